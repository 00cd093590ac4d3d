"""Every exception, every kind of finding and every logger that warns has a code, and messages cite it."""

from __future__ import annotations

import ast
import json
import logging
import re
from pathlib import Path

import pytest

from lockstep import cli, codes, errors
from lockstep.logging import get_logger
from tests.docs.runner import ROOT

SOURCE = Path(__file__).resolve().parents[2] / "src" / "lockstep"


def exceptions() -> list[type[errors.LockstepError]]:
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [kind for kind in found if issubclass(kind, errors.LockstepError)]


def test_codes_are_of_one_form_and_sources_are_unique() -> None:
    assert all(re.fullmatch(r"LS[1-3]\d{3}", code) for code in codes.ENTRIES)
    assert list(codes.ENTRIES) == sorted(codes.ENTRIES)
    sources = [entry.source for entry in codes.ENTRIES.values()]
    assert len(sources) == len(set(sources))
    for code, entry in codes.ENTRIES.items():
        assert all(entry), code
        assert (ROOT / "docs" / entry.page.partition("#")[0]).exists(), code


def test_every_exception_has_its_own() -> None:
    assert [kind.__name__ for kind in exceptions() if not codes.code_of(kind.__name__)] == []
    documented = {entry.source for code, entry in codes.ENTRIES.items() if code.startswith("LS1")}
    assert documented == {kind.__name__ for kind in exceptions()}


def test_every_kind_of_finding_has_one() -> None:
    tree = ast.parse((SOURCE / "guard" / "diagnose.py").read_text(encoding="utf-8"))
    kinds = {
        text.value
        for node in ast.walk(tree)
        if (isinstance(node, ast.keyword) and node.arg == "kind")
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "kind")
        for text in ast.walk(node.value)
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
    }
    assert {"gone", "missing", "all wait", "different ops"} <= kinds
    assert [kind for kind in sorted(kinds) if not codes.code_of(kind)] == []


def logger_names() -> set[str]:
    names = set()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("get_notices", "get_logger"):
                name = node.args[0]
                if isinstance(name, ast.Constant):
                    names.add(name.value)
                elif getattr(name, "id", "") == "__name__":
                    names.add(".".join(("lockstep", *path.relative_to(SOURCE).with_suffix("").parts)))
    return names


def test_every_logger_has_one_and_packages_that_warn_often_have_their_own() -> None:
    names = logger_names()
    assert len(names) > 8
    assert [name for name in sorted(names) if not codes.code_of(name)] == []
    general = {name for name in names if codes.code_of(name) == "LS3000"}
    own = {entry.source for code, entry in codes.ENTRIES.items() if code.startswith("LS3")} - {"lockstep"}
    assert len(general) < len(names) / 2
    assert [name for name in sorted(own) if not any(used.startswith(name) for used in names)] == []


def test_an_exception_knows_its_code_and_one_of_your_own_has_its_parents() -> None:
    class Strange(errors.DataError):
        pass

    assert errors.ConfigError("bad").code == "LS1001"
    assert errors.NotYetError("bad").code == "LS1002"
    assert Strange("x").code == "LS1004"


def test_a_warning_ends_with_its_code_and_other_lines_do_not(caplog) -> None:
    caplog.set_level(logging.INFO)
    get_logger("lockstep.checkpoint").warning("%s was skipped", "this")
    get_logger("lockstep.checkpoint").info("saved")
    get_logger("mine").warning("careful")
    assert caplog.messages == ["this was skipped [LS3004]", "saved", "careful"]


def explain(capsys, *words: str) -> str:
    assert cli.main(["explain", *words]) == 0
    return capsys.readouterr().out


def test_explain_prints_an_entry_by_code_number_or_name(capsys) -> None:
    text = explain(capsys, "LS1011")
    entry = codes.ENTRIES["LS1011"]
    assert text.startswith(f"LS1011: {entry.title}")
    assert " ".join(text.split()).count(entry.fix) == 1
    assert explain(capsys, "ls1011") == explain(capsys, "1011") == explain(capsys, entry.source) == text
    assert len(explain(capsys).splitlines()) == len(codes.ENTRIES)


def test_explain_as_json(capsys) -> None:
    found = json.loads(explain(capsys, "LS2001", "--json"))
    assert found == {"LS2001": codes.ENTRIES["LS2001"]._asdict()}
    assert list(json.loads(explain(capsys, "--json"))) == list(codes.ENTRIES)


@pytest.mark.parametrize(("typed", "near"), [("LS1111", "LS1011"), ("ConfgError", "LS1001"), ("zzz", "lists all")])
def test_an_unknown_code_gets_a_suggestion(capsys, typed: str, near: str) -> None:
    assert cli.main(["explain", typed]) == 2
    assert near in capsys.readouterr().err
