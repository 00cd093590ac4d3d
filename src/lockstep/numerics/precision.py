"""Running one module of a model in fp32, whatever the rest is computed in."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.trees import map_tensors, walk_paths
from lockstep.errors import ConfigError
from lockstep.numerics.unwrap import describe_type
from lockstep.strategies.unwrap import inner_model

_NARROW = (torch.float16, torch.bfloat16)


def run_in_fp32(model: nn.Module, *names: str) -> nn.Module:
    """Have these modules compute in fp32: autocast off inside, inputs cast, parameters held in fp32.

    ::

        run_in_fp32(model, "encoder.block.2.layer.1")

    What comes out stays in fp32 under autocast, which takes it from there; a value that does not fit into fp16 would be
    lost otherwise. In a model whose own parameters are fp16 or bf16 it is cast to what went in, as the next module
    needs that. Call it before the optimizer is made if the module's parameters are not in fp32 yet.

    Args:
        model: The model; what ``prepare`` or ``torch.compile`` put around it is looked through.
        names: Fully qualified names, as the detector reports them.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"run_in_fp32: model is {describe_type(model)}. Pass a torch.nn.Module.")
    inner = inner_model(model)
    known = dict(inner.named_modules())
    problems = [_unknown(name, list(known)) for name in names if name not in known]
    if problems or not names:
        raise ConfigError.of(problems or ["run_in_fp32 got no module. Name at least one, as the detector reports it."])
    for name in names:
        module = known[name]
        if isinstance(module.__dict__.get("forward"), Fp32Forward):
            continue
        narrow = any(
            tensor.dtype in _NARROW for tensors in (module.parameters(), module.buffers()) for tensor in tensors
        )
        if narrow:
            module.float()
        module.forward = Fp32Forward(module.forward, cast_back=narrow)
    return model


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    hint = f" Close to it: {', '.join(close)}." if close else " Names are those of model.named_modules()."
    return f"run_in_fp32: the model has no module {name!r}.{hint}"


class Fp32Forward:
    """A module's forward in fp32. A class, so that a copied model gets a forward of its own."""

    def __init__(self, forward: Callable[..., Any], *, cast_back: bool) -> None:
        self.forward = forward
        self._cast_back = cast_back
        self.__doc__ = forward.__doc__

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward in fp32."""
        given = _narrow_dtype((args, kwargs)) if self._cast_back else None
        args, kwargs = map_tensors(_widen, (args, kwargs))
        autocast = False
        with ExitStack() as stack:
            for device in _device_types():
                if torch.is_autocast_enabled(device):
                    autocast = True
                    stack.enter_context(torch.autocast(device, enabled=False))
            output = self.forward(*args, **kwargs)
        if given is None or autocast:
            return output
        return map_tensors(lambda tensor: tensor.to(given) if tensor.dtype is torch.float32 else tensor, output)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _NARROW else tensor


def _narrow_dtype(tree: Any) -> torch.dtype | None:
    for _, leaf in walk_paths(tree):
        if isinstance(leaf, Tensor) and leaf.dtype in _NARROW:
            return leaf.dtype
    return None


def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
