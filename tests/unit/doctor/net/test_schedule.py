from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.doctor.net import schedule

hosts_of_ranks = st.lists(st.sampled_from("abcde"), max_size=14).map(lambda names: dict(enumerate(names)))


@given(hosts_of_ranks)
def test_each_pair_once_and_no_machine_twice_in_a_round(hosts: dict[int, str]) -> None:
    made = schedule.rounds(hosts)
    assert sorted(pair for together in made for pair in together) == list(combinations(range(len(hosts)), 2))
    for together in made:
        used = [host for a, b in together for host in {hosts[a], hosts[b]}]
        assert len(used) == len(set(used))


@given(st.integers(2, 16))
def test_machines_of_their_own_are_measured_at_the_same_time(count: int) -> None:
    made = schedule.rounds({rank: str(rank) for rank in range(count)})
    assert len(made) < max(2, 2 * count)


@given(st.data())
def test_those_together_can_all_talk_and_none_is_left_out_in_vain(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 10))
    pairs = list(combinations(range(count), 2))
    broken = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    kept = schedule.together(count, broken)
    assert all(pair not in broken for pair in combinations(kept, 2))
    assert kept
    if not broken:
        assert kept == list(range(count))


def test_one_that_talks_to_nobody_is_the_one_left_out() -> None:
    assert schedule.together(4, [(0, 2), (1, 2), (2, 3)]) == [0, 1, 3]


@given(hosts_of_ranks, st.integers(0, 100))
def test_of_too_many_pairs_every_two_machines_keep_one(hosts: dict[int, str], most: int) -> None:
    pairs = list(combinations(sorted(hosts), 2))
    kept = schedule.fewer(hosts, pairs, most)
    if len(pairs) <= most:
        assert kept == pairs
        return
    assert [pair for pair in pairs if hosts[pair[0]] == hosts[pair[1]]] == [
        (a, b) for a, b in kept if hosts[a] == hosts[b]
    ]
    between = [frozenset((hosts[a], hosts[b])) for a, b in kept if hosts[a] != hosts[b]]
    assert sorted(map(sorted, between)) == sorted(map(list, combinations(sorted(set(hosts.values())), 2)))
