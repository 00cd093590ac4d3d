"""How the launchers of several nodes find each other, by torch's rendezvous.

Two things are added to it. Where nodes have numbers they keep them: torch numbers them as they come. And the attempt
has a name that all nodes agree on: torch counts restarts on each node by itself, so that after a failure on one
the processes of another would look for each other in the wrong place.
"""

from __future__ import annotations

import contextlib
import json
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Unanswered
from typing import Any, TypeVar

import torch.distributed.elastic.rendezvous.registry as registry
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from lockstep.config import env
from lockstep.errors import ConfigError, TopologyError
from lockstep.guard.node_exchange import Node
from lockstep.host.network import REFUSED, interface_of, knock
from lockstep.job_store.signed_store import SignedStore, read_secret
from lockstep.launch.plan import LaunchPlan
from lockstep.launch.rendezvous_backend import open_c10d

_SILENCE = 5.0
"""Seconds of waiting for other nodes after which this is reported."""
_ONE_TRY = 2.0
"""Seconds for one connection, made to see what is in the way."""
Answer = TypeVar("Answer")
_ANSWERS = 2.0
"""Seconds that the store has to answer the agent."""
_MOST_RANKS = 4096
"""Ranks that one node may say it has."""


def open_rendezvous(plan: LaunchPlan, report: Callable[[str], None]) -> NodeRendezvous:
    """Called on: all nodes. Host the rendezvous, or connect to it."""
    parameters = RendezvousParameters(
        backend=plan.rdzv_backend,
        endpoint=plan.endpoint,
        run_id=str(plan.value("rdzv_id", "lockstep")) if plan.machines > 1 else uuid.uuid4().hex,
        min_nodes=plan.machines,
        max_nodes=plan.machines,
        local_addr=plan.address,
        **_settings(plan),
    )
    secret = read_secret(env.snapshot())
    try:
        with _report_long_wait(report, lambda: _obstacle(plan), plan.machines, after=_ONE_TRY):
            if plan.rdzv_backend != "c10d" or parameters.get("store_type", "tcp") != "tcp":
                return NodeRendezvous(registry.get_rendezvous_handler(parameters), plan, report, secret)
            handler, store = open_c10d(parameters, secret)
        return NodeRendezvous(handler, plan, report, secret, store)
    except (RendezvousConnectionError, DistError) as error:
        raise unreachable(plan) from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--rdzv_backend {plan.rdzv_backend} cannot be used: {error}") from error


class NodeRendezvous(RendezvousHandler):
    """Torch's rendezvous, with node ranks kept and the attempt named."""

    def __init__(
        self,
        inner: RendezvousHandler,
        plan: LaunchPlan,
        log: Callable[[str], None],
        secret: str,
        shared: TCPStore | None = None,
    ) -> None:
        self._inner = inner
        self._plan = plan
        self._log = log
        self._secret = secret
        self._shared = shared
        """The store that the ranks use; None where torch makes one for them."""
        self._asking: Future[Any] | None = None
        self.nodes: tuple[Node, ...] = ()
        """The nodes of this attempt, after the rendezvous."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Called on: all nodes. Wait for all, agree on ranks and on the name of this attempt."""
        number = self._plan.machines
        waiting = f"waiting for {number} nodes at {self._plan.endpoint} …"
        with _report_long_wait(self._log, lambda: waiting, number, f"all {number} nodes joined."):
            # Torch would host one more store for the ranks, which listens at every interface.
            own = {} if self._shared is None else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            with env.patched(own):
                info = self._inner.next_rendezvous()
            rank, store = info.rank, SignedStore(info.store, self._secret, "lockstep")
            if self._plan.machine_rank is not None and self._plan.machines > 1 and self._plan.rdzv_backend == "c10d":
                rank = self._own_number(info, store)
            if number > 1:
                self.nodes = self._exchange_names(info, store, rank)
        if info.rank == 0:
            store.set("attempt", uuid.uuid4().hex[:8])
        # Inherited by the processes that are started next.
        env.publish({"LOCKSTEP_ATTEMPT": store.get("attempt", _read_attempt)})
        place: Any = info.bootstrap_store_info
        if self._shared is not None:
            host = self._plan.endpoint.rpartition(":")[0].strip("[]")
            place = RendezvousStoreInfo(host, self._shared.port)
        return RendezvousInfo(info.store, rank, info.world_size, place)

    def _exchange_names(self, info: RendezvousInfo, store: SignedStore, own: int) -> tuple[Node, ...]:
        """Called on: all nodes. Who is who: a node that is lost later cannot be asked any more."""
        store.set(f"node/{own}", json.dumps([platform.node(), self._plan.per_machine, self._plan.address]))
        nodes: list[Node] = []
        first = 0
        for number in range(info.world_size):
            host, count, address = store.get(f"node/{number}", _read_node)
            nodes.append(Node(number=number, host=host, ranks=tuple(range(first, first + count)), address=address))
            first += count
        return tuple(nodes)

    def _own_number(self, info: RendezvousInfo, store: SignedStore) -> int:
        own = self._plan.machine_rank
        store.set(f"machine/{info.rank}", str(own))
        said = [store.get(f"machine/{peer}", int) for peer in range(info.world_size)]
        if sorted(said) != list(range(info.world_size)):
            raise TopologyError(
                f"The nodes have --machine_rank {', '.join(map(str, sorted(said)))}; expected 0 to "
                f"{info.world_size - 1}, each once. Correct --machine_rank (here: {own})."
            )
        return int(own)  # type: ignore[arg-type]

    def get_backend(self) -> str:
        """The name of the backend."""
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use the store of the agents' rendezvous."""
        return self._shared is not None or self._inner.use_agent_store

    def is_closed(self) -> bool:
        """Whether nobody can join any more."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Let nobody join any more."""
        self.call_store(self._inner.set_closed, None)

    def num_nodes_waiting(self) -> int:
        """Nodes that wait for the next round; 0 while the store does not answer."""
        return self.call_store(self._inner.num_nodes_waiting, 0)

    def call_store(self, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        """The answer, or ``otherwise`` from a store that gives none.

        Behind a network that is cut, torch waits for an answer without a limit, and holds a lock meanwhile. The agent
        asks between two looks at its ranks: it would never see that they have ended.
        """
        if self._plan.machines == 1:
            return question()
        if self._asking is not None and not self._asking.done():
            return otherwise
        answer: Future[Answer] = Future()
        self._asking = answer

        def ask() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="lockstep-rendezvous", daemon=True).start()
        try:
            return answer.result(_ANSWERS)
        except Unanswered:
            return otherwise

    def get_run_id(self) -> str:
        """The job's name."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Leave."""
        return self.call_store(self._inner.shutdown, False)


def _read_attempt(data: bytes) -> str:
    return f"{int(data, 16):08x}"


def _read_node(data: bytes) -> tuple[str, int, str]:
    host, count, address = json.loads(data)
    if not isinstance(host, str) or not isinstance(address, str) or not 0 < int(count) <= _MOST_RANKS:
        raise ValueError(host)
    return host, int(count), address


def _settings(plan: LaunchPlan) -> dict[str, str]:
    """``--rdzv_conf``, and who hosts the rendezvous: node 0, whatever its name resolves to."""
    settings: dict[str, str] = {}
    for pair in filter(None, str(plan.value("rdzv_conf", "")).split(",")):
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--rdzv_conf {pair!r} must be key=value, and several separated by commas.")
        settings[name.strip()] = value.strip()
    if plan.rdzv_backend == "c10d":
        hosts = plan.machines == 1 if plan.machine_rank is None else plan.machine_rank == 0
        if hosts or plan.machine_rank is not None:
            settings.setdefault("is_host", str(hosts).lower())
    return settings


def obstacle_to(plan: LaunchPlan) -> str:
    """Why the endpoint cannot be reached; empty when it accepts connections."""
    address, _, port = plan.endpoint.rpartition(":")
    return knock(address.strip("[]"), int(port), _ONE_TRY) if address and port.isdecimal() else ""


def unreachable(plan: LaunchPlan) -> TopologyError:
    """For a node that cannot reach the others."""
    return TopologyError(
        f"This node ({plan.address}) could not reach the rendezvous endpoint {plan.endpoint}. Check that the command "
        "runs on node 0, that its address can be reached from here, and that no firewall blocks the port."
    )


def _obstacle(plan: LaunchPlan) -> str:
    """Why the endpoint cannot be reached, tried by hand: torch reports nothing before it gives up."""
    reason = obstacle_to(plan)
    if not reason:
        return f"waiting for the rendezvous endpoint {plan.endpoint} …"
    here = f"{plan.address} ({interface_of(plan.address)})"
    if reason == REFUSED:
        return (
            f"rendezvous endpoint {plan.endpoint} refused the connection from {here} (nothing is listening there, or a "
            "firewall); retrying …"
        )
    return (
        f"rendezvous endpoint {plan.endpoint} cannot be reached from {here}: {reason}. Check that it is an address of "
        f"node 0, the route to it, and that no firewall blocks the port; retrying …"
    )


@contextlib.contextmanager
def _report_long_wait(
    log: Callable[[str], None], what: Callable[[], str], machines: int, then: str = "", after: float = _SILENCE
) -> Iterator[None]:
    """Report what takes long, once it does, and when it is over."""
    if machines == 1:
        yield
        return
    over = threading.Event()

    def report() -> None:
        text = what()
        if not over.is_set():
            log(text)

    start = time.monotonic()
    timer = threading.Timer(after, report)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        over.set()
        if then and time.monotonic() - start > after:
            log(then)
