"""Run the tests of a make target that CI does not run, and keep their last output and the result in docs/project/.

The page is written for a reader on another machine: no absolute paths, and enough about this one (cores, versions)
to judge the timings.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {
    "soak": ["-m", "soak and not soak_long", "-v"],
    # Single tests take up to ten minutes there: no stacks in the page before that.
    "soak-long": ["-m", "soak_long", "-v", "-o", "faulthandler_timeout=1800"],
    "floor": ["tests/unit", "tests/integration", "tests/distributed", "tests/faults"],
}
"""Name of the make target and of the page -> which tests."""
ARGUMENTS = ["-n", "3", "--dist", "loadgroup", "--no-loadscope-reorder", "--durations=20"]
KEPT_LINES = 500
NOTHING_SELECTED = 5  # pytest's exit code when no test matches


def run(target: str) -> tuple[int, list[str], float]:
    """Run pytest; show its output as it comes, and return its exit code, its lines, and the seconds it took."""
    started = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "pytest", *TARGETS[target], *ARGUMENTS],
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


def page(target: str, code: int, lines: list[str], seconds: float) -> str:
    """The page, as Markdown."""
    left_out = max(0, len(lines) - KEPT_LINES)
    note = f"The first {left_out} lines are left out.\n\n" if left_out else ""
    result = "passed" if code == 0 else f"FAILED (pytest exit code {code})"
    output = "\n".join(lines[left_out:]).replace("```", "'''")
    return (
        f"# The last run of `make {target}`\n\n"
        f"- Command: `pytest {shlex.join([*TARGETS[target], *ARGUMENTS])}`\n"
        f"- Result: **{result}** after {datetime.timedelta(seconds=round(seconds))}\n"
        f"- Date: {datetime.date.today().isoformat()}\n"
        f"- On: {os.cpu_count()} cores, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, torch {version('torch')}\n\n"
        f"{note}```text\n{output}\n```\n"
    )


def main() -> int:
    """Run, write the page, and pass pytest's exit code on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    target = parser.parse_args().target
    kept = ROOT / "docs" / "project" / f"{target}.md"
    code, lines, seconds = run(target)
    if code == NOTHING_SELECTED:
        print(f"No test is selected: {kept.name} is left as it is.", file=sys.stderr)
    else:
        kept.write_text(page(target, code, lines, seconds), encoding="utf-8")
        print(f"Kept in {kept.relative_to(ROOT)}.")
    return code


if __name__ == "__main__":
    sys.exit(main())
