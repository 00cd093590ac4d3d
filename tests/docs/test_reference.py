"""The reference page and the drawing of the house agree with the code."""

from __future__ import annotations

import inspect
import re
import sys

import pytest

import lockstep
from lockstep import Accelerator, errors
from lockstep.config.env import UNBUILT, VARIABLES
from tests.docs.runner import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:  # which pytest brings along there
    import tomli as tomllib

REFERENCE = (ROOT / "docs" / "training-loop.md").read_text(encoding="utf-8")
HOUSE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return REFERENCE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def named(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_the_constructor_table_has_every_argument_and_no_other() -> None:
    first_cells = re.findall(r"^\| (`[^|]+) \|", section("Constructor"), re.M)
    arguments = set(inspect.signature(Accelerator).parameters)
    assert named(" ".join(first_cells)) == arguments


def test_every_public_method_and_property_is_named() -> None:
    public = {name for name in dir(Accelerator) if not name.startswith("_")}
    assert sorted(public - named(section("Methods")) - named(section("Properties"))) == []


def test_what_is_said_to_be_missing_is_missing_and_says_so() -> None:
    missing = named(section("Methods").split("not in this release", 1)[1])
    assert len(missing) > 2
    for name in missing:
        with pytest.raises(AttributeError, match="does not have it yet"):
            getattr(Accelerator.__new__(Accelerator), name)


def test_every_variable_is_named_and_no_other() -> None:
    known = {name for names in VARIABLES.values() for name in names} | set(UNBUILT)
    known |= {"LOCKSTEP_RUN_DIR", "LOCKSTEP_LAUNCH", "LOCKSTEP_ATTEMPT", "LOCKSTEP_JOB_SECRET"}  # the launcher's
    shown = {name for name in named(section("Environment variables")) if name.startswith(("LOCKSTEP_", "ACCELERATE_"))}
    assert shown == known


def test_the_tree_of_errors_is_the_one_in_the_module() -> None:
    tree = inspect.cleandoc((errors.__doc__ or "").split("::", 1)[1].split("\n\nTexts", 1)[0])
    assert tree.strip() in REFERENCE


def test_the_option_objects_are_named() -> None:
    options = {name for name in lockstep.__all__ if name.endswith(("Kwargs", "Plugin", "Configuration"))}
    assert options <= named(section("Option objects"))


def layers() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [re.sub(r"[()]", "", line) for line in settings["tool"]["importlinter"]["contracts"][0]["layers"]]


def test_the_order_of_the_packages_is_the_one_of_the_contract() -> None:
    assert "\n".join(layers()) in HOUSE


def test_every_package_and_its_order_is_in_the_drawing() -> None:
    drawing = HOUSE.split("```text\n", 1)[1].split("```", 1)[0]
    packages = [name.strip() for line in layers() for name in line.split("|")]
    source = ROOT / "src" / "lockstep"
    built = [name for name in packages if (source / name).is_dir() or (source / f"{name}.py").is_file()]
    places = {name: re.search(rf"(?:^|\s){name}(?:/|\.py)", drawing) for name in built}
    assert [name for name, place in places.items() if place is None] == []
    at = [place.start() for place in places.values() if place is not None]
    assert at == sorted(at)


def test_the_files_that_the_drawing_names_exist() -> None:
    named_files = re.findall(r"`((?:\w+/)+\w+\.py)`", HOUSE)
    roots = (ROOT / "src" / "lockstep", ROOT)
    assert [name for name in named_files if not any((root / name).exists() for root in roots)] == []
