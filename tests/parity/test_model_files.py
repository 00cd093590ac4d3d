"""Model files: each library reads what the other wrote, and both write the same files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep import load_checkpoint_in_model
from lockstep.model_files.save import replace_model
from tests.parity.file_model import WAYS, Model, values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both have written, and what Accelerate has read of ours."""
    place = tmp_path_factory.mktemp("model-files")
    model = Model(0)
    for name, asked in WAYS.items():
        size = asked.get("max_shard_size", "10GB")
        replace_model(model.state_dict(), place / "ours" / name, size, asked["safe_serialization"])
    load_checkpoint_in_model(
        Model(1), place / "ours" / "safe-whole", {"": "disk", "norm": "cpu"}, place / "ours" / "offload", strict=True
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "LOCKSTEP_"))
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "their_files.py"), str(place)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return place


def test_accelerate_reads_what_we_write(folder: Path) -> None:
    seen = json.loads((folder / "seen.json").read_text())
    expected = values(Model(0))
    assert {name for name in WAYS if seen[name] != expected} == set()


def test_we_read_what_accelerate_writes(folder: Path) -> None:
    expected = values(Model(0))
    for name in WAYS:
        model = Model(1)
        load_checkpoint_in_model(model, folder / "theirs" / name, strict=True)
        assert values(model) == expected, name
        assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("name", WAYS)
def test_both_write_the_same_files(folder: Path, name: str) -> None:
    ours, theirs = folder / "ours" / name, folder / "theirs" / name
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
    for path in ours.iterdir():
        other = theirs / path.name
        if path.suffix == ".json":
            assert path.read_bytes() == other.read_bytes()
        else:
            load = load_file if path.suffix == ".safetensors" else torch.load
            left, right = load(path), load(other)
            assert {key: (t.dtype, t.shape) for key, t in left.items()} == {
                key: (t.dtype, t.shape) for key, t in right.items()
            }
            assert all(torch.equal(left[key], right[key]) for key in left)


def test_weights_on_disk_are_kept_in_the_same_way(folder: Path) -> None:
    ours, theirs = folder / "ours" / "offload", folder / "theirs" / "offload"
    index, expected_index = (json.loads((place / "index.json").read_text()) for place in (ours, theirs))
    # Ours says more of each file, and has a second name for a tied weight.
    assert {name: {key: index[name][key] for key in entry} for name, entry in expected_index.items()} == expected_index
    assert set(index) - set(expected_index) == {"head.weight"}
    for path in theirs.glob("*.dat"):
        assert (ours / path.name).read_bytes() == path.read_bytes()
    assert (ours / "head.weight.dat").samefile(ours / "embed.weight.dat")
    seen = json.loads((folder / "seen.json").read_text())["offload"]
    expected = values(Model(0))
    # Norms are not on disk; and their function for reading weights back does not tie what was tied.
    kept = [name for name in expected if not name.startswith(("norm.", "head."))]
    assert {name for name in kept if seen[name] != expected[name]} == set()
