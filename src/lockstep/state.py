"""Read-only views of what this process is and does, under the names scripts know."""

from __future__ import annotations

from typing import Any

import torch

from lockstep import current
from lockstep.comm.process_info import ProcessView
from lockstep.config.choices import DebugTool
from lockstep.config.env import snapshot
from lockstep.config.handlers import GradientAccumulationPlugin, InitProcessGroupKwargs
from lockstep.config.settings import read_debug, read_precision
from lockstep.data.iteration import Iteration
from lockstep.errors import ConfigError, UsageError
from lockstep.optim.accumulation import Accumulation


class PartialState(ProcessView):
    """This process's place in the job. The first one of a process joins the job.

    Keyword arguments are those of the process group: ``backend``, ``init_method``, ``timeout``.
    """

    def __init__(self, cpu: bool | None = None, **kwargs: Any) -> None:
        unknown = sorted(set(kwargs) - {"backend", "init_method", "timeout"})
        if unknown:
            raise ConfigError(
                f"{type(self).__name__} got {', '.join(unknown)}. Allowed: backend, init_method, timeout."
            )
        init = InitProcessGroupKwargs(**kwargs) if kwargs else None
        debug = None if current.peek() else DebugTool.COLLECTIVES in read_debug(None, snapshot())
        self._session = current.require(cpu=cpu, init=init, debug=debug)

    @property
    def initialized(self) -> bool:
        """Whether this process has joined its job."""
        return current.peek() is self._session

    @property
    def default_device(self) -> torch.device:
        """The device that this machine offers when nothing is asked for."""
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    @property
    def backend(self) -> str | None:
        """What the processes talk over."""
        return self._session.group.backend if self.use_distributed else None

    @property
    def debug(self) -> bool:
        """Whether each collective is verified before it runs. Can be switched, on all ranks at the same place."""
        return self._session.group.debug

    @debug.setter
    def debug(self, verified: bool) -> None:
        self._session.group.debug = bool(verified)

    def set_device(self) -> None:
        """Make this process's device torch's current one."""
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index or 0)

    def destroy_process_group(self) -> None:
        """Leave the job."""
        current.reset()

    @staticmethod
    def _reset_state() -> None:
        """Leave the job and forget it (for tests)."""
        current.reset()

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}\nBackend: {self.backend}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
            f"Why: {self._session.topology.reason}; {self._session.topology.device_reason}\n"
        )


class AcceleratorState(PartialState):
    """The same, with the precision that the process's Accelerator settled."""

    def __init__(self, mixed_precision: str | None = None, cpu: bool | None = None, **kwargs: Any) -> None:
        asked = read_precision(mixed_precision)
        super().__init__(cpu=cpu, **kwargs)
        if asked is not None:
            fix_precision(self._session, asked.value)

    @property
    def mixed_precision(self) -> str:
        """Precision of the forward pass."""
        return self._session.mixed_precision or "no"

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        session = current.peek()
        if reset_partial_state:
            current.reset()
        elif session is not None:
            session.mixed_precision = None

    def __repr__(self) -> str:
        return f"{super().__repr__()}Mixed precision type: {self.mixed_precision}\n"


def fix_precision(session: current.Session, asked: str | None) -> str:
    """The precision of this process: the first that is asked for stays."""
    if session.mixed_precision is None:
        session.mixed_precision = asked or "no"
    elif asked is not None and asked != session.mixed_precision:
        raise ConfigError(
            f"mixed_precision={asked!r}: this process already trains with mixed_precision="
            f"{session.mixed_precision!r}. The first Accelerator of a process settles it; pass it there, or leave it "
            "out here."
        )
    return session.mixed_precision


_SWITCHES = ("adjust_scheduler", "sync_with_dataloader", "sync_each_batch")


class _PluginKwargs(dict[str, Any]):
    """The accumulation options that are not as usual, as a dict; what is written takes effect."""

    def __init__(self, accumulation: Accumulation) -> None:
        usual = GradientAccumulationPlugin()
        changed = [name for name in _SWITCHES if getattr(accumulation, name) != getattr(usual, name)]
        super().__init__((name, getattr(accumulation, name)) for name in ("num_steps", *changed))
        self._accumulation = accumulation

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "num_steps":
            self._accumulation.set_steps(value)
        elif name in _SWITCHES:
            setattr(self._accumulation, name, bool(value))
        else:
            raise ConfigError(
                f"plugin_kwargs[{name!r}] is not an option of gradient accumulation. "
                f"Allowed: {', '.join(('num_steps', *_SWITCHES))}."
            )
        super().__setitem__(name, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


class GradientState:
    """Where gradient accumulation stands. Without an accumulation it is a view of the newest Accelerator's."""

    def __init__(
        self,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        *,
        accumulation: Accumulation | None = None,
    ) -> None:
        session = current.peek()
        if accumulation is None and session is not None and session.training is not None:
            accumulation = session.training.accumulation
        if accumulation is not None and gradient_accumulation_plugin is not None:
            raise UsageError(
                "GradientState is a view of an Accelerator; give the plugin to "
                "Accelerator(gradient_accumulation_plugin=…)."
            )
        self._accumulation = accumulation or Accumulation(gradient_accumulation_plugin or GradientAccumulationPlugin())

    @staticmethod
    def _reset_state() -> None:
        """Nothing is to be forgotten (for tests): each accelerator has its own."""

    @property
    def num_steps(self) -> int:
        """Micro-batches per update."""
        return self._accumulation.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether a scheduler counts micro-batches it does not step on."""
        return self._accumulation.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the end of the loader closes the window."""
        return self._accumulation.sync_with_dataloader

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch completes an update."""
        return self._accumulation.sync_gradients

    @property
    def initialized(self) -> bool:
        """True: a view always has something to show."""
        return True

    @property
    def is_xla_gradients_synced(self) -> bool:
        """False: XLA is not supported yet."""
        return False

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The options; writing to them takes effect."""
        return _PluginKwargs(self._accumulation)

    @plugin_kwargs.setter
    def plugin_kwargs(self, value: dict[str, Any]) -> None:
        _PluginKwargs(self._accumulation).update(value)

    @property
    def active_dataloader(self) -> Any:
        """The loader whose batch was drawn last."""
        newest = self._newest
        return None if newest is None else newest.loader

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being iterated; None first, as scripts know it."""
        batches = self._accumulation.batches
        return [None, *(() if batches is None else (iteration.loader for iteration in batches.live))]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self._newest is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch that was drawn last is its loader's last."""
        newest = self._newest
        return newest is not None and newest.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real samples in the last global batch; -1 when unknown."""
        newest = self._newest
        return -1 if newest is None else newest.remainder

    @property
    def _newest(self) -> Iteration | None:
        batches = self._accumulation.batches
        return None if batches is None else batches.newest

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Say by hand whether this micro-batch completes an update."""
        self._accumulation.sync_gradients = bool(sync_gradients)

    def __repr__(self) -> str:
        return (
            f"Sync gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\nGradient accumulation steps: {self.num_steps}\n"
        )
