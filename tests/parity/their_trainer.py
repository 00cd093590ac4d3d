"""The Trainer of transformers, on Accelerate's objects or on ours; a script for one rank.

``python their_trainer.py FOLDER accelerate|lockstep``: a small model is trained in several ways, and the losses that
the trainer logs and evaluates are written to FOLDER/LIBRARY.json by the main process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

FOLDER, LIBRARY = Path(sys.argv[1]), sys.argv[2]
if LIBRARY == "lockstep":
    import their_scripts  # beside this script

    # Before transformers has taken the names.
    their_scripts.put_ours_in_place()

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402
from transformers import logging as chatter  # noqa: E402

TEXTS = torch.randint(0, 64, (60, 16), generator=torch.Generator().manual_seed(0))
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"num_train_epochs": 2},
    "accumulated": {"num_train_epochs": 1, "gradient_accumulation_steps": 3},
    "clipped": {"max_steps": 5, "max_grad_norm": 0.3, "warmup_steps": 2, "lr_scheduler_type": "cosine"},
    "workers": {"num_train_epochs": 1, "dataloader_drop_last": True, "dataloader_num_workers": 1},
    "recomputed": {"num_train_epochs": 1, "gradient_checkpointing": True},
    "seedable": {"num_train_epochs": 1, "accelerator_config": {"use_seedable_sampler": True, "even_batches": True}},
    "stream": {"max_steps": 6},
    "saved": {"max_steps": 4, "save_steps": 2},
    "resumed": {"max_steps": 6, "save_steps": 2, "resume": "saved/checkpoint-4"},
}


class Texts(Dataset[Any]):
    """A few lines of numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": TEXTS[place], "labels": TEXTS[place]}


class Stream(IterableDataset[Any]):
    """All of them, one after the other."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for line in TEXTS:
            yield {"input_ids": line, "labels": line}


def trained(way: str, resume: str | None = None, **options: Any) -> tuple[bool, dict[str, Any]]:
    """What the trainer logged, and what it found in the end; and whether this is the main process."""
    torch.manual_seed(0)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    small = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, **still)
    each = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "logging_steps": 1, "seed": 1}
    where = FOLDER / LIBRARY / way
    arguments = TrainingArguments(
        output_dir=str(where), report_to=[], use_cpu=True, disable_tqdm=True, **each, **options
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(small),
        args=arguments,
        train_dataset=Stream() if way == "stream" else Texts(50),
        eval_dataset=Texts(21),
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(FOLDER / LIBRARY / resume))
    logged = [
        [step["loss"], step["grad_norm"], step["learning_rate"]] for step in trainer.state.log_history if "loss" in step
    ]
    return trainer.is_world_process_zero(), {"logged": logged, "loss": trainer.evaluate()["eval_loss"]}


def main() -> None:
    """All ways."""
    chatter.set_verbosity_error()
    seen = {}
    for way, options in WAYS.items():
        is_main, seen[way] = trained(way, **options)
    if is_main:
        (FOLDER / f"{LIBRARY}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
