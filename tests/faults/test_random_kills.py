"""SIGKILL at a random moment, of any process of a job: it ends soon, names the cause, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.jobs import HERE, LIMIT, Job
from tests.ranks import free_port

BAR = 15.0
"""Seconds from the kill to the end of the job; three times as much is asserted."""
VICTIMS = ("worker", "launcher", "rank 1", "keeper", "rank 0", "host of the store")
RUN = "LOCKSTEP_TEST_RUN"
MOUNT = 'mount -t tmpfs none /dev/shm && exec "$@"'
OWN_SHM = ["unshare", "--mount", "--propagation", "private", "sh", "-c", MOUNT, "sh"]


def rounds() -> list[object]:
    """60 of them: one in every run, 10 in soak, the others in soak-long."""
    marks = {0: (), **dict.fromkeys(range(1, 10), pytest.mark.soak)}
    return [pytest.param(number, marks=marks.get(number, pytest.mark.soak_long)) for number in range(60)]


class Run:
    """A job in which something will be killed."""

    def __init__(self, folder: Path, strategy: str) -> None:
        self.token = uuid.uuid4().hex
        self.end, self.screen, self.boxes = folder / "end", folder / "screen", folder / "run" / "boxes"
        # Short, since the path of a socket has a limit.
        self.temporary = Path(tempfile.mkdtemp(prefix="kill-"))
        self.environ = {
            **os.environ,
            RUN: self.token,
            "TMPDIR": str(self.temporary),
            "LOCKSTEP_RUN_DIR": str(folder / "run"),
            "OMP_NUM_THREADS": "1",
        }
        self.argv = [str(HERE / "loading.py"), str(self.end), strategy]
        self.memory = -1
        self.processes: list[subprocess.Popen[bytes]] = []

    def launch(self) -> None:
        """By ``lockstep launch``, with a /dev/shm that only the job sees."""
        command = [*Job().command[:-1], *self.argv]
        self._start([*(OWN_SHM if os.geteuid() == 0 else []), *command])
        if os.geteuid() == 0:
            place = f"/proc/{self.processes[0].pid}/root/dev/shm"
            while os.stat(place).st_dev == os.stat("/dev/shm").st_dev:
                time.sleep(0.01)  # that of everybody, still
            self.memory = os.open(place, os.O_RDONLY)

    def start_alone(self) -> None:
        """Without a launcher: rank 0 hosts the store."""
        port = str(free_port())
        for rank in range(2):
            place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
            variables = {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}
            self._start([sys.executable, *self.argv], variables)

    def _start(self, argv: list[str], variables: dict[str, str] | None = None) -> None:
        with open(self.screen, "ab") as file:
            environ = {**self.environ, **(variables or {})}
            self.processes.append(subprocess.Popen(argv, stdout=file, stderr=file, env=environ, start_new_session=True))

    def find(self, what: str) -> list[int]:
        """The processes that could be the victim now."""
        launcher = self.processes[0].pid
        if what == "host of the store":  # before, the other rank cannot know that it will not start
            return [launcher] if (self.boxes / "rank_1.box").exists() else []
        ranks = {number: pid for pid in children(launcher) if (number := environ_of(pid).get("RANK"))}
        if what.startswith("rank"):
            return [ranks[what[5:]]] if what[5:] in ranks else []
        if what == "worker":
            return [pid for rank in ranks.values() for pid in children(rank) if forked(pid, rank)]
        return [pid for pid in children(launcher) if forked(pid, launcher)] if what == "keeper" else [launcher]

    def alive(self) -> list[int]:
        """All of its processes, by a variable that they inherit."""
        everything = map(int, filter(str.isdecimal, os.listdir("/proc")))
        return [pid for pid in everything if environ_of(pid).get(RUN) == self.token]

    def left(self) -> list[str]:
        """What is there that was not, in the folder for temporary files and in shared memory."""
        # Torch's compiler keeps its cache there on purpose; and any library may be killed while it has a file open that
        # it would have removed, which nothing tells from one that the script wants to keep.
        names = os.listdir(self.temporary)
        found = [name for name in names if not re.fullmatch(r"torchinductor_.*|tmp\w{8}", name)]
        return [*found, *(os.listdir(self.memory) if self.memory >= 0 else ())]

    def close(self) -> None:
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        if self.memory >= 0:
            os.close(self.memory)
        shutil.rmtree(self.temporary)


def children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def environ_of(pid: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)


def forked(pid: int, parent: int) -> bool:
    """Whether it runs the same program as its parent: a worker, or the keeper."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == Path(f"/proc/{parent}/cmdline").read_bytes()
    except OSError:
        return False


def settled(look: Callable[[], object], seconds: float) -> bool:
    """Whether it comes to nothing within so many seconds."""
    deadline = time.monotonic() + seconds
    while look() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not look()


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    number = request.getfixturevalue("number")
    made = Run(tmp_path, "file_system" if number % 4 == 3 else "file_descriptor")
    yield made
    made.close()


@pytest.mark.parametrize("number", rounds())
def test_a_process_that_is_killed(run: Run, number: int, note: Callable[[str], None]) -> None:
    draw = random.Random(number)
    victim = VICTIMS[number % len(VICTIMS)]
    if victim == "host of the store":
        run.start_alone()
    else:
        run.launch()
    deadline = time.monotonic() + 2 * LIMIT
    while not (found := run.find(victim)):
        assert time.monotonic() < deadline, run.screen.read_text()
        time.sleep(0.02)
    time.sleep(draw.uniform(0, 5))  # while it starts, or later
    killed = draw.choice(run.find(victim) or found)
    os.kill(killed, signal.SIGKILL)
    since = time.monotonic()
    if victim == "keeper":
        run.end.touch()
    assert settled(lambda: [one for one in run.processes if one.poll() is None], LIMIT), run.screen.read_text()
    took = time.monotonic() - since
    assert settled(run.alive, 3 * BAR), [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in run.alive()]
    text = run.screen.read_text()
    check_cause(victim, killed, run.processes[-1].returncode, text)
    if victim != "host of the store":
        assert settled(run.left, 2), f"{run.left()}\n{text}"
    if victim != "keeper":
        assert took < 3 * BAR, f"{took:.1f} s\n{text}"
        note(f"random kills: {victim} ended after {took:.1f} s")


def check_cause(victim: str, pid: int, code: int, text: str) -> None:
    if victim == "keeper":
        assert code == 0, text
        assert "all done" in text, text
    elif victim == "launcher":
        assert code == -signal.SIGKILL, text
    elif victim == "worker":
        assert code == 1, text
        report = text.partition("the job failed")[2]
        assert re.search(r"Rank \d raised \w+ at \S*loading.py", report), text
        assert re.search(rf"DataLoader worker \(pid(\(s\))? {pid}\)", report), text
    elif victim == "host of the store":
        assert code not in (0, None), text
        assert re.search(r"[Rr]ank 0 (on \S+ \(pid \d+\) )?(died|has exited|exited|was killed|failed)", text), text
    else:
        assert code == 128 + signal.SIGKILL, text
        report = " ".join(text.partition("the job failed")[2].split())
        assert re.search(rf"R{victim[1:]} was killed by SIGKILL[^│]*Its process was {pid} on ", report), text
