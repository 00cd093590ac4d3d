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


def banned_variables(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Variables, arguments and attributes that are given such a name, or one in which somebody speaks."""
    for node in ast.walk(tree):
        name = getattr(node, "arg", None) if isinstance(node, ast.arg) else None
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        if name is not None and set(re.findall(r"[a-z]+", name.lower())) & {*BANNED, "said", "meant", "speak"}:
            yield node.lineno, name


VARIABLES_TOO = (
    "config",
    "doctor",
    "estimate",
    "host",
    "job_store",
    "model_files",
    "rundir",
    "storage",
    "topology",
    "traces",
)
"""Packages in which variables are held to it too."""


@pytest.mark.parametrize("package", VARIABLES_TOO)
def test_variables_are_the_fields_own(package: str) -> None:
    assert offences(banned_variables, [path for path in FILES if path.is_relative_to(SOURCE / package)]) == []


def test_the_rule_for_variables_sees() -> None:
    code = "def f(told, fine):\n    heard_of = told\n    self.said = 1\n    for meant in fine:\n        pass\n"
    assert [name for _, name in banned_variables(ast.parse(code))] == ["told", "heard_of", "said", "meant"]


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
    inside = SOURCE / "torch_internals" / "ddp.py"  # DDP's own inside, which strategies/ddp alone imports
    files = [path for path in FILES if "strategies" not in path.relative_to(SOURCE).parts and path != inside]
    assert offences(assumes_replicas, files) == []
    users = [
        path
        for path in FILES
        if "torch_internals.ddp" in (text := path.read_text("utf-8")) or "import autograd, ddp" in text
    ]
    assert {path.parent for path in users} <= {SOURCE / "strategies" / "ddp"}
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
    "torch_internals/flight_recorder.py": "torch's Flight Recorder, in this process",
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


TORCH_INTERNALS = SOURCE / "torch_internals"
TORCHS = {
    *("_backward_hooks", "_forward_hooks", "_forward_pre_hooks", "_load_state_dict_pre_hooks"),
    *("_load_from_state_dict", "_save_to_state_dict", "_state_dict_hooks", "_orig_mod", "_compiled_call_impl"),
    *("_comm_hooks", "_update_process_group", "_join_config", "_join_hook", "_sync_buffers", "_sync_final_model"),
    *("_pre_forward", "_post_forward", "_set_static_graph", "_get_ddp_logging_data", "_get_num_nonjoined_procs"),
    *("_check_global_requires_backward_grad_sync", "_match_unused_params_allreduce", "_find_common_rank"),
    *("_distributed_broadcast_coalesced", "_remove_autograd_hooks", "_static_graph_delay_allreduce_enqueued"),
    *("_iterator", "_get_iterator", "_next_data", "_base_seed", "_index_sampler", "_dataset_kind", "_num_workers"),
    *("_worker_result_queue", "_data_queue", "_tasks_outstanding", "_workers", "_num_samples", "_auto_collation"),
    *("_get_backend", "_reduce_scatter_base", "_get_default_store", "_get_default_group"),
    *("_get_sequence_number_for_group", "_abort_process_group", "_dump_fr_trace", "_set_default_timeout"),
    *("_start_workers", "_monitor_workers", "_stop_workers", "_pcontext", "_remaining_restarts", "_worker_group"),
    *("_execution_engine", "_current_graph_task_id", "_grad_fn", "_cdata", "_local_tensor", "_per_optimizer_states"),
    *("_wrapped_by_lr_sched", "_step_count", "_opt_called", "_optimizer_step_pre_hooks", "_checkpoint_offset"),
    *("_ddp_params_and_buffers_to_ignore", "_lazy_load_hook", "_RendezvousState", "_NodeDesc"),
}
"""Private names of torch's objects, in use or at hand: found by name, whatever they are looked up in, also as texts."""
TORCHS_OF = {
    "_parameters": {"module", "part", "model", "net", "child", "layer", "block"},
    "_buffers": {"module", "part", "model", "net", "child", "layer", "block"},
    "_modules": {"module", "part", "model", "net", "child", "layer", "block"},
    "_values": {"tensor", "gradient", "grad", "sparse", "value", "detach()"},
    "_indices": {"tensor", "gradient", "grad", "sparse", "value"},
    "_version": {"tensor", "parameter", "value", "weight"},
    "_shutdown": {"super()", "agent"},
    "_store": {"agent"},
}
"""The same for names that ours have, too: what they are looked up in."""
PYTHONS = {
    *("_exit", "_getframe", "_current_frames", "_run_module_as_main", "_config", "_initializing", "_replace"),
    *("_fields", "_asdict", "_actions", "_SubParsersAction"),
}
"""Private names of Python's own modules and classes."""
OTHERS = {"_no_split_modules", "_tie_weights"}
"""Of models of transformers, where it is the documented way."""


@functools.cache
def own_private_names() -> frozenset[str]:
    """What this package itself defines with an underscore: functions, classes, variables, attributes, slots."""
    found: set[str] = set()
    for path in FILES:
        if TORCH_INTERNALS in path.parents:
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.alias):
                found.add(node.asname or node.name.rpartition(".")[2])
    return frozenset(found) - TORCHS


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name.strip("_") != ""


def torchs_private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Uses of what torch keeps to itself: in imports, behind names that are torch's, and on objects of torch's."""
    known: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] == "torch":
                    known.add((name.asname or name.name).partition(".")[0])
                    if any(map(is_private, name.name.split("."))):
                        yield node.lineno, f"import {name.name}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for name in node.names:
                known.add(name.asname or name.name)
                if any(map(is_private, [*(node.module or "").split("."), name.name])):
                    yield node.lineno, f"from {node.module} import {name.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base: ast.AST = node
            while isinstance(base, ast.Attribute):
                base = base.value
            of_torch = isinstance(base, ast.Name) and base.id in known
            strange = node.attr not in own_private_names() | PYTHONS | OTHERS
            if of_torch or strange or _is_torchs(node.attr, node.value):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name in TORCHS:
                yield node.lineno, f"def {node.name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in TORCHS or re.fullmatch(r"torch(\.\w+)*\._(?!_)[\w.]+", node.value):
                yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            text = getattr(node.args[1], "value", None)
            looks = node.func.id in ("getattr", "setattr", "hasattr", "delattr") and isinstance(text, str)
            if looks and is_private(text) and text not in own_private_names() | PYTHONS | OTHERS | TORCHS:
                yield node.lineno, ast.unparse(node)


def _is_torchs(name: str, owner: ast.AST) -> bool:
    return name in TORCHS or ast.unparse(owner).rpartition(".")[2] in TORCHS_OF.get(name, ())


def test_torchs_private_names_are_in_one_package() -> None:
    elsewhere = [path for path in FILES if TORCH_INTERNALS not in path.parents]
    preload = SOURCE / "testing" / "_preload.py"  # names modules to be loaded early, and does without any of them
    assert offences(torchs_private_names, [path for path in elsewhere if path != preload]) == []


def test_each_file_of_that_package_has_a_test_and_each_function_says_what_it_needs() -> None:
    for path in sorted(TORCH_INTERNALS.glob("[a-z]*.py")):
        tree = parsed(path)
        assert isinstance(tree, ast.Module)
        assert (Path(__file__).parent / "torch_internals" / f"test_{path.stem}.py").exists(), path.name
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                said = ast.get_docstring(node) or ""
                assert ("Needs" in said and "Without" in said) or "see ``" in said, f"{path.name}: {node.name}"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch\ntorch._C._x()", ["torch._C._x", "torch._C"]),
        ("import torch.distributed as d\nd._functional_collectives", ["d._functional_collectives"]),
        ("from torch.nn.modules.batchnorm import _NormBase", ["from torch.nn.modules.batchnorm import _NormBase"]),
        ("from torch._dynamo import reset", ["from torch._dynamo import reset"]),
        ("import torch._dynamo", ["import torch._dynamo"]),
        ("model._comm_hooks", ["model._comm_hooks"]),
        ("self._pre_forward()", ["self._pre_forward"]),
        ("loader._iterator = None", ["loader._iterator"]),
        ("tensor.untyped_storage()._weak_ref()", ["tensor.untyped_storage()._weak_ref"]),
        ("getattr(model, '_fsdp_state', None)", ["getattr(model, '_fsdp_state', None)"]),
        ("model.__dict__['_join_config']", ["'_join_config'"]),
        ("importlib.import_module('torch._inductor.codecache')", ["'torch._inductor.codecache'"]),
        ("class A(B):\n    def _start_workers(self): ...", ["def _start_workers"]),
        ("part._parameters", ["part._parameters"]),
        ("import torch\nself._group\ntorch.__version__\nos._exit(1)\nself._parameters", []),
    ],
)
def test_the_rule_on_torchs_private_names_sees(code: str, found: list[str]) -> None:
    assert [what for _, what in torchs_private_names(ast.parse(code))] == found


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
