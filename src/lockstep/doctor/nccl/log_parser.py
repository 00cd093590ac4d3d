"""Putting a story together, line by line. What is kept is bounded, however long the logs are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from lockstep.doctor.nccl import message
from lockstep.doctor.nccl.knowledge import Knowledge, LogPattern
from lockstep.doctor.nccl.log_summary import FOLLOWS, Communicator, LogSummary, Problem
from lockstep.doctor.nccl.message import Message
from lockstep.doctor.nccl.watchdog_state import Waiting

EVIDENCE = 600
"""Characters of a line that are kept as evidence."""
_MOST_PAIRS = 20_000
_MOST_COMMUNICATORS = 256
_MOST_PROCESSES = 8192
_MOST_PROBLEMS = 2000
_MOST_UNKNOWN = 100
_MOST_SETTINGS = 500
_MOST_FACTS = 50_000
_LARGEST_RANK = 1 << 24

_INFO = b" NCCL INFO "
_KNOWN_LINES = tuple(
    b"NCCL cudaDriverVersion Bootstrap NET/ Using Channel Ring Trees comm ncclComm 0 1 2 3 4 5 6 7 8 9".split()
)
"""How the lines begin that say what NCCL chose."""
_NOTED = re.compile(rb" -> [1-6]\b|Failed to open|GPU Direct RDMA|connect returned")
"""What the other lines of this level that matter have in them."""

_INIT = re.compile(
    r"comm 0x[0-9a-f]+ rank (?P<rank>\d+) nRanks? ?(?P<ranks>\d+)(?:.*?cudaDev (?P<device>\d+))?"
    r"(?:.*?commId (?P<id>0x[0-9a-f]+))?(?:.*?Init (?P<state>START|COMPLETE))?",
    re.IGNORECASE,
)
_VIA = re.compile(
    r"(?:Channel|Ring) (?P<channel>\d+)(?:/\d+)? : (?P<source>\d+)(?:\[[0-9a-fx]+\])? -> "
    r"(?P<target>\d+)(?:\[[0-9a-fx]+\])? (?:\[(?:send|receive)\] )?via (?P<via>\S.*?)(?: comm 0x\S*.*)?$"
)
_RING = re.compile(r"Channel (?P<channel>\d+)/(?P<channels>\d+) ?: +(?P<order>\d+(?: +\d+)*) *$")
_TREE = re.compile(r"\[(?P<channel>\d+)\] -?\d+(?:/-?\d+)*->(?P<rank>-?\d+)->(?P<parent>-?\d+)")
_CHANNELS = re.compile(r"(?P<coll>\d+) coll channels,.*?(?P<p2p>\d+) p2p channels")
_SETTING = re.compile(r"(?P<name>NCCL_\w+) set(?: by environment)? to (?P<value>\S+?)\.?$")
_VERSION = re.compile(r"NCCL version (?P<version>\d[\w.+-]*)")
_INTERFACE = re.compile(r"(?:\[\d+\])?(?P<name>[^\s:\[\]]+):(?P<address>\S+?)<\d+>")
_CARD = re.compile(r"\[\d+\](?P<name>[\w.-]+:\d+/\w+)")
_TRACE = re.compile(r"\S+\.(?:cc|cu|h|cpp):\d+ -> (?P<code>[1-6])\b")
_FILE_RANK = re.compile(r"rank_?(\d+)\.\w+$")
_NET = re.compile(r"NET/(?P<name>[^/\[\]]+)")

Who = tuple[str, int, int]
"""Machine, process, GPU."""


class LogParser:
    """Takes lines in, and gives the story."""

    def __init__(self, knowledge: Knowledge) -> None:
        self._knowledge = knowledge
        self._summary = LogSummary()
        self._communicators: dict[str, Communicator] = {}
        self._joining: dict[tuple[str, int, int], Communicator] = {}
        """The group that a thread is joining, or joined last."""
        self._joined: dict[Who, Communicator] = {}
        """The group that a process joined last with a GPU."""
        self._early: dict[tuple[str, int, int], Communicator] = {}
        """What was said before NCCL said of which group; older versions name it in the end."""
        self._ranks: dict[Who, tuple[int, int]] = {}
        """Size of the largest group of a process, and its rank there."""
        self._seen: dict[tuple[Any, ...], list[Any]] = {}
        self._unknown = 0
        self._facts: dict[tuple[str, str, Who], None] = {}
        self._last_error = False
        """Whether the line before announced the text of NCCL's last error."""
        self._waiting = Waiting()

    def add(self, log: str, number: int, raw: bytes) -> None:
        """One more line."""
        for part in raw.split(b"\r") if b"\r" in raw else (raw,):
            _, _, text = part.partition(_INFO)
            if text and not text.startswith(_KNOWN_LINES) and not _NOTED.search(text):
                self._summary.lines += 1  # most lines of a long log: each collective, when all is logged
            else:
                self._take(log, number, message.parse(part))

    def summarize(self) -> LogSummary:
        """The story so far."""
        summary = self._summary
        for group in self._early.values():
            self._merge(self._group("", group.ranks), group)
        self._early.clear()
        summary.communicators = sorted(self._communicators.values(), key=lambda group: -group.ranks)
        summary.processes = len({(host, pid) for host, pid, _ in self._ranks})
        for kind, value, who in self._facts:
            place = summary.versions.setdefault(value, set()) if kind == "version" else self._setting(kind, value)
            place.add(self._named(who))
        summary.waiting = self._waiting
        if summary.world is not None and summary.world.ranks <= _MOST_PROCESSES:
            summary.seen.update(range(summary.world.ranks))
        summary.problems = _ordered([self._problem(key, kept) for key, kept in self._seen.items()])
        return summary

    # ---------------------------------------------------------------- lines

    def _take(self, log: str, number: int, line: Message) -> None:
        last_error, self._last_error = self._last_error, line.whole.rstrip().endswith("Last error:")
        who = (line.host, line.pid, line.device)
        if line.level:
            self._summary.lines += 1
            if who not in self._ranks and len(self._ranks) < _MOST_PROCESSES:
                self._ranks[who] = (0, -1)
        if line.level == "INFO":
            self._inform(line, who)
            entry = self._knowledge.find_info(line.whole)
        elif line.level == "TRACE":
            return
        else:
            if found := _VERSION.search(line.text):
                self._fact("version", found["version"], who)
                if not line.level:
                    self._summary.lines += 1
            entry = self._knowledge.find(line.whole)
            if not line.level:
                self._watch(log, line)
        if entry is not None:
            self._keep(entry, log, number, line, who)
        elif line.level in ("WARN", "ABORT", "ERROR") or (last_error and line.whole):
            self._keep(None, log, number, line, who)

    def _watch(self, log: str, line: Message) -> None:
        """What torch's watchdog says of how far this rank has come."""
        rank = _rank_in(log, line)
        if rank is not None:
            if len(self._summary.seen) < _MOST_PROCESSES:
                self._summary.seen.add(rank)
            self._waiting.read(line.whole, rank)

    def _inform(self, line: Message, who: Who) -> None:
        first = line.text.split(" ", 1)[0]
        handler = self._HANDLERS.get(first)
        if handler is not None:
            handler(self, line, who)
        elif first.startswith("NCCL_"):
            if found := _SETTING.match(line.text):
                self._fact(found["name"], found["value"], who)
        elif first.startswith("ncclComm"):
            self._join(line, who)
        elif first.isdecimal():
            if found := _CHANNELS.match(line.text):
                group = self._current(line, who)
                group.channels = (int(found["coll"]), int(found["p2p"]))
        elif _TRACE.match(line.text):
            self._summary.failed = True

    def _version(self, line: Message, who: Who) -> None:
        if found := _VERSION.search(line.text):
            self._fact("version", found["version"], who)

    def _driver(self, line: Message, who: Who) -> None:
        number = line.text.rpartition(" ")[2]
        if number.isdecimal() and len(number) < 8 and len(self._summary.drivers) < 100:
            self._summary.drivers.add(f"{int(number) // 1000}.{int(number) % 1000 // 10}")

    def _read_bootstrap(self, line: Message, who: Who) -> None:
        """Where it meets the others: `Bootstrap : Using`, `NET/Socket : Using`, `NET/IB : Using`."""
        before, _, names = line.text.partition("Using ")
        if not names:
            return
        if "NET/IB" in before:
            cards, _, names = names.partition("OOB ")
            known = self._summary.cards.setdefault(line.host, set())
            known.update(found["name"] for found in _CARD.finditer(cards) if len(known) < 100)
        if len(self._summary.interfaces) < _MOST_PROCESSES:
            known = self._summary.interfaces.setdefault(line.host, set())
            for found in _INTERFACE.finditer(names):
                if len(known) < 100:
                    known.add(f"{found['name']} {found['address']}")

    def _network(self, line: Message, who: Who) -> None:
        if line.text.startswith("Using network ") and len(self._summary.networks) < 100:
            self._summary.networks.add(line.text.removeprefix("Using network ").strip())

    def _connect(self, line: Message, who: Who) -> None:
        if found := _VIA.match(line.text):
            pair = (int(found["source"][:9]), int(found["target"][:9]))
            self._pair(self._current(line, who), pair, found["via"])
        elif found := _RING.match(line.text):
            group = self._current(line, who)
            order = tuple(int(rank[:9]) for rank in found["order"].split())
            channel = int(found["channel"][:9])
            if len(group.rings) < 128 or channel in group.rings:
                group.rings[channel] = order
                group.ranks = max(group.ranks, len(order))

    def _tree(self, line: Message, who: Who) -> None:
        group = self._current(line, who)
        for found in _TREE.finditer(line.text):
            group.trees = max(group.trees, int(found["channel"][:9]) + 1)
            if int(found["channel"][:9]) == 0 and len(group.parents) < _MOST_PAIRS:
                group.parents[int(found["rank"][:9])] = int(found["parent"][:9])

    def _join(self, line: Message, who: Who) -> None:
        found = _INIT.search(line.text)
        if found is None:
            return
        rank, ranks = int(found["rank"][:9]), int(found["ranks"][:9])
        if rank >= ranks or ranks > _LARGEST_RANK:
            return
        group = self._group(found["id"] or "", ranks)
        thread = (line.host, line.pid, line.thread)
        early = self._early.pop(thread, None)
        if early is not None:
            self._merge(group, early)
        if len(self._joining) < _MOST_PROCESSES * 4:
            self._joining[thread] = group
        if who in self._ranks:
            self._joined[who] = group
            if ranks >= self._ranks[who][0]:
                self._ranks[who] = (ranks, rank)
        if len(group.began) < _LARGEST_RANK:
            group.began.add(rank)
            group.hosts[rank] = line.host
        if (found["state"] or "").upper() == "COMPLETE":
            group.complete.add(rank)

    _HANDLERS: ClassVar[dict[str, Callable[[LogParser, Message, Who], None]]] = {
        "NCCL": _version,
        "cudaDriverVersion": _driver,
        "Bootstrap": _read_bootstrap,
        "Bootstrap:": _read_bootstrap,
        "NET/Socket": _read_bootstrap,
        "NET/IB": _read_bootstrap,
        "Using": _network,
        "Channel": _connect,
        "Ring": _connect,
        "Trees": _tree,
        "comm": _join,
    }

    # ---------------------------------------------------------------- keeping

    def _group(self, key: str, ranks: int) -> Communicator:
        """The group of this id; logs of old versions have none, and are told apart by size only."""
        key = key or f"of {ranks}"
        if key not in self._communicators and len(self._communicators) >= _MOST_COMMUNICATORS:
            self._summary.dropped += 1
            return Communicator(ranks=ranks)
        return self._communicators.setdefault(key, Communicator(ranks=ranks))

    def _current(self, line: Message, who: Who) -> Communicator:
        """The group that a line is about: its thread's, else the latest of its GPU, else one that is named later."""
        thread = (line.host, line.pid, line.thread)
        group = self._joining.get(thread) or self._joined.get(who)
        if group is not None:
            return group
        if thread not in self._early and len(self._early) >= _MOST_PROCESSES:
            self._summary.dropped += 1
            return Communicator(ranks=0)
        return self._early.setdefault(thread, Communicator(ranks=0))

    def _pair(self, group: Communicator, pair: tuple[int, int], via: str) -> None:
        if pair not in group.pairs and len(group.pairs) >= _MOST_PAIRS:
            self._summary.dropped += 1
            return
        group.pairs[pair] = transport(via)
        exact = via[:60]
        if exact in group.details or len(group.details) < 64:
            group.details[exact] = group.details.get(exact, 0) + 1

    def _merge(self, into: Communicator, early: Communicator) -> None:
        into.ranks = max(into.ranks, early.ranks)
        into.pairs.update(early.pairs)
        into.rings.update(early.rings)
        into.parents.update(early.parents)
        into.trees = max(into.trees, early.trees)
        into.channels = into.channels or early.channels
        for exact, count in early.details.items():
            into.details[exact] = into.details.get(exact, 0) + count

    def _fact(self, kind: str, value: str, who: Who) -> None:
        fact = (kind, value[:200], who)
        if fact in self._facts or len(self._facts) < _MOST_FACTS:
            self._facts[fact] = None
        else:
            self._summary.dropped += 1

    def _setting(self, name: str, value: str) -> set[int | str]:
        known = self._summary.settings
        if name not in known and len(known) >= _MOST_SETTINGS:
            return set()
        return known.setdefault(name, {}).setdefault(value, set())

    def _keep(self, entry: LogPattern | None, log: str, number: int, line: Message, who: Who) -> None:
        writer: Any = who if line.level else (log, line.rank)
        # Of unknown ones, those that differ in numbers and addresses only are one.
        text = entry.id if entry is not None else re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", line.text)[:200]
        kept = self._seen.get((entry, text, writer))
        if kept is not None:
            kept[-1] += 1
            return
        self._unknown += entry is None
        if len(self._seen) >= _MOST_PROBLEMS or (entry is None and self._unknown > _MOST_UNKNOWN):
            self._summary.dropped += 1
            return
        self._seen[(entry, text, writer)] = [log, number, line, who, 1]

    # ---------------------------------------------------------------- in the end

    def _problem(self, key: tuple[Any, ...], kept: list[Any]) -> Problem:
        log, number, line, who, count = kept
        rank = self._rank(who) if line.level and line.rank is None else line.rank
        if rank is None:
            rank = _rank_in(log, line)
        evidence = line.whole
        if len(evidence) > EVIDENCE:
            # Torch puts a whole traceback on one line at times: the beginning says it.
            evidence = evidence[:EVIDENCE] + " …"
        return Problem(
            entry=key[0],
            rank=rank,
            host=line.host,
            log=log,
            line=number,
            evidence=evidence,
            time=line.time,
            count=count,
        )

    def _rank(self, who: Who) -> int | None:
        known = self._ranks.get(who)
        if known is not None and known[1] >= 0:
            return known[1]
        # A helper thread may name another GPU than the one its process works with.
        ranks = {rank for (host, pid, _), (_, rank) in self._ranks.items() if (host, pid) == who[:2] and rank >= 0}
        return ranks.pop() if len(ranks) == 1 else None

    def _named(self, who: Who) -> int | str:
        rank = self._rank(who)
        if rank is not None:
            return rank
        return f"{who[0]}:{who[1]}" if who[0] else "a process that is not named"


def _rank_in(log: str, line: Message) -> int | None:
    """The rank that a line names, or else its file."""
    if line.rank is None and (named := _FILE_RANK.search(log)):
        return int(named[1][:9])
    return line.rank


def transport(via: str) -> str:
    """The family of a transport: P2P, SHM, NET/IB, NET/Socket, …"""
    if via.startswith("P2P"):
        return "P2P"
    if via.startswith("SHM") or "shared memory" in via:
        return "SHM"
    if found := _NET.match(via):
        # The library's own plugin for InfiniBand goes by IBext.
        name = found["name"].strip()
        return "NET/IB" if name.startswith("IB") else f"NET/{name}"
    return via[:40]


def _ordered(problems: Iterable[Problem]) -> list[Problem]:
    """Likely causes first. Clocks are used only where all lines carry one: otherwise it is the order of the logs."""
    found = list(problems)
    timed = all(problem.time for problem in found)
    late: set[int] = set()
    followed: set[str] = set()
    for number, problem in enumerate(found):
        if problem.entry is None and problem.log in followed:
            late.add(number)
        elif problem.weight == FOLLOWS:
            followed.add(problem.log)

    def key(item: tuple[int, Problem]) -> tuple[int, str, int]:
        number, problem = item
        # What nobody knows, after what only follows in the same log, is no likelier to be the cause.
        weight = FOLLOWS if number in late else problem.weight
        return weight, problem.time if timed else "", number

    return [problem for _, problem in sorted(enumerate(found), key=key)]
