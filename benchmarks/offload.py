"""A forward of a disk-offloaded transformer of 12 blocks, next to Accelerate's and to the same model in memory.

All three run in one process, in turns and in an order that keeps changing; Lockstep's forward is compared with
Accelerate's of the same round. The files are in the page cache, so this is the time of the libraries and not of the
disk; with --cold the cache of the weights' files is dropped before each forward (as far as the system does so).
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import accelerate
import torch
from measure import find_versions
from torch import nn

import lockstep

BAR = 0.8
"""At most this many times Accelerate's time."""
WORDS = 8000


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        batch, length, width = values.shape
        query, key, value = self.qkv(self.norm1(values)).view(batch, length, 3, 12, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return values + self.down(nn.functional.gelu(self.up(self.norm2(values))))


def transformer(width: int, blocks: int) -> nn.Module:
    layers = (Block(width) for _ in range(blocks))
    return nn.Sequential(nn.Embedding(WORDS, width), *layers, nn.Linear(width, WORDS)).eval()


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*.dat"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run(length: int, rounds: int, width: int, *, cold: bool) -> dict[str, list[float]]:
    """Seconds of each forward, by contender."""
    whole = transformer(width, 12)
    models = {"in memory": whole, "accelerate": copy.deepcopy(whole), "lockstep": copy.deepcopy(whole)}
    words = torch.randint(0, WORDS, (1, length))
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        accelerate.disk_offload(models["accelerate"], os.path.join(place, "accelerate"))
        lockstep.disk_offload(models["lockstep"], os.path.join(place, "lockstep"))
        wanted = whole(words)
        for model in models.values():  # twice: the order is learnt in the first
            assert torch.equal(model(words), wanted)
            assert torch.equal(model(words), wanted)
        seconds: dict[str, list[float]] = {name: [] for name in models}
        order = list(models)
        for _ in range(rounds):
            random.shuffle(order)
            for name in order:
                if cold:
                    drop_cache(Path(place))
                start = time.perf_counter()
                models[name](words)
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    print(find_versions("torch", "accelerate"), f"{torch.get_num_threads()} threads, {args.rounds} rounds")
    print("| tokens | in memory | Accelerate | Lockstep | Lockstep / Accelerate, median | quartiles |")
    print("|---|---|---|---|---|---|")
    missed = False
    for length in args.lengths:
        seconds = run(length, args.rounds, args.width, cold=args.cold)
        ratios = sorted(ours / theirs for ours, theirs in zip(seconds["lockstep"], seconds["accelerate"], strict=True))
        quarter = len(ratios) // 4
        cells = " | ".join(f"{1e3 * median(values):.0f} ms" for values in seconds.values())
        spread = f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"
        print(f"| {length} | {cells} | {median(ratios):.2f} | {spread} |", flush=True)
        missed = missed or median(ratios) > BAR
    print(f"bar: {BAR}, {'missed' if missed else 'met'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
