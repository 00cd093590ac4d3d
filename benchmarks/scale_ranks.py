"""What ``scale.py`` runs in the ranks of a job: each piece of work of the library beside the same in raw torch.

    lockstep launch --cpu --num_processes 4 benchmarks/scale_ranks.py measure figures.json
    lockstep launch --cpu --num_processes 4 benchmarks/scale_ranks.py join times.txt
    torchrun --nproc-per-node=4 benchmarks/scale_ranks.py join-raw times.txt

Blocks of both kinds take turns in the same processes; ``measure.py`` says how they are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

RAW, AGAIN, LOCKSTEP = "raw", "raw (again)", "lockstep"


def join(file: str) -> None:
    """Called on: all ranks. Join the job as a script does, and note when all have."""
    from lockstep import Accelerator

    Accelerator(cpu=True).wait_for_everyone()
    _note(file)


def join_raw(file: str) -> None:
    """Called on: all ranks. The same in raw torch."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    _note(file)
    dist.destroy_process_group()


def _note(file: str) -> None:
    with open(file, "a") as times:
        times.write(f"{time.time()}\n")


def measure(file: str, repeats: int) -> None:
    """Called on: all ranks. Time everything; rank 0 writes the figures."""
    import torch
    import torch.distributed as dist
    from loop import make_accelerator, make_parts, make_raw
    from measure import Work, compare, interleave, new_accelerator, raw_all_gather, repeated, settle

    from lockstep import current

    warnings.filterwarnings("ignore")
    ranks = int(os.environ["WORLD_SIZE"])
    steps, calls = 10, 20
    trained = make_accelerator(LOCKSTEP, make_parts(steps, ranks), ranks)
    by_hand = {name: make_raw(make_parts(steps, ranks), ranks) for name in (RAW, AGAIN)}
    accelerator = new_accelerator(LOCKSTEP, ranks)
    group = current.require().group
    tensor = torch.randn(64, 10)
    flag = torch.zeros((), dtype=torch.int64)
    gather = raw_all_gather([tensor])

    def raw_trigger(_: object) -> bool:
        value = flag.clone()
        dist.all_reduce(value)
        return bool(value)

    raw: dict[str, Callable[[Any], object]] = {
        "gather": gather,
        "barrier": lambda _: dist.barrier(),
        "trigger": raw_trigger,
    }
    mine: dict[str, Callable[[Any], object]] = {
        "gather": accelerator.gather,
        "barrier": lambda _: accelerator.wait_for_everyone(),
        "trigger": lambda _: accelerator.check_trigger(),
    }
    works: dict[str, tuple[dict[str, Work], int, int]] = {
        "step": ({**{name: one.epoch for name, one in by_hand.items()}, LOCKSTEP: trained.epoch}, repeats, steps)
    }
    for name, call in mine.items():
        plain = repeated(raw[name], tensor, calls)
        works[name] = ({RAW: plain, AGAIN: plain, LOCKSTEP: repeated(call, tensor, calls)}, repeats, calls)
    with tempfile.TemporaryDirectory() as folder:
        works["save"] = (_saves(accelerator, Path(folder)), max(4, repeats // 3), 2)
        settle()
        found = {}
        for name, (blocks, rounds, pieces) in works.items():
            times = interleave(blocks, rounds, pieces)
            found[name] = {kind: asdict(compare(kind, times[kind], times[RAW])) for kind in times}
        found["comparison"] = _comparison(group, accelerator.gather, tensor, repeats * calls)
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        Path(file).write_text(json.dumps(found))


def _saves(accelerator: Any, folder: Path) -> dict[str, Callable[[list[float]], None]]:
    """Called on: all ranks. The state of a small training, durable on disk before anybody continues."""
    import torch
    import torch.distributed as dist
    from loop import make_parts
    from measure import clock

    parts = make_parts(1, 1)
    _, optimizer = accelerator.prepare(parts.model, parts.optimizer)
    for parameter in parts.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # so that there is a state

    def by_hand(ticks: list[float]) -> None:
        for _ in range(2):
            if accelerator.is_main_process:
                with open(folder / ".state", "wb") as file:
                    torch.save({"model": parts.model.state_dict(), "optimizer": parts.optimizer.state_dict()}, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(folder / ".state", folder / "state")
            dist.barrier()
            ticks.append(clock())

    def save(ticks: list[float]) -> None:
        for _ in range(2):
            accelerator.save_state(folder / "checkpoint")
            ticks.append(clock())

    return {RAW: by_hand, AGAIN: by_hand, LOCKSTEP: save}


def _comparison(group: Any, gather: Callable[[Any], Any], value: Any, calls: int) -> dict[str, float]:
    """Called on: all ranks. Microseconds that comparing a collective with every local peer's takes.

    Clocked inside gathers, with the comparison and without it, in turns; the slowest rank counts.
    """
    import torch
    import torch.distributed as dist
    from guard import ClockedBox, put

    box = group.box
    peers = box._peers
    spent: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(max(1, calls // 10)):
        for compares in (True, False):
            box._peers = peers if compares else None
            clocked: dict[str, list[float]] = {}
            with put(group, ClockedBox(box, clocked)):
                for _ in range(10):
                    gather(value)
            spent[compares] += clocked["enter"]
    box._peers = peers
    figures = torch.tensor([median(spent[True]), median(spent[False])], dtype=torch.float64) * 1e6
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    whole, without = figures.tolist()
    return {"enter": whole, "enter without": without, "comparison": max(whole - without, 0.01)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("measure", "join", "join-raw"))
    parser.add_argument("file")
    parser.add_argument("--repeats", type=int, default=12)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    if args.work == "measure":
        measure(args.file, args.repeats)
    else:
        {"join": join, "join-raw": join_raw}[args.work](args.file)


if __name__ == "__main__":
    main()
