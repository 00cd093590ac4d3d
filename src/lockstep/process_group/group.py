"""The process group of the job, through all of its generations.

Torch's process group cannot be left while a peer is missing: a rank that fails alone leaves the others waiting in
a collective. ``Group`` adds what is needed to leave together and start again:

- A *generation* is one life of the torch process group. Each has its own prefix in the store.
- The rank that fails writes why under the generation's ``end`` key and wakes the others: a thread of every rank
  waits for its own ``wake`` key on a store connection of its own, which costs nothing while all is well.
- Then whatever this rank is blocked in is freed: our own collectives wait in slices and look up;
  DDP's all-reduces are waited for by us in the same way; the sockets of gloo are shut for everything else;
  other backends are aborted.
- Then all ranks meet in the store and make the next generation.

*Ticks* keep this from reaching a rank too early. Each entry into, and each agreed exit from, a scope of
``comm.agree`` is one tick, in the same order on all ranks. A rank that failed at tick 7 has completed everything up
to tick 6, so a rank at tick 6 is left alone until it gets to 7 by itself.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lockstep.blackbox.box import NoBox
from lockstep.blackbox.step_clock import StepClock
from lockstep.config import env
from lockstep.errors import LOST_PEER, PeerFailure, TopologyError
from lockstep.host.python_objects import keep_forever
from lockstep.job_store.signed_store import SignedStore, read_secret
from lockstep.process_group import gloo_sockets, gloo_threads, job_secret, startup_diagnostics
from lockstep.process_group.abort import AbortListener, AbortReason
from lockstep.process_group.monitor import Monitor
from lockstep.process_group.store import open_store, port_of
from lockstep.rundir.crash_report import Advice
from lockstep.rundir.format_ranks import name_ranks
from lockstep.topology.topology import Topology
from lockstep.torch_internals.c10d import backend_for, default_store

if TYPE_CHECKING:
    from lockstep.comm.tensors import BufferPlan
    from lockstep.comm.verify import HandshakeBuffers

POLL = timedelta(seconds=0.2)
"""How long a wait of ours sleeps before it looks whether the generation has ended."""
ABORT_REASON_TIMEOUT = 2.0
"""Seconds a rank waits, after its connection broke, for the true cause to be written."""
SHUTDOWN_TIMEOUT = 3.0
"""Seconds the store's host waits at the end for the others to close."""
DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long a collective may take when nothing else was asked for."""


class _Backends(dict[torch.device, Any]):
    """Torch's backend for each device. Its process group would get there through the dispatcher, for tracers' sake."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = weakref.ref(group)

    def __missing__(self, device: torch.device) -> Any:
        group = self._group()
        assert group is not None
        found = self[device] = backend_for(group.pg, device)
        return found


class GroupListener(Protocol):
    """What has to know of a group's generations."""

    def recovery_enabled(self) -> None:
        """From now on a failure is to be survived."""

    def group_rebuilt(self) -> None:
        """Called on: all ranks. There is a new generation."""


class Group:
    """This process's membership in the job."""

    def __init__(self, topology: Topology, *, timeout: timedelta | None = None, debug: bool = False) -> None:
        self.rank = topology.rank
        self.world_size = topology.world_size
        self.device = topology.device
        self.backend = topology.backend
        self.timeout = timeout or DEFAULT_TIMEOUT
        self.debug = debug
        """Whether each of our collectives is verified before it runs."""
        self.generation = 0
        self.tick = 0
        self.scopes = 0
        """Scopes of ``comm.agree`` that are open: inside one, a failure here is survived."""
        self.guard_suspended = False
        """Whether one of them keeps the guard from stopping the job."""
        self.keeps_old_groups = False
        """Whether old process groups are kept to the end: a collective that we do not see may be under way in them."""
        self.recovery_enabled = False
        """Whether a scope of ``comm.agree`` was ever opened, so that a rank must be able to leave whatever it is in."""
        self.monitor = Monitor()
        """What watches over this rank: the guard, once it is there."""
        self.plans: dict[Any, BufferPlan] = {}
        """How structures of tensors are packed, by their signatures; kept for one generation."""
        self.handshake: HandshakeBuffers | None = None
        """What debug mode compares collectives through, in one generation."""
        self.backends = _Backends(self)
        """What carries the tensors of each device in this generation: quicker to call than the process group."""
        self.abort_reason: AbortReason | None = None
        """Why the generation has ended; None while all is well."""
        self.store_lost = False
        """Whether the job's store does not answer any more, and a thread is blocked in its connection."""
        self._pg: Any = None
        self._store: SignedStore | None = None
        self._side: SignedStore | None = None
        self._lock = threading.Lock()
        self._listener: AbortListener | None = None
        self._own_ports: frozenset[int] = frozenset()
        self._peer_ports: frozenset[int] = frozenset()
        self._abandoned: list[tuple[Any, Any]] = []
        self._under_way: list[tuple[weakref.ref[Any], list[Any]]] = []
        self._listeners: list[weakref.ref[GroupListener]] = []
        self._asked: Counter[str] = Counter()
        self._latest: dict[str, str] = {}
        self._owned = False
        self._hosts_store = False
        self._excepthook: Any = None

    # --- joining -----------------------------------------------------------------------------------------------

    @classmethod
    def connect(
        cls,
        topology: Topology,
        *,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        debug: bool = False,
        session: int = 0,
        stores: dict[str, SignedStore] | None = None,
        notify_peers: Callable[[Group], None] | None = None,
    ) -> Group:
        """Called on: all ranks. Join the job; a process that nobody started as part of one is alone.

        ``session`` counts how often this process has joined before, and ``stores`` holds the store of the last time:
        a process that leaves and joins again finds the same store, and a fresh place in it. ``notify_peers`` sees to it
        that the others are told when this rank fails.
        """
        group = cls(topology, timeout=timeout, debug=debug)
        if topology.backend is None:
            return group
        if notify_peers is not None and group.world_size > 1:
            notify_peers(group)  # before torch puts its own hook around it
        if dist.is_initialized():
            group._adopt(topology, session)
        else:
            store = open_store(topology, init_method, group.timeout, {} if stores is None else stores)
            place = f"lockstep/attempt_{topology.attempt}/session_{session}"
            group._store = store.under(place)
            with startup_diagnostics.of_the_others(topology, group._root):
                job_secret.compare(group._root, group.rank, group.world_size, group.timeout)
                group._join()
            # All ranks are in this session, so they have left the one before: nobody needs its keys.
            forget = store.delete_all if group.rank == 0 else store.delete_own
            forget(f"{place.rpartition('/')[0]}/session_", but=(f"{place}/",))
            group._owned = True
            group._hosts_store = topology.rank == 0 and topology.world_size > 1 and not topology.agent_store
        if group.world_size > 1:
            group._listen()
        return group

    def _adopt(self, topology: Topology, session: int) -> None:
        """Take over the process group that the user's script has made."""
        if dist.get_world_size() != self.world_size or dist.get_rank() != self.rank:
            raise TopologyError(
                f"torch.distributed is initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but the "
                f"environment says rank {self.rank} of {self.world_size}. Let Accelerator() make the process group, "
                "or set RANK and WORLD_SIZE to match."
            )
        self._pg = dist.group.WORLD
        self.backend = dist.get_backend()
        secret = read_secret(env.snapshot())
        place = f"lockstep/attempt_{topology.attempt}/session_{session}"
        self._store = SignedStore(default_store(), secret, place)
        job_secret.compare(self._store, self.rank, self.world_size, self.timeout)
        self._store_barrier("adopt")
        self._exchange_ports(gloo_sockets.list_fds())

    def _join(self) -> None:
        """Make this generation's process group."""
        before = gloo_sockets.list_fds()
        hook = sys.excepthook
        self._excepthook = self._excepthook or hook
        bound = self.device if self.device.type == "cuda" else None
        with _flight_recorder():
            dist.init_process_group(
                self.backend,
                store=PrefixStore(self._root.full(f"generation_{self.generation}"), self._root.raw),
                rank=self.rank,
                world_size=self.world_size,
                timeout=self.timeout,
                device_id=bound,
            )
        if self.generation:
            sys.excepthook = hook  # each initialisation wraps the hook of the one before
        self._pg = dist.group.WORLD
        self._exchange_ports(gloo_sockets.list_fds() - before)

    def _exchange_ports(self, fds: frozenset[int]) -> None:
        """Tell the others which ports our gloo listens on, and learn theirs."""
        if self.world_size == 1:
            return
        self._own_ports = gloo_sockets.listener_ports(fds) - {port_of(self._root.raw)}
        if not self._shuts_sockets:
            return  # every rank would read every other's key, for nothing: 17 million reads on 4,096 ranks
        self._root.set(self.key(f"ports/{self.rank}"), json.dumps(sorted(self._own_ports)))
        peers = [self.key(f"ports/{peer}") for peer in range(self.world_size) if peer != self.rank]
        answers = self._root.gather(peers, _read_ports, self.timeout)
        self._peer_ports = frozenset(port for answer in answers for port in answer)

    # --- what watches over it ----------------------------------------------------------------------------------

    @property
    def box(self) -> NoBox:
        """Where this rank writes what it is doing."""
        return self.monitor.box

    @property
    def boxes(self) -> Path | None:
        """The folder in which the boxes of this node's ranks are."""
        return self.monitor.boxes

    @property
    def clock(self) -> StepClock | None:
        """When this rank got data and was in backward, for who looks for a straggler."""
        return self.monitor.clock

    # --- talking -----------------------------------------------------------------------------------------------

    @property
    def pg(self) -> Any:
        """Torch's process group of this generation."""
        return self._pg

    @property
    def store(self) -> SignedStore:
        """A store that all ranks share, and that outlives generations."""
        return self._root

    @property
    def _root(self) -> SignedStore:
        if self._store is None:
            raise TopologyError("This process is not part of a job of several processes.")
        return self._store

    def key(self, name: str) -> str:
        """A key of this generation: its writer removes it once all ranks are in the next one."""
        return f"generation_{self.generation}/{name}"

    @property
    def talks_host(self) -> bool:
        """Whether tensors in host memory can travel as they are."""
        return self.device.type == "cpu" or (self.backend is not None and "gloo" in self.backend)

    @property
    def _shuts_sockets(self) -> bool:
        """Whether what waits in this group is freed by shutting its sockets; else the group is aborted."""
        return self.backend is not None and "nccl" not in self.backend

    @property
    def aborted(self) -> bool:
        """Whether the generation ended at a point this rank has reached."""
        return self.abort_reason is not None and self.abort_reason.tick <= self.tick

    @property
    def leaving(self) -> bool:
        """Whether the rank that ended the generation will not come back."""
        return self.abort_reason is not None and self.abort_reason.leaving

    def ordinal(self, name: str, line: str = "") -> int:
        """How often this was asked for the name before: tells things apart that one line makes several of.

        With ``line``, whose names are never asked for again once another one was, only the latest is remembered.
        """
        if line and (latest := self._latest.get(line)) != name:
            self._asked.pop(latest or "", None)
            self._latest[line] = name
        self._asked[name] += 1
        return self._asked[name] - 1

    def check(self, doing: str) -> None:
        """Raise when another rank has failed and this one need not start ``doing`` anything."""
        if self.abort_reason is not None and self.aborted:
            raise self.abort_reason.failure(doing)

    def wait(self, work: Any, doing: str) -> None:
        """Wait for a collective of ours, in slices, so that the end of the generation is noticed."""
        done = False
        while True:
            try:
                work.wait(POLL)
            except RuntimeError as error:
                if self.aborted and self.abort_reason is not None:
                    self._abandoned.append((self._pg, work))
                    raise self.abort_reason.failure(doing) from None
                if done:
                    raise self.explain(error, doing) from error
                done = work.is_completed()  # maybe since the slice ran out: only the next error is its own
            else:
                return

    def barrier(self) -> None:
        """Called on: all ranks. Wait until every rank is here."""
        if self.world_size == 1:
            return
        self.check("waiting for everyone")
        options = dist.BarrierOptions()
        if self.device.type != "cpu":
            options.device_ids = [self.device.index or 0]
        self.wait(self._pg.barrier(options), "waiting for everyone")

    def explain(self, error: BaseException, doing: str) -> PeerFailure:
        """What a transport error means: the failure that another rank reported, else a broken line."""
        # A rank that failed tells the others before it closes its box: of one that came to its end nothing will come.
        left = [] if self.abort_reason is not None else self.monitor.find_left()
        if not left:
            self._await_abort_reason()
        if self.abort_reason is not None:
            return self.abort_reason.failure(doing)
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        dead = self.monitor.find_dead()
        if dead:
            return _advised(
                f"While {doing}, rank {self.rank} lost the connection to {name_ranks(box.rank for box in dead)}, which "
                f"died ({first}).",
                self.monitor.advise_on_dead(dead),
                dead[0].rank,
            )
        if "timed out" in first.lower() or "timeout" in first.lower():
            return PeerFailure(
                f"While {doing}, rank {self.rank} waited {self.timeout.total_seconds():.0f} s for another rank, which "
                "did not come. It is busy or stuck elsewhere: look at what it does, or allow more time with "
                "InitProcessGroupKwargs(timeout=…)."
            )
        left = left or self.monitor.find_left()
        if left:
            return _advised(
                f"While {doing}, rank {self.rank} lost the connection to {name_ranks(box.rank for box in left)}, which "
                "came to the end of the script.",
                self.monitor.advise_on_left(left),
                left[0].rank,
            )
        return PeerFailure(
            f"While {doing}, rank {self.rank} lost the connection to another rank ({first}). "
            "That rank's own output shows why it ended."
        )

    def is_consequence(self, error: BaseException) -> bool:
        """Whether an error on this rank only follows from another rank's failure."""
        if not _is_broken(error) and not isinstance(error, PeerFailure):
            return False
        if not (isinstance(error, PeerFailure) and error.lead):  # else it was waited for when the error was made
            self._await_abort_reason()
        if self.abort_reason is None:
            return bool(self.monitor.find_dead())
        return self.abort_reason.rank != self.rank and self.aborted

    def advise_on_lost_peers(self, error: BaseException) -> Advice | None:
        """After a broken connection in one of torch's own calls: ranks of this node that died or left."""
        if not _is_broken(error) or isinstance(error, PeerFailure) or not LOST_PEER.search(str(error)):
            return None
        if self.abort_reason is None:
            self._await_abort_reason()
        if dead := self.monitor.find_dead():
            return self.monitor.advise_on_dead(dead)
        left = self.monitor.find_left() if self.abort_reason is None else []
        return self.monitor.advise_on_left(left, "backward") if left else None

    def _await_abort_reason(self) -> None:
        """A connection breaks a moment before the reason for it is known: give it that moment."""
        deadline = time.monotonic() + ABORT_REASON_TIMEOUT
        while self.abort_reason is None and time.monotonic() < deadline:
            time.sleep(0.01)

    # --- leaving -----------------------------------------------------------------------------------------------

    def advance(self) -> int:
        """Count one more point that all ranks pass in the same order; the new tick."""
        self.tick += 1
        if self.aborted:
            self._free()
        return self.tick

    def add_listener(self, listener: GroupListener) -> None:
        """Have it called for as long as it lives."""
        self._listeners = [*map(weakref.ref, self._live_listeners()), weakref.ref(listener)]

    def _live_listeners(self) -> list[GroupListener]:
        return [listener for reference in self._listeners if (listener := reference()) is not None]

    def enable_recovery(self) -> None:
        """Called on: all ranks. Be ready to leave whatever this rank will be blocked in."""
        if not self.recovery_enabled:
            self.recovery_enabled = True
            for listener in self._live_listeners():
                listener.recovery_enabled()

    def abort(self, what: str, *, leaving: bool = False, details: str = "") -> AbortReason:
        """Called on: the rank that failed. Tell the others; the first cause told is the one that counts."""
        mine = AbortReason(rank=self.rank, tick=self.tick, what=what, leaving=leaving, details=details)
        try:
            cause: AbortReason = self._root.claim(self.key("end"), json.dumps(asdict(mine)), AbortReason.read)
        except dist.DistNetworkError as error:
            raise self._lost_store(f"tell the others of its failure ({what})") from error
        except TopologyError:  # who was first can no longer be known: better two causes than none
            cause = mine
        # First the reason, then the broken lines, or others would see those and not know why.
        for peer in range(self.world_size):
            self._root.set(self.key(f"wake/{peer}"), json.dumps(asdict(cause)))
        self._on_abort(self.generation, cause)
        return cause

    def _on_abort(self, generation: int, cause: AbortReason) -> None:
        with self._lock:
            if generation != self.generation or self.abort_reason is not None:
                return
            self.abort_reason = cause
        if self.aborted:
            self._free()

    def _free(self) -> None:
        """Make everything that waits in this generation return."""
        if self._shuts_sockets:
            gloo_sockets.shut(gloo_sockets.connections(self._own_ports, self._peer_ports))
        else:
            with contextlib.suppress(RuntimeError):
                self._pg.abort()

    def abandon(self, works: Iterable[Any]) -> None:
        """Keep collectives that nobody waits for any more until they end: the end of their group waits for them."""
        self._abandoned += [(self._pg, work) for work in works if not work.is_completed()]

    def _abandon_all(self) -> None:
        for _, works in self._under_way:
            self.abandon(works)
            works.clear()
        self._under_way.clear()

    def track_works(self, owner: Any, works: list[Any]) -> None:
        """Remember a list of collectives under way; what is left in it when the generation is buried is kept."""
        # A script may prepare models again and again: of those that are gone only what is still under way counts.
        self._under_way = [(of, left) for of, left in self._under_way if left or of() is not None]
        self._under_way.append((weakref.ref(owner), works))

    def rebuild(self) -> None:
        """Called on: all ranks, after the generation ended. Meet again and make the next one."""
        while True:
            self._destroy()
            self._store_barrier(
                f"form the group again after: {self.abort_reason.what if self.abort_reason else 'a lost connection'}"
            )
            with self._lock:
                self.generation += 1
                self.abort_reason = None
            self._listen()
            try:
                self._join()
                self.box.generation(self.generation)
                break
            except Exception:
                self._await_abort_reason()
                if self.abort_reason is None:  # else another rank has already ended the new generation too
                    raise
        # The keys of the last generation stay: a rank may still be about to read there that all have come to its end.
        kept = [f"generation_{self.generation - n}/" for n in (0, 1)]
        self._root.delete_own("generation_", but=kept)
        if self.rank == 0:
            self._root.delete_all("generation_", but=kept)
        for listener in self._live_listeners():
            listener.group_rebuilt()

    def forget_buffers(self) -> None:
        """Forget what collectives have kept for the next call; plans of debug mode lie in its buffers."""
        self.plans.clear()
        self.handshake = None

    def _destroy(self) -> None:
        """Let go of the old process group; one that still has work under way is kept, or its end would block."""
        self._stop_listening()
        self._abandon_all()
        self._abandoned = [(pg, work) for pg, work in self._abandoned if not work.is_completed()]
        self.forget_buffers()  # they may still be written to by a collective of the old generation
        if self.keeps_old_groups and self._pg is not None:
            keep_forever(self._pg)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._pg = None
        self.backends.clear()
        gloo_sockets.drain_closed_sockets(self._own_ports)

    def _store_barrier(self, purpose: str) -> None:
        """Wait in the store until every rank is here; say who is missing when they do not come."""
        mark = f"meet/{purpose.split(':')[0]}"
        self._root.set(self.key(f"{mark}/{self.rank}"), "here")
        missing = [peer for peer in range(self.world_size) if peer != self.rank]
        try:
            self._root.gather([self.key(f"{mark}/{peer}") for peer in missing], timeout=self.timeout)
        except dist.DistStoreError:
            missing = [peer for peer in missing if self._root.peek(self.key(f"{mark}/{peer}")) is None]
            raise TopologyError(
                f"Rank {self.rank} waited {self.timeout.total_seconds():.0f} s to {purpose}. "
                f"Missing: {', '.join(f'rank {peer}' for peer in missing)}."
            ) from None
        except dist.DistNetworkError as error:
            raise self._lost_store(purpose) from error

    def _lost_store(self, purpose: str) -> TopologyError:
        return TopologyError(
            f"Rank {self.rank} wanted to {purpose}, but the job's store is gone, and with it who keeps it: "
            "the launcher, or else rank 0. Its own output tells why it went away."
        )

    # --- watching and closing ----------------------------------------------------------------------------------

    def _listen(self) -> None:
        generation = self.generation
        key = self.key(f"wake/{self.rank}")
        if self._side is None:
            # One connection for all generations: torch asks for the name behind each new one, which can take 5 s.
            self._side = self._root.clone()
        self._listener = AbortListener(self._root, self._side, key, lambda cause: self._on_abort(generation, cause))

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.stop()
            self._listener = None

    def close(self) -> None:
        """Leave for good: end the watcher, and the process group if we made it."""
        if self._store is None:
            return
        if not self.store_lost:
            self._stop_listening()
        self._abandon_all()
        # A group that had collectives broken off is kept to the end of the process: its destructor waits for its
        # threads, which may wait in a collective that no longer ends, or for the GIL that its caller holds.
        kept = bool(self._abandoned or self.generation)
        for pg, work in self._abandoned:
            keep_forever(pg)
            keep_forever(work)
        if self.generation:
            keep_forever(self._pg)
        gloo_threads.rest(SHUTDOWN_TIMEOUT, unnamed="gloo" in (self.backend or "") and self.world_size > 1)
        self._abandoned.clear()
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()
            sys.excepthook = self._excepthook or sys.excepthook
        if kept:
            gloo_sockets.drain_closed_sockets(self._own_ports)
        self._shutdown_handshake()
        self._pg = None
        self.backends.clear()
        self._store = self._side = None

    def _shutdown_handshake(self) -> None:
        """The rank that hosts the store lets the others close first, or their last words would be network errors."""
        if self.store_lost:
            return
        with contextlib.suppress(RuntimeError):
            self._root.set(f"closed/{self.rank}", "yes")
            deadline = time.monotonic() + SHUTDOWN_TIMEOUT
            others = [f"closed/{peer}" for peer in range(1, self.world_size)]
            while self._hosts_store and time.monotonic() < deadline and self._root.peek_all(others) is None:
                time.sleep(0.005)


def _read_ports(data: bytes) -> list[int]:
    return [int(port) for port in json.loads(data)]


def _advised(text: str, advice: Advice, rank: int) -> PeerFailure:
    """The error of a rank that lost another one, with what is known of that."""
    error = PeerFailure(f"{text}\n{advice}", rank=rank)
    error.lead, error.cause, error.fix = advice.lead, advice.cause, advice.fix
    return error


def _is_broken(error: BaseException) -> bool:
    """Whether it is what torch makes of shut sockets when the user called it directly."""
    return isinstance(error, dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and LOST_PEER.search(str(error)) is not None
    )


def _flight_recorder() -> contextlib.AbstractContextManager[None]:
    """Have torch record its collectives, from which the guard learns where a rank waits; 2.9 does only if asked.

    Torch reads the variable when the first group is made. Whoever has set it, to 0 maybe, has decided.
    """
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    if any(name in env.snapshot() for name in names):
        return contextlib.nullcontext()
    return env.patched({names[0]: "2000"})
