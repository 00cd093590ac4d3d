"""The autograd engine, and futures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

backward_number: Callable[[], int] = torch._C._current_graph_task_id
"""Which backward this thread is in; -1 outside.

Needs ``torch._C._current_graph_task_id``; 2.9 to 2.13. Without it: a checkpointed part that is computed again could not
be told from a forward, and a rank without data from a backward.
"""


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Called inside a backward. Have the engine call this at its end, in the order in which it was asked.

    Needs ``torch.autograd.Variable._execution_engine.queue_callback``, which DDP and FSDP use; 2.9 to 2.13. Without it:
    DDP's own wait at the end of backward cannot be left when a peer fails.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def new_future() -> Any:
    """A future of torch's that is completed by hand, for DDP to wait for.

    Needs ``torch._C.Future``; 2.9 to 2.13. Without it: ``torch.futures.Future``, the Python class above it, which costs
    as much again.
    """
    return torch._C.Future([])
