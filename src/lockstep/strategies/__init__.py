"""How a model is trained on this job's processes."""
