"""Taking batches out of torch's loader, and what its workers do meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import dataloader

from lockstep.comm.profiled import is_as_known

_NEXT = (
    "_profile_name",
    "_sampler_iter",
    "_reset",
    "_next_data",
    "_num_yielded",
    "_dataset_kind",
    "_DatasetKind",
    "Iterable",
    "_IterableDataset_len_called",
    "_dataset",
    "_num_workers",
    "warnings",
    "warn",
)
_SHORT = is_as_known(dataloader._BaseDataLoaderIter.__next__, *_NEXT)


def short_form(batches: Iterator[Any]) -> Callable[[], Any] | None:
    """What does the same as next, if no profiler runs; None where there is only that."""
    if not _SHORT or type(batches) is not dataloader._SingleProcessDataLoaderIter:
        return None
    # The batches of a stream are counted.
    return batches._next_data if batches._dataset_kind == dataloader._DatasetKind.Map else None


def workers_of(batches: Iterator[Any]) -> Callable[[], float] | None:
    """What gives the share of a loader's worker processes that are busy now; None where there are none.

    Torch's loader counts the batches that it has asked its workers for and has not taken; those that lie in its queues
    are done. Where that is not to be known, the workers count as busy.
    """
    workers = getattr(batches, "_num_workers", 0)
    if not workers:
        return None

    def busy() -> float:
        try:
            queues = {id(queue): queue for queue in (batches._data_queue, batches._worker_result_queue)}  # type: ignore[attr-defined]
            done = sum(queue.qsize() for queue in queues.values())
            return min(1.0, max(0.0, (batches._tasks_outstanding - done) / workers))  # type: ignore[attr-defined]
        except (AttributeError, NotImplementedError, OSError, ValueError):
            return 1.0  # another kind of loader, a system without such counts, a queue that is being closed

    return busy
