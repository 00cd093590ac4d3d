"""One save: agree on a folder, write beside it, agree that all is written, give it its name.

Every rank writes what only it has. What the ranks have in common is written by one of them, the *home*: rank 0, or the
first of each machine where each keeps a checkpoint of its own. Whatever fails on any rank is told to all of them, the
unfinished folder is removed, and the checkpoint that was there before stays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from lockstep import __version__
from lockstep.checkpoint import safe_pickle
from lockstep.checkpoint.exchange import Exchange
from lockstep.checkpoint.prune import prune
from lockstep.checkpoint.state import STATE, Content, numbered_name
from lockstep.comm import replicas
from lockstep.config.handlers import ProjectConfiguration
from lockstep.errors import CheckpointError, ConfigError
from lockstep.model_files import weights
from lockstep.rundir.format_ranks import name_ranks
from lockstep.storage import commit, hashing, manifest
from lockstep.storage.disk import Disk
from lockstep.storage.hashing import HashedFile
from lockstep.storage.manifest import Manifest, ManifestEntry
from lockstep.topology.topology import Topology

_ONE_FILE = 1 << 60
"""A model in one file, however large: Accelerate's load_state reads no shards."""


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """What was asked for."""

    project: ProjectConfiguration
    output_dir: str | os.PathLike[str] | None = None
    safe: bool = True
    """Whether models go into safetensors files."""
    durable: bool = True
    """Whether to wait until the medium has everything."""
    alone: bool = False
    """Whether the main process saves without the others."""


@dataclass(kw_only=True)
class SaveContext:
    """Where a save takes place, as one rank sees it."""

    topology: Topology
    disk: Disk
    request: SaveRequest
    place: Path = field(default_factory=Path)
    """What the checkpoint will be called."""
    folder: Path = field(default_factory=Path)
    """Where it is until then."""
    number: int | None = None
    """Of a numbered one."""
    ticket: str = ""
    """Names this save, on all ranks alike."""
    staging: commit.Staging | None = None
    """On the home: the folder as it is published or removed."""
    moved: Callable[[int], None] = lambda _: None
    """Told of bytes that were written."""

    @property
    def is_home(self) -> bool:
        """Whether this rank writes what all have in common, and gives the folder its name."""
        return self.topology.is_local_main if self.request.project.save_on_each_node else self.topology.is_main

    @property
    def house(self) -> int:
        """Ranks of one number share a folder."""
        return self.topology.node_rank if self.request.project.save_on_each_node else 0

    def close(self) -> None:
        """Remove what was not committed, and let others write here."""
        if self.staging is not None:
            self.staging.close()
            self.staging = None


# ---------------------------------------------------------------- beginning


def begin(site: SaveContext, exchange: Exchange) -> None:
    """Called on: all ranks. Agree on the folder, and make it."""
    answer = _attempt(lambda: _begin_home(site) if site.is_home else None)
    try:
        told = exchange((site.house, answer), "agreeing on a checkpoint's folder")
        _raise_failures(site, [answer for _, answer in told], "could not begin")
    except BaseException:
        site.close()
        raise
    chosen = next(answer for house, answer in told if house == site.house and answer is not None)
    place, folder, site.number = chosen
    site.place, site.folder, site.ticket = Path(place), Path(folder), told[0][1][1]


def _begin_home(site: SaveContext) -> tuple[str, str, int | None]:
    place, number = _choose(site.request)
    site.staging = commit.Staging(place, site.disk, durable=site.request.durable, numbered=number is not None)
    if number is not None and place.exists():
        raise CheckpointError(
            f"{place} exists already. To go on from it, call load_state() before the first save_state(); for another "
            "run use another project_dir, or set accelerator.project_configuration.iteration to a free number."
        )
    return str(place), str(site.staging.folder), number


def _choose(request: SaveRequest) -> tuple[Path, int | None]:
    project = request.project
    if project.automatic_checkpoint_naming:
        folder = checkpoints_folder(project)
        number = project.iteration
        if request.alone:  # earlier ones may have been counted by other ranks
            number = max(number, *(taken + 1 for taken, _ in commit.numbered(folder)), 0)
        return folder / f"{commit.PREFIX}{number}", number
    if request.output_dir is None:
        raise ConfigError(
            "save_state() was given no folder. Pass one, or use ProjectConfiguration(project_dir=…, "
            "automatic_checkpoint_naming=True)."
        )
    return Path(os.path.abspath(os.path.expanduser(request.output_dir))), None


def checkpoints_folder(project: ProjectConfiguration) -> Path:
    """Where numbered checkpoints are."""
    if project.project_dir is None:
        raise ConfigError("automatic_checkpoint_naming needs a project_dir to put the checkpoints in. Set it.")
    return Path(os.path.abspath(os.path.expanduser(project.project_dir)), "checkpoints")


# ---------------------------------------------------------------- writing


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where a rank was when its state was taken: the same on all ranks, or their states do not fit together."""

    generation: int = 0
    number: int = 0
    """Of its last collective; 0 when its disk has no room for a black box, which counts them."""
    digest: int = 0
    """Of what its latest collectives were."""
    checksums: bytes = b""
    """Of the parameters that must be the same on all ranks; empty where none must be."""
    names: tuple[str, ...] = ()
    """Of these parameters."""


@dataclass(frozen=True, kw_only=True)
class SavedFiles:
    """What a rank has written of a checkpoint, for the others."""

    house: int
    answer: Any
    """Its files, name -> ``ManifestEntry``; or how it failed."""
    mark: Mark

    def to_json(self) -> dict[str, Any]:
        """What travels to the other ranks."""
        mark, failed = self.mark, isinstance(self.answer, _Failed)
        return {
            "house": self.house,
            "failure": self.answer.text if failed else None,
            "files": {} if failed else {name: entry.to_json() for name, entry in self.answer.items()},
            "place": [mark.generation, mark.number, mark.digest],
            "checksums": mark.checksums.hex(),
        }

    @classmethod
    def parse(cls, value: Any, rank: int) -> SavedFiles:
        """What another rank has sent; CheckpointError when it is nothing of the kind."""
        where = f"What rank {rank} said of the checkpoint"
        try:
            failure, house = value["failure"], int(value["house"])
            generation, number, digest = map(int, value["place"])
            mark = Mark(
                generation=generation, number=number, digest=digest, checksums=bytes.fromhex(value["checksums"])
            )
            files = {
                str(name): manifest.parse_entry(str(name), entry, hashing.CHUNK, where)
                for name, entry in value["files"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{where} cannot be read ({type(error).__name__}: {error}).") from error
        return cls(house=house, answer=files if failure is None else _Failed(str(failure)), mark=mark)


def finish(
    site: SaveContext, content: Content, exchange: Exchange, mark: Mark, failure: Exception | None = None
) -> None:
    """Called on: all ranks. Write, agree that all have, and give the folder its name.

    ``mark`` says where this rank was when its state was taken; ``failure`` says why it could not be.
    """
    try:
        answer = _attempt(lambda: _write(site, content)) if failure is None else _failed(failure)
        mine = SavedFiles(house=site.house, answer=answer, mark=mark)
        told = exchange(mine.to_json(), "agreeing that a checkpoint is written")
        written = [SavedFiles.parse(value, rank) for rank, value in enumerate(told)]
        _raise_failures(site, [one.answer for one in written], "failed to write its part")
        _compare_marks(site, [one.mark for one in written])
        _compare_replicas(site, [one.mark.checksums for one in written], mark.names)
        entries = {name: entry for one in written if one.house == site.house for name, entry in one.answer.items()}
        answer = _attempt(lambda: _commit(site, entries, content) if site.is_home else None)
        outcome = [answer.text, None] if isinstance(answer, _Failed) else [None, answer]
        done = exchange(outcome, "agreeing that a checkpoint is in its place")
        answers = [None if text is None else _Failed(str(text)) for text, _ in done]
        _raise_failures(site, answers, "could not put the checkpoint in its place")
        _raise_unfinished(site, [text for _, text in done])
    finally:
        site.close()


class HashingSink:
    """Opens files that are hashed while they are written, and keeps what they hash to."""

    def __init__(self, site: SaveContext) -> None:
        self._site = site
        self.files: list[HashedFile] = []

    def open(self, path: Path) -> AbstractContextManager[HashedFile]:
        """A new file; complete when the region ends."""
        site = self._site
        file = HashedFile(path, site.disk, durable=site.request.durable, moved=site.moved)
        self.files.append(file)
        return file


def _write(site: SaveContext, content: Content) -> dict[str, ManifestEntry]:
    if not site.folder.is_dir():
        raise CheckpointError(
            f"{site.folder} was made by another rank and is not there on this machine. Save to a file system that all "
            "machines share, or use ProjectConfiguration(save_on_each_node=True)."
        )
    with ThreadPoolExecutor(1, thread_name_prefix="lockstep-write") as beside:
        sink = HashingSink(site)
        try:
            # The models in one thread, all else in this one: two files grow faster than one.
            models = beside.submit(_write_models, site, content, sink)
            try:
                _write_files(site, content, sink)
            finally:
                wait([models])
            models.result()
        except Exception:
            if site.staging is not None:
                site.staging.check()  # who takes over removes the folder, and that is what failed then
            failed = next((file for file in sink.files if file.error is not None), None)
            if failed is not None and failed.error is not None:
                raise failed.error from None  # the disk's own words, whatever was made of them on the way
            raise
        return {file.path.name: ManifestEntry(size=file.size, chunks=file.chunks) for file in sink.files}


def _write_models(site: SaveContext, content: Content, sink: HashingSink) -> None:
    for number, tensors in enumerate(content.weights):
        stem = numbered_name("model", number, "")
        weights.write_weights(
            tensors, site.folder, max_shard_size=_ONE_FILE, safe=site.request.safe, stem=stem, sink=sink
        )


def _write_files(site: SaveContext, content: Content, sink: HashingSink) -> None:
    for name, value in content.files.items():
        with sink.open(site.folder / name) as file:
            safe_pickle.write(value, file)
    if content.counters:
        with sink.open(site.folder / STATE) as file:
            file.write(json.dumps(content.counters, indent=1).encode())


def _compare_marks(site: SaveContext, marks: list[Mark]) -> None:
    """Ranks that have entered other collectives than the rest are not at the same step: their states do not fit.

    Within a machine each collective was compared before it ran. Between machines a difference that neither blocked nor
    crashed shows here.
    """
    places = [(mark.generation, mark.number, mark.digest) for mark in marks]
    known = [place for place in places if place[1]]
    if len(set(known)) <= 1:
        return
    usual = max(known, key=known.count)
    strangers = [rank for rank, place in enumerate(places) if place[1] and place != usual]
    if all(places[rank][:2] == usual[:2] for rank in strangers):
        raise CheckpointError(
            f"The checkpoint {site.place} was not committed: {name_ranks(strangers)} called other collectives than the "
            "rest, or the same with other shapes or dtypes. What they returned was wrong, so the state cannot be "
            "trusted. Load an older checkpoint; Accelerator(debug=True) finds the call."
        )
    counts = "; ".join(f"rank {rank} has entered {places[rank][1]}" for rank in strangers)
    raise CheckpointError(
        f"The checkpoint {site.place} was not committed: the ranks are not at the same place. {counts} collectives, "
        f"the others {usual[1]}: {name_ranks(strangers)} called something the others did not, or left something out. "
        "Call every collective, and save_state(), on all ranks alike; Accelerator(debug=True) finds the call."
    )


def _compare_replicas(site: SaveContext, packed: list[bytes], names: tuple[str, ...]) -> None:
    """A checkpoint has the weights of one rank: the others would go on from weights that they never had."""
    found = [replicas.Checksums.unpack(data) for data in packed]
    of_ranks = {rank: sums for rank, sums in enumerate(found) if sums is not None}
    differs = replicas.difference(of_ranks, names) if len(of_ranks) == len(packed) else None
    if differs is not None:
        raise CheckpointError(
            f"The checkpoint {site.place} was not committed: the weights are not the same on all ranks: {differs}. "
            "Look for an optimizer that was not passed to prepare() or steps on some ranks only, and for code that "
            "writes weights on one rank; LOCKSTEP_REPLICA_CHECK_STEPS=1 finds the step. Then load an older checkpoint."
        )


def _commit(site: SaveContext, entries: dict[str, ManifestEntry], content: Content) -> str | None:
    """What failed after the commit, if anything did."""
    disk, folder, durable = site.disk, site.folder, site.request.durable
    missing = [name for name in entries if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{', '.join(missing)} were written on another machine and are not in {folder} here. Save to a file system "
            "that all machines share, or use ProjectConfiguration(save_on_each_node=True)."
        )
    entries = {**entries, **_others(folder, entries, disk, durable)}
    about = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "lockstep": __version__,
        "torch": torch.__version__,
        **{name: content.counters.get(name) for name in ("updates", "world_size")},
        "number": site.number,
    }
    with HashedFile(folder / manifest.NAME, disk, durable=durable) as file:
        file.write(Manifest(files=entries, about=about).dump())
    assert site.staging is not None
    unfinished = site.staging.publish()
    limit = site.request.project.total_limit
    if site.number is not None and limit is not None:
        prune(site.place.parent, max(1, limit), disk)
    return unfinished


def _others(folder: Path, known: dict[str, ManifestEntry], disk: Disk, durable: bool) -> dict[str, ManifestEntry]:
    """What hooks of the user's have put into the folder."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            inside = path.relative_to(folder).as_posix()
            if inside in known or not manifest.stays_inside(inside):
                continue
            if path.is_symlink() or not path.is_file():  # would not be read again: a checkpoint holds files only
                continue
            size, chunks = hashing.hash_file(path)
            found[inside] = ManifestEntry(size=size, chunks=chunks)
            if durable:
                disk.fsync_file(path)
    return found


# ---------------------------------------------------------------- when something fails


@dataclass(frozen=True)
class _Failed:
    """How a part of the save failed on one rank."""

    text: str


def _attempt(part: Callable[[], Any]) -> Any:
    """What it gives, or how it failed: to be told to the other ranks instead of leaving them waiting."""
    try:
        return part()
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> _Failed:
    return _Failed(commit.describe(error))


def _raise_failures(site: SaveContext, answers: list[Any], what: str) -> None:
    failed = {rank: answer.text for rank, answer in enumerate(answers) if isinstance(answer, _Failed)}
    if not failed:
        return
    if len(answers) == 1:
        told = failed[0]
    else:
        told = "; ".join(f"rank {rank} {what}: {text}" for rank, text in failed.items())
    place = f" {site.place}" if site.place.name else ""
    raise CheckpointError(
        f"The checkpoint{place} was not saved: {told.rstrip('.')}. What was written of it is removed, an older one is "
        "as it was, and training can go on."
    )


def _raise_unfinished(site: SaveContext, texts: list[str | None]) -> None:
    found = [str(text) for text in texts if text is not None]
    if found:
        raise CheckpointError(commit.unfinished(f"The checkpoint {site.place}", "; ".join(found)))
