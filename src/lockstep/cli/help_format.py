"""How the help of a command is laid out."""

from __future__ import annotations

import argparse
import copy


class HelpFormat(argparse.RawDescriptionHelpFormatter):
    """As argparse's, with each option once: ``--a-b`` is not shown beside ``--a_b``."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = {name.replace("_", "-"): name for name in reversed(action.option_strings)}
        shown = copy.copy(action)
        shown.option_strings = list(names.values())[::-1]
        return super()._format_action_invocation(shown)
