"""Checks that hang, break or die: each is a finding, and the others go on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from lockstep.doctor import checks as room
from lockstep.doctor.checks import CHECKS, DoctorCheck
from lockstep.doctor.context import DoctorContext
from lockstep.doctor.finding import Finding, exit_code, worst
from lockstep.doctor.run import run_check, run_checks

# A module of checks beside the real ones, as far as Python can tell.
PATIENTS = """
import os, signal, time
from lockstep.doctor.finding import Finding

def well(context):
    return Finding(check="well", status="ok", what=f"{context.processes} processes", data={"seen": [1, None]})

def two(context):
    yield Finding(check="one", status="ok", what="1")
    yield Finding(check="two", status="warning", what="2")

def hangs(context):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)

def breaks(context):
    raise ValueError("no such thing")

def dies(context):
    os.kill(os.getpid(), signal.SIGKILL)

def leaves(context):
    os._exit(7)
"""


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "patients.py").write_text(PATIENTS)
    monkeypatch.setattr(room, "__path__", [*room.__path__, str(tmp_path)])


def check(name: str, limit: float = 20.0) -> DoctorCheck:
    return DoctorCheck(name=name, place=f"patients:{name}", limit=limit)


def test_one_that_hangs_breaks_or_dies_is_told_and_the_rest_answers(patients: None) -> None:
    told: list[str] = []
    started = time.monotonic()
    asked = [check("hangs", 1.0), *map(check, ("well", "two", "breaks", "dies", "leaves"))]
    found = run_checks(DoctorContext(processes=3), asked, on_result=lambda each, _: told.append(each.name))
    assert time.monotonic() - started < 15  # the hanging one sleeps for 60
    assert [(finding.check, finding.status) for finding in found] == [
        ("hangs", "error"),
        ("well", "ok"),
        ("one", "ok"),
        ("two", "warning"),
        ("breaks", "warning"),
        ("dies", "warning"),
        ("leaves", "warning"),
    ]
    by_name = {finding.check: finding for finding in found}
    assert by_name["hangs"].what == "no answer within 1 s"
    assert by_name["well"].what == "3 processes"
    assert by_name["well"].data == {"seen": [1, None]}
    assert "ValueError: no such thing" in by_name["breaks"].what
    assert "signal 9" in by_name["dies"].what
    assert "exit code 7" in by_name["leaves"].what
    assert sorted(told) == sorted(each.name for each in asked)


def test_the_process_of_one_that_hangs_is_ended(patients: None) -> None:
    before = _children()  # fixtures of the whole run may have some
    run_checks(DoctorContext(), [check("hangs", 0.5)])
    assert _children() - before == set()


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_a_check_that_is_not_there_is_a_finding() -> None:
    (finding,) = run_check(DoctorCheck(name="lost", place="nowhere:nothing"), DoctorContext())
    assert finding.status == "warning"
    assert "ModuleNotFoundError" in finding.what


@pytest.mark.parametrize("each", CHECKS, ids=lambda each: each.name)
def test_every_check_of_the_list_exists_and_has_a_limit(each: DoctorCheck) -> None:
    import importlib

    module, _, function = each.place.partition(":")
    assert callable(getattr(importlib.import_module(f"lockstep.doctor.checks.{module}"), function))
    assert 0 < each.limit <= 60


@pytest.mark.parametrize(
    ("states", "gravest", "code"),
    [
        ([], "ok", 0),
        (["skipped"], "skipped", 0),
        (["skipped", "ok", "warning"], "warning", 0),
        (["error", "ok", "warning"], "error", 1),
    ],
)
def test_errors_alone_make_the_exit_code(states: list, gravest: str, code: int) -> None:
    findings = [Finding(check="a", status=state, what="b") for state in states]
    assert worst(findings) == gravest
    assert exit_code(findings) == code


def test_a_finding_travels() -> None:
    finding = Finding(check="a", status="error", what="b", why="c", fix="d", data={"e": 1})
    assert Finding.of(finding.plain()) == finding


def test_signals_are_as_they_were() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    run_checks(DoctorContext(), [DoctorCheck(name="kernel", place="kernel:version")])
    assert signal.getsignal(signal.SIGCHLD) is before
