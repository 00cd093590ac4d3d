"""What looking for the first bad number costs, next to the detector of transformers in the same run.

    python benchmarks/numerics.py               statistics, the detector, the tier that is always on
    python benchmarks/numerics.py --only stats

Each contender has a model of its own with the same weights. ``none`` is the model without a detector. The bars:
statistics of a tensor of 1M elements and more at least 8 times as fast; the detector adds at most a fifth of what the
other one adds to a forward; the tier that is always on adds at most 3 % to a training step. The other detector looks at
forwards only; ours is measured twice, as it is (it is then ready to look at gradients and updates too), and with
``gradients=False``. A whole step shows what looking at those costs, which nothing can be compared with.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from measure import Figures, clock, compare, find_versions, interleave, settle, table
from rich.console import Console
from torch import Tensor, nn

from lockstep import Accelerator
from lockstep.debug_utils import DebugUnderflowOverflow
from lockstep.numerics.stats import measure

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIDTH, TOKENS = 256, (8, 128)
MLP_WIDTH, MLP_BATCH, BLOCKS = 512, 32, 12


def make_encoder() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(*TOKENS, WIDTH)


def make_mlp() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    blocks = [part for _ in range(BLOCKS) for part in (nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.ReLU())]
    return nn.Sequential(*blocks), torch.randn(MLP_BATCH, MLP_WIDTH)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"encoder": make_encoder, "MLP": make_mlp}


def their_detector(model: nn.Module) -> Any:
    from transformers.debug_utils import DebugUnderflowOverflow as Theirs

    return Theirs(model)


DETECTORS: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda model: None,
    "none (again)": lambda model: None,
    "transformers": their_detector,
    "lockstep": DebugUnderflowOverflow,
    "lockstep, forward only": lambda model: DebugUnderflowOverflow(model, gradients=False),
}


# --- statistics of one tensor ----------------------------------------------------------------------------------------


def their_statistics(tensor: Tensor) -> None:
    from transformers.debug_utils import detect_overflow, get_abs_min_max

    get_abs_min_max(tensor, "output")
    detect_overflow(tensor, "output")


def time_statistics(repeats: int) -> list[list[str]]:
    rows = []
    for name, dtype in DTYPES.items():
        for size in (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24):
            tensor = torch.randn(size).to(dtype)
            calls = max(1, (1 << 20) // size)
            took: dict[str, list[float]] = {"theirs": [], "ours": []}
            looks: dict[str, Callable[[Tensor], Any]] = {"theirs": their_statistics, "ours": measure}
            for look in looks.values():
                look(tensor)
            for _ in range(repeats):
                for who in random.sample(list(looks), 2):
                    begin = clock()
                    for _ in range(calls):
                        looks[who](tensor)
                    took[who].append((clock() - begin) / calls * 1e6)
            theirs, ours = min(took["theirs"]), min(took["ours"])
            ratio = median(a / b for a, b in zip(took["theirs"], took["ours"], strict=True))
            bar = "" if size < 1 << 20 else "met" if ratio >= 8 else "NOT MET"
            rows.append(
                [name, f"{size:,}", f"{theirs:.0f}", f"{ours:.0f}", f"{theirs / ours:.1f}", f"{ratio:.1f}", bar]
            )
    return rows


# --- the detector ----------------------------------------------------------------------------------------------------


def make_step(kind: str, dtype: torch.dtype, who: str, training: bool) -> Callable[[list[float]], None]:
    model, batch = MODELS[kind]()
    model, batch = model.to(dtype), batch.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    keeper = DETECTORS[who](model)

    def run(ticks: list[float]) -> None:
        assert who.startswith("none") or keeper is not None
        for _ in range(2):
            loss = model(batch).float().square().mean()
            if training:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            ticks.append(clock())

    return run


def time_detectors(repeats: int) -> list[list[str]]:
    rows = []
    for kind in MODELS:
        for name, dtype in DTYPES.items():
            for what, training in (("forward", False), ("step", True)):
                if training and kind != "MLP":
                    continue
                blocks = {who: make_step(kind, dtype, who, training) for who in DETECTORS}
                settle()
                times = interleave(blocks, repeats, 2)
                told = {who: compare(who, times[who], times["none"]) for who in blocks if who != "none"}
                rows += _rows(f"{kind} {what}, {name}", told)
    return rows


def _rows(title: str, told: dict[str, Figures]) -> list[list[str]]:
    theirs = told["transformers"]
    rows = []
    for who, figures in told.items():
        share = figures.added_best / theirs.added_best
        pairs = figures.added / theirs.added
        bar = ("met" if pairs <= 0.2 else "NOT MET") if who.startswith("lockstep") else ""
        added = f"+{100 * (figures.ratio - 1):.1f} %"
        rows.append(
            [title, who, f"{figures.median / 1000:.1f}", added, f"{100 * (figures.ratio_of_best - 1):+.1f} %",
             f"{pairs:.3f}", f"{share:.3f}", bar]
        )  # fmt: skip
    return rows


# --- always on -------------------------------------------------------------------------------------------------------


def make_policy_step(kind: str, policy: str, clip: bool) -> Callable[[list[float]], None]:
    accelerator = Accelerator(cpu=True, nan_policy=policy.removesuffix(" (again)"))
    model, batch = MODELS[kind]()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    model.eval() if kind == "encoder" else model.train()

    def run(ticks: list[float]) -> None:
        for _ in range(4):
            accelerator.backward(model(batch).square().mean())
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ticks.append(clock())

    return run


def time_policies(repeats: int) -> list[list[str]]:
    rows = []
    for kind in MODELS:
        for clip in (False, True):
            blocks = {
                policy: make_policy_step(kind, policy, clip)
                for policy in ("off", "off (again)", "warn", "skip", "stop")
            }
            settle()
            times = interleave(blocks, repeats if kind == "MLP" else max(10, repeats // 4), 4)
            for policy in blocks:
                if policy == "off":
                    continue
                figures = compare(policy, times[policy], times["off"])
                bar = "" if "again" in policy else "met" if figures.ratio <= 1.03 else "NOT MET"
                rows.append(
                    [f"{kind} step{', clipped' if clip else ''}", policy, f"{figures.median / 1000:.2f}",
                     f"{figures.added:+.0f} us", f"{figures.ratio:.3f}", f"{figures.ratio_typical:.3f}", bar]
                )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["stats", "detector", "policy"])
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    console = Console(width=160, highlight=False)
    versions = find_versions("torch", "transformers", "torch-lockstep")
    console.print(", ".join(f"{name} {version}" for name, version in versions.items()))
    console.print(f"{os.cpu_count()} cores, 1 thread, load before: {os.getloadavg()[0]:.2f}\n")
    if args.only in (None, "stats"):
        headings = ["dtype", "elements", "transformers, us", "lockstep, us", "times faster: bests", "pairs", "bar 8"]
        console.print(table("Statistics of a tensor", headings, time_statistics(max(7, args.repeats // 3))))
    if args.only in (None, "detector"):
        with contextlib.redirect_stdout(None):
            rows = time_detectors(args.repeats)
        headings = ["work", "detector", "median, ms", "added: pairs", "bests", "of theirs: pairs", "bests", "bar 0.2"]
        console.print(table("The detector", headings, rows))
    if args.only in (None, "policy"):
        headings = ["work", "nan_policy", "median, ms", "added", "ratio to off: pairs", "typical", "bar 1.03"]
        console.print(table("Always on", headings, time_policies(args.repeats)))


if __name__ == "__main__":
    main()
