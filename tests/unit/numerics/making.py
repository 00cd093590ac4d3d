"""Frames for the tests of traces: any that can be, and those of a small run."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

from hypothesis import strategies as st

from lockstep.traces.frames import Frame, Stat
from lockstep.traces.trace import open_trace

NUMBERS = st.floats(min_value=0) | st.just(math.nan)
STATS = st.builds(
    Stat,
    name=st.sampled_from(["weight", "bias", "input[0]", "output", "grad_output[0]"]) | st.text(max_size=8),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "int64", ""]),
    shape=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    abs_min=NUMBERS,
    abs_max=NUMBERS,
    nans=st.booleans(),
    infs=st.booleans(),
    tiny=st.none() | st.floats(0, 1),
    note=st.sampled_from(["", "None", "not a tensor"]) | st.text(max_size=8),
)
FRAMES = st.lists(
    st.builds(
        Frame,
        batch=st.integers(0, 50),
        phase=st.sampled_from(["forward", "backward", "optimizer"]),
        module=st.text(max_size=12),
        kind=st.text(max_size=8),
        call=st.integers(0, 5),
        stats=st.lists(STATS, max_size=3).map(tuple),
    ),
    max_size=12,
).map(lambda frames: sorted(frames, key=lambda frame: frame.batch))


def plain(frames):
    """As values that compare: nan is unlike itself, and a text is not."""

    def tidy(value):
        if isinstance(value, tuple):
            return tuple(tidy(part) for part in value)
        return "nan" if isinstance(value, float) and math.isnan(value) else value

    return [tidy(astuple(frame)) for frame in frames]


def stat(name="output", dtype="float32", shape=(4, 8), low=0.01, high=1.0, nans=False, infs=False, tiny=None):
    return Stat(name, dtype, shape, low, high, nans, infs, tiny)


def call(batch, module, *stats, phase="forward", kind="Linear", number=0):
    return Frame(batch, phase, module, kind, number, stats or (stat(),))


def small_run(batches=3, modules=4, dtype="float32"):
    """A run of a small model: parameters in fp32, activations in ``dtype``; the numbers change from batch to batch."""
    return [
        call(
            batch,
            f"layer.{module}",
            stat("weight", shape=(8, 8), high=1 + module),
            stat("input[0]", dtype, high=2.0 + module + batch / 8),
            stat("output", dtype, high=3.0 + module + batch / 8),
        )
        for batch in range(batches)
        for module in range(modules)
    ]


def changed(frames, index, number, **values):
    """The frames with another tensor in one place."""
    frame = frames[index]
    stats = list(frame.stats)
    stats[number] = replace(stats[number], **values)
    return [*frames[:index], replace(frame, stats=tuple(stats)), *frames[index + 1 :]]


def write(folder, frames, rank=0, **options):
    writer = open_trace(folder, rank=rank, **options)
    for frame in frames:
        writer.add(frame)
    writer.close()
    return folder
