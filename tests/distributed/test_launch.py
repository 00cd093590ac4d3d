"""`lockstep launch` with real processes: what runs, what is said when it fails, and that nothing is left running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pexpect
import pytest

LIMIT = 60.0
JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
TWO = ("--cpu", "--num_processes", "2")


def environment(folder: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in JOB}
    own = {"LOCKSTEP_RUN_DIR": str(folder / "run"), "HF_HOME": str(folder)}
    return {**kept, **own, **(extra or {})}


def alive(pid: int) -> bool:
    """Whether a process still runs; one that only waits for its parent to look does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Launched:
    """A `lockstep launch` that runs, its screen, and the processes that told us their numbers."""

    def __init__(self, folder: Path, words: tuple[str, ...], env: Mapping[str, str] | None) -> None:
        self.folder = folder
        self.screen = folder / "screen"
        self.errors = folder / "errors"
        with self.screen.open("wb") as out, self.errors.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lockstep", "launch", *words],
                cwd=folder,
                env=environment(folder, env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return self.screen.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self.errors.read_text(errors="replace")

    @property
    def lines(self) -> list[str]:
        return sorted(line for line in self.out.splitlines() if "[Gloo]" not in line)  # torch 2.9

    @property
    def pids(self) -> list[int]:
        """All processes that the script has written down."""
        return [int(path.name) for path in self.folder.glob("pids/*")]

    def until(self, what: Callable[[], object], limit: float = LIMIT) -> None:
        deadline = time.monotonic() + limit
        while not what():
            assert time.monotonic() < deadline, f"it did not happen\n{self}"
            time.sleep(0.02)

    def until_started(self, count: int) -> None:
        self.until(lambda: len(self.pids) >= count or self.process.poll() is not None)
        assert len(self.pids) >= count, f"it has ended already\n{self}"

    def wait(self, code: int | None = None) -> Launched:
        """Until the end; the code it must have, and that nothing is left running."""
        try:
            self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it does not end\n{self}")
        assert code is None or self.process.returncode == code, f"code {self.process.returncode}\n{self}"
        self.until_gone()
        return self

    def until_gone(self) -> None:
        self.until(lambda: not any(map(alive, self.pids)), limit=10)

    def clean(self) -> None:
        for pid in (self.process.pid, *self.pids):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(LIMIT)

    def __str__(self) -> str:
        return f"--- stdout\n{self.out}\n--- stderr\n{self.err}\n--- alive {[pid for pid in self.pids if alive(pid)]}"


Start = Callable[..., Launched]


def box_of(job: Launched) -> list[str]:
    """The lines of the box, which is the last thing on the screen, and there once."""
    _, *boxes = job.err.split("──── lockstep launch: the job failed ")
    assert len(boxes) == 1, job
    lines = boxes[0].rstrip().splitlines()
    assert set(lines[-1]) == {"─"}, job
    assert len(lines) <= 30, job
    return lines[1:-1]


# Each process that shall be gone in the end leaves a file with its number as name.
PRELUDE = """
import os, signal, subprocess, sys, time

rank = int(os.environ.get("RANK", "0"))

def note(pid=None):
    os.makedirs("pids", exist_ok=True)
    open(f"pids/{pid or os.getpid()}", "w").close()

def say(text):
    sys.stdout.write(f"{text}\\n")  # in one piece
    sys.stdout.flush()

def child():
    note(subprocess.Popen(["sleep", "300"]).pid)

"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Launched] = []

    def begin(
        *words: str, script: str | None = None, args: tuple[str, ...] = (), env: Mapping[str, str] | None = None
    ) -> Launched:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        if script is not None:
            (folder / "train.py").write_text(PRELUDE + textwrap.dedent(script))
            words = (*words, "train.py", *args)
        job = Launched(folder, words, env)
        started.append(job)
        return job

    yield begin
    for job in started:
        job.clean()


# --- one process -------------------------------------------------------------------------------------------------


def test_one_process_is_like_python(start: Start) -> None:
    """Everything a script can see of how it was started, compared with Python itself."""
    script = """
    import __main__, dataclasses, inspect, pickle, typing

    @dataclasses.dataclass
    class Point:
        x: int

    def main(value: int) -> None:
        print(sys.argv, __file__, __name__, __package__, __spec__, __doc__, sys.path[0])
        print(main.__annotations__)  # classes here, unless annotations were made strings
        print(pickle.loads(pickle.dumps(Point(1))), Point.__module__, __main__.Point is Point)
        print(inspect.getsource(Point).splitlines()[-1])
        print(sorted(name for name in globals() if name not in seen))
        print(neighbour.__file__)
        print(sorted(name for name in os.environ if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))

    seen = {"__annotations__", "__builtins__", "__loader__"}
    import neighbour
    if __name__ == "__main__":
        main(1)
    """
    job = start("--cpu", "--dry_run", script=script).wait(0)  # makes the folder
    folder = job.folder / "some folder"
    folder.mkdir()
    (folder / "my train.py").write_text((job.folder / "train.py").read_text())
    (folder / "neighbour.py").touch()
    words = ["some folder/my train.py", "--flag", "a b"]
    plain = subprocess.run(
        [sys.executable, *words], cwd=job.folder, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    again = Launched(job.folder, ("--cpu", *words), None).wait(0)
    assert again.out == plain.stdout
    assert again.err == ""
    assert again.out.endswith("[]\n")
    logs = job.folder / "run" / "logs"
    assert (logs / "rank_0.out").read_text() == plain.stdout


def test_a_module_is_like_python(start: Start) -> None:
    job = start("--version-is-unknown", "x").wait(2)
    package = job.folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").touch()
    (package / "train.py").write_text(
        textwrap.dedent("""
        import atexit, pickle, sys
        from . import other

        class Thing:
            pass

        print(sys.argv, __name__, __package__, __spec__.name, __file__)
        atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Thing()))).__name__))
        """)
    )
    words = ["-m", "package.train", "--flag"]
    plain = subprocess.run(
        [sys.executable, *words], cwd=job.folder, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert Launched(job.folder, tuple(words), None).wait(0).out == plain.stdout
    missing = Launched(job.folder, ("-m", "package.nothing"), None).wait(1)
    assert "No module named package.nothing" in missing.err
    assert "Traceback" not in missing.err


@pytest.mark.parametrize(
    ("script", "code", "error"),
    [
        ("sys.exit(7)", 7, ""),
        ("sys.exit('too bad')", 1, "too bad"),
        ("os._exit(9)", 9, ""),
        ("def broken(:", 1, "SyntaxError"),
        ("import nothing_like_it", 1, "No module named 'nothing_like_it'"),
        ("sys.excepthook = lambda *_: None\nraise ValueError", 1, ""),
    ],
)
def test_the_scripts_own_code_is_passed_on(start: Start, script: str, code: int, error: str) -> None:
    job = start("--cpu", script=script).wait(code)
    assert error in job.err
    assert "worker.py" not in job.err
    raised = "Error" in script or "import" in script or "Error" in error
    assert raised == ("lockstep launch" in job.err)
    if raised:
        assert box_of(job)[0].startswith("Rank 0 raised ")
        assert (job.folder / "run" / "words" / "rank_0.json").exists()


@pytest.mark.parametrize(
    ("script", "code", "text"),
    [
        ("child(); import ctypes; ctypes.string_at(0)", 139, "crashed: segmentation fault"),
        ("child(); os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
    ],
)
def test_a_signal_that_ends_the_script_is_said_in_words(start: Start, script: str, code: int, text: str) -> None:
    job = start("--cpu", script=f"note()\nsys.stdout.write('half a line')\n{script}").wait(code)
    assert box_of(job)[0].startswith(f"Rank 0 {text}")
    assert job.out == "half a line"
    if code == 139:
        assert "ctypes.string_at(0)" in job.err  # where it happened


def test_what_cannot_be_started(start: Start) -> None:
    assert "The script 'nothing.py' does not exist" in start("nothing.py").wait(2).err
    job = start("--no_python", "no-such-program-here").wait(2)
    assert "was not found on the path" in job.err
    strange = job.folder / "strange"
    strange.write_bytes(b"\0\1\2")
    strange.chmod(0o700)
    for words in ((), TWO):
        job = Launched(job.folder, (*words, "--no_python", "./strange"), None).wait(2)
        assert "./strange cannot be started (Exec format error)" in job.err
        assert "Traceback" not in job.err
    job = Launched(job.folder, ("--log_dir", "strange", "--no_python", "true"), None).wait(2)
    assert "--log_dir strange cannot be used" in job.err


def test_a_program(start: Start) -> None:
    job = start("--tee", "3", "--no_python", "sh", "-c", "echo $LOCKSTEP_LAUNCH; echo bad >&2; exit 5").wait(5)
    assert (job.out, job.err) == ("[rank 0] 1\n", "[rank 0] bad\n")


def test_one_process_needs_no_torch(start: Start) -> None:
    """In the launcher: its modules are listed when it ends."""
    job = start("--cpu", script="say('torch' in sys.modules)")
    job.wait(0)
    (job.folder / "sitecustomize.py").write_text(
        "import atexit, sys\n"
        "heavy = ('torch', 'numpy', 'yaml')\n"
        "atexit.register(lambda: sys.stderr.write(f'{[name for name in heavy if name in sys.modules]}\\n'))\n"
    )
    path = os.pathsep.join([str(job.folder), os.environ["PYTHONPATH"]])
    again = Launched(job.folder, ("--cpu", "train.py"), {"PYTHONPATH": path}).wait(0)
    assert again.out == "False\n"
    assert again.err == "[]\n" * 2


def test_when_nobody_reads(start: Start) -> None:
    """`lockstep launch | head -1`: the job goes on, nothing is a traceback, and the file has it all."""
    job = start("--cpu", "--dry_run", script="for number in range(20_000): say(f'{number:>50}')").wait(0)
    command = f"{sys.executable} -m lockstep launch --cpu train.py | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=job.folder,
        env=environment(job.folder),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0"
    assert "Traceback" not in done.stderr
    assert "nobody reads stdout any more; the job continues" in done.stderr
    assert (job.folder / "run" / "logs" / "rank_0.out").read_text().count("\n") == 20_000


@pytest.mark.parametrize("words", [("--cpu",), TWO])
def test_nohup_is_respected(start: Start, words: tuple[str, ...]) -> None:
    script = """
    note()
    while not os.path.exists("go"):
        time.sleep(0.02)
    say("done")
    """
    job = start(*words, "--dry_run", script=script).wait(0)
    launch = (sys.executable, "-m", "lockstep", "launch", *words, "train.py")
    again = Launched(job.folder, ("--cpu", "--no_python", "nohup", *launch), None)
    again.until_started(1)
    launcher = int(Path(f"/proc/{again.pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(launcher, signal.SIGHUP)
    time.sleep(0.3)
    (job.folder / "go").touch()
    again.wait(0)
    assert "done" in again.out


def test_stdin_that_is_no_terminal(start: Start) -> None:
    job = start("--cpu", "--dry_run", script="say(f'{sys.stdin.isatty()} {input()} {sys.stdin.read()}')").wait(0)
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "launch", "--cpu", "train.py"],
        cwd=job.folder,
        env=environment(job.folder),
        input="one\ntwo",
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False one two\n", "")


def test_a_folder_that_is_gone(start: Start) -> None:
    job = start("--cpu", "--dry_run", script="").wait(0)
    command = f"mkdir gone; cd gone; rmdir ../gone; exec {sys.executable} -m lockstep launch --no_python echo shown"
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=job.folder,
        env=environment(job.folder),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "shown\n"), done.stderr


def test_where_the_files_are_kept(start: Start) -> None:
    job = start("--cpu", script="say('kept')", env={"LOCKSTEP_RUN_DIR": ""}).wait(0)
    runs = job.folder / ".lockstep" / "runs"
    assert (runs / "latest" / "logs" / "rank_0.out").read_text() == "kept\n"
    assert (runs / "latest").resolve().stat().st_mode & 0o777 == 0o700
    Launched(job.folder, ("--project_dir", "elsewhere", "train.py"), {"LOCKSTEP_RUN_DIR": ""}).wait(0)
    assert (job.folder / "elsewhere" / ".lockstep" / "runs" / "latest" / "logs" / "rank_0.out").exists()
    assert len(list(runs.iterdir())) == 2  # the run and the link


def test_safe_path_is_respected(start: Start) -> None:
    job = start("--cpu", script="say(sys.path)", env={"PYTHONSAFEPATH": "1"}).wait(0)
    plain = subprocess.run(
        [sys.executable, "train.py"],
        cwd=job.folder,
        env=environment(job.folder, {"PYTHONSAFEPATH": "1"}),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    assert job.out == plain.stdout


def test_ctrl_c_before_there_are_processes(start: Start) -> None:
    job = start(*TWO, script="say('started')")
    job.until((job.folder / "run" / "config.json").exists)
    job.process.send_signal(signal.SIGINT)
    job.wait(130)
    assert "Traceback" not in job.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_process_is_told_to_end(start: Start, number: signal.Signals) -> None:
    script = """
    def leave(number, frame):
        say(f"got {signal.Signals(number).name}")
        time.sleep(0.3)
        say("saved")
        os._exit(128 + number)

    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, leave)
    child()
    note()
    while True:
        time.sleep(1)
    """
    job = start("--cpu", script=script)
    job.until_started(2)
    job.process.send_signal(number)
    job.wait(128 + number)
    assert job.out == f"got {number.name}\nsaved\n"


def test_one_process_that_does_not_listen(start: Start) -> None:
    script = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child()
    note()
    while True:
        time.sleep(1)
    """
    job = start("--cpu", "--grace", "0.3", script=script)
    job.until_started(2)
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    assert job.process.returncode in (143, 137), str(job)
    job = start("--cpu", "--grace", "300", script=script.replace("SIGTERM", "SIGINT"))
    job.until_started(2)
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    job.process.send_signal(signal.SIGINT)
    job.wait(130)


@pytest.mark.parametrize("program", [False, True])
def test_a_launcher_that_is_killed_leaves_nothing(start: Start, program: bool) -> None:
    script = "child(); note(); time.sleep(300)"
    job = start("--cpu", *(("--no_python", sys.executable) if program else ()), script=script)
    job.until_started(2)
    job.process.kill()
    job.process.wait(LIMIT)
    job.until_gone()


# --- two processes -----------------------------------------------------------------------------------------------


def test_two_processes_train_together(start: Start) -> None:
    """Also: spawned workers of a DataLoader of the script's own class; the files of each rank; what is left running."""
    script = """
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    class Squares(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, place):
            return place ** 2

    def main():
        child()
        note()
        dist.init_process_group("gloo")
        everybody = [None, None]
        dist.all_gather_object(everybody, (rank, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])))
        loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
        batches = [batch.tolist() for batch in loader]
        say(f"rank {rank}: {everybody} {batches} {os.environ['OMP_NUM_THREADS']} {sys.argv[1:]}")
        dist.barrier()
        say("the same of both")
        sys.stderr.write(f"rank {rank} warns\\n")
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
    """
    job = start(
        *TWO, "--quiet", "--log_dir", "logs", "--num_cpu_threads_per_process", "3", script=script, args=("--x", "1")
    )
    job.wait(0)
    parts = "[(0, 0, 2), (1, 1, 2)] [[0, 1], [4, 9]] 3 ['--x', '1']"
    assert job.lines == sorted([*(f"[rank {rank}] rank {rank}: {parts}" for rank in (0, 1)), "the same of both"]), str(
        job
    )
    assert sorted(job.err.splitlines()) == [f"[rank {rank}] rank {rank} warns" for rank in (0, 1)]
    for rank in (0, 1):
        kept = (job.folder / "logs" / f"rank_{rank}.out").read_text().splitlines()
        assert [line for line in kept if "[Gloo]" not in line] == [f"rank {rank}: {parts}", "the same of both"]
        assert (job.folder / "logs" / f"rank_{rank}.err").read_text() == f"rank {rank} warns\n"
    assert len(job.pids) == 4
    assert (job.folder / "run" / "config.json").exists()


def test_arguments_reach_the_ranks_as_they_are(start: Start) -> None:
    args = ("a$$b", "${local_rank}", "$HOME", "", "a b", "ü")
    job = start(*TWO, script="say(sys.argv[1:])", args=args).wait(0)
    assert job.lines == [str(list(args))] * 2


def test_an_unknown_rendezvous_backend(start: Start) -> None:
    job = start(*TWO, "--rdzv_backend", "nonsense", script="").wait(2)
    assert "--rdzv_backend nonsense" in job.err
    assert "Traceback" not in job.err


def test_an_exception_on_one_rank_is_the_last_thing_said(start: Start) -> None:
    script = """
    import torch
    import torch.distributed as dist

    def main():
        child()
        note()
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 1:
            raise ValueError("this is the cause")
        dist.all_reduce(torch.ones(1))

    main()
    """
    job = start(*TWO, "--tee", "3", script=script).wait(1)
    lines = box_of(job)
    assert re.fullmatch(r"Rank 1 raised ValueError at train\.py:\d+ in main: this is the cause", lines[0])
    assert any(line.startswith("  ❱ ") and 'raise ValueError("this is the cause")' in line for line in lines)
    assert any(line.startswith("Others    rank 0 ") for line in lines)
    assert job.err.count("this is the cause") == 2  # the message, and the line of the script
    assert "Traceback" not in job.err
    assert "/site-packages/" not in job.err
    logs = job.folder / "run" / "logs"
    (place,) = [line for line in lines if line.startswith("Logs ")]
    assert "run/logs (full traceback: rank_1.err)" in place
    kept = (logs / "rank_1.err").read_text()
    assert kept.count("Traceback") == 1
    assert "ValueError: this is the cause" in kept
    assert "worker.py" not in kept


def test_library_frames_come_back_when_asked_for(start: Start) -> None:
    script = """
    import json
    child()
    json.loads("{")
    """
    job = start(*TWO, script=script, env={"LOCKSTEP_TRACEBACK": "full"}).wait(1)
    assert "json/decoder.py" in job.err
    # Both fail alike; the launcher may end the slower one first.
    assert re.match(
        r"Ranks? 0(-1)? raised JSONDecodeError at train\.py:|Rank 1 raised JSONDecodeError at", box_of(job)[0]
    )
    assert "Allowed: short, full" in start(*TWO, script=script, env={"LOCKSTEP_TRACEBACK": "ful"}).wait(2).err


@pytest.mark.parametrize(
    ("script", "code", "parts"),
    [
        ("sys.exit(3)", 3, ["Rank 1 exited with code 3, by sys.exit() at train.py:"]),
        ("os._exit(5)", 5, ["Rank 1 exited with code 5", "os._exit()"]),
        ("import ctypes; ctypes.string_at(0)", 139, ["Rank 1 crashed: segmentation fault", "ctypes.string_at(0)"]),
        ("outside()", 137, ["Rank 1 was killed by SIGKILL", "Killed from outside"]),
    ],
)
def test_a_rank_that_ends_early(start: Start, script: str, code: int, parts: list[str]) -> None:
    text = f"""
    def outside():
        open("ready", "w").close()
        time.sleep(300)

    child()
    note()
    while len(os.listdir("pids")) < 4:
        time.sleep(0.01)
    if rank == 1:
        open("rank_1", "w").write(str(os.getpid()))
        {script}
    time.sleep(300)
    """
    job = start(*TWO, script=text)
    if "outside" in script:
        job.until(lambda: (job.folder / "ready").exists() or job.process.poll() is not None)
        os.kill(int((job.folder / "rank_1").read_text()), signal.SIGKILL)
    job.wait(code)
    lines = box_of(job)
    assert "Others    rank 0 ended by the launcher" in lines
    assert lines[0].startswith("Rank 1 ")
    for part in parts:
        assert part in "\n".join(lines)


SLEEPERS = """
    def leave(number, frame):
        say(f"rank {rank} got {signal.Signals(number).name}")
        time.sleep(0.2)
        say(f"rank {rank} saved")
        sys.exit(0)

    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, signal.SIG_IGN if "deaf" in sys.argv else leave)
    child()
    note()
    while True:
        time.sleep(1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_are_told_to_end(start: Start, number: signal.Signals) -> None:
    job = start(*TWO, script=SLEEPERS)
    job.until_started(4)
    job.process.send_signal(number)
    job.wait(128 + number)
    assert job.lines == sorted(f"rank {rank} {what}" for rank in (0, 1) for what in (f"got {number.name}", "saved"))
    assert f"ended by {number.name}" in job.err
    assert "Traceback" not in job.err


def test_a_second_signal_kills(start: Start) -> None:
    job = start(*TWO, "--grace", "300", script=SLEEPERS, args=("deaf",))
    job.until_started(4)
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    job.wait(130)
    assert "second signal" in job.err
    assert "Traceback" not in job.err


@pytest.mark.parametrize("program", [False, True])
def test_a_killed_launcher_of_two_leaves_nothing(start: Start, program: bool) -> None:
    job = start(*TWO, *(("--no_python", sys.executable) if program else ()), script=SLEEPERS, args=("deaf",))
    job.until_started(4)
    job.process.kill()
    job.process.wait(LIMIT)
    job.until_gone()


# --- at a terminal -----------------------------------------------------------------------------------------------


class Terminal:
    """A `lockstep launch` at a terminal of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "lockstep", "launch", *words],
            cwd=str(folder),
            env=environment(folder, {"TERM": "dumb"}),
            timeout=LIMIT,
            encoding="utf-8",
            dimensions=(40, 123),
        )

    def end(self) -> int:
        self.child.expect(pexpect.EOF)
        self.child.close()
        return int(self.child.exitstatus if self.child.exitstatus is not None else -self.child.signalstatus)


@pytest.fixture
def at_terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def begin(*words: str, script: str) -> Terminal:
        (tmp_path / "train.py").write_text(PRELUDE + textwrap.dedent(script))
        started.append(Terminal(tmp_path, *words, "train.py"))
        return started[-1]

    yield begin
    for terminal in started:
        terminal.child.close(force=True)
        for path in tmp_path.glob("pids/*"):
            if alive(int(path.name)):
                os.kill(int(path.name), signal.SIGKILL)


def test_a_conversation(at_terminal: Callable[..., Terminal]) -> None:
    script = """
    import readline
    print(sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size().columns)
    name = input("name? ")
    print(f"hello {name}!")
    breakpoint()
    sys.stdout.write("\\r 50%")
    time.sleep(0.2)
    sys.stdout.write("\\r100%\\n")
    """
    terminal = at_terminal("--cpu", script=script)
    terminal.child.expect("True True True 123\r\n")
    terminal.child.expect(r"name\? ")
    terminal.child.sendline("you")
    terminal.child.expect("hello you!")
    terminal.child.expect(r"\(Pdb\) ")
    terminal.child.sendline("p name * 2")
    terminal.child.expect("'youyou'")
    terminal.child.expect(r"\(Pdb\) ")
    terminal.child.sendline("c")
    terminal.child.expect("\r 50%\r100%\r\n")
    assert terminal.end() == 0


@pytest.mark.parametrize("words", [("--cpu",), TWO])
def test_ctrl_c(at_terminal: Callable[..., Terminal], words: tuple[str, ...]) -> None:
    script = "child(); note(); say(sys.stdout.isatty()); time.sleep(300)"
    terminal = at_terminal(*words, script=script)
    for _ in range(2 if words == TWO else 1):
        terminal.child.expect("True\r\n")
    pids = [int(path.name) for path in terminal.folder.glob("pids/*")]
    terminal.child.sendintr()
    assert terminal.end() == 130, terminal.child.before
    said = str(terminal.child.before)
    assert ("KeyboardInterrupt" if words != TWO else "interrupted: ranks 0-1 at train.py:") in said
    assert said.count("Traceback") == (words != TWO)
    deadline = time.monotonic() + 10
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
