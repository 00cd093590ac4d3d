"""Phrases that do not appear in what users read: string constants of the source, the documentation, the newest changes.

One term per concept, the field's own. ``STILL`` says how many are left where not all is cured: its numbers only shrink.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.runner import ROOT

SOURCE = ROOT / "src" / "lockstep"

PHRASES = {
    r"meeting( point)?s?\b": "rendezvous, store",
    r"time-outs?\b": "timeout",
    r"set-ups?\b": "setup",
    r"data sets?\b": "dataset",
    r"bad numbers?\b": "NaN or inf",
    r"is no (number|file|folder|tensor|model|script|rank|device)\b": "is not a",
    r"told to (go|stop|leave)\b": "preempted, asked to stop",
    r"goes? on\b": "continue",
    r"gone on\b|going on\b": "continue, resume",
    r"(has|have) come to\b": "arrived at",
    r"the line to (it|another|a)\b": "the connection to",
    r"(machines|nodes|ranks|processes) meet\b": "rendezvous",
    r"march": "are in step",
    r"\b[Mm]end (it|that|this|them)\b": "correct",
    r"stumbled": "failed",
    r"without a word\b": "without a message",
    r"further settings\b": "additional settings",
    r"left as it is\b": "not changed",
    r"is there already\b": "exists",
    r"in its usual place\b": "default",
}
"""What may not appear -> what to write instead."""

STILL: dict[str, int] = {
    "README.md": 1,  # its first sentence
    "src/lockstep/data": 17,
    "src/lockstep/numerics": 13,
    "src/lockstep/launch": 12,
    "src/lockstep/guard": 7,
    "src/lockstep/strategies": 6,
    "src/lockstep/testing": 6,
    "src/lockstep/comm": 5,
    "src/lockstep/checkpoint": 4,
    "src/lockstep/model_files": 3,
    "src/lockstep/offload": 3,
    "src/lockstep/optim": 3,
    "src/lockstep/accelerator.py": 2,
    "src/lockstep/blackbox": 2,
    "src/lockstep/estimate": 2,
    "src/lockstep/process_group": 2,
    "src/lockstep/traces": 2,
    "src/lockstep/torch_internals": 1,
    "src/lockstep/__init__.py": 1,
    "src/lockstep/errors.py": 1,
    "src/lockstep/rundir": 1,
    "src/lockstep/storage": 1,
    "src/lockstep/tracking": 1,
    "CHANGELOG.md": 0,
}
"""Page, package or module -> how many are left there. What is not named has none."""


def hits(text: str) -> Iterator[str]:
    for phrase, instead in PHRASES.items():
        for found in re.finditer(phrase, text):
            yield f"{found[0]!r}: write {instead}"


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """String constants that have a space in them: what is shown, and docstrings."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value


def in_source(path: Path) -> list[str]:
    return [f"{path.relative_to(ROOT)}:{line}: {hit}" for line, text in strings(path) for hit in hits(text)]


def in_page(path: Path, text: str) -> list[str]:
    # Code and output are held by the tests of the code that prints them.
    prose = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.S)
    prose = re.sub(r"<!--.*?-->", "", prose, flags=re.S)
    return [f"{path.relative_to(ROOT)}: {hit}" for hit in hits(re.sub(r"`[^`\n]*`", "", prose))]


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def is_log(path: Path) -> bool:
    return path.parent.name in ("project", "decisions")


def judge(name: str, found: list[str]) -> None:
    known = STILL.get(name, 0)
    assert len(found) <= known, "\n".join([f"{name}: {known} known, {len(found)} found:", *found])


@pytest.mark.parametrize("package", sorted(SOURCE.iterdir()), ids=lambda path: path.name)
def test_strings_of_packages(package: Path) -> None:
    files = sorted(package.rglob("*.py")) if package.is_dir() else [package] if package.suffix == ".py" else []
    judge(package.relative_to(ROOT).as_posix(), [hit for path in files for hit in in_source(path)])


@pytest.mark.parametrize("page", [path for path in pages() if not is_log(path)], ids=lambda path: path.name)
def test_pages(page: Path) -> None:
    judge(page.relative_to(ROOT).as_posix(), in_page(page, page.read_text(encoding="utf-8")))


def test_the_newest_changes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.split(r"^## ", text, flags=re.M)[1]
    judge("CHANGELOG.md", in_page(ROOT / "CHANGELOG.md", newest))


def test_what_is_named_as_left_exists() -> None:
    assert [name for name in STILL if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(("text", "count"), [("a time-out", 1), ("the meeting point", 1), ("a timeout, goes one", 0)])
def test_phrases_are_found(text: str, count: int) -> None:
    assert len(list(hits(text))) == count
