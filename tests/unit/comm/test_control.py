"""Dividing work between processes, and code for some of them only."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.control import only_on, print_here, share
from lockstep.errors import ConfigError
from lockstep.topology.topology import Topology

CPU = torch.device("cpu")


def place(rank: int, world_size: int) -> Topology:
    return Topology(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, device=CPU)


def shares(inputs: Any, world_size: int, padding: bool = False) -> list[Any]:
    return [share(inputs, place(rank, world_size), padding) for rank in range(world_size)]


def joined(parts: list[Any]) -> list[Any]:
    return [item for part in parts for item in part]


KINDS: dict[str, Any] = {"list": list, "tuple": tuple, "tensor": torch.tensor, "array": np.array, "range": len}


def build(kind: str, items: list[int]) -> Any:
    return range(len(items)) if kind == "range" else KINDS[kind](items)


@given(items=st.lists(st.integers(0, 99), max_size=20), world_size=st.integers(1, 6), kind=st.sampled_from([*KINDS]))
def test_all_parts_together_are_the_input(items: list[int], world_size: int, kind: str) -> None:
    inputs = build(kind, items)
    parts = shares(inputs, world_size)
    assert all(type(part) is type(inputs) for part in parts)
    assert [int(item) for item in joined(parts)] == [int(item) for item in inputs]
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(
    items=st.lists(st.integers(0, 99), min_size=1, max_size=20),
    world_size=st.integers(2, 6),
    kind=st.sampled_from([*KINDS]),
)
def test_padding_repeats_the_last_item(items: list[int], world_size: int, kind: str) -> None:
    inputs = build(kind, items)
    bare, padded = shares(inputs, world_size), shares(inputs, world_size, padding=True)
    longest = -(-len(items) // world_size)
    for part, full in zip(bare, padded, strict=True):
        assert len(full) == longest
        assert [int(item) for item in full] == [*map(int, part)] + [int(inputs[-1])] * (longest - len(part))


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda items: defaultdict(list, items)])
def test_a_mapping_is_divided_by_its_values(kind: Any) -> None:
    inputs = kind({"names": ["a", "b", "c"], "ids": torch.arange(3)})
    first, second = shares(inputs, 2)
    assert type(first) is type(inputs)
    assert first["names"] == ["a", "b"]
    assert first["ids"].tolist() == [0, 1]
    assert second["names"] == ["c"]
    assert shares(inputs, 2, padding=True)[1]["ids"].tolist() == [2, 2]


def test_fewer_items_than_ranks() -> None:
    assert shares(["a"], 3) == [["a"], [], []]
    assert shares(["a"], 3, padding=True) == [["a"], ["a"], ["a"]]
    assert [part.shape for part in shares(torch.ones(1, 4), 3)] == [(1, 4), (0, 4), (0, 4)]
    assert shares([], 2, padding=True) == [[], []]


def test_what_cannot_be_divided() -> None:
    with pytest.raises(ConfigError, match=r"differ in length: \{'a': 1, 'b': 2\}"):
        share({"a": [1], "b": [1, 2]}, place(0, 2))
    for wrong in (3, {1, 2}, iter([1])):
        with pytest.raises(ConfigError, match=f"cannot divide a {type(wrong).__name__}.*Allowed: lists"):
            share(wrong, place(0, 2))


def test_functions_for_some() -> None:
    def double(value: int) -> int:
        """Twice."""
        return 2 * value

    assert only_on(True, double)(4) == 8
    quiet = only_on(False, double)
    assert quiet(4) is None
    assert quiet.__doc__ == "Twice."


def test_printing_is_for_the_first_of_a_machine(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        # Two machines with two processes each.
        topology = Topology(
            rank=rank, world_size=4, local_rank=rank % 2, local_world_size=2, node_rank=rank // 2, device=CPU
        )
        print_here(topology, rank, "here", sep="-")
    assert capsys.readouterr().out == "0-here\n2-here\n"


def test_what_stands_in_for_stdout_needs_no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept:
        text = ""

        def write(self, text: str) -> None:
            self.text += text

    kept = Kept()
    monkeypatch.setattr("sys.stdout", kept)
    print_here(place(0, 1), "here")
    assert kept.text == "here\n"
    monkeypatch.setattr("sys.stdout", None)
    print_here(place(0, 1), "nowhere")
