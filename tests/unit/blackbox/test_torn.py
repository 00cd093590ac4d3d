"""Half-written records: of what a reader may find on a processor that reorders, nothing is believed that never was.

What one event of the writer's changes in the file is taken word by word. Of each mixture of old and new words, all of
them where they are few, the reader has to give a state from before or from after, or less than that; never another.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.blackbox import layout
from lockstep.blackbox.box import Box
from lockstep.blackbox.peers import Peers, box_path
from lockstep.blackbox.read import read_box
from lockstep.blackbox.snapshot import Op, Raw, Snapshot
from tests.unit.blackbox import writers

WORD = layout.WORD
ALL_UP_TO = 10
"""Words whose 2 ** n mixtures are all tried; of more, a thousand, and all that are a beginning or an end."""


def mixtures(old: bytes, new: bytes) -> Iterator[bytes]:
    changed = [at for at in range(0, len(old), WORD) if old[at : at + WORD] != new[at : at + WORD]]
    chance = random.Random(0)
    chosen: Iterator[Sequence[int]] | list[Sequence[int]]
    if len(changed) <= ALL_UP_TO:
        chosen = itertools.chain.from_iterable(itertools.combinations(changed, n) for n in range(len(changed) + 1))
    else:
        parts = [changed[:end] for end in range(len(changed))] + [changed[start:] for start in range(len(changed))]
        alone = [[at] for at in changed] + [[at for at in changed if at != left] for left in changed]
        chosen = [*parts, *alone, *(chance.sample(changed, chance.randrange(len(changed))) for _ in range(1000))]
    for places in chosen:
        mixed = bytearray(old)
        for at in places:
            mixed[at : at + WORD] = new[at : at + WORD]
        yield bytes(mixed)


def event_inside(box: Box) -> None:
    box.enter("gather", "float32 (2, 3)")


def event_refused(box: Box) -> None:
    box.refuse()


def leave(box: Box) -> None:
    box.leave(box.mark()[1], refused=True)


def known_phase(box: Box) -> None:
    box.phase("forward")


def new_phase(box: Box) -> None:
    box.phase("a phase of another name", site=True)


def pace(box: Box) -> None:
    box.pace(1.5, 2.5, 3.5, 7.5, 0.5, 0.25)


def raw(box: Box) -> None:
    box.raw(Raw(number=7, since=3.0, name="all_reduce", site="/home/me/other.py:12", shapes="[[9]]", group="mesh"))


def close(box: Box) -> None:
    box.close("failed", "ValueError: what ended it, in words that are longer than a few of the file's own words")


def skip(box: Box) -> None:
    box.forward()


def next_generation(box: Box) -> None:
    box.generation(3)


def facts(snapshot: Snapshot) -> dict[str, Any]:
    """What must be of one moment."""
    return {
        "phase": (snapshot.phase, snapshot.phase_site, snapshot.phase_since),
        "raw": snapshot.raw,
        "closed": (snapshot.closed, snapshot.words),
        "skipped": (snapshot.skipped, snapshot.skipped_step, snapshot.skipped_at),
        "pending": snapshot.pending_at,
        "stepped": snapshot.stepped_at,
        "beat": snapshot.beat,
        "step": snapshot.step,
    }


@pytest.mark.parametrize(
    "event",
    [event_inside, event_refused, leave, known_phase, new_phase, pace, raw, close, skip, next_generation],
    ids=lambda event: event.__name__,
)
def test_no_mixture_of_an_events_words_is_believed(tmp_path: Path, event: Callable[[Box], None]) -> None:
    box = writers.make(tmp_path)
    prepare(box, inside=event in (event_refused, leave))
    path, torn = box.path, tmp_path / "torn.box"
    old = path.read_bytes()
    event(box)
    new = path.read_bytes()
    before, after = read_box(path_of(torn, old)), read_box(path_of(torn, new))
    assert before is not None
    assert after is not None
    nothing = facts(read_box(writers.make(tmp_path / "empty").path) or before)
    ops = {op.seq: {op} for op in before.history}
    for op in after.history:
        ops.setdefault(op.seq, set()).add(op)
    changed = 0
    for mixed in mixtures(old, new):
        seen = read_box(path_of(torn, mixed))
        assert seen is not None
        changed += mixed not in (old, new)
        for name, value in facts(seen).items():
            known = (facts(before)[name], facts(after)[name], nothing[name])
            assert value in known or (name == "phase" and value in map(without_line, known)), name
        for op in (*seen.history, *filter(None, [seen.op])):
            assert op in ops[op.seq] or op in [less for whole in ops[op.seq] for less in without_texts(whole)]
        assert set(seen.pace) <= {*before.pace, *after.pace}
        assert (seen.generation, seen.entered) in {
            (shot.generation, count) for shot in (before, after) for count in (0, shot.entered)
        }
    assert changed or event is leave  # which is one word


def without_line(phase: tuple[str, str, float]) -> tuple[str, str, float]:
    """A line whose text has not come yet is unknown."""
    return phase[0], "", phase[2]


def without_texts(op: Op) -> list[Op]:
    """The same for a collective: its name must be there."""
    return [replace(op, site=""), replace(op, signature=""), replace(op, site="", signature="")]


def path_of(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def prepare(box: Box, inside: bool) -> None:
    """A box in which all parts have been written before, the ring of events and of steps more than once."""
    for number in range(2 * layout.EVENT_SLOTS + 3):
        box.leave(box.enter(("gather", "barrier", "reduce")[number % 3], f"float32 ({number % 5}, 3)"))
    for number in range(layout.PACE_SLOTS + 5):
        box.pace(*(float(number + part) for part in range(6)))
        box.phase("forward" if number % 2 else "data", site=True)
    for number in range(3):
        box.raw(
            Raw(number=number, since=1.0, name="barrier", site="/home/me/train.py:3", shapes="[[1], [2]]", group="")
        )
    box.step(5)
    box.forward()
    box.beat()
    if inside:
        box.enter("gather", "float32 (4, 3)")


@pytest.mark.parametrize("theirs", ["float32 (2, 3)", "float32 (7, 3)"])
@pytest.mark.parametrize("earlier", ["float32 (2, 3)", "float32 (7, 3)", "int64 (1,)"])
def test_no_peer_is_blamed_for_half_a_record(tmp_path: Path, earlier: str, theirs: str) -> None:
    box, other = writers.make(tmp_path, 0), writers.make(tmp_path, 1)
    for _ in range(2 * layout.EVENT_SLOTS - 1):  # a number at which boxes that were missing are looked for
        box.leave(box.enter("gather", earlier))
        other.leave(other.enter("gather", earlier))
    number = box.enter("gather", "float32 (2, 3)")
    old = other.path.read_bytes()
    other.enter("gather", theirs)
    new = other.path.read_bytes()
    found = set()
    peers = Peers(tmp_path, 0, [0, 1])
    for mixed in mixtures(old, new):
        with box_path(tmp_path, 1).open("r+b") as file:  # into the file that is mapped
            file.write(mixed)
        found.add(peers.compare(number))
        whole = mixed[layout.EVENTS : layout.PACES] == new[layout.EVENTS : layout.PACES]
        if whole and "7" in theirs:
            assert peers.compare(number) == 1
    assert found == ({None, 1} if "7" in theirs else {None})


def test_the_words_are_what_a_check_is_of(tmp_path: Path) -> None:
    """The test above can fail: a reader that believed stamps alone would take 1 of the mixtures for a record."""
    box = writers.make(tmp_path)
    prepare(box, inside=False)
    old = box.path.read_bytes()
    event_inside(box)
    new = box.path.read_bytes()
    start = layout.EVENTS + box.mark()[1] % layout.EVENT_SLOTS * layout.RECORD_SIZE
    believed = wrong = 0
    for mixed in mixtures(old[start : start + layout.RECORD_SIZE], new[start : start + layout.RECORD_SIZE]):
        record, check = layout.CHECKED_RECORD.unpack(mixed)
        stamped = mixed[:WORD] == new[start : start + WORD]
        believed += stamped
        wrong += stamped and check == layout.check_of(record) and mixed != new[start : start + layout.RECORD_SIZE]
    assert believed > 32
    assert wrong == 0
