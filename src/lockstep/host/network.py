"""The way from this machine to others: whether a port answers, and by which interface packets leave."""

from __future__ import annotations

import socket
from contextlib import closing

from lockstep.errors import ConfigError

REFUSED = "connection refused"
"""Of a port: its machine answers, and nobody listens there; or a firewall says so."""


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


def is_port_in_use(port: int | None = None) -> bool:
    """Whether something on this machine listens at the port (29500 where none is given)."""
    return not knock("localhost", 29500 if port is None else port, 1.0)
