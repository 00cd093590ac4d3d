from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DataParallel

from lockstep import Accelerator, CheckpointError, ConfigError, load_checkpoint_in_model
from lockstep.model_files import save as saving
from lockstep.storage.disk import Disk
from lockstep.utils import extract_model_from_parallel, save
from tests.unit.checkpoint.small_models import Tied, on_meta, same_values

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_prepared_model_is_saved_under_its_own_names(accelerator: Accelerator, tmp_path: Path) -> None:
    model = Tied()
    prepared = accelerator.prepare(model)
    accelerator.save_model(prepared, tmp_path / "new" / "folder")
    assert set(load_file(tmp_path / "new" / "folder" / "model.safetensors")) == set(model.state_dict()) - {
        "head.weight"
    }
    assert list(accelerator.get_state_dict(DataParallel(model))) == list(model.state_dict())
    assert next(iter(accelerator.get_state_dict(DataParallel(model), unwrap=False))) == "module.embed.weight"
    assert list(accelerator.get_state_dict(torch.compile(model))) == list(model.state_dict())


def test_a_second_save_leaves_nothing_of_the_first(accelerator: Accelerator, tmp_path: Path) -> None:
    """Accelerate leaves the shards, or worse: a whole model that it then loads instead of the new shards."""
    first, second = Tied(), Tied()
    (tmp_path / "mine.txt").touch()
    for before, after in (("10GB", 300), (300, "10GB"), (0, 300)):
        for safe in (True, False):
            accelerator.save_model(first, tmp_path, max_shard_size=before, safe_serialization=safe)
            accelerator.save_model(second, tmp_path, max_shard_size=after, safe_serialization=safe)
        for path in (tmp_path, next(iter(tmp_path.glob("pytorch_model.bin*")))):
            model = Tied()
            load_checkpoint_in_model(model, path, strict=True)
            assert same_values(model, second)
    assert "mine.txt" in names(tmp_path)


def test_a_save_that_fails_leaves_the_model_that_was_there(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Tied()
    accelerator.save_model(first, tmp_path, max_shard_size=300)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real, opened = Disk.open, []

    def full(disk: Disk, path: Path) -> int:
        opened.extend([path] if path.suffix == ".safetensors" else [])
        if len(opened) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(disk, path)

    monkeypatch.setattr(Disk, "open", full)
    with pytest.raises(CheckpointError, match=r"not saved to .* \(OSError: .*No space left"):
        accelerator.save_model(Tied(), tmp_path, max_shard_size=300)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_model_that_is_mapped_from_the_old_file_can_be_saved_over_it(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    """Writing into the file itself would pull the memory away from under the model: SIGBUS."""
    accelerator.save_model(nn.Linear(1000, 1000), tmp_path)
    model = nn.Linear(1000, 1000)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    accelerator.save_model(model, tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], model.weight)


def test_what_cannot_be_saved_is_an_error(accelerator: Accelerator, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file is a file; save_directory has to be a folder"):
        accelerator.save_model(Tied(), tmp_path / "file")
    with pytest.raises(CheckpointError, match="on the meta device"):
        accelerator.save_model(on_meta(), tmp_path)
    with pytest.raises(ConfigError, match="The size '10 bananas'"):
        accelerator.save_model(Tied(), tmp_path, max_shard_size="10 bananas")
    assert names(tmp_path) == ["file"]


def test_small_letters_count_bytes_in_the_size_of_a_shard(accelerator: Accelerator, tmp_path: Path) -> None:
    accelerator.save_model(nn.Linear(16, 16), tmp_path, max_shard_size="2kb")
    assert names(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("safe", [True, False])
def test_save_writes_an_object_to_a_path_or_an_open_file(accelerator: Accelerator, tmp_path: Path, safe: bool) -> None:
    state = Tied().state_dict()
    memory = io.BytesIO()
    accelerator.save(state, tmp_path / "a", safe_serialization=safe)
    save(state, str(tmp_path / "b"), safe_serialization=safe)
    save(state, memory, safe_serialization=safe)
    assert names(tmp_path) == ["a", "b"]
    (tmp_path / "c").write_bytes(memory.getvalue())
    for name in "abc":
        back = load_file(tmp_path / name) if safe else torch.load(tmp_path / name)
        assert torch.equal(back["block.weight"], state["block.weight"])


def test_save_keeps_the_old_file_when_it_fails(accelerator: Accelerator, tmp_path: Path) -> None:
    accelerator.save({"epoch": 1}, tmp_path / "a")
    with pytest.raises((TypeError, AttributeError), match="pickle"):
        accelerator.save({"epoch": lambda: 2}, tmp_path / "a")
    with pytest.raises(CheckpointError, match="This is a list"):
        accelerator.save([1], tmp_path / "a", safe_serialization=True)
    assert torch.load(tmp_path / "a") == {"epoch": 1}
    assert names(tmp_path) == ["a"]


def test_replace_model_gives_the_names_it_wrote(tmp_path: Path) -> None:
    assert saving.replace_model({"a": torch.zeros(1)}, tmp_path, safe=False) == ["pytorch_model.bin"]


def test_a_model_comes_out_of_what_is_around_it() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    assert extract_model_from_parallel(DataParallel(DataParallel(model))) is model
    compiled = torch.compile(model)
    assert extract_model_from_parallel(compiled) is compiled
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    assert extract_model_from_parallel(torch.compile(DataParallel(model)), keep_torch_compile=False) is model
    nested = nn.Sequential(DataParallel(model))
    assert isinstance(extract_model_from_parallel(nested)[0], DataParallel)
    assert extract_model_from_parallel(nested, recursive=True)[0] is model
