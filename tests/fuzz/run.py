"""What each rank runs: programs one after the other, each with an accelerator of its own.

``run.py LIBRARY FOLDER SEED... [CHOICE=VALUE...]`` under any launcher. Each rank writes FOLDER/<rank>.jsonl: a line
when a program begins, and one with what was seen when it has ended.
"""

from __future__ import annotations

import importlib
import itertools
import json
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.fuzz import parts
from tests.fuzz.parts import Batch
from tests.fuzz.program import Program, draw, parse


class Run:
    """One program on one rank. Methods named after an extra are what the script does beside its training."""

    def __init__(self, library: str, program: Program, folder: Path) -> None:
        self.program = program
        self.folder = folder
        self.utils = importlib.import_module(f"{library}.utils")
        self.logger = importlib.import_module(f"{library}.logging").get_logger("fuzz")
        self.accelerator = self._accelerator(importlib.import_module(library))
        self.models = parts.build_models(program)
        self.optimizers: list[Any] = parts.build_optimizers(program, self.models)
        self.schedule = parts.build_schedule(program, self.optimizers[0])
        self.loader: Any = parts.training_loader(program)
        self.held_out: Any = DataLoader(parts.Samples(parts.HELD_OUT), batch_size=program.batch_size)
        self._prepare()
        self.micro_batches = 0
        self.predicted = torch.empty(0)
        self.seen: dict[str, Any] = {
            "drawn": [],  # per epoch, the samples of each batch that came from the loader
            "steps": [],  # per micro-batch: samples, loss, whether an update followed
            "rates": [],
            "norms": [],
            "metrics": [],  # per epoch, the samples that gather_for_metrics gave
            "extras": [],
        }

    def _accelerator(self, library: Any) -> Any:
        program = self.program
        data = library.DataLoaderConfiguration(
            even_batches=program.even_batches,
            split_batches=program.split_batches,
            dispatch_batches=program.dispatch_batches,
            use_seedable_sampler=program.sampler == "seedable",
        )
        handlers = []
        if program.model == "unused":
            handlers.append(library.DistributedDataParallelKwargs(find_unused_parameters=True))
        return library.Accelerator(
            cpu=True,
            mixed_precision=program.precision,
            dataloader_config=data,
            gradient_accumulation_plugin=self.utils.GradientAccumulationPlugin(
                num_steps=program.accumulation if program.how == "accumulate" else 1,
                sync_with_dataloader=program.sync_with_dataloader,
                sync_each_batch=program.sync_each_batch,
            ),
            kwargs_handlers=handlers,
        )

    def _prepare(self) -> None:
        prepared = self.accelerator.prepare(*self.models, *self.optimizers, self.loader, self.held_out)
        self.models = list(prepared[: len(self.models)])
        self.optimizers = list(prepared[len(self.models) : -2])
        self.loader, self.held_out = prepared[-2:]
        if self.schedule is not None:
            self.schedule = self.accelerator.prepare(self.schedule)

    @property
    def model(self) -> Any:
        return self.models[0]

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    # --- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Called on: all ranks. Train; what was seen."""
        accelerator, program = self.accelerator, self.program
        for epoch in range(program.epochs):
            self.seen["drawn"].append([])
            self.seen["metrics"].append([])
            with accelerator.join_uneven_inputs(self.models) if program.join else nullcontext():
                if program.resume:
                    self.interrupted_epoch()
                else:
                    self.epoch(epoch)
        accelerator.wait_for_everyone()
        unwrapped = [accelerator.unwrap_model(model) for model in self.models]
        return {**self.seen, **parts.flat_state(unwrapped)}

    def epoch(self, epoch: int) -> None:
        program = self.program
        loader = self.loader
        if program.skip and epoch == 0:
            loader = self.accelerator.skip_first_batches(loader, program.skip)
        for step, batch in enumerate(self.batches(loader)):
            self.step(batch)
            if epoch == 0:
                self.beside(step, batch)
            if step + 1 == program.stop_after:
                break

    def interrupted_epoch(self) -> None:
        """Save after a batch, train on, and resume from what was saved."""
        folder = self.folder / f"state-{self.program.seed}"
        saved = None
        for step, batch in enumerate(self.batches(self.loader)):
            self.step(batch)
            if step + 1 == self.program.resume_at:
                self.beside(0, batch)
                self.accelerator.save_state(str(folder))
                saved = json.dumps([self.seen, self.micro_batches])
            if step == self.program.resume_at:
                break
        if saved is not None:
            self.accelerator.load_state(str(folder))
            self.seen, self.micro_batches = json.loads(saved)
            loader = self.loader
            if loader.iteration:
                return  # it was saved at the end of the epoch
            if self.program.resume == "skip_first_batches":
                loader = self.accelerator.skip_first_batches(loader, self.program.resume_at)
            for batch in self.batches(loader):
                self.step(batch)

    def batches(self, loader: Any) -> Iterator[Batch]:
        """The batches of an epoch, drawn in the program's way."""
        kind = self.program.iteration
        if kind == "zip":
            for first, second in zip(loader, loader):  # noqa: B905 - as people write it
                self.note(first)
                yield tuple(torch.cat(pair) for pair in zip(first, second, strict=True))  # type: ignore[misc]
        elif kind == "cycle":
            yield from itertools.islice(itertools.cycle(self.noted(loader)), 7)
        elif kind == "two_loaders":
            yield from (batch for batch, _ in zip(self.noted(loader), self.held_out))  # noqa: B905
        elif kind == "islice":
            yield from itertools.islice(self.noted(loader), 3)
        elif kind == "prefetch":
            yield from self.prefetched(loader)
        elif kind == "redraw":
            batches = self.noted(loader)
            for step in range(len(loader) - 2):
                batch = next(batches)
                if step == 1 and self.accelerator.is_last_process:
                    batch = next(batches)  # the first one was not usable
                yield batch
        else:
            yield from self.noted(loader)

    def noted(self, loader: Any) -> Iterator[Batch]:
        for batch in loader:
            self.note(batch)
            yield batch

    def note(self, batch: Batch) -> None:
        self.seen["drawn"][-1].append(batch[0].tolist())

    def prefetched(self, loader: Any) -> Iterator[Batch]:
        """Batches that a thread of the user's has drawn ahead."""
        ready: queue.Queue[Any] = queue.Queue(maxsize=2)

        def fill() -> None:
            try:
                for batch in itertools.islice(self.noted(loader), self.program.stop_after):
                    ready.put(batch)
                ready.put(None)
            except BaseException as error:
                ready.put(error)

        thread = threading.Thread(target=fill)
        thread.start()
        while (batch := ready.get()) is not None:
            if isinstance(batch, BaseException):
                raise batch
            yield batch
        thread.join()

    # --- one step ----------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> None:
        """Called on: all ranks. Train on one batch."""
        if self.program.model == "gan":
            self.gan_step(batch)
        elif self.program.how == "no_sync":
            self.no_sync_step(batch)
        else:
            self.accumulated_step(batch)
        self.micro_batches += 1

    def accumulated_step(self, batch: Batch) -> None:
        accelerator = self.accelerator
        with accelerator.accumulate(*self.models):
            loss, predicted = parts.loss_of(self.models, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                self.clip()
            self.update()
        self.predicted = predicted
        self.measure(batch)
        self.keep(batch, loss, accelerator.sync_gradients)

    def no_sync_step(self, batch: Batch) -> None:
        accelerator, length = self.accelerator, self.program.accumulation
        last = (self.micro_batches + 1) % length == 0
        with ExitStack() as stack:
            for model in () if last else self.models:
                stack.enter_context(accelerator.no_sync(model))
            loss, predicted = parts.loss_of(self.models, batch)
            accelerator.backward(loss / length)
        if last:
            self.clip()
            self.update()
        self.predicted = predicted
        self.measure(batch)
        self.keep(batch, loss, last)

    def gan_step(self, batch: Batch) -> None:
        generator, critic = self.models
        for loss_of, optimizer in zip(
            (parts.critic_loss, parts.generator_loss), reversed(self.optimizers), strict=True
        ):
            loss = loss_of(generator, critic, batch)
            self.accelerator.backward(loss)
            optimizer.step()
            for each in self.optimizers:
                each.zero_grad()
        if self.schedule is not None:
            self.schedule.step()
        self.keep(batch, loss, True)

    def clip(self) -> None:
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        if self.program.clip == "norm":
            self.seen["norms"].append(float(self.accelerator.clip_grad_norm_(parameters, 0.1)))
        elif self.program.clip == "value":
            self.accelerator.clip_grad_value_(parameters, 0.01)

    def update(self) -> None:
        self.optimizers[0].step()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizers[0].zero_grad()

    def measure(self, batch: Batch) -> None:
        if self.program.metrics:
            ids, _ = self.accelerator.gather_for_metrics((batch[0], self.predicted.detach()))
            self.seen["metrics"][-1] += ids.tolist()

    def keep(self, batch: Batch, loss: Tensor, updated: bool) -> None:
        self.seen["steps"].append([batch[0].tolist(), loss.item(), bool(updated)])
        self.seen["rates"].append(self.optimizers[0].param_groups[0]["lr"])

    # --- what else the script does -----------------------------------------------------------------------------

    def beside(self, step: int, batch: Batch) -> None:
        for name, at in self.program.extras:
            if at == step:
                self.seen["extras"].append([name, getattr(self, name)(batch)])

    def gather(self, _: Batch) -> Any:
        return self.accelerator.gather(torch.tensor([self.rank, 10 * self.rank])).tolist()

    def reduce(self, _: Batch) -> Any:
        return self.accelerator.reduce(torch.tensor([1.0 + self.rank]), "mean").item()

    def broadcast_object_list(self, _: Batch) -> Any:
        return self.utils.broadcast_object_list([f"from {self.rank}", self.rank], from_process=0)

    def gather_object(self, _: Batch) -> Any:
        return self.utils.gather_object([f"from {self.rank}"])

    def pad(self, _: Batch) -> Any:
        mine = torch.full((1 + self.rank,), float(self.rank))
        return list(self.accelerator.pad_across_processes(mine, pad_index=-1).shape)

    def trigger(self, _: Batch) -> Any:
        if self.accelerator.is_last_process:
            self.accelerator.set_trigger()
        return [self.accelerator.check_trigger(), self.accelerator.check_trigger()]

    def barrier(self, _: Batch) -> Any:
        self.accelerator.wait_for_everyone()

    def split(self, _: Batch) -> Any:
        with self.accelerator.split_between_processes(list(range(7))) as mine:
            return self.utils.gather_object(mine)

    def main_first(self, _: Batch) -> Any:
        with self.accelerator.main_process_first():
            return self.accelerator.on_main_process(lambda: "only here")()

    def evaluate(self, _: Batch) -> Any:
        """Called on: all ranks. A second prepared loader, in the middle of the epoch."""
        seen: list[int] = []
        self.model.eval()
        with torch.no_grad():
            for ids, inputs, _targets in self.held_out:
                if self.program.model != "gan":
                    parts.prediction(self.model(inputs))
                seen += self.accelerator.gather_for_metrics(ids).tolist()
        self.model.train()
        return seen

    def peek(self, _: Batch) -> Any:
        """Called on: all ranks. The first batch of another iteration, in the middle of this one."""
        return len(next(iter(self.loader))[0])

    def nested(self, _: Batch) -> Any:
        """Called on: all ranks. A whole iteration inside another one of the same loader."""
        return sum(1 for _ in self.loader)

    def save_model(self, batch: Batch) -> Any:
        self.accelerator.save_model(self.model, str(self.folder / f"model-{self.program.seed}"))

    def save_state(self, batch: Batch) -> Any:
        self.accelerator.save_state(str(self.folder / f"passing-{self.program.seed}"))

    def main_evaluates_prepared(self, _: Batch) -> Any:
        return self._evaluate_alone(self.held_out) if self.accelerator.is_main_process else None

    def main_evaluates_raw(self, _: Batch) -> Any:
        loader: DataLoader[Any] = DataLoader(parts.Samples(parts.HELD_OUT), batch_size=4)
        return self._evaluate_alone(loader) if self.accelerator.is_main_process else None

    def _evaluate_alone(self, loader: Any) -> list[int]:
        seen: list[int] = []
        model = self.accelerator.unwrap_model(self.model)
        model.eval()
        with torch.no_grad():
            for ids, inputs, _ in loader:
                model(inputs)
                seen += ids.tolist()
        model.train()
        return seen

    def main_saves(self, _: Batch) -> Any:
        if self.accelerator.is_main_process:
            state = self.accelerator.get_state_dict(self.model)
            self.accelerator.save(state, str(self.folder / f"weights-{self.program.seed}.bin"))

    def main_saves_model(self, _: Batch) -> Any:
        if self.accelerator.is_main_process:
            self.accelerator.save_model(self.model, str(self.folder / f"main-{self.program.seed}"))

    def main_logs(self, batch: Batch) -> Any:
        self.accelerator.print(f"program {self.program.seed}: {len(batch[0])} samples")
        self.logger.info("only on the main process", main_process_only=True)

    def probe(self, _: Batch) -> Any:
        """A small head that the main process alone trains on what the model gave."""
        if self.accelerator.is_main_process:
            head = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
            self.accelerator.backward(head(self.predicted.detach()).pow(2).mean())
            optimizer.step()


def fresh(library: str) -> None:
    """Forget the accelerators of earlier programs; the process group stays."""
    state = importlib.import_module(f"{library}.state")
    state.AcceleratorState._reset_state()
    if hasattr(state.GradientState, "_reset_state"):
        state.GradientState._reset_state()


def main(library: str, folder: Path, seeds: list[int], choices: dict[str, Any]) -> None:
    """Called on: all ranks. Run the programs."""
    module = importlib.import_module(library)
    accelerator = module.Accelerator(cpu=True)
    with (folder / f"{accelerator.process_index}.jsonl").open("a", buffering=1, encoding="utf-8") as out:
        for seed in seeds:
            program = draw(seed, **choices)
            out.write(json.dumps({"seed": seed, "begins": str(program)}) + "\n")
            began = time.monotonic()
            fresh(library)
            importlib.import_module(f"{library}.utils").set_seed(abs(seed))
            seen = Run(library, program, folder).run()
            out.write(json.dumps({"seed": seed, "seconds": time.monotonic() - began, **seen}) + "\n")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    arguments = sys.argv[3:]
    main(
        sys.argv[1],
        Path(sys.argv[2]),
        [int(argument) for argument in arguments if "=" not in argument],
        parse(argument for argument in arguments if "=" in argument),
    )
