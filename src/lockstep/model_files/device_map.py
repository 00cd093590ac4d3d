"""Where each weight goes when a model is loaded in parts: a device map, a dtype, a folder for what stays on disk."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.model_files.shared_tensors import tied_names
from lockstep.model_files.state_loader import WeightPlacement, in_place

DISK = "disk"
_META = torch.device("meta")


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype, also from its name: ``"float16"`` or ``"torch.float16"``."""
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(
            f"dtype={dtype!r} is none that weights can have. Give one such as torch.float16 or 'bfloat16'."
        )
    return found


class Placing:
    """Says for each weight of a model where it goes. Making it checks that the map covers the model."""

    def __init__(
        self,
        model: nn.Module,
        device_map: Mapping[str, Any] | None,
        dtype: torch.dtype | None,
        keep_in_fp32: Sequence[str] = (),
        offload_buffers: bool = False,
    ) -> None:
        self._dtype, self._keep = dtype, tuple(keep_in_fp32)
        self._on_host = set() if offload_buffers else {name for name, _ in model.named_buffers()}
        self._map = None if device_map is None else _read_map(model, device_map)
        if self._map is not None:
            _check_ties(model, self._map)

    @property
    def uses_disk(self) -> bool:
        """Whether some weight is not to be kept in memory."""
        return self._map is not None and DISK in self._map.values()

    def __call__(self, name: str, target: Tensor) -> WeightPlacement:
        """Where this weight goes."""
        now = in_place(name, target)
        dtype = now.dtype if self._dtype is None or not target.is_floating_point() else self._dtype
        if dtype is not now.dtype and any(f"{part}." in name or part == name for part in self._keep):
            dtype = torch.float32
        if self._map is None:
            return WeightPlacement(now.device, dtype)
        asked = self._map[covering(name, self._map)]
        if asked == DISK:
            return WeightPlacement(torch.device("cpu") if name in self._on_host else _META, dtype)
        return WeightPlacement(asked, dtype)


def check_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> None:
    """Raise unless the map's keys are parts of the model and every weight lies under one of them."""
    if not isinstance(device_map, Mapping):
        raise ConfigError(
            f"device_map={device_map!r} is not a table. Give one from names of modules to devices, such as "
            '{"": "cpu"} or {"encoder": 0, "decoder": "disk"}.'
        )
    names = list(model.state_dict(keep_vars=True))
    known = {name for name, _ in model.named_modules(remove_duplicate=False)} | set(names)
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}  # of which some are not saved
    if unknown := [key for key in device_map if key not in known]:
        raise ConfigError(f"device_map names parts that the model does not have: {', '.join(map(repr, unknown[:5]))}.")
    if bare := [name for name in names if covering(name, device_map) is None]:
        raise ConfigError(
            f"device_map says nothing of {len(bare)} weights of the model: {', '.join(bare[:5])}. Name their modules, "
            'or give a place for all others under "".'
        )


def _read_map(model: nn.Module, device_map: Mapping[str, Any]) -> dict[str, Any]:
    check_device_map(model, device_map)
    return {key: as_device(key, value) for key, value in device_map.items()}


def as_device(key: str, value: Any) -> torch.device | str:
    """The place that a map gives a part: ``"disk"``, or a device that can be used here."""
    if value == DISK:
        return DISK
    try:
        # An accelerator's number is made definite here, so that a weight that is there already is known to be.
        return torch.empty(0, device=value).device
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"device_map puts {key!r} on {value!r}, which cannot be used here: {reason}") from None


def covering(name: str, places: Collection[str]) -> Any:
    """The longest key of the map that the name lies under."""
    while name not in places:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def _check_ties(model: nn.Module, places: Mapping[str, Any]) -> None:
    for names in tied_names(model.state_dict(keep_vars=True)):
        if len({places[covering(name, places)] for name in names}) > 1:
            listed = ", ".join(f"{name} on {places[covering(name, places)]}" for name in names)
            raise ConfigError(
                f"device_map puts one tensor that the model uses under several names on several places: {listed}."
            )
