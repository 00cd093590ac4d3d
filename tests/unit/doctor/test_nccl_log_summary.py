"""What logs tell together. The logs are written from documented forms: there is no GPU here."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cli import doctor, doctor_nccl
from lockstep.doctor.finding import Finding
from lockstep.doctor.nccl import knowledge, log_parser, report
from lockstep.doctor.nccl.findings import findings
from lockstep.doctor.nccl.log_parser import LogParser, transport
from lockstep.doctor.nccl.read import Reading, read
from lockstep.errors import ConfigError
from tests.unit.doctor.nccl_logs import rank_log

CLOSED = "{host}:{pid}:9 [{device}] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer b<42>"
TRACE = "{host}:{pid}:9 [{device}] NCCL INFO misc/socket.cc:749 -> 6"
FULL = "{host}:{pid}:9 [{device}] misc/shmutils.cc:71 NCCL WARN Error: failed to extend /dev/shm/nccl-a to 9 bytes"
STRANGE = "{host}:{pid}:9 [{device}] graph/new.cc:7 NCCL WARN Flux capacitor {pid} is empty"


def told(folder: Path, *logs: str, names: tuple[str, ...] = ()) -> Reading:
    paths = []
    for number, text in enumerate(logs):
        path = folder / (names[number] if names else f"log{number}.txt")
        path.write_text(text)
        paths.append(str(path))
    return read(paths)


def found(reading: Reading, check: str) -> Finding:
    (finding,) = [finding for finding in reading.findings if finding.check == f"nccl {check}"]
    return finding


def checks(reading: Reading) -> list[str]:
    return [f"{finding.check} {finding.status}" for finding in reading.findings]


def test_a_job_that_is_well(tmp_path: Path) -> None:
    reading = told(tmp_path, *(rank_log(rank) for rank in range(4)))
    assert checks(reading) == [
        "nccl version ok",
        "nccl start ok",
        "nccl interface ok",
        "nccl transports ok",
        "nccl rings and trees ok",
    ]
    assert found(reading, "version").what == "2.19.3+cuda12.2; the driver supports CUDA 12.2"
    assert found(reading, "version").data["versions"] == {"2.19.3+cuda12.2": [0, 1, 2, 3]}
    assert found(reading, "start").what == "all 4 ranks have joined on 2 nodes"
    assert found(reading, "start").data["machines"] == {"node0": [0, 1], "node1": [2, 3]}
    assert found(reading, "interface").what == "meets over eth0 (2 nodes); data between nodes over Socket"
    assert found(reading, "transports").what == "NET/Socket 0-3, 1-2; P2P 0-1, 2-3"
    assert {"from": 3, "to": 0, "transport": "NET/Socket"} in found(reading, "transports").data["pairs"]
    shape = found(reading, "rings and trees")
    assert shape.what.startswith(
        "2 rings, the first 0 → 1 → 2 → 3; 2 trees, rank 0 at the root of the first; 2 channels"
    )
    assert shape.data["parents"] == {"0": -1, "1": 0, "2": 1, "3": 2}


def test_logs_may_be_given_in_any_order_or_as_one(tmp_path: Path) -> None:
    logs = [rank_log(rank) for rank in range(4)]
    one = told(tmp_path, *logs)
    other = told(tmp_path, *logs[::-1])
    lines = [line for log in logs for line in log.splitlines(keepends=True)]
    # Lines of several ranks get mixed, those of one stay in order.
    shuffled = random.Random(3)
    queues = [log.splitlines(keepends=True) for log in logs]
    mixed = []
    while any(queues):
        mixed.append(shuffled.choice([queue for queue in queues if queue]).pop(0))
    assert sorted(mixed) == sorted(lines)
    together = told(tmp_path, "".join(mixed))
    expected = [finding.plain() for finding in one.findings]
    assert [finding.plain() for finding in other.findings] == expected
    assert [finding.plain() for finding in together.findings] == expected


def test_prefixes_of_launchers_are_seen_through(tmp_path: Path) -> None:
    plain = told(tmp_path, *(rank_log(rank) for rank in range(4)))
    for prefix in ("[1,0]<stdout>:", "(pid=909608) ", "[2025-07-21 19:05:29] ", "\x1b[36m", "worker-0: "):
        logs = ["".join(prefix + line for line in rank_log(rank).splitlines(keepends=True)) for rank in range(4)]
        reading = told(tmp_path, *logs)
        assert [finding.what for finding in reading.findings] == [finding.what for finding in plain.findings], prefix


def test_old_logs_name_the_group_in_the_end(tmp_path: Path) -> None:
    reading = told(tmp_path, *(rank_log(rank, old=True, version="2.7.8+cuda11.1") for rank in range(4)))
    assert found(reading, "start").status == "ok"
    assert found(reading, "transports").what == "NET/Socket 0-3, 1-2; P2P 0-1, 2-3"
    assert found(reading, "version").what.startswith("2.7.8+cuda11.1")


def test_smaller_groups_do_not_get_mixed_in(tmp_path: Path) -> None:
    logs = [
        rank_log(rank) + rank_log(rank // 2, 2, host=f"node{rank // 2}", comm=f"0xd{rank % 2}") for rank in range(4)
    ]
    reading = told(tmp_path, *logs)
    assert found(reading, "start").what == "all 4 ranks have joined on 2 nodes; 2 smaller groups besides"
    assert found(reading, "transports").what == "NET/Socket 0-3, 1-2; P2P 0-1, 2-3"


@pytest.mark.parametrize(
    ("via", "family"),
    [
        ("P2P/IPC/read", "P2P"),
        ("P2P/direct pointer", "P2P"),
        ("P2P/CUMEM", "P2P"),
        ("SHM/direct/direct", "SHM"),
        ("direct shared memory", "SHM"),
        ("NET/Socket/0", "NET/Socket"),
        ("NET/IB/0(1)/GDRDMA", "NET/IB"),
        ("NET/IBext_v8/3", "NET/IB"),
        ("NET/AWS Libfabric/0", "NET/AWS Libfabric"),
        ("NVLS", "NVLS"),
    ],
)
def test_families_of_transports(via: str, family: str) -> None:
    assert transport(via) == family


def test_who_is_missing_and_who_is_stuck(tmp_path: Path) -> None:
    reading = told(tmp_path, *(rank_log(rank) for rank in range(3)))
    assert found(reading, "start").status == "warning"
    assert "3 of 4 ranks have joined" in found(reading, "start").what
    assert "nothing was read of rank 3" in found(reading, "start").what
    reading = told(tmp_path, *(rank_log(rank, complete=rank != 2) for rank in range(4)))
    assert found(reading, "start").status == "error"
    assert found(reading, "start").what.startswith("rank 2 of 4 began to join the group and did not finish")


def test_versions_that_differ(tmp_path: Path) -> None:
    reading = told(tmp_path, *(rank_log(rank, version=f"2.{19 + rank // 3}.3+cuda12.2") for rank in range(4)))
    finding = found(reading, "version")
    assert finding.status == "error"
    assert finding.what.endswith("2.19.3+cuda12.2 on ranks 0-2; 2.20.3+cuda12.2 on rank 3")


def test_an_interface_that_leads_nowhere(tmp_path: Path) -> None:
    reading = told(tmp_path, *(rank_log(rank, interface="docker0" if rank > 1 else "eth0") for rank in range(4)))
    assert found(reading, "interface").status == "warning"
    assert "docker0 leads nowhere" in found(reading, "interface").what
    # On one node loopback will do.
    reading = told(tmp_path, *(rank_log(rank, interface="lo", host="node0") for rank in range(4)))
    assert found(reading, "interface").status == "ok"


def test_the_network_within_a_machine(tmp_path: Path) -> None:
    reading = told(tmp_path, *(rank_log(rank, host="node0") for rank in range(4)))
    finding = found(reading, "transports")
    assert finding.status == "warning"
    assert "0-3, 1-2 of one node talk over the network" in finding.what


def test_settings(tmp_path: Path) -> None:
    reading = told(tmp_path, *(rank_log(rank, settings=["NCCL_IB_HCA set to mlx5"]) for rank in range(4)))
    assert (found(reading, "settings").status, found(reading, "settings").what) == ("ok", "NCCL_IB_HCA=mlx5")
    off = ["NCCL_P2P_DISABLE set by environment to 1."]
    reading = told(tmp_path, *(rank_log(rank, settings=off) for rank in range(4)))
    assert found(reading, "settings").status == "warning"
    assert found(reading, "settings").fix == "Try without: unset NCCL_P2P_DISABLE"
    uneven = [f"NCCL_ALGO set by environment to {algorithm}" for algorithm in ("Ring", "Tree")]
    reading = told(tmp_path, *(rank_log(rank, settings=[uneven[rank % 2]]) for rank in range(4)))
    assert found(reading, "settings").what.startswith("NCCL_ALGO differs between ranks")


# ---------------------------------------------------------------- what went wrong


def test_the_cause_is_told_before_what_follows(tmp_path: Path) -> None:
    logs = [rank_log(rank, then=[FULL] if rank == 3 else [CLOSED, TRACE]) for rank in range(4)]
    reading = told(tmp_path, *logs)
    first = found(reading, "first error")
    assert first.data["id"] == "shm-full"
    assert first.data["ranks"] == [3]
    assert first.data["line"] == len(logs[3].splitlines())
    assert first.data["log"] == str(tmp_path / "log3.txt")
    assert "failed to extend /dev/shm" in first.data["evidence"]
    assert first.data["source"].startswith("https://")
    assert any("--shm-size" in remedy for remedy in first.data["remedies"])
    also = found(reading, "error")
    assert (also.data["id"], also.data["ranks"], also.data["count"]) == ("tcp-peer-closed", [0, 1, 2], 3)
    text = "\n".join(report.lines(reading, 100))
    assert f"First error: rank 3 on node1, {tmp_path}/log3.txt:{first.data['line']}\n  node1:1003:9 [1] misc" in text
    assert text.index("First error") < text.index("Also: ranks 0-2 (rank 0 here)")


def test_what_is_not_known_is_shown_and_not_guessed(tmp_path: Path) -> None:
    reading = told(tmp_path, rank_log(0, 1, then=[STRANGE, STRANGE]))
    finding = found(reading, "warning")
    assert finding.status == "warning"  # nothing shows that anything failed
    assert finding.data["evidence"] == "node0:1000:9 [0] graph/new.cc:7 NCCL WARN Flux capacitor 1000 is empty"
    assert finding.data["id"] is None
    assert finding.fix == ""
    assert "not guessed" in finding.why
    assert finding.data["count"] == 2
    reading = told(tmp_path, rank_log(0, 1, then=[STRANGE, TRACE]))
    assert found(reading, "first error").data["id"] is None


def test_an_unknown_one_after_what_follows_is_not_the_first(tmp_path: Path) -> None:
    reading = told(tmp_path, rank_log(0, 1, then=[CLOSED, STRANGE, TRACE]))
    assert found(reading, "first error").data["id"] == "tcp-peer-closed"
    reading = told(tmp_path, rank_log(0, 1, then=[STRANGE, CLOSED, TRACE]))
    assert found(reading, "first error").data["id"] is None


def test_a_failure_without_a_word(tmp_path: Path) -> None:
    reading = told(tmp_path, rank_log(0, 1, then=[TRACE]))
    assert "no warning says why" in found(reading, "first error").what


def test_times_decide_where_all_lines_have_them(tmp_path: Path) -> None:
    early, late = (f"[2025-07-21 19:05:{second}] {FULL}" for second in (10, 50))
    other = early.replace("misc/shmutils.cc:71", "bootstrap.cc:45").replace(
        "Error: failed to extend /dev/shm/nccl-a to 9 bytes", "Bootstrap : no socket interface found"
    )
    reading = told(tmp_path, rank_log(0, 2, then=[late]), rank_log(1, 2, then=[other]))
    assert found(reading, "first error").data["id"] == "tcp-no-interface"


def test_torchs_own_lines(tmp_path: Path) -> None:
    watchdog = (
        "[rank3]:[E321 02:07:08.40 ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.\n"
    )
    duplicate = (
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, invalid usage, NCCL version 2.20.5\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
        "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 10\n"
    )
    reading = told(tmp_path, watchdog, duplicate, names=("rank_3.err", "rank_1.err"))
    first = found(reading, "first error")
    assert (first.data["id"], first.data["ranks"], first.data["line"]) == ("duplicate-gpu", [1], 4)
    assert [f.data["id"] for f in reading.findings if f.check == "nccl error"] == ["watchdog-timeout", "result-usage"]
    assert found(reading, "version").what == "2.20.5"


def test_an_unknown_last_error_is_shown(tmp_path: Path) -> None:
    reading = told(tmp_path, "ncclSystemError: System call failed.\nLast error:\nThe moon is in the way\n")
    shown = [finding.data.get("evidence") for finding in reading.findings]
    assert "The moon is in the way" in shown


def test_a_message_behind_a_progress_bar(tmp_path: Path) -> None:
    bar = "".join(f"{n}%|███| {n}/100 [00:01<00:02]\r" for n in range(900))
    reading = told(tmp_path, bar + FULL.format(host="node0", pid=7, device=0) + "\n")
    first = found(reading, "first error")
    assert first.data["evidence"].startswith("node0:7:9 [0] misc/shmutils.cc")


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PROBLEMS", "UNKNOWN", "PAIRS", "COMMUNICATORS", "FACTS", "PROCESSES"):
        monkeypatch.setattr(log_parser, f"_MOST_{name}", 20)
    taking = LogParser(knowledge.load())
    for n in range(100):
        where = f"node{n}:{n}:{n} [0]"
        word = "".join(chr(97 + int(digit)) for digit in str(n))
        for line in (
            f"{where} NCCL INFO comm 0x1 rank 0 nranks 2 cudaDev 0 commId 0x{n:x} - Init START",
            f"{where} NCCL INFO Channel 00/0 : {n}[0] -> {n + 1}[1] via P2P/IPC",
            f"{where} NCCL INFO NCCL_X{n} set by environment to {n}",
            f"{where} a.cc:1 NCCL WARN strange {word} thing",
            FULL.format(host=f"node{n}", pid=n, device=0),
        ):
            taking.add("a.log", n, line.encode())
    story = taking.summarize()
    assert len(story.problems) == 20
    assert len(story.communicators) == 20
    assert sum(len(group.pairs) for group in story.communicators) <= 20
    assert len(story.settings) == 20
    assert story.processes == 20
    assert story.dropped > 100
    assert any("more facts and problems were read" in finding.what for finding in findings(story))


# ---------------------------------------------------------------- whatever is in a log

NOISE = st.one_of(
    st.sampled_from(
        [
            *(line for entry in knowledge.load().entries for line in entry.examples),
            *rank_log(1).splitlines(),
            *rank_log(0, old=True).splitlines(),
            "Last error:",
            "x:1:1 [0] NCCL INFO comm 0xff rank 99999999999999999999 nranks 99999999999999999999 - Init START",
            "x:99999999999999999999999:1 [0] NCCL INFO Trees [0] -1->0->-1 [99999999999999999999] 1->0->1",
            "x:1:1 [0] NCCL INFO Channel 99999999999999999999/0 : 1[0] -> 99999999999999999999[1] via ",
        ]
    ),
    st.text(max_size=200),
    st.binary(max_size=200).map(lambda data: data.decode("latin-1")),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(NOISE, max_size=60), st.randoms(use_true_random=False))
def test_nothing_in_a_log_can_break_the_reading(lines: list[str], chance: random.Random) -> None:
    taking = LogParser(knowledge.load())
    for number, line in enumerate(lines):
        raw = line.encode("utf-8", "surrogatepass")
        if chance.random() < 0.3 and raw:  # cut off, doubled, or with a hole in it
            at = chance.randrange(len(raw))
            raw = chance.choice([raw[:at], raw[at:] + raw, raw[:at] + b"\0\xff" + raw[at:]])
        taking.add("a.log", number, raw)
    story = taking.summarize()
    reading = Reading(logs=("a.log",), summary=story, findings=findings(story))
    json.dumps([finding.plain() for finding in reading.findings])
    assert list(report.lines(reading, 80))


# ---------------------------------------------------------------- the command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        (tmp_path / f"rank_{rank}.err").write_text(rank_log(rank, then=[FULL] if rank == 2 else []))
    assert doctor.run(["nccl", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "First error: rank 2 on node1" in out
    assert "do:    Make /dev/shm larger." in out
    assert doctor.run(["nccl", "--json", *map(str, sorted(tmp_path.iterdir()))]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert plain["story"] == {
        "lines": sum(len(rank_log(rank).splitlines()) for rank in range(4)) + 1,
        "processes": 4,
        "ranks": 4,
        "groups": [{"ranks": 4, "joined": "0-3"}],
        "failed": False,
    }
    assert len(plain["logs"]) == 4
    (tmp_path / "rank_2.err").write_text(rank_log(2))
    assert doctor.run(["nccl", str(tmp_path)]) == 0


def test_bad_command_lines() -> None:
    for words, said in (
        ([], "No log was named"),
        (["a.log", "--run", "train.py"], "Choose one"),
        (["--run"], "needs a script"),
        (["--run", "--"], "needs a script"),
    ):
        with pytest.raises(ConfigError, match=said):
            doctor.run(["nccl", *words])


def test_words_after_run_are_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(doctor_nccl, "run", lambda arguments: given.append(arguments) or 0)
    words = ["--num_processes", "2", "--", "train.py", "--json", "--run"]
    assert doctor.run(["nccl", "--json", "--run", *words]) == 0
    assert (given[0].json, given[0].run, given[0].job) == (True, True, words)
