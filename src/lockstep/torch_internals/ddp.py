"""DistributedDataParallel and Join."""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from lockstep.torch_internals.compiler import untraced


def ignored_parameters(model: nn.Module) -> Collection[str]:
    """Names of parameters and buffers that DDP was told to leave alone.

    Needs ``_ddp_params_and_buffers_to_ignore``, which torch's public setter leaves on the model; 2.9 to 2.13. Without
    it: these parameters are reported as trained without being averaged.
    """
    return getattr(model, "_ddp_params_and_buffers_to_ignore", ())


def has_hook(model: DistributedDataParallel) -> bool:
    """Whether a communication hook was registered, of which DDP takes one only.

    Needs ``DistributedDataParallel._comm_hooks``; 2.9 to 2.13. Without it: our wrapper would have to count, and a hook
    that a script registers on its own would be refused by torch when ours comes second.
    """
    return bool(model._comm_hooks)


def is_in_join(model: Any) -> bool:
    """Whether some ranks may have run out of batches, and take part only in what torch's ``Join`` answers for them.

    Needs ``Joinable._join_config``; 2.9 to 2.13. Without it: our own flag, blind to a script that uses ``Join`` itself.
    """
    return bool(model._join_config.enable)


def share_buffers(model: DistributedDataParallel) -> None:
    """Called on: all ranks. Give every rank rank 0's buffers, where DDP would before a forward.

    Needs ``_check_sync_bufs_pre_fwd`` and ``_sync_buffers``; 2.9 to 2.13. Without them: with ``auto_microbatch`` on an
    accelerator each rank keeps its own statistics of batch norms.
    """
    if model._check_sync_bufs_pre_fwd():
        model._sync_buffers()


def knows_static_graph(model: DistributedDataParallel) -> bool:
    """Whether a model with ``static_graph=True`` has learned its graph.

    Needs ``_static_graph_delay_allreduce_enqueued``; 2.9 to 2.13. Without it: a rank that has no first batch in a join
    hangs instead of raising.
    """
    return bool(model._static_graph_delay_allreduce_enqueued)


def use_group(model: DistributedDataParallel, group: Any) -> None:
    """Have a model let go of its process group for another. Its buckets stay.

    Needs ``_update_process_group``, made for torch's own fault tolerance; 2.9 to 2.13. Without it: after a recovery
    models have to be prepared again.
    """
    model._update_process_group(group)


def remake_reducer(model: DistributedDataParallel, group: Any) -> None:
    """Point a model at another process group, and have it begin with its first buckets again, without a hook.

    A failure can reach some ranks before and others after DDP has rebuilt its buckets, and with ``use_group`` alone the
    ranks would add up different ones. Needs ``_update_process_group``, ``_remove_autograd_hooks``, ``_comm_hooks``,
    ``_static_graph_delay_allreduce_enqueued``, and a ``__setstate__`` that makes the reducer, as unpickling does, in
    the default group; 2.9 to 2.13. Without it: after a recovery models have to be prepared again.
    """
    # First: it lets go of the old group without the GIL. The old reducer's end would do so with it, and wait for
    # the group's threads, which may be waiting for the GIL.
    model._update_process_group(group)
    model._remove_autograd_hooks()
    model._comm_hooks.clear()
    model._static_graph_delay_allreduce_enqueued = False  # the new reducer has yet to learn the graph
    model.__setstate__(model.__getstate__())


def around_pre_forward(model: DistributedDataParallel, meet: Callable[[], None] | None) -> None:
    """Call this before and after what DDP does ahead of the next forward that is trained on; None: do not any more.

    Needs ``_pre_forward``; 2.9 to 2.13. Without it: a rank that fails just when the others agree on new buckets leaves
    them in a call that ends with its timeout.
    """
    model.__dict__.pop("_pre_forward", None)
    if meet is None:
        return
    reference = weakref.ref(model)

    def around(*inputs: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return untraced(around, *inputs, **kwargs)
        model = reference()
        assert model is not None
        # In a join some ranks may run no forward any more. There it waits for the first one after it.
        if not torch.is_grad_enabled() or is_in_join(model):
            return type(model)._pre_forward(model, *inputs, **kwargs)
        model.__dict__.pop("_pre_forward", None)
        meet()
        made = model._pre_forward(*inputs, **kwargs)
        meet()
        return made

    model.__dict__["_pre_forward"] = around  # in place of the method, and not around it: this is for one call


def reduce_as_torchs(model: DistributedDataParallel, without: Collection[str], **changes: Any) -> tuple[Any, ...]:
    """What ``__reduce_ex__`` of a subclass gives, so that a copy is torch's own class, without these attributes.

    Needs ``_comm_hooks`` and ``_pre_forward``; 2.9 to 2.13. Without it: a model that was saved whole can be loaded only
    where Lockstep is installed.
    """
    state = {name: value for name, value in model.__getstate__().items() if name not in (*without, "_pre_forward")}
    state["_comm_hooks"] = []  # they belong to the reducer, and a copy makes its own
    return copyreg._reconstructor, (DistributedDataParallel, object, None), {**state, **changes}  # type: ignore[attr-defined]


# --- joining ------------------------------------------------------------------------------------------------------


def used_map(model: DistributedDataParallel) -> Tensor:
    """Which parameters this rank has used, as DDP adds them up over the ranks.

    Needs ``Reducer._get_local_used_map``; 2.9 to 2.13. Without it: no join with ``find_unused_parameters``.
    """
    return model.reducer._get_local_used_map()


@dataclass(frozen=True, kw_only=True)
class JoinAnswers:
    """What DDP calls in a join, in place of methods of its own whose waits cannot be left; arguments have its names."""

    agree: Callable[[bool], bool | None]
    """In each forward, on all ranks: whether its backward averages. ``is_joined_rank``: this rank has run out."""
    answer_unused: Callable[[], None]
    """On a rank that ran out, when the others add up which parameters they used."""
    find_common_rank: Callable[[int, bool], int]
    """The highest rank of those that are candidates."""
    send: Callable[[Sequence[Tensor], int, int], None]
    """Tensors, size of a bucket, from which rank."""
    sync_final: Callable[[bool], None]
    """At the end: give all ranks the model of one that ran longest."""


@contextmanager
def joining(model: DistributedDataParallel, answers: JoinAnswers) -> Iterator[None]:
    """A region of a join in which DDP asks these; at its end the model is out of join mode, in which torch leaves it.

    Needs ``_join_config``, ``_check_global_requires_backward_grad_sync``, ``_match_unused_params_allreduce``,
    ``_find_common_rank``, ``_distributed_broadcast_coalesced`` and ``_sync_final_model``; 2.9 to 2.13. Without them: a
    rank that fails in a join leaves the others in a collective, and after accumulation uneven ranks do not agree.
    """
    own = {
        "_check_global_requires_backward_grad_sync": answers.agree,
        "_match_unused_params_allreduce": answers.answer_unused,
        "_find_common_rank": answers.find_common_rank,
        "_distributed_broadcast_coalesced": answers.send,
        "_sync_final_model": answers.sync_final,
    }
    config = model._join_config
    model.__dict__.update(own)
    try:
        yield
    finally:
        for name in own:
            del model.__dict__[name]
        model._join_config = config


class LeavableJoin(Join):
    """Torch's, with ``count`` to ask how many ranks still train.

    Needs ``Join._get_num_nonjoined_procs``; 2.9 to 2.13. Without it: a rank that has run out of batches waits for one
    that failed until the timeout.
    """

    def __init__(self, joinables: list[Joinable], count: Callable[[], int]) -> None:
        super().__init__(joinables)
        self._count = count

    def _get_num_nonjoined_procs(self) -> int:
        return self._count()
