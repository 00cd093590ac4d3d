"""``lockstep numerics record|diff|html``: keep the numbers of chosen batches, compare them, look at them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.recording import FORMATS, NumericsRecord
from lockstep.errors import ConfigError
from lockstep.rundir.format_ranks import name_ranks, number_ranks
from lockstep.rundir.printable import printable
from lockstep.traces import read_trace
from lockstep.traces.diff import Diff, Difference, diff_batches, diff_runs
from lockstep.traces.frames import Frame, Stat
from lockstep.traces.read_trace import Run, Trace
from lockstep.traces.tolerance import ABSOLUTE
from lockstep.traces.trace import number

if TYPE_CHECKING:
    from rich.console import Console

RAW = True
"""The command line is handed over as it is: everything after ``--`` belongs to the launcher and to the script."""

PAGE = "heatmap.html"
"""The page's name, where none is given; it lies beside the trace."""


def run(argv: Sequence[str]) -> int:
    """Do what the first word says; for ``diff``, 1 when the two sides part."""
    words = list(argv)
    command: list[str] = []
    if "--" in words:
        split = words.index("--")
        words, command = words[:split], words[split + 1 :]
    arguments = make_parser().parse_args(words)
    if arguments.what == "record":
        return _record(arguments, command)
    if command:
        raise ConfigError(f"Only `record` starts something; `{arguments.what}` has no use for {' '.join(command)!r}.")
    return _diff(arguments) if arguments.what == "diff" else _html(arguments)


def make_parser() -> argparse.ArgumentParser:
    """The options of the three subcommands."""
    parser = argparse.ArgumentParser(prog="lockstep numerics", description="The numbers of a run, kept and compared.")
    kinds = parser.add_subparsers(dest="what", required=True, metavar="record|diff|html")
    record = kinds.add_parser(
        "record",
        help="run a script and keep the numbers of every module call",
        usage="lockstep numerics record OUT [--batches N … | --every N] -- [options of launch] script.py [arguments]",
    )
    record.add_argument("out", metavar="OUT", help="the folder; each rank writes a file into it")
    which = record.add_mutually_exclusive_group()
    which.add_argument("--batches", metavar="N", nargs="+", type=int, help="these batches only; the first one is 0")
    which.add_argument("--every", metavar="N", type=int, default=1, help="every N-th batch, from batch 0")
    record.add_argument("--format", choices=FORMATS, default="jsonl", help="form of the files; Parquet needs pyarrow")
    record.add_argument("--overwrite", action="store_true", help="remove the trace that is in OUT already")

    diff = kinds.add_parser("diff", help="say where two runs part, or what changed between two batches of one")
    diff.add_argument("run", metavar="RUN", help="the folder of a trace, or one file of it")
    diff.add_argument("other", metavar="RUN_B", nargs="?", help="the run to compare with")
    diff.add_argument("--batches", metavar=("A", "B"), nargs=2, type=int, help="compare two batches of RUN")
    diff.add_argument("--ranks", metavar=("A", "B"), nargs=2, type=int, help="compare parameters on two ranks of RUN")
    diff.add_argument("--all-tensors", action="store_true", help="with --ranks: compare all, not only parameters")
    diff.add_argument(
        "--rtol", metavar="X", type=float, help="tolerated share of the largest value; by dtype without it"
    )
    diff.add_argument("--atol", metavar="X", type=float, default=ABSOLUTE, help=f"always tolerated ({ABSOLUTE:g})")
    diff.add_argument("--limit", metavar="N", type=int, default=20, help="lines shown at most (20)")
    diff.add_argument("--json", action="store_true", help="print one JSON object instead of a table")

    page = kinds.add_parser("html", help="write one page: modules by batches as a heat map, each frame a click away")
    page.add_argument("run", metavar="RUN", help="the folder of a trace, or one file of it")
    page.add_argument("-o", "--out", metavar="FILE", help=f"where to; {PAGE} beside the trace without it")
    page.add_argument("--rank", metavar="N", type=int, help="this rank only; all of them together without it")
    return parser


# ---------------------------------------------------------------- record


def _record(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    """Become ``lockstep launch``, so that its output, its exit code and the signals sent to us are its own."""
    batches = None if arguments.batches is None else tuple(sorted(set(arguments.batches)))
    asked = NumericsRecord(
        path=os.path.abspath(arguments.out), every=arguments.every, batches=batches, format=arguments.format
    )
    if not command:
        raise ConfigError(
            "No script was given. It goes behind two dashes: lockstep numerics record OUT -- train.py [its arguments]."
        )
    if asked.format == "parquet":
        from lockstep.traces import parquet

        parquet.require()
    _make_room(Path(asked.path), overwrite=arguments.overwrite)
    print(f"Recording {_in_words(asked)} to {asked.path}.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    launch = [sys.executable, "-m", "lockstep", "launch", "--numerics_record", asked.text(), *command]
    os.execv(sys.executable, launch)


def _make_room(folder: Path, *, overwrite: bool) -> None:
    present = read_trace.files_in(folder)
    if present and not overwrite:
        raise ConfigError(
            f"{folder} holds a trace of {name_ranks(present, 8)} already. Name another folder, or add --overwrite."
        )
    for file in present.values():
        file.unlink()


def _in_words(asked: NumericsRecord) -> str:
    if asked.batches is not None:
        return f"batch{'' if len(asked.batches) == 1 else 'es'} {number_ranks(asked.batches, 8)}"
    return "every batch" if asked.every == 1 else f"every batch whose number is a multiple of {asked.every}"


# ---------------------------------------------------------------- diff


def _diff(arguments: argparse.Namespace) -> int:
    given = [arguments.other is not None, arguments.batches is not None, arguments.ranks is not None]
    if sum(given) != 1:
        raise ConfigError(
            "Say what to compare RUN with: one of a second run (lockstep numerics diff RUN RUN_B), two batches "
            "(--batches 149 150), or two ranks (--ranks 0 1)."
        )
    for name in ("rtol", "atol"):
        value = getattr(arguments, name)
        if value is not None and not value >= 0:
            raise ConfigError(f"--{name} {value} must be 0 or more.")
    first = read_trace.open_run(arguments.run)
    second = None if arguments.other is None else read_trace.open_run(arguments.other)
    with _progress(first, *([second] if second else [])):
        found, names = _compared(arguments, first, second)
    if not found.batches:
        raise ConfigError(f"{names[0]} and {names[1]} have no batch in common. " + " ".join(found.notes))
    if arguments.json:
        print(json.dumps(_as_json(found, names), indent=1))
    else:
        _show(found, names, max(0, arguments.limit))
    return 1 if found.parted else 0


def _compared(arguments: argparse.Namespace, first: Run, second: Run | None) -> tuple[Diff, list[str]]:
    """The diff that was asked for, and what its two sides are called."""
    tolerance = {"rtol": arguments.rtol, "atol": arguments.atol}
    if second is not None:
        return _two_runs(first, second, tolerance), [str(arguments.run), str(arguments.other)]
    if arguments.batches is not None:
        found = diff_batches(*_two_batches(first, arguments.batches), **tolerance)
        found.notes += first.notes
        return found, [f"batch {batch}" for batch in arguments.batches]
    one, other = (_rank(first, rank) for rank in arguments.ranks)
    found = diff_runs({one.rank: one}, {one.rank: other}, parameters_only=not arguments.all_tensors, **tolerance)
    found.notes += [*one.notes, *other.notes]
    return found, [f"rank {rank}" for rank in arguments.ranks]


@contextmanager
def _progress(*runs: Run) -> Iterator[None]:
    """A count of the batches read, on a terminal; traces can be large."""
    from tqdm import tqdm

    with tqdm(desc="batches read", unit="", disable=None, leave=False) as bar:
        for run in runs:
            for trace in run.traces.values():
                trace.progress = bar.update
        yield


def _two_runs(first: Run, second: Run, tolerance: Mapping[str, Any]) -> Diff:
    mine: dict[int, Trace] = first.traces
    theirs: dict[int, Trace] = second.traces
    notes: list[str] = []
    together = False
    if (
        first.path.is_file() and second.path.is_file()
    ):  # two files were named: these two are meant, whatever their ranks
        (one,), (other,) = mine.values(), theirs.values()
        theirs = {one.rank: other}
    elif first.world_size != second.world_size:
        together = True
        notes.append(
            f"{first.world_size} against {second.world_size} ranks: those of each run are taken together, and the "
            "backward pass is left out, because its numbers depend on how many samples a rank has."
        )
    elif not set(mine) & set(theirs):
        raise ConfigError(
            f"{first.path} has {name_ranks(mine, 8)}, {second.path} {name_ranks(theirs, 8)}: none in common."
        )
    found = diff_runs(mine, theirs, together=together, **tolerance)
    found.notes = [*notes, *found.notes, *first.notes, *second.notes]
    return found


def _two_batches(run: Run, wanted: Sequence[int]) -> Iterator[tuple[int, dict[int, list[Frame]]]]:
    found: dict[int, dict[int, list[Frame]]] = {batch: {} for batch in wanted}
    there: set[int] = set()
    for rank, trace in run.traces.items():
        for batch, frames in trace.batches():
            there.add(batch)
            if batch in found:
                found[batch][rank] = frames
    for batch in wanted:
        if not found[batch]:
            has = f"It has {number_ranks(there, 8)}." if there else "It holds no frame."
            raise ConfigError(f"{run.path} has no batch {batch}. {has}")
        yield batch, found[batch]


def _rank(run: Run, rank: int) -> Trace:
    if rank not in run.traces:
        raise ConfigError(f"{run.path} has no trace of rank {rank}, but of {name_ranks(run.traces, 8)}.")
    return run.traces[rank]


# ---------------------------------------------------------------- what is shown


def _as_json(found: Diff, names: Sequence[str]) -> dict[str, Any]:
    differences = [_difference(one) for one in found.differences]
    return {
        "compared": list(names),
        "parted": found.parted,
        "first": differences[0] if differences else None,
        "differences": differences,
        "missing": found.missing,
        "extra": found.extra,
        "batches": found.batches,
        "tensors": found.tensors,
        "notes": found.notes,
    }


def _difference(one: Difference) -> dict[str, Any]:
    table = asdict(one)
    for side in ("first", "second"):
        table[side] = {name: number(v) if isinstance(v, float) else v for name, v in table[side].items()}
    table["relative"] = number(one.relative)
    return table


def _show(found: Diff, names: Sequence[str], limit: int) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)

    def show(text: str, style: str | None = None) -> None:
        console.print(printable(text), soft_wrap=True, style=style)

    compared = (
        f"{found.tensors} tensors in {len(found.batches)} batch{'' if len(found.batches) == 1 else 'es'} compared"
    )
    if found.differences:
        first = found.differences[0]
        where = f"{_where(first)}, {first.phase}, {first.tensor}"
        at = "" if names[0].startswith("batch ") else f" in batch {first.batch}"
        on = "" if first.rank is None or names[0].startswith("rank ") else f" on rank {first.rank}"
        show(f"{names[0]} and {names[1]} part{at}{on} at {where} ({first.what}).", style="bold")
        _table(console, found.differences[:limit], names)
        if len(found.differences) > limit:
            show(f"{len(found.differences) - limit} more in this batch; --limit shows more, --json all of them.")
    elif not found.parted:
        show(f"No difference: {compared}, all within the tolerance.")
    else:
        show(f"The numbers of what both have agree: {compared}.")
    for only, name in ((found.missing, names[0]), (found.extra, names[1])):
        if only:
            show(f"Only {name} has:", style="bold")
            for what, where in list(only.items())[:limit]:
                show(f"  {what}  [{where}]")
            if len(only) > limit:
                show(f"  and {len(only) - limit} more")
    for note in found.notes:
        show(f"Note: {note}", style="dim")


def _table(console: Console, differences: Sequence[Difference], names: Sequence[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in ("batch", "rank", "phase", "module", "tensor", "what"):
        table.add_column(heading, justify="right" if heading in ("batch", "rank") else "left", overflow="fold")
    short = [os.path.basename(os.path.normpath(name)) for name in names]
    for heading in (*(short if short[0] != short[1] else ("first", "second")), "apart", "tolerated"):
        table.add_column(Text(printable(heading)), justify="right", overflow="fold")
    for one in differences:
        cells = (
            str(one.batch),
            "all" if one.rank is None else str(one.rank),
            one.phase,
            _where(one),
            one.tensor,
            one.what,
            _value(one.first, one, one.second),
            _value(one.second, one, one.first),
            f"{one.relative:.2g}" if one.relative < float("inf") else "",
            f"{one.tolerance:.1g}",
        )
        table.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(table)


def _where(one: Difference) -> str:
    called = f", call {one.call}" if one.call else ""
    return f"{one.module or '(root)'} ({one.kind}{called})"


def _value(stat: Stat, one: Difference, beside: Stat) -> str:
    """The number that differs, with the dtype where the two have not the same."""
    if stat.note:
        return stat.note
    if one.what == "shape" or (one.what == "note" and beside.note):
        return str(list(stat.shape))
    if one.what == "underflow":
        return f"{100 * (stat.tiny or 0):.1f} %"
    found = [name for name, there in (("nan", stat.nans), ("inf", stat.infs)) if there]
    text = f"{stat.abs_min if one.what == 'abs min' else stat.abs_max:.2e}" + (
        f" (has {', '.join(found)})" if found else ""
    )
    return text if stat.dtype == beside.dtype else f"{text} {stat.dtype}"


# ---------------------------------------------------------------- html


def _html(arguments: argparse.Namespace) -> int:
    from lockstep.traces.html import write_page

    run = read_trace.open_run(arguments.run)
    traces = run.traces if arguments.rank is None else {arguments.rank: _rank(run, arguments.rank)}
    beside = run.path.parent if run.path.is_file() else run.path
    out = Path(arguments.out) if arguments.out else beside / PAGE
    title = run.path.resolve().name
    with _progress(run):
        rows, batches = write_page(traces, out, title=title, notes=lambda: run.notes)
    for note in run.notes:
        print(printable(f"Note: {note}"), file=sys.stderr)
    print(f"{printable(str(out))}: {rows} rows, {batches} batches.")
    return 0
