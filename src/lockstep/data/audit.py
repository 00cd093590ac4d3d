"""Did every sample get its turn? Looked at once, at the end of the first epoch over indexed data.

Each rank counts the samples it was given, by their place in the data set at the bottom: a ``Subset`` is looked
through. The counts are added up, and a pure function, ``judge``, says what is wrong with them.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, Subset

from lockstep.comm import objects, tensors
from lockstep.data.round import Round
from lockstep.data.sampler import SeedableRandomSampler
from lockstep.topology.group import Group

_MOST = 50_000_000
"""Samples from which on a count of each would be felt."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank saw."""

    length: int
    """Samples in the data set as this rank has it."""
    bottom: int
    """Samples in the data set below all subsets."""
    identity: str
    """A digest of which samples the subset holds; empty when it is no subset."""
    presharded: bool
    """Whether the loader's own sampler deals to ranks already."""
    complete: bool
    """Whether the loader's order has each sample once."""
    repeated: int
    """Samples that were repeated to fill up the last batch."""
    counted: bool = True
    """Whether its samples could be counted: indices may be of another kind."""


class Audit:
    """Counts what one rank is given in one epoch."""

    def __init__(self, dataset: Any, sampler: Any, drop_last: bool) -> None:
        self._dataset = dataset
        self._sampler = sampler
        self._drop_last = drop_last
        self._seen = array("q")
        self._repeated = 0
        self._whole = True

    @classmethod
    def of(cls, inner: DataLoader[Any]) -> Audit | None:
        """An audit for a loader over indexed data; None where indices are no numbers, or too many."""
        try:
            if len(inner.dataset) > _MOST:  # type: ignore[arg-type]
                return None
        except TypeError:
            return None
        shard = inner.batch_sampler if inner.batch_sampler is not None else inner.sampler
        return cls(inner.dataset, getattr(shard, "sampler", None), bool(getattr(shard, "drop_last", False)))

    def saw(self, round_: Round, rank: int) -> None:
        """Note a batch."""
        real = round_.real[rank]
        try:
            self._seen.extend(round_.ids if real == len(round_.ids) else round_.ids[:real])
        except TypeError:
            self._whole = False  # indices of another kind
        self._repeated += round_.rows[rank] - real

    def finish(self, group: Group) -> None:
        """Called on: all ranks. Compare what the ranks saw, and say what is wrong, on the main process."""
        bottom, resolved = _resolve(self._dataset, torch.tensor(self._seen, dtype=torch.int64))
        whole = self._whole and (not len(resolved) or (int(resolved.min()) >= 0 and int(resolved.max()) < bottom))
        mine = Report(
            length=len(self._dataset),
            bottom=bottom,
            identity=_identity(self._dataset),
            presharded=isinstance(self._sampler, DistributedSampler),
            complete=whole and not self._drop_last and _complete(self._sampler),
            repeated=self._repeated,
            counted=whole,
        )
        reports = objects.all_objects(group, mine, "comparing what the ranks have seen")
        # Decided by what all ranks said, never by this one alone: whoever left the sum out would leave others waiting.
        if len({report.bottom for report in reports}) > 1 or not all(report.counted for report in reports):
            counts = None
        else:
            counts = tensors.reduce(group, torch.bincount(resolved, minlength=bottom).clamp_(max=1).int(), "sum")
        if group.rank == 0:
            _say(*judge(reports, counts))


def judge(reports: list[Report], counts: Tensor | None) -> tuple[str, bool]:
    """What there is to say about an epoch, and whether it is a warning. ``counts``: ranks that saw each sample."""
    differs = len({(report.length, report.bottom, report.identity) for report in reports}) > 1
    shared = None if counts is None else int((counts > 1).sum())
    bottom = reports[0].bottom
    if any(report.presharded for report in reports):
        seen = "" if counts is None else f": {int((counts == 0).sum())} of {bottom} samples were never seen"
        return (
            f"This loader was dealt to the ranks twice{seen}. It already has a DistributedSampler, and prepare() "
            "deals to the ranks by itself. Build the loader with shuffle=True instead of that sampler.",
            True,
        )
    if differs:
        lengths = sorted({report.length for report in reports})
        what = f"lengths {', '.join(map(str, lengths))}" if len(lengths) > 1 else "other samples on each rank"
        seen = ""
        if counts is not None:
            seen = (
                f" In this epoch {shared} samples were seen by several ranks, and {int((counts == 0).sum())} by none."
            )
        return (
            f"The data set differs between ranks ({what}).{seen} prepare() deals one data set to all ranks: build the "
            "same on each. For a random split, pass generator=torch.Generator().manual_seed(0) to random_split; if you "
            "divided the data between ranks yourself, leave that to prepare().",
            True,
        )
    if counts is not None and all(report.complete for report in reports):
        never = reports[0].length - int((counts > 0).sum())
        if never or shared:
            return (
                f"In this epoch {never} of {reports[0].length} samples were never seen, and {shared} were seen by "
                "several ranks: the sampler gave each rank another order. Give it a generator that is seeded alike on "
                "all ranks, or let it depend on the epoch alone.",
                True,
            )
    repeated = sum(report.repeated for report in reports)
    if repeated:
        return (
            f"{repeated} samples were repeated so that all ranks get equally many batches; "
            "gather_for_metrics leaves them out.",
            False,
        )
    return "", False


def _say(text: str, warn: bool) -> None:
    if text:
        from lockstep.logging import get_notices  # loaded where it is used: there is seldom anything to say

        notices = get_notices("lockstep.data")
        (notices.warning if warn else notices.info)(f"end of the first epoch: {text}")


def _resolve(dataset: Any, indices: Tensor) -> tuple[int, Tensor]:
    """The length of the data set below all subsets, and these indices as its own."""
    while type(dataset) is Subset:
        indices = torch.as_tensor(dataset.indices, dtype=torch.int64)[indices]
        dataset = dataset.dataset
    return len(dataset), indices


def _identity(dataset: Any) -> str:
    """Which samples a subset holds, as a digest."""
    digest = hashlib.blake2b(digest_size=16)
    subset = False
    while type(dataset) is Subset:
        subset = True
        digest.update(torch.as_tensor(dataset.indices, dtype=torch.int64).numpy().tobytes())
        dataset = dataset.dataset
    return digest.hexdigest() if subset else ""


def _complete(sampler: Any) -> bool:
    """Whether a sampler gives each sample exactly once, as far as one can know."""
    if isinstance(sampler, (RandomSampler, SeedableRandomSampler)):
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return isinstance(sampler, SequentialSampler)
