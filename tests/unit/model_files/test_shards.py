from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep import CheckpointError
from lockstep.model_files.shards import plan, read_index


def of_sizes(*sizes: int) -> dict[str, torch.Tensor]:
    return {f"t{place}": torch.zeros(size, dtype=torch.uint8) for place, size in enumerate(sizes)}


def test_a_file_is_closed_where_the_next_tensor_would_not_fit() -> None:
    made = plan(of_sizes(6, 6, 2, 6, 2, 2), 10, "model", ".safetensors", together=False)
    assert list(made.files.values()) == [["t0"], ["t1", "t2"], ["t3", "t4", "t5"]]
    assert list(made.files)[1] == "model-00002-of-00003.safetensors"
    assert made.total_size == 24


def test_a_tensor_that_is_too_large_gets_its_own() -> None:
    made = plan(of_sizes(3, 30, 3), 10, "model", ".bin", together=False)
    assert list(made.files.values()) == [["t1"], ["t0", "t2"]]


def test_one_file_has_no_number_and_nothing_is_one_file_too() -> None:
    assert plan(of_sizes(1, 1), 10, "model", ".safetensors", together=False).files == {
        "model.safetensors": ["t0", "t1"]
    }
    assert plan({}, 10, "model", ".safetensors", together=False).files == {"model.safetensors": []}


def test_what_shares_memory_goes_into_one_file_and_counts_once() -> None:
    state = of_sizes(8, 8)
    state["again"] = state["t0"]
    made = plan(state, 8, "pytorch_model", ".bin", together=True)
    assert list(made.files.values()) == [["t0", "again"], ["t1"]]
    assert made.total_size == 16


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(0, 50), st.booleans())
def test_every_tensor_is_in_one_file_and_only_single_ones_are_too_large(
    sizes: list[int], largest: int, together: bool
) -> None:
    state = of_sizes(*sizes)
    made = plan(state, largest, "model", ".safetensors", together=together)
    assert sorted(name for names in made.files.values() for name in names) == sorted(state)
    assert all(
        len(names) == 1 or sum(state[name].nbytes for name in names) <= largest
        for names in made.files.values()
        if names
    )
    assert made.total_size == sum(sizes)


def test_the_index_says_where_each_tensor_is(tmp_path: Path) -> None:
    made = plan(of_sizes(6, 6), 6, "model", ".safetensors", together=False)
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(made.index())
    assert json.loads(path.read_text())["metadata"] == {"total_size": 12}
    assert read_index(path) == {
        name: f"model-0000{place}-of-00002.safetensors" for place, name in ((1, "t0"), (2, "t1"))
    }


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "..\\a", "C:\\a", "./a", "a/", "//a"]
)
def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CheckpointError, match="files of its own folder only") as caught:
        read_index(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "1", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000, "\xff\xfe", '{"a": null}'],
)
def test_what_is_no_index_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"index\.json"):
        read_index(path)
