"""Ranks that fall out of step, for real: who is named, which line, why; and what others learn of a rank that ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults.jobs import Job, Result, marks, run_in_pool
from tests.ranks import free_port

AT = marks()
STOPPED = 86
REACHES = 15.0
"""Seconds in which the others stop: three times the bar, for a machine that has more to do."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """What must be seen of a scenario. The texts are patterns.

    In them ``$last`` is the number of the odd rank and ``$other`` that of any other; ``$others`` names these all.
    """

    scenario: str
    code: int
    """What ``lockstep launch`` ends with; torchrun always ends with 1."""
    says: list[str]
    """Under either launcher."""
    first: dict[str, str] = field(default_factory=dict)
    """Launcher -> how it names the first cause."""


FIRST = {"lockstep": r"the job failed ─+ Ranks? \d+"}
"""The box begins with ranks and what they did; `LEADS` holds which."""
ONE_LESS = [
    "called different operations",
    f"- Process $other: backward at \\S*{AT['backward']}",
    f"- Process $last: wait_for_everyone at \\S*{AT['end']}",
]
SKIPPED = [
    *ONE_LESS,
    r"Likely cause: At backward #\d rank $last was at batch 4 of its loader, the others at batch 3: it went on to the "
    "next batch without a backward, by .* an exception that was caught",
    "Fix: Let all ranks decide alike",
]
SKIPPED_LOSS = [
    *ONE_LESS,
    f"Likely cause: Rank $last called the model at \\S*{AT['forward']} and left out its backward after 2 updates: a "
    r"`continue` \(a NaN loss that is skipped, say\)",
    "Fix: Let all ranks decide alike",
]
SKIPPED_STEP = [
    "Cannot reduce gradients because optimizers have made more steps on some processes",
    r"Optimizer steps: - Process $other: after 3 optimizer steps - Process $last: after 2 optimizer steps",
    f"- Process $other: backward at \\S*{AT['backward']} - Process $last: backward at \\S*{AT['backward']}",
    f"Likely cause: Rank $last left out optimizer step 3, which ranks? $other[-, \\d]* made at \\S*{AT['step']}",
    "Fix: Let all ranks decide alike",
]
LEFT = [
    "called different operations",
    f"- Process $other: backward at \\S*{AT['backward']}",
    f"- Process $last: wait_for_everyone at \\S*{AT['end']}",
    # Of more ranks those are named that had come to it by then.
    f"Likely cause: Rank $last left the loop of line {AT['loop'].rpartition(':')[2]} .* while ranks? $other[-, \\d]* "
    "went on with it: fewer batches there, or a break on some ranks only",
    "Fix: Give every rank as many batches",
]
RAW = Stop(
    scenario="raw",
    code=STOPPED,
    says=[
        "lockstep guard: the ranks are out of step",
        f"$others waits? in torch's barrier #(\\d+) at \\S*{AT['barrier']}, "
        f"rank $last waits in torch's all_reduce #\\1 at \\S*{AT['all_reduce']}: calls that do not meet",
        "Cause Calls of torch.distributed meet in the order in which each rank makes them",
        "Job stopped",
    ],
)
RAW_LEFT_OUT = Stop(
    scenario="raw left out",
    code=STOPPED,
    says=[
        f"Rank $last did not make the call of torch's all_reduce at \\S*{AT['left out']}",
        f"$others called torch's all_reduce #(\\d+) at \\S*{AT['left out']}, "
        f"rank $last called torch's all_reduce #\\1 at \\S*{AT['after left out']}: calls that do not meet",
        "Cause .* From there on calls of torch.distributed are paired wrongly",
        "Job stopped",
    ],
)
STOPS = [
    Stop(
        scenario="shapes",
        code=1,
        says=[
            "due to shape mismatches",
            r"- Process $other: \[2\], float32 - Process $last: \[3\], float32",
            f"- Process $other: gather at \\S*{AT['shapes']} - Process $last: gather at \\S*{AT['shapes']}",
            "Likely cause: gather needs the same shape on every rank",
            "Fix: Call accelerator.pad_across_processes",
        ],
        first=FIRST,
    ),
    Stop(
        scenario="dtypes",
        code=1,
        says=[
            "due to dtype mismatches",
            r"- Process $other: \[2\], float32 - Process $last: \[2\], float64",
            f"- Process $other: gather at \\S*{AT['dtypes']} - Process $last: gather at \\S*{AT['dtypes']}",
            "Likely cause: gather needs the same dtype on every rank",
        ],
        first=FIRST,
    ),
    Stop(
        scenario="structures",
        code=1,
        says=[
            "its arguments differ between the processes",
            r"- Process $other: tuple, 1, \[2\], float32 - Process $last: dict, 1, a, \[2\], float32",
            f"- Process $other: gather at \\S*{AT['structures']} - Process $last: gather at \\S*{AT['structures']}",
            "Likely cause: gather needs the same structure on every rank",
        ],
        first=FIRST,
    ),
    Stop(
        scenario="operations",
        code=1,
        says=[
            "called different operations",
            f"- Process $other: gather at \\S*{AT['gather']} - Process $last: reduce \\(sum\\) at \\S*{AT['reduce']}",
            "Likely cause: The ranks took different ways through the script",
        ],
        first=FIRST,
    ),
    Stop(
        scenario="opposite order",
        code=1,
        says=[
            "called different operations",
            f"- Process $other: reduce \\(sum\\) at \\S*{AT['reduce first']} "
            f"- Process $last: gather at \\S*{AT['gather first']}",
            "Likely cause: The ranks call the same two in opposite order, in the two branches of line "
            + AT["opposite"].rpartition(":")[2],
            "Fix: Let every rank make these calls in the same order",
        ],
        first=FIRST,
    ),
    Stop(
        scenario="gather under main",
        code=1,
        says=[
            "called different operations",
            f"- Process 0: gather at \\S*{AT['gather under main']}",
            f"- Process \\d: wait_for_everyone at \\S*{AT['after gather']}",
            f"Likely cause: \\S*{AT['gather under main']} is under `if accelerator.is_main_process:`",
            "Fix: Call gather on every rank, outside of that condition",
        ],
        first=FIRST,
    ),
    Stop(
        scenario="barrier under main",
        code=1,
        says=[
            "called different operations",
            f"- Process 0: wait_for_everyone at \\S*{AT['barrier under main']}",
            f"- Process \\d: backward at \\S*{AT['backward']}",
            f"Likely cause: \\S*{AT['barrier under main']} is under `if accelerator.is_main_process:`",
            "Fix: Call wait_for_everyone on every rank, outside of that condition",
        ],
        first=FIRST,
    ),
    Stop(scenario="leaves the loop early", code=1, says=LEFT, first=FIRST),
    Stop(scenario="fewer batches", code=1, says=LEFT, first=FIRST),
    Stop(scenario="skips an update", code=1, says=SKIPPED, first=FIRST),
    Stop(scenario="skips a NaN loss", code=1, says=SKIPPED_LOSS, first=FIRST),
    Stop(scenario="skips a step", code=1, says=SKIPPED_STEP, first=FIRST),
    Stop(scenario="raises and swallows it", code=1, says=SKIPPED, first=FIRST),
    Stop(
        scenario="raises",
        code=1,
        says=["sample 11 is broken", "raise ValueError"],
        first={"lockstep": f"Rank $last raised ValueError at \\S*{AT['raises']} in train"},
    ),
    Stop(
        scenario="exits with 0",
        code=STOPPED,
        says=[
            f"Rank $last has finished; $others waits? in backward #\\d+ at \\S*{AT['backward']}",
            "Cause Rank $last came to the end of the script while others still train",
            "Job stopped",
        ],
    ),
    Stop(
        scenario="exits with 3",
        code=3,
        says=[],
        first={
            "lockstep": rf"Rank $last exited with code 3, by sys.exit\(\) at \S*{AT['exits']}",
            "torchrun": r"Root Cause .* rank : $last \(local_rank: $last\) exitcode : 3 ",
        },
    ),
    Stop(
        scenario="asked to end",
        code=143,
        says=[],
        first={
            "lockstep": r"Rank $last was asked to stop \(SIGTERM\)",
            "torchrun": r"Root Cause .* rank : $last \(local_rank: $last\) exitcode : -15 ",
        },
    ),
    Stop(
        scenario="killed",
        code=137,
        says=[],
        first={
            "lockstep": "Rank $last was killed by SIGKILL",
            "torchrun": r"Root Cause .* rank : $last \(local_rank: $last\) exitcode : -9 ",
        },
    ),
]
LAUNCHED = [stop for stop in STOPS if stop.scenario == "shapes" or stop.first is not FIRST]
"""Each way in which the launcher learns of a cause, once; `make soak` launches all."""
SOAK_STOPS = [*STOPS, RAW, RAW_LEFT_OUT, Stop(scenario="fewer batches of its own", code=1, says=LEFT, first=FIRST)]


def assert_says(result: Result, ranks: int, patterns: list[str]) -> None:
    others = "rank 0" if ranks == 2 else f"ranks 0-{ranks - 2}"
    other = f"[0-{ranks - 2}]"
    for pattern in patterns:
        # Spelled out: `$others` first, `$other` begins it.
        # In a box the labels have no colon.
        spelled = pattern.replace("Likely cause: ", "(Likely cause:|Cause) ").replace("Fix: ", "Fix:? ")
        spelled = spelled.replace("$others", others).replace("$other", other).replace("$last", str(ranks - 1))
        assert re.search(spelled, result.words, re.IGNORECASE), f"{spelled!r} is not in\n{result}"


def check(stop: Stop, job: Job, result: Result) -> None:
    assert result.code == (stop.code if job.launcher == "lockstep" else 1), result
    first = stop.first.get(job.launcher)
    assert_says(result, job.ranks, [first] if first else [])
    check_words(stop, job, result)
    assert "Starting again" not in result.text
    assert stop.code != STOPPED or (result.run / "diagnosis.json").exists()


def check_words(stop: Stop, job: Job, result: Result) -> None:
    assert_says(result, job.ranks, stop.says)
    assert result.seconds_since_fault < REACHES, result


def stops(rows: list[Stop], launcher: str = "lockstep", options: tuple[str, ...] = ()) -> list[object]:
    jobs = [Job(scenario=stop.scenario, launcher=launcher, options=options) for stop in rows]
    return [pytest.param(stop, job, id=stop.scenario) for stop, job in zip(rows, jobs, strict=True)]


# The guard's stops come with restarts that were asked for: starting again would only bring the job back there.
@pytest.mark.parametrize(
    ("stop", "job"), [*stops([*LAUNCHED, RAW_LEFT_OUT]), *stops([RAW], options=("--max_restarts", "3"))]
)
def test_the_job_stops_and_says_why(ended: Callable[[Job], Result], stop: Stop, job: Job) -> None:
    check(stop, job, ended(job))


# What a rank raises does not depend on who started it: for most causes it is read off ranks that are there already.
@pytest.mark.parametrize(("stop", "job"), stops([stop for stop in STOPS if stop not in LAUNCHED]))
def test_the_rank_that_sees_it_raises_and_says_why(stop: Stop, job: Job) -> None:
    result = run_in_pool(job)
    assert result.code == 1, result
    check_words(stop, job, result)


DEBUGGED = ("shapes", "dtypes", "structures", "operations", "opposite order", "gather under main", "barrier under main")
LEADS = {
    "leaves the loop early": f"Rank $last left the loop of \\S*{AT['loop']} and called wait_for_everyone at "
    f"\\S*{AT['end']}, while ranks? $other[-, \\d]* went on with it",
    "skips an update": "Rank $last went on to its next batch without a backward",
    "skips a NaN loss": f"Rank $last left out a backward, after it called the model at \\S*{AT['forward']}",
    "skips a step": f"Rank $last left out optimizer step 3, which others made at \\S*{AT['step']}",
    "gather under main": f"Rank 0 called gather at \\S*{AT['gather under main']}, which not every rank comes to",
    "barrier under main": f"Rank 0 called wait_for_everyone at \\S*{AT['barrier under main']}, which not every rank",
}
"""The first line of the error: who strayed, and where, whichever rank has noticed."""


@pytest.mark.parametrize("scenario", LEADS)
def test_the_first_line_names_the_rank_that_strayed(scenario: str) -> None:
    result = run_in_pool(Job(scenario=scenario))
    lead = LEADS[scenario].replace("$last", "1").replace("$other", "0")
    assert re.search(rf"DistributedOperationException: (\[rank\d\]: )?\s*{lead}", result.text), result


@pytest.mark.parametrize("scenario", [*DEBUGGED, "leaves the loop early", "skips a step"])
def test_debug_mode_says_no_less(scenario: str) -> None:
    """Its text has cause and fix, on every rank that it raises on."""
    stop = next(stop for stop in STOPS if stop.scenario == scenario)
    result = run_in_pool(Job(scenario=scenario, environ=(("LOCKSTEP_DEBUG_MODE", "1"),)))
    assert result.code == 1, result
    assert_says(result, 2, [part for part in stop.says if part.startswith(("Likely cause", "Fix"))])
    if scenario in LEADS:
        assert_says(result, 2, [LEADS[scenario]])
    assert "Fix: " in result.words
    assert not re.search(r"Input shapes: - Process \d: (batch|after) ", result.words), result


@pytest.mark.parametrize(("stop", "job"), stops([RAW], launcher="torchrun"))
def test_by_torchrun_too(ended: Callable[[Job], Result], stop: Stop, job: Job) -> None:
    check(stop, job, ended(job))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("stop", "job"),
    [
        pytest.param(stop, job, id=str(job))
        for stop in SOAK_STOPS
        for ranks in (2, 4)
        for launcher in ("lockstep", "torchrun")
        for job in [Job(scenario=stop.scenario, ranks=ranks, launcher=launcher)]
    ],
)
def test_on_more_ranks_and_by_torchrun(ended: Callable[[Job], Result], stop: Stop, job: Job) -> None:
    check(stop, job, ended(job))


# --- what may still end ------------------------------------------------------------------------------------------

STALLS = {
    "sleeps": [
        f"rank $last is in time.sleep at \\S*{AT['sleeps']}",
        f"Cause Rank $last sleeps at \\S*{AT['sleeps']}",
    ],
    "endless loop": [
        f"rank $last is in the loop `while .* at \\S*{AT['loops']}",
        f"Cause Rank $last does not come out of a `while` loop, at \\S*{AT['loops']}",
    ],
    "stuck in the loader": [
        f"rank $last is in the data loader \\(time.sleep\\) at \\S*{AT['loader']}",
        "Cause Rank $last gets no next batch",
    ],
}


TOGETHER = "each stuck in its own way"


def stall(scenario: str, ranks: int, launcher: str = "lockstep") -> Job:
    seconds = 4.0 + ranks
    stall_seconds = (("LOCKSTEP_STALL_SECONDS", "2"),)
    return Job(scenario=scenario, seconds=seconds, ranks=ranks, launcher=launcher, environ=stall_seconds)


def check_stall(job: Job, result: Result, others: str, patterns: list[str]) -> None:
    assert result.code == 0, result
    assert result.text.rstrip().endswith("all done")
    box = (result.run / "diagnosis.txt").read_text()
    assert box.splitlines()[0] in result.text
    waits = f"{others} waits? in backward #\\d+ at \\S*{AT['backward']} for"
    assert_says(result, job.ranks, ["ranks have been waiting", waits, *patterns, "Job continues"])
    assert "stopped" not in result.text


@pytest.mark.parametrize("job", [stall(TOGETHER, 4)], ids=str)
def test_what_may_still_end_is_told_and_left_running(ended: Callable[[Job], Result], job: Job) -> None:
    """Three ways to be stuck in one job; the cause that is told is the first one's."""
    (sleeps, cause), (loops, _), (loads, _) = STALLS.values()
    patterns = [part.replace("$last", str(rank)) for rank, part in enumerate((sleeps, loops, loads), 1)]
    check_stall(job, ended(job), "rank 0", [*patterns, cause.replace("$last", "1")])


@pytest.mark.soak
@pytest.mark.parametrize(
    "job",
    [
        stall(scenario, ranks, launcher)
        for scenario in STALLS
        for ranks in (2, 4)
        for launcher in ("lockstep", "torchrun")
    ],
    ids=str,
)
def test_stalls_on_more_ranks_and_by_torchrun(ended: Callable[[Job], Result], job: Job) -> None:
    check_stall(job, ended(job), "$others", STALLS[job.scenario])


# --- notebooks ---------------------------------------------------------------------------------------------------


def test_ranks_of_a_notebook_are_watched_too(tmp_path: Path) -> None:
    script = tmp_path / "cell.py"
    script.write_text(
        "import torch\nimport torch.distributed as dist\nfrom lockstep import Accelerator, debug_launcher\n\n\n"
        "def train():\n    if Accelerator().process_index:\n        dist.all_reduce(torch.ones(2))\n"
        "    else:\n        dist.barrier()\n\n\ndebug_launcher(train)\n"
    )
    environ = {**os.environ, "LOCKSTEP_RUN_DIR": str(tmp_path / "run")}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=environ, check=False
    )
    assert done.returncode == 1, done.stderr
    for part in ("lockstep guard", "cell.py:8", "cell.py:10", f"exit code {STOPPED}"):
        assert part in done.stdout + done.stderr, done.stdout + done.stderr


def test_a_rank_takes_over_from_a_watcher_that_has_died(tmp_path: Path) -> None:
    script = Path(__file__).with_name("taken_over.py")
    port = free_port()
    ranks = []
    for rank in range(3):
        place = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": port}
        environ = {**os.environ, **{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "127.0.0.1"}
        environ["LOCKSTEP_RUN_DIR"] = str(tmp_path / "run")
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
            )
        )
    try:
        texts = [process.communicate(timeout=60)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [-signal.SIGKILL, STOPPED, STOPPED], "\n".join(texts)
    assert "lockstep guard" in texts[1], texts[1]  # the lowest that lives
    assert "lockstep guard" not in texts[2], texts[2]
    for part in ("rank 1 waits in torch's all_reduce", "rank 2 waits in torch's barrier"):
        assert part in " ".join(texts[1].split()), texts[1]
