"""Lists of torch's own collectives side by side: where they part, and who left out what."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.blackbox.snapshot import Snapshot, TorchCall
from lockstep.guard.diagnose import diagnose
from lockstep.guard.torch_calls import calls_of, explain, first_difference
from lockstep.torch_internals.flight_recorder import allow_stacks, can_list_stacks
from tests.unit.guard.boxes import BACKWARD, box

STEP = ("all_reduce", 100, "train.py:20")
OWN = ("all_reduce", 2, "train.py:30")
NAMES = st.tuples(st.sampled_from(["all_reduce", "broadcast", "barrier"]), st.integers(1, 4), st.just("train.py:9"))


def calls(rows: list[tuple[str, int, str]]) -> tuple[TorchCall, ...]:
    return tuple(
        TorchCall(number=number, name=name, shapes=f"[[{size}]]", elements=size, site=site)
        for number, (name, size, site) in enumerate(rows, 1)
    )


def rank(number: int, rows: list[tuple[str, int, str]], **more: Any) -> Snapshot:
    return box(number, [BACKWARD, BACKWARD], waits=5, torch_calls=calls(rows), **more)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_call_left_out_is_named_with_its_line(ranks: int) -> None:
    boxes = [
        rank(number, [STEP, STEP, *([OWN] if number != 1 else []), STEP, STEP], world=ranks) for number in range(ranks)
    ]
    found = diagnose(boxes)
    assert found is not None
    assert found.certain
    assert found.kind == "different torch calls"
    assert found.lead == "Rank 1 did not make the call of torch's all_reduce at train.py:30."
    assert "called torch's all_reduce #3 at train.py:30" in found.headline


def test_calls_that_differ_otherwise_are_both_shown() -> None:
    boxes = [rank(0, [STEP, OWN, STEP]), rank(1, [STEP, ("barrier", 1, "train.py:31"), STEP])]
    found = diagnose(boxes)
    assert found is not None
    assert found.certain
    assert not found.lead
    assert "train.py:30" in found.headline
    assert "train.py:31" in found.headline


@given(
    st.lists(NAMES, max_size=20), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=2, max_size=5)
)
def test_lists_of_one_order_never_differ(rows: list[tuple[str, int, str]], parts: list[tuple[int, int]]) -> None:
    """Ranks are at different places, and Flight Recorder has forgotten the oldest calls of some."""
    whole = calls(rows)
    boxes = [box(number, torch_calls=whole[start:end]) for number, (start, end) in enumerate(parts)]
    assert first_difference(boxes) is None


@given(st.lists(NAMES, min_size=1, max_size=12), st.integers(0, 11), st.integers(2, 4))
def test_the_first_difference_is_found(rows: list[tuple[str, int, str]], at: int, ranks: int) -> None:
    at = min(at, len(rows) - 1)
    other = [*rows[:at], ("all_to_all", 1, "train.py:7"), *rows[at + 1 :]]
    boxes = [rank(number, rows, world=ranks) for number in range(ranks - 1)] + [rank(ranks - 1, other, world=ranks)]
    found = first_difference(boxes)
    assert found is not None
    assert {call.number for call in found.values()} == {at + 1}
    assert explain(found, boxes).cause


def test_valid_differences_are_none() -> None:
    # As many elements in another shape; parts of unequal sizes, which NCCL gathers.
    same = TorchCall(number=1, name="all_reduce", shapes="[[2, 3]]", elements=6, site="a.py:1")
    flat = TorchCall(number=1, name="all_reduce", shapes="[[6]]", elements=6, site="b.py:2")
    parts = [TorchCall(number=2, name="all_gather", shapes=f"[[{n}]]", elements=n, site="a.py:3") for n in (1, 2)]
    boxes = [box(0, torch_calls=(same, parts[0])), box(1, torch_calls=(flat, parts[1]))]
    assert first_difference(boxes) is None


def entry(number: int, **more: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[2, 3]],
        "process_group": ("0", "default_pg"),
        "time_created_ns": 10,
        "is_p2p": False,
        "frames": [{"filename": "/home/me/train.py", "line": 7}],
        **more,
    }


def test_only_calls_of_the_present_group_are_listed() -> None:
    entries = [
        entry(1, time_created_ns=1),  # before the group was formed
        entry(7),  # an older group, in the same process
        entry(1),
        entry(2, is_p2p=True),
        entry(2, process_group=("3", "undefined")),
        entry(2, profiling_name="gloo:barrier", input_sizes=[], frames=[]),
        entry(3), entry(3),  # coalesced
    ]  # fmt: skip
    assert calls_of(entries, since_ns=5) == (
        TorchCall(number=1, name="all_reduce", shapes="[[2, 3]]", elements=6, site="/home/me/train.py:7"),
        TorchCall(number=2, name="barrier", shapes="", elements=0, site=""),
    )


def test_lines_are_asked_for_only_where_that_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import in the reporter's thread would meet that of the compiler in the thread that trains."""
    name = "torch._inductor.codecache"
    allow_stacks()
    assert can_list_stacks()
    half = ModuleType(name)
    half.__spec__ = ModuleSpec(name, None)
    half.__spec__._initializing = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, half)
    assert not can_list_stacks()
    monkeypatch.delitem(sys.modules, name)
    assert not can_list_stacks()
