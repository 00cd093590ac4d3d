"""``lockstep bundle [RUN_DIR]``: a zip for a bug report. Its contents are shown first, secrets are not in it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.config import env as variables
from lockstep.doctor import bundle
from lockstep.errors import ConfigError
from lockstep.rundir import constants, layout
from lockstep.rundir.layout import RunDirectory
from lockstep.rundir.printable import printable

_MOST_LEFT_OUT = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument(
        "run",
        metavar="RUN_DIR",
        nargs="?",
        help="a run directory or a run's name; the latest run without it, and only this machine where there is none",
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="the zip (default: lockstep-bundle-<run>.zip here)")
    parser.add_argument("--list", action="store_true", help="print what would be in it, and write nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(arguments: argparse.Namespace) -> int:
    """Say what goes in, and write it."""
    environ = variables.snapshot()
    directory, note = _directory(arguments.run, environ.get(constants.VARIABLE))
    redactor = bundle.redactor_for(directory, environ, sys.argv)
    parts = bundle.parts(directory, redactor, env=_env, findings=_findings)
    gone = bundle.left_out(directory) if directory is not None else []
    plain: dict[str, Any] = {"run": str(directory.path) if directory is not None else None, "note": note}
    if arguments.list:
        listed = [{"name": part.name, "what": part.what} for part in parts]
        skipped = [asdict(item) for item in gone]
        shown = {**plain, "contents": listed, "left_out": skipped}
        print(json.dumps(shown, indent=2) if arguments.json else _listing(parts, note, gone))
        return 0
    output = arguments.output if arguments.output is not None else _fresh(directory)
    if output.exists():
        raise ConfigError(f"{output} exists. Name another file with --output, or remove it.")
    if not arguments.json:
        print(_listing(parts, note, gone), flush=True)
    about = {"lockstep": __version__, "made": time.strftime("%Y-%m-%d %H:%M:%S %z"), **redactor.data(plain)}
    written = bundle.write(output, parts, about, _progress, gone)
    if arguments.json:
        print(json.dumps({"bundle": str(output), **plain, "contents": [asdict(item) for item in written]}, indent=2))
        return 0
    print(f"\nWritten to {printable(str(output))} ({output.stat().st_size / 1024:.0f} KiB).")
    print(
        "Secrets are taken out as far as they can be known. Host names, paths, and what your script prints are in it: "
        "look through it before you hand it on."
    )
    return 0


def _directory(text: str | None, asked: str | None) -> tuple[RunDirectory | None, str]:
    """The run, and what is to be said about it; a run that was named and is not there is an error."""
    try:
        return layout.find(text, asked=asked), ""
    except ConfigError as error:
        if text or asked:
            raise
        return None, f"No run: {error} The bundle is about this machine only."


def _fresh(directory: RunDirectory | None) -> Path:
    """A name that is free in the working directory."""
    stem = f"lockstep-bundle-{directory.path.name}" if directory is not None else "lockstep-bundle"
    path, number = Path(f"{stem}.zip"), 1
    while path.exists():
        number += 1
        path = Path(f"{stem}-{number}.zip")
    return path


def _listing(parts: list[bundle.BundleInput], note: str, gone: list[bundle.LeftOut]) -> str:
    """The contents; files of one kind, such as a log for each rank, as one line."""
    rows = []
    for what, group in groupby(parts, key=lambda part: part.what):
        found = [part.name for part in group]
        name = found[0] if len(found) == 1 else f"{found[0]} … {found[-1]}"
        rows.append((name, what if len(found) == 1 else f"{what} ({len(found)} files)"))
    rows.append(("contents.json", "this list"))
    width = max(len(name) for name, _ in rows)
    lines = [*([note, ""] if note else []), "In the bundle:"]
    lines += [f"  {name:<{width}}  {what}" for name, what in rows]
    if gone:
        lines += ["", "Left out:", *(f"  {item.name}: {item.why}" for item in gone[:_MOST_LEFT_OUT])]
        lines += [f"  and {len(gone) - _MOST_LEFT_OUT} more (--json)"] if len(gone) > _MOST_LEFT_OUT else []
    return printable("\n".join(lines))


def _progress(part: bundle.BundleInput) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{printable(part.name)}", end="", file=sys.stderr, flush=True)
        if part.name.endswith("doctor.txt"):
            print(" (a few seconds)", end="", file=sys.stderr, flush=True)


def _env() -> tuple[str, Any]:
    from lockstep.cli import env

    report = env.collect()
    plain = {part: {name: fact.plain() for name, fact in facts.items()} for part, facts in report.items()}
    return "\n".join(env.render(report)), plain


def _findings() -> tuple[str, Any]:
    from lockstep.doctor import table
    from lockstep.doctor.context import DoctorContext
    from lockstep.doctor.run import run_checks

    found = run_checks(DoctorContext(environ=variables.snapshot()))
    text = "\n".join([*table.lines(found, 120), table.summary(found)])
    return text, [finding.plain() for finding in found]
