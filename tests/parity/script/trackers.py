"""Experiment trackers: one of the script's own on each process, and TensorBoard's files where it is installed."""

import importlib.util
import tempfile
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, filter_trackers, on_main_process, register_tracker_class
from accelerate.utils import LoggerType
from notes import attempt, fresh


class Own(GeneralTracker):
    name = "own"
    requires_logging_directory = False

    def __init__(self, run_name="made by hand", **options):
        super().__init__()
        self.calls = [run_name, options]

    @property
    def tracker(self):
        return self.calls

    @on_main_process
    def start(self):
        self.calls.append("start")

    @on_main_process
    def store_init_configuration(self, values):
        self.calls.append(values)

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.calls.append([values, step, kwargs])

    @on_main_process
    def finish(self):
        self.calls.append("finish")


class Everywhere(Own):
    name = "everywhere"
    main_process_only = False


class ByName(Own):
    name = "by name"


class Nameless(GeneralTracker):
    requires_logging_directory = False


def used(accelerator, *own):
    """What the trackers and the accelerator have seen after a short run."""
    before = [type(tracker).__name__ for tracker in accelerator.trackers]
    accelerator.init_trackers("project", config={"lr": 0.1}, init_kwargs={"by name": {"extra": 1}, "wandb": {"a": 1}})
    accelerator.log({"loss": 0.5}, step=1, log_kwargs={"own": {"x": 1}, "wandb": {"y": 1}})
    accelerator.log({"loss": 0.25})
    running = [tracker.name for tracker in accelerator.trackers]
    for tracker in own:
        tracker.log({"by hand": 1})
    for tracker in accelerator.trackers:
        tracker.finish()
    return {
        "before": before,
        "running": running,
        "own": [tracker.calls for tracker in own],
        "all": [tracker.tracker for tracker in accelerator.trackers],
        "got": [type(accelerator.get_tracker(name)).__name__ for name in running],
        "unwrapped": [accelerator.get_tracker(name, unwrap=True) for name in running],
        "absent": attempt(lambda: type(accelerator.get_tracker("absent")).__name__),
    }


def own_trackers():
    own, everywhere = Own(), Everywhere()
    return used(fresh(log_with=[own, everywhere]), own, everywhere)


def registered():
    register_tracker_class(ByName)
    return used(fresh(log_with="by name"))


def chosen():
    own = Own()
    return {
        "none": filter_trackers(None),
        "own": [type(item).__name__ for item in filter_trackers(own)],
        "unknown": attempt(lambda: filter_trackers("tensorbord")),
        "nameless": attempt(Nameless),
        "without trackers": [Accelerator().trackers, type(Accelerator().get_tracker("x")).__name__],
    }


def tensorboard():
    if importlib.util.find_spec("tensorboard") is None:
        return "not installed"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    without = attempt(lambda: filter_trackers("tensorboard"))
    with tempfile.TemporaryDirectory() as folder:
        accelerator = fresh(log_with="tensorboard", project_dir=folder)
        config = {"lr": 0.1, "batch": 8, "name": "x", "flag": True}
        accelerator.init_trackers("run", config=config)
        for step in range(3):
            accelerator.log({"loss": 1 / (step + 1), "count": step, "numbers": {"a": step}}, step=step)
        accelerator.log({"note": "text"}, step=3)
        tracker = accelerator.get_tracker("tensorboard")
        if accelerator.is_main_process:
            tracker.log_images({"image": torch.zeros(1, 3, 2, 2)}, step=4)
        for running in accelerator.trackers:
            running.finish()
        if not accelerator.is_main_process:
            return [type(tracker).__name__, sorted(Path(folder).iterdir())]
        found = EventAccumulator(f"{folder}/run")
        found.Reload()
        part = EventAccumulator(f"{folder}/run/numbers_a")
        part.Reload()
        [kept] = Path(folder).glob("run/*/hparams.yml")
        return {
            "without a folder": without,
            "tags": found.Tags()["scalars"] + found.Tags()["images"] + found.Tags()["tensors"],
            "loss": [(event.step, event.value) for event in found.Scalars("loss")],
            "count": [(event.step, event.value) for event in found.Scalars("count")],
            "numbers": [(event.step, event.value) for event in part.Scalars("numbers")],
            "image": [(image.step, image.height, image.width) for image in found.Images("image")],
            "hparams": yaml.safe_load(kept.read_text()),
        }


def names():
    return [member.value for member in LoggerType]


def scenarios():
    return {
        "trackers/own": own_trackers,
        "trackers/registered": registered,
        "trackers/chosen": chosen,
        "trackers/names": names,
        "trackers/tensorboard": tensorboard,
    }
