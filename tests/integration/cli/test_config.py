"""``lockstep config``, on a real terminal (a pty) and without one."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pexpect
import pytest

from lockstep.cli import config
from lockstep.config import file
from lockstep.errors import ConfigError
from lockstep.launch import basic_config
from lockstep.launch.basic_config import Detected

ENTER, DOWN, CLEAR = "\r", "\x1b[B", "\x15"
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

WHERE, WHAT, PROCESSES = "Where will training run?", "Which hardware?", "How many processes?"
PRECISION, DEBUG, MORE = "Mixed precision?", "Debug mode", "Set more options"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A user without a configuration, on a node without accelerators."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "LOCKSTEP_"))}
    # The last stops prompt_toolkit from waiting for an answer that this terminal does not give.
    return {
        **kept,
        "HF_HOME": str(tmp_path / "hf"),
        "CUDA_VISIBLE_DEVICES": "",
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",
    }


@pytest.fixture
def default(tmp_path: Path) -> Path:
    return tmp_path / "hf" / "accelerate" / "default_config.yaml"


class Terminal:
    """The command on a pty: questions are waited for, keys are pressed."""

    def __init__(self, environ: Mapping[str, str], *arguments: str) -> None:
        self.log = io.StringIO()
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "lockstep", "config", *arguments],
            env=dict(environ),
            encoding="utf-8",
            timeout=60,
            dimensions=(50, 200),
        )
        self.child.logfile_read = self.log

    def answer(self, question: str, keys: str = "") -> None:
        try:
            self.child.expect_exact(question)
        except pexpect.ExceptionPexpect:
            pytest.fail(f"{question!r} was not asked; on the screen was:\n{self.screen}", pytrace=False)
        self.child.send(keys + ENTER)

    def end(self) -> int:
        self.child.expect(pexpect.EOF)
        self.child.close()
        return int(self.child.exitstatus)

    @property
    def screen(self) -> str:
        return _CODES.sub("", self.log.getvalue())


@pytest.fixture
def terminal(environ: dict[str, str]) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def opening(*arguments: str) -> Terminal:
        opened.append(Terminal(environ, *arguments))
        return opened[-1]

    yield opening
    for one in opened:
        one.child.close(force=True)


def run(environ: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lockstep", "config", *arguments],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# ---------------------------------------------------------------- on a terminal


def test_six_times_enter_is_this_machine(terminal: Callable[..., Terminal], default: Path) -> None:
    screen = terminal()
    for question in (WHERE, WHAT, PROCESSES, PRECISION, DEBUG, MORE):
        screen.answer(question)
    assert screen.end() == 0
    assert f"Written: {default}" in screen.screen
    assert "  lockstep test " in screen.screen
    assert "  lockstep launch train.py" in screen.screen
    seen = file.read(default)
    assert seen.values == {
        "cpu": True,
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 1,
        "same_network": True,
    }
    assert seen.keys["debug"] is False


def test_several_machines_and_more_options(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    hosts, path = tmp_path / "hosts", tmp_path / "mine.yaml"
    hosts.write_text("one\n")
    screen = terminal("--config-file", str(path))
    screen.answer(WHERE, DOWN)
    screen.answer("How many nodes?", CLEAR + "3")
    screen.answer("Rank of this node", CLEAR + "2")
    screen.answer("IP address or host name of node 0", "10.0.0.1")
    screen.answer("Free port", CLEAR + "29600")
    screen.answer(WHAT)
    screen.answer(PROCESSES, CLEAR + "6")
    screen.answer(PRECISION, DOWN + DOWN)
    screen.child.expect_exact(DEBUG)
    screen.child.send("y")
    screen.child.expect_exact(MORE)
    screen.child.send("y")
    screen.answer("torch.compile backend", DOWN)
    screen.answer("Gradient accumulation steps", CLEAR + "4")
    screen.answer("Hostfile", str(hosts))
    screen.answer("Bind each process")
    assert screen.end() == 0
    assert f"lockstep launch --config_file {path} train.py" in screen.screen
    seen = file.read(path)
    assert seen.keys["distributed_type"] == "MULTI_CPU"
    assert seen.values == {
        "cpu": True,
        "debug": "collectives",
        "dynamo_backend": "INDUCTOR",
        "enable_cpu_affinity": False,
        "gradient_accumulation_steps": 4,
        "machine_rank": 2,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29600,
        "main_training_function": "main",
        "mixed_precision": "bf16",
        "mpirun_hostfile": str(hosts),
        "num_machines": 3,
        "num_processes": 6,
        "same_network": True,
    }


def test_a_wrong_answer_is_not_taken(terminal: Callable[..., Terminal], default: Path) -> None:
    screen = terminal()
    screen.answer(WHERE)
    screen.answer(WHAT)
    screen.answer(PROCESSES, CLEAR + "none")
    screen.child.expect_exact("A whole number of 1 or more")
    screen.child.send(CLEAR + "2" + ENTER)
    for question in (PRECISION, DEBUG, MORE):
        screen.answer(question)
    assert screen.end() == 0
    assert file.read(default).values["num_processes"] == 2


def test_ctrl_c_writes_nothing(terminal: Callable[..., Terminal], default: Path) -> None:
    screen = terminal()
    screen.answer(WHERE)
    screen.child.expect_exact(WHAT)
    screen.child.send("\x03")
    assert screen.end() == 130
    assert "Nothing was written." in screen.screen
    assert not default.parent.exists()


def test_the_file_that_is_there_gives_the_defaults(terminal: Callable[..., Terminal], default: Path) -> None:
    old = {
        "cpu": True,
        "num_processes": 4,
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "host",
        "main_process_port": 29501,
        "mixed_precision": "bf16",
        "debug": True,
        "max_restarts": 3,
    }
    before = file.read(file.write(default, old)).values
    screen = terminal()
    for question in (WHERE, "How many nodes?", "Rank of this", "IP address", "port", WHAT, PROCESSES):
        screen.answer(question)
    for question in (PRECISION, DEBUG, MORE):
        screen.answer(question)
    assert screen.end() == 0
    assert file.read(default).values == before


def test_a_file_for_another_engine_is_replaced_only_when_asked(
    terminal: Callable[..., Terminal], default: Path
) -> None:
    default.parent.mkdir(parents=True)
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 8\n"
    default.write_text(text)
    screen = terminal()
    screen.answer("Replace this file, and drop the settings listed above?")
    assert screen.end() == 1
    assert "line 1: distributed_type: FSDP asks for FSDP" in screen.screen
    assert "was not changed" in screen.screen
    assert default.read_text() == text


def test_a_broken_file_is_shown_and_replaced_only_when_asked(terminal: Callable[..., Terminal], default: Path) -> None:
    default.parent.mkdir(parents=True)
    default.write_text("num_proceses: 2\n")
    screen = terminal()
    screen.child.expect_exact("Replace this file?")
    screen.child.send("y")
    for question in (WHERE, WHAT, PROCESSES, PRECISION, DEBUG, MORE):
        screen.answer(question)
    assert screen.end() == 0
    assert "line 1: 'num_proceses' is not a known key. Did you mean num_processes?" in screen.screen
    assert file.read(default).values["num_processes"] == 1


# ---------------------------------------------------------------- the questions, on nodes that are not here


class Script(config.Wizard):
    """Answers by the beginning of the question; what is not in the script takes the default."""

    def __init__(self, **given: Any) -> None:
        self.given, self.asked = given, []

    def _say(self, question: str, default: Any) -> Any:
        self.asked.append(question)
        return next((value for start, value in self.given.items() if question.startswith(start)), default)

    def menu(self, question: str, choices: Mapping[Any, str], default: Any) -> Any:
        answer = self._say(question, default)
        assert answer in choices
        return answer

    def yes(self, question: str, default: bool) -> bool:
        return self._say(question, default)

    def text(self, question: str, default: str, check: Callable[[str], str | None]) -> str:
        answer = str(self._say(question, default))
        assert check(answer) is None
        return answer


@pytest.mark.parametrize(
    ("found", "given", "old", "kind", "expected"),
    [
        (Detected(kind="cuda", count=4), {}, {}, "MULTI_GPU", {"cpu": False, "multi_gpu": True, "num_processes": 4}),
        (Detected(kind="xpu", count=2), {}, {}, "MULTI_XPU", {"cpu": False, "multi_gpu": True, "num_processes": 2}),
        (Detected(kind="cuda", count=1), {}, {}, None, {"cpu": False, "multi_gpu": False, "num_processes": 1}),
        (
            Detected(kind="cuda", count=4),
            {"Which hardware": True},
            {"cpu": False, "num_processes": 4, "gpu_ids": "0,1"},
            None,
            {"cpu": True, "multi_gpu": False, "num_processes": 1},
        ),
        (
            Detected(kind="cuda", count=4),
            {"Where": True, "IP address": "host"},
            {},
            "MULTI_GPU",
            {"num_machines": 2, "machine_rank": 0, "main_process_port": 29500, "num_processes": 8},
        ),
        (
            Detected(kind="cpu", count=0),
            {"Which hardware": False, "How": 2},
            {},
            None,
            {"cpu": False, "multi_gpu": True, "num_processes": 2},
        ),
        (
            Detected(kind="cpu", count=0),
            {"Where": False},
            {"num_machines": 2, "main_process_ip": "host", "machine_rank": 1, "quiet": True},
            None,
            {"cpu": True, "quiet": True, "num_processes": 1},
        ),
    ],
)
def test_the_defaults_follow_what_was_found(
    tmp_path: Path,
    found: Detected,
    given: dict[str, Any],
    old: dict[str, Any],
    kind: str | None,
    expected: dict[str, Any],
) -> None:
    values, seen = config.answers(Script(**given), old, found)
    assert {name: values.get(name) for name in expected} == expected
    assert seen == kind
    assert "gpu_ids" not in values
    if "Where" in given and not given["Where"]:
        assert "main_process_ip" not in values
    file.read(file.write(tmp_path / "config.yaml", values, distributed_type=seen))


def test_few_questions_are_asked() -> None:
    script = Script()
    config.answers(script, {}, Detected(kind="cuda", count=2))
    assert len(script.asked) == 6


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (Detected(kind="cpu", count=0), "CPU only"),
        (Detected(kind="cuda", count=1), "1 GPU"),
        (Detected(kind="cuda", count=2), "2 GPUs"),
        (Detected(kind="xpu", count=2), "2 XPU devices"),
    ],
)
def test_devices_in_words(found: Detected, text: str) -> None:
    assert str(found) == text


# ---------------------------------------------------------------- without a terminal


def test_without_a_terminal_the_defaults_are_written(environ: dict[str, str], default: Path) -> None:
    first = run(environ)
    assert (first.returncode, first.stderr) == (0, "")
    assert "No terminal for questions" in first.stdout
    assert "Found on this machine: CPU only." in first.stdout
    assert f"Written: {default}" in first.stdout
    text = default.read_text()
    second = run(environ)
    assert second.returncode == 0
    assert "exists and was not changed" in second.stdout
    assert default.read_text() == text


@pytest.mark.parametrize("dash", ["-", "_"])
def test_default_takes_its_flags_in_both_spellings(environ: dict[str, str], tmp_path: Path, dash: str) -> None:
    path = tmp_path / "mine.yaml"
    # Before the action's name or after it.
    where = [f"--config{dash}file", str(path)]
    what = ["default", f"--mixed{dash}precision", "bf16"]
    done = run(environ, *(where + what if dash == "-" else what + where))
    assert (done.returncode, done.stderr) == (0, "")
    assert file.read(path).values["mixed_precision"] == "bf16"


def test_default_does_not_pretend_to_have_changed_a_file(environ: dict[str, str], default: Path) -> None:
    file.write(default, {"mixed_precision": "fp16"})
    assert run(environ, "default", "--mixed_precision", "fp16").returncode == 0
    done = run(environ, "default", "--mixed_precision", "bf16")
    assert done.returncode == 2
    assert f"--mixed_precision bf16 was not written: {default} exists" in done.stderr
    assert run(environ, "default", "--mixed_precision", "half").returncode == 2


def test_update_says_what_changed(environ: dict[str, str], default: Path) -> None:
    default.parent.mkdir(parents=True)
    default.write_text("distributed_type: MULTI_GPU\nfp16: true\nmain_process_ip: null\ntpu_name: mine\n")
    done = run(environ, "update")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Rewritten: {default}" in done.stdout
    assert "mixed_precision: 'fp16' is new, in place of fp16" in done.stdout
    assert "main_process_ip: None is gone: it says nothing" in done.stdout
    assert "tpu_name has no effect: it is for TPUs" in done.stdout
    assert file.read(default).values["mixed_precision"] == "fp16"
    assert "is up to date" in run(environ, "update").stdout


def test_update_of_nothing_says_who_writes_it(environ: dict[str, str], default: Path) -> None:
    done = run(environ, "update")
    assert done.returncode == 2
    assert f"The configuration file {default} does not exist." in done.stderr


def test_an_old_json_file_is_the_default_of_a_new_yaml_file(
    terminal: Callable[..., Terminal], environ: dict[str, str], default: Path
) -> None:
    old = file.write(default.with_suffix(".json"), {"cpu": True, "num_processes": 3})
    screen = terminal()
    for question in (WHERE, WHAT, PROCESSES, PRECISION, DEBUG, MORE):
        screen.answer(question)
    assert screen.end() == 0
    assert file.read(default).values["num_processes"] == 3
    assert old.exists()


def test_questions_need_no_torch(environ: dict[str, str]) -> None:
    check = (
        "import sys, argparse\n"
        "from lockstep.cli import config\n"
        "config.add_arguments(argparse.ArgumentParser())\n"
        "print([name for name in ('torch', 'yaml', 'questionary') if name in sys.modules])\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", check], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert child.stdout.strip() == "[]"


# ---------------------------------------------------------------- write_basic_config


def test_write_basic_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(basic_config, "detect", lambda: Detected(kind="cuda", count=2))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    path = tmp_path / "accelerate" / "default_config.yaml"
    assert basic_config.write_basic_config("BF16") == path
    assert capsys.readouterr().out == ""
    seen = file.read(path)
    assert seen.keys["distributed_type"] == "MULTI_GPU"
    assert (seen.values["num_processes"], seen.values["mixed_precision"]) == (2, "bf16")
    assert basic_config.write_basic_config() is False
    assert f"{path} exists and was not changed" in capsys.readouterr().out
    assert basic_config.write_basic_config(save_location=str(tmp_path / "other.yaml")) == tmp_path / "other.yaml"


@pytest.mark.parametrize(
    ("precision", "said"), [("half", "Allowed: 'no', 'fp8'"), ("fp8", "'fp8' is not supported yet")]
)
def test_write_basic_config_refuses(tmp_path: Path, precision: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        basic_config.write_basic_config(precision, tmp_path / "config.yaml")
    assert list(tmp_path.iterdir()) == []
