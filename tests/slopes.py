"""Whether what a process holds grows with what it does: samples along the way, and a slope through them.

Memory is looked at three times. The collector counts its objects exactly, so one that is kept every tenth time shows
within some hundred iterations; Python's allocator also counts texts and numbers, and moves a little by itself; what
native code keeps shows only in the memory of the process, which moves by whole arenas. The slope is the median of those
of all pairs of samples (Theil and Sen), in the first and in the second half of the run, and the smaller one counts:
what happens once, such as a cache that is filled or an arena that is opened, is not growth.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

_libc = ctypes.CDLL(None)
SAMPLES = 25
"""Points through which a slope is laid, after the warm-up."""
NOISE = 3 << 20
"""Bytes by which the memory of a process that keeps nothing moves: a few of the allocators' arenas.

Over 200,000 steps that makes a bound of about 22 bytes a step; a leak of 100 bytes is four times as much."""
FEW_BLOCKS = 600
"""Blocks of Python's allocator by which their number moves by itself, however long the run is."""
FEW_OBJECTS = 15
"""Objects that come and go with the moment of the look: what a thread that waits holds, an iteration that is open."""


@dataclass(frozen=True)
class Usage:
    """What a process holds at one moment."""

    done: int
    """Iterations so far."""
    memory: int
    """Bytes that this process alone has written and that are not in a file."""
    objects: int
    """That the collector knows, and that were not there before the first iteration."""
    blocks: int
    """Of Python's allocator."""
    descriptors: int
    threads: int
    shared: int
    """Files of the machine's shared memory that belong to multiprocessing, or to torch."""
    keys: int
    """Of the job's store; 0 without one."""


def private_memory(pid: int | str = "self") -> int:
    """Bytes of a process that no other shares, as far as they were written."""
    found = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return int(found["Private_Dirty"].split()[0]) * 1024


def take(done: int, store: Any = None) -> Usage:
    """Look at this process, once all that can be freed is."""
    for _ in range(2):  # what a finalizer lets go of is found the second time
        gc.collect()
    _libc.malloc_trim(0)
    blocks = sys.getallocatedblocks()
    return Usage(
        done=done,
        memory=private_memory(),
        objects=len(gc.get_objects()),
        blocks=blocks,
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        shared=sum(name.startswith(("torch_", "pymp-", "sem.")) for name in os.listdir("/dev/shm")),
        keys=0 if store is None else store.num_keys(),
    )


def watch(
    iterate: Callable[[int], object],
    count: int,
    *,
    warm_up: float = 0.3,
    look: Callable[[int], Usage] = take,
    samples: int = SAMPLES,
) -> list[Usage]:
    """Iterate so often, and take samples after the first part of it, in which caches and rings are filled."""
    first = max(1, int(count * warm_up))
    if count - first < samples:
        raise ValueError(f"{count} iterations are too few for {samples} samples after a warm-up of {first}.")
    at = [first + round(number * (count - first) / (samples - 1)) for number in range(samples)]
    # In memory that is there from the start: objects that hold the figures would be what grows.
    width = len(fields(Usage))
    taken = array("q", bytes(8 * width * samples))
    number = 0
    gc.collect()
    gc.freeze()  # what is there before is neither counted nor gone through by the collections to come
    try:
        for done in range(1, count + 1):
            iterate(done)
            if done == at[number]:
                taken[number * width : (number + 1) * width] = array("q", astuple(look(done)))
                number += 1
    finally:
        gc.unfreeze()
    return [Usage(*taken[place : place + width]) for place in range(0, len(taken), width)]


def slope(samples: Sequence[Usage], field: str) -> float:
    """Growth of one field in an iteration, all along."""
    middle = len(samples) // 2
    return min((_slope(half, field) for half in (samples[: middle + 1], samples[middle:])), key=abs)


def _slope(samples: Sequence[Usage], field: str) -> float:
    points = [(sample.done, getattr(sample, field)) for sample in samples]
    return median((b - a) / (then - now) for (now, a), (then, b) in combinations(points, 2))


def growth(samples: Sequence[Usage], torchs: float = 0.0) -> list[str]:
    """What grows, one line each; empty when nothing does. ``torchs``: bytes that torch itself keeps each time."""
    span = samples[-1].done - samples[0].done
    bounds = {
        "memory": NOISE / span + torchs,
        "blocks": FEW_BLOCKS / span,
        "objects": FEW_OBJECTS / span,
        # One in the whole run is no slope yet, two are.
        **dict.fromkeys(("descriptors", "threads", "shared", "keys"), 1.5 / span),
    }
    return [
        f"{field}: {found:.4g} an iteration, at most {bound:.4g} ({[getattr(one, field) for one in samples]})"
        for field, bound in bounds.items()
        if (found := slope(samples, field)) > bound
    ]


def describe(samples: Sequence[Usage], seconds: float | None = None) -> str:
    """The slopes in one line."""
    names = [name for name in asdict(samples[0]) if name != "done"]
    figures = ", ".join(f"{name} {slope(samples, name):+.3g}" for name in names)
    took = "" if seconds is None else f" in {seconds:.0f} s"
    return (
        f"{samples[-1].done} iterations{took}: slopes of {figures}; in the end {samples[-1].memory >> 20} MB, "
        f"{samples[-1].descriptors} descriptors, {samples[-1].threads} threads"
    )
