"""One batch of a running training, in as many parts as it takes to fit into memory.

Every part is computed without talking to other ranks, so a rank that runs out leaves nobody waiting inside something.
Then the ranks tell each other how it went: all drop the batch's gradients and compute it again in smaller parts, or
all average the gradients, once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lockstep.comm import tensors, trees
from lockstep.comm.agree import drop_tracebacks
from lockstep.comm.rng import States
from lockstep.errors import ConfigError, OutOfMemory, UsageError
from lockstep.logging import get_notices
from lockstep.memory.cache import clear_device_cache
from lockstep.memory.oom_detect import describe, is_out_of_memory
from lockstep.training.state import TrainingState
from lockstep.training.step import complete_update

Split = Callable[[Any, slice], Any]


def train_on(
    state: TrainingState,
    batch: Any,
    compute_loss: Callable[[Any], Tensor],
    num_items: Callable[[Any], Any] | None,
    split: Split | None,
) -> Tensor:
    """Called on: all ranks. Forward and backward of one batch, in parts that fit; its loss."""
    rows = trees.find_batch_size(batch)
    if not rows:
        raise UsageError("auto_microbatch: no tensor of this batch has a first dimension to split it by.")
    if not callable(compute_loss):
        raise UsageError(
            "auto_microbatch(batch, compute_loss): compute_loss must be a function of a part of the batch."
        )
    job = _Batch(state, batch, rows, compute_loss, _counted(state, batch, num_items), split or split_rows)
    return job.run()


class _Batch:
    def __init__(
        self,
        state: TrainingState,
        batch: Any,
        rows: int,
        compute_loss: Callable[[Any], Tensor],
        items: _Items | None,
        split: Split,
    ) -> None:
        self._state, self._group = state, state.group
        self._batch, self._rows, self._split = batch, rows, split
        self._compute_loss = compute_loss
        self._items = items
        self._parameters = state.parameters()
        self._seen = state.monitor.mark()

    def run(self) -> Tensor:
        state, group = self._state, self._group
        state.strategy.start_parts(state.models)
        before = [parameter.grad for parameter in self._parameters]
        # Here, because it may talk to other ranks; and once, because a batch counts once however often it is tried.
        unit = torch.ones(())
        accumulation = state.accumulation
        weighted = self._items is not None
        scaled = accumulation.weighted(group, unit, self._items.total) if self._items else accumulation.scaled(unit)
        random = States.of(group.device)
        while True:
            loss, error = self._attempt(float(scaled))
            everyone = self._exchange(error)
            if not any(ran_out for ran_out, _ in everyone):
                break
            self._drop_gradients()
            state.monitor.forget_since(self._seen)  # a bad loss, and the parts' inputs
            self._shrink(everyone, error, before)
            clear_device_cache(garbage_collection=True)
            random.restore(group.device)
        for parameter, earlier in zip(self._parameters, before, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        state.current_batch.trained()
        if accumulation.sync_gradients:
            state.strategy.average(state.models)
            complete_update(state, weighted)
        if state.monitor.pending:
            state.monitor.report()
        assert loss is not None
        return loss

    def _attempt(self, scale: float) -> tuple[Tensor | None, Exception | None]:
        """The whole batch, or the error that says that memory ran out."""
        self._drop_gradients()  # those of earlier micro-batches are kept apart, so that this one's can be dropped
        try:
            with ExitStack() as stack:
                for model in self._state.models:
                    held = self._state.strategy.no_sync(model)
                    if held is not None:
                        stack.enter_context(held)
                return self._compute(scale), None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            drop_tracebacks(error)
            return None, error

    def _compute(self, scale: float) -> Tensor:
        total = torch.zeros((), device=self._group.device)
        for rows in self._parts():
            share = (rows.stop - rows.start) / self._rows
            part = self._split(self._batch, rows)
            if self._items is not None:
                share = self._items.share(part, rows)
                if not share:
                    continue  # a mean over nothing is no number
            loss = self._compute_loss(part)
            _check_loss(loss)
            total += loss.detach() * share
            loss = self._monitored(loss, rows) * (share * scale)
            if self._state.scaler is not None:
                loss = self._state.scaler.scale(loss)
            loss.backward()
            del loss
        return total

    def _monitored(self, loss: Tensor, rows: slice) -> Tensor:
        """The loss of some rows as ``nan_policy`` wants it for the backward."""
        now = self._state.current_batch.round
        # Rows are samples only where the batch is the loader's.
        part = replace(now, ids=now.ids[rows]) if now and len(now.ids) == self._rows else None
        return self._state.monitor.loss(loss, part)

    def _parts(self) -> Iterator[slice]:
        count = -(-self._rows // (self._state.microbatch_size or self._rows))
        bounds = [self._rows * place // count for place in range(count + 1)]
        return (slice(*pair) for pair in itertools.pairwise(bounds))

    def _exchange(self, error: Exception | None) -> list[tuple[int, int]]:
        """Called on: all ranks. Of each rank whether it ran out, and its rows."""
        mine = torch.tensor([int(error is not None), self._rows], device=self._group.device)
        return [(ran_out, rows) for ran_out, rows in tensors.gather(self._group, mine).view(-1, 2).tolist()]

    def _shrink(
        self, everyone: Sequence[tuple[int, int]], error: Exception | None, before: Sequence[Tensor | None]
    ) -> None:
        """Halve the parts, alike on all ranks; raise on all when they cannot be smaller."""
        largest = max(rows for _, rows in everyone)
        size = min(self._state.microbatch_size or largest, largest)
        ranks = ", ".join(f"rank {rank}" for rank, (ran_out, _) in enumerate(everyone) if ran_out)
        what = f"{ranks} ran out of memory{describe(error)}"
        if size == 1:
            for parameter, earlier in zip(self._parameters, before, strict=True):
                parameter.grad = earlier
            raise OutOfMemory(
                f"auto_microbatch: even parts of 1 sample do not fit: {what}. Use a smaller model, "
                'mixed_precision="bf16", or torch.utils.checkpoint in the model.'
            ) from error
        self._state.microbatch_size = size // 2
        get_notices("lockstep.memory").warning(f"a batch in parts of {size} does not fit: {what}; parts of {size // 2}")

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


# --- weights -----------------------------------------------------------------------------------------------------


class _Items:
    """What a loss is a mean of, in the whole batch and in a part of it."""

    def __init__(self, total: float, count: Callable[[Any, slice], float]) -> None:
        self.total = total
        self._count = count

    def share(self, part: Any, rows: slice) -> float:
        return self._count(part, rows) / self.total if self.total else 0.0


def _counted(state: TrainingState, batch: Any, num_items: Callable[[Any], Any] | None) -> _Items | None:
    if num_items is not None:
        if not callable(num_items):
            raise ConfigError(
                f"auto_microbatch(num_items={num_items!r}): give a function that counts the items of a part, such as "
                "lambda part: part['labels'].ne(-100).sum()."
            )
        count = num_items
        return _Items(float(num_items(batch)), lambda part, _: float(count(part)))
    real = state.items_of_batch()
    if real is None:
        return None
    # Repeated samples stand at the end of a batch.
    return _Items(float(real), lambda _, rows: float(max(0, min(real, rows.stop) - rows.start)))


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise UsageError(
            f"auto_microbatch: compute_loss returned {got}. Return the loss, a mean over the part's samples."
        )


# --- splitting ---------------------------------------------------------------------------------------------------


def split_rows(batch: Any, rows: slice) -> Any:
    """Some rows of a batch: of each tensor that has the batch's first dimension, and of lists of as many samples."""
    size = trees.find_batch_size(batch)
    return _split(batch, rows, size, "")


def _split(tree: Any, rows: slice, size: int | None, path: str) -> Any:
    kind = trees.kind_of(tree)
    if kind == "tensor":
        if tree.ndim == 0:
            return tree
        if tree.shape[0] != size:
            raise UsageError(
                f"auto_microbatch: batch{path} has {tree.shape[0]} rows where the first tensor has {size}. Pass "
                "split=, a function of the batch and a slice of its rows, that says how to split it."
            )
        return tree[rows]
    if kind == "leaf":
        return tree
    if kind == "list" and len(tree) == size and not any(isinstance(leaf, Tensor) for _, leaf in trees.walk_paths(tree)):
        return tree[rows]
    keys, values = trees.parts(tree, kind)
    names = range(keys) if isinstance(keys, int) else keys
    marks = [f".{name}" if kind == "dataclass" else f"[{name!r}]" for name in names]
    parts = [_split(value, rows, size, path + mark) for mark, value in zip(marks, values, strict=True)]
    return trees.rebuild(tree, kind, keys, parts)
