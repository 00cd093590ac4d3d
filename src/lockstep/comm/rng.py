"""Random numbers: one seed for every generator of a process, one state for the generators of all ranks."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep import current
from lockstep.comm import tensors
from lockstep.config import env
from lockstep.config.choices import RNGType
from lockstep.errors import ConfigError
from lockstep.process_group.group import Group
from lockstep.topology import environments

_LARGEST_SEED = 2**32 - 1
"""What numpy's generator takes; torch and Python would take more."""


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, numpy's and torch's generators, those of all accelerator devices included.

    Args:
        seed: From 0 to 2**32 - 1.
        device_specific: Add the rank, so that every process draws numbers of its own.
        deterministic: Have torch use deterministic algorithms only; what has none then raises.
    """
    session = current.peek()
    place = environments.find(env.snapshot()) if session is None else session.topology
    # The bound is the same on every rank: an error that only the last ranks see would leave the others waiting.
    largest = _LARGEST_SEED - (place.world_size - 1 if device_specific else 0)
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ConfigError(f"seed={seed!r} is not a whole number. Allowed: 0 to {largest}.")
    if not 0 <= seed <= largest:
        note = f" (the rank is added, and there are {place.world_size})" if largest != _LARGEST_SEED else ""
        raise ConfigError(f"seed={seed} is out of range. Allowed: 0 to {largest}{note}.")
    value = int(seed) + (place.rank if device_specific else 0)
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        # Its timings choose an algorithm, and no two runs time alike.
        torch.backends.cudnn.benchmark = False


def seed_in_force() -> int | None:
    """The seed of torch's generator; None when nobody has set one.

    Torch starts with 64 random bits. Seeds of people, and all that ``set_seed`` takes, are smaller.
    """
    seed = torch.initial_seed()
    return seed if seed <= _LARGEST_SEED else None


def synchronize_rng_state(rng_type: RNGType | str, generator: torch.Generator | None = None) -> None:
    """Called on: all ranks. Put one kind of generator into rank 0's state."""
    synchronize_rng_states([rng_type], generator)


def synchronize_rng_states(rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None) -> None:
    """Called on: all ranks. Put these generators into rank 0's state; all states travel in one collective.

    Args:
        rng_types: "torch", "generator", or the type of this process's device, such as "cuda".
        generator: The one that "generator" means.
    """
    session = current.peek()
    if session is None and environments.find(env.snapshot()).world_size == 1:
        # Not worth a session, which would settle the device before the user's Accelerator does.
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        _check(device, rng_types, generator)
        return
    session = session or current.require()
    synchronize(session.group, session.topology.device, rng_types, generator)


def synchronize(
    group: Group, device: torch.device, rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None
) -> None:
    """Called on: all ranks. Put these generators of the group's ranks into rank 0's state, by one collective."""
    types = _check(device, rng_types, generator)
    if group.world_size == 1 or not types:
        return
    carrier = torch.device("cpu") if group.talks_host else group.device
    states = {str(kind): _read(kind, device, generator).to(carrier) for kind in types}
    tensors.broadcast(group, states)
    if group.rank == 0:
        return
    for kind in types:
        _write(kind, device, generator, states[str(kind)].cpu())


def check_types(rng_types: Iterable[RNGType], device: torch.device) -> None:
    """Raise unless a process on this device has all these kinds of generators."""
    _check(device, [kind for kind in rng_types if kind is not RNGType.GENERATOR], None)


def _check(
    device: torch.device, rng_types: Iterable[RNGType | str], generator: torch.Generator | None
) -> list[RNGType]:
    """The kinds asked for, each once; raises before anything is sent."""
    asked = [rng_types] if isinstance(rng_types, str) else rng_types
    types = list(dict.fromkeys(RNGType.parse(kind, "rng_types") for kind in asked))
    problems = [problem for kind in types if (problem := _problem(kind, device, generator))]
    if problems:
        raise ConfigError.of(problems)
    return types


def _problem(kind: RNGType, device: torch.device, generator: torch.Generator | None) -> str | None:
    if kind is RNGType.TORCH:
        return None
    if kind is RNGType.GENERATOR:
        if isinstance(generator, torch.Generator):
            return None
        return f"rng_types has 'generator', but generator={generator!r} is no torch.Generator. Pass one."
    if str(kind) != device.type:
        allowed = ["'torch'", "'generator'"] + ([f"'{device.type}'"] if device.type in RNGType.list() else [])
        return f"rng_types has '{kind}', but this process computes on {device.type!r}. Allowed: {', '.join(allowed)}."
    if not hasattr(_device_module(device), "get_rng_state"):
        return f"rng_types has '{kind}', but torch cannot read the random state of such a device. Leave it out."
    return None


def _device_module(device: torch.device) -> Any:
    return getattr(torch, device.type, None)


def _read(kind: RNGType, device: torch.device, generator: torch.Generator | None) -> Tensor:
    if kind is RNGType.TORCH:
        return torch.get_rng_state()
    if kind is RNGType.GENERATOR and generator is not None:
        return generator.get_state()
    state: Tensor = _device_module(device).get_rng_state(device)
    return state


def _write(kind: RNGType, device: torch.device, generator: torch.Generator | None, state: Tensor) -> None:
    if kind is RNGType.TORCH:
        torch.set_rng_state(state)
    elif kind is RNGType.GENERATOR and generator is not None:
        generator.set_state(state)
    else:
        _device_module(device).set_rng_state(state, device)


# --- going back ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class States:
    """Where Python's, numpy's and torch's generators stood, that of the device included."""

    python: Any
    numpy: Any
    host: Tensor
    device: Tensor | None

    @classmethod
    def of(cls, device: torch.device) -> States:
        """Where they stand now."""
        read = None if device.type == "cpu" else getattr(_device_module(device), "get_rng_state", None)
        state = None if read is None else read(device)
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), state)

    def restore(self, device: torch.device) -> None:
        """Put them back there."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.device is not None:
            _device_module(device).set_rng_state(self.device, device)
