"""Every exception Lockstep raises on purpose.

::

    LockstepError
    ├── ConfigError (ValueError)              an argument, variable or file holds a value we cannot honour
    │   ├── NotYetError (NotImplementedError) a value Accelerate knows and this release does not act on
    │   └── IncompleteTracker (NotImplementedError) a tracker's class lacks what every tracker has
    ├── UsageError (RuntimeError)             the right objects, called in a way that cannot work
    ├── DataError (RuntimeError)              a sample or batch could not be read, or not be shared between ranks
    ├── NumericsError (ValueError)            a number became NaN or infinite, or a trace is complete, and the run stops
    ├── CheckpointError (RuntimeError)        a checkpoint or model file cannot be written, read or used
    ├── TopologyError (RuntimeError)          the processes cannot be put together into one job
    ├── OutOfMemory (RuntimeError)            even the smallest batch that was tried does not fit into memory
    ├── PeerFailure (RuntimeError)            this rank is fine; another one failed, or the line to it broke
    ├── RankFailed (RuntimeError)             a function that was started on several processes failed on one of them
    └── DistributedOperationException         ranks called one collective with arguments that do not fit together

Texts follow one form: what you set, what we saw, what to do.
"""

from __future__ import annotations

import re

from lockstep import codes

TYPE_CHECKING = False  # as typing has it, which takes a while to load
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from traceback import TracebackException
    from typing import Any, TypeVar

    _Chained = TypeVar("_Chained", BaseException, TracebackException)


def first_line(error: object) -> str:
    """The first line of an error's text, or of a text, that says anything; the error's type where none does."""
    named = type(error).__name__ if isinstance(error, BaseException) else ""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), named)


LOST_PEER = re.compile(
    r"PeerFailure|DistNetworkError|gloo|nccl|(connection|socket) (was )?(likely )?(closed|reset)|broken pipe",
    re.IGNORECASE,
)
"""What errors say when the process at the other end of a connection is gone."""


def walk_chain(error: _Chained | None, *, suppressed: bool = False) -> Iterator[_Chained]:
    """The error, what it was raised from or while handling, and the members of groups, each once.

    With ``suppressed`` also what ``raise ... from`` has put out of sight. Takes tracebacks' own form of them, too.
    """
    waiting: list[Any] = [error]
    seen: set[int] = set()
    while waiting:
        part: Any = waiting.pop(0)
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        hidden = part.__suppress_context__ and not suppressed
        waiting += [part.__cause__, None if hidden else part.__context__, *(getattr(part, "exceptions", None) or ())]


class LockstepError(Exception):
    """The root of all errors that Lockstep raises on purpose."""

    lead: str = ""
    """What happened, in a sentence, where it is known of another rank than the one that raises this."""
    cause: str = ""
    """The likely cause, where it is known. The text has it, too."""
    fix: str = ""
    """What to do about it. The text has it, too."""

    @property
    def code(self) -> str:
        """Its code, such as LS1001: what ``lockstep explain`` takes. One of your own subclasses has its parent's."""
        return next(code for kind in type(self).__mro__ if (code := codes.code_of(kind.__name__)))


class ConfigError(LockstepError, ValueError):
    """A value that was asked for cannot be honoured."""

    problems: Sequence[str] = ()
    """Each thing that is wrong, one by one."""

    @classmethod
    def of(cls, problems: Sequence[str]) -> ConfigError:
        """One error for all problems found, so that the user mends them in one go."""
        text = problems[0]
        if len(problems) > 1:
            lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
            text = f"{len(problems)} settings cannot be used:\n{lines}"
        error = cls(text)
        error.problems = tuple(problems)
        return error


class NotYetError(ConfigError, NotImplementedError):
    """A setting that is part of the known interface, but that this release does not act on."""


class IncompleteTracker(ConfigError, NotImplementedError):
    """The class of a tracker does not define what is asked of every tracker."""


class UsageError(LockstepError, RuntimeError):
    """The call cannot work in the place where it was made."""


class DataError(LockstepError, RuntimeError):
    """A sample or batch could not be read, or not be shared between ranks."""


class CheckpointError(LockstepError, RuntimeError):
    """A checkpoint or a model file could not be written, or not be read, or does not fit what it is for."""


class NumericsError(LockstepError, ValueError):
    """A number became NaN or infinite, and the run was to stop at that; or the trace that was asked for is complete."""


class TopologyError(LockstepError, RuntimeError):
    """The processes of the job do not fit together."""


class OutOfMemory(LockstepError, RuntimeError):
    """Even the smallest batch that was tried does not fit into memory."""


class PeerFailure(LockstepError, RuntimeError):
    """Another rank failed, and this one left what it was waiting for."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first, where it is known."""


class DistributedOperationException(LockstepError):
    """Ranks entered one collective with shapes, dtypes, structures or operations that differ."""


class RankFailed(LockstepError, RuntimeError):
    """The function failed on some rank. The text holds that rank, its exception and its traceback."""

    def __init__(self, message: str, *, rank: int, kind: str | None, traceback: str, exit_code: int | None) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first."""
        self.kind = kind
        """The name of its exception's type; None when its process ended without one."""
        self.traceback = traceback
        """The traceback of the exception there, as text."""
        self.exit_code = exit_code
        """Of its process, where that is on this machine; minus the signal's number where one ended it."""
