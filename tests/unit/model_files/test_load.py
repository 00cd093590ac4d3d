from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from lockstep import Accelerator, CheckpointError, ConfigError, NotYetError, load_checkpoint_in_model
from lockstep.model_files.weights import write_weights
from tests.unit.checkpoint.small_models import Tied, bits, on_meta, same_values


@pytest.fixture
def source() -> Tied:
    return Tied()


@pytest.fixture
def folder(tmp_path: Path, source: Tied) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    write_weights(source.state_dict(), path, max_shard_size=400)
    return path


def test_a_file_an_index_or_a_folder(tmp_path: Path, source: Tied) -> None:
    for safe, whole in ((True, "model.safetensors"), (False, "pytorch_model.bin")):
        for size, name in (("10GB", whole), (300, f"{whole}.index.json")):
            place = tmp_path / f"{safe} {size}"
            place.mkdir()
            write_weights(source.state_dict(), place, max_shard_size=size, safe=safe)
            for path in (place, place / name, str(place / name)):
                model = Tied()
                load_checkpoint_in_model(model, path, strict=True)
                assert same_values(model, source)
    torch.save(source.state_dict(), tmp_path / "mine.pt")
    model = Tied()
    load_checkpoint_in_model(model, tmp_path / "mine.pt", strict=True)
    assert same_values(model, source)


def test_the_guides_way_with_torch_load_works(tmp_path: Path, alone: None, source: Tied) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(accelerator.prepare(source), tmp_path, safe_serialization=False)
    model = accelerator.prepare(Tied())
    accelerator.unwrap_model(model).load_state_dict(torch.load(tmp_path / "pytorch_model.bin"))
    assert same_values(accelerator.unwrap_model(model), source)


def test_a_model_with_something_around_it(folder: Path, source: Tied) -> None:
    for wrap in (DataParallel, torch.compile):
        model = Tied()
        load_checkpoint_in_model(wrap(model), folder, strict=True)
        assert same_values(model, source)


@pytest.mark.parametrize("make", [Tied, on_meta])
@pytest.mark.parametrize("dtype", ["float16", "torch.float16", torch.float16])
def test_a_dtype_is_for_floating_weights(folder: Path, source: Tied, make: Any, dtype: Any) -> None:
    """Accelerate ignores it without a device map."""
    model = make()
    load_checkpoint_in_model(model, folder, dtype=dtype, keep_in_fp32_modules=["norm"])
    assert {name: str(t.dtype) for name, t in model.state_dict().items() if t.dtype != torch.float16} == {
        "norm.weight": "torch.float32",
        "norm.bias": "torch.float32",
        "norm.running_mean": "torch.float32",
        "norm.running_var": "torch.float32",
        "norm.num_batches_tracked": "torch.int64",
    }
    assert torch.equal(model.block.weight, source.block.weight.half())
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, source.embed.weight.half())


@pytest.mark.parametrize("dtype", ["float99", "int64", "Tensor", torch.int8])
def test_a_dtype_that_is_none_for_weights(folder: Path, dtype: Any) -> None:
    with pytest.raises(ConfigError, match="none that weights can have"):
        load_checkpoint_in_model(Tied(), folder, dtype=dtype)


# ---------------------------------------------------------------- device maps


def test_each_part_goes_where_the_longest_name_says(tmp_path: Path, folder: Path, source: Tied) -> None:
    model = on_meta()
    places = {"": "cpu", "block": "disk", "block.bias": torch.device("cpu")}
    load_checkpoint_in_model(model, folder, device_map=places, offload_folder=tmp_path / "off", strict=True)
    assert [name for name, t in model.state_dict().items() if t.is_meta] == ["block.weight"]
    assert torch.equal(model.block.bias, source.block.bias)
    assert model.head.weight is model.embed.weight
    assert bits(model.head.weight) == bits(source.head.weight)


@pytest.mark.parametrize("make", [Tied, on_meta])
def test_what_goes_to_disk_can_be_mapped_from_there(tmp_path: Path, folder: Path, source: Tied, make: Any) -> None:
    off = tmp_path / "off"
    off.mkdir()
    (off / "index.json").write_text('{"before": {"dtype": "float32", "shape": [1]}}')
    model = make()
    load_checkpoint_in_model(model, folder, device_map={"": "disk"}, offload_folder=off)
    index = json.loads((off / "index.json").read_text())
    assert index["before"]
    state = source.state_dict()
    assert set(index) - {"before"} == {name for name, _ in source.named_parameters(remove_duplicate=False)}
    assert (off / "head.weight.dat").samefile(off / "embed.weight.dat")
    for name in set(index) - {"before"}:
        numbers = np.memmap(off / f"{name}.dat", mode="r", dtype=np.uint8)
        assert numbers.tobytes() == bits(state[name])
        assert index[name]["dtype"] == str(state[name].dtype).removeprefix("torch.")
        assert index[name]["shape"] == list(state[name].shape)
    assert all(parameter.is_meta for parameter in model.parameters())
    # Accelerate leaves these as they were: loaded neither to disk nor to memory.
    assert torch.equal(model.norm.running_mean, source.norm.running_mean)
    assert sorted(path.name for path in off.iterdir()) == sorted(
        ["index.json", *(f"{n}.dat" for n in set(index) - {"before"})]
    )


def test_buffers_go_to_disk_when_asked(tmp_path: Path, folder: Path) -> None:
    model = Tied()
    load_checkpoint_in_model(
        model, folder, device_map={"": "cpu", "norm": "disk"}, offload_folder=tmp_path / "off", offload_buffers=True
    )
    assert (tmp_path / "off" / "norm.num_batches_tracked.dat").stat().st_size == 8
    assert model.norm.running_var.is_meta


@pytest.mark.parametrize(
    ("device_map", "said"),
    [
        ("auto", "not a table"),
        ({"embed": "cpu"}, r"says nothing of 10 weights.*block\.weight"),
        ({"": "cpu", "typo": "cpu"}, "parts that the model does not have: 'typo'"),
        ({"": "cpu", "block": "cuda:99"}, "puts 'block' on 'cuda:99', which cannot be used here"),
        ({"": "cpu", "block": "nowhere"}, "puts 'block' on 'nowhere'"),
        ({"": "disk"}, "no offload_folder"),
        ({"": "cpu", "head": "disk"}, r"embed\.weight on cpu, head\.weight on disk"),
    ],
)
def test_a_map_that_cannot_be_honoured(folder: Path, device_map: Any, said: str) -> None:
    model = Tied()
    before = {name: bits(t) for name, t in model.state_dict().items()}
    with pytest.raises(ConfigError, match=said):
        load_checkpoint_in_model(model, folder, device_map=device_map)
    assert {name: bits(t) for name, t in model.state_dict().items()} == before


def test_a_module_with_its_own_way_to_load_can_be_placed_too(tmp_path: Path) -> None:
    source, model = (torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)) for _ in range(2))
    write_weights(source.state_dict(), tmp_path)
    off = tmp_path / "off"
    load_checkpoint_in_model(
        model, tmp_path, device_map={"": "cpu", "bias": "disk"}, offload_folder=off, dtype="float64"
    )
    assert model.bias.is_meta
    assert np.fromfile(off / "bias.dat", dtype=np.float64).tolist() == source.bias.double().tolist()
    assert torch.equal(model.parametrizations.weight.original1, source.parametrizations.weight.original1.double())


def test_a_disk_that_cannot_be_written_leaves_the_model(tmp_path: Path, folder: Path) -> None:
    model = Tied()
    (tmp_path / "off").mkdir()
    (tmp_path / "off" / "thin.bias.dat").mkdir()  # a file of that name cannot be put there
    before = {name: (t.device, bits(t)) for name, t in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"cannot be offloaded to .*off: Is a directory"):
        load_checkpoint_in_model(model, folder, device_map={"": "disk"}, offload_folder=tmp_path / "off")
    assert {name: (t.device, bits(t)) for name, t in model.state_dict().items()} == before
    assert not list((tmp_path / "off").glob(".*.part"))
    assert not (tmp_path / "off" / "index.json").exists()


def test_an_offload_index_that_cannot_be_read_is_not_overwritten(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "off").mkdir()
    (tmp_path / "off" / "index.json").write_text("{half")
    with pytest.raises(CheckpointError, match=r"off/index\.json is there and cannot be read"):
        load_checkpoint_in_model(Tied(), folder, device_map={"": "disk"}, offload_folder=tmp_path / "off")
    assert (tmp_path / "off" / "index.json").read_text() == "{half"


# ---------------------------------------------------------------- what is said


def test_names_without_counterpart_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Other(Tied):
        def __init__(self) -> None:
            super().__init__()
            del self.block
            self.more = nn.Linear(1, 1)

    loaded = load_checkpoint_in_model(Other(), folder)
    assert loaded.missing_keys == ["more.weight", "more.bias"]
    assert loaded.unexpected_keys == ["block.weight", "block.bias"]
    assert "2 weights of the model are not in it and were left as they are: more.weight, more.bias." in caplog.text
    assert "2 of its weights are not in the model and were not used: block.weight, block.bias." in caplog.text
    with pytest.raises(CheckpointError, match="does not fit Other, which was left as it is"):
        load_checkpoint_in_model(Other(), folder, strict=True)


def test_what_is_not_there_or_not_built(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"There is no .*nowhere to load from"):
        load_checkpoint_in_model(Tied(), tmp_path / "nowhere")
    with pytest.raises(NotYetError, match="8-bit"):
        load_checkpoint_in_model(Tied(), folder, offload_8bit_bnb=True)
    (tmp_path / "page.html").write_text("<html>Not found</html>")
    with pytest.raises(CheckpointError, match=r"page\.html"):
        load_checkpoint_in_model(Tied(), tmp_path / "page.html")


def test_a_later_shard_that_is_damaged_leaves_the_model_untouched(folder: Path) -> None:
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    model = Tied()
    before = {name: bits(t) for name, t in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=last.name):
        load_checkpoint_in_model(model, folder)
    assert {name: bits(t) for name, t in model.state_dict().items()} == before


# ---------------------------------------------------------------- memory
