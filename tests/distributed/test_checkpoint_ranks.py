"""Whole-state checkpoints on several ranks: resumed to the bit, on other numbers of ranks, ranks that cannot write."""

from __future__ import annotations

import atexit
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, DataLoaderConfiguration, PartialState, ProjectConfiguration
from lockstep.blackbox.box import NoBox
from lockstep.checkpoint import discovery, safe_pickle
from lockstep.errors import CheckpointError
from lockstep.storage.disk import Disk
from lockstep.testing import Ranks, run_ranks
from tests.unit.checkpoint.round_trips import MODELS, content
from tests.unit.checkpoint.runs import Run

SAMPLES = 24


# ---------------------------------------------------------------- the same number of ranks


def interrupted(folder: str, stops: list[int]) -> Any:
    """The results of a run that was left alone, and of ones that were given up after so many batches."""
    options = {"samples": SAMPLES}
    torch.manual_seed(PartialState().process_index)
    results = [Run(**options).train().result()]
    for number, stop in enumerate(stops):
        run = Run(**options).train(stop)
        run.accelerator.save_state(folder, blocking=number % 2 == 0, durable=False)
        run.train(1)
        run.accelerator.wait_for_checkpoint()
        last = Run(**options)
        last.accelerator.load_state(folder)
        results.append(last.train().result())
    return results


def test_two_ranks_go_on_to_the_bit(tmp_path: Path) -> None:
    ranks = run_ranks(interrupted, 2, str(tmp_path / "state"), [1, 2, 4, 6, 7, 11])
    for rank, (alone, *resumed) in enumerate(ranks):
        for result in resumed:
            # Of registered objects, and of a model's buffers, it is rank 0's state that counts.
            own = ("average", "buffers") if rank else ()
            assert {name: value for name, value in result.items() if name not in own} == {
                name: value for name, value in alone.items() if name not in own
            }
    assert discovery.verify(tmp_path / "state") == []
    assert os.listdir(tmp_path) == ["state"]


# ---------------------------------------------------------------- other numbers of ranks


def part(folder: str, batches: int | None, options: dict[str, Any]) -> list[int]:
    """Go on from the folder, if there is one, for so many batches; the samples that were trained on here."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    torch.manual_seed(3)
    model = nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.arange(48.0).view(48, 1)), batch_size=2, shuffle=True)
    model, loader = accelerator.prepare(model, loader)
    if os.path.exists(folder):
        accelerator.load_state(folder)
    seen: list[int] = []
    for number, (inputs,) in enumerate(loader, 1):
        seen += inputs.flatten().int().tolist()
        if number == batches:
            break
    accelerator.save_state(folder)
    return seen


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}], ids=["each reads", "dispatched"])
def test_one_two_four_one_ranks_see_every_sample_once(tmp_path: Path, options: dict[str, Any]) -> None:
    seen: list[int] = []
    for size, batches in ((1, 5), (2, 4), (4, 2), (1, None)):
        seen += [sample for mine in run_ranks(part, size, str(tmp_path / "state"), batches, options) for sample in mine]
    assert sorted(seen) == list(range(48))


def window(folder: str, save: bool, weighted: bool, steps: int) -> list[float]:
    """An update whose window is left open after half of it, or is completed from the folder."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    torch.manual_seed(2)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    if not save:
        accelerator.load_state(folder)
    rank, world = accelerator.process_index, accelerator.num_processes
    # Eight samples for the first half of the window and eight for the second, however many ranks share them.
    source = torch.Generator().manual_seed(4)
    data = torch.randn(16, 2, generator=source)[:8] if save else torch.randn(16, 2, generator=source)[8:]
    micro = data.view(steps // 2, world, -1, 2)[:, rank]
    for inputs in micro:
        with accelerator.accumulate(model):
            loss = model(inputs).pow(2).mean()
            accelerator.backward(loss, **({"num_items": len(inputs)} if weighted else {}))
            optimizer.step()
            optimizer.zero_grad()
    if save:
        accelerator.save_state(folder)
    return next(iter(model.parameters())).flatten().tolist()


def expected_weights() -> list[float]:
    torch.manual_seed(2)
    model = nn.Linear(2, 1)
    model(torch.randn(16, 2, generator=torch.Generator().manual_seed(4))).pow(2).mean().backward()
    with torch.no_grad():
        return (model.weight - 0.5 * model.weight.grad).flatten().tolist()


@pytest.mark.parametrize("weighted", [False, True], ids=["means", "items"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (2, 4), (4, 1), (1, 2)])
def test_the_gradients_of_an_open_window_count_in_full(tmp_path: Path, before: int, after: int, weighted: bool) -> None:
    folder = str(tmp_path / "state")
    run_ranks(window, before, folder, True, weighted, 2)
    for found in run_ranks(window, after, folder, False, weighted, 2):
        assert found == pytest.approx(expected_weights(), rel=1e-5)


def draws(folder: str, save: bool) -> list[float]:
    accelerator = Accelerator(cpu=True)
    seed = 100 + accelerator.process_index
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    if save:
        accelerator.save_state(folder)
    else:
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        accelerator.load_state(folder)
    return [torch.rand(()).item(), random.random(), float(np.random.rand()), float(np.random.randn())]


def test_every_rank_has_its_own_generators_and_new_ranks_have_defined_ones(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    saved = run_ranks(draws, 2, folder, True)
    assert run_ranks(draws, 2, folder, False) == saved
    assert run_ranks(draws, 1, folder, False) == saved[:1]
    four = run_ranks(draws, 4, folder, False)
    assert four[:2] == saved
    assert four == run_ranks(draws, 4, folder, False)
    assert len({row[0] for row in four}) == 4


# ---------------------------------------------------------------- ranks that cannot


class Failing(Disk):
    def write(self, file: int, data: memoryview) -> int:
        if b'"token"' in bytes(data):  # the lock, which is written when a save begins
            return super().write(file, data)
        raise OSError(28, "No space left on device", "the disk")


def failing(folder: str, who: int, blocking: bool) -> Any:
    run = Run(samples=SAMPLES).train(2)
    run.accelerator.save_state(folder)
    rank = run.accelerator.process_index
    if rank == who:
        run.accelerator._checkpoints.disk = Failing()
    told = ""
    try:
        run.accelerator.save_state(folder, blocking=blocking)
        run.train(1)
        run.accelerator.wait_for_checkpoint()
    except CheckpointError as error:
        told = str(error)
    run.train(1)  # nothing has been lost but the checkpoint
    run.accelerator._checkpoints.disk = Disk()
    run.accelerator.save_state(folder)
    return told


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "background"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_cannot_write_is_named_on_all(tmp_path: Path, who: int, blocking: bool) -> None:
    for told in run_ranks(failing, 2, str(tmp_path / "state"), who, blocking):
        assert f"rank {who} failed to write its part: No space left on device" in told
        assert "training can go on" in told
    assert discovery.verify(tmp_path / "state") == []
    assert os.listdir(tmp_path) == ["state"]


def out_of_step(folder: str, *entered: str) -> str:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.wait_for_everyone()
    box = accelerator._session.group.box
    box.compare_with(None, lambda name, number, rank: None)  # ranks of other machines cannot be seen
    if name := entered[accelerator.process_index]:
        box.leave(box.enter(name))  # as a rank of another machine would, in a collective that needs no partner
    try:
        accelerator.save_state(folder)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_ranks_that_are_not_at_one_place_commit_nothing(tmp_path: Path) -> None:
    for told in run_ranks(out_of_step, 2, str(tmp_path / "state"), "", "reduce"):
        assert "was not committed: the ranks are not at the same place: rank 1 has entered" in told
    for told in run_ranks(out_of_step, 2, str(tmp_path / "state"), "gather", "reduce"):
        assert "was not committed: rank 1 called other collectives than the rest" in told
    assert not (tmp_path / "state").exists()


def damaged(folder: str, large: int) -> tuple[str, bool]:
    run = Run(samples=SAMPLES).train(2)
    run.accelerator.save_state(folder)
    run.accelerator.wait_for_everyone()
    before = run.train(1).weights()
    if run.accelerator.is_main_process:
        path = Path(folder, "optimizer.bin")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    run.accelerator.wait_for_everyone()
    usual, safe_pickle.LARGE = safe_pickle.LARGE, large
    try:
        run.accelerator.load_state(folder)
    except CheckpointError as error:
        return str(error), torch.equal(run.weights(), before)
    finally:
        safe_pickle.LARGE = usual
    return "loaded", False


@pytest.mark.parametrize("large", [0, safe_pickle.LARGE])
def test_damage_that_one_rank_finds_stops_all(tmp_path: Path, large: int) -> None:
    for told, untouched in run_ranks(damaged, 2, str(tmp_path / "state"), large):
        assert "optimizer.bin is damaged" in told
        assert untouched


# ---------------------------------------------------------------- told to go


def listening(folder: str) -> tuple[bool, bool]:
    """Whether a thread listens for other ranks' signals: while it is to, and when Python shuts down."""
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project, save_on_signal=True)
    listens = [any(thread.name == "lockstep-preemption" for thread in threading.enumerate())]
    atexit._run_exitfuncs()
    listens.append(any(thread.name == "lockstep-preemption" for thread in threading.enumerate()))
    del accelerator
    return listens[0], listens[1]


def test_no_thread_is_left_in_the_store_when_python_shuts_down(tmp_path: Path) -> None:
    # One that came out of it then would end the rank with SIGABRT, and the job, which is complete, with it.
    with Ranks(2) as pool:  # of its own: what is registered for the end of these processes has run
        assert pool.run(listening, str(tmp_path)) == [(True, False)] * 2


def saves_without_a_box(folder: str, who: tuple[int, ...]) -> list[str]:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    if accelerator.process_index in who:
        accelerator._session.group.monitor.box = NoBox("the disk is full")
    for _ in range(2):
        accelerator.save_state(folder)
    return sorted(name for name in os.listdir(folder) if name.startswith("random_states"))


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_ranks_without_a_black_box_save_together(tmp_path: Path, who: tuple[int, ...]) -> None:
    for files in run_ranks(saves_without_a_box, 2, str(tmp_path / "state"), who, timeout=30):
        assert files == ["random_states_0.pkl", "random_states_1.pkl"]


def saves_before_anything_else(folder: str) -> bool:
    accelerator = Accelerator(cpu=True)
    if accelerator.is_main_process:
        accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    return os.path.isdir(folder)


def test_the_main_process_may_save_alone_before_the_first_collective(tmp_path: Path) -> None:
    assert run_ranks(saves_before_anything_else, 2, str(tmp_path / "state"), timeout=30) == [True, True]


def saves_on_another_rank(folder: str) -> str:
    accelerator = Accelerator(cpu=True)
    text = ""
    if not accelerator.is_main_process:
        try:
            accelerator.save_state(folder)
        except CheckpointError as error:
            text = str(error)
    accelerator.wait_for_everyone()
    return text


def test_another_rank_alone_cannot_save(tmp_path: Path) -> None:
    first, second = run_ranks(saves_on_another_rank, 2, str(tmp_path / "state"), timeout=30)
    assert first == ""
    assert "save_state() was called on rank 1, but the main process waits in wait_for_everyone #1" in second


# ---------------------------------------------------------------- whatever is saved can be loaded


def round_trips(folder: str, names: list[str]) -> list[str]:
    """The kinds of models that did not come back, of all that two ranks can train."""
    wrong = []
    for number, name in enumerate(names):
        for safe_format in (True, False):
            torch.manual_seed(0)
            accelerator, model = Accelerator(cpu=True), MODELS[name]()
            accelerator.prepare(model)
            before = content(model)
            place = f"{folder}/{number}-{safe_format}"
            accelerator.save_state(place, safe_serialization=safe_format, durable=False)
            torch.manual_seed(1)
            accelerator, other = Accelerator(cpu=True), MODELS[name]()
            accelerator.prepare(other)
            accelerator.load_state(place)
            if content(other) != before:
                wrong.append(f"{name}, safe={safe_format}")
    return wrong


def test_what_two_ranks_save_they_can_load(tmp_path: Path) -> None:
    names = ["overlapping", "tied", "weight norm", "parametrized", "float8_e4m3fn", "uint16", "complex64"]
    assert run_ranks(round_trips, 2, str(tmp_path), names) == [[], []]


def one_rank_refuses(folder: str, refusing: int) -> Any:
    """A registered object that one rank refuses to load: what the other rank has loaded is taken back."""
    run = Run(samples=SAMPLES).train(2)
    run.accelerator.save_state(folder)
    other = Run(samples=SAMPLES).train(3)
    before = other.result()
    rank = PartialState().process_index
    if rank == refusing:
        other.average.load_state_dict = lambda state: 1 / 0  # type: ignore[method-assign]
    error = ""
    try:
        other.accelerator.load_state(folder)
    except CheckpointError as caught:
        error = str(caught)
    return error, {**other.result(), "draw": None} == {**before, "draw": None}


def test_what_one_rank_refuses_none_loads(tmp_path: Path) -> None:
    for error, unchanged in run_ranks(one_rank_refuses, 2, str(tmp_path / "state"), 1):
        assert "rank 1" in error or "custom_checkpoint_0.pkl" in error
        assert "ZeroDivisionError" in error
        assert unchanged
