"""The process group of a job through its generations: joining, aborting, rebuilding and leaving it."""
