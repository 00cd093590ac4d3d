"""What is left for torchrun when a rank ends, in processes of their own; read as torchrun reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lockstep.rundir import error_file

START = "import sys\nfrom lockstep.rundir.error_file import ErrorFile\nkept = ErrorFile()\nkept.install(0)\n"
END = "\nimport atexit\natexit.register(kept.uninstall)\n"


def run(path: Path, code: str, **more: str) -> tuple[int, Any]:
    """The exit code, and what the file says."""
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path), **more}
    environ = {name: value for name, value in environ.items() if name != "LOCKSTEP_LAUNCH" or name in more}
    argv = [sys.executable, "-c", START + END + code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environ, check=False)
    assert list(path.parent.iterdir()) in ([], [path])
    return done.returncode, json.loads(path.read_text())["message"] if path.exists() else None


def test_an_exception(tmp_path: Path) -> None:
    code, said = run(tmp_path / "error", "def f():\n    raise ValueError('no such sample')\nf()\n")
    assert (code, said["message"]) == (1, "ValueError: no such sample")
    assert said["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last):")
    assert said["extraInfo"]["py_callstack"].endswith("in f\nValueError: no such sample")
    assert abs(int(said["extraInfo"]["timestamp"]) - time.time()) < 60


def test_exit_with_a_code_or_a_message(tmp_path: Path) -> None:
    code, said = run(tmp_path / "error", "def f():\n    sys.exit(3)\nf()\n")
    assert (code, said["message"]) == (3, "SystemExit: 3")
    assert "in f\n" in said["extraInfo"]["py_callstack"]
    (tmp_path / "error").unlink()
    code, said = run(tmp_path / "error", "sys.exit('no data')")
    assert (code, said["message"]) == (1, "SystemExit: no data")


def test_a_rank_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    for end in ("", "sys.exit()", "sys.exit(0)", "try:\n    sys.exit(2)\nexcept SystemExit:\n    pass\nsys.exit(0)"):
        assert run(tmp_path / "error", end) == (0, None), end


def test_the_exception_that_ended_it_counts_not_an_exit_that_was_caught(tmp_path: Path) -> None:
    end = "try:\n    sys.exit(2)\nexcept SystemExit:\n    pass\nraise ValueError('later')"
    assert run(tmp_path / "error", end)[1]["message"] == "ValueError: later"


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "error").write_text('{"message": "by the script"}')
    assert run(tmp_path / "error", "1 / 0") == (1, "by the script")


def test_lockstep_launch_reads_the_last_words_instead(tmp_path: Path) -> None:
    assert run(tmp_path / "error", "1 / 0", LOCKSTEP_LAUNCH="1") == (1, None)


def test_a_folder_that_is_not_there_hides_no_error(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", START + END + "1 / 0"]
    environ = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "nowhere" / "error")}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environ, check=False)
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert len(done.stderr.split("Traceback")) == 2


def test_a_consequence_is_dated_later_so_that_it_is_not_the_root_cause(tmp_path: Path) -> None:
    lost = "raise RuntimeError('[gloo] Connection closed by peer')"
    before = int(time.time())
    _, said = run(tmp_path / "error", lost)
    assert int(said["extraInfo"]["timestamp"]) >= before + error_file._LATER
