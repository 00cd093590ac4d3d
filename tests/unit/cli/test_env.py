"""The report of `lockstep env`: complete, in a fixed order, without secrets, and never stopped by one bad part."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import lockstep
from lockstep.cli import env as command
from lockstep.topology import kernel

PARTS = ["versions", "machine", "devices", "process", "network", "settings", "variables"]

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(autouse=True)
def _no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The configuration file of whoever runs the tests stays out of them."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "some.yaml"
    path.write_text(text)
    return path


def usual_place(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hf" / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def printed(capsys: pytest.CaptureFixture[str], *, as_json: bool = False, config_file: Any = None) -> tuple[int, str]:
    given = None if config_file is None else str(config_file)
    code = command.run(argparse.Namespace(json=as_json, config_file=given))
    return code, capsys.readouterr().out


def line_of(text: str, name: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(f"  {name}  ")]
    return line.removeprefix(f"  {name}").strip()


def test_the_parts_and_their_order() -> None:
    report = command.collect()
    assert list(report) == PARTS
    assert list(report["versions"])[:5] == ["lockstep", "torch", "numpy", "python", "platform"]
    assert list(report["machine"])[:3] == ["kernel", "cpu cores", "memory"]


def test_versions_and_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = printed(capsys)
    assert code == 0
    assert line_of(text, "lockstep") == lockstep.__version__
    assert line_of(text, "torch") == version("torch")
    assert line_of(text, "memory") == f"{psutil.virtual_memory().total / 2**30:.1f} GiB"
    assert "usable" in line_of(text, "cpu cores")
    assert line_of(text, "started by").startswith("none (")


def test_lines_are_aligned_and_plain(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = printed(capsys)
    lines = text.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == PARTS
    width = max(len(name) for facts in command.collect().values() for name in facts)
    for line in lines:
        assert "\x1b" not in line
        assert line == line.rstrip()
        if line.startswith("  ") and line != "  none":
            assert line[width + 2 : width + 4] == "  "
            assert line[width + 4] != " "


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = printed(capsys, as_json=True)
    facts = json.loads(text)
    assert code == 0
    assert list(facts) == PARTS
    assert facts["machine"]["memory"] == psutil.virtual_memory().total
    assert facts["process"]["started by"]["value"] == "none"
    assert facts["settings"]["cpu"] == {"value": "no", "reason": "default"}
    assert facts["network"]["lo"]["up"] is True
    assert "127.0.0.1" in facts["network"]["lo"]["addresses"]


def test_environment_wins_over_file_over_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = usual_place(tmp_path, "mixed_precision: bf16\nuse_cpu: true\nnum_processes: 3\n")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    code, text = printed(capsys)
    assert code == 0
    assert line_of(text, "configuration file") == f"{path} (the usual place)"
    assert line_of(text, "mixed_precision") == "fp16 (environment ACCELERATE_MIXED_PRECISION)"
    assert line_of(text, "cpu") == f"yes (file {path})"
    assert line_of(text, "num_processes") == f"3 (file {path})"
    assert line_of(text, "gradient_accumulation_steps") == "1 (default)"


def test_a_file_that_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    usual_place(tmp_path, "num_processes: 3\n")
    path = written(tmp_path, "num_processes: 5\n")
    code, text = printed(capsys, config_file=path)
    assert code == 0
    assert line_of(text, "num_processes") == f"5 (file {path})"
    assert line_of(text, "configuration file") == f"{path} (--config_file)"


@pytest.mark.parametrize("text", [None, "num_proceses: 3\n", "a: [\n"], ids=["missing", "typo", "no YAML"])
def test_a_named_file_that_cannot_be_read_is_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "missing.yaml" if text is None else written(tmp_path, text)
    code = command.run(argparse.Namespace(json=False, config_file=str(path)))
    out, err = capsys.readouterr()
    assert code == 2
    assert line_of(out, "configuration file").startswith("ERROR: ")
    assert str(path) in err
    assert line_of(out, "cpu") == "no (default)"


def test_a_bad_file_in_the_usual_place_is_part_of_the_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    usual_place(tmp_path, "num_proceses: 3\n")
    code, text = printed(capsys)
    assert code == 0
    assert "num_proceses" in line_of(text, "configuration file")


def test_a_bad_variable_says_so_in_its_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_USE_CPU", "perhaps")
    monkeypatch.setenv("LOCKSTEP_MIXED_PRECISION", "bf16")
    code, text = printed(capsys)
    assert code == 0
    assert line_of(text, "cpu").startswith("perhaps  ERROR: LOCKSTEP_USE_CPU='perhaps'")
    assert line_of(text, "process").startswith("ERROR: LOCKSTEP_USE_CPU='perhaps'")
    assert line_of(text, "mixed_precision") == "bf16 (environment LOCKSTEP_MIXED_PRECISION)"


def test_secrets_are_hidden(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCKSTEP_API_TOKEN", "ACCELERATE_SECRET", "NCCL_KEY_FILE", "GLOO_PASSWORD"):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("NCCL_PROXY", "http://me:hunter2@proxy:80")
    monkeypatch.setenv("NCCL_DEBUG", "INFO\nWARN")
    monkeypatch.setenv("UNRELATED", "nobody asked")
    for as_json in (False, True):
        _, text = printed(capsys, as_json=as_json)
        assert "hunter2" not in text
        assert "UNRELATED" not in text
        assert "LOCKSTEP_API_TOKEN" in text
    _, text = printed(capsys)
    assert line_of(text, "NCCL_KEY_FILE") == "(hidden)"
    assert line_of(text, "NCCL_PROXY") == "http://(hidden)@proxy:80"
    assert line_of(text, "NCCL_DEBUG") == r"INFO\nWARN"


def test_the_launcher_and_its_reason(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**job, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    _, text = printed(capsys)
    assert line_of(text, "started by").startswith("torchrun (")
    assert line_of(text, "rank") == "1"
    assert line_of(text, "route to the main address") == (
        "lo (from 127.0.0.1 to 127.0.0.1, which comes from MASTER_ADDR)"
    )
    assert line_of(text, "MASTER_PORT") == "29500"


def test_a_main_address_without_a_route(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "999.1.2.3")
    code, text = printed(capsys)
    assert code == 0
    assert line_of(text, "route to the main address").startswith("ERROR: ")


def test_an_old_kernel_is_warned_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.platform, "system", lambda: "Linux")
    monkeypatch.setattr(kernel.platform, "release", lambda: "4.18.0-500.el8")
    _, text = printed(capsys)
    assert line_of(text, "kernel") == "Linux 4.18.0-500.el8"
    assert "Below 5.5" in line_of(text, "kernel warning")


def test_accelerators(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 80 * 2**30

    class Module:
        @staticmethod
        def get_device_name(index: int) -> str:
            if index:
                raise RuntimeError("device 1 is asleep")
            return "Fast Card"

        @staticmethod
        def get_device_properties(index: int) -> Properties:
            return Properties()

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    _, text = printed(capsys)
    assert line_of(text, "accelerators") == "2 of type cuda"
    assert line_of(text, "cuda:0") == "Fast Card, 80.0 GiB"
    assert line_of(text, "cuda:1") == "ERROR: RuntimeError: device 1 is asleep"


def test_a_part_that_fails_leaves_the_rest(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("no such thing")

    monkeypatch.setattr(psutil, "net_if_addrs", broken)
    code, text = printed(capsys)
    assert code == 0
    assert line_of(text, "network") == "ERROR: OSError: no such thing"
    assert line_of(text, "cpu") == "no (default)"


def test_a_part_that_hangs_is_given_up(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def asleep(check_available: bool = False) -> Any:
        time.sleep(1.0)
        return None

    monkeypatch.setattr(command, "PATIENCE", 0.3)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", asleep)
    code, text = printed(capsys)
    assert code == 0
    assert line_of(text, "devices") == "ERROR: no answer within 0.3 s"
    assert line_of(text, "cpu") == "no (default)"


def test_started_as_a_command(tmp_path: Path) -> None:
    environ = {**os.environ, "LOCKSTEP_LOG_LEVEL": "INFO"}
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "env", "--json", "--config-file", str(written(tmp_path, "debug: true\n"))],
        env=environ,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["settings"]["log_level"] == {"value": "INFO", "reason": "environment LOCKSTEP_LOG_LEVEL"}
    assert facts["variables"]["LOCKSTEP_LOG_LEVEL"] == "INFO"


def test_where_torch_cannot_be_imported() -> None:
    """The one thing most worth reporting must not stop the report."""
    code = "import sys; sys.modules['torch'] = None; from lockstep.cli import main; sys.exit(main(['env']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("versions", "devices", "process"):
        assert line_of(done.stdout, name).startswith("ERROR: ModuleNotFoundError"), done.stdout
    assert line_of(done.stdout, "torch") == version("torch")
    assert line_of(done.stdout, "started by").startswith("none (")
    assert "GiB" in line_of(done.stdout, "memory")
    assert line_of(done.stdout, "gradient_accumulation_steps") == "1 (default)"
