"""What the user's script says around a line: who comes to it, and in which loop it is."""

from __future__ import annotations

import ast
import linecache
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from lockstep.rundir.code_frames import CodeFrame, shorten

Reader = Callable[[str], Sequence[str]]
"""File name -> its lines; empty where it cannot be read."""

_BY_RANK = re.compile(
    r"is_(local_|last_)?(main_)?process\b|process_index|\b(global_|local_|node_)?rank\b|get_rank\(|is_(main|master)\b"
    r"|is_rank_?(zero|0)",
    re.IGNORECASE,
)
_DECORATORS = re.compile(r"\bon_((local_)?main_|last_|local_)?process\b")
_LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)

_LARGEST = 4 << 20
"""Bytes of a script that is looked into."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop around a line."""

    line: int
    """Where it begins."""
    last: int
    """Where it ends."""
    text: str
    """Its first line."""
    endless: bool
    """Whether it is a ``while``."""


@dataclass(frozen=True, kw_only=True)
class LineContext:
    """What is around one line."""

    text: str = ""
    """The line itself."""
    condition: str = ""
    """What only some ranks pass on the way to it: "under `if accelerator.is_main_process:` (line 29)"."""
    branch: tuple[int, int] = (0, 0)
    """First and last line of the part under that condition."""
    choice: int = 0
    """The line of that condition."""
    leaves: str = ""
    """Where other ranks leave before they come to the line, the statement by which they do: "break"."""
    loops: tuple[Loop, ...] = ()
    """Its loops, innermost first."""


def read_lines(path: str) -> Sequence[str]:
    """The lines of a file, as it is now."""
    with suppress(OSError):  # there may be no working directory any more
        path = os.path.abspath(path)
    # The path may stem from a stranger's run: a pipe or a device would never end, nor would /proc/kmsg, of size 0.
    with suppress(OSError, ValueError):
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode) or not 0 < about.st_size <= _LARGEST:
            return ()
    linecache.checkcache(path)
    return linecache.getlines(path)


def split(site: str) -> tuple[str, int]:
    """``train.py:27`` -> the file and the line; line 0 where there is none."""
    path, _, line = site.rpartition(":")
    return (path, int(line)) if path and line.isdecimal() else (site, 0)


def excerpt(site: str, function: str = "") -> CodeFrame | None:
    """A line of the user's with those around it; None where it cannot be read."""
    path, number = split(site)
    lines = read_lines(path) if number else ()
    if not 0 < number <= len(lines):
        return None
    first = max(1, number - 2)
    source = tuple(line.rstrip()[:300] for line in lines[first - 1 : number + 2])
    return CodeFrame(file=shorten(path), line=number, function=function, first=first, source=source)


def setting(site: str, read: Reader) -> LineContext:
    """What is around a line of the user's."""
    path, number = split(site)
    lines = read(path) if number else ()
    if not 0 < number <= len(lines):
        return LineContext()
    text = lines[number - 1].strip()
    try:
        with warnings.catch_warnings():  # the script's own, which Python has shown when it ran it
            warnings.simplefilter("ignore")
            tree = ast.parse("".join(line if line.endswith("\n") else f"{line}\n" for line in lines))
    except (SyntaxError, ValueError, RecursionError):
        return LineContext(text=text)
    found = LineContext()
    loops = []
    for node in _around(tree, number):
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            loops.append(
                Loop(
                    line=node.lineno,
                    last=node.end_lineno or node.lineno,
                    text=lines[node.lineno - 1].strip(),
                    endless=isinstance(node, ast.While),
                )
            )
        if not found.condition:
            found = _condition(node, number)
    return replace(found, text=text, loops=tuple(loops))


def _around(tree: ast.AST, number: int) -> list[ast.AST]:
    """The nodes that hold the line, innermost first; each function begins anew: its loops are its own."""
    found: list[ast.AST] = []
    node: ast.AST | None = tree
    while node is not None:
        found.append(node)
        node = next((child for child in _statements(node) if _first(child) <= number <= _last(child)), None)
    inner = next((place for place, item in enumerate(reversed(found)) if _is_function(item)), len(found) - 1)
    return found[::-1][: inner + 1]


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            yield from child.body


def _first(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", ())
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _last(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def _condition(node: ast.AST, number: int) -> LineContext:
    """What in this node lets only some ranks come to the line."""
    if isinstance(node, ast.If) and _BY_RANK.search(ast.unparse(node.test)) and number >= node.body[0].lineno:
        body = node.body if number <= _last(node.body[-1]) else node.orelse
        if not body:
            return LineContext()
        way = "in the other branch of" if body is node.orelse else "under"
        condition = f"{way} `if {ast.unparse(node.test)}:` (line {node.lineno})"
        return LineContext(condition=condition, branch=(body[0].lineno, _last(body[-1])), choice=node.lineno)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        for decorator in node.decorator_list:
            said = ast.unparse(decorator)
            if _DECORATORS.search(said):
                condition = f"in {node.name}(), which `@{said}` runs on some ranks only"
                return LineContext(condition=condition, branch=(node.lineno, _last(node)), choice=node.lineno)
    for field in ("body", "orelse"):
        block = getattr(node, field, None)
        if not isinstance(block, list):
            continue
        for statement in block:
            if isinstance(statement, ast.If) and _last(statement) < number and _leaves_by_rank(statement):
                block_end = _last(block[-1])
                if _first(block[0]) <= number <= block_end:
                    leaves = ast.unparse(statement.body[-1])
                    condition = f"after `if {ast.unparse(statement.test)}: {leaves}` (line {statement.lineno})"
                    branch = (_last(statement) + 1, block_end)
                    return LineContext(condition=condition, branch=branch, choice=statement.lineno, leaves=leaves)
    return LineContext()


def _leaves_by_rank(node: ast.If) -> bool:
    return isinstance(node.body[-1], _LEAVES) and not node.orelse and bool(_BY_RANK.search(ast.unparse(node.test)))
