"""Who does what when, on two and three ranks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import Accelerator, AcceleratorState, DistributedType, PartialState
from lockstep.testing import run_ranks
from lockstep.utils import reduce


def place() -> dict[str, Any]:
    accelerator = Accelerator()
    views = PartialState(), AcceleratorState(), accelerator
    shown = [
        (
            view.num_processes,
            view.process_index,
            view.local_process_index,
            view.is_main_process,
            view.is_local_main_process,
            view.is_last_process,
            view.distributed_type,
            str(view.device),
        )
        for view in views
    ]
    assert shown[0] == shown[1] == shown[2]
    ran = []
    for name in ("on_main_process", "on_local_main_process", "on_last_process"):
        getattr(accelerator, name)(ran.append)(name)
    accelerator.on_process(ran.append, 1)("on_process")
    accelerator.on_local_process(local_process_index=2)(ran.append)("on_local_process")
    return {"shown": shown[0], "ran": ran, "repr": repr(accelerator), "backend": views[0].backend}


def test_places_and_decorators() -> None:
    first, second, third = run_ranks(place, 3)
    kind = DistributedType.MULTI_CPU
    assert first["shown"] == (3, 0, 0, True, True, False, kind, "cpu")
    assert second["shown"] == (3, 1, 1, False, False, False, kind, "cpu")
    assert third["shown"] == (3, 2, 2, False, False, True, kind, "cpu")
    assert first["ran"] == ["on_main_process", "on_local_main_process"]
    assert second["ran"] == ["on_process"]
    assert third["ran"] == ["on_last_process", "on_local_process"]
    assert "rank 2 of 3 over gloo" in third["repr"]
    assert "DDP averages gradients" in third["repr"]
    assert first["backend"] == "gloo"


def in_turn(folder: str, name: str, fail: bool) -> tuple[bool, str]:
    """Whether the first one's file was there; the first one takes its time."""
    accelerator = Accelerator()
    file = Path(folder) / "done"
    try:
        with getattr(accelerator, name)():
            if accelerator.is_main_process:
                time.sleep(0.3)
                if fail:
                    raise OSError("disk full")
                file.touch()
            there = file.exists()
    except OSError as error:
        return False, str(error)
    accelerator.wait_for_everyone()
    return there, ""


@pytest.mark.parametrize("name", ["main_process_first", "local_main_process_first"])
def test_the_first_goes_first(tmp_path: Path, name: str) -> None:
    assert run_ranks(in_turn, 3, str(tmp_path), name, False) == [(True, "")] * 3


def failing_first(folder: str) -> str:
    accelerator = Accelerator()
    try:
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                raise OSError("disk full")
    except OSError as error:
        return str(error)
    return "released"


def test_the_others_are_released_when_the_first_fails(tmp_path: Path) -> None:
    assert run_ranks(failing_first, 2, str(tmp_path), timeout=30) == ["disk full", "released"]


def prints() -> None:
    accelerator = Accelerator()
    accelerator.print("from the machine", accelerator.process_index)
    PartialState().print("from the state")


def test_print_once_per_machine() -> None:
    outcomes = run_ranks(prints, 2, on_failure="collect")
    assert [outcome.error_text for outcome in outcomes] == ["", ""]
    lines = [line for outcome in outcomes for line in outcome.output.splitlines() if line.startswith("from the")]
    assert lines == ["from the machine 0", "from the state"]


def divided() -> dict[str, Any]:
    accelerator = Accelerator()
    found: dict[str, Any] = {}
    with accelerator.split_between_processes(list("abcde")) as part:
        found["list"] = part
    with accelerator.split_between_processes(("a",), apply_padding=True) as part:
        found["tuple"] = part
    with PartialState().split_between_processes(torch.arange(4), apply_padding=True) as part:
        found["tensor"] = part.tolist()
    with accelerator.split_between_processes({"x": [1, 2, 3], "y": torch.arange(3)}) as part:
        found["dict"] = {"x": part["x"], "y": part["y"].tolist()}
    with accelerator.split_between_processes(["a"]) as part:
        found["short"] = part
    return found


def test_dividing_work() -> None:
    first, second, third = run_ranks(divided, 3)
    assert [first["list"], second["list"], third["list"]] == [["a", "b"], ["c", "d"], ["e"]]
    assert first["tuple"] == second["tuple"] == third["tuple"] == ("a",)
    assert [first["tensor"], second["tensor"], third["tensor"]] == [[0, 1], [2, 3], [3, 3]]
    assert second["dict"] == {"x": [2], "y": [1]}
    assert [first["short"], second["short"], third["short"]] == [["a"], [], []]


def triggers() -> list[bool]:
    accelerator = Accelerator()
    seen = [accelerator.check_trigger()]
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    seen.append(accelerator.check_trigger())
    seen.append(accelerator.check_trigger())
    if accelerator.process_index == 0:
        accelerator.set_breakpoint()
    seen.append(accelerator.check_breakpoint())
    seen.append(accelerator.check_breakpoint())
    return seen


def test_a_trigger_of_one_is_learnt_by_all() -> None:
    assert run_ranks(triggers, 2) == [[False, True, False, True, False]] * 2


def sums() -> tuple[float, float]:
    accelerator = Accelerator()
    value = torch.tensor([float(accelerator.process_index + 1)])
    return reduce(value).item(), accelerator.reduce(value).item()


def test_the_two_defaults_of_reduce() -> None:
    assert run_ranks(sums, 2) == [(1.5, 3.0)] * 2
