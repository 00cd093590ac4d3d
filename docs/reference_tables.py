"""The parts of the reference pages that the code gives: public names, commands, keys, variables, exceptions."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import lockstep
import lockstep.utils
from lockstep import codes, errors
from lockstep.cli.parsers import every_parser
from lockstep.config import env, file_keys
from lockstep.config.launch import GROUPS, LaunchConfig


def _cell(text: object) -> str:
    """Text as one cell of a table."""
    return re.sub(r"([\\|<>*_\[\]])", r"\\\1", " ".join(str(text).split()))


def _table(head: str, rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


# ---------------------------------------------------------------- public names


def _directive(module: str, name: str) -> list[str]:
    value = getattr(__import__(module, fromlist=[name]), name)
    if inspect.isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        return [f".. {kind}:: {module}.{name}", "   :members:", "   :show-inheritance:", ""]
    return [f".. autofunction:: {module}.{name}", ""] if callable(value) else []


def _section(title: str, module: str, names: list[str]) -> str:
    lines = [line for name in names for line in _directive(module, name)]
    return "\n".join([f"## {title}", "", "```{eval-rst}", *lines, "```", ""])


def api() -> str:
    """`lockstep.__all__` and what `lockstep.utils` adds, by kind."""
    names = [name for name in lockstep.__all__ if not name.startswith("__")]
    classes = [name for name in names if inspect.isclass(getattr(lockstep, name))]
    raised = [name for name in classes if issubclass(getattr(lockstep, name), BaseException)]
    options = [name for name in classes if name.endswith(("Kwargs", "Plugin", "Configuration", "Type"))]
    states = [name for name in classes if name.endswith("State")]
    functions = [name for name in names if name not in classes]
    rest = [name for name in classes if name not in {*raised, *options, *states}]
    utils = [name for name in lockstep.utils.__all__ if name not in lockstep.__all__]
    return "\n".join(
        [
            _section("Training", "lockstep", rest),
            _section("Functions", "lockstep", functions),
            _section("State", "lockstep", states),
            _section("Options", "lockstep", options),
            _section("Utilities", "lockstep.utils", utils),
            _section("Exceptions", "lockstep", raised),
        ]
    )


# ---------------------------------------------------------------- commands


def commands() -> str:
    """Every command: what it does, its usage, its options."""
    return "\n".join(line for name, parser in every_parser().items() for line in _command(name, parser))


def _command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    level = "##" if " " not in name else "###"
    yield f"{level} lockstep {name}\n"
    if parser.description:
        yield _cell(parser.description) + "\n"
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    yield f"```text\n{inspect.cleandoc(usage)}\n```\n"
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if _is_shown(action)]
        if not shown:
            continue
        title = {"positional arguments": "Argument", "options": "Option"}.get(group.title or "", group.title or "")
        rows = [(_spelling(action), _cell(_help(parser, action))) for action in shown]
        yield _table(f"{title} | Meaning", rows) + "\n"


def _is_shown(action: argparse.Action) -> bool:
    hidden = action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction)
    return not hidden and action.dest != "help"


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    return formatter._expand_help(action) if action.help else ""


def _spelling(action: argparse.Action) -> str:
    formatter = argparse.HelpFormatter("")
    value = "" if action.nargs == 0 else formatter._format_args(action, action.dest.upper())
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    # --a_b and --a-b are one option.
    names = {name.replace("_", "-"): name for name in reversed(action.option_strings)}
    spelled = [f"{name} {value}".strip() for name in reversed(names.values())]
    return ", ".join(f"`{text}`" for text in spelled)


# ---------------------------------------------------------------- settings


def variables() -> str:
    """Setting -> environment variables."""
    rows = [
        (f"`{setting}`", ", ".join(f"`{name}`" for name in names), _cell(_launch_help(setting)))
        for setting, names in env.VARIABLES.items()
    ]
    return _table("Setting | Variables | Meaning", rows)


def _launch_help(setting: str) -> str:
    texts = {option.metadata.get("setting", option.name): option.metadata["help"] for option in fields(LaunchConfig)}
    return texts.get(setting, env.MEANINGS.get(setting, ""))


def keys() -> str:
    """Key of a configuration file -> option of `lockstep launch`, by group."""
    options = {option.name: option.metadata for option in fields(LaunchConfig)}
    acted: dict[str, str] = {name: key for key, (name, _) in {**file_keys.ACTED, **file_keys.OWN}.items()}
    for section, inner in file_keys.SECTIONS.items():
        acted.update({name: f"{section}: {key}" for key, (name, _) in inner.items()})
    parts = []
    for group, title in GROUPS.items():
        rows = [
            (f"`{acted[name]}`", f"`--{name}`", _cell(meta["help"]))
            for name, meta in options.items()
            if meta["group"] == group and name in acted
        ]
        if rows:
            parts.append(f"### {title}\n\n{_table('Key | Flag | Meaning', rows)}\n")
    return "\n".join(parts)


def option_objects() -> str:
    """The fields of the option objects, with their defaults, are in the API reference: links to each."""
    names = [name for name in lockstep.__all__ if name.endswith(("Kwargs", "Plugin", "Configuration"))]
    return _table("Object | For", [(f"{{py:class}}`lockstep.{name}`", _first(name)) for name in names])


def _first(name: str) -> str:
    return inspect.cleandoc(getattr(lockstep, name).__doc__ or "").splitlines()[0].replace("``", "`")


def exceptions() -> str:
    """The tree of exceptions."""
    tree = inspect.cleandoc((errors.__doc__ or "").split("::", 1)[1].split("\n\nTexts", 1)[0])
    return f"```text\n{tree.strip()}\n```"


# ---------------------------------------------------------------- codes

_KINDS = {"LS1": "Exceptions", "LS2": "Failures of a job", "LS3": "Warnings"}


def errors_page() -> str:
    """The page docs/errors.md, which is kept: readers of the repository look codes up there."""
    lines = [
        "# Errors and warnings",
        "",
        "Messages end with a code. `lockstep explain CODE` prints its entry, `lockstep explain` all codes.",
        "This page is made from `src/lockstep/codes.py` by `python docs/reference_tables.py`.",
        "",
        "| Code | Stands for |",
        "|---|---|",
        *(f"| [{code}](#{code.lower()}) | {entry.title} |" for code, entry in codes.ENTRIES.items()),
    ]
    for start, title in _KINDS.items():
        lines += ["", f"## {title}"]
        for code, entry in codes.ENTRIES.items():
            if code.startswith(start):
                lines += [
                    "",
                    f"### {code}",
                    "",
                    f"**{entry.title[:1].upper()}{entry.title[1:]}** (`{entry.source}`)",
                    "",
                ]
                lines += [f"- What happened: {entry.happened}", f"- Why: {entry.why}", f"- What to do: {entry.fix}"]
                lines += [f"- More: [{entry.page.partition('#')[0].removesuffix('.md')}]({entry.page})"]
    return "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[], Any]] = {
    "api": api,
    "commands": commands,
    "variables": variables,
    "keys": keys,
    "option_objects": option_objects,
    "exceptions": exceptions,
}
"""Name in a page's comment `<!-- generated: NAME -->` -> what makes the text."""


if __name__ == "__main__":
    Path(__file__).with_name("errors.md").write_text(errors_page(), encoding="utf-8")
