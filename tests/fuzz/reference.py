"""What a program must have seen: one process of plain torch computes it from the samples that each rank trained on.

The samples are checked first, against the rule by which a dataset is divided between ranks. Then training is replayed:
the gradient of a step is the mean over the ranks, and over the micro-batches of an accumulation window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz import parts
from tests.fuzz.program import Program

Seen = dict[str, Any]
TOLERANCE = {"no": 2e-5, "bf16": 5e-3}


def differences(program: Program, ranks: list[Seen]) -> list[str]:
    """One line for each thing that is not as it must be."""
    found = list(_sample_differences(program, ranks))
    if not found:
        found = list(_extra_differences(program, ranks))
        found += _number_differences(program, ranks)
    return found


# --- which samples each rank gets --------------------------------------------------------------------------------


def divide(order: list[int], batch_size: int, ranks: int, *, split: bool, drop_last: bool, even: bool) -> list[Any]:
    """Per rank, its batches: one for each rank at a time, in order; the end is filled up from the start."""
    whole = batch_size if split else batch_size * ranks
    share = whole // ranks
    left = len(order) % whole
    if left and drop_last:
        order = order[: len(order) - left]
    elif left and even and ranks > 1:
        order = order + [order[place % len(order)] for place in range(whole - left)]
    starts = range(0, len(order), whole)
    dealt = [[order[start + rank * share : start + (rank + 1) * share] for start in starts] for rank in range(ranks)]
    return [[batch for batch in batches if batch] for batches in dealt]


def divide_batches(batches: list[list[int]], ranks: int, *, even: bool) -> list[Any]:
    """Per rank, its batches, where whole batches are given out in turn."""
    missing = -len(batches) % ranks if even else 0
    batches = batches + [batches[place % ranks] for place in range(missing)]
    return [batches[rank::ranks] for rank in range(ranks)]


def expected_batches(program: Program, order: list[int], ranks: int) -> list[Any]:
    """Per rank, its batches of one epoch."""
    if program.sampler == "batch_sampler":
        return divide_batches(
            parts.Buckets(program.samples, program.batch_size).batches, ranks, even=program.even_batches
        )
    return divide(
        order,
        program.batch_size,
        ranks,
        split=program.split_batches,
        drop_last=program.drop_last,
        even=program.even_batches,
    )


def _steps(program: Program, batches: int, epoch: int, ranks: int) -> int:
    """Steps in an epoch over so many batches."""
    if program.iteration == "cycle":
        steps = 7 if batches else 0
    elif program.iteration == "redraw":
        steps = max(0, batches - 2)
    elif program.iteration == "islice":
        steps = min(3, batches)
    elif program.iteration == "two_loaders":
        whole = program.batch_size * (1 if program.split_batches else ranks)
        steps = min(batches, -(-parts.HELD_OUT // whole))
    else:
        steps = batches
    steps -= min(steps, program.skip) if epoch == 0 else 0
    return steps if program.stop_after is None else min(steps, program.stop_after)


def _order(program: Program, drawn: list[Any]) -> list[int]:
    """The order of an epoch, as far as the ranks drew it; the rest in any order."""
    if program.order_is_known or program.sampler == "batch_sampler":
        return list(range(program.samples))
    rounds = itertools.zip_longest(*drawn, fillvalue=()) if program.join else zip(*drawn, strict=False)
    order = [sample for batches in rounds for batch in batches for sample in batch][: program.samples]
    rest = [sample for sample in range(program.samples) if sample not in set(order)]
    return order + rest[: program.samples - len(order)]


def _sample_differences(program: Program, ranks: list[Seen]) -> Iterator[str]:
    counted = [0] * len(ranks)
    for epoch in range(program.epochs):
        drawn = [seen["drawn"][epoch] for seen in ranks]
        if program.stream and program.workers:
            yield from _stream_differences(program, drawn, epoch)
            continue
        skipped = program.skip if epoch == 0 else 0
        order = _order(program, drawn)
        shuffled = program.sampler in ("shuffle", "seedable")
        if shuffled and sorted(order) != list(range(program.samples)):
            yield f"epoch {epoch}: not every sample once: {order}"
        for rank, batches in enumerate(expected_batches(program, order, len(ranks))):
            counted[rank] += _steps(program, len(batches), epoch, len(ranks))
            if skipped and not program.order_is_known:
                continue  # what was skipped is not known, and so neither is what the end is filled with
            mine = drawn[rank]
            if not program.order_is_known and not program.join:
                mine = mine[: min(map(len, drawn))]  # of a batch more on one rank nobody knows the place
            due = batches[skipped : skipped + len(mine)]
            if mine != due:
                yield f"epoch {epoch}, rank {rank}: drew {mine}, expected {due}"
        if program.metrics and not (skipped and not program.order_is_known):
            yield from _metric_differences(program, order, ranks, epoch)
    for rank, seen in enumerate(ranks):
        if len(seen["steps"]) != counted[rank] and not (program.stream and program.workers):
            yield f"rank {rank}: {len(seen['steps'])} steps, expected {counted[rank]}"


def _stream_differences(program: Program, drawn: list[Any], epoch: int) -> Iterator[str]:
    """Workers of a stream take turns by batches: what comes at all is checked, and in how many steps."""
    seen = {sample for batches in drawn for batch in batches for sample in batch}
    whole = program.iteration == "plain" and not (program.stop_after or program.skip or program.drop_last)
    if whole and seen != set(range(program.samples)):
        yield f"epoch {epoch}: samples {sorted(set(range(program.samples)) - seen)} were not seen"
    if program.iteration != "plain" or program.join or (len(drawn) == 1 and program.workers > 1):
        return  # on one process, each worker's last batch may be short
    for rank, batches in enumerate(expected_batches(program, list(range(program.samples)), len(drawn))):
        due = _steps(program, len(batches), epoch, len(drawn))
        if len(drawn[rank]) != due:
            yield f"epoch {epoch}, rank {rank}: {len(drawn[rank])} steps, expected {due}"


def _metric_differences(program: Program, order: list[int], ranks: list[Seen], epoch: int) -> Iterator[str]:
    """Every sample that was trained on is in the metric once."""
    whole = program.batch_size * (1 if program.split_batches else len(ranks))
    skipped = program.skip if epoch == 0 else 0
    for rank, seen in enumerate(ranks):
        batches = expected_batches(program, order, len(ranks))[rank]
        steps = _steps(program, len(batches), epoch, len(ranks))
        due = order[skipped * whole : (skipped + steps) * whole]
        if seen["metrics"][epoch] != due:
            yield f"epoch {epoch}, rank {rank}: gather_for_metrics gave {seen['metrics'][epoch]}, expected {due}"


def _updates(program: Program, ranks: int) -> list[bool]:
    """For each step whether an update follows: when a window is full, and at the end of the loader."""
    updates: list[bool] = []
    filled = 0
    for epoch in range(program.epochs):
        batches = len(expected_batches(program, list(range(program.samples)), ranks)[0])
        last = batches - (program.skip if epoch == 0 else 0) - 1
        closes = program.sync_with_dataloader and program.how == "accumulate"
        for step in range(_steps(program, batches, epoch, ranks)):
            at_end = closes and step == last
            filled = 0 if at_end else filled + 1
            updates.append(at_end or filled % program.accumulation == 0)
    return updates


# --- what else the script did ------------------------------------------------------------------------------------


def _extra_differences(program: Program, ranks: list[Seen]) -> Iterator[str]:
    world = range(len(ranks))
    held_out = divide(
        list(range(parts.HELD_OUT)),
        program.batch_size,
        len(ranks),
        split=program.split_batches,
        drop_last=False,
        even=program.even_batches,
    )
    fixed = {
        "gather": [value for rank in world for value in (rank, 10 * rank)],
        "reduce": sum(1.0 + rank for rank in world) / len(ranks),
        "broadcast_object_list": ["from 0", 0],
        "gather_object": [f"from {rank}" for rank in world],
        "pad": [len(ranks)],
        "trigger": [True, False],
        "split": list(range(7)),
        "evaluate": list(range(parts.HELD_OUT)),
    }
    on_main = {
        "main_first": "only here",
        "main_evaluates_prepared": [sample for batch in held_out[0] for sample in batch],
        "main_evaluates_raw": list(range(parts.HELD_OUT)),
    }
    for rank, seen in enumerate(ranks):
        for name, value in seen["extras"]:
            if name in ("peek", "nested"):
                continue  # its batches are of another epoch
            due = fixed.get(name, on_main.get(name) if rank == 0 else None)
            if value != due:
                yield f"rank {rank}: {name} gave {value}, expected {due}"


# --- training ----------------------------------------------------------------------------------------------------


def _number_differences(program: Program, ranks: list[Seen]) -> Iterator[str]:
    if program.iteration in ("plain", "islice") and not (program.join or (program.stream and program.workers)):
        due_updates = _updates(program, len(ranks))
        if [updated for _, _, updated in ranks[0]["steps"]] != due_updates:
            yield f"updates {[updated for _, _, updated in ranks[0]['steps']]}, expected {due_updates}"
    due = Replay(program, ranks).run()
    tolerance = TOLERANCE[program.precision]
    for rank, seen in enumerate(ranks):
        updates = [updated for _, _, updated in seen["steps"]]
        if rank and not program.join and updates != [updated for _, _, updated in ranks[0]["steps"]]:
            yield f"rank {rank}: updates {updates}, and others on rank 0"
        values = {name: seen[name] for name in ("rates", "norms", "parameters", "buffers")}
        values["losses"] = [loss for _, loss, _ in seen["steps"]]
        expected = {**due, "losses": due["losses"][rank]}
        for name, value in values.items():
            if name == "buffers" and rank:
                continue  # each rank has its own until the next forward
            if name == "rates" and program.join:
                continue  # a rank that is through stays at its own until the end of the region
            if not close(value, expected[name], tolerance):
                yield f"rank {rank}: {name} {_short(value)}, expected {_short(expected[name])}"


def close(left: list[float], right: list[float], tolerance: float) -> bool:
    """Whether these are the same numbers but for rounding."""
    return len(left) == len(right) and all(
        math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance) for one, other in zip(left, right, strict=True)
    )


def _short(values: list[float]) -> str:
    return str([round(value, 6) for value in values[:24]])


def _aligned(program: Program, ranks: list[Seen]) -> list[Any]:
    """For each step what every rank trained on in it; None where a rank has run out of batches of that epoch."""
    if not program.join:
        return list(zip(*(seen["steps"] for seen in ranks), strict=True))
    aligned: list[Any] = []
    left = [iter(seen["steps"]) for seen in ranks]
    for drawn in zip(*(seen["drawn"] for seen in ranks), strict=True):
        epoch = [list(itertools.islice(steps, len(batches))) for steps, batches in zip(left, drawn, strict=True)]
        aligned += itertools.zip_longest(*epoch)
    return aligned


class Replay:
    """Training in one process, from the samples that each rank had in each step."""

    def __init__(self, program: Program, ranks: list[Seen]) -> None:
        self.program = program
        self.ranks = len(ranks)
        self.steps = _aligned(program, ranks)
        self.samples = parts.Samples(program.samples)
        self.models = parts.build_models(program)
        self.optimizers = parts.build_optimizers(program, self.models)
        self.schedule = parts.build_schedule(program, self.optimizers[0])
        self.seen: dict[str, Any] = {"losses": [[] for _ in ranks], "rates": [], "norms": []}

    def run(self) -> dict[str, Any]:
        window: list[int] = []
        for step, taken in enumerate(self.steps):
            window.append(step)
            updated = any(mine[2] for mine in taken if mine is not None)
            if self.program.model == "gan":
                self._gan_step(step)
            elif updated:
                self._update(window)
            if updated:
                window = []
                self.seen["rates"].append(self.optimizers[0].param_groups[0]["lr"])
        self._leave_open(window)
        return {**self.seen, **parts.flat_state(self.models)}

    def _update(self, window: list[int]) -> None:
        before = self.optimizers[0].param_groups[0]["lr"]
        length = self.program.accumulation if self.program.how == "no_sync" else len(window)
        models = [self._cast(model) for model in self.models]
        self._average(window, lambda batch: parts.loss_of(models, batch)[0] / length, length)
        self.seen["rates"] += [before] * (len(window) - 1)
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        if self.program.clip == "norm":
            self.seen["norms"].append(float(nn.utils.clip_grad_norm_(parameters, 0.1)))
        elif self.program.clip == "value":
            nn.utils.clip_grad_value_(parameters, 0.01)
        self.optimizers[0].step()
        self._advance_schedule()
        self.optimizers[0].zero_grad()

    def _leave_open(self, window: list[int]) -> None:
        """The losses of a window that no update has closed."""
        if window and self.program.model != "gan":
            models = [self._cast(model) for model in self.models]
            self._average(window, lambda batch: parts.loss_of(models, batch)[0], 1)
            self.seen["rates"] += [self.optimizers[0].param_groups[0]["lr"]] * len(window)

    def _gan_step(self, step: int) -> None:
        generator, critic = (self._cast(model) for model in self.models)
        for loss_of, optimizer in zip(
            (parts.critic_loss, parts.generator_loss), reversed(self.optimizers), strict=True
        ):
            losses = [seen.copy() for seen in self.seen["losses"]]
            self._average([step], lambda batch, of=loss_of: of(generator, critic, batch), 1)  # type: ignore[misc]
            if loss_of is parts.critic_loss:
                self.seen["losses"] = losses  # only the generator's is kept
            optimizer.step()
            for each in self.optimizers:
                each.zero_grad()
        self._advance_schedule()

    def _average(self, steps: list[int], loss_of: Callable[[Any], Tensor], scale: int) -> None:
        """Put the mean gradient of these steps over all ranks into the models; keep the losses."""
        trained = [parameter for model in self.models for parameter in model.parameters() if parameter.requires_grad]
        total: dict[int, Tensor] = {}
        buffers = [buffer.clone() for model in self.models for buffer in model.buffers()]
        after: list[Tensor] = buffers
        for rank in range(self.ranks):
            self._set_buffers(buffers)
            for step in steps:
                if (mine := self.steps[step][rank]) is None:
                    continue  # this rank is through, and adds nothing
                loss = loss_of(self.samples.take(mine[0]))
                self.seen["losses"][rank].append(loss.item() * scale)
                for place, gradient in enumerate(torch.autograd.grad(loss, trained, allow_unused=True)):
                    if gradient is not None:
                        total[place] = total.get(place, torch.zeros_like(gradient)) + gradient / self.ranks
            if rank == 0:
                after = [buffer.clone() for model in self.models for buffer in model.buffers()]
        self._set_buffers(after)
        for place, parameter in enumerate(trained):
            parameter.grad = total.get(place)

    def _set_buffers(self, values: list[Tensor]) -> None:
        for buffer, value in zip((buffer for model in self.models for buffer in model.buffers()), values, strict=True):
            buffer.copy_(value)

    def _advance_schedule(self) -> None:
        if self.schedule is not None:
            for _ in range(1 if self.program.split_batches else self.ranks):
                self.schedule.step()

    def _cast(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        """The model's prediction, computed in the program's precision, in fp32."""
        bf16 = self.program.precision == "bf16"

        def forward(inputs: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                return parts.prediction(model(inputs)).float()

        return forward
