"""The bar of a search for a batch size: read from a real terminal, and absent where there is none."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

SCRIPT = """
from lockstep import find_executable_batch_size

@find_executable_batch_size(starting_batch_size=64, search="binary")
def train(size):
    if size > 45:
        raise MemoryError
    return size

print("found", train())
"""


def in_a_terminal(script: Path) -> str:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    child = subprocess.Popen([sys.executable, str(script)], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    read = b""
    with suppress(OSError):  # so Linux says that the last end is closed
        while chunk := os.read(ours, 4096):
            read += chunk
    os.close(ours)
    assert child.wait(60) == 0, read.decode()
    return read.decode()


def test_a_terminal_shows_which_attempt_it_is_and_what_is_known(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    written = in_a_terminal(script)
    shown = re.findall(r"batch size: (attempt [^|]*\)) \|", written)
    assert list(dict.fromkeys(shown)) == [
        # 32, 16, 8, 4, 2 and 1, then at most 8 trials; and only 3 when what is between is known
        "attempt 2 of at most 15, trying 32 (64 does not fit)",
        "attempt 3 of at most 7, trying 45 (32 fits, 64 does not)",
        "attempt 4 of at most 7, trying 51 (45 fits, 64 does not)",
    ]
    # Lines have a line of their own, and the bar is gone before the last run.
    lines = [re.split(r"\r+", line.rstrip("\r"))[-1] for line in written.split("\n")]
    assert "INFO lockstep.memory: batch size 45 fits; trial 2 of at most 8: 51" in lines
    assert "found 45" in lines


def test_without_a_terminal_there_are_lines_alone(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "found 45\n"
    assert [line.partition(": ")[2] for line in done.stderr.splitlines()] == [
        "batch size 64 does not fit: rank 0 ran out of memory; trying 32 [LS3008]",
        "batch size 32 fits; trial 1 of at most 8: 45",
        "batch size 45 fits; trial 2 of at most 8: 51",
        "batch size 51 does not fit: rank 0 ran out of memory",
        "batch size 45: 51 does not fit. Running to the end",
    ]
