"""Giving memory back."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from lockstep.topology.memory import empty_cache


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the device's cached memory back; with ``garbage_collection``, first collect what nobody refers to.

    Then the host's allocator gives back as well what it keeps of freed memory, where it is glibc's.
    """
    if garbage_collection:
        empty_cache()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
    elif torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Let go of objects and give their memory back: ``model, optimizer = release_memory(model, optimizer)``.

    Python cannot clear the caller's variables: they are cleared by taking the Nones that this returns. The memory is
    free once nothing else refers to the objects.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count
