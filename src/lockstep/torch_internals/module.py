"""torch.nn.Module: its tables, its hooks, its ways to load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The table of a module's own parameters; a change of it is a change of the module.

    Needs ``Module._parameters``; 2.9 to 2.13. Without it: ``named_parameters(recurse=False)``, a generator that costs
    3 us for each module call of the detector and leaves out parameters that stand there twice.
    """
    return module._parameters


def tensor_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables of a module's own parameters and buffers; a change of them is a change of the module.

    Needs ``Module._parameters`` and ``_buffers``; 2.9 to 2.13. Without them: weights that get new memory could not be
    put into the model past its ``__setattr__``, which modules such as an LSTM have replaced.
    """
    return module._parameters, module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The table of a module's own children; one that is registered under two names is there twice.

    Needs ``Module._modules``; 2.9 to 2.13. Without it: ``named_children``, which leaves out the second name.
    """
    return module._modules


def device_of_move(*args: Any, **kwargs: Any) -> Any:
    """The device in the arguments of ``Module.to``; None where they change the dtype only.

    Needs ``torch._C._nn._parse_to``; 2.9 to 2.13. Without it: telling the forms of these arguments apart here.
    """
    return torch._C._nn._parse_to(*args, **kwargs)[0]


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Names of a module's own buffers that are not in its state dict.

    Needs ``Module._non_persistent_buffers_set``; 2.9 to 2.13. Without it: comparing buffers with a state dict, whose
    hooks may rename them.
    """
    return module._non_persistent_buffers_set


def loads_plainly(module: nn.Module) -> bool:
    """Whether a module has no code and no hook of its own in the way from a state dict to its tensors.

    Needs ``Module._load_state_dict_pre_hooks``, ``_load_state_dict_post_hooks``, ``_state_dict_hooks``,
    ``_state_dict_pre_hooks``, ``_save_to_state_dict``; 2.9 to 2.13. Without them: every model is loaded by
    ``load_state_dict``, whole in memory, and not file by file.
    """
    hooked = (
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or module._state_dict_hooks
        or module._state_dict_pre_hooks
    )
    own = type(module)._save_to_state_dict is not nn.Module._save_to_state_dict
    return not hooked and not own and not loads_by_itself(module)


def loads_by_itself(module: nn.Module) -> bool:
    """Whether a module has code of its own to load its tensors; batch norms only accept older files by theirs.

    Needs ``Module._load_from_state_dict``; 2.9 to 2.13. Without it: as for ``loads_plainly``.
    """
    own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return own and not is_norm(module)


def is_norm(module: nn.Module) -> bool:
    """Whether it is a batch or instance norm, whose older files do not count batches.

    Needs ``torch.nn.modules.batchnorm._NormBase``; 2.9 to 2.13. Without it: the public classes, one by one.
    """
    return isinstance(module, _NormBase)


def run_load_pre_hooks(model: nn.Module, state: dict[str, Tensor], strict: bool) -> None:
    """Have the modules' own hooks rename and complete a state dict, as ``load_state_dict`` would; nothing is loaded.

    Lazy modules are left out: their hook gives them their shapes. Needs ``Module._load_state_dict_pre_hooks`` and
    ``LazyModuleMixin._lazy_load_hook``; 2.9 to 2.13. Without them: names could not be checked before a weight changes.
    """
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        for hook in _load_pre_hooks(module):
            hook(state, prefix, {}, strict, [], [], [])


def _load_pre_hooks(module: nn.Module) -> Iterator[Any]:
    for hook in module._load_state_dict_pre_hooks.values():
        if getattr(getattr(hook, "hook", None), "__func__", None) is not LazyModuleMixin._lazy_load_hook:
            yield hook
