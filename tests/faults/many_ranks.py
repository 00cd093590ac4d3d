"""A training on more ranks than the machine has cores: slow, and in order. Each rank prints what memory it has."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator
from lockstep.config.handlers import ProjectConfiguration

STEPS = 300


def memory() -> dict[str, int]:
    """Kilobytes by name: Pss counts what n processes share as an nth, Private is this process's own."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    fields = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return {**fields, "Private": fields["Private_Clean"] + fields["Private_Dirty"]}


def main(folder: str) -> None:
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    ranks = accelerator.num_processes
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(50 * 8 * ranks, 64), torch.randint(0, 10, (50 * 8 * ranks,)))
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, batch_size=8, shuffle=True))
    held_out = accelerator.prepare(DataLoader(data, batch_size=32, num_workers=1))
    step = 0
    while step < STEPS:
        for inputs, labels in loader:
            step += 1
            outputs = model(inputs)
            accelerator.backward(nn.functional.cross_entropy(outputs, labels))
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                assert len(accelerator.gather(outputs.detach())) == 8 * ranks
            if step % 50 == 0:
                accelerator.wait_for_everyone()
                if accelerator.process_index == step // 50 % ranks:
                    accelerator.set_trigger()
                assert accelerator.check_trigger()
            if step % 100 == 0:
                accelerator.save_state()
                accelerator.print(f"step {step}")
    seen = sum(len(accelerator.gather_for_metrics(labels)) for _, labels in held_out)
    assert seen == len(data), seen
    used = memory()
    sys.stdout.write(f"memory: {used['Pss']} {used['Private']} {used['Rss']}\n")
    accelerator.wait_for_everyone()
    accelerator.print("all done")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        main(sys.argv[1] if len(sys.argv) > 1 else own)
