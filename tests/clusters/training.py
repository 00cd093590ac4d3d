"""A script that trains a little on every rank and writes down where it ran; what the tests of this folder start."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

SCRIPT = """
import json, os, socket, sys
from pathlib import Path

import torch
from lockstep import Accelerator
from lockstep import current

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    accelerator.backward(model(torch.ones(2, 3) * (accelerator.process_index + 1)).mean())
    optimizer.step()
    optimizer.zero_grad()
weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
topology = current.require().topology
said = {
    "rank": accelerator.process_index,
    "world": accelerator.num_processes,
    "local_rank": accelerator.local_process_index,
    "node": topology.node_rank,
    "host": socket.gethostname(),
    "launcher": topology.launcher,
    "ranks": accelerator.gather(torch.tensor([accelerator.process_index])).tolist(),
    "equal": all(torch.equal(row, weights[0]) for row in weights),
    "setting": os.environ.get("LOCKSTEP_NOTED", ""),
}
Path(sys.argv[1], f"rank{accelerator.process_index}.json").write_text(json.dumps(said))
if sys.argv[2:3] == ["fail"]:
    accelerator.wait_for_everyone()
    sys.exit(5 if accelerator.process_index == accelerator.num_processes - 1 else 0)
"""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The script in a folder, and what its ranks said there."""

    script: Path
    folder: Path

    def said(self) -> list[dict[str, object]]:
        """What each rank wrote, by rank."""
        return sorted(
            (json.loads(path.read_text()) for path in self.folder.glob("rank*.json")), key=lambda one: one["rank"]
        )

    def check(self, *hosts: str, launcher: str | None = None) -> list[dict[str, object]]:
        """One rank ran on each of these hosts, in this order, and they trained together."""
        said = self.said()
        world = len(hosts)
        assert [one["host"] for one in said] == list(hosts)
        assert [one["rank"] for one in said] == list(range(world))
        assert {one["world"] for one in said} == {world}
        assert all(one["ranks"] == list(range(world)) for one in said)
        assert all(one["equal"] for one in said)
        if launcher is not None:
            assert {one["launcher"] for one in said} == {launcher}
        return said


def in_folder(folder: Path) -> Training:
    """The script, written into a folder whose output goes beside it."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    results = folder / "results"
    results.mkdir()
    return Training(script=script, folder=results)
