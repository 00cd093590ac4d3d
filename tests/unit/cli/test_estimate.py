from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lockstep.cli import main

MODULE = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2))

def batch(size):
    return {"input": torch.randn(size, 6)}

def loss(model, batch):
    return model(batch["input"]).square().mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""
COUNT = 6 * 32 + 32 + 32 * 2 + 2


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"estimated_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["estimate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = as_json(capsys, f"{module}:model", "--shape", "6", "--batch-size", "4", "16", "--dtypes", "float32", "int8")
    assert said["parameters"] == COUNT
    assert [row["dtype"] for row in said["sizes"]] == ["fp32", "int8"]
    assert said["sizes"][0]["weights"] == 4 * COUNT
    assert [(row["dtype"], row["batch_size"]) for row in said["forecasts"]] == [
        ("fp32", 4), ("fp32", 16), ("int8", 4), ("int8", 16)
    ]  # fmt: skip
    assert said["forecasts"][1]["activations"] == 16 * 32 * 4


def test_functions_of_the_users(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [f"--{name}={module}:{name}" for name in ("batch", "loss", "optimizer")]
    said = as_json(capsys, f"{module}:model", *paths, "--batch-size", "16", "--dtypes", "fp32")
    assert said["sizes"][0]["optimizer"] == 4 * COUNT
    assert said["forecasts"][0]["activations"] == 16 * 32 * 4 + 16 * 2 * 4  # the square keeps the output


def test_the_tables(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", f"{module}:model", "--shape=6", "--batch-size", "4"]) == 0
    out = capsys.readouterr().out
    for text in ("largest layer", "total size", "training with Adam", "activations", "peak in", "bf16", "int8"):
        assert text in out
    assert f"{COUNT} weights to train" in out


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"layer.weight": torch.zeros(100, 10)}, tmp_path / "model.safetensors")
    assert main(["estimate", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "3.9 KiB" in out
    assert "Activations are not known" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--batch-size", "0"], "--batch-size is 0, and must be at least 1"),
        (["--sequence-length", "-2"], "--sequence-length is -2"),
        (["--shape", "3,4"], "--shape '3,4' is not a shape"),
        (["--shape", "3:florp"], "torch has no type 'florp'"),
        (["--shape", "6", "--batch", "a:b"], "Give one of them"),
        (["--shape", "7"], "The model failed on the batch"),
        (["--optimizer", "adamantium"], "optimizer='adamantium' is not known"),
        (["--loss", "no_such_module_here:f", "--shape", "6"], "cannot be found"),
    ],
)
def test_bad_input(module: str, words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", f"{module}:model", *words]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert "Traceback" not in err


def test_a_type_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["estimate", "a:b", "--dtypes", "fp8"])
    assert "invalid choice: 'fp8'" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom lockstep.cli import main\n"
        "try:\n    main(['estimate', '--help'])\nexcept SystemExit:\n    pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "pkg.module:factory" in done.stdout
