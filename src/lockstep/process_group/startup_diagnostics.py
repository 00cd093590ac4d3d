"""While a rank waits to join its job: what is in the way, in words, before torch gives up, which takes half an hour.

Torch says nothing while it waits: for the store when a firewall drops what is sent there, for the other ranks when some
have not come, and for gloo's or NCCL's connections when only the ports that people know of are open. A thread looks
after a while, on the first rank of each machine, and tells what it finds; nothing is sent while all goes well.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from typing import Any

from lockstep.config import env
from lockstep.config.stall import read_stall_seconds
from lockstep.host import interfaces, network
from lockstep.job_store.signed_store import SignedStore, from_json
from lockstep.rundir.format_ranks import name_ranks
from lockstep.topology.standard_streams import print_error
from lockstep.topology.topology import Topology

AFTER = 6.0
"""Seconds after which somebody looks."""
ONE_TRY = 3.0
"""Seconds for one connection."""
_ITSELF = "this address means the machine itself"
_AT_ONCE = 64
_FEW = 8
_PAUSE = 0.5


@contextmanager
def at_the_store(topology: Topology, address: str, port: int) -> Iterator[None]:
    """Called on: all ranks. Around opening the store: say what is in the way to it."""
    # Where the first rank hosts the store, it is the second that misses it.
    second = topology.rank == topology.local_rank == 1
    if topology.world_size == 1 or (topology.local_rank and not second):
        yield
        return
    with _looking(lambda over: _check_store(topology, address, port, over)):
        yield


@contextmanager
def of_the_others(topology: Topology, store: SignedStore) -> Iterator[None]:
    """Called on: all ranks. Around making the process group: say which ranks have not come, and who cannot connect."""
    if topology.world_size > 1:
        store.set(f"arrived/{topology.rank}", "")
    if topology.world_size == 1 or topology.local_rank != 0:
        yield
        return
    with _looking(lambda over: _check_peers(topology, store, over)):
        yield


@contextmanager
def _looking(check: Callable[[threading.Event], None]) -> Iterator[None]:
    over = threading.Event()

    def run() -> None:
        if not over.wait(AFTER):
            with suppress(Exception):  # a look that fails must not be what ends the job
                check(over)

    thread = threading.Thread(target=run, name="lockstep-arrival", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * ONE_TRY)


def _report(text: str) -> None:
    print_error(f"lockstep: {text}")


# --- the store -------------------------------------------------------------------------------------------------------


def _check_store(topology: Topology, address: str, port: int, over: threading.Event) -> None:
    stall, started = _stall(), time.monotonic() - AFTER
    told = waiting_told = False
    while not over.wait(_PAUSE):
        reason = network.knock(address, port, ONE_TRY)
        late = time.monotonic() - started >= stall
        if over.is_set():
            return
        if reason and not told and (late or (reason != network.REFUSED and topology.local_rank == 0)):
            told = True
            _report(
                f"rank {topology.rank} on {socket.gethostname()} cannot reach the store at {address} port {port}: "
                f"{reason}. All ranks meet there. See that rank 0 runs on that machine, and that the port is open "
                f"between them (try: nc -vz {address} {port}); `lockstep doctor net` tries every pair. Still trying."
            )
        # Torch's store lets nobody go on before all have come to it, and does not say who has.
        if not reason and late and topology.rank == 0 and not waiting_told:
            waiting_told = True
            _report(
                f"rank 0 waits for the other ranks of {topology.world_size} at {address} port {port}: not all came "
                f"within {time.monotonic() - started:.0f} s. They are still starting, busy before the first "
                "Accelerator() or PartialState(), cannot reach this machine, or have ended; their own output says."
            )


def _stall() -> float:
    return read_stall_seconds(env.snapshot())


# --- the others ------------------------------------------------------------------------------------------------------


def _check_peers(topology: Topology, store: SignedStore, over: threading.Event) -> None:
    side = store.clone()  # a connection of its own: the other one is in use, and locked
    started, next_word = time.monotonic() - AFTER, _stall()
    listening: AbstractContextManager[dict[str, Any]] = nullcontext({})
    if topology.num_nodes > 1:
        listening = _listening(topology)
    with listening as own:
        side.set(f"reach/{topology.node_rank}", json.dumps(own))
        untried = set(range(topology.num_nodes)) - {topology.node_rank}
        while not over.wait(_PAUSE):
            there = {node: side.peek(f"reach/{node}", from_json) for node in sorted(untried)}
            ready = {node: peer for node, peer in there.items() if peer is not None}
            untried -= set(ready)
            _try(own, list(ready.values()), over)
            waited = time.monotonic() - started
            if topology.rank == 0 and waited >= next_word:
                next_word = 2 * waited
                _report_absent(topology, side, waited)


def _report_absent(topology: Topology, side: SignedStore, waited: float) -> None:
    absent = [rank for rank in range(topology.world_size) if side.peek(f"arrived/{rank}") is None]
    if absent:
        _report(
            f"{name_ranks(absent, _FEW)} of {topology.world_size} {'has' if len(absent) == 1 else 'have'} not joined "
            f"yet, after {waited:.0f} s: still starting, busy before the first Accelerator() or PartialState(), or "
            "ended. The others wait."
        )


@contextmanager
def _listening(topology: Topology) -> Iterator[dict[str, Any]]:
    """A port for the others to try, at the address that gloo or NCCL will use, and what is to be known of it."""
    present = interfaces.read()
    choose = interfaces.for_nccl if "nccl" in (topology.backend or "") else interfaces.for_gloo
    choice = choose(env.snapshot(), present)
    address = choice.address or ""
    with closing(socket.create_server((address, 0), family=_family(address), backlog=128)) as server:
        yield {
            "rank": topology.rank,
            "host": socket.gethostname(),
            "address": address,
            "interface": choice.interface,
            "port": server.getsockname()[1],
        }


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _try(own: Mapping[str, Any], peers: Sequence[Mapping[str, Any]], over: threading.Event) -> None:
    """Try the first ranks of other machines, all at once, and tell of those that cannot be reached."""
    if not peers:
        return
    with ThreadPoolExecutor(min(len(peers), _AT_ONCE), "lockstep-arrival") as pool:
        reasons = list(pool.map(lambda peer: _reach(own, peer), peers))
    failed = [(peer, reason) for peer, reason in zip(peers, reasons, strict=True) if reason]
    if failed and not over.is_set():
        peer, reason = failed[0]
        fix = "Open all TCP ports between the machines: ranks listen at ports that the system picks."
        if reason == _ITSELF:
            fix = f"On {peer['host']}: export GLOO_SOCKET_IFNAME=INTERFACE NCCL_SOCKET_IFNAME=INTERFACE."
        more = f" (and to {len(failed) - 1} more machines)" if len(failed) > 1 else ""
        _report(
            f"{_named(own)} cannot connect to {_named(peer)}{more}: {reason}. So the ranks cannot join. {fix} "
            "`lockstep doctor net` tries every pair."
        )


def _reach(own: Mapping[str, Any], peer: Mapping[str, Any]) -> str:
    """Why there is no way to a peer; empty when there is one."""
    if interfaces.is_loopback(peer["address"]) and peer["host"] != own["host"]:
        return _ITSELF
    return network.knock(peer["address"], peer["port"], ONE_TRY)


def _named(end: Mapping[str, Any]) -> str:
    return f"rank {end['rank']} on {end['host']} ({end['interface']} {end['address']})"
