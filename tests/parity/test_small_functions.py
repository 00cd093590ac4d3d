"""The small functions of `utils`: the same answers as Accelerate's, in one process."""

from __future__ import annotations

import os
import socket
import types
from collections import OrderedDict, namedtuple
from typing import Any

import accelerate.utils as theirs
import pytest
import torch
from packaging.version import Version

from lockstep import utils as ours

pytestmark = pytest.mark.usefixtures("alone")

# What Accelerate would do and Lockstep does not, whatever is installed.
DIFFERENT = {"is_pippy_available", "is_torch_xla_available"}
PREDICATES = [name for name in ours.__all__ if name.startswith("is_") and name.endswith("_available")]
Pair = namedtuple("Pair", "a b")

TREES: list[Any] = [
    torch.arange(3),
    [torch.ones(2, 2), {"a": torch.tensor(True)}],
    OrderedDict(x=torch.zeros(1, dtype=torch.bfloat16), y=(torch.tensor(2),)),
    Pair(torch.ones(1), [torch.zeros(2)]),
    [],
    {"text": "x", "number": 3},
    "text",
]
VERSIONS = ["1.0", "2.9.0", "2.13", "2.13.0", "2.13.1", "3.0", "2.13.0rc1"]
OPERATIONS = ["<", "<=", "==", "!=", ">=", ">"]


@pytest.mark.parametrize("name", sorted(set(PREDICATES) - DIFFERENT))
def test_predicates(name: str) -> None:
    assert bool(getattr(ours, name)()) == bool(getattr(theirs, name)())


def test_predicates_are_all_there() -> None:
    known = {name for name in dir(theirs) if name.startswith("is_") and name.endswith("_available")}
    absent = {"is_bitsandbytes_multi_backend_available", "is_transformer_engine_mxfp8_available"}
    assert known - set(PREDICATES) == absent
    assert not any(getattr(ours, name)() for name in DIFFERENT)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_versions(operation: str) -> None:
    for version in VERSIONS:
        assert ours.is_torch_version(operation, version) == theirs.is_torch_version(operation, version)
        assert ours.compare_versions("numpy", operation, version) == theirs.compare_versions(
            "numpy", operation, version
        )
        for other in VERSIONS:
            expected = theirs.compare_versions(Version(other), operation, version)
            assert ours.compare_versions(Version(other), operation, version) == expected


def test_a_comparison_that_is_none() -> None:
    for library in (theirs, ours):
        with pytest.raises(ValueError, match=r"operation.*'?=>'?"):
            library.is_torch_version("=>", "2.0")


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_trees(tree: Any) -> None:
    for name in ("find_device", "is_namedtuple", "is_torch_tensor"):
        assert getattr(ours, name)(tree) == getattr(theirs, name)(tree)
    assert ours.listify(tree) == theirs.listify(tree)
    assert type(ours.listify(tree)) is type(theirs.listify(tree))


def test_honoring_a_type() -> None:
    for example in ([1], (1,), Pair(1, 2)):
        made = ours.honor_type(example, (value * 2 for value in (1, 2)))
        assert made == theirs.honor_type(example, (value * 2 for value in (1, 2)))
        assert type(made) is type(example)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1536, 10**6, 2**30, 3 * 2**40, 2**52, 2**60, 12.5])
def test_sizes(size: float) -> None:
    assert ours.convert_bytes(size) == theirs.convert_bytes(size)


def test_names_and_parts() -> None:
    for thing in (int, test_sizes, torch.nn.Linear(1, 1), "x", types, torch.nn.Linear.forward, Pair):
        assert ours.get_pretty_name(thing) == theirs.get_pretty_name(thing)
    assert ours.recursive_getattr(torch, "nn.functional.relu") is torch.nn.functional.relu
    source = {"a": 1, "b": {"c": 2, "d": {"e": 3}}}
    assert ours.merge_dicts(source, {"b": {"x": 0}}) == theirs.merge_dicts(source, {"b": {"x": 0}})


@pytest.mark.parametrize("text", ["y", "YES", "t", "True", "on", "1", "n", "No", "f", "FALSE", "off", "0"])
def test_flags(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for to_bool in (False, True):
        assert ours.str_to_bool(text, to_bool) is theirs.str_to_bool(text, to_bool)
    monkeypatch.setenv("SOME_FLAG", text)
    assert ours.parse_flag_from_env("SOME_FLAG") is theirs.parse_flag_from_env("SOME_FLAG")
    assert ours.parse_choice_from_env("SOME_FLAG") == theirs.parse_choice_from_env("SOME_FLAG") == text


def test_flags_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (theirs, ours):
        for text in ("maybe", ""):
            with pytest.raises(ValueError, match=r"maybe|truth|neither"):
                library.str_to_bool(text)
        assert library.parse_flag_from_env("NO_SUCH_FLAG") is False
        assert library.parse_flag_from_env("NO_SUCH_FLAG", True) is True
        assert library.parse_choice_from_env("NO_SUCH_FLAG") == "no"
        monkeypatch.setenv("SOME_NUMBER", "3")
        assert library.get_int_from_env(["NO_SUCH", "SOME_NUMBER"], 7) == 3
        assert library.get_int_from_env(["NO_SUCH"], 7) == 7


@pytest.mark.parametrize("library", [theirs, ours], ids=["theirs", "ours"])
def test_the_environment_comes_back(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_KEPT", "1")
    before = dict(os.environ)
    with library.patch_environment(accelerate_kept=2, some_name="x"):
        assert (os.environ["ACCELERATE_KEPT"], os.environ["SOME_NAME"]) == ("2", "x")
    assert dict(os.environ) == before
    with library.clear_environment():
        assert dict(os.environ) == {}
        os.environ["SOME_NAME"] = "x"
    assert dict(os.environ) == before

    @library.purge_accelerate_environment
    def change() -> str:
        os.environ.update(ACCELERATE_KEPT="3", ACCELERATE_NEW="4")
        return "done"

    @library.purge_accelerate_environment
    class Tests:
        def test_one(self) -> None:
            change.__wrapped__()  # type: ignore[attr-defined]

        def other(self) -> None:
            os.environ["ACCELERATE_NEW"] = "5"

    class More(Tests):
        def test_two(self) -> None:
            change.__wrapped__()  # type: ignore[attr-defined]

    assert change() == "done"
    More().test_one()
    More().test_two()
    assert dict(os.environ) == before
    More().other()
    assert os.environ.pop("ACCELERATE_NEW") == "5"


def test_ports() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert not ours.is_port_in_use(port)
        listening.listen()
        assert ours.is_port_in_use(port)


def test_kinds_of_models() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.ReLU()))
    compiled = torch.compile(plain)
    partly = torch.nn.Sequential(torch.compile(torch.nn.Linear(1, 1)))
    for model in (plain, compiled, partly, plain[0]):
        for name in ("is_peft_model", "is_compiled_module", "has_compiled_regions", "model_has_dtensor"):
            ask, expected = getattr(ours, name), getattr(theirs, name, None) or getattr(theirs.other, name)
            assert ask(model) is bool(expected(model))
        for named in (False, True):
            assert ours.get_module_children_bottom_up(model, named) == theirs.get_module_children_bottom_up(
                model, named
            )


def test_a_model_of_pefts() -> None:
    peft = pytest.importorskip("peft")
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model = peft.get_peft_model(layer, peft.LoraConfig(target_modules=["0"]))
    assert ours.is_peft_model(model)
    assert not ours.is_peft_model(layer[0])
