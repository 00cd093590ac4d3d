"""Whole-state checkpoints next to Accelerate's and to a plain write: a 400 MB model with Adam, 1.2 GB of state.

    python benchmarks/checkpoint.py                 best of 5 rounds
    python benchmarks/checkpoint.py --rounds 9

All contenders run in one process, in turns, in an order that keeps changing; the best of each counts, as what others do
on the machine can only slow a turn down. Folders of earlier turns are deleted, and what they left in the page cache is
written out, off the clock. What is loaded lies in the page cache; "anew" loads it in a process that was started for
that, as a job that goes on does: its memory is still the system's to hand out. Memory is the growth of the peak of the
resident set (``VmHWM``, reset before each turn); for loads, into objects without a state, what stays is taken off.

A model of 100,000 small tensors is saved and loaded next to torch alone, in turns as well.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import torch
from measure import clock, find_versions, settle, table
from rich.console import Console
from torch import Tensor, nn

import lockstep

WIDTH = 1024
BARS = [
    ("save, durable", "lockstep", "plain write + fsync", 1.25),
    ("save, not durable", "lockstep", "accelerate", 0.7),
    ("load, verified", "lockstep", "accelerate", 1.0),
    ("load, verified, anew", "lockstep", "accelerate", 1.0),
    ("blocking=False, stall", "lockstep", "copy in memory", 1.2),
]
"""What, who, next to whom, and at most how many times its time."""


SMALL_BARS = [
    (f"{what}, small tensors", who, "torch", 2.0)
    for what in ("save", "load")
    for who in ("safetensors", "torch's format")
]
"""The same for a model of very many small tensors, next to torch.save, and to torch.load with load_state_dict."""


LIBRARIES = {"lockstep": lockstep, "accelerate": accelerate}


class Side:
    """One library's accelerator with a model and an Adam, which has made a step unless it is ``fresh``."""

    def __init__(self, who: str, megabytes: int, fresh: bool = False) -> None:
        self.accelerator = LIBRARIES[who].Accelerator(cpu=True)  # type: ignore[attr-defined]
        torch.manual_seed(0)
        layers = round(megabytes * 1e6 / (4 * WIDTH * (WIDTH + 1)))
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.Adam(model.parameters()))
        if fresh:
            return
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forget(self) -> None:
        """The state of the optimizer, as in a process that has just been started."""
        getattr(self.optimizer, "optimizer", self.optimizer).state.clear()

    def tensors(self) -> list[Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*(parameter.detach() for parameter in self.model.parameters()), *moments]


def plain_write(tensors: list[Tensor], path: Path, sync: bool) -> None:
    with open(path, "wb", buffering=0) as file:
        for tensor in tensors:
            view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            while view:
                view = view[file.write(view) :]
        if sync:
            os.fsync(file.fileno())


def load_anew(who: str, folder: Path, megabytes: int) -> float:
    """Seconds that a new process took to load."""
    command = [sys.executable, __file__, "--load", who, "--folder", str(folder), "--megabytes", str(megabytes)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def time_load(who: str, folder: Path, megabytes: int) -> None:
    side = Side(who, megabytes, fresh=True)
    begin = clock()
    side.accelerator.load_state(str(folder / who))
    print(clock() - begin)


def keep_freed_memory() -> None:
    """Have malloc keep what is freed, up to 2 GB.

    Else it depends on whose tensors lie at the end of the heap who gets old memory for its next load, and for whom the
    system has to hand out new memory, which takes several times as long as to read. "anew" measures that, for both.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
    libc.mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD


def memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


class Race:
    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder, self.megabytes = folder, megabytes
        self.ours, self.theirs = Side("lockstep", megabytes), Side("accelerate", megabytes)
        self.size = sum(tensor.nbytes for tensor in self.ours.tensors())
        self.ours.accelerator.save_state(folder / "lockstep")
        self.theirs.accelerator.save_state(str(folder / "accelerate"))

    def contenders(self) -> dict[tuple[str, str], Callable[[], object]]:
        ours, theirs, place = self.ours, self.theirs, self.folder / "new"
        return {
            ("save, durable", "plain write + fsync"): lambda: plain_write(ours.tensors(), place, True),
            ("save, durable", "lockstep"): lambda: ours.accelerator.save_state(place),
            ("save, not durable", "plain write"): lambda: plain_write(ours.tensors(), place, False),
            ("save, not durable", "accelerate"): lambda: theirs.accelerator.save_state(str(place)),
            ("save, not durable", "lockstep"): lambda: ours.accelerator.save_state(place, durable=False),
            ("load, verified", "accelerate"): lambda: theirs.accelerator.load_state(str(self.folder / "accelerate")),
            ("load, verified", "lockstep"): lambda: ours.accelerator.load_state(self.folder / "lockstep"),
            ("load, verified, anew", "accelerate"): lambda: load_anew("accelerate", self.folder, self.megabytes),
            ("load, verified, anew", "lockstep"): lambda: load_anew("lockstep", self.folder, self.megabytes),
            ("blocking=False, stall", "copy in memory"): lambda: [tensor.clone() for tensor in ours.tensors()],
            ("blocking=False, stall", "lockstep"): lambda: ours.accelerator.save_state(place, blocking=False),
        }

    def turn(self, key: tuple[str, str], work: Callable[[], object]) -> tuple[float, int]:
        """Seconds that it took, and bytes that the peak of memory grew by."""
        place = self.folder / "new"
        shutil.rmtree(place, ignore_errors=True)
        place.unlink(missing_ok=True)
        os.sync()
        loading = key[0] == "load, verified"
        if loading:
            (self.ours if key[1] == "lockstep" else self.theirs).forget()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory("VmRSS")
        begin = clock()
        left = work()
        seconds = left if isinstance(left, float) else clock() - begin  # another process has its own clock
        peak, after = memory("VmHWM"), memory("VmRSS")
        del left
        self.ours.accelerator.wait_for_checkpoint()
        return seconds, peak - (max(before, after) if loading else before)


class SmallTensors:
    """A model of many small tensors, saved and loaded as a state in both formats, and by torch alone."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self.accelerator = lockstep.Accelerator(cpu=True)
        self.model = nn.Module()
        for number in range(count):
            self.model.register_buffer(f"layer_{number}_weight", torch.randn(8))
        self.accelerator.prepare(self.model)

    def contenders(self) -> dict[tuple[str, str], Callable[[], object]]:
        file = self._folder / "small.pt"
        work: dict[tuple[str, str], Callable[[], object]] = {
            ("save, small tensors", "torch"): lambda: torch.save(self.model.state_dict(), file),
            ("load, small tensors", "torch"): lambda: self.model.load_state_dict(torch.load(file)),
        }
        for who, safe in (("safetensors", True), ("torch's format", False)):
            place = self._folder / who
            work["save, small tensors", who] = lambda place=place, safe=safe: self.accelerator.save_state(  # type: ignore[misc]
                place, safe_serialization=safe, durable=False
            )
            work["load, small tensors", who] = lambda place=place: self.accelerator.load_state(place)  # type: ignore[misc]
        return work

    def race(self, rounds: int) -> dict[tuple[str, str], list[float]]:
        """Seconds of each turn; in each round all save before all load, in an order that keeps changing."""
        work = self.contenders()
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in work}
        for number in range(rounds):
            order = list(work)
            random.Random(number).shuffle(order)
            for key in sorted(order, key=lambda key: key[0], reverse=True):
                gc.collect()
                begin = clock()
                work[key]()
                seconds[key].append(clock() - begin)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=400, help="of the model; with Adam it is three times that")
    parser.add_argument("--tensors", type=int, default=100_000, help="small ones, of a model of its own; 0 for none")
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--load", choices=LIBRARIES, help="only load what is in the folder, and print the seconds")
    arguments = parser.parse_args()
    if arguments.load:
        time_load(arguments.load, Path(arguments.folder), arguments.megabytes)
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        keep_freed_memory()
        race = Race(Path(folder), arguments.megabytes)
        settle()
        work = race.contenders()
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in work}
        peaks: dict[tuple[str, str], list[int]] = {key: [] for key in work}
        order = list(work)
        for number in range(arguments.rounds + 1):
            random.Random(number).shuffle(order)
            for key in order:
                took, grew = race.turn(key, work[key])
                if number:  # the first round warms up
                    seconds[key].append(took)
                    peaks[key].append(grew)
        del work
        if arguments.tensors:
            small = SmallTensors(Path(folder), arguments.tensors).race(max(2, arguments.rounds // 2))
            seconds |= small
            peaks |= {key: [0] * len(times) for key, times in small.items()}
    tell(race, seconds, peaks, load, arguments.json)


def tell(race: Race, seconds: Any, peaks: Any, load: float, as_json: bool) -> None:
    best = {key: min(times) for key, times in seconds.items()}
    bars = [
        {
            "bar": what if who == "lockstep" else f"{what}, {who}",
            "ratio": best[what, who] / best[what, other],
            "next to": other,
            "at most": limit,
            "met": best[what, who] <= limit * best[what, other],
        }
        for what, who, other, limit in (BARS + SMALL_BARS if ("save, small tensors", "torch") in best else BARS)
    ]
    rows = [
        {"what": what, "who": who, "best": best[what, who], "all": times, "peak_mb": min(peaks[what, who]) / 1e6}
        for (what, who), times in seconds.items()
    ]
    if as_json:
        print(json.dumps({"bytes": race.size, "load_before": load, "rows": rows, "bars": bars}, indent=1))
        return
    console = Console(width=140, highlight=False)
    versions = find_versions("torch", "accelerate")
    console.print(", ".join(f"{name} {version}" for name, version in versions.items()))
    console.print(f"{race.size / 1e9:.2f} GB of state, {os.cpu_count()} cores, load before: {load:.2f}\n")
    cells = [
        [
            row["what"],
            row["who"],
            f"{row['best']:.2f}",
            f"{max(row['all']):.2f}",
            "-" if "anew" in row["what"] or "small" in row["what"] else f"{row['peak_mb']:.0f}",
        ]
        for row in rows
    ]
    console.print(table("Times", ["s", "who", "best", "worst", "MB more at the peak"], cells))
    cells = [
        [bar["bar"], bar["next to"], f"{bar['ratio']:.2f}", f"{bar['at most']:g}", "met" if bar["met"] else "NOT MET"]
        for bar in bars
    ]
    console.print(table("Bars", ["lockstep", "next to", "ratio", "at most", "verdict"], cells))


if __name__ == "__main__":
    main()
