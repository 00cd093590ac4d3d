"""`lockstep bundle`: runs that are over, running, half there or missing; and no secret in the zip, wherever it was."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep import cli
from lockstep.cli import bundle as command
from lockstep.doctor import bundle
from lockstep.doctor.redact import HIDDEN, Redactor
from lockstep.errors import ConfigError
from lockstep.rundir.layout import RunDirectory
from tests.unit.doctor.nccl_logs import rank_log
from tests.unit.doctor.test_redact import VALUES

CONFIG = {"kind": "agent", "argv": ["python", "train.py", "--lr", "0.1"], "options": {"log_dir": {"value": None}}}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The machine's own checks have tests of their own, and take seconds."""
    monkeypatch.setattr(command, "_env", lambda: ("versions\n  lockstep 1", {"versions": {"lockstep": "1"}}))
    monkeypatch.setattr(command, "_findings", lambda: ("ok kernel", [{"check": "kernel", "status": "ok"}]))
    monkeypatch.delenv("LOCKSTEP_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)


def make_run(project: Path, name: str = "20250314-120000-3fa9c1", **files: str) -> Path:
    run = project / ".lockstep" / "runs" / name
    run.mkdir(parents=True)
    everything = {
        "config.json": json.dumps(CONFIG),
        "env.json": json.dumps({"host": "node1", "command": ["lockstep", "launch", "train.py"]}),
        "logs/rank_0.out": "".join(f"step {n}\n" for n in range(500)),
        "logs/rank_0.err": "Traceback\nValueError: bad\n",
        "logs/attempt_1/rank_0.out": "again\n",
        "stacks/rank_0.txt": "Thread 0x1\n",
        "diagnosis.txt": "Rank 0 waits.\n",
        "diagnosis.json": json.dumps({"kind": "missing", "certain": False}),
        "pid": "began elsewhere/- 1 1\nended elsewhere/- 1 1\n",
        **files,
    }
    for path, text in everything.items():
        (run / path).parent.mkdir(parents=True, exist_ok=True)
        (run / path).write_text(text)
    return run


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(list(words)))


def opened(path: Path | str) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_a_job_that_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    assert call() == 0
    out = capsys.readouterr().out
    inside = opened("lockstep-bundle-20250314-120000-3fa9c1.zip")
    assert list(inside) == [
        *("doctor.txt", "doctor.json", "env.txt", "env.json", "run/state.json", "run/config.json", "run/env.json"),
        *("run/diagnosis.txt", "run/diagnosis.json", "run/words.json", "run/boxes.json"),
        *("run/logs/attempt_1/rank_0.out", "run/logs/rank_0.err", "run/logs/rank_0.out", "run/stacks/rank_0.txt"),
        "contents.json",
    ]
    lines = inside["run/logs/rank_0.out"].splitlines()
    assert lines[0].startswith("[the last 200 lines of ")
    assert lines[1:] == [f"step {n}" for n in range(300, 500)]
    assert inside["run/logs/rank_0.err"] == "Traceback\nValueError: bad\n"
    assert json.loads(inside["run/config.json"]) == CONFIG
    assert inside["run/diagnosis.txt"] == "Rank 0 waits.\n"
    assert json.loads(inside["run/state.json"])["running"] is False
    contents = json.loads(inside["contents.json"])
    assert [item["name"] for item in contents["contents"]] == [name for name in inside if name != "contents.json"]
    assert {item["name"]: item["size"] for item in contents["contents"]}["doctor.txt"] == len(inside["doctor.txt"])
    # The list comes first, and every file is in it, by itself or as one of a kind.
    assert out.index("In the bundle:") < out.index("Written to")
    for name in (
        "env.txt",
        "run/diagnosis.txt",
        "run/logs/attempt_1/rank_0.out … run/logs/rank_0.out",
        "contents.json",
    ):
        assert name in out
    assert (Path("lockstep-bundle-20250314-120000-3fa9c1.zip").stat().st_mode & 0o777) == 0o600


def test_the_list_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    before = set(tmp_path.iterdir())
    assert call("--list") == 0
    assert "run/logs" in capsys.readouterr().out
    assert call("--list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["run"].endswith("3fa9c1")
    assert {"name": "run/boxes.json", "what": "what each rank was doing last, from its black box"} in listed["contents"]
    assert set(tmp_path.iterdir()) == before


def test_no_run_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"] is None
    assert "There is no run in" in told["note"]
    assert list(opened(told["bundle"])) == ["doctor.txt", "doctor.json", "env.txt", "env.json", "contents.json"]
    with pytest.raises(ConfigError, match="No run is called 'nowhere'"):
        call("nowhere")


@pytest.mark.parametrize("left", [(), ("pid",), ("config.json",), ("logs/rank_0.err",), ("diagnosis.txt",)])
def test_half_a_run(tmp_path: Path, left: tuple[str, ...]) -> None:
    run = make_run(tmp_path)
    for path in sorted(run.rglob("*"), reverse=True):
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif str(path.relative_to(run)) not in left:
            path.unlink()
    assert call("--output", "a.zip", "20250314") == 0
    inside = opened("a.zip")
    assert {f"run/{name}" for name in left if name != "pid"} <= set(inside)
    assert json.loads(inside["run/words.json"]) == json.loads(inside["run/boxes.json"]) == []
    if "diagnosis.txt" not in left:
        assert inside["run/diagnosis.txt"] == "No rank has a black box, so there is nothing to go by.\n"


def test_what_cannot_be_read_does_not_take_the_rest_along(tmp_path: Path) -> None:
    run = make_run(tmp_path, **{"config.json": "{not json", "words/rank_0.json": "[", "boxes/rank_0.box": "no box"})
    (run / "logs" / "rank_0.err").unlink()
    os.mkfifo(run / "logs" / "rank_0.err")  # would keep a reader waiting for ever
    (run / "logs" / "rank_1.out").symlink_to("/etc/passwd")
    (run / "logs" / "rank_2.out").write_bytes(bytes(range(256)) * 10)
    assert call("--output", "a.zip") == 0
    inside = opened("a.zip")
    assert inside["run/config.json"] == "{not json"
    assert "run/logs/rank_0.err" not in inside
    assert "run/logs/rank_1.out" not in inside
    assert "run/logs/rank_2.out" in inside
    gone = json.loads(inside["contents.json"])["left_out"]
    assert {"name": "logs/rank_0.err", "why": "a pipe"} in gone
    assert {"name": "logs/rank_1.out", "why": "a link"} in gone
    assert "step 499" in inside["run/logs/rank_0.out"]


def test_a_part_that_breaks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def broken() -> tuple[str, object]:
        tried.append(1)
        raise RuntimeError("no driver")

    monkeypatch.setattr(command, "_findings", broken)
    assert call("--output", "a.zip") == 0
    inside = opened("a.zip")
    assert inside["doctor.txt"] == inside["doctor.json"] == "(this part could not be made: RuntimeError: no driver)\n"
    assert tried == [1]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_text("mine")
    with pytest.raises(ConfigError, match=r"a\.zip exists"):
        call("--output", "a.zip")
    assert (tmp_path / "a.zip").read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot be written"):
        call("--output", "no/such/folder/a.zip")
    assert call() == 0
    assert call() == 0
    assert {path.name for path in tmp_path.glob("*.zip")} == {"a.zip", "lockstep-bundle.zip", "lockstep-bundle-2.zip"}
    assert not list(tmp_path.glob(".*"))


def test_logs_that_the_job_kept_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rank_0.out").write_text("PRINTED\n")
    config = {"options": {"log_dir": {"value": str(tmp_path / "elsewhere")}}}
    run = make_run(tmp_path, **{"config.json": json.dumps(config)})
    for path in sorted((run / "logs").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (run / "logs").rmdir()
    assert call("--output", "a.zip") == 0
    inside = opened("a.zip")
    assert not [name for name in inside if "elsewhere" in name]
    why = f"the ranks' output is outside the run directory, in {tmp_path / 'elsewhere'}"
    assert json.loads(inside["contents.json"])["left_out"] == [{"name": "logs", "why": why}]
    # Inside of it, it is taken.
    config = {"options": {"log_dir": {"value": str(run / "output")}}}
    (run / "config.json").write_text(json.dumps(config))
    (run / "output").mkdir()
    (run / "output" / "rank_0.out").write_text("here\n")
    assert call("--output", "b.zip") == 0
    assert opened("b.zip")["run/output/rank_0.out"] == "here\n"
    # By a link, or by a name that leads out of it, it is not.
    for value in (str(run / "away"), str(run / ".." / ".." / ".." / "elsewhere")):
        (run / "away").unlink(missing_ok=True)
        (run / "away").symlink_to(tmp_path / "elsewhere")
        (run / "config.json").write_text(json.dumps({"options": {"log_dir": {"value": value}}}))
        assert "PRINTED" not in json.dumps(bundle_texts(tmp_path))


def bundle_texts(tmp_path: Path) -> dict[str, str]:
    output = tmp_path / "again.zip"
    output.unlink(missing_ok=True)
    assert call("--output", str(output)) == 0
    return {name: text for name, text in opened(output).items() if name.startswith("run/") and "output" not in name}


def test_a_very_long_log_keeps_its_beginning(tmp_path: Path) -> None:
    lines = [f"line {number} {'x' * 90}" for number in range(8000)]
    secret = "hunter" + "2" * 9
    lines[0] = f"password={secret}"
    # The block begins above what is kept, and would look like ordinary lines there.
    start = 8000 - 200 - 2
    lines[start : start + 4] = ["secrets:", f"  one: {secret}1", f"  two: {secret}2", f"  three: {secret}3"]
    make_run(tmp_path, **{"logs/rank_0.out": "\n".join(lines)})
    assert call("--output", "a.zip") == 0
    shown = opened("a.zip")["run/logs/rank_0.out"].splitlines()
    assert shown[0] == "[the first 50 lines]"
    assert shown[1] == f"password={HIDDEN}"
    assert shown[50].startswith("line 49 ")
    assert shown[52].startswith("[the last 200 lines of ")
    assert shown[-1].startswith("line 7999 ")
    assert not [line for line in shown if secret in line]


def test_the_whole_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "_LARGEST", 50_000)
    make_run(tmp_path, **{f"logs/rank_{number}.out": "y" * 99 + "\n" * 300 for number in range(1, 5)})
    make_run(tmp_path, "20250314-120001-3fa9c1", **{f"logs/rank_{n}.out": ("y" * 99 + "\n") * 190 for n in range(5)})
    assert call("--output", "a.zip", "20250314-120001") == 0
    inside = opened("a.zip")
    assert sum(map(len, inside.values())) < 60_000
    gone = json.loads(inside["contents.json"])["left_out"]
    assert {item["why"] for item in gone} == {"the bundle would have more than 0 MiB"}
    assert "run/logs/rank_4.out" in [item["name"] for item in gone]


def test_nccls_logs_are_read(tmp_path: Path) -> None:
    full = "{host}:{pid}:9 [{device}] misc/shmutils.cc:71 NCCL WARN Error: failed to extend /dev/shm/nccl-a to 9 bytes"
    make_run(tmp_path, **{"nccl/node0.1000.log": rank_log(0, 1, then=[full])})
    assert call("--output", "a.zip") == 0
    inside = opened("a.zip")
    assert "failed to extend" in inside["run/nccl/node0.1000.log"]
    assert "There is not enough shared memory." in inside["run/nccl.txt"]
    assert any(finding["check"] == "nccl first error" for finding in json.loads(inside["run/nccl.json"]))


# A rank that lives: its box is open, and its environment can be read.
LIVING = """
import os, sys, time
from lockstep.blackbox.box import Box
from lockstep.rundir.layout import make

run = make(sys.argv[1], None)
host, pid = os.uname().nodename, os.getpid()
box = Box.create(run.boxes / "rank_0.box", rank=0, world_size=1, local_rank=0, node=0, host=host, pid=pid)
box.leave(box.enter("gather", "float32[4]"))
box.enter("reduce", "float32[8]")
print("ready", flush=True)
time.sleep(60)
"""


def test_a_job_that_runs(tmp_path: Path) -> None:
    environ = {**os.environ, "MY_API_KEY": "only-the-job-knows-42"}
    child = subprocess.Popen(
        [sys.executable, "-c", LIVING, str(tmp_path / "run")], env=environ, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        (tmp_path / "run" / "logs").mkdir()
        (tmp_path / "run" / "logs" / "rank_0.out").write_text("login with only-the-job-knows-42\n")
        assert call("--output", "a.zip", str(tmp_path / "run")) == 0
    finally:
        child.kill()
        child.communicate()
    inside = opened("a.zip")
    assert json.loads(inside["run/state.json"])["running"] is True
    (box,) = json.loads(inside["run/boxes.json"])
    assert (box["rank"], box["alive"], box["pid"]) == (0, True, child.pid)
    calls = [(op["name"], op["signature"]) for op in box["history"]]
    assert calls == [("gather", "float32[4]"), ("reduce", "float32[8]")]
    assert inside["run/logs/rank_0.out"] == f"login with {HIDDEN}\n"
    # The same run, now that it is dead.
    assert call("--output", "b.zip", str(tmp_path / "run")) == 0
    inside = opened("b.zip")
    assert json.loads(inside["run/state.json"])["running"] is False
    assert json.loads(inside["run/boxes.json"])[0]["alive"] is False


# ---------------------------------------------------------------- secrets


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    secret=VALUES,
    where=st.sets(st.sampled_from(["environ", "argv", "argv=", "command", "url"]), min_size=1),
    also=st.sets(st.sampled_from(["log", "error", "diagnosis", "words", "stack", "nccl", "old config"])),
)
def test_a_planted_secret_is_nowhere_in_the_zip(
    tmp_path_factory: pytest.TempPathFactory, secret: str, where: set[str], also: set[str]
) -> None:
    project = tmp_path_factory.mktemp("project")
    environ = {"PATH": "/bin", "HF_TOKEN": secret if "environ" in where else "another-secret-1"}
    argv = ["python", "train.py"]
    argv += ["--api_key", secret] if "argv" in where else []
    argv += [f"--password={secret}"] if "argv=" in where else []
    url = f"https://bob:{quote(secret, safe='')}@host/x" if "url" in where else "https://host/x"
    said = f"refused: {secret} ({secret!r}, {json.dumps({'x': secret})}, {quote(secret)})\n"
    files = {
        "config.json": json.dumps({"argv": argv, "env": {"DATASET": url}, "options": {}}, indent=1),
        "env.json": json.dumps({"command": ["launch", *(["--token", secret] if "command" in where else [])]}),
        "logs/rank_0.out": said if "log" in also else "",
        "logs/rank_0.err": ("x\n" * 300 + said) if "error" in also else "",
        "diagnosis.txt": said if "diagnosis" in also else "",
        "words/rank_0.json": json.dumps(last_words(said)) if "words" in also else "",
        "stacks/rank_0.txt": said if "stack" in also else "",
        "nccl/a.1.log": f"a:1:1 [0] x.cc:1 NCCL WARN {said}" if "nccl" in also else "",
    }
    run = RunDirectory(path=make_run(project, **files))
    redactor = bundle.redactor_for(run, environ)
    parts = bundle.parts(
        run,
        redactor,
        env=lambda: (f"HF_TOKEN {environ['HF_TOKEN']}", {"variables": environ}),
        findings=lambda: (said, [{"what": said}]),
    )
    output = project / "a.zip"
    bundle.write(output, parts, {}, lambda part: None)
    for name, text in opened(output).items():
        for form in (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret), quote(secret, safe="")):
            assert form not in text, (name, form)
    inside = opened(output)
    assert "train.py" in inside["run/config.json"]


def last_words(message: str) -> dict[str, object]:
    return {
        **{"rank": 0, "local_rank": 0, "host": "h", "pid": 1, "attempt": "", "time": 1.0, "kind": "ValueError"},
        **{"message": message, "traceback": message, "line": "train.py:1", "follows": False, "cause_rank": None},
    }


def test_a_cut_does_not_spare_half_a_secret(tmp_path: Path) -> None:
    secret = "abcdefghijkl0123456789"
    redactor = Redactor().learn({"MY_TOKEN": secret})
    log = tmp_path / "a.log"
    for shift in range(0, len(secret) + 2, 3):
        # The window begins inside the secret, in the middle of a line; and in one line that fills all of it.
        for text in (
            f"{secret}\n" + "y" * (bundle._WINDOW - shift - 2) + "\n",
            f"x {secret} " + "y " * ((bundle._WINDOW - shift) // 2),
        ):
            log.write_text(text)
            shown = bundle.redacted_tail(log, redactor)
            assert not [part for part in (secret[start : start + 5] for start in range(18)) if part in shown]
    # Nor where a long line is cut.
    log.write_text("y" * (bundle._LONGEST - 5) + secret + "\n")
    assert secret[:5] not in bundle.redacted_tail(log, redactor)


def test_the_command_is_one_of_lockstep(capsys: pytest.CaptureFixture[str]) -> None:
    assert "bundle" in cli.COMMANDS
    assert cli.main(["bundle", "--list", "nowhere"]) == 2
    assert "No run is called 'nowhere'" in capsys.readouterr().err


def test_the_doctors_checks_are_forked_before_torch_is_there(tmp_path: Path) -> None:
    """A real bundle of this machine; what comes first must not have torch and its threads in the process."""
    code = """
import sys
from lockstep.cli import bundle, env
from lockstep.doctor import run

run_checks, collect, seen = run.run_checks, env.collect, []
run.run_checks = lambda context: (seen.append("torch" in sys.modules), run_checks(context, run.CHECKS[:2]))[1]
env.collect = lambda: (seen.append(len(seen)), {"versions": {"lockstep": env.Fact(value="1")}})[1]
sys.argv = ["lockstep", "bundle", "--output", "a.zip"]
from lockstep.cli import main

assert main() == 0
assert seen == [False, 1], seen
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "kernel" in opened(tmp_path / "a.zip")["doctor.txt"]
