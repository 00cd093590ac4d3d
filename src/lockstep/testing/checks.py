"""What ``lockstep test`` runs on every rank: a short real check of each thing that training stands on.

Each check is a function of a table. It runs inside ``accelerator.agree``, so that one that fails on any rank is left by
all, is told with its rank, and the next one can still run. The functions are in `lockstep.testing.trials`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

from lockstep import current
from lockstep.accelerator import Accelerator
from lockstep.comm.agree import Failure
from lockstep.config.handlers import InitProcessGroupKwargs
from lockstep.errors import LockstepError
from lockstep.testing import trials
from lockstep.testing.trials import Skip

PATIENCE = timedelta(minutes=2)
"""How long ranks wait for each other: nothing here takes seconds, and a set-up that hangs should say so soon."""
LOST = "The ranks have lost each other: no more checks can be run. Look at the output of the rank that is missing."
GRACE = 1.0
"""Seconds for which the other ranks stay when all have lost each other, so that rank 0 can say so."""


@dataclass(frozen=True, kw_only=True)
class SetupCheck:
    """One line of the table."""

    name: str
    """What is checked."""
    run: Callable[[Accelerator], Skip | str | None]
    """Called on: all ranks. Raises when it is not as it should be; may return a note, or a `Skip`."""
    advice: str
    """What a failure means, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one check went, the same on every rank."""

    name: str
    """What was checked."""
    state: str
    """"passed", "failed" or "skipped"."""
    seconds: float
    """How long it took on this rank."""
    note: str = ""
    """What else there is to say."""
    failures: tuple[Failure, ...] = ()
    """The ranks on which it failed, and how."""
    advice: str = ""
    """What to do, when it failed."""


CHECKS: tuple[SetupCheck, ...] = (
    SetupCheck(
        name="collectives",
        run=trials.check_collectives,
        advice="Ranks cannot exchange data. Look at the network: `lockstep env` on each machine shows the interfaces "
        "and the route to the main address; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another one.",
    ),
    SetupCheck(
        name="data sharding",
        run=trials.check_sharding,
        advice="Samples would be lost or seen twice. Make sure that all ranks run the same versions (`lockstep env`).",
    ),
    SetupCheck(
        name="same weights as one process",
        run=trials.check_training,
        advice="Gradients are not averaged as they should be, or devices compute differently. See whether all ranks "
        "run on the same kind of device with the same versions (`lockstep env`).",
    ),
    SetupCheck(
        name="gradient accumulation",
        run=trials.check_accumulation,
        advice="Updates over several micro-batches are wrong. See whether all ranks run the same versions "
        "(`lockstep env`).",
    ),
    SetupCheck(
        name="mixed precision fp16",
        run=trials.check_fp16,
        advice="Train with mixed_precision='no' or 'bf16' on this device.",
    ),
    SetupCheck(
        name="mixed precision bf16",
        run=trials.check_bf16,
        advice="Train with mixed_precision='no' or 'fp16' on this device.",
    ),
    SetupCheck(
        name="checkpoint round trip",
        run=trials.check_checkpoint,
        advice="What is saved cannot be gone on from. See whether the temporary folder (TMPDIR) has room and is the "
        "same one for all processes of a machine.",
    ),
    SetupCheck(
        name="random numbers",
        run=trials.check_random,
        advice="Ranks would shuffle differently. See whether all ranks run the same versions (`lockstep env`).",
    ),
    SetupCheck(
        name="process control",
        run=trials.check_control,
        advice="Ranks do not wait for each other. See whether every process can reach the main address and port.",
    ),
    SetupCheck(
        name="debug mode",
        run=trials.check_debug_mode,
        advice="Mismatched collectives would go unnoticed. See whether all ranks run the same versions "
        "(`lockstep env`).",
    ),
)
"""What is checked, in this order: later ones stand on earlier ones."""


# --- running them ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None, checks: Sequence[SetupCheck] = CHECKS) -> int:
    """Called on: all ranks. Run the checks; rank 0 prints. The exit code, the same on every rank: 1 when one failed."""
    parser = argparse.ArgumentParser(prog="lockstep.testing.checks", description="Check the set-up on every process.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    as_json = parser.parse_args(argv).json
    logging.getLogger("lockstep").setLevel(logging.WARNING)  # the small runs here would each announce themselves
    try:
        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)])
    except LockstepError as error:
        print(f"lockstep test: the processes could not be put together: {error}", file=sys.stderr, flush=True)
        return 1
    group = current.require().group
    place = f"{accelerator.device.type}, {group.backend}" if accelerator.use_distributed else accelerator.device.type
    show = accelerator.is_main_process and not as_json
    results: list[Result] = []
    lost = False
    for check in checks:
        result, lost = _perform(accelerator, check)
        results.append(result)
        if show:
            print("\n".join(_lines(result, max(len(each.name) for each in checks))), flush=True)
        if lost:
            # The ranks cannot be brought together again: whatever comes next would fail for that reason alone.
            results += [Result(name=rest.name, state="not run", seconds=0.0) for rest in checks[len(results) :]]
            break
    if show:
        print(_summary(results, accelerator.num_processes, place), flush=True)
    elif accelerator.is_main_process:
        job = {"processes": accelerator.num_processes, "device": accelerator.device.type, "backend": group.backend}
        passed = all(result.state in ("passed", "skipped") for result in results)
        print(json.dumps({"passed": passed, **job, "checks": [asdict(each) for each in results]}, indent=2), flush=True)
    if not lost:
        accelerator.wait_for_everyone()  # a launcher stops the job at the first exit code: rank 0 has to have spoken
    elif not accelerator.is_main_process:
        time.sleep(GRACE)
    accelerator.end_training()
    return int(any(result.state == "failed" for result in results))


def _perform(accelerator: Accelerator, check: SetupCheck) -> tuple[Result, bool]:
    """Called on: all ranks. One check, and whether the ranks lost each other over it."""
    started = time.monotonic()
    lost, value = False, None
    failures: tuple[Failure, ...]
    try:
        agreement = accelerator.agree(lambda: check.run(accelerator))
        failures, value = agreement.failures, agreement.value
    except Exception as error:
        lost = True
        failures = (Failure(rank=accelerator.process_index, kind=type(error).__name__, message=str(error), details=""),)
    seconds = time.monotonic() - started
    if failures:
        advice = LOST if lost else check.advice
        return Result(name=check.name, state="failed", seconds=seconds, failures=failures, advice=advice), lost
    if isinstance(value, Skip):
        return Result(name=check.name, state="skipped", seconds=seconds, note=value.reason), lost
    return Result(name=check.name, state="passed", seconds=seconds, note=value or ""), lost


def _lines(result: Result, width: int) -> Iterator[str]:
    """What is said of one check."""
    note = f"  {result.note}" if result.state == "passed" and result.note else ""
    yield f"{_mark(result.state)} {result.name:<{width}}  {result.seconds:6.2f} s{note}"
    if result.state == "skipped":
        yield f"    skipped: {result.note}"
    for failure in result.failures:
        first, *rest = f"rank {failure.rank}: {failure.kind}: {failure.message.strip()}".splitlines()
        yield from (f"    {line}" for line in (first, *rest))
    if result.advice:
        yield f"    {result.advice}"


def _mark(state: str) -> str:
    mark, plain = {"passed": ("✓", "ok"), "failed": ("✗", "FAILED"), "skipped": ("–", "--")}[state]
    try:
        mark.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return plain
    return mark


def _summary(results: Sequence[Result], processes: int, place: str) -> str:
    where = f"on {processes} process{'es' if processes > 1 else ''} ({place})"
    failed = [result.name for result in results if result.state == "failed"]
    passed = sum(result.state == "passed" for result in results)
    others = [
        f"{count} {state}"
        for state in ("skipped", "not run")
        if (count := sum(result.state == state for result in results))
    ]
    if failed:
        return f"{len(failed)} of {len(results)} checks failed {where}: {'; '.join([', '.join(failed), *others])}"
    return "; ".join([f"All {passed} checks passed {where}", *others])


if __name__ == "__main__":
    sys.exit(main())
