"""Data parallel over several processes, by torch's DistributedDataParallel."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lockstep.comm import trees
from lockstep.comm.objects import all_objects
from lockstep.comm.tensors import broadcast_leaves
from lockstep.config.choices import DDPCommunicationHookType
from lockstep.config.handlers import DistributedDataParallelKwargs
from lockstep.config.settings import Settings
from lockstep.errors import DistributedOperationException, UsageError
from lockstep.process_group.group import Group
from lockstep.strategies.base import RemembersUpdates, Strategy
from lockstep.strategies.ddp.grad_allreduce import average_gradients
from lockstep.strategies.ddp.module import BUFFER_OPTION, Note
from lockstep.strategies.ddp.module import DistributedDataParallel as Replica
from lockstep.strategies.ddp.reductions import Reductions
from lockstep.strategies.ddp.trained_parameters import TrainedParameters
from lockstep.strategies.ddp.uneven_inputs import check_joinables, joined
from lockstep.topology.topology import Topology
from lockstep.torch_internals import autograd, ddp
from lockstep.torch_internals.compiler import untraced
from lockstep.torch_internals.ddp import has_hook, is_in_join
from lockstep.torch_internals.flight_recorder import allow_stacks

if TYPE_CHECKING:
    from lockstep.optim.accumulation import Accumulation

_SYNC_BYTES = 32 << 20
"""Parameters are sent from rank 0 in pieces of about this size."""


class DDP(Strategy):
    """Each process holds the whole model; gradients are averaged during backward."""

    def __init__(self, topology: Topology, group: Group, settings: Settings) -> None:
        super().__init__(topology, group)
        self._options = options = settings.handler(DistributedDataParallelKwargs)
        self._wrapped: WeakSet[Replica] = WeakSet()
        self._reductions = Reductions(group)
        # DDP's exchange of used parameters may be pending in what a failed backward left: that then holds the group's
        # last reference, and its end would wait for threads that wait for the GIL.
        group.keeps_old_groups = group.keeps_old_groups or options.find_unused_parameters

    @classmethod
    def reason(cls, topology: Topology) -> str:
        """What it does and why it is chosen for such a job, in a line."""
        return f"{topology.world_size} processes, so DDP averages gradients over {topology.backend}"

    def wrap(self, model: nn.Module) -> nn.Module:
        """Called on: all ranks. The model, with rank 0's weights, averaging its gradients over all ranks."""
        # Nothing to average, and torch would refuse a model without a parameter to train.
        if isinstance(model, DistributedDataParallel) or not any(item.requires_grad for item in model.parameters()):
            self._reductions.add_other(model)
            return model
        _refuse_sharded(model)
        _check_same_model(self._group, model)
        options = self._options
        on_host = self._topology.device.type == "cpu"
        buffers: dict[str, Any] = {BUFFER_OPTION: options.broadcast_buffers and not on_host}
        _send_weights(self._group, model, options.broadcast_buffers)
        wrapped = Replica(
            model,
            self._reductions.new(),
            TrainedParameters(
                model,
                ddp.ignored_parameters(model),
                waits=options.static_graph or not options.find_unused_parameters,
                learns=options.static_graph,
            ),
            device_ids=None if on_host else [self._topology.device],
            process_group=self._group.pg,
            init_sync=False,  # done above, in a way that can be left and that names what differs
            dim=options.dim,
            **buffers,
            bucket_cap_mb=options.bucket_cap_mb,
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
        )
        allow_stacks()  # cheap here, as DDP has loaded the compiler
        self._wrapped.add(wrapped)
        self._reductions.add(wrapped)
        self._hook(wrapped)
        if on_host and not has_hook(wrapped):
            self._barrier_after_backward(wrapped)
        if on_host and options.broadcast_buffers and next(model.buffers(), None) is not None:
            wrapped.share_buffers_with(self._share_buffers)
        return wrapped

    def fits(self, model: nn.Module) -> bool:
        """Whether a prepared model is still trained as it was when it was prepared."""
        return self._reductions.fits(model)

    def replaced(self, model: nn.Module) -> None:
        """Note that the model inside this wrapper was prepared again."""
        self._reductions.replaced(model)

    def enter_backward(self, loss: Any, batch: int) -> int | None:
        """Note that a backward begins, if it reduces gradients; so many steps of optimizers must have come before."""
        return self._reductions.enter(loss, batch)

    def stepped(self, optimizer: Any) -> None:
        """Count a step."""
        self._reductions.stepped(optimizer)

    def checksums(self) -> tuple[list[str], bytes]:
        """Names and checksums of the parameters that must be the same on all ranks."""
        return self._reductions.names(), self._reductions.checksums()

    def restart(self) -> None:
        """Called on: all ranks. Count anew: all have the same weights now."""
        self._reductions.restart()

    def _share_buffers(self, wrapped: nn.Module) -> None:
        """Give every rank rank 0's buffers before a forward, when DDP would, but in a way that can be left."""
        if torch.compiler.is_compiling():
            untraced(self._share_buffers, wrapped)
        elif wrapped.require_forward_param_sync and not is_in_join(wrapped):
            leaves, signature = trees.flatten(list(wrapped.module.buffers()))  # type: ignore[union-attr]
            self._group.check("sharing buffers")
            number = self._group.box.enter("sharing buffers", signature, 2)
            try:
                broadcast_leaves(self._group, leaves, signature)
            finally:
                self._group.box.leave(number)

    def _hook(self, wrapped: DistributedDataParallel, armed: bool = False) -> None:
        """Have the gradients travel as the options ask, and on CPU, once failures are survived, so that it can be left.

        A hook in Python costs about 2 % of a step of 2 ms. A job that only ever fails as a whole does not pay that: its
        sockets are shut, and should gloo miss it (it does, at times, while data is moving), its processes are ended.
        """
        hook, state = _compression(self._group, self._options)
        if isinstance(wrapped, Replica):  # a script's own DDP can be joined, and is not prepared
            wrapped.barrier_at_next_forward(None)  # what was planned in the generation before
        if self._topology.device.type == "cpu" and (armed or self._group.recovery_enabled or hook is not None):
            reference = weakref.ref(wrapped)  # torch would never let go of a model that its own hook holds
            average = _averaging(
                self._group,
                wrapped,
                hook,
                state,
                lambda: self._barrier_once(reference()),
                (lambda: self._barrier_after_used_map(reference())) if self._options.find_unused_parameters else None,
                delayed=self._options.static_graph,
            )
            wrapped.register_comm_hook(None, average)
        elif hook is not None:
            wrapped.register_comm_hook(state, hook)

    def enable_recovery(self) -> None:
        """From now on a failure is to be survived: have each backward wait in a way that can be left."""
        for wrapped in self._wrapped:
            if not has_hook(wrapped):
                self._hook(wrapped)

    def _barrier_after_backward(self, wrapped: Replica) -> None:
        """Have all ranks meet once after the first backward that averages; with a hook, that sees to it."""
        reference = weakref.ref(wrapped)

        def arrived(_: Tensor) -> None:
            model = reference()
            if model is None or has_hook(model):
                handle.remove()
            elif model.require_backward_grad_sync:
                handle.remove()
                self._barrier_once(model)

        parameter = next(parameter for parameter in wrapped.parameters() if parameter.requires_grad)
        handle = parameter.register_post_accumulate_grad_hook(arrived)

    def _barrier_once(self, wrapped: DistributedDataParallel | None) -> None:
        """Have all ranks meet around what DDP does before the next forward.

        In the forward after the first backward DDP lets the ranks agree on new buckets, in a call that cannot be left
        for certain. So each rank first sees, in a way that can, that the others are there; and none goes on to the
        model, in which it can fail, before all have come out of it.
        """
        # Then DDP keeps its first buckets.
        kept = self._options.find_unused_parameters and not self._options.static_graph
        if isinstance(wrapped, Replica) and not kept:
            wrapped.barrier_at_next_forward(self._group.barrier)

    def _barrier_after_used_map(self, wrapped: DistributedDataParallel | None) -> None:
        """Have all ranks meet after DDP has exchanged which parameters were used.

        It waits for that in a call that cannot be left for certain. So no rank goes on, and can fail, before all have
        come out of it; one that fails earlier leaves the others in an averaging, which can be left.
        """
        if wrapped is not None and not is_in_join(wrapped):
            self._group.barrier()

    def note_forwards(self, model: nn.Module, note: Note) -> RemovableHandle | None:
        """Have a trained model's forwards noted; elsewhere than on the host only the model sees where inputs go."""
        on_host = self._topology.device.type == "cpu"
        return model.note_forwards(note) if on_host and isinstance(model, Replica) else None

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None] | None:
        """A region in which backward leaves the gradients on this rank; None where there is nothing to hold back."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else None

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's model."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    @contextmanager
    def forced_sync(self, model: nn.Module) -> Iterator[None]:
        """A region whose backward averages gradients even if its forwards ran without."""
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        # The reducer must be told, or it ignores the backward of a forward that ran under no_sync.
        model.reducer.prepare_for_backward([])
        if isinstance(model, Replica):
            model.reduction.expected = True
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    @contextmanager
    def join(self, joinables: Any, accumulation: Accumulation, states: Sequence[RemembersUpdates]) -> Iterator[None]:
        """Called on: all ranks. A region in which a rank may have fewer batches than others; see ``joining``."""
        items = check_joinables(joinables)
        if any(is_in_join(item) for item in items):
            raise UsageError("join_uneven_inputs is open already for this model. Pass several models to one block.")
        on_host = self._topology.device.type == "cpu"
        for item in items:
            # A rank that is out of batches runs no backward: what follows the first one must not depend on that.
            if on_host and isinstance(item, DistributedDataParallel) and not has_hook(item):
                self._hook(item, armed=True)
        buffers = BUFFER_OPTION if on_host and self._options.broadcast_buffers else None
        # Inside, ranks may do different numbers of things: all of it counts as one.
        number = self._group.box.enter("join_uneven_inputs", None, 2)
        self._reductions.uneven = True
        try:
            with joined(self._group, items, accumulation, states, buffers):
                yield
        finally:
            self._group.box.leave(number)
            self._reductions.restart()  # a rank that ran out of batches has made fewer steps, and has the same weights

    def start_parts(self, models: Sequence[nn.Module]) -> None:
        """Called on: all ranks. Refuse what cannot be computed apart; share buffers, as a forward would."""
        for wrapped in models:
            if not isinstance(wrapped, DistributedDataParallel):
                continue
            if self._options.comm_hook is not DDPCommunicationHookType.NO:
                raise UsageError(
                    f"auto_microbatch averages gradients as they are, and comm_hook={self._options.comm_hook} asks for "
                    "compressed ones. Leave the hook out, or use find_executable_batch_size."
                )
            if is_in_join(wrapped):
                raise UsageError("auto_microbatch does not go with join_uneven_inputs: use even_batches=True.")
            if any(isinstance(module, nn.SyncBatchNorm) for module in wrapped.modules()):
                raise UsageError(
                    "auto_microbatch computes each part alone, and SyncBatchNorm needs all ranks in every part. Use a "
                    "norm over each sample (LayerNorm, GroupNorm), or find_executable_batch_size."
                )
            if self._topology.device.type != "cpu":
                ddp.share_buffers(wrapped)
            elif self._options.broadcast_buffers and next(wrapped.module.buffers(), None) is not None:
                self._share_buffers(wrapped)

    def average(self, models: Sequence[nn.Module]) -> None:
        """Called on: all ranks. Average the gradients that backwards under ``no_sync`` have left."""
        wrapped = [model for model in models if isinstance(model, DistributedDataParallel)]
        trained = (parameter for model in wrapped for parameter in model.parameters() if parameter.requires_grad)
        average_gradients(self._group, list({id(parameter): parameter for parameter in trained}.values()))
        self._reductions.reduced(wrapped)

    def reattach(self, model: nn.Module) -> None:
        """Point the model at the group's new generation.

        Its buckets are the first ones again: a failure can reach some ranks before and others after DDP has rebuilt
        theirs.
        """
        if isinstance(model, DistributedDataParallel):
            ddp.remake_reducer(model, self._group.pg)
            self._hook(model)

    def detach(self, model: nn.Module) -> None:
        """Have a model that is trained no more let go of the group's old generation, as ``reattach`` does."""
        if isinstance(model, DistributedDataParallel):
            ddp.use_group(model, self._group.pg)


# --- gradients on their way --------------------------------------------------------------------------------------

Hook = Callable[[Any, Any], torch.futures.Future[Any]]


def _averaging(
    group: Group,
    wrapped: DistributedDataParallel,
    hook: Hook | None,
    state: Any,
    at_first: Callable[[], None],
    at_last: Callable[[], None] | None,
    *,
    delayed: bool,
) -> Hook:
    """A hook whose all-reduces are waited for by us, so that a backward that waits for a failed rank can be left.

    DDP gets a future per bucket and waits for it at the end of backward. Just before that, in the same thread, the
    autograd engine calls ``finish``, which waits in a way that can be left, and completes the futures. Where
    it does not, ``finish`` follows the last bucket: a rank that has run out of batches calls the hook without a
    backward, and with ``delayed``, a static graph, DDP does not return to the engine before it waits. ``at_last`` is
    called when DDP has done its own waiting.
    """
    share = 1.0 / group.world_size
    options = dist.AllreduceOptions()
    under_way: list[Any] = []
    promised: list[tuple[torch.futures.Future[Any], Any]] = []
    group.track_works(wrapped, under_way)
    first = True
    at_end = True

    def average(_: Any, bucket: Any) -> torch.futures.Future[Any]:
        nonlocal first, at_end
        if bucket.index() == 0:
            group.check("averaging gradients")
            if first:
                first = False
                at_first()
            clear()  # what a backward that was broken off has left
            at_end = autograd.backward_number() != -1 and not delayed
            if at_end:
                autograd.at_end_of_backward(finish)
        promise = autograd.new_future()
        if hook is None:
            buffer = bucket.buffer().mul_(share)  # as DDP itself does, to the bit
            under_way.append(group.backends[buffer.device].allreduce([buffer], options))
            promised.append((promise, buffer))
        else:
            under_way.append(FutureWork(hook(state, bucket)))
            promised.append((promise, None))
        if not at_end and bucket.is_last():
            finish()
        return promise

    def finish() -> None:
        for work, (promise, buffer) in zip(under_way, promised, strict=True):
            group.wait(work, "averaging gradients")
            promise.set_result(work.value() if buffer is None else buffer)
        under_way.clear()
        promised.clear()
        if at_end and at_last is not None:
            autograd.at_end_of_backward(at_last)  # behind DDP's own, which stands in the queue by now

    def clear() -> None:
        if promised:
            group.abandon(under_way)
            under_way.clear()
            promised.clear()

    average.__annotations__.clear()  # torch compares annotations with types, and ours are texts
    return average


class FutureWork:
    """A compression hook's future, to be waited for as a collective is."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self._future = future
        self._done = threading.Event()
        future.add_done_callback(lambda _: self._done.set())

    def wait(self, patience: timedelta) -> None:
        """Wait so long at most; raise when it took longer, or when the collective failed."""
        if not self._done.wait(patience.total_seconds()):
            raise RuntimeError("timed out")
        self._future.value()

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._done.is_set()

    def value(self) -> Any:
        """What the hook made of the bucket."""
        return self._future.value()


def _compression(group: Group, options: DistributedDataParallelKwargs) -> tuple[Hook | None, Any]:
    """The hook that compresses gradients as the options ask, and its state."""
    if options.comm_hook is DDPCommunicationHookType.NO:
        return None, None
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    hooks: dict[DDPCommunicationHookType, Any] = {
        DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
        DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
        DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
        DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers: dict[DDPCommunicationHookType, Any] = {
        DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
        DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
    }
    hook = hooks[options.comm_hook]
    if options.comm_wrapper is not DDPCommunicationHookType.NO:
        hook = wrappers[options.comm_wrapper](hook)
    powered = options.comm_hook in (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)
    state = powerSGD_hook.PowerSGDState(process_group=None, **options.comm_state_option) if powered else None
    return hook, state


# --- one model on all ranks --------------------------------------------------------------------------------------


def _refuse_sharded(model: nn.Module) -> None:
    """Raise for a model that is divided between the ranks already: torch would mix its tensors with plain ones."""
    tensor = sys.modules.get("torch.distributed.tensor")  # nobody has such a parameter who has not loaded it
    sharded = [name for name, item in model.named_parameters() if tensor and isinstance(item, tensor.DTensor)]
    if sharded:
        raise UsageError(
            f"prepare() got a {type(model).__name__} that is sharded already: {sharded[0]} is a DTensor, as "
            "fully_shard and parallelize_module make them. This release trains models that each process holds whole: "
            "pass the model before it is sharded, or train it without prepare()."
        )


def _check_same_model(group: Group, model: nn.Module) -> None:
    """Called on: all ranks. Raise on all when the ranks' models differ, naming the first difference."""
    mine = [(name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in _tensors(model)]
    everyone = all_objects(group, mine, "comparing models")
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        ours = next((pair for pair in zip(everyone[0], theirs, strict=False) if pair[0] != pair[1]), None)
        if ours is None:
            what = f"rank 0 has {len(everyone[0])} parameters and buffers, rank {rank} has {len(theirs)}"
        else:
            here, there = (_spell(*item, frozen=ours[0][:3] == ours[1][:3]) for item in ours)
            what = f"rank 0 has {here}, rank {rank} has {there}"
        raise DistributedOperationException(
            f"The model passed to prepare differs between ranks: {what}. Build the same model on every rank."
        )


def _spell(name: str, shape: tuple[int, ...], dtype: str, trained: bool, *, frozen: bool) -> str:
    """A tensor in words; ``frozen``: say whether it is, as the ranks' differ in nothing else."""
    return f"{name} {list(shape)} {dtype}" + ((", trained" if trained else ", frozen") if frozen else "")


def _send_weights(group: Group, model: nn.Module, buffers: bool) -> None:
    """Called on: all ranks. Give every rank rank 0's parameters, and its buffers unless they are each rank's own."""
    batch: list[Tensor] = []
    size = 0
    for tensor in [*model.parameters(), *(model.buffers() if buffers else ())]:
        batch.append(tensor.detach())
        size += tensor.numel() * tensor.element_size()
        if size >= _SYNC_BYTES:
            broadcast_leaves(group, batch, None)
            batch, size = [], 0
    if batch:
        broadcast_leaves(group, batch, None)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
