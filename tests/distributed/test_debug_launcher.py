"""The launchers for notebooks and tests, called from a plain process: results, failures, refusals, what is left."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
import torch

from lockstep.errors import ConfigError, UsageError
from lockstep.host import hardware
from lockstep.launch.notebook import RankFailed, debug_launcher, notebook_launcher
from tests.ranks import free_port, in_soak

LIMIT = 90


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """A launch that hangs is interrupted, and so ends its ranks."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"not finished after {LIMIT} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def busy_parent() -> Iterator[torch.Tensor]:
    """OpenMP has started its workers in this process, as after a cell that computed something."""
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        matrix = torch.randn(1200, 1200)
        (matrix @ matrix).sum()
        torch.exp(torch.randn(4_000_000)).sum()
        torch.nn.Linear(400, 400)(torch.randn(2000, 400)).sum().backward()
        yield matrix
    finally:
        torch.set_num_threads(threads)


def children() -> set[int]:
    """Processes started by this one, without those that multiprocessing keeps for itself."""
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if child.status() != psutil.STATUS_ZOMBIE}


# ---------------------------------------------------------------- results


def test_every_rank_returns_and_the_parent_is_as_before() -> None:
    debug_launcher(nothing)  # torch's first store opens a pipe for the life of the process
    before = (dict(os.environ), {number: signal.getsignal(number) for number in signal.valid_signals()})
    processes, threads, descriptors = children(), threading.active_count(), len(os.listdir("/proc/self/fd"))
    offset = 10

    def train(factor: int) -> tuple[int, list[int], str, dict[str, str | None], torch.Tensor]:
        from lockstep import Accelerator

        accelerator = Accelerator()
        together = accelerator.gather(torch.tensor([accelerator.process_index * factor + offset]))
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        seen = {name: os.environ.get(name) for name in (*names, "LOCKSTEP_LAUNCH", "LOCKSTEP_USE_CPU")}
        assert threading.current_thread() is threading.main_thread()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # only a main thread may
        return accelerator.process_index, together.tolist(), str(accelerator.device), seen, torch.ones(2)

    results = debug_launcher(train, args=(5,))

    assert [result[:3] for result in results] == [(0, [10, 15], "cpu"), (1, [10, 15], "cpu")]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    ours = {"LOCKSTEP_LAUNCH": "1", "LOCKSTEP_USE_CPU": "1"}
    assert [result[3] for result in results] == [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared, **ours} for rank in range(2)
    ]
    assert all(torch.equal(result[4], torch.ones(2)) for result in results)
    assert (dict(os.environ), {number: signal.getsignal(number) for number in signal.valid_signals()}) == before
    assert children() == processes
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_ranks_compute_with_threads_after_the_parent_did(busy_parent: torch.Tensor) -> None:
    def train() -> tuple[int, bool]:
        given = torch.get_num_threads()
        torch.set_num_threads(2)  # a rank that takes more than it was given must not hang either
        product = busy_parent @ busy_parent
        torch.exp(torch.randn(4_000_000)).sum()
        model = torch.nn.Conv2d(4, 4, 3)
        model(torch.randn(16, 4, 64, 64)).sum().backward()
        return given, bool(torch.isfinite(product).all())

    text = os.environ.get("OMP_NUM_THREADS")
    expected = int(text) if text else max(1, hardware.usable_cores() // 2)
    assert debug_launcher(train) == [(expected, True)] * 2


def test_launches_can_follow_each_other_after_failures() -> None:
    def fail() -> None:
        raise ValueError("again")

    kept = []  # an error that is kept keeps all the frames it came through
    for _ in range(3):
        with pytest.raises(RankFailed) as caught:
            debug_launcher(fail)
        kept.append(caught)

    def collect() -> int:
        import gc

        return int(gc.collect() >= 0)

    assert debug_launcher(collect) == [1, 1]


def test_what_ranks_write_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("tests.notebook")
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)

    def talk() -> None:
        rank = os.environ["RANK"]
        print(f"printed by {rank}")
        print("in two", end=" ", flush=True)
        print(f"parts, ü {rank}")
        os.write(1, f"native of {rank}\n".encode())
        logger.warning("logged by %s", rank)
        print(f"unfinished by {rank}", end="")

    try:
        notebook_launcher(talk, num_processes=2, log_line_prefix_template="<${rank}/${local_rank}> ")
    finally:
        logger.removeHandler(handler)
    out, err = capsys.readouterr()
    for rank in range(2):
        assert f"<{rank}/{rank}> printed by {rank}\n" in out
        assert f"parts, ü {rank}\n" in out
        assert f"<{rank}/{rank}> native of {rank}\n" in out
        assert f"unfinished by {rank}" in out
        assert f"<{rank}/{rank}> logged by {rank}\n" in err


def test_large_results_and_output_do_not_block() -> None:
    def much() -> torch.Tensor:
        for _ in range(2000):
            print("x" * 100)
        return torch.full((1_000_000,), float(os.environ["RANK"]))

    assert [int(value.sum()) for value in debug_launcher(much)] == [0, 1_000_000]


def test_mixed_precision_has_an_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    def precision() -> str:
        from lockstep import Accelerator

        return str(Accelerator().mixed_precision)

    assert notebook_launcher(precision, num_processes=2, mixed_precision="bf16") == ["bf16", "bf16"]
    assert notebook_launcher(precision, mixed_precision="bf16") == ["bf16"]
    monkeypatch.setenv("LOCKSTEP_MIXED_PRECISION", "bf16")
    assert notebook_launcher(precision) == ["bf16"]  # a default does not override what is set
    assert notebook_launcher(precision, mixed_precision="no") == ["no"]


# ---------------------------------------------------------------- one process


def test_one_process_is_this_one() -> None:
    seen = []

    def train(word: str) -> str:
        from lockstep import Accelerator

        seen.append((os.getpid(), Accelerator().num_processes))
        return word

    assert notebook_launcher(train, ("done",), num_processes=1) == ["done"]
    assert seen == [(os.getpid(), 1)]
    # The Accelerator is gone with the call, so several processes can be started now.
    assert len(notebook_launcher(lambda: None, num_processes=2)) == 2


def test_one_process_raises_the_functions_own_error_after_its_restarts(capsys: pytest.CaptureFixture[str]) -> None:
    tries = []

    def train() -> int:
        tries.append(1)
        if len(tries) < 3:
            raise KeyError("missing")
        return len(tries)

    with pytest.raises(KeyError, match="missing"):
        notebook_launcher(train, max_restarts=1)
    assert len(tries) == 2
    assert "Starting again: restart 1 of 1." in capsys.readouterr().err
    assert notebook_launcher(train) == [3]


# ---------------------------------------------------------------- failures


def fail_in(way: str) -> None:
    """Rank 1 fails; rank 0 waits for it in a collective."""
    from lockstep import Accelerator

    accelerator = Accelerator()
    if accelerator.process_index == 1:
        if way == "raise":
            raise ValueError("sample 17 is broken")
        if way == "exit":
            sys.exit(3)
        if way == "quiet":
            os._exit(0)
        os.kill(os.getpid(), getattr(signal, way))
    accelerator.wait_for_everyone()


@pytest.mark.parametrize(
    ("way", "said", "code"),
    [
        ("raise", "ValueError: sample 17 is broken", 1),
        ("exit", "left with sys.exit(3)", 3),
        ("quiet", "exit code 0, without the function having returned", 0),
        ("SIGKILL", "memory ran out, or by kill -9 (SIGKILL)", -9),
        ("SIGSEGV", "segmentation fault", -11),
    ],
)
def test_the_first_failure_is_told_in_full(way: str, said: str, code: int) -> None:
    before = children()
    with pytest.raises(RankFailed) as caught:
        debug_launcher(fail_in, (way,))
    text = str(caught.value)
    first = text.splitlines()[0]
    assert first.startswith("rank 1 of 2 failed: ")
    assert said in first
    assert caught.value.rank == 1
    assert caught.value.exit_code == code
    assert caught.value.kind == {"raise": "ValueError", "exit": "SystemExit"}.get(way)
    assert ("in fail_in" in text) == (way in ("raise", "exit"))
    assert [line for line in text.splitlines() if line.startswith("  rank 0: ")]
    assert children() == before


def test_a_rank_that_does_not_want_to_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.launch.fork_pool.GRACE", 0.5)
    before = children()

    def train() -> None:
        if os.environ["RANK"] == "1":
            time.sleep(0.5)
            raise ValueError("enough")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "1000"])  # what a rank has started goes with it
        time.sleep(1000)

    with pytest.raises(RankFailed, match="rank 1 of 2 failed: ValueError: enough"):
        debug_launcher(train)
    assert children() == before


def test_a_result_that_cannot_be_sent_is_a_failure() -> None:
    with pytest.raises(RankFailed, match="the function returned function, which cannot be sent"):
        debug_launcher(lambda: lambda: None)


def test_leaving_with_success_is_no_failure() -> None:
    assert debug_launcher(lambda: sys.exit()) == [None, None]


def test_restarts_begin_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> tuple[int, list[int]]:
        from lockstep import Accelerator

        accelerator = Accelerator()
        together = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
        mark = tmp_path / f"tries{accelerator.process_index}"
        mark.write_text(mark.read_text() + "x" if mark.exists() else "x")
        if accelerator.process_index == 1 and len(mark.read_text()) < 3:
            raise OSError("the disk is asleep")
        accelerator.wait_for_everyone()
        return len(mark.read_text()), together

    assert notebook_launcher(train, num_processes=2, max_restarts=3) == [(3, [0, 1])] * 2
    err = capsys.readouterr().err
    assert "rank 1 of 2 failed: OSError: the disk is asleep\nStarting again: restart 1 of 3." in err
    assert "restart 2 of 3" in err
    assert "restart 3 of 3" not in err


# ---------------------------------------------------------------- refusals


def nothing() -> None:
    pass


def test_signatures_are_the_known_ones() -> None:
    accelerate = pytest.importorskip("accelerate")
    for ours, theirs in (
        (notebook_launcher, accelerate.notebook_launcher),
        (debug_launcher, accelerate.debug_launcher),
    ):
        known = inspect.signature(theirs).parameters
        mine = inspect.signature(ours).parameters
        assert list(mine) == list(known)
        assert [value.default for value in mine.values()] == [value.default for value in known.values()]


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        notebook_launcher(
            "train",  # type: ignore[arg-type]
            args=3,  # type: ignore[arg-type]
            num_processes=0,
            mixed_precision="fp17",
            use_port="http",
            node_rank=2,
            num_nodes=2,
            rdzv_backend="smoke",
            max_restarts=-1,
            monitor_interval=0,
        )
    text = str(caught.value)
    assert text.startswith("9 settings cannot be used:")
    for part in (
        "function='train' cannot be called",
        "write args=(3,)",
        "num_processes=0",
        "mixed_precision='fp17' is not known. Allowed: 'no', 'fp8', 'fp16', 'bf16'",
        "use_port='http'",
        "node_rank=2: with num_nodes=2 it is one of 0 to 1",
        "rdzv_backend='smoke'",
        "max_restarts=-1",
        "monitor_interval=0",
    ):
        assert part in text


def test_a_port_in_use_is_named_with_a_free_one() -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            notebook_launcher(nothing, num_processes=2, use_port=str(port))
        assert f"use_port={port}: the port is in use" in str(caught.value)
        assert f"Free is {hardware.next_free(port)}" in str(caught.value)


def test_the_default_port_gives_way() -> None:
    with closing(socket.socket()) as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # somebody else has it: just as well
            taken.bind(("", 29500))
            taken.listen()
        ports = notebook_launcher(lambda: os.environ["MASTER_PORT"], num_processes=2)
    assert ports[0] == ports[1] != "29500"


def test_an_accelerator_in_this_process_is_refused() -> None:
    from lockstep import Accelerator, current

    Accelerator(cpu=True)
    try:
        with pytest.raises(UsageError, match=r"An Accelerator .* Restart the kernel, and make the Accelerator inside"):
            notebook_launcher(nothing, num_processes=2)
        assert notebook_launcher(lambda: 1, num_processes=1) == [1]
        assert current.peek() is not None  # it was there before, so it stays
    finally:
        current.reset()


def test_a_device_in_use_and_too_many_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "accelerators", lambda environ: (2, "cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delenv("LOCKSTEP_USE_CPU", raising=False)
    with pytest.raises(UsageError, match=r"CUDA is in use in this process already.* Restart the kernel"):
        notebook_launcher(nothing)  # two processes, one for each device
    with pytest.raises(ConfigError, match=r"num_processes=3: this machine has 2 cuda devices\. Give at most 2"):
        notebook_launcher(nothing, num_processes=3)
    assert debug_launcher(lambda: 1) == [1, 1]  # computes on the CPU, so the device does not matter


def test_a_rank_cannot_launch() -> None:
    with pytest.raises(RankFailed, match="UsageError: This process is itself rank 0 of a job") as caught:
        debug_launcher(lambda: notebook_launcher(nothing), num_processes=1)
    assert caught.value.kind == "UsageError"


# ---------------------------------------------------------------- other processes


def script(folder: Path, text: str) -> list[str]:
    path = folder / "job.py"
    path.write_text(textwrap.dedent(text))
    return [sys.executable, str(path)]


TWO_MACHINES = """
    import os, sys
    import torch
    from lockstep.launch.notebook import notebook_launcher

    machine, port, backend = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    if backend == "static":
        where = dict(node_rank=machine, use_port=port)
    else:
        where = dict(rdzv_backend="c10d", rdzv_endpoint=f"127.0.0.1:{port}", rdzv_id="job")

    def train():
        from lockstep import Accelerator

        accelerator = Accelerator()
        together = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
        if accelerator.process_index == 2 and accelerator.state.backend and os.environ["LOCKSTEP_ATTEMPT"] == "0":
            raise OSError("the disk is asleep")
        accelerator.wait_for_everyone()
        return accelerator.process_index, together, int(os.environ["GROUP_RANK"])

    print("results", notebook_launcher(train, num_processes=2, num_nodes=2, max_restarts=int(sys.argv[4]), **where))
"""


def two_machines(folder: Path, backend: str, restarts: int) -> list[tuple[int, str, str]]:
    port = free_port()
    command = script(folder, TWO_MACHINES)
    machines = [
        subprocess.Popen(
            [*command, str(number), str(port), backend, str(restarts)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        )
        for number in range(2)
    ]
    watchdog = threading.Timer(60.0, lambda: [process.send_signal(signal.SIGABRT) for process in machines])
    watchdog.start()
    try:
        said = [process.communicate(timeout=80) for process in machines]  # with all stacks, of one that hangs
    finally:
        watchdog.cancel()
        for process in machines:
            process.kill()
            process.wait()
    return [(process.returncode, *texts) for process, texts in zip(machines, said, strict=True)]


@pytest.mark.parametrize("backend", ["static", *in_soak("c10d")])
def test_two_machines_start_again_together(tmp_path: Path, backend: str) -> None:
    ended = two_machines(tmp_path, backend, restarts=1)
    results = []
    for code, out, err in ended:
        assert code == 0, err
        assert "rank 2 of 4 (machine 1) failed: OSError: the disk is asleep\nStarting again: restart 1 of 1." in err
        results.append(out.strip().splitlines()[-1])
    first = "results [(0, [0, 1, 2, 3], 0), (1, [0, 1, 2, 3], 0)]"
    second = "results [(2, [0, 1, 2, 3], 1), (3, [0, 1, 2, 3], 1)]"
    # The c10d rendezvous gives out the numbers itself.
    assert (results if backend == "static" else sorted(results)) == [first, second]


def test_two_machines_both_tell_the_failure_of_one(tmp_path: Path) -> None:
    for code, _, err in two_machines(tmp_path, "static", restarts=0):
        assert code == 1
        assert "RankFailed: rank 2 of 4 (machine 1) failed: OSError: the disk is asleep" in err
        assert "in train" in err


def test_ranks_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        """
        import os, time
        from lockstep.launch.notebook import debug_launcher

        def stay():
            print("pid", os.getpid(), flush=True)
            time.sleep(1000)

        debug_launcher(stay)
        """,
    )
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
    deadline = time.monotonic() + 10
    while any(lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if lives(pid)] == []


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
