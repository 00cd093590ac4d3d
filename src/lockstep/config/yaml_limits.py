"""How large a configuration file may be: some hundred times what any option needs, and far from what would hurt."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError

LARGEST = 1 << 20
"""Bytes of a file."""
DEEPEST = 32
"""Levels that are nested in it."""
MOST_VALUES = 20_000
"""Values in it."""
_SIMPLER = "A configuration file has a few dozen lines `key: value`; check that this is one."


def check(path: Path, events: Iterable[Any]) -> None:
    """Refuse what would take long or overflow the stack, before anything is built from it.

    A name for a part (``&a``, ``*a``) stands for all that it holds each time, and can hold other names.
    """
    import yaml

    inside: list[tuple[str | None, int]] = []
    sizes: dict[str, int] = {}
    count = 0
    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            inside.append((event.anchor, count))
            if event.anchor:
                sizes[event.anchor] = 0
            if len(inside) > DEEPEST:
                raise ConfigError(f"{path}, line {line}: more than {DEEPEST} levels are nested here. {_SIMPLER}")
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            anchor, before = inside.pop()
            if anchor:
                sizes[anchor] = count - before
        elif isinstance(event, yaml.AliasEvent):
            count += sizes.get(event.anchor or "", 0)
        elif isinstance(event, yaml.ScalarEvent) and event.anchor:
            sizes[event.anchor] = 1
        count += 1
        if count > MOST_VALUES:
            raise ConfigError(
                f"{path}, line {line}: the file holds more than {MOST_VALUES} values, those that are repeated by an "
                f"alias counted each time. {_SIMPLER}"
            )
