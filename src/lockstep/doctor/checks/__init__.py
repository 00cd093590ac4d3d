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


CHECKS: tuple[Check, ...] = (
    Check(name="kernel", place="kernel:version"),
    Check(name="cores", place="cpu:cores"),
    Check(name="threads", place="cpu:threads"),
    Check(name="memory", place="memory:allowed"),
    Check(name="shared memory", place="memory:shared"),
    Check(name="limits", place="ulimits:all_of_them"),
    Check(name="disk", place="disk:room", limit=15.0),
    Check(name="host name", place="names:own"),
    Check(name="interfaces", place="network:chosen"),
    Check(name="IPv6", place="network:ipv6"),
    Check(name="main port", place="ports:main_port"),
    Check(name="firewall", place="ports:firewall"),
    Check(name="accelerators", place="devices:by_torch", limit=60.0),
    Check(name="GPU health", place="devices:health", limit=20.0),
)
"""What is looked at, in the order in which it is shown."""
