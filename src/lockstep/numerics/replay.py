"""Running a batch once more, with the same random numbers and the full detector, to see which module did it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lockstep.errors import first_line
from lockstep.numerics.detector import DebugUnderflowOverflow
from lockstep.numerics.replay_buffer import Forward, states_of
from lockstep.numerics.report import Hit


class _Found(Exception):
    """Ends the replay."""

    def __init__(self, hit: Hit) -> None:
        super().__init__(hit.line())
        self.hit = hit


def replay(forward: Forward) -> Hit | str | None:
    """Run a forward again and look at everything in it: the first bad number, or why that could not be done.

    Nothing is left behind: neither gradients nor changes of buffers or generators. Numbers that a model takes from
    Python's or numpy's generators are not the same again.
    """
    model = forward.model
    # Others in their place, not the old values restored: autograd would see that they were written to.
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    def stop(hit: Hit) -> None:
        raise _Found(hit)

    try:
        with (
            torch.no_grad(),
            _same_numbers(forward),
            DebugUnderflowOverflow(model, gradients=False, found=stop),
        ):
            torch.func.functional_call(model, buffers, forward.args, forward.kwargs)
    except _Found as found:
        return found.hit
    except Exception as error:  # a model that keeps what it saw may refuse to see it twice
        return f"{type(error).__name__}: {first_line(error)}"
    return None


@contextmanager
def _same_numbers(forward: Forward) -> Iterator[None]:
    device = None
    if forward.device_state is not None:
        device = next((tensor.device for tensor in forward.model.parameters()), None)
    forked = torch.random.fork_rng(
        [] if device is None else [device.index or 0], device_type="cuda" if device is None else device.type
    )
    with forked:
        torch.default_generator.set_state(forward.state)
        if device is not None and forward.device_state is not None:
            states_of(device).set_rng_state(forward.device_state, device)
        yield
