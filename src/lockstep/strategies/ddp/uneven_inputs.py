"""Training on uneven inputs: a rank that has run out of batches keeps the others company until they have, too.

Torch's ``Join`` does the company: when a rank's block ends, it answers each collective that DDP starts on the others,
with zeros for gradients, and at last all ranks take the model of one that ran longest. What is added here:

- The ranks that still train agree in each forward whether its backward averages gradients. By themselves they would
  not: with gradient accumulation, a rank whose loader ends closes its window there, and the others do not.
- Buffers are shared by DDP itself, which knows whom to ask when rank 0 has run out.
- The ranks that ran out have missed updates, so they take the states of optimizers and schedulers over as well;
  or the ranks' next update would be different ones.
- Every wait is one that can be left, or follows one, so that ``agree`` can end a join in which a rank fails.
- Torch leaves its models in join mode; they are taken out of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm.objects import all_objects, broadcast_object_list
from lockstep.comm.tensors import broadcast_leaves
from lockstep.errors import PeerFailure, UsageError
from lockstep.process_group.group import Group
from lockstep.strategies.base import RemembersUpdates
from lockstep.torch_internals import ddp

if TYPE_CHECKING:
    from lockstep.optim.accumulation import Accumulation

_DOING = "training on uneven inputs"


@contextmanager
def joined(
    group: Group,
    models: Sequence[DistributedDataParallel],
    accumulation: Accumulation,
    states: Sequence[RemembersUpdates],
    buffers: str | None,
) -> Iterator[None]:
    """Called on: all ranks. A region in which a rank may have fewer batches than others.

    ``buffers`` is the name of DDP's switch for sharing them by itself; None where it is as it should be.
    """
    presence = _Presence(group, models[0])
    with ExitStack() as undo:
        undo.callback(models[0].register_forward_pre_hook(presence.announce).remove)
        for model in models:
            undo.enter_context(ddp.joining(model, _answers(group, model, accumulation)))
            if buffers is not None:
                _switch(undo, model, buffers, True)
            if model.static_graph:
                # Only there to tell a rank that ran out to answer a collective which a static graph does not have.
                _switch(undo, model, "find_unused_parameters", False)
        _switch(undo, accumulation, "weighted", _refuse_items)
        join = ddp.LeavableJoin([presence, *models], lambda: _reduced(group, models[0], 0, dist.ReduceOp.SUM))
        try:
            yield
            with warnings.catch_warnings():  # torch changes the filters of the whole process
                join.__exit__(None, None, None)
            _catch_up(group, presence.is_last, states)
        except PeerFailure:
            raise
        except RuntimeError as error:
            if group.is_consequence(error):
                raise group.explain(error, _DOING) from None
            raise
    if accumulation.num_steps > 1:
        accumulation.reset()  # ranks may have stopped at different places of their windows


def check_joinables(joinables: Any) -> list[DistributedDataParallel]:
    """The models as a list; raise for one that cannot be joined, saying what to pass."""
    if isinstance(joinables, nn.Module) or not isinstance(joinables, Iterable):
        raise UsageError(
            f"join_uneven_inputs got a {type(joinables).__name__}, not a list. Write join_uneven_inputs([model])."
        )
    items = list(joinables)
    if not items:
        raise UsageError(
            "join_uneven_inputs got an empty list. Pass the prepared models that are trained in the block."
        )
    for place, item in enumerate(items):
        if not isinstance(item, DistributedDataParallel):
            raise UsageError(
                f"join_uneven_inputs cannot join item {place} of its list, a {type(item).__name__}. Pass models as "
                "prepare returned them; those without trainable parameters, or prepared with evaluation_mode=True, "
                "average nothing and are left out. Optimizers follow by themselves."
            )
    return items


def _switch(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until ``undo``."""
    if name in owner.__dict__:
        undo.callback(setattr, owner, name, owner.__dict__[name])
    else:
        undo.callback(delattr, owner, name)  # what the class has shows again
    setattr(owner, name, value)


def _refuse_items(*_: Any) -> Any:
    """What weighting by items is in a join: it adds them up over all ranks, and some may have run out."""
    raise UsageError(
        "backward with num_items, or with reproducible=True, needs all ranks in each update, and in join_uneven_inputs "
        "some may have run out of batches. Train with even_batches=True, or leave out num_items."
    )


# --- which backwards average -------------------------------------------------------------------------------------


def _agreement(
    group: Group, model: DistributedDataParallel, accumulation: Accumulation
) -> Callable[[bool], bool | None]:
    """What DDP calls in each forward of a join, on ranks that train and on those that ran out.

    Torch's own only tells the ranks that ran out whether this backward averages. This one tells everybody.
    """
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]

    def agree(is_joined_rank: bool) -> bool | None:
        if is_joined_rank and model.static_graph and not ddp.knows_static_graph(model):
            raise UsageError(
                f"Rank {group.rank} has no batch for a model with static_graph=True, which has not learned its graph "
                "yet. Give every rank a batch in the first block, or leave out static_graph."
            )
        averages = closes = False
        if not is_joined_rank:
            averages = model.require_backward_grad_sync and torch.is_grad_enabled()
            closes = accumulation.inside and accumulation.sync_gradients
        flags = torch.tensor([averages, closes], dtype=torch.float32, device=model.device)
        group.wait(model.process_group.allreduce([flags], options), _DOING)
        anyone_averages, anyone_closes = (bool(flag) for flag in flags.tolist())
        if is_joined_rank:
            return anyone_averages
        if anyone_averages and not averages and torch.is_grad_enabled():
            model.require_backward_grad_sync = True  # until the end of the no_sync region that said otherwise
            model.reducer.prepare_for_forward()
        if accumulation.inside and accumulation.num_steps > 1:
            _keep_step(accumulation, anyone_closes)
        return None

    return agree


def _answer_unused(group: Group, model: DistributedDataParallel) -> Callable[[], None]:
    """What a rank that ran out calls when the others tell each other which parameters they used.

    Torch's own sends what this rank last received, and goes on without waiting, so that nobody knows of it when the
    group ends.
    """

    def answer() -> None:
        used = ddp.used_map(model).zero_()
        group.wait(model.process_group.allreduce([used], dist.AllreduceOptions()), _DOING)

    return answer


def _keep_step(accumulation: Accumulation, closes: bool) -> None:
    """Make this micro-batch's window the same on all ranks that train.

    Each rank would divide by the micro-batches that its own loader has left. Here nobody knows how many there will
    be, so all divide by a full window, and scale up when it turns out shorter.
    """
    accumulation.divisor = accumulation.num_steps
    if closes:
        if not accumulation.sync_gradients:
            accumulation.step = 0
        accumulation.sync_gradients = True
        accumulation.settled = not accumulation.exact_tail


# --- torch's own collectives, in a way that can be left -----------------------------------------------------------


def _answers(group: Group, model: DistributedDataParallel, accumulation: Accumulation) -> ddp.JoinAnswers:
    """What DDP's join asks and sends, by our waits."""

    def find_common_rank(rank: int, candidate: bool) -> int:
        return _reduced(group, model, rank if candidate else -1, dist.ReduceOp.MAX)

    def send(tensors: Sequence[torch.Tensor], _: int, source: int = 0) -> None:
        broadcast_leaves(group, list(tensors), None, source)

    def sync_final_model(is_last_joiner: bool) -> None:
        source = find_common_rank(group.rank, is_last_joiner)
        shared = model.module.buffers() if model.broadcast_buffers else ()
        send([tensor.detach() for tensor in (*model.module.parameters(), *shared)], 0, source)

    return ddp.JoinAnswers(
        agree=_agreement(group, model, accumulation),
        answer_unused=_answer_unused(group, model),
        find_common_rank=find_common_rank,
        send=send,
        sync_final=sync_final_model,
    )


def _reduced(group: Group, model: DistributedDataParallel, value: int, how: Any) -> int:
    """Called on: all ranks. One number of all ranks."""
    options = dist.AllreduceOptions()
    options.reduceOp = how
    number = torch.tensor([value], device=model.device)
    group.wait(model.process_group.allreduce([number], options), _DOING)
    return int(number)


class _Presence(Joinable, JoinHook):
    """Goes into a join first: tells in each forward that this rank still trains, and learns who did so longest.

    Torch has the first of a join do the telling, and DDP would not wait for it, so that nobody knows of it when the
    group ends.
    """

    def __init__(self, group: Group, first: DistributedDataParallel) -> None:
        super().__init__()
        self._group = group
        self._first = first
        self.is_last = False
        """Whether this rank was one of the last to run out."""

    def announce(self, *_: Any) -> None:
        """Called before each forward of the first model."""
        _reduced(self._group, self._first, 1, dist.ReduceOp.SUM)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Itself."""
        return self

    def post_hook(self, is_last_joiner: bool) -> None:
        """Called when every rank has run out."""
        self.is_last = is_last_joiner

    @property
    def join_device(self) -> torch.device:
        """The same as that of the others in the join."""
        return self._first.join_device

    @property
    def join_process_group(self) -> Any:
        """The same as that of the others in the join."""
        return self._first.join_process_group


# --- at the end --------------------------------------------------------------------------------------------------


def _catch_up(group: Group, is_last: bool, states: Sequence[RemembersUpdates]) -> None:
    """Called on: all ranks. Give the ranks that ran out early the states of one that did not."""
    lasts = all_objects(group, is_last, _DOING)
    if all(lasts) or not states:
        return
    longest = max(rank for rank, last in enumerate(lasts) if last)  # the one whose model torch has sent
    sent = [state.state_dict() for state in states] if group.rank == longest else []
    broadcast_object_list(group, sent, longest)
    if not lasts[group.rank]:
        for state, values in zip(states, sent, strict=True):
            state.load_state_dict(values)
