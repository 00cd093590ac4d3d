"""Structures of tensors: apart and together again, and what is done to their leaves."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm import trees


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    value: Any
    other: Any = 3


@dataclass
class Counted:
    value: Any
    made: int = field(default=0, init=False)


class Encoding(UserDict[str, Any]):
    """A mapping that carries something beside its items."""

    def __init__(self, data: Mapping[str, Any], note: str = "") -> None:
        super().__init__(data)
        self.note = note


LEAVES = st.one_of(
    st.integers(0, 9).map(torch.tensor),
    st.lists(st.integers(0, 9), max_size=3).map(lambda numbers: torch.tensor(numbers, dtype=torch.int64)),
    st.text(max_size=2),
    st.none(),
    st.integers(),
)


def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.text(max_size=2), inner, max_size=3)
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        named,
        named.map(OrderedDict),
        named.map(lambda items: Encoding(items, "kept")),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
        inner.map(Frozen),
        inner.map(Counted),
    )


TREES = st.recursive(LEAVES, grow, max_leaves=12)


def same(left: Any, right: Any) -> bool:
    """Compared without the code under test."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, Encoding) and left.note != right.note:
        return False
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, (Frozen, Counted)):
        return all(map(same, vars(left).values(), vars(right).values()))
    return bool(left == right)


@given(TREES)
def test_apart_and_together_again(tree: Any) -> None:
    leaves, signature = trees.flatten(tree)
    assert same(trees.unflatten(tree, iter(leaves)), tree)
    assert same([leaf for _, leaf in trees.walk_paths(tree)], leaves)
    again, same_signature = trees.flatten(trees.map_leaves(lambda leaf: leaf, tree))
    assert same(again, leaves)
    assert hash(signature) == hash(same_signature)
    assert signature == same_signature


@given(TREES)
def test_leaves_are_replaced_in_a_new_structure(tree: Any) -> None:
    before = repr(tree)
    marked = trees.map_tensors(lambda leaf: leaf + 100, tree)
    for (place, old), (other, new) in zip(trees.walk_paths(tree), trees.walk_paths(marked), strict=True):
        assert place == other
        assert torch.equal(new, old + 100) if isinstance(old, torch.Tensor) else new is old
    assert repr(tree) == before


def test_signatures_tell_structures_apart() -> None:
    one = torch.ones(2)
    structures = [one, [one], (one,), {"a": one}, {"b": one}, [one, one], [torch.ones(3)], [one.double()], Frozen(one)]
    assert len({trees.flatten(structure)[1] for structure in structures}) == len(structures)


def test_places_are_written_as_python_would_index() -> None:
    tree = {"a": [1, (2,)], 3: Frozen(Point(4, 5))}
    places = [place for place, _ in trees.walk_paths(tree)]
    assert places == ["['a'][0]", "['a'][1][0]", "[3].value[0]", "[3].value[1]", "[3].other"]
    assert list(trees.walk_paths(7)) == [("", 7)]


def test_recursively_apply() -> None:
    tree = {"a": torch.ones(2), "b": ["text", torch.zeros(1)]}
    found = trees.recursively_apply(torch.add, tree, 2, alpha=3)
    assert same(found, {"a": torch.full((2,), 7.0), "b": ["text", torch.full((1,), 6.0)]})
    with pytest.raises(TypeError, match="add cannot be applied to a str"):
        trees.recursively_apply(torch.add, tree, 2, error_on_other_type=True)
    upper = trees.recursively_apply(str.upper, ["a", 1], test_type=lambda leaf: isinstance(leaf, str))
    assert upper == ["A", 1]


def test_a_leaf_that_is_no_tensor_is_named_with_its_place() -> None:
    tree = [torch.ones(1), {"x": Frozen(torch.ones(1), "no")}]
    with pytest.raises(TypeError, match=r"gather got a str at \[1\]\['x'\]\.other"):
        trees.require_tensors(trees.flatten(tree)[0], tree, "gather")
    with pytest.raises(TypeError, match="gather got a int at the top"):
        trees.require_tensors([5], 5, "gather")


class Movable:
    def __init__(self) -> None:
        self.where: Any = None

    def to(self, device: Any) -> Movable:
        self.where = device
        return self


class Batch(Encoding):
    def to(self, device: Any, non_blocking: bool = False) -> tuple[str, Any, bool]:
        return "moved by itself", device, non_blocking


def test_send_to_device() -> None:
    meta = torch.device("meta")
    tree = {"a": torch.ones(2), "keep": torch.ones(2), "n": [{"keep": torch.ones(1), "b": torch.ones(1)}, "text"]}
    moved = trees.send_to_device(tree, "meta", skip_keys="keep")
    assert (moved["a"].device, moved["n"][0]["b"].device) == (meta, meta)
    assert moved["keep"] is tree["keep"]
    assert moved["n"][0]["keep"] is tree["n"][0]["keep"]
    assert moved["n"][1] == "text"
    assert tree["a"].device.type == "cpu"
    assert trees.send_to_device(tree, "cpu")["a"] is tree["a"]
    assert trees.send_to_device(tree, "meta", skip_keys=["a", "n"])["n"] is tree["n"]
    movable = Movable()
    assert trees.send_to_device([movable], "meta")[0] is movable
    assert movable.where == meta
    assert trees.send_to_device(Batch({}), "meta", non_blocking=True) == ("moved by itself", meta, True)


def test_concatenate_and_slice() -> None:
    parts = [{"a": torch.full((2, 2), float(n)), "b": (torch.tensor(n),)} for n in range(3)]
    joined = trees.concatenate(parts)
    assert same(joined["a"], torch.cat([part["a"] for part in parts]))
    assert same(joined["b"], (torch.tensor([0, 1, 2]),))
    assert trees.concatenate([part["a"] for part in parts], dim=1).shape == (2, 6)
    assert same(trees.slice_tensors([joined["a"], "text"], slice(1, 3)), [joined["a"][1:3], "text"])
    with pytest.raises(ValueError, match="empty list"):
        trees.concatenate([])
    with pytest.raises(TypeError, match="not str"):
        trees.concatenate(["a", "b"])


def test_find_batch_size() -> None:
    assert trees.find_batch_size({"a": torch.tensor(1), "b": ["text", torch.ones(4, 2)]}) == 4
    assert trees.find_batch_size([torch.tensor(1), "text"]) is None
