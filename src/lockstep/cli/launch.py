"""``lockstep launch [options] script.py args…``: run a script on one node or several."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from lockstep.config.launch import GROUPS, RELATED, LaunchConfig
from lockstep.errors import ConfigError

RAW = True
"""The command line is handed over as it is: everything after the script belongs to the script."""

_REFUSED = {
    "use_fsdp": "FSDP",
    "fsdp": "FSDP",
    "use_deepspeed": "DeepSpeed",
    "deepspeed": "DeepSpeed",
    "zero": "DeepSpeed",
    "zero3": "DeepSpeed",
    "offload": "DeepSpeed",
    "gradient_clipping": "DeepSpeed's gradient clipping; call accelerator.clip_grad_norm_ instead",
    "use_megatron_lm": "Megatron-LM",
    "megatron_lm": "Megatron-LM",
    "use_parallelism_config": "ParallelismConfig",
    "parallelism_config": "ParallelismConfig",
    "tpu": "TPU",
    "no_tpu_cluster": "TPU",
    "vm": "TPU pods",
    "env": "TPU pods",
    "downcast_bf16": "TPU",
    "main_training_function": "TPU",
    "fp8": "fp8",
    "aws": "Amazon SageMaker",
}
"""Beginning of a flag's name -> the engine it asks for, which is not built yet."""
_REFUSED_SWITCHES = (
    "use_fsdp",
    "use_deepspeed",
    "use_megatron_lm",
    "use_parallelism_config",
    "tpu",
    "tpu_cluster",
    "no_tpu_cluster",
    "tpu_use_sudo",
    "downcast_bf16",
    "fp8_use_autocast_during_eval",
)
"""Those of them that take no value: what follows is not theirs."""

_TORCHRUN = {
    "nproc_per_node": "Torchrun's --nproc_per_node is --num_processes here, the total of all nodes.",
    "nnodes": "Torchrun's --nnodes is --num_machines here.",
    "node_rank": "Torchrun's --node_rank is --machine_rank here.",
    "master_addr": "Torchrun's --master_addr is --main_process_ip here.",
    "master_port": "Torchrun's --master_port is --main_process_port here.",
    "redirects": "Torchrun's --redirects is not needed here: output is always kept, in --log_dir.",
    "standalone": "Torchrun's --standalone is not needed here: one node is the default.",
}
"""What torchrun calls it -> how to say it here."""

_DEBUG_TOOLS = ("underflow_overflow", "collectives")

_OWN = {
    "config_file": ("FILE", "configuration file, instead of the default one"),
    "module": (None, "run a module, like python -m"),
    "no_python": (None, "run an executable, not a Python script"),
    "dry_run": (None, "print what would be started and the source of each setting, and exit"),
    "json": (None, "with --dry_run: print JSON"),
    "help": (None, "print this help; with other flags, only their groups"),
}
_SHORT = {"-m": "module", "-h": "help"}


def run(argv: Sequence[str]) -> int:
    """Read the flags, make the plan, and carry it out."""
    given = read(argv)
    if "help" in given.own:
        print(make_parser(given.named).format_help().rstrip())
        return 0
    try:
        return _carry_out(given)
    except KeyboardInterrupt:  # before there were processes that it could be passed on to
        return 130


def _carry_out(given: Given) -> int:
    from lockstep.config import env
    from lockstep.config.launch import resolve_launch
    from lockstep.launch.plan import make_plan

    environ = env.snapshot()
    from_file, file_name, refused, ignored = _read_file(given.own.get("config_file"), environ)
    options = resolve_launch(given.flags, environ, from_file, file_name)
    plan = make_plan(options, given.target(), environ, refused=[*given.problems, *refused], given=given.tokens)
    passed_over = [f"{file_name}: {key} has no effect: {why}" for key, why in ignored.items()]
    plan = replace(plan, notes=(*passed_over, *plan.notes))
    if "dry_run" in given.own:
        print(json.dumps(plan.to_dict(), indent=2) if "json" in given.own else _show(plan))
        return 0
    from lockstep.launch import job

    return job.run(plan, environ)


def _read_file(
    path: str | None, environ: Mapping[str, str]
) -> tuple[Mapping[str, Any], str, tuple[str, ...], Mapping[str, str]]:
    from lockstep.config import file

    chosen = file.default_path(environ) if path is None else path
    if path is None and not file.default_path(environ).exists():
        return {}, "", (), {}
    found = file.read(chosen)
    return found.values, str(found.path), found.refused, found.ignored


# --- reading the command line ------------------------------------------------------------------------------------


class Given:
    """What was typed: flags, the launcher's own switches, and where the script begins."""

    def __init__(self) -> None:
        self.flags: dict[str, Any] = {}
        self.own: dict[str, str] = {}
        self.rest: list[str] = []
        self.tokens: list[str] = []
        """The flags as they were typed, without those that only concern this call."""
        self.problems: list[str] = []
        self.named: list[str] = []
        """Every option that was named, for the help."""

    def target(self) -> Any:
        """What every rank runs."""
        from lockstep.launch.plan import LaunchTarget

        if "json" in self.own and "dry_run" not in self.own:
            self.problems.append("--json needs --dry_run. Add --dry_run, or leave --json out.")
        if "module" in self.own and "no_python" in self.own:
            self.problems.append("-m and --no_python contradict each other: a module is run by Python.")
        if not self.rest:
            raise ConfigError.of(
                [*self.problems, "No script was given. Usage: lockstep launch [options] script.py [its arguments]."]
            )
        kind = "module" if "module" in self.own else "program" if "no_python" in self.own else "script"
        return LaunchTarget(script=self.rest[0], args=tuple(self.rest[1:]), kind=kind)


def read(argv: Sequence[str]) -> Given:
    """Split the command line into the launcher's flags and the script's; all that is wrong is collected."""
    options = {option.name: option.metadata for option in fields(LaunchConfig)}
    short = {**_SHORT, **{meta["short"]: name for name, meta in options.items() if "short" in meta}}
    given = Given()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--":
            given.rest = words
            break
        if not word.startswith("-") or word == "-":
            given.rest = [word, *words]
            break
        flag, equals, text = word.partition("=")
        name = short.get(flag) or flag.lstrip("-").replace("-", "_")
        value = text if equals else None
        before = len(words)
        if flag not in short and not (flag.startswith("--") and flag[2:3].isalnum()):
            _refuse(given, flag, name, value, words, options)
        elif name in options:
            given.named.append(name)
            _take(given, name, options[name], value, words, short)
            given.tokens += [word, *_consumed(argv, before, len(words))]
        elif name in _OWN:
            if _OWN[name][0] is None:
                if value is None or _yes(given, name, value):
                    given.own[name] = "yes"
            elif value is None and _is_missing(words, short):
                given.problems.append(f"{flag} needs a value ({_OWN[name][0]}).")
            else:
                given.own[name] = words.pop(0) if value is None else value
                given.tokens += [word, *_consumed(argv, before, len(words))]
        else:
            _refuse(given, flag, name, value, words, options)
    return given


def _consumed(argv: Sequence[str], before: int, after: int) -> list[str]:
    return list(argv[len(argv) - before : len(argv) - after])


def _is_missing(words: Sequence[str], short: Mapping[str, str]) -> bool:
    """Whether there is no value: nothing follows, or the next flag does. A number may be negative."""
    return not words or words[0].startswith("--") or words[0] in short


def _take(
    given: Given,
    name: str,
    meta: Mapping[str, Any],
    value: str | None,
    words: list[str],
    short: Mapping[str, str],
) -> None:
    if name == "debug":
        if value is None and words and words[0] in _DEBUG_TOOLS:
            value = words.pop(0)
        given.flags[name] = "true" if value is None else value
        if value is not None and not all(part.strip() in _DEBUG_TOOLS for part in value.split(",")):
            _yes(given, name, value, f", {', '.join(_DEBUG_TOOLS)}")
    elif meta["kind"] is bool:
        given.flags[name] = True if value is None else _yes(given, name, value)
    elif value is None and _is_missing(words, short):
        given.problems.append(f"--{name} needs a value ({meta['metavar'] or ', '.join(meta['choices'])}).")
    else:
        text = words.pop(0) if value is None else value
        try:
            number = meta["kind"](text)
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(text)
            given.flags[name] = number
        except ValueError:
            kind = "a whole number" if meta["kind"] is int else "a number"
            given.problems.append(f"--{name} {text} is not {kind}.")


def _yes(given: Given, name: str, text: str, more: str = "") -> bool | None:
    from lockstep.config import env

    try:
        return env.parse_flag(text, f"--{name}")
    except ConfigError:
        given.problems.append(f"--{name}={text} is unknown. Allowed: 1, true, yes, on, 0, false, no, off{more}.")
        return None


def _refuse(
    given: Given, flag: str, name: str, value: str | None, words: list[str], options: Mapping[str, Any]
) -> None:
    """A flag that is not ours: of an engine that is not built, of torchrun, or mistyped."""
    engine = _engine(name)
    if engine is not None:
        given.named.append("paradigm")
        given.problems.append(f"{flag} asks for {engine}, which is not supported yet. Leave it out.")
        if name not in _REFUSED_SWITCHES:
            _skip_value(value, words)
        return
    if name in _TORCHRUN:
        hint = _TORCHRUN[name]
    else:
        near = difflib.get_close_matches(name, [*options, *_OWN], n=1)
        hint = f"Did you mean --{near[0]}?" if near else "`lockstep launch -h` lists the options."
    given.problems.append(
        f"{flag} is not an option of lockstep launch. {hint} Arguments of the script go after its name."
    )
    if name != "standalone":
        _skip_value(value, words)


def _skip_value(value: str | None, words: list[str]) -> None:
    """Of a flag that we do not know: what follows is most likely its value, and not the script, if more follows."""
    if value is None and len(words) > 1 and not words[0].startswith("-") and not words[0].endswith(".py"):
        words.pop(0)


def _engine(name: str) -> str | None:
    if name in _REFUSED:
        return _REFUSED[name]
    return next((engine for start, engine in _REFUSED.items() if name.startswith(f"{start}_")), None)


# --- showing -----------------------------------------------------------------------------------------------------


def make_parser(named: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The options as a parser: for help, reference pages and completion; `read` reads the command line.

    With ``named`` options only the groups that belong to them.
    """
    parser = argparse.ArgumentParser(
        prog="lockstep launch",
        usage="lockstep launch [options] script.py [arguments of the script]\n"
        "       lockstep launch [options] -m module [arguments]",
        description="Run a script on this node or on several. Flags may be spelled with - or _.",
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    by_name = {option.name: option.metadata for option in fields(LaunchConfig)}
    shown = set(GROUPS)
    if named:
        shown = set()
        for name in named:
            shown.update(RELATED.get(name, (by_name[name]["group"],) if name in by_name else (name,)))
    else:
        general = parser.add_argument_group("General")
        for name, (metavar, text) in _OWN.items():
            letters = [letter for letter, long in _SHORT.items() if long == name]
            _add(general, [*letters, f"--{name}"], text, metavar, None)
    for group, title in GROUPS.items():
        if group not in shown:
            continue
        section = parser.add_argument_group(title)
        for name, meta in by_name.items():
            if meta["group"] == group:
                letters = [meta["short"]] if "short" in meta else []
                metavar = None if meta["kind"] is bool or name == "debug" else meta["metavar"]
                _add(
                    section, [*letters, f"--{name}"], meta["help"], metavar, meta.get("offered") or meta.get("choices")
                )
        if group == "paradigm":
            for start in ("use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config", "tpu"):
                _add(section, [f"--{start}"], f"{_REFUSED[start]}: not supported yet", None, None)
    return parser


def _add(group: Any, names: list[str], text: str, metavar: str | None, choices: Sequence[str] | None) -> None:
    if metavar is None and choices is None:
        group.add_argument(*names, action="store_true", help=text)
    else:
        group.add_argument(*names, metavar=metavar or "{" + ",".join(choices or ()) + "}", help=text)


def _show(plan: Any) -> str:
    lines = [
        f"{_KINDS[plan.kind]}: {plan.processes} process{'es' if plan.processes > 1 else ''}"
        + (f" on {plan.machines} nodes, {plan.per_machine} on this one" if plan.machines > 1 else ""),
        f"  command      {shlex.join(plan.argv)}",
    ]
    if plan.kind == "agent":
        assigned = plan.machine_rank is None and plan.machines > 1
        rank = "assigned by the rendezvous" if assigned else plan.machine_rank or 0
        lines.append(f"  rendezvous   {plan.rdzv_backend}, endpoint {plan.endpoint}")
        lines.append(f"  this node    {plan.address}, node rank {rank}")
    lines += [f"  environment  {name}={value}" for name, value in plan.env.items()]
    chosen = {name: found for name, found in plan.options.items() if found.value is not None}
    width = max((len(name) for name in plan.options), default=0)
    lines.append("Options, and the source of each:")
    lines += [f"  {name:<{width}}  {found.value}  ({found.source})" for name, found in chosen.items()]
    rest = ", ".join(name for name in plan.options if name not in chosen)
    lines.append(f"  default: {rest}")
    lines += [f"Note: {note}" for note in plan.notes]
    return "\n".join(lines)


_KINDS = {
    "alone": "One process, without a process group",
    "agent": "torch.distributed elastic agent",
    "mpirun": "mpirun",
    "srun": "srun, one agent on each node",
}
