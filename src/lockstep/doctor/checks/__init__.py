"""The checks of one node: each a function from a `DoctorContext` to a `Finding`, one concept a file.

They are listed by name and imported where they are run, in a process of their own: what one of them imports, breaks or
waits for is nobody else's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DoctorCheck:
    """One entry of the list."""

    name: str
    """What is looked at; the name of its finding."""
    place: str
    """The module and function that look, as ``module:function`` in this package."""
    limit: float = 10.0
    """Seconds after which it is given up."""


CHECKS: tuple[DoctorCheck, ...] = (
    DoctorCheck(name="kernel", place="kernel:version"),
    DoctorCheck(name="cores", place="cpu:cores"),
    DoctorCheck(name="threads", place="cpu:threads"),
    DoctorCheck(name="memory", place="memory:allowed"),
    DoctorCheck(name="shared memory", place="memory:shared"),
    DoctorCheck(name="limits", place="ulimits:all_of_them"),
    DoctorCheck(name="disk", place="disk:room", limit=15.0),
    DoctorCheck(name="host name", place="names:own"),
    DoctorCheck(name="interfaces", place="network:chosen"),
    DoctorCheck(name="IPv6", place="network:ipv6"),
    DoctorCheck(name="main port", place="ports:main_port"),
    DoctorCheck(name="firewall", place="ports:firewall"),
    DoctorCheck(name="accelerators", place="devices:by_torch", limit=60.0),
    DoctorCheck(name="GPU health", place="devices:health", limit=20.0),
)
"""What is looked at, in the order in which it is shown."""
