"""Collectives, functions on structures, metrics, and work divided between processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.compare import differences, raises
from tests.parity.run import Runs

OWN_REDUCTIONS = (
    "method sum scaled",
    "method mean scaled",
    "method none",
    "none scaled",
    "mean of whole numbers",
)


@pytest.mark.parametrize("kind", ["gather", "broadcast", "pad", "objects", "trigger", "decorators"])
def test_collectives_are_the_same(runs: Runs, kind: str) -> None:
    assert differences(runs, f"comm/{kind}") == []


def test_reductions_are_the_same(runs: Runs) -> None:
    assert differences(runs, "comm/reduce", without=OWN_REDUCTIONS) == []


def test_reductions_of_our_own(runs: Runs) -> None:
    # Ours to choose: off TPUs, Accelerate ignores the scale; its "none" is a sum; its mean of integers is an error.
    both = runs.world_size == 2
    for rank, (theirs, ours) in enumerate(runs.pairs("comm/reduce")):
        assert theirs["method sum scaled"]["vector"] == theirs["method default"]["vector"]
        assert ours["method sum scaled"]["vector"]["tensor"] == ([5.0, 6.0, 7.0] if both else [0.0, 0.5, 1.0])
        assert theirs["method mean scaled"]["vector"] == theirs["method mean"]["vector"]
        assert ours["method mean scaled"]["vector"]["tensor"] == ([15.0, 18.0, 21.0] if both else [0.0, 3.0, 6.0])
        assert theirs["method none"]["vector"] == theirs["method default"]["vector"]
        assert ours["method none"]["vector"]["tensor"] == [10.0 * rank, 10.0 * rank + 1, 10.0 * rank + 2]
        assert raises(theirs["mean of whole numbers"]["matrix"]) is both
        assert ours["mean of whole numbers"]["matrix"]["tensor"] == ([[5, 6], [7, 8]] if both else [[0, 1], [2, 3]])


def test_functions_on_structures_are_the_same(runs: Runs) -> None:
    assert differences(runs, "comm/trees", without=("batch size of text",)) == []


def test_metrics_are_gathered_without_repetitions(runs: Runs) -> None:
    assert differences(runs, "metrics/map") == []
    for _, ours in runs.pairs("metrics/map"):
        for name, seen in ours.items():
            samples = int(name.split("samples=")[1].split()[0])
            assert seen["tensor"] == list(range(samples)), name
            assert seen["structure"] == [2 * sample for sample in range(samples)], name
            assert len(seen["repeated"]) == len(seen["repeated objects"]) == samples, name


def test_work_is_divided_the_same_way(runs: Runs) -> None:
    assert differences(runs, "comm/split", without=[name for name in _names(runs) if not _comparable(name)]) == []


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_padding_makes_all_parts_equally_long(runs: Runs, length: int) -> None:
    # Ours to choose: with padding, Accelerate's tuples are an error, and its dicts lose items: of 3 and 4 items on 2
    # processes each rank gets 1.
    if runs.world_size == 1:
        pytest.skip("one process gets everything")
    parts: dict[str, list[Any]] = {
        kind: [ours[f"{kind} of {length}, apply_padding=True"] for _, ours in runs.pairs("comm/split")]
        for kind in ("list", "tuple", "dict of lists")
    }
    longest = -(-length // 2)
    assert [len(part) for part in parts["list"]] == [longest, longest]
    numbers = [[int(item.removeprefix("item ")) for item in part] for part in parts["list"]]
    assert sorted({number for part in numbers for number in part}) == list(range(length))
    assert parts["tuple"] == [{"tuple": part} for part in numbers]
    assert parts["dict of lists"] == [{"a": part, "b": [str(number) for number in part]} for part in numbers]


def _names(runs: Runs) -> list[str]:
    return list(runs.accelerate[0]["comm/split"])


def _comparable(name: str) -> bool:
    """Text is not compared: Accelerate hands every process the whole. Nor is what Accelerate gets wrong, below."""
    if name.startswith("text"):
        return False
    padded = name.endswith("apply_padding=True")
    return not (padded and (name.startswith(("tuple", "dict")) or " of 0," in name))
