"""NCCL's log, read and told in words: what it chose, what failed first, and what is known about it."""
