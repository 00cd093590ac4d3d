"""Pools of real processes on one machine, one per rank, that run a function together.

::

    with Ranks(2) as pool:
        losses = pool.run(train, steps=3)      # [what rank 0 returned, what rank 1 returned]

``run_ranks(train, 2, steps=3)`` does the same with a pool that all its callers share.

A process is forked from a server that has torch imported already. So variables that torch reads while it is being
imported have no effect here, and all ranks have the same hash seed. The function is found by its name, so it lives at
the top of a module.
"""

from __future__ import annotations

import atexit
import os
import pickle
import random
import secrets
import shutil
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from lockstep.config import env as environment
from lockstep.job_store import signed_store
from lockstep.testing import _rank
from lockstep.testing._member import KILL_SECONDS, RankProcess, start
from lockstep.testing.outcome import STOPPED, TIMED_OUT, Outcome, RanksFailed, innermost_frame

T = TypeVar("T")
OnFailure = Literal["raise", "collect"]
Variables = Mapping[str, "str | None"]

# Bounds on waits that normally take milliseconds.
_RESET_SECONDS = 20.0
_STACKS_SECONDS = 0.5

# Below the range from which the kernel hands out ports by itself, so that no connection takes the port meanwhile.
_PORTS = range(20_000, 32_000)


class Ranks:
    """Processes that run a function together, each with the variables of its rank; used by one thread at a time.

    The processes start with the first run or on entering the ``with`` block, serve one run after another, and are all
    replaced after a run in which any of them failed.
    """

    def __init__(
        self, world_size: int, *, timeout: float = 60.0, grace: float = 5.0, env: Variables | None = None
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: a pool has at least one rank.")
        self.world_size = world_size
        self._timeout = timeout
        self._grace = grace
        self._env = dict(env or {})
        self._members: list[RankProcess] = []
        self._folder: Path | None = None
        self._owner = os.getpid()
        self._closed = False
        _POOLS.every.add(self)

    def __enter__(self) -> Ranks:
        self._ensure_started()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The processes there are now, in rank order; empty before the start and after a failure."""
        return [member.pid for member in self._members]

    @overload
    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float | None = None,
        grace: float | None = None,
        env: Variables | None = None,
        reset: bool = True,
        on_failure: Literal["raise"] = "raise",
        **kwargs: Any,
    ) -> list[T]: ...

    @overload
    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float | None = None,
        grace: float | None = None,
        env: Variables | None = None,
        reset: bool = True,
        on_failure: Literal["collect"],
        **kwargs: Any,
    ) -> list[Outcome]: ...

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float | None = None,
        grace: float | None = None,
        env: Variables | None = None,
        reset: bool = True,
        on_failure: OnFailure = "raise",
        **kwargs: Any,
    ) -> list[T] | list[Outcome]:
        """Call ``fn(*args, **kwargs)`` on every rank and return what each returned, in rank order.

        Every rank sees the parent's ``sys.path``, directory and environment of this moment, the variables of its
        rank with a MASTER_PORT nobody used before, then the pool's ``env`` and this one (None removes a variable).

        A rank that raises ends its process a moment later, as a script would; one that returns stays until all have.

        Args:
            fn: A function at the top of an importable module.
            args: Passed on to it.
            timeout: Seconds for all ranks to return; then their stacks are reported and they are killed.
            grace: Seconds that the others get after the first failure.
            env: Variables for this run.
            reset: Leave the process group and forget the session on every rank, once all have returned.
            on_failure: "raise" stops the run at the first failure and raises `RanksFailed`; "collect" lets the others
                go on until the time-out and returns an `Outcome` for every rank.
            kwargs: Passed on to it.
        """
        __tracebackhide__ = True
        call = _pickled_call(fn, args, kwargs)
        try:
            outcomes = self._run(
                call,
                overrides={**self._env, **(env or {})},
                timeout=self._timeout if timeout is None else timeout,
                grace=(self._grace if grace is None else grace) if on_failure == "raise" else None,
                reset=reset,
            )
        except BaseException:  # an interrupt, too, must not leave ranks in the middle of a call
            self._kill()
            raise
        if not all(outcome.ok for outcome in outcomes):
            self._kill()
            if on_failure == "raise":
                raise RanksFailed(f"{fn.__module__}.{fn.__qualname__}", outcomes)
        return outcomes if on_failure == "collect" else [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """End the processes. Harmless when repeated."""
        self._closed = True
        self._kill()

    def _run(
        self, call: bytes, *, overrides: Variables, timeout: float, grace: float | None, reset: bool
    ) -> list[Outcome]:
        folder = self._ensure_started()
        request = _rank.RankRequest(
            call=call,
            path=[entry or os.getcwd() for entry in sys.path],
            cwd=os.getcwd(),
            environ={
                signed_store.VARIABLE: secrets.token_hex(32),
                **environment.snapshot(),
                "LOCKSTEP_RUN_DIR": str(folder / "run"),
            },
            overrides=overrides,
            world_size=self.world_size,
            port=_free_port(),
        )
        _rank.request_file(folder).write_bytes(pickle.dumps(request))
        started = time.monotonic()
        outcomes = self._gather(_rank.RUN, started, timeout, grace)
        if reset and all(outcome.ok for outcome in outcomes):
            # Only now: a rank that left while others still ran would take rank 0's store away from them.
            resets = self._gather(_rank.RESET, time.monotonic(), _RESET_SECONDS, grace)
            outcomes = [run if left.ok else _in_reset(left) for run, left in zip(outcomes, resets, strict=True)]
        return outcomes

    def _gather(self, word: bytes, started: float, timeout: float, grace: float | None) -> list[Outcome]:
        """Give the word to all ranks and wait for how each ends, no longer than allowed."""
        for member in self._members:
            member.send(word)
        deadline = started + timeout
        ended: dict[int, Outcome] = {}
        waiting = dict(enumerate(self._members))
        while waiting and (left := deadline - time.monotonic()) > 0:
            wait([handle for member in waiting.values() for handle in (member.pipe, member.process.sentinel)], left)
            for rank, member in list(waiting.items()):
                outcome = member.poll(started)
                if outcome is None:
                    continue
                ended[rank] = outcome
                del waiting[rank]
                if grace is not None and not outcome.ok:
                    deadline = min(deadline, time.monotonic() + grace)
        if waiting:
            failed = grace is not None and any(not outcome.ok for outcome in ended.values())
            ended.update(_unfinished(waiting, time.monotonic() - started, after_failure=failed))
        return [ended[rank] for rank in range(self.world_size)]

    def _ensure_started(self) -> Path:
        if self._closed:
            raise RuntimeError("This pool of ranks has been closed.")
        if self._folder is not None and all(member.process.is_alive() for member in self._members):
            return self._folder
        self._kill()
        self._owner = os.getpid()
        self._folder = Path(tempfile.mkdtemp(prefix="lockstep-ranks-"))
        self._members = [RankProcess(rank, self._folder) for rank in range(self.world_size)]
        try:
            start(self._members)
        except BaseException:
            self._kill()
            raise
        return self._folder

    def _kill(self) -> None:
        members, self._members = self._members, []
        folder, self._folder = self._folder, None
        if os.getpid() != self._owner:
            return  # a forked copy of the parent: the processes are not its own
        for member in members:
            member.kill()
        deadline = time.monotonic() + KILL_SECONDS
        for member in members:
            member.wait_for_end(deadline)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


class _Pools:
    """The pools of this process: none may outlive it, and those of `run_ranks` are shared by size."""

    def __init__(self) -> None:
        self.every: weakref.WeakSet[Ranks] = weakref.WeakSet()
        self.shared: dict[int, Ranks] = {}


_POOLS = _Pools()


@overload
def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    grace: float | None = None,
    env: Variables | None = None,
    reset: bool = True,
    on_failure: Literal["raise"] = "raise",
    **kwargs: Any,
) -> list[T]: ...


@overload
def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    grace: float | None = None,
    env: Variables | None = None,
    reset: bool = True,
    on_failure: Literal["collect"],
    **kwargs: Any,
) -> list[Outcome]: ...


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    on_failure: OnFailure = "raise",
    **kwargs: Any,
) -> list[T] | list[Outcome]:
    """`Ranks.run` on the pool of this size that all callers in the process share."""
    __tracebackhide__ = True
    pool = _POOLS.shared.get(world_size)
    if pool is None:
        pool = _POOLS.shared[world_size] = Ranks(world_size)
    if on_failure == "collect":
        return pool.run(fn, *args, timeout=timeout, on_failure="collect", **kwargs)
    return pool.run(fn, *args, timeout=timeout, **kwargs)


def close_pools() -> None:
    """End the pools that `run_ranks` shares; it starts new ones when it is called again."""
    while _POOLS.shared:
        _POOLS.shared.popitem()[1].close()


def _close_every_pool() -> None:
    for pool in list(_POOLS.every):
        pool.close()


# Registered after multiprocessing's own exit handler and so run before it: that one waits for every process.
atexit.register(_close_every_pool)


def _unfinished(members: Mapping[int, RankProcess], seconds: float, *, after_failure: bool) -> dict[int, Outcome]:
    """Outcomes of ranks that are still running, with their stacks."""
    for member in members.values():
        with suppress(OSError):
            os.kill(member.pid, _rank.STACKS_SIGNAL)
    deadline = time.monotonic() + _STACKS_SECONDS
    written: dict[int, str] = {}
    while time.monotonic() < deadline:
        time.sleep(0.05)
        before, written = written, {rank: member.stacks() for rank, member in members.items()}
        if before == written and all(written.values()):
            break
    outcomes = {}
    for rank, member in members.items():
        line = (
            "still running when it was stopped because another rank had failed"
            if after_failure
            else f"had not finished after {seconds:.1f} s"
        )
        where = innermost_frame(written.get(rank, ""))
        outcomes[rank] = member.failure(
            seconds,
            error_type=STOPPED if after_failure else TIMED_OUT,
            error_line=f"{line}, in {where}" if where else line,
            error_text=f"{line}\n{written.get(rank) or '(no stacks came: the process is stopped or going down)'}",
        )
    return outcomes


def _in_reset(outcome: Outcome) -> Outcome:
    where = "in the reset after the function had returned: "
    return replace(outcome, error_line=where + outcome.error_line, error_text=where + outcome.error_text)


def _pickled_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        pickle.dumps(fn)
    except Exception as error:
        raise TypeError(
            f"{fn!r} cannot be sent to the ranks: {error}. A function is sent by its name: define it at the top of a "
            "module, and pass what it needs as arguments."
        ) from None
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise TypeError(f"An argument for {fn.__qualname__} cannot be sent to the ranks: {error}") from error


def _free_port() -> int:
    # Not the seeded generator: two test runs side by side would pick the same ports.
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"None of 100 ports tried between {_PORTS.start} and {_PORTS.stop} is free.")
