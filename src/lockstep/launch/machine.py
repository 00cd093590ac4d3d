"""What this machine has: cores, accelerators, ports, and the way to other machines. Without torch where that can be."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from lockstep.config import limits
from lockstep.errors import ConfigError

_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dri/renderD*", "accel*", "davinci[0-9]*", "dxg")
"""Where Linux shows accelerators. Where none of these exists, asking torch would only take time."""

REFUSED = "connection refused"
"""Of a port: its machine answers, and nobody listens there; or a firewall says so."""


def usable_cores() -> int:
    """Cores that this process may use: fewer than the machine has, when it is tied to some or limited by its cgroup."""
    tied = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = limits.cores()
    return tied if allowed is None else max(1, min(tied, int(allowed)))


def accelerators(environ: Mapping[str, str]) -> tuple[int, str]:
    """How many accelerators torch can use here, and what they are called."""
    if environ.get("CUDA_VISIBLE_DEVICES") == "" or not any(
        next(Path("/dev").glob(pattern), None) for pattern in _DEVICE_FILES
    ):
        return 0, "none"
    import torch

    if not torch.accelerator.is_available():
        return 0, "none"
    device = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count(), "accelerator" if device is None else device.type


def is_free(port: int, address: str = "") -> bool:
    """Whether a server could listen there."""
    with closing(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except (OSError, OverflowError):
            return False
        return True


def next_free(port: int) -> int:
    """The first free port after this one; any free one when there is none."""
    for candidate in range(port + 1, min(port + 1000, 65536)):
        if is_free(candidate):
            return candidate
    with closing(socket.socket()) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def knock(address: str, port: int, limit: float) -> str:
    """Try to connect: empty when it works, else why not."""
    try:
        with closing(socket.create_connection((address, port), timeout=limit)):
            return ""
    except ConnectionRefusedError:
        return REFUSED
    except TimeoutError:
        return f"no answer within {limit:g} s"
    except (OSError, OverflowError, UnicodeError) as error:
        return (getattr(error, "strerror", None) or str(error)).lower()


def route_to(address: str, port: int) -> tuple[str, str | None]:
    """Which of our own addresses, on which interface, packets to ``address`` leave from.

    The name of this machine often resolves to an address that no other machine can reach (127.0.1.1), so it is the
    route that decides. Nothing is sent: connecting a datagram socket only looks the route up.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, port or 1, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise ConfigError(
            f"The main address {address!r} cannot be resolved on this machine ({error.strerror or error}). Give an "
            "address, or add the name to the name service or to /etc/hosts."
        ) from None
    with closing(socket.socket(family, kind)) as probe:
        try:
            probe.connect(target)
        except OSError as error:
            raise ConfigError(
                f"There is no route from this machine to the main address {address} ({error.strerror or error}). "
                "Check the address and the network."
            ) from None
        own = str(probe.getsockname()[0])
    return own, interface_of(own)


def interface_of(own: str) -> str | None:
    """The interface that has this address."""
    import psutil

    own = own.split("%")[0]  # a link-local address carries its interface
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == own for entry in addresses):
            return str(name)
    return "lo" if own.startswith("127.") else None
