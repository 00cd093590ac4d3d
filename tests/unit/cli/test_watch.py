"""The table of `lockstep watch`, from made-up ranks; and reading what faulthandler writes."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.blackbox.snapshot import Op, Raw, Snapshot
from lockstep.cli import stacks, watch
from lockstep.errors import ConfigError
from lockstep.rundir.layout import RunDirectory


def rank(number: int, *, of: int = 2, op: Op | None = None, **more: object) -> Snapshot:
    fields = {"host": "box", "pid": 100 + number, "entered": 27, "now": 50.0, "step": 9, **more}
    return Snapshot(rank=number, world_size=of, op=op, **fields)  # type: ignore[arg-type]


GATHER = Op(seq=27, name="gather", site="train.py:30", since=38.0)
LATE = replace(GATHER, since=49.0)


def states(*boxes: Snapshot) -> list[str]:
    return [row.state for row in watch.rows(boxes, {}, {})]


def test_blocked_is_who_waits_while_others_are_elsewhere() -> None:
    loading = rank(1, phase="data", phase_since=38.0)
    assert states(rank(0, op=GATHER), loading) == ["blocked", "running"]
    assert states(rank(0, op=LATE), loading) == ["running", "running"]
    assert states(rank(0, op=GATHER), rank(1, op=LATE)) == ["running", "running"]
    assert states(rank(0, op=GATHER), rank(1, op=replace(GATHER, name="barrier"))) == ["blocked", "blocked"]
    assert states(rank(0, op=GATHER), rank(1, alive=False)) == ["blocked", "dead"]
    assert states(rank(0, op=GATHER)) == ["blocked"]  # the other one has no box
    assert states(rank(0, raw=Raw(name="gloo:all_reduce", number=3, since=40.0)), loading) == ["blocked", "running"]


def test_how_ranks_left() -> None:
    boxes = [
        rank(0, of=4, closed="finished", alive=False),
        rank(1, of=4, closed="failed", words="ValueError: [bold] 7", alive=False),
        rank(2, of=4, alive=False),
        rank(3, of=4, paused=True, op=GATHER),
    ]
    found = watch.rows(boxes, dict.fromkeys(range(4), 1.0), {})
    assert [row.state for row in found] == ["finished", "failed", "dead", "paused"]
    assert [row.doing for row in found] == [
        "has finished",
        "has failed: ValueError: [bold] 7",
        "has died",
        "in gather #27",
    ]
    assert [row.steps_per_second for row in found] == [None, None, None, 1.0]


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        (rank(0, op=GATHER), ("in gather #27", "train.py:30", 12.0)),
        (
            rank(0, phase="data", phase_site="train.py:9", phase_since=48.0),
            ("in the data loader", "train.py:9", 2.0),
        ),
        (rank(0, raw=Raw(name="gloo:barrier", site="t.py:4", since=45.0)), ("in torch's barrier", "t.py:4", 5.0)),
        (rank(0, entered=0), ("has not come to a first collective", "", None)),
    ],
)
def test_where_a_rank_is(box: Snapshot, expected: tuple[str, str, float | None]) -> None:
    assert watch.where(box) == expected


def test_steps_per_second_are_of_one_process() -> None:
    before = [rank(0, step=4, now=48.0), rank(1, step=4, now=48.0, pid=7)]
    assert watch.rates(before, [rank(0), rank(1)]) == {0: 2.5}
    assert watch.rates([], [rank(0)]) == {}


def test_the_table() -> None:
    boxes = [rank(0, of=4, op=GATHER), rank(1, of=4, closed="failed", words="ValueError: [bold] 7", alive=False)]
    console = Console(width=120, record=True, force_terminal=True, color_system="standard", quiet=False)
    with console.capture() as capture:
        found = watch.rows(boxes, {0: 1.25}, {0: 3 * 2**29})
        console.print(watch.render(RunDirectory(path=Path("/runs/a[b]")), found, watch.absent(boxes)))
    text = capture.get()
    for part in ("a[b]", "in gather #27 at train.py:30 (blocked)", "12 s", "1.25", "1.5 GiB", "[bold] 7", "Ranks 2-3"):
        assert part in text, text
    assert "\x1b[31m" in text
    assert "\x1b[1;31m" in text


def test_a_run_without_boxes(tmp_path: Path) -> None:
    (tmp_path / "boxes").mkdir()
    with pytest.raises(ConfigError, match=r"No rank of the run .* has a black box"):
        watch.run(argparse.Namespace(run=str(tmp_path), once=True, json=False))


DUMP = """\
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f2 (most recent call first):
  File "/home/me/train.py", line 30 in step
  File "/home/me/train.py", line 41 in <module>
  File "/x/lockstep/launch/worker.py", line 77 in _run_script
  File "<frozen runpy>", line 198 in _run_module_as_main
"""


def test_the_main_thread_is_read_and_turned_round() -> None:
    frames = stacks.main_stack(DUMP)
    assert [(frame.line, frame.function) for frame in frames] == [(41, "<module>"), (30, "step")]
    shown = stacks.show(
        stacks.RankStack(
            rank=1, pid=7, host="box", doing="in gather #27", site="train.py:30", seconds=12.0, stack=frames[:1]
        )
    )
    assert shown == (
        'rank 1 on box (pid 7): in gather #27 at train.py:30 for 12 s\n  File "/home/me/train.py", line 41, in <module>'
    )
    assert stacks.main_stack("") == ()


def test_with_too_many_threads_it_is_the_one_that_took_the_signal() -> None:
    first, second = DUMP.split("\n\n")
    assert len(stacks.main_stack(f"{second}\n{first}\n...\n")) == 2
