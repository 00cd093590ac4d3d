"""Jobs on two machines between which ports are closed: a training says so itself, long before torch gives up."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.clusters.machines import Machine

Machines = tuple[Machine, Machine]
LIMIT = 60.0
PORT = 29751
SCRIPT = """
import torch
from lockstep import Accelerator

accelerator = Accelerator(cpu=True)
print("gathered", accelerator.gather(torch.ones(1)).tolist())
"""
CHAIN = "nft add table ip arrival && nft 'add chain ip arrival input { type filter hook input priority 0; }'"


@pytest.mark.parametrize(
    ("closed", "said"),
    [
        (
            f"tcp dport != {PORT}",
            "rank 1 on node1 (eth0 10.211.0.2) cannot connect to rank 0 on node0 (eth0 10.211.0.1): no answer within",
        ),
        pytest.param(
            f"tcp dport {PORT}",
            f"rank 1 on node1 cannot reach the store at 10.211.0.1 port {PORT}: no answer within 3 s",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_closed_ports_are_told_and_the_job_goes_on_when_they_open(
    closed: str, said: str, two_machines: Machines, tmp_path: Path
) -> None:
    if shutil.which("nft", path="/usr/sbin:/usr/bin:/sbin:/bin") is None:
        pytest.skip("nft is not installed (scripts/apt.sh installs it)")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    node0, node1 = two_machines
    rule = f"nft add rule ip arrival input ip saddr {node1.address} {closed} tcp flags '& (syn | ack)' == syn drop"
    made = node0.run(["sh", "-c", f"{CHAIN} && {rule}"])
    if made.returncode != 0:
        pytest.skip(f"a firewall cannot be made here: {made.stderr.strip()}")
    ranks = []
    try:
        for number, machine in enumerate(two_machines):
            env = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            env |= {"GROUP_RANK": str(number), "MASTER_ADDR": node0.address, "MASTER_PORT": str(PORT)}
            ranks.append(machine.popen([sys.executable, str(script)], env=env, cwd=tmp_path))
        heard = _first_word(ranks[1])
    finally:
        node0.run(["nft", "delete", "table", "ip", "arrival"])
    outs = _ends(ranks)
    assert said in heard
    assert "`lockstep doctor net` tries every pair" in heard
    assert [out for out, _ in outs] == ["gathered [1.0, 1.0]\n"] * 2, outs


def _first_word(rank: subprocess.Popen[str]) -> str:
    """The first line that the rank says of itself; empty when there is none in time."""
    timer = threading.Timer(LIMIT, rank.kill)
    timer.start()
    assert rank.stderr is not None
    try:
        return next((line for line in rank.stderr if line.startswith("lockstep: ")), "")
    finally:
        timer.cancel()
        timer.join()


def _ends(ranks: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    try:
        return [rank.communicate(timeout=LIMIT) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
