"""Is this machine, its network and the cluster fit to train: one finding for each thing that was looked at."""
