"""Progress bars that several processes can share a terminal with: tqdm, shown once per machine."""

from __future__ import annotations

from typing import Any

from lockstep import current
from lockstep.config import env
from lockstep.errors import ConfigError
from lockstep.topology import environments


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A tqdm bar, with all of tqdm's arguments; shown by the first process of each machine.

    Args:
        args: Passed on to tqdm.
        main_process_only: Whether the other processes of a machine stay silent; with False each shows its own bar.
        kwargs: Passed on to tqdm. ``disable=True`` hides the bar everywhere.
    """
    if args and isinstance(args[0], bool):
        raise ConfigError(
            f"tqdm({args[0]}, ...): the first argument is what to iterate over. "
            f"Pass main_process_only={args[0]} by name."
        )
    # Here, not above: a script that shows no bar does not pay for the import.
    from tqdm.auto import tqdm as bar

    # What the caller asked for stands where it asked for less: None hides the bar when the output is no terminal.
    if main_process_only and not kwargs.get("disable") and _local_rank() != 0:
        kwargs["disable"] = True
    return bar(*args, **kwargs)


def _local_rank() -> int:
    session = current.peek()
    place = environments.find(env.snapshot()) if session is None else session.topology
    return place.local_rank
