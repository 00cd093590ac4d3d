"""An Accelerate script: runs every scenario once and writes what it saw, one file per rank.

`python main.py FOLDER [option=value ...]`: the options go to GradientAccumulationPlugin where a scenario asks for
Accelerate's arithmetic. The lines `from accelerate…` are the only ones that change for the other library.
"""

import json
import sys
import warnings
from pathlib import Path

import collectives
import data
import facts
import local_sgd
import models
import notes
import trackers
import training
from accelerate import Accelerator


def main() -> None:
    warnings.simplefilter("ignore")
    accelerator = Accelerator()
    rank = accelerator.process_index
    options = dict(argument.split("=") for argument in sys.argv[2:])
    seen = {}
    for name, scenario in {
        **facts.scenarios(),
        **collectives.scenarios(),
        **data.scenarios(),
        **training.scenarios(options),
        **models.scenarios(),
        **local_sgd.scenarios(),
        **trackers.scenarios(),
    }.items():
        seen[name] = notes.attempt(scenario)
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(seen))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
