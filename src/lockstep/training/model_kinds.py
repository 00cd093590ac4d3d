"""What kind of model it is, and its modules in order."""

from __future__ import annotations

import sys
from typing import Literal, overload

from torch import nn

from lockstep.host.packages import is_peft_available
from lockstep.torch_internals.compiler import original_of
from lockstep.training.unwrap import extract_model_from_parallel


def is_peft_model(model: nn.Module) -> bool:
    """Whether the model is one of peft's."""
    if not is_peft_available() or "peft" not in sys.modules:  # nobody can have made one
        return False
    from peft import PeftModel

    return isinstance(extract_model_from_parallel(model), PeftModel)


def is_compiled_module(module: nn.Module) -> bool:
    """Whether ``torch.compile`` has made it."""
    return original_of(module) is not None


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether ``torch.compile`` has made a part of it."""
    parts = module.modules() if next(module.children(), None) is not None else ()
    return any(is_compiled_module(part) for part in parts)


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether a parameter is shared out between processes."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


@overload
def get_module_children_bottom_up(model: nn.Module, return_fqns: Literal[False] = False) -> list[nn.Module]: ...
@overload
def get_module_children_bottom_up(model: nn.Module, return_fqns: Literal[True]) -> list[tuple[str, nn.Module]]: ...
def get_module_children_bottom_up(
    model: nn.Module, return_fqns: bool = False
) -> list[nn.Module] | list[tuple[str, nn.Module]]:
    """All modules, each after those inside it; with ``return_fqns``, with their names."""
    waiting, found = [("", model)], []
    while waiting:
        name, module = waiting.pop()
        found.append((name, module))
        waiting += [(f"{name}.{child}" if name else child, part) for child, part in module.named_children()]
    found.reverse()
    return found if return_fqns else [module for _, module in found]
