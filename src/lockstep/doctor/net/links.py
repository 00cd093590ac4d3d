"""Which ranks can connect to which, and what the lines between them give."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lockstep.doctor.net import tcp_probe
from lockstep.doctor.net.results import Contact, Link, RankInfo
from lockstep.doctor.net.schedule import Pair
from lockstep.host import interfaces
from lockstep.host.network import route_to

CONNECT = 3.0
"""Seconds for one connection. All are tried at once, so this names every pair that cannot talk."""
SILENT = "nothing came"
"""Begins the error of a line that stands and is silent."""
_AT_ONCE = 256
SILENCE = 5.0
"""Seconds without a byte after which a line that is being measured counts as broken."""


def reach(
    own: RankInfo, members: Mapping[int, RankInfo], keep: Container[int]
) -> tuple[list[Contact], dict[int, socket.socket]]:
    """Try to connect to every other rank, all at once: what failed, and the lines to those in ``keep`` that stand.

    The others are hung up at once: of thousands of ranks no process can keep a line to each.
    """
    others = [member for rank, member in sorted(members.items()) if rank != own.rank]
    if not others:
        return [], {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(others)), "lockstep-doctor-dial") as pool:
        tried = list(pool.map(lambda member: _try(own, member, keep), others))
    lines = {member.rank: line for member, (_, line) in zip(others, tried, strict=True) if line is not None}
    return [contact for contact, _ in tried if contact is not None], lines


def _try(own: RankInfo, peer: RankInfo, keep: Container[int]) -> tuple[Contact | None, socket.socket | None]:
    """Why there is no line to a peer, or the line, if it is to be kept."""
    started = time.monotonic()
    line, error = None, peer.problem
    if not error:
        line, error = _dial(own, peer, peer.address or "")
    if line is not None:
        if peer.rank not in keep:
            tcp_probe.hang_up(line)
        return None, line if peer.rank in keep else None
    contact = Contact(
        source=own.rank,
        target=peer.rank,
        error=error,
        seconds=time.monotonic() - started,
        through=_leaves_by(peer.address) if peer.address else "",
        instead=_other_way(own, peer),
    )
    return contact, None


def _dial(own: RankInfo, peer: RankInfo, address: str) -> tuple[socket.socket | None, str]:
    if not address:
        return None, "it has no address"
    if interfaces.is_loopback(address) and peer.host != own.host:
        # To dial it would reach this machine itself.
        return None, f"{address} means the machine itself, and cannot be reached from another one"
    try:
        return tcp_probe.dial(address, peer.port, peer.token, own.rank, CONNECT), ""
    except TimeoutError:
        return None, f"no answer within {CONNECT:g} s"
    except OSError as error:
        return None, (error.strerror or str(error)).lower()


def _leaves_by(address: str) -> str:
    try:
        return route_to(address, 0)[1] or ""
    except ValueError:
        return ""


def _other_way(own: RankInfo, peer: RankInfo) -> str:
    """An interface of the peer that answers, where the one it would use does not; all are tried at once."""
    ways = [(name, each) for name, addresses in peer.others.items() for each in addresses if each != peer.address]
    if not ways:
        return ""
    with ThreadPoolExecutor(len(ways), "lockstep-doctor-dial") as pool:
        lines = [line for line, _ in pool.map(lambda way: _dial(own, peer, way[1]), ways)]
    found = ""
    for (name, _), line in zip(ways, lines, strict=True):
        if line is not None:
            tcp_probe.hang_up(line)
            found = found or name
    return found


def dialler(pair: Pair, tried: Container[int], failed: Container[Pair]) -> int | None:
    """Which of the two asks the other; None when neither could connect. The same on every rank.

    ``tried`` are the ranks that have tried to connect to all others, and ``failed`` has each try, from and to.
    """
    for source, target in (pair, pair[::-1]):
        if source in tried and (source, target) not in failed:
            return source
    return None


def measure(line: socket.socket, *, own: int, peer: int, pings: int, target: float) -> Link:
    """What a line gives; ``target`` is how long each direction is to be used, and 0 only tries whether it is one."""
    a, b = sorted((own, peer))
    found: dict[str, Any] = {}
    doing = "small messages were sent"
    try:
        line.settimeout(SILENCE)
        tcp_probe.ping(line)  # the first one wakes the other side up
        trips = [tcp_probe.ping(line) for _ in range(pings)]
        shortest = min(trips)
        found["latency"] = statistics.median(seconds for seconds, _ in trips) / 2
        found["offset"] = shortest[1] if own == a else -shortest[1]
        found["uncertain"] = shortest[0] / 2
        for source, to in ((own, peer), (peer, own)):
            doing = f"rank {source} sent larger ones to rank {to}; small messages pass"
            value = tcp_probe.rate(line, take=source == peer, target=target)
            if target > 0:
                found["forth" if source == a else "back"] = value
        resent, resent_here = tcp_probe.sent_again(line)
        found["lost_forth"], found["lost_back"] = (resent, resent_here) if own == a else (resent_here, resent)
    except (OSError, EOFError) as error:
        why = f"{SILENT} for {SILENCE:g} s" if isinstance(error, TimeoutError) else str(error)
        line.close()  # without a word, which would wait for what was not taken
        return Link(a=a, b=b, error=f"{why} while {doing}", **found)
    tcp_probe.hang_up(line)
    return Link(a=a, b=b, **found)
