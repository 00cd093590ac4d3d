"""The detector: looks at every tensor of every module call, and stops at the first one that is not finite."""

from __future__ import annotations

import operator
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.config.recording import NumericsRecord
from lockstep.errors import ConfigError, NumericsError
from lockstep.numerics import report
from lockstep.numerics.batches import Batches
from lockstep.numerics.dtype_limits import SCALER_PATIENCE
from lockstep.numerics.gradients import Gradients, Updates
from lockstep.numerics.process import append_report, this_process
from lockstep.numerics.report import Hit, Underflow
from lockstep.numerics.stats import Numbers
from lockstep.numerics.tensor_reader import FrameRow, ModuleCall, TensorReader, inputs_of, leaves_of
from lockstep.numerics.unwrap import describe_type, idle
from lockstep.strategies.unwrap import inner_model
from lockstep.torch_internals.autograd import backward_number
from lockstep.torch_internals.compiler import is_compiled
from lockstep.torch_internals.module import parameters_of
from lockstep.traces.frames import FrameSink

_UNDERFLOW_SHARE = 0.5
"""A tensor that lost this much of its values, some of them to subnormals, is told of."""


class DebugUnderflowOverflow:
    """Finds the first NaN or infinity in a model: in weights, inputs and outputs of each module, gradients, updates.

    ::

        detector = DebugUnderflowOverflow(model)

    At the first one the last frames are printed, one for each module call, and ``ValueError`` stops the run.

    Args:
        model: Any module; DDP and ``torch.compile`` around it are looked through. Compiled models run uncompiled
            meanwhile, as only then there are modules to look at.
        max_frames_to_save: How many frames the report goes back.
        trace_batch_nums: Print every frame of these batches instead; nothing is detected then. Batches count from 0.
        abort_after_batch_num: Stop after this batch.
        gradients: Look at the backward and at the optimizer's steps, too.
        record: Write frames to a file: a folder, or anything with ``add(frame)`` and ``close()``.
        record_batches: The batches to write; all, when None.
        detect: Whether a bad number stops the run; False to record only.
        rank: Of this process, for the file's name; found out when None.
        world_size: How many processes there are, for the file.
        who: Says which samples the current batch is of, for the report.
        found: Called with the hit instead of printing a report and raising.
    """

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: Iterable[int] = (),
        abort_after_batch_num: int | None = None,
        *,
        gradients: bool = True,
        record: str | os.PathLike[str] | NumericsRecord | FrameSink | None = None,
        record_batches: Iterable[int] | None = None,
        detect: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        who: Callable[[], str] | None = None,
        found: Callable[[Hit], None] | None = None,
    ) -> None:
        traced, record_batches = _check_arguments(
            model, max_frames_to_save, trace_batch_nums, abort_after_batch_num, record_batches
        )
        self.model = inner_model(model)
        self.trace_batch_nums = frozenset(traced or ())
        self.abort_after_batch_num = abort_after_batch_num
        self.underflows: dict[tuple[str, str], Underflow] = {}
        """What underflowed badly, the worst of each tensor."""
        self._who, self._on_hit = who, found
        self._frames: deque[ModuleCall] = deque(maxlen=max_frames_to_save)
        self._back: deque[ModuleCall] = deque(maxlen=max_frames_to_save)
        self._batches = Batches(self.model)
        self._reader = TensorReader()
        self._sink = _open_sink(record, record_batches, this_process().rank if rank is None else rank, world_size)
        self._wanted: Callable[[int], bool] = getattr(self._sink, "wants", lambda batch: True)
        self._detects = detect and not self.trace_batch_nums
        self._tracing = self._recording = False
        self._looking = self._detects
        self._gradients = Gradients(self._reader, self._after_gradient) if gradients else None
        self._updates: Updates | None = None
        self._bad_backwards: list[int] = []
        self._handles: list[RemovableHandle] = []
        self._stance: Any = None
        self._attach(model, gradients)

    @property
    def batch_number(self) -> int:
        """The batch whose forward is under way, or else the next."""
        return self._batches.finished

    # --- hooks -------------------------------------------------------------------------------------------------

    def _attach(self, outer: nn.Module, gradients: bool) -> None:
        root = self.model
        handles = self._handles
        handles.append(root.register_forward_pre_hook(_RootHook(self._begin, root), prepend=True))
        named = list(root.named_modules())
        for name, module in named:
            hook = _ModuleHook(self, name, module)
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        handles.append(root.register_forward_hook(_RootHook(self._end, root), always_call=True))
        if self._gradients is not None:
            self._gradients.watch_parameters(named)
            self._updates = Updates(self._reader, root, self._after_update)
        if is_compiled(outer):
            self._stance = torch.compiler.set_stance("force_eager")

    def remove(self) -> None:
        """Take the hooks off, close the trace, and tell what underflowed."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._gradients is not None:
            self._gradients.remove()
        if self._updates is not None:
            self._updates.remove()
            self._updates = None
        stance, self._stance = self._stance, None
        if stance is not None:
            stance.__exit__(None, None, None)
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close()

    def __enter__(self) -> DebugUnderflowOverflow:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()

    # --- a batch -----------------------------------------------------------------------------------------------

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        if backward_number() != -1 or not self._batches.begin():
            return
        batches = self._batches
        self._tracing = batches.counts and batches.current in self.trace_batch_nums
        self._recording = self._sink is not None and batches.counts and self._wanted(batches.current)
        self._reader.thorough = self._tracing or self._recording
        self._looking = self._detects or self._reader.thorough
        self._reader.forget()
        if self._gradients is not None:
            self._gradients.forget()
        if self._tracing:
            print("\n".join(report.starting_lines(batches.current, this_process().name)))

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if backward_number() != -1 or not self._batches.end(output):
            return
        last = self.abort_after_batch_num
        if last is not None and self._batches.finished > last:
            raise NumericsError(
                f"DebugUnderflowOverflow: aborting after {self._batches.finished} batches due to "
                f"`abort_after_batch_num={last}` arg"
            )

    # --- frames ------------------------------------------------------------------------------------------------

    def after_forward(self, hook: _ModuleHook, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A module has been called."""
        if not self._looking:
            return
        call = hook.count(self._batches.serial)
        if backward_number() != -1:
            # A checkpointed part computed once more: its numbers were seen, but only now it has gradients to come.
            if self._gradients is not None and torch.is_grad_enabled():
                self._gradients.watch_outputs(hook.name, hook.kind, call, output)
            return
        reader = self._reader
        parameters = parameters_of(module).items()
        rows = [reader.weight(key, parameter) for key, parameter in parameters if parameter is not None]
        leaves = list(inputs_of(args, kwargs))
        leaves += [("output", output)] if isinstance(output, Tensor) else leaves_of("output", output)
        rows += reader.read(leaves)
        if self._take(ModuleCall(self._batches.current, "forward", hook.name, hook.kind, call, rows), self._frames):
            self._stop("forward", self._frames)
        if self._gradients is not None and torch.is_grad_enabled():
            self._gradients.watch_outputs(hook.name, hook.kind, call, output)

    def _after_gradient(self, module: str, kind: str, call: int, rows: list[FrameRow]) -> None:
        if not self._looking:
            return
        bad = self._take(ModuleCall(self._batches.current, "backward", module, kind, call, rows), self._back)
        if bad and not self._forgiven():
            self._stop("backward", self._back)

    def _forgiven(self) -> bool:
        """Whether a bad gradient is one of those by which fp16's loss scaler finds its scale."""
        if not self._reader.half:
            return False
        batch, row = self._batches.current, self._bad_backwards
        if row and row[-1] == batch:
            return True
        if row and row[-1] != batch - 1:
            row.clear()
        row.append(batch)
        return len(row) < SCALER_PATIENCE

    def _after_update(self, module: str, kind: str, rows: list[FrameRow]) -> None:
        if self._detects:
            seen = ModuleCall(self._batches.current, "optimizer", module, kind, 0, rows)
            if self._recording and self._sink is not None:
                self._sink.add(seen.frame())
            self._stop("optimizer", deque([seen]))

    def _take(self, seen: ModuleCall, frames: deque[ModuleCall]) -> bool:
        """Whether there is a bad number in it that is to be stopped at."""
        if self._reader.thorough:
            frame = seen.frame()
            if self._recording and self._sink is not None:
                self._sink.add(frame)
            if self._tracing and seen.phase == "forward":
                print("\n".join(report.frame_lines(frame)))
        bad = False
        for row in seen.rows:
            numbers = row.numbers
            if type(numbers) is Numbers:  # a weight that is still to be read was found finite
                bad = bad or numbers.nans or numbers.infs
                if numbers.subnormal and (numbers.tiny or 0.0) >= _UNDERFLOW_SHARE:
                    self._underflowed(seen, row.name, str(row.dtype).removeprefix("torch."), numbers.tiny or 0.0)
        frames.append(seen)
        return bad and self._detects

    def _underflowed(self, seen: ModuleCall, name: str, dtype: str, share: float) -> None:
        known = self.underflows.get((seen.module, name))
        if known is None or known.share < share:
            self.underflows[seen.module, name] = Underflow(
                module=seen.module, kind=seen.kind, name=name, dtype=dtype, share=share, batch=seen.batch
            )
        if known is None:
            place = this_process().name
            print(f"Underflow{f' on {place}' if place else ''}: {self.underflows[seen.module, name]}.", file=sys.stderr)

    def _stop(self, phase: str, frames: deque[ModuleCall]) -> None:
        hit = Hit(
            batch=self._batches.current,
            phase=phase,
            frames=[seen.frame() for seen in frames],
            evaluation=not self._batches.counts,
            underflows=tuple(self.underflows.values()),
        )
        frames.clear()
        if self._sink is not None:
            self._sink.close()  # what led here is on disk before the run ends
            self._sink = None
            self._recording = False
        if self._on_hit is not None:
            self._on_hit(hit)
            return
        process = this_process()
        said = self._who() if self._who is not None else ""
        text = report.render_hit(hit, who=", ".join(filter(None, (process.name, said))))
        print(text, flush=True)
        raise NumericsError(report.reason(hit, process.name, append_report(process.folder, process.rank, text)))


class _ModuleHook:
    """One module's forward hook. Copies and pickles of the model get one that does nothing."""

    __slots__ = ("_calls", "_detector", "_module", "_serial", "kind", "name")

    def __init__(self, detector: DebugUnderflowOverflow, name: str, module: nn.Module) -> None:
        self._detector, self._module = detector, module
        self.name, self.kind = name, type(module).__name__
        self._calls = self._serial = 0

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module is self._module:
            self._detector.after_forward(self, module, args, kwargs, output)

    def count(self, serial: int) -> int:
        """How many calls of this module there were before in the forward of this number."""
        if serial != self._serial:
            self._serial, self._calls = serial, 0
        self._calls += 1
        return self._calls - 1

    def __reduce__(self) -> tuple[Any, ...]:
        return idle()


class _RootHook:
    """Tells the detector where a forward begins and ends."""

    __slots__ = ("_call", "_model")

    def __init__(self, call: Callable[..., None], model: nn.Module) -> None:
        self._call, self._model = call, model

    def __call__(self, module: nn.Module, *rest: Any) -> None:
        if module is self._model:
            self._call(module, *rest)

    def __reduce__(self) -> tuple[Any, ...]:
        return idle()


def _check_arguments(
    model: Any, max_frames: Any, trace_batches: Any, abort_after: Any, record_batches: Any
) -> tuple[list[int] | None, list[int] | None]:
    """Refuse what could only fail, or do nothing, many batches later; the two choices of batches."""
    problems = []
    if not isinstance(model, nn.Module):
        problems.append(f"DebugUnderflowOverflow: model is {describe_type(model)}. Pass a torch.nn.Module.")
    if not _is_count(max_frames) or max_frames < 1:
        problems.append(f"DebugUnderflowOverflow: max_frames_to_save={max_frames!r} must be a whole number, 1 or more.")
    if abort_after is not None and not (_is_count(abort_after) and abort_after >= 0):
        problems.append(
            f"DebugUnderflowOverflow: abort_after_batch_num={abort_after!r} must be the number of a batch, 0 or more, "
            "or None."
        )
    chosen: list[list[int] | None] = []
    for name, batches in (("trace_batch_nums", trace_batches), ("record_batches", record_batches)):
        try:
            numbers = None if batches is None else list(batches)
        except TypeError:
            numbers = [batches]
            problems.append(f"DebugUnderflowOverflow: {name}={batches!r} must be a list of batches, such as [1, 3].")
        else:
            wrong = [number for number in numbers or () if not _is_count(number) or number < 0]
            if wrong:
                problems.append(
                    f"DebugUnderflowOverflow: {name}={numbers!r} must hold numbers of batches, 0 or more, but has "
                    f"{', '.join(map(repr, wrong))}. Batches count from 0, and not from the end."
                )
        chosen.append(numbers)
    if problems:
        raise ConfigError.of(problems)
    return chosen[0], chosen[1]


def _is_count(value: Any) -> bool:
    """Whether it is a whole number, numpy's and torch's included."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _open_sink(record: Any, batches: Iterable[int] | None, rank: int, world_size: int | None) -> FrameSink | None:
    """Where frames go."""
    if record is None or hasattr(record, "add"):
        return record
    from lockstep.traces.trace import open_trace  # loaded where it is used: few runs are recorded

    if isinstance(record, NumericsRecord):
        return open_trace(
            record.path,
            rank=rank,
            every=record.every,
            batches=record.batches,
            world_size=world_size,
            format=record.format,
        )
    return open_trace(record, rank=rank, batches=None if batches is None else set(batches), world_size=world_size)
