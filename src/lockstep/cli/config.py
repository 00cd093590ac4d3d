"""``lockstep config``: write the file that ``lockstep launch`` reads, by a few questions or by none."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.help_format import HelpFormat
from lockstep.errors import ConfigError

if TYPE_CHECKING:
    from lockstep.config.file import ConfigFile
    from lockstep.launch.basic_config import Detected

INTERRUPTED = 130
"""The exit code of a command that was ended by Ctrl-C (or Ctrl-D)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    _add_file(parser, default=None)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    default = actions.add_parser(
        "default",
        formatter_class=HelpFormat,
        help="write a file for all accelerators of this node, without questions",
        description="Write the file without a question: a process per accelerator, else one on the CPU. A file that "
        "exists is not changed.",
    )
    # Suppressed: the default of the inner parser would hide a value that was given before the action's name.
    _add_file(default, default=argparse.SUPPRESS)
    default.add_argument(
        "--mixed_precision",
        "--mixed-precision",
        type=str.lower,
        choices=("no", "fp16", "bf16"),
        help="mixed precision mode (default: no)",
    )
    update = actions.add_parser(
        "update",
        formatter_class=HelpFormat,
        help="convert an older file to the current keys",
        description="Convert a file of an older version to the current keys, and list the changes. Comments are lost.",
    )
    _add_file(update, default=argparse.SUPPRESS)


def _add_file(parser: argparse.ArgumentParser, default: Any) -> None:
    parser.add_argument(
        "--config_file",
        "--config-file",
        metavar="FILE",
        default=default,
        help="the file (default: the one that `lockstep launch` reads)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the file; the exit code."""
    if arguments.action == "default":
        return _default(_place(arguments), arguments.mixed_precision)
    if arguments.action == "update":
        return _update(_place(arguments, existing=True))
    path = _place(arguments)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("No terminal for questions: the defaults are used, unless there is a file.")
        return _default(path, None)
    try:
        return _ask(path)
    except (KeyboardInterrupt, EOFError):
        print("\nNothing was written.", file=sys.stderr)
        return INTERRUPTED


def _place(arguments: argparse.Namespace, *, existing: bool = False) -> Path:
    from lockstep.config import env, file

    if arguments.config_file is not None:
        return Path(arguments.config_file).expanduser()
    path = file.default_path(env.snapshot())
    # What is written newly is YAML, also where an old JSON file was read until now.
    return path if existing else path.with_suffix(".yaml")


def _finish(path: Path) -> int:
    from lockstep.config import env, file

    named = "" if path == file.default_path(env.snapshot()) else f"--config_file {path} "
    print(f"Written: {path}")
    print("\n".join(f"  {line}" for line in path.read_text(encoding="utf-8").splitlines()))
    print(f"  lockstep test {named}".rstrip().ljust(34) + "  checks the setup")
    print(f"  lockstep launch {named}train.py".ljust(34) + "  starts your script")
    return 0


# ---------------------------------------------------------------- without questions


def _default(path: Path, precision: str | None) -> int:
    from lockstep.config import file
    from lockstep.launch.basic_config import detect, write_basic

    if path.exists():
        if precision is not None and (there := file.read(path).values.get("mixed_precision", "no")) != precision:
            raise ConfigError(
                f"--mixed_precision {precision} was not written: {path} exists, and has "
                f"mixed_precision: {there}. Change it with `lockstep config`, or remove it first."
            )
        print(f"The configuration file {path} exists and was not changed. `lockstep config` changes it.")
        return 0
    found = detect()
    write_basic(path, found, precision or "no")
    print(f"Found on this machine: {found}.")
    return _finish(path)


def _update(path: Path) -> int:
    from lockstep.config import file

    old = file.read(path)
    keys, changes = file.today(old)
    if not changes:
        print(f"{path} is up to date; nothing was changed.")
        return 0
    file.dump(path, keys)
    print(f"Rewritten: {path}")
    for change in changes:
        print(f"  {change}")
    _notes(old)
    return 0


def _notes(old: ConfigFile) -> None:
    for key, why in old.ignored.items():
        print(f"  {key} has no effect: {why}")
    for sentence in old.refused:
        print(f"  {sentence}")


# ---------------------------------------------------------------- with questions


class Wizard:
    """Asks on the terminal: menus by arrow keys, and lines of text. Ctrl-C raises KeyboardInterrupt."""

    def menu(self, question: str, choices: Mapping[Any, str], default: Any) -> Any:
        """One of several, moved to by the arrow keys."""
        import questionary

        options = [questionary.Choice(title, value=value) for value, title in choices.items()]
        default = default if default in choices else next(iter(choices))
        return questionary.select(question, options, default=default).unsafe_ask()

    def yes(self, question: str, default: bool) -> bool:
        """Yes or no."""
        import questionary

        return bool(questionary.confirm(question, default=default).unsafe_ask())

    def text(self, question: str, default: str, check: Callable[[str], str | None]) -> str:
        """A line; ``check`` says what is wrong with one."""
        import questionary

        def valid(line: str) -> bool | str:
            return check(line.strip()) or True

        return str(questionary.text(question, default=default, validate=valid).unsafe_ask()).strip()

    def number(self, question: str, default: int, lowest: int, highest: int | None = None) -> int:
        """A whole number between two others."""

        def check(line: str) -> str | None:
            fine = line.isdecimal() and lowest <= int(line) and (highest is None or int(line) <= highest)
            upper = "" if highest is None else f" to {highest}"
            return None if fine else f"A whole number{f' from {lowest}{upper}' if upper else f' of {lowest} or more'}"

        return int(self.text(question, str(default), check))


def _ask(path: Path) -> int:
    from lockstep.config import file
    from lockstep.launch.basic_config import detect

    questions = Wizard()
    old = _existing(path, questions)
    if old is None:
        print(f"{path} was not changed.")
        return 1
    values, kind = answers(questions, old, detect())
    file.write(path, values, distributed_type=kind)
    return _finish(path)


def _existing(path: Path, questions: Wizard) -> dict[str, Any] | None:
    """The options of the file that is there, as defaults of the questions; None when it is to be left alone."""
    from lockstep.config import env, file

    before = path
    if not path.exists():
        before = file.default_path(env.snapshot())
        if before.with_suffix(".yaml") != path or not before.exists():
            return {}
    try:
        old = file.read(before)
    except ConfigError as error:
        print(error)
        return {} if questions.yes("Replace this file?", default=False) else None
    if old.refused or old.ignored:
        _notes(old)
        # Sections of engines that are not built would be lost.
        if not questions.yes("Replace this file, and drop the settings listed above?", default=False):
            return None
    return dict(old.values)


def answers(questions: Wizard, old: Mapping[str, Any], found: Detected) -> tuple[dict[str, Any], str | None]:
    """The options that were chosen, and the type of job where the devices decide it."""
    values = dict(old)
    machines = _machines(questions, values)
    on_cpu = _device(questions, values, found)
    values["cpu"] = on_cpu
    usual = machines * (1 if on_cpu else max(found.count, 1))
    # What the old file says about processes is about the device that it says.
    before = values.get("num_processes") if old.get("cpu", on_cpu) == on_cpu else None
    together = " (total of all nodes)" if machines > 1 else ""
    values["num_processes"] = questions.number(f"How many processes?{together}", before or usual, machines)
    values["multi_gpu"] = not on_cpu and values["num_processes"] > 1
    values["mixed_precision"] = questions.menu(
        "Mixed precision?",
        {"no": "no", "fp16": "fp16", "bf16": "bf16"},
        values.get("mixed_precision", "no"),
    )
    debug = questions.yes(
        "Debug mode (checks every collective across ranks; recommended while developing)?",
        default=bool(values.get("debug")),
    )
    values["debug"] = (values.get("debug") or True) if debug else False
    if questions.yes("Set more options (torch.compile, gradient accumulation, mpirun, CPU affinity)?", default=False):
        _more(questions, values)
    values.pop("gpu_ids" if on_cpu else "mpirun_hostfile", None)
    return values, found.distributed_type if found.count and values["multi_gpu"] else None


def _machines(questions: Wizard, values: dict[str, Any]) -> int:
    before = values.get("num_machines", 1)
    several = questions.menu(
        "Where will training run?", {False: "on one node", True: "on several nodes"}, default=before > 1
    )
    if not several:
        for name in ("num_machines", "machine_rank", "main_process_ip", "main_process_port"):
            values.pop(name, None)
        return 1
    machines = questions.number("How many nodes?", max(before, 2), 2)
    values["num_machines"] = machines
    rank = min(values.get("machine_rank", 0), machines - 1)
    values["machine_rank"] = questions.number(
        f"Rank of this node (0 is the main node; up to {machines - 1})?", rank, 0, machines - 1
    )
    values["main_process_ip"] = questions.text(
        "IP address or host name of node 0, as the other nodes reach it?",
        values.get("main_process_ip", ""),
        lambda line: None if line and not line.split()[1:] else "A name or an address, such as 10.0.0.1",
    )
    values["main_process_port"] = questions.number(
        "Free port on node 0?", values.get("main_process_port") or 29500, 1, 65535
    )
    return machines


def _device(questions: Wizard, values: Mapping[str, Any], found: Detected) -> bool:
    accelerators = str(found) if found.count else "GPU (none found on this node)"
    choices = {False: accelerators, True: "CPU only"}
    if not found.count:
        choices = dict(reversed(choices.items()))
    return bool(questions.menu("Which hardware?", choices, default=values.get("cpu", not found.count)))


def _more(questions: Wizard, values: dict[str, Any]) -> None:
    from lockstep.config.choices import DynamoBackend

    backends = ("NO", "INDUCTOR", *(name for name in DynamoBackend.list() if name not in ("NO", "INDUCTOR")))
    backend = questions.menu(
        "torch.compile backend?",
        {name: "no" if name == "NO" else name.lower() for name in backends},
        values.get("dynamo_backend", "NO"),
    )
    values["dynamo_backend"] = None if backend == "NO" else backend
    steps = questions.number("Gradient accumulation steps?", values.get("gradient_accumulation_steps", 1), 1)
    values["gradient_accumulation_steps"] = steps if steps > 1 else None
    if values["cpu"]:
        hosts = questions.text(
            "Hostfile for mpirun (empty: do not use mpirun)?",
            values.get("mpirun_hostfile", ""),
            lambda line: None if not line or Path(line).expanduser().is_file() else "No such file",
        )
        values["mpirun_hostfile"] = hosts or None
    values["enable_cpu_affinity"] = questions.yes(
        "Bind each process to the CPU cores near its device?", default=bool(values.get("enable_cpu_affinity"))
    )
