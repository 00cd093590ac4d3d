"""The checks of one machine: each a function from a `Situation` to a `Finding`, one concept a file.

They are listed by name and imported where they are run, in a process of their own: what one of them imports, breaks or
waits for is nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Check:
    """One entry of the list."""

    name: str
    """What is looked at; the name of its finding."""
    place: str
    """The module and function that look, as ``module:function`` in this room."""
    limit: float = 10.0
    """Seconds after which it is given up."""


CHECKS: tuple[Check, ...] = (Check(name="kernel", place="kernel:version"),)
"""What is looked at, in the order in which it is shown."""
