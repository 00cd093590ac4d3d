"""Names: what scripts call on Accelerate's objects is there on ours, with the same parameters."""

from __future__ import annotations

from typing import Any

from tests.parity.run import Runs

# Each of these comes with a later issue; a name that has arrived must leave this list.
LATER = {
    "Accelerator": {
        # sharded models and other kinds of parallelism
        "context_parallel_rank",
        "data_parallel_rank",
        "data_parallel_shard_rank",
        "deepspeed_plugin",
        "deepspeed_ulysses_dl_adapter",
        "fp8_backend",
        "is_composable_parallelism_enabled",
        "is_fsdp2",
        "lomo_backward",
        "maybe_context_parallel",
        "parallelism_config",
        "pipeline_parallel_rank",
        "should_save_model",
        "tensor_parallel_rank",
        "torch_device_mesh",
    },
    "PartialState": set(),
    "AcceleratorState": {
        "deepspeed_plugin",
        "fork_launched",
        "get_deepspeed_plugin",
        "is_fsdp2",
        "select_deepspeed_plugin",
    },
    "GradientState": set(),
    "instance": {
        "_custom_objects",
        # how Accelerate keeps its options and its trigger; not asked for by a guide
        "native_amp",
        "flag_tensor",
        "ddp_handler",
        "scaler_handler",
        "init_handler",
        "autocast_handler",
        "profile_handler",
    },
}


def test_the_constructor_takes_every_argument(runs: Runs) -> None:
    for theirs, ours in runs.pairs("facts/constructor"):
        assert list(ours)[: len(theirs)] == list(theirs)


def test_every_member_of_the_accelerator_is_there_or_listed(runs: Runs) -> None:
    for theirs, ours in runs.pairs("facts/methods"):
        assert set(theirs) - set(ours) == LATER["Accelerator"]
        assert _narrower(theirs, ours) == []


def test_every_attribute_of_the_accelerator_is_there_or_listed(runs: Runs) -> None:
    for theirs, ours in runs.pairs("facts/instance"):
        assert {name for name, there in theirs.items() if there and not ours[name]} == LATER["instance"]


def test_every_member_of_the_states_is_there_or_listed(runs: Runs) -> None:
    for theirs, ours in runs.pairs("facts/states"):
        for state, members in theirs.items():
            assert set(members) - set(ours[state]) == LATER[state]
            # A process is in one group here; there is no other to name.
            narrower = {"destroy_process_group(group=)"} if state != "GradientState" else set()
            assert set(_narrower(members, ours[state])) == narrower


def test_functions_take_every_argument(runs: Runs) -> None:
    for theirs, ours in runs.pairs("facts/functions"):
        # Accelerate's names the caller in an error; ours has no use for them.
        assert _narrower(theirs, ours) == ["slice_tensors(process_index=)", "slice_tensors(num_processes=)"]
        for name, parameters in theirs.items():
            for parameter, (_, default) in parameters.items():
                if (name, parameter) == ("synchronize_rng_state", "rng_type"):
                    continue  # Accelerate's default synchronizes nothing; ours has none
                if parameter in ours[name] and default and not default.startswith("<"):
                    assert ours[name][parameter][1] == default, (name, parameter)


def test_prepared_objects_have_the_names(runs: Runs) -> None:
    for kind, missing in {"optimizer": {"scaler"}, "scheduler": {"print_lr"}, "loader": set()}.items():
        for theirs, ours in runs.pairs(f"facts/{kind}"):
            # print_lr: torch has none any more.
            assert {name for name, there in theirs["names"].items() if there and not ours["names"][name]} == missing
            assert ours["is"] == theirs["is"]
            assert ours["state"] == theirs["state"]


def _narrower(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Parameters of Accelerate's functions that ours of the same name do not take."""
    found = []
    for name, parameters in theirs.items():
        mine = ours.get(name)
        if not isinstance(parameters, dict) or not isinstance(mine, dict):
            continue
        open_ended = any(kind == "VAR_KEYWORD" for kind, _ in mine.values())
        for parameter, (kind, _) in parameters.items():
            if parameter not in mine and not open_ended and not kind.startswith("VAR_"):
                found.append(f"{name}({parameter}=)")
    return found
