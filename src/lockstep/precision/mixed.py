"""Mixed precision around a model: autocast inside, fp32 outside."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.comm.trees import map_tensors
from lockstep.config.choices import PrecisionType
from lockstep.config.handlers import AutocastKwargs, GradScalerKwargs
from lockstep.errors import ConfigError
from lockstep.precision.scaler import LossScaler

_DTYPES = {PrecisionType.FP16: torch.float16, PrecisionType.BF16: torch.bfloat16}
_HALVES = (torch.float16, torch.bfloat16)


class Precision:
    """The precision of one Accelerator."""

    def __init__(self, mode: PrecisionType, device: torch.device, autocast: AutocastKwargs) -> None:
        self.mode = mode
        self._device = device
        self._options = autocast
        self.dtype = _DTYPES.get(mode)

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A region that computes in this precision; nothing where it is plain fp32."""
        options = options or self._options
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(
            self._device.type, dtype=self.dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        """Have the model's forward compute in this precision and give its outputs in fp32."""
        if self.dtype is not None and not isinstance(model.__dict__.get("forward"), MixedForward):
            model.forward = MixedForward(model.forward, self.autocast)
        return model

    def make_scaler(
        self, options: GradScalerKwargs, any_rank: Callable[[bool], bool] | None = None
    ) -> LossScaler | None:
        """The loss scaler that fp16 needs; None in other precisions."""
        return LossScaler(self._device.type, options, any_rank) if self.mode is PrecisionType.FP16 else None


class MixedForward:
    """A model's forward in mixed precision. A class, so that a copied model gets a forward of its own."""

    def __init__(self, forward: Callable[..., Any], autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        self.forward = forward
        self._autocast = autocast
        self.__doc__ = forward.__doc__

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward in mixed precision; outputs in fp32."""
        with self._autocast():
            outputs = self.forward(*args, **kwargs)
        return convert_to_fp32(outputs)


def restore_forward(model: nn.Module) -> nn.Module:
    """The model with its own forward."""
    wrapper = model.__dict__.get("forward")
    if isinstance(wrapper, MixedForward):
        original = wrapper.forward
        if getattr(original, "__self__", None) is model and getattr(original, "__func__", None) is type(model).forward:
            del model.__dict__["forward"]
        else:
            model.forward = original
    return model


def convert_to_fp32(tensor: Any) -> Any:
    """The structure with its fp16 and bf16 tensors in fp32."""
    if isinstance(tensor, Tensor):
        return tensor.float() if tensor.dtype in _HALVES else tensor
    return map_tensors(lambda leaf: leaf.float() if leaf.dtype in _HALVES else leaf, tensor)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose outputs come back in fp32."""
    return MixedForward(model_forward, nullcontext)


def check_device(mode: PrecisionType, device: torch.device) -> None:
    """Raise when this device cannot compute in the precision."""
    if mode is PrecisionType.BF16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError(
            f"mixed_precision='bf16': {torch.cuda.get_device_name(device)} cannot compute in bf16. Use 'fp16' or 'no'."
        )
