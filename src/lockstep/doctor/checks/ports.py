"""The port of the rendezvous: free here, or reachable there; and whether this machine lets itself be reached."""

from __future__ import annotations

import socket
import threading
from contextlib import closing, suppress
from typing import Any

from lockstep.doctor.context import DoctorContext
from lockstep.doctor.finding import Finding
from lockstep.host import interfaces
from lockstep.host.hardware import is_free, next_free
from lockstep.host.network import REFUSED, knock

_CONNECT = 3.0


def main_port(context: DoctorContext) -> Finding:
    """On the main node the port has to be free; from the others it has to be reachable."""
    port, address = context.main_port, context.main_address
    data: dict[str, Any] = {"address": address, "port": port}
    if context.launched and port:
        return _reachable(address or "127.0.0.1", port, data)
    if address is not None and not interfaces.resolve(address):
        return Finding(check="main port", status="skipped", what=f"{address} resolves to no address", data=data)
    if address is not None and not _is_here(address):
        return _reachable(address, port, data, may_be_early=True)
    if is_free(port):
        return Finding(check="main port", status="ok", what=f"{port} is free on this machine", data=data)
    free = next_free(port)
    return Finding(
        check="main port",
        status="warning",
        what=f"{port} is in use on this machine{_user(port)}",
        why="a job that meets there fails with 'Address already in use', or meets another job",
        fix=f"--main_process_port {free} (lockstep launch) or --master_port {free} (torchrun): {free} is free",
        data={**data, "free": free},
    )


def _reachable(address: str, port: int, data: dict[str, Any], may_be_early: bool = False) -> Finding:
    reason = knock(address, port, _CONNECT)
    if not reason:
        return Finding(check="main port", status="ok", what=f"{address} port {port} can be reached", data=data)
    if reason == REFUSED and may_be_early:
        what = f"{address} answers; nobody listens at {port} there yet, as long as no job runs"
        return Finding(check="main port", status="ok", what=what, data=data)
    return Finding(
        check="main port",
        status="error",
        what=f"{address} port {port} cannot be reached from here: {reason}",
        why="this machine cannot meet the others",
        fix=f"see `ip route get {address}`, and open the port in the firewall there; try: nc -vz {address} {port}",
        data={**data, "reason": reason},
    )


def _is_here(address: str) -> bool:
    present = interfaces.read()
    return any(interfaces.holder(number, present) is not None for number in interfaces.resolve(address))


def _user(port: int) -> str:
    """Who listens there, as far as this user may see."""
    import psutil

    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def firewall(context: DoctorContext) -> Finding:
    """Whether a connection to this machine's own outward address comes through, on a port that the system picks.

    Between nodes it is tried each way by `lockstep doctor` under a launcher, and by `lockstep doctor net`.
    """
    out = interfaces.likely(interfaces.read())
    if out is None:
        return Finding(check="firewall", status="skipped", what="no interface leads out of this machine")
    address = next((number for number in out.addresses if ":" not in number), out.addresses[0])
    data: dict[str, Any] = {"interface": out.name, "address": address}
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    reason = ""
    with closing(socket.create_server((address, 0), family=family)) as server:
        server.settimeout(_CONNECT)
        port = int(server.getsockname()[1])
        thread = threading.Thread(target=_accept, args=(server,), daemon=True)
        thread.start()
        try:
            with closing(socket.create_connection((address, port), timeout=_CONNECT)) as line:
                line.settimeout(_CONNECT)
                if line.recv(2) != b"ok":
                    reason = "the connection was closed"
        except OSError as error:
            reason = f"no answer within {_CONNECT:g} s" if isinstance(error, TimeoutError) else str(error)
        thread.join(_CONNECT)
    if not reason:
        what = f"a connection to {address} ({out.name}) at a port the system picks comes through on this machine"
        return Finding(check="firewall", status="ok", what=f"{what}; between nodes: lockstep doctor net", data=data)
    return Finding(
        check="firewall",
        status="error",
        what=f"a connection of this machine to its own address {address} ({out.name}), port {port}, fails: {reason}",
        why="ranks of one node talk to each other like this",
        fix="open it: nft list ruleset (or iptables -L -n) shows the rules; allow what comes from this machine",
        data={**data, "reason": reason},
    )


def _accept(server: socket.socket) -> None:
    with suppress(OSError):
        line, _ = server.accept()
        with closing(line):
            line.sendall(b"ok")
