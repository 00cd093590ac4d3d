"""Will the schedule end where the training ends? A pure judgement from four numbers."""

from __future__ import annotations

from typing import Any


def schedule_length(scheduler: Any) -> int | None:
    """How many steps a scheduler is set for; None when it does not say."""
    for name in ("total_steps", "T_max", "total_iters"):
        length = getattr(scheduler, name, None)
        if isinstance(length, int) and length > 0:
            return length
    for function in getattr(scheduler, "lr_lambdas", ()):
        # Schedules made by functools.partial, as those of transformers, carry their length as an argument.
        length = getattr(function, "keywords", {}).get("num_training_steps")
        if isinstance(length, int) and length > 0:
            return length
    return None


def judge(length: int, steps_per_epoch: int, batches_before: int | None, batches_after: int) -> str | None:
    """One line when the schedule will end early, or will not end; None when it fits.

    ``steps_per_epoch`` is by how much an epoch advances the schedule; the batches are those of the loader before and
    after it was prepared. A length that is a whole number of epochs in one of these counts tells how many were meant.
    """
    if steps_per_epoch <= 0:
        return None
    epochs = length / steps_per_epoch
    if length < steps_per_epoch:
        return _line(length, steps_per_epoch, epochs, "ends early, before the first epoch is over")
    if length % steps_per_epoch == 0 and batches_before in (None, steps_per_epoch):
        return None
    for batches in (batches_after, batches_before):
        if batches and length % batches == 0 and length // batches != epochs:
            meant = length // batches
            verdict = "ends early" if epochs < meant else f"will not end within {meant} epoch{'s' * (meant > 1)}"
            return _line(length, steps_per_epoch, epochs, f"{verdict}, if {meant} × {batches} batches were meant")
    return None


def _line(length: int, steps_per_epoch: int, epochs: float, verdict: str) -> str:
    return (
        f"The learning rate schedule is {length} steps long, and one epoch advances it by {steps_per_epoch}, so it "
        f"takes {epochs:.3g} epochs: it {verdict}. Set its length to epochs × {steps_per_epoch}, or use "
        "Accelerator(scheduler_unit='update') and count optimizer updates."
    )
