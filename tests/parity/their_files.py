"""What Accelerate makes of model files: run as a script, in a process in which no Lockstep is imported.

``python their_files.py FOLDER``: reads what is in FOLDER/ours/*, notes the values that arrive in a model, and writes
the same model to FOLDER/theirs/* in the same ways.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.utils import load_offloaded_weights
from file_model import WAYS, Model, values  # beside this script


def main(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    seen = {}
    for name, arguments in WAYS.items():
        model = Model(seed=1)
        load_checkpoint_in_model(model, folder / "ours" / name, strict=name.startswith("torch"))
        seen[name] = values(model)
        accelerator.save_model(Model(), folder / "theirs" / name, **arguments)
    model = Model(seed=1)
    index = json.loads((folder / "ours" / "offload" / "index.json").read_text())
    load_offloaded_weights(model, index, folder / "ours" / "offload")
    seen["offload"] = values(model)
    model = Model(seed=1)
    places = {"": "disk", "norm": "cpu"}  # it fails for a map of the disk alone
    load_checkpoint_in_model(model, folder / "theirs" / "safe-whole", places, folder / "theirs" / "offload")
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
