"""Which batches' numbers are recorded, and where: one setting, as a value and as the text that a variable carries."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.config.resolve import resolve
from lockstep.errors import ConfigError

FORMATS = ("jsonl", "parquet")
_FORM = "Give FOLDER, FOLDER@every=10, FOLDER@149,150, and with @parquet or a further ,parquet that form of file."
_ITEM = r"(?:every=[^,@]*|-?\d+|parquet|jsonl)"
_SUFFIX = re.compile(rf"(?P<path>.*)@(?P<items>{_ITEM}(?:,{_ITEM})*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class NumericsRecord:
    """A trace that was asked for."""

    path: str
    """The folder; each rank writes a file of its own into it."""
    every: int = 1
    """Every how many batches, from batch 0."""
    batches: tuple[int, ...] | None = None
    """These batches only; None for no such choice."""
    format: str = "jsonl"
    """ "jsonl", or "parquet", which needs pyarrow."""

    def __post_init__(self) -> None:
        problems = []
        if not self.path:
            problems.append(f"numerics_record names no folder. {_FORM}")
        if self.every < 1:
            problems.append(f"numerics_record: every={self.every} must be 1 or more.")
        if self.batches is not None and any(batch < 0 for batch in self.batches):
            problems.append(f"numerics_record: batches {_numbers(self.batches)} must be 0 or more; the first one is 0.")
        if self.batches is not None and self.every != 1:
            problems.append(
                f"numerics_record: every={self.every} and batches {_numbers(self.batches)} are two answers to one "
                "question. Give one of them."
            )
        if self.format not in FORMATS:
            problems.append(f"numerics_record: the form {self.format!r} is unknown. Allowed: {', '.join(FORMATS)}.")
        if problems:
            raise ConfigError.of(problems)

    def text(self) -> str:
        """As a variable or a flag carries it."""
        items = [] if self.every == 1 else [f"every={self.every}"]
        items += [str(batch) for batch in self.batches or ()]
        items += [] if self.format == "jsonl" else [self.format]
        # A folder whose name ends as a choice of batches does is followed by a choice, so that it is not taken for one.
        if not items and _SUFFIX.fullmatch(self.path):
            items = ["jsonl"]
        return f"{self.path}@{','.join(items)}" if items else self.path


def parse_recording(text: str, name: str = "numerics_record") -> NumericsRecord | None:
    """The setting in its text form; empty means off."""
    if not text.strip():
        return None
    match = _SUFFIX.fullmatch(text)
    if match is None:
        return NumericsRecord(path=os.path.abspath(text))
    every, batches, form = 1, [], "jsonl"
    for item in match["items"].split(","):
        if item.startswith("every="):
            if not item[6:].isdecimal():
                raise ConfigError(f"{name}={text!r}: {item!r} is not a whole number of batches. {_FORM}")
            every = int(item[6:])
        elif item in FORMATS:
            form = item
        else:
            batches.append(int(item))
    path = os.path.abspath(match["path"]) if match["path"] else ""
    chosen = tuple(sorted(set(batches))) if batches else None
    return NumericsRecord(path=path, every=every, batches=chosen, format=form)


def read_recording(environ: Mapping[str, str]) -> NumericsRecord | None:
    """What the environment asks for; None when nothing is to be recorded."""
    return resolve("numerics_record", None, None, environ, parse_recording).value


def _numbers(batches: tuple[int, ...]) -> str:
    return ", ".join(str(batch) for batch in batches)
