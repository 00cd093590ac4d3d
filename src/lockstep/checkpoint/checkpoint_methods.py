"""What an accelerator does with checkpoints and files of models, as methods.

Everything else of this package is loaded with the first of them that is called: importing the library stays quick.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from lockstep.config.handlers import ProjectConfiguration
from lockstep.errors import ConfigError
from lockstep.process_group.group import Group
from lockstep.rundir import constants
from lockstep.topology.topology import Topology

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from lockstep.checkpoint.manager import CheckpointManager, LoadHook, SaveHook
    from lockstep.checkpoint.preemption import Preemption


class ModelFileMethods:
    """Files of one model, each in one line."""

    _group: Group
    _topology: Topology
    project_configuration: ProjectConfiguration
    unwrap_model: Callable[..., nn.Module]

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        durable: bool = True,
    ) -> None:
        """Called on: the main process, or all ranks. Write the model's weights for other tools to load.

        The main process writes; the others do nothing, and nobody waits. Files that are there already stay as they are
        until all new ones are complete; those of an earlier save that would be mixed up with them are removed. With
        ``durable`` it waits until the disk has everything.
        """
        from lockstep.model_files import save as saving

        saving.save_model(
            self.get_state_dict(model),
            Path(save_directory),
            max_shard_size,
            safe_serialization,
            durable=durable,
            here=self._writes(),
        )

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The model's state dict, by default under the names it has without anything around it."""
        from lockstep.strategies.unwrap import inner_model

        return inner_model(self.unwrap_model(model)).state_dict() if unwrap else model.state_dict()

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object to a file (a path or an open one) in the main process; others do nothing, and none waits."""
        if self._writes():
            from lockstep.model_files import save as saving

            saving.save_object(obj, f, safe_serialization)

    def _writes(self) -> bool:
        each = self.project_configuration.save_on_each_node
        return self._topology.is_local_main if each else self._topology.is_main


class StateMethods:
    """Saving and loading everything that a run needs to go on."""

    _group: Group
    _topology: Topology
    _models: list[nn.Module]
    _strategy: Any
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
    def _checkpoints(self) -> CheckpointManager:
        from lockstep.checkpoint.manager import CheckpointManager

        return CheckpointManager(self)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        blocking: bool = True,
        durable: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Called on: all ranks. Save all that the run needs to resume; the folder, which is complete or not there.

        Called on the main process alone, it saves what that has, and logs what a resumed run will lack.

        Args:
            output_dir: The folder. With ``automatic_checkpoint_naming`` it is ``checkpoints/checkpoint_N`` instead.
            safe_serialization: Whether models go into safetensors files.
            blocking: With False the state is copied to host memory, and written while training goes on.
            durable: Whether to wait until the disk has everything, so that a power cut cannot undo it.
            save_model_func_kwargs: None are known.
        """
        _refuse(save_model_func_kwargs, "save_state")
        return self._checkpoints.save(output_dir, safe=safe_serialization, blocking=blocking, durable=durable)

    def wait_for_checkpoint(self) -> None:
        """Until a save in the background has ended; raises what it failed with. Nothing when there is none."""
        if "_checkpoints" in self.__dict__:
            self._checkpoints.wait()

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
        return self._checkpoints.load(input_dir, trusted=trusted, strict=strict)

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
        return self._checkpoints.before_save(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Have ``hook(models, input_dir)`` called before each load; it may load models itself and take them off."""
        return self._checkpoints.before_load(hook)

    # --- told to go --------------------------------------------------------------------------------------------

    def _heed_signals(self, wanted: bool) -> None:
        """From now on, or no more."""
        if self._preemption is not None:
            self._preemption.close()
            self._preemption = None
        if wanted:
            from lockstep.checkpoint.preemption import Preemption

            done = lambda: (self._updates, self._accumulation.step)  # noqa: E731
            self._preemption = Preemption(self._group, done, self._save_and_leave)

    @property
    def _after_batch(self) -> Callable[[], None] | None:
        return None if self._preemption is None else self._preemption.check

    def _save_and_leave(self) -> NoReturn:
        self.save_state()
        if self._preemption is not None:
            self._preemption.deafen()  # a launcher that sees the first rank gone tells the others to go, once more
        self.end_training()
        raise SystemExit(constants.SAVED)


def _refuse(options: dict[str, Any], name: str) -> None:
    if options:
        raise ConfigError(f"{name} does not know {', '.join(sorted(options))}. Leave it out.")
