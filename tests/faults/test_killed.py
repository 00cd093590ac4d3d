"""A rank that a signal ends leaves no exception: its black box shows what it was doing, whoever started the job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.faults.jobs import HERE, Job, Result, marks
from tests.ranks import OLD_TORCH, free_port, in_soak

AT = marks("killed.py")
STOPPED = 86
DONE = r"The last collective it completed is \w[\w' ]* #\d+ at \S*killed.py:\d+\."
WAS = {
    "data": rf"in the data loader at \S*{AT['data']}, after step 3\..* {DONE}",
    "forward": rf"in forward at \S*{AT['forward']}, after step 3\..* {DONE}",
    "backward": rf"in backward #5 at \S*{AT['backward']}, after step 3\..* {DONE}",
    "between steps": rf"in the script's own code after backward #4 at \S*{AT['backward']}, after step 3\. ",
    "checkpoint": rf"writing a checkpoint at \S*{AT['checkpoint']}, after step 3\..* {DONE}",
    "collective": rf"in wait_for_everyone #5 at \S*{AT['collective']}, after step 3\..* {DONE}",
    "sleep": rf"in the script at \S*{AT['sleep']}, after step 3\..* {DONE}",
}
FIX = "If nobody killed it, memory is the first suspect"


def killed(where: str, launcher: str = "lockstep", ranks: int = 2, options: tuple[str, ...] = ()) -> Job:
    return Job(scenario=where, script="killed.py", launcher=launcher, ranks=ranks, options=options)


@pytest.mark.parametrize(
    "where", ["forward", *in_soak("between steps", "data", "backward", "checkpoint", "collective", "sleep")]
)
def test_the_launcher_reports_what_it_was_doing(ended: Callable[[Job], Result], where: str) -> None:
    result = ended(killed(where))
    assert result.code == 137, result
    report = result.words.partition("the job failed")[2]
    assert re.search(rf"Rank 1 was killed by SIGKILL, {WAS[where]}.*{FIX}", report), result


def test_a_restart_reports_it_too(ended: Callable[[Job], Result]) -> None:
    result = ended(killed("forward", options=("--max_restarts", "1")))
    was = rf"in forward at \S*{AT['forward']}, after step 3\."
    assert re.search(rf"Rank 1 was killed by SIGKILL, {was} Starting again", result.words), result


@pytest.mark.parametrize("launcher", ["lockstep", *in_soak("torchrun")])
def test_ranks_whose_calls_gloo_aborts_are_both_named(ended: Callable[[Job], Result], launcher: str) -> None:
    """Which rank gloo aborts depends on who is first: one that made the call, or the one that left it out."""
    result = ended(killed("gloo aborts", launcher=launcher, ranks=3))
    assert result.code, result
    raw, backward = rf"torch's all_reduce at \S*{AT['gloo aborts']}", rf"backward #5 at \S*{AT['backward']}"
    assert re.search(
        rf"in {raw}, after step 3\..* At that moment rank 2 was in {backward}\. .*Cause The ranks made "
        rf"different|in {backward}, after step 3\.",
        result.words,
    ), result
    assert "gloo aborts the process" in result.words or AT["gloo aborts"] in result.words, result


@pytest.mark.parametrize("launcher", ["lockstep", *in_soak("torchrun")])
def test_a_crash_in_native_code_is_reported_with_its_line(ended: Callable[[Job], Result], launcher: str) -> None:
    result = ended(killed("native code", launcher=launcher))
    was = rf"in the script at \S*{AT['native code']}, after step 3\."
    assert re.search(was, result.words), result
    assert "different collective calls" not in result.words, result


def assert_reported_once(result: Result, rank: int, where: str) -> None:
    died = rf"Rank {rank} on \S+ \(pid \d+\) died without an exception\. It was {WAS[where]}.*{FIX}"
    assert re.search(died, result.words), result
    assert result.text.count("died without an exception") == 1, result


@pytest.mark.parametrize(
    "where", ["forward", *in_soak("data", "backward", "between steps", "checkpoint", "collective")]
)
def test_by_torchrun_a_rank_that_survives_reports_it(ended: Callable[[Job], Result], where: str) -> None:
    result = ended(killed(where, launcher="torchrun", ranks=3))
    assert_reported_once(result, 2, where)
    # What torchrun prints of the others stays as it was.
    assert result.text.count("(SIGTERM)") >= (0 if OLD_TORCH else 2), result  # older ones do not list them


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed (scripts/apt.sh installs it)")
@pytest.mark.soak
@pytest.mark.parametrize(("where", "rank"), [("forward", 0), ("data", 2), ("backward", 1)])
def test_by_mpirun_too(tmp_path: os.PathLike[str], where: str, rank: int) -> None:
    argv = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable]
    environ = {**os.environ, "LOCKSTEP_RUN_DIR": f"{os.fspath(tmp_path)}/run", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*argv, str(HERE / "killed.py"), where, str(rank)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90, env=environ, check=False,
    )  # fmt: skip
    result = Result(code=done.returncode, text=done.stdout, ended=0.0, run=HERE)
    assert_reported_once(result, rank, where)


@pytest.mark.parametrize("where", ["torch's own", *in_soak("backward")])
def test_where_nobody_ends_the_others_their_errors_report_it(tmp_path: os.PathLike[str], where: str) -> None:
    """As under srun, which leaves the other ranks to themselves."""
    port, ranks = free_port(), []
    for rank in range(2):
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        environ = {**os.environ, **{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "127.0.0.1"}
        environ |= {"LOCKSTEP_RUN_DIR": f"{os.fspath(tmp_path)}/run", "OMP_NUM_THREADS": "1"}
        argv = [sys.executable, str(HERE / "killed.py"), where]
        ranks.append(subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environ))
    try:
        text, _ = (process.communicate(timeout=60)[1] for process in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    result = Result(code=ranks[0].returncode, text=text, ended=0.0, run=HERE)
    if result.code == STOPPED:  # the guard was first to find it
        assert re.search(rf"Rank 1 has exited after step 3, in backward #5 at \S*{AT['backward']}", result.words), (
            result
        )
        return
    assert result.code == 1, result
    assert_reported_once(result, 1, where if where in WAS else "between steps")
