"""What an accelerator does with a checkpoint of the whole state, as methods."""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.checkpoint import commit, exchange, find, load, save, state
from lockstep.checkpoint.background import Background, Bar
from lockstep.checkpoint.disk import Disk
from lockstep.checkpoint.state import Content, Objects
from lockstep.checkpoint.wrappers import inner_model
from lockstep.config.handlers import ProjectConfiguration
from lockstep.errors import ConfigError
from lockstep.logging import get_notices
from lockstep.rundir import names
from lockstep.topology.group import Group
from lockstep.topology.topology import Topology

if TYPE_CHECKING:
    from lockstep.checkpoint.preempt import Preemption

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], Any]
LoadHook = Callable[[list[nn.Module], str], Any]


class _Extras:
    """What belongs to checkpoints and to nothing else in an accelerator."""

    def __init__(self) -> None:
        self.custom: list[Any] = []
        self.save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self.load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self.background = Background()
        self.disk = Disk()
        self.numbers = itertools.count()


class SavesState:
    """Saving and loading everything that a run needs to go on."""

    _group: Group
    _topology: Topology
    _models: list[nn.Module]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _dataloaders: list[Any]
    _accumulation: Any
    _updates: int
    _record: Any
    project_configuration: ProjectConfiguration
    unwrap_model: Callable[..., nn.Module]
    _parameters: Callable[[], list[Tensor]]
    end_training: Callable[[], None]
    _preemption: Preemption | None = None
    _loaded_run: dict[str, Any] | None = None
    """How the run was set up whose state was loaded; None when none was."""

    @cached_property
    def _checkpoints(self) -> _Extras:
        return _Extras()

    # --- saving ------------------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        blocking: bool = True,
        durable: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Called on: all ranks. Save all that the run needs to go on; the folder, which is complete or not there.

        Args:
            output_dir: The folder. With ``automatic_checkpoint_naming`` it is ``checkpoints/checkpoint_N`` instead.
            safe_serialization: Whether models go into safetensors files.
            blocking: With False the state is copied to host memory, and written while training goes on.
            durable: Whether to wait until the disk has everything, so that a power cut cannot undo it.
            save_model_func_kwargs: None are known.
        """
        _refuse(save_model_func_kwargs, "save_state")
        self.wait_for_checkpoint()
        extras, group = self._checkpoints, self._group
        wish = save.Wish(
            project=self.project_configuration, output_dir=output_dir, safe=safe_serialization, durable=durable
        )
        site = save.Site(topology=self._topology, disk=extras.disk, wish=wish)
        with self._in_phase("checkpoint"):
            talk = exchange.by_collective(group)
            save.begin(site, talk)
            mark = (*group.box.mark()[:2], group.box.digest())
            content, failure = Content(), None
            try:
                content = self._capture(site)
                content = content if blocking else content.to_host()
            except Exception as error:  # told to the other ranks in their next exchange, which they are waiting in
                failure = error
            if blocking:
                self._finish(site, content, talk, mark, failure)
            else:
                through = exchange.StoreExchange(group, site.ticket)
                extras.background.start(lambda: self._finish(site, content, through, mark, failure))
            if site.number is not None:
                self.project_configuration.iteration = site.number + 1
        return str(site.place)

    def _finish(
        self,
        site: save.Site,
        content: Content,
        talk: exchange.Exchange,
        mark: tuple[int, int, int],
        failure: Exception | None,
    ) -> None:
        bar = Bar(f"saving {site.place.name}", content.nbytes(), self._topology.is_main)
        site.moved = bar.moved
        try:
            save.finish(site, content, talk, mark, failure)
        finally:
            bar.close()

    def _capture(self, site: save.Site) -> Content:
        objects = self._objects()
        models: list[dict[str, Any]] = [model.state_dict() for model in objects.models]
        for hook in self._checkpoints.save_hooks.values():
            hook(self._models, models, str(site.folder))
        files = state.own_files(objects)
        if not site.is_home:
            return Content(files=files)
        record = None if self._record is None else self._record.to_dict()
        files = {**state.common_files(objects), **files}
        return Content(weights=models, files=files, counters=state.counters(objects, self._updates, record))

    def wait_for_checkpoint(self) -> None:
        """Until a save in the background has ended; raises what it failed with. Nothing when there is none."""
        self._checkpoints.background.wait()

    # --- loading -----------------------------------------------------------------------------------------------

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        trusted: bool = False,
        strict: bool = True,
        **load_model_func_kwargs: Any,
    ) -> str | None:
        """Called on: all ranks. Go on where a state was saved; the folder it came from.

        Args:
            input_dir: The folder. Without it, the newest of ``checkpoints/checkpoint_N`` that is whole; None is given
                when there is none yet, so that a script can always call this.
            load_kwargs: None are known.
            trusted: Whether files may hold any pickled object, as some of Accelerate's do. Loading those can run any
                code: only for files whose origin you know.
            strict: Whether the names of a model's weights must be those in the file.
            load_model_func_kwargs: ``map_location`` is taken and has no effect: values go to where the objects are.
        """
        load_model_func_kwargs.pop("map_location", None)
        _refuse({**(load_kwargs or {}), **load_model_func_kwargs}, "load_state")
        self.wait_for_checkpoint()
        request = load.Request(**self._where(input_dir), trusted=trusted, strict=strict)
        with self._in_phase("loading a checkpoint"):
            talk = exchange.by_collective(self._group)
            outcome = load.load(request, self._objects(), self._topology, talk, self._to_load)
        notices = get_notices("lockstep.checkpoint")
        if outcome is None:
            notices.info(f"There is no checkpoint in {request.place} yet: starting from the beginning.")
            return None
        for line in outcome.skipped:
            notices.warning(line)
        self._adopt(outcome, notices)
        return str(outcome.folder)

    def _where(self, input_dir: str | os.PathLike[str] | None) -> dict[str, Any]:
        if input_dir is not None:
            place = Path(os.path.abspath(os.path.expanduser(input_dir)))
            many = place.is_dir() and find.look(place).manifest is None and bool(commit.numbered(place))
            return {"place": place, "many": many}
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ConfigError(
                "load_state() was given no folder. Pass one, or use ProjectConfiguration(project_dir=…, "
                "automatic_checkpoint_naming=True)."
            )
        return {"place": save.checkpoints_folder(self.project_configuration), "many": True}

    def _to_load(self, folder: Path) -> list[nn.Module]:
        """The models whose weights are to be read from the folder, when hooks have taken theirs."""
        models = list(self._models)
        for hook in self._checkpoints.load_hooks.values():
            hook(models, str(folder))
        return [inner_model(self.unwrap_model(model)) for model in models]

    def _adopt(self, outcome: load.Outcome, notices: Any) -> None:
        """Take over counters, and say what is not as it was."""
        saved = outcome.loaded.counters
        if outcome.number is not None and self.project_configuration.automatic_checkpoint_naming:
            newest = max((number for number, _ in commit.numbered(outcome.folder.parent)), default=outcome.number)
            self.project_configuration.iteration = max(newest, outcome.number) + 1
        if saved is None:
            notices.warning(
                f"{outcome.folder} has no manifest: it was not made by lockstep, and its files were not verified. "
                "Where the loaders stood is not known; they begin a new epoch."
            )
            return
        self._updates = saved["updates"]
        self._group.box.step(self._updates)
        before = saved["world_size"]
        notices.info(
            f"Loaded {outcome.folder}, saved after {self._updates} updates on {before} process{'es' * (before != 1)}."
        )
        if outcome.derived_seed is not None:
            notices.warning(
                f"Rank {self._topology.rank} was not there when {outcome.folder.name} was saved on {before} "
                f"process{'es' * (before != 1)}: its generators start from seed {outcome.derived_seed}, which follows "
                "from rank 0's.",
                main_process_only=False,
            )
        self._loaded_run = saved.get("run")

    # --- told to go --------------------------------------------------------------------------------------------

    def _heed_signals(self, wanted: bool) -> None:
        """From now on, or no more."""
        if self._preemption is not None:
            self._preemption.close()
            self._preemption = None
        if wanted:
            from lockstep.checkpoint.preempt import Preemption  # loaded where it is used, as few scripts do

            done = lambda: (self._updates, self._accumulation.step)  # noqa: E731
            self._preemption = Preemption(self._group, done, self._save_and_leave)

    @property
    def _after_batch(self) -> Callable[[], None] | None:
        return None if self._preemption is None else self._preemption.look

    def _save_and_leave(self) -> NoReturn:
        self.save_state()
        if self._preemption is not None:
            self._preemption.deafen()  # a launcher that sees the first rank gone tells the others to go, once more
        self.end_training()
        raise SystemExit(names.SAVED)

    # --- what is saved -----------------------------------------------------------------------------------------

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have objects with ``state_dict`` and ``load_state_dict`` saved and loaded too."""
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
        known = self._checkpoints.custom
        known += [item for item in objects if not any(item is other for other in known)]

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Have ``hook(models, weights, output_dir)`` called before each save.

        It may write files there, which become a part of the checkpoint, and take weights off the list.
        """
        return _add(self._checkpoints.save_hooks, hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Have ``hook(models, input_dir)`` called before each load; it may load models itself and take them off."""
        return _add(self._checkpoints.load_hooks, hook)

    def _objects(self) -> Objects:
        return Objects(
            models=[inner_model(self.unwrap_model(model)) for model in self._models],
            optimizers=self._optimizers,
            schedulers=self._schedulers,
            loaders=self._dataloaders,
            scaler=self.scaler,  # type: ignore[attr-defined]
            custom=self._checkpoints.custom,
            window=self._accumulation,
            parameters=self._parameters(),
            device=self._topology.device,
            rank=self._topology.rank,
            world_size=self._topology.world_size,
        )

    @contextmanager
    def _in_phase(self, name: str) -> Iterator[None]:
        """Let the guard see what this rank does."""
        self._group.box.phase(name, site=True)
        try:
            yield
        finally:
            self._group.box.phase("")


def _add(hooks: OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _refuse(options: dict[str, Any], name: str) -> None:
    if options:
        raise ConfigError(f"{name} does not know {', '.join(sorted(options))}. Leave it out.")
