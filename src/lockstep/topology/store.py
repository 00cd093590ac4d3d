"""The store that a job's ranks share: opening it, and where it listens."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from lockstep.errors import TopologyError
from lockstep.topology import arrival
from lockstep.topology.topology import Topology


def port_of(store: Store) -> int | None:
    """Where the store listens, if it does: a line to it is not gloo's, and is needed to meet again."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, TCPStore) else None


def open_store(topology: Topology, init_method: str | None, timeout: timedelta, kept: dict[str, Store]) -> Store:
    """Called on: all ranks. The store that the job's ranks share."""
    url = init_method or f"tcp://{topology.main_address}:{topology.main_port}"
    if init_method is None and topology.main_address is None and topology.world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    if url.startswith("env://"):
        url = f"tcp://{topology.main_address}:{topology.main_port}"
    if url in kept:
        return kept[url]
    kept.clear()
    try:
        with _told(topology, url):
            store, _, _ = next(dist.rendezvous(url, topology.rank, topology.world_size, timeout=timeout))  # type: ignore[attr-defined]
        kept[url] = store
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TopologyError(
            f"Rank {topology.rank} of {topology.world_size} could not reach the job's store at {url} ({reason}). "
            "Check that rank 0 runs there, and that the port is free on its machine and open between machines."
        ) from error
    return store


def _told(topology: Topology, url: str) -> AbstractContextManager[None]:
    """Around opening the store: what is in the way to it, and that it waits for others, is told."""
    where = urlsplit(url)
    if where.scheme != "tcp" or where.hostname is None or where.port is None:
        return nullcontext()
    return arrival.at_the_store(topology, where.hostname, where.port)
