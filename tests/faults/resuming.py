"""A training script that saves every few batches, dies where it is told to, and goes on when it is started again."""

from __future__ import annotations

TRAIN = """
import json, os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lockstep import Accelerator
from lockstep.utils import ProjectConfiguration

# argv: a folder; then who dies after which batch of the whole training, one word for each attempt ("1:5"), or
# "slow" for batches that take their time.
folder, fates = sys.argv[1], sys.argv[2:]
project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
options = {"gradient_accumulation_steps": 3, "save_on_signal": True}
accelerator = Accelerator(cpu=True, project_config=project, **options)
marks = os.path.join(folder, "deaths")
deaths = len(open(marks).read()) if os.path.exists(marks) else 0
torch.manual_seed(7 + accelerator.process_index)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
data = torch.randn(44, 4, generator=torch.Generator().manual_seed(1))
loader = DataLoader(TensorDataset(data), batch_size=2, shuffle=True)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)


class Count:
    def __init__(self): self.batches = 0
    def state_dict(self): return {"batches": self.batches}
    def load_state_dict(self, state): self.batches = state["batches"]


count = Count()
accelerator.register_for_checkpointing(count)
resumed = accelerator.load_state()
if accelerator.is_main_process:
    print("began", count.batches, flush=True)
for epoch in range(loader.iteration, 2):
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).pow(2).mean())
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
        count.batches += 1
        if "slow" in fates:
            time.sleep(0.25)
        if count.batches % 4 == 0:
            accelerator.save_state(blocking=count.batches % 8 == 0)
        if deaths < len(fates) and fates[deaths] == f"{accelerator.process_index}:{count.batches}":
            with open(marks, "a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
accelerator.wait_for_checkpoint()
weights = torch.cat([p.detach().double().flatten() for p in accelerator.unwrap_model(model).parameters()])
moments = torch.cat([s["exp_avg"].double().flatten() for s in optimizer.state.values()])
if accelerator.is_main_process:
    with open(os.path.join(folder, "result.json"), "w") as file:
        json.dump({"weights": weights.tolist(), "moments": moments.tolist(), "batches": count.batches}, file)
"""
