"""`lockstep test` and the checks it runs, on real processes: all pass here, and a planted failure is named."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.cli import test as command
from lockstep.testing import checks

NAMES = [check.name for check in checks.CHECKS]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    def lines(self, mark: str) -> list[str]:
        """The checks with this mark, by name."""
        starts = [line for line in self.out.splitlines() if line.startswith(f"{mark} ")]
        return [line.removeprefix(f"{mark} ").rsplit("  ", 2)[0].split("   ")[0].strip() for line in starts]


def run(*words: str, folder: Path, env: Mapping[str, str] | None = None) -> Ended:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LOCKSTEP_", "ACCELERATE_", "SLURM_", "OMPI_", "PMI_"))
    }
    quick = {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**kept, **quick, "PYTHONIOENCODING": "utf-8", **(env or {})},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=150,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return Ended(code=done.returncode, out=done.stdout, err=done.stderr)


def planted(folder: Path, body: str) -> str:
    """A script that runs the checks with one of them replaced."""
    text = """
        import dataclasses, os, signal, sys, time
        import torch
        from lockstep.testing import checks, trials

        def planted(accelerator):
            rank = accelerator.process_index
            BODY

        table = [
            dataclasses.replace(check, run=planted) if check.name == "data sharding" else check
            for check in checks.CHECKS
            if check.name in ("collectives", "data sharding", "process control", "debug mode")
        ]
        sys.exit(checks.main(checks=table))
    """
    path = folder / "planted.py"
    path.write_text(textwrap.dedent(text).replace("BODY", textwrap.indent(textwrap.dedent(body), " " * 4).strip()))
    return str(path)


def test_all_pass_on_one_process(tmp_path: Path) -> None:
    ended = run("-m", "lockstep.testing.checks", folder=tmp_path)
    assert ended.code == 0, ended.out + ended.err
    assert ended.lines("✓") == NAMES[:-1]
    assert ended.lines("–") == ["debug mode"]
    assert "skipped: one process has nobody to differ from" in ended.out
    assert ended.out.splitlines()[-1] == "All 9 checks passed on 1 process (cpu); 1 skipped"


@pytest.mark.soak
def test_all_pass_on_two_processes(tmp_path: Path) -> None:
    ended = run(*TORCHRUN, "-m", "lockstep.testing.checks", folder=tmp_path)
    assert ended.code == 0, ended.out + ended.err
    assert ended.lines("✓") == NAMES
    assert ended.out.splitlines()[-1] == "All 10 checks passed on 2 processes (cpu, gloo)"
    assert len(ended.out.splitlines()) == 11, "rank 0 alone prints"


@pytest.mark.soak
def test_what_the_job_is_configured_with_does_not_disturb(tmp_path: Path) -> None:
    """Each check has its own precision, accumulation and compiler, whatever scripts are to use."""
    variables = {
        "LOCKSTEP_MIXED_PRECISION": "bf16",
        "LOCKSTEP_GRADIENT_ACCUMULATION_STEPS": "4",
        "LOCKSTEP_DYNAMO_BACKEND": "inductor",
        "LOCKSTEP_DEBUG_MODE": "1",
    }
    ended = run(*TORCHRUN, "-m", "lockstep.testing.checks", "--json", folder=tmp_path, env=variables)
    assert ended.code == 0, ended.out + ended.err
    said = json.loads(ended.out)
    assert (said["passed"], said["processes"], said["device"], said["backend"]) == (True, 2, "cpu", "gloo")
    assert [(check["name"], check["state"]) for check in said["checks"]] == [(name, "passed") for name in NAMES]


def test_a_setting_that_cannot_be_honoured(tmp_path: Path) -> None:
    ended = run("-m", "lockstep.testing.checks", folder=tmp_path, env={"LOCKSTEP_MIXED_PRECISION": "fp8"})
    assert ended.code == 1
    assert "LOCKSTEP_MIXED_PRECISION='fp8' is not supported yet" in ended.err
    assert ended.out == ""


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("if rank == 1: raise OSError('the disk of rank 1 is full')", marks=pytest.mark.soak),
        # Rank 0 is inside a collective when rank 1 fails: it must come out of it.
        """
        if rank == 1: raise OSError('the disk of rank 1 is full')
        accelerator.gather(torch.ones(3))
        """,
    ],
    ids=["alone", "while rank 0 waits"],
)
def test_a_failure_names_its_check_and_its_rank(tmp_path: Path, body: str) -> None:
    ended = run(*TORCHRUN, planted(tmp_path, body), folder=tmp_path)
    assert ended.code == 1, ended.out + ended.err
    assert ended.lines("✗") == ["data sharding"]
    assert ended.lines("✓") == ["collectives", "process control", "debug mode"], "the rest is still run"
    assert "    rank 1: OSError: the disk of rank 1 is full" in ended.out.splitlines()
    assert "rank 0: " not in ended.out
    assert "Samples would be lost or seen twice." in ended.out
    assert ended.out.splitlines()[-1] == "1 of 4 checks failed on 2 processes (cpu, gloo): data sharding"


@pytest.mark.soak
def test_a_wrong_result_is_told(tmp_path: Path) -> None:
    body = "trials.expect('gather', accelerator.gather(torch.tensor([rank])).tolist(), [0, 2])"
    ended = run(*TORCHRUN, planted(tmp_path, body), folder=tmp_path)
    assert ended.code == 1
    assert "WrongResult: gather gave [0, 1], and should have given [0, 2]" in ended.out


@pytest.mark.soak
def test_a_failure_in_json(tmp_path: Path) -> None:
    script = planted(tmp_path, "if rank == 1: raise OSError('the disk of rank 1 is full')")
    ended = run(*TORCHRUN, script, "--json", folder=tmp_path)
    assert ended.code == 1
    said = json.loads(ended.out)
    assert said["passed"] is False
    (failed,) = [check for check in said["checks"] if check["state"] == "failed"]
    assert failed["name"] == "data sharding"
    (failure,) = failed["failures"]
    assert (failure["rank"], failure["kind"]) == (1, "OSError")
    assert "planted.py" in failure["details"]


@pytest.mark.soak
def test_a_rank_that_dies_ends_the_job(tmp_path: Path) -> None:
    script = planted(tmp_path, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\naccelerator.gather(torch.ones(3))")
    ended = run(*TORCHRUN, script, folder=tmp_path)
    assert ended.code != 0
    assert "All" not in ended.out


SABOTAGE = """
    import contextlib, dataclasses, sys, time
    from unittest import mock
    from lockstep import Accelerator
    from lockstep.strategies.ddp import module as ddp_module
    from lockstep.testing import checks, trials

    @contextlib.contextmanager
    def late(accelerator):
        if accelerator.is_main_process:
            time.sleep(0.5)
        yield

    def unreduced(model, *inputs):
        return model.module(*inputs)

    BROKEN = {
        "collectives": (trials.functional, "broadcast", lambda tensor, from_process=0: tensor),
        "data sharding": (Accelerator, "gather_for_metrics", lambda self, tensor: self.gather(tensor)),
        "same weights as one process": (ddp_module.DistributedDataParallel, "forward", unreduced),
        "gradient accumulation": (ddp_module.DistributedDataParallel, "forward", unreduced),
        "mixed precision fp16": (ddp_module.DistributedDataParallel, "forward", unreduced),
        "mixed precision bf16": (trials.AcceleratorState, "_reset_state", lambda: None),
        "checkpoint round trip": (Accelerator, "load_state", lambda self, folder: None),
        "random numbers": (trials.rng, "synchronize_rng_states", lambda kinds, generator=None: None),
        "process control": (Accelerator, "main_process_first", late),
        "debug mode": (Accelerator, "gather", lambda self, tensor: tensor),
    }

    def broken(check):
        def run(accelerator):
            with mock.patch.object(*BROKEN[check.name]):
                return check.run(accelerator)

        return dataclasses.replace(check, run=run)

    sys.exit(checks.main(checks=[broken(check) for check in checks.CHECKS]))
"""


@pytest.mark.soak
def test_broken_parts_are_found(tmp_path: Path) -> None:
    """Something underneath each check is broken: none of them passes whatever happens."""
    path = tmp_path / "sabotage.py"
    path.write_text(textwrap.dedent(SABOTAGE))
    ended = run(*TORCHRUN, str(path), "--json", folder=tmp_path)
    assert ended.code == 1, ended.out + ended.err
    said = {check["name"]: check for check in json.loads(ended.out)["checks"]}
    assert list(said) == NAMES
    assert {name: check["state"] for name, check in said.items()} == dict.fromkeys(NAMES, "failed")
    kinds = {name: {failure["kind"] for failure in check["failures"]} for name, check in said.items()}
    # Where the precision of the check before is kept, the next Accelerator refuses another one.
    assert kinds == {**{name: {"WrongResult"} for name in NAMES}, "mixed precision bf16": {"ConfigError"}}


@pytest.mark.soak
def test_the_marks_where_only_ascii_can_be_printed(tmp_path: Path) -> None:
    script = planted(tmp_path, "raise OSError('full')")
    ended = run(script, folder=tmp_path, env={"PYTHONIOENCODING": "ascii"})
    assert ended.code == 1
    assert ended.out.isascii()
    assert ended.lines("ok") == ["collectives", "process control"]
    assert ended.lines("FAILED") == ["data sharding"]


# --- the command ---------------------------------------------------------------------------------------------------


def words(*given: str) -> list[str]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.command(parser.parse_args(given))


def test_options_are_handed_to_launch() -> None:
    start = [sys.executable, "-m", "lockstep", "launch"]
    assert words() == [*start, "-m", "lockstep.testing.checks"]
    assert words("--config-file", "f.yaml", "--num-processes", "2", "--cpu", "--json") == [
        *start,
        *("--config_file", "f.yaml", "--num_processes", "2", "--cpu"),
        *("-m", "lockstep.testing.checks", "--json"),
    ]


def test_the_command_on_two_processes(tmp_path: Path) -> None:
    ended = run("-m", "lockstep", "test", "--num_processes", "2", "--cpu", folder=tmp_path)
    assert ended.code == 0, ended.out + ended.err
    assert ended.lines("✓") == NAMES
    assert ended.out.splitlines()[-1] == "All 10 checks passed on 2 processes (cpu, gloo)"


def test_the_command_takes_a_file_and_passes_exit_codes_on(tmp_path: Path) -> None:
    missing = run("-m", "lockstep", "test", "--config_file", "missing.yaml", folder=tmp_path)
    assert missing.code == 2
    assert "missing.yaml" in missing.err
    (tmp_path / "one.yaml").write_text("use_cpu: true\nnum_processes: 1\nmixed_precision: fp16\n")
    ended = run("-m", "lockstep", "test", "--config_file", "one.yaml", "--json", folder=tmp_path)
    assert ended.code == 0, ended.out + ended.err
    assert json.loads(ended.out)["processes"] == 1
