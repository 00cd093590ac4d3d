"""A real SLURM, from Debian's packages, on two machines: munged, slurmctld and two slurmd, without systemd."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clusters.machines import Machine

START_SECONDS = 30.0
DEAD = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE", "PREEMPTED")

# No accounting, no cgroups, no time lost: everything else is how SLURM comes.
_CONFIGURATION = """
ClusterName=lockstep
SlurmctldHost={controller}
SlurmctldPort=6817
SlurmdPort=6818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
NodeName={nodes} CPUs=4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=10 State=UP OverSubscribe=NO
"""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """A running cluster; its commands are run on the first machine, which is a node as well as the place to submit."""

    machines: tuple[Machine, Machine]
    folder: Path

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """What a command of SLURM needs to find this cluster, and ``extra``."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), **(extra or {})}

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command (srun, sbatch, salloc, or a script that calls them) to its end."""
        moved = argv if cwd is None else ["env", f"--chdir={cwd}", *argv]
        return self.machines[0].run(moved, env=self.environment(env), timeout=timeout)

    def wait(self, job: int, timeout: float = 60.0) -> tuple[str, int]:
        """Wait for a job's end: its state, and the exit code of its script."""
        deadline = time.monotonic() + timeout
        while True:
            shown = self.run(["scontrol", "--oneliner", "show", "job", str(job)]).stdout
            fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
            state = fields.get("JobState", "")
            if state == "COMPLETED" or state in DEAD:
                return state, int(fields["ExitCode"].split(":")[0])
            if time.monotonic() > deadline:
                self.run(["scancel", "--signal=KILL", str(job)])
                pytest.fail(f"job {job} is {state or 'unknown'} after {timeout} s: {shown}", pytrace=False)
            time.sleep(0.2)


@contextlib.contextmanager
def cluster(machines: tuple[Machine, Machine], folder: Path) -> Iterator[Slurm]:
    """Two nodes, until the block ends; skips where a part of SLURM is not installed."""
    for tool in ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol"):
        if shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin") is None:
            pytest.skip(f"{tool} is not installed (scripts/apt.sh installs it)")
    nodes = ",".join(machine.name for machine in machines)
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(controller=machines[0].name, folder=folder, nodes=nodes))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    slurm = Slurm(machines=machines, folder=folder)
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munged += [
        f"--pid-file={folder}/munged.pid",
        f"--seed-file={folder}/munged.seed",
        f"--log-file={folder}/munged.log",
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_daemon(slurm, machines[0], munged))
        _wait_for(slurm, lambda: (folder / "munge.socket").exists(), "munged makes its socket")
        stack.enter_context(_daemon(slurm, machines[0], ["slurmctld", "-D", "-i"]))
        for machine in machines:
            stack.enter_context(_daemon(slurm, machine, ["slurmd", "-D", "-N", machine.name]))
        _wait_for(slurm, lambda: _idle(slurm) == len(machines), "both nodes are idle")
        yield slurm


@contextlib.contextmanager
def _daemon(slurm: Slurm, machine: Machine, argv: Sequence[str]) -> Iterator[None]:
    """A daemon in the foreground, on a machine; it dies with the test run at the latest."""
    path = {"PATH": os.environ["PATH"] + ":/usr/sbin"}
    with (slurm.folder / f"{argv[0]}.{machine.name}.out").open("w") as log:
        process = machine.popen(
            ["setpriv", "--pdeathsig", "KILL", *argv],
            env=slurm.environment(path),
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=slurm.folder,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _idle(slurm: Slurm) -> int:
    return slurm.run(["sinfo", "--noheader", "--Node", "--format=%t"]).stdout.split().count("idle")


def _wait_for(slurm: Slurm, condition, what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in slurm.folder.glob("*.out"))
            print(logs, file=sys.stderr)
            pytest.fail(f"SLURM did not start: after {START_SECONDS} s it is not so that {what}", pytrace=False)
        time.sleep(0.1)
