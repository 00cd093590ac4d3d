"""Did every sample get its turn? Checked once, at the end of the first epoch over indexed data.

Each rank notes the samples it was given, by their place in the dataset at the bottom: a ``Subset`` is looked through.
When its epoch ends, it posts a report to the job's store and waits for nobody: a rank may well evaluate alone. The rank
that posts the last report reads all of them, and a pure function, ``judge``, finds what is wrong.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, Subset

from lockstep.data.global_batch import GlobalBatch
from lockstep.data.sampler import SeedableRandomSampler
from lockstep.job_store.signed_store import from_fields
from lockstep.process_group.group import Group
from lockstep.topology.data_parallel import DataParallelRanks

_MOST = 50_000_000
"""Samples from which on a count of each would be felt."""
_MOST_BYTES = 64 * 2**20
"""What the bitmaps of all ranks may take in the store."""
_MOST_EACH = 7 * 2**20
"""What one may take: torch's store closes the connection of whoever sends it more than 8 MiB at once."""


@dataclass(frozen=True, kw_only=True)
class RankAudit:
    """What one rank saw."""

    length: int
    """Samples in the dataset as this rank has it."""
    bottom: int
    """Samples in the dataset below all subsets."""
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
    epoch: int = 0
    """Which epoch this was: a rank may have been through others alone."""
    seen: int = 0
    """Different samples that it was given."""
    checksum: int = 0
    """Of these, in any order: the sum of the squares of their places in the dataset, modulo 2**64."""


class Audit:
    """Notes what one rank is given in one epoch.

    ``name`` is the loader's, the same on all ranks that have prepared it.
    """

    def __init__(self, name: str, dataset: Any, sampler: Any, *, drop_last: bool, epoch: int) -> None:
        self._name = name
        self._dataset = dataset
        self._sampler = sampler
        self._drop_last = drop_last
        self._epoch = epoch
        self._seen = array("q")
        self._repeated = 0
        self._whole = True

    @classmethod
    def of(cls, inner: DataLoader[Any], name: str, epoch: int) -> Audit | None:
        """An audit for a loader over indexed data; None where indices are not numbers, or too many."""
        try:
            if len(inner.dataset) > _MOST:  # type: ignore[arg-type]
                return None
        except TypeError:
            return None
        shard = inner.batch_sampler if inner.batch_sampler is not None else inner.sampler
        sampler, drop_last = getattr(shard, "sampler", None), bool(getattr(shard, "drop_last", False))
        return cls(name, inner.dataset, sampler, drop_last=drop_last, epoch=epoch)

    def saw(self, round_: GlobalBatch, rank: int) -> None:
        """Note a batch."""
        real = round_.real[rank]
        try:
            self._seen.extend(round_.ids if real == len(round_.ids) else round_.ids[:real])
        except TypeError:
            self._whole = False  # indices of another kind
        self._repeated += round_.rows[rank] - real

    def finish(self, group: Group, parallel: DataParallelRanks | None = None) -> None:
        """Called on: any rank, whenever its epoch ends. The last of them logs what is wrong; nobody waits."""
        parallel = parallel or DataParallelRanks(group.rank, range(group.world_size))
        mine = self._result(parallel.size) if parallel.leads else None
        if mine is None:
            return  # nothing to post, or another rank with the same samples posts it
        try:
            results = _exchange(group, parallel, self._name, *mine)
        except RuntimeError:
            return  # the store is gone, as it may be at the end of a job
        if results is not None:
            reports, bitmaps = results
            _log(*judge(reports, count(bitmaps, reports[0].bottom)))

    def _result(self, world_size: int) -> tuple[RankAudit, bytes] | None:
        """What there is to post: the report, and a bit for each sample at the bottom, unless these are too many."""
        length = len(self._dataset)
        indices = torch.tensor(self._seen, dtype=torch.int64)
        whole = self._whole and (not len(indices) or (int(indices.min()) >= 0 and int(indices.max()) < length))
        try:
            bottom, resolved = _resolve(self._dataset, indices if whole else indices[:0])
            identity = _identity(self._dataset)
        except (TypeError, ValueError, IndexError):
            return None  # a subset by names, or of something without a length
        whole = whole and (not len(resolved) or (int(resolved.min()) >= 0 and int(resolved.max()) < bottom))
        report = RankAudit(
            length=length,
            bottom=bottom,
            identity=identity,
            presharded=isinstance(self._sampler, DistributedSampler),
            complete=whole and not self._drop_last and _complete(self._sampler),
            repeated=self._repeated,
            counted=whole,
            epoch=self._epoch,
        )
        if not whole:
            return report, b""
        size = -(-bottom // 8)
        if size <= _MOST_EACH and size * world_size <= _MOST_BYTES:
            return report, np.packbits(_mask(resolved, bottom)).tobytes()
        seen = np.flatnonzero(_mask(indices, length)).astype(np.uint64)
        return replace(report, seen=len(seen), checksum=int((seen * seen).sum())), b""


def _exchange(
    group: Group, parallel: DataParallelRanks, name: str, report: RankAudit, bitmap: bytes
) -> tuple[list[RankAudit], list[bytes]] | None:
    """Post a result; all of them for the rank that posts the last one, None for the others, or where one is odd."""
    store = group.store
    keys = [group.key(f"audit/{name}/{rank}") for rank in range(parallel.size)]
    store.set(keys[parallel.rank], json.dumps(asdict(report)).encode() + b"\n" + bitmap)
    # Each rank posts before it looks, so the last one finds everything there. Of two that do, the one that removes the
    # first key goes on.
    found = store.peek_all(keys, _read_posted)
    if found is None or not store.delete(keys[0]):
        return None
    for key in keys[1:]:
        store.delete(key)
    return [report for report, _ in found], [bits for _, bits in found]


def _read_posted(data: bytes) -> tuple[RankAudit, bytes]:
    text, _, bits = data.partition(b"\n")
    return from_fields(RankAudit, text), bits


def count(bitmaps: list[bytes], bottom: int) -> Tensor | None:
    """For each sample at the bottom 0, 1 or 2: no rank saw it, one did, several did. None unless all were counted."""
    size = -(-bottom // 8)
    if not size or any(len(bitmap) != size for bitmap in bitmaps):
        return None
    any_rank = np.zeros(size, np.uint8)
    several = np.zeros(size, np.uint8)
    for bitmap in bitmaps:
        bits = np.frombuffer(bitmap, np.uint8)
        several |= any_rank & bits
        any_rank |= bits
    return torch.from_numpy(np.unpackbits(any_rank, count=bottom) + np.unpackbits(several, count=bottom))


def judge(reports: list[RankAudit], counts: Tensor | None) -> tuple[str, bool]:
    """The finding about an epoch, and whether it is a warning.

    ``counts``: how many ranks saw each sample, as far as it is more than one; None when nobody knows.
    """
    if len({report.epoch for report in reports}) > 1:
        counts = None  # shares of different orders do not add up
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
            f"The dataset differs between ranks ({what}).{seen} prepare() deals one dataset to all ranks: build the "
            "same on each. For a random split, pass generator=torch.Generator().manual_seed(0) to random_split; if you "
            "divided the data between ranks yourself, leave that to prepare().",
            True,
        )
    wrong = ""
    if not all(report.complete for report in reports):
        pass  # such an order is not meant to have each sample once
    elif counts is not None:
        never = reports[0].length - int((counts > 0).sum())
        if never or shared:
            wrong = f"{never} of {reports[0].length} samples were never seen, and {shared} were seen by several ranks"
    elif len({report.epoch for report in reports}) == 1 and not _each_once(reports):
        wrong = f"some of {reports[0].length} samples were never seen, or were seen by several ranks"
    if wrong:
        return (
            f"In this epoch {wrong}: the sampler gave each rank another order. Give it a generator that is seeded "
            "alike on all ranks, or let it depend on the epoch alone.",
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


def _each_once(reports: list[RankAudit]) -> bool:
    """Whether the ranks together saw each sample once, by number and checksum."""
    length = reports[0].length
    squares = (length - 1) * length * (2 * length - 1) // 6
    return (
        sum(report.seen for report in reports) == length
        and (sum(report.checksum for report in reports) - squares) % 2**64 == 0
    )


def log_stream(repeated: int, samples: int, length: int | None, workers: int) -> None:
    """Called on: the main process, at the end of its first epoch of a stream. Log what was repeated."""
    if length and workers > 1 and samples == workers * length:
        _log(
            f"each of the {workers} workers read all {length} samples of the dataset, so each came {workers} times. "
            "Let the dataset's __iter__ take only its worker's share, by torch.utils.data.get_worker_info().",
            True,
        )
    if repeated:
        what = f"1 sample of {samples} was" if repeated == 1 else f"{repeated} samples of {samples} were"
        _log(f"{what} repeated so that all ranks get equally many batches; gather_for_metrics leaves them out.", False)


def _log(text: str, warn: bool) -> None:
    if text:
        from lockstep.logging import get_notices  # loaded where it is used: there is seldom anything to log

        notices = get_notices("lockstep.data")
        # Once for the job: on the rank that found it, whichever it is.
        (notices.warning if warn else notices.info)(f"end of the first epoch: {text}", main_process_only=False)


def _mask(indices: Tensor, length: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    mask = np.zeros(length, np.bool_)
    mask[indices.numpy()] = True
    return mask


def _resolve(dataset: Any, indices: Tensor) -> tuple[int, Tensor]:
    """The length of the dataset below all subsets, and these indices as its own."""
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
