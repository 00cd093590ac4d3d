"""What each rank is doing, in a file that survives it."""
