"""The evaluation loop of transformers' Trainer, on Accelerate's objects or on ours; a script for one process.

``python their_evaluation.py FOLDER accelerate|lockstep``: a small model is evaluated on datasets that the batch size
divides and on others; the losses, and how many labels the metrics got, are written to FOLDER/LIBRARY.json.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

FOLDER, LIBRARY = Path(sys.argv[1]), sys.argv[2]
if LIBRARY == "lockstep":
    import their_scripts  # beside this script

    # Before transformers has taken the names.
    their_scripts.put_ours_in_place()

from transformers import Trainer, TrainingArguments  # noqa: E402
from transformers import logging as chatter  # noqa: E402

POINTS = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))


class Points(Dataset[Any]):
    """Indexed."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"x": POINTS[place], "labels": POINTS[place].sum()}


class Stream(IterableDataset[Any]):
    """The same in a row, of unknown length."""

    def __init__(self, count: int) -> None:
        self.inner = Points(count)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.inner[place] for place in range(self.inner.count))


class Model(nn.Module):
    """One layer that computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss as a mean, and the predictions."""
        found = self.layer(x).squeeze(1)
        return {"loss": (found - labels).square().mean(), "logits": found}


def main() -> None:
    """All sizes."""
    chatter.set_verbosity_error()
    seen = {}
    cases = itertools.product((Points, Stream), (1, 7, 8, 10, 23), (1, 4, 5, 32), (False, True))
    for kind, count, batch_size, drop_last in cases:
        if drop_last and count < batch_size:
            continue  # there is nothing to evaluate
        arguments = TrainingArguments(
            output_dir=str(FOLDER / LIBRARY),
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            per_device_eval_batch_size=batch_size,
            dataloader_drop_last=drop_last,
        )
        trainer = Trainer(
            model=Model(),
            args=arguments,
            compute_metrics=lambda found: {"labels": len(found.label_ids), "mean": float(found.label_ids.mean())},
        )
        result = trainer.evaluate(kind(count))
        name = f"{kind.__name__} {count} by {batch_size}{' drop_last' if drop_last else ''}"
        seen[name] = {key: result[f"eval_{key}"] for key in ("loss", "labels", "mean")}
    (FOLDER / f"{LIBRARY}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
