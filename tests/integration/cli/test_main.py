"""The command as a whole: what becomes of it when nobody reads any more, or Ctrl-C is pressed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from lockstep.cli import COMMANDS

LOCKSTEP = [sys.executable, "-m", "lockstep"]


def reset() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_reader_that_has_seen_enough() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*LOCKSTEP, "doctor", "--json"], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("command", [[], ["doctor"], ["checkpoint"]])
def test_names_and_what_they_do_stand_apart(command: list[str]) -> None:
    done = subprocess.run([*LOCKSTEP, *command, "-h"], capture_output=True, text=True, timeout=60)
    lines = re.split(r"^(?:commands|parts|actions):\n", done.stdout, flags=re.MULTILINE)[1].splitlines()
    assert len({line.index(re.split(r"\s{2,}", line.strip(), maxsplit=1)[1]) for line in lines}) == 1, done.stdout
    if not command:
        assert [line.split()[0] for line in lines] == list(COMMANDS)


def test_ctrl_c_ends_it_without_a_traceback() -> None:
    reading = [*LOCKSTEP, "doctor", "nccl", "-"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(reading, **pipes, preexec_fn=reset, start_new_session=True) as process:  # type: ignore[call-overload]
        deadline = time.monotonic() + 5  # where the kernel does not say
        while "pipe" not in _waits_in(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert said == b""
    assert process.returncode == 128 + signal.SIGINT


def _waits_in(pid: int) -> str:
    """The call in the kernel that a process waits in."""
    with open(f"/proc/{pid}/wchan", encoding="ascii") as file:
        return file.read()
