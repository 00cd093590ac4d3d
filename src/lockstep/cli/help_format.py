"""How the help of a command is laid out."""

from __future__ import annotations

import argparse


class HelpFormat(argparse.RawDescriptionHelpFormatter):
    """As argparse's, with each option once: ``--a-b`` is not shown beside ``--a_b``."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = {name.replace("_", "-"): name for name in reversed(action.option_strings)}
        if len(names) == len(action.option_strings):
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper())}"
        return ", ".join(f"{name}{value}" for name in reversed(names.values()))
