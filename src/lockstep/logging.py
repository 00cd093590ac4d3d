"""Logging for several processes: a line appears once, or once per process, and then in the order of the ranks.

The level of the logger that was asked for is set, never the root's. Its lines reach the screen without further
ado: where no handler would take a record, the logger gets one of its own, and that one falls silent as soon as the
user installs another.

``in_order`` is not a barrier: a rank waits a moment for those before it, then prints and says who was missing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lockstep import codes, current
from lockstep.config import env, resolve
from lockstep.errors import ConfigError
from lockstep.job_store.signed_store import SignedStore, read_secret
from lockstep.process_group.group import Group
from lockstep.topology import environments
from lockstep.topology.topology import Topology
from lockstep.torch_internals.c10d import default_store

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
    _StreamHandler = logging.StreamHandler[Any]
else:
    # They take no type argument before Python 3.11.
    _Adapter, _StreamHandler = logging.LoggerAdapter, logging.StreamHandler

PATIENCE = 2.0
"""Seconds that an ``in_order`` line waits for lower ranks, all in all."""
_CONNECTING = 10 * PATIENCE
"""Seconds after which no connection is still being tried: torch tries again past the timeout that it is given."""
_LEAST_PATIENCE = 0.05
_POLL = 0.005
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """The logger of that name, whose methods also take ``main_process_only`` and ``in_order``.

    ::

        logger = get_logger(__name__, log_level="INFO")
        logger.info("once for the whole job")
        logger.info("once per process", main_process_only=False)
        logger.info("once per process, rank 0 first", main_process_only=False, in_order=True)

    Args:
        name: As for ``logging.getLogger``.
        log_level: The level of this logger; without it LOCKSTEP_LOG_LEVEL or ACCELERATE_LOG_LEVEL, and without those
            the level stays as it is.
    """
    argument = None if log_level is None else _level(log_level, "log_level")
    level = resolve.resolve("log_level", argument, None, env.snapshot(), _level_of_variable).value
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level)
    return MultiProcessAdapter(logger, {})


def get_notices(name: str) -> MultiProcessAdapter:
    """The same, at INFO where nobody has said how much they want to read: for the few lines everybody should see."""
    adapter = get_logger(name)
    place = adapter.logger
    while place.parent is not None:
        if place.level != logging.NOTSET:
            return adapter
        place = place.parent
    if place.level == logging.WARNING:  # the root's level as Python sets it
        adapter.logger.setLevel(logging.INFO)
    return adapter


def _level_of_variable(text: str, name: str) -> int | None:
    return _level(text, name) if text.strip() else None  # `export NAME=` is how shells unset


def _level(value: str | int, name: str) -> int:
    if isinstance(value, str):
        known = logging.getLevelName(value.strip().upper())  # levels that the user added are known, too
        if isinstance(known, int):
            return known
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ConfigError(f"{name}={value!r} is not a log level. Allowed: {', '.join(_LEVELS)}.")


class MultiProcessAdapter(_Adapter):
    """A logger that knows which process it is in.

    ``stacklevel`` counts as in Accelerate: 2 is the line that logs, 3 the one that has called it. Every logging method
    takes two more arguments:

    main_process_only (default True): only rank 0 logs.
    in_order (default False): with ``main_process_only=False``, the ranks' lines appear in the order of the ranks.
    A rank waits for lower ones no longer than `PATIENCE`, then logs and names those that did not.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log, if this process is to."""
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        place = current.placement()
        if main_process_only and place.rank != 0:
            return
        caller, between = _caller()
        kwargs["stacklevel"] = kwargs.get("stacklevel", 2) - 1 + between  # Accelerate counts its own method as 1
        msg, passed = self.process(msg, kwargs)
        if level >= logging.WARNING and (code := codes.code_of(self.logger.name)):
            msg = f"{str(msg).rstrip()} [{code}]"
        _ensure_handler(self.logger)
        if main_process_only or not in_order or place.world_size == 1:
            self.logger.log(level, msg, *args, **passed)
            return
        turns = _find_turns(place)
        turn = _Turn(note=_unordered(place.rank)) if turns is None else turns.take(_site(caller))
        try:
            self.logger.log(level, f"{msg} ({turn.note})" if turn.note else msg, *args, **passed)
        finally:
            turn.end()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Join the adapter's own ``extra`` into the call's, which the base class would drop."""
        if self.extra:
            kwargs["extra"] = {**self.extra, **(kwargs.get("extra") or {})}
        return msg, kwargs

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Warn, but only once per process about the same thing."""
        if self.isEnabledFor(logging.WARNING) and _memory.is_new((self.logger.name, str(msg), repr(args))):
            self.warning(msg, *args, **kwargs)


class _Memory:
    """What this process has said already."""

    def __init__(self) -> None:
        self._said: set[Any] = set()

    def is_new(self, what: Any) -> bool:
        """Whether this is the first time; it no longer is afterwards."""
        if what in self._said:
            return False
        self._said.add(what)
        return True


_memory = _Memory()


# --- who and where -----------------------------------------------------------------------------------------------


_HERE = get_logger.__code__.co_filename
_STANDARD = logging.addLevelName.__code__.co_filename
_COUNTS_STANDARD = sys.version_info[:2] < (3, 11)
"""Whether ``stacklevel`` counts the frames of the logging module, too."""


def _caller() -> tuple[FrameType | None, int]:
    """The frame that called us, and how much ``stacklevel`` has to grow to get there."""
    frame: FrameType | None = sys._getframe(1)
    between = 0
    while frame is not None and frame.f_code.co_filename in (_HERE, _STANDARD):
        between += frame.f_code.co_filename == _HERE or _COUNTS_STANDARD
        frame = frame.f_back
    return frame, between


def _site(frame: FrameType | None) -> str:
    # Without its folder: the same script can lie in different places on different machines.
    return "?" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


# --- the handler of last resort ----------------------------------------------------------------------------------


class _OwnHandler(_StreamHandler):
    """Prints to stderr as long as nobody else handles the record."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print, unless a handler was installed since that prints it as well."""
        if any(not isinstance(handler, _OwnHandler) for _, handler in _on_path(logging.getLogger(record.name))):
            return
        self.stream = sys.stderr  # as it is now: notebooks and tests exchange it
        with _above_bars(self.stream):
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Level, rank where there are several, name, message."""
        place = current.placement()
        rank = f" [rank {place.rank}]" if place.world_size > 1 else ""
        self.formatter = logging.Formatter(f"%(levelname)s{rank} %(name)s: %(message)s")
        return super().format(record)


def _above_bars(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Progress bars of this process make room for a line, and are drawn again below it."""
    bars = sys.modules.get("tqdm.std")  # not loaded: there is none
    if bars is None:
        return contextlib.nullcontext()
    room: contextlib.AbstractContextManager[Any] = bars.tqdm.external_write_mode(file=stream)
    return room


def _on_path(logger: logging.Logger) -> Iterator[tuple[logging.Logger, logging.Handler]]:
    """The handlers that get this logger's records, with where they sit."""
    place: logging.Logger | None = logger
    while place is not None:
        for handler in list(place.handlers):
            yield place, handler
        place = place.parent if place.propagate else None


def _ensure_handler(logger: logging.Logger) -> None:
    """Have exactly one of us on the path when there is nobody else, and none when there is."""
    found = list(_on_path(logger))
    own = [(place, handler) for place, handler in found if isinstance(handler, _OwnHandler)]
    if not found:
        logger.addHandler(_OwnHandler())
    elif len(own) < len(found):
        for place, handler in own:
            place.removeHandler(handler)
    else:
        for place, handler in own[:-1]:  # a parent has got one since
            place.removeHandler(handler)


# --- taking turns ------------------------------------------------------------------------------------------------


def _unordered(rank: int) -> str:
    if rank == 0 or not _memory.is_new("in_order without a session"):
        return ""
    return "in_order: no Accelerator yet, and no launcher with a store, so the ranks cannot wait for each other"


@dataclass
class _Turn:
    """One line's place in the order of the ranks."""

    note: str = ""
    """What to tell the reader about the order."""
    ready: threading.Event = field(default_factory=threading.Event)
    """Set when the lower ranks have logged, or are not waited for any longer."""
    logged: threading.Event = field(default_factory=threading.Event)
    """Set when this rank has."""
    worker: threading.Thread | None = None

    def end(self) -> None:
        """Let the next rank go; normally a matter of microseconds."""
        self.logged.set()
        if self.worker is not None:
            self.worker.join(PATIENCE / 20)


_workers: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _join_workers() -> None:
    """A thread that comes out of a call to the store while Python shuts down ends the process with SIGABRT."""
    deadline = time.monotonic() + _CONNECTING
    for worker in list(_workers):
        worker.join(max(0.0, deadline - time.monotonic()))


atexit.register(_join_workers)


class _Turns:
    """This process's side of the order, in one store.

    Each rank keeps count in the store, per line of the script, of how often it came to an ``in_order`` call and how
    often it got it done. A rank's turn is when the rank before it is done as often as this one came. Counters do not
    pile up, as a key per line logged would. All talking is done by a thread, so that a store that is slow to answer (a
    new connection can take seconds) cannot hold the caller longer than promised.
    """

    def __init__(self, connect: Callable[[], SignedStore], rank: int, world_size: int) -> None:
        self._connect = connect
        """Makes a connection of its own: one that somebody waits on serves nobody else meanwhile."""
        self._rank = rank
        self._world_size = world_size
        self._own_store: SignedStore | None = None
        self._unreachable = False
        """Whether a connection was tried in vain. It is not tried again: each line would wait for it, and the exit."""
        self._patience: dict[str, float] = {}
        """Line of the script -> seconds to wait there, where ranks were missing the last time."""
        self._lock = threading.Lock()

    def take(self, site: str) -> _Turn:
        """Wait for this rank's turn, at most `PATIENCE`."""
        turn = _Turn()
        turn.worker = threading.Thread(
            target=self._serve, args=(turn, site, time.monotonic()), name="lockstep-log-order", daemon=True
        )
        _workers.add(turn.worker)
        turn.worker.start()
        if not turn.ready.wait(PATIENCE):
            turn.note = "in_order: the job's store does not answer, so the order is not certain"
            turn.worker = None
        return turn

    def _serve(self, turn: _Turn, site: str, started: float) -> None:
        # One turn at a time, so that threads of this process that log at once do not count each other's turns.
        try:
            with self._lock:
                store = self._store()
                note = self._wait(store, site, started)
                if note:
                    turn.note = note
                turn.ready.set()
                turn.logged.wait()
                self._count(store, "done", site)
        except (RuntimeError, ConnectionError):
            turn.note = turn.note or "in_order: the job's store is gone, so the order is not certain"
        finally:
            turn.ready.set()

    def _store(self) -> SignedStore:
        if self._unreachable:
            raise ConnectionError("the job's store did not answer before")
        if self._own_store is None:
            self._unreachable = True
            self._own_store = self._connect()
            self._unreachable = False
        return self._own_store

    def _key(self, what: str, site: str, rank: int) -> str:
        return f"log/{what}/{site}/{rank}"

    def _count(self, store: SignedStore, what: str, site: str) -> int:
        """One more of this rank, which alone writes there."""
        key = self._key(what, site, self._rank)
        number = (store.peek(key, int) or 0) + 1
        store.set(key, str(number))
        return number

    def _wait(self, store: SignedStore, site: str, started: float) -> str:
        """Wait for the rank before; a note when some lower rank has not come."""
        mine = self._count(store, "came", site)
        if self._rank == 0:
            return ""

        def short(what: str, ranks: range) -> list[int]:
            return [rank for rank in ranks if (store.peek(self._key(what, site, rank), int) or 0) < mine]

        patience = self._patience.get(site, PATIENCE)
        # Lower ranks give up a little sooner: those that wait for the same absent one still log in order.
        share = 0.95 - 0.1 * (self._world_size - 1 - self._rank) / self._world_size
        before = range(self._rank - 1, self._rank)
        while (late := short("done", before)) and time.monotonic() < started + patience * share:
            time.sleep(_POLL)
        missing = short("came", range(self._rank)) or late
        if not missing:
            self._patience.pop(site, None)
            return ""
        # A rank that left this line out once lags behind here for good, which looks the same as being late each time.
        # So every line says it, but waits for it ever less.
        self._patience[site] = max(patience / 2, _LEAST_PATIENCE)
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
        return f"in_order: {who} did not log here as often as this rank; waited {time.monotonic() - started:.1f} s"


_turns: weakref.WeakKeyDictionary[Group, _Turns] = weakref.WeakKeyDictionary()
_early_turns: dict[tuple[Any, ...], _Turns] = {}
"""Those of processes that have not joined the job, by the store."""


def _find_turns(place: Topology | environments.Placement) -> _Turns | None:
    """In the job's store; before it is joined, in that of the script's own process group or of the launcher."""
    session = current.peek()
    if session is not None:
        group = session.group
        if group not in _turns:
            _turns[group] = _Turns(group.store.clone, group.rank, group.world_size)
        return _turns[group]
    if dist.is_initialized():
        store = default_store()
        key: tuple[Any, ...] = (id(store),)
        connect = functools.partial(_cloned, store)
    elif place.agent_store:
        key = (place.main_address, place.main_port, place.attempt)
        connect = functools.partial(_launcher_store, place)
    else:
        return None  # rank 0 opens the store when it joins the job
    if key not in _early_turns:
        _early_turns[key] = _Turns(connect, place.rank, place.world_size)
    return _early_turns[key]


def _cloned(store: Any) -> SignedStore:
    """A connection of its own to the store of the script's process group."""
    return SignedStore(store.clone(), read_secret(env.snapshot()), "lockstep/before_joining")


def _launcher_store(place: Topology | environments.Placement) -> SignedStore:
    """The store that an elastic agent hosts from before the ranks start; nobody else is waited for."""
    assert place.main_address is not None  # where several processes are
    assert place.main_port is not None
    store = dist.TCPStore(  # type: ignore[attr-defined]
        place.main_address,
        place.main_port,
        is_master=False,
        timeout=timedelta(seconds=PATIENCE),
        wait_for_workers=False,
    )
    return SignedStore(store, read_secret(env.snapshot()), f"lockstep/attempt_{place.attempt}/before_joining")
