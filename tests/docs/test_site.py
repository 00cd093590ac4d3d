"""The documentation as a site: every page has its place, and the parts that the code gives are whole.

`make docs` builds it; its theme is not installed for these tests.
"""

from __future__ import annotations

import argparse
import importlib.util
import re

import pytest

import lockstep
from lockstep import errors
from lockstep.cli.parsers import every_parser
from lockstep.config import env
from tests.docs.runner import ROOT

DOCS = ROOT / "docs"
MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.M)


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference_tables", DOCS / "reference_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables(reference):
    return reference.TABLES


def test_every_page_has_one_place_in_the_navigation() -> None:
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", (DOCS / "index.md").read_text(encoding="utf-8"), re.M | re.S)
    placed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    pages = [path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(placed) == sorted(page for page in pages if page != "index")


def test_every_marker_is_filled_in_and_every_table_is_used(tables) -> None:
    used = {name for path in DOCS.rglob("*.md") for name in MARKER.findall(path.read_text(encoding="utf-8"))}
    assert used == set(tables)


def test_the_api_page_has_every_public_name(tables) -> None:
    shown = set(re.findall(r"^\.\. auto\w+:: lockstep\.(?:utils\.)?(\w+)$", tables["api"](), re.M))
    public = {*lockstep.__all__, *lockstep.utils.__all__} - {"__version__"}
    assert sorted(public - shown) == []


def test_the_commands_page_has_every_option(tables) -> None:
    text = tables["commands"]()
    parsers = every_parser()
    assert {"launch", "config update", "doctor net", "numerics diff"} <= set(parsers)
    for name, parser in parsers.items():
        assert re.search(rf"^###? lockstep {name}$", text, re.M), name
        for action in parser._actions:
            flag = next(iter(action.option_strings), None)
            if flag is not None and action.dest != "help" and action.help != argparse.SUPPRESS:
                assert f"`{flag}" in text, (name, flag)


def test_the_settings_page_has_every_variable_with_its_meaning(tables) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]*) \|$", tables["variables"](), re.M))
    assert sorted(rows) == sorted(env.VARIABLES)
    assert [name for name, meaning in rows.items() if not meaning.strip()] == []


def test_the_tree_of_exceptions_is_whole(tables) -> None:
    kinds = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    assert [name for name in kinds if name not in tables["exceptions"]()] == []


def test_the_page_of_codes_is_the_one_that_the_table_gives(reference) -> None:
    kept = (DOCS / "errors.md").read_text(encoding="utf-8")
    assert kept == reference.errors_page(), "run: python docs/reference_tables.py"
