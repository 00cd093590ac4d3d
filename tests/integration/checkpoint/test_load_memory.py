"""How much memory loading a model takes, by what the kernel has counted in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import torch

from lockstep.model_files.weights import write_weights
from tests.ranks import OLD_TORCH

MEMORY = """
    import os
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    from lockstep.model_files.load import load_checkpoint_in_model

    def peak():
        text = Path("/proc/self/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) / 1024

    def layers():
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))

    def measure(folder, dtype, place):
        model = layers().to("meta") if place == "meta" else layers()
        before = peak()
        load_checkpoint_in_model(model, folder, dtype=dtype, strict=True)
        print(peak() - before, model[23].weight.flatten()[0].item(), flush=True)

    torch.set_num_threads(1)
    small = nn.Linear(2, 2)
    torch.save(small.state_dict(), sys.argv[1] + "/warm.bin")
    load_checkpoint_in_model(small, sys.argv[1] + "/warm.bin", dtype="float32")  # what is imported on first use
    for case in sys.argv[2:]:  # each in a process of its own, whose count begins anew
        if not (child := os.fork()):
            measure(*case.split(","))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
"""


def test_the_peak_of_memory_is_the_model_and_one_shard(tmp_path: Path) -> None:
    """96 MiB in six shards of 16, each tensor 4, by what the kernel has counted."""
    state = {f"{layer}.weight": torch.full((1024, 1024), float(layer)) for layer in range(24)}
    for kind in ("safe", "torch"):
        (tmp_path / kind).mkdir()
        assert len(write_weights(state, tmp_path / kind, max_shard_size="16MiB", safe=kind == "safe")) == 7
    cases = {
        "safe,float32,host": 8,
        "safe,float32,meta": 96 + 8,
        "safe,bfloat16,meta": 48 + 4 + 8,
        "torch,float32,meta": 96 + 16 + 8,
        # An older torch does not say where a tensor's bytes are: all shards are read before one is assigned.
        "torch,float32,host": (96 if OLD_TORCH else 0) + 16 + 8,
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path), *(f"{tmp_path}/{case}" for case in cases)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    seen = [[float(number) for number in line.split()] for line in done.stdout.splitlines()]
    assert [value for _, value in seen] == [23.0] * len(cases)
    assert {case: extra for case, (extra, _) in zip(cases, seen, strict=True) if extra > cases[case]} == {}
