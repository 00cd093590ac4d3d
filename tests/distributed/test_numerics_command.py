"""`lockstep numerics` on real jobs: recorded, compared across world sizes, shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.test_numerics import numerics

SCRIPT = """
import sys, torch
from lockstep import Accelerator
from lockstep.utils import DataLoaderConfiguration
accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.arange(64.0).reshape(16, 4) / 64
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
for number, batch in enumerate(loader):
    if number == 2 and len(sys.argv) > 1:
        with torch.no_grad():
            accelerator.unwrap_model(model)[2].weight[0, 0] += float(sys.argv[1])
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_jobs_are_recorded_compared_across_world_sizes_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    started = []
    for name, processes, arguments in (("two", "2", ()), ("one", "1", ("2.5",))):
        words = ["record", name, "--every", "2", "--", "--cpu", "--num_processes", processes, "train.py", *arguments]
        with open(tmp_path / f"{name}.log", "wb") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "lockstep", "numerics", *words],
                    env=environ,
                    cwd=tmp_path,
                    stdout=log,
                    stderr=log,
                )
            )
    try:
        codes = [job.wait(120) for job in started]
    finally:
        for job in started:
            job.terminate()
            job.wait()
    assert codes == [0, 0], "".join((tmp_path / f"{name}.log").read_text() for name in ("two", "one"))
    assert sorted(os.listdir(tmp_path / "two")) == ["rank_0.jsonl", "rank_1.jsonl"]
    assert numerics("diff", tmp_path / "two", "--ranks", 0, 1) == 0
    assert numerics("diff", tmp_path / "two", "--ranks", 0, 1, "--all-tensors") == 1  # they have other samples
    capsys.readouterr()
    assert numerics("diff", tmp_path / "two", tmp_path / "one", "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["batches"] == [0, 2]  # the same in batch 0, and up to what was changed in batch 2
    assert (told["first"]["batch"], told["first"]["module"], told["first"]["tensor"]) == (2, "2", "weight")
    assert (told["missing"], told["extra"]) == ({}, {})
    assert [note[:18] for note in told["notes"]] == ["2 against 1 ranks:"]
    assert numerics("html", tmp_path / "two") == 0
    assert "2 batches" in capsys.readouterr().out
