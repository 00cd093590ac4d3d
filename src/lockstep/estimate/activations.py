"""``estimate_memory``: what training a model on a batch takes, found out by one forward and one backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.estimate.fake_params import copies, no_data, stand_ins
from lockstep.estimate.memory_tracker import TEMPORARY, MemoryTracker
from lockstep.estimate.optimizers import Cost, cost, maker
from lockstep.strategies.unwrap import replica_module
from lockstep.torch_internals import fake

Loss = Callable[[Any, Any], Tensor]
"""From the model and a batch to the loss."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What training takes on one process, in bytes."""

    weights: int
    buffers: int
    """What else the model keeps, such as the statistics of batch norm."""
    gradients: int
    """The gradients, when all are there."""
    optimizer: int
    """What the optimizer keeps from its first step on."""
    batch: int
    activations: int
    """The most that autograd keeps for the backward at one time, without weights, buffers and batch."""
    peak: int
    """The most that lives at one time, from the second step on."""
    peak_in: str
    """When that is: "forward", "backward" or "optimizer step"."""
    at_peak: Mapping[str, int]
    """What lives at that time, by purpose."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "at_peak": dict(self.at_peak)}


def estimate_memory(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: str | Callable[[list[nn.Parameter]], torch.optim.Optimizer] = "adamw",
    loss: Loss | None = None,
) -> MemoryEstimate:
    """Measure what training ``model`` on ``batch`` takes, by a real forward and backward on the model's device.

    Afterwards the model is as before: its gradients, buffers and the random state are put back. A model on the meta
    device needs no memory: stand-ins without data take the place of its tensors and those of the batch.

    ``loss(model, batch)`` gives the loss. Without it the batch is handed to the model (a mapping by names, a tuple or
    list by position), and the loss is what its output calls ``loss``, or else the sum of the outputs. ``optimizer`` is
    a name, or a function from parameters to an optimizer; what it keeps is found by trying it on tensors without data.

    Not included: what kernels need inside one operation, what the script holds besides, and with several processes
    the buckets of DDP, as large as the gradients.
    """
    model = replica_module(model)  # its forward would prepare for a backward together with the other ranks
    make = maker(optimizer, next((parameter.device.type for parameter in model.parameters()), "cpu"))
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        with no_data(), stand_ins(model):
            return measure(model, _on_cpu(batch), make=make, loss=loss)
    with torch.random.fork_rng(_indices(tensor.device for tensor in model.parameters())), copies(model):
        return measure(model, fake.map_only(Tensor, _same, batch), make=make, loss=loss)


def measure(
    model: nn.Module,
    batch: Any,
    *,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    loss: Loss | None = None,
    autocast: torch.dtype | None = None,
) -> MemoryEstimate:
    """Run forward and backward under a ledger, and add what the optimizer takes; the tensors are used up by it."""
    ledger = MemoryTracker()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise UsageError(f"No parameter of {type(model).__name__} requires a gradient: there is nothing to train.")
    spent = cost(parameters, make)
    _enter_fixed(ledger, model, batch)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda held: _claim_gradient(ledger, held))
    with ledger:
        ledger.phase = "forward"
        with ledger.saving(), _autocast(parameters[0].device, autocast):
            value = (loss or default_loss)(model, batch)
        _check_loss(value)
        ledger.phase = "backward"
        value.backward()
    return _sum_up(ledger, spent)


def forward_only(model: nn.Module, batch: Any) -> tuple[int, int]:
    """What lives during inference besides weights, buffers and batch at the most, and the batch, in bytes."""
    ledger = MemoryTracker()
    _enter_fixed(ledger, model, batch)
    fixed = ledger.total
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), ledger:
            call(model, batch)
    finally:
        for module in training:
            module.training = True
    return ledger.peak - fixed, ledger.live["batch"]


def call(model: nn.Module, batch: Any) -> Any:
    """Hand a batch to a model: a mapping by names, a tuple or list by position, anything else as it is."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the output holds, or the sum of all outputs: a sum keeps nothing for the backward."""
    output = call(model, batch)
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor):
        return named
    leaves = [leaf for leaf in fake.leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise UsageError(
            f"The output of {type(model).__name__} holds no tensor with a gradient, so there is nothing to run "
            "backward from. Give loss=, a function of the model and the batch."
        )
    return torch.stack([leaf.sum() for leaf in leaves]).sum()


# --- parts of a measurement ------------------------------------------------------------------------------------------


def _enter_fixed(ledger: MemoryTracker, model: nn.Module, batch: Any) -> None:
    ledger.enter_all(model.parameters(), "weights")
    ledger.enter_all(model.buffers(), "buffers")
    ledger.enter_all((leaf for leaf in fake.leaves(batch) if isinstance(leaf, Tensor)), "batch")


def _claim_gradient(ledger: MemoryTracker, parameter: Tensor) -> None:
    if parameter.grad is not None:
        ledger.claim(parameter.grad, "gradients")


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    # Not autocast that is switched off: the caller may have it on.
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def _check_loss(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        seen = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f"loss gave {seen}. It must give one number, as a tensor with a gradient.")


def _sum_up(ledger: MemoryTracker, spent: Cost) -> MemoryEstimate:
    """Called after the backward, with the gradients there; the optimizer's state is there all the time."""
    peak, phase, parts = ledger.peak, ledger.peak_phase, dict(ledger.at_peak)
    if ledger.total + spent.step > peak:
        peak, phase, parts = ledger.total + spent.step, "optimizer step", dict(ledger.live)
        parts[TEMPORARY] = parts.get(TEMPORARY, 0) + spent.step
    return MemoryEstimate(
        weights=ledger.live["weights"],
        buffers=ledger.live["buffers"],
        gradients=ledger.live["gradients"],
        optimizer=spent.state,
        batch=ledger.live["batch"],
        activations=ledger.most_activations,
        peak=peak + spent.state,
        peak_in=phase,
        at_peak={name: size for name, size in {**parts, "optimizer": spent.state}.items() if size},
    )


# --- around a measurement ---------------------------------------------------------------------------------------------


def _indices(devices: Iterable[torch.device]) -> list[int]:
    """The CUDA devices among these; the CPU's random state is always kept."""
    return sorted({device.index for device in devices if device.type == "cuda"})


def _same(tensor: Tensor) -> Tensor:
    """The same data; a gradient that comes out is not left on the caller's tensor."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _on_cpu(batch: Any) -> Any:
    """A batch of stand-ins, as large as this one."""
    return fake.map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="cpu"), batch)
