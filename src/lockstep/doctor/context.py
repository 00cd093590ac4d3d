"""What the checks are told about where they run and what they are to look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class DoctorContext:
    """One node, as the job on it would find it."""

    environ: Mapping[str, str] = field(default_factory=dict)
    """The environment of the job."""
    folder: Path = Path()
    """Where checkpoints go."""
    processes: int = 1
    """Processes that run, or will run, on this machine."""
    machines: int = 1
    """Nodes of the job."""
    main_address: str | None = None
    """The address of the rendezvous; None when nobody has said."""
    main_port: int = 29500
    """The port they meet at."""
    launched: bool = False
    """Whether a launcher has started this process, so that the rendezvous endpoint is in use by its own job."""
