from __future__ import annotations

import argparse
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import slurm
from lockstep.errors import ConfigError


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    slurm.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    return tmp_path


def test_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--nodes", "2", "--gpus-per-node=4", "--cpus_per_node", "16", "--time", "2:00:00", "--partition", "gpu"]
    asked += ["--sbatch=--constraint=a100", "--launch=--debug --mixed_precision bf16", "train.py", "--name", "a b"]
    assert slurm.run(arguments(*asked)) == 0
    assert (folder / "train.sbatch").read_text().splitlines() == [
        "#!/bin/bash",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=16",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --time=2:00:00",
        "#SBATCH --partition=gpu",
        "#SBATCH --job-name=train",
        "#SBATCH --output=%x-%j.out",
        "#SBATCH --constraint=a100",
        "",
        "# This runs on the first node; `lockstep launch` starts itself on all of them, by srun.",
        f"exec {sys.executable} -m lockstep launch --num_processes 8 --debug --mixed_precision bf16 "
        "train.py --name 'a b'",
    ]
    assert capsys.readouterr().out == "Wrote train.sbatch. Look it over, then submit it:\n  sbatch train.sbatch\n"


def test_bash_reads_the_file_as_it_was_meant(folder: Path) -> None:
    args = ["a b", "it's", "$HOME", "`x`", "ä", "*", "\\", "--nodes"]
    text = slurm.batch(arguments("--cpu", "train.py", *args)).text()
    spied = text.replace(f"exec {sys.executable} -m lockstep", "printf '%s\\n'")
    assert spied != text
    shown = subprocess.run(["bash"], input=spied, capture_output=True, text=True, check=True, timeout=20).stdout
    assert shown.splitlines() == ["launch", "--cpu", "train.py", *args]


def test_one_node_leaves_the_number_of_processes_open(folder: Path) -> None:
    text = slurm.batch(arguments("train.py")).text()
    assert text.endswith(f"exec {sys.executable} -m lockstep launch train.py\n")
    assert "first node" not in text


def test_processes_per_node_and_modules(folder: Path) -> None:
    text = slurm.batch(arguments("--nodes=3", "--processes_per_node=2", "--cpu", "-m", "pkg.train", "-v")).text()
    assert text.splitlines()[-1].endswith("launch --num_processes 6 --cpu -m pkg.train -v")
    assert "#SBATCH --job-name=pkg" in text


def test_names_with_spaces_are_quoted(folder: Path) -> None:
    text = slurm.batch(arguments("--job-name", "my run", "--output", "my logs/%j.out", "train.py")).text()
    assert '#SBATCH --job-name="my run"\n#SBATCH --output="my logs/%j.out"\n' in text


def test_a_file_that_is_there_is_kept_unless_forced(folder: Path) -> None:
    (folder / "train.sbatch").write_text("mine")
    with pytest.raises(ConfigError, match=r"train.sbatch exists. Add --force"):
        slurm.run(arguments("train.py"))
    assert (folder / "train.sbatch").read_text() == "mine"
    slurm.run(arguments("--file", "other.sbatch", "train.py"))
    slurm.run(arguments("--force", "train.py"))
    assert (folder / "train.sbatch").read_text() == (folder / "other.sbatch").read_text()


def test_all_problems_at_once(folder: Path) -> None:
    asked = ["--nodes=0", "--cpu", "--gpus-per-node=2", "--time", "", "--sbatch=x", "--launch='", "none.py"]
    with pytest.raises(ConfigError) as caught:
        slurm.run(arguments(*asked))
    for words in (
        "6 settings",
        "--nodes is 0",
        "'none.py' does not exist",
        "--cpu and --gpus-per-node 2 contradict",
        "--time is ''",
        "--sbatch 'x' must be an option",
        "cannot be split",
    ):
        assert words in str(caught.value)
    assert not (folder / "train.sbatch").exists()


def test_a_place_that_cannot_be_written(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"none/x cannot be written: No such file.*--file"):
        slurm.run(arguments("--file=none/x", "train.py"))


def test_submit_runs_sbatch_and_passes_its_code_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(ConfigError, match=r"--submit: sbatch cannot be run \(No such file"):
        slurm.run(arguments("--submit", "train.py"))
    sbatch = folder / "sbatch"
    sbatch.write_text('#!/bin/sh\necho "$@" > said\nexit 7\n')
    sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)
    assert slurm.run(arguments("--force", "--submit", "train.py")) == 7
    assert (folder / "said").read_text() == "train.sbatch\n"
    assert os.path.exists("train.sbatch")


def test_an_option_behind_the_script_is_the_scripts_and_that_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.run(arguments("train.py", "--nodes=2", "--lr", "1", "--time"))
    assert "train.py --nodes=2 --lr 1 --time\n" in (folder / "train.sbatch").read_text()
    assert capsys.readouterr().err == (
        "lockstep slurm: --nodes, --time after the script belong to the script; "
        "what is meant for SLURM goes before it.\n"
    )
