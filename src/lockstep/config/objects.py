"""Names and parts of any object, and mappings that are laid over each other."""

from __future__ import annotations

from functools import reduce
from typing import Any


def get_pretty_name(obj: Any) -> str:
    """The name of a function or class; of anything else, that of its class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def recursive_getattr(obj: Any, attr: str) -> Any:
    """The attribute behind a path such as ``a.b.c``."""
    return reduce(getattr, attr.split("."), obj)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Lay ``source`` over ``destination``, dicts inside too; gives ``destination``."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination
