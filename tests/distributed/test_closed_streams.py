"""Commands whose standard streams are closed, or have no reader: the exit code is that of what they did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import in_soak

SCRIPT = """
import sys
from lockstep import Accelerator
accelerator = Accelerator(cpu=True)
for number in range(3000):
    accelerator.print("line", number)
print("an error", file=sys.stderr)
accelerator.end_training()
sys.exit(7)
"""


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    lockstep = f"{sys.executable} -m lockstep"
    return subprocess.run(
        ["bash", "-c", f"{lockstep} {line}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "LOCKSTEP_RUN_DIR": str(folder / "runs")},
        check=False,
    )


@pytest.mark.parametrize("streams", [">&-", *in_soak("2>&-", ">&- 2>&-", "<&- >&- 2>&-", "| head -1", "2>&1 | true")])
@pytest.mark.parametrize("processes", [1, *in_soak(2)])
def test_a_job_exits_with_its_code(tmp_path: Path, processes: int, streams: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(f"launch --cpu --num_processes {processes} script.py {streams}", tmp_path)
    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr
    files = list(tmp_path.glob("runs/**/rank_0.out"))
    assert len(files) == 1
    assert files[0].read_text().splitlines()[-1] == "line 2999"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("--help >&-", 0),
        ("checkpoint ls nowhere >&- 2>&-", 2),
        ("launch --nonsense script.py 2>&-", 2),
        *(pytest.param(line, 0, marks=pytest.mark.soak) for line in ("env >&-", "env 2>&-", "env | head -1")),
    ],
)
def test_a_command_exits_with_its_code(tmp_path: Path, line: str, code: int) -> None:
    done = run(line, tmp_path)
    assert (done.returncode, done.stderr) == (code, "")


def test_what_is_opened_next_does_not_take_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from lockstep import Accelerator\n"
        "Accelerator(cpu=True).print('before')\n"
        "assert os.open('file', os.O_CREAT | os.O_WRONLY) > 2\n"
        "print('to stdout'); os.system('echo from a child; echo from a child >&2')\n"
    )
    line = f"cd {tmp_path}; {sys.executable} program.py >&- 2>&-"
    assert subprocess.run(["bash", "-c", line], timeout=60, check=False).returncode == 0
    assert (tmp_path / "file").read_text() == ""
