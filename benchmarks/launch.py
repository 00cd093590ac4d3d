"""Seconds from a command to the first line of the user's script: python, torchrun, lockstep launch, accelerate launch.

The script only notes the time, so this is what the launcher itself costs. All in one run, interleaved.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = "import sys, time\nopen(sys.argv[1], 'a').write(f'{time.time()}\\n')\n"


def commands(processes: int) -> dict[str, list[str]]:
    beside = Path(sys.executable).parent
    found = {"lockstep": [sys.executable, "-m", "lockstep", "launch", "--cpu", "--num_processes", str(processes)]}
    found["torchrun"] = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    if processes == 1:
        found = {"python": [sys.executable], **found}
    accelerate = shutil.which("accelerate", path=str(beside))
    if accelerate is not None:
        # Without a GPU it starts one process, whatever it is told: see docs/migration.md.
        found["accelerate"] = [accelerate, "launch", "--cpu", "--num_processes", str(processes)]
    return found


def once(command: list[str], folder: Path) -> tuple[float, float]:
    """Seconds to the first line, and to the end of the command."""
    note = folder / "note"
    note.unlink(missing_ok=True)
    environ = {**os.environ, "LOCKSTEP_RUN_DIR": str(folder / "run"), "OMP_NUM_THREADS": "1"}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # everybody is compiled, as installed packages are
    start = time.time()
    subprocess.run([*command, str(folder / "script.py"), str(note)], env=environ, check=True, capture_output=True)
    end = time.time()
    return min(float(line) for line in note.read_text().split()) - start, end - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        for processes in arguments.processes:
            kinds = commands(processes)
            times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
            for round_ in range(arguments.rounds + 1):
                for kind, command in kinds.items():
                    taken = once(command, folder)
                    if round_:  # the first warms the caches
                        times[kind].append(taken)
            base = "python" if processes == 1 else "torchrun"
            print(f"\n{processes} process{'es' if processes > 1 else ''}, {arguments.rounds} rounds, seconds")
            print(f"| | first line: best | median | over {base} (bests) | to the end: best |\n|---|---|---|---|---|")
            reference = min(first for first, _ in times[base])
            for kind, taken_all in times.items():
                firsts = [first for first, _ in taken_all]
                ends = min(end for _, end in taken_all)
                print(
                    f"| {kind} | {min(firsts):.3f} | {statistics.median(firsts):.3f} | "
                    f"{min(firsts) - reference:+.3f} | {ends:.3f} |"
                )
        helps = []
        for _ in range(arguments.rounds):
            start = time.time()
            subprocess.run([sys.executable, "-m", "lockstep", "--help"], check=True, capture_output=True)
            helps.append(time.time() - start)
        print(f"\nlockstep --help: best {min(helps):.3f} s, median {statistics.median(helps):.3f} s")


if __name__ == "__main__":
    main()
