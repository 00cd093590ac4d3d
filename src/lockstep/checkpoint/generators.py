"""The random number generators of a process: Python's, numpy's, torch's, and those of its accelerator devices."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

Generators = dict[str, Any]
"""Their states, under the names that Accelerate gives them."""


def capture(device: torch.device) -> Generators:
    """The states now, as tensors and plain values."""
    name, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    states: Generators = {
        "random_state": random.getstate(),
        "numpy_random_seed": (str(name), torch.from_numpy(keys.astype(np.int64)), place, has_gauss, gauss),  # type: ignore[union-attr]
        "torch_manual_seed": torch.get_rng_state(),
    }
    module = _module(device)
    if module is not None:
        every = getattr(module, "get_rng_state_all", lambda: [module.get_rng_state()])
        states[_device_key(device)] = [state.cpu() for state in every()]
    return states


def restore(states: Generators, device: torch.device) -> None:
    """Put the generators into these states."""
    version, internal, gauss = states["random_state"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, place, has_gauss, cached = states["numpy_random_seed"]
    np.random.set_state((name, np.asarray(keys).astype(np.uint32), place, has_gauss, cached))
    torch.set_rng_state(states["torch_manual_seed"])
    module = _module(device)
    saved = states.get(_device_key(device))
    if module is None or not saved:
        return
    if hasattr(module, "set_rng_state_all") and len(saved) == module.device_count():
        module.set_rng_state_all(saved)
    else:  # saved where there were more devices, or fewer: this process computes on one of them
        module.set_rng_state(saved[min(device.index or 0, len(saved) - 1)])


def check(states: Any) -> str | None:
    """What is wrong with states that were read; None when they can be restored."""
    before = capture(torch.device("cpu"))
    try:
        restore(states, torch.device("cpu"))
    except Exception as error:  # each library has its own
        return f"{type(error).__name__}: {error}"
    finally:
        restore(before, torch.device("cpu"))
    return None


def derive(states: Generators, rank: int, device: torch.device) -> int:
    """Seed the generators of a rank that was not there when the states of rank 0 were saved; the seed.

    It follows from those states and the rank alone, so that every resume from one checkpoint gives the same.
    """
    text = states["torch_manual_seed"].numpy().tobytes() + f"/{rank}".encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def _module(device: torch.device) -> Any:
    module = getattr(torch, device.type, None)
    return module if device.type != "cpu" and hasattr(module, "get_rng_state") else None


def _device_key(device: torch.device) -> str:
    return f"torch_{device.type}_manual_seed"
