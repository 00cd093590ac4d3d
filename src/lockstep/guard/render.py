"""A diagnosis as a box for the terminal, with what the user's script shows about the lines in it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from lockstep.guard import remedies
from lockstep.guard.diagnosis import Diagnosis, RankLocation
from lockstep.guard.rank_location import RANGES, span, state, user_frames
from lockstep.guard.source import LineContext, Loop, Reader, read_lines, setting, split
from lockstep.rundir.format_ranks import name_ranks, number_ranks
from lockstep.terminal.failure_box import WIDTH, Entry, FailureBox, plain

_PLACES = 5
"""Groups of ranks that are shown; more are counted."""


def explain(diagnosis: Diagnosis, source: Reader = read_lines) -> str:
    """The box as text. ``source`` gives the lines of a file of the user's."""
    return plain(box_of(understand(diagnosis, source), source))


def box_of(found: Diagnosis, source: Reader = read_lines, *, logs: str = "") -> FailureBox:
    """The box of a diagnosis that `understand` has completed."""
    headline = f"{found.lead} {found.headline}" if found.lead and found.certain else found.headline
    different = found.kind == "different arguments"
    together = f"last in {found.together}" if found.together else "not yet, in no collective"
    entries = (
        Entry(label="Together", text=together),
        Entry(label="Cause", text=found.cause),
        Entry(label="Fix", text=found.fix, rows=6),
        Entry(label="Job", text=_what_now(found)),
        Entry(label="Logs", text=logs, rows=2),
    )
    return FailureBox(
        title=f"lockstep guard: {_title(found)}",
        headline=headline,
        details=tuple(_arguments(found)) if different else (),
        places=(
            *(() if different else _places("Waiting", found.waiting, source)),
            *_places("Missing", found.missing, source),
        ),
        closing=tuple(entry for entry in entries if entry.text),
    )


def to_json(diagnosis: Diagnosis, source: Reader = read_lines) -> str:
    """The same for programs."""
    return json.dumps(understand(diagnosis, source).to_dict(), indent=1)


# --- what the script says ------------------------------------------------------------------------------------------


def understand(diagnosis: Diagnosis, source: Reader = read_lines) -> Diagnosis:
    """The diagnosis, with cause and fix as the user's script shows them."""
    found = _looked_closer(diagnosis, source)
    why = _why(found, source)
    if why is None or why.cause == found.cause:
        return found
    if "recovering" in found.cause and "recovering" not in why.cause:
        why = remedies.recovering(why)
    return replace(found, cause=why.cause, fix=why.fix, lead=why.lead)


def _looked_closer(diagnosis: Diagnosis, source: Reader) -> Diagnosis:
    """Say what a missing rank does where its line shows it."""
    missing = tuple(_closer(place, source) for place in diagnosis.missing)
    headline = diagnosis.headline
    for before, after in zip(diagnosis.missing, missing, strict=True):
        headline = headline.replace(state(before), state(after))
    return replace(diagnosis, missing=missing, headline=headline)


def _closer(place: RankLocation, source: Reader) -> RankLocation:
    if not place.site or not re.match(r"are (in (?!a debugger)|outside of any|computing in)", place.doing):
        return place
    there = setting(place.site, source)
    loading = place.doing == "are in the data loader"
    if re.search(r"\bsleep\(", there.text):
        return replace(place, doing=f"{place.doing} (time.sleep)" if loading else "are in time.sleep")
    if re.search(r"\binput\(", there.text):
        return replace(place, doing="are waiting for input from the keyboard")
    loop = there.loops[0] if there.loops else None
    if not loading and loop is not None and loop.endless and not _trains(loop, place, source):
        return replace(place, doing=f"are in the loop `{_cut(loop.text, 40)}` (line {loop.line})")
    return place


def _trains(loop: Loop, place: RankLocation, source: Reader) -> bool:
    """Whether a loop is the one of the training: to be in it is nothing special."""
    lines = source(split(place.site)[0])[loop.line - 1 : loop.last]
    return any(re.search(r"\baccelerator\b|\bbackward\(|\bdist\.|\.step\(", line) for line in lines)


def _why(diagnosis: Diagnosis, source: Reader) -> remedies.CauseAndFix | None:
    if diagnosis.recorded or diagnosis.kind in ("different arguments", "all wait"):
        return None
    settings = {place: _on_the_way(place, diagnosis, source) for place in (*_calls(diagnosis), *diagnosis.missing)}
    if diagnosis.kind in ("different ops", "raw"):
        opposite = _opposite(diagnosis.waiting, settings, source)
        if opposite is not None:
            return opposite
    if diagnosis.kind != "gone" or all("finished" in place.doing for place in diagnosis.missing):
        for place in _calls(diagnosis):
            site, there = settings[place]
            if _leaves_loop(there):
                return _left_before(place, site, there, diagnosis)
            if there.condition:
                return _under_condition(place, site, there)
    if diagnosis.kind == "different ops":
        return _left_loop(diagnosis.waiting, settings)
    if diagnosis.kind == "missing":
        return _stuck(diagnosis.missing, settings)
    return None


def _calls(diagnosis: Diagnosis) -> tuple[RankLocation, ...]:
    """Where calls were made; first where they may have begun to differ."""
    return (*diagnosis.apart, *diagnosis.waiting)


def _on_the_way(place: RankLocation, diagnosis: Diagnosis, source: Reader) -> tuple[str, LineContext]:
    """The line of a place, or the line of one of its callers that only some ranks come to."""
    rank = next((rank for rank in place.ranks if rank in diagnosis.stacks), None)
    callers = user_frames(diagnosis.stacks[rank]) if rank is not None else []
    first = setting(place.site, source)
    if first.condition:
        return place.site, first
    for site, _ in callers:
        there = setting(site, source)
        if there.condition:
            return site, there
    return place.site, first


def _under_condition(place: RankLocation, site: str, there: LineContext) -> remedies.CauseAndFix:
    call = _call(place)
    where = f"{place.site} is" if site == place.site else f"The way to {place.site} leads over {site},"
    return remedies.CauseAndFix(
        lead=f"{_sentence(name_ranks(place.ranks, RANGES))} called {call} at {place.site}, which not every rank comes "
        "to.",
        cause=f"{where} {there.condition}: not every rank comes to it, but {call} needs every rank.",
        fix=f"Call {call} on every rank, outside of that condition; keep inside it only what is done with the result "
        "(printing, writing).",
    )


def _leaves_loop(there: LineContext) -> bool:
    """Whether ranks leave a loop before the line; but what follows ``if not is_main_process: return`` is work alone."""
    inside = any(loop.line < there.choice <= loop.last for loop in there.loops)
    return inside and there.leaves.partition(" ")[0] in ("break", "return") and "main_process" not in there.condition


def _left_before(place: RankLocation, site: str, there: LineContext, diagnosis: Diagnosis) -> remedies.CauseAndFix:
    """Some ranks left a loop by a condition on the rank, and never came to the call that the others made."""
    away = [one for one in (*diagnosis.waiting, *diagnosis.missing) if not set(one.ranks) & set(place.ranks)]
    ranks = sorted({rank for one in away for rank in one.ranks})
    who = _sentence(name_ranks(ranks, RANGES)) if ranks else "Another rank"
    called = next((f" and called {_call(one)} at {one.site}" for one in away if one in diagnosis.waiting), "")
    return remedies.CauseAndFix(
        lead=f"{who} left the loop by the `{there.leaves}` under {split(site)[0]}:{there.choice}{called}, while "
        f"{name_ranks(place.ranks, RANGES)} went on with it.",
        cause=f"{there.condition.removeprefix('after ')} holds on some ranks only. The others called {_call(place)} at "
        f"{place.site}, which needs every rank.",
        fix=remedies.STOP_TOGETHER,
    )


def _opposite(
    places: Sequence[RankLocation], settings: dict[RankLocation, tuple[str, LineContext]], source: Reader
) -> remedies.CauseAndFix | None:
    """Whether each of two branches begins with the call that the other makes later."""
    if len(places) != 2:
        return None
    (one, here), (other, there) = [(place, settings[place][1]) for place in places]
    if not here.choice or here.choice != there.choice or _call(one) == _call(other):
        return None
    if not (_comes_later(_call(other), one, here, source) and _comes_later(_call(one), other, there, source)):
        return None
    return remedies.CauseAndFix(
        cause=f"The ranks call the same two in opposite order, in the two branches of line {here.choice}: "
        f"{_call(one)} first at {one.site}, {_call(other)} first at {other.site}.",
        fix="Let every rank make these calls in the same order.",
    )


def _comes_later(call: str, place: RankLocation, there: LineContext, source: Reader) -> bool:
    path, line = split(place.site)
    later = source(path)[line : there.branch[1]]
    return any(f"{call}(" in text for text in later)


def _left_loop(
    places: Sequence[RankLocation], settings: dict[RankLocation, tuple[str, LineContext]]
) -> remedies.CauseAndFix | None:
    """Whether some ranks are past a loop that others are still in."""
    for inside in places:
        path, _ = split(inside.site)
        for loop in settings[inside][1].loops:
            out = [place for place in places if split(place.site)[0] == path and split(place.site)[1] > loop.last]
            if out:
                return _out_of(loop, path, inside, out[0])
    return None


def _out_of(loop: Loop, path: str, inside: RankLocation, out: RankLocation) -> remedies.CauseAndFix:
    return remedies.CauseAndFix(
        lead=f"{_sentence(name_ranks(out.ranks, RANGES))} left the loop of {path}:{loop.line} and called {_call(out)} "
        f"at {out.site}, while {name_ranks(inside.ranks, RANGES)} went on with it.",
        cause=f"{_sentence(name_ranks(out.ranks, RANGES))} left the loop of line {loop.line} "
        f"(`{_cut(loop.text, 50)}`) while {name_ranks(inside.ranks, RANGES)} went on with it: fewer batches "
        "there, or a break on some ranks only.",
        fix=f"{remedies.EVEN} {remedies.STOP_TOGETHER}",
    )


def _stuck(
    places: Sequence[RankLocation], settings: dict[RankLocation, tuple[str, LineContext]]
) -> remedies.CauseAndFix | None:
    for place in places:
        who = _sentence(name_ranks(place.ranks, RANGES))
        text = settings[place][1].text
        if place.doing == "are in time.sleep":
            return remedies.CauseAndFix(
                cause=f"{who} sleeps at {place.site} (`{_cut(text, 60)}`) while the others wait for it.",
                fix="Do not sleep on one rank while others are in a collective; if it waits for something, let all.",
            )
        if "are in the loop" in place.doing:
            return remedies.CauseAndFix(
                cause=f"{who} does not come out of a `while` loop, at {place.site}.",
                fix="Look at what should end that loop on this rank; `lockstep stacks` shows whether it moves.",
            )
        if "keyboard" in place.doing:
            return remedies.CauseAndFix(
                cause=f"{who} asks a question that nobody sees.", fix="Ask before the job starts."
            )
    for place in places:
        site, there = settings[place]
        if there.condition:
            return remedies.CauseAndFix(
                cause=f"{_sentence(name_ranks(place.ranks, RANGES))} works alone ({site} is {there.condition}) while "
                "the others wait. If that work ends, nothing is wrong.",
                fix="Nothing, if it ends. To be told later, set LOCKSTEP_STALL_SECONDS higher.",
            )
    return None


def _call(place: RankLocation) -> str:
    """ "wait in reduce(mean) #27" -> "reduce"."""
    match = re.search(r"(?:in|left|refused|called) (?:torch's )?(\w+)", place.doing)
    return match[1] if match else "the call"


# --- the box -------------------------------------------------------------------------------------------------------


def _title(diagnosis: Diagnosis) -> str:
    if diagnosis.certain:
        return "the ranks are out of step"
    return f"ranks have been waiting for {span(diagnosis.seconds)}"


def _what_now(diagnosis: Diagnosis) -> str:
    if diagnosis.certain:
        return "stopped: this wait cannot end by itself."
    return "continues: this wait may still end by itself."


def _arguments(diagnosis: Diagnosis) -> list[str]:
    """In the form that is known from Accelerate's guides, with a line for each group of ranks."""
    title = remedies.title_of([place.detail for place in diagnosis.waiting if place.detail])
    lines = [f"Operation: `lockstep.{_call(diagnosis.waiting[0])}`", f"{title}:"]
    for place in diagnosis.waiting[:_PLACES]:
        who = f"Process{'' if len(place.ranks) == 1 else 'es'} {number_ranks(place.ranks, RANGES)}"
        verb = "left it already, " if "left" in place.doing else ""
        end = f"  ({verb}at {place.site})" if place.site else ""
        room = max(20, WIDTH - len(who) - len(end) - 6)
        lines.append(f"  - {who}: {_cut(place.detail or 'no tensors', room)}{end}")
    return [*lines, *_more(diagnosis.waiting)]


def _places(title: str, places: Sequence[RankLocation], source: Reader) -> list[Entry]:
    entries: list[Entry] = []
    for place in places[:_PLACES]:
        detail = f" ({place.detail})" if place.detail else ""
        text = setting(place.site, source).text if place.site else ""
        label = title if not entries else ""
        entries.append(Entry(label=label, text=state(place) + detail, code=_cut(text, 400), rows=3))
    return [*entries, *(Entry(label="", text=text) for text in _more(places))]


def _more(places: Sequence[RankLocation]) -> list[str]:
    rest = [rank for place in places[_PLACES:] for rank in place.ranks]
    return [f"and {name_ranks(rest, RANGES)} at {len(places) - _PLACES} more places"] if rest else []


def _cut(text: str, room: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= room else f"{text[: room - 2]} …"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
