"""Which interface gloo and NCCL take; the machine's own interfaces are read for real."""

from __future__ import annotations

import pytest

from lockstep.host import interfaces
from lockstep.host.interfaces import Interface

LO = Interface(name="lo", up=True, addresses=("127.0.0.1", "::1"))
ETH = Interface(name="eth0", up=True, addresses=("192.0.2.7", "2001:db8::7"), speed=1000)
FAST = Interface(name="ens9", up=True, addresses=("198.51.100.7",), speed=100_000)
IB = Interface(name="ib0", up=True, addresses=("203.0.113.7",), speed=200_000)
DOCKER = Interface(name="docker0", up=True, addresses=("172.17.0.1",), speed=10_000)
DOWN = Interface(name="eth1", up=False, addresses=("192.0.2.8",), speed=400_000)
ALL = [LO, DOCKER, ETH, FAST, DOWN]


def test_what_this_machine_has() -> None:
    found = {each.name: each for each in interfaces.read()}
    assert "127.0.0.1" in found["lo"].addresses
    assert found["lo"].is_loopback
    assert not found["lo"].leads_out
    assert all("%" not in address for each in found.values() for address in each.addresses)


def test_gloo_obeys_and_says_what_is_wrong() -> None:
    choice = interfaces.for_gloo({"GLOO_SOCKET_IFNAME": "ens9"}, ALL)
    assert (choice.interface, choice.address, choice.problem) == ("ens9", "198.51.100.7", "")
    wrong = interfaces.for_gloo({"GLOO_SOCKET_IFNAME": "eth7"}, ALL)
    assert wrong.address is None
    assert "names no interface of this machine (there are: lo, docker0, eth0, ens9, eth1)" in wrong.problem
    assert "eth1, which is down" in interfaces.for_gloo({"GLOO_SOCKET_IFNAME": "eth1"}, ALL).problem


@pytest.mark.parametrize(
    ("found", "interface", "address"),
    [
        (["192.0.2.7"], "eth0", "192.0.2.7"),
        (["127.0.1.1"], "lo", "127.0.1.1"),
        (["192.0.2.99", "198.51.100.7"], "ens9", "198.51.100.7"),
        ([], "lo", "127.0.0.1"),
        (["192.0.2.99"], "lo", "127.0.0.1"),
    ],
)
def test_gloo_goes_by_the_name(found: list[str], interface: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "resolve", lambda name: found)
    choice = interfaces.for_gloo({}, ALL, "node7")
    assert (choice.interface, choice.address) == (interface, address)
    assert "node7" in choice.reason


@pytest.mark.parametrize(
    ("told", "name", "allowed"),
    [
        ("eth", "eth0", True),
        ("eth,ib", "ib3", True),
        ("=eth", "eth0", False),
        ("=eth0,eth1", "eth1", True),
        ("^docker", "eth0", True),
        ("^docker,lo", "lo", False),
        ("^=eth", "eth0", True),
        ("^=eth0", "eth0", False),
    ],
)
def test_the_language_of_nccl(told: str, name: str, allowed: bool) -> None:
    assert interfaces.nccl_allows(told, name) == allowed


def test_nccl_prefers_infiniband_and_avoids_docker() -> None:
    assert interfaces.for_nccl({}, [*ALL, IB]).interface == "ib0"
    assert interfaces.for_nccl({}, ALL).interface == "eth0"
    assert interfaces.for_nccl({}, [LO, DOCKER]).interface == "docker0"
    assert interfaces.for_nccl({}, [LO]).interface == "lo"
    assert interfaces.for_nccl({}, []).address is None
    assert interfaces.for_nccl({"NCCL_SOCKET_IFNAME": "ens"}, ALL).interface == "ens9"
    assert (
        "^eth,lo,docker,ens names no interface"
        in interfaces.for_nccl({"NCCL_SOCKET_IFNAME": "^eth,lo,docker,ens"}, ALL).problem
    )


def test_the_likely_one_is_that_of_the_route_or_the_fastest_that_leads_out() -> None:
    assert interfaces.likely(ALL) == FAST
    assert interfaces.likely(ALL, "eth0") == ETH
    assert interfaces.likely([LO, DOCKER, DOWN]) is None


def test_all_of_127_is_the_loopback() -> None:
    assert interfaces.holder("127.0.1.1", ALL) == LO
    assert interfaces.holder("192.0.2.7", ALL) == ETH
    assert interfaces.holder("192.0.2.70", ALL) is None
    assert interfaces.is_loopback("::1")
    assert not interfaces.is_loopback("node7")


def test_names_resolve_ipv4_first() -> None:
    assert interfaces.resolve("localhost")[0] == "127.0.0.1"
    assert interfaces.resolve("no such name") == []
