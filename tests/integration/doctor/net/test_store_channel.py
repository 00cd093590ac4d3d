"""Ranks that meet in a store: real ones, in threads; some come late, and some never."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.doctor.net.store_channel import StoreChannel, _require_free
from lockstep.errors import TopologyError


def ranks(count: int, work: Callable[[StoreChannel], Any], absent: tuple[int, ...] = ()) -> dict[int, Any]:
    """What each rank that is there gets."""
    store = dist.HashStore()
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        found[rank] = work(StoreChannel(store, rank, count))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_everybody_hears_everybody() -> None:
    def work(meeting: StoreChannel) -> Any:
        meeting.send("who", {"rank": meeting.rank})
        return meeting.receive("who", 10)

    assert set(map(str, ranks(7, work).values())) == {str({rank: {"rank": rank} for rank in range(7)})}


def test_those_that_never_come_are_waited_for_once() -> None:
    words: list[str] = []

    def work(meeting: StoreChannel) -> Any:
        meeting.send("who", meeting.rank)
        heard = meeting.receive("who", 1.3, log=words.append)
        started = time.monotonic()
        meeting.barrier("later", 30)
        return sorted(heard), meeting.missing, time.monotonic() - started < 10

    assert set(map(str, ranks(5, work, absent=(1, 3)).values())) == {"([0, 2, 4], [1, 3], True)"}
    assert "waiting for ranks 1, 3" in words


def test_one_that_comes_after_it_was_given_up_does_not_stand_for_another() -> None:
    store = dist.HashStore()
    early, late, other = (StoreChannel(store, rank, 3) for rank in range(3))
    early.lose([1])
    late.send("who", 1)
    early.send("who", 0)
    assert early.receive("who", 0.3) == {0: 0}  # two have told, but not the two that were asked
    assert early.missing == [1, 2]
    other.send("again", 2)
    assert other.receive("again", 5, of=[2]) == {2: 2}


def test_a_port_that_is_taken_is_told_with_one_that_is_free() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            TopologyError, match=f"Port {port}, at which the ranks are to meet, is in use.*is free here"
        ):
            _require_free(port)
