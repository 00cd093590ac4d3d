"""Python objects between ranks, pickled; small ones travel in one collective.

Each rank sends a frame of fixed size that holds the length and, when it fits, the object. Only when some rank's
object is longer does a second collective follow. Pickles are exchanged between processes of one job only.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import verify
from lockstep.comm.all_gather import gather_host
from lockstep.errors import ConfigError
from lockstep.process_group.group import Group

_FRAME = 4096
_HEADER = 8
_TAG = 0x10C5
"""Tells our messages between two ranks from those of the user; collectives do not use tags."""


def all_objects(group: Group, value: Any, doing: str = "gathering objects") -> list[Any]:
    """Called on: all ranks. Every rank's object, in rank order."""
    if group.world_size == 1:
        return [value]
    group.check(doing)
    number = group.box.enter(doing, None, 2)
    try:
        payload = pickle.dumps(value)
        frames = gather_host(group, _frame(payload, _FRAME), doing).numpy()
        longest = max(_length(frame) for frame in frames)
        if longest > _FRAME - _HEADER:
            frames = gather_host(group, _frame(payload, longest + _HEADER), doing).numpy()
    finally:
        group.box.leave(number)
    return [_open(frame) for frame in frames]


def objects_among(group: Group, ranks: Sequence[int], value: Any, doing: str = "gathering objects") -> list[Any]:
    """Called on: these ranks only. Every one's object, in their order; the other ranks are not waited for."""
    if list(ranks) == [group.rank]:
        return [value]
    group.check(doing)
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    lengths = _swap(group, ranks, torch.tensor([payload.numel()]), [1] * len(ranks), doing)
    payloads = _swap(group, ranks, payload, [int(length) for length in lengths], doing)
    return [pickle.loads(payload.numpy().tobytes()) for payload in payloads]


def _swap(group: Group, ranks: Sequence[int], source: Tensor, sizes: Sequence[int], doing: str) -> list[Tensor]:
    """Called on: these ranks only. Every one's flat host tensor, whose sizes are known."""
    sent = source if group.talks_host else source.to(group.device)
    received = [
        sent if rank == group.rank else torch.empty(size, dtype=sent.dtype, device=sent.device)
        for rank, size in zip(ranks, sizes, strict=True)
    ]
    messages = []
    for rank, place in zip(ranks, received, strict=True):
        if rank != group.rank:
            messages.append(dist.P2POp(dist.isend, sent, rank, group.pg, _TAG))
            messages.append(dist.P2POp(dist.irecv, place, rank, group.pg, _TAG))
    try:
        # Not waited for in slices: gloo closes the connection when a wait for a message runs out. What frees this
        # wait when another rank fails is that the sockets are shut, or NCCL aborted.
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    except RuntimeError as error:
        raise group.explain(error, doing) from error
    return [place.cpu() for place in received]


def gather_object(group: Group, value: Any) -> Any:
    """Called on: all ranks. The ranks' lists joined into one; alone in the world, the object itself."""
    if group.world_size == 1:
        return value
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(
            f"gather_object joins the ranks' lists; it got a {type(value).__name__}. Put it into a list: "
            "gather_object([value])."
        )
    number = group.box.enter("gather_object", None, 2)
    try:
        if group.debug:
            verify.check(group, verify.CollectiveSignature(operation="gather_object"))
        return [item for items in all_objects(group, list(value)) for item in items]
    finally:
        group.box.leave(number)


def broadcast_object_list(group: Group, object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Called on: all ranks. The sender's objects in every rank's list, which is overwritten and returned."""
    if not 0 <= from_process < group.world_size:
        raise ConfigError(
            f"from_process={from_process} is not a rank of this job. Allowed: 0 to {group.world_size - 1}."
        )
    if group.world_size == 1:
        return object_list
    sender = group.rank == from_process
    number = group.box.enter(f"broadcast_object_list (from process {from_process})", None, 2)
    try:
        if group.debug:
            verify.check(
                group,
                verify.CollectiveSignature(operation="broadcast_object_list", extra=f"from process {from_process}"),
            )
        group.check("broadcasting objects")
        payload = pickle.dumps(list(object_list)) if sender else b""
        frame = _broadcast(group, _frame(payload, _FRAME), from_process)
        length = _length(frame.numpy())
        if length > _FRAME - _HEADER:
            frame = _broadcast(group, _frame(payload, length + _HEADER), from_process)
    finally:
        group.box.leave(number)
    if not sender:
        object_list[:] = _open(frame.numpy())
    return object_list


def _broadcast(group: Group, frame: Tensor, from_process: int) -> Tensor:
    carried = frame if group.talks_host else frame.to(group.device)
    options = dist.BroadcastOptions()
    options.rootRank = from_process
    group.wait(group.backends[carried.device].broadcast([carried], options), "broadcasting objects")
    return carried.cpu()


def _frame(payload: bytes, size: int) -> Tensor:
    frame = np.zeros(size, dtype=np.uint8)
    frame[:_HEADER] = np.frombuffer(len(payload).to_bytes(_HEADER, "little"), dtype=np.uint8)
    part = payload[: size - _HEADER]
    frame[_HEADER : _HEADER + len(part)] = np.frombuffer(part, dtype=np.uint8)
    return torch.from_numpy(frame)


def _length(frame: Any) -> int:
    return int.from_bytes(frame[:_HEADER].tobytes(), "little")


def _open(frame: Any) -> Any:
    return pickle.loads(frame[_HEADER : _HEADER + _length(frame)].tobytes())
