"""Training programs in which ranks do different things and none is wrong: each runs to its end, with equal weights.

Its argument names the programs that are run, with commas between; without it all are.
"""

from __future__ import annotations

import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from tempfile import TemporaryDirectory
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lockstep import Accelerator
from lockstep.utils import broadcast_object_list

accelerator = Accelerator(cpu=True)
main = accelerator.is_main_process
odd = accelerator.process_index == accelerator.num_processes - 1
CROSS = nn.MSELoss()


class Training:
    """A small model with its optimizer and loader, prepared."""

    def __init__(self, model: nn.Module | None = None, samples: int = 48) -> None:
        torch.manual_seed(0)
        model = model or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.loader: DataLoader[Tensor]
        self.model, self.optimizer, self.loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.01), loader(samples)
        )

    def update(self, batch: Tensor) -> None:
        accelerator.backward(self.loss(batch))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, batch: Tensor) -> Tensor:
        return CROSS(self.model(batch), batch[:, :2])

    def check(self) -> None:
        """Called on: all ranks. The weights are the same on all."""
        mine = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        assert torch.equal(accelerator.gather(mine), mine.repeat(accelerator.num_processes))


def loader(samples: int = 48) -> DataLoader[Tensor]:
    return DataLoader(torch.randn(samples, 4, generator=torch.Generator().manual_seed(1)), batch_size=2)  # type: ignore[arg-type]


def own_prefetch_thread() -> None:
    """A thread of the script's reads ahead, further on some ranks than on others."""
    training = Training()
    for _ in range(2):
        batches: queue.Queue[Tensor | None] = queue.Queue(maxsize=5 if odd else 1)

        def read(into: queue.Queue[Tensor | None] = batches) -> None:
            for batch in training.loader:
                into.put(batch)
            into.put(None)

        reader = threading.Thread(target=read)
        reader.start()
        while (batch := batches.get()) is not None:
            training.update(batch)
        reader.join()
    training.check()


def draws_again() -> None:
    """A rank takes another batch when one is of no use; all make as many updates."""
    training = Training(samples=96)
    batches = iter(training.loader)
    for step in range(8):
        batch = next(batches)
        if odd and step % 3 == 1:
            batch = next(batches)
        training.update(batch)
    training.check()


def second_loader_on_main() -> None:
    """The main process looks at a batch of a second prepared loader now and then."""
    training = Training()
    second = iter(accelerator.prepare(loader()))
    for step, batch in enumerate(training.loader):
        if main and step % 2:
            next(second)
        training.update(batch)
    training.check()


def probe_on_main() -> None:
    """The main process trains a probe on what the model gives, through the accelerator; nobody else does."""
    training = Training()
    probe = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.01)
    for batch in training.loader:
        training.update(batch)
        if main:
            features = accelerator.unwrap_model(training.model)(batch).detach()
            accelerator.backward(probe(features).sum())
            optimizer.step()
            features = training.model(batch).detach()
            accelerator.backward(probe(features).sum())
    training.check()


def probe_before_backward() -> None:
    """The same between a forward and its backward, with an optimizer that is prepared."""
    training = Training()
    probe = nn.Linear(2, 1)
    optimizer = accelerator.prepare(torch.optim.SGD(probe.parameters(), lr=0.01))
    for batch in training.loader:
        output = training.model(batch)
        if main:
            accelerator.backward(probe(output.detach()).sum())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.backward(CROSS(output, batch[:, :2]))
        training.optimizer.step()
        training.optimizer.zero_grad()
    training.check()


def forwards_without_backward() -> None:
    """Every rank calls the model several times for one backward, and now and then for none."""
    training = Training()
    for step, batch in enumerate(training.loader):
        loss = training.loss(batch) + training.loss(batch * 2)
        if step % 3 == 2:
            continue
        accelerator.backward(loss)
        training.optimizer.step()
        training.optimizer.zero_grad()
    training.check()


def steps_left_out_everywhere() -> None:
    """All ranks drop the same updates."""
    training = Training()
    for step, batch in enumerate(training.loader):
        accelerator.backward(training.loss(batch))
        if step % 3 != 2:
            training.optimizer.step()
        training.optimizer.zero_grad()
    training.check()


class Checkpointed(nn.Module):
    """The whole of it runs again in its backward, which the graph of a loss does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, batch: Tensor) -> Tensor:
        return checkpoint(self.inner, batch.requires_grad_(), use_reentrant=True)


def reentrant_checkpointing() -> None:
    training = Training(Checkpointed())
    for batch in training.loader:
        training.update(batch)
    training.check()


def two_models() -> None:
    """Adversaries that are trained in turns."""
    one, other = Training(nn.Linear(4, 4)), Training(nn.Linear(4, 2))
    for step, batch in enumerate(one.loader):
        made = one.model(batch)
        accelerator.backward(-other.loss(made))
        one.optimizer.step()
        one.optimizer.zero_grad()
        other.optimizer.zero_grad()
        if step % 2:
            accelerator.backward(other.loss(made.detach()) + other.loss(batch))
            other.optimizer.step()
            other.optimizer.zero_grad()
    one.check()
    other.check()


def two_optimizers_of_one_model() -> None:
    """One of them makes a step every other time."""
    training = Training()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.01) for part in training.model.module[::2])
    first, second = accelerator.prepare(first, second)
    for step, batch in enumerate(training.loader):
        accelerator.backward(training.loss(batch))
        first.step()
        if step % 2:
            second.step()
        first.zero_grad()
        second.zero_grad()
    training.check()


def local_steps() -> None:
    """Each rank makes as many steps of its own as it likes; then their weights are averaged."""
    training = Training(samples=96)
    batches = iter(training.loader)
    for _ in range(3):
        for _ in range(3 if odd else 2):
            with accelerator.no_sync(training.model):
                training.update(next(batches))
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.copy_(accelerator.reduce(parameter.detach(), "mean"))
        training.update(next(batches))
    training.check()


def accumulation_by_hand() -> None:
    training = Training()
    for step, batch in enumerate(training.loader):
        due = step % 3 == 2
        with nullcontext() if due else accelerator.no_sync(training.model):
            accelerator.backward(training.loss(batch) / 3)
        if due:
            training.optimizer.step()
            training.optimizer.zero_grad()
    training.check()


def uneven_then_even() -> None:
    """After a region in which ranks made different numbers of steps all go on together."""
    training = Training()
    batches = [torch.ones(2, 4)] * (3 if odd else 5)
    with accelerator.join_uneven_inputs([training.model]):
        for batch in batches:
            training.update(batch)
    for batch in training.loader:
        training.update(batch)
    training.check()


def closure_of_lbfgs() -> None:
    training = Training(nn.Linear(4, 2))
    optimizer = accelerator.prepare(torch.optim.LBFGS(training.model.parameters(), max_iter=3))
    batch = next(iter(loader()))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = training.loss(batch)
        accelerator.backward(loss)
        return loss

    for _ in range(3):
        optimizer.step(closure)
    training.check()


def losses_of_its_own() -> None:
    """``loss.backward()``, as torch has it, on some updates."""
    training = Training()
    for step, batch in enumerate(training.loader):
        loss = training.loss(batch)
        if step % 2:
            loss.backward()
        else:
            accelerator.backward(loss)
        training.optimizer.step()
        training.optimizer.zero_grad()
    training.check()


def main_evaluates_alone() -> None:
    """Over a prepared loader, with the prepared model."""
    training, data = Training(), accelerator.prepare(loader())
    for _ in range(2):
        for batch in training.loader:
            training.update(batch)
        if main:
            with torch.no_grad():
                for batch in data:
                    accelerator.unwrap_model(training.model)(batch)
    training.check()


def loop_in_main_process_first() -> None:
    data = accelerator.prepare(loader())
    with accelerator.main_process_first():
        assert sum(len(batch) for batch in data) == 48 // accelerator.num_processes
    with accelerator.local_main_process_first():
        assert sum(len(batch) for batch in data) == 48 // accelerator.num_processes


def main_saves_the_model() -> None:
    training = Training()
    with TemporaryDirectory() as folder:
        for step, batch in enumerate(training.loader):
            training.update(batch)
            if main and step % 5 == 4:
                accelerator.save_model(training.model, folder)
                accelerator.save(accelerator.get_state_dict(training.model), f"{folder}/weights.pt")
        assert not main or sorted(os.listdir(folder)) == ["model.safetensors", "weights.pt"]
    training.check()


def main_saves_the_state() -> None:
    """In the middle of a training, at its end, twice in a row, and then once together; and it can be loaded."""
    training = Training()
    with shared_folder() as folder:
        for step, batch in enumerate(training.loader):
            training.update(batch)
            if main and step % 5 == 4:
                accelerator.save_state(f"{folder}/lone")
                accelerator.save_state(f"{folder}/lone")
        if main:
            accelerator.save_state(f"{folder}/last")
        accelerator.save_state(f"{folder}/together")
        for name in ("lone", "last", "together"):
            accelerator.load_state(f"{folder}/{name}")
            training.check()
        training.update(batch)
    training.check()


def saves_at_different_lines() -> None:
    """To folders of each rank's own; and the ranks do not meet in one call."""
    training = Training()
    with TemporaryDirectory() as folder:
        for batch in training.loader:
            training.update(batch)
        accelerator.save_state(folder)
        if main:
            accelerator.save_state(folder)
        else:
            accelerator.save_state(folder)
        training.check()


def saves_after_a_long_wait() -> None:
    """A rank waits in a call of torch's own, and then keeps its interpreter busy: its record is late to follow."""
    training = Training()
    for waits in (main, odd):
        with shared_folder() as folder:
            for batch in training.loader:
                training.update(batch)
            if not waits:
                time.sleep(3.5)
            torch.distributed.all_reduce(torch.ones(1))
            if waits:
                pow(3, 5_000_000)  # a second of one instruction, in which no thread of Python's runs
            accelerator.save_state(f"{folder}/state")
            assert not main or os.path.exists(f"{folder}/state/random_states_1.pkl")
    training.check()


def main_saves_the_state_at_the_end() -> None:
    """The others go on to something that needs no rank, and have nothing left to wait in."""
    training = Training()
    with shared_folder() as folder:
        for batch in training.loader:
            training.update(batch)
        if main:
            accelerator.save_state(f"{folder}/last", blocking=False)
            accelerator.wait_for_checkpoint()
        training.check()


@contextmanager
def shared_folder() -> Iterator[str]:
    names = [tempfile.mkdtemp() if main else ""]
    broadcast_object_list(names)
    yield names[0]
    accelerator.wait_for_everyone()
    if main:
        shutil.rmtree(names[0])


PROGRAMS = [
    name
    for name, value in list(globals().items())
    if isinstance(value, FunctionType) and value.__module__ == __name__ and name not in ("loader", "shared_folder")
]
for name in sys.argv[1].split(",") if len(sys.argv) > 1 else PROGRAMS:
    globals()[name]()
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.print(f"done: {name}")
