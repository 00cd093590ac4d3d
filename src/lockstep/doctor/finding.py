"""What one check has found: the common form of everything the doctor says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warning", "error", "skipped"]
"""How it is: "skipped" means that it could not be looked at here, which is no failure."""

_GRAVITY: tuple[Status, ...] = ("skipped", "ok", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """What was looked at, in a word or two; the same for every node."""
    status: Status
    """How it is."""
    what: str
    """What was seen."""
    why: str = ""
    """Why it matters."""
    fix: str = ""
    """What to do about it, as a command where there is one."""
    data: dict[str, Any] = field(default_factory=dict)
    """The same for programs: values that JSON can carry."""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Finding:
        """The finding that `plain` has written."""
        return cls(**plain)


def worst(findings: Iterable[Finding]) -> Status:
    """The gravest status among them; "ok" when there are none."""
    return max((finding.status for finding in findings), key=_GRAVITY.index, default="ok")


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """All of them, for JSON."""
    return {"ok": exit_code(findings) == 0, "findings": [finding.plain() for finding in findings]}


def exit_code(findings: Iterable[Finding]) -> int:
    """1 when any of them is an error."""
    return 1 if worst(findings) == "error" else 0
