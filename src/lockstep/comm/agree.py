"""Nobody fails alone: run a step on every rank, and let every rank learn how it went on all of them.

When the step succeeds everywhere, each rank passes one barrier and goes on. When it raises on any rank, all ranks
leave it, even those blocked in a collective of it; the process group is formed again; and every rank gets the same
list of failures. What to do about them is the caller's business, and so is undoing what the step had already done:
ranks may have left it at different lines.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from lockstep.comm.objects import all_objects
from lockstep.errors import PeerFailure, walk_chain
from lockstep.process_group.group import Group
from lockstep.torch_internals import c10d

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How the step failed on one rank."""

    rank: int
    """Which rank."""
    kind: str
    """The exception's type, by name."""
    message: str
    """Its text."""
    details: str
    """Its traceback."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.kind}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class Agreement(Generic[Value]):
    """What every rank knows after a step that was run together."""

    value: Value | None = None
    """What the step returned on this rank; None when it failed anywhere."""
    failures: tuple[Failure, ...] = ()
    """The failures of all ranks, in rank order; the same on every rank."""
    error: Exception | None = None
    """This rank's own exception. Local variables of its frames are cleared; what the step closes over is not."""

    @property
    def ok(self) -> bool:
        """Whether the step succeeded on every rank."""
        return not self.failures

    def unwrap(self) -> Value:
        """The step's value; or this rank's own error, or else one that names the ranks that failed."""
        if self.error is not None:
            raise self.error
        if self.failures:
            told = "; ".join(str(failure) for failure in self.failures)
            raise PeerFailure(f"The step failed on another rank ({told}).", rank=self.failures[0].rank)
        return self.value  # type: ignore[return-value]  # None is a fine value of a step that returns nothing


class _Recovered(PeerFailure):
    """The group is whole again, but the step to be given up is an outer one: unwind to it."""

    def __init__(self, scope: int, failures: tuple[Failure, ...]) -> None:
        super().__init__("; ".join(str(failure) for failure in failures), rank=failures[0].rank if failures else None)
        self.scope = scope
        self.failures = failures


def agree(group: Group, step: Callable[[], Value], *, watched: bool = False) -> Agreement[Value]:
    """Called on: all ranks. Run ``step`` on every rank; it counts as done only when it is done on all.

    The guard stops no job whose ranks are in here. With ``watched`` it may until one has failed: for a step as long as
    a training, in which ranks that wait for each other would else never be found.
    """
    if group.world_size == 1:
        return _alone(group, step)
    group.enable_recovery()
    outside, group.guard_suspended = group.guard_suspended, group.guard_suspended or not watched
    group.box.recovering(group.guard_suspended)
    try:
        with _leavable(group):
            return _together(group, step)
    finally:
        group.guard_suspended = outside
        group.box.recovering(outside)


@contextmanager
def _leavable(group: Group) -> Iterator[None]:
    """A region in which a script's own calls of ``torch.distributed`` can be left as ours can.

    Shutting gloo's sockets frees them too, but now and then gloo misses that, and waits until its time-out. Others wait
    on the device, where their process group is aborted.
    """
    if group.scopes or group.device.type != "cpu":
        yield
        return
    with c10d.waiting_by(group.wait):
        yield


def _together(group: Group, step: Callable[[], Value]) -> Agreement[Value]:
    scope = group.advance()
    error: Exception | None = None
    group.scopes += 1
    try:
        group.check("starting a common step")
        value = step()
        group.barrier()
        group.advance()
        return Agreement(value=value)
    except _Recovered as recovered:
        if recovered.scope == scope:
            return Agreement(failures=recovered.failures)
        raise
    except Exception as caught:
        error = caught
    except BaseException as caught:  # the user's Ctrl-C or sys.exit: this rank will not come back
        group.abort(_line(caught), leaving=True)
        raise
    finally:
        group.scopes -= 1
    group.box.recovering(True)
    failure = None
    if not group.is_consequence(error):
        failure = _failure(group.rank, error)
        group.abort(_line(error))
    clear_frames(error)
    if group.leaving:
        raise error if isinstance(error, PeerFailure) else group.explain(error, "running a common step") from error
    failures = _recover(group, scope, failure)
    return Agreement(failures=failures, error=error if failure is not None else None)


def _alone(group: Group, step: Callable[[], Value]) -> Agreement[Value]:
    try:
        return Agreement(value=step())
    except Exception as error:
        failure = _failure(group.rank, error)
        clear_frames(error)
        return Agreement(failures=(failure,), error=error)


def _recover(group: Group, scope: int, failure: Failure | None) -> tuple[Failure, ...]:
    """Called on: all ranks. Form the group again and tell each other what happened."""
    group.rebuild()
    reports: list[tuple[int, int, Failure | None]] = all_objects(group, (scope, group.tick, failure))
    outermost = min(report[0] for report in reports)
    failures = tuple(report[2] for report in reports if report[2] is not None)
    # Past every rank's: one that fails right after this must not disturb those still telling each other.
    group.tick = max(report[1] for report in reports) + 1
    if scope > outermost:
        raise _Recovered(outermost, failures)
    return failures


def _failure(rank: int, error: BaseException) -> Failure:
    details = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Failure(rank=rank, kind=type(error).__name__, message=str(error), details=details)


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def clear_frames(error: BaseException | None) -> None:
    """Drop the local variables that an exception's tracebacks hold, so that memory can be freed."""
    for part in walk_chain(error, suppressed=True):
        traceback.clear_frames(part.__traceback__)


def drop_tracebacks(error: BaseException | None) -> None:
    """The same, and the tracebacks too: a frame without variables still holds what its function closes over.

    Torch calls a module's forward in such a function, so a traceback out of a forward holds the module.
    """
    clear_frames(error)
    for part in walk_chain(error, suppressed=True):
        part.__traceback__ = None
