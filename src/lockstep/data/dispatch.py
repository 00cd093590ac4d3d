"""One rank reads, all ranks work: batches that rank 0 read, on their way to the ranks they are for.

Each exchange starts with one frame of fixed size per rank. It holds the batch as a pickle without its tensors, the
round, whether it is the last, and, when there is room, the tensors' bytes. Only when some rank's batch is larger does
a second collective follow, which brings the rest. So a round costs two collectives at most, and every rank receives
only what is its own. Pickles are exchanged between processes of one job only.

Rank 0 reads one round ahead. When the next round is the last and has nothing for some ranks, it is sent along with the
one before it: nobody has to come to an exchange that brings them nothing, and after a rank's last batch there is none.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import trees, verify
from lockstep.data.global_batch import GlobalBatch
from lockstep.errors import DataError, UsageError
from lockstep.process_group.group import Group

_DOING = "receiving a batch"
_FRAME = 4096
_LEAD = struct.Struct("<QQQ")
"""What a frame starts with: the bytes of the pickle, of the tensors, and of the second collective, 0 without one."""
_ALIGN = 16
_KEEP_BYTES = 1 << 26
"""Buffers up to this size are kept for the next round; larger ones would hold too much memory."""

Delivery = tuple[Any, GlobalBatch, bool]
"""A rank's batch, the round it is part of, and whether it is the rank's last."""
_Spec = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...], bool]
"""What stands in the pickle for a tensor: its number, where its bytes start, dtype, shape, strides, requires_grad."""


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One rank's batch, as rank 0 read it."""

    batch: Any
    """What the rank will get."""
    start: int
    """Where its first sample stands in the order of the epoch."""
    rows: int
    """Samples in it."""
    real: int
    """How many of them are no repeats; they come first."""
    ids: Sequence[int] = ()
    """Its samples, as in `GlobalBatch.ids`."""
    size: int = 0
    """Samples in a full batch, as in `GlobalBatch.size`."""


def dispatch(
    group: Group, source: Iterator[RankBatch] | None, *, even: bool, parts: Sequence[int] | None = None
) -> Iterator[Delivery]:
    """Called on: all ranks. Each rank's batches of one epoch, with their rounds and whether they are its last.

    Rank 0 gets its own batches as they are; the others get tensors in host memory that are their own.

    Args:
        group: The ranks.
        source: On rank 0, the shares: for rank 0, rank 1 and so on, then those of the next round. Else None.
        even: When the shares do not suffice for the last round, the ranks that are left over get shares of the first
            round again, with nothing in them real. Otherwise they end one round before the others.
        parts: Of each rank, which part of a round is its own; without them each has one.
    """
    if group.rank != 0:
        yield from _receive(group)
        return
    if source is None:
        raise UsageError("dispatch got no source on rank 0, which is the one that reads. Pass its shares there.")
    buffers = _ScatterBuffers(group, group.world_size)
    parts = parts or range(group.world_size)
    for deliveries in _scatter(source, max(parts) + 1, even):
        deliveries_by_rank = [deliveries[part] for part in parts]
        deliveries.clear()
        if group.world_size > 1:
            _send(buffers, deliveries_by_rank)
        mine = deliveries_by_rank[0]
        deliveries_by_rank.clear()  # the others' batches are not held while this rank works
        yield from mine


# --- who gets what -----------------------------------------------------------------------------------------------


def _scatter(source: Iterator[RankBatch], world_size: int, even: bool) -> Iterator[list[list[Delivery]]]:
    """For each exchange what each rank gets in it: one batch, two at an uneven end, or nothing."""
    current = list(islice(source, world_size))
    first = current if even else []
    if not current:
        yield [[] for _ in range(world_size)]
    while current:
        following = list(islice(source, world_size)) if len(current) == world_size else []
        rounds = [current]
        if even:
            rounds = [current + [replace(first[k % len(first)], real=0) for k in range(len(current), world_size)]]
        elif len(following) < world_size:
            rounds, following = [current, following], []
        deliveries_by_rank = _parcels(rounds, world_size, last=not following)
        current = following
        del rounds, following  # what was sent is not held until the next round
        yield deliveries_by_rank


def _parcels(rounds: list[list[RankBatch]], world_size: int, *, last: bool) -> list[list[Delivery]]:
    deliveries_by_rank: list[list[Delivery]] = []
    for rank in range(world_size):
        mine = [shares for shares in rounds if rank < len(shares)]
        deliveries_by_rank.append(
            [
                (shares[rank].batch, _round(shares, rank, world_size), last and number == len(mine))
                for number, shares in enumerate(mine, 1)
            ]
        )
    return deliveries_by_rank


def _round(shares: list[RankBatch], rank: int, world_size: int) -> GlobalBatch:
    none = (0,) * (world_size - len(shares))
    return GlobalBatch(
        start=shares[0].start,
        rows=tuple(share.rows for share in shares) + none,
        real=tuple(share.real for share in shares) + none,
        ids=shares[rank].ids,
        size=max(share.size for share in shares),
    )


# --- sending and receiving ---------------------------------------------------------------------------------------


class _ScatterBuffers:
    """The buffers that frames and payloads travel in, a row for each rank they go to."""

    def __init__(self, group: Group, ranks: int) -> None:
        self.group = group
        self._ranks = ranks
        self.frames = self._made(_FRAME)
        self._kept: Tensor | None = None

    def payloads(self, size: int) -> Tensor:
        """Rows of at least this size, with anything in them."""
        if self._kept is not None and self._kept.shape[1] >= size:
            return self._kept.narrow(1, 0, size)
        made = self._made(size)
        self._kept = made if made.numel() <= _KEEP_BYTES else None
        return made

    def _made(self, size: int) -> Tensor:
        # A buffer made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            return torch.empty((self._ranks, size), dtype=torch.uint8, device="cpu")

    def open(self) -> None:
        """Called on: all ranks. Before an exchange, see that nobody has failed and, in debug mode, that all mean it."""
        self.group.check(_DOING)
        if self.group.debug:
            verify.check(self.group, verify.CollectiveSignature(operation="dispatch_batches"))

    def scatter(self, rows: Tensor) -> Tensor:
        """Called on: all ranks. The row that rank 0 has for this rank; elsewhere it is written into the only row."""
        group = self.group
        group.check(_DOING)
        carried = [row if group.talks_host else row.to(group.device) for row in rows]
        options = dist.ScatterOptions()
        options.rootRank = 0
        # Rank 0's own row is its result too: it keeps its batch, so nothing needs to be copied for it.
        carrier = group.backends[carried[0].device]
        group.wait(carrier.scatter([carried[0]], [carried] if group.rank == 0 else [], options), _DOING)
        return carried[0].cpu()


def _send(buffers: _ScatterBuffers, deliveries_by_rank: list[list[Delivery]]) -> None:
    """Called on: rank 0, while the others are in ``_receive``. Give each rank its parcel."""
    messages = [_ScatterMessage(deliveries, rank) for rank, deliveries in enumerate(deliveries_by_rank) if rank != 0]
    size = max(message.payload for message in messages)
    payloads = buffers.payloads(size) if size else None
    for rank, message in enumerate(messages, 1):
        message.write(buffers.frames[rank], payloads[rank] if payloads is not None else None, size)
    buffers.open()
    buffers.scatter(buffers.frames)
    if payloads is not None:
        buffers.scatter(payloads)


def _receive(group: Group) -> Iterator[Delivery]:
    """Called on: all ranks but 0. What rank 0 sends, until it says that it was the last."""
    buffers = _ScatterBuffers(group, 1)
    last = False
    while not last:
        buffers.open()
        frame = buffers.scatter(buffers.frames)
        size = _LEAD.unpack_from(frame.numpy().data)[2]
        deliveries = _read(frame, buffers.scatter(buffers.payloads(size)) if size else None)
        last = not deliveries or deliveries[-1][2]
        yield from deliveries


class _ScatterMessage:
    """What one rank gets in one exchange, ready to be written into its frame and its payload."""

    def __init__(self, deliveries: list[Delivery], rank: int) -> None:
        header = io.BytesIO()
        pickler = _Pickler(header)
        try:
            pickler.dump(deliveries)
        except Exception as error:
            raise _unsendable(deliveries, rank, error) from error
        self._header = header.getbuffer()
        self._tensors = pickler.tensors
        self._nbytes = pickler.nbytes
        length = len(self._header)
        self.payload = 0 if _fits(length, self._nbytes) else _aligned(_rest(length)) + self._nbytes
        """Bytes that need the second collective."""

    def write(self, frame: Tensor, payload: Tensor | None, size: int) -> None:
        """Fill the rows that travel to the rank, of which the payload has ``size`` bytes."""
        head, length = self._header, len(self._header)
        _LEAD.pack_into(frame.numpy().data, 0, length, self._nbytes, size)
        rest = _rest(length)
        frame.numpy()[_LEAD.size : _LEAD.size + length - rest] = np.frombuffer(head[: length - rest], dtype=np.uint8)
        if payload is None or not self.payload:
            packed = frame[_after_header(length) :]
        else:
            payload.numpy()[:rest] = np.frombuffer(head[length - rest :], dtype=np.uint8)
            packed = payload[_aligned(rest) :]
        for spec, tensor in self._tensors:
            if tensor.numel():
                _place(packed, spec).copy_(tensor.detach())


def _read(frame: Tensor, payload: Tensor | None) -> list[Delivery]:
    """The parcel that was written into these rows."""
    length, nbytes, _ = _LEAD.unpack_from(frame.numpy().data)
    rest = _rest(length)
    header = frame.numpy()[_LEAD.size : _LEAD.size + length - rest].tobytes()
    if payload is None or _fits(length, nbytes):
        packed = frame[_after_header(length) :]
    else:
        header += payload.numpy()[:rest].tobytes()
        packed = payload[_aligned(rest) :]
    return _Unpickler(io.BytesIO(header), packed).load()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _rest(length: int) -> int:
    """How much of a pickle of this length does not go into the frame."""
    return max(0, length - (_FRAME - _LEAD.size))


def _after_header(length: int) -> int:
    """Where tensors start in a frame with a pickle of this length."""
    return _aligned(_LEAD.size + length)


def _fits(length: int, nbytes: int) -> bool:
    """Whether a frame has room for a pickle of this length and tensors of so many bytes."""
    return _after_header(length) + nbytes <= _FRAME


def _place(packed: Tensor, spec: _Spec) -> Tensor:
    """Where a tensor that is not empty lies among the packed ones."""
    _, offset, dtype, shape, strides, _ = spec
    nbytes = dtype.itemsize * math.prod(shape)
    return packed.narrow(0, offset, nbytes).view(dtype).as_strided(shape, strides)


# --- batches without their tensors -------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Pickles a parcel and puts the tensors aside, wherever they lie in it; one that occurs twice only once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[tuple[_Spec, Tensor]] = []
        self.nbytes = 0
        self._met: dict[int, _Spec] = {}

    def persistent_id(self, value: Any) -> _Spec | None:
        """What stands for a tensor; None for anything that is pickled as it is."""
        # Kinds of tensors that are more than their bytes know best how to be pickled.
        if type(value) is not Tensor or value.layout is not torch.strided or value.device.type == "meta":
            return None
        if value.is_quantized or value.is_nested or value.__dict__:
            return None
        spec = self._met.get(id(value))
        if spec is None:
            # As ``clone`` would: channels-last images stay so, holes and repetitions between the elements go.
            like = value if value.is_contiguous() else torch.empty_like(value, device="meta")
            number, shape = len(self.tensors), tuple(value.shape)
            spec = number, self.nbytes, value.dtype, shape, like.stride(), value.requires_grad
            self._met[id(value)] = spec
            self.tensors.append((spec, value))
            self.nbytes += _aligned(value.numel() * value.element_size())
        return spec


class _Unpickler(pickle.Unpickler):
    """Puts the tensors back, each in memory of its own: one that is kept does not keep the whole batch."""

    def __init__(self, file: io.BytesIO, packed: Tensor) -> None:
        super().__init__(file)
        self._packed = packed
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, spec: _Spec) -> Tensor:
        """The tensor that this stands for."""
        number, _, dtype, shape, strides, requires_grad = spec
        if number not in self._made:
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
            if tensor.numel():
                tensor.copy_(_place(self._packed, spec))
            self._made[number] = tensor.requires_grad_() if requires_grad else tensor
        return self._made[number]


def _unsendable(deliveries: list[Delivery], rank: int, error: Exception) -> DataError:
    """Which part of a batch it is that cannot be pickled."""
    where, what, reason = "", deliveries[0][0], error
    for path, leaf in (found for batch, _, _ in deliveries for found in trees.walk_paths(batch)):
        try:
            _Pickler(io.BytesIO()).dump(leaf)
        except Exception as own:
            where, what, reason = path, leaf, own
            break
    return DataError(
        f"dispatch_batches=True has rank 0 send each rank its batch, but the one for rank {rank} holds a "
        f"{type(what).__name__} at batch{where} that cannot be pickled ({type(reason).__name__}: {reason}). Let "
        "collate_fn return tensors, numbers, strings or objects of classes at the top of a module; or set "
        "dispatch_batches=False, so that every rank reads its own batches."
    )
