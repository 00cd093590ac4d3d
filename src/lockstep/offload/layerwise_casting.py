"""Weights that are kept in a narrow dtype and computed with in a wider one, layer by layer."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from lockstep.offload.hooks import ModelHook, add_hook_to_module

CAST_LAYERS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
"""Layers whose results suffer little from weights in a narrow dtype, and that have most of the weights."""


class LayerwiseCastingHook(ModelHook):
    """Keeps a module in one dtype, and widens it to another for its forward. What is rounded off stays lost."""

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype, self.compute_dtype, self.non_blocking = storage_dtype, compute_dtype, non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Narrow the weights."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Widen the weights."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Narrow the weights."""
        self.init_hook(module)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Narrow the weights."""
        self.init_hook(module)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keep the linear and convolution layers of a model in ``storage_dtype``, and run them in ``compute_dtype``.

    Args:
        module: The model.
        storage_dtype: The narrow dtype, such as ``torch.float8_e4m3fn``.
        compute_dtype: The wide one, which inputs have.
        skip_modules_pattern: Regular expressions; modules whose name has a match are left as they are.
        skip_modules_classes: Classes of modules that are left as they are. When neither is given, the module itself is
            cast as a whole.
        non_blocking: Whether the casts may still be going on afterwards.
    """
    hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
    if skip_modules_pattern is None and skip_modules_classes is None:
        add_hook_to_module(module, hook, append=True)
        return
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else tuple(skip_modules_pattern or ())
    _attach(module, hook, patterns, tuple(skip_modules_classes or ()), "")


def _attach(
    module: nn.Module,
    hook: LayerwiseCastingHook,
    patterns: tuple[str, ...],
    classes: tuple[type[nn.Module], ...],
    name: str,
) -> None:
    if isinstance(module, classes) or any(re.search(pattern, name) for pattern in patterns):
        return
    if isinstance(module, CAST_LAYERS):
        add_hook_to_module(
            module, LayerwiseCastingHook(hook.storage_dtype, hook.compute_dtype, hook.non_blocking), append=True
        )
        return
    for child_name, child in module.named_children():
        _attach(child, hook, patterns, classes, f"{name}.{child_name}" if name else child_name)
