"""The harness that runs ranks, tested with real processes: what it reports, how soon, and what it leaves behind."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist

from lockstep.testing import Outcome, Ranks, RanksFailed, close_pools, run_ranks
from lockstep.testing.faults import FaultPlan, die, stall
from lockstep.testing.outcome import in_order
from tests.leaks import Snapshot

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2, timeout=20.0) as pool:
        yield pool


# ---------------------------------------------------------------- what the ranks run


def my_rank() -> int:
    return int(os.environ["RANK"])


def add(left: int, right: int = 0) -> tuple[int, int]:
    return my_rank(), left + right


def pid_and_port() -> tuple[int, str]:
    return os.getpid(), os.environ["MASTER_PORT"]


def surroundings() -> tuple[dict[str, str | None], str, int]:
    return {name: os.environ.get(name) for name in (*VARIABLES, "EXTRA", "LEFT")}, os.getcwd(), torch.get_num_threads()


def soil() -> None:
    os.environ["LEFT"] = "over"
    os.environ["GROUP_RANK"] = "9"
    del os.environ["WORLD_SIZE"]
    os.chdir("/")


def sum_of_ranks() -> float:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    tensor = torch.tensor([my_rank() + 1.0])
    dist.all_reduce(tensor)
    return tensor.item()


def speak(text: str) -> None:
    print(f"rank {my_rank()} says {text}")
    print("and complains", file=sys.stderr)
    os.system("echo from outside Python")


def raise_on_one(fails: int) -> None:
    dist.init_process_group("gloo")
    print(f"before, on {my_rank()}")
    if my_rank() == fails:
        raise ValueError("a bad batch")
    dist.all_reduce(torch.ones(1))


def train(plan: FaultPlan, steps: int = 4) -> int:
    dist.init_process_group("gloo")
    for step in range(steps):
        plan.reached(my_rank(), step)
        dist.all_reduce(torch.ones(1))
    return steps


def fail_late(seconds: float) -> None:
    if my_rank() == 1:
        raise KeyError("first")
    stall(seconds)


def wait_in_here(seconds: float) -> None:
    stall(seconds)


def in_native_code() -> None:
    dist.init_process_group("gloo")
    if my_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        stall(60)


def keep_a_child() -> int:
    return subprocess.Popen(["sleep", "300"]).pid


def silence_the_library() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    stall(60)


def break_the_reset() -> None:
    class Broken:
        def reset(self) -> None:
            raise OSError("a group that does not close")

    sys.modules["lockstep.current"] = Broken()  # type: ignore[assignment]


def draw() -> int:
    return int(numpy.random.randint(1 << 30))


def unpicklable() -> Callable[[], int]:
    return lambda: 1


# ---------------------------------------------------------------- success


def test_results_come_in_rank_order_and_arguments_arrive(pair: Ranks) -> None:
    assert pair.run(add, 2, right=3) == [(0, 5), (1, 5)]


def test_a_rank_knows_its_place_and_runs_where_the_parent_is(
    pair: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXTRA", "from the parent")
    for rank, (variables, cwd, threads) in enumerate(pair.run(surroundings, env={"OMP_NUM_THREADS": None})):
        assert variables.pop("MASTER_PORT") is not None
        assert variables == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": None,
            "GLOO_SOCKET_IFNAME": "lo",
            "EXTRA": "from the parent",
            "LEFT": None,
        }
        assert (cwd, threads) == (str(tmp_path), 1)


def test_what_a_run_does_to_its_environment_is_gone_in_the_next(pair: Ranks) -> None:
    before = pair.run(surroundings)
    pair.run(soil)
    after = pair.run(surroundings)
    for variables, *_ in (*before, *after):
        del variables["MASTER_PORT"]
    assert after == before


@pytest.mark.parametrize(("world_size", "total"), [(2, 3.0), (4, 10.0)])
def test_ranks_reduce_together_again_and_again(world_size: int, total: float) -> None:
    for _ in range(2):  # the second run starts its own group on a new port
        assert run_ranks(sum_of_ranks, world_size) == [total] * world_size


def test_processes_serve_several_runs_each_with_its_own_port(pair: Ranks) -> None:
    runs = [pair.run(pid_and_port) for _ in range(3)]
    assert [[pid for pid, _ in run] for run in runs] == [pair.pids] * 3
    assert len({port for run in runs for _, port in run}) == 3
    assert all(len({port for _, port in run}) == 1 for run in runs)


def test_without_reset_the_group_stays(pair: Ranks) -> None:
    assert pair.run(sum_of_ranks, reset=False) == [3.0, 3.0]
    assert pair.run(dist.is_initialized) == [True, True]
    assert pair.run(dist.is_initialized) == [False, False]


def test_nothing_is_seeded(pair: Ranks) -> None:
    first, second = pair.run(draw)
    assert first != second


def test_output_is_captured_from_print_and_from_outside_python(pair: Ranks) -> None:
    pair.run(speak, "something else")
    first, second = pair.run(speak, "hello", on_failure="collect")
    assert first.ok
    assert sorted(first.output.splitlines()) == ["and complains", "from outside Python", "rank 0 says hello"]
    assert "rank 1 says hello" in second.output


def test_a_pool_is_shared_by_its_size_until_pools_are_closed(pair: Ranks) -> None:
    first = run_ranks(os.getpid, 2)
    assert run_ranks(os.getpid, 2) == first
    assert run_ranks(os.getpid, 1)[0] not in first
    close_pools()
    assert not any(map(psutil.pid_exists, first))
    assert not set(run_ranks(os.getpid, 2)) & set(first)
    assert pair.run(my_rank) == [0, 1]  # not one of theirs


# ---------------------------------------------------------------- failure


def test_the_rank_that_raised_is_first_while_the_other_waits_for_it(pair: Ranks) -> None:
    before = pair.run(os.getpid)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        pair.run(raise_on_one, 1)
    assert time.monotonic() - start < 5
    text = str(caught.value)
    first_line, _, rest = text.partition("\n")
    assert re.search(r"raise_on_one: rank 1 of 2 failed first, after [\d.]+ s: ValueError: a bad batch$", first_line)
    traceback, _, rest = rest.partition("then:")
    assert 'raise ValueError("a bad batch")' in traceback
    assert "_rank.py" not in traceback
    followers, _, output = rest.partition("output of rank 0:")
    assert re.fullmatch(r"\n  rank 0, \+[\d.]+ s: .*Error.*\n\n", followers)
    assert "  | before, on 0" in output
    assert "  | before, on 1" in output.partition("output of rank 1:")[2]
    assert [outcome.rank for outcome in caught.value.failures] == [1, 0]

    after = pair.run(os.getpid)
    assert not set(before) & set(after)
    assert not any(map(psutil.pid_exists, before))


def test_others_are_stopped_after_the_grace(pair: Ranks) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        pair.run(fail_late, 60, grace=0.3)
    assert time.monotonic() - start < 5
    stopped, raised = caught.value.outcomes
    assert (raised.error_type, stopped.error_type) == ("KeyError", "Stopped")
    assert re.search(r"\n  rank 0, \S+ s: still running when .*, in stall, .*faults.py:\d+$", str(caught.value))


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        (3, 3, "exited with code 3 before the function returned"),
        (signal.SIGKILL, -9, "killed by SIGKILL (kill -9, or out of memory)"),
        (signal.SIGABRT, -6, "killed by SIGABRT (an abort in native code)"),
    ],
)
def test_a_death_is_told_in_words_and_comes_before_those_who_felt_it(
    pair: Ranks, how: signal.Signals | int, code: int, words: str
) -> None:
    with pytest.raises(RanksFailed) as caught:
        pair.run(train, FaultPlan(1, 2, functools.partial(die, how)))
    assert re.search(rf"train: rank 1 of 2 died first, after [\d.]+ s: {re.escape(words)}\n", str(caught.value))
    follower, dead = caught.value.outcomes
    assert (dead.error_type, dead.exit_code) == ("Died", code)
    assert (follower.ok, follower.exit_code) == (False, None)
    assert "all_reduce" in follower.error_text
    # A signal that is an error in native code leaves the Python stack in the output.
    assert ("faults.py" in dead.output) == (how == signal.SIGABRT)


def test_collect_lets_the_others_finish(pair: Ranks) -> None:
    late, early = pair.run(fail_late, 0.5, on_failure="collect", grace=0.0)
    assert isinstance(late, Outcome)
    assert late.ok
    assert late.seconds > 0.45
    assert (early.ok, early.error_type, early.value) == (False, "KeyError", None)
    assert "KeyError: 'first'" in early.error_text


def test_collect_reports_exit_and_time_out(pair: Ranks) -> None:
    outcomes = pair.run(sys.exit, 7, on_failure="collect")
    assert [(o.error_type, o.exit_code) for o in outcomes] == [("SystemExit", 7)] * 2
    outcomes = pair.run(stall, 60, on_failure="collect", timeout=0.3)
    assert [(o.ok, o.error_type) for o in outcomes] == [(False, "TimedOut")] * 2


@pytest.mark.parametrize(
    ("fn", "args", "names"),
    [
        (wait_in_here, (60,), ["in wait_in_here", "in wait_in_here"]),
        (in_native_code, (), ["in all_reduce", "in stall"]),
        (silence_the_library, (), ["in silence_the_library", "in silence_the_library"]),
    ],
)
def test_a_time_out_shows_where_every_rank_is(
    pair: Ranks, fn: Callable[..., None], args: tuple[float, ...], names: list[str]
) -> None:
    pair.run(my_rank)  # the start is not part of the time
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"2 of 2 ranks had not finished after 0\.\d s") as caught:
        pair.run(fn, *args, timeout=0.8)
    assert time.monotonic() - start < 6
    _, of_rank_0, of_rank_1 = re.split(r"^rank \d of 2: ", str(caught.value), flags=re.M)
    for stack, name in zip((of_rank_0, of_rank_1), names, strict=True):
        assert name in stack
        assert f"in {fn.__name__}" in stack


def test_a_stopped_process_does_not_stop_the_parent(pair: Ranks) -> None:
    with pytest.raises(RanksFailed, match="no stacks came"):
        pair.run(os.kill, 0, signal.SIGSTOP, timeout=0.5)
    assert pair.run(my_rank) == [0, 1]


def test_an_interrupt_ends_the_ranks_too(pair: Ranks) -> None:
    ranks = pair.run(os.getpid)
    thread = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    thread.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        pair.run(stall, 60)
    thread.join()
    assert time.monotonic() - start < 5
    assert not any(map(psutil.pid_exists, ranks))


def test_a_rank_that_cannot_be_reset_has_failed(pair: Ranks) -> None:
    with pytest.raises(RanksFailed, match="in the reset after the function had returned: OSError: a group that does"):
        pair.run(break_the_reset)
    assert pair.run(break_the_reset, reset=False) == [None, None]
    pair.run(os._exit, 0, on_failure="collect")


def test_a_complaint_about_a_lost_peer_comes_after_the_death_noticed_late() -> None:
    complaint = Outcome(
        rank=0, ok=False, error_type="RuntimeError", error_text="Connection closed by peer [127.0.0.1]:1", seconds=1.00
    )
    death = Outcome(rank=1, ok=False, error_type="Died", error_text="killed by SIGKILL", seconds=1.01)
    other = Outcome(rank=1, ok=False, error_type="ValueError", error_text="ValueError: late", seconds=1.01)
    assert [outcome.rank for outcome in in_order([complaint, death])] == [1, 0]
    assert [outcome.rank for outcome in in_order([complaint, other])] == [0, 1]


def test_what_cannot_be_sent_is_said_at_once(pair: Ranks) -> None:
    with pytest.raises(TypeError, match="define it at the top of a module"):
        pair.run(lambda: 1)
    with pytest.raises(TypeError, match="An argument for add cannot be sent"):
        pair.run(add, threading.Lock())
    with pytest.raises(RanksFailed, match="The function returned function, which cannot be pickled"):
        pair.run(unpicklable)


# ---------------------------------------------------------------- nothing is left


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int], within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while any(map(runs, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_closed_pool_leaves_neither_ranks_nor_their_children() -> None:
    with Ranks(2) as pool:
        ranks, children = pool.pids, pool.run(keep_a_child)
        assert all(map(runs, ranks + children))
    assert not any(map(psutil.pid_exists, ranks))
    assert gone(children)
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(my_rank)


def test_the_server_that_forks_has_one_thread(pair: Ranks) -> None:
    servers = {psutil.Process(pid).ppid() for pid in pair.run(os.getpid)}
    assert len(servers) == 1
    assert psutil.Process(servers.pop()).num_threads() == 1


SCRIPT = """
    import os, sys
    from lockstep.testing import Ranks, run_ranks
    from lockstep.testing.faults import stall

    if __name__ == "__main__":
        print(*run_ranks(os.getpid, 2), *run_ranks(os.getppid, 2), flush=True)
        pool = Ranks(1)
        print(*pool.run(os.getpid), flush=True)
        if sys.argv[1:] == ["stall"]:
            pool.run(stall, 300, timeout=300)
"""


def test_nothing_survives_a_parent_that_ends_or_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    # A killed parent cannot remove its folder of temporary files.
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    ends, stalls = (
        subprocess.Popen([sys.executable, str(script), *args], stdout=subprocess.PIPE, text=True, env=variables)
        for args in ([], ["stall"])
    )
    with ends, stalls:
        try:
            # Reads to the end of the pipe: somebody who still held it open would be seen as a time-out here.
            text, _ = ends.communicate(timeout=30)
            assert ends.returncode == 0
            assert stalls.stdout is not None
            pids = [int(word) for _ in range(2) for word in stalls.stdout.readline().split()]
            assert len(pids) == len(text.split()) == 5
            assert all(map(runs, pids))
            stalls.kill()
            assert stalls.communicate(timeout=5)[0] == ""
            assert gone(pids)
            assert gone([int(word) for word in text.split()])
            assert len(list(tmp_path.glob("lockstep-ranks-*"))) == 2  # those of the killed one
        finally:
            ends.kill()
            stalls.kill()


def test_descriptors_of_ranks_that_other_tests_use_may_stay(tmp_path: Path) -> None:
    before = Snapshot.take(tmp_path)
    with Ranks(1):
        assert before.left_behind(grace=0) == []
