"""Configuration files: Accelerate's own, of any version, read as they are and written so that it can read them too.

A key is *acted on* (it becomes an option of ``lockstep launch``), *ignored* with the reason, *refused* because it asks
for an engine that is not built, or a mistake. All mistakes of a file are said at once, each with its line.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config import file_keys, yaml_limits
from lockstep.config.choices import DebugTool, DistributedType, PrecisionType
from lockstep.config.limited_file import read_limited
from lockstep.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """What one file says."""

    path: Path
    """Where it was read."""
    values: Mapping[str, Any]
    """Option of ``lockstep launch`` -> value. What only repeats "nothing special" (``gpu_ids: all``) is left out."""
    lines: Mapping[str, int]
    """Option, and key of the file -> the line it stands on."""
    ignored: Mapping[str, str]
    """Key -> why it is not acted on."""
    refused: tuple[str, ...]
    """What cannot be run with this file, a sentence each."""
    accelerator: str | None
    """The type of device that the file is written for (``cuda``, ``xpu``, …), where it names one."""
    keys: Mapping[str, Any]
    """The file's own keys and values, as they stand."""


def default_path(environ: Mapping[str, str]) -> Path:
    """Where the file is looked for when none is named; an old JSON file counts where there is no YAML file."""
    if home := environ.get("HF_HOME"):
        folder = Path(home)
    else:
        folder = Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    path = _expand(folder, environ) / "accelerate" / "default_config.yaml"
    old = path.with_suffix(".json")
    return old if old.is_file() and not path.is_file() else path


def _expand(path: Path, environ: Mapping[str, str]) -> Path:
    # Of the environment that was handed in, not of the process.
    if path.parts[:1] == ("~",) and environ.get("HOME"):
        return Path(environ["HOME"], *path.parts[1:])
    return path.expanduser()


# ---------------------------------------------------------------- reading


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One value of the file, its line, and what stands inside it."""

    value: Any
    line: int
    inner: Mapping[str, _Entry] | None


def read(path: str | os.PathLike[str]) -> ConfigFile:
    """Read a YAML or JSON file; everything that is wrong with it is one ConfigError."""
    path = Path(path)
    reader = _Reader(path)
    reader.take(_parse(path, _load(path), reader.problems))
    if reader.problems:
        raise ConfigError.of(reader.problems)
    return ConfigFile(
        path=path,
        values=reader.values,
        lines=reader.lines,
        ignored=reader.ignored,
        refused=tuple(reader.refused),
        accelerator=reader.accelerator,
        keys=reader.keys,
    )


def _load(path: Path) -> str:
    try:
        text = read_limited(path, yaml_limits.LARGEST).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"The configuration file {path} does not exist. `lockstep config --config_file {path}` writes it."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"The configuration file {path} cannot be read: {reason}.") from None
    # A tab is a blank in JSON and a mistake in YAML; within JSON's strings there is none.
    return text.replace("\t", " ") if path.suffix == ".json" else text


def _parse(path: Path, text: str, problems: list[str]) -> dict[str, _Entry]:
    import yaml

    try:
        yaml_limits.check(path, yaml.parse(text, Loader=yaml.SafeLoader))
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
            raise ConfigError(f"{path} is empty. `lockstep config --config_file {path}` fills it.")
        if not isinstance(node, yaml.MappingNode):
            seen = "a list" if isinstance(node, yaml.SequenceNode) else f"the text {node.value[:40]!r}"
            raise ConfigError(f"{path}, line 1: {seen} stands here. Expected are lines of the form `key: value`.")
        return _entries(loader, node, path, problems)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax(path, text, error)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}.") from None


def _syntax(path: Path, text: str, error: Any) -> str:
    mark = error.problem_mark or error.context_mark
    lines = text.splitlines()
    there = lines[mark.line].strip() if mark.line < len(lines) else ""
    return (
        f"{path}, line {mark.line + 1}, column {mark.column + 1}: this is not YAML: {error.problem or error.context}. "
        + (f"There stands {there!r}." if there else "The file ends there.")
    )


def _entries(loader: Any, node: Any, path: Path, problems: list[str], *, deep: bool = True) -> dict[str, _Entry]:
    import yaml

    first: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            problems.append(f"{path}, line {line}: a key must be a word, not a list or a mapping.")
        elif key.value in first:
            problems.append(
                f"{path}, line {line}: {key.value} is set a second time, after line {first[key.value]}. "
                "Remove one of them."
            )
        else:
            first[key.value] = line
    loader.flatten_mapping(node)
    found = {}
    for key, item in node.value:
        if isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            inner = None
            if deep and isinstance(item, yaml.MappingNode):
                inner = _entries(loader, item, path, problems, deep=False)
            found[key.value] = _Entry(value=_value(loader, item, path, problems), line=line, inner=inner)
    return found


def _value(loader: Any, node: Any, path: Path, problems: list[str]) -> Any:
    import yaml

    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        mark = getattr(error, "problem_mark", None) or node.start_mark
        seen = getattr(error, "problem", None) or str(error)
        problems.append(
            f"{path}, line {mark.line + 1}: this value cannot be read: {seen}. Allowed are plain numbers, texts, lists "
            "and mappings."
        )
        return None


@dataclass
class _Reader:
    """Sorts the entries of one file."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    keys: dict[str, Any] = field(default_factory=dict)
    accelerator: str | None = None
    _covered: set[str] = field(default_factory=set)

    def take(self, entries: Mapping[str, _Entry]) -> None:
        self.keys = {key: entry.value for key, entry in entries.items()}
        self.lines = {key: entry.line for key, entry in entries.items()}
        for key, entry in entries.items():
            if key not in file_keys.TOP:
                self._unknown(key, entry.line, file_keys.TOP)
            elif (known := file_keys.ACTED.get(key) or file_keys.OWN.get(key)) is not None:
                self._act(key, entry, known)
            elif key in file_keys.SECTIONS:
                self._section(key, entry)
        self._older(entries)
        if not self._on_sagemaker(entries):
            self._type(entries)
        self._engines(entries)
        for key, entry in entries.items():
            if key in file_keys.IGNORED and key not in self._covered and _says_something(key, entry.value):
                self.ignored[key] = file_keys.IGNORED[key]

    def _at(self, line: int) -> str:
        return f"{self.path}, line {line}"

    def _unknown(self, key: str, line: int, valid: Collection[str], inside: str = "") -> None:
        near = difflib.get_close_matches(key, sorted(valid), n=1)
        advice = f"Did you mean {near[0]}?" if near else "Remove it; docs/configuration.md lists the keys there are."
        self.problems.append(f"{self._at(line)}: {key!r} is not a known key{inside}. {advice}")

    def _wrong(self, key: str, entry: _Entry, allowed: object) -> None:
        self.problems.append(f"{self._at(entry.line)}: {key}: {entry.value!r} must be {allowed}.")

    def _act(self, key: str, entry: _Entry, known: tuple[str, file_keys.Parse]) -> None:
        option, parse = known
        self.lines[option] = entry.line
        if entry.value is None:
            return
        try:
            value = parse(entry.value)
        except ValueError as allowed:
            self._wrong(key, entry, allowed)
            return
        if value is not None:
            self.values[option] = value

    def _section(self, name: str, entry: _Entry) -> None:
        if entry.inner is None:
            if entry.value:
                self._wrong(name, entry, "a section: indented lines of the form `key: value`")
            return
        for key, inner in entry.inner.items():
            if (known := file_keys.SECTIONS[name].get(key)) is not None:
                self._act(key, inner, known)
            elif key == "mpirun_ccl":
                self.ignored[f"{name}.{key}"] = file_keys.IGNORED[key]
            else:
                self._unknown(key, inner.line, file_keys.SECTIONS[name], f" of {name}")

    def _older(self, entries: Mapping[str, _Entry]) -> None:
        """Keys that Accelerate wrote once, and has other names for now."""
        for key, entry in entries.items():
            if key == "fp16" and self.keys.get("mixed_precision") is None:
                self._act(key, entry, ("mixed_precision", file_keys.parse_fp16))
                self._covered.add(key)
            elif key == "dynamo_backend" and not self.keys.get("dynamo_config"):
                self._act(key, entry, file_keys.SECTIONS["dynamo_config"]["dynamo_backend"])
                self._covered.add(key)

    def _on_sagemaker(self, entries: Mapping[str, _Entry]) -> bool:
        entry = entries.get("compute_environment")
        if entry is None or entry.value in (None, "LOCAL_MACHINE"):
            return False
        if entry.value != "AMAZON_SAGEMAKER":
            self._wrong("compute_environment", entry, "LOCAL_MACHINE")
            return False
        self._refuse("compute_environment", entry, "jobs on Amazon SageMaker", "Set it to LOCAL_MACHINE.")
        self._covered |= {key for key, why in file_keys.IGNORED.items() if why == file_keys.SAGEMAKER}
        return True

    def _type(self, entries: Mapping[str, _Entry]) -> None:
        entry = entries.get("distributed_type")
        if entry is None or entry.value is None:
            return
        kind = "NO" if entry.value is False else str(entry.value).upper()
        if kind in file_keys.ENGINES:
            engine, section = file_keys.ENGINES[kind]
            self._refuse("distributed_type", entry, engine, "Set it to NO, MULTI_CPU or MULTI_GPU.")
            self._covered |= {section} if section else set()
        elif kind == "MULTI_CPU":
            self.values["cpu"] = True
            self.lines.setdefault("cpu", entry.line)
        elif kind in file_keys.DEVICES:
            self._devices(kind, entry)
        elif kind == "NO" and self.values.get("num_processes", 1) > 1:
            self.problems.append(
                f"{self._at(entry.line)}: distributed_type: NO is one process, and line "
                f"{self.lines['num_processes']} says num_processes: {self.values['num_processes']}. "
                "Set distributed_type to MULTI_CPU or MULTI_GPU, or num_processes to 1."
            )
        elif kind not in file_keys.TYPES:
            self._wrong("distributed_type", entry, f"one of {', '.join(DistributedType.list())}")

    def _devices(self, kind: str, entry: _Entry) -> None:
        self.accelerator, add_on = file_keys.DEVICES[kind]
        if add_on is not None and importlib.util.find_spec(add_on) is None:
            self.refused.append(
                f"{self._at(entry.line)}: distributed_type: {kind} asks for {self.accelerator} devices, which torch "
                f"knows by the package {add_on} only, and that is not installed. Install it, or set NO, MULTI_CPU or "
                "MULTI_GPU."
            )
        elif self.values.get("cpu"):
            self.problems.append(
                f"{self._at(entry.line)}: distributed_type: {kind} contradicts use_cpu: true on line "
                f"{self.lines['cpu']}. Remove use_cpu, or set distributed_type to MULTI_CPU."
            )
        else:
            self.values["multi_gpu"] = True
            self.lines["multi_gpu"] = entry.line

    def _engines(self, entries: Mapping[str, _Entry]) -> None:
        """Engines that are asked for by something else than distributed_type."""
        if self.values.get("mixed_precision") == PrecisionType.FP8:
            self._refuse("mixed_precision", entries["mixed_precision"], "fp8", "Set it to no, fp16 or bf16.")
            self._covered.add("fp8_config")
        for key in ("parallelism_config", "tp_config"):
            entry = entries.get(key)
            sizes = entry.inner if entry is not None and entry.inner is not None else {}
            above = [name for name, item in sizes.items() if name.endswith("_size") and item.value not in (None, 1)]
            if entry is not None and above and key not in self._covered:
                self._refuse(above[0], sizes[above[0]], "a model divided over processes", "Set it to 1.")
                self._covered.add(key)

    def _refuse(self, key: str, entry: _Entry, engine: str, advice: str) -> None:
        self.refused.append(
            f"{self._at(entry.line)}: {key}: {entry.value} asks for {engine}, which this release does not have, and "
            f"nothing else is run in its place. {advice}"
        )


def _says_something(key: str, value: Any) -> bool:
    if isinstance(value, dict):
        return any(_says_something(key, item) for item in value.values())
    return value not in (None, False, "no", "NO", "", 0) and value != []


# ---------------------------------------------------------------- writing

OPTIONS = frozenset(
    {"multi_gpu"}
    | {option for keys in (file_keys.ACTED, file_keys.OWN, *file_keys.SECTIONS.values()) for option, _ in keys.values()}
)
"""The options of ``lockstep launch`` that a file can hold."""


def write(path: str | os.PathLike[str], values: Mapping[str, Any], *, distributed_type: str | None = None) -> Path:
    """Write options of ``lockstep launch`` in Accelerate's keys; those it does not know are there only where set.

    ``distributed_type`` names the kind of accelerator, where there are several of a kind that is not MULTI_GPU.
    """
    given = {option: value for option, value in values.items() if value is not None}
    if unknown := given.keys() - OPTIONS:
        raise ConfigError(f"{', '.join(sorted(unknown))} cannot be kept in a configuration file.")
    if distributed_type is None:
        several = max(given.get("num_processes", 1), given.get("num_machines", 1)) > 1
        on_cpu = "MULTI_CPU" if given.get("cpu") and several else "NO"
        distributed_type = "MULTI_GPU" if given.get("multi_gpu") else on_cpu
    keys: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": distributed_type,
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no",
        "num_machines": 1,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    keys |= {key: given[option] for key, (option, _) in {**file_keys.ACTED, **file_keys.OWN}.items() if option in given}
    for section, inner in file_keys.SECTIONS.items():
        if found := {key: given[option] for key, (option, _) in inner.items() if option in given}:
            keys[section] = found
    keys["debug"] = _debug_key(given.get("debug"))
    return dump(path, keys)


def _debug_key(value: Any) -> Any:
    tools = file_keys.parse_debug(value) if value is not None else None
    if tools in (None, str(DebugTool.COLLECTIVES)):
        return tools is not None
    names = str(tools).split(",")
    return names if len(names) > 1 else names[0]


def dump(path: str | os.PathLike[str], keys: Mapping[str, Any]) -> Path:
    """Write keys as they are: all of the file or nothing of it, in folders that are made where they lack."""
    import json

    import yaml

    path = Path(path)
    if path.suffix == ".json":
        text = json.dumps(keys, indent=2, sort_keys=True) + "\n"
    else:
        text = yaml.safe_dump(dict(keys), sort_keys=True)
    try:
        # A link stays a link, to a file with new content.
        target = path.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with draft.open("w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            if target.exists():
                draft.chmod(target.stat().st_mode & 0o7777)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        no_folder = isinstance(error, (FileExistsError, NotADirectoryError))
        reason = "one of its folders is a file" if no_folder else error.strerror
        raise ConfigError(
            f"The configuration file {path} cannot be written: {reason}. Name another with --config_file."
        ) from None
    return path


# ---------------------------------------------------------------- bringing up to date

_TODAY = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "NO",
    "enable_cpu_affinity": False,
    "mixed_precision": "no",
    "use_cpu": False,
}
_RENAMED_TYPES = {"TPU": "XLA", "MPS": "NO", "False": "NO"}
_GONE = ("ipex_config", "tp_config")


def today(file: ConfigFile) -> tuple[dict[str, Any], list[str]]:
    """The file's keys as they are written now, and what had to change for that, a line each."""
    keys, changes = dict(file.keys), []

    def replace(key: str, value: Any, why: str = "") -> None:
        change = f"{keys[key]!r} is now {value!r}" if key in keys else f"{value!r} is new"
        changes.append(f"{key}: {change}{why}")
        keys[key] = value

    def remove(key: str, why: str) -> None:
        changes.append(f"{key}: {keys.pop(key)!r} is gone: {why}")

    if "fp16" in keys:
        if keys.get("mixed_precision") is None:
            replace("mixed_precision", file.values.get("mixed_precision", "no"), ", in place of fp16")
        remove("fp16", "mixed_precision replaced it")
    if "dynamo_backend" in keys:
        backend = file.values.get("dynamo_backend", "NO")
        if backend != "NO" and not keys.get("dynamo_config"):
            replace("dynamo_config", {"dynamo_backend": backend}, ", in place of dynamo_backend")
        remove("dynamo_backend", "dynamo_config replaced it")
    if (kind := str(keys.get("distributed_type"))) in _RENAMED_TYPES:
        replace("distributed_type", _RENAMED_TYPES[kind])
    if keys.get("mixed_precision") is False:
        replace("mixed_precision", "no")
    for key in _GONE:
        if key in keys:
            remove(key, "Accelerate no longer knows it")
    if "mpirun_ccl" in (keys.get("mpirun_config") or {}):
        replace("mpirun_config", {key: value for key, value in keys["mpirun_config"].items() if key != "mpirun_ccl"})
    for key in [key for key, value in keys.items() if value is None or value == {}]:
        remove(key, "it says nothing")
    for key, value in _TODAY.items():
        if key not in keys and "AMAZON_SAGEMAKER" not in keys.values():
            replace(key, value)
    return keys, changes
