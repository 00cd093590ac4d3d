"""Run the tests marked `soak` and keep their last output, with the command and the result, in docs/soak.md.

The page is written for a reader on another machine: no absolute paths, and enough about this one (cores, versions)
to judge the timings.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "soak.md"
ARGUMENTS = ["-m", "soak", "-v", "--durations=20"]
KEPT_LINES = 500
NOTHING_SELECTED = 5  # pytest's exit code when no test matches


def run() -> tuple[int, list[str], float]:
    """Run pytest; show its output as it comes, and return its exit code, its lines, and the seconds it took."""
    started = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "pytest", *ARGUMENTS],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        print(line, end="", flush=True)
        lines.append(without_paths(line.rstrip()))
    return child.wait(), lines, time.monotonic() - started


def without_paths(line: str) -> str:
    """Take folders and the user of this machine out of a line."""
    folders = {
        str(ROOT): ".",
        sys.prefix: "<venv>",
        sys.base_prefix: "<python>",
        tempfile.gettempdir(): "<tmp>",
        str(Path.home()): "~",
    }
    for folder in sorted((folder for folder in folders if len(folder) > 1), key=len, reverse=True):
        line = line.replace(folder, folders[folder])
    return re.sub(r"pytest-of-[^/\s]+", "pytest", line)  # the folder is named after the user


def page(code: int, lines: list[str], seconds: float) -> str:
    """The page, as Markdown."""
    left_out = max(0, len(lines) - KEPT_LINES)
    note = f"The first {left_out} lines are left out.\n\n" if left_out else ""
    result = "passed" if code == 0 else f"FAILED (pytest exit code {code})"
    output = "\n".join(lines[left_out:]).replace("```", "'''")
    return (
        "# The last soak run\n\n"
        f"- Command: `make soak` (`pytest {' '.join(ARGUMENTS)}`)\n"
        f"- Result: **{result}** after {datetime.timedelta(seconds=round(seconds))}\n"
        f"- Date: {datetime.date.today().isoformat()}\n"
        f"- On: {os.cpu_count()} cores, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, torch {version('torch')}\n\n"
        f"{note}```text\n{output}\n```\n"
    )


def main() -> int:
    """Run, write the page, and pass pytest's exit code on."""
    code, lines, seconds = run()
    if code == NOTHING_SELECTED:
        print("No test is marked `soak`: nothing was run, docs/soak.md is left as it is.", file=sys.stderr)
    else:
        PAGE.write_text(page(code, lines, seconds), encoding="utf-8")
        print(f"Kept in {PAGE.relative_to(ROOT)}.")
    return code


if __name__ == "__main__":
    sys.exit(main())
