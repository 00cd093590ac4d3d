"""Will the schedule end where the training ends? From numbers alone."""

from __future__ import annotations

from typing import Any


def schedule_length(scheduler: Any) -> int | None:
    """How many steps a scheduler is set for; None when it does not say, or when it is a warm-up."""
    for name in ("total_steps", "T_max", "total_iters"):
        length = getattr(scheduler, name, None)
        if isinstance(length, int) and length > 0:
            return None if _warms_up(scheduler) else length
    for function in getattr(scheduler, "lr_lambdas", ()):
        # Schedules made by functools.partial, as those of transformers, carry their length as an argument.
        length = getattr(function, "keywords", {}).get("num_training_steps")
        if isinstance(length, int) and length > 0:
            return length
    return None


def _warms_up(scheduler: Any) -> bool:
    """Whether the learning rate grows to its full size: that ends early on purpose."""
    start = getattr(scheduler, "start_factor", getattr(scheduler, "factor", None))  # LinearLR, ConstantLR
    return isinstance(start, (int, float)) and start < getattr(scheduler, "end_factor", 1.0)


def describe(
    length: int, steps_per_epoch: int, steps_per_update: int, batches_before: int | None, batches_after: int
) -> str | None:
    """One line when the length may have been counted in something else than what advances the schedule; else None.

    ``steps_per_epoch`` and ``steps_per_update`` are by how much an epoch and an update advance the schedule; the
    batches are those of the loader before and after it was prepared. The line is a fact and an "if", not a verdict:
    300 steps are 3 epochs of 100 batches, but also 12 epochs of 25 updates, or where the script stops counting.
    """
    if steps_per_epoch <= 0:
        return None

    def is_same(batches: int) -> bool:
        # Ranks get equally many batches, and the last window may be shorter: both round up.
        return abs(batches - steps_per_epoch) < 2 * steps_per_update

    fitting = [steps_per_epoch, batches_before] if batches_before is None or is_same(batches_before) else []
    if any(count and length % count == 0 for count in fitting):
        return None
    others = [batches for batches in (batches_after, batches_before) if batches and not is_same(batches)]
    other = next((batches for batches in others if length % batches == 0), None)
    if other is not None:
        meant = f"{length // other} epoch{'s' * (length // other > 1)} of {other} batches"
    elif length < steps_per_epoch:
        meant = "whole epochs"
    else:
        return None
    epochs = f"{length / steps_per_epoch:.3g} epoch{'s' * (length != steps_per_epoch)}"
    return (
        f"The learning rate schedule is {length} steps long, and one epoch advances it by {steps_per_epoch}: it ends "
        f"after {epochs}. If it was meant for {meant}, set its length to epochs × {steps_per_epoch}."
    )
