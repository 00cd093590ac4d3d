"""How the library's costs grow with the number of ranks.

    python benchmarks/scale.py                      2 to 16 ranks on this machine, 64 to 4,096 simulated: 8 minutes
    python benchmarks/scale.py --ranks 2 4          fewer
    python benchmarks/scale.py --ranks              only what is simulated
    python benchmarks/scale.py --json figures.json  keep all figures

On this machine: from the command to the moment at which all ranks have joined, ``lockstep launch`` and torchrun in
turns; then, in one job for each number of ranks, a step, a gather, a barrier, a trigger and a durable save, each in
turns with the same in raw torch (``scale_ranks.py``); and the comparison of a collective with the black boxes of all
local peers, clocked inside gathers. With more ranks than cores all of this waits for the processor, raw torch as well:
the ratio is what carries over. ``scale_simulated.py`` says what is simulated, and how.

A growth exponent is the slope through medians on logarithmic scales: 1 is linear, 2 quadratic.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from measure import find_versions, table
from rich.console import Console
from scale_ranks import AGAIN, LOCKSTEP, RAW

HERE = Path(__file__).parent
WORKS = ("step", "gather", "barrier", "trigger", "save")
JOB_SECONDS = 300.0
"""For one job: more than any takes, so that one that hangs does not hold up the rest."""
Progress = Callable[[str], None]


# --- on this machine -----------------------------------------------------------------------------------------------


def launch(kind: str, ranks: int, words: Sequence[str], folder: Path) -> None:
    starters = {
        LOCKSTEP: ["lockstep", "launch", "--cpu", "--num_processes", str(ranks)],
        RAW: ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"],
    }
    environ = {**os.environ, "LOCKSTEP_RUN_DIR": str(folder / "run"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *starters[kind], str(HERE / "scale_ranks.py"), *words]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=JOB_SECONDS)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")


def time_starts(ranks: int, rounds: int, folder: Path, progress: Progress) -> dict[str, list[float]]:
    """Seconds from the command until the last rank has passed the first barrier, raw and ours in turns."""
    found: dict[str, list[float]] = {RAW: [], LOCKSTEP: []}
    for round_ in range(rounds):
        for kind, work in ((RAW, "join-raw"), (LOCKSTEP, "join")):
            progress(
                f"{ranks} ranks: start by {'torchrun' if kind == RAW else 'lockstep launch'}, {round_ + 1}/{rounds}"
            )
            note = folder / "times"
            note.unlink(missing_ok=True)
            begin = time.time()
            launch(kind, ranks, [work, str(note)], folder)
            times = [float(line) for line in note.read_text().split()]
            if len(times) != ranks:
                raise SystemExit(f"{len(times)} of {ranks} ranks joined: the time would mean nothing.")
            found[kind].append(max(times) - begin)
    return found


def measure_here(ranks: int, args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """All figures of one number of ranks; milliseconds, but for the comparison, which has microseconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        starts = time_starts(ranks, args.rounds, folder, progress)
        progress(f"{ranks} ranks: {', '.join(WORKS)} and the comparison, raw and lockstep in turns")
        launch(LOCKSTEP, ranks, ["measure", str(folder / "figures"), "--repeats", str(args.repeats)], folder)
        found = json.loads((folder / "figures").read_text())
    pairs = [mine / raw for mine, raw in zip(starts[LOCKSTEP], starts[RAW], strict=True)]
    rows = {
        "start": {
            RAW: [1e3 * seconds for seconds in starts[RAW]],
            LOCKSTEP: [1e3 * seconds for seconds in starts[LOCKSTEP]],
            "ratio": median(pairs),
            "spread": [min(pairs), max(pairs)],
        }
    }
    for work in WORKS:
        figures = found[work]
        rows[work] = {
            RAW: [figures[RAW]["median"] / 1e3],
            LOCKSTEP: [figures[LOCKSTEP]["median"] / 1e3],
            "ratio": figures[LOCKSTEP]["ratio"],
            "spread": figures[LOCKSTEP]["ratio_quartiles"],
            "noise": figures[AGAIN]["ratio"],
        }
    return {"rows": rows, "comparison": found["comparison"]}


# --- growth --------------------------------------------------------------------------------------------------------


def exponent(points: Mapping[int, float]) -> float:
    """The slope of a line through the logarithms, by least squares."""
    logs = [(math.log(count), math.log(value)) for count, value in points.items() if value > 0]
    middle = sum(x for x, _ in logs) / len(logs), sum(y for _, y in logs) / len(logs)
    return sum((x - middle[0]) * (y - middle[1]) for x, y in logs) / sum((x - middle[0]) ** 2 for x, _ in logs)


def fit(points: Mapping[int, float]) -> float | None:
    return exponent(points) if len(points) > 1 else None


def growth_here(found: Mapping[int, Any]) -> dict[str, dict[str, float | None]]:
    grown = {
        work: {
            kind: fit({ranks: median(one["rows"][work][kind]) for ranks, one in found.items()})
            for kind in (RAW, LOCKSTEP)
        }
        for work in ("start", *WORKS)
    }
    grown["comparison"] = {
        RAW: grown["gather"][RAW],
        LOCKSTEP: fit({ranks: one["comparison"]["comparison"] for ranks, one in found.items()}),
    }
    return grown


# --- simulated -----------------------------------------------------------------------------------------------------


def simulate(sizes: Sequence[int], progress: Progress) -> dict[str, dict[int, list[float]]]:
    """Figures by name and number of ranks: seconds, or counts."""
    # Torch asks for the name behind each of a thousand connections, and warns where there is none.
    environ = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "timeout:1 attempts:1"}
    command = [sys.executable, str(HERE / "scale_simulated.py"), *map(str, sizes)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stderr:
            progress(line.rstrip())
        answer = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}.")
    return {name: {int(ranks): values for ranks, values in row.items()} for name, row in json.loads(answer).items()}


# --- reporting -----------------------------------------------------------------------------------------------------


def show_here(console: Console, found: Mapping[int, Any], grown: Mapping[str, Mapping[str, float | None]]) -> None:
    rows = []
    for work in ("start", *WORKS):
        for ranks, one in found.items():
            row = one["rows"][work]
            low, high = row["spread"]
            noise = f"{row['noise']:.2f}" if "noise" in row else "-"
            raw, mine = median(row[RAW]), median(row[LOCKSTEP])
            rows.append(
                [work, str(ranks), f"{raw:.2f}", f"{mine:.2f}", f"{row['ratio']:.2f}", f"{low:.2f}–{high:.2f}", noise]
            )
    headings = ["ms", "ranks", "raw torch", "lockstep", "ratio", "spread", "raw against itself"]
    console.print(table("On this machine, medians", headings, rows))
    rows = [
        [
            str(ranks),
            *(f"{one['comparison'][name]:.1f}" for name in ("enter", "comparison")),
            f"{1e3 * one['rows']['gather'][RAW][0]:.0f}",
        ]
        for ranks, one in found.items()
    ]
    headings = ["ranks", "begin a collective, us", "of it comparing", "raw all_gather"]
    console.print(table("The black box's comparison with every local peer", headings, rows))
    rows = [[work, *(spell(row[kind]) for kind in (RAW, LOCKSTEP))] for work, row in grown.items()]
    console.print(table("Growth exponents", ["", "raw torch", "lockstep"], rows))
    console.print("In the row of the comparison, raw torch is the gather that is compared.\n")


def spell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def show_simulated(console: Console, found: Mapping[str, Mapping[int, Sequence[float]]]) -> None:
    sizes = list(next(iter(found.values())))
    rows = []
    for name, by_size in found.items():
        medians = {ranks: median(values) for ranks, values in by_size.items()}
        timed = len(by_size[sizes[0]]) > 1
        texts = [f"{medians[ranks]:.4f} s" if timed else f"{medians[ranks]:.0f}" for ranks in sizes]
        spread = max(by_size[sizes[-1]]) / min(by_size[sizes[-1]]) if timed else 1.0
        rows.append([name, *texts, f"{spread:.1f}", spell(fit(medians))])
    headings = ["simulated", *(f"{ranks} ranks" for ranks in sizes), "slowest over fastest", "exponent"]
    console.print(table("Simulated in one process, medians of three", headings, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8, 16], help="on this machine")
    parser.add_argument(
        "--simulated", type=int, nargs="*", default=[64, 256, 1024, 4096], help="multiples of 8, from 16"
    )
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind")
    parser.add_argument("--repeats", type=int, default=12, help="pairs of blocks")
    parser.add_argument("--json", type=Path, help="keep all figures in this file")
    args = parser.parse_args()
    began = time.monotonic()
    load = os.getloadavg()[0]

    def progress(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", file=sys.stderr, flush=True)

    here = {ranks: measure_here(ranks, args, progress) for ranks in args.ranks}
    grown = growth_here(here) if here else {}
    simulated = simulate(args.simulated, progress) if args.simulated else {}
    console = Console(width=160, highlight=False)
    versions = find_versions("torch", "torch-lockstep")
    console.print(", ".join(f"{name} {version}" for name, version in versions.items()))
    console.print(f"{os.cpu_count()} cores, 1 thread a process, load before: {load:.2f}\n")
    if here:
        show_here(console, here, grown)
    if simulated:
        show_simulated(console, simulated)
    if args.json is not None:
        kept = {"versions": versions, "cores": os.cpu_count(), "load_before": load}
        args.json.write_text(json.dumps({**kept, "ranks": here, "exponents": grown, "simulated": simulated}, indent=1))


if __name__ == "__main__":
    main()
