import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.traces import trace as writing
from lockstep.traces.read_trace import open_run
from lockstep.traces.trace import encode, open_trace
from tests.unit.numerics.making import FRAMES, call, changed, plain, small_run, stat, write


def read(folder, rank=0):
    return list(open_run(folder).traces[rank])


@given(frames=FRAMES)
@settings(max_examples=60, deadline=None)
def test_what_was_written_is_read_back(frames):
    with tempfile.TemporaryDirectory() as folder:
        write(folder, frames)
        trace = open_run(folder).traces[0]
        assert plain(trace) == plain(frames)
        assert trace.complete
        assert trace.notes == []


@given(frames=FRAMES, cut=st.integers(0, 1 << 20))
@settings(max_examples=80, deadline=None)
def test_a_file_cut_at_any_byte_is_read_up_to_the_last_whole_line(frames, cut):
    with tempfile.TemporaryDirectory() as folder:
        write(folder, frames)
        file = Path(folder, "rank_0.jsonl")
        whole = file.read_bytes()
        cut %= len(whole) + 1
        file.write_bytes(whole[:cut])
        ends, position = [], whole.index(b"\n")
        for frame in frames:
            position += len(encode(frame))
            ends.append(position)  # where the line's last brace is; the break behind it may be gone
        kept = [frame for frame, end in zip(frames, ends, strict=True) if end <= cut]
        trace = open_run(folder).traces[0]
        assert plain(trace) == plain(kept)
        assert trace.complete == (cut >= len(whole) - 1)
        assert len(trace.notes) == (not trace.complete)


def test_a_process_that_is_killed_leaves_what_was_flushed(tmp_path):
    code = (
        "import os, signal, sys; from lockstep.traces.trace import open_trace\n"
        "from tests.unit.numerics.making import small_run\n"
        "writer = open_trace(sys.argv[1], rank=3)\n"
        "frames = small_run()\n"
        "[writer.add(frame) for frame in frames[:8]]; writer.flush()\n"
        "[writer.add(frame) for frame in frames[8:]]; os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=_environ(), timeout=60)
    assert killed.returncode == -signal.SIGKILL
    trace = open_run(tmp_path).traces[3]
    assert list(trace) == small_run()[:8]
    assert "was not closed; it ends after 8 frames" in trace.notes[0]


def test_a_process_that_ends_by_itself_closes_its_trace(tmp_path):
    code = (
        "import sys; from lockstep.traces.trace import open_trace\n"
        "from tests.unit.numerics.making import small_run\n"
        "writer = open_trace(sys.argv[1], rank=0)\n"
        "[writer.add(frame) for frame in small_run()]; raise ValueError('the run failed')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=_environ(), timeout=60, stderr=subprocess.DEVNULL)
    trace = open_run(tmp_path).traces[0]
    assert list(trace) == small_run()
    assert trace.complete


def _environ():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_only_the_chosen_batches_are_kept(tmp_path):
    frames = small_run(batches=7)
    write(tmp_path / "every", frames, every=3)
    assert {frame.batch for frame in read(tmp_path / "every")} == {0, 3, 6}
    write(tmp_path / "some", frames, batches=[1, 5])
    assert {frame.batch for frame in read(tmp_path / "some")} == {1, 5}
    writer = open_trace(tmp_path / "asked", rank=0, batches=[2])
    assert [batch for batch in range(5) if writer.wants(batch)] == [2]
    writer.close()
    assert not writer.wants(2)
    with pytest.raises(ConfigError, match="every=0 must be 1 or more"):
        open_trace(tmp_path, rank=0, every=0)


def test_each_line_is_json_that_any_reader_takes(tmp_path):
    frame = call(0, "</script>\n\ud800", stat(high=float("inf"), infs=True, low=float("nan"), nans=True))
    write(tmp_path, [frame], world_size=2)
    lines = (tmp_path / "rank_0.jsonl").read_text(encoding="ascii").splitlines()
    header, told, end = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert header["world_size"] == 2
    assert told["stats"][0]["abs_max"] == "inf"
    assert end == {"end": True, "frames": 1}
    assert plain(read(tmp_path)) == plain([frame])


def test_threads_add_whole_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_BUFFER_BYTES", 300)
    writer = open_trace(tmp_path, rank=0)
    frames = small_run(batches=1, modules=40)
    threads = [threading.Thread(target=lambda: [writer.add(frame) for frame in frames]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert sorted(plain(read(tmp_path))) == sorted(plain(frames * 4))


def test_a_forked_process_does_not_write_the_buffer_again(tmp_path):
    writer = open_trace(tmp_path, rank=0)
    frames = small_run()
    writer.add(frames[0])
    child = os.fork()
    if child == 0:
        writer.add(frames[1])
        writer.close()
        os._exit(0)
    os.waitpid(child, 0)
    writer.add(frames[2])
    writer.close()
    assert read(tmp_path) == [frames[0], frames[2]]


def test_an_older_trace_is_moved_aside(tmp_path):
    for batches in (1, 2, 3):
        write(tmp_path, small_run(batches))
    assert sorted(os.listdir(tmp_path)) == ["earlier_1_rank_0.jsonl", "earlier_2_rank_0.jsonl", "rank_0.jsonl"]
    assert read(tmp_path) == small_run(3)
    (trace,) = open_run(tmp_path / "earlier_1_rank_0.jsonl").traces.values()
    assert list(trace) == small_run(1)


def test_a_disk_that_is_full_ends_the_trace_and_not_the_run(tmp_path):
    writer = open_trace(tmp_path, rank=0)
    os.dup2(full := os.open("/dev/full", os.O_WRONLY), writer._out.fileno())
    os.close(full)
    writer.add(small_run()[0])
    with pytest.warns(RuntimeWarning, match="No space left on device. The run goes on without it"):
        writer.flush()
    writer.add(small_run()[1])
    writer.close()
    assert not writer.wants(0)


def test_a_place_that_cannot_be_written_is_said_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"rank 0 cannot be written to .*file: .*Name a folder"):
        open_trace(tmp_path / "file", rank=0)


# ---------------------------------------------------------------- what is no trace


def test_places_without_a_trace_say_what_is_there_instead(tmp_path):
    with pytest.raises(ConfigError, match="it does not exist"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"it is empty.*lockstep numerics record"):
        open_run(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=r"no rank_N.jsonl.*but notes.txt"):
        open_run(tmp_path)
    write(tmp_path / "monday", [])
    with pytest.raises(ConfigError, match="in its folders monday"):
        open_run(tmp_path)
    (tmp_path / "run" / "boxes").mkdir(parents=True)
    with pytest.raises(ConfigError, match="whose numbers were not recorded"):
        open_run(tmp_path / "run")
    write(tmp_path / "run" / "numerics", small_run(1))
    assert read(tmp_path / "run") == small_run(1)


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 40, b"[]\n", b'{"a": 1}\n', b"\n"])
def test_what_is_no_trace_is_refused(tmp_path, content):
    (tmp_path / "rank_0.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match="is not a trace"):
        open_run(tmp_path)


def test_a_form_of_another_release_is_refused(tmp_path):
    (tmp_path / "rank_0.jsonl").write_text('{"lockstep_trace": 2}\n')
    with pytest.raises(ConfigError, match="has the form 2"):
        open_run(tmp_path)


def test_lines_that_are_no_frames_are_passed_over_and_counted(tmp_path):
    frames = small_run(1)
    write(tmp_path, frames)
    file = tmp_path / "rank_0.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    table = json.loads(lines[1])
    wrong = [
        b"\x00\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b"17\n",
        *(
            json.dumps({**table, name: value}).encode() + b"\n"
            for name, value in [("batch", "0"), ("batch", True), ("module", None), ("stats", [3]), ("stats", {})]
        ),
        *(
            json.dumps({**table, "stats": [{**table["stats"][0], name: value}]}).encode() + b"\n"
            for name, value in [("shape", ["x"]), ("abs_max", []), ("abs_max", "much"), ("abs_min", 10**400)]
        ),
    ]
    later = json.dumps({**table, "new": {"field": 1}, "stats": [{**one, "new": 2} for one in table["stats"]]}).encode()
    file.write_bytes(b"".join([lines[0], *wrong, later + b"\n", *lines[2:]]))
    trace = open_run(tmp_path).traces[0]
    assert list(trace) == frames
    assert trace.notes == [f"{file}: {len(wrong)} lines could not be read and were passed over, the first is line 2."]


def test_batches_that_go_backwards_are_refused(tmp_path):
    write(tmp_path, small_run(2)[::-1])
    with pytest.raises(ConfigError, match="batch 0 comes after batch 1"):
        list(open_run(tmp_path).traces[0].batches())


def test_ranks_without_a_trace_are_named(tmp_path):
    write(tmp_path, small_run(1), rank=1, world_size=4)
    run = open_run(tmp_path)
    assert run.world_size == 4
    assert "no trace of ranks 0, 2-3, of 4 in all" in run.notes[0]


def test_a_large_trace_is_read_in_little_memory(tmp_path):
    one = b"".join(encode(frame) for frame in small_run(1, modules=50))
    with open(tmp_path / "rank_0.jsonl", "wb") as file:
        file.write(b'{"lockstep_trace":1}\n')
        for batch in range(600):
            file.write(one.replace(b'"batch":0', b'"batch":%d' % batch))
    size = (tmp_path / "rank_0.jsonl").stat().st_size
    code = (
        "import resource, sys; from lockstep.traces.read_trace import open_run\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(sum(1 for _ in open_run(sys.argv[1]).traces[0].batches()))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=_environ(), timeout=120, capture_output=True, text=True
    )
    batches, grown = told.stdout.split()
    assert batches == "600"
    assert int(grown) * 1024 < 3 << 20 < size / 3


# ---------------------------------------------------------------- Parquet


@given(frames=FRAMES)
@settings(max_examples=25, deadline=None)
def test_parquet_is_read_back_too(frames):
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    with tempfile.TemporaryDirectory() as folder:
        write(folder, frames, format="parquet", world_size=2)
        assert os.listdir(folder) == ["rank_0.parquet"]
        run = open_run(folder)
        assert plain(run.traces[0]) == plain(frames)
        assert run.traces[0].complete
        assert run.world_size == 2


def test_parquet_has_a_row_per_tensor(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    frames = changed(small_run(), 5, 1, nans=True)
    write(tmp_path, frames, format="parquet")
    table = parquet.read_table(tmp_path / "rank_0.parquet")
    assert table.num_rows == 3 * len(frames)
    (row,) = [row for row in table.to_pylist() if row["nans"]]
    assert (row["batch"], row["module"], row["tensor"]) == (1, "layer.1", "input[0]")


def test_parquet_that_is_damaged_or_foreign_is_refused(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    from pyarrow import parquet

    file = tmp_path / "rank_0.parquet"
    file.write_bytes(b"PAR1 garbage")
    with pytest.raises(ConfigError, match="Parquet cannot be read from it"):
        open_run(tmp_path)
    parquet.write_table(arrow.table({"a": [1]}), file)
    with pytest.raises(ConfigError, match="not written by lockstep"):
        open_run(tmp_path)


def test_without_pyarrow_parquet_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="needs pyarrow, which is not installed"):
        open_trace(tmp_path / "trace", rank=0, format="parquet")
    assert not (tmp_path / "trace").exists()
    with pytest.raises(ConfigError, match="format='csv' is unknown"):
        open_trace(tmp_path, rank=0, format="csv")
