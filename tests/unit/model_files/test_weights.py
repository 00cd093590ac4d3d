from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep import CheckpointError
from lockstep.model_files.save import replace_model
from lockstep.model_files.weights import load_into, load_weights, read_weights, write_weights
from tests.unit.checkpoint.small_models import Tied, bits, on_meta, same_values

WAYS = [(safe, size) for safe in (True, False) for size in ("10GB", 300, 0)]


@pytest.mark.parametrize(("safe", "size"), WAYS)
def test_a_model_comes_back_bit_for_bit_and_tied(tmp_path: Path, safe: bool, size: int | str) -> None:
    model = Tied()
    names = write_weights(model.state_dict(), tmp_path, max_shard_size=size, safe=safe)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    for fresh in (Tied(), on_meta()):
        assert load_into(fresh, read_weights(tmp_path), strict=True).missing_keys == []
        assert same_values(model, fresh)
        assert fresh.head.weight is fresh.embed.weight
    fresh = Tied()
    load_weights(fresh, tmp_path)
    assert same_values(model, fresh)


def test_files_have_the_usual_names(tmp_path: Path) -> None:
    state = Tied().state_dict()
    assert write_weights(state, tmp_path) == ["model.safetensors"]
    assert write_weights(state, tmp_path, safe=False) == ["pytorch_model.bin"]
    assert write_weights(state, tmp_path, stem="model_1", safe=False) == ["pytorch_model_1.bin"]
    assert write_weights(state, tmp_path, max_shard_size=500) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert write_weights(state, tmp_path, max_shard_size=500, safe=False)[-1] == "pytorch_model.bin.index.json"


def test_several_models_of_one_folder_are_kept_apart(tmp_path: Path) -> None:
    for number, stem in enumerate(("model", "model_1", "model_2")):
        write_weights({"w": torch.full((3,), float(number))}, tmp_path, stem=stem, max_shard_size=100 - number)
    for number, stem in enumerate(("model", "model_1", "model_2")):
        assert read_weights(tmp_path, stem)["w"].tolist() == [number] * 3
    with pytest.raises(CheckpointError, match=r"holds no model: there is none of model_3\.safetensors"):
        read_weights(tmp_path, "model_3")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(0, 100), st.booleans())
def test_any_sizes_in_any_shards(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], largest: int, safe: bool
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    state = {f"t{place}": torch.randn(size) for place, size in enumerate(sizes)}
    write_weights(state, folder, max_shard_size=largest, safe=safe)
    back = read_weights(folder)
    assert {name: bits(tensor) for name, tensor in back.items()} == {name: bits(t) for name, t in state.items()}
    shutil.rmtree(folder)


def test_left_over_files_of_the_same_format_are_replaced_and_no_others(tmp_path: Path) -> None:
    state = Tied().state_dict()
    many = write_weights(state, tmp_path, max_shard_size=0)
    others = write_weights(state, tmp_path, max_shard_size=0, safe=False)
    others += write_weights(state, tmp_path, stem="model_1")
    (tmp_path / "model-of-mine.safetensors").touch()
    one = replace_model(state, tmp_path)
    assert not {*many} & {*one}
    assert {path.name for path in tmp_path.iterdir()} == {*others, *one, "model-of-mine.safetensors"}


def test_tensors_without_values_are_refused_before_a_file_is_made(tmp_path: Path) -> None:
    for safe in (True, False):
        with pytest.raises(CheckpointError, match=r"11 of 11 tensors have no values.*embed\.weight"):
            write_weights(on_meta().state_dict(), tmp_path, safe=safe)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- reading what others left


def test_a_folder_with_a_whole_and_a_divided_model_is_ambiguous(tmp_path: Path) -> None:
    state = Tied().state_dict()
    write_weights(state, tmp_path)
    write_weights(state, tmp_path, max_shard_size=0)
    with pytest.raises(CheckpointError, match="left over from an earlier save"):
        read_weights(tmp_path)


def test_safetensors_are_preferred_and_the_other_is_mentioned(
    tmp_path: Path, alone: None, caplog: pytest.LogCaptureFixture
) -> None:
    write_weights({"w": torch.zeros(1)}, tmp_path)
    write_weights({"w": torch.ones(1)}, tmp_path, safe=False)
    assert read_weights(tmp_path)["w"].item() == 0
    assert "pytorch_model.bin; model.safetensors is read" in caplog.text


def test_an_index_under_another_name_is_taken_if_it_is_the_only_one(tmp_path: Path) -> None:
    write_weights({"a": torch.zeros(1), "b": torch.ones(1)}, tmp_path, stem="diffusion", max_shard_size=0)
    assert set(read_weights(tmp_path)) == {"a", "b"}
    write_weights({"a": torch.zeros(1), "b": torch.ones(1)}, tmp_path, stem="other", max_shard_size=0)
    with pytest.raises(CheckpointError, match="2 indexes"):
        read_weights(tmp_path)


def test_an_index_and_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    write_weights({"a": torch.zeros(1), "b": torch.ones(1)}, tmp_path, max_shard_size=0)
    first, second = (tmp_path / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    kept = second.read_bytes()
    shutil.copy(first, second)
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors does not hold b"):
        read_weights(tmp_path)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors is missing"):
        read_weights(tmp_path)
    second.write_bytes(kept[:-1])
    model = nn.ParameterDict({"a": torch.full((1,), 5.0), "b": torch.full((1,), 5.0)})
    with pytest.raises(CheckpointError, match=r"00002-of-00002\.safetensors has"):
        load_weights(model, tmp_path)
    assert [value.item() for value in model.values()] == [5.0, 5.0]


def test_names_that_the_index_does_not_know_are_unexpected(tmp_path: Path) -> None:
    write_weights({"a": torch.zeros(1), "b": torch.ones(1)}, tmp_path, max_shard_size=0)
    index = tmp_path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    write_weights({"a": torch.zeros(1), "stranger": torch.ones(1)}, tmp_path, stem="other")
    (tmp_path / "other.safetensors").replace(tmp_path / table["weight_map"]["a"])
    model = nn.ParameterDict({"a": torch.ones(1), "b": torch.ones(1)})
    assert load_weights(model, tmp_path, strict=False).unexpected_keys == ["stranger"]
    with pytest.raises(CheckpointError, match="1 names are not in the model: stranger"):
        load_weights(model, tmp_path)


def test_a_folder_without_a_model_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none of model\.safetensors, pytorch_model\.bin, and no index"):
        read_weights(tmp_path)
