"""Parameters by rows over the ranks: gathered before a forward, their gradients averaged and cut after a backward.

Simple, not quick: one gather and one all-reduce for a whole model. Names and ties stay, parameters without dimensions
are on every rank, and a rank may have no row of a small one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import Accelerator, UsageError
from lockstep.comm import tensors
from lockstep.process_group.group import Group
from lockstep.strategies.base import Rows, Strategy
from lockstep.topology.data_parallel import DataParallelRanks
from lockstep.topology.topology import Topology

OWNER = "_row_sharding"
ROWS = "_rows"


class RowSharding(Strategy):
    """Each rank trains rows of its own; it sees the gradients of these alone."""

    sees_all_gradients = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._models: list[ShardedModel] = []

    @classmethod
    def reason(cls, topology: Topology) -> str:
        return f"rows of each parameter on {topology.world_size} processes"

    # --- models ------------------------------------------------------------------------------------------------

    def wrap(self, model: nn.Module) -> nn.Module:
        owner = model.__dict__.get(OWNER) or ShardedModel(model)
        owner.shard(self._group)
        self._models = [*(other for other in self._models if other is not owner), owner]
        return model

    def fits(self, model: nn.Module) -> bool:
        owner = model.__dict__.get(OWNER)
        return owner is None or owner.fits()

    def rows_of(self, parameter: Tensor) -> Rows | None:
        return getattr(parameter, ROWS, None)

    def reattach(self, model: nn.Module) -> None:
        if OWNER in model.__dict__:
            model.__dict__[OWNER].reset()

    # --- forward and backward ----------------------------------------------------------------------------------

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None] | None:
        owner = model.__dict__.get(OWNER)
        return None if owner is None else owner.switched("holds")

    def forced_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        owner = model.__dict__.get(OWNER)
        return nullcontext() if owner is None else owner.switched("forced")

    def enter_backward(self, loss: Any, batch: int) -> int | None:
        awaited = [owner for owner in self._models if owner.forwards]
        reduces = any(not held or owner.forced for owner in awaited for held in owner.forwards)
        for owner in awaited:
            owner.forwards.clear()
        if not reduces:
            return -1 if awaited or not self._models else None
        return self._group.box.enter("backward of rows", None, 4)

    @contextmanager
    def silenced(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        ours = {id(item) for owner in self._models for item in owner.shards}
        with super().silenced([item for item in parameters if id(item) not in ours]):
            for owner in self._models:
                owner.silent = True
            try:
                yield
            finally:
                for owner in self._models:
                    owner.silent = False

    def join(self, joinables: Any, accumulation: Any, states: Any) -> AbstractContextManager[None]:
        if self._topology.world_size == 1:
            return nullcontext()
        raise UsageError(
            "join_uneven_inputs: every forward gathers rows from all ranks, so none may run out of batches before the "
            "others. Use even_batches=True."
        )

    def start_parts(self, models: Sequence[nn.Module]) -> None:
        raise UsageError("auto_microbatch: each part gathers rows from all ranks. Use find_executable_batch_size.")

    # --- gradients ---------------------------------------------------------------------------------------------

    def grad_norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        held = {id(item): value for owner in self._models for item, value in owner.held_by_shard()}
        here = [held.get(id(item), item.grad) for item in parameters]
        if held:  # no update is due: what this rank has so far
            return torch.nn.utils.get_total_norm([item for item in here if item is not None], norm_type=norm_type)
        there = [item for item in parameters if item.grad is not None]
        rows = [item.grad for item in there if self.rows_of(item) is not None and item.numel()]
        rest = [item.grad for item in there if self.rows_of(item) is None]
        mine, whole = (torch.nn.utils.get_total_norm(part, norm_type=norm_type) for part in (rows, rest))
        if norm_type == float("inf"):
            return torch.maximum(tensors.reduce(self._group, mine, "max"), whole)
        return (tensors.reduce(self._group, mine**norm_type, "sum") + whole**norm_type) ** (1.0 / norm_type)

    def any_rank(self, finding: bool) -> bool:
        return bool(tensors.reduce(self._group, torch.tensor(float(finding)), "max"))

    def drop_held(self, optimizer: torch.optim.Optimizer) -> None:
        dropped = {id(item) for group in optimizer.param_groups for item in group["params"]}
        for owner in self._models:
            owner.drop_held(dropped)

    def window_gradients(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        held = {id(item): value for owner in self._models for item, value in owner.held_by_shard()}
        return [self._local(item, held.get(id(item))) for item in parameters]

    def _local(self, parameter: Tensor, held: Tensor | None) -> Tensor | None:
        """A whole gradient whose mean over the ranks is what these have: rows that were averaged already, and held."""
        rows = self.rows_of(parameter)
        if parameter.grad is None or rows is None:
            return held if parameter.grad is None else parameter.grad + (0 if held is None else held)
        whole = parameter.new_zeros((rows.total, *parameter.shape[1:])) if held is None else held.clone()
        whole[rows.start : rows.stop] += parameter.grad * self._topology.world_size
        return whole

    def restore_window(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        left = dict(zip(map(id, parameters), zip(parameters, gradients, strict=True), strict=True))
        for owner in self._models:
            owner.drop_held(set(left))
            for place, item in enumerate(owner.shards):
                parameter, gradient = left.pop(id(item), (item, None))
                parameter.grad, owner.held[place] = None, gradient
        rest = list(left.values())
        super().restore_window([item for item, _ in rest], [gradient for _, gradient in rest])


class ShardedModel:
    """One model's rows on this rank, and where the gathered parameters go while it runs."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shards: list[nn.Parameter] = []
        self.held: list[Tensor | None] = []
        """Of each of them, the whole gradient of this rank that was held back."""
        self.forwards: list[bool] = []
        """Of each forward that waits for its backward, whether gradients are held back."""
        self.holds = self.forced = self.silent = False
        self._uses: list[tuple[dict[str, Any], str, int]] = []
        model.__dict__[OWNER] = self
        model.register_forward_pre_hook(lambda *_: self._gather())
        model.register_forward_hook(lambda *_: self._put_back(), always_call=True)

    def shard(self, group: Group) -> None:
        """Called on: all ranks. Keep this rank's rows of what rank 0 has; of what was sharded before, what is there."""
        self._group = group
        known = {id(item) for item in self.shards}
        fresh = {id(item): item for item in self.model.parameters() if id(item) not in known}
        if fresh:
            tensors.broadcast_leaves(group, [item.detach() for item in fresh.values()], None)
        made = {key: self._shard(item) for key, item in fresh.items()}
        self.shards, self.held, self._uses = [], [], []
        places: dict[int, int] = {}
        for module in self.model.modules():
            for name, item in module._parameters.items():
                if item is None:
                    continue
                kept = made.get(id(item), item)
                if id(kept) not in places:
                    places[id(kept)] = len(self.shards)
                    self.shards.append(kept)
                module._parameters[name] = kept
                self._uses.append((module._parameters, name, places[id(kept)]))
        self.reset()
        self._trained = [item.requires_grad for item in self.shards]

    def _shard(self, item: nn.Parameter) -> nn.Parameter:
        if not item.ndim:
            return item
        total, (rank, size) = item.shape[0], (self._group.rank, self._group.world_size)
        rows = Rows(total * rank // size, total * (rank + 1) // size, total)
        made = nn.Parameter(rows.take(item), requires_grad=item.requires_grad)
        setattr(made, ROWS, rows)
        return made

    def fits(self) -> bool:
        """Whether the model has the parameters that were sharded, and the same of them are trained."""
        now = {id(item) for item in self.model.parameters()}
        same = now == {id(item) for item in self.shards}
        return same and self._trained == [item.requires_grad for item in self.shards]

    def reset(self) -> None:
        """Give up what was held back, and what a forward that failed has left."""
        self._put_back()
        self.held = [None] * len(self.shards)
        self.forwards.clear()

    def held_by_shard(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [(item, value) for item, value in zip(self.shards, self.held, strict=True) if value is not None]

    def drop_held(self, dropped: set[int]) -> None:
        pairs = zip(self.shards, self.held, strict=True)
        self.held = [None if id(item) in dropped else value for item, value in pairs]

    @contextmanager
    def switched(self, name: str) -> Iterator[None]:
        before = getattr(self, name)
        setattr(self, name, True)
        try:
            yield
        finally:
            setattr(self, name, before)

    def _gather(self) -> None:
        whole = GatherRows.apply(self, self.holds, *self.shards)
        if torch.is_grad_enabled():
            self.forwards.append(self.holds)
        for table, name, place in self._uses:
            table[name] = whole[place]

    def _put_back(self) -> None:
        for table, name, place in self._uses:
            table[name] = self.shards[place]

    def gather(self) -> list[Tensor]:
        """Called on: all ranks. All parameters whole."""
        number = self._group.box.enter("gathering rows", None, 3)
        try:
            whole = []
            for item in self.shards:
                rows, value = getattr(item, ROWS, None), item.detach()
                if rows is None or self._group.world_size == 1:
                    whole.append(value.clone())
                else:
                    whole.append(torch.cat(tensors.gather_ragged(self._group, [value], [value])[0]))
            return whole
        finally:
            self._group.box.leave(number)

    def reduce(self, hold: bool, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Called on: all ranks, unless gradients are held back. The rows of the averaged gradients."""
        if self.silent:
            gradients = [None if item is None else torch.zeros_like(item) for item in gradients]
        local = [
            new if old is None else old if new is None else old + new
            for old, new in zip(self.held, gradients, strict=True)
        ]
        if hold and not self.forced:
            self.held = local
            return [None] * len(local)
        self.held = [None] * len(local)
        there = torch.tensor([float(item is not None) for item in local])
        anywhere = tensors.reduce(self._group, there, "sum").tolist()
        found: list[Tensor | None] = []
        for item, gradient, ranks in zip(self.shards, local, anywhere, strict=True):
            if not ranks:
                found.append(None)
                continue
            rows = getattr(item, ROWS, None)
            if gradient is None:
                gradient = item.new_zeros(item.shape if rows is None else (rows.total, *item.shape[1:]))
            mean = tensors.reduce(self._group, gradient, "mean")
            found.append(mean if rows is None else rows.take(mean))
        return found


class GatherRows(torch.autograd.Function):
    """Whole parameters from the ranks' rows; gradients go back to these."""

    @staticmethod
    def forward(ctx: Any, owner: ShardedModel, hold: bool, *_: Tensor) -> Any:
        ctx.owner, ctx.hold = owner, hold
        ctx.set_materialize_grads(False)
        whole = owner.gather()
        ctx.mark_non_differentiable(
            *(value for value, item in zip(whole, owner.shards, strict=True) if not item.requires_grad)
        )
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, None, *ctx.owner.reduce(ctx.hold, gradients)


class SameSamples(RowSharding):
    """The same, where all ranks get the same samples: a data-parallel size of 1 on any number of processes."""

    @property
    def data_parallel(self) -> DataParallelRanks:
        return DataParallelRanks(self._topology.rank, [0] * self._topology.world_size)


class ShardingAccelerator(Accelerator):
    """An accelerator that trains so."""

    _strategy_class = RowSharding


class SameSamplesAccelerator(Accelerator):
    """An accelerator that trains so, on the same samples on all ranks."""

    _strategy_class = SameSamples
