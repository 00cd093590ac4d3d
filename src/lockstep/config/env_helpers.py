"""The environment as scripts and their tests reach for it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lockstep.config import env
from lockstep.errors import ConfigError

_PREFIXES = ("ACCELERATE_", "LOCKSTEP_")
_WRAPPED = "_lockstep_purged"


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 for yes, true, on and the like, 0 for their opposites; as a bool with ``to_bool``."""
    if not value.strip():
        raise ConfigError(f"{value!r} is neither yes nor no. Allowed: 1, true, yes, on, 0, false, no, off.")
    found = env.parse_flag(value, "value")
    return found if to_bool else int(found)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """A yes-or-no variable."""
    return str_to_bool(env.snapshot().get(key, str(default))) == 1


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The text of a variable."""
    return env.snapshot().get(key, str(default))


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of these variables that is a number from 0 on."""
    environ = env.snapshot()
    numbers = (env.parse_int(environ[key], key) for key in env_keys if key in environ)
    return next((number for number in numbers if number >= 0), default)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Which of these modules have been imported."""
    return [name for name in library_names if name in sys.modules]


def patch_environment(**kwargs: Any) -> AbstractContextManager[None]:
    """A region with these variables, their names in capitals; afterwards they are what they were."""
    return env.patched({key.upper(): str(value) for key, value in kwargs.items()})


@contextmanager
def clear_environment() -> Iterator[None]:
    """A region without any variables; afterwards they are what they were."""
    with _restored(lambda name: True):
        for name in env.snapshot():
            env.withdraw(name)
        yield


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """A decorator after whose function the ACCELERATE_* and LOCKSTEP_* variables are what they were.

    On a class it takes all methods whose names begin with "test", those of derived classes too.
    """
    if not isinstance(func_or_cls, type):
        return _purged(func_or_cls)
    _purge_tests(func_or_cls)
    func_or_cls.__init_subclass__ = classmethod(lambda cls, **_: _purge_tests(cls))  # type: ignore[assignment]
    return func_or_cls


def _purge_tests(cls: type) -> None:
    for name in dir(cls):
        method = getattr(cls, name)
        if name.startswith("test") and callable(method) and not hasattr(method, _WRAPPED):
            setattr(cls, name, _purged(method))


def _purged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _restored(lambda name: name.startswith(_PREFIXES)):
            return function(*args, **kwargs)

    setattr(call, _WRAPPED, True)
    return call


@contextmanager
def _restored(concerns: Callable[[str], bool]) -> Iterator[None]:
    """A region after which the variables that it concerns are what they were."""
    before: Mapping[str, str] = env.snapshot()
    try:
        yield
    finally:
        for name in env.snapshot():
            if concerns(name) and name not in before:
                env.withdraw(name)
        env.publish({name: value for name, value in before.items() if concerns(name)})
