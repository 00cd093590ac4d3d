"""The network interfaces of this machine, and which of them gloo and NCCL will take."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SOFTWARE = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "tunl", "podman", "vmnet", "tap")
"""How the names of interfaces begin that lead to containers on this machine, not to other machines."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """One interface."""

    name: str
    """What Linux calls it."""
    up: bool
    """Whether it is switched on."""
    addresses: tuple[str, ...] = ()
    """Its IP addresses, without those that mean something on one cable only."""
    speed: int = 0
    """What its hardware says it can do, in Mbit/s; 0 when it does not say."""
    mtu: int = 0
    """The largest packet."""

    @property
    def is_loopback(self) -> bool:
        """Whether it leads back to this machine."""
        return self.name == "lo" or any(is_loopback(address) for address in self.addresses)

    @property
    def leads_out(self) -> bool:
        """Whether other machines may be reached by it."""
        return self.up and bool(self.addresses) and not self.is_loopback and not self.name.startswith(_SOFTWARE)


def is_loopback(address: str) -> bool:
    """Whether this address means the machine itself, whoever uses it."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def read() -> list[Interface]:
    """What this machine has, in the system's order."""
    import psutil

    stats = psutil.net_if_stats()
    found = []
    for name, entries in psutil.net_if_addrs().items():
        numbers = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        known = stats.get(name)
        found.append(
            Interface(
                name=name,
                up=known is not None and known.isup,
                addresses=tuple(number for number in numbers if "%" not in number and not _is_link_local(number)),
                speed=0 if known is None or known.speed >= 65535 else known.speed,  # 65535 is a driver's "unknown"
                mtu=0 if known is None else known.mtu,
            )
        )
    return found


def _is_link_local(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_link_local
    except ValueError:
        return True


def holder(address: str, interfaces: Sequence[Interface]) -> Interface | None:
    """The interface that has this address; the whole of 127.0.0.0/8 is the loopback's."""
    for interface in interfaces:
        if address in interface.addresses:
            return interface
    if is_loopback(address):
        return next((interface for interface in interfaces if interface.is_loopback), None)
    return None


@dataclass(frozen=True, kw_only=True)
class InterfaceChoice:
    """What a library will use, and why."""

    address: str | None
    """The address; None when there is none to be had."""
    interface: str | None
    reason: str
    """Why this one, in words."""
    problem: str = ""
    """What is wrong with it as it is set."""


def for_gloo(environ: Mapping[str, str], interfaces: Sequence[Interface], name: str | None = None) -> InterfaceChoice:
    """As gloo chooses: the interface it is told, else the first address of the host's name that is this machine's."""
    setting = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if setting:
        matching = [each for each in interfaces if each.name == setting]
        return _as_asked("GLOO_SOCKET_IFNAME", setting, matching, interfaces)
    name = socket.gethostname() if name is None else name
    for address in resolve(name):
        found = holder(address, interfaces)
        if found is not None:
            return InterfaceChoice(address=address, interface=found.name, reason=f"the host name {name} resolves to it")
    return InterfaceChoice(
        address="127.0.0.1",
        interface="lo",
        reason=f"the host name {name} resolves to no address of this machine, so gloo falls back to the loopback",
    )


def for_nccl(environ: Mapping[str, str], interfaces: Sequence[Interface]) -> InterfaceChoice:
    """As NCCL chooses: those that NCCL_SOCKET_IFNAME allows; else InfiniBand's, else any but docker's and loopback."""
    setting = environ.get("NCCL_SOCKET_IFNAME", "").strip()
    usable = [each for each in interfaces if each.up and each.addresses]
    if setting:
        return _as_asked(
            "NCCL_SOCKET_IFNAME", setting, [each for each in usable if nccl_allows(setting, each.name)], interfaces
        )
    for start, reason in (("ib", "NCCL takes interfaces of InfiniBand first"), ("", "NCCL takes the first one that")):
        for each in usable:
            if each.name.startswith(start) and not each.is_loopback and not each.name.startswith("docker"):
                why = reason if start else f"{reason} is neither docker's nor the loopback"
                return InterfaceChoice(address=each.addresses[0], interface=each.name, reason=why)
    last = next(iter(sorted(usable, key=lambda each: each.is_loopback)), None)
    if last is None:
        return InterfaceChoice(address=None, interface=None, reason="no interface is up and has an address")
    return InterfaceChoice(address=last.addresses[0], interface=last.name, reason="NCCL finds nothing better")


def nccl_allows(setting: str, name: str) -> bool:
    """NCCL's own words: beginnings of names with commas between, ``=`` in front for whole names, ``^`` to exclude."""
    exclude = setting.startswith("^")
    setting = setting.removeprefix("^")
    whole = setting.startswith("=")
    words = [word for word in setting.removeprefix("=").split(",") if word]
    matches = any(name == word if whole else name.startswith(word) for word in words)
    return matches != exclude


def _as_asked(
    variable: str, setting: str, matching: Sequence[Interface], interfaces: Sequence[Interface]
) -> InterfaceChoice:
    usable = [each for each in matching if each.up and each.addresses]
    reason = f"{variable}={setting}"
    if usable:
        return InterfaceChoice(address=usable[0].addresses[0], interface=usable[0].name, reason=reason)
    state = "no interface of this machine" if not matching else f"{matching[0].name}, which is down or has no address"
    there = ", ".join(each.name for each in interfaces)
    return InterfaceChoice(
        address=None, interface=None, reason=reason, problem=f"{reason} names {state} (there are: {there})"
    )


def resolve(name: str) -> list[str]:
    """The addresses of a name, IPv4 first as gloo and most programs have it; empty when it has none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    numbers = [str(entry[4][0]).split("%")[0] for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)]
    return list(dict.fromkeys(numbers))


def likely(interfaces: Sequence[Interface], route: str | None = None) -> Interface | None:
    """The one that other machines are most likely reached by: that of the route to them, else the fastest."""
    if route is not None:
        return next((each for each in interfaces if each.name == route), None)
    return max((each for each in interfaces if each.leads_out), key=lambda each: each.speed, default=None)
