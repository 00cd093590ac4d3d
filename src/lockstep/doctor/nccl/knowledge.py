"""What is known about NCCL's messages: ``knowledge.yaml``, read and checked.

Nothing here guesses: a line that no entry was written for stays unknown, and is shown as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from importlib import resources
from typing import Any

from lockstep.errors import ConfigError

LEVELS = ("error", "warning", "note")
ROLES = ("cause", "follows")
_FILE = "knowledge.yaml"


@dataclass(frozen=True, kw_only=True, eq=False)
class LogPattern:
    """One kind of message."""

    id: str
    """Its name, which does not change."""
    regex: re.Pattern[str]
    """Found anywhere in the line."""
    level: str
    """How bad it is: "error", "warning", or "note" for what is normal on many nodes."""
    meaning: str
    """What it says, in plain words."""
    remedies: tuple[str, ...]
    """What has helped, the likeliest first."""
    source: str
    """The public page or thread that it comes from."""
    examples: tuple[str, ...]
    role: str = ""
    """Of an error: "cause", or "follows" when the cause is on another rank or in an earlier line."""
    info: bool = False
    """Whether it is looked for in lines of the level INFO too."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Knowledge:
    """All entries, in their order: the first that matches counts."""

    entries: tuple[LogPattern, ...]

    def find(self, line: str) -> LogPattern | None:
        """The entry for a warning of NCCL's, or for a line of torch's."""
        return _first(self.entries, line)

    def find_info(self, line: str) -> LogPattern | None:
        """The entry for a line of the level INFO."""
        return _first(self._info, line)

    @cached_property
    def _info(self) -> Sequence[LogPattern]:
        return [entry for entry in self.entries if entry.info]


def _first(entries: Iterable[LogPattern], line: str) -> LogPattern | None:
    return next((entry for entry in entries if entry.regex.search(line)), None)


@cache
def load() -> Knowledge:
    """The entries that come with the library."""
    return parse(resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8"))


def parse(text: str, name: str = _FILE) -> Knowledge:
    """Read entries, and say all that is wrong with them at once."""
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is no YAML: {error}") from None
    if not isinstance(found, list):
        raise ConfigError(f"{name} has to be a list of entries.")
    problems: list[str] = []
    entries = [entry for number, raw in enumerate(found, 1) if (entry := _entry(raw, number, problems)) is not None]
    for entry in entries:
        if sum(other.id == entry.id for other in entries) > 1:
            problems.append(f"{entry.id}: two entries have this id")
        problems += [f"{entry.id}: its regex does not match its example {line!r}" for line in _missed(entry)]
    if problems:
        raise ConfigError.of([f"{name}: {problem}." for problem in dict.fromkeys(problems)])
    return Knowledge(entries=tuple(entries))


def _missed(entry: LogPattern) -> list[str]:
    return [line for line in entry.examples if not entry.regex.search(line)]


def _entry(raw: Any, number: int, problems: list[str]) -> LogPattern | None:
    if not isinstance(raw, Mapping):
        problems.append(f"entry {number} is no table")
        return None
    name = f"{raw.get('id', f'entry {number}')}"
    before = len(problems)
    known = {field.name for field in fields(LogPattern)}
    needed = known - {"role", "info"}
    problems += [f"{name}: {key} is missing" for key in sorted(needed - set(raw))]
    problems += [f"{name}: {key} is not a key of an entry" for key in sorted(set(map(str, raw)) - known)]
    if len(problems) > before:
        return None
    for key in ("id", "regex", "meaning", "source"):
        if not isinstance(raw[key], str) or not raw[key].strip():
            problems.append(f"{name}: {key} has to be a text")
    for key in ("remedies", "examples"):
        if not isinstance(raw[key], list) or not raw[key] or not all(isinstance(item, str) for item in raw[key]):
            problems.append(f"{name}: {key} has to be a list of texts, at least one")
    if raw["level"] not in LEVELS:
        problems.append(f"{name}: level is {raw['level']!r}; allowed: {', '.join(LEVELS)}")
    elif raw["level"] == "error" and raw.get("role") not in ROLES:
        problems.append(f"{name}: role is {raw.get('role')!r}; allowed for an error: {', '.join(ROLES)}")
    if not str(raw["source"]).startswith("https://"):
        problems.append(f"{name}: source has to be an address (https://…)")
    try:
        regex = re.compile(str(raw["regex"]))
    except re.error as error:
        problems.append(f"{name}: regex is none ({error})")
    if len(problems) > before:
        return None
    return LogPattern(
        id=raw["id"],
        regex=regex,
        level=raw["level"],
        meaning=raw["meaning"],
        remedies=tuple(raw["remedies"]),
        source=raw["source"],
        examples=tuple(raw["examples"]),
        role=raw.get("role", ""),
        info=bool(raw.get("info", False)),
    )
