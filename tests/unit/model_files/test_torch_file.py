from __future__ import annotations

import os
import zipfile
from contextlib import closing
from pathlib import Path

import pytest
import torch

from lockstep import CheckpointError
from lockstep.model_files import torch_file
from lockstep.model_files.tensor_entry import read_all
from lockstep.model_files.torch_file import TorchFile


class Evil:
    """What unpickling must never run."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("/tmp/lockstep-was-fooled",)


def test_a_state_dict_comes_back_with_what_it_shares(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    weight = torch.randn(3, 4)
    state = {"a": weight, "b": weight, "turned": weight.t(), "n": torch.tensor(3), "x._extra_state": {"k": [1, "two"]}}
    torch_file.write(state, tmp_path / "m.bin")
    back = torch.load(tmp_path / "m.bin")
    assert back["a"].data_ptr() == back["b"].data_ptr() == back["turned"].data_ptr()
    assert torch.equal(back["turned"], weight.t())
    file = TorchFile(tmp_path / "m.bin")
    request.addfinalizer(file.close)
    assert file.entries["turned"].shape == (4, 3)
    assert read_all(file.entries)["x._extra_state"] == {"k": [1, "two"]}
    target = torch.zeros(3, 4)
    file.rest()
    file.entries["b"].read_into(target)
    assert torch.equal(target, weight)


def test_a_part_of_a_large_storage_takes_no_more_than_its_own_size(tmp_path: Path) -> None:
    whole = torch.randn(100_000)
    torch_file.write({"part": whole[:10]}, tmp_path / "m.bin")
    assert (tmp_path / "m.bin").stat().st_size < 10_000
    assert torch.equal(torch.load(tmp_path / "m.bin")["part"], whole[:10])


def test_old_files_are_read(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    with closing(TorchFile(tmp_path / "old.bin")) as file:
        assert torch.equal(file.entries["w"].read(), torch.ones(3))


@pytest.mark.parametrize("new", [True, False])
def test_nothing_but_tensors_and_plain_values_is_unpickled(tmp_path: Path, new: bool) -> None:
    torch.save({"w": torch.ones(3), "evil": Evil()}, tmp_path / "evil.bin", _use_new_zipfile_serialization=new)
    with pytest.raises(CheckpointError, match=r"evil\.bin holds more than tensors"):
        TorchFile(tmp_path / "evil.bin")
    assert not Path("/tmp/lockstep-was-fooled").exists()


def test_what_is_no_state_dict_is_said_to_be_none(tmp_path: Path) -> None:
    for content, said in (([torch.ones(1)], "a list"), ({1: torch.ones(1)}, "a dict"), (torch.ones(1), "a Tensor")):
        torch.save(content, tmp_path / "m.bin")
        with pytest.raises(CheckpointError, match=f"m.bin holds {said}, not a state dict"):
            TorchFile(tmp_path / "m.bin")


def test_every_flipped_bit_in_a_weight_is_noticed(tmp_path: Path) -> None:
    """Torch loads such a file without a word."""
    path = tmp_path / "m.bin"
    weight = torch.arange(64.0)
    torch_file.write({"w": weight}, path)
    good = path.read_bytes()
    start = good.index(weight.numpy().tobytes())
    for bit in range(0, 64 * 4 * 8, 37):
        bad = bytearray(good)
        bad[start + bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"m\.bin is damaged: the checksum"):
            TorchFile(path)


def test_a_file_cut_anywhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    torch_file.write({"w": torch.arange(64.0)}, path)
    good = path.read_bytes()
    for length in range(0, len(good) - 1, 61):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError, match=r"m\.bin"):
            TorchFile(path)


def test_a_compressed_archive_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10_000_000)
    with pytest.raises(CheckpointError, match="compressed"):
        TorchFile(tmp_path / "bomb.bin")
