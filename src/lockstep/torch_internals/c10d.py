"""torch.distributed's process groups and stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def backend_for(group: Any, device: torch.device) -> Any:
    """The backend that carries a device's tensors, which is quicker to call than the group with its dispatcher.

    Needs ``ProcessGroup._get_backend``; 2.9 to 2.13. Without it: use the group itself, some 10 us slower for each call.
    """
    return group._get_backend(device)


def all_gather_into(backend: Any, result: Tensor, source: Tensor, options: Any) -> Any:
    """Start gathering every rank's ``source`` into one tensor; the work to wait for.

    Needs ``Backend._allgather_base``; 2.9 to 2.13. Without it: ``dist.all_gather_into_tensor``, through the dispatcher,
    which warns in 2.13 where ``async_op`` is asked for.
    """
    return backend._allgather_base(result, source, options)


def default_store() -> Any:
    """The store of the process group that the script has made itself.

    Needs ``distributed_c10d._get_default_store``; 2.9 to 2.13. Without it: such a script has to let ``Accelerator()``
    make the group.
    """
    return dist.distributed_c10d._get_default_store()


@contextmanager
def waiting_by(wait: Callable[[Any, str], None]) -> Iterator[None]:
    """Have ``Work.wait`` without a timeout, as a script's own collectives call it, wait by ``wait(work, doing)``.

    Needs ``dist.Work.wait`` to be an attribute that can be set, and torch's Python collectives to look it up there;
    2.9 to 2.13. Without it: a wait in a script's own call is left only where gloo notices that its sockets were shut.
    """
    original = dist.Work.wait

    def wait_leavably(work: dist.Work, timeout: timedelta | None = None) -> bool:
        if timeout:
            return original(work, timeout)
        wait(work, "calling torch.distributed")
        return True

    dist.Work.wait = wait_leavably  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        dist.Work.wait = original  # type: ignore[method-assign]
