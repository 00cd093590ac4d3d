"""torch's DataLoader, its iterators and workers."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch.utils.data._utils import pin_memory as _pin_memory
from torch.utils.data._utils.fetch import _MapDatasetFetcher


def forget_iterator(loader: Any) -> None:
    """Have a loader, say a copy of one, start workers of its own: those that it keeps are another's, or out of date.

    Needs ``DataLoader._iterator``; 2.9 to 2.13. Without it: no ``persistent_workers`` in a loader that is prepared,
    copied or set to another place.
    """
    loader.__dict__["_iterator"] = None


def worker_processes(batches: Any) -> list[Any]:
    """The worker processes of a loader's iterator; empty where there are none.

    Needs ``_MultiProcessingDataLoaderIter._workers``; 2.9 to 2.13. Without it: a worker that dies while it hands a
    batch over is not named, and the error is that of its broken connection.
    """
    return list(getattr(batches, "_workers", ()))


def busy_share(batches: Any) -> Callable[[], float] | None:
    """What gives the share of a loader's worker processes that are busy now; None where there are none.

    Torch's loader counts the batches that it has asked its workers for and has not taken; those that lie in its queues
    are done. Needs ``_num_workers``, ``_data_queue``, ``_worker_result_queue`` and ``_tasks_outstanding`` of its
    iterator; 2.9 to 2.13. Without them: the workers count as busy, and a straggler's workers may be named for nothing.
    """
    workers = getattr(batches, "_num_workers", 0)
    if not workers:
        return None

    def busy() -> float:
        try:
            queues = {id(queue): queue for queue in (batches._data_queue, batches._worker_result_queue)}
            done = sum(queue.qsize() for queue in queues.values())
            return min(1.0, max(0.0, (batches._tasks_outstanding - done) / workers))
        except (AttributeError, NotImplementedError, OSError, ValueError):
            return 1.0  # another kind of loader, a system without such counts, a queue that is being closed

    return busy


def pin(batch: Any, device: Any = None) -> Any:
    """A batch in page-locked memory, as ``DataLoader(pin_memory=True)`` puts it there, structure and all.

    Needs ``torch.utils.data._utils.pin_memory``; 2.9 to 2.13. Without it: the batches of streams that Lockstep shares
    between ranks are not pinned.
    """
    return _pin_memory.pin_memory(batch, device)


def index_being_read(trace: TracebackType | None) -> Any:
    """The index whose item raised in this process, out of the traceback; None where there is none.

    Needs the local variable ``idx`` in ``_MapDatasetFetcher.fetch``; 2.9 to 2.13. In Python 3.10 and 3.11 it is in a
    frame of its own, that of a list comprehension. Without it: the error names all samples of the batch.
    """
    file, found = _MapDatasetFetcher.fetch.__code__.co_filename, None
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_filename == file and "idx" in frame.f_locals:
            found = frame.f_locals["idx"]
        trace = trace.tb_next
    return found
