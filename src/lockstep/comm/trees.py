"""Nested structures of tensors: taking them apart and putting them together again.

A structure is a tree of tuples, named tuples, lists, mappings and dataclass instances; its leaves are tensors and
anything else. ``flatten`` gives the leaves and a hashable signature (structure, shapes, dtypes, device types), which
serves as the key for remembered plans.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_TYPES: dict[type, str] = {}
"""Kind of each container type met so far, so that the questions below are asked once per type."""


def kind_of(value: Any) -> str:
    """tensor, list, tuple, named, dict, mapping, dataclass or leaf."""
    cls = type(value)
    known = _TYPES.get(cls)
    if known is None:
        known = _TYPES[cls] = _classify(cls)
    return known


def _classify(cls: type) -> str:
    if issubclass(cls, Tensor):
        return "tensor"
    if issubclass(cls, tuple):
        return "named" if hasattr(cls, "_fields") else "tuple"
    if issubclass(cls, list):
        return "list"
    if cls is dict:
        return "dict"
    if issubclass(cls, Mapping):
        return "mapping"
    if dataclasses.is_dataclass(cls):
        return "dataclass"
    return "leaf"


def flatten(tree: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """The leaves in order, and the signature of the whole."""
    leaves: list[Any] = []
    signature: list[Any] = []
    _walk(tree, leaves, signature)
    return leaves, tuple(signature)


def _walk(tree: Any, leaves: list[Any], signature: list[Any]) -> None:
    # Called once per node of everything that is gathered: the common types come first, and by identity.
    cls = type(tree)
    if cls is Tensor or (cls is not dict and cls is not tuple and cls is not list and kind_of(tree) == "tensor"):
        leaves.append(tree)
        signature += (tree.shape, tree.dtype, tree.device)
    elif cls is tuple or cls is list:
        signature += (cls, len(tree))
        for value in tree:
            _walk(value, leaves, signature)
    elif cls is dict:
        signature += (cls, len(tree), *tree)
        for value in tree.values():
            _walk(value, leaves, signature)
    elif kind_of(tree) == "leaf":
        leaves.append(tree)
        signature.append(cls)
    else:
        keys, values = parts(tree, kind_of(tree))
        signature += (cls, keys)
        for value in values:
            _walk(value, leaves, signature)


def parts(tree: Any, kind: str) -> tuple[Any, Iterable[Any]]:
    """The keys (or the length) and the values of a container."""
    if kind in ("dict", "mapping"):
        return tuple(tree.keys()), tree.values()
    if kind == "dataclass":
        names = tuple(field.name for field in dataclasses.fields(tree))
        return names, [getattr(tree, name) for name in names]
    return len(tree), tree


def unflatten(tree: Any, leaves: Iterator[Any]) -> Any:
    """A structure like ``tree`` with the next ``leaves`` in place of its own."""
    cls = type(tree)
    if cls is Tensor:
        return next(leaves)
    if cls is dict:
        return {key: unflatten(value, leaves) for key, value in tree.items()}
    if cls is tuple:
        return tuple([unflatten(value, leaves) for value in tree])
    if cls is list:
        return [unflatten(value, leaves) for value in tree]
    kind = kind_of(tree)
    if kind in ("tensor", "leaf"):
        return next(leaves)
    keys, values = parts(tree, kind)
    return rebuild(tree, kind, keys, [unflatten(value, leaves) for value in values])


def rebuild(tree: Any, kind: str, keys: Any, values: list[Any]) -> Any:
    """A container of the same type as ``tree`` with other values."""
    if kind == "dict":
        return dict(zip(keys, values, strict=True))
    if kind == "named":
        return type(tree)(*values)
    if kind in ("tuple", "list"):
        return values if type(tree) is list else type(tree)(values)
    # A copy keeps what the type holds beside its items; constructors of such types differ too much to call.
    fresh = copy.copy(tree)
    for key, value in zip(keys, values, strict=True):
        if kind == "mapping":
            fresh[key] = value
        else:
            object.__setattr__(fresh, key, value)
    return fresh


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The structure with ``function`` applied to each leaf."""
    kind = kind_of(tree)
    if kind in ("tensor", "leaf"):
        return function(tree)
    keys, values = parts(tree, kind)
    return rebuild(tree, kind, keys, [map_leaves(function, value) for value in values])


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The structure with ``function`` applied to each tensor; other leaves stay as they are."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = lambda value: isinstance(value, Tensor),
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply ``func`` to each leaf that passes ``test_type``; others stay, or are an error."""

    def apply(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"{getattr(func, '__name__', func)} cannot be applied to a {type(leaf).__name__}. "
                "Allowed: nested tuples, lists, mappings and dataclasses of tensors."
            )
        return leaf

    return map_leaves(apply, data)


def require_tensors(leaves: Iterable[Any], tree: Any, operation: str) -> None:
    """Raise for the first leaf that is no tensor, with its place in the structure."""
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return
    path, leaf = next((path, leaf) for path, leaf in walk_paths(tree) if not isinstance(leaf, Tensor))
    raise TypeError(
        f"{operation} got a {type(leaf).__name__} at {path or 'the top'}. It takes nested tuples, lists, mappings and "
        "dataclasses of tensors; for other objects use gather_object."
    )


def walk_paths(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf with its place, written as Python would index it."""
    kind = kind_of(tree)
    if kind in ("tensor", "leaf"):
        yield path, tree
        return
    keys, values = parts(tree, kind)
    for key, value in zip(keys if not isinstance(keys, int) else range(keys), values, strict=True):
        step = f".{key}" if kind == "dataclass" else f"[{key!r}]"
        yield from walk_paths(value, path + step)


def send_to_device(
    tensor: Any, device: Any, non_blocking: bool = False, skip_keys: str | list[str] | None = None
) -> Any:
    """The structure on another device. ``skip_keys`` names mapping keys that stay where they are.

    Leaves with a ``to(device)`` method of their own (packed sequences, batch encodings) are moved too.
    """
    device = torch.device(device)
    skipped = [skip_keys] if isinstance(skip_keys, str) else (skip_keys or [])
    return _send(tensor, device, non_blocking, skipped)


def _send(tree: Any, device: torch.device, non_blocking: bool, skipped: list[str]) -> Any:
    kind = kind_of(tree)
    if kind == "tensor":
        return tree if tree.device == device else tree.to(device, non_blocking=non_blocking)
    if kind == "leaf" or (kind in ("mapping", "named", "tuple") and hasattr(tree, "to")):
        return _send_by_method(tree, device, non_blocking)
    keys, values = parts(tree, kind)
    named = keys if not isinstance(keys, int) else [None] * keys
    moved = [
        value if key in skipped else _send(value, device, non_blocking, skipped)
        for key, value in zip(named, values, strict=True)
    ]
    return rebuild(tree, kind, keys, moved)


def _send_by_method(value: Any, device: torch.device, non_blocking: bool) -> Any:
    move = getattr(value, "to", None)
    if move is None:
        return value
    try:
        return move(device, non_blocking=non_blocking)
    except TypeError:
        return move(device)


def slice_tensors(data: Any, tensor_slice: Any) -> Any:
    """Each tensor of the structure, indexed by ``tensor_slice``."""
    return map_tensors(lambda leaf: leaf[tensor_slice], data)


def concatenate(data: list[Any], dim: int = 0) -> Any:
    """One structure from several of the same form: tensors joined along ``dim``, zero-dimensional ones stacked.

    Something else than a tensor cannot be joined; a single one is given back.
    """
    if not data:
        raise ValueError("concatenate got an empty list; there is no structure to join.")
    first = data[0]
    kind = kind_of(first)
    if kind == "tensor":
        return torch.stack(data) if first.ndim == 0 else torch.cat(data, dim=dim)
    if kind == "leaf":
        if len(data) == 1:
            return first
        raise TypeError(f"concatenate takes nested tuples, lists and mappings of tensors, not {type(first).__name__}.")
    keys, _ = parts(first, kind)
    columns = zip(*(parts(item, kind)[1] for item in data), strict=True)
    return rebuild(first, kind, keys, [concatenate(list(column), dim) for column in columns])


def find_batch_size(data: Any) -> int | None:
    """The first dimension of the first tensor that has one; None when there is none."""
    for _, leaf in walk_paths(data):
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return int(leaf.shape[0])
    return None
