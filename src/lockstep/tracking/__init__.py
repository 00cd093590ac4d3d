"""Experiment trackers: where the numbers of a run are kept to be looked at."""

from lockstep.tracking.aim import AimTracker
from lockstep.tracking.clearml import ClearMLTracker
from lockstep.tracking.comet import CometMLTracker
from lockstep.tracking.dvclive import DVCLiveTracker
from lockstep.tracking.general import GeneralTracker, on_main_process
from lockstep.tracking.jsonl import JsonlTracker, read_records
from lockstep.tracking.mlflow import MLflowTracker
from lockstep.tracking.registry import (
    LOGGER_TYPE_TO_CLASS,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)
from lockstep.tracking.swanlab import SwanLabTracker
from lockstep.tracking.tensorboard import TensorBoardTracker
from lockstep.tracking.trackio import TrackioTracker
from lockstep.tracking.wandb import WandBTracker

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "JsonlTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "read_records",
    "register_tracker_class",
]
