"""The name of this machine: where it leads, here and for others."""

from __future__ import annotations

import socket

from lockstep.doctor.context import DoctorContext
from lockstep.doctor.finding import Finding
from lockstep.host import interfaces


def own(context: DoctorContext) -> Finding:
    """The host name must resolve to an address that other nodes can reach: gloo tells it to them."""
    name = socket.gethostname()
    present = interfaces.read()
    found = interfaces.resolve(name)
    data = {"name": name, "addresses": found}
    out = interfaces.likely(present)
    several = context.machines > 1
    interface = context.environ.get("GLOO_SOCKET_IFNAME")
    if not found:
        return Finding(
            check="host name",
            status="error" if several and not interface else "warning",
            what=f"{name} resolves to no address",
            why="gloo falls back to the loopback then, where no other node can reach it",
            fix=_line(out, name),
            data=data,
        )
    first = found[0]
    holder = interfaces.holder(first, present)
    if holder is None:
        return Finding(
            check="host name",
            status="error" if several and not interface else "warning",
            what=f"{name} resolves to {first}, which is no address of this machine",
            why="other nodes that look for this one by its name find another, or nobody",
            fix=_line(out, name),
            data=data,
        )
    if not holder.is_loopback:
        what = f"{name} resolves to {first} ({holder.name})"
        return Finding(check="host name", status="ok", what=what, data=data)
    if interface:
        what = f"{name} resolves to {first}, the machine itself; GLOO_SOCKET_IFNAME={interface} is used instead"
        return Finding(check="host name", status="ok", what=what, data=data)
    if out is None:
        what = f"{name} resolves to {first}, the machine itself; there is no interface that leads out"
        return Finding(check="host name", status="ok", what=what, data=data)
    return Finding(
        check="host name",
        status="error" if several else "warning",
        what=f"{name} resolves to {first}, which only means the machine itself",
        why="on several nodes gloo tells the others this address, and they wait for themselves",
        fix=f"{_line(out, name)}, or export GLOO_SOCKET_IFNAME={out.name}; `lockstep launch` does the latter by itself",
        data=data,
    )


def _line(out: interfaces.Interface | None, name: str) -> str:
    address = out.addresses[0] if out is not None and out.addresses else "ADDRESS"
    return f"write `{address} {name}` into /etc/hosts instead of its line there"
