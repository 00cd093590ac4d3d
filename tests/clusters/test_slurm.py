"""Jobs on a real SLURM: ranks started by srun, and `lockstep launch` in an allocation."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.clusters.slurm_cluster import Slurm
from tests.clusters.training import Training

LOCKSTEP = [sys.executable, "-m", "lockstep"]


def submit(slurm: Slurm, folder: Path, *argv: str) -> tuple[str, int, str]:
    """Write a batch file and submit it by `lockstep slurm`: the job's last state, its exit code, what it printed."""
    options = ["--submit", "--job-name=job", "--output=%x.out", "--time=5", "--cpu"]
    env = {"LOCKSTEP_RUN_DIR": str(folder / "run")}
    done = slurm.run([*LOCKSTEP, "slurm", *options, *argv], cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    assert "Wrote train.sbatch." in done.stdout
    state, code = slurm.wait(int(done.stdout.split("Submitted batch job")[1]))
    return state, code, (folder / "job.out").read_text()


# --- srun starts the ranks ---------------------------------------------------------------------------------------


def test_ranks_started_by_srun(slurm: Slurm, job: Training) -> None:
    done = slurm.run(["srun", "-N2", "-n3", sys.executable, str(job.script), str(job.folder)])
    assert done.returncode == 0, done.stderr
    said = job.check("node0", "node0", "node1", launcher="slurm")
    assert [(one["node"], one["local_rank"]) for one in said] == [(0, 0), (0, 1), (1, 0)]


def test_a_rank_that_was_killed_is_reported_by_one_that_survives(slurm: Slurm, tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "faults" / "killed.py"
    env = {"LOCKSTEP_RUN_DIR": str(tmp_path / "run")}
    done = slurm.run(["srun", "-N1", "-n2", sys.executable, str(script), "forward"], env=env)
    assert done.returncode != 0
    # By its own error, or by the guard, whichever comes first.
    words = " ".join(done.stderr.split())
    assert re.search(r"rank 1 (on \S+ \(pid \d+\) died|has exited) .*in forward at \S*killed.py:\d+", words, re.I), (
        words
    )


# --- the launcher inside an allocation ---------------------------------------------------------------------------


@pytest.mark.soak
def test_a_batch_file_on_one_node(slurm: Slurm, job: Training, tmp_path: Path) -> None:
    options = ["--processes-per-node=2", "--cpus-per-node=2"]
    state, code, printed = submit(slurm, tmp_path, *options, str(job.script), str(job.folder))
    assert (state, code) == ("COMPLETED", 0), printed
    job.check("node0", "node0", launcher="lockstep launch")


def test_a_batch_file_on_two_nodes(slurm: Slurm, job: Training, tmp_path: Path) -> None:
    options = ["--nodes=2", "--processes-per-node=2", "--cpus-per-node=2"]
    state, code, printed = submit(slurm, tmp_path, *options, str(job.script), str(job.folder))
    assert (state, code) == ("COMPLETED", 0), printed
    said = job.check("node0", "node0", "node1", "node1", launcher="lockstep launch")
    assert [one["local_rank"] for one in said] == [0, 1, 0, 1]


def test_a_failing_rank_fails_the_job_on_all_nodes(slurm: Slurm, job: Training, tmp_path: Path) -> None:
    options = ["--nodes=2", "--processes-per-node=1"]
    state, code, printed = submit(slurm, tmp_path, *options, str(job.script), str(job.folder), "fail")
    assert state == "FAILED"
    assert code != 0
    job.check("node0", "node1")
    assert "Rank 1 on node 1 (node1)" in printed


@pytest.mark.soak
def test_srun_once_per_node_is_one_job(slurm: Slurm, job: Training, tmp_path: Path) -> None:
    launch = [*LOCKSTEP, "launch", "--cpu", "--num_processes=2", "--main_process_ip=node0"]
    env = {"LOCKSTEP_RUN_DIR": str(tmp_path / "run")}
    done = slurm.run(["srun", "-N2", "-n2", *launch, str(job.script), str(job.folder)], env=env)
    assert done.returncode == 0, done.stderr
    job.check("node0", "node1", launcher="lockstep launch")


def test_srun_several_times_per_node_is_refused(slurm: Slurm, job: Training) -> None:
    done = slurm.run(["srun", "-N1", "-n2", *LOCKSTEP, "launch", "--cpu", str(job.script), str(job.folder)])
    assert done.returncode == 2
    assert "started `lockstep launch` 2 times on 1 nodes" in done.stderr
    assert job.said() == []
