"""What an accelerator does in a step: a micro-batch, backward, clipping, and a region of uneven inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.optim import clip
from lockstep.optim.optimizer import PreparedOptimizer
from lockstep.optim.unprepared_check import refuse_strangers
from lockstep.training.state import TrainingState


@contextmanager
def accumulate(state: TrainingState, models: Sequence[nn.Module]) -> Iterator[None]:
    """One micro-batch of an accumulation window: its backward averages gradients, or holds them back."""
    accumulation, rates = state.accumulation, None
    if accumulation.inside:
        raise UsageError("accelerator.accumulate() is open already. Pass several models to one: accumulate(a, b).")
    if accumulation.num_steps > 1:
        refuse_strangers(accumulation, state.parameters)
    sync = accumulation.advance()
    accumulation.inside = True
    if not sync:
        rates = state.schedule_check.rates()
    with ExitStack() as held:
        try:
            if not sync and not accumulation.sync_each_batch:
                for model in models:
                    held.enter_context(state.strategy.no_sync(model) or nullcontext())
            yield
            if rates:
                state.schedule_check.compare(rates, accumulation.num_steps)
        finally:
            accumulation.inside = False
            accumulation.leave()


def backward(state: TrainingState, loss: Tensor, num_items: Any, **kwargs: Any) -> None:
    """Called on: all ranks. Backward of a loss that is a mean, scaled for the accumulation window."""
    accumulation, group, batch = state.accumulation, state.group, state.current_batch
    if num_items is None:
        num_items = state.items_of_batch()
    # A mean over nothing is no number, and counts for nothing.
    if isinstance(loss, Tensor) and (num_items is None or num_items):
        loss = state.monitor.loss(loss)
    loss = accumulation.scaled(loss) if num_items is None else accumulation.weighted(group, loss, num_items)
    if state.scaler is not None:
        loss = state.scaler.scale(loss)
    box, clock, iteration = group.box, group.clock, batch.training
    entered = state.strategy.enter_backward(loss, 0 if iteration is None else iteration.turn)
    if entered is not None:
        batch.trained()
    number = -1 if entered is None else entered
    if number < 0:
        box.phase("backward, not averaging")
    began = monotonic()
    try:
        if num_items is not None and not num_items:
            with state.strategy.silenced(state.parameters()):
                loss.backward(**kwargs)
        else:
            loss.backward(**kwargs)
    except RuntimeError as error:
        if group.is_consequence(error):
            raise group.explain(error, "averaging gradients") from None
        raise
    finally:
        if number < 0:
            box.phase("")
        box.leave(number)
    if number > 0 and clock is not None and clock.on:
        clock.backwards.append((began, monotonic()))
    if accumulation.sync_gradients:
        complete_update(state, num_items is not None, counts=entered is not None)
    if state.monitor.pending:
        state.monitor.report()


def complete_update(state: TrainingState, weighted: bool, counts: bool = True) -> None:
    """Called on: all ranks. After the backward that closes a window: bring its gradients to scale.

    Something that one rank trains beside the models does not count as an update: ranks compare their numbers.
    """
    if counts:
        state.updates += 1
        state.group.box.step(state.updates)
    if weighted:
        state.accumulation.divide_by_items(state.group, state.parameters())
    elif not state.accumulation.settled:
        state.accumulation.rescale_gradients(state.parameters())
    if state.on_update is not None:
        state.on_update()


def unscale_gradients(state: TrainingState, optimizer: Any = None) -> None:
    """Take fp16's loss scale out of the gradients; nothing in other precisions."""
    if state.scaler is None or not state.accumulation.sync_gradients:
        return
    chosen = state.optimizers if optimizer is None else optimizer
    for item in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
        state.scaler.unscale(item.optimizer if isinstance(item, PreparedOptimizer) else item)


def clip_norm(state: TrainingState, parameters: Any, max_norm: float, norm_type: float) -> Tensor:
    """Clip the norm of the gradients and give it as it was; nothing is clipped while an update is not due."""
    chosen = _to_clip(state, parameters)
    due = state.accumulation.sync_gradients
    scale = 1.0 if due or state.scaler is None else state.scaler.current()
    norm = clip.clip_norm(
        chosen,
        max_norm,
        norm_type,
        grad_norm=state.strategy.grad_norm,
        due=due,
        scale=scale,
        sparing=state.monitor.spares,
    )
    if due:
        state.monitor.norm(norm, chosen)
    return norm


def clip_value(state: TrainingState, parameters: Any, value: float) -> None:
    """Clip each gradient value; nothing is clipped while an update is not due."""
    chosen = _to_clip(state, parameters)
    if state.accumulation.sync_gradients:
        torch.nn.utils.clip_grad_value_(chosen, value)


def _to_clip(state: TrainingState, parameters: Any) -> list[Tensor]:
    """The parameters, unscaled by way of their optimizers: another one's gradients may not be complete yet."""
    chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if state.scaler is not None:
        wanted = {id(parameter) for parameter in chosen}
        owners = [item for item in state.optimizers if any(id(owned) in wanted for owned in item.parameters())]
        unscale_gradients(state, owners)
    return chosen


@contextmanager
def join_uneven_inputs(state: TrainingState, joinables: Iterable[Any], even_batches: bool | None) -> Iterator[None]:
    """Called on: all ranks. A region in which each rank may train these models on as many batches as it has."""
    loaders = [] if even_batches is None else [(loader, loader.even_batches) for loader in state.loaders]
    try:
        for loader, _ in loaders:
            loader.even_batches = bool(even_batches)
        updated = (*state.optimizers, *state.schedulers, *(() if state.scaler is None else (state.torch_scaler,)))
        with nullcontext() if even_batches else state.strategy.join(joinables, state.accumulation, updated):
            yield
    finally:
        for loader, before in loaders:
            loader.even_batches = before
