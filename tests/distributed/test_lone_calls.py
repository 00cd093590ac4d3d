"""Which calls need all ranks, as docs/guard.md lists them: every other public one is made by the main process alone."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import lockstep
from lockstep import Accelerator, utils
from lockstep.testing import run_ranks

NEED_ALL = {
    "accelerator": {
        *("agree", "auto_microbatch", "check_breakpoint", "check_trigger", "gather", "gather_for_metrics"),
        *("join_uneven_inputs", "load_state", "local_main_process_first", "main_process_first"),
        *("pad_across_processes", "reduce", "wait_for_everyone"),
        *("end_training",),  # leaves the job
    },
    "lockstep": {
        *("find_executable_batch_size", "load_checkpoint_in_model", "synchronize_rng_states"),
        *("load_checkpoint_and_dispatch",),  # with broadcast_from_rank0
        *("debug_launcher", "notebook_launcher"),  # start jobs
    },
    "utils": {
        *("broadcast", "broadcast_object_list", "find_executable_batch_size", "gather", "gather_object"),
        *("load_checkpoint_in_model", "pad_across_processes", "reduce", "synchronize_rng_state"),
        *("synchronize_rng_states", "wait_for_everyone"),
        *("estimate_memory", "write_basic_config"),  # for a terminal: not of a job
    },
}


OF_THIS_PROCESS = (
    *("lockstep.config.", "lockstep.host.", "lockstep.topology.", "lockstep.offload."),
    *("lockstep.model_files.device_map", "lockstep.comm.tree_helpers", "lockstep.training.model_kinds"),
)
"""Modules that have no way to other ranks: what they look at is this process, a model, a structure of tensors."""


class Parts:
    """What the calls are made with."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerator = Accelerator(cpu=True)
        net = nn.Linear(2, 1)
        self.model, self.optimizer, self.loader = accelerator.prepare(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1),
            DataLoader(torch.ones(8, 2), batch_size=2),  # type: ignore[arg-type]
        )
        self.rows = torch.ones(2, 2)
        self.folder = tempfile.mkdtemp()


def of_accelerator(parts: Parts) -> dict[str, Callable[[], Any]]:
    a, model, rows = parts.accelerator, parts.model, parts.rows
    weights = list(model.parameters())

    def region(context: Any) -> None:
        with context:
            pass

    def held_back() -> None:
        with a.no_sync(model):
            a.backward(model(rows).sum())

    return {
        "accumulate": lambda: region(a.accumulate(model)),
        "autocast": lambda: region(a.autocast()),
        "backward": held_back,
        "clear": lambda: a.clear(nn.Linear(1, 1)),
        "clip_grad_norm_": lambda: a.clip_grad_norm_(weights, 1.0),
        "clip_grad_value_": lambda: a.clip_grad_value_(weights, 1.0),
        "free_memory": lambda: a.free_memory(nn.Linear(1, 1)) and None,
        "get_state_dict": lambda: a.get_state_dict(model),
        "get_tracker": lambda: a.get_tracker("jsonl"),
        "init_trackers": lambda: a.init_trackers("alone"),
        "log": lambda: a.log({"loss": 1.0}, step=1),
        "no_sync": lambda: region(a.no_sync(model)),
        **{name: lambda name=name: getattr(a, name)(lambda: 1)() for name in ("on_last_process", "on_main_process")},
        "on_local_main_process": lambda: a.on_local_main_process(lambda: 1)(),
        "on_local_process": lambda: a.on_local_process(lambda: 1, local_process_index=0)(),
        "on_process": lambda: a.on_process(lambda: 1, process_index=0)(),
        "prepare": lambda: list(a.prepare(DataLoader(torch.ones(8, 2), batch_size=2))),  # type: ignore[arg-type]
        "prepare_data_loader": lambda: a.prepare_data_loader(DataLoader(torch.ones(8, 2))),  # type: ignore[arg-type]
        "prepare_model": lambda: a.prepare_model(nn.Linear(1, 1).requires_grad_(False)),
        "prepare_optimizer": lambda: a.prepare_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)).step(),
        "prepare_scheduler": lambda: a.prepare_scheduler(torch.optim.lr_scheduler.StepLR(parts.optimizer.optimizer, 1)),
        "print": lambda: a.print("alone"),
        "profile": lambda: region(a.profile()),
        "register_for_checkpointing": lambda: a.register_for_checkpointing(nn.Linear(1, 1)),
        "register_load_state_pre_hook": lambda: a.register_load_state_pre_hook(print).remove(),
        "register_save_state_pre_hook": lambda: a.register_save_state_pre_hook(print).remove(),
        "save": lambda: a.save(rows, f"{parts.folder}/rows.pt"),
        "save_model": lambda: a.save_model(model, parts.folder),
        "save_state": lambda: a.save_state(f"{parts.folder}/state"),
        "set_breakpoint": a.set_breakpoint,
        "set_trigger": a.set_trigger,
        "skip_first_batches": lambda: list(a.skip_first_batches(parts.loader, 1)),
        "split_between_processes": lambda: region(a.split_between_processes([1, 2])),
        "trigger_sync_in_backward": lambda: region(a.trigger_sync_in_backward(model)),
        "unscale_gradients": a.unscale_gradients,
        "unwrap_model": lambda: a.unwrap_model(model)(rows),
        "verify_device_map": lambda: a.verify_device_map(model),
        "wait_for_checkpoint": a.wait_for_checkpoint,
    }


def of_modules(parts: Parts) -> dict[str, dict[str, Callable[[], Any]]]:
    rows, model = parts.rows, parts.model
    tree = {"a": rows}
    return {
        "lockstep": {
            "set_seed": lambda: lockstep.set_seed(1),
            "skip_first_batches": lambda: list(lockstep.skip_first_batches(parts.loader, 1)),
            "tqdm": lambda: list(lockstep.tqdm(range(2))),
        },
        "utils": {
            "clean_state_dict_for_safetensors": lambda: utils.clean_state_dict_for_safetensors(tree),
            "clear_device_cache": lambda: utils.clear_device_cache(True),
            "concatenate": lambda: utils.concatenate([rows, rows]),
            "convert_file_size_to_int": lambda: utils.convert_file_size_to_int("1GB"),
            "convert_outputs_to_fp32": lambda: utils.convert_outputs_to_fp32(model.forward),
            "convert_to_fp32": lambda: utils.convert_to_fp32(tree),
            "extract_model_from_parallel": lambda: utils.extract_model_from_parallel(model),
            "find_batch_size": lambda: utils.find_batch_size(tree),
            "get_max_memory": utils.get_max_memory,
            "id_tensor_storage": lambda: utils.id_tensor_storage(rows),
            "recursively_apply": lambda: utils.recursively_apply(torch.neg, tree),
            "release_memory": lambda: utils.release_memory(nn.Linear(1, 1)),
            "save": lambda: utils.save(rows, f"{parts.folder}/rows.pt"),
            "send_to_device": lambda: utils.send_to_device(tree, "cpu"),
            "set_seed": lambda: utils.set_seed(1),
            "slice_tensors": lambda: utils.slice_tensors(tree, slice(0, 1)),
            "tqdm": lambda: list(utils.tqdm(range(2))),
        },
    }


def functions(owner: Any, names: list[str]) -> set[str]:
    found = {name: getattr(owner, name) for name in names if inspect.isroutine(getattr(owner, name))}
    return {name for name, value in found.items() if not value.__module__.startswith(OF_THIS_PROCESS)}


def main_calls_all() -> tuple[dict[str, set[str]], dict[str, set[str]], float]:
    parts = Parts()
    accelerator = parts.accelerator
    calls = {"accelerator": of_accelerator(parts), **of_modules(parts)}
    if accelerator.is_main_process:
        for name in [name for name in dir(Accelerator) if not name.startswith("_")]:
            getattr(accelerator, name)  # properties too
        for recipes in calls.values():
            for call in recipes.values():
                call()
        assert sorted(os.listdir(parts.folder)) == ["model.safetensors", "rows.pt", "state"]
    total = accelerator.reduce(torch.ones(1)).item()  # the ranks are still in step
    accelerator.backward(parts.model(parts.rows).sum())
    made = {owner: set(recipes) for owner, recipes in calls.items()}
    known = {
        "accelerator": functions(Accelerator, [name for name in dir(Accelerator) if not name.startswith("_")]),
        "lockstep": functions(lockstep, [name for name in lockstep.__all__ if not name.startswith("_")]),
        "utils": functions(utils, [name for name in dir(utils) if not name.startswith("_")]),
    }
    return made, known, total


def test_every_other_call_is_made_by_one_rank_alone() -> None:
    for made, known, total in run_ranks(main_calls_all, 2, timeout=60):
        assert total == 2
        for owner, names in known.items():
            assert names <= made[owner] | NEED_ALL[owner], f"{owner}: who has to call these?"
