"""Checkpoints of a training's whole state: what is in them, where they are, and what goes with each."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import DistError
from torch.utils.hooks import RemovableHandle

from lockstep.checkpoint import discovery, exchange, load, save, save_rendezvous, spread, state
from lockstep.checkpoint.background import Background, Bar
from lockstep.checkpoint.load import LoadRequest, LoadResult
from lockstep.checkpoint.save import Mark, SaveContext, SaveRequest
from lockstep.checkpoint.state import Content, Objects
from lockstep.errors import ConfigError
from lockstep.logging import get_notices
from lockstep.storage import commit
from lockstep.storage.disk import Disk
from lockstep.strategies.unwrap import inner_model
from lockstep.training.state import TrainingState

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], Any]
LoadHook = Callable[[list[nn.Module], str], Any]


class CheckpointManager:
    """Saves and loads what a training consists of."""

    def __init__(self, training: TrainingState) -> None:
        self._training = training
        self.custom: list[Any] = []
        """What else is saved: objects that were registered."""
        self.disk = Disk()
        """Where files are written."""
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._background = Background()
        self._was_alone = self._argument_reported = False

    def register(self, objects: tuple[Any, ...]) -> None:
        """Save and load these objects too."""
        unfit = [
            f"a {type(item).__name__} (argument {place})"
            for place, item in enumerate(objects, 1)
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict"))
        ]
        if unfit:
            raise ConfigError(
                f"register_for_checkpointing was given {', '.join(unfit)}. Objects need state_dict() and "
                "load_state_dict(); give a small class of your own these two."
            )
        self.custom += [item for item in objects if not any(item is other for other in self.custom)]

    def before_save(self, hook: SaveHook) -> RemovableHandle:
        """Have it called before each save."""
        return _add(self._save_hooks, hook)

    def before_load(self, hook: LoadHook) -> RemovableHandle:
        """Have it called before each load."""
        return _add(self._load_hooks, hook)

    # --- saving ------------------------------------------------------------------------------------------------

    def save(self, output_dir: str | os.PathLike[str] | None, *, safe: bool, blocking: bool, durable: bool) -> str:
        """Called on: all ranks. Save everything; the folder."""
        self.wait()
        training = self._training
        group, project = training.group, training.project
        with self._in_phase("checkpoint"):
            absent = save_rendezvous.find_absent(group)
            alone = bool(absent)
            if alone:
                spread.refuse_alone(training.strategy, training.parameters(), absent)
            if alone and group.rank != 0:
                return ""  # the main process saves, and this rank has nothing to add to it any more
            request = SaveRequest(project=project, output_dir=output_dir, safe=safe, durable=durable, alone=alone)
            site = SaveContext(topology=training.topology, disk=self.disk, request=request)
            talk = save_rendezvous.by_one if alone else exchange.by_collective(group)
            save.begin(site, talk)
            if output_dir is not None and project.automatic_checkpoint_naming and not self._argument_reported:
                self._argument_reported = True
                get_notices("lockstep.checkpoint").warning(
                    f"save_state({os.fspath(output_dir)!r}) saves to {site.place}: automatic_checkpoint_naming=True "
                    "names the folders, and the argument is not used. Leave out one of the two."
                )
            mark = self._mark()
            content, failure = Content(), None
            try:
                content = self._capture(site)
                content = content if blocking else content.to_host()
            except Exception as error:  # told to the other ranks in their next exchange, which they are waiting in
                failure = error
            if blocking:
                self._finish(site, content, talk, mark, failure)
            else:
                through = save_rendezvous.by_one if alone else exchange.StoreExchange(group, site.ticket)
                self._background.start(lambda: self._finish(site, content, through, mark, failure))
            if site.number is not None:
                project.iteration = site.number + 1
        if alone:
            self._log_alone(site, absent)
        return str(site.place)

    def _log_alone(self, site: SaveContext, absent: dict[int, str]) -> None:
        notices = get_notices("lockstep.checkpoint")
        where = "; ".join(f"rank {rank} {doing}" for rank, doing in absent.items())
        text = f"{site.place} was saved by the main process alone ({where})."
        if self._was_alone:
            notices.info(text)
            return
        self._was_alone = True
        notices.warning(
            f"{text} It lacks the random states of the other ranks, their places in stateful loaders and the gradients "
            "of an open accumulation window: a run that resumes from it does not continue bit for bit. Call "
            "save_state() on all ranks for that."
        )

    def _finish(
        self,
        site: SaveContext,
        content: Content,
        talk: exchange.Exchange,
        mark: Mark,
        failure: Exception | None,
    ) -> None:
        bar = Bar(f"saving {site.place.name}", content.nbytes(), self._training.topology.is_main)
        site.moved = bar.moved
        try:
            save.finish(site, content, talk, mark, failure)
        except DistError as error:  # in the background, of the store: the rank that hosts it has ended
            raise self._training.group.explain(error, "saving a state") from None
        finally:
            bar.close()

    def _mark(self) -> Mark:
        box = self._training.group.box
        generation, number, _ = box.mark()
        names, sums = self._training.strategy.checksums()
        return Mark(generation=generation, number=number, digest=box.digest(), checksums=sums, names=tuple(names))

    def _capture(self, site: SaveContext) -> Content:
        training, objects = self._training, self._objects()
        strategy, keep = training.strategy, site.is_home or bool(self._save_hooks)
        models = [spread.whole_model(strategy, model, keep=keep) for model in objects.models]
        for hook in self._save_hooks.values():
            hook(training.models, models, str(site.folder))
        optimizers = [spread.whole_optimizer(strategy, item, keep=site.is_home) for item in objects.optimizers]
        files = state.own_files(objects)
        if not site.is_home:
            return Content(files=files)
        record = None if training.run_summary is None else training.run_summary.to_dict()
        files = {**state.common_files(objects, optimizers), **files}
        counters = {**state.counters(objects, training.updates, record), "alone": site.request.alone}
        return Content(weights=models, files=files, counters=counters)

    def wait(self) -> None:
        """Until a save in the background has ended; raises what it failed with."""
        self._background.wait()

    # --- loading -----------------------------------------------------------------------------------------------

    def load(self, input_dir: str | os.PathLike[str] | None, *, trusted: bool, strict: bool) -> str | None:
        """Called on: all ranks. Load everything; the folder it came from, None when there is none yet."""
        self.wait()
        training = self._training
        request = LoadRequest(**self._where(input_dir), trusted=trusted, strict=strict)
        with self._in_phase("loading a checkpoint"):
            talk = exchange.by_collective(training.group)
            outcome = load.load(request, self._objects(), training.topology, talk, self._to_load)
            training.strategy.restart()
        notices = get_notices("lockstep.checkpoint")
        if outcome is None:
            notices.info(f"There is no checkpoint in {request.place} yet: starting from the beginning.")
            return None
        for line in outcome.skipped:
            notices.warning(line)
        if commit.pending(outcome.folder) is not None:
            notices.warning(commit.reads_pending(outcome.folder))
        self._adopt(outcome, notices)
        return str(outcome.folder)

    def _where(self, input_dir: str | os.PathLike[str] | None) -> dict[str, Any]:
        if input_dir is not None:
            place = Path(os.path.abspath(os.path.expanduser(input_dir)))
            many = place.is_dir() and discovery.inspect_folder(place).manifest is None and bool(commit.numbered(place))
            return {"place": place, "many": many}
        project = self._training.project
        if not project.automatic_checkpoint_naming:
            raise ConfigError(
                "load_state() was given no folder. Pass one, or use ProjectConfiguration(project_dir=…, "
                "automatic_checkpoint_naming=True)."
            )
        return {"place": save.checkpoints_folder(project), "many": True}

    def _to_load(self, folder: Path) -> list[nn.Module]:
        """The models whose weights are to be read from the folder, when hooks have taken theirs."""
        models = list(self._training.models)
        for hook in self._load_hooks.values():
            hook(models, str(folder))
        return [inner_model(self._training.unwrap(model)) for model in models]

    def _adopt(self, outcome: LoadResult, notices: Any) -> None:
        """Take over counters, and say what is not as it was."""
        training, saved = self._training, outcome.loaded.counters
        project = training.project
        if outcome.number is not None and project.automatic_checkpoint_naming:
            newest = max((number for number, _ in commit.numbered(outcome.folder.parent)), default=outcome.number)
            project.iteration = max(newest, outcome.number) + 1
        if saved is None:
            notices.warning(
                f"{outcome.folder} has no manifest: it was not made by lockstep, and its files were not verified. "
                "Where the loaders stood is not known; they begin a new epoch."
            )
            return
        training.updates = updates = saved["updates"]
        training.group.box.step(updates)
        before = saved["world_size"]
        notices.info(
            f"Loaded {outcome.folder}, saved after {updates} updates on {before} process{'es' * (before != 1)}."
        )
        if outcome.loaded.left_out:
            notices.warning(
                f"This script has prepared other objects than the one that saved {outcome.folder.name}. Not restored: "
                f"{'; '.join(outcome.loaded.left_out)}. To resume training, prepare the same objects in the same order "
                "before load_state(); to evaluate, nothing is missing."
            )
        if outcome.derived_seed is not None:
            notices.warning(
                f"Rank {training.topology.rank} was not there when {outcome.folder.name} was saved on {before} "
                f"process{'es' * (before != 1)}: its generators start from seed {outcome.derived_seed}, which follows "
                "from rank 0's.",
                main_process_only=False,
            )
        training.loaded_run = saved.get("run")

    def _objects(self) -> Objects:
        training = self._training
        return Objects(
            models=[inner_model(training.unwrap(model)) for model in training.models],
            optimizers=training.optimizers,
            schedulers=training.schedulers,
            loaders=training.loaders,
            scaler=training.torch_scaler,
            custom=self.custom,
            window=training.accumulation,
            parameters=training.parameters(),
            device=training.topology.device,
            rank=training.topology.rank,
            world_size=training.topology.world_size,
            strategy=training.strategy,
        )

    @contextmanager
    def _in_phase(self, name: str) -> Iterator[None]:
        """Let the guard see what this rank does."""
        box = self._training.group.box
        box.phase(name, site=True)
        try:
            yield
        finally:
            box.phase("")


def _add(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
