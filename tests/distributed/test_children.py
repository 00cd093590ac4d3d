"""Processes that a rank starts, by fork or spawn: they know their place, and cannot hang the job or end it."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

from lockstep import Accelerator, PartialState, UsageError
from lockstep.process_group import gloo_threads
from lockstep.testing import run_ranks
from tests.ranks import in_soak

LIMIT = 90.0


FORKING = """
import json, os, sys, time
import torch
from lockstep import Accelerator, PartialState, UsageError

accelerator = Accelerator(cpu=True)
rank = accelerator.process_index


def place():
    state = PartialState()
    return state.process_index, state.num_processes, state.is_main_process


def fail():
    raise ValueError("only the child")


def first():
    with accelerator.main_process_first():
        pass


works = {
    "place": place,
    "nothing": lambda: "",
    "failure": fail,
    "barrier": accelerator.wait_for_everyone,
    "gather": lambda: accelerator.gather(torch.ones(1)),
    "objects": lambda: accelerator.gather_for_metrics(["a"], use_gather_object=True),
    "first": first,
    "agreement": lambda: accelerator.agree(lambda: 1),
    "another": lambda: Accelerator(cpu=True),
}
told = {}
for name, work in works.items():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(work())
        except UsageError as error:
            said = f"UsageError: {error}"
        os.write(writer, said.encode())
        sys.exit(3)  # as a program ends: everything is taken down
    os.close(writer)
    _, status = os.waitpid(child, 0)
    told[name] = [os.waitstatus_to_exitcode(status), os.read(reader, 65536).decode()]
    os.close(reader)
    assert accelerator.gather(torch.tensor([rank])).tolist() == [0, 1]  # the job goes on
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(told, file)
"""


def place() -> tuple[int, int]:
    state = PartialState()
    return state.process_index, state.num_processes


@pytest.mark.parametrize("launcher", ["lockstep", *in_soak("torchrun")])
def test_children_made_by_fork(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FORKING)
    launch = ["-m", "lockstep", "launch", "--cpu", "--num_processes", "2"]
    if launcher == "torchrun":
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ValueError: only the child") == 2
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told.pop("failure") == [1, ""]
        assert {code for code, _ in told.values()} == {3}
        assert told.pop("place")[1] == str((rank, 2, rank == 0))
        assert told.pop("nothing")[1] == ""
        for _, said in told.values():
            assert said.startswith("UsageError: This process (")
            assert f"was forked by rank {rank} (process " in said
            assert "Do that in the rank, and hand over what comes of it." in said


class Placed(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(place())


def refused(index: int) -> str:
    try:
        Accelerator(cpu=True)
    except UsageError as error:
        return str(error)
    return ""


def children_by(method: str) -> tuple[list[list[int]], list[str]]:
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(Placed(), batch_size=1, num_workers=1, multiprocessing_context=method)
    seen = [batch for batches in accelerator.prepare(loader) for batch in batches.tolist()]
    with multiprocessing.get_context(method).Pool(1) as pool:
        said = pool.map(refused, range(1))
    accelerator.wait_for_everyone()
    return seen, said


@pytest.mark.parametrize("method", ["fork", "spawn", *in_soak("forkserver")])
def test_loader_workers_and_pools(method: str) -> None:
    for rank, (seen, (said,)) in enumerate(run_ranks(children_by, 2, method)):
        assert seen == [[rank, 2]] * 2
        assert f"by rank {rank} (process " in said
        if method != "fork":
            assert "`if __name__ == '__main__':`" in said


def forks_after_collectives(folder: str, count: int) -> int:
    """Workers are started right after the ranks have agreed on the order of the epoch."""
    accelerator = Accelerator(cpu=True)
    data = TensorDataset(torch.arange(36.0).reshape(-1, 1))
    batches = BatchSampler(RandomSampler(data), 2, drop_last=False)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_sampler=batches, num_workers=1)
    )
    done = 0
    for _ in range(count):
        next(iter(loader))
        next(iter(loader))
        for (batch,) in loader:
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            break
        accelerator.save_state(folder, durable=False)
        accelerator.load_state(folder)
        done += len(list(accelerator.skip_first_batches(loader, 2)))
    return done


@pytest.mark.parametrize("count", [4, *in_soak(300)])
def test_a_worker_starts_whatever_gloo_is_doing(tmp_path: Path, count: int) -> None:
    """Without a wait before the fork, a worker never started in 2 of 3 runs of 150 rounds."""
    assert run_ranks(forks_after_collectives, 3, str(tmp_path / "state"), count, timeout=60 + count) == [4 * count] * 3


def waits_before_a_fork() -> list[bool]:
    accelerator = Accelerator(cpu=True)
    seen: list[bool] = []
    real, gloo_threads.rest = gloo_threads.rest, lambda patience, unnamed: seen.append(unnamed) or True
    try:
        accelerator.wait_for_everyone()
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
    finally:
        gloo_threads.rest = real
    return seen


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python needs no wait")
def test_a_rank_lets_gloo_rest_before_it_forks() -> None:
    assert run_ranks(waits_before_a_fork, 2) == [[True]] * 2
