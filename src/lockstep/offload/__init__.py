"""Models that do not fit into one device's memory: device maps, weights on disk, hooks that bring them when needed."""
