"""Which trackers there are, and which of them were asked for."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

from lockstep.config.choices import LoggerType
from lockstep.errors import ConfigError
from lockstep.host.packages import is_installed
from lockstep.tracking.aim import AimTracker
from lockstep.tracking.clearml import ClearMLTracker
from lockstep.tracking.comet import CometMLTracker
from lockstep.tracking.dvclive import DVCLiveTracker
from lockstep.tracking.general import GeneralTracker, incomplete, missing_attributes
from lockstep.tracking.jsonl import JsonlTracker
from lockstep.tracking.mlflow import MLflowTracker
from lockstep.tracking.swanlab import SwanLabTracker
from lockstep.tracking.tensorboard import TensorBoardTracker
from lockstep.tracking.trackio import TrackioTracker
from lockstep.tracking.wandb import WandBTracker

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    "aim": AimTracker,
    "comet_ml": CometMLTracker,
    "mlflow": MLflowTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
    "clearml": ClearMLTracker,
    "dvclive": DVCLiveTracker,
    "swanlab": SwanLabTracker,
    "trackio": TrackioTracker,
    "jsonl": JsonlTracker,
}
"""The class for each name of ``log_with``; `register_tracker_class` adds yours."""

PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "tensorboard": (("tensorboard",), ("tensorboardX",)),
    "mlflow": (("mlflow", "mlflow", "mlflow-skinny"),),
    "jsonl": (),
}
"""Where they differ from the name: the modules of which one has to be there, each with its distributions' names."""

Chosen = LoggerType | str | GeneralTracker
"""A tracker that was asked for: one that comes with Lockstep, a registered name, or an object."""


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Make a class of yours known by its ``name``, so that ``log_with`` takes that and ``init_trackers`` makes it.

    It is called with the project's name, then with the folder for logs if ``requires_logging_directory``, and with its
    part of ``init_kwargs``.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ConfigError(f"tracker_class={tracker_class!r} is not a subclass of GeneralTracker.")
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{tracker_class.__name__}.name must be a text that log_with can ask for; it is {name!r}.")
    if not hasattr(tracker_class, "requires_logging_directory"):
        raise ConfigError(
            f"{tracker_class.__name__} does not define requires_logging_directory. Set it to True if the tracker is to "
            "be given the folder for logs, else to False."
        )
    if name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(
            f"The tracker {name!r} was {LOGGER_TYPE_TO_CLASS[name].__name__} and is now {tracker_class.__name__}.",
            stacklevel=2,
        )
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def get_available_trackers() -> list[LoggerType]:
    """The trackers whose packages are installed; "jsonl", which needs none, is not counted."""
    own = (LoggerType.ALL, LoggerType.JSONL)
    return [kind for kind in LoggerType if kind not in own and is_available(kind.value)]


def is_available(name: str) -> bool:
    """Whether the package of a built-in tracker is installed. True for classes of the user's."""
    if name not in LoggerType.list():
        return True
    modules = PACKAGES.get(name, ((name,),))
    return not modules or any(is_installed(*names) for names in modules)


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Chosen]:
    """The trackers that were asked for, each once; raises once for all that cannot be."""
    asked = list(log_with) if isinstance(log_with, (list, tuple)) else [] if log_with is None else [log_with]
    problems: list[str] = []
    chosen: list[Chosen] = []
    for item in asked:
        kind = _read(item, problems)
        # The same name twice is one tracker, as in Accelerate; two objects are not.
        if kind is not None and not (isinstance(kind, str) and kind in chosen):
            chosen.append(kind)
    if LoggerType.ALL in chosen:
        objects = [item for item in chosen if isinstance(item, GeneralTracker)]
        taken = [tracker_name(item) for item in objects]
        chosen = [*objects, *(kind for kind in get_available_trackers() if kind.value not in taken)]
    problems += _same_names(chosen)
    problems += [
        f"log_with={tracker_name(item)!r} writes to a folder, and there is none. Pass project_dir=…, or "
        "project_config=ProjectConfiguration(logging_dir=…)."
        for item in chosen
        if not isinstance(item, GeneralTracker)
        and getattr(LOGGER_TYPE_TO_CLASS[str(item)], "requires_logging_directory", False)
        and logging_dir is None
    ]
    if problems:
        raise ConfigError.of(problems)
    return chosen


def tracker_name(item: Chosen) -> str:
    """The name by which ``get_tracker`` finds it."""
    return str(item.name if isinstance(item, GeneralTracker) else item)  # type: ignore[attr-defined]


def require_packages(chosen: Iterable[Chosen]) -> None:
    """Raise where a tracker's package is missing in this process."""
    missing = [item for item in chosen if not isinstance(item, GeneralTracker) and not is_available(str(item))]
    if missing:
        raise ConfigError.of(
            [
                f"log_with={str(item)!r}: the package is not installed. Install it (pip install {item}), leave the "
                'tracker out, or use "jsonl", which needs nothing.'
                for item in missing
            ]
        )


def _read(item: Any, problems: list[str]) -> Chosen | None:
    if isinstance(item, GeneralTracker):
        missing = missing_attributes(item)
        if missing:
            problems.append(str(incomplete(type(item), missing)))
        return None if missing else item
    text = str(item) if isinstance(item, (str, LoggerType)) else None
    if text is not None and text.lower() in LoggerType.list():
        return LoggerType(text.lower())
    if text in LOGGER_TYPE_TO_CLASS:
        return text
    known = ", ".join(repr(name) for name in ("all", *sorted(LOGGER_TYPE_TO_CLASS)))
    hint = (
        " Give an object of it, not the class." if isinstance(item, type) and issubclass(item, GeneralTracker) else ""
    )
    problems.append(
        f"log_with={item!r} is not a tracker.{hint} Allowed: {known}, a name given to register_tracker_class, or an "
        "object of a subclass of GeneralTracker."
    )
    return None


def _same_names(chosen: list[Chosen]) -> list[str]:
    names = [tracker_name(item) for item in chosen]
    return [
        f"log_with has {names.count(name)} trackers named {name!r}, and get_tracker({name!r}) could give only one of "
        "them. Give each a name of its own."
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
