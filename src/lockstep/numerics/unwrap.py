"""The user's model: out of what was put around it, and without what was put into it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any


def describe_type(thing: Any) -> str:
    """What was passed instead of a module: "the class Net, not an object of it", "a dict"."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}, not an object of it"
    name = type(thing).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def idle() -> tuple[Any, ...]:
    """What a hook of ours is pickled and copied as: something that does nothing, and that Python itself has.

    A model that was saved whole can then be loaded where Lockstep is not installed.
    """
    return getattr, (nullcontext(), "__exit__")
