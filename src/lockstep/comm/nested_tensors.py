"""Nested tensors: they have no size to pad to, so padding leaves them as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.comm import trees


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was given to ``pad_across_processes``."""


def is_in(tree: Any) -> bool:
    """Whether there is a nested tensor in the structure."""
    return any(_is_nested(leaf) for _, leaf in trees.walk_paths(tree))


def pad_others(tree: Any, pad: Callable[[Any], Any]) -> Any:
    """Pad the structure, without its nested tensors, and warn."""
    warnings.warn(
        "pad_across_processes leaves nested tensors as they are: they have no size to pad to. Pad before nesting.",
        CannotPadNestedTensorWarning,
        stacklevel=4,
    )
    padded, _ = trees.flatten(pad(trees.map_tensors(lambda leaf: torch.zeros(()) if leaf.is_nested else leaf, tree)))
    given = [leaf for _, leaf in trees.walk_paths(tree)]
    kept = [leaf if _is_nested(leaf) else made for leaf, made in zip(given, padded, strict=True)]
    return trees.unflatten(tree, iter(kept))


def _is_nested(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_nested
