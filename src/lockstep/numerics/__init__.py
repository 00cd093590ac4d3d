"""Numerics: the first bad number, where it arose, and what the numbers of chosen batches looked like."""
