"""The interfaces: which of them gloo and NCCL will take, and which is likely the right one; IPv6."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.doctor.context import DoctorContext
from lockstep.doctor.finding import Finding
from lockstep.errors import ConfigError
from lockstep.host import interfaces
from lockstep.host.interfaces import Interface, InterfaceChoice
from lockstep.host.network import route_to


def chosen(context: DoctorContext) -> Iterator[Finding]:
    """What gloo takes, and NCCL, each beside what the route to the main address says."""
    present = interfaces.read()
    route = None
    if context.main_address is not None:
        try:
            route = route_to(context.main_address, 0)[1]
        except ConfigError as error:
            yield Finding(
                check="route",
                status="error",
                what=str(error),
                why="this machine cannot meet the others",
                data={"main_address": context.main_address},
            )
    right = interfaces.likely(present, None if route == "lo" and context.machines > 1 else route)
    for library, choice in (
        ("gloo", interfaces.for_gloo(context.environ, present)),
        ("NCCL", interfaces.for_nccl(context.environ, present)),
    ):
        yield _one(library, choice, right, present, context, by_route=route is not None)


def _one(
    library: str,
    choice: InterfaceChoice,
    right: Interface | None,
    present: list[Interface],
    context: DoctorContext,
    *,
    by_route: bool,
) -> Finding:
    check, variable = f"{library} interface", f"{library.upper()}_SOCKET_IFNAME"
    data = {
        "chosen": choice.interface,
        "address": choice.address,
        "likely": None if right is None else right.name,
        "interfaces": {each.name: list(each.addresses) for each in present if each.up},
    }
    fix = f"export {variable}={right.name}" if right is not None else "see `ip address`"
    if choice.problem:
        return Finding(
            check=check,
            status="error",
            what=choice.problem,
            why=f"{library} finds no interface to talk over, and the job fails when it starts",
            fix=fix,
            data=data,
        )
    summary = f"{choice.interface or 'none'} ({choice.address}): {choice.reason}"
    if right is None or choice.interface == right.name or context.machines == 1:
        other = right is not None and right.leads_out and choice.interface != right.name
        rest = f"; {right.name} leads to other nodes" if other and right is not None else ""
        return Finding(check=check, status="ok", what=summary + rest, data=data)
    chosen_one = next((each for each in present if each.name == choice.interface), None)
    unusable = chosen_one is None or chosen_one.is_loopback or not chosen_one.leads_out
    why = "the route to the main address goes by it" if by_route else "it is the fastest that leads out"
    return Finding(
        check=check,
        status="error" if unusable else "warning",
        what=f"{summary}; {right.name} is likely the right one, as {why}",
        why="ranks tell each other an address at which they cannot be reached, or take a slow way",
        fix=fix,
        data=data,
    )


def ipv6(context: DoctorContext) -> Finding:
    """Whether a host has addresses of both kinds, of which one may lead nowhere."""
    present = interfaces.read()
    six = {each.name: [number for number in each.addresses if ":" in number] for each in present if each.leads_out}
    four = {each.name: [number for number in each.addresses if ":" not in number] for each in present if each.leads_out}
    data = {"ipv6": six, "ipv4": four}
    has_six, has_four = any(six.values()), any(four.values())
    if has_six and not has_four:
        family = context.environ.get("NCCL_SOCKET_FAMILY")
        what = "this machine has IPv6 addresses only"
        if family == "AF_INET":
            return Finding(
                check="IPv6",
                status="error",
                what=f"{what}, and NCCL_SOCKET_FAMILY=AF_INET asks for IPv4",
                why="NCCL finds no interface",
                fix="export NCCL_SOCKET_FAMILY=AF_INET6",
                data=data,
            )
        return Finding(check="IPv6", status="ok", what=f"{what}; write them in brackets: [address]:port", data=data)
    if has_six and context.environ.get("NCCL_SOCKET_FAMILY") is None:
        what = "addresses of both kinds; IPv4 is taken first (NCCL_SOCKET_FAMILY=AF_INET makes NCCL sure of it)"
        return Finding(check="IPv6", status="ok", what=what, data=data)
    return Finding(check="IPv6", status="ok", what="IPv4 only" if not has_six else "addresses of both kinds", data=data)
