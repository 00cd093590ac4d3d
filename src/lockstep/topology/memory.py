"""Giving memory back to the device."""

from __future__ import annotations

import gc

import torch


def empty_cache() -> None:
    """Collect garbage and empty the accelerator's cache, where there is one."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
