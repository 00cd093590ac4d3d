"""torch.compile, without loading the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


@torch._disable_dynamo  # type: ignore[attr-defined]
def untraced(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do some work outside of what is being compiled: a collective of ours cannot be traced.

    Needs ``torch._disable_dynamo``; 2.9 to 2.13. Without it: ``torch.compiler.disable``, which loads the compiler, and
    100 MB with it, also where nothing is compiled.
    """
    return work(*args, **kwargs)


def original_of(model: Any) -> nn.Module | None:
    """The module that ``torch.compile(model)`` was put around; None where it was not.

    Needs ``OptimizedModule._orig_mod``; 2.9 to 2.13. Without it: names of weights keep the prefix ``_orig_mod.``.
    """
    found = model._modules.get("_orig_mod") if isinstance(model, nn.Module) else None
    return found if isinstance(found, nn.Module) else None


def is_compiled(model: nn.Module) -> bool:
    """Whether any part of it is compiled, by ``torch.compile`` or in place.

    Needs ``OptimizedModule._orig_mod`` and ``Module._compiled_call_impl``; 2.9 to 2.13. Without them: the numerics
    detector sees nothing inside a compiled model, and does not say so.
    """
    return any(original_of(part) is not None or part._compiled_call_impl is not None for part in model.modules())


def uncompile(model: nn.Module) -> None:
    """Have the model and its blocks run uncompiled again, where ``Module.compile`` was called.

    Needs ``Module._compiled_call_impl``; 2.9 to 2.13. Without it: ``keep_torch_compile=False`` cannot be honoured.
    """
    for part in model.modules():
        part._compiled_call_impl = None
