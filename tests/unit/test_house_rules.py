"""Rules of the house that no linter knows: who reads the environment, no `global`, and starting without torch."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "lockstep"
ENVIRONMENT_READER = SOURCE / "config" / "env.py"
FILES = sorted(SOURCE.rglob("*.py"))

ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def environment_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Places that touch the environment: attributes of the os module under any alias, and imports from it."""
    aliases = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
        if name.name == "os"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_NAMES:
            if isinstance(node.value, ast.Name) and node.value.id in aliases:
                yield node.lineno, f"os.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "os" and node.level == 0:
            for name in node.names:
                if name.name in ENVIRONMENT_NAMES | {"*"}:
                    yield node.lineno, f"from os import {name.name}"


def global_statements(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


def offences(rule, files: list[Path]) -> list[str]:
    return [f"{path.relative_to(SOURCE.parent)}:{line}: {what}" for path in files for line, what in rule(parsed(path))]


@functools.cache
def parsed(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def test_a_class_name_occurs_once() -> None:
    """Who greps for a class finds one."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


BANNED = {
    *("look", "tell", "told", "hear", "heard", "say", "bury", "hoards", "sheltered", "farewell", "goodbye", "mend"),
    *("keeper", "teller", "wish", "whereabouts", "away", "talk", "desk", "letter", "parcel", "deal", "dealt"),
    *("walked", "sparing", "armed", "reform", "situation"),
}
"""Words that name nothing outside this project, as parts of names: poll, report, send, receive say what is done."""


def banned_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Functions and classes whose names have such a part."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            parts = set(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", node.name).lower()))
            if parts & BANNED:
                yield node.lineno, node.name


def test_names_are_the_fields_own() -> None:
    assert offences(banned_names, FILES) == []
    assert [path.stem for path in FILES if set(path.stem.split("_")) & BANNED] == []


def assumes_replicas(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Importing or naming torch's DistributedDataParallel, or knowing what its weights are called."""
    names = {"DistributedDataParallel", "DataParallel"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute | ast.Name):
            found = [node.attr if isinstance(node, ast.Attribute) else node.id]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [node.value] if node.value == "module." else []
        else:
            continue
        for name in found:
            if name == "module." or "torch.nn.parallel" in name or name.rpartition(".")[2] in names:
                yield node.lineno, name


def test_only_strategies_know_what_is_put_around_a_model() -> None:
    files = [path for path in FILES if "strategies" not in path.relative_to(SOURCE).parts]
    assert offences(assumes_replicas, files) == []
    assert offences(assumes_replicas, sorted((SOURCE / "strategies" / "ddp").glob("*.py")))


@pytest.mark.parametrize(
    "line",
    [
        "from torch.nn.parallel import DistributedDataParallel as D",
        "import torch.nn.parallel.distributed as p",
        "from torch.nn import parallel, DataParallel",
        "isinstance(model, nn.parallel.DistributedDataParallel)",
        "name.removeprefix('module.')",
    ],
)
def test_every_way_to_know_a_replica_is_seen(line: str) -> None:
    assert list(assumes_replicas(ast.parse(line)))


UNPICKLES = {
    "checkpoint/safe_pickle.py": "files, by torch's unpickler of plain values, unless the user trusts them",
    "model_files/torch_file.py": "files, of which only the outline is read",
    "comm/objects.py": "the other ranks, in a collective",
    "data/dispatch.py": "rank 0, in a collective",
    "data/worker_tails.py": "a worker process of this loader",
    "guard/reporter.py": "torch's Flight Recorder, in this process",
    "launch/fork_worker.py": "the notebook that forked this process",
    "launch/fork_pool.py": "a process that this one forked",
    "launch/rendezvous_state.py": "the rendezvous' state, by the classes of that state only, before torch does",
    "testing/_member.py": "a process that this one started",
    "testing/_rank.py": "the process that started this one",
    "testing/ranks.py": "processes that this one started",
}
"""Modules that may use pickle, and whose bytes they unpickle. The job's store is open to whoever reaches its port."""


def imports_of_pickle(tree: ast.AST) -> Iterator[tuple[int, str]]:
    names = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and {alias.name.partition(".")[0] for alias in node.names} & names:
            yield node.lineno, "import pickle"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in names:
            yield node.lineno, "from pickle import"


RAW_READS = ("multi_get", "compare_set", "queue_pop")
SIGNED_READS = ("peek", "peek_all", "claim")
READS_UNSIGNED = {
    "job_store/signed_store.py": "checks the signatures",
    "process_group/job_secret.py": "fingerprints of the secret, compared as texts",
    "launch/rendezvous_backend.py": "signs and checks the state of torch's rendezvous",
}
"""Modules that may read torch's store past the signatures, and what."""


def reads_past_signatures(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls of torch's store itself that read; and its counters, which cannot be signed."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        counts = node.attr in ("add", "append") and ("store" in owner.lower() or owner in ("_root", "raw"))
        raw = isinstance(node.value, ast.Attribute) and owner == "raw" and node.attr in ("get", "wait", "check")
        if node.attr in RAW_READS or raw or counts:
            yield node.lineno, f"{owner}.{node.attr}"


def test_values_of_the_store_are_read_through_their_signatures() -> None:
    allowed = [SOURCE / name for name in READS_UNSIGNED]
    assert offences(reads_past_signatures, [path for path in FILES if path not in allowed]) == []
    assert [path for path in allowed if not list(reads_past_signatures(parsed(path)))] == []


def uses_of_a_store(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Reading from the job's store: ``store.get``, ``self._root.get`` and the like, and what only a store has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("get", "gather", "add", *RAW_READS, *SIGNED_READS):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if node.attr not in ("get", "gather", "add") or "store" in owner.lower() or owner in ("_root", "raw"):
                yield node.lineno, f"{owner}.{node.attr}"


def test_nothing_from_a_store_is_unpickled() -> None:
    allowed = [SOURCE / name for name in UNPICKLES]
    assert offences(imports_of_pickle, [path for path in FILES if path not in allowed]) == []
    assert offences(uses_of_a_store, allowed) == []
    assert [path for path in allowed if not list(imports_of_pickle(parsed(path)))] == []


def test_there_is_source_to_check() -> None:
    assert ENVIRONMENT_READER in FILES


def test_only_config_env_touches_the_environment() -> None:
    assert offences(environment_uses, [path for path in FILES if path != ENVIRONMENT_READER]) == []


def test_no_global_statement() -> None:
    assert offences(global_statements, FILES) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import os\nos.environ['A']", ["os.environ"]),
        ("import os as system\ndef f():\n    return system.getenv('A')", ["os.getenv"]),
        ("from os import environ as e, path", ["from os import environ"]),
        ("from os import *", ["from os import *"]),
        ("import os\nos.putenv('A', 'b')", ["os.putenv"]),
        ("import os\nos.path.join('a')", []),
        ("class C:\n    environ = 1\nC.environ", []),
    ],
)
def test_the_environment_rule_sees(code: str, found: list[str]) -> None:
    assert [what for _, what in environment_uses(ast.parse(code))] == found


def test_the_global_rule_sees() -> None:
    assert [what for _, what in global_statements(ast.parse("def f():\n    global a, b\n"))] == ["global a, b"]


@pytest.mark.parametrize(
    "start",
    [
        pytest.param("import lockstep", id="import lockstep"),
        pytest.param(
            """
            import runpy

            sys.argv = ["lockstep", "--help"]
            try:
                runpy.run_module("lockstep", run_name="__main__", alter_sys=True)
            except SystemExit as end:
                assert not end.code, f"lockstep --help ended with {end.code}"
            """,
            id="lockstep --help",
        ),
    ],
)
def test_starts_without_importing_torch(start: str) -> None:
    check = "import sys\n" + textwrap.dedent(start) + "\nassert 'torch' not in sys.modules, 'torch was imported'\n"
    child = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 0, child.stderr
