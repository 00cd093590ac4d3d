"""Whole models that take turns on the accelerator."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep.comm.trees import send_to_device
from lockstep.offload.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from lockstep.offload.set_tensor import Place


class CpuOffload(ModelHook):
    """Keeps a model on the CPU until its forward is called; then it stays on the device until it is sent back.

    Args:
        execution_device: Where the forward runs; by default the accelerator, where there is one.
        prev_module_hook: Of the model that ran before, which is sent to the CPU first.
    """

    def __init__(
        self, execution_device: Place | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.execution_device = execution_device if execution_device is not None else (found or torch.device("cpu"))
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Send the model to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Send the one before to the CPU, and this one and its inputs to the device."""
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
            if torch.accelerator.is_available():
                torch.accelerator.memory.empty_cache()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """A model and its hook."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model, self.hook = model, hook

    def offload(self) -> None:
        """Send the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Place | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model on the CPU until its forward is called. For models that run in turn, each many times.

    Args:
        model: The model.
        execution_device: Where its forward runs; by default the accelerator, where there is one.
        prev_module_hook: What this function gave for the model that runs before it.

    Returns:
        The model, and what sends it back to the CPU (``offload()``) or takes the hook off (``remove()``).
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
