"""Where the ranks of a notebook's job meet: the store, and what the launchers of several machines tell each other.

The launcher of machine 0 hosts the store, so that it outlives ranks that fail. On one machine each start of the job
gets a new one. Several machines keep one, in which the ranks' entries carry the number of the start.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from lockstep.config import network
from lockstep.errors import ConfigError, TopologyError, first_line
from lockstep.launch import machine

LOOPBACK = "127.0.0.1"
PATIENCE = 3.0
"""Seconds to wait for word of the cause, when all that is known here is that ranks have lost each other."""
FAREWELL = 10.0
"""Seconds that machines wait for each other at the end."""
SILENCE = 5.0
"""Seconds of waiting for other machines after which we say so."""
_LOOK = 0.2


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines of a job, as each of them was told."""

    number: int
    """How many."""
    rank: int
    """Which one this is."""
    processes: int
    """Ranks on each."""
    address: str
    """Of machine 0."""
    port: int
    """Of the store there; 0 for any free one."""
    fixed_port: bool
    """Whether the port was asked for, so that another one would not do."""
    hosted: bool = False
    """Whether the store is there already, by a rendezvous of torch's."""
    run_id: str = "none"
    """The name of the job."""
    patience: float = 900.0
    """Seconds to wait for the others."""


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """The first failure, when it was on another machine."""

    node: int
    """Which machine."""
    rank: int
    """Which rank."""
    line: str
    """What happened, in one line."""
    text: str
    """Its traceback."""


class _Wait:
    """A wait that says, once it takes long, for what."""

    def __init__(self, patience: float) -> None:
        self._started = time.monotonic()
        self._patience = patience
        self._told = ""

    def goes_on(self, what: str) -> bool:
        """Pause for a moment; False when it has taken too long."""
        taken = time.monotonic() - self._started
        if taken > self._patience:
            return False
        if taken > SILENCE and what != self._told:
            print(f"notebook_launcher: waiting for {what} …", file=sys.stderr, flush=True)
            self._told = what
        time.sleep(_LOOK)
        return True


class Meeting:
    """The store that the ranks of one job share."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.port = nodes.port
        self.store: Any = None
        self._attempt = 0

    def begin(self, attempt: int) -> None:
        """Be ready for the ranks to meet for the ``attempt``-th time."""
        self._attempt = attempt
        if self.nodes.number == 1 and not self.nodes.hosted:
            self.store = None  # the old one lets go of its port
        if self.store is not None:
            return
        if self.nodes.rank == 0 and not self.nodes.hosted:
            self._host()
        else:
            self._join()
        if self.nodes.number > 1:
            self._compare()

    def news(self) -> bool:
        """Whether another machine had a failure."""
        if self.nodes.number == 1:
            return False
        return self._has(self._key("failed"))

    def tell(self, failure: Elsewhere, *, follows: bool) -> Elsewhere:
        """Say that this machine had a failure, and learn the first one of the job.

        One that only ``follows`` from another rank's is held back for a moment: the cause may be on another machine.
        """
        if self.nodes.number == 1:
            return failure
        deadline = time.monotonic() + PATIENCE
        while follows and not self.news() and time.monotonic() < deadline:
            time.sleep(_LOOK)
        text = self._ask(
            lambda store: store.compare_set(self._key("failed"), "", json.dumps(asdict(failure), sort_keys=True))
        )
        return Elsewhere(**json.loads(text))

    def elsewhere(self) -> Elsewhere:
        """The failure that there is news of."""
        return Elsewhere(**json.loads(self._get(self._key("failed"))))

    def all_done(self) -> bool:
        """Wait until every machine's ranks have returned; False when some rank failed."""
        if self.nodes.number == 1:
            return True
        self._ask(lambda store: store.add(self._key("done"), 1))
        while self._ask(lambda store: store.add(self._key("done"), 0)) < self.nodes.number:
            if self.news():
                return False
            time.sleep(_LOOK)
        return True

    def close(self, *, patience: float = FAREWELL) -> None:
        """Leave, together with the others: machine 0, which hosts the store, when all have read how it ended."""
        store, self.store = self.store, None
        if store is None or self.nodes.number == 1 or not patience:
            return
        deadline = time.monotonic() + patience

        def together(name: str, number: int) -> None:
            while store.add(f"lockstep/launch/{name}", 0) < number and time.monotonic() < deadline:
                time.sleep(_LOOK)

        with suppress(Exception):  # the others may be gone already
            store.add("lockstep/launch/ready", 1)
            together("ready", self.nodes.number)
            store.add("lockstep/launch/gone", 1)
            if self.nodes.rank == 0:
                together("gone", self.nodes.number)

    # -----------------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"lockstep/launch/{self._attempt}/{name}"

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda store: store.check([key])))

    def _get(self, key: str) -> str:
        return str(self._ask(lambda store: store.get(key)).decode())

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        from torch.distributed import DistError

        try:
            return question(self.store)
        except DistError as error:
            raise TopologyError(
                f"The line to machine 0 ({self.nodes.address}:{self.port}) broke: {first_line(error)}. Its "
                "notebook was stopped, or the network failed; look there for the cause, and start again everywhere."
            ) from error

    def _host(self) -> None:
        from torch.distributed import DistNetworkError
        from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

        nodes = self.nodes
        if self.port and not nodes.fixed_port and not machine.is_free(self.port):
            self.port = machine.next_free(self.port)
        for last in (False, False, True):
            try:
                self.store = TCPStore(
                    nodes.address, self.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
                )
                break
            except DistNetworkError as error:
                if nodes.fixed_port or last:
                    raise port_error(self.port, first_line(error)) from None
                self.port = machine.next_free(self.port)
        self.port = self.store.port

    def _join(self) -> None:
        from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

        nodes = self.nodes
        wait = _Wait(nodes.patience)
        # Torch's own attempt could not be interrupted.
        while reason := network.knock(nodes.address, self.port, 2.0):
            if not wait.goes_on(f"machine 0 at {nodes.address}:{self.port} ({reason})"):
                raise TopologyError(
                    f"Machine {nodes.rank} of {nodes.number} could not reach machine 0 at {nodes.address}:{self.port} "
                    f"within {nodes.patience:g} s ({reason}). Run the same cell there with node_rank=0, and check that "
                    "the port is open between the machines."
                )
        self.store = TCPStore(
            nodes.address, self.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
        )

    def _compare(self) -> None:
        """Called on: every machine's launcher. See that all are there, and were told the same."""
        nodes, wait = self.nodes, _Wait(self.nodes.patience)
        told = json.dumps({"num_nodes": nodes.number, "num_processes": nodes.processes, "rdzv_id": nodes.run_id})
        if self._ask(lambda store: store.add(f"lockstep/launch/node{nodes.rank}/count", 1)) > 1:
            raise ConfigError(
                f"node_rank={nodes.rank} is used by two machines. Give each of the {nodes.number} its own, from 0."
            )
        self._ask(lambda store: store.set(f"lockstep/launch/node{nodes.rank}", told))
        for other in range(nodes.number):
            key = f"lockstep/launch/node{other}"
            while not self._has(key):
                if not wait.goes_on(f"machine {other} of {nodes.number}"):
                    raise TopologyError(
                        f"Machine {other} of {nodes.number} has not come within {nodes.patience:g} s. Run the same "
                        f"cell there, with node_rank={other}."
                    )
            theirs = self._get(key)
            if theirs != told:
                raise ConfigError(
                    f"The machines were told different things: machine {nodes.rank} {told}, machine {other} {theirs}. "
                    "Make the call the same on all of them, but for node_rank."
                )


def port_error(port: int, reason: str = "") -> ConfigError:
    """A port that cannot be used, and one that can."""
    why = f" ({reason})" if reason else ""
    return ConfigError(f"use_port={port}: the port is in use on this machine{why}. Free is {machine.next_free(port)}.")


def rendezvous(
    backend: str, endpoint: str, run_id: str, conf: dict[str, Any], number: int
) -> tuple[int, str, int, Callable[[], None]]:
    """Let torch's own rendezvous give out the numbers of the machines: (node rank, address, port, how to leave)."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    parameters = RendezvousParameters(
        backend=backend,
        endpoint=endpoint,
        run_id=run_id,
        min_nodes=number,
        max_nodes=number,
        **conf,
    )
    handler = get_rendezvous_handler(parameters)
    try:
        info = handler.next_rendezvous()
    except BaseException:
        handler.shutdown()
        raise
    place = info.bootstrap_store_info
    if place is None:
        handler.shutdown()
        raise TopologyError(f"rdzv_backend={backend!r} gave no address to meet at. Use 'static' or 'c10d'.")

    def leave() -> None:
        handler.shutdown()

    return info.rank, place.master_addr, place.master_port, leave
