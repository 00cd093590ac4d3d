"""Optimizers, schedulers and gradient accumulation."""
