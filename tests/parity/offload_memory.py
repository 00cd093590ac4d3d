"""The most memory that forwards of a disk-offloaded GPT-2 take: python offload_memory.py LIBRARY FOLDER.

Prints the growth of the resident memory at its peak, and of what is not a file's, in bytes.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import torch
import transformers


def field(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    library, folder = sys.argv[1:]
    offload = importlib.import_module(f"{library}.big_modeling")
    config = transformers.GPT2Config(vocab_size=5000, n_positions=64, n_embd=768, n_layer=6, n_head=12)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    offload.disk_offload(model, folder)
    words = torch.arange(16)[None]
    with torch.no_grad():
        model(words[:, :1])  # what is set up once is there
        before = field("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        for _ in range(3):
            total = model(words).logits.sum().item()
    peak = field("VmHWM") - before
    print(json.dumps({"peak": peak, "whole": field("VmHWM"), "sum": total}))


if __name__ == "__main__":
    main()
