"""Standard streams that were closed when the process started, as by ``>&-``.

Their descriptors must not stay free: the next file to be opened would get one, and with it all that is printed there.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_NAMES = ("stdin", "stdout", "stderr")


def reserve() -> None:
    """Have the descriptors that are free lead nowhere."""
    for number, name in enumerate(_NAMES):
        if getattr(sys, name) is None and not _is_open(number):
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)  # or processes that are started find it closed


def replace() -> None:
    """Reserve them, and have what is printed there lead nowhere, too."""
    reserve()
    for number, name in enumerate(_NAMES):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w"))  # noqa: SIM115


def print_error(text: str) -> None:
    """Print to stderr itself: ``sys.stderr`` may lead elsewhere, as in the moment in which torch loads its compiler."""
    rest = memoryview(f"{text}\n".encode(errors="backslashreplace"))
    with suppress(OSError):  # it is closed, or nobody reads it
        while rest:
            rest = rest[os.write(2, rest) :]


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
