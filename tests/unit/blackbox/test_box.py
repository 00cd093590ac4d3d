"""What a rank writes into its box is what a reader finds there."""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.blackbox import layout
from lockstep.blackbox.box import Box, NoBox, open_box
from lockstep.blackbox.peers import box_path
from lockstep.blackbox.read import read_box
from lockstep.blackbox.snapshot import Raw, Snapshot
from tests.unit.blackbox import writers


def look(box: Box, history: int = 64) -> Snapshot:
    snapshot = read_box(box.path, history)
    assert snapshot is not None
    return snapshot


@contextmanager
def collective(box: Box, name: str) -> Iterator[int]:
    number = box.enter(name, depth=3)
    try:
        yield number
    finally:
        box.leave(number)


def here() -> str:
    frame: FrameType | None = sys._getframe(1)
    assert frame is not None
    return f"{__file__}:{frame.f_lineno}"


def test_a_new_box_says_who_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "boxes" / "rank_3.box"
    Box.create(path, rank=3, world_size=8, local_rank=1, node=1, host="node-1", pid=os.getpid(), attempt="2")
    snapshot = read_box(path)
    assert snapshot is not None
    assert (snapshot.rank, snapshot.world_size, snapshot.local_rank, snapshot.node) == (3, 8, 1, 1)
    assert (snapshot.host, snapshot.pid) == ("node-1", os.getpid())
    assert (snapshot.entered, snapshot.left, snapshot.op, snapshot.phase, snapshot.closed) == (0, 0, None, "", "")
    assert (snapshot.history, snapshot.raw, snapshot.pace, snapshot.recovering) == ((), None, (), False)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["rank_3.box"]


def test_a_collective_is_entered_and_left(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    number, line = box.enter("gather", "float32 (2, 3)"), here()
    inside = look(box)
    assert number == 1
    assert inside.op is not None
    assert (inside.op.seq, inside.op.name, inside.op.signature) == (1, "gather", "float32 (2, 3)")
    assert inside.op.site == line
    assert 0 < inside.op.since <= inside.now
    assert (inside.entered, inside.left, inside.history) == (1, 0, (inside.op,))
    box.leave(number)
    outside = look(box)
    assert (outside.entered, outside.left, outside.op, outside.history) == (1, 1, None, (inside.op,))


def test_each_call_has_its_own_line_also_when_repeated(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    for _ in range(3):
        for name in ("a", "b"):
            box.leave(box.enter(name))
        box.leave(box.enter("a"))
    sites = [op.site for op in look(box).history]
    assert len(set(sites)) == 2
    assert [sites[0], sites[1]] == [sites[3], sites[4]]
    assert sites[0] == sites[1] != sites[2]


def test_the_line_is_the_users_not_the_packages(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    names: dict[str, object] = {}
    source = "def gather(box):\n    box.leave(enter(box))\ndef enter(box):\n    return box.enter('gather')\n"
    exec(compile(source, str(Path(layout.__file__).parents[1] / "comm" / "anything.py"), "exec"), names)
    gather = names["gather"]
    assert callable(gather)
    for _ in range(2):  # the first learns, the second knows
        gather(box)
        line = here()
        op = look(box).history[-1]
        assert op.site == f"{__file__}:{int(line.rpartition(':')[2]) - 1}"


def test_what_is_inside_a_collective_is_a_part_of_it(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    outer = box.enter("gather_for_metrics")
    inner = box.enter("gather")
    innermost = box.enter("reduce")
    assert (outer, inner, innermost) == (1, 0, 0)
    box.leave(innermost)
    box.leave(inner)
    assert (look(box).entered, look(box).left) == (1, 0)
    box.leave(outer)
    assert (look(box).entered, look(box).left) == (1, 1)
    assert box.enter("barrier") == 2


def test_exceptions_leave_what_they_pass(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    with pytest.raises(KeyError), collective(box, "outer"), collective(box, "inner"):
        raise KeyError
    assert (look(box).entered, look(box).left) == (1, 1)
    # Even when a part was not left: the whole is.
    with collective(box, "outer"):
        box.enter("never left")
    assert (look(box).entered, look(box).left) == (2, 2)
    with collective(box, "after") as number:
        assert number == 3
    assert look(box).left == 3


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.booleans()), max_size=30))
def test_nesting_is_balanced_whatever_is_raised(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, int, bool]]
) -> None:
    box = writers.make(tmp_path_factory.mktemp("boxes"))

    def nest(depth: int, raising: int) -> None:
        with collective(box, f"depth {depth}"):
            if depth == raising:
                raise KeyError
            if depth:
                nest(depth - 1, raising)

    for count, (depth, raising, in_new_generation) in enumerate(shapes, 1):
        if in_new_generation:
            box.generation(count)
        before = look(box)
        try:
            nest(depth, raising)
        except KeyError:
            assert raising <= depth
        after = look(box)
        assert (after.entered, after.left) == (before.entered + 1, before.left + 1)
        assert after.history[-1].name == f"depth {depth}"
        assert after.op is None


def test_a_refused_collective_is_marked(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    box.leave(box.enter("gather"))
    box.leave(box.enter("reduce"), refused=True)
    assert [(op.name, op.refused) for op in look(box).history] == [("gather", False), ("reduce", True)]


def test_another_thread_is_not_mixed_in(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    numbers: list[int] = []

    def other() -> None:
        number = box.enter("gather")
        numbers.append(number)
        box.leave(number)

    for inside in (False, True):
        mine = box.enter("backward")
        if not inside:
            box.leave(mine)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(timeout=20)
        assert look(box).left == mine - inside
        box.leave(mine)
    assert numbers == [-1, -1]
    assert [op.name for op in look(box).history] == ["backward", "backward"]


def test_numbers_start_anew_with_a_generation(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    for _ in range(5):
        box.leave(box.enter("gather"))
    old = box.enter("backward")
    box.generation(3)
    fresh = look(box)
    assert (fresh.generation, fresh.entered, fresh.left, fresh.op, fresh.history) == (3, 0, 0, None, ())
    box.leave(old)  # what was left behind unwinds only now
    assert (look(box).entered, look(box).left) == (0, 0)
    assert box.enter("barrier") == 1
    assert (look(box).generation, look(box).entered, look(box).left) == (3, 1, 0)
    assert [op.name for op in look(box).history] == ["barrier"]


def test_the_ring_keeps_the_latest(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    many = 3 * layout.EVENT_SLOTS + 5
    for number in range(1, many + 1):
        box.leave(box.enter(f"op {number % 3}", f"signature {number % 7}"))
    assert [op.seq for op in look(box).history] == list(range(many - 63, many + 1))
    past = look(box, history=layout.EVENT_SLOTS).history
    assert [op.seq for op in past] == list(range(many - layout.EVENT_SLOTS + 1, many + 1))
    assert all((op.name, op.signature) == (f"op {op.seq % 3}", f"signature {op.seq % 7}") for op in past)


def test_texts_never_run_out(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    for number in range(1, 1001):
        entered = box.enter("gather", f"shape {number}")
        op = look(box).op
        assert op is not None
        assert (op.name, op.signature) == ("gather", f"shape {number}")
        box.leave(entered)
    assert [op.signature for op in look(box).history] == [f"shape {number}" for number in range(937, 1001)]
    for number in range(1, 1001):  # more names than there is room for, from as many lines
        names: dict[str, object] = {"box": box}
        exec(compile(f"number = box.enter('name {number}')", f"file_{number}.py", "exec"), names)
        op = look(box).op
        assert op is not None
        assert (op.name, op.site) == (f"name {number}", f"file_{number}.py:1")
        assert isinstance(names["number"], int)
        box.leave(names["number"])
    # A name that is lost ends the history; none is wrong.
    past = look(box, history=layout.EVENT_SLOTS).history
    assert [op.name for op in past] == [f"name {number}" for number in range(1000 - len(past) + 1, 1001)]
    assert len(past) == layout.NAMES.slots


def test_a_text_that_is_known_again_after_it_lost_its_place(tmp_path: Path) -> None:
    box = writers.make(tmp_path)

    def enter(signature: str) -> str | None:
        number = box.enter("gather", signature)
        op = look(box).op
        box.leave(number)
        return op.signature if op else None

    for _ in range(3):
        assert enter("always") == "always"
        for number in range(layout.SIGNATURES.slots):
            enter(f"shape {number}")


def test_long_texts_are_cut_and_still_tell_apart(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    long = "float32 (2, 3), é" * 100
    for signature in (long + "a", long + "b", long + "a"):
        box.leave(box.enter("gather" * 50, signature))
    first, second, third = look(box).history
    assert first.signature == third.signature != second.signature
    assert first.signature.startswith("float32 (2, 3), é")
    assert len(first.signature) <= 340
    assert first.name == second.name
    exec(compile("box.enter('gather')", "/folder" * 100 + "/train.py", "exec"), {"box": box})
    op = look(box).op
    assert op is not None
    assert op.site.startswith("…")
    assert op.site.endswith("/folder/train.py:1")


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=400), st.text(max_size=60))
def test_any_text_may_be_written(tmp_path_factory: pytest.TempPathFactory, signature: str, name: str) -> None:
    box = writers.make(tmp_path_factory.getbasetemp())
    box.enter(name, signature)
    op = look(box).op
    assert op is not None
    if len(signature.encode(errors="replace")) <= layout.SIGNATURES.room // 2:
        assert op.signature == signature
    if len(name.encode(errors="replace")) <= layout.NAMES.room // 2:
        assert op.name == name


def test_signatures_that_are_equal_as_keys_are_equal_as_texts(tmp_path: Path) -> None:
    import torch

    a, b = writers.make(tmp_path, 0), writers.make(tmp_path, 1)
    a.leave(a.enter("gather", (torch.Size([2, 3]), torch.float32, True)))
    a.enter("gather", ((2, 3), torch.float32, 1))
    b.enter("gather", ((2.0, 3), torch.float32, 1))
    ops = [look(a).op, look(b).op]
    assert [op.signature for op in ops if op] == ["[2, 3], float32, 1"] * 2


def test_a_signature_that_is_no_key_is_recorded_all_the_same(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    for _ in range(2):
        box.leave(box.enter("gather", ["float32", [2, 3]]))  # type: ignore[arg-type]
    assert [op.signature for op in look(box).history] == ["float32, [2, 3]"] * 2


def test_a_depth_beyond_the_stack_gives_no_line(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    box.enter("gather", depth=10_000)
    op = look(box).op
    assert op is not None
    assert (op.name, op.site) == ("gather", "")


def test_phases_steps_and_recovery(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    for number in range(10):
        box.phase(f"phase {number % 3}")
    assert (look(box).phase, look(box).phase_site) == ("phase 0", "")
    box.phase("data", site=True)
    line = int(here().rpartition(":")[2]) - 1
    seen = look(box)
    assert (seen.phase, seen.phase_site) == ("data", f"{__file__}:{line}")
    assert 0 < seen.phase_since <= seen.now
    box.phase("")
    box.step(12)
    box.recovering(True)
    seen = look(box)
    assert (seen.phase, seen.phase_site, seen.step, seen.recovering) == ("", "", 12, True)
    box.recovering(False)
    assert not look(box).recovering


def test_the_latest_paces(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    box.pace(1, 2, 3, 4, 5, 6)
    assert look(box).pace == ((1.0, 2.0, 3.0, 4.0, 5.0, 6.0),)
    for number in range(200):
        box.pace(number, 0, 0.5, number, 0.25, 0)
    # The oldest place is the one that is written next, so it is not read.
    assert look(box).pace == tuple((float(n), 0.0, 0.5, float(n), 0.25, 0.0) for n in range(137, 200))


def test_torchs_own_collective(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    raw = Raw(name="all_reduce", number=7, site="train.py:3", since=1.5, shapes="[[2, 3]]", group="1")
    for value in (raw, Raw(name="barrier"), None, raw):
        box.raw(value)
        assert look(box).raw == value
    box.raw(Raw(name="x" * 5000, site="y" * 5000, shapes="z" * 5000))
    cut = look(box).raw
    assert cut is not None
    assert {*cut.name, *cut.site, *cut.shapes} == set("xyz")
    before = look(box).now
    box.beat()
    assert before <= look(box).beat <= look(box).now


@pytest.mark.parametrize(("how", "words"), [("finished", ""), ("failed", "ValueError: ü" * 100)])
def test_the_first_closing_counts_and_nothing_is_written_after_it(tmp_path: Path, how: str, words: str) -> None:
    box = writers.make(tmp_path)
    box.leave(box.enter("gather"))
    box.close(how, words)
    box.close("failed", "another")
    assert box.enter("barrier") == 2
    box.beat()
    box.raw(None)
    box.phase("data")
    seen = look(box)
    assert (seen.closed, seen.entered, seen.phase, seen.beat) == (how, 1, "", 0.0)
    assert words.startswith(seen.words.rstrip("\\xc3�"))
    assert bool(seen.words) == bool(words)


def test_a_forked_child_does_not_write_into_its_parents_box(tmp_path: Path) -> None:
    box = writers.make(tmp_path)
    box.enter("backward")
    child = os.fork()
    if not child:
        box.enter("gather")
        box.phase("data")
        box.close("finished")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    seen = look(box)
    assert (seen.entered, seen.phase, seen.closed) == (1, "", "")


def test_a_later_attempt_replaces_the_box(tmp_path: Path) -> None:
    old = writers.make(tmp_path, attempt="0")
    old.enter("gather")
    new = writers.make(tmp_path, attempt="1")
    old.enter("barrier")
    assert look(new).entered == 0


def test_where_no_box_can_be_made_there_is_one_that_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    (tmp_path / "file").touch()
    for path in (None, tmp_path / "rank_0.box", tmp_path / "file" / "rank_0.box"):
        box = open_box(path, rank=0, world_size=1, local_rank=0, node=0, host="here", pid=os.getpid())
        assert type(box) is NoBox
        assert box.reason == "there is no run directory" if path is None else str(path) in box.reason
        assert box.enter("gather", "float32") == 0
        box.leave(0)
        box.phase("data")
        box.step(1)
        box.recovering(True)
        box.generation(1)
        box.pace(1, 1, 1, 1, 1, 1)
        box.raw(None)
        box.beat()
        box.close("finished")
    assert os.listdir(tmp_path) == ["file"]
    monkeypatch.undo()
    made = open_box(box_path(tmp_path, 0), rank=0, world_size=1, local_rank=0, node=0, host="here", pid=os.getpid())
    assert isinstance(made, Box)


def test_a_box_has_what_no_box_has() -> None:
    public = {name for name in vars(NoBox) if not name.startswith("_")} - {"reason"}
    assert public == {name for name in vars(Box) if not name.startswith("_")} - {"create", "path"}


def test_a_digest_tells_whether_the_latest_collectives_were_the_same(tmp_path: Path) -> None:
    boxes = [writers.make(tmp_path, rank) for rank in range(2)]

    def enter(box: Box, name: str, signature: str) -> None:
        box.leave(box.enter(name, signature))

    for number in range(300):
        for box in boxes:
            enter(box, "gather", f"[{number % 7}], float32")
        assert boxes[0].digest() == boxes[1].digest()
    enter(boxes[0], "gather", "[2], float32")
    assert boxes[0].digest() != boxes[1].digest()
    enter(boxes[1], "gather", "[3], float32")
    assert boxes[0].digest() != boxes[1].digest()
    for box in boxes:
        for _ in range(199):
            enter(box, "reduce", "")
    assert boxes[0].digest() != boxes[1].digest()
    for box in boxes:
        enter(box, "reduce", "")
    assert boxes[0].digest() == boxes[1].digest()  # too long ago
