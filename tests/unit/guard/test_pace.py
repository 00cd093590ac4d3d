"""Who is slow: from times to steps, and from steps to a rank."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.blackbox.snapshot import Snapshot
from lockstep.guard.pace import STEPS, find_slow, own_times


def box(rank: int, steps: list[tuple[float, float, float, float]], world_size: int = 2, **more: object) -> Snapshot:
    fields = {"host": f"host{rank}", "device": f"cuda:{rank}", "pace": tuple(steps), **more}
    return Snapshot(rank=rank, world_size=world_size, **fields)  # type: ignore[arg-type]


def test_a_step_is_put_together_from_its_times() -> None:
    fetches = [(0.0, 1.0), (10.0, 11.0), (20.0, 21.0)]
    backwards = [(3.0, 8.0), (13.0, 18.0)]
    started = [4.0, 6.0, 9.0, 14.0, 17.0]  # the one at 9 follows backward: the script's own
    assert own_times(fetches, backwards, started) == [(1.0, 2.0, 3.0, 10.0), (1.0, 2.0, 4.0, 10.0)]


def test_steps_of_which_something_is_not_known_are_left_out() -> None:
    fetches = [(0.0, 1.0), (10.0, 11.0), (20.0, 21.0), (30.0, 31.0)]
    assert own_times(fetches, [(13.0, 18.0)], [14.0]) == [(1.0, 2.0, 1.0, 10.0)]  # evaluating, accumulating
    assert own_times(fetches, [(3.0, 8.0)], []) == []  # nothing is known of torch's collectives
    assert own_times([], [(3.0, 8.0)], [4.0]) == []


@given(st.lists(st.tuples(*[st.floats(0.001, 1.0)] * 5), min_size=2, max_size=30), st.integers(1, 4))
def test_whatever_the_steps_their_times_come_out(spans: list[tuple[float, ...]], buckets: int) -> None:
    now, fetches, backwards, started, wanted = 0.0, [], [], [], []
    for data, forward, own, wait, rest in spans:
        asked, answered = now, now + data
        began = answered + forward
        started += [began + own * (number + 1) / buckets for number in range(buckets)]
        fetches.append((asked, answered))
        backwards.append((began, began + own + wait))
        now = began + own + wait + rest
        wanted.append((data, forward, own, now - asked))
    found = own_times(fetches, backwards, started)
    assert len(found) == len(spans) - 1  # the last step has not ended
    for step, meant in zip(found, wanted, strict=False):
        assert step == pytest.approx(meant)


def test_the_slow_rank_is_named_with_its_phase_and_what_it_costs() -> None:
    quick = [(0.001, 0.004, 0.005, 0.070)] * STEPS
    late = [(0.001, 0.004, 0.055, 0.070)] * STEPS
    slow = find_slow([box(0, quick, 3), box(1, late, 3), box(2, quick, 3)])
    assert slow is not None
    assert (slow.rank, slow.host, slow.device, slow.phase) == (1, "host1", "cuda:1", "backward")
    assert slow.lost == pytest.approx(0.05 / 0.07)
    for part in ("Rank 1", "host1", "cuda:1", "backward", "60 ms", "10 ms", "71%"):
        assert part in slow.line()


@pytest.mark.parametrize(("place", "phase"), [(0, "data"), (1, "forward"), (2, "backward")])
def test_each_phase_can_be_the_slow_one(place: int, phase: str) -> None:
    step = (0.01, 0.01, 0.01, 0.05)
    late = tuple(0.02 if number == place else value for number, value in enumerate(step))
    slow = find_slow([box(0, [late] * STEPS), box(1, [step] * STEPS)])  # type: ignore[list-item]
    assert slow is not None
    assert (slow.rank, slow.phase) == (0, phase)


def test_equal_ranks_on_a_busy_machine_are_not_slow() -> None:
    def noisy(seed: int) -> list[tuple[float, float, float, float]]:
        draw = random.Random(seed)
        # Each phase is now and then held up, sometimes for long: what other programs on the cores do to it.
        return [(*(0.002 * (1 + draw.expovariate(1.0)) for _ in range(3)), 0.02) for _ in range(STEPS)]  # type: ignore[misc]

    assert all(find_slow([box(0, noisy(seed)), box(1, noisy(seed + 1000))]) is None for seed in range(300))


def test_no_verdict_from_too_little() -> None:
    quick, late = [(0.0, 0.0, 0.01, 0.02)], [(0.0, 0.0, 0.1, 0.2)]
    assert find_slow([]) is None
    assert find_slow([box(0, quick * STEPS)]) is None
    assert find_slow([box(0, quick * STEPS), box(1, late * (STEPS - 1))]) is None
    assert find_slow([box(0, quick * STEPS, 3), box(1, late * STEPS, 3), box(2, [], 3)]) is None  # one is not known yet
    assert find_slow([box(0, quick * STEPS), box(1, late * STEPS, closed="finished")]) is None
    assert find_slow([box(0, quick * STEPS), box(1, [(0.0, 0.0, 0.011, 0.02)] * STEPS)]) is None  # a tenth more
    tiny, more = [(0.0, 0.0, 0.0006, 0.002)] * STEPS, [(0.0, 0.0, 0.0009, 0.002)] * STEPS
    assert find_slow([box(0, tiny), box(1, more)]) is None  # less than can be told from chance
