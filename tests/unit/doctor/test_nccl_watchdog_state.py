"""Who waited and who was missing, from what torch's watchdog prints. The forms are those of torch 2.1 to 2.13."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.doctor.finding import Finding
from lockstep.doctor.nccl import report, watchdog_state
from lockstep.doctor.nccl.read import read
from lockstep.doctor.nccl.watchdog_state import Waiting

WHOLE = "PG ID 0 PG GUID 0(default_pg)"


def timed_out(rank: int, number: int, kind: str = "ALLREDUCE", size: int | None = 10) -> str:
    sizes = f"NumelIn={size}, NumelOut={size}, " if size is not None else ""
    return (
        f"[rank{rank}]:[E808 04:21:41.1609 ProcessGroupNCCL.cpp:655] [Rank {rank}] Watchdog caught collective "
        f"operation timeout: WorkNCCL(SeqNum={number}, OpType={kind}, {sizes}Timeout(ms)=600000) ran for 600001 "
        "milliseconds before timing out."
    )


def state(rank: int, number: int, started: int, finished: int, group: str = WHOLE, form: str = "new") -> str:
    start = f"[rank{rank}]:[E808 04:21:41.1610 ProcessGroupNCCL.cpp:2299] [{group} Rank {rank}] "
    if form == "new":
        return (
            f"{start} failure detected by watchdog at work sequence id: {number} PG status: last enqueued work: "
            f"{started}, last completed work: {finished}"
        )
    if form == "middle":
        return (
            f"{start}Exception (either an error or timeout) detected by watchdog at work: {number}, last enqueued NCCL "
            f"work: {started}, last completed NCCL work: {finished}."
        )
    last = f"last enqueued NCCL work: {started}, last completed NCCL work: {finished}."
    return f"{start}Timeout at NCCL work: {number}, {last}"


def was_told(rank: int, started: int, finished: int, group: str = WHOLE) -> str:
    return (
        f"[rank{rank}]:[E808 04:21:42.1 ProcessGroupNCCL.cpp:1682] [{group} Rank {rank}] Received a dump signal due to "
        "a collective timeout from rank 0 and we will try our best to dump the debug info. Last enqueued NCCL "
        f"work: {started}, last completed NCCL work: {finished}.This is most likely caused by incorrect usages"
    )


def told(folder: Path, *lines: str) -> list[Finding]:
    log = folder / "job.log"
    log.write_text("\n".join(lines) + "\n")
    return [finding for finding in read([str(log)]).findings if finding.check == "nccl waiting"]


def test_ranks_that_wait_in_different_ones_are_told_apart_also_without_groups(tmp_path: Path) -> None:
    """As torch 2.1 prints it: the numbers alone, in no order, and several of a rank."""
    lines = [timed_out(0, 120, size=None), timed_out(0, 117, size=None), timed_out(1, 117, size=None)]
    (finding,) = told(tmp_path, *lines, timed_out(7, 88, "BROADCAST", size=None))
    assert finding.what == (
        "rank 7 waited in BROADCAST, number 88, until the timeout; ranks 0-1 in ALLREDUCE, number 117"
    )
    assert "these logs do not say" in finding.why
    assert finding.data["elsewhere"] == {"0": 117, "1": 117}


def test_of_one_group_who_waits_in_a_later_one_has_the_earlier_one_behind_it(tmp_path: Path) -> None:
    (finding,) = told(tmp_path, state(0, 9, 9, 8), state(1, 7, 7, 6))
    assert finding.what == "rank 1 waited in a collective, number 7, until the timeout; rank 0 had finished it"


@pytest.mark.parametrize("form", ["new", "middle", "old"])
@pytest.mark.parametrize("group", [WHOLE, "PG 0 (default_pg)", "PG 0"])
def test_the_rank_that_never_started_it_is_named(tmp_path: Path, form: str, group: str) -> None:
    lines = [line for rank in (0, 1, 3) for line in (timed_out(rank, 8), state(rank, 8, 11, 7, group, form))]
    (finding,) = told(tmp_path, *lines, was_told(2, 7, 7, group))
    assert finding.status == "error"
    assert finding.data == {
        **{"group": group.removeprefix("PG ID 0 PG GUID ").removeprefix("PG "), "number": 8},
        **{"collectives": ["ALLREDUCE of 10 elements"], "waiting": [0, 1, 3], "absent": [2], "past": [], "silent": []},
        "elsewhere": {},
    }
    assert finding.what == (
        "ranks 0-1, 3 waited in ALLREDUCE of 10 elements, number 8, until the timeout; rank 2 never started it, and "
        "got as far as number 7"
    )
    assert "waited for rank 2" in finding.why
    assert "rank 2" in finding.fix


def test_a_rank_without_a_word_is_named_where_the_job_is_known_to_have_it(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        (tmp_path / f"rank_{rank}.err").write_text(timed_out(rank, 8, size=None) + "\n")
    (tmp_path / "rank_2.err").write_text("[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate\n")
    reading = read([str(tmp_path)])
    (finding,) = [finding for finding in reading.findings if finding.check == "nccl waiting"]
    assert finding.what == "ranks 0-1, 3 waited in ALLREDUCE, number 8, until the timeout; rank 2 said nothing of it"
    # And what became of it is the first error.
    assert "First error: rank 2, " in "\n".join(report.lines(reading, 100))


def test_different_collectives_of_one_number(tmp_path: Path) -> None:
    (finding,) = told(tmp_path, timed_out(0, 8), timed_out(1, 8, "BROADCAST", 3), timed_out(2, 8))
    assert finding.what == (
        "ranks 0-2 waited in a collective, number 8, until the timeout; ranks 0, 2 called ALLREDUCE of 10 elements; "
        "rank 1 called BROADCAST of 3 elements"
    )
    assert "different collectives" in finding.why


def test_one_that_does_not_get_out_of_it(tmp_path: Path) -> None:
    lines = [timed_out(0, 132), state(0, 132, 134, 131), was_told(1, 135, 134), was_told(2, 135, 134)]
    (finding,) = told(tmp_path, *lines)
    assert finding.data["waiting"] == [0]
    assert finding.data["past"] == [1, 2]
    assert "rank 0" in finding.fix


def test_all_in_it_with_the_same_size(tmp_path: Path) -> None:
    lines = [line for rank in range(2) for line in (timed_out(rank, 5), state(rank, 5, 6 + rank, 4))]
    (finding,) = told(tmp_path, *lines)
    assert finding.data["absent"] == finding.data["past"] == []
    assert "did not end" in finding.why
    (alone,) = told(tmp_path, *lines[:2])
    assert "logs of the other ranks" in alone.fix


def test_groups_are_not_mixed(tmp_path: Path) -> None:
    rows = [f"PG ID 1 PG GUID {guid}(mesh_tp)" for guid in (1, 5)]
    lines = [timed_out(0, 40), state(0, 40, 41, 39, rows[0]), was_told(1, 39, 39, rows[0])]
    lines += [was_told(2, 12, 12, rows[1]), was_told(3, 12, 12, rows[1])]
    (finding,) = told(tmp_path, *lines)
    assert finding.data["group"] == "1(mesh_tp)"
    assert finding.data["absent"] == [1]
    assert finding.data["silent"] == []
    assert "number 40 of group 1(mesh_tp)" in finding.what


def test_one_without_a_state_belongs_to_those_that_wait_in_the_same_number(tmp_path: Path) -> None:
    (finding,) = told(tmp_path, timed_out(0, 40), state(0, 40, 41, 39, "PG 7"), timed_out(4, 40))
    assert finding.data["waiting"] == [0, 4]


def test_numbers_that_were_never_set_are_left_out(tmp_path: Path) -> None:
    lines = [timed_out(2, 1), state(2, 1, 1, 76280750235782912, "PG 0", "old")]
    (finding,) = told(tmp_path, *lines, state(1, 1, 1, 0, "PG 0", "old"))
    assert finding.data["waiting"] == [1, 2]
    assert finding.data["past"] == []


def test_nobody_waited(tmp_path: Path) -> None:
    assert told(tmp_path, "epoch 1", was_told(1, 3, 3)) == []


@settings(max_examples=100, deadline=None)
@given(
    st.integers(2, 12).flatmap(lambda ranks: st.tuples(st.just(ranks), st.sets(st.integers(0, ranks - 1), min_size=1))),
    st.integers(1, 10**6),
    st.randoms(use_true_random=False),
)
def test_whoever_is_absent_is_found_in_any_order(
    drawn: tuple[int, set[int]], number: int, chance: random.Random
) -> None:
    ranks, absent = drawn
    if len(absent) == ranks:
        absent = absent - {0}
    lines = []
    for rank in range(ranks):
        if rank in absent:
            last = number - chance.randrange(1, 4)
            lines.append((rank, was_told(rank, last, last)))
        else:
            ahead = chance.randrange(5)
            lines += [(rank, timed_out(rank, number)), (rank, state(rank, number, number + ahead, number - 1))]
    chance.shuffle(lines)
    said = Waiting()
    for rank, line in lines:
        said.read(line, rank)
    (finding,) = watchdog_state.findings(said, range(ranks))
    assert finding.data["absent"] == sorted(absent)
    assert finding.data["waiting"] == sorted(set(range(ranks)) - absent)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_state, "MOST", 20)
    said = Waiting()
    for rank in range(100):
        said.read(timed_out(rank, 8), rank)
        said.read(state(rank, 8, 8, 7), rank)
    assert len(said.works) + len(said.reached) <= 21
