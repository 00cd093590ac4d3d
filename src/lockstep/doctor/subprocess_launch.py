"""A job that the doctor starts by ``lockstep launch`` and waits for: it ends when the doctor is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def launch(words: Sequence[str], environ: Mapping[str, str], output: TextIO | None = None) -> int:
    """Start ``lockstep launch`` with these words and wait for it; ``output`` takes what it prints. Its exit code."""
    command = [sys.executable, "-m", "lockstep", "launch", *words]
    child = subprocess.Popen(command, env=dict(environ), stdout=output)
    with _passing_on(child):
        code = child.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _passing_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    def pass_on(number: int, frame: object) -> None:
        # Ctrl-C at a terminal reaches the launcher too: a second one would have it kill its ranks.
        if number == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty():
            return
        with suppress(ProcessLookupError):
            os.kill(child.pid, number)

    # What is ignored stays so: by nohup, or of a shell's background job.
    handled = [number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
