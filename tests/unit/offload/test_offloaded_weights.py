"""Weights in a folder: what is written, what is read, and what is noticed."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lockstep import CheckpointError, ConfigError
from lockstep.offload.disk_weight import SMALL
from lockstep.utils.offload import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)

BIG = SMALL // 4 + 5


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(BIG),
        "a.half": torch.randn(3, 2).to(torch.bfloat16),
        "b.eighth": torch.randn(70_000).to(torch.float8_e4m3fn),
        "b.count": torch.tensor(7),
        "b.mask": torch.tensor([True, False]),
        "b.empty": torch.empty(0, 3),
        "b.turned": torch.randn(300, 200).t(),
    }


def bits(value: torch.Tensor) -> bytes:
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_what_is_written_is_read(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    offload_state_dict(tmp_path / "off", state)
    found = OffloadedWeightsLoader(save_folder=tmp_path / "off")
    assert list(found) == list(state)
    assert len(found) == len(state)
    for _ in range(3):
        for name, value in state.items():
            assert found[name].dtype is value.dtype
            assert found[name].shape == value.shape
            assert bits(found[name]) == bits(value)
    found.close()


def test_accelerate_reads_our_folder_and_we_read_theirs(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    from accelerate import utils as theirs

    del state["b.empty"]  # a memory map of theirs cannot be empty
    offload_state_dict(tmp_path / "ours", state)
    theirs.offload_state_dict(tmp_path / "theirs", state)
    one = theirs.OffloadedWeightsLoader(save_folder=tmp_path / "ours")
    other = OffloadedWeightsLoader(save_folder=tmp_path / "theirs")
    for name, value in state.items():
        assert bits(one[name]) == bits(other[name]) == bits(value)
    other.close()


def test_a_tied_weight_is_on_disk_once(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    state["z.weight"] = state["a.weight"]
    offload_state_dict(tmp_path, state)
    assert (tmp_path / "z.weight.dat").samefile(tmp_path / "a.weight.dat")
    with OffloadedWeightsLoader(save_folder=tmp_path) as found:
        assert bits(found["z.weight"]) == bits(state["a.weight"])


def test_changing_what_was_read_does_not_reach_the_file(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    offload_state_dict(tmp_path, state)
    with OffloadedWeightsLoader(save_folder=tmp_path) as found:
        found["a.weight"].zero_()
        assert bits(found["a.weight"]) == bits(state["a.weight"])


def test_memory_comes_before_disk_and_names_can_be_shortened(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    offload_state_dict(tmp_path, state)
    with OffloadedWeightsLoader({"b.count": torch.tensor(9)}, tmp_path) as found:
        assert found["b.count"].item() == 9
        short = PrefixedDataset(found, "b.")
        assert set(short) == {"eighth", "count", "mask", "empty", "turned"}
        assert len(short) == 5
        assert short["mask"].tolist() == [True, False]
        assert "weight" not in short
        assert short.get("weight") is None
    assert set(extract_submodules_state_dict(state, ["a", "b.mask"])) == {"a.weight", "a.half", "b.mask"}
    assert set(extract_submodules_state_dict(state, [""])) == set(state)


def test_weights_in_safetensors_files(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    whole = {name: value.contiguous() for name, value in state.items() if name != "b.empty"}
    save_file(whole, tmp_path / "model.safetensors")
    index = {
        f"m.{name}": {"safetensors_file": str(tmp_path / "model.safetensors"), "weight_name": name} for name in whole
    }
    index["m.a.half"]["dtype"] = "float32"
    with OffloadedWeightsLoader(index=index) as found:
        for name, value in whole.items():
            wanted = value.float() if name == "a.half" else value
            assert bits(found[f"m.{name}"]) == bits(wanted)
    index["m.x"] = {"safetensors_file": str(tmp_path / "model.safetensors")}
    with pytest.raises(CheckpointError, match=r"does not hold 'm\.x'"):
        OffloadedWeightsLoader(index=index)


def test_single_weights_and_their_index(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    index = offload_weight(state["a.half"], "a.half", tmp_path, index={})
    assert index == {"a.half": {"dtype": "bfloat16", "shape": [3, 2]}}
    save_offload_index(index, tmp_path)
    save_offload_index({"other": {"dtype": "int64", "shape": []}}, tmp_path)
    save_offload_index({}, tmp_path)
    assert set(json.loads((tmp_path / "index.json").read_text())) == {"a.half", "other"}
    assert bits(load_offloaded_weight(tmp_path / "a.half.dat", index["a.half"])) == bits(state["a.half"])
    assert offload_weight(state["b.count"], "n", tmp_path) is None


# ---------------------------------------------------------------- what has changed


def test_a_file_that_changes_is_named(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    offload_state_dict(tmp_path, state)
    file = tmp_path / "a.weight.dat"
    good = file.read_bytes()
    with OffloadedWeightsLoader(save_folder=tmp_path) as found:
        for _ in range(2):
            assert bits(found["a.weight"]) == good
        file.write_bytes(good[:-4] + b"\1\2\3\4")
        with pytest.raises(CheckpointError, match=r"a\.weight was offloaded to .*a\.weight\.dat.*has other content"):
            found["a.weight"]
        file.write_bytes(good[:-4])
        with pytest.raises(CheckpointError, match=f"has {len(good) - 4} bytes where {len(good)} were written"):
            found["a.weight"]
        file.unlink()
        with pytest.raises(CheckpointError, match=r"a\.weight\.dat, which cannot be opened any more"):
            found["a.weight"]
        file.mkdir()
        with pytest.raises(CheckpointError, match=r"a\.weight\.dat"):
            found["a.weight"]


def test_a_file_that_changed_between_two_runs_is_named(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    offload_state_dict(tmp_path, state)
    for name in ("a.half", "b.eighth"):  # one that is copied, one that is mapped
        file = tmp_path / f"{name}.dat"
        file.write_bytes(bytes(len(file.read_bytes())))
        with (
            OffloadedWeightsLoader(save_folder=tmp_path) as found,
            pytest.raises(CheckpointError, match="other content"),
        ):
            found[name]


def test_files_that_were_copied_or_touched_are_good(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    offload_state_dict(tmp_path / "one", state)
    shutil.copytree(tmp_path / "one", tmp_path / "two", copy_function=shutil.copyfile)
    with OffloadedWeightsLoader(save_folder=tmp_path / "two") as found:
        assert bits(found["a.weight"]) == bits(state["a.weight"])
        os.utime(tmp_path / "two" / "a.weight.dat")
        assert bits(found["a.weight"]) == bits(state["a.weight"])


def test_files_of_accelerate_are_watched_from_the_first_read_on(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    index = offload_weight(state["a.weight"], "a.weight", tmp_path, {})
    save_offload_index(index, tmp_path)
    with OffloadedWeightsLoader(save_folder=tmp_path) as found:
        assert bits(found["a.weight"]) == bits(state["a.weight"])
        (tmp_path / "a.weight.dat").write_bytes(bytes(4 * BIG))
        with pytest.raises(CheckpointError, match="other content"):
            found["a.weight"]


# ---------------------------------------------------------------- what cannot be written or read


@contextmanager
def full_disk(left: int) -> Iterator[None]:
    """No file can become longer than this: what a full disk does to those who write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    offload_state_dict(tmp_path, state)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    changed = {name: torch.zeros_like(value) for name, value in state.items()}
    with full_disk(1000), pytest.raises(CheckpointError, match=r"cannot be offloaded to .*: File too large"):
        offload_state_dict(tmp_path, changed)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with full_disk(100), pytest.raises(CheckpointError, match="cannot be offloaded"):
        offload_state_dict(tmp_path / "new", {"count": torch.tensor(1)})  # the index is what does not fit
    assert not (tmp_path / "new" / "index.json").exists()


def test_a_folder_that_cannot_be_made_or_is_a_file(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    (tmp_path / "file").write_text("")
    for folder, said in ((tmp_path / "file", "File exists"), (Path("/proc/nowhere"), "No such file|not permitted")):
        with pytest.raises(CheckpointError, match=f"cannot be offloaded to {folder}: .*({said})"):
            offload_state_dict(folder, state)
    with pytest.raises(CheckpointError, match="cannot be the name of a file"):
        offload_state_dict(tmp_path / "off", {"a/b": torch.ones(1)})


def test_nothing_is_written_twice(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    offload_state_dict(tmp_path, state)
    before = {path.name: path.stat().st_ino for path in tmp_path.glob("*.dat")}
    state["a.half"] = state["a.half"] + 1
    offload_state_dict(tmp_path, state)
    after = {path.name: path.stat().st_ino for path in tmp_path.glob("*.dat")}
    assert {name for name in before if before[name] != after[name]} == {"a.half.dat"}


def test_a_loader_needs_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs weights"):
        OffloadedWeightsLoader()
    with pytest.raises(CheckpointError, match=r"There is no .*index\.json"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    (tmp_path / "index.json").write_text('{"a": {"dtype": "float15", "shape": [1]}}')
    with pytest.raises(CheckpointError, match="gives a the dtype 'float15'"):
        OffloadedWeightsLoader(save_folder=tmp_path)


# ---------------------------------------------------------------- reading ahead


def test_what_follows_is_read_ahead_from_the_second_round_on(tmp_path: Path) -> None:
    names = [f"w{number}" for number in range(6)]
    offload_state_dict(tmp_path, {name: torch.full((BIG,), float(i)) for i, name in enumerate(names)})
    with OffloadedWeightsLoader(save_folder=tmp_path) as found:
        for name in names:
            found[name]
        assert found._ahead.hits == 0
        for _ in range(3):
            assert [found[name][0].item() for name in names] == [0, 1, 2, 3, 4, 5]
        assert found._ahead.hits >= 3 * len(names) - 2
        assert [found[name][0].item() for name in reversed(names)] == [5, 4, 3, 2, 1, 0]
        assert sum(found.on_disk[name].nbytes for name in found._ahead._reading) <= 4 * BIG
        copy = pickle.loads(pickle.dumps(found))
        assert copy["w3"][0].item() == 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lockstep-read-ahead")]


def test_a_change_after_it_was_read_ahead_is_noticed(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {name: torch.ones(BIG) for name in "ab"})
    with OffloadedWeightsLoader(save_folder=tmp_path) as found:
        for name in "aba":
            found[name]
        found._ahead._reading["b"].result()
        (tmp_path / "b.dat").unlink()
        with pytest.raises(CheckpointError, match=r"b\.dat, which cannot be opened"):
            found["b"]


def test_a_forked_process_reads_on(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {name: torch.full((BIG,), ord(name)) for name in "ab"})
    with OffloadedWeightsLoader(save_folder=tmp_path) as found:
        for name in "abab":
            found[name]
        child = os.fork()
        if not child:
            os._exit(0 if [found[name][0].item() for name in "abab"] == [97, 98, 97, 98] else 1)
        assert os.waitpid(child, 0)[1] == 0
