"""``lockstep env``: versions, and the place this process would take, with the reason for each choice."""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found out."""
    facts = collect()
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    return 0


def collect() -> dict[str, Any]:
    """Versions and choices, by name."""
    import torch

    from lockstep import __version__
    from lockstep.config import env, resolve
    from lockstep.topology.topology import discover, old_kernel_warning

    environ = env.snapshot()
    cpu = resolve.resolve("cpu", None, False, environ, env.parse_flag)
    fixed = resolve.resolve("device", None, None, environ, resolve.as_text)
    topology = discover(environ, cpu=cpu.value, device=fixed.value)
    precision = resolve.resolve("mixed_precision", None, "no", environ, resolve.as_text)
    return {
        "lockstep": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "kernel": old_kernel_warning() or "fine",
        "processes": topology.world_size,
        "started by": f"{topology.launcher} ({topology.reason})",
        "device": f"{topology.device} ({topology.device_reason})",
        "backend": topology.backend or "none",
        "cpu": f"{cpu.value} ({cpu.source})",
        "mixed precision": f"{precision.value} ({precision.source})",
    }
