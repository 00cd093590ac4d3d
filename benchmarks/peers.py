"""Lockstep next to raw torch, Accelerate and Fabric, in one command and two Markdown tables.

    python benchmarks/peers.py                 both tables; short runs, some minutes
    python benchmarks/peers.py --part costs    how much longer than raw torch each takes: ratios
    python benchmarks/peers.py --part failures what a job of 2 ranks shows when one of them goes wrong, and how soon

The costs come from the other benchmarks of this folder, which interleave their contenders in one process; each of those
prints more, with longer runs. For the failures the same program is run three times: with raw torch under torchrun, with
Accelerate under torchrun (its launcher starts one process on a machine without a GPU), and with Lockstep under its own
launcher. A job that has not ended after ``--limit`` seconds is stopped by us, and counts as hanging.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import launch

FOLDER = Path(__file__).resolve().parent
PEERS = ("raw torch", "Accelerate", "Fabric", "Lockstep")
NAMES = {"accelerate": "Accelerate", "fabric": "Fabric", "lockstep": "Lockstep"}


def print_table(headings: list[str], rows: list[list[str]]) -> None:
    for row in (headings, ["---"] * len(headings), *rows):
        print(f"| {' | '.join(row)} |", flush=True)


# ---------------------------------------------------------------- costs


def run_json(*words: str) -> Any:
    """What another benchmark measures."""
    command = [sys.executable, str(FOLDER / words[0]), *words[1:], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(done.stdout[done.stdout.index("{") :])


def ratios(figures: list[dict[str, Any]]) -> dict[str, float]:
    return {NAMES[row["name"]]: row["ratio"] for row in figures if row["name"] in NAMES}


def measure_costs(repeats: int) -> list[list[str]]:
    rows: list[list[str]] = []

    def add(what: str, found: Mapping[str, float], baseline: str = "1") -> None:
        cells = [f"{found[peer]:.2f}" if peer in found else "–" for peer in PEERS[1:]]
        rows.append([what, baseline, *cells])

    number = str(repeats)
    alone = run_json("loop.py", "--repeats", number, "--imports", str(max(3, repeats // 4)))
    add("training step, 1 process", ratios(alone["step_us"]))
    pair = run_json("loop.py", "--repeats", number, "--processes", "2")
    add("training step, 2 processes", ratios(pair["step_us"]))
    for kind, figures in pair["gather_us"].items():
        add(f"gather, {kind}, 2 processes", ratios(figures))
    debug = run_two("guard.py", "debug", "--repeats", number)["figures"]
    own = {"Lockstep": "Lockstep's plain call", "Accelerate": "Accelerate's plain call"}
    found = {
        peer: figures[-1]["ratio"]
        for peer, end in own.items()
        for name, figures in debug.items()
        if name.startswith("gather, one tensor") and name.endswith(end)
    }
    add("gather in debug mode, over the same library's plain call", found, "–")
    add("one batch of a dispatched loader, over Accelerate's", dispatch(number), "–")
    state = run_json("checkpoint.py", "--rounds", "3", "--megabytes", "100")
    best = {(row["what"], row["who"]): row["best"] for row in state["rows"]}
    for what in ("save, not durable", "load, verified"):
        if (what, "accelerate") in best:
            ratio = best[what, "lockstep"] / best[what, "accelerate"]
            add(
                f"{what.partition(',')[0]} the whole state, over Accelerate's",
                {"Accelerate": 1.0, "Lockstep": ratio},
                "–",
            )
    add("start of 2 ranks, over torchrun", starts())
    imports = {NAMES[row["name"]]: row["cpu"] / 1000 for row in alone["import_ms"] if row["name"] in NAMES}
    rows.append(
        ["import, seconds of processor time beyond torch's", "0", *(f"{imports[peer]:.2f}" for peer in PEERS[1:])]
    )
    return rows


def run_two(*words: str) -> Any:
    """The same, started with 2 ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(FOLDER / words[0]), *words[1:], "--json"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout[done.stdout.index("{") :])


def dispatch(repeats: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        kept = Path(name) / "data.json"
        words = [
            "--only",
            "dispatched",
            "--processes",
            "2",
            "--repeats",
            repeats,
            "--batches",
            "60",
            "--json",
            str(kept),
        ]
        subprocess.run([sys.executable, str(FOLDER / "data.py"), *words], check=True, capture_output=True)
        found = {row["name"]: row["median"] for row in json.loads(kept.read_text())["sections"][0]["figures"]}
    return {NAMES[name]: found[name] / found["accelerate"] for name in ("accelerate", "lockstep")}


def starts(rounds: int = 3) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(launch.SCRIPT)
        commands = {kind: command for kind, command in launch.commands(2).items() if kind != "accelerate"}
        best: dict[str, float] = {}
        for number in range(rounds + 1):
            for kind, command in commands.items():
                taken, _ = launch.once(command, folder)
                if number:  # the first warms the caches
                    best[kind] = min(taken, best.get(kind, taken))
    return {"Lockstep": best["lockstep"] / best["torchrun"]}


# ---------------------------------------------------------------- failures

PROGRAM = """\
import os, signal, sys, time
import torch
import torch.distributed as dist

library, scenario = sys.argv[1], sys.argv[2]
if library == "torch":
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def gather(tensor):
        room = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(room, tensor)
        return torch.cat(room)
else:
    if library == "accelerate":
        from accelerate import Accelerator
    else:
        from lockstep import Accelerator
    accelerator = Accelerator(cpu=True)
    rank, gather = accelerator.process_index, accelerator.gather

for step in range(5):
    gather(torch.ones(2))
print(f"fault at {time.time():.3f}", flush=True)
if rank == 1 and scenario == "leaves the loop":
    sys.exit(0)  # CULPRIT
if rank == 1 and scenario == "raises":
    raise ValueError("a bad sample")  # CULPRIT
if rank == 1 and scenario == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)  # CULPRIT
size = 3 if rank == 1 and scenario == "has another shape" else 2
gather(torch.ones(size))  # CULPRIT
print("went on", flush=True)
"""
SCENARIOS = {
    "has another shape": "one rank gathers another shape",
    "leaves the loop": "one rank leaves the loop early",
    "raises": "one rank raises an exception",
    "is killed": "one rank is killed (SIGKILL)",
}
COMMANDS = {
    "torch": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "accelerate": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "lockstep": ["-m", "lockstep", "launch", "--cpu", "--num_processes", "2"],
}


def run_failure(library: str, scenario: str, folder: Path, limit: float) -> str:
    """What the job of one library shows when a rank goes wrong."""
    script = folder / "train.py"
    script.write_text(PROGRAM)
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "LOCKSTEP_RUN_DIR": str(folder / "run"),
    }
    output = folder / "output"
    with output.open("wb") as target:
        process = subprocess.Popen(
            [sys.executable, *COMMANDS[library], str(script), library, scenario],
            stdout=target,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            stop(process)
            return f"hangs (stopped by us after {limit:.0f} s)"
        over = time.time()
    text = output.read_text(errors="replace")
    faults = [float(at) for at in re.findall(r"fault at ([\d.]+)", text)]
    if not faults:
        raise SystemExit(f"{library}, {scenario}: the job did not come to the fault:\n{text[-3000:]}")
    # torchrun names one rank as the root cause; the guard and the launcher of Lockstep begin with it.
    blamed = text.partition("Root Cause")[2] or text
    rank = "rank" if re.search(r"[Rr]ank +: 1\b|[Rr]ank 1\b", blamed) else ""
    line = "line" if re.search(rf'train\.py(:|", line ){culprit(scenario)}\b', text) else ""
    named = " and ".join(filter(None, [rank, line]))
    if process.returncode == 0:
        return "ends as if nothing had happened" if text.count("went on") else "ends with exit code 0"
    seconds, lines = over - max(faults), text.count("\n")
    return f"stops after {seconds:.1f} s; names {named or 'neither rank nor line'}; {lines} lines"


def culprit(scenario: str) -> int:
    """The number of the line at which rank 1 goes wrong."""
    lines = PROGRAM.splitlines()
    before = next((number for number, text in enumerate(lines) if scenario in text and "if rank" in text), 0)
    return next(number for number, text in enumerate(lines, 1) if number > before and "# CULPRIT" in text)


def stop(process: subprocess.Popen[bytes]) -> None:
    """The job and its ranks: torchrun passes SIGTERM on."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure_failures(limit: float) -> list[list[str]]:
    rows = []
    for scenario, what in SCENARIOS.items():
        cells = []
        for library in COMMANDS:
            with tempfile.TemporaryDirectory() as name:
                cells.append(run_failure(library, scenario, Path(name), limit))
        rows.append([what, *cells])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["costs", "failures"], help="one of the two tables")
    parser.add_argument("--repeats", type=int, default=20, help="pairs of blocks")
    parser.add_argument("--limit", type=float, default=60, help="seconds after which a job counts as hanging")
    arguments = parser.parse_args()
    if arguments.part != "costs":
        print_table(
            ["When", "raw torch, torchrun", "Accelerate, torchrun", "Lockstep"], measure_failures(arguments.limit)
        )
        print()
    if arguments.part != "failures":
        print_table(["Ratio to raw torch", *PEERS], measure_costs(arguments.repeats))


if __name__ == "__main__":
    main()
