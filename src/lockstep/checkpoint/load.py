"""One load: find a checkpoint, read and hash it at the same time, compare it with the objects, and then touch them.

The ranks of a machine share the hashing between them. When anything is wrong on any rank, all of them leave their
objects as they are, and either try the next older checkpoint together or raise together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from lockstep.checkpoint import discovery, spread, state
from lockstep.checkpoint.exchange import Exchange
from lockstep.checkpoint.restoring import Restoring
from lockstep.checkpoint.state import LoadedState, Objects, numbered_name
from lockstep.checkpoint.state_files import StateFiles
from lockstep.errors import CheckpointError, LockstepError
from lockstep.model_files import weights
from lockstep.model_files.state_loader import Assignment
from lockstep.storage import hashing, state_weights
from lockstep.storage.manifest import Manifest
from lockstep.strategies.unwrap import strip_prefix
from lockstep.topology.topology import Topology


@dataclass(kw_only=True)
class LoadResult:
    """What was loaded."""

    folder: Path
    """From where."""
    number: int | None
    """Of a numbered checkpoint."""
    loaded: LoadedState
    derived_seed: int | None = None
    """The seed that this rank's generators got because it was not there when the state was saved."""
    skipped: list[str] = field(default_factory=list)
    """Why newer ones were not taken."""
    verified: bool = True
    """Whether there were hashes to compare with."""


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """What was asked for."""

    place: Path
    many: bool
    """Whether the place is a folder of numbered checkpoints."""
    trusted: bool = False
    strict: bool = True


def load(
    request: LoadRequest,
    objects: Objects,
    topology: Topology,
    exchange: Exchange,
    models: Callable[[Path], list[nn.Module]],
) -> LoadResult | None:
    """Called on: all ranks. Load the newest checkpoint that is whole; None when there is none at all.

    ``models`` says which are to be loaded from a folder: the user's hooks may see to some of them.
    """
    # By name: where each machine keeps its own, they need not be in the same folder.
    names = exchange(
        [path.name for path in discovery.candidates(request.place, many=request.many)], "finding checkpoints"
    )[0]
    # A root has no name. Of other folders rank 0's name counts: each rank may have made a temporary one.
    around = request.place if request.many or not request.place.name else request.place.parent
    paths = [around / name for name in names]
    if not paths:
        if request.many:
            return None
        raise CheckpointError(f"{request.place} does not exist, so there is nothing to load from it.")
    skipped: list[str] = []
    for path in paths:
        outcome = _try(path, request, objects, topology, exchange, models)
        if isinstance(outcome, LoadResult):
            outcome.skipped = skipped
            return outcome
        if not request.many:
            raise CheckpointError(f"{path} was not loaded{_unchanged(outcome)}: {outcome}")
        skipped.append(f"{path.name} was skipped: {outcome}")
    told = "\n".join(f"- {line}" for line in skipped)
    raise CheckpointError(f"None of the checkpoints in {request.place} can be loaded{_unchanged(told)}:\n{told}")


_MODELS_CHANGED = "The models have the weights of the checkpoint by now, everything else is as it was."


def _unchanged(told: str) -> str:
    return "" if _MODELS_CHANGED in told else ", and nothing was changed"


def _try(
    path: Path,
    request: LoadRequest,
    objects: Objects,
    topology: Topology,
    exchange: Exchange,
    models: Callable[[Path], list[nn.Module]],
) -> LoadResult | str:
    seen = discovery.inspect_folder(path)
    foreign = seen.manifest is None and not request.many and is_foreign(path)
    problem = None if foreign else seen.problem
    told = exchange(problem, "looking at a checkpoint")
    if any(told):
        return _joined(told)
    threads = min(8, max(1, (os.cpu_count() or 1) // topology.local_world_size))
    with ExitStack() as stack:
        files = stack.enter_context(closing(StateFiles(seen.folder, seen.manifest)))
        pool = stack.enter_context(hashing.pool(threads))
        hashes = None
        if seen.manifest is not None:
            hashes = _start_hashing(files, seen.manifest, topology, pool, objects, stack)
        found: list[tuple[LoadedState, list[Assignment]]] = []
        answer = _outcome(lambda: found.append(_read(files, seen.manifest, request, objects, models, hashes, stack)))
        if hashes is not None:
            # Damage explains whatever reading stumbled over, so it is what is told.
            answer = "; ".join(hashes.problems()) or answer
        told = exchange(answer, "reading a checkpoint")
        if any(told):
            return _joined(told)
        loaded, assignments = found[0]
        restored = _restore(Restoring(files.folder, loaded, objects), assignments, exchange, pool, threads)
        if isinstance(restored, str):
            return restored
        seed = restored.finish()
    number = None
    if seen.manifest is not None and isinstance(seen.manifest.about.get("number"), int):
        number = seen.manifest.about["number"]
    return LoadResult(folder=path, number=number, loaded=loaded, derived_seed=seed, verified=not foreign)


def _outcome(step: Callable[[], object]) -> str | None:
    """How a step has failed; None when it has not. The other ranks must not be left waiting."""
    try:
        step()
    except LockstepError as error:
        return str(error)
    except Exception as error:  # of a hook of the user's, or of whatever an object makes of its state
        return f"{type(error).__name__}: {error}"
    return None


def _restore(
    restoring: Restoring,
    assignments: list[Assignment],
    exchange: Exchange,
    pool: ThreadPoolExecutor,
    threads: int,
) -> Restoring | str:
    """Called on: all ranks. Change the objects, on all ranks or on none; why not, if not."""

    def fill() -> None:
        models = [assignment.model for assignment in assignments]
        restoring.keep_for_undo(models, doubtful=any(assignment.may_refuse for assignment in assignments))
        for assignment in assignments:
            _run(assignment, pool, threads)
        restoring.load_custom()

    for step in (restoring.begin, fill):
        told = exchange(_outcome(step), "restoring a checkpoint")
        if any(told):
            restoring.undo()
            lost = step is fill and assignments and not restoring.kept
            return f"{_joined(told)} {_MODELS_CHANGED}" if lost else _joined(told)
    return restoring


def _joined(told: Sequence[str | None]) -> str:
    """What is wrong, each thing once, with the ranks that saw it where not all did."""
    lines: dict[str, list[int]] = {}
    for rank, text in enumerate(told):
        if text:
            lines.setdefault(text, []).append(rank)
    return "; ".join(
        text if len(ranks) == len(told) or text.startswith("/") else f"rank {ranks[0]}: {text}"
        for text, ranks in lines.items()
    )


def _run(assignment: Assignment, pool: ThreadPoolExecutor, threads: int) -> None:
    """Fill a model from several threads, unless its modules have a hand in it."""
    if assignment.by_module:
        assignment.run()
        return
    for _ in pool.map(assignment.fill, assignment.shares(threads)):
        pass


def _start_hashing(
    files: StateFiles, found: Manifest, topology: Topology, pool: ThreadPoolExecutor, objects: Objects, stack: ExitStack
) -> discovery.Checking:
    """This rank's share of the hashing, in threads, which read the optimizers' files too."""
    mine = hashing.share(found.chunks(), topology.local_rank, topology.local_world_size)
    optimizers = [numbered_name("optimizer", number, ".bin") for number in range(len(objects.optimizers))]
    checking = discovery.Checking(files, found, mine, pool, apart=optimizers)
    stack.callback(checking.cancel)
    return checking


def _read(
    files: StateFiles,
    found: Manifest | None,
    request: LoadRequest,
    objects: Objects,
    models: Callable[[Path], list[nn.Module]],
    hashes: discovery.Checking | None,
    stack: ExitStack,
) -> tuple[LoadedState, list[Assignment]]:
    """Everything that is going to be assigned, compared with what it is for."""
    path = files.folder
    fill = None if hashes is None or request.trusted else hashes.fill
    loaded = state.read(files, objects, trusted=request.trusted, fill=fill)
    assignments = []
    for number, model in enumerate(models(path)):
        stem = numbered_name("model", number, "")
        place = path if found is None else state_weights.locate(path, found, stem)
        opened = stack.enter_context(weights.open_weights(place, stem, files.open, hashed=found is not None))
        entries = spread.rows_of_model(objects.strategy, model, strip_prefix(opened.entries, model))
        assignments.append(Assignment(model, entries, request.strict, str(place), surplus=opened.surplus))
    return loaded, assignments


def is_foreign(path: Path) -> bool:
    """Whether it looks like what Accelerate's save_state makes, which has no manifest."""
    try:
        names = os.listdir(path)
    except OSError:
        return False
    if any(name.startswith(("lockstep_", ".lockstep")) for name in names):
        return False  # ours, and its manifest is lost or damaged
    return "random_states_0.pkl" in names or "optimizer.bin" in names
