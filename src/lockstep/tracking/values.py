"""Values as trackers can store them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from typing import Any

import numpy as np
import torch

from lockstep.logging import get_notices

_LONGEST = 10_000
"""Elements of a tensor that are written out; of a longer one, only its shape."""


def scalar(value: Any) -> Any:
    """The Python number in a tensor or an array without dimensions; anything else as it is."""
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 0:
        return value.item()
    return value.item() if isinstance(value, np.generic) else value


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one ``log``, with the numbers of tensors taken out."""
    if not isinstance(values, Mapping):
        raise TypeError(f"log() takes a dict of names and values, and got a {type(values).__name__}")
    return {key: scalars(value) if isinstance(value, Mapping) else scalar(value) for key, value in values.items()}


def plain(value: Any) -> Any:
    """The same in what JSON and YAML know: mappings, lists, texts, numbers, booleans and None.

    What is none of these becomes its text.
    """
    value = scalar(value)
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (torch.Tensor, np.ndarray)):
        size = value.numel() if isinstance(value, torch.Tensor) else value.size
        return value.tolist() if size <= _LONGEST else f"{type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, (Sequence, Set)) and not isinstance(value, (bytes, bytearray)):
        return [plain(item) for item in value]
    return str(value)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration as one level: ``{"optimizer": {"lr": 1}}`` becomes ``{"optimizer/lr": 1}``."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{prefix}{key}/"))
        else:
            found[f"{prefix}{key}"] = value
    return found


def report_left_out(tracker: str, key: str, value: Any, allowed: str) -> None:
    """Log once per key that a value is not stored."""
    get_notices("lockstep.tracking").warning_once(
        "Tracker %r stores %s. %r is a %s and was left out.",
        tracker,
        allowed,
        key,
        type(value).__name__,
        main_process_only=False,
    )
