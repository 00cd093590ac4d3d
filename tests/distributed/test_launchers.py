"""Scripts started the way users start them: torchrun, mpirun, or by hand with a rendezvous of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks import free_port, in_soak

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    return {**kept, "OMP_NUM_THREADS": "1", **(extra or {})}


def run(*command: str, env: Mapping[str, str] | None = None, timeout: float = 60.0) -> Ended:
    started = time.monotonic()
    done = subprocess.run(
        command,
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        start_new_session=True,
    )
    return Ended(code=done.returncode, out=done.stdout, err=done.stderr, seconds=time.monotonic() - started)


def by_hand(
    script: Path, *args: str, world_size: int = 2, env: Mapping[str, str] | None = None, seeds: bool = False
) -> list[Ended]:
    """Each rank started by hand; rank 0 hosts the store."""
    port = str(free_port())
    started = time.monotonic()
    ranks = []
    for rank in range(world_size):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **({"PYTHONHASHSEED": str(rank + 1)} if seeds else {}),
            **(env or {}),
        }
        command = [sys.executable, str(script), *args]
        ranks.append(
            subprocess.Popen(
                command, env=environment(variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    ended = []
    try:
        for process in ranks:
            out, err = process.communicate(timeout=60)
            took = time.monotonic() - started
            ended.append(Ended(code=process.returncode, out=out, err=err, seconds=took))
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    return ended


def torchrun(script: Path, *args: str, env: Mapping[str, str] | None = None) -> Ended:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return run(*command, "--master-port", str(free_port()), str(script), *args, env=env)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


SCRIPT = """
    import sys, time
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from lockstep import Accelerator
    from lockstep import current
    from lockstep.utils import InitProcessGroupKwargs

    mode, *rest = sys.argv[1:]
    handlers = []
    if mode == "file":
        handlers = [InitProcessGroupKwargs(init_method="file://" + rest[0])]
    if mode == "timeout":
        handlers = [InitProcessGroupKwargs(timeout=timedelta(seconds=77))]
    if mode == "backend":
        handlers = [InitProcessGroupKwargs(backend=rest[0])]
    if mode == "adopt":
        dist.init_process_group("gloo", timeout=timedelta(seconds=55))
        users = dist.group.WORLD
    accelerator = Accelerator(kwargs_handlers=handlers)
    rank, world = accelerator.process_index, accelerator.num_processes

    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 3) * (rank + 1)).mean())
        optimizer.step()
        optimizer.zero_grad()
    gathered = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
    same = all(torch.equal(row, gathered[0]) for row in gathered)
    backend = dist.get_backend()
    total = int(accelerator.reduce(torch.tensor(rank + 1)))
    line = f"rank {rank} of {world} over {backend}, equal weights: {same}, sum {total}"
    if mode == "timeout":
        line += f", {current.require().group.timeout}"
    if mode == "adopt":
        line += f", adopted: {current.require().group.pg is users}"
    if mode == "dtypes":
        # More than a megabyte of several dtypes: one all-reduce for each, in an order all ranks share.
        kinds = [torch.float32, torch.int64, torch.float64, torch.int32, torch.float16, torch.bfloat16]
        tree = [torch.full((200_000 + place,), rank + place, dtype=kind) for place, kind in enumerate(kinds)]
        sums = accelerator.reduce(tree)
        good = [torch.all(one == 1 + 2 * place) and one.dtype == kinds[place] for place, one in enumerate(sums)]
        line += f", sums: {all(good)}"
    if mode == "early" and rank != int(rest[0]):
        time.sleep(1.0)
    if mode == "recover" or (mode == "adopt" and rest):
        from lockstep.comm.agree import agree

        def step():
            if rank == 1:
                raise ValueError("once")
            accelerator.wait_for_everyone()

        agreement = agree(current.require().group, step)
        line += f", failed: {[failure.rank for failure in agreement.failures]}, "
        line += f"then {int(accelerator.reduce(torch.tensor(1)))}"
    sys.stdout.write(line + "\\n")  # in one piece: under PYTHONUNBUFFERED print writes the line's end by itself
    sys.stdout.flush()
    if mode == "fail":
        accelerator.wait_for_everyone()  # so that both have printed
        sys.exit(3 * rank)
    if mode == "recover":
        # gloo's worker lets go of all these after the caller has gone on, and needs the GIL for each.
        dist.all_reduce_coalesced([torch.ones(1) for _ in range(20_000)])
"""


def lines(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith("rank "))


HEALTHY = [f"rank {rank} of 2 over gloo, equal weights: True, sum 3" for rank in range(2)]


def check_quiet(ended: Ended) -> None:
    assert ended.code == 0, ended.err
    assert ended.err == ""


# --- torchrun ----------------------------------------------------------------------------------------------------


def test_torchrun_without_a_gpu_is_a_world_of_two(script: Path) -> None:
    ended = torchrun(script, "plain")
    check_quiet(ended)
    assert lines(ended.out) == HEALTHY


def test_torchrun_passes_a_failing_rank_on(script: Path) -> None:
    ended = torchrun(script, "fail")
    assert ended.code == 1
    assert lines(ended.out) == HEALTHY
    assert "exitcode  : 3" in ended.err


# --- by hand, rank 0 hosts the store -----------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, *in_soak(1)])
def test_ranks_that_end_at_different_times_end_quietly(script: Path, first: int) -> None:
    ended = by_hand(script, "early", str(first))
    for one in ended:
        check_quiet(one)
    assert lines(ended[0].out + ended[1].out) == HEALTHY


def test_ranks_started_by_hand_end_quietly_and_the_port_is_free_again(script: Path) -> None:
    port = str(free_port())
    for _ in range(2):
        ended = by_hand(script, "plain", env={"MASTER_PORT": port})
        for one in ended:
            check_quiet(one)
        assert lines(ended[0].out + ended[1].out) == HEALTHY


@pytest.mark.soak
def test_large_sums_of_several_dtypes_do_not_depend_on_hash_seeds(script: Path) -> None:
    # Processes of a test pool are forked from one, so only here do sets have another order on each rank.
    for one, healthy in zip(by_hand(script, "dtypes", seeds=True), HEALTHY, strict=True):
        check_quiet(one)
        assert lines(one.out) == [f"{healthy}, sums: True"]


def test_a_job_that_was_formed_again_ends_quietly_right_after_a_collective(script: Path) -> None:
    for one, healthy in zip(by_hand(script, "recover", env={"PYTHONWARNINGS": "ignore"}), HEALTHY, strict=True):
        check_quiet(one)
        assert lines(one.out) == [f"{healthy}, failed: [1], then 2"]


# --- mpirun ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (scripts/apt.sh installs it)")
def test_mpirun_is_a_world_of_two(script: Path) -> None:
    ended = run("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, str(script), "plain")
    assert ended.code == 0, ended.err
    assert lines(ended.out) == HEALTHY
    assert "warn" not in ended.err.lower()
    assert "[W" not in ended.err


# --- options of the process group --------------------------------------------------------------------------------


def test_a_file_as_the_rendezvous(script: Path, tmp_path: Path) -> None:
    ended = by_hand(script, "file", str(tmp_path / "meet"))
    for one in ended:
        check_quiet(one)
    assert lines(ended[0].out + ended[1].out) == HEALTHY


def test_the_time_out_is_the_one_asked_for(script: Path) -> None:
    ended = by_hand(script, "timeout")
    assert lines(ended[0].out + ended[1].out) == [f"{line}, 0:01:17" for line in HEALTHY]


def test_a_group_the_script_has_made_is_adopted_and_outlives_a_failure(script: Path) -> None:
    ended = by_hand(script, "adopt", "fail")
    for one, healthy in zip(ended, HEALTHY, strict=True):
        assert one.code == 0, one.err
        assert lines(one.out) == [f"{healthy}, adopted: True, failed: [1], then 2"]
        assert "[W" not in one.err


@pytest.mark.soak
def test_an_adopted_group_under_torchrun(script: Path) -> None:
    ended = torchrun(script, "adopt")
    assert ended.code == 0, ended.err
    assert lines(ended.out) == [f"{line}, adopted: True" for line in HEALTHY]


@pytest.mark.parametrize("backend", ["nccl", "smoke"])
def test_a_backend_that_cannot_work_is_refused_before_ranks_meet(script: Path, backend: str) -> None:
    [ended] = by_hand(script, "backend", backend, world_size=1, env={"WORLD_SIZE": "2"})
    assert ended.code == 1
    last = ended.err.strip().splitlines()[-1]
    assert last.startswith("lockstep.errors.")
    assert f"backend {backend!r}" in last
    assert "gloo" in last
