"""Runs functions of the test scripts that Accelerate is shipped with on Lockstep's objects; a script for one rank.

``python their_scripts.py RESULTS``: each function of `FUNCTIONS` is called as its script calls it, and what became of
it is written to RESULTS/RANK.json. Accelerate's modules are imported, and our names put in the place of theirs.
"""

from __future__ import annotations

import functools
import importlib
import json
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate

import lockstep
import lockstep.utils
from lockstep import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin, PartialState
from lockstep.data.sampler import SeedableRandomSampler

SCRIPTS = Path(accelerate.__file__).parent / "test_utils" / "scripts"
MODULES = (
    *("", ".accelerator", ".data_loader", ".launchers", ".state", ".test_utils.testing"),
    *(".utils", ".utils.dataclasses", ".utils.operations", ".utils.random"),
)
FUNCTIONS = {
    "test_ops.py": ["main"],
    "test_sync.py": ["main"],
    "test_distributed_data_loop.py": [
        *("test_default_ensures_even_batch_sizes", "test_can_disable_even_batches", "test_can_join_uneven_inputs"),
        *("test_join_can_override_even_batches", "test_join_can_override_for_mixed_type_dataloaders"),
        *("test_pickle_accelerator", "test_stateful_dataloader", "test_stateful_dataloader_save_state"),
    ],
    "test_script.py": [
        *("init_state_check", "process_execution_check", "rng_sync_check", "dl_preparation_check"),
        *("central_dl_preparation_check", "custom_sampler_check", "check_seedable_sampler", "training_check"),
        *("check_seedable_sampler_in_batch_sampler_shard", "check_seedable_sampler_with_data_seed", "test_trigger"),
        *("test_split_between_processes_list", "test_split_between_processes_nested_dict"),
        *("test_split_between_processes_tensor", "test_split_between_processes_evenly"),
    ],
}
"""Script -> what runs of it. Left out: what needs a GPU, other packages, or the insides of Accelerate's own classes."""


class AsTheirs(Accelerator):
    """With Accelerate's arithmetic for the last, shorter accumulation window."""

    def __init__(self, *args: Any, gradient_accumulation_steps: int | None = None, **kwargs: Any) -> None:
        plugin = kwargs.pop("gradient_accumulation_plugin", None)
        plugin = plugin or GradientAccumulationPlugin(num_steps=gradient_accumulation_steps)
        plugin.tail_divisor = "window"  # type: ignore[assignment]
        super().__init__(*args, gradient_accumulation_plugin=plugin, **kwargs)


def prepare_data_loader(dataloader: Any, *place: Any, rng_types: Any = None, **options: Any) -> Any:
    """Accelerate's function of this name, by an accelerator of ours."""
    config = {name: value for name, value in options.items() if name in DataLoaderConfiguration.__dataclass_fields__}
    return Accelerator(dataloader_config=DataLoaderConfiguration(**config), rng_types=rng_types).prepare(dataloader)


def put_ours_in_place() -> None:
    """Where a module of Accelerate's has a name that we have too, it is ours from now on."""
    ours: dict[str, Any] = {name: getattr(lockstep, name) for name in lockstep.__all__ if not name.startswith("_")}
    ours |= {name: getattr(lockstep.utils, name) for name in lockstep.utils.__all__}
    ours |= {"Accelerator": AsTheirs, "prepare_data_loader": prepare_data_loader}
    ours |= {"SeedableRandomSampler": SeedableRandomSampler}
    for name in MODULES:
        module = importlib.import_module(f"accelerate{name}")
        for own, value in ours.items():
            if hasattr(module, own):
                setattr(module, own, value)


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each function with the arguments that its script gives it."""
    for script, names in FUNCTIONS.items():
        found = runpy.run_path(str(SCRIPTS / script), run_name="script")
        for name in names:
            function = found[name]
            needs = function.__code__.co_varnames[: function.__code__.co_argcount - len(function.__defaults__ or ())]
            if needs == ("accelerator",):
                function = functools.partial(function, found["create_accelerator"]())
            yield f"{script}: {name}", function


def main(folder: Path) -> None:
    """Run them all, one after the other."""
    put_ours_in_place()
    seen = {}
    sys.argv = sys.argv[:1]
    for name, function in calls():
        try:
            function()
            seen[name] = "ok"
        except Exception:
            seen[name] = traceback.format_exc()
            break  # the ranks are not in step any more
    (folder / f"{PartialState().process_index}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
