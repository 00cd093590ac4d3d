"""Ranks of a machine that see in each other's boxes whether they mean the same collective."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.blackbox import layout
from lockstep.blackbox.peers import Peers
from tests.unit.blackbox import writers


@pytest.mark.parametrize(
    ("mine", "theirs", "found"),
    [
        (("gather", "a"), ("gather", "a"), None),
        (("gather", "a"), ("gather", "b"), 1),
        (("gather", "a"), ("reduce", "a"), 1),
        (("gather", None), ("gather", "b"), None),
        (("gather", "a"), ("gather", ""), None),
        (("gather", None), ("barrier", None), 1),
        (("gather", ((2, 3), "f32")), ("gather", ((2, 3), "f32")), None),
        (("gather", ((2, 3), "f32")), ("gather", ((2, 4), "f32")), 1),
        (("gather", "x" * 1000 + "1"), ("gather", "x" * 1000 + "2"), 1),
    ],
)
def test_compares_name_and_signature_of_the_same_number(
    tmp_path: Path, mine: tuple[str, object], theirs: tuple[str, object], found: int | None
) -> None:
    box, other = writers.make(tmp_path, 0), writers.make(tmp_path, 1)
    peers, others = Peers(tmp_path, 0, [0, 1]), Peers(tmp_path, 1, [0, 1])
    first = box.enter(*mine)
    assert peers.compare(first) is None  # the other has not come yet
    assert others.compare(other.enter(*theirs)) == (None if found is None else 0)
    assert peers.compare(first) == found


def test_hashes_may_be_given(tmp_path: Path) -> None:
    box, other = writers.make(tmp_path, 0), writers.make(tmp_path, 1)
    peers = Peers(tmp_path, 0, [0, 1])
    other.enter("gather", "a")
    number = box.enter("gather", "a")
    name, signature = layout.hash_text("gather"), layout.hash_text("a")
    assert peers.compare(number, name, signature) is None
    assert peers.compare(number, name, 0) is None
    assert peers.compare(number, name, layout.hash_text("b")) == 1
    assert peers.compare(number, layout.hash_text("reduce"), 0) == 1


def test_other_numbers_and_generations_are_not_compared(tmp_path: Path) -> None:
    box, other = writers.make(tmp_path, 0), writers.make(tmp_path, 1)
    peers = Peers(tmp_path, 0, [0, 1])
    for _ in range(layout.EVENT_SLOTS + 1):  # in the place of the first, but another number
        other.leave(other.enter("reduce"))
    number = box.enter("gather")
    assert peers.compare(number) is None
    box.leave(number)
    box.generation(1)
    assert peers.compare(box.enter("gather")) is None
    assert peers.compare(0) is None
    assert peers.compare(-1) is None


def test_numbers_of_a_generation_that_comes_twice_are_not_mixed_up(tmp_path: Path) -> None:
    box, other = writers.make(tmp_path, 0), writers.make(tmp_path, 1)
    peers = Peers(tmp_path, 0, [0, 1])
    other.leave(other.enter("gather"))
    box.leave(box.enter("gather"))
    other.generation(0)
    box.generation(0)
    assert peers.compare(box.enter("barrier")) is None


def test_boxes_may_appear_later_and_one_of_an_earlier_attempt_is_none(tmp_path: Path) -> None:
    box = writers.make(tmp_path, 0, attempt="2")
    peers = Peers(tmp_path, 0, [0, 1])
    number = box.enter("gather")
    assert peers.compare(number) is None
    old = writers.make(tmp_path, 1, attempt="1")
    old.enter("barrier")
    assert peers.compare(number) is None
    new = writers.make(tmp_path, 1, attempt="2")
    new.enter("reduce")
    assert peers.compare(number) == 1


def test_the_box_of_a_dead_process_is_not_compared(tmp_path: Path) -> None:
    child = writers.start("stay", tmp_path, 1)
    writers.end(child)
    box = writers.make(tmp_path, 0)
    assert Peers(tmp_path, 0, [0, 1]).compare(box.enter("reduce")) is None


def test_after_forget_a_replaced_box_is_found(tmp_path: Path) -> None:
    box, first = writers.make(tmp_path, 0), writers.make(tmp_path, 1)
    peers = Peers(tmp_path, 0, [0, 1])
    number = box.enter("gather")
    first.enter("gather")
    assert peers.compare(number) is None
    writers.make(tmp_path, 1).enter("barrier")
    assert peers.compare(number) is None
    peers.forget()
    assert peers.compare(number) == 1


def test_without_a_box_of_its_own_nothing_is_compared(tmp_path: Path) -> None:
    writers.make(tmp_path, 1).enter("gather")
    assert Peers(tmp_path, 0, [0, 1]).compare(1) is None
    writers.make(tmp_path, 0, pid=os.getpid() + 1).enter("reduce")
    assert Peers(tmp_path, 0, [0, 1]).compare(1) is None


def test_two_that_enter_at_the_same_moment_do_not_both_miss_a_mismatch(tmp_path: Path) -> None:
    entries = 200_000
    children = [writers.start("meet", tmp_path, rank, 1 - rank, entries) for rank in (0, 1)]
    try:
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        seen = [{int(word) for word in child.communicate(timeout=200)[0].split()} for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait(timeout=20)
    planted = set(range(10, entries + 1, 10))
    assert seen[0] | seen[1] == planted
