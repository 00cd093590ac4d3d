"""Reading logs: any size in constant memory, and a word for what cannot be read."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lockstep.doctor.nccl import reader
from lockstep.doctor.nccl.read import read
from lockstep.doctor.nccl.reader import Log, UnreadableLog, logs_of
from tests.ranks import in_soak


def written(folder: Path, data: bytes, name: str = "a.log") -> Log:
    path = folder / name
    path.write_bytes(data)
    return Log(name=name, path=path)


def test_lines_and_their_numbers(tmp_path: Path) -> None:
    assert list(written(tmp_path, b"one\ntwo\r\n\nfour").lines()) == [(1, b"one"), (2, b"two"), (3, b""), (4, b"four")]
    assert list(written(tmp_path, b"").lines()) == []


def test_a_long_line_comes_in_pieces_of_one_number(tmp_path: Path) -> None:
    long = b"x" * (reader.LIMIT * 2 + 5)
    found = list(written(tmp_path, b"a\n" + long + b"\nb\n").lines())
    assert [number for number, _ in found] == [1, 2, 2, 2, 3]
    assert b"".join(text for number, text in found if number == 2) == long


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=30), st.integers(1, 40), st.integers(1, 90))
def test_the_same_lines_as_split_gives(lines: list[bytes], limit: int, block: int) -> None:
    clean = [bytes(byte for byte in line if 32 <= byte < 127) for line in lines]
    data = b"\n".join(clean)
    assume(not data.startswith(b"BZh"))  # is refused as compressed
    before = reader.LIMIT, reader._BLOCK
    reader.LIMIT, reader._BLOCK = limit, block
    try:
        found = list(reader._lines(io.BytesIO(data), "x", None, ()))
    finally:
        reader.LIMIT, reader._BLOCK = before
    joined: dict[int, bytes] = {}
    for number, text in found:
        assert len(text) <= limit
        joined[number] = joined.get(number, b"") + text
    expected = data.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert [joined[number] for number in sorted(joined)] == expected


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (random.Random(1).randbytes(5000), "binary file"),
        (b"\x7fELF\x02\x01\x01" + bytes(4000), "binary file"),
        (bytes(4000) + b"\nnode1:1:1 [0] NCCL INFO x\n", "binary file"),
        (gzip.compress(b"node1:1:1 [0] NCCL INFO x\n" * 100, mtime=0), "zcat"),
        ("node1:1:1 [0] NCCL INFO x\n".encode("utf-16"), "iconv -f utf-16"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    log = written(tmp_path, data)
    with pytest.raises(UnreadableLog, match=said):
        list(log.lines())
    (finding,) = read([str(log.path)]).findings
    assert (finding.check, finding.status) == ("log", "error")
    assert said in finding.what


def test_colours_bars_and_accents_are_text(tmp_path: Path) -> None:
    text = "\x1b[31mé\x1b[0m 10%|██\r 20%|████\r\n".encode() * 50
    assert len(list(written(tmp_path, text).lines())) == 50


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (finding,) = read([str(tmp_path / "none.log")]).findings
    assert finding.status == "error"
    assert "No such file" in finding.what
    (finding,) = read([str(tmp_path)]).findings
    assert "without files" in finding.what


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    log = written(tmp_path, b"x\n")
    assert log.path is not None
    log.path.chmod(0)
    # Root may read everything but this: nothing is mapped where a process's memory begins.
    path, why = ("/proc/self/mem", "Input/output error") if os.geteuid() == 0 else (str(log.path), "Permission denied")
    (finding,) = read([path]).findings
    assert finding.status == "error"
    assert why in finding.what


def test_an_empty_log_and_one_without_nccl(tmp_path: Path) -> None:
    (finding,) = read([str(written(tmp_path, b"").path)]).findings
    assert (finding.status, "nothing in it" in finding.what) == ("warning", True)
    (finding,) = read([str(written(tmp_path, b"epoch 1\n").path)]).findings
    assert finding.status == "warning"
    assert "NCCL_DEBUG=INFO" in finding.fix


def test_a_folder_means_its_logs(tmp_path: Path) -> None:
    (tmp_path / "logs" / "attempt_1").mkdir(parents=True)
    (tmp_path / "nccl").mkdir()
    for name in ("logs/rank_0.out", "logs/attempt_1/rank_1.err", "nccl/node1.77.log", "config.json"):
        (tmp_path / name).write_text("x\n")
    found = {str(log.path.relative_to(tmp_path)) for log in logs_of(str(tmp_path)) if log.path is not None}
    assert found == {"logs/rank_0.out", "logs/attempt_1/rank_1.err", "nccl/node1.77.log"}
    plain = tmp_path / "nccl"
    (plain / "other.txt").write_text("x\n")
    assert [log.path.name for log in logs_of(str(plain)) if log.path is not None] == ["node1.77.log", "other.txt"]


def test_what_is_no_log_in_a_folder_is_passed_over_and_said(tmp_path: Path) -> None:
    written(tmp_path, random.Random(1).randbytes(5000), "weights.bin")
    skipped, warning = read([str(tmp_path)]).findings
    assert (skipped.status, warning.status) == ("skipped", "warning")
    assert "no line of NCCL's" in warning.what
    written(tmp_path, b"node1:1:1 [0] NCCL INFO NCCL version 2.19.3+cuda12.2\n")
    assert [finding.status for finding in read([str(tmp_path)]).findings] == ["skipped", "ok"]


# A child of its own, so that its largest size is that of the reading alone.
CHILD = """
import json, resource, sys
from lockstep.doctor.nccl.read import read

read([])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
reading = read(["-"])
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"grown": after - before, "findings": [f.what for f in reading.findings]}))
"""


@pytest.mark.parametrize("size", [50_000_000, *in_soak(200_000_000)])
def test_a_large_log_is_read_in_constant_memory(size: int) -> None:
    """Through a pipe: ordinary lines, lines without an end, and ever new warnings that nobody knows."""
    plain = b"".join(b"node1:77:78 [0] NCCL INFO AllReduce: opCount %x sendbuff 0x7f00\n" % n for n in range(2000))
    noise = b"x" * (1 << 20) + b"\n" + b"epoch 1 loss 0.5\n" * 20_000
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    sent = 0
    for round_ in range(1000):
        fresh = b"".join(
            b"node%d:%d:78 [0] a.cc:1 NCCL WARN strange %s thing\n" % (round_, n, bytes([97 + n % 26]) * (n + 1))
            for n in range(10)
        )
        data = fresh + (plain if round_ % 8 == 0 else noise)
        child.stdin.write(data)
        sent += len(data)
        if sent > size:
            break
    child.stdin.write(
        b"node1:77:78 [0] misc/shmutils.cc:71 NCCL WARN Error: failed to extend /dev/shm/nccl-a to 9 bytes\n"
    )
    out, _ = child.communicate(timeout=120)
    told = json.loads(out)
    assert sent > size
    assert told["grown"] < 32 * 1024, f"grew by {told['grown']} KiB"  # with room for buffers
    assert any("failed to extend /dev/shm" in what for what in told["findings"])
