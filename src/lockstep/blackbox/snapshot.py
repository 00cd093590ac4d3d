"""What a black box says, as a value: the state of one rank at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

Step = tuple[float, float, float, float, float, float]
"""Seconds of a step: a rank's own work on data, in forward, in backward; the whole; waiting at the end of backward;
for how long the loader's worker processes were busy beside all that."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One collective of the library, as one rank entered it."""

    seq: int
    """Its number among the collectives of this rank's generation, from 1."""
    name: str
    """What it is: "gather", "reduce(mean)", "backward", "barrier", …; equal on all ranks when they march together."""
    signature: str = ""
    """What must agree between ranks: structure, shapes, dtypes; empty where ranks may differ."""
    site: str = ""
    """The user's line, ``train.py:27``."""
    since: float = 0.0
    """When it was entered, in seconds of this machine's monotonic clock."""
    refused: bool = False
    """Whether it ended with an error on this rank: nothing that it would have brought was used."""
    batch: int = 0
    """Batches that the loader had given out by then, of a backward; 0 where that is not known."""


@dataclass(frozen=True, kw_only=True)
class Raw:
    """A collective of torch's own that is under way: a direct ``torch.distributed`` call, or one inside DDP."""

    name: str
    """What torch calls it: "all_reduce", "barrier", …"""
    number: int = 0
    """Its number in torch's process group."""
    site: str = ""
    """The user's line."""
    since: float = 0.0
    """When it was first seen under way."""
    shapes: str = ""
    """Sizes of its inputs, where they are known."""
    group: str = ""
    """The name of its process group; empty for the one of all ranks."""


@dataclass(frozen=True, kw_only=True)
class TorchCall:
    """A collective that a rank has started in torch's process group, as Flight Recorder lists it."""

    number: int
    """Its number in the group."""
    name: str
    shapes: str
    """Sizes of its inputs."""
    elements: int
    """The number of elements in them."""
    site: str
    """The user's line that led to it."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank at one moment."""

    rank: int
    """Which rank."""
    world_size: int
    """Of how many."""
    local_rank: int = 0
    """Its number on its machine."""
    node: int = 0
    """Its machine's number."""
    host: str = ""
    """Its machine's name."""
    pid: int = 0
    """Its process."""
    device: str = ""
    """What it computes on."""
    attempt: str = ""
    """Which start of the job, and which session of the process, this is: only equal ones march together."""
    alive: bool = True
    """Whether the process lives."""
    closed: str = ""
    """How it left the job: "" when it has not, "finished" in good order, "failed" with an exception."""
    words: str = ""
    """The exception's first line, when it failed; how a signal ended it, when one did."""
    generation: int = 0
    """Which process group; numbers of collectives start anew in each."""
    recovering: bool = False
    """Whether it is inside a scope of ``agree``: a failure there is survived."""
    entered: int = 0
    """Collectives entered in this generation."""
    left: int = 0
    """Collectives completed in this generation."""
    op: Op | None = None
    """The collective it is in right now."""
    phase: str = ""
    """What it does outside collectives, where that is known: "data", "forward", "backward", "step", "checkpoint", …"""
    phase_site: str = ""
    """The user's line of it, where known."""
    phase_since: float = 0.0
    """Since when."""
    step: int = 0
    """Updates made."""
    stepped_at: str = ""
    """The user's line where an optimizer made its latest step."""
    skipped: int = 0
    """Forwards of a training that got no backward."""
    skipped_step: int = 0
    """Updates made before the first of them."""
    skipped_at: str = ""
    """The user's line of that forward."""
    pending_at: str = ""
    """The user's line of a forward whose backward has not begun yet."""
    raw: Raw | None = None
    """Torch's own collective that it is in right now."""
    torch_calls: tuple[TorchCall, ...] = ()
    """Its latest collectives in torch's process group, when it does not move."""
    history: tuple[Op, ...] = field(default=())
    """Its latest collectives, oldest first; the one it is in is the last."""
    stack: tuple[str, ...] = ()
    """The main thread's stack, innermost first, as ``file:line in function``, when it was asked for."""
    crash: str = ""
    """The fatal error in native code that ended it, as Python's faulthandler names it: "Aborted"."""
    paused: bool = False
    """Whether a debugger holds it, or it was stopped by a signal."""
    beat: float = 0.0
    """When its own reporter last looked up, in seconds of the monotonic clock."""
    pace: tuple[Step, ...] = ()
    """Its latest steps, oldest first."""
    now: float = 0.0
    """When this was read."""
