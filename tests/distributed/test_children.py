"""Processes that a rank starts, by fork or spawn: they know their place, and cannot hang the job or end it."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lockstep import Accelerator, PartialState, UsageError
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


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_loader_workers_and_pools(method: str) -> None:
    for rank, (seen, (said,)) in enumerate(run_ranks(children_by, 2, method)):
        assert seen == [[rank, 2]] * 2
        assert f"by rank {rank} (process " in said
        if method != "fork":
            assert "`if __name__ == '__main__':`" in said
