"""What all ranks computed from one round of batches, without the samples that were repeated to fill it.

How many samples each rank's batch holds, and how many of them are real, stands in the `GlobalBatch`: nothing is guessed
from the length of what was gathered. Joining is done by `Joiner`, which talks to nobody; a round that is complete
has nothing to drop and takes the plain gather. One process is a world of one: nothing has to be gathered, and what a
script computed for a full batch when its last one is shorter is dropped as anywhere else.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.comm import objects, tensors, trees, verify
from lockstep.comm.raw_bytes import as_bytes
from lockstep.data.global_batch import GlobalBatch, ItemCounts
from lockstep.errors import DistributedOperationException, UsageError
from lockstep.process_group.group import Group
from lockstep.topology.data_parallel import DataParallelRanks

_DOING = "gathering for metrics"
_RECORDS = frozenset(("dict", "mapping", "named", "dataclass"))
_REPORTED: set[str] = set()
"""Kinds of complaint that this process has made: each is made once."""


def gather(
    group: Group,
    data: Any,
    now: GlobalBatch | None,
    *,
    as_objects: bool = False,
    counts: ItemCounts | None = None,
    announce: Callable[[str], None] | None = None,
    data_parallel: DataParallelRanks | None = None,
) -> Any:
    """Called on: all ranks that have a batch in this round. What they computed from it, without repeated samples.

    Tensors are joined along the first dimension, which may count several rows for each sample; tensors without
    dimensions become one value per rank. When the structure holds anything else, or with ``as_objects``:

    - Mappings, dataclasses and named tuples are joined field by field; so are tuples that hold lists or tuples
      (``(predictions, references)``) and, unless ``as_objects``, lists and tuples that hold tensors.
    - Any other list, tuple or iterable holds the samples' objects: these follow each other in one list.
    - Anything else (a number, a string) becomes a list of one value per rank.

    One process gets its own structure back: the types in it, and tensors without dimensions, stay what they are.

    Args:
        group: The job.
        data: What this rank computed.
        now: The round that is being worked on; without one nothing is dropped.
        as_objects: Take tensors in a list for objects of single samples.
        counts: What the iteration has shown of the items per sample so far.
        announce: Called, on one rank, with what could not be dropped, in place of a warning in the log; in debug mode
            it is an error on all.
        data_parallel: Which rank has which part of a round; without it each has one of its own.
    """
    plain = now is None or now.complete
    if now is not None and counts is not None and counts.begin(now) and plain:
        _learn(counts, data, now.rows[0], as_objects)
    parallel = data_parallel or DataParallelRanks(group.rank, range(group.world_size))
    if plain and parallel.size == 1:
        return data
    plain = plain and parallel.size == group.world_size
    if plain and isinstance(data, Tensor) and not as_objects:
        return tensors.gather(group, data)
    leaves, signature = trees.flatten(data)
    # What is remembered under a signature has been found to be tensors only. Nothing at all may be a list of objects
    # that is empty here and not on other ranks.
    tensors_only = bool(leaves) and (signature in group.plans or all(isinstance(leaf, Tensor) for leaf in leaves))
    as_tensors = tensors_only and not as_objects
    if parallel.size == 1:
        return _alone(data, _take_part(group, now, parallel)[1], as_tensors, as_objects, counts)
    if plain and as_tensors:
        return tensors.gather_flat(group, data, leaves, signature)
    ranks, share = _take_part(group, now, parallel)
    joiner = Joiner(share, as_objects, counts)
    if as_tensors:
        parts = _leaves_of_all(group, data, leaves, signature, ranks, share)
        result = _join_leaves(joiner, data, leaves, parts)
    else:
        result = joiner.join(_objects_of_all(group, data, ranks, as_objects))
    _complain(group, joiner.complaints, ranks, announce)
    return result


def _take_part(
    group: Group, now: GlobalBatch | None, parallel: DataParallelRanks
) -> tuple[Sequence[int], BatchCounts | None]:
    """The ranks that have a batch, each a part of its own, and what is in theirs."""
    if now is None:
        return parallel.peers, None
    if not now.rows[parallel.rank]:
        raise UsageError(
            f"gather_for_metrics was called on rank {group.rank}, which has no batch in this round (samples per rank: "
            f"{now.rows}), so the others do not wait for it. Call it inside the loop over the prepared loader only."
        )
    parts = [part for part, rows in enumerate(now.rows) if rows]
    return [parallel.peers[part] for part in parts], BatchCounts(
        tuple(now.rows[part] for part in parts), tuple(now.real[part] for part in parts), now.size
    )


def _complain(
    group: Group, complaints: dict[str, str], ranks: Sequence[int], announce: Callable[[str], None] | None
) -> None:
    if complaints and group.debug:
        raise UsageError("\n".join(complaints.values()))
    for kind, text in complaints.items():
        if kind not in _REPORTED:
            _REPORTED.add(kind)
            if group.rank == ranks[0]:  # all have the same to say, and rank 0 may be one that has no batch
                (announce or _warn)(text)


def _warn(text: str) -> None:
    from lockstep.logging import get_logger  # loaded where it is used: there is seldom anything to say

    get_logger(__name__).warning(text, main_process_only=False)


# --- what travels ------------------------------------------------------------------------------------------------


def _leaves_of_all(
    group: Group,
    data: Any,
    leaves: Sequence[Tensor],
    signature: tuple[Any, ...],
    ranks: Sequence[int],
    share: BatchCounts | None,
) -> list[list[Tensor]]:
    """Called on: these ranks. For each leaf what every one of them has."""
    if len(ranks) < group.world_size:
        # No collective without the ranks whose loop is over. It is the end of an epoch: pickles will do.
        each = _exchange(group, [_PackedTensor(leaf) for leaf in leaves], ranks)
        if len({len(part) for part in each}) > 1:
            raise _differs("structures", "", [f"{len(part)} tensors" for part in each])
        return [list(column) for column in zip(*each, strict=True)]
    if share is not None and len(set(share.rows)) > 1:
        return tensors.gather_ragged(group, data, leaves)
    return tensors.gather_parts(group, data, leaves, signature)


def _objects_of_all(group: Group, data: Any, ranks: Sequence[int], as_objects: bool) -> list[Any]:
    """Called on: these ranks. What every one of them has."""
    if form_of(data, as_objects) == "value":
        raise TypeError(
            f"gather_for_metrics joins tensors and lists with one object for each sample; it got a "
            f"{type(data).__name__}. Put it into a list: gather_for_metrics([value])."
        )
    if len(ranks) == group.world_size and group.debug:
        verify.check(group, verify.CollectiveSignature(operation="gather_object"))
    return _exchange(group, _pack(data, as_objects), ranks)


def _exchange(group: Group, value: Any, ranks: Sequence[int]) -> list[Any]:
    if len(ranks) == group.world_size:
        each = objects.all_objects(group, value, _DOING)
    else:
        each = objects.objects_among(group, ranks, value, _DOING)
    return [trees.map_leaves(lambda leaf: _unpack(leaf, group.device), part) for part in each]


class _PackedTensor:
    """A tensor among objects. Pickled as it is, it would take its whole storage along, and its sender's device."""

    __slots__ = ("data", "dtype", "on_host", "shape")

    def __init__(self, tensor: Tensor) -> None:
        self.on_host = tensor.device.type == "cpu"
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
        self.data = as_bytes(dense.cpu().resolve_conj().resolve_neg().contiguous()).numpy().tobytes()

    def open(self, device: torch.device) -> Tensor:
        """The tensor: in host memory if it was there, else on this rank's device."""
        if not self.data:
            tensor = torch.empty(self.shape, dtype=self.dtype)
        else:
            tensor = torch.frombuffer(bytearray(self.data), dtype=self.dtype).view(self.shape)
        return tensor if self.on_host else tensor.to(device)


def _pack(value: Any, as_objects: bool) -> Any:
    """The structure with tensors as parcels, and what can only be iterated as lists."""
    form = form_of(value, as_objects)
    if form == "record":
        kind = trees.kind_of(value)
        keys, values = trees.parts(value, kind)
        return trees.rebuild(value, kind, keys, [_pack(item, as_objects) for item in values])
    if form == "samples":
        if trees.kind_of(value) == "leaf":
            return _pack(list(value), as_objects)
        return [trees.map_tensors(_PackedTensor, item) for item in value]
    return _PackedTensor(value) if form == "tensor" else value


def _unpack(leaf: Any, device: torch.device) -> Any:
    return leaf.open(device) if isinstance(leaf, _PackedTensor) else leaf


# --- joining -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What is in the batches of the ranks that take part, one number for each of them."""

    rows: tuple[int, ...]
    """Samples in the batch; at least 1."""
    real: tuple[int, ...]
    """How many of them are no repeats; they come first."""
    size: int = 0
    """Samples in a full batch, where one of these may be shorter."""

    @property
    def averages(self) -> bool:
        """Whether the mean over the ranks that have real samples is the mean over these samples."""
        counted = [(rows, real) for rows, real in zip(self.rows, self.real, strict=True) if real]
        return len(set(counted)) == 1 and counted[0][0] == counted[0][1]

    def real_items(self, counts: Sequence[int], known: int | None = None) -> tuple[int, ...] | None:
        """How many of the ``counts`` items of each rank are of real samples; None when that cannot be told.

        It can be told when there are equally many items for each sample, on all ranks, or for each sample of a full
        batch: scripts repeat the mean loss by their batch size, or pad a short batch. When it may be either, how many
        items per sample are ``known`` decides; without that, a full batch's worth of items is one per sample.
        """
        short = any(rows < self.size for rows in self.rows)
        if self.real == self.rows and not short:
            return tuple(counts)
        each = _per_sample(counts, self.rows)
        padded = _per_sample(counts, [self.size] * len(counts)) if short else None
        if padded is not None and (each is None or padded == (1 if known is None else known)):
            each = padded
        if each is None:
            return tuple(counts) if self.real == self.rows else None
        return tuple(each * real for real in self.real)


def _per_sample(counts: Sequence[int], rows: Sequence[int]) -> int | None:
    """Items for each sample; None when they are not equally many."""
    found = {divmod(count, batch) for count, batch in zip(counts, rows, strict=True)}
    multiple, rest = found.pop()
    return None if found or rest else multiple


def form_of(value: Any, as_objects: bool = False) -> str:
    """tensor, record (joined field by field), samples (one object each, or a fixed number) or value.

    Only types decide, so that a structure is treated alike in every round, whatever its lengths there.
    """
    kind = trees.kind_of(value)
    if kind == "tensor":
        return "tensor"
    if kind in _RECORDS:
        return "record"
    if kind in ("list", "tuple"):
        kinds = {trees.kind_of(item) for item in value}
        columns = kind == "tuple" and not kinds.isdisjoint(("list", "tuple"))
        return "record" if columns or ("tensor" in kinds and not as_objects) else "samples"
    iterable = isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray))
    # An array without dimensions says that it can be iterated, and cannot.
    return "samples" if iterable and getattr(value, "ndim", None) != 0 else "value"


class Joiner:
    """Makes one structure of the ranks' structures, in rank order, and notes what it could not do right."""

    def __init__(self, share: BatchCounts | None, as_objects: bool = False, counts: ItemCounts | None = None) -> None:
        self._share = share
        self._as_objects = as_objects
        self._counts = counts
        self.complaints: dict[str, str] = {}
        """Kind of complaint -> the first one of it. The same on all ranks, as all join the same."""

    def join(self, parts: Sequence[Any], path: str = "") -> Any:
        """The ranks' structures as one."""
        # An empty list shows nothing of what the others hold.
        telling = [part for part in parts if not (isinstance(part, (list, tuple)) and not part)] or parts
        forms = [form_of(part, self._as_objects) for part in telling]
        if len(set(forms)) > 1:
            raise _differs("types", path, [type(part).__name__ for part in parts])
        if forms[0] == "tensor":
            return self.tensor(parts, all(part.ndim == 0 for part in parts), path)
        if forms[0] == "record":
            return self._record(parts, path)
        if forms[0] == "samples":
            kept = self.real_items([len(part) for part in parts], "objects", path, _key(path, parts[0]))
            return [item for part, count in zip(parts, kept, strict=True) for item in part[:count]]
        average = isinstance(parts[0], numbers.Number) and not isinstance(parts[0], bool)
        kept = self._real_values(len(parts), average, path)
        return [part for part, count in zip(parts, kept, strict=True) if count]

    def tensor(self, parts: Sequence[Tensor], scalar: bool, path: str = "") -> Tensor:
        """The ranks' tensors as one; with ``scalar`` they had no dimensions, and are one value per rank."""
        if scalar:
            kept = self._real_values(len(parts), True, path)
            return torch.cat([part.reshape(1)[:count] for part, count in zip(parts, kept, strict=True)])
        if len({(part.dtype, part.ndim, part.shape[1:]) for part in parts}) > 1:
            raise _differs("shapes or dtypes", path, [f"{list(part.shape)} {part.dtype}" for part in parts])
        kept = self.real_items([len(part) for part in parts], "rows", path, _key(path, parts[0]))
        return torch.cat([part[:count] for part, count in zip(parts, kept, strict=True)])

    def _record(self, parts: Sequence[Any], path: str) -> Any:
        first = parts[0]
        kind = trees.kind_of(first)
        keys, _ = trees.parts(first, kind)
        fields = []
        for part in parts:
            if trees.kind_of(part) != kind or not _same_keys(keys, trees.parts(part, kind)[0]):
                raise _differs("fields", path, [_fields_of(part) for part in parts])
            # By key, as ranks may have filled their mappings in different orders.
            fields.append([part[key] for key in keys] if kind in ("dict", "mapping") else trees.parts(part, kind)[1])
        steps = [step for step, _ in _fields(first)]
        columns = zip(*fields, strict=True)
        joined = [self.join(column, path + step) for step, column in zip(steps, columns, strict=True)]
        return trees.rebuild(first, kind, keys, joined)

    def real_items(self, counts: Sequence[int], what: str, path: str, key: Any) -> Sequence[int]:
        """How many of each rank's items are of real samples."""
        known = None if self._counts is None else self._counts.per_sample(key)
        kept = counts if self._share is None else self._share.real_items(counts, known)
        if kept is not None:
            return kept
        assert self._share is not None
        repeats = sum(self._share.rows) - sum(self._share.real)
        self.complaints.setdefault(
            "rows",
            f"gather_for_metrics got {list(counts)} {what}{_at(path)} from ranks whose batches have "
            f"{list(self._share.rows)} samples. Which belong to which sample cannot be told, so those of the {repeats} "
            f"repeated samples were not dropped. Pass {what} per sample: as many for each, on all ranks. For what is "
            "not per sample, use gather.",
        )
        return counts

    def _real_values(self, ranks: int, average: bool, path: str) -> Sequence[int]:
        """For each rank whether its one value is kept."""
        if self._share is None:
            return [1] * ranks
        if average and not self._share.averages:
            self.complaints.setdefault(
                "value",
                f"gather_for_metrics got one value per rank{_at(path)}, but the ranks' values do not count the same: "
                f"they come from {list(self._share.rows)} samples, of which {list(self._share.real)} are no repeats. "
                "Their mean is not the mean over the samples. Pass one value per sample, as from "
                'F.cross_entropy(..., reduction="none"), or weight each rank\'s value by its real samples.',
            )
        return [int(real > 0) for real in self._share.real]


def _key(path: str, items: Any) -> Any:
    """What items of one place and kind have in common from round to round."""
    return (path, items.dtype, items.ndim) if isinstance(items, Tensor) else path


def _learn(counts: ItemCounts, data: Any, rows: int, as_objects: bool) -> None:
    """Note how many items there are for each of a batch's samples."""
    as_tensors = not as_objects and all(isinstance(leaf, Tensor) for leaf in trees.flatten(data)[0])
    for path, items in trees.walk_paths(data) if as_tensors else _items(data, as_objects):
        if not isinstance(items, Tensor) or items.ndim:
            counts.learn(_key(path, items), len(items), rows)


def _items(value: Any, as_objects: bool, path: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and lists of a structure that may have items per sample, each with its path."""
    form = form_of(value, as_objects)
    if form == "record":
        for step, item in _fields(value):
            yield from _items(item, as_objects, path + step)
    elif form == "tensor" or (form == "samples" and hasattr(value, "__len__")):
        yield path, value


def _alone(
    data: Any,
    share: BatchCounts | None,
    as_tensors: bool,
    as_objects: bool,
    counts: ItemCounts | None,
) -> Any:
    """On one process: the structure without what was computed beyond the samples of a short batch."""
    joiner = Joiner(share, as_objects, counts)
    if as_tensors:
        leaves = list(trees.walk_paths(data))
        kept = [_trimmed(joiner, leaf, path) for path, leaf in leaves]
        same = all(one is leaf for one, (_, leaf) in zip(kept, leaves, strict=True))
        return data if same else trees.unflatten(data, iter(kept))
    return _trimmed_objects(joiner, data, as_objects)


def _trimmed_objects(joiner: Joiner, value: Any, as_objects: bool, path: str = "") -> Any:
    form = form_of(value, as_objects)
    if form == "record":
        kind = trees.kind_of(value)
        fields = list(_fields(value))
        kept = [_trimmed_objects(joiner, item, as_objects, path + step) for step, item in fields]
        same = all(one is item for one, (_, item) in zip(kept, fields, strict=True))
        return value if same else trees.rebuild(value, kind, trees.parts(value, kind)[0], kept)
    # What has no places can only be iterated, once: it stays as it is.
    placed = form == "samples" and hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return _trimmed(joiner, value, path) if placed or form == "tensor" else value


def _trimmed(joiner: Joiner, items: Any, path: str) -> Any:
    if isinstance(items, Tensor) and not items.ndim:
        return items
    (kept,) = joiner.real_items([len(items)], "items", path, _key(path, items))
    return items if kept == len(items) else items[:kept]


def _fields(record: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a record, each with its step in a path."""
    kind = trees.kind_of(record)
    keys, values = trees.parts(record, kind)
    for key, value in zip(_each_key(keys), values, strict=True):
        yield f".{key}" if kind == "dataclass" else f"[{key!r}]", value


def _join_leaves(joiner: Joiner, data: Any, leaves: Sequence[Tensor], parts: list[list[Tensor]]) -> Any:
    """A structure like ``data``, each leaf from the parts that the ranks have of it."""
    joined = []
    for (path, leaf), column in zip(trees.walk_paths(data), parts, strict=True):
        joined.append(joiner.tensor(column, leaf.ndim == 0, path).to(leaf.device))
    return trees.unflatten(data, iter(joined))


def _each_key(keys: Any) -> Iterable[Any]:
    return range(keys) if isinstance(keys, int) else keys


def _same_keys(mine: Any, other: Any) -> bool:
    if isinstance(mine, int) or isinstance(other, int):
        return bool(mine == other)
    return set(mine) == set(other)


def _fields_of(part: Any) -> str:
    kind = trees.kind_of(part)
    if kind in ("tensor", "leaf"):
        return type(part).__name__
    keys, _ = trees.parts(part, kind)
    return f"{type(part).__name__} of {keys if isinstance(keys, int) else list(keys)}"


def _at(path: str) -> str:
    return f" at {path}" if path else ""


def _differs(what: str, path: str, seen: Sequence[str]) -> DistributedOperationException:
    return DistributedOperationException(
        f"gather_for_metrics got different {what}{_at(path)} from the ranks that have a batch, in rank order: "
        f"{'; '.join(seen)}. Only the first dimension, or the length of a list, may differ."
    )
