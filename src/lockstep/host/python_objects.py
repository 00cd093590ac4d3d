"""What Python allows to be done to objects and nobody should do without a reason; the reasons are here."""

from __future__ import annotations

import ctypes
from typing import Any


def keep_forever(thing: Any) -> None:
    """Have an object outlive the process: its end would wait for threads, or take down what belongs to another process.

    A list that is never emptied would not do: Python clears modules when it ends, and their objects with them.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def turn_into(thing: Any, made: Any) -> None:
    """Make one object what another is: whoever holds it, and nobody knows who does, holds the other from now on.

    In a forked child the process group is held by loaders, models and closures of the parent's; each must find out that
    it may not be used. An attribute that every call asks for would cost every call in every rank.
    """
    thing.__class__ = type(made)
    thing.__dict__.clear()
    thing.__dict__.update(made.__dict__)
