"""The watchers of a job's machines, together: over a store, and only once one of them has something to ask.

While all is well each watcher has one connection on which it waits for a word in its inbox, and nothing is sent. A
watcher whose ranks are blocked, or all wait for a slower one, opens a *round*; of several only the first does, and the
others leave it to that one.
All answer with the boxes of their machine. Who has opened it looks at all of them, and what it finds goes out as the
next round. So the traffic of a job that hangs is a few messages for each machine and look, however many machines wait.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from lockstep.blackbox.snapshot import Op, Raw, Snapshot, TorchCall
from lockstep.errors import TopologyError
from lockstep.host.threads import join
from lockstep.job_store.signed_store import check_fields
from lockstep.rundir.format_ranks import name_ranks

PATIENCE = 1.5
"""Seconds that a round waits for the answers of other machines."""
_DAY = timedelta(days=1)
_TRIES = 20
_BEHIND = 64
"""Rounds by which no watcher is behind: what it has not read waits in its inbox. Earlier ones are removed."""
_MOST = 64 * 2**20
"""Bytes that the boxes of one node may take."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One of the job's nodes, as all of them know it from the rendezvous."""

    number: int
    host: str
    ranks: tuple[int, ...]
    address: str = ""

    @property
    def place(self) -> str:
        """Where it is: "node 1 (host b, 10.0.0.2)"."""
        return f"node {self.number} (host {self.host}{f', {self.address}' if self.address else ''})"

    def __str__(self) -> str:
        """As messages name it: "node 1 (host b, ranks 2-3)"."""
        return f"node {self.number} (host {self.host}, {name_ranks(self.ranks)})"


class Exchange:
    """This machine's end."""

    def __init__(
        self,
        connect: Callable[[], Any],
        *,
        node: int,
        nodes: int,
        boxes: Callable[[str], Sequence[Snapshot]],
        receive: Callable[[dict[str, Any]], None],
        reach: Callable[[], str] = lambda: "",
    ) -> None:
        self.node = node
        """This machine's number."""
        self.silent: tuple[int, ...] = ()
        """Nodes that did not answer when they were last asked."""
        self._reach = reach
        self._connect = connect
        self._nodes = nodes
        self._boxes = boxes
        self._receive = receive
        self._store: Any = None
        """The connection of whoever asks; the thread's own is busy waiting. None before there is one, and after."""
        self._round = 1
        self._left_to_others = (0, 0.0)
        self._ended = threading.Event()
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="lockstep-exchange", daemon=True)
        self._thread.start()

    # --- asking --------------------------------------------------------------------------------------------------

    def collect(self, mine: Sequence[Snapshot], about: str = "", patience: float = PATIENCE) -> list[Snapshot] | None:
        """The boxes of all machines that answer, who hear what it is about; None when another is asking already.

        ``silent`` holds those that did not answer within ``patience`` seconds.
        """
        store, number = self._store, self._round
        if store is None and self._thread.is_alive():
            return None  # not there yet
        # Where the network is down, a call to the store would wait for minutes.
        if store is None or (self.node and self._reach()):
            return self._without_store(mine)
        try:
            if not self._open(store, number, {"from": self.node, "asks": about}):
                return None
            return [*mine, *self._collect(store, number, patience)]
        except RuntimeError:
            return self._without_store(mine)

    def _without_store(self, mine: Sequence[Snapshot]) -> list[Snapshot]:
        """The store has gone, and node 0 with it, which hosts it; of the others nothing is known."""
        self.silent = (0,) if self.node else ()
        return list(mine)

    def publish(self, message: dict[str, Any]) -> bool:
        """Let all other watchers hear of something; returns when they have, or have had time to. False: nobody does."""
        store = self._store
        with suppress(RuntimeError):
            for _ in range(_TRIES if store is not None else 0):
                number = self._round
                if self._open(store, number, {"from": self.node, **message}):
                    # The host of the store may end next, and with it whatever nobody has fetched yet.
                    self._until_read(store, [self._inbox(node, number) for node in self._others()])
                    return True
                with self._moved:  # somebody else's round: the next one, then
                    self._moved.wait_for(lambda number=number: self._round > number, timeout=1.0)  # type: ignore[misc]
        return False

    def close(self, last: Iterable[Snapshot] = ()) -> None:
        """Leave what this machine's boxes said in the end, for those who still ask, and end the thread."""
        self._ended.set()
        store = self._store
        if store is not None:
            with suppress(RuntimeError):
                store.set(f"left/{self.node}", _pack(last))
                store.set(self._inbox(self.node, self._round), "")
        join(self._thread, 2)

    def _others(self) -> list[int]:
        return [node for node in range(self._nodes) if node != self.node]

    @staticmethod
    def _inbox(node: int, number: int) -> str:
        return f"inbox/{node}/{number}"

    def _open(self, store: Any, number: int, message: dict[str, Any]) -> bool:
        """Begin a round; False when another machine has begun it."""
        said = json.dumps({**message, "id": uuid.uuid4().hex})
        try:
            first = store.claim(f"round/{number}", said, bytes.decode)
        except TopologyError:  # a value of nobody's stands there: make room, and try again at the next look
            store.delete(f"round/{number}")
            return False
        if first != said:
            lost, since = self._left_to_others
            if lost != number:
                self._left_to_others = number, time.monotonic()
            elif time.monotonic() - since > 2 * PATIENCE:
                self._deliver(store, number, first)  # whoever began it has died before it could tell all
            return False
        self._deliver(store, number, said)
        store.delete(f"round/{number - _BEHIND}")
        return True

    def _deliver(self, store: Any, number: int, said: str) -> None:
        store.set("latest", str(number))
        for node in range(self._nodes):
            store.set(self._inbox(node, number), said)

    def _until_read(self, store: Any, keys: list[str]) -> None:
        until = time.monotonic() + PATIENCE
        while any(store.peek(key) is not None for key in keys) and time.monotonic() < until:
            time.sleep(0.02)

    def _collect(self, store: Any, number: int, patience: float) -> list[Snapshot]:
        open_keys = {other: f"answer/{number}/{other}" for other in self._others()}
        found: list[Snapshot] = []
        until = time.monotonic() + patience
        while open_keys:
            late, before = time.monotonic() > until, len(open_keys)
            for other, key in list(open_keys.items()):
                answer = store.peek(key, _unpack)
                boxes = answer if answer is not None else store.peek(f"left/{other}", _unpack)
                if boxes is not None:
                    found += boxes
                    if answer is not None:
                        store.delete(key)
                    del open_keys[other]
            # Opening the answers of many nodes takes longer than the patience: others may have come in meanwhile.
            if late and len(open_keys) == before:
                break
            time.sleep(0.02 if open_keys else 0.0)
        self.silent = tuple(open_keys)
        return found

    # --- answering -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            store, own = self._connect(), self._connect()
            latest = store.peek("latest", int)
            if latest is not None:  # taking over from a watcher that has died, or late
                self._round = latest + 1
                while self._round > 1 and store.peek(self._inbox(self.node, self._round - 1)) is not None:
                    self._round -= 1  # nobody has read it yet
            self._store = own
            while not self._ended.is_set():
                key = self._inbox(self.node, self._round)
                try:
                    message = store.get(key, _read_message, _DAY)
                except RuntimeError as error:
                    # By its name: this package is loaded where torch is not.
                    if type(error).__name__ == "DistStoreError":
                        continue  # nothing happened for a day
                    raise
                if not message:
                    return
                store.delete(key)
                if message["from"] != self.node:
                    with suppress(KeyError, TypeError, ValueError, AttributeError):  # not a watcher's message
                        self._answer(store, message)
                with self._moved:
                    self._round += 1
                    self._moved.notify_all()
        except RuntimeError:
            self._store = None  # its host has gone: nobody is left to talk to, and each try would take a minute

    def _answer(self, store: Any, message: dict[str, Any]) -> None:
        if "asks" in message:
            store.delete(f"answer/{self._round - _BEHIND}/{self.node}")  # one that came too late to be read
            store.set(f"answer/{self._round}/{self.node}", _pack(self._boxes(message["asks"])))
        else:
            self._receive(message)


def _pack(boxes: Iterable[Snapshot]) -> bytes:
    return zlib.compress(json.dumps([asdict(box) for box in boxes]).encode(), 1)


def _read_message(data: bytes) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(data) if data else {}
    if message and type(message["from"]) is not int:
        raise ValueError(message["from"])
    return message


def _unpack(data: bytes) -> list[Snapshot]:
    opened = zlib.decompressobj()
    text = opened.decompress(data, _MOST)
    if not opened.eof:
        raise ValueError(f"more than {_MOST} bytes")
    return [_snapshot(fields) for fields in json.loads(text)]


def _snapshot(fields: dict[str, Any]) -> Snapshot:
    op, raw = fields["op"], fields["raw"]
    box = Snapshot(
        **{
            **fields,
            "op": None if op is None else Op(**op),
            "raw": None if raw is None else Raw(**raw),
            "history": tuple(Op(**op) for op in fields["history"]),
            "stack": tuple(fields["stack"]),
            "torch_calls": tuple(TorchCall(**call) for call in fields["torch_calls"]),
            "pace": tuple(tuple(step) for step in fields["pace"]),
        }
    )
    for part in (box, *filter(None, (box.op, box.raw)), *box.history):
        check_fields(part)
    return box
