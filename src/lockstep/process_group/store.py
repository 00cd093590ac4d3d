"""The store that a job's ranks share: opening it, and where it listens."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from lockstep.config import env
from lockstep.errors import TopologyError
from lockstep.job_store.signed_store import SignedStore, read_secret
from lockstep.job_store.store_server import host_store
from lockstep.process_group import startup_diagnostics
from lockstep.topology.topology import Topology


def port_of(store: Store) -> int | None:
    """Where the store listens, if it does: a line to it is not gloo's, and is needed to meet again."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, TCPStore) else None


def open_store(
    topology: Topology, init_method: str | None, timeout: timedelta, kept: dict[str, SignedStore]
) -> SignedStore:
    """Called on: all ranks. The store that the job's ranks share."""
    secret = read_secret(env.snapshot())
    url = init_method or f"tcp://{topology.main_address}:{topology.main_port}"
    if init_method is None and topology.main_address is None and topology.world_size == 1:
        return SignedStore(dist.HashStore(), secret)  # type: ignore[attr-defined]
    if url.startswith("env://"):
        url = f"tcp://{topology.main_address}:{topology.main_port}"
    if url in kept:
        return kept[url]
    kept.clear()
    try:
        with _report_while_opening(topology, url):
            store = _host(topology, url, timeout)
            if store is None:
                store, _, _ = next(dist.rendezvous(url, topology.rank, topology.world_size, timeout=timeout))  # type: ignore[attr-defined]
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TopologyError(
            f"Rank {topology.rank} of {topology.world_size} could not reach the job's store at {url} ({reason}). "
            "Check that rank 0 runs there, and that the port is free on its machine and open between machines."
        ) from error
    kept[url] = SignedStore(store, secret)
    return kept[url]


def _host(topology: Topology, url: str, timeout: timedelta) -> Store | None:
    """The store, where this rank hosts it; None where torch's rendezvous is to find or make it."""
    where = urlsplit(url)
    if topology.rank or topology.agent_store or topology.world_size == 1 or env.snapshot().get("USE_LIBUV") == "0":
        return None
    if where.scheme != "tcp" or where.query or where.hostname is None or where.port is None:
        return None
    return host_store(
        where.hostname,
        where.port,
        nodes=topology.num_nodes,
        timeout=timeout,
        world_size=topology.world_size,
        wait_for_workers=True,
    )


def _report_while_opening(topology: Topology, url: str) -> AbstractContextManager[None]:
    """Around opening the store: what is in the way to it, and that it waits for others, is told."""
    where = urlsplit(url)
    if where.scheme != "tcp" or where.hostname is None or where.port is None:
        return nullcontext()
    return startup_diagnostics.at_the_store(topology, where.hostname, where.port)
