"""Findings in words: what the user's script adds to them, and the form of the box."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lockstep.blackbox.snapshot import Snapshot
from lockstep.guard.diagnose import diagnose
from lockstep.guard.render import explain, to_json, understand
from tests.unit.guard.boxes import BACKWARD, NOW, box, raw

Explained = Callable[[str, Sequence[Snapshot]], str]


def nothing(path: str) -> Sequence[str]:
    return ()


def tell(script: str, boxes: Sequence[Snapshot]) -> str:
    """The box in one line, for a script whose lines are numbered from 1."""
    lines = textwrap.dedent(script).strip("\n").splitlines(keepends=True)
    found = diagnose(boxes)
    assert found is not None
    text = explain(found, lambda path: lines if path == "train.py" else ())
    assert len(text.splitlines()) <= 25
    assert max(map(len, text.splitlines())) <= 100
    return " ".join(text.split())


TRAIN = """
for batch in loader:
    loss = model(batch)
    accelerator.backward(loss)
    if accelerator.is_main_process:
        losses = accelerator.gather(
            loss,
        )
        print(losses)
accelerator.wait_for_everyone()
"""
LOOP = [("backward", "train.py:3")] * 4


def test_a_collective_that_only_the_main_process_calls() -> None:
    boxes = [
        box(0, [*LOOP, ("gather", "train.py:5")], waits=3),
        box(1, [*LOOP, ("backward", "train.py:3")], waits=3),
    ]
    text = tell(TRAIN, boxes)
    assert "Rank 0 waits in gather #5 at train.py:5, rank 1 waits in backward #5 at train.py:3." in text
    assert "❱ losses = accelerator.gather(" in text
    assert "❱ accelerator.backward(loss)" in text
    assert "Together last in backward #4 at train.py:3" in text
    assert "Cause train.py:5 is under `if accelerator.is_main_process:` (line 4): not every rank comes to it" in text
    assert "gather needs every rank" in text
    assert "Fix Call gather on every rank, outside of that condition" in text
    assert "Job stopped" in text


def test_a_rank_that_left_the_loop() -> None:
    boxes = [
        box(0, [*LOOP, ("backward", "train.py:3")], waits=3),
        box(1, [*LOOP, ("barrier", "train.py:9")], waits=3),
    ]
    text = tell(TRAIN, boxes)
    assert "Rank 1 left the loop of line 1 (`for batch in loader:`) while rank 0 went on with it" in text
    assert "even_batches" in text
    assert "check_trigger" in text


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("way", ["break", "return"])
def test_a_rank_that_left_the_loop_by_a_condition_is_the_one_that_is_named(way: str, ranks: int) -> None:
    """Not the ranks that went on, although only they come to the line behind the condition."""
    script = f"""
    def train():
        for batch in loader:
            if accelerator.process_index == 1 and step == 3:
                {way}
            accelerator.backward(loss)
    train()
    accelerator.wait_for_everyone()
    """
    before = [("backward", "train.py:5")] * 2
    boxes = [box(rank, [*before, ("backward", "train.py:5")], waits=3) for rank in range(ranks)]
    boxes[1] = box(1, [*before, ("wait_for_everyone", "train.py:7")], waits=3)
    found = diagnose(boxes, blocked_for=3.0)
    assert found is not None
    others = "rank 0" if ranks == 2 else "ranks 0, 2-3"
    lines = textwrap.dedent(script).strip().splitlines(keepends=True)
    assert understand(found, lambda path: lines).lead == (
        f"Rank 1 left the loop by the `{way}` under train.py:3 and called wait_for_everyone at train.py:7, "
        f"while {others} went on with it."
    )
    text = tell(script, boxes)
    assert f"`if accelerator.process_index == 1 and step == 3: {way}` (line 3) holds on some ranks only" in text
    assert "check_trigger" in text


CONDITIONS = {
    "else": ("if rank != 0:\n    pass\nelse:\n    gather(x)", 4, "in the other branch of `if rank != 0:` (line 1)"),
    "elif": ("if a:\n    pass\nelif get_rank() == 0:\n    gather(x)", 4, "under `if get_rank() == 0:` (line 3)"),
    "deep": (
        "if state.is_local_main_process:\n    for i in x:\n        with y:\n            gather(i)",
        4,
        "under `if",
    ),
    "try": ("if a.process_index == 0:\n    try:\n        b()\n    except E:\n        gather(x)", 5, "(line 1)"),
    "left before": (
        "for i in x:\n    if not a.is_main_process:\n        continue\n    gather(i)",
        4,
        "after `if not a.is_main_process: continue` (line 2)",
    ),
    "returned before": (
        "def f():\n    if a.rank > 0:\n        return\n    gather(i)",
        4,
        "after `if a.rank > 0: return`",
    ),
    "decorated": (
        "@accelerator.on_main_process\ndef f():\n    gather(i)",
        3,
        "in f(), which `@accelerator.on_main_process` runs on some ranks only",
    ),
}


@pytest.mark.parametrize(("script", "line", "said"), CONDITIONS.values(), ids=CONDITIONS)
def test_what_only_some_ranks_pass(script: str, line: int, said: str) -> None:
    boxes = [box(0, [("gather", f"train.py:{line}")], waits=3), box(1, [("backward", "train.py:77")], waits=3)]
    assert said in tell(script, boxes)


def test_other_conditions_are_not_blamed() -> None:
    script = "if step % 10 == 0:\n    gather(x)\nif a.is_main_process:\n    print(1)\ngather(y)"
    for line in (2, 5):
        boxes = [box(0, [("gather", f"train.py:{line}")], waits=3), box(1, [("backward", "train.py:77")], waits=3)]
        text = tell(script, boxes)
        assert "is_main_process" not in text
        assert "different ways" in text


def test_the_condition_may_be_at_a_caller() -> None:
    script = """
    def evaluate():
        return accelerator.gather(x)

    for batch in loader:
        accelerator.backward(loss)
        if accelerator.is_main_process:
            evaluate()
    """
    boxes = [
        box(
            0,
            [("backward", "train.py:5"), ("gather", "train.py:2")],
            waits=3,
            stack=("/x/site-packages/torch/a.py:1 in g", "train.py:2 in evaluate", "train.py:7 in <module>"),
        ),
        box(1, [("backward", "train.py:5")] * 2, waits=3),
    ]
    text = tell(script, boxes)
    assert "The way to train.py:2 leads over train.py:7, under `if accelerator.is_main_process:` (line 6)" in text


def test_two_calls_in_opposite_order() -> None:
    script = """
    if accelerator.process_index == 0:
        accelerator.gather(x)
        accelerator.reduce(y)
    else:
        accelerator.reduce(y)
        accelerator.gather(x)
    """
    boxes = [box(0, [("gather", "train.py:2")], waits=3), box(1, [("reduce(sum)", "train.py:5")], waits=3)]
    text = tell(script, boxes)
    assert (
        "in opposite order, in the two branches of line 1: gather first at train.py:2, reduce first at train.py:5"
        in text
    )
    assert "same order" in text


def test_two_raw_calls_in_opposite_order() -> None:
    script = (
        "if rank == 0:\n    dist.all_reduce(x)\n    dist.barrier()\nelse:\n    dist.barrier()\n    dist.all_reduce(x)"
    )
    boxes = [
        box(0, raw=raw("all_reduce", number=1, site="train.py:2")),
        box(1, raw=raw("barrier", number=1, site="train.py:5")),
    ]
    assert "opposite order" in tell(script, boxes)


def test_a_call_that_met_the_wrong_one_earlier() -> None:
    script = "if accelerator.is_main_process:\n    accelerator.wait_for_everyone()\naccelerator.wait_for_everyone()"
    boxes = [
        box(0, [("barrier", "train.py:2"), ("barrier", "train.py:3")], waits=3),
        box(1, [("barrier", "train.py:3")], closed="finished", alive=False),
    ]
    text = tell(script, boxes)
    assert "Rank 1 has finished; rank 0 waits in barrier #2 at train.py:3" in text
    assert "train.py:2 is under `if accelerator.is_main_process:`" in text


STUCK = {
    "sleep": (
        "import time\ntime.sleep(100)",
        2,
        "rank 1 is in time.sleep at train.py:2",
        "Rank 1 sleeps at train.py:2",
    ),
    "endless": (
        "while not ready:\n    x = x + 1",
        2,
        "rank 1 is in the loop `while not ready:` (line 1) at train.py:2",
        "Rank 1 does not come out of a `while` loop",
    ),
    "input": ("name = input('name? ')", 1, "rank 1 is waiting for input", "Rank 1 asks a question"),
    "in its function": (
        "def fetch():\n    time.sleep(100)",
        2,
        "rank 1 is in time.sleep at train.py:2",
        "Rank 1 sleeps at train.py:2",
    ),
    "training": (
        "while True:\n    prepare()\n    accelerator.backward(x)",
        2,
        "outside of any",
        "Rank 1 is busy or stuck",
    ),
    "alone": (
        "if accelerator.is_main_process:\n    evaluate()",
        2,
        "rank 1 is outside of any collective at train.py:2",
        "Rank 1 works alone (train.py:2 is under `if accelerator.is_main_process:` (line 1))",
    ),
}


@pytest.mark.parametrize(("script", "line", "where", "cause"), STUCK.values(), ids=STUCK)
def test_a_rank_that_does_not_come(script: str, line: int, where: str, cause: str) -> None:
    boxes = [box(0, [BACKWARD, BACKWARD], waits=31), box(1, [BACKWARD], stack=(f"train.py:{line} in <module>",))]
    text = tell(script, boxes)
    assert text.count(where) == 2  # in the headline and in its place
    assert f"Cause {cause}" in text
    assert "ranks have been waiting for 31 s" in text
    assert "Job continues" in text


def test_a_data_loader_that_sleeps_is_a_data_loader() -> None:
    script = "def __getitem__(self, index):\n    time.sleep(100)"
    boxes = [
        box(0, [BACKWARD, BACKWARD], waits=31),
        box(1, [BACKWARD], phase="data", stack=("train.py:2 in __getitem__", "train.py:9 in <module>")),
    ]
    text = tell(script, boxes)
    assert "rank 1 is in the data loader (time.sleep) at train.py:2" in text
    assert "Cause Rank 1 gets no next batch" in text


def test_a_rank_that_failed_is_the_cause_whatever_the_script_says() -> None:
    boxes = [
        box(0, [("gather", "train.py:5")], waits=3),
        box(1, closed="failed", words="ValueError: no such file", phase_site="train.py:2"),
    ]
    text = tell(TRAIN, boxes)
    assert "Cause Rank 1 failed: ValueError: no such file" in text
    assert "Missing rank 1 has failed at train.py:2 (ValueError: no such file) ❱ loss = model(batch)" in text


def test_recovering_is_said_with_what_the_script_says() -> None:
    boxes = [
        box(0, [*LOOP, ("gather", "train.py:5")], waits=40, recovering=True),
        box(1, [*LOOP, ("backward", "train.py:3")], waits=40, recovering=True),
    ]
    text = tell(TRAIN, boxes)
    assert "recovering" in text
    assert "is under `if accelerator.is_main_process:`" in text
    assert "Job continues" in text


def test_arguments_keep_the_form_of_the_guides() -> None:
    shapes = ["[2, 3] float32"] * 3 + ["[4, 3] float32"]
    boxes = [box(rank, [("gather", "train.py:5", shape)], waits=3, world=4) for rank, shape in enumerate(shapes)]
    found = diagnose(boxes)
    assert found is not None
    lines = explain(found, nothing).splitlines()
    at = lines.index("Operation: `lockstep.gather`")
    assert lines[at + 1 : at + 4] == [
        "Input shapes:",
        "  - Processes 0-2: [2, 3] float32  (at train.py:5)",
        "  - Process 3: [4, 3] float32  (at train.py:5)",
    ]
    assert lines[1] == "The ranks called gather #1 with different shapes."


@pytest.mark.parametrize("fault", ["arguments", "ops", "places"])
def test_it_stays_a_box_whatever_the_number_of_ranks(fault: str) -> None:
    boxes = []
    for rank in range(200):
        if fault == "arguments":
            boxes.append(box(rank, [("gather", "a.py:1", f"[{rank}] float32, " * 40)], waits=3, world=200))
        elif fault == "ops":
            boxes.append(box(rank, [(f"gather{rank}", "/very/long/way/" * 9 + "a.py:1")], waits=3, world=200))
        elif rank:
            boxes.append(box(rank, world=200, stack=(f"{'x' * 50}.py:{rank} in function_{rank}",)))
        else:
            boxes.append(box(0, [BACKWARD], waits=33, world=200))
    found = diagnose(boxes)
    assert found is not None
    lines = explain(found, nothing).splitlines()
    assert len(lines) <= 30
    assert all(len(line) <= 100 for line in lines if len(line.split()) > 2)  # a path is not broken
    assert any(line.startswith("Cause") for line in lines)
    assert any(line.startswith("Fix") for line in lines)


@pytest.mark.parametrize("lines", [[], ["if is_main_process:\n", "  gather(\n", "!!\n"]], ids=["none", "no python"])
def test_a_script_that_cannot_be_read_is_no_obstacle(lines: list[str]) -> None:
    found = diagnose([box(0, [("gather", "a.py:2")], waits=3), box(1, [("backward", "a.py:9")], waits=3)])
    assert found is not None
    assert "rank 0 waits in gather #1 at a.py:2" in explain(found, lambda path: lines)


def test_sites_that_are_no_places_in_a_file() -> None:
    for site in ("", "train.py", "<stdin>:1", "train.py:x", ":3"):
        found = diagnose([box(0, [("gather", site)], waits=3), box(1, [("backward", site)], waits=3)])
        assert found is not None
        assert "gather #1" in explain(found)


def test_the_script_is_read_from_its_file_as_it_is_now(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    found = diagnose([box(0, [("gather", f"{script}:2")], waits=3), box(1, [("backward", f"{script}:9")], waits=3)])
    assert found is not None
    script.write_text("if True:\n    gather(x)\n")
    assert "is_main_process" not in explain(found)
    script.write_text("if accelerator.is_main_process:\n    gather(x)\n")
    assert "is under `if accelerator.is_main_process:`" in " ".join(explain(found).split())


def test_json_says_the_same() -> None:
    lines = textwrap.dedent(TRAIN).strip("\n").splitlines(keepends=True)
    boxes = [
        box(0, [*LOOP, ("gather", "train.py:5")], waits=3),
        box(1, [*LOOP, ("backward", "train.py:3")], waits=3, now=NOW),
    ]
    found = diagnose(boxes)
    assert found is not None
    said = json.loads(to_json(found, lambda path: lines))
    assert said["kind"] == "different ops"
    assert said["certain"] is True
    assert said["waiting"][0]["ranks"] == [0]
    assert said["cause"] == understand(found, lambda path: lines).cause
    assert "is_main_process" in said["cause"]


def test_the_rank_that_left_the_loop_stands_first() -> None:
    boxes = [
        box(0, [*LOOP, ("backward", "train.py:3")], waits=3),
        box(1, [*LOOP, ("wait_for_everyone", "train.py:9")], waits=3),
    ]
    _, _, first = tell(TRAIN, boxes).partition("──── lockstep guard: the ranks are out of step ")
    assert first.lstrip("─ ").startswith(
        "Rank 1 left the loop of train.py:1 and called wait_for_everyone at train.py:9, while rank 0 went on with it. "
        "Rank 0 waits in backward #5 at train.py:3, rank 1 waits in wait_for_everyone #5 at train.py:9."
    )


def test_steps_do_not_stand_under_shapes() -> None:
    calls = [("backward", "train.py:3", f"after {steps} optimizer steps") for steps in (3, 2)]
    text = tell(TRAIN, [box(rank, [*LOOP, call], waits=3) for rank, call in enumerate(calls)])
    assert "Optimizer steps: - Process 0: after 3 optimizer steps" in text
    assert "Input shapes" not in text
