"""The ranks of the job meet in its store: to introduce themselves, to wait for each other, to tell what they found.

No wait here is without a limit, and each says who was missing: a rank that does not come is a finding, not a hang.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from lockstep.config import env
from lockstep.doctor.finding import Finding
from lockstep.doctor.net import store_reachability
from lockstep.doctor.net.results import RankInfo
from lockstep.errors import TopologyError
from lockstep.host.hardware import is_free, next_free
from lockstep.job_store.signed_store import SignedStore, read_secret
from lockstep.job_store.store_server import host_store
from lockstep.rundir.format_ranks import name_ranks
from lockstep.topology.topology import Topology

SLICE = 1.0
"""Seconds after which a wait says whom it waits for."""
_SHORTEST, _LONGEST = 0.001, 0.05
"""Seconds between two looks."""
_FEW = 8
_OPENING = 15.0
"""Seconds for torch to open a store whose address answers."""


class StoreChannel:
    """This rank's line to the others."""

    def __init__(self, store: Store, rank: int, world_size: int, prefix: str = "", secret: str = "") -> None:
        self.store = store
        """Torch's own."""
        self._signed = SignedStore(store, secret, prefix)
        self.rank = rank
        self.world_size = world_size
        self._lost: set[int] = set()
        """Ranks that were once waited for in vain: nobody waits for them again."""
        self.closed = False
        """Whether the store is gone, and with it whoever hosts it."""

    @classmethod
    def join(
        cls,
        topology: Topology,
        own: RankInfo,
        patience: float,
        log: Callable[[str], None] = lambda text: None,
        alarm: Callable[[list[Finding]], None] = lambda findings: None,
    ) -> StoreChannel:
        """Called on: all ranks. Open the store of the job; whoever else is there or not does not matter yet."""
        if topology.main_address is None or topology.main_port is None:
            return cls(dist.HashStore(), 0, 1)  # type: ignore[attr-defined]
        hosts = topology.rank == 0 and not topology.agent_store
        if hosts:
            _require_free(topology.main_port)
        else:
            deadline = time.monotonic() + patience
            reason = store_reachability.wait_for(own, topology.main_address, topology.main_port, deadline, log, alarm)
            if reason:
                raise _no_way(topology, reason)
        try:
            limit = timedelta(seconds=_OPENING)
            if hosts:
                store = host_store(topology.main_address, topology.main_port, nodes=topology.num_nodes, timeout=limit)
            else:
                store = TCPStore(
                    topology.main_address, topology.main_port, is_master=False, timeout=limit, wait_for_workers=False
                )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise _no_way(topology, str(error).strip().splitlines()[0]) from error
        prefix = f"lockstep/doctor/attempt_{topology.attempt}"
        return cls(store, topology.rank, topology.world_size, prefix, read_secret(env.snapshot()))

    def torch_store(self, name: str) -> Store:
        """A part of the store for a process group of torch's."""
        return PrefixStore(self._signed.full(name), self.store)

    def send(self, topic: str, value: Any) -> None:
        """Tell the others something, under a topic that is used once."""
        try:
            # A question first, which is answered and so shows whether the store is there. The word itself is the last
            # thing that is sent: whoever has heard the last one may go, and the store with it.
            self.store.check([topic])
            self._signed.set(f"{topic}/{self.rank}", json.dumps([value]))
        except (dist.DistStoreError, dist.DistNetworkError, RuntimeError):
            self.closed = True

    def receive(
        self,
        topic: str,
        patience: float,
        *,
        of: Sequence[int] | None = None,
        log: Callable[[str], None] = lambda text: None,
    ) -> dict[int, Any]:
        """What each rank has told under a topic, those that do not within ``patience`` seconds left out."""
        asked = [rank for rank in (range(self.world_size) if of is None else of) if rank not in self._lost]
        late = self._wait(topic, asked, patience, log)
        self._lost |= late
        here = [rank for rank in asked if rank not in late]
        try:
            received = [self._signed.peek(f"{topic}/{rank}", _read_value) for rank in here]
        except (dist.DistStoreError, dist.DistNetworkError, RuntimeError):
            self.closed = True
            return {}
        return {rank: value[0] for rank, value in zip(here, received, strict=True) if value is not None}

    def _wait(self, topic: str, asked: Sequence[int], patience: float, log: Callable[[str], None]) -> set[int]:
        """Wait until all of them have told; those that have not in time."""
        started = time.monotonic()
        next_word = started + SLICE
        pause = _SHORTEST
        # Asked again and again, not waited for: torch warns of every wait of its store that is given up.
        while not self._have_sent(topic, asked):
            now = time.monotonic()
            over = now - started >= patience or self.closed
            if over or now >= next_word:
                late = {rank for rank in asked if not self._have_sent(topic, [rank])}
                if over:
                    return late
                if late:
                    log(f"waiting for {name_ranks(late, _FEW)}")
                next_word = now + SLICE
            time.sleep(pause)
            pause = min(_LONGEST, pause * 1.5)
        return set()

    def _have_sent(self, topic: str, ranks: Sequence[int]) -> bool:
        """Whether all of them have told."""
        try:
            return not ranks or self._signed.peek_all([f"{topic}/{rank}" for rank in ranks]) is not None
        except (dist.DistStoreError, dist.DistNetworkError, RuntimeError):
            self.closed = True
            return False

    def require_open(self) -> None:
        """Raise when what this rank has told has reached nobody."""
        if self.closed:
            raise TopologyError(
                "The job's store has gone away while this rank was examined: rank 0, or the launcher that hosts it, "
                "has ended. Look at the output of rank 0."
            )

    def barrier(self, name: str, patience: float) -> None:
        """Called on: all ranks. Wait until all have come here, those left out that were already missing."""
        self.send(name, 1)
        asked = [rank for rank in range(self.world_size) if rank not in self._lost]
        self._lost |= self._wait(name, asked, patience, lambda text: None)

    def lose(self, ranks: Iterable[int]) -> None:
        """Wait for these no longer: another rank has done so in vain."""
        self._lost |= set(ranks)

    @property
    def missing(self) -> list[int]:
        """Ranks that did not come."""
        return sorted(self._lost)


def _read_value(data: bytes) -> tuple[Any]:
    (value,) = json.loads(data)
    return (value,)


def _require_free(port: int) -> None:
    """Raise where another program has the port at which this rank is to be met."""
    if not is_free(port):
        raise TopologyError(
            f"Port {port}, at which the ranks are to meet, is in use on this machine. Name another one for all ranks "
            f"(MASTER_PORT, --main_process_port, --master_port): {next_free(port)} is free here."
        )


def _no_way(topology: Topology, reason: str) -> TopologyError:
    return TopologyError(
        f"Rank {topology.rank} cannot reach the job's store at {topology.main_address} port {topology.main_port} "
        f"({reason}). See that rank 0 runs there, that the name leads there from this machine, and that the port is "
        "open between them."
    )


def read_all(kind: Any, received: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[Any]:
    """The values of one kind that all ranks have told, in the order of the ranks."""
    return [kind.of(plain) for rank in sorted(received) for plain in received[rank]]
