"""Where one rank is, in words: read off its black box and its stack."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from lockstep.blackbox.snapshot import Op, Snapshot
from lockstep.guard.diagnosis import RankLocation
from lockstep.rundir.format_ranks import name_ranks

SILENT = 10.0
"""Seconds without a sign from a rank's own reporter after which its interpreter counts as held up."""
RANGES = 8
"""Runs of ranks that are named before a list is cut."""

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib/python3|/torch/|^<")
_DEBUGGERS = re.compile(r"(^|/)(bdb|pdb|pudb|ipdb|debugpy|_?pydevd)[\w./]*:\d+ in ")
_COMPILERS = re.compile(r"/torch/(_dynamo|_inductor|_functorch)/")
_LOADERS = re.compile(r"/torch/utils/data/|/torchdata/|/lockstep/data/")
_TORCH_CALL = re.compile(r"/torch/distributed/distributed_c10d\.py:\d+ in ([a-z]\w*)$")
_PHASES = {
    "data": "are in the data loader",
    "forward": "are in forward",
    "backward": "are in backward",
    "step": "are in the optimizer's step",
    "checkpoint": "are writing a checkpoint",
    "join": "have run out of batches and keep the others company",
}
_SINGULAR = {"wait": "waits", "are": "is", "have": "has", "were": "was", "stand": "stands"}


def state(place: RankLocation) -> str:
    """ "rank 1 waits in gather #27 at train.py:30"."""
    doing = place.doing
    if len(place.ranks) == 1:
        verb, _, rest = doing.partition(" ")
        doing = f"{_SINGULAR.get(verb, verb)} {rest}"
    return f"{name_ranks(place.ranks, RANGES)} {doing}" + (f" at {place.site}" if place.site else "")


def label(op: Op) -> str:
    """ "gather #27"."""
    return f"{op.name} #{op.seq}"


def at(op: Op) -> str:
    """ "gather #27 at train.py:30"."""
    return f"{label(op)} at {op.site}" if op.site else label(op)


def span(seconds: float) -> str:
    """A time in words: "3 s", "4 min"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def user_frames(stack: Iterable[str]) -> list[tuple[str, str]]:
    """The frames of the user's own code, innermost first: (``file:line``, function)."""
    frames = []
    for line in stack:
        site, _, function = line.rpartition(" in ")
        if site and not site.startswith(_OURS) and not _LIBRARIES.search(site):
            frames.append((site, function))
    return frames


def ending(box: Snapshot) -> tuple[str, str]:
    """How a rank that is gone ended: what it did, and what is known of why."""
    if box.closed == "failed":
        return "have failed", box.words
    if box.closed == "finished":
        return "have finished", box.words
    if box.closed:
        return f"have left the job ({box.closed})", box.words
    if box.crash:
        return "have crashed", f"{box.crash}, in native code"
    if re.search(r"kill|signal|SIG[A-Z]{2,}|segmentation|abort", box.words, re.IGNORECASE):
        return "were killed", box.words
    return "have exited", box.words


def torch_call(stack: Sequence[str]) -> str | None:
    """The function of torch.distributed at the end of a stack, innermost first; None where it ends elsewhere."""
    calls = [match[1] for line in stack if (match := _TORCH_CALL.search(line))]
    return calls[-1] if calls else None


def last_seen(box: Snapshot) -> tuple[str, str]:
    """What a rank whose process has ended was doing then, and the user's line: ("in forward", "train.py:30").

    Outside of what the box records, the line is that of the last collective.
    """
    frames = user_frames(box.stack)
    if box.op is not None:
        return f"in {label(box.op)}", box.op.site
    if frames and (call := torch_call(box.stack)):
        return f"in torch's {call}", frames[0][0]
    if box.phase:
        return _PHASES.get(box.phase, f"are in {box.phase}").removeprefix("are "), box.phase_site
    if frames:
        return f"in {frames[0][1]}()" if frames[0][1] != "<module>" else "in the script", frames[0][0]
    if box.history:
        return f"in the script's own code after {label(box.history[-1])}", box.history[-1].site
    return "in the script's own code before its first collective", ""


def last_steps(box: Snapshot) -> str:
    """The same in sentences: the call, the step, the user's line, and the last collective that is complete."""
    doing, site = last_seen(box)
    step = f"after step {box.step}" if box.step else "before its first step"
    done = next((op for op in reversed(box.history) if op.seq <= box.left), None)
    before = f" The last collective it completed is {at(done)}." if done and label(done) not in doing else ""
    return f"It was {doing}{f' at {site}' if site else ''}, {step}.{before}"


def locate(box: Snapshot) -> tuple[str, str, str]:
    """What a rank that lives does outside of the library's collectives: doing, the user's line, more."""
    frames = user_frames(box.stack)
    site = frames[0][0] if frames else box.phase_site
    more = f"for {span(box.now - box.phase_since)}" if box.phase_since else ""
    if box.beat and box.now - box.beat > SILENT and not box.paused:
        more = f"{more}, its interpreter held up by native code".removeprefix(", ")
    if box.paused:
        return "are paused (by a debugger, or by a signal such as Ctrl-Z sends)", site, more
    if _any(_DEBUGGERS, box.stack):
        return "are in a debugger", site, more
    if _any(_COMPILERS, box.stack):
        return "are compiling", site, more
    if box.raw is not None:
        where = f"torch's {raw_name(box.raw.name)}"
        return f"wait in {where}", box.raw.site or site, f"for {span(box.now - box.raw.since)}"
    if box.phase == "data" or _any(_LOADERS, box.stack):
        return _PHASES["data"], site, more
    if box.phase:
        return _PHASES.get(box.phase, f"are in {box.phase}"), site, more
    if frames and frames[0][1] not in ("<module>", "main"):
        return f"are in {frames[0][1]}()", site, more
    if not box.entered:
        return "have not come to a first collective", site, more
    return "are outside of any collective", site, more


def _any(pattern: re.Pattern[str], stack: Sequence[str]) -> bool:
    return any(pattern.search(line) for line in stack)


def raw_name(name: str) -> str:
    """What torch calls a collective, without the backend in front."""
    return name.rpartition(":")[2]


def by_place(found: Iterable[tuple[int, tuple[str, str, str]]]) -> tuple[RankLocation, ...]:
    """Ranks at the same point in one place each, in the order of their first ranks; times are those of the first."""
    places: dict[tuple[str, str, str], tuple[list[int], str]] = {}
    for rank, (doing, site, detail) in found:
        times = re.fullmatch(r"for [\d.]+ (s|min)(, .*)?", detail)
        key = (doing, site, (times[2] or "") if times else detail)
        places.setdefault(key, ([], detail))[0].append(rank)
    return tuple(
        RankLocation(ranks=tuple(ranks), doing=doing, site=site, detail=detail)
        for (doing, site, _), (ranks, detail) in places.items()
    )
