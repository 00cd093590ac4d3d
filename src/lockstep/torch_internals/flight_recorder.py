"""torch's Flight Recorder. Imports nothing of torch: the guard's thread asks in processes that may not have it."""

from __future__ import annotations

import importlib
import pickle
import sys
from contextlib import suppress
from typing import Any

_SYMBOLS = "torch._inductor.codecache"


def dump(stacks: bool = False) -> dict[str, Any] | None:
    """The latest collectives of this process; None where there is no such list.

    Needs ``torch._C._distributed_c10d._dump_fr_trace``; 2.9 to 2.13, in 2.9 filled for gloo only where
    ``TORCH_FR_BUFFER_SIZE`` is set before the first group. Without it: the guard does not see collectives that are not
    Lockstep's own, those of DDP's backward included, and names the line of Python only.
    """
    torch = sys.modules.get("torch")
    read = getattr(getattr(getattr(torch, "_C", None), "_distributed_c10d", None), "_dump_fr_trace", None)
    if read is None:
        return None
    try:
        return dict(pickle.loads(read(True, stacks, False)))  # collectives, stacks, those under way only
    except (RuntimeError, TypeError, ValueError, pickle.UnpicklingError):
        return None


def allow_stacks() -> None:
    """Called by the thread that trains. Load what torch needs to list calls with the lines that made them.

    Torch would load it when it is first asked for lines. In the reporter's thread that can meet an import of the
    compiler in the thread that trains, and the later of the two fails on a module that is not complete.

    Needs ``torch._inductor.codecache``; 2.9 to 2.13. Without it: calls are listed without their lines.
    """
    with suppress(Exception):
        importlib.import_module(_SYMBOLS)


def can_list_stacks() -> bool:
    """Whether calls can be listed with their lines and nothing is imported for it; see ``allow_stacks``."""
    module = sys.modules.get(_SYMBOLS)
    return module is not None and not getattr(module.__spec__, "_initializing", False)
