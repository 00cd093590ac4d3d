"""Collectives on nested structures of tensors: one collective for the whole structure, not one per leaf.

The leaves are copied as bytes into one buffer, which travels once. Where each leaf lies in the buffer is a plan that
depends only on the structure's signature, so it is made once and remembered with the group's generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.blackbox import layout
from lockstep.comm import nested_tensors, trees, verify
from lockstep.comm.all_gather import CARRIED, OPTIONS, all_gather, gather_host
from lockstep.errors import ConfigError, DistributedOperationException
from lockstep.process_group.group import Group
from lockstep.torch_internals.c10d import all_gather_into
from lockstep.torch_internals.tensor import copy_all

_ALIGN = 16
_KEEP_BYTES = 1 << 20
"""Send buffers up to this size are kept for the next call; larger ones would hold too much memory."""
_LOCAL_SUM_BYTES = 1 << 20
"""Up to this size, a structure of several dtypes is gathered once and summed on each rank."""
_MAX_PLANS = 256
_CALLER = 3
"""Frames from a black box up to who has called us through the accelerator or ``utils``."""
_REDUCTIONS = {"sum": "reduce (sum)", "mean": "reduce (mean)", "max": "reduce (max)"}
_SUMMABLE = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32))
"""Dtypes that every backend adds up, and compares, by itself."""


@dataclass(frozen=True, eq=False)
class _BufferSlice:
    """Where one leaf lies in the packed buffer."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size


def _place(part: Tensor, slot: _BufferSlice) -> Tensor:
    """Where a leaf lies in one rank's part of a buffer; a zero-dimensional one as a row of one."""
    shape = slot.shape or (1,)
    if not slot.nbytes:
        return torch.empty(shape, dtype=slot.dtype, device=part.device)
    return part.narrow(0, slot.offset, slot.nbytes).view(slot.dtype).view(shape)


class BufferPlan:
    """Where all leaves of one signature lie, and the buffers they travel in.

    Small buffers and the views into them are kept for the next call: making views costs more than copying.
    """

    def __init__(
        self,
        leaves: Sequence[Tensor],
        group: Group,
        meant: verify.CollectiveSignature | None = None,
        signature: tuple[Any, ...] | None = None,
    ) -> None:
        self.sign = "" if signature is None else layout.spell(signature)
        """The signature as a text, which is quicker to look up."""
        devices = {leaf.device for leaf in leaves}
        self.one_device = len(devices) == 1
        self.device = devices.pop() if self.one_device else group.device
        self._world_size = world_size = group.world_size
        slots, offset = [], 0
        for leaf in leaves:
            nbytes = leaf.numel() * leaf.element_size()
            slots.append(_BufferSlice(offset, nbytes, leaf.dtype, leaf.shape))
            offset += -(-nbytes // _ALIGN) * _ALIGN
        self.slots = tuple(slots)
        self.nbytes = offset
        self._kept = offset * (world_size + 1) <= _KEEP_BYTES
        self._sending: tuple[Tensor, list[Tensor]] | None = None
        self._receiving: tuple[Tensor, list[list[Tensor]]] | None = None
        self.key = 0
        """What is compared in debug mode."""
        self.framed = False
        """Whether the leaves travel in debug mode's own frames, together with the key."""
        if meant is not None:
            self.key = meant.key()
            self.framed = 0 < offset <= verify.ROOM and self.device.type == "cpu" and group.talks_host
        if self.framed:
            frames = verify.frames_of(group)
            self._sending = frames.data, [_place(frames.data, slot).view(slot.shape) for slot in self.slots]
            self._receiving = frames.rows, [[_place(part, slot) for part in frames.rows] for slot in self.slots]

    def sending(self) -> tuple[Tensor, list[Tensor]]:
        """A buffer for one rank's leaves, and each leaf's place in it."""
        if self._sending is not None:
            return self._sending
        # A buffer made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
            made = buffer, [_place(buffer, slot).view(slot.shape) for slot in self.slots]
        if self._kept:
            self._sending = made
        return made

    def receiving(self) -> tuple[Tensor, list[list[Tensor]]]:
        """A buffer for all ranks' leaves, and for each leaf its place in every rank's part of it."""
        if self._receiving is not None:
            return self._receiving
        with torch.inference_mode(False):
            buffer = torch.empty((self._world_size, self.nbytes), dtype=torch.uint8, device=self.device)
            made = buffer.view(-1), [[_place(part, slot) for part in buffer] for slot in self.slots]
        if self._kept:
            self._receiving = made
        return made

    def pack(self, leaves: Sequence[Tensor]) -> Tensor:
        """The leaves as one buffer of bytes."""
        buffer, places = self.sending()
        strided = torch.strided
        ready = [
            leaf if leaf.layout is strided and not leaf.requires_grad else _dense(leaf.detach()) for leaf in leaves
        ]
        copy_all(places, ready)
        return buffer


def _plan(
    group: Group,
    leaves: Sequence[Tensor],
    signature: tuple[Any, ...] | None,
    meant: verify.CollectiveSignature | None = None,
) -> BufferPlan:
    plan = None if signature is None else group.plans.get(signature)
    if plan is None:
        if len(group.plans) >= _MAX_PLANS:
            group.forget_buffers()
        plan = BufferPlan(leaves, group, meant, signature)
        if signature is not None:
            group.plans[signature] = plan
    return plan


def _dense(leaf: Tensor) -> Tensor:
    return leaf if leaf.layout is torch.strided else leaf.to_dense()


# --- gather ------------------------------------------------------------------------------------------------------


def gather(group: Group, tree: Any) -> Any:
    """Called on: all ranks. Each tensor of the structure from all ranks, joined along the first dimension.

    Zero-dimensional tensors become one-dimensional, one value per rank.
    """
    if group.world_size == 1:
        return tree
    if group.abort_reason is not None:
        group.check("gathering tensors")
    if not isinstance(tree, Tensor) or group.debug:
        leaves, signature = trees.flatten(tree)
        plan = group.plans.get(signature)
        if plan is None:
            trees.require_tensors(leaves, tree, "gather")
        return gather_flat(group, tree, leaves, signature, plan, _CALLER + 1)
    # Much of this is written out here that has functions of its own elsewhere: after a collective the caches are cold,
    # and each function costs as much as the work in it.
    number = group.box.enter("gather", (tree.shape, tree.dtype), _CALLER)
    try:
        leaf = tree.detach() if tree.requires_grad else tree
        if leaf.layout is not torch.strided or not leaf.is_contiguous():
            leaf = _dense(leaf).contiguous()
        shape, dtype, device = leaf.shape, leaf.dtype, leaf.device
        if not shape:
            leaf, shape = leaf.view(1), torch.Size((1,))  # gloo refuses a source without a dimension
        result = torch.empty((group.world_size * shape[0], *shape[1:]), dtype=dtype, device=device)
        if dtype in CARRIED and leaf.numel():
            group.wait(all_gather_into(group.backends[device], result, leaf, OPTIONS), "gathering tensors")
        elif leaf.numel():
            all_gather(group, result, leaf)
        return result
    finally:
        group.box.leave(number)


def gather_flat(
    group: Group,
    tree: Any,
    leaves: Sequence[Tensor],
    signature: tuple[Any, ...],
    plan: BufferPlan | None = None,
    depth: int = _CALLER,
) -> Any:
    """Called on: all ranks. `gather` for who has taken the structure apart already, and found only tensors.

    ``plan`` is what is remembered under the signature; ``depth`` frames up from a black box is who has called us.
    """
    if group.abort_reason is not None:
        group.check("gathering tensors")
    if plan is None:
        plan = _plan(group, leaves, signature)
    number = group.box.enter("gather", plan.sign, depth)
    try:
        if group.debug:
            rows, plan = _gather_rows(group, leaves, signature, tree, "gather")
        else:
            buffer, rows = plan.receiving()
            if plan.nbytes:
                work = all_gather_into(group.backends[plan.device], buffer, plan.pack(leaves), OPTIONS)
                group.wait(work, "gathering tensors")
    finally:
        group.box.leave(number)
    joined = [torch.cat(ranks) for ranks in rows]
    if not plan.one_device:
        joined = [whole.to(leaf.device) for whole, leaf in zip(joined, leaves, strict=True)]
    return trees.unflatten(tree, iter(joined))


def gather_parts(group: Group, tree: Any, leaves: Sequence[Tensor], signature: tuple[Any, ...]) -> list[list[Tensor]]:
    """Called on: all ranks. For each leaf every rank's, not joined, by one collective; zero-dimensional ones as a row.

    Their memory is used again by the next call.
    """
    group.check("gathering tensors")
    number = group.box.enter("gather", signature, _CALLER)
    try:
        return _gather_rows(group, leaves, signature, tree, "gather")[0]
    finally:
        group.box.leave(number)


@torch.no_grad()
def gather_ragged(group: Group, tree: Any, leaves: Sequence[Tensor]) -> list[list[Tensor]]:
    """Called on: all ranks. The same for leaves whose first dimension differs between ranks.

    The sizes travel first: a rank can know its own only, and a collective with sizes that do not fit never ends.
    """
    group.check("gathering tensors")
    number = group.box.enter("gather", _any_length(trees.flatten(tree)[1]), _CALLER)
    try:
        if group.debug:
            verify.check(group, verify.CollectiveSignature(operation="gather", tree=tree, free_dim=0))
        return _ragged(group, leaves) if leaves else []
    finally:
        group.box.leave(number)


def _any_length(signature: tuple[Any, ...]) -> tuple[Any, ...]:
    """What must agree when first dimensions may differ."""
    return tuple(("any", *part[1:]) if isinstance(part, torch.Size) else part for part in signature)


def _ragged(group: Group, leaves: Sequence[Tensor]) -> list[list[Tensor]]:
    own = torch.tensor([leaf.shape[0] if leaf.ndim else -1 for leaf in leaves])
    sizes = gather_host(group, own, "gathering tensors")
    if bool(((sizes < 0).any(0) != (sizes < 0).all(0)).any()):
        raise DistributedOperationException(
            "Tensors of one place have a first dimension on some ranks and none on others. Their first dimensions, "
            f"rank by rank (-1: none): {sizes.tolist()}. Give each rank's tensor the same number of dimensions."
        )
    longest = sizes.amax(0).tolist()
    padded = [_pad(_dense(leaf.detach()), 0, size, 0, False) for leaf, size in zip(leaves, longest, strict=True)]
    # Sizes that differ seldom come again: the plan is not remembered.
    rows, _ = _gather_rows(group, padded, None)
    return [
        [part if size < 0 else part[:size] for part, size in zip(ranks, column, strict=True)]
        for ranks, column in zip(rows, sizes.t().tolist(), strict=True)
    ]


def _gather_rows(
    group: Group,
    leaves: Sequence[Tensor],
    signature: tuple[Any, ...] | None,
    tree: Any = None,
    operation: str = "",
) -> tuple[list[list[Tensor]], BufferPlan]:
    """Called on: all ranks. Each leaf of every rank, by one collective; their memory is the plan's.

    With an ``operation``, its name and the tree are compared first in debug mode.
    """
    if operation and group.debug:
        return _compared_rows(group, leaves, signature, verify.CollectiveSignature(operation=operation, tree=tree))
    plan = _plan(group, leaves, signature)
    buffer, rows = plan.receiving()
    if plan.nbytes:
        all_gather(group, buffer, plan.pack(leaves))
    return rows, plan


def _compared_rows(
    group: Group, leaves: Sequence[Tensor], signature: tuple[Any, ...] | None, meant: verify.CollectiveSignature
) -> tuple[list[list[Tensor]], BufferPlan]:
    """Called on: all ranks. The same in debug mode: small leaves travel in the frame that is compared."""
    plan = _plan(group, leaves, None if signature is None else ("debug", meant.operation, *signature), meant)
    packed = plan.pack(leaves) if plan.framed else None
    together = verify.frames_of(group).exchange(
        plan.key, plan.nbytes if plan.framed else 0, f"checking {meant.operation}"
    )
    if together is None:
        verify.refuse(group, meant)
    buffer, rows = plan.receiving()
    if together or not plan.nbytes:
        return rows, plan
    if packed is None:
        all_gather(group, buffer, plan.pack(leaves))
        return rows, plan
    # Another rank's leaves are on a device, so that it has sent none yet.
    apart = BufferPlan(leaves, group)
    buffer, rows = apart.receiving()
    all_gather(group, buffer, apart.pack(leaves))
    return rows, apart


# --- reduce ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def reduce(group: Group, tree: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Called on: all ranks. The sums, means or largest values of each tensor of the structure over the ranks, scaled.

    ``"none"`` leaves the ranks' values apart. The input is not changed. A mean of whole numbers is a float; booleans
    are counted, and their maximum is a boolean. A nan on any rank is a nan in the maximum, too.
    """
    if reduction not in ("sum", "mean", "max", "none"):
        raise ConfigError(f"reduction={reduction!r} is not known. Allowed: 'sum', 'mean', 'max', 'none'.")
    leaves, signature = trees.flatten(tree)
    trees.require_tensors(leaves, tree, "reduce")
    if reduction == "max" and any(leaf.is_complex() for leaf in leaves):
        raise ConfigError("reduction='max': complex numbers have no order. Reduce .abs(), or .real and .imag.")
    if reduction == "none" or group.world_size == 1:
        return tree if scale == 1.0 else trees.map_tensors(lambda leaf: leaf * scale, tree)
    group.check("reducing tensors")
    number = group.box.enter(_REDUCTIONS[reduction], signature, _CALLER)
    try:
        found = _combine(group, [_dense(leaf) for leaf in leaves], signature, tree, reduction)
    finally:
        group.box.leave(number)
    if reduction == "mean":
        found = [total / group.world_size for total in found]
    if scale != 1.0:
        found = [total * scale for total in found]
    return trees.unflatten(tree, iter(found))


def _combine(group: Group, leaves: list[Tensor], signature: tuple[Any, ...], tree: Any, reduction: str) -> list[Tensor]:
    """The sums of the leaves over the ranks, or their largest values."""
    largest, operation = reduction == "max", _REDUCTIONS[reduction]
    flags = [leaf.dtype == torch.bool for leaf in leaves]
    leaves = [leaf.long() if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]
    # In order of appearance, which is the same on all ranks; the order of a set is not.
    dtypes = dict.fromkeys((leaf.dtype, leaf.device.type) for leaf in leaves)
    native = all(dtype in _SUMMABLE for dtype, _ in dtypes)
    total_bytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    small = total_bytes + _ALIGN * len(leaves) <= verify.ROOM
    if not native or (len(dtypes) > 1 and total_bytes <= _LOCAL_SUM_BYTES) or (group.debug and small):
        # One gather whatever the dtypes; each rank adds in the same order, so all get the same bits.
        rows, _ = _gather_rows(group, leaves, ("max" if largest else "sum", *signature), tree, operation)
        found = []
        for ranks, leaf in zip(rows, leaves, strict=True):
            stacked = torch.stack(ranks)
            total = stacked.amax(0) if largest else stacked.sum(0, dtype=leaf.dtype)
            found.append(total.view(leaf.shape).to(leaf.device))
    else:
        if group.debug:
            verify.check(group, verify.CollectiveSignature(operation=operation, tree=tree))
        found = list(leaves)
        for dtype, kind in dtypes:
            places = [place for place, leaf in enumerate(leaves) if (leaf.dtype, leaf.device.type) == (dtype, kind)]
            chosen = [leaves[place] for place in places]
            if len(chosen) == 1:
                found[places[0]] = alone = chosen[0].clone(memory_format=torch.contiguous_format)
                if alone.numel():
                    _combine_in_place(group, alone, largest)
                continue
            flat = torch.cat([leaf.reshape(-1) for leaf in chosen])
            if flat.numel():
                _combine_in_place(group, flat, largest)
            pieces = flat.split([leaf.numel() for leaf in chosen])
            for place, leaf, piece in zip(places, chosen, pieces, strict=True):
                found[place] = piece.view(leaf.shape)
    return [total.bool() if flag and largest else total for total, flag in zip(found, flags, strict=True)]


def _combine_in_place(group: Group, flat: Tensor, largest: bool) -> None:
    """Called on: all ranks. Sum, or the largest values, by the backend."""
    carrier, options = group.backends[flat.device], dist.AllreduceOptions()
    if not largest:
        group.wait(carrier.allreduce([flat], options), "reducing tensors")
        return
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    bad = flat.isnan().to(torch.int32) if flat.is_floating_point() else None
    group.wait(carrier.allreduce([flat], options), "reducing tensors")
    if bad is not None:
        # Backends compare with <, which a nan always loses: it would be gone without a word.
        group.wait(carrier.allreduce([bad], options), "reducing tensors")
        flat.masked_fill_(bad.bool(), float("nan"))


# --- broadcast ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def broadcast(group: Group, tree: Any, from_process: int = 0) -> Any:
    """Called on: all ranks. The sender's values in every rank's tensors, which are overwritten and returned."""
    _check_rank(group, from_process)
    if group.world_size == 1:
        return tree
    group.check("broadcasting tensors")
    leaves, signature = trees.flatten(tree)
    trees.require_tensors(leaves, tree, "broadcast")
    number = group.box.enter(f"broadcast (from process {from_process})", signature, _CALLER)
    try:
        if group.debug:
            extra = f"from process {from_process}"
            verify.check(group, verify.CollectiveSignature(operation="broadcast", tree=tree, extra=extra))
        broadcast_leaves(group, leaves, signature, from_process)
    finally:
        group.box.leave(number)
    return tree


def broadcast_leaves(
    group: Group, leaves: Sequence[Tensor], signature: tuple[Any, ...] | None, from_process: int = 0
) -> None:
    """Called on: all ranks. Overwrite these tensors with the sender's, by one collective.

    Without a signature the plan is not remembered.
    """
    plan = _plan(group, leaves, signature)
    if not plan.nbytes:
        return
    packed, places = plan.sending()
    with torch.no_grad():
        copy_all(places, list(leaves))
    options = dist.BroadcastOptions()
    options.rootRank = from_process
    group.wait(group.backends[packed.device].broadcast([packed], options), "broadcasting tensors")
    if group.rank != from_process:
        # A tensor made in inference mode can be written to only there.
        with torch.inference_mode(any(leaf.is_inference() for leaf in leaves)), torch.no_grad():
            copy_all(list(leaves), places)


def _check_rank(group: Group, rank: int) -> None:
    if not 0 <= rank < group.world_size:
        raise ConfigError(f"from_process={rank} is not a rank of this job. Allowed: 0 to {group.world_size - 1}.")


# --- padding -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def pad_across_processes(
    group: Group, tree: Any, dim: int = 0, pad_index: int | float = 0, pad_first: bool = False
) -> Any:
    """Called on: all ranks. Each tensor padded along ``dim`` to its largest size on any rank.

    The sizes of the whole structure travel in one collective. Tensors without that dimension stay as they are, and so
    do nested tensors, with a warning.
    """
    if nested_tensors.is_in(tree):
        return nested_tensors.pad_others(
            tree, lambda flat: pad_across_processes(group, flat, dim, pad_index, pad_first)
        )
    leaves, _ = trees.flatten(tree)
    trees.require_tensors(leaves, tree, "pad_across_processes")
    if group.world_size == 1:
        return tree
    group.check("padding tensors")
    # Only sizes are exchanged, one for each tensor: what else differs does no harm here.
    number = group.box.enter(f"pad_across_processes (dim={dim})", f"{len(leaves)} tensors", _CALLER)
    try:
        sizes = torch.tensor([leaf.shape[dim] if -leaf.ndim <= dim < leaf.ndim else -1 for leaf in leaves])
        carried = None
        if group.debug:
            meant = verify.CollectiveSignature(operation=f"pad_across_processes (dim={dim})", tree=tree, free_dim=dim)
            carried = verify.exchange(group, meant, sizes.view(torch.uint8) if leaves else None)
        if not leaves:
            return tree
        known = carried.contiguous().view(torch.int64) if carried is not None else None
        longest = (gather_host(group, sizes, "padding tensors") if known is None else known).amax(0).tolist()
    finally:
        group.box.leave(number)
    padded = [_pad(leaf, dim, int(size), pad_index, pad_first) for leaf, size in zip(leaves, longest, strict=True)]
    return trees.unflatten(tree, iter(padded))


def _pad(leaf: Tensor, dim: int, size: int, pad_index: int | float, pad_first: bool) -> Tensor:
    if size < 0 or leaf.shape[dim] == size:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = size
    padded = leaf.new_full(shape, pad_index)
    start = size - leaf.shape[dim] if pad_first else 0
    padded.narrow(dim, start, leaf.shape[dim]).copy_(leaf)
    return padded
