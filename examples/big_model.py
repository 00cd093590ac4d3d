"""Run a model whose blocks stay on disk, and compare with the same model in memory.

    python examples/big_model.py                  # 12 blocks, 340 MB
    python examples/big_model.py --blocks 2 --width 64

The model is written to files, built again without memory for its weights, and run from the files.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from lockstep import Accelerator, init_empty_weights, load_checkpoint_and_dispatch


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        batch, length, width = values.shape
        query, key, value = self.qkv(self.norm1(values)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return values + self.down(nn.functional.gelu(self.up(self.norm2(values))))


class Transformer(nn.Module):
    def __init__(self, blocks: int, width: int, words: int = 1000) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(words)))


def timed(model: nn.Module, words: torch.Tensor) -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    with torch.no_grad():
        logits = model(words)
    return logits, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    words = torch.randint(0, 1000, (1, 64))
    whole = Transformer(args.blocks, args.width).eval()
    with tempfile.TemporaryDirectory() as place:
        accelerator.save_model(whole, Path(place) / "model", max_shard_size="100MB")
        with init_empty_weights():
            model = Transformer(args.blocks, args.width).eval()
        device_map = {"": "cpu", "blocks": "disk"}
        load_checkpoint_and_dispatch(model, Path(place) / "model", device_map, offload_folder=Path(place) / "offload")
        for _ in range(2):  # the second time, blocks are read ahead
            wanted, seconds = timed(whole, words)
            logits, offloaded_seconds = timed(model, words)
    held = sum(weight.nbytes for weight in model.parameters() if not weight.is_meta)
    total = sum(weight.nbytes for weight in whole.parameters())
    accelerator.print(f"the same logits: {torch.equal(logits, wanted)}")
    accelerator.print(f"held in memory:  {held / 1e6:.1f} of {total / 1e6:.1f} MB")
    accelerator.print(f"a forward takes: {1e3 * offloaded_seconds:.0f} ms, in memory {1e3 * seconds:.0f} ms")


if __name__ == "__main__":
    main()
