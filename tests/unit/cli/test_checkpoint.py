"""``lockstep checkpoint``: what it lists, what it finds damaged, what it deletes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.storage import commit
from lockstep.storage.disk import Disk
from tests.unit.checkpoint.runs import Run


@pytest.fixture
def project(tmp_path: Path, alone: None) -> Path:
    run = Run(tmp_path)
    for _ in range(3):
        run.train(3).accelerator.save_state(durable=False)
    return tmp_path


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_ls_tells_of_each(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(project)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        ["checkpoint_2", "complete", "3", "1"],
        ["checkpoint_1", "complete", "2", "1"],
        ["checkpoint_0", "complete", "1", "1"],
    ]


def test_verify_names_the_damaged_file(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(project / "checkpoints")]) == 0
    assert capsys.readouterr().out.count("verified") == 3
    spoil(project / "checkpoints" / "checkpoint_1" / "optimizer.bin")
    assert main(["checkpoint", "ls", str(project)]) == 0  # its size is right: only reading shows it
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(project), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["verified", "damaged", "verified"]
    assert "optimizer.bin is damaged" in rows[1]["problems"][0]
    assert main(["checkpoint", "verify", str(project / "checkpoints" / "checkpoint_2")]) == 0


def test_prune_keeps_the_newest_that_are_whole(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = project / "checkpoints"
    (folder / "checkpoint_2" / "model.safetensors").unlink()
    assert main(["checkpoint", "prune", str(project), "--keep", "1", "--dry_run"]) == 0
    assert "would delete" in capsys.readouterr().out
    assert len(list(folder.iterdir())) == 3
    assert main(["checkpoint", "prune", str(project), "--keep", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deleted"] == [str(folder / "checkpoint_0")]
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_1", "checkpoint_2"]


def test_prune_waits_for_no_writer_but_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = project / "checkpoints"
    with commit.locked(folder, Disk()):
        assert main(["checkpoint", "prune", str(project), "--keep", "1"]) == 2
    assert "is writing" in capsys.readouterr().err


def test_prune_leaves_files_that_are_not_the_checkpoints(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = project / "checkpoints"
    (folder / "checkpoint_0" / "scores.json").write_text("mine")
    for deleted in (["checkpoint_1", "checkpoint_0"], []):  # what is left is not taken for a checkpoint
        assert main(["checkpoint", "prune", str(project), "--keep", "1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["deleted"] == [str(folder / name) for name in deleted]
        assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_0", "checkpoint_2"]
        assert [path.name for path in (folder / "checkpoint_0").iterdir()] == ["scores.json"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ls", "no/such/folder"], "is not a folder"),
        (["prune", ".", "--keep", "0"], "at least 1"),
        (["prune", "."], "say how many"),
        (["ls", "empty"], "there is no checkpoint in it"),
    ],
)
def test_what_makes_no_sense_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], found: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["checkpoint", *words]) == 2
    assert found in capsys.readouterr().err


def test_torch_is_not_loaded(project: Path) -> None:
    code = "import sys; from lockstep.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "checkpoint", "verify", str(project)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
