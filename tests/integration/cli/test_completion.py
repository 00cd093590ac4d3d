"""The completion scripts in real shells."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.cli.parsers import every_parser


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", "completion", shell],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        (folder / shell).write_text(done.stdout)
    return folder


def complete(scripts: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    listed = " ".join(f"'{word}'" for word in ("lockstep", *words))
    text = f"source {scripts / 'bash'}; COMP_WORDS=({listed}); COMP_CWORD={len(words)}; _lockstep; "
    done = subprocess.run(
        ["bash", "--norc", "-c", text + 'printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True, timeout=20
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["la"], ["launch"]),
        (["launch", "--mixed"], ["--mixed_precision"]),
        (["launch", "--mixed_precision", ""], ["no", "fp16", "bf16"]),
        (["launch", "--mixed_precision", "b"], ["bf16"]),
        (["config", "u"], ["update"]),
        (["config", "default", "--mixed"], ["--mixed_precision"]),
        (["doctor", ""], ["net", "mpi", "nccl"]),
        (["doctor", "net", "--qu"], ["--quick"]),
        (["checkpoint", "v"], ["verify"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["launch", "train"], []),
    ],
)
def test_bash_completes(scripts: Path, words: list[str], expected: list[str]) -> None:
    assert complete(scripts, *words) == expected


def test_bash_offers_all_commands(scripts: Path) -> None:
    assert complete(scripts, "") == list(cli.COMMANDS)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_the_script(scripts: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", str(scripts / shell)], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_completes(scripts: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    for words, expected in {"la": "launch", "doctor net --qu": "--quick", "launch --mixed_precision b": "bf16"}.items():
        text = f"source {scripts / 'fish'}; complete -C 'lockstep {words}'"
        done = subprocess.run(["fish", "--no-config", "-c", text], capture_output=True, text=True, timeout=20)
        assert [line.split("\t")[0] for line in done.stdout.splitlines()] == [expected], done.stderr


def test_every_option_is_in_the_script_for_fish(scripts: Path) -> None:
    text = (scripts / "fish").read_text()
    for name, parser in every_parser().items():
        for action in parser._actions:
            flag = next(iter(action.option_strings), "")
            if flag.startswith("--") and action.help != "==SUPPRESS==":
                assert f" -l {flag[2:]} " in text, (name, flag)
