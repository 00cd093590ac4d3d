"""Where the job's store listens: at the address that the job's processes connect to, and nowhere else."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import pytest
from torch.distributed import DistNetworkError

from lockstep.host import interfaces
from lockstep.host.interfaces import Interface
from lockstep.job_store import store_server
from tests.ranks import free_port

SECOND = timedelta(seconds=10)
HERE = [
    Interface(name="lo", up=True, addresses=("127.0.0.1", "::1")),
    Interface(name="eth0", up=True, addresses=("10.0.0.1", "fd00::1")),
    Interface(name="ib0", up=True, addresses=("10.1.0.1",)),
]
NAMES = {
    "localhost": ["127.0.0.1", "::1"],
    "debian": ["127.0.1.1"],
    "node0": ["10.0.0.1"],
    "both": ["10.0.0.1", "10.1.0.1"],
    "loop-and-net": ["127.0.1.1", "10.0.0.1"],
    "service": ["10.96.0.1"],
    "unknown": [],
}


@pytest.mark.parametrize(
    ("main", "one_node", "several"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),  # several nodes at a loopback address are all on this machine
        ("::1", "::1", "::1"),
        ("10.0.0.1", "10.0.0.1", "10.0.0.1"),
        ("fd00::1", "fd00::1", "fd00::1"),
        ("10.96.0.1", None, None),  # a service's, or a router's
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("debian", "127.0.1.1", None),  # the others know it by another address
        ("node0", "10.0.0.1", "10.0.0.1"),
        ("both", "10.0.0.1", None),
        ("loop-and-net", "127.0.1.1", "10.0.0.1"),
        ("service", None, None),
        ("unknown", None, None),
    ],
)
def test_the_address_follows_from_where_the_others_look(
    main: str, one_node: str | None, several: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "read", lambda: HERE)
    monkeypatch.setattr(interfaces, "resolve", lambda name: NAMES.get(name, [name]))
    assert store_server.listen_address(main, 1) == one_node
    assert store_server.listen_address(main, 2) == several


def listeners(port: int) -> list[str]:
    found = psutil.Process(os.getpid()).net_connections(kind="inet")
    return [each.laddr.ip for each in found if each.status == "LISTEN" and each.laddr.port == port]


@pytest.mark.parametrize("main", ["127.0.0.1", "localhost"])
def test_it_listens_there_only(main: str) -> None:
    store = store_server.host_store(main, 0, nodes=1, timeout=SECOND)
    assert listeners(store.port) == ["127.0.0.1"]
    store.set("a", "1")
    assert store.clone().get("a") == b"1"


def test_a_store_of_this_process_is_found_again_and_a_port_of_another_program_is_an_error() -> None:
    first = store_server.host_store("127.0.0.1", free_port(), nodes=1, timeout=SECOND)
    first.set("a", "1")
    assert store_server.host_store("127.0.0.1", first.port, nodes=1, timeout=SECOND).get("a") == b"1"
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(DistNetworkError):
        store_server.host_store("127.0.0.1", other.getsockname()[1], nodes=1, timeout=SECOND)
