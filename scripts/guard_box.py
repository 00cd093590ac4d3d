"""Draws the failure screen of a real run: ``python scripts/guard_box.py [docs/images/guard.svg]``.

A script with a mistake in one line runs on two processes under `lockstep launch`, on a terminal; what is shown last
becomes an SVG for the README.
"""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, LINES = 100, 40
SCRIPT = """\
import torch
from lockstep import Accelerator

accelerator = Accelerator(cpu=True)


def evaluate(samples):
    rows = samples[accelerator.process_index :: 2]  # 8 on rank 0, 7 on rank 1
    return accelerator.gather(torch.tensor(rows))


evaluate(list(range(15)))
"""


def main() -> None:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images/guard.svg")
    shown = run()
    start = shown.rindex("╭─", 0, shown.rindex("╰─"))
    box = shown[shown.rfind("\n", 0, start) + 1 :].strip()
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text.from_ansi(box), soft_wrap=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(target), title="$ lockstep launch --num_processes 2 train.py", unique_id="guard")
    # No web fonts.
    drawn = "\n".join(line.rstrip() for line in target.read_text().splitlines() if "cdnjs.cloudflare.com" not in line)
    target.write_text(drawn.replace('-Regular"),', '-Regular");').replace('-Bold"),', '-Bold");') + "\n")
    print(f"{target}: {target.stat().st_size / 1000:.0f} kB")


def run() -> str:
    """What the launcher shows on a terminal."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        argv = [sys.executable, "-m", "lockstep", "launch", "--cpu", "--num_processes", "2", "train.py"]
        environ = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
        environ.pop("NO_COLOR", None)
        process = subprocess.Popen(
            argv, cwd=folder, env=environ, stdout=writer, stderr=writer, stdin=subprocess.DEVNULL
        )
        os.close(writer)
        parts = []
        while True:
            try:
                data = os.read(reader, 65536)
            except OSError:  # how a terminal says that its other side is closed
                break
            if not data:
                break
            parts.append(data)
        process.wait()
    return b"".join(parts).decode().replace("\r\n", "\n")


if __name__ == "__main__":
    main()
