"""SIGTERM with a report before it, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

START = """
import os, signal, sys, threading, time
from lockstep.guard.sigterm import SigtermReport
def report(ends):
    os.write(1, f"report {ends}\\n".encode())
"""
ASK = "threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()\n"


def run(code: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, timeout=60, check=False)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


# In C, where no Python handler runs, and in Python.
@pytest.mark.parametrize("busy", ["import ctypes; ctypes.CDLL(None).pause()", "while True: pass"])
def test_the_report_comes_first_and_the_signal_ends_the_process(busy: str) -> None:
    # pause() returns when a handler has run: so it is called again.
    code = f"kept = SigtermReport(report)\n{ASK}while True:\n    {busy}\n"
    assert run(code) == (-signal.SIGTERM, "report True\n")


def test_a_report_that_fails_ends_the_process_too() -> None:
    assert run(f"kept = SigtermReport(lambda ends: 1 / 0)\n{ASK}time.sleep(20)\n") == (-signal.SIGTERM, "")


@pytest.mark.parametrize("first", [True, False])
def test_the_handler_of_the_script_stays(first: bool) -> None:
    lines = ["signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'mine\\n'))", "kept = SigtermReport(report)"]
    code = "\n".join(lines if first else lines[::-1])
    code, out = run(f"{code}\n{ASK}time.sleep(1)\nkept.close()\n")
    assert (code, sorted(out.splitlines())) == (0, ["mine", "report False"])


def test_after_it_is_closed_nothing_is_left() -> None:
    left = (
        "print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.set_wakeup_fd(-1), threading.active_count())"
    )
    assert run(f"SigtermReport(report).close()\n{left}") == (0, "True -1 1\n")


def test_a_child_that_is_ended_at_once_does_not_end_its_parent() -> None:
    code = """
kept = SigtermReport(report)
for _ in range(50):
    child = os.fork()
    if not child:
        time.sleep(20)
    os.kill(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
kept.close()
print("lives")
"""
    assert run(code) == (0, "lives\n")


def test_the_wakeup_pipe_of_an_event_loop_stays() -> None:
    code = f"""
import asyncio
async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print, "loop")
    kept = SigtermReport(report)
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.sleep(0.1)
    {ASK.strip()}
    await asyncio.sleep(20)
asyncio.run(main())
"""
    assert run(code) == (-signal.SIGTERM, "loop\nreport True\n")
