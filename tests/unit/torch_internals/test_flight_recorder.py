"""torch's Flight Recorder, as this torch keeps it."""

from __future__ import annotations

import subprocess
import sys

from lockstep.testing import run_ranks

WITHOUT_TORCH = """
import sys
from lockstep.torch_internals import flight_recorder
assert flight_recorder.dump() is None
assert not flight_recorder.can_list_stacks()
assert "torch" not in sys.modules
"""


def recorded() -> list[str]:
    import torch
    import torch.distributed as dist

    from lockstep.torch_internals import flight_recorder

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(2))
    found = flight_recorder.dump() or {}
    return [f"{entry['profiling_name']} {entry['input_sizes']}" for entry in found.get("entries", ())]


def test_a_collective_is_listed() -> None:
    (entries,) = run_ranks(recorded, 1, env={"TORCH_FR_BUFFER_SIZE": "100"})
    assert "gloo:all_reduce [[2]]" in entries


def test_asking_imports_no_torch() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, timeout=60)
