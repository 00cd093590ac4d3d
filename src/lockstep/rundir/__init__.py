"""The folder of one run: where it is, what is in it, and the last words of each rank."""
