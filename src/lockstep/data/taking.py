"""Taking batches out of torch's loader."""

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
