from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lockstep.errors import ConfigError
from lockstep.estimate import find_model
from lockstep.estimate.estimate import estimate

FACTORIES = """
import torch
from torch import nn

def small():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))

def broken():
    return nn.Linear(int(torch.ones(1).item()), 2)

class Needs(nn.Module):
    def __init__(self, size):
        super().__init__()

class Inside:
    made = nn.Linear(2, 3)

number = 3
text = lambda: "no model"
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory; each test has its own, since modules are imported once."""
    name = f"factories_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_factory_is_called_on_the_meta_device(factories: str) -> None:
    found = find_model.find(f"{factories}:small")
    assert found.model is not None
    assert all(tensor.is_meta for tensor in found.model.parameters())
    assert {weight.name: weight.trainable for weight in found.weights} == {
        **{"0.weight": True, "0.bias": True, "1.weight": True, "1.bias": True},
        **{"1.running_mean": False, "1.running_var": False, "1.num_batches_tracked": False},
    }


def test_an_attribute_that_is_a_model(factories: str) -> None:
    assert isinstance(find_model.find(f"{factories}:Inside.made").model, nn.Linear)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("nowhere", r"'nowhere' is no folder .*'pkg\.module:factory'.*Nothing is downloaded"),
        ("no_such_module_at_all:make", "cannot be found: No module named 'no_such_module_at_all'"),
        ("{}:absent", "cannot be found: .*no attribute 'absent'"),
        ("{}:", "is no Python path"),
        ("{}:number", "is of type int"),
        ("{}:text", "gave an object of type str"),
        ("{}:Needs", "failed when it was called, without arguments.*missing 1 required positional argument"),
        ("{}:broken", "failed when it was called.*can be measured from Python"),
    ],
)
def test_what_is_no_model(factories: str, path: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        find_model.find(path.format(factories))


# --- folders ---------------------------------------------------------------------------------------------------------

TENSORS = {
    "embed.weight": torch.zeros(100, 8, dtype=torch.bfloat16),
    "layers.0.weight": torch.zeros(8, 8),
    "layers.0.bias": torch.zeros(8),
    "norm.running_mean": torch.zeros(8),
    "norm.num_batches_tracked": torch.tensor(3),
}


def shapes(found: find_model.FoundModel) -> dict[str, tuple[int, ...]]:
    return {weight.name: weight.shape for weight in found.weights}


EXPECTED = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


def test_a_folder_with_one_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    save_file({"lora": torch.zeros(1)}, tmp_path / "adapter.safetensors")
    found = find_model.find(str(tmp_path))
    assert shapes(found) == EXPECTED
    assert [weight.name for weight in found.weights if not weight.trainable] == [
        "norm.num_batches_tracked",
        "norm.running_mean",
    ]
    assert found.layers["layers.0"] == 72
    assert found.model is None
    assert found.notes == ("Activations are not known: There is no config.json.",)


def test_only_the_header_is_read(tmp_path: Path) -> None:
    """A file of 16 GB that is nothing but a header and a hole."""
    header = json.dumps({"w": {"dtype": "F16", "shape": [1 << 20, 1 << 13], "data_offsets": [0, 1 << 34]}}).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + (1 << 34))
    report = estimate(find_model.find(str(tmp_path)), dtypes=["fp32", "fp16", "int8"])
    assert [row.weights for row in report.sizes] == [1 << 35, 1 << 34, 1 << 33]
    assert report.sizes[0].training_with_adam == 4 * (1 << 35) + 4


def sharded(folder: Path, kind: str) -> None:
    names = list(TENSORS)
    parts = {f"model-{number}.{kind}": names[number::2] for number in (0, 1)}
    for part, held in parts.items():
        tensors = {name: TENSORS[name] for name in held}
        save_file(tensors, folder / part) if kind == "safetensors" else torch.save(tensors, folder / part)
    index = {"weight_map": {name: part for part, held in parts.items() for name in held}}
    whole = "model" if kind == "safetensors" else "pytorch_model"
    (folder / f"{whole}.{kind}.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_folder_with_an_index(tmp_path: Path, kind: str) -> None:
    sharded(tmp_path, kind)
    assert shapes(find_model.find(str(tmp_path))) == EXPECTED
    (tmp_path / f"model-1.{kind}").unlink()
    with pytest.raises(ConfigError, match=f"names 1 of 2 files that are not there, such as 'model-1.{kind}'"):
        find_model.find(str(tmp_path))


def test_tied_weights_in_a_bin_file(tmp_path: Path) -> None:
    weight = torch.zeros(10, 4)
    torch.save({"embed.weight": weight, "head.weight": weight, "step": 3}, tmp_path / "pytorch_model.bin")
    assert shapes(find_model.find(str(tmp_path))) == {"embed.weight": (10, 4)}


def test_whole_numbers_are_told(tmp_path: Path) -> None:
    save_file({"a.qweight": torch.zeros(8, 8, dtype=torch.int32)}, tmp_path / "model.safetensors")
    assert "if the files are quantised" in find_model.find(str(tmp_path)).notes[1]


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("model.safetensors", b"", "is not a safetensors file"),
        ("model.safetensors", struct.pack("<Q", 1 << 60) + b"{}", "the header would be 1152921504606846976 bytes"),
        ("model.safetensors", struct.pack("<Q", 2) + b"[]", "is not a safetensors file"),
        ("model.safetensors", struct.pack("<Q", 4) + b"nope", "is not a safetensors file"),
        ("pytorch_model.bin", b"not a pickle", "cannot be read as weights"),
        ("model.safetensors.index.json", b'{"weights": 1}', "must be JSON with a weight_map"),
        ("readme.txt", b"", r"holds neither config\.json nor"),
        ("config.json", b'{"model_type": "no-such-type"}', r"config\.json cannot be used"),
    ],
)
def test_a_folder_that_cannot_be_read(tmp_path: Path, file: str, content: bytes, text: str) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=text):
        find_model.find(str(tmp_path))


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=100, max_position_embeddings=64, architectures=["LlamaForCausalLM"], tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    built = find_model.find(str(tmp_path))
    assert built.model is not None
    save_file({weight.name: torch.zeros(weight.shape) for weight in built.weights}, tmp_path / "model.safetensors")
    found = find_model.find(str(tmp_path))
    assert found.notes == ()
    assert "model.layers.0" in found.layers  # kept whole, as the model asks
    assert found.batch is not None
    assert {name: tuple(tensor.shape) for name, tensor in found.batch(3).items()} == {
        "input_ids": (3, 64),
        "labels": (3, 64),
    }
    report = estimate(found, dtypes=["fp32", "mixed-bf16", "int8"], batch_sizes=[1, 2])
    assert len(report.forecasts) == 6
    assert report.forecasts[0].activations < report.forecasts[1].activations
    save_file({"other": torch.zeros(5)}, tmp_path / "model.safetensors")
    assert "sizes are those of the files" in find_model.find(str(tmp_path)).notes[0]
