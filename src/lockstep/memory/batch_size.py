"""Find a batch size that fits, on all ranks together."""

from __future__ import annotations

import functools
import operator
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lockstep import current
from lockstep.comm.agree import agree, drop_tracebacks
from lockstep.comm.objects import all_objects
from lockstep.comm.rng import States
from lockstep.config import env
from lockstep.config.sizes import check_size
from lockstep.errors import ConfigError, OutOfMemory, PeerFailure, UsageError
from lockstep.logging import get_notices
from lockstep.memory.batch_size_args import check_function, passed_in, positional, read_margin, read_search
from lockstep.memory.cache import clear_device_cache
from lockstep.memory.oom_detect import describe, is_out_of_memory
from lockstep.memory.progress import SearchBar
from lockstep.process_group.group import Group
from lockstep.topology import environments
from lockstep.training.state import PreparedMark

TRIAL_UPDATES = 2
"""Updates after which a trial is broken off: the first makes the optimizer's state, so the second shows the peak."""
MAX_TRIALS = 8
"""Trials after the first size that fits, at most."""


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    keep_effective_batch: bool = False,
    search: str = "halving",
    margin: float = 0.1,
) -> Any:
    """Called on: all ranks. A decorator that runs a function again, with a smaller batch, when memory runs out.

    The function's first parameter is the batch size; the caller leaves it out. When any rank runs out of memory, all
    leave what they are in and try again together. Each call starts at the starting size.

    Args:
        function: What to run.
        starting_batch_size: The size to try first.
        reduce_batch_size_fn: Takes no argument, returns the next size to try. Without one the size is halved.
        keep_effective_batch: Accumulate gradients over as many more batches as they are smaller, so that each update
            is made from as many samples as at the starting size. Sizes are then divisors of the starting size.
        search: "halving" keeps the first size that fits. "binary" goes up again from there: it looks for the largest
            size that fits in trials of 2 updates each, then runs the function once to its end.
        margin: With "binary", how far the size stays below the smallest one that is known not to fit.
    """
    options = SearchOptions(
        start=check_size(starting_batch_size, "starting_batch_size"),
        reduce=reduce_batch_size_fn,
        keep_effective=keep_effective_batch,
        binary=read_search(search, reduce_batch_size_fn),
        margin=read_margin(margin),
    )
    if function is None:
        return functools.partial(_decorate, options=options)
    return _decorate(function, options=options)


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """How to search; see ``find_executable_batch_size``."""

    start: int
    reduce: Callable[[], int] | None
    keep_effective: bool
    binary: bool
    margin: float


def _decorate(function: Callable[..., Any], *, options: SearchOptions) -> Callable[..., Any]:
    signature = check_function(function)
    first, *others = signature.parameters.values()
    takes_more = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in (first, *others))

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if first.name in kwargs or (not takes_more and len(args) > positional(others)):
            raise TypeError(passed_in(function, first, others, args, kwargs))
        return Search(functools.partial(_call, function, args, kwargs), options, current.peek()).run()

    if first.kind is not first.VAR_POSITIONAL:
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    return run


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> Any:
    return function(size, *args, **kwargs)


# --- trying ------------------------------------------------------------------------------------------------------


class _Enough(BaseException):
    """A trial has shown that its size fits. No Exception: the function's own handlers are not to catch it."""


@dataclass(frozen=True)
class _RanOut:
    """An attempt that did not fit."""

    ranks: tuple[int, ...]
    what: str
    trace: str


class Search:
    """One search: of a function of the batch size, in a session; None where nobody has joined a job yet."""

    def __init__(self, function: Callable[[int], Any], options: SearchOptions, session: current.Session | None) -> None:
        self._function = function
        self._options = options
        self._group: Group | None = None if session is None else session.group
        self._device = torch.device("cpu") if session is None else session.topology.device
        self._state = None if session is None else session.training
        self._tried: list[int] = []
        self._trace = ""
        self._random = States.of(self._device)
        self._notices = get_notices("lockstep.memory")
        self._bar = SearchBar(shown=self._group is None or self._group.rank == 0)

    def run(self) -> Any:
        """Called on: all ranks. What the function returns at the size that fits."""
        self._check_place()
        clear_device_cache(garbage_collection=True)
        size = self._options.start
        outcome = self._attempt(size)
        if not isinstance(outcome, _RanOut):
            return outcome
        if self._options.binary:
            try:
                size = self._largest_that_fits(size, outcome)
            finally:
                self._bar.close()
            outcome = self._attempt(size)
        while isinstance(outcome, _RanOut):  # in "binary" as well: a trial does not see all that a training does
            size = self._smaller(size, outcome)
            outcome = self._attempt(size)
        return outcome

    def _check_place(self) -> None:
        if self._group is None and environments.find(env.snapshot()).world_size > 1:
            raise UsageError(
                "find_executable_batch_size: this is one of several processes, and they cannot try together before "
                "there is an Accelerator. Make it before this call, outside the decorated function."
            )
        if self._options.keep_effective and self._state is None:
            raise UsageError(
                "keep_effective_batch=True changes the accelerator's gradient_accumulation_steps, and there is no "
                "Accelerator yet. Make it before this call, outside the decorated function."
            )
        if self._group is not None and self._group.world_size > 1:
            starts = all_objects(self._group, self._options.start)
            if len(set(starts)) > 1:
                told = ", ".join(f"rank {rank}: {start}" for rank, start in enumerate(starts))
                raise ConfigError(f"starting_batch_size differs between ranks ({told}). Give the same on every rank.")

    def _attempt(self, size: int, *, trial: bool = False) -> Any:
        """Called on: all ranks. What the function returns; or who ran out of memory, when that is why it failed."""
        if self._tried:
            self._random.restore(self._device)  # as if nothing had been tried before
        self._tried.append(size)
        state = self._state
        mark: PreparedMark = () if state is None else state.mark()
        if state is not None:
            if self._options.keep_effective:
                state.accumulation.stretch(self._options.start // size)
            state.on_update = _counter() if trial else None
        try:
            outcome = self._together(size, mark)
        finally:
            if state is not None:
                state.on_update = None
        if trial and not isinstance(outcome, _RanOut):
            outcome = None  # the next trial needs its memory
            if state is not None:
                state.forget_since(mark)
            clear_device_cache(garbage_collection=True)
        return outcome

    def _together(self, size: int, mark: PreparedMark) -> Any:
        group = self._group
        if group is None or group.world_size == 1:
            return self._alone(size, mark)

        def step() -> Any:
            try:
                return self._function(size)
            except _Enough:
                return None
            except Exception as error:
                # Before the group is formed again: that takes memory, and attaches what is still prepared to it.
                if is_out_of_memory(error) or group.is_consequence(error):
                    self._let_go(error, mark)
                    clear_device_cache(garbage_collection=True)
                raise

        agreement = agree(group, step, watched=True)
        if agreement.ok:
            return agreement.value
        error = agreement.error
        if error is None and self._state is not None:
            self._state.forget_since(mark)  # this rank had come to the end of its attempt
        verdicts = all_objects(group, error is None or is_out_of_memory(error))
        if not all(verdicts):
            self._raise_other(agreement.failures, verdicts, error)
        clear_device_cache(garbage_collection=True)
        ranks = tuple(failure.rank for failure in agreement.failures)
        told = all_objects(group, (describe(error), self._trace if error is not None else ""))
        return _RanOut(ranks, *told[ranks[0]])

    def _alone(self, size: int, mark: PreparedMark) -> Any:
        try:
            return self._function(size)
        except _Enough:
            return None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._let_go(error, mark)
            ran_out = _RanOut((0,), describe(error), self._trace)
        clear_device_cache(garbage_collection=True)
        return ran_out

    def _let_go(self, error: BaseException, mark: PreparedMark) -> None:
        """Drop what the attempt held: its frames with their variables, and what it has prepared."""
        self._trace = "".join(traceback.format_exception(error)).rstrip()
        drop_tracebacks(error)
        if self._state is not None:
            self._state.forget_since(mark)

    def _raise_other(self, failures: Any, verdicts: list[bool], error: Exception | None) -> None:
        """Raise, on every rank, for a failure that less memory would not cure."""
        if error is not None and not is_out_of_memory(error):
            raise error
        first = next(failure for failure in failures if not verdicts[failure.rank])
        raise PeerFailure(f"The attempt failed on another rank ({first}).", rank=first.rank) from error

    # --- the next size -----------------------------------------------------------------------------------------

    def _smaller(self, size: int, ran_out: _RanOut) -> int:
        """Called on: all ranks. The next size to try: rank 0's, where a function of the user's says it."""
        if self._options.reduce is None:
            found = self._halved(size)
        else:
            answer = self._options.reduce()
            if self._group is not None and self._group.world_size > 1:
                answer = all_objects(self._group, answer)[0]
            found = self._check_reduced(answer, size)
        if found < 1:
            self._give_up(size, ran_out)
        self._log(size, ran_out, f"trying {found}{self._accumulating(found)}")
        return found

    def _halved(self, size: int) -> int:
        if not self._options.keep_effective:
            return size // 2
        return max((other for other in _divisors(self._options.start) if other <= size // 2), default=0)

    def _check_reduced(self, answer: Any, size: int) -> int:
        try:
            found = operator.index(answer)
        except TypeError:
            raise ConfigError(f"reduce_batch_size_fn returned {answer!r}, which is no whole number.") from None
        if found >= size:
            raise ConfigError(
                f"reduce_batch_size_fn returned {found} after batch size {size} did not fit. Return a smaller one."
            )
        if self._options.keep_effective and found > 0 and self._options.start % found:
            raise ConfigError(
                f"reduce_batch_size_fn returned {found}, of which the starting size {self._options.start} is no "
                "multiple: keep_effective_batch=True cannot make the same effective batch from it. Return a divisor."
            )
        return found

    def _give_up(self, size: int, ran_out: _RanOut) -> None:
        tried = ", ".join(map(str, self._tried))
        raise OutOfMemory(
            f"No executable batch size found, reached zero. Tried: {tried}. At {size}, {_who(ran_out)}. Use a smaller "
            'model, mixed_precision="bf16", or torch.utils.checkpoint in the model; or see what else uses the memory.'
            f"\n\nOn rank {ran_out.ranks[0]}:\n{ran_out.trace}\n\n"
            f"No batch size fits: {tried} {'was' if len(self._tried) == 1 else 'were'} tried."  # where the eye falls
        )

    def _largest_that_fits(self, size: int, ran_out: _RanOut) -> int:
        """Called on: all ranks. Halve until a trial fits, then go up again, to the margin below what does not fit."""
        outcome: Any = ran_out
        failing = size
        while isinstance(outcome, _RanOut):
            failing = size
            size = self._smaller(size, outcome)
            outcome = self._try_out(size, None, failing, size.bit_length() + MAX_TRIALS)
        fits = size
        for trial in range(1, MAX_TRIALS + 1):
            ceiling = max(fits, min(failing - 1, int(failing * (1 - self._options.margin))))
            size = self._between(fits, ceiling)
            if size == fits:
                break
            self._inform(f"batch size {fits} fits; trial {trial} of at most {MAX_TRIALS}: {size}")
            # Each trial halves what is between, so there may be fewer to come than are allowed.
            left = min(MAX_TRIALS + 1 - trial, (ceiling - fits).bit_length())
            outcome = self._try_out(size, fits, failing, left)
            if isinstance(outcome, _RanOut):
                failing = size
                self._inform(f"batch size {size} does not fit: {_who(outcome)}")
            else:
                fits = size
        fits = min(fits, max(self._between(0, int(failing * (1 - self._options.margin)), top=True), 1))
        self._inform(f"batch size {fits}{self._accumulating(fits)}: {failing} does not fit. Running to the end")
        return fits

    def _try_out(self, size: int, fits: int | None, failing: int, left: int) -> Any:
        """Called on: all ranks. A trial, shown as one of ``left`` at most."""
        self._bar.trying(size, done=len(self._tried), left=left, fits=fits, failing=failing)
        return self._attempt(size, trial=True)

    def _between(self, low: int, high: int, *, top: bool = False) -> int:
        """A size above ``low`` and up to ``high``, near the middle (or the highest); ``low`` when there is none."""
        if self._options.keep_effective:
            sizes = [size for size in _divisors(self._options.start) if low < size <= high]
            return (sizes[-1] if top else sizes[len(sizes) // 2]) if sizes else low
        return high if top else (low + high + 1) // 2

    # --- telling -----------------------------------------------------------------------------------------------

    def _log(self, size: int, ran_out: _RanOut, then: str) -> None:
        with self._bar.aside():
            self._notices.warning(f"batch size {size} does not fit: {_who(ran_out)}; {then}")

    def _inform(self, text: str) -> None:
        with self._bar.aside():
            self._notices.info(text)

    def _accumulating(self, size: int) -> str:
        if not self._options.keep_effective:
            return ""
        return f" with gradients of {self._options.start // size} times as many batches per update"


def _counter() -> Callable[[], None]:
    seen = 0

    def count() -> None:
        nonlocal seen
        seen += 1
        if seen >= TRIAL_UPDATES:
            raise _Enough

    return count


def _who(ran_out: _RanOut) -> str:
    ranks = ", ".join(f"rank {rank}" for rank in ran_out.ranks)
    return f"{ranks} ran out of memory{ran_out.what}"


def _divisors(number: int) -> list[int]:
    return [other for other in range(1, number + 1) if number % other == 0]
