"""Models of which parts wait on disk or on the host."""

from __future__ import annotations

import copy
import gc
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import (
    Accelerator,
    CheckpointError,
    ConfigError,
    UsageError,
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from lockstep.hooks import AlignDevicesHook, remove_hook_from_submodules
from lockstep.model_files.weights import read_weights, write_weights
from lockstep.utils.modeling import (
    align_module_device,
    find_tied_parameters,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    load_offloaded_weights,
    set_module_tensor_to_device,
)
from tests.unit.offload.models import WORDS, Net, net

PRELOAD = ["Attention"]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("lockstep-read-ahead"):
            thread.join(10)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(WORDS)["logits"]


def on_meta(model: nn.Module) -> set[str]:
    return {name for name, value in model.state_dict(keep_vars=True).items() if value.is_meta}


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


MAPS: dict[str, dict[str, Any]] = {
    "all on disk": {"": "disk"},
    "blocks on disk": {"embed": "cpu", "head": "cpu", "gain": "cpu", "attention": "cpu", "blocks": "disk"},
    "an exception": {"": "disk", "blocks.1": "cpu"},
    "an exception inside one": {"": "cpu", "blocks": "disk", "blocks.0.up": "cpu"},
    "single tensors": {"": "cpu", "gain": "disk", "blocks.2.scale": "disk", "blocks.0.up.bias": "disk"},
}


@pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_the_same_result_wherever_the_parts_wait(
    tmp_path: Path, device_map: dict[str, Any], offload_buffers: bool
) -> None:
    whole = net()
    want, state = logits(whole), copy.deepcopy(whole.state_dict())
    model = dispatch_model(
        whole, device_map, offload_dir=tmp_path, preload_module_classes=PRELOAD, offload_buffers=offload_buffers
    )
    waiting = on_meta(model)
    assert waiting
    for _ in range(3):
        assert torch.equal(logits(model), want)
        assert on_meta(model) == waiting
    assert model.hf_device_map == device_map
    assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]
    assert ("blocks.0.norm.running_mean" in waiting) == (offload_buffers and "blocks.0.norm.running_mean" in waiting)
    assert same_state(get_state_dict_offloaded_model(model), state)
    remove_hook_from_submodules(model)
    assert same_state(model.state_dict(), state)
    assert model.head.weight is model.embed.weight or "embed.weight" in waiting
    assert torch.equal(logits(model), want)
    assert "to" not in model.__dict__


def test_buffers_stay_unless_they_are_offloaded(tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path / "a", preload_module_classes=PRELOAD)
    assert not model.blocks[0].norm.running_mean.is_meta
    model = disk_offload(net(), tmp_path / "b", preload_module_classes=PRELOAD, offload_buffers=True)
    assert model.blocks[0].norm.running_mean.is_meta
    assert not model.blocks[0].shift.is_meta  # it is in no state dict, so it cannot be kept on disk


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("device_map", [{"": "disk"}, {"": "disk", "blocks.1": "cpu"}, "auto", None, "sequential"])
def test_from_files_into_an_empty_model(tmp_path: Path, safe: bool, device_map: Any) -> None:
    source = net()
    (tmp_path / "model").mkdir()
    write_weights(source.state_dict(), tmp_path / "model", max_shard_size=100_000, safe=safe)
    with init_empty_weights():
        model = Net().eval()
    for block, original in zip(model.blocks, source.blocks, strict=True):
        block.shift = original.shift  # in no file
    off = tmp_path / "off"
    load_checkpoint_and_dispatch(
        model, tmp_path / "model", device_map, offload_folder=off, preload_module_classes=PRELOAD, strict=True
    )
    assert torch.equal(logits(model), logits(source))
    assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]
    if isinstance(device_map, dict):
        assert (off / "head.weight.dat").samefile(off / "embed.weight.dat")
        with init_empty_weights():
            again = Net().eval()
        again.load_state_dict({name: value for name, value in source.state_dict().items() if "norm.r" in name}, False)
        for block, original in zip(again.blocks, source.blocks, strict=True):
            block.shift = original.shift
        disk = {"": "disk"} if len(device_map) == 1 else None
        if disk:  # the folder is enough
            dispatch_model(again, disk, offload_dir=off, preload_module_classes=PRELOAD)
            assert torch.equal(logits(again), logits(source))


def test_a_map_for_limits_of_memory_is_used(tmp_path: Path) -> None:
    source = net()
    want = logits(source)
    device_map = infer_auto_device_map(source, {"cpu": 1_500_000}, no_split_module_classes=["Body", "Attention"])
    assert set(device_map.values()) == {"cpu", "disk"}
    model = dispatch_model(source, device_map, offload_dir=tmp_path, preload_module_classes=PRELOAD)
    assert torch.equal(logits(model), want)


def test_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    write_weights(net().state_dict(), tmp_path)
    model = load_checkpoint_and_dispatch(
        Net().eval(),
        tmp_path,
        {"": "disk"},
        offload_folder=tmp_path / "off",
        dtype="bfloat16",
        preload_module_classes=PRELOAD,
    )
    assert {value.dtype for value in get_state_dict_offloaded_model(model).values()} == {torch.bfloat16, torch.int64}
    assert (tmp_path / "off" / "gain.dat").stat().st_size == 320


def test_weights_on_the_host() -> None:
    whole = net()
    want = logits(whole)
    before = whole.head.weight.data_ptr()
    model = cpu_offload(whole, preload_module_classes=PRELOAD)
    assert on_meta(model) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert torch.equal(logits(model), want)
    assert get_state_dict_offloaded_model(model)["head.weight"].data_ptr() == before
    with pytest.raises(UsageError, match="have no values"):
        cpu_offload(model)


def test_one_device_needs_no_hooks_unless_they_are_forced() -> None:
    model = dispatch_model(net(), {"": "cpu"})
    assert not [module for module in model.modules() if "_hf_hook" in module.__dict__]
    model = dispatch_model(net(), {"": "cpu"}, force_hooks=True)
    assert isinstance(model._hf_hook, AlignDevicesHook)
    assert torch.equal(logits(model), logits(net()))


def test_the_meta_device_stands_for_one_that_is_not_there(tmp_path: Path) -> None:
    """Where each part runs, and what is moved between them, by shapes alone."""
    model = net()
    places = {"embed": "meta", "head": "meta", "gain": "meta", "attention": "meta", "blocks": "cpu"}
    model = dispatch_model(model, places, main_device="meta", preload_module_classes=PRELOAD)
    with torch.no_grad():
        assert model(WORDS.to("meta"))["logits"].is_meta
    assert {name for name in dict(model.named_parameters()) if name.startswith("blocks")} <= on_meta(model)
    hook = AlignDevicesHook("meta", skip_keys="stays")
    args, kwargs = hook.pre_forward(model, torch.ones(1), stays=torch.ones(1), goes=[torch.ones(1)])
    assert args[0].is_meta
    assert kwargs["goes"][0].is_meta
    assert not kwargs["stays"].is_meta


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"device_map": {"": "disk"}}, ConfigError, "device_map puts '' on \"disk\", and there is no offload_dir"),
        ({"device_map": {"": "cpu", "hed": "disk"}}, ConfigError, "does not have: 'hed'"),
        ({"device_map": {"embed": "cpu"}}, ConfigError, "says nothing of"),
        ({"device_map": {"": "cpu", "gain": "tpu9"}}, ConfigError, "puts 'gain' on 'tpu9', which cannot be used here"),
        ({"device_map": "everywhere"}, ConfigError, "not a table"),
    ],
)
def test_a_map_that_cannot_be_honoured(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    model = net()
    with pytest.raises(error, match=said):
        dispatch_model(model, **arguments)
    assert not on_meta(model)
    assert torch.equal(logits(model), logits(net()))


def test_a_way_to_make_a_map_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"device_map='best' is not known.*'balanced_low_0'"):
        load_checkpoint_and_dispatch(net(), tmp_path, "best")


def test_a_folder_of_another_model(tmp_path: Path) -> None:
    disk_offload(nn.Linear(2, 2), tmp_path)
    with init_empty_weights():
        model = Net()
    with pytest.raises(CheckpointError, match=r"are not in .*index\.json: .*embed\.weight"):
        disk_offload(model, tmp_path)
    with init_empty_weights():
        other = nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match=r"weight has shape \[2, 2\] in .*, and \[2, 3\]"):
        dispatch_model(other, {"": "disk"}, offload_dir=tmp_path)


def test_values_in_memory_count_more_than_those_in_the_folder(tmp_path: Path) -> None:
    disk_offload(nn.Linear(2, 2), tmp_path)
    new = nn.Linear(2, 2)
    want = new(torch.ones(2))
    assert torch.equal(disk_offload(new, tmp_path)(torch.ones(2)), want)


def test_a_file_that_vanishes_is_named_and_the_model_can_go_on_when_it_is_back(tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path, preload_module_classes=PRELOAD)
    want = logits(model)
    file = tmp_path / "blocks.1.up.weight.dat"
    file.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"blocks\.1\.up\.weight was offloaded to .*blocks\.1\.up\.weight\.dat"):
        logits(model)
    assert "blocks.1.up.weight" in on_meta(model)
    (tmp_path / "elsewhere").rename(file)
    assert torch.equal(logits(model), want)


def test_an_offloaded_model_is_not_moved(tmp_path: Path) -> None:
    model = dispatch_model(net(), {"": "disk"}, offload_dir=tmp_path)
    for move in (lambda: model.to("cpu"), lambda: model.cpu()):
        with pytest.raises(UsageError, match="cannot be moved"):
            move()
    model.to(torch.float32)  # no move
    spread = dispatch_model(net(), {"": "cpu"}, force_hooks=True)
    assert spread.to("cpu") is spread


# ---------------------------------------------------------------- in training, and saving


def test_lost_gradients_are_warned_of_and_those_of_others_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = dispatch_model(net(), {"": "cpu", "blocks": "disk"}, offload_dir=tmp_path)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.gain.requires_grad_(True)
    reference = net()
    reference(WORDS)["logits"].sum().backward()
    with caplog.at_level(logging.WARNING):
        model(WORDS)["logits"].sum().backward()
    assert torch.allclose(model.gain.grad, reference.gain.grad)
    assert not [text for text in caplog.messages if "is lost" in text]
    model.blocks[0].scale.requires_grad_(True)
    with caplog.at_level(logging.WARNING):
        model(WORDS)["logits"].sum().backward()
    assert [text for text in caplog.messages if "A gradient was computed for a weight that is offloaded" in text]


def test_prepare_leaves_it_where_it_is_and_saving_gives_its_weights(tmp_path: Path, alone: None) -> None:
    source = net()
    accelerator = Accelerator(cpu=True)
    offloaded = (
        disk_offload(net(), tmp_path / "off", preload_module_classes=PRELOAD),
        cpu_offload(net(), preload_module_classes=PRELOAD),
    )
    for number, model in enumerate(map(accelerator.prepare, offloaded)):
        assert torch.equal(logits(model), logits(source))
        state = accelerator.get_state_dict(model)
        assert same_state(state, source.state_dict())
        accelerator.save_model(model, tmp_path / f"saved{number}")
        saved = read_weights(tmp_path / f"saved{number}")
        assert all(torch.equal(saved[name], source.state_dict()[name]) for name in saved)
        assert set(source.state_dict()) - set(saved) == {"head.weight"}
        assert accelerator.verify_device_map(model)


def test_weights_can_be_looked_at_where_they_run(tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path, preload_module_classes=PRELOAD)
    body = model.blocks[0]
    assert has_offloaded_params(body)
    assert not has_offloaded_params(nn.Linear(1, 1))
    with align_module_device(body):
        assert torch.equal(body.scale, net().blocks[0].scale)
    assert body.scale.is_meta
    with align_module_device(body, "cpu"):
        assert not body.scale.is_meta
    plain = nn.Linear(1, 1)
    weight = plain.weight
    with align_module_device(plain, "meta"):
        assert plain.weight.is_meta
    assert plain.weight is weight
    state = dict.fromkeys(["blocks.0.scale", "gain"], "")
    get_state_dict_from_offload(body, "blocks.0.scale", state)
    assert torch.equal(state["blocks.0.scale"], net().blocks[0].scale)
    assert state["gain"] == ""


def test_offloaded_weights_are_brought_back_into_an_empty_model(tmp_path: Path) -> None:
    import json

    disk_offload(nn.Linear(3, 2), tmp_path)
    with init_empty_weights():
        model = nn.Linear(3, 2)
    load_offloaded_weights(model, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    assert model(torch.ones(3)).shape == (2,)


def test_one_tensor_is_placed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight.requires_grad_(False)
    set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(2, 2, dtype=torch.float64))
    assert model[0].weight.dtype is torch.float32
    assert not model[0].weight.requires_grad
    set_module_tensor_to_device(model, "1.running_mean", "cpu", value=torch.ones(2), dtype="float16")
    assert model[1].running_mean.dtype is torch.float16
    set_module_tensor_to_device(model, "0.bias", "meta")
    with pytest.raises(ConfigError, match=r"0\.bias has no values"):
        set_module_tensor_to_device(model, "0.bias", "cpu")
    with pytest.raises(ConfigError, match=r"shape \(2,\), and the given value \(3,\)"):
        set_module_tensor_to_device(model, "0.bias", "cpu", value=torch.ones(3))
    with pytest.raises(ConfigError, match=r"no parameter or buffer '7\.bias'"):
        set_module_tensor_to_device(model, "7.bias", "cpu")


def test_a_model_that_calls_itself_and_one_that_is_used_twice(tmp_path: Path) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([2.0]))

        def forward(self, value: torch.Tensor, depth: int) -> torch.Tensor:
            return (self(value, depth - 1) if depth else value) * self.w

    model = nn.ModuleDict({"a": Again()})
    model["b"] = model["a"]
    disk_offload(model, tmp_path)
    assert model["a"](torch.ones(1), 3).item() == 16
    assert model["b"](torch.ones(1), 0).item() == 2
    assert model["a"].w.is_meta


def test_a_copy_runs_on_its_own(tmp_path: Path) -> None:
    model = disk_offload(net(), tmp_path, preload_module_classes=PRELOAD)
    want = logits(model)
    other = copy.deepcopy(model)
    assert torch.equal(logits(other), want)
    assert on_meta(other) == on_meta(model)
    remove_hook_from_submodules(other)
    assert torch.equal(logits(model), want)


def test_a_compiled_model_reads_its_weights_outside_of_the_graph(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 2)).eval()
    values = torch.randn(4, 300)
    with torch.no_grad():
        want = model(values)
        compiled = torch.compile(disk_offload(model, tmp_path), backend="eager")
        for _ in range(2):
            assert torch.equal(compiled(values), want)
    assert model[0].weight.is_meta
