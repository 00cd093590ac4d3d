"""The report of an out-of-memory error that ends a rank: the request, what was free, what is large, what helps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import current
from lockstep.config.choices import PrecisionType
from lockstep.config.sizes import in_words
from lockstep.errors import OutOfMemory, PeerFailure
from lockstep.memory.oom_detect import is_out_of_memory, requested_bytes, root_of
from lockstep.rundir.crash_report import Advice, line_of
from lockstep.topology.memory import free_device_memory, free_host_memory
from lockstep.training.state import TrainingState

_SHOWN = 5
"""How many of the largest tensors are listed."""
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True)
class _Large:
    size: int
    what: str


@dataclass(frozen=True)
class _Kept:
    """What the prepared models keep, in bytes."""

    weights: int
    gradients: int
    states: int


def advise(error: BaseException) -> Advice | None:
    """What is known of an error that ends this rank; None when it is no lack of memory of its own."""
    return report(error, current.peek())


def report(error: BaseException, session: current.Session | None) -> Advice | None:
    """The same in a session; None where nobody has joined a job yet."""
    if not is_out_of_memory(error) or isinstance(root_of(error), PeerFailure):
        return None
    state = None if session is None else session.training
    if isinstance(error, OutOfMemory) and (state is None or not state.models):
        return None  # a search that has ended: what it held is freed, and its own text has what to do and the result
    device = torch.device("cpu") if session is None else session.topology.device
    root = root_of(error)
    on_host = device.type == "cpu" or isinstance(root, (MemoryError, OSError)) or "CPUAllocator" in str(root)
    kept = _Kept(0, 0, 0)
    large: list[_Large] = []
    if state is not None:
        kept, large = _modules(state)
        mine = {id(parameter) for parameter in state.parameters()}
        large += _variables(error, mine)
    rank = 0 if session is None else session.topology.rank
    asked = requested_bytes(error)
    free = free_host_memory() if on_host else free_device_memory(device)
    where = line_of(error).removesuffix(" in <module>")
    lead = (
        f"Out of memory on rank {rank} ({'host' if on_host else device}){f' at {where}' if where else ''}: "
        + (f"tried to allocate {in_words(asked)}" if asked else "the size of the request is not known")
        + (f", {in_words(free)} free." if free is not None else ".")
    )
    largest = sorted(large, key=lambda item: -item.size)[:_SHOWN]
    details = ["Largest tensors that Python can see (what autograd keeps for backward is not among them):"]
    details += [f"  {in_words(item.size):>10}  {item.what}" for item in largest]
    remedies = list(_remedies(error, state, kept, on_host, large))[:2]
    fix = [f"{number}. {text}" for number, text in enumerate(remedies, 1)]
    return Advice(lead=lead, details="\n".join(details) if large else "", fix="\n".join(fix))


# --- what is large -----------------------------------------------------------------------------------------------


def _modules(training: TrainingState) -> tuple[_Kept, list[_Large]]:
    """What the modules of the prepared models keep: weights, gradients, the optimizer's state."""
    states: dict[int, int] = {}
    for optimizer in training.optimizers:
        for parameter, state in optimizer.state.items():
            states[id(parameter)] = sum(_bytes(value) for value in state.values() if isinstance(value, Tensor))
    found, totals = [], [0, 0, 0]
    for model in training.models:
        plain = training.strategy.unwrap(model)
        for name, module in plain.named_modules():
            sizes = _own(module, states)
            if sum(sizes):
                parts = [f"{label} {in_words(size)}" for label, size in zip(_LABELS, sizes, strict=True) if size]
                found.append(_Large(sum(sizes), f"{name or type(plain).__name__} ({', '.join(parts)})"))
                totals = [total + size for total, size in zip(totals, sizes, strict=True)]
    return _Kept(*totals), found


_LABELS = ("weights", "gradients", "optimizer")


def _own(module: nn.Module, states: dict[int, int]) -> tuple[int, int, int]:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    gradients = sum(_bytes(item.grad) for item in own if item.grad is not None)
    return sum(map(_bytes, own)), gradients, sum(states.get(id(item), 0) for item in own)


def _variables(error: BaseException, parameters: set[int]) -> list[_Large]:
    """Tensors in the variables of the functions that the error came through."""
    found: dict[int, _Large] = {}
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename.startswith(_OURS):
            trace = trace.tb_next
            continue
        owner = trace.tb_frame.f_locals.get("self")
        place = f"{type(owner).__name__}.{code.co_name}" if isinstance(owner, nn.Module) else code.co_name
        for name, value in trace.tb_frame.f_locals.items():
            for path, tensor in _tensors(name, value):
                if id(tensor) not in parameters and tensor.device.type != "meta":
                    shape = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
                    where = f"{os.path.basename(code.co_filename)}:{trace.tb_lineno}"
                    what = f"{path} {shape}, in {place} ({where})"
                    found.setdefault(tensor.untyped_storage().data_ptr(), _Large(_bytes(tensor), what))
        trace = trace.tb_next
    return list(found.values())


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif type(value) in (list, tuple):
        yield from ((f"{name}[{place}]", item) for place, item in enumerate(value) if isinstance(item, Tensor))
    elif type(value) is dict:
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items() if isinstance(item, Tensor))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# --- what would help ---------------------------------------------------------------------------------------------


def _remedies(
    error: BaseException, state: TrainingState | None, kept: _Kept, on_host: bool, large: list[_Large]
) -> Iterator[str]:
    """What to do about it in this run, the most useful first."""
    text = str(root_of(error))
    if "reserved by PyTorch but unallocated" in text and "expandable_segments" in text:
        yield "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: memory is reserved in pieces too small for this."
    models = [] if state is None else state.models
    if models and not any(model.training for model in models) and _builds_graph(error):
        yield "Evaluate under torch.no_grad(): the models are in eval mode, and yet a graph for backward is kept."
    if "DataLoader worker" in text or _is_in_traceback(error, os.path.join("utils", "data")):
        yield "Memory ran out while data was read: use fewer num_workers, or a smaller prefetch_factor or batch."
    batch = _batch_size(state)
    if state is not None and batch is not None and batch > 1:
        steps = state.accumulation.num_steps
        yield (
            f"Halve the batch and accumulate twice as often, which makes the same updates: batch_size={batch // 2}, "
            f"gradient_accumulation_steps={steps * 2}. find_executable_batch_size(keep_effective_batch=True) and "
            "accelerator.auto_microbatch find a size that fits."
        )
    if kept.states > kept.weights and kept.states >= (requested_bytes(error) or 0) / 4:
        yield (
            f"Take an optimizer with a smaller state: it keeps {in_words(kept.states)} beside {in_words(kept.weights)} "
            "of weights (SGD with momentum keeps as much as the weights, Adafactor far less)."
        )
    if not models:
        yield "The model has not been prepared yet: load it in half precision, or take a smaller one."
    if state is not None and state.precision.mode is PrecisionType.NO:
        yield 'Compute in half precision, which about halves the activations: Accelerator(mixed_precision="bf16").'
    if on_host and state is not None and state.topology.world_size > 1:
        yield f"Start fewer than {state.topology.world_size} processes: each has a copy of the model in host memory."
    yield "Compute activations again in backward instead of keeping them: torch.utils.checkpoint in the largest blocks."
    yield "Take a smaller model."


def _batch_size(state: TrainingState | None) -> int | None:
    """That of the first loader; the one that was iterated has been left by the error."""
    if state is None or not state.loaders:
        return None
    total = state.loaders[0].total_batch_size
    return total // state.topology.world_size if total else None


def _builds_graph(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if any(isinstance(value, Tensor) and value.grad_fn is not None for value in trace.tb_frame.f_locals.values()):
            return True
        trace = trace.tb_next
    return False


def _is_in_traceback(error: BaseException, folder: str) -> bool:
    trace = error.__traceback__
    while trace is not None:
        if (
            folder in trace.tb_frame.f_code.co_filename
            and f"{os.sep}torch{os.sep}" in trace.tb_frame.f_code.co_filename
        ):
            return True
        trace = trace.tb_next
    return False
