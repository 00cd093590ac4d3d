"""What many nodes say of themselves, told once where it is the same."""

from __future__ import annotations

from lockstep.doctor.finding import Finding
from lockstep.doctor.net import machines
from lockstep.doctor.net.results import RankInfo


def member(number: int, *findings: Finding) -> RankInfo:
    return RankInfo(rank=number, host=f"n{number}", findings=[each.plain() for each in findings])


def test_what_is_the_same_is_told_once_and_the_rest_by_machines() -> None:
    same = Finding(check="kernel", status="ok", what="Linux 6")
    found = [member(number, same, memory(number)) for number in range(3)]
    assert [each.what for each in machines.findings(found)] == [
        "all 3 nodes: Linux 6",
        "n0: 0 GiB",
        "n1: 1 GiB",
        "n2: 2 GiB",
    ]


def memory(number: int) -> Finding:
    return Finding(check="memory", status="ok" if number != 5 else "warning", what=f"{number} GiB")


def test_on_the_screen_many_alike_are_two_rows_and_one_for_the_rest() -> None:
    found = list(machines.findings([member(number, memory(number)) for number in range(12)]))
    assert len(found) == 12
    shown = list(machines.brief(found))
    assert [(each.status, each.what) for each in shown] == [
        ("ok", "n0: 0 GiB"),
        ("ok", "n1: 1 GiB"),
        ("ok", "n2, n3, n4, n6, n7, n8 and 3 more: ok too, each with figures of its own, which --json has"),
        ("warning", "n5: 5 GiB"),
    ]


def test_few_machines_are_all_shown() -> None:
    found = list(machines.findings([member(number, memory(number)) for number in range(3)]))
    assert list(machines.brief(found)) == found
