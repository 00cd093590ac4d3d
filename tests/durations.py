"""What ends a test run beside its result: where the time went, and the figures that tests have measured.

The seconds by folder are shown each time, so that a folder that grows is seen in the change that grows it.
``--durations-file`` keeps the start, end, worker and processor time of every test as JSON lines, for whoever has to
cut. Processor time is that of the worker and of the processes that it has started and waited for; pools of ranks are
not in it.
"""

from __future__ import annotations

import json
import resource
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

Note = Callable[[str], None]


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    """Keeps a line for the end of the run; what a test prints gets lost on its way from one of several processes."""
    return lambda line: record_property("note", line)


_BEGAN = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before anything of a test is made."""
    item.stash[_BEGAN] = _processor_time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """After everything of a test is gone."""
    report = yield
    if report.when == "teardown":
        report.user_properties.append(("processor_time", _processor_time() - item.stash[_BEGAN]))
    return report


def _processor_time() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@dataclass(eq=False)  # pytest keeps plugins in sets
class Durations:
    """Collects the reports of a run. Registered on the process that prints, not on xdist's workers."""

    file: Path | None
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    processor: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    tests: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    workers: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    lines: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one phase (setup, call or teardown) of one test."""
        folder = "/".join(report.nodeid.partition("::")[0].split("/")[:2])
        worker = getattr(report, "worker_id", "main")
        self.seconds[folder] += report.duration
        self.tests[folder] += report.when == "call"
        self.workers[worker].append((report.start, report.stop))
        used = sum(value for name, value in report.user_properties if name == "processor_time")
        self.processor[folder] += used
        if report.when == "teardown":
            self.notes += [str(value) for name, value in report.user_properties if name == "note"]
        if self.file is not None:
            row = {"test": report.nodeid, "when": report.when, "worker": worker, "processor": round(used, 4)}
            self.lines.append(json.dumps({**row, "start": report.start, "seconds": round(report.duration, 4)}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the tables."""
        if self.file is not None:
            self.file.write_text("".join(f"{line}\n" for line in self.lines), encoding="utf-8")
        if self.notes:
            terminalreporter.section("measured")
            for line in self.notes:
                terminalreporter.write_line(line)
        if len(self.seconds) > 1 or len(self.workers) > 1:
            terminalreporter.section("time by folder")
            for line in self.summary():
                terminalreporter.write_line(line)

    def summary(self) -> Iterator[str]:
        """One line for each folder, the slowest first, and one for each worker."""
        for folder, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]):
            used = f"{self.processor[folder]:8.1f} s of processor time"
            yield f"{seconds:8.1f} s  {used}  {self.tests[folder]:5d} tests  {folder}"
        first = min(start for spans in self.workers.values() for start, _ in spans)
        for worker, spans in sorted(self.workers.items()):
            busy = sum(stop - start for start, stop in spans)
            yield f"{busy:8.1f} s  busy, done after {spans[-1][1] - first:.1f} s: worker {worker}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--durations-file``."""
    parser.addoption("--durations-file", type=Path, help="keep start, seconds and worker of every test, as JSON lines")


def pytest_configure(config: pytest.Config) -> None:
    """Count on the process that prints."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(file=config.getoption("--durations-file")))
