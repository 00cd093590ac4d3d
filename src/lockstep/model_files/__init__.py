"""The weights of a model in files: their formats, shards and index; saving them, and loading them into a model."""
