"""The checks themselves: each a function that every rank calls, and that raises when something is not as it should be.

Results are known beforehand or computed apart with plain torch; nothing is compared with itself.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lockstep import current
from lockstep.accelerator import Accelerator
from lockstep.comm import functional, rng
from lockstep.config.choices import PrecisionType
from lockstep.config.handlers import DataLoaderConfiguration, ProjectConfiguration
from lockstep.errors import ConfigError, DistributedOperationException
from lockstep.precision.mixed import check_device
from lockstep.state import AcceleratorState

TOLERANCE = 1e-5
"""How far weights may be apart that were summed in another order."""
FEATURES = 8


class WrongResult(Exception):
    """A check ran through and found something else than it should."""


@dataclass(frozen=True, kw_only=True)
class Skip:
    """What a check returns, on every rank, when there is nothing to check here."""

    reason: str
    """Why, in words."""


# --- small things to train -------------------------------------------------------------------------------------------


class Samples(Dataset[dict[str, Tensor]]):
    """Numbered samples, the same wherever they are made."""

    def __init__(self, count: int) -> None:
        source = torch.Generator().manual_seed(11)
        self.inputs = torch.randn(count, FEATURES, generator=source)
        self.targets = torch.randn(count, 1, generator=source)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"id": torch.tensor(place), "inputs": self.inputs[place], "targets": self.targets[place]}

    def plain_batches(self, size: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
        """The samples in order, cut without any loader."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield {"inputs": self.inputs[part].to(device), "targets": self.targets[part].to(device)}


def _model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(13)
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["inputs"]), batch["targets"])


def _trained_plainly(samples: Samples, batch_size: int, device: torch.device, epochs: int = 1) -> nn.Module:
    """The model that one process makes of all the samples, with nothing but torch."""
    model = _model().to(device)
    optimizer = _optimizer(model)
    for _ in range(epochs):
        for batch in samples.plain_batches(batch_size, device):
            optimizer.zero_grad()
            _loss(model, batch).backward()
            optimizer.step()
    return model


def _gap(left: nn.Module, right: nn.Module) -> float:
    """The largest difference between two models' weights."""
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max(float((one.detach() - other.detach()).abs().max()) for one, other in pairs)


def _fresh(**options: Any) -> Accelerator:
    """An accelerator with settings of the check's own, whatever the job is configured with."""
    AcceleratorState._reset_state()  # the precision belongs to the process, and each check has its own
    usual = {"mixed_precision": "no", "gradient_accumulation_steps": 1, "dynamo_backend": "no", "reproducible": False}
    return Accelerator(**{**usual, **options})


def expect(what: str, found: Any, wanted: Any) -> None:
    """Raise unless ``what`` was done gave what it should."""
    if found != wanted:
        raise WrongResult(f"{what} gave {found}, and should have given {wanted}")


# --- the checks ------------------------------------------------------------------------------------------------------


def check_collectives(accelerator: Accelerator) -> None:
    """Called on: all ranks. Each collective, on values that are known beforehand."""
    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    last, total = size - 1, size * (size - 1) // 2
    mine = torch.tensor([rank, 10 * rank], device=device)
    expect("gather", accelerator.gather(mine).tolist(), [value for r in range(size) for value in (r, 10 * r)])
    nested = accelerator.gather({"one": mine[:1], "two": (mine[1:].float(), [mine > 0])})
    expect("gather of a structure", nested["two"][0].tolist(), [10.0 * r for r in range(size)])
    expect("reduce with sum", accelerator.reduce(mine, "sum").tolist(), [total, 10 * total])
    expect("reduce with mean", accelerator.reduce(mine.float(), "mean").tolist(), [last / 2, 10 * last / 2])
    sent = functional.broadcast(mine.clone(), from_process=last)
    expect(f"broadcast from rank {last}", sent.tolist(), [last, 10 * last])
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, 2, device=device), pad_index=-1)
    expect("pad_across_processes", padded.sum(dim=1).tolist(), [2.0] * (rank + 1) + [-2.0] * (last - rank))
    expect("gather_object", functional.gather_object([f"rank {rank}"]), [f"rank {r}" for r in range(size)])
    expect("broadcast_object_list", functional.broadcast_object_list([{"from": rank}]), [{"from": 0}])


def check_sharding(accelerator: Accelerator) -> None:
    """Called on: all ranks. At an uneven size, every sample is read once over all ranks and counted once by metrics."""
    size = accelerator.num_processes
    samples = Samples(4 * size * 3 + 4 + 1)  # the last round is one full batch, a single sample, and no more
    everything = list(range(len(samples)))
    uneven = _fresh(dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = uneven.prepare(DataLoader(samples, batch_size=4, shuffle=True))
    mine = [place for batch in loader for place in batch["id"].tolist()]
    expect("the samples that all ranks read", sorted(functional.gather_object(mine)), everything)
    even = _fresh()
    loader = even.prepare(DataLoader(samples, batch_size=4))
    counted: list[int] = []
    rounds = 0
    for batch in loader:
        counted += even.gather_for_metrics(batch["id"]).tolist()
        rounds += 1
    expect("gather_for_metrics", counted, everything)
    expect("the batches of each rank", functional.gather_object([rounds]), [len(loader)] * size)


def check_training(accelerator: Accelerator) -> str:
    """Called on: all ranks. Training on all ranks gives the weights that one process gives with plain torch."""
    batch_size = 8 * accelerator.num_processes
    samples = Samples(3 * batch_size + batch_size // 2 + 1)
    here = _fresh(split_batches=True, reproducible=True)
    model = _model()
    model, optimizer, loader = here.prepare(model, _optimizer(model), DataLoader(samples, batch_size=batch_size))
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            here.backward(_loss(model, batch))
            optimizer.step()
    gap = _gap(here.unwrap_model(model), _trained_plainly(samples, batch_size, here.device, epochs=2))
    if not gap <= TOLERANCE:
        raise WrongResult(f"after 8 updates the weights are {gap:.2g} away from those that one process gives")
    return f"weights equal to {gap:.0e}" if gap else "weights equal"


def check_accumulation(accelerator: Accelerator) -> None:
    """Called on: all ranks. Updates over micro-batches are those of one large batch, at the end of an epoch too."""
    steps, micro = 3, 4
    window = steps * micro * accelerator.num_processes
    samples = Samples(window + window // steps)  # a whole window, and one with a single micro-batch
    here = _fresh(gradient_accumulation_steps=steps)
    model = _model()
    model, optimizer, loader = here.prepare(model, _optimizer(model), DataLoader(samples, batch_size=micro))
    due = []
    for batch in loader:
        with here.accumulate(model):
            here.backward(_loss(model, batch))
            due.append(here.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
    expect("the micro-batches that complete an update", due, [False, False, True, True])
    gap = _gap(here.unwrap_model(model), _trained_plainly(samples, window, here.device))
    if not gap <= TOLERANCE:
        raise WrongResult(f"after 2 updates the weights are {gap:.2g} away from those that whole batches give")


def check_fp16(accelerator: Accelerator) -> Skip | None:
    """Called on: all ranks. A few updates in fp16."""
    return _check_precision(accelerator, PrecisionType.FP16)


def check_bf16(accelerator: Accelerator) -> Skip | None:
    """Called on: all ranks. A few updates in bf16."""
    return _check_precision(accelerator, PrecisionType.BF16)


def _check_precision(accelerator: Accelerator, mode: PrecisionType) -> Skip | None:
    # Decided together: a rank that went ahead alone would wait for the others.
    reasons = functional.gather_object([_why_not(mode, accelerator.device, probe=accelerator.is_local_main_process)])
    reason = next((text for text in reasons if text), None)
    if reason is not None and accelerator.mixed_precision == mode.value:
        raise ConfigError(f"this job is configured with mixed_precision={mode.value!r}, and {reason}")
    if reason is not None:
        return Skip(reason=reason)
    here = _fresh(mixed_precision=mode.value)
    samples = Samples(16 * here.num_processes)
    model = _model()
    inside: list[torch.dtype] = []
    hook = model[2].register_forward_hook(lambda module, inputs, output: inside.append(output.dtype))  # type: ignore[index]
    model, optimizer, loader = here.prepare(model, _optimizer(model), DataLoader(samples, batch_size=4))
    updates = 0
    for batch in loader:
        optimizer.zero_grad()
        output = model(batch["inputs"])
        expect("the precision of the output", output.dtype, torch.float32)
        here.backward(nn.functional.mse_loss(output, batch["targets"]))
        optimizer.step()
        updates += not here.optimizer_step_was_skipped
    hook.remove()
    expect("the precision inside the model", set(inside), {getattr(torch, _NAMES[mode])})
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    finite = bool(weights.isfinite().all())
    if not updates or not finite:
        raise WrongResult(f"{updates} of {len(loader)} updates were made; the weights are finite: {finite}")
    rows = here.gather(weights.unsqueeze(0))
    if bool((rows != rows[0]).any()):
        raise WrongResult("the ranks have different weights")
    return None


_NAMES = {PrecisionType.FP16: "float16", PrecisionType.BF16: "bfloat16"}
_PROBE = """
import sys, torch
model = torch.nn.Linear(16, 16)
with torch.autocast("cpu", dtype=getattr(torch, sys.argv[1])):
    output = model(torch.ones(8, 16))
output.float().sum().backward()
"""


def _why_not(mode: PrecisionType, device: torch.device, *, probe: bool) -> str | None:
    """Why this rank's device cannot compute in the precision; ``probe`` the CPU on one rank of each machine."""
    try:
        check_device(mode, device)
    except ConfigError as error:
        return str(error)
    if device.type != "cpu" or not probe or not _announces_tiles():
        return None
    trial = [sys.executable, "-c", _PROBE, _NAMES[mode]]
    done = subprocess.run(trial, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return (
            f"a trial process that computed in {mode.value} was killed by signal {-done.returncode}: the CPU announces "
            "instructions that it does not run. Set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 (or AVX2)."
        )
    return f"a trial in {mode.value} failed: {done.stderr.strip().splitlines()[-1]}"


def _announces_tiles() -> bool:
    """Whether the CPU claims matrix instructions: some virtual machines do, and die of the first one."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "amx_" in text or "avx512_fp16" in text


def check_checkpoint(accelerator: Accelerator) -> None:
    """Called on: all ranks. Saved in the middle of an epoch and loaded into new objects, training goes on the same."""
    samples = Samples(4 * accelerator.num_processes * 4)
    project = ProjectConfiguration(save_on_each_node=True)  # the machines need not share a file system for this
    first = _TrainingRun(_fresh(project_config=project), samples)
    for _ in range(2):
        first.step()
    with _folder_of_machine(accelerator) as folder:
        first.accelerator.save_state(folder / "state")
        second = _TrainingRun(_fresh(project_config=project), samples)
        second.accelerator.load_state(folder / "state")
        accelerator.wait_for_everyone()
    for number in (3, 4):
        expect(f"the samples of batch {number} after loading", second.step(), first.step())
    expect("the learning rate after loading", second.scheduler.get_last_lr(), first.scheduler.get_last_lr())
    gap = _gap(second.model, first.model)
    # Not to the last bit: a fresh DDP model may sum its first gradients in another order.
    if not gap <= TOLERANCE:
        raise WrongResult(f"two updates after loading the weights are {gap:.2g} away from those without the break")


class _TrainingRun:
    """A training run that can be saved and loaded."""

    def __init__(self, accelerator: Accelerator, samples: Samples) -> None:
        model = _model()
        optimizer = _optimizer(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        loader = DataLoader(samples, batch_size=4, shuffle=True)
        self.accelerator = accelerator
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self._batches: Iterator[dict[str, Tensor]] | None = None

    def step(self) -> list[int]:
        """One update; the samples it was made with on this rank."""
        self._batches = iter(self.loader) if self._batches is None else self._batches
        batch = next(self._batches)
        self.optimizer.zero_grad()
        self.accelerator.backward(_loss(self.model, batch))
        self.optimizer.step()
        self.scheduler.step()
        return batch["id"].tolist()


@contextmanager
def _folder_of_machine(accelerator: Accelerator) -> Iterator[Path]:
    """Called on: all ranks. A temporary folder that the ranks of one machine share."""
    node = current.require().topology.node_rank
    made = Path(tempfile.mkdtemp(prefix="lockstep-test-")) if accelerator.is_local_main_process else None
    try:
        places = functional.gather_object([(node, str(made))] if made is not None else [])
        yield Path(dict(places)[node])
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def check_random(accelerator: Accelerator) -> None:
    """Called on: all ranks. Generators can be seeded alike and apart, and put in step."""
    rank, device = accelerator.process_index, accelerator.device

    def draws() -> list[list[int]]:
        mine = torch.randint(2**40, (3,)).tolist()
        if device.type != "cpu":
            mine += torch.randint(2**40, (3,), device=device).tolist()
        return functional.gather_object([mine])

    rng.set_seed(17, device_specific=True)
    found = draws()
    if len({tuple(row) for row in found}) != len(found):
        raise WrongResult(f"seeds of their own gave ranks the same numbers: {found}")
    rng.set_seed(17)
    found = draws()
    expect("one seed for all ranks", found, [found[0]] * len(found))
    torch.manual_seed(rank)
    own = torch.Generator().manual_seed(rank)
    kinds = ["torch", "generator", *([device.type] if device.type != "cpu" else [])]
    rng.synchronize_rng_states(kinds, own)
    found = draws()
    expect("generators after they were put in step", found, [found[0]] * len(found))
    found = functional.gather_object([torch.randint(2**40, (3,), generator=own).tolist()])
    expect("a generator of the script's own, after that", found, [found[0]] * len(found))


def check_control(accelerator: Accelerator) -> None:
    """Called on: all ranks. The main process goes first, triggers reach everybody, and lists are shared out."""
    rank, size = accelerator.process_index, accelerator.num_processes
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            time.sleep(0.05)  # time for another rank to come too early
        first = current.require().group.store.claim("checks/first", str(rank), int) if size > 1 else 0
    expect("the rank that was first in main_process_first", functional.gather_object([first]), [0] * size)
    if accelerator.is_last_process:
        accelerator.set_trigger()
    expect("check_trigger after the last rank set it", accelerator.check_trigger(), True)
    expect("check_trigger when nobody did", accelerator.check_trigger(), False)
    numbers = list(range(2 * size + 1))
    with accelerator.split_between_processes(numbers) as part:
        expect("split_between_processes", functional.gather_object(list(part)), numbers)
    ran: list[int] = []
    accelerator.on_main_process(ran.append)(accelerator.process_index)
    expect("on_main_process", functional.gather_object(ran), [0])


def check_debug_mode(accelerator: Accelerator) -> Skip | None:
    """Called on: all ranks. In debug mode a gather of unequal shapes raises on every rank, and all can go on."""
    if accelerator.num_processes == 1:
        return Skip(reason="one process has nobody to differ from")
    group = current.require().group
    before, group.debug = group.debug, True
    try:
        mine = torch.ones(3 if accelerator.is_last_process else 2, device=accelerator.device)
        try:
            accelerator.gather(mine)
        except DistributedOperationException as error:
            named = "Process 0: [2]" in str(error) and f"Process {accelerator.num_processes - 1}: [3]" in str(error)
            expect("whether the error names each rank's shape", named, True)
        else:
            raise WrongResult("gather of unequal shapes raised nothing")
        total = accelerator.reduce(torch.ones(1, device=accelerator.device), "sum")
        expect("reduce after the error", total.tolist(), [float(accelerator.num_processes)])
    finally:
        group.debug = before
    return None
