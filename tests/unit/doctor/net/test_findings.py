"""From measurements to findings: who is named, and what is not."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lockstep.doctor.finding import Finding
from lockstep.doctor.net import findings as network_findings
from lockstep.doctor.net import machines, quality
from lockstep.doctor.net.results import NetReport, RankResult
from tests.unit.doctor.net.reports import healthy, with_contact, with_link, with_member

FIVE = ("a", "b", "c", "d", "e")


def found(report: NetReport, check: str) -> list[Finding]:
    return [finding for finding in network_findings.findings(report) if finding.check == check]


def test_all_is_well() -> None:
    findings = network_findings.findings(healthy(FIVE))
    assert {finding.status for finding in findings} == {"ok"}
    assert [finding.check for finding in findings] == [
        "ranks",
        "connections",
        "lines",
        "clocks",
        "versions",
        "collectives",
    ]


def test_a_line_with_more_latency_than_the_others_is_marked_with_both_ends() -> None:
    (slow,) = found(with_link(healthy(FIVE), 1, 3, latency=400e-6), "slow line")
    assert slow.status == "warning"
    assert "rank 1 on b (eth0 10.0.0.2) and rank 3 on d (eth0 10.0.0.4)" in slow.what
    assert "400 us, 13 times the median" in slow.what
    assert slow.data["pairs"] == [[1, 3]]


def test_a_bad_interface_is_found_among_five_machines() -> None:
    report = healthy(FIVE)
    for peer in (0, 1, 2, 4):
        report = with_link(report, min(3, peer), max(3, peer), forth=2e8, back=2e8)
    pairs = [tuple(pair) for slow in found(report, "slow line") for pair in slow.data["pairs"]]
    assert sorted(pairs) == [(0, 3), (1, 3), (2, 3), (3, 4)]


def test_a_slow_machine_among_many_is_told_once() -> None:
    report = healthy([f"n{number}" for number in range(12)])
    for peer in range(1, 12):
        report = with_link(report, 0, peer, back=1e7)
    (slow,) = found(report, "slow line")
    assert slow.what.startswith("11 between n0 and 11 other nodes (n1, n10, n11, n2, n3, n4 and 5 more); one of them: ")
    assert "rank 0 on n0 (eth0 10.0.0.1) and rank 1 on n1 (eth0 10.0.0.2): 10.0 MB/s from rank 1 to 0" in slow.what
    assert len(slow.data["pairs"]) == len(slow.data["marks"]) == 11
    assert "switch port of n0" in slow.fix


def test_a_machine_that_nobody_can_talk_to_is_told_once_and_the_others_by_pairs() -> None:
    report = healthy([f"n{number}" for number in range(8)])
    for peer in range(7):
        report = with_contact(report, peer, 7, "no answer within 3 s")
    report = with_contact(report, 7, 2, "no route to host")
    report = with_contact(report, 0, 1, "connection refused")
    alone, pair = found(report, "connections")
    assert alone.what.startswith(
        "n7 and 7 other nodes cannot talk (7 cannot connect to it, it cannot connect to 1): n0"
    )
    assert "rank 0 on n0 (eth0 10.0.0.1) cannot connect to rank 7 on n7 (eth0 10.0.0.8): no answer" in alone.what
    assert len(alone.data["pairs"]) == 7
    assert alone.data["errors"] == ["no answer within 3 s", "no route to host"]
    assert "rank 0 on n0 (eth0 10.0.0.1) cannot connect to rank 1 on n1" in pair.what


@given(st.sets(st.frozensets(st.sampled_from("abcdefgh"), min_size=1, max_size=2)))
def test_every_two_machines_that_cannot_talk_are_named_once(apart: set[frozenset[str]]) -> None:
    left = list(apart)
    for host, others in machines.cut_off(apart):
        assert len(others) >= machines.MANY
        for other in others:
            left.remove(frozenset((host, other)))
    for host in "abcdefgh":
        assert sum(host in hosts and len(hosts) == 2 for hosts in left) < machines.MANY


def test_ranks_that_went_away_before_they_could_say_are_not_called_connected() -> None:
    assert found(replace(healthy(FIVE), tried=[0, 1, 2, 3]), "connections") == []


def test_what_is_wrong_with_several_lines_of_two_machines_is_told_in_one() -> None:
    report = with_link(healthy(("a", "a", "b", "b")), 0, 2, latency=5e-3)
    report = with_link(report, 1, 3, forth=2e7)
    (slow,) = found(report, "slow line")
    assert "latency 5.0 ms" in slow.what
    assert "ranks 1 and 3: 20.0 MB/s from rank 1 to 3" in slow.what
    assert len(slow.data["marks"]) == 2


def test_packets_that_were_lost_are_told_where_they_cost_speed() -> None:
    report = with_link(healthy(FIVE), 0, 2, forth=0.9e9, lost_forth=0.03)
    (slow,) = found(report, "slow line")
    assert "3% of the packets from rank 0 to 2 were lost on the way" in slow.what
    assert found(with_link(report, 0, 2, forth=2e9), "slow line") == []  # faster than the hardware says it is
    assert found(with_link(report, 0, 2, lost_forth=0.001), "slow line") == []


def test_a_line_that_carries_only_small_messages_is_an_error_of_both() -> None:
    silent = "nothing came for 5 s while rank 1 sent larger ones to rank 3; small messages pass"
    report = with_link(healthy(FIVE), 1, 3, error=silent, forth=None, back=None)
    report = with_member(with_member(report, 1, mtu=9000), 3, mtu=1500)
    (broken,) = found(report, "broken line")
    assert broken.status == "error"
    assert f"rank 1 on b (eth0 10.0.0.2) and rank 3 on d (eth0 10.0.0.4): {silent} (MTU 9000 and 1500)" in broken.what
    assert "on b try `ping -M do -s 1472 10.0.0.4`" in broken.fix
    assert found(report, "slow line") == found(report, "lines") == []
    assert network_findings.broken_pairs(report) == {(1, 3)}
    (ended,) = found(with_link(report, 1, 3, error="the line was closed while …"), "broken line")
    assert "has ended" in ended.fix


def test_one_direction_is_named() -> None:
    (slow,) = found(with_link(healthy(FIVE), 0, 2, back=1e8), "slow line")
    assert "from rank 2 to 0" in slow.what
    assert "9% of the median" in slow.what
    assert "from rank 0 to 2" not in slow.what


def test_two_machines_have_no_median_but_the_hardware_tells() -> None:
    report = healthy(("a", "b"), forth=5e6, back=1.1e9)
    (slow,) = found(report, "slow line")
    assert "5.0 MB/s from rank 0 to 1, 0.4% of the nominal 1.25 GB/s" in slow.what
    (late,) = found(healthy(("a", "b"), latency=5e-3), "slow line")
    assert "latency 5.0 ms, far above what a local network has" in late.what


def test_one_stream_need_not_fill_the_fastest_interface() -> None:
    report = healthy(("a", "b"), forth=2e9, back=2e9)
    for rank in (0, 1):
        report = with_member(report, rank, speed=400_000)
    assert found(report, "slow line") == []


def test_an_interface_that_does_not_say_its_speed_is_not_judged_by_it() -> None:
    assert found(with_member(healthy(("a", "b"), forth=1e6, back=1e6), 1, speed=0), "slow line") == []


@given(st.lists(st.floats(20e-6, 60e-6), min_size=10, max_size=10))
def test_what_differs_a_little_is_not_marked(latencies: list[float]) -> None:
    report = healthy(FIVE)
    links = [replace(link, latency=value) for link, value in zip(report.links, latencies, strict=True)]
    assert quality.marks(replace(report, links=links)) == {}


def test_lines_inside_machines_are_compared_among_themselves() -> None:
    report = healthy(("a", "a", "a", "b"), latency=5e-6)
    for rank in range(3):
        report = with_link(report, rank, 3, latency=90e-6)
    assert quality.marks(report) == {}


def test_a_busy_machine_is_not_taken_for_a_slow_line() -> None:
    assert quality.marks(with_link(healthy(("a", "a", "a"), latency=7e-6), 0, 2, latency=90e-6)) == {}
    assert (0, 2) in quality.marks(with_link(healthy(("a", "a", "a"), latency=7e-6), 0, 2, latency=900e-6))


def test_a_pair_that_cannot_talk_is_named_once_for_both_ways() -> None:
    report = with_contact(healthy(("a", "b", "c")), 0, 2, error="no answer within 3 s")
    report = with_contact(report, 2, 0, error="no route to host")
    (broken,) = found(report, "connections")
    assert broken.status == "error"
    assert "rank 0 on a (eth0 10.0.0.1) cannot connect to rank 2 on c (eth0 10.0.0.3)" in broken.what
    assert "no answer within 3 s (neither way)" in broken.what
    assert "the other way: no route to host" in broken.what
    assert broken.data["pairs"] == [[0, 2]]
    assert network_findings.broken_pairs(report) == {(0, 2)}


def test_many_ranks_of_two_machines_are_one_finding() -> None:
    report = healthy(("a", "a", "b", "b"))
    for source in (0, 1):
        for target in (2, 3):
            report = with_contact(report, source, target, error="no answer within 3 s")
    (broken,) = found(report, "connections")
    assert "this way only; the other way works" in broken.what
    assert "the same for 3 more pairs" in broken.what


def test_the_remedy_names_the_interface_that_works() -> None:
    report = with_contact(healthy(("a", "b")), 0, 1, error="no answer within 3 s", instead="eth7")
    (broken,) = found(report, "connections")
    assert broken.fix.startswith("on b: export GLOO_SOCKET_IFNAME=eth7 NCCL_SOCKET_IFNAME=eth7")
    report = with_contact(healthy(("a", "b")), 0, 1, error="127.0.1.1 means the machine itself, and so on")
    assert "/etc/hosts" in found(report, "connections")[0].fix
    report = with_contact(healthy(("a", "b")), 0, 1, error="no answer within 3 s")
    assert "open all TCP ports" in found(report, "connections")[0].fix


def test_a_clock_that_is_ahead() -> None:
    (clocks,) = found(with_link(healthy(("a", "b", "c")), 1, 2, offset=-42.5), "clocks")
    assert clocks.status == "warning"
    assert "the clock of b is 42.5 s ahead of that of c" in clocks.what
    (clocks,) = found(healthy(("a", "b"), offset=0.4), "clocks")
    assert clocks.status == "ok"
    assert "400.0 ms" in clocks.what
    assert found(healthy(("a", "a"), offset=9.0), "clocks") == []


def test_an_offset_within_its_uncertainty_is_no_skew() -> None:
    (clocks,) = found(healthy(("a", "b"), offset=1.5, uncertain=0.8), "clocks")
    assert clocks.status == "ok"


def test_versions_that_differ() -> None:
    report = with_member(
        healthy(("a", "b", "c")), 2, versions={"torch": "2.9.0", "python": "3.11.7", "lockstep": "0.1"}
    )
    (torch,) = found(report, "torch")
    assert torch.status == "error"
    assert torch.what == "2.13.0 on a, b; 2.9.0 on c"
    (same,) = found(report, "versions")
    assert "python 3.11.7" in same.what
    assert "torch" not in same.what


def test_one_machine_need_not_agree_with_itself() -> None:
    assert found(healthy(("a", "a")), "versions") == []


def test_devices_that_are_not_alike() -> None:
    report = healthy(("a", "a", "b"))
    for rank, name, memory in ((0, "H100", 80 << 30), (1, "H100", 80 << 30), (2, "A10", 24 << 30)):
        report = with_member(report, rank, device_name=name, device_memory=memory)
    (devices,) = found(report, "devices")
    assert "H100, 80 GiB: ranks 0-1; A10, 24 GiB: rank 2" in devices.what
    assert "24 GiB" in devices.why


def test_a_missing_rank_and_a_wrong_sum() -> None:
    report = replace(healthy(("a", "b")), missing=[2])
    assert found(report, "ranks")[0].status == "error"
    assert "rank 2 of 3 did not come" in found(report, "ranks")[0].what
    wrong = replace(
        report, outcomes=[RankResult(rank=0, checked=True), RankResult(rank=1, error="gave 3 where 6 is right")]
    )
    (told,) = found(wrong, "collectives")
    assert told.status == "error"
    assert "rank 1 on b (eth0 10.0.0.2): gave 3 where 6 is right" in told.what


def test_who_was_left_out_of_the_collectives_is_said() -> None:
    report = replace(healthy(("a", "b", "c")), group=[0, 1])
    assert "without rank 2" in found(report, "collectives")[0].what
