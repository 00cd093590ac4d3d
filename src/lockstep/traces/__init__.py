"""Traces: the numbers of chosen batches in a file, and comparing two of them."""
