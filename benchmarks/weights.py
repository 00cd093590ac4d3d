"""Model files of 400 MB next to Accelerate's: saving, loading in place, loading onto meta, and the memory it takes.

Everything in one process and in turns, in an order that keeps changing; the best of each counts, as what others do on
the machine can only slow a turn down. Files are in the page cache, so that this is the time of the libraries and not
of the disk; a plain write of the same bytes stands beside.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import accelerate
import torch
from measure import find_versions
from torch import nn

import lockstep

WIDTH = 1024
BARS = {
    "load, in place": ("accelerate", 0.5),
    "load, safetensors of 5 shards": ("accelerate", 0.5),
    "load, from meta": ("accelerate", 1.0),  # bound by the kernel, which clears new memory first
    "load, torch's format": ("accelerate", 1.0),  # bound by the checksums, which only Lockstep looks at
    "save, safetensors": ("accelerate", 1.0),
    "save, torch's format": ("accelerate", 1.0),
}
"""What is measured -> next to what, and at most how many times its time."""


def layers(megabytes: int, meta: bool = False) -> nn.Sequential:
    with torch.device("meta" if meta else "cpu"):
        return nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH) for _ in range(round(megabytes * 1e6 / (4 * WIDTH * (WIDTH + 1)))))
        )


class Race:
    """The contenders of each contest, as calls that give the seconds they took."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder, self.megabytes = folder, megabytes
        self.model, self.target = layers(megabytes), layers(megabytes)
        self.theirs, self.ours = accelerate.Accelerator(cpu=True), lockstep.Accelerator(cpu=True)
        for name, arguments in {
            "whole": {},
            "shards": {"max_shard_size": f"{megabytes // 5 + 5}MB"},
            "torch": {"safe_serialization": False},
        }.items():
            self.theirs.save_model(self.model, folder / name, **arguments)

    def loading(self, load: Callable[..., object], name: str, meta: bool = False) -> Callable[[], float]:
        def run() -> float:
            target = layers(self.megabytes, meta=True) if meta else self.target
            arguments = {"device_map": {"": "cpu"}} if meta else {}
            begin = time.perf_counter()
            load(target, self.folder / name, **arguments)
            if meta:  # Accelerate only maps the file here: its weights come into memory when they are first used
                with torch.no_grad():
                    for parameter in target.parameters():
                        parameter.add_(1)
            return time.perf_counter() - begin

        return run

    def saving(self, save: Callable[..., object], **arguments: object) -> Callable[[], float]:
        def run() -> float:
            place = self.folder / "saved"
            shutil.rmtree(place, ignore_errors=True)
            begin = time.perf_counter()
            save(self.model, place, **arguments)
            return time.perf_counter() - begin

        return run

    def writing(self) -> float:
        """The same bytes into one file, and nothing else."""
        (self.folder / "plain").unlink(missing_ok=True)
        begin = time.perf_counter()
        with open(self.folder / "plain", "wb") as file:
            for tensor in self.model.state_dict().values():
                file.write(tensor.numpy().data)
        return time.perf_counter() - begin

    def reading(self) -> float:
        """The same bytes into memory that is there already, and nothing else."""
        room = memoryview(bytearray(4 * WIDTH * (WIDTH + 1)))
        begin = time.perf_counter()
        with open(self.folder / "whole" / "model.safetensors", "rb", buffering=0) as file:
            while file.readinto(room):
                pass
        return time.perf_counter() - begin

    def contests(self) -> dict[str, dict[str, Callable[[], float]]]:
        ours, theirs = lockstep.load_checkpoint_in_model, accelerate.load_checkpoint_in_model

        def loads(name: str, meta: bool = False) -> dict[str, Callable[[], float]]:
            return {"lockstep": self.loading(ours, name, meta), "accelerate": self.loading(theirs, name, meta)}

        def saves(**arguments: object) -> dict[str, Callable[[], float]]:
            return {
                "lockstep": self.saving(self.ours.save_model, durable=False, **arguments),
                "accelerate": self.saving(self.theirs.save_model, **arguments),
            }

        return {
            "load, in place": {**loads("whole"), "plain read": self.reading},
            "load, safetensors of 5 shards": loads("shards"),
            "load, from meta": loads("whole", meta=True),
            "load, torch's format": loads("torch"),
            "save, safetensors": {**saves(), "plain write": self.writing},
            "save, torch's format": saves(safe_serialization=False),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--folder", type=Path, help="where the files go; by default the folder for temporary files")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        race = Race(Path(name), arguments.megabytes)
        contests = race.contests()
        torch.set_num_threads(1)
        times: dict[str, dict[str, list[float]]] = {
            what: {who: [] for who in calls} for what, calls in contests.items()
        }
        turns = [(what, who) for what, calls in contests.items() for who in calls]
        shuffle = random.Random(0).shuffle
        for round_ in range(-1, arguments.rounds):
            shuffle(turns)
            for what, who in turns:
                gc.collect()
                taken = contests[what][who]()
                if round_ >= 0:  # the first warms the caches
                    times[what][who].append(taken)
    print(
        ", ".join(f"{name} {version}" for name, version in find_versions("torch", "safetensors", "accelerate").items())
    )
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {arguments.megabytes} MB, {arguments.rounds} rounds\n"
    )
    print(
        "| seconds | who | best | median | lockstep to it (bests) | at most | verdict |\n|---|---|---|---|---|---|---|"
    )
    for what, contest in times.items():
        rival, limit = BARS[what]
        for who, taken_all in contest.items():
            ratio = min(contest["lockstep"]) / min(taken_all)
            judged = (f"{limit:g}", "met" if ratio <= limit else "NOT MET") if who == rival else ("", "")
            told = "" if who == "lockstep" else f"{ratio:.2f}"
            print(
                f"| {what} | {who} | {min(taken_all):.3f} | {median(taken_all):.3f} | {told} | {' | '.join(judged)} |"
            )


if __name__ == "__main__":
    main()
