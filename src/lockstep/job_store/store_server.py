"""Hosting the job's store: it listens where the job's processes connect, not at every interface."""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from lockstep.host import interfaces

if TYPE_CHECKING:
    from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

_BACKLOG = 4096
"""Connections that may wait to be accepted, within the kernel's own limit: the ranks of a large job arrive at once."""


def listen_address(main: str, nodes: int) -> str | None:
    """The address of this node at which the others look for the store; None where it has to listen at all.

    An address that is not this node's own belongs to a router or to a service in front of it. A name that leads back
    to this node alone, as Debian's host names do to 127.0.1.1, leads the other nodes elsewhere; so may one with
    several addresses.
    """
    named = interfaces.resolve(main)
    present = interfaces.read()
    own = [address for address in named if interfaces.holder(address, present) is not None]
    if nodes == 1 or main in (*named, "localhost"):
        return own[0] if own else None
    outside = [address for address in own if not interfaces.is_loopback(address)]
    return outside[0] if len(outside) == 1 else None


def is_here(main: str) -> bool:
    """Whether an address, or all that a name stands for, belongs to this node."""
    named, present = interfaces.resolve(main), interfaces.read()
    return bool(named) and all(interfaces.holder(address, present) is not None for address in named)


def host_store(
    main: str,
    port: int,
    *,
    nodes: int,
    timeout: timedelta,
    world_size: int | None = None,
    wait_for_workers: bool = False,
) -> TCPStore:
    """Called on: the process that hosts the store. Open it at ``main``, or raise torch's DistNetworkError."""
    from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

    listener = _listen(listen_address(main, nodes), port)
    return TCPStore(
        main,
        port if listener is None else listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=wait_for_workers,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listen(address: str | None, port: int) -> socket.socket | None:
    """A socket that listens; None where torch is to make its own."""
    if address is None:
        return None
    with suppress(OSError):  # taken: by a store of this process, which torch finds, or torch's error says by whom
        return socket.create_server(
            (address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=_BACKLOG
        )
    return None
