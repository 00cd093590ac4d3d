"""Where the ranks of a notebook's job meet: the store, and what the launchers of several machines tell each other.

The launcher of machine 0 hosts the store, so that it outlives ranks that fail. On one machine each start of the job
gets a new one. Several machines keep one, in which the ranks' entries carry the number of the start.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from lockstep.config import env
from lockstep.errors import ConfigError, TopologyError, first_line
from lockstep.host import hardware, network
from lockstep.job_store.signed_store import SignedStore, compare_secrets, from_fields, from_text
from lockstep.job_store.store_server import host_store

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
    rank: int
    processes: int
    address: str
    """Of machine 0."""
    port: int
    """Of the store there; 0 for any free one."""
    fixed_port: bool
    """Whether the port was asked for, so that another one would not do."""
    hosted: bool = False
    """Whether the store is there already, by a rendezvous of torch's."""
    run_id: str = "none"
    patience: float = 900.0
    """Seconds to wait for the others."""


@dataclass(frozen=True, kw_only=True)
class RemoteFailure:
    """The first failure, when it was on another machine."""

    node: int
    rank: int
    line: str
    text: str


class _Wait:
    """A wait that says, once it takes long, for what."""

    def __init__(self, patience: float) -> None:
        self._started = time.monotonic()
        self._patience = patience
        self._told = ""

    def pause(self, what: str) -> bool:
        """Pause for a moment; False when it has taken too long."""
        taken = time.monotonic() - self._started
        if taken > self._patience:
            return False
        if taken > SILENCE and what != self._told:
            print(f"notebook_launcher: waiting for {what} …", file=sys.stderr, flush=True)
            self._told = what
        time.sleep(_LOOK)
        return True


class NotebookStore:
    """The store that the ranks of one job share."""

    def __init__(self, nodes: Nodes, secret: str) -> None:
        self.nodes = nodes
        self.port = nodes.port
        self.store: Any = None
        """Torch's own, which the ranks connect to."""
        self._secret = secret
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
        return self._exchange(lambda store: store.peek(self._key("failed"), _read_failure)) is not None

    def report_failure(self, failure: RemoteFailure, *, follows: bool) -> RemoteFailure:
        """Say that this machine had a failure, and learn the first one of the job.

        One that only ``follows`` from another rank's is held back for a moment: the cause may be on another machine.
        """
        if self.nodes.number == 1:
            return failure
        deadline = time.monotonic() + PATIENCE
        while follows and not self.news() and time.monotonic() < deadline:
            time.sleep(_LOOK)
        first: RemoteFailure = self._exchange(
            lambda store: store.claim(self._key("failed"), json.dumps(asdict(failure)), _read_failure)
        )
        return first

    def elsewhere(self) -> RemoteFailure:
        """The failure that there is news of."""
        failure: RemoteFailure = self._exchange(lambda store: store.get(self._key("failed"), _read_failure))
        return failure

    def all_done(self) -> bool:
        """Wait until every machine's ranks have returned; False when some rank failed."""
        if self.nodes.number == 1:
            return True
        self._exchange(lambda store: store.set(self._key(f"done/{self.nodes.rank}"), "yes"))
        everyone = [self._key(f"done/{node}") for node in range(self.nodes.number)]
        while self._exchange(lambda store: store.peek_all(everyone)) is None:
            if self.news():
                return False
            time.sleep(_LOOK)
        return True

    def close(self, *, patience: float = FAREWELL) -> None:
        """Leave, together with the others: machine 0, which hosts the store, when all have read how it ended."""
        store, self.store = self._signed(), None
        if store.raw is None or self.nodes.number == 1 or not patience:
            return
        deadline = time.monotonic() + patience

        def together(name: str) -> None:
            everyone = [f"{name}/{node}" for node in range(self.nodes.number)]
            while store.peek_all(everyone) is None and time.monotonic() < deadline:
                time.sleep(_LOOK)

        with suppress(Exception):  # the others may be gone already
            store.set(f"ready/{self.nodes.rank}", "yes")
            together("ready")
            store.set(f"gone/{self.nodes.rank}", "yes")
            if self.nodes.rank == 0:
                together("gone")

    # -----------------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return f"{self._attempt}/{name}"

    def _signed(self) -> SignedStore:
        return SignedStore(self.store, self._secret, "lockstep/launch")

    def _exchange(self, question: Callable[[SignedStore], Any]) -> Any:
        from torch.distributed import DistError

        try:
            return question(self._signed())
        except DistError as error:
            raise TopologyError(
                f"The line to machine 0 ({self.nodes.address}:{self.port}) broke: {first_line(error)}. Its "
                "notebook was stopped, or the network failed; look there for the cause, and start again everywhere."
            ) from error

    def _host(self) -> None:
        from torch.distributed import DistNetworkError

        nodes = self.nodes
        if self.port and not nodes.fixed_port and not hardware.is_free(self.port):
            self.port = hardware.next_free(self.port)
        for last in (False, False, True):
            try:
                self.store = host_store(nodes.address, self.port, nodes=nodes.number, timeout=timedelta(seconds=60))
                break
            except DistNetworkError as error:
                if nodes.fixed_port or last:
                    raise port_error(self.port, first_line(error)) from None
                self.port = hardware.next_free(self.port)
        self.port = self.store.port

    def _join(self) -> None:
        from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

        nodes = self.nodes
        wait = _Wait(nodes.patience)
        # Torch's own attempt could not be interrupted.
        while reason := network.knock(nodes.address, self.port, 2.0):
            if not wait.pause(f"machine 0 at {nodes.address}:{self.port} ({reason})"):
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
        self._exchange(lambda store: compare_secrets(store.raw, self._secret, hosts=nodes.rank == 0))
        mine = uuid.uuid4().hex
        if self._exchange(lambda store: store.claim(f"node{nodes.rank}/first", mine, from_text)) != mine:
            raise ConfigError(
                f"node_rank={nodes.rank} is used by two machines. Give each of the {nodes.number} its own, from 0."
            )
        self._exchange(lambda store: store.set(f"node{nodes.rank}", told))
        for other in range(nodes.number):
            key = f"node{other}"
            while (theirs := self._exchange(lambda store, key=key: store.peek(key, from_text))) is None:  # type: ignore[misc]
                if not wait.pause(f"machine {other} of {nodes.number}"):
                    raise TopologyError(
                        f"Machine {other} of {nodes.number} has not come within {nodes.patience:g} s. Run the same "
                        f"cell there, with node_rank={other}."
                    )
            if theirs != told:
                raise ConfigError(
                    f"The machines were told different things: machine {nodes.rank} {told}, machine {other} {theirs}. "
                    "Make the call the same on all of them, but for node_rank."
                )


def _read_failure(data: bytes) -> RemoteFailure:
    failure: RemoteFailure = from_fields(RemoteFailure, data)
    return failure


def port_error(port: int, reason: str = "") -> ConfigError:
    """A port that cannot be used, and one that can."""
    why = f" ({reason})" if reason else ""
    return ConfigError(f"use_port={port}: the port is in use on this machine{why}. Free is {hardware.next_free(port)}.")


def rendezvous(
    backend: str, endpoint: str, run_id: str, conf: dict[str, Any], number: int, secret: str
) -> tuple[int, str, int, Callable[[], None]]:
    """Let torch's own rendezvous give out the numbers of the machines: (node rank, address, port, how to leave)."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    from lockstep.launch.rendezvous_backend import open_c10d

    parameters = RendezvousParameters(
        backend=backend,
        endpoint=endpoint,
        run_id=run_id,
        min_nodes=number,
        max_nodes=number,
        **conf,
    )
    store = None
    if backend == "c10d":
        handler, store = open_c10d(parameters, secret)
    else:
        handler = get_rendezvous_handler(parameters)
    try:
        # Torch would host one more store for the ranks, which listens at every interface.
        with env.patched({} if store is None else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}):
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

    if store is not None:
        return info.rank, endpoint.rpartition(":")[0].strip("[]"), store.port, leave
    return info.rank, place.master_addr, place.master_port, leave
