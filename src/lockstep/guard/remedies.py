"""What a finding most likely comes from, and what to do, as far as the boxes tell; ``explain`` reads the script too."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.blackbox.snapshot import Op, Snapshot
from lockstep.errors import LOST_PEER
from lockstep.guard.diagnosis import RankLocation
from lockstep.guard.rank_location import RANGES, at
from lockstep.rundir.format_ranks import name_ranks

STOP_TOGETHER = (
    "To leave a loop on all ranks at once, call accelerator.set_trigger() where one wants to, and let every rank "
    "break when accelerator.check_trigger() is true."
)
TOGETHER = (
    "Let all ranks decide alike: share the decision first (accelerator.gather or accelerator.reduce of a flag), then "
    "skip on every rank or on none. Let no `except` pass over an error on one rank only."
)
EVEN = (
    "Give every rank as many batches: prepare the data loader and keep even_batches=True, or put the loop into "
    "accelerator.join_uneven_inputs([model])."
)
KILLED = (
    "If nobody killed it, memory is the first suspect: look for the out-of-memory killer in `dmesg`, and at the limits "
    "of the container or the batch system."
)
_STEPS = re.compile(r"after (\d+) optimizer steps?")
_SHAPE = re.compile(r"[\[(][\d, x]*[\])]")
_DTYPE = re.compile(r"\b(torch\.)?(b?float|u?int|complex|bool|half|double|long)\d*\w*\b")


@dataclass(frozen=True, kw_only=True)
class CauseAndFix:
    """Cause and fix."""

    cause: str
    """The most likely one."""
    fix: str
    """What to do."""
    lead: str = ""
    """The rank that strayed, and where, in a sentence; empty where the boxes and the script do not show which did."""


@dataclass(frozen=True, kw_only=True)
class RanksInCall:
    """Ranks that made the same call."""

    op: Op
    """As one of them made it."""
    ranks: tuple[int, ...]
    """Which."""

    @property
    def key(self) -> tuple[str, str]:
        """What makes it the same call, time and again."""
        return self.op.name, self.op.site

    @property
    def who(self) -> str:
        """The ranks, in words."""
        return name_ranks(self.ranks, RANGES)


def recovering(why: CauseAndFix) -> CauseAndFix:
    """For ranks inside a scope of ``agree``, which ends such waits by itself."""
    return CauseAndFix(
        cause="The ranks are recovering: a failure inside agree is survived, so the job is not stopped. "
        f"If it does not go on: {why.cause}",
        fix=f"Wait for it to go on. If it does not: {why.fix}",
        lead=why.lead,
    )


def apart(places: Sequence[RankLocation]) -> str:
    """What it means that ranks make calls of one name at different lines."""
    where = ", ".join(f"{name_ranks(place.ranks, RANGES)} at {place.site}" for place in places[:3])
    return f"It may have begun earlier: {places[0].doing.removeprefix('called ')} was called by {where}."


# --- different calls -----------------------------------------------------------------------------------------------


def different_ops(number: int, calls: Sequence[RanksInCall], histories: Mapping[int, Mapping[int, Op]]) -> CauseAndFix:
    """Ranks made different calls as their n-th."""
    usual, odd = _usual_and_odd(number, calls, histories)
    if _crossed(number, usual, odd, histories):
        return opposite_order(usual.op, odd.op)
    before = {(op.name, op.site) for rank in odd.ranks[:1] for seq, op in histories[rank].items() if seq < number}
    if usual.key in before and odd.key in before:
        return CauseAndFix(
            cause=f"So far every rank made both calls; this time {odd.who} left out {_call(usual.op)} and went on to "
            f"{_call(odd.op)}: a `continue` (a NaN loss that is skipped, say), a condition that holds on that rank "
            "only, or an exception that was caught and passed over.",
            fix=TOGETHER,
            lead=f"{_sentence(odd.who)} left out {_call(usual.op)}, and called {_call(odd.op)}.",
        )
    if usual.key in before:
        return CauseAndFix(
            cause=f"{_sentence(usual.who)} went on with {_call(usual.op)}, as before; {odd.who} went elsewhere, to "
            f"{_call(odd.op)}: a loop left early (break, or fewer batches), or a line that not every rank runs.",
            fix=f"{STOP_TOGETHER} {EVEN}",
            lead=f"{_sentence(odd.who)} went elsewhere, to {_call(odd.op)}, while {usual.who} went on with "
            f"{_call(usual.op)}.",
        )
    return CauseAndFix(
        cause=f"The ranks took different ways through the script: {_call(usual.op)} and {_call(odd.op)} are called in "
        "opposite order, or each only on some ranks.",
        fix="Let every rank make the same calls in the same order; keep them out of code that depends on the rank.",
    )


def opposite_order(one: Op, other: Op) -> CauseAndFix:
    """Each rank begins with the call that the other makes second."""
    return CauseAndFix(
        cause=f"The ranks call the same two in opposite order: some begin with {_call(one)}, others with "
        f"{_call(other)}.",
        fix="Let every rank make these calls in the same order.",
    )


def _usual_and_odd(
    number: int, calls: Sequence[RanksInCall], histories: Mapping[int, Mapping[int, Op]]
) -> tuple[RanksInCall, RanksInCall]:
    """Which call was to be expected, by what came after the same point before, or else by what most ranks did."""
    most = sorted(calls, key=lambda call: (-len(call.ranks), call.ranks[0]))
    usual = most[0]
    expected = _expected(number, histories[usual.ranks[0]])
    usual = next((call for call in most if call.key == expected), usual)
    odd = next(call for call in most if call.op.name != usual.op.name)
    return usual, odd


def _expected(number: int, history: Mapping[int, Op]) -> tuple[str, str] | None:
    last = history.get(number - 1)
    if last is None:
        return None
    for seq in range(number - 2, min(history) - 1, -1):
        op = history.get(seq)
        if op is not None and (op.name, op.site) == (last.name, last.site):
            after = history.get(seq + 1)
            return (after.name, after.site) if after is not None else None
    return None


def _crossed(number: int, one: RanksInCall, other: RanksInCall, histories: Mapping[int, Mapping[int, Op]]) -> bool:
    next_of_one = histories[one.ranks[0]].get(number + 1)
    next_of_other = histories[other.ranks[0]].get(number + 1)
    return (
        next_of_one is not None
        and next_of_other is not None
        and next_of_one.name == other.op.name
        and next_of_other.name == one.op.name
    )


def _call(op: Op) -> str:
    return at(replace(op, seq=0)).replace(" #0", "", 1)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- different arguments -------------------------------------------------------------------------------------------


def what_differs(signatures: Sequence[str]) -> str:
    """ "shapes", "dtypes", "structures", or "steps" where optimizers have made more of them on some ranks."""
    if all(_STEPS.fullmatch(signature) for signature in signatures):
        return "steps"
    if len({_DTYPE.sub("t", _SHAPE.sub("s", signature)) for signature in signatures}) > 1:
        return "structures"
    if len({tuple(_SHAPE.findall(signature)) for signature in signatures}) > 1:
        return "shapes"
    return "dtypes"


def title_of(signatures: Sequence[str]) -> str:
    """What the arguments of a call are, above a list of them: how many steps came before a backward is no shape."""
    return "Optimizer steps" if signatures and what_differs(signatures) == "steps" else "Input shapes"


def different_arguments(name: str, what: str) -> CauseAndFix:
    """One call, whose arguments do not fit together."""
    name = name.partition("(")[0].strip()
    if what == "shapes":
        return CauseAndFix(
            cause=f"{name} needs the same shape on every rank. Often the last batch is smaller on one rank, or "
            "sequences are padded to the longest of each rank's own batch.",
            fix="Call accelerator.pad_across_processes(tensor, dim=…) first, or use accelerator.gather_for_metrics.",
        )
    if what == "dtypes":
        return CauseAndFix(
            cause=f"{name} needs the same dtype on every rank. Often one rank makes its tensor another way: an integer "
            "count, a Python float, or a part that ran outside of autocast.",
            fix="Give the tensor its dtype where it is made, or convert it (tensor.float()) before the call.",
        )
    return CauseAndFix(
        cause=f"{name} needs the same structure on every rank: as many tensors, under the same keys, in the same "
        "order. Often a key is added on one rank only.",
        fix="Build the same dict, list or tuple on every rank; fill what a rank does not have with zeros.",
    )


def different_steps(calls: Sequence[tuple[Snapshot, Op]]) -> CauseAndFix:
    """One reduction of gradients, before which optimizers have made more steps on some ranks."""
    counts = {box.rank: int(found[1]) for box, op in calls if (found := _STEPS.fullmatch(op.signature))}
    most = max(counts.values())
    fewer = [rank for rank, count in counts.items() if count < most]
    ahead = [rank for rank, count in counts.items() if count == most]
    line = next((box.stepped_at for box, _ in calls if box.rank in ahead and box.stepped_at), "")
    left_out = min(counts[rank] for rank in fewer) + 1
    return CauseAndFix(
        cause=f"{_sentence(name_ranks(fewer, RANGES))} left out optimizer step {left_out}, which "
        f"{name_ranks(ahead, RANGES)} made{f' at {line}' if line else ''}: a `continue` after backward (zero_grad() "
        "and on to the next batch, say), a condition that holds on that rank only, or an exception that was caught. "
        "The weights differ since.",
        fix=f"{TOGETHER} Then load the last checkpoint: the weights are no longer the same on all ranks.",
        lead=f"{_sentence(name_ranks(fewer, RANGES))} left out optimizer step {left_out}"
        f"{f', which others made at {line}' if line else ''}.",
    )


# --- gone ----------------------------------------------------------------------------------------------------------


def is_follower(place: RankLocation) -> bool:
    """Whether its end reads like a consequence of another rank's."""
    return bool(LOST_PEER.search(place.detail))


def ended_rank_cause(place: RankLocation, waiting: Sequence[RankLocation]) -> CauseAndFix:
    """Ranks wait for one that has ended."""
    who = _sentence(name_ranks(place.ranks, RANGES))
    was = "was" if len(place.ranks) == 1 else "were"
    if place.doing.startswith("have failed"):
        return CauseAndFix(
            cause=f"{who} failed: {place.detail or 'with an exception'}. The others only wait for it.",
            fix="Mend that error; its traceback is in the run directory (words/ and logs/). If the script is to "
            "survive it, run the step inside accelerator.agree, which lets every rank know.",
        )
    if place.doing.startswith("have crashed"):
        return CauseAndFix(
            cause=f"{who} {was} ended by a crash in native code ({place.detail}). The others only wait for it.",
            fix="Look at what it wrote last (logs/ and stacks/ in the run directory).",
        )
    if place.doing.startswith("were killed"):
        return CauseAndFix(
            cause=f"{who} {was} ended from outside: {place.detail}."
            if place.detail
            else f"{who} {was} ended from outside.",
            fix=KILLED,
        )
    if place.doing.startswith("have finished") or re.search(r"exit code 0\b", place.detail):
        if any("backward" in at_work.doing for at_work in waiting):
            return CauseAndFix(
                cause=f"{who} came to the end of the script while others still train: it had fewer batches, or left "
                "its loop early (break, return, sys.exit).",
                fix=f"{EVEN} {STOP_TOGETHER}",
            )
        return CauseAndFix(
            cause=f"{who} came to the end of the script without this call: it had fewer batches, left a loop or "
            "function early (break, return, sys.exit), or the call is on a way that only some ranks take.",
            fix=f"Let every rank make the call. {EVEN} {STOP_TOGETHER}",
        )
    died = f": {place.detail}" if place.detail else ", and left no word of why"
    return CauseAndFix(
        cause=f"{who} ended{died}.",
        fix="Look for sys.exit, os._exit or exit() in the script, and at what the rank printed last (logs/ in the run "
        f"directory). It may have been killed. {KILLED}",
    )


# --- torch's own ---------------------------------------------------------------------------------------------------


def raw(boxes: Sequence[Snapshot], shapes: bool) -> CauseAndFix:
    """Calls of torch.distributed that do not meet."""
    if shapes and all(box.op is not None and box.op.name.startswith("backward") for box in boxes):
        return CauseAndFix(
            cause="The gradients that the ranks average differ in size: the model is not the same on every rank.",
            fix="Build the model alike on every rank: nothing in it may depend on the rank or on its data.",
        )
    if shapes:
        return CauseAndFix(
            cause="The ranks call the same function of torch.distributed with tensors of different sizes.",
            fix="Make the tensors equal in shape on every rank before the call (accelerator.pad_across_processes).",
        )
    return CauseAndFix(
        cause="Calls of torch.distributed meet in the order in which each rank makes them; these ranks make different "
        "ones, or the same ones in another order.",
        fix="Let every rank make the same calls in the same order: those of torch.distributed and those of Lockstep.",
    )


# --- not there yet -------------------------------------------------------------------------------------------------


def missing(places: Sequence[RankLocation]) -> CauseAndFix:
    """Ranks wait for one that lives, and may still come."""
    doing = " ".join(place.doing for place in places)
    ranks = [rank for place in places for rank in place.ranks]
    who = _sentence(name_ranks(ranks, RANGES))
    one = len(ranks) == 1
    if "paused" in doing or "debugger" in doing:
        return CauseAndFix(
            cause=f"{who} {'is' if one else 'are'} held by a debugger or a stop signal.",
            fix="Let it go on (`continue`, `fg`, `kill -CONT`).",
        )
    if "data loader" in doing:
        return CauseAndFix(
            cause=f"{who} {'gets' if one else 'get'} no next batch: a worker of the data loader is stuck, or disk or "
            "network is slow.",
            fix="Look at the samples and files that rank reads; with num_workers=0 the stack shows the line, with "
            "DataLoader(timeout=…) a stuck worker raises.",
        )
    if "compiling" in doing:
        return CauseAndFix(
            cause=f"{who} {'compiles' if one else 'compile'} the model while others wait; that may take minutes and "
            "end well.",
            fix="Nothing, if it ends. If it comes again each time shapes change, see torch.compile(dynamic=True).",
        )
    if "are lost with" in doing:
        return CauseAndFix(
            cause=f"The node of {who[:1].lower() + who[1:]} does not answer: it has failed, or the network to it has.",
            fix="Look whether the node is up, and at its kernel log; if it is up, at the network between the nodes. "
            "The ranks here wait until the timeout of the process group; to end them now, stop the job. Then start it "
            "again from its last checkpoint.",
        )
    if "heard of" in doing and len(places) == 1:
        return CauseAndFix(
            cause=f"What {who[:1].lower() + who[1:]} does is not known here.",
            fix="Look at the output of the machines they run on, and at `lockstep stacks` there.",
        )
    if "still in" in doing:
        return CauseAndFix(
            cause="Ranks are in different collectives, one behind the other: slow network, or a rank that gave one up "
            "after an exception and went on.",
            fix="If it does not end: let no `except` pass over an error in a collective on one rank only.",
        )
    return CauseAndFix(
        cause=f"{who} {'is' if one else 'are'} busy or stuck outside of the collective that the others wait in. "
        "Long work on one rank alone (evaluating, downloading, preparing data) looks like this and is no error.",
        fix="If it does not end by itself, `lockstep stacks` shows where each rank is.",
    )


def all_wait() -> CauseAndFix:
    """Everybody has come, and still it does not end."""
    return CauseAndFix(
        cause="Nobody is missing, so the data itself is slow or stuck on its way: a network that drops packets, a "
        "wrong interface, a firewall, or simply a lot of data.",
        fix="If it does not end: check the network between the machines, and which interface is used "
        "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME).",
    )
