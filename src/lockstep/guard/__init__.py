"""Watching over the ranks: who waits where, for whom, and why."""
