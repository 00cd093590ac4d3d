"""What ``find_executable_batch_size`` is given: its options, the function, and the arguments of a call."""

from __future__ import annotations

import inspect
from typing import Any

from lockstep.errors import ConfigError

SEARCHES = ("halving", "binary")


def read_search(value: str, reduce: Any) -> bool:
    """Whether the search goes up again."""
    if value not in SEARCHES:
        raise ConfigError(f"search={value!r} is not known. Allowed: {', '.join(map(repr, SEARCHES))}.")
    if reduce is not None and not callable(reduce):
        raise ConfigError(f"reduce_batch_size_fn={reduce!r} cannot be called. Give a function without parameters.")
    return value == "binary"


def read_margin(value: float) -> float:
    """How far to stay below what does not fit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ConfigError(f"margin={value!r} must be a number from 0 to below 1.")
    return float(value)


def check_function(function: Any) -> inspect.Signature:
    """The signature of a function that can be given a batch size."""
    if not callable(function):
        raise TypeError(
            f"find_executable_batch_size({function!r}): this is no function. Give the starting size by name: "
            "find_executable_batch_size(starting_batch_size=…)."
        )
    signature = inspect.signature(function)
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        name = _name(function)
        raise TypeError(
            f"`{name}` has no positional parameter to take the batch size. Make it the first one: "
            f"`def {name}(batch_size, …)`."
        )
    return signature


def positional(parameters: list[inspect.Parameter]) -> int:
    """How many of these can be given by position."""
    return sum(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters
    )


def passed_in(
    function: Any,
    first: inspect.Parameter,
    others: list[inspect.Parameter],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str:
    """What to say to a caller that passes the batch size, or too much; with the right call spelled out."""
    name = _name(function)
    by_name = first.name in kwargs
    rest = args if by_name else args[1:]
    names = [parameter.name for parameter in others]
    given = [f"{key}={_short(value)}" for key, value in zip(names, rest, strict=False)]
    given += [f"{key}={_short(value)}" for key, value in kwargs.items() if key != first.name]
    how = f"by name ({first.name}=)" if by_name else "as the first argument"
    return (
        f"Batch size was passed into `{name}` {how} when called. "
        f"Remove this as the decorator already does so: `{name}({', '.join(given)})`"
    )


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 40 and "\n" not in text else f"<{type(value).__name__}>"


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
