"""The way to the job's store, tried by hand before torch takes it: what stands in it is told at once, and by name."""

from __future__ import annotations

import time
from collections.abc import Callable

from lockstep.doctor.finding import Finding
from lockstep.doctor.net.results import RankInfo
from lockstep.errors import ConfigError
from lockstep.host.network import REFUSED, knock, route_to

ONE_TRY = 3.0
"""Seconds for one connection."""
EARLY = 5.0
"""Seconds for which nobody needs to listen: rank 0 may start later than the others."""
_PAUSE = 0.5


def wait_for(
    own: RankInfo,
    address: str,
    port: int,
    deadline: float,
    log: Callable[[str], None],
    alarm: Callable[[list[Finding]], None],
) -> str:
    """Wait until the store's address answers; why it does not, when it has not by the deadline. Alarms once."""
    started = time.monotonic()
    logged = False
    while reason := knock(address, port, ONE_TRY):
        now = time.monotonic()
        if now >= deadline:
            return reason
        if not logged and (reason != REFUSED or now - started >= EARLY):
            alarm([obstacle(own, address, port, reason)])
            logged = True
        log(f"waiting for the store at {address} port {port}: {reason}")
        time.sleep(min(_PAUSE, max(0.0, deadline - now)))
    return ""


def obstacle(own: RankInfo, address: str, port: int, reason: str) -> Finding:
    """What one who cannot get to the store says."""
    try:
        through = route_to(address, 0)[1]
    except ConfigError:
        through = None
    leaving = f", leaving by {through}" if through and through != own.interface else ""
    data = {"rank": own.rank, "host": own.host, "address": address, "port": port, "reason": reason}
    if reason == REFUSED:
        return Finding(
            check="main address",
            status="warning",
            what=f"{own.name} finds nobody at {address} port {port}{leaving}: {reason}",
            why="all ranks need this store: rank 0 has not started yet, runs elsewhere, or a firewall refuses",
            fix=f"see that rank 0 runs, that {address} is its machine, and that port {port} is open there",
            data=data,
        )
    return Finding(
        check="main address",
        status="error",
        what=f"{own.name} cannot connect to {address} port {port}, the rendezvous of all ranks{leaving}: {reason}",
        why="without it this rank cannot take part, and a job would wait for it in vain",
        fix=f"see `ip route get {address}`, and open the port in the firewall there; try: nc -vz {address} {port}",
        data=data,
    )
