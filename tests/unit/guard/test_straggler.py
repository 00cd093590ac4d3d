"""Who is slow: from times to steps, and from steps to a rank."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.blackbox.snapshot import Snapshot
from lockstep.blackbox.step_clock import StepClock
from lockstep.guard import straggler
from lockstep.guard.straggler import STEPS, QuestionSchedule, Slow, all_wait, find_slow, own_times


def box(rank: int, steps: list[tuple[float, ...]], world_size: int = 2, **more: object) -> Snapshot:
    whole = tuple((*step, *[0.0] * (6 - len(step))) for step in steps)
    fields = {"host": f"host{rank}", "device": f"cuda:{rank}", "pace": whole, **more}
    return Snapshot(rank=rank, world_size=world_size, **fields)  # type: ignore[arg-type]


def test_a_step_is_put_together_from_its_times() -> None:
    fetches = [(0.0, 1.0), (10.0, 11.0), (20.0, 21.0)]
    backwards = [(3.0, 8.0), (13.0, 18.0)]
    started = [4.0, 6.0, 9.0, 14.0, 17.0]  # the one at 9 follows backward: the script's own
    assert own_times(fetches, backwards, started) == [
        (1.0, 2.0, 3.0, 10.0, 2.0, 0.0),
        (1.0, 2.0, 4.0, 10.0, 1.0, 0.0),
    ]
    assert [step[5] for step in own_times(fetches, backwards, started, busy=0.5)] == [5.0, 5.0]


def test_steps_of_which_something_is_not_known_are_left_out() -> None:
    fetches = [(0.0, 1.0), (10.0, 11.0), (20.0, 21.0), (30.0, 31.0)]
    assert own_times(fetches, [(13.0, 18.0)], [14.0]) == [(1.0, 2.0, 1.0, 10.0, 4.0, 0.0)]  # evaluating, accumulating
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
        wanted.append((data, forward, own, now - asked, wait, 0.0))
    found = own_times(fetches, backwards, started)
    assert len(found) == len(spans) - 1  # the last step has not ended
    for step, meant in zip(found, wanted, strict=False):
        assert step == pytest.approx(meant)


def test_the_slow_rank_is_named_with_its_phase_and_what_it_costs() -> None:
    quick = [(0.001, 0.004, 0.005, 0.070)] * STEPS
    late = [(0.001, 0.004, 0.055, 0.070)] * STEPS
    slow = find_slow([box(0, quick, 3), box(1, late, 3), box(2, quick, 3)])
    assert slow is not None
    assert (slow.ranks, slow.host, slow.device, slow.phase) == ((1,), "host1", "cuda:1", "backward")
    assert slow.lost == pytest.approx(0.05 / 0.07)
    assert Slow.from_dict(json.loads(json.dumps(slow.to_dict()))) == slow
    for part in ("Rank 1", "host1", "cuda:1", "backward", "60 ms", "10 ms", "71%"):
        assert part in slow.line()


@pytest.mark.parametrize(("place", "phase"), [(0, "data"), (1, "forward"), (2, "backward")])
def test_each_phase_can_be_the_slow_one(place: int, phase: str) -> None:
    step = (0.01, 0.01, 0.01, 0.05)
    late = tuple(0.02 if number == place else value for number, value in enumerate(step))
    slow = find_slow([box(0, [late] * STEPS), box(1, [step] * STEPS)])
    assert slow is not None
    assert (slow.ranks, slow.phase) == ((0,), phase)


def test_equal_ranks_on_a_busy_machine_are_not_slow() -> None:
    def noisy(seed: int) -> list[tuple[float, ...]]:
        draw = random.Random(seed)
        # Each phase is now and then held up, sometimes for long: what other programs on the cores do to it.
        return [(*(0.002 * (1 + draw.expovariate(1.0)) for _ in range(3)), 0.02) for _ in range(STEPS)]

    assert all(find_slow([box(0, noisy(seed)), box(1, noisy(seed + 1000))]) is None for seed in range(300))


def data_bound(*busy: float) -> list[Snapshot]:
    """Rank 0 waits for its loader in each step, rank 1 has a batch in reserve; how much their workers are busy."""
    waits, reserve = (0.020, 0.001, 0.001, 0.022, 0.0), (0.0, 0.001, 0.001, 0.022, 0.020)
    return [box(0, [(*waits, busy[0] * 0.022)] * STEPS), box(1, [(*reserve, busy[1] * 0.022)] * STEPS)]


def test_who_has_a_batch_in_reserve_is_not_quicker_than_who_has_none() -> None:
    assert find_slow(data_bound(1.0, 1.0)) is None
    assert find_slow(data_bound(1.0, 0.9)) is None
    assert find_slow(data_bound(0.7, 0.7)) is None  # on a busy machine each of them is held up now and then


def test_who_has_idle_workers_is_quicker_and_by_how_much_is_known() -> None:
    slow = find_slow(data_bound(1.0, 0.25))
    assert slow is not None
    assert (slow.ranks, slow.phase) == ((0,), "data")
    assert slow.others == pytest.approx(0.0055)
    assert slow.more == pytest.approx(0.0165)
    assert slow.lost == pytest.approx(0.75)


def test_workers_count_as_busy_until_they_were_looked_at_often_enough() -> None:
    clock = StepClock()
    clock.sample()
    assert clock.busy_share() == 0.0  # there are none
    clock.workers = lambda: 0.25
    assert clock.busy_share() == 1.0
    for _ in range(19):
        clock.sample()
    assert clock.busy_share() == 1.0
    clock.sample()
    assert clock.busy_share() == 0.25
    clock.workers = None  # the epoch has ended
    assert clock.busy_share() == 0.25
    for _ in range(20):
        clock.sample()
    assert clock.busy_share() == 0.0


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


# --- across machines -----------------------------------------------------------------------------------------------

QUICK = [(0.001, 0.004, 0.005, 0.065, 0.05)] * STEPS
LATE = [(0.001, 0.004, 0.055, 0.065, 0.0)] * STEPS


def test_a_machine_all_of_whose_ranks_are_slow_is_named() -> None:
    boxes = [box(rank, LATE if rank >= 4 else QUICK, 6, node=rank // 2, host=f"node{rank // 2}") for rank in range(6)]
    slow = find_slow(boxes)
    assert slow is not None
    assert (slow.ranks, slow.host, slow.device, slow.phase) == ((4, 5), "node2", "2 devices", "backward")
    assert "Ranks 4-5 (node2, 2 devices) are slower than those of the other machines: 60 ms of their own" in slow.line()
    one = find_slow([box(0, QUICK, 3, node=0), box(1, LATE, 3, node=1), box(2, QUICK, 3, node=1)])
    assert one is not None
    assert one.ranks == (1,)
    # The same times on one machine: half of its ranks are as slow as each other, and none of them stands out.
    assert find_slow([box(rank, LATE if rank >= 2 else QUICK, 4) for rank in range(4)]) is None


def test_all_wait_only_when_everyone_here_does() -> None:
    def on_cpu(rank: int, steps: list[tuple[float, ...]], **more: object) -> Snapshot:
        return box(rank, steps, device="cpu", **more)

    assert all_wait([on_cpu(0, QUICK), on_cpu(1, QUICK)])
    assert not all_wait([on_cpu(0, QUICK), on_cpu(1, LATE)])  # it is one of ours
    assert not all_wait([])
    assert not all_wait([on_cpu(0, QUICK), on_cpu(1, QUICK[1:])])  # one is not known yet
    assert not all_wait([on_cpu(0, QUICK), on_cpu(1, QUICK, alive=False)])
    assert all_wait([on_cpu(0, QUICK), on_cpu(1, [], closed="finished")])
    tiny = [(0.0, 0.0005, 0.0005, 0.003, 0.0019)] * STEPS
    assert not all_wait([on_cpu(0, tiny)])  # less than the scheduler takes
    optimizing = [(0.0, 0.005, 0.005, 0.05, 0.001)] * STEPS
    assert not all_wait([on_cpu(0, optimizing)])  # long after backward, by itself
    assert all_wait([box(0, optimizing)])  # an accelerator's host waits there, for whom cannot be told


@given(st.floats(0.005, 1.0), st.floats(0.0, 2.0), st.lists(st.integers(1, 4), min_size=2, max_size=5))
def test_whoever_is_slow_enough_to_be_named_makes_the_other_machines_ask(
    own: float, excess: float, sizes: list[int]
) -> None:
    late = (0.0, 0.0, own * (1 + excess), own * (1 + excess), 0.0)
    quick = (0.0, 0.0, own, own * (1 + excess), own * excess)
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    boxes = [box(rank, [quick if rank else late] * STEPS, node=node, device="cpu") for rank, node in enumerate(nodes)]
    if find_slow(boxes) is not None:
        assert all(all_wait([one for one in boxes if one.node == node]) for node in range(1, len(sizes)))
    assert not all_wait([one for one in boxes if one.node == 0])


def test_questions_become_seldom() -> None:
    questions, asked = QuestionSchedule(), []
    for now in range(4 * 3600):
        if questions.due(True, float(now)):
            asked.append(now)
            questions.put_off(float(now))
    assert [later - before for before, later in pairwise(asked)][:5] == [300, 600, 1200, 1800, 1800]
    assert asked[0] == straggler.SETTLE


def test_a_wait_that_passes_asks_nothing() -> None:
    questions = QuestionSchedule()
    assert not any(questions.due(now % 3 > 0, float(now)) for now in range(1000))
