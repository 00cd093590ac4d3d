"""Hooks that run around a module's forward: they get its arguments, and may replace them and the output."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn


class ModelHook:
    """What to do before and after a forward. Subclasses override what they need."""

    no_grad = False
    """Whether the forward runs without gradients."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is added; gives the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before the forward; gives its arguments."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after the forward; gives the output."""
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Called in place of ``post_forward`` when the forward raises."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed; gives the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks, one after the other."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Of each hook."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Of each hook, with what the one before gave."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Of each hook, with what the one before gave."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Of each hook."""
        for hook in self.hooks:
            _notify_failure(hook, module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Of each hook."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Run the hook around the module's forward, in place of the one that it has; with ``append``, after that one."""
    before = getattr(module, "_hf_hook", None)
    if before is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(before, hook) if append else hook
    forward = module.forward
    module._old_forward = forward  # type: ignore[assignment]
    module = hook.init_hook(module)
    module._hf_hook = hook  # type: ignore[assignment]
    module.forward = functools.update_wrapper(functools.partial(_hooked_forward, module), forward)
    return module


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook = module._hf_hook
    try:
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        if hook.no_grad:
            with torch.no_grad():
                output = module._old_forward(*args, **kwargs)
        else:
            output = module._old_forward(*args, **kwargs)
    except BaseException:
        _notify_failure(hook, module)
        raise
    return hook.post_forward(module, output)


def _notify_failure(hook: Any, module: nn.Module) -> None:
    """A hook made for Accelerate may not know of this."""
    if (notify := getattr(hook, "forward_failed", None)) is not None:
        notify(module)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take the module's hook off, and with ``recurse`` those of all modules in it; forward is as it was."""
    attributes = module.__dict__
    hook = attributes.pop("_hf_hook", None)
    if hook is not None:
        hook.detach_hook(module)
    forward = attributes.pop("_old_forward", None)
    if forward is not None:
        if getattr(forward, "__func__", None) is type(module).forward:
            attributes.pop("forward", None)
        else:  # it had a forward of its own
            module.forward = forward
    for name in MOVES:
        if hasattr(attributes.get(name), "__wrapped__"):
            del attributes[name]
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take off the hooks of a module and of all modules in it."""
    remove_hook_from_module(module, recurse=True)


MOVES = ("to", "cuda", "cpu", "xpu", "npu", "mlu", "musa")
"""Methods that move a module, which a dispatched model replaces."""


def hooks_of(module: nn.Module) -> list[ModelHook]:
    """All hooks of one module, those in a sequence one by one."""
    found: list[ModelHook] = []
    waiting = [module.__dict__.get("_hf_hook")]
    while waiting:
        hook = waiting.pop(0)
        if isinstance(hook, SequentialHook):
            waiting[:0] = hook.hooks
        elif hook is not None:
            found.append(hook)
    return found
