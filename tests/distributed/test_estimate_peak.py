"""The forecast of a peak against the peak that the kernel counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.estimate.activations import MemoryEstimate
from lockstep.utils import estimate_memory
from tests.unit.memory.peaks import CASES, LARGE, Case, loss

ROOT = Path(__file__).resolve().parents[2]


def measure(*arguments: str, **environment: str) -> dict[str, int]:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the kernel's count of resident memory is read from /proc")
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.memory.peaks", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    return measure(MALLOC_MMAP_THRESHOLD_="65536")


def forecast(case: Case, device: str) -> MemoryEstimate:
    with torch.device(device):
        model = case.build(*case.full)
    return estimate_memory(model, case.batch(case.batch_size), loss=loss)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_peak_is_within_15_percent(name: str, device: str, measured: dict[str, int]) -> None:
    seen = forecast(CASES[name], device)
    print(f"{name} on {device}: {seen.peak / 2**20:.1f} MiB, measured {measured[name] / 2**20:.1f} MiB, {seen.peak_in}")
    assert abs(seen.peak / measured[name] - 1) < 0.15
    # The bar means something only where neither the weights nor the activations are all there is.
    assert seen.activations > 0.1 * seen.peak or seen.peak_in == "optimizer step"


@pytest.mark.soak
def test_with_glibcs_defaults_it_holds_where_tensors_are_large() -> None:
    for name, found in measure("large").items():
        seen = forecast(LARGE[name], "meta")
        print(f"{name}: {seen.peak / 2**20:.1f} MiB, measured {found / 2**20:.1f} MiB")
        assert abs(seen.peak / found - 1) < 0.15
