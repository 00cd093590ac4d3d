"""``lockstep doctor`` as it is called: parts, help without torch, JSON, exit codes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

from lockstep.cli import doctor, doctor_machine, doctor_net, main
from lockstep.doctor.finding import Finding
from lockstep.errors import ConfigError


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    doctor_net.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("words", [["doctor"], *(["doctor", part] for part in doctor.PARTS)])
def test_help_needs_no_torch(words: list[str]) -> None:
    code = (
        "import sys; from lockstep.cli import main\n"
        f"try: main({[*words, '--help']!r})\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert f"lockstep {' '.join(words)}" in done.stdout


def test_the_help_names_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "-h"])
    shown = capsys.readouterr().out
    assert all(f"\n  {part} " in shown for part in doctor.PARTS)


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warning", 0), ("skipped", 0), ("error", 1)])
def test_the_exit_code_and_json(
    alone: None, status: str, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = Finding(check="x", status=status, what="y", data={"z": 1})  # type: ignore[arg-type]
    monkeypatch.setattr(doctor_machine, "run_checks", lambda context, on_result: [finding])
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == {"ok": code == 0, "findings": [finding.plain()]}
    assert main(["doctor"]) == code
    assert "x" in capsys.readouterr().out


def test_flags_make_the_situation(alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    seen = []
    monkeypatch.setattr(doctor_machine, "run_checks", lambda context, on_result: seen.append(context) or [])
    flags = ["--num_machines", "2", "--num-processes", "8", "--main_process_ip", "node0", "--main_process_port", "77"]
    assert main(["doctor", *flags]) == 0
    (context,) = seen
    assert (context.machines, context.processes) == (2, 4)
    assert (context.main_address, context.main_port) == ("node0", 77)


def test_doctor_net_by_itself_starts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    command = doctor_net.job_words(parsed("--quick", "--num_processes", "3", "--json", "--html", "a.html"))
    assert command[:2] == ["--num_processes", "3"]
    again = command[command.index("doctor") :]
    assert again[:2] == ["doctor", "net"]
    assert {"--quick", "--json", "--html", "a.html"} <= set(again)


def test_doctor_net_alone_takes_two_on_the_cpu_or_all_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.host import hardware

    for present, expected in ((0, ["2", "--cpu"]), (1, ["2", "--cpu"]), (8, ["8", "-m"])):
        monkeypatch.setattr(hardware, "accelerators", lambda environ, present=present: (present, "cuda"))
        command = doctor_net.job_words(parsed())
        at = command.index("--num_processes")
        assert command[at + 1 : at + 3] == expected


def test_doctor_net_refuses_what_makes_no_sense(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in ("0", "1"):
        with pytest.raises(ConfigError, match="at least one other"):
            doctor_net.job_words(parsed("--num_processes", count))
    with pytest.raises(SystemExit):
        parsed("--budget", "-3")
    with monkeypatch.context() as launched:
        launched.setenv("LOCKSTEP_LAUNCH", "1")
        with pytest.raises(ConfigError, match="has started one process"):
            doctor_net.run(parsed())
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="has started this one"):
        doctor_net.run(parsed("--num_processes", "2"))
