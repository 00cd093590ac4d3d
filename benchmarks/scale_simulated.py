"""What of a job with thousands of ranks can be run in one process without pretending: for ``scale.py``.

- The diagnosis is a pure function of all ranks' boxes: here they are made, not read.
- The exchange of the nodes' watchers: real ``Exchange`` objects, one for every 8 ranks, on connections of their own to
  one real TCPStore. Their calls are counted. How long they take says nothing: here all share one interpreter.
- What one rank asks the store for when it joins: the code of the group itself, on a store that counts.
- The commit of a checkpoint by rank 0, whose exchange with the others is answered as they would.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lockstep.blackbox.snapshot import Op, Snapshot
from lockstep.checkpoint import save
from lockstep.checkpoint.exchange import StoreExchange
from lockstep.checkpoint.save import Mark, SaveContext, SaveRequest
from lockstep.checkpoint.state import Content
from lockstep.config.handlers import ProjectConfiguration
from lockstep.guard.diagnose import diagnose
from lockstep.guard.job import HISTORY
from lockstep.guard.node_exchange import Exchange, _pack, _unpack
from lockstep.guard.render import explain
from lockstep.job_store.signed_store import SignedStore
from lockstep.process_group.group import Group
from lockstep.storage import hashing, manifest
from lockstep.storage.disk import Disk
from lockstep.topology.topology import Topology

PER_NODE = 8
SECRET = "secret"
PATIENCE = 120.0
"""Seconds that a round may take here, where the watchers of all nodes share one interpreter."""


# --- boxes ---------------------------------------------------------------------------------------------------------


def make_boxes(ranks: int, odd: str = "") -> list[Snapshot]:
    """Boxes of a job that waits in its 1,000th collective; the last rank is where ``odd`` says."""
    history = tuple(
        Op(seq=seq, name="gather", signature="f32[64,10]", site="train.py:27", since=float(seq))
        for seq in range(1001 - HISTORY, 1001)
    )
    boxes = [
        Snapshot(
            rank=rank,
            world_size=ranks,
            local_rank=rank % PER_NODE,
            node=rank // PER_NODE,
            host=f"node{rank // PER_NODE}",
            pid=1000 + rank,
            attempt="a.1",
            entered=1000,
            left=999,
            op=history[-1],
            history=history,
            step=500,
            beat=1060.0,
            now=1060.0,
        )
        for rank in range(ranks)
    ]
    last = boxes[-1]
    if odd == "another collective":
        other = replace(history[-1], name="wait_for_everyone", signature="", site="train.py:31")
        boxes[-1] = replace(last, op=other, history=(*history[:-1], other))
    elif odd == "user code":
        boxes[-1] = replace(last, entered=999, left=999, op=None, history=history[:-1], phase="data")
    elif odd == "dead":
        boxes[-1] = replace(last, entered=999, left=999, op=None, history=history[:-1], alive=False, words="SIGKILL")
    return boxes


def seconds_of(work: Callable[[], object], repeats: int = 3) -> list[float]:
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return taken


def diagnoses(ranks: int) -> dict[str, list[float]]:
    """Seconds from the boxes to the text, by what is wrong."""
    found = {}
    for odd in ("another collective", "user code", "dead"):
        boxes = make_boxes(ranks, odd)

        def say(boxes: Sequence[Snapshot] = boxes, odd: str = odd) -> None:
            diagnosis = diagnose(boxes)
            if diagnosis is None or str(ranks - 1) not in explain(diagnosis):
                raise SystemExit(f"{odd} on rank {ranks - 1} of {ranks} was not found: its time would mean nothing.")

        found[f"diagnosis, {odd}"] = seconds_of(say)
    return found


# --- the store -----------------------------------------------------------------------------------------------------


class Counting:
    """A connection to a store that counts its calls, with those made by its copies."""

    def __init__(self, store: Any, calls: Counter[str]) -> None:
        self._store = store
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if not callable(value):
            return value

        def call(*args: Any) -> Any:
            self._calls[name] += 1
            return value(*args)

        return call

    def clone(self) -> Counting:
        # A HashStore is this process's own, and has no connections.
        return Counting(self._store if isinstance(self._store, dist.HashStore) else self._store.clone(), self._calls)


def exchange_calls(ranks: int) -> dict[str, float]:
    """Calls to the store in one round in which a watcher asks all others, and what comes back."""
    nodes = ranks // PER_NODE
    _allow_connections(4 * nodes + 200)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    calls = [Counter[str]() for _ in range(nodes)]
    boxes = make_boxes(ranks, "another collective")
    ready = threading.Semaphore(0)

    def connect(node: int) -> SignedStore:
        ready.release()
        return SignedStore(Counting(server.clone(), calls[node]), SECRET, "guard")

    watchers = [
        Exchange(
            lambda node=node: connect(node),  # type: ignore[misc]
            node=node,
            nodes=nodes,
            boxes=lambda _, node=node: boxes[node * PER_NODE : (node + 1) * PER_NODE],  # type: ignore[misc]
            receive=lambda _: None,
        )
        for node in range(nodes)
    ]
    for _ in range(2 * nodes):
        ready.acquire()
    while any(watcher._store is None for watcher in watchers):
        time.sleep(0.01)
    for counted in calls:
        counted.clear()
    everybody = watchers[0].collect(boxes[:PER_NODE], patience=PATIENCE)
    if everybody is None or len(everybody) != ranks:
        raise SystemExit(f"Of {ranks} boxes {len(everybody or ())} came: the count would mean nothing.")
    found = {
        "exchange, calls of who asks, polls included": float(sum(calls[0].values())),
        "exchange, calls of each other node": median(sum(one.values()) for one in calls[1:]),
        "exchange, kB received": sum(len(_pack(boxes[n * PER_NODE :][:PER_NODE])) for n in range(1, nodes)) / 1024,
    }
    for watcher in watchers:
        watcher._ended.set()
    for node, watcher in enumerate(watchers):
        SignedStore(server, SECRET, "guard").set(watcher._inbox(node, watcher._round), "")
    for watcher in watchers:
        watcher._thread.join()
    return found


def unpacking(ranks: int) -> dict[str, list[float]]:
    """Seconds in which the node that asks opens all answers."""
    packed = _pack(make_boxes(PER_NODE))

    def unpack() -> None:
        for _ in range(ranks // PER_NODE):
            _unpack(packed)

    return {"exchange, opening the answers": seconds_of(unpack)}


def store_calls(ranks: int) -> dict[str, float]:
    """Calls of one rank while it joins, beside those of torch, and in a turn of an asynchronous save."""
    calls = Counter[str]()
    store = dist.HashStore()
    group = Group(Topology(rank=1, world_size=ranks, device=torch.device("cpu"), backend="gloo"))
    group._store = SignedStore(Counting(store, calls), SECRET)
    others = SignedStore(store, SECRET)
    for rank in range(ranks):
        others.set(f"generation_0/ports/{rank}", "[1]")
        others.set(f"checkpoint/ticket/1/{rank}", "[0]")
    group._exchange_ports(frozenset())
    at_start = sum(calls.values())
    calls.clear()
    StoreExchange(group, "ticket")(0, "saving")
    return {
        "start, calls of a rank to learn all ports": float(at_start),
        "asynchronous save, calls of a rank in a turn": float(sum(calls.values())),
    }


def _allow_connections(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


# --- the commit ----------------------------------------------------------------------------------------------------


def commits(ranks: int) -> dict[str, list[float]]:
    """Seconds in which rank 0 agrees with all others that a checkpoint is written, and commits it."""
    taken, read = [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            own, whole = _commit(ranks, Path(folder))
            taken.append(own)
            read += seconds_of(lambda whole=whole: manifest.read(whole), 1)  # type: ignore[misc]
    return {"commit, rank 0": taken, "commit, reading the manifest": read}


def _commit(ranks: int, folder: Path) -> tuple[float, Path]:
    topology = Topology(rank=0, world_size=ranks, device=torch.device("cpu"))
    wish = SaveRequest(
        project=ProjectConfiguration(project_dir=str(folder)), output_dir=folder / "state", durable=False
    )
    site = SaveContext(topology=topology, disk=Disk(), request=wish)
    elsewhere = 0.0

    def answer(value: Any, doing: str) -> list[Any]:
        nonlocal elsewhere
        begin = time.perf_counter()
        try:
            if "folder" in doing:
                return [value, *([[0, None]] * (ranks - 1))]
            if "written" not in doing:
                return [value] * ranks
            return [value, *(_other(site.folder, rank, value) for rank in range(1, ranks))]
        finally:
            elsewhere += time.perf_counter() - begin

    content = Content(files={"random_states_0.pkl": {"seed": 1}}, counters={"updates": 1, "world_size": ranks})
    begin = time.perf_counter()
    save.begin(site, answer)
    save.finish(site, content, answer, Mark(generation=0, number=7, digest=1))
    return time.perf_counter() - begin - elsewhere, folder / "state"


def _other(folder: Path, rank: int, value: Any) -> Any:
    """What another rank writes and sends: a file of its own, and how that hashes."""
    path = folder / f"random_states_{rank}.pkl"
    path.write_bytes(json.dumps({"rank": rank}).encode())
    size, chunks = hashing.hash_file(path)
    return {**value, "files": {path.name: manifest.ManifestEntry(size=size, chunks=chunks).to_json()}}


# --- all of it -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Print all figures as JSON: name -> ranks -> seconds, or a count; what is under way goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="+", help="multiples of 8, from 16")
    found: dict[str, dict[int, list[float]]] = {}
    for ranks in parser.parse_args().ranks:
        for part in (diagnoses, unpacking, exchange_calls, store_calls, commits):
            print(f"{ranks} ranks, simulated: {part.__name__.replace('_', ' ')}", file=sys.stderr, flush=True)
            for name, value in part(ranks).items():
                found.setdefault(name, {})[ranks] = value if isinstance(value, list) else [value]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
