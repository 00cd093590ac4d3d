"""``lockstep completion bash|zsh|fish``: a script for the shell, made from the parsers of all commands."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from lockstep.cli import COMMANDS

SHELLS = {
    "bash": 'eval "$(lockstep completion bash)"',
    "zsh": 'eval "$(lockstep completion zsh)"',
    "fish": "lockstep completion fish | source",
}
"""Shell -> the line for its startup file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("shell", choices=list(SHELLS), help="the shell to print the script for")
    lines = "\n".join(f"  {shell}: {line}" for shell, line in SHELLS.items())
    parser.epilog = f"Add one line to your shell's startup file:\n{lines}"


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    print(_fish() if arguments.shell == "fish" else _bash(zsh=arguments.shell == "zsh"))
    return 0


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            yield action


def _names(action: argparse.Action) -> list[str]:
    """As the help spells them: not ``--a-b`` beside ``--a_b``."""
    return list({name.replace("_", "-"): name for name in reversed(action.option_strings)}.values())[::-1]


def _choices(action: argparse.Action) -> list[str]:
    """The values of an option, also where only its metavar lists them."""
    if action.choices is not None and not isinstance(action, argparse._SubParsersAction):
        return [str(choice) for choice in action.choices]
    shown = action.metavar if isinstance(action.metavar, str) else ""
    return shown[1:-1].split(",") if shown.startswith("{") else []


def _words(name: str, parser: argparse.ArgumentParser, all_names: list[str]) -> list[str]:
    """What may follow a command: parts of it, values of its first argument, its options."""
    parts = [other.removeprefix(f"{name} ") for other in all_names if other.startswith(f"{name} ")]
    values = [value for action in parser._actions if not action.option_strings for value in _choices(action)]
    return [*parts, *values, *(text for action in _options(parser) for text in _names(action))]


# ---------------------------------------------------------------- bash, and zsh by its emulation

_BASH = """\
_lockstep() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words="" values=""
  local first="" second=""
  (( COMP_CWORD > 1 )) && first="${{COMP_WORDS[1]}}"
  (( COMP_CWORD > 2 )) && second="${{COMP_WORDS[2]}}"
  COMPREPLY=()
  case "$first" in
    "") words="{commands}" ;;
{cases}
  esac
  case "$first $second" in
{parts}
  esac
  case "$first $previous" in
{values}
  esac
  [ -n "$values" ] && words="$values"
  [ -z "$current" ] && [ -z "$values" ] && words="${{words%%-*}}"
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _lockstep lockstep"""


def _bash(*, zsh: bool) -> str:
    from lockstep.cli.parsers import every_parser

    parsers = every_parser()
    names = list(parsers)
    cases: list[str] = []
    parts: list[str] = []
    values: dict[str, str] = {}
    for name, parser in parsers.items():
        words = " ".join(_words(name, parser, names))
        (parts if " " in name else cases).append(f'    "{name}") words="{words}" ;;')
        for action in _options(parser):
            for text in action.option_strings if _choices(action) else ():
                values[f"{name.partition(' ')[0]} {text}"] = " ".join(_choices(action))
    script = _BASH.format(
        commands=" ".join([*COMMANDS, "--help", "--version"]),
        cases="\n".join(cases),
        parts="\n".join(parts),
        values="\n".join(f'    "{key}") values="{text}" ;;' for key, text in values.items()),
    )
    before = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    return before + script


# ---------------------------------------------------------------- fish


def _fish() -> str:
    from lockstep.cli.parsers import every_parser

    lines = [
        f"complete -c lockstep -n __fish_use_subcommand -f -a {name} -d {_quoted(what)}"
        for name, what in COMMANDS.items()
    ]
    parsers = every_parser()
    for name, parser in parsers.items():
        first, _, part = name.partition(" ")
        seen = f"__fish_seen_subcommand_from {first}"
        condition = f"{seen}; and __fish_seen_subcommand_from {part}" if part else seen
        if part:
            lines.append(f"complete -c lockstep -n {_quoted(seen)} -f -a {part}")
        for action in _options(parser):
            flags = " ".join(_fish_flag(text) for text in _names(action))
            takes = "" if action.nargs == 0 else " -r"
            choices = f" -f -a {_quoted(' '.join(_choices(action)))}" if _choices(action) else ""
            text = (action.help or "").replace("%%", "%").partition("%(")[0]
            lines.append(f"complete -c lockstep -n {_quoted(condition)} {flags}{takes}{choices} -d {_quoted(text)}")
    return "\n".join(lines)


def _fish_flag(text: str) -> str:
    return f"-l {text[2:]}" if text.startswith("--") else f"-s {text[1:]}"


def _quoted(text: str) -> str:
    escaped = " ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
