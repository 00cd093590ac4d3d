"""What can be imported, from where."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys

import pytest
import torch

import lockstep
import lockstep.utils
import lockstep.utils.operations
from lockstep import Accelerator
from lockstep.comm import tensors

TOP = """
Accelerator AcceleratorState AutocastKwargs CheckpointError ConfigError DDPCommunicationHookType DataError
DataLoaderConfiguration
DistributedDataParallelKwargs DistributedOperationException DistributedType GradScalerKwargs
GradientAccumulationPlugin GradientState InitProcessGroupKwargs LocalSGD LockstepError NotYetError NumericsError
OutOfMemory PartialState PeerFailure ProfileKwargs ProjectConfiguration RankFailed TopologyError TorchDynamoPlugin
UsageError __version__ cpu_offload cpu_offload_with_hook debug_launcher disk_offload dispatch_model
find_executable_batch_size infer_auto_device_map init_empty_weights init_on_device load_checkpoint_and_dispatch
load_checkpoint_in_model notebook_launcher set_seed
is_rich_available skip_first_batches synchronize_rng_states tqdm
""".split()  # noqa: SIM905

OPERATIONS = """
CannotPadNestedTensorWarning DistributedOperationException broadcast broadcast_object_list
concatenate convert_outputs_to_fp32 convert_to_fp32
find_batch_size find_device gather gather_object honor_type ignorant_find_batch_size is_namedtuple is_torch_tensor
listify pad_across_processes recursively_apply reduce send_to_device slice_tensors
""".split()  # noqa: SIM905


def in_order(names: list[str]) -> list[str]:
    """Each once; numbers in names count as numbers, as ruff sorts."""
    return sorted(
        set(names), key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    )


def test_the_top_level_is_exactly_this() -> None:
    assert sorted(lockstep.__all__) == sorted(TOP)


def test_all_is_sorted_and_says_each_name_once() -> None:
    for module in (lockstep, lockstep.utils, lockstep.utils.operations):
        assert module.__all__ == in_order(module.__all__)


def test_every_name_can_be_loaded_and_nothing_else() -> None:
    for name in lockstep.__all__:
        assert getattr(lockstep, name) is not None
        assert name in dir(lockstep)
    places = {name for names in lockstep._PLACES.values() for name in names}
    assert places | {"__version__"} == set(lockstep.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Acelerator'"):
        _ = lockstep.Acelerator


def test_names_are_loaded_from_where_they_live() -> None:
    for place, names in lockstep._PLACES.items():
        for name in names:
            assert getattr(lockstep, name) is getattr(importlib.import_module(place), name)


def test_nothing_is_loaded_before_it_is_used() -> None:
    code = (
        "import sys, lockstep; assert 'torch' not in sys.modules; assert 'Accelerator' not in vars(lockstep); "
        "lockstep.ConfigError; assert 'torch' not in sys.modules; "
        "from lockstep import Accelerator; assert 'torch' in sys.modules; assert 'Accelerator' in vars(lockstep)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_utils() -> None:
    assert set(OPERATIONS) == set(lockstep.utils.operations.__all__)
    assert set(OPERATIONS) <= set(lockstep.utils.__all__)
    for module in (lockstep.utils, lockstep.utils.operations):
        for name in module.__all__:
            assert not getattr(getattr(module, name), "__module__", "").startswith("lockstep.utils")
    for name in ("DistributedType", "ProjectConfiguration", "set_seed", "tqdm", "wait_for_everyone"):
        assert name in lockstep.utils.__all__


@pytest.mark.parametrize(
    "path",
    [
        "data_loader",
        "launchers",
        "local_sgd",
        "optimizer",
        "scheduler",
        "utils.dataclasses",
        "utils.environment",
        "utils.imports",
        "utils.memory",
        "utils.modeling",
        "utils.other",
        "utils.random",
        "utils.versions",
    ],
)
def test_further_import_places_have_only_what_lives_elsewhere(path: str) -> None:
    module = importlib.import_module(f"lockstep.{path}")
    assert module.__all__ == in_order(module.__all__)
    for name in module.__all__:
        assert getattr(module, name).__module__ != module.__name__
        assert not getattr(module, name).__module__.startswith("lockstep.utils")


def test_reduce_has_two_defaults() -> None:
    assert inspect.signature(lockstep.utils.reduce).parameters["reduction"].default == "mean"
    assert inspect.signature(lockstep.utils.operations.reduce).parameters["reduction"].default == "mean"
    assert inspect.signature(Accelerator.reduce).parameters["reduction"].default == "sum"
    assert inspect.signature(tensors.reduce).parameters["reduction"].default == "mean"


def test_a_wrong_reduction(alone: None) -> None:
    with pytest.raises(
        lockstep.ConfigError, match=r"reduction='min' is not known\. Allowed: 'sum', 'mean', 'max', 'none'"
    ):
        lockstep.utils.reduce(torch.ones(1), "min")
