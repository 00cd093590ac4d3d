"""Data parallel over several processes, by torch's DistributedDataParallel."""
