"""The detector's words: frames as a table, what went wrong where, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.numerics.dtype_limits import near_edge, range_named
from lockstep.traces.frames import Frame, Stat

HEADER = f"{'abs min':8} {'abs max':8} metadata"
_MARGIN = " " * 17
_SHOWN_UNDERFLOWS = 5


@dataclass(frozen=True, kw_only=True)
class Underflow:
    """A tensor much of which has become zero or subnormal."""

    module: str
    kind: str
    name: str
    """Which of the module's tensors."""
    dtype: str
    share: float
    """Of its values, zeros and subnormals together."""
    batch: int

    def __str__(self) -> str:
        limits = range_named(self.dtype)
        below = "" if limits is None else f" (below {limits.smallest_normal:.2e} in {limits.name})"
        return (
            f"{self.share:.0%} of {self.name} of {called(self.module, self.kind)} became zero or subnormal{below}, "
            f"batch_number={self.batch}"
        )


@dataclass(frozen=True, kw_only=True)
class Hit:
    """The first NaN or infinity, with what led to it."""

    batch: int
    phase: str
    frames: Sequence[Frame] = field(repr=False)
    """The last ones, the bad one at the end."""
    evaluation: bool = False
    """Whether it was met in an evaluation pass after that batch."""
    underflows: Sequence[Underflow] = ()

    @property
    def frame(self) -> Frame:
        """The one in which it was met."""
        return self.frames[-1]

    @property
    def stat(self) -> Stat:
        """The tensor that tells most: what went in, before what came out."""
        return next(stat for stat in self.frame.stats if stat.nans or stat.infs)

    def line(self) -> str:
        """In one line."""
        what = "nan" if self.stat.nans else "inf"
        return f"{what} in {self.stat.name} of {called(self.frame.module, self.frame.kind)}"


def called(module: str, kind: str) -> str:
    """A module in words."""
    return f"{module} ({kind})" if module else f"the model itself ({kind})"


# --- frames ----------------------------------------------------------------------------------------------------------


def stat_line(stat: Stat) -> str:
    """One tensor."""
    if stat.note:
        return f"{stat.note:>17} {stat.name}"
    return f"{stat.abs_min:8.2e} {stat.abs_max:8.2e} {stat.name}"


def frame_lines(frame: Frame) -> list[str]:
    """One call of a module."""
    return [f"{_MARGIN} {frame.module} {frame.kind}", *(stat_line(stat) for stat in frame.stats)]


def starting_lines(batch: int, place: str = "") -> list[str]:
    """What stands above the frames of a batch; with several ranks, whose they are."""
    return ["", f"{_MARGIN} {place}" if place else "", f"{_MARGIN} *** Starting batch number={batch} ***", HEADER]


def render(frames: Sequence[Frame]) -> str:
    """Several frames; where a batch begins between them, that is said."""
    lines: list[str] = []
    before: int | None = None
    for frame in frames:
        if before is not None and frame.batch != before:
            lines += starting_lines(frame.batch)
        before = frame.batch
        lines += frame_lines(frame)
    return "\n".join(lines)


def render_hit(hit: Hit, *, who: str = "", title: str = "") -> str:
    """The whole report; ``who`` says which rank and which samples, where that is known."""
    lines = ["", title or f"Detected inf/nan during batch_number={hit.batch}"]
    lines += [f"in {who}"] if who else []
    lines += ["in an evaluation pass after that batch"] if hit.evaluation else []
    lines += [f"Last {len(hit.frames)} {hit.phase} frames:", HEADER, render(hit.frames), ""]
    lines += advice(hit)
    shown = sorted(hit.underflows, key=lambda one: -one.share)[:_SHOWN_UNDERFLOWS]
    lines += [f"Underflow: {one}." for one in shown]
    return "\n".join([*lines, ""])


def reason(hit: Hit, place: str = "", kept: Path | None = None) -> str:
    """Why the run was stopped, for the exception; ``place`` is its rank, and ``kept`` the file that holds the report.

    A launcher shows the exception once more at the end of the job, where nothing else is "above".
    """
    on = f" on {place}" if place else ""
    file = "" if kept is None else f", and kept in {kept},"
    return (
        f"DebugUnderflowOverflow: inf/nan detected during batch_number={hit.batch}{on} ({hit.line()}), aborting as "
        f"there is no point running further. The report printed above{file} shows the values that led to it."
    )


# --- what to do ------------------------------------------------------------------------------------------------------


def advice(hit: Hit) -> list[str]:
    """What happened, what is close to happening, and the narrowest remedy."""
    if hit.phase == "optimizer":
        return _after_update(hit)
    if hit.phase == "backward":
        return _in_backward(hit)
    return _in_forward(hit)


def _in_forward(hit: Hit) -> list[str]:
    stat = hit.stat
    lines = [f"First bad number: {hit.line()}."]
    if not stat.name.startswith(("input", "output")):
        return [
            *lines,
            "The parameter was bad before this forward: an update, a checkpoint or its initialisation made it so. "
            "Lower the learning rate, or clip the gradients.",
        ]
    if stat.name.startswith("input"):
        return [
            *lines,
            "It came in from outside: no module before has given it. Look at the batch itself, and at what is computed "
            'between modules (detect_overflow(tensor, "after …") there tells more).',
        ]
    edge = edges(hit.frames)
    lines += [f"On the edge: {text}." for text in edge]
    limits = range_named(stat.dtype)
    if limits is not None and limits.narrow:
        module = narrowest(hit)
        lines.append(f"Values have left the range of {limits.name} (largest {limits.largest:.2e}).")
        if module:
            lines.append(f'Remedy: run_in_fp32(model, "{module}")  # from lockstep.debug_utils import run_in_fp32')
        else:
            lines.append("Remedy: train in bf16, whose range is that of fp32, or in fp32.")
    else:
        lines.append(_without_range(hit))
    return lines


def _without_range(hit: Hit) -> str:
    """Advice for dtypes as wide as fp32: left by values that have grown, or by an operation that has no result."""
    large = _overflow(hit)
    if large:
        return f"{large} Lower the learning rate, clip the gradients, or normalise what goes into it."
    if hit.stat.nans and not hit.stat.infs:
        return (
            "Its inputs and parameters are finite, so the module made it: 0 / 0, inf - inf, a root or logarithm of a "
            "negative number, or a softmax over nothing but masked places. Add a small constant there, or mask less."
        )
    limits = range_named(hit.stat.dtype)
    beyond = "" if limits is None else f" beyond {limits.largest:.2e}, the largest number of {limits.name}"
    return (
        f"Its inputs and parameters are finite, so the module made it: a product, power or sum{beyond}, an "
        "exponential, a division by zero, or a logarithm of zero. Bound what goes into it (clamp), or lower the "
        "learning rate if the values grow."
    )


def _overflow(hit: Hit) -> str:
    """A sentence where the values at hand are so large that a product or sum of them leaves the dtype; else empty.

    At hand are the finite tensors of the frame, and in the same batch the outputs of modules inside it, or in a
    backward the gradients that came before.
    """
    frame, limits = hit.frame, range_named(hit.stat.dtype)
    if limits is None:
        return ""
    at_hand = [(stat, frame) for stat in frame.stats if not stat.name.startswith("output")]
    for earlier in hit.frames[:-1]:
        if earlier.batch == frame.batch and (hit.phase == "backward" or _holds(frame.module, earlier.module)):
            at_hand += [(stat, earlier) for stat in earlier.stats if stat.name.startswith(("output", "grad_output"))]
    finite = [(stat, where) for stat, where in at_hand if not (stat.note or stat.nans or stat.infs)]
    if not finite:
        return ""
    largest, where = max(finite, key=lambda one: one[0].abs_max)
    if largest.abs_max * largest.abs_max * math.prod(largest.shape) < limits.largest:
        return ""
    return (
        f"Values have left the range of {limits.name} (largest {limits.largest:.2e}): {largest.name} of "
        f"{called(where.module, where.kind)} reaches {largest.abs_max:.2e}, and a product or sum of such values does "
        "not fit."
    )


def _holds(outer: str, inner: str) -> bool:
    """Whether a module is inside another one."""
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


def _in_backward(hit: Hit) -> list[str]:
    frame = hit.frame
    lines = [f"First bad number: {hit.line()}, in the backward.", "The forward of this batch was finite."]
    limits = range_named(hit.stat.dtype)
    if len(hit.frames) == 1:
        lines.append("It came with the gradient of the loss: look at what is computed from the model's output.")
    elif hit.stat.name.startswith("grad_output"):
        later = next((one for one in reversed(hit.frames[:-1]) if one.module != frame.module), None)
        through = "" if later is None else f" It arose between there and {called(later.module, later.kind)}."
        lines.append(f"Gradients came through later modules finite.{through}")
    if limits is not None and limits.narrow:
        lines.append(
            f"Gradients have left the range of {limits.name}: use a loss scaler, as mixed_precision='fp16' does."
        )
    elif large := _overflow(hit):
        lines.append(f"{large} Scale the loss down, or normalise the activations of that module.")
    else:
        lines.append(
            "Typical causes: the root, norm or division of exactly zero, whose slope is infinite, and where() around "
            "such an expression: add a small constant inside it; or a product beyond the dtype's largest number: scale "
            "the loss or the weights down. Clipping cannot mend a gradient that is not a number."
        )
    return lines


def _after_update(hit: Hit) -> list[str]:
    frame, stat = hit.frame, hit.stat
    lines = [f"First bad number: {stat.name} of {frame.module or 'the model'}, after a step of {frame.kind}."]
    others = [one for one in frame.stats[1:] if one.nans or one.infs]
    if any(one.name.endswith(".grad") for one in others):
        lines.append("Its gradient was bad already. nan_policy='skip' drops such updates on all ranks together.")
    elif others:
        names = ", ".join(one.name for one in others)
        lines.append(f"The gradient was finite; what the optimizer keeps is not: {names}. Lower the learning rate.")
    else:
        lines.append("Gradient and optimizer state are finite: the step itself was too large. Lower the learning rate.")
    return lines


def edges(frames: Sequence[Frame]) -> list[str]:
    """Outputs that are close to the largest number of their dtype, the latest last."""
    found = []
    for frame in frames:
        for stat in frame.stats:
            words = near_edge(stat.abs_max, stat.dtype) if stat.name.startswith("output") else None
            if words is not None:
                found.append(f"{words} in {stat.name} of {called(frame.module, frame.kind)}")
    return found[-3:]


def narrowest(hit: Hit) -> str:
    """The innermost module that has to compute in fp32 for the number to fit; "" when that is the whole model.

    A module that got ordinary numbers and gave too large ones is it. One that was already handed numbers at the edge is
    not: then it is what holds both this module and the one that made those numbers.
    """
    frame = hit.frame
    handed = [stat for stat in frame.stats if stat.name.startswith("input")]
    if not any(near_edge(stat.abs_max, stat.dtype) for stat in handed):
        return frame.module
    top = max(stat.abs_max for stat in handed)
    for earlier in reversed(hit.frames[:-1]):
        if earlier.batch != frame.batch or earlier.module == frame.module:
            continue
        if any(stat.name.startswith("output") and stat.abs_max >= top for stat in earlier.stats):
            return common_parent(frame.module, earlier.module)
    return frame.module


def common_parent(one: str, other: str) -> str:
    """The innermost module that holds both; a module holds itself."""
    shared = []
    for mine, theirs in zip(one.split("."), other.split("."), strict=False):
        if mine != theirs:
            break
        shared.append(mine)
    return ".".join(shared)
