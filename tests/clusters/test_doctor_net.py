"""``lockstep doctor net`` on three machines whose cables are long, thin, cut or blocked: who is named, and the rest."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.machines import Machine
from tests.clusters.slurm_cluster import Slurm

LIMIT = 90.0
Three = tuple[Machine, Machine, Machine]


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a run of the doctor said."""

    report: dict[str, Any]
    errors: str
    codes: list[int]
    alarm: float | None
    """Seconds from the first connection to the first error on the screen."""

    def findings(self, check: str) -> list[dict[str, Any]]:
        return [finding for finding in self.report["findings"] if finding["check"] == check]

    def one(self, check: str) -> dict[str, Any]:
        (finding,) = self.findings(check)
        return finding

    def link(self, a: int, b: int) -> dict[str, Any]:
        (link,) = [link for link in self.report["links"] if (link["a"], link["b"]) == (a, b)]
        return link


def doctor(
    three: Sequence[Machine],
    port: int,
    *options: str,
    extra: Mapping[int, Mapping[str, str]] | None = None,
    scripts: Mapping[int, Path] | None = None,
) -> Told:
    """One rank on each machine, started by hand as torchrun would have."""
    ranks = []
    for number, machine in enumerate(three):
        env = {"RANK": str(number), "WORLD_SIZE": str(len(three)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env |= {"GROUP_RANK": str(number), "MASTER_ADDR": three[0].address, "MASTER_PORT": str(port)}
        env |= (extra or {}).get(number, {})
        argv = [sys.executable, "-m", "lockstep", "doctor", "net", "--cpu", "--json", *options]
        argv += ["--script", str(scripts[number])] if scripts is not None else []
        ranks.append(machine.popen(argv, env=env))
    watch = _Watch(ranks[0])
    deadline = time.monotonic() + LIMIT
    try:
        outs = [rank.communicate(timeout=max(1.0, deadline - time.monotonic())) for rank in ranks[1:]]
        watch.thread.join(max(1.0, deadline - time.monotonic()))
        ranks[0].wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        pytest.fail(f"took more than {LIMIT} s\n{''.join(watch.errors)}", pytrace=False)
    with ranks[0] as first:  # closes its pipes
        out = first.stdout.read() if first.stdout is not None else ""
    errors = "".join(watch.errors) + "".join(err for _, err in outs)
    assert out, errors
    return Told(report=json.loads(out), errors=errors, codes=[rank.wait() for rank in ranks], alarm=watch.alarm)


class _Watch:
    """Reads what rank 0 says while it says it."""

    def __init__(self, rank: subprocess.Popen[str]) -> None:
        self.errors: list[str] = []
        self.alarm: float | None = None
        self._rank = rank
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        began = time.monotonic()
        assert self._rank.stderr is not None
        for line in self._rank.stderr:
            self.errors.append(line)
            if "connecting every rank" in line:
                began = time.monotonic()
            if line.startswith("ERROR") and self.alarm is None:
                self.alarm = time.monotonic() - began


@contextlib.contextmanager
def on(machine: Machine, do: str, undo: str) -> Iterator[None]:
    """A command on a machine, and another that takes it back."""
    done = machine.run(["sh", "-c", do])
    if done.returncode != 0:
        pytest.skip(f"{do} is not possible here: {done.stderr.strip()}")
    try:
        yield
    finally:
        machine.run(["sh", "-c", undo])


def firewall(machine: Machine, rule: str) -> AbstractContextManager[None]:
    """A rule for what comes in."""
    if shutil.which("nft", path=os.environ["PATH"] + ":/usr/sbin") is None:
        pytest.skip("nft is not installed (scripts/apt.sh installs it)")
    chain = "nft add table ip doctor && nft 'add chain ip doctor input { type filter hook input priority 0; }'"
    return on(machine, f"{chain} && nft add rule ip doctor input {rule}", "nft delete table ip doctor")


def test_a_long_and_a_thin_cable_are_marked_and_the_third_is_not(three_machines: Three, tmp_path: Path) -> None:
    page = tmp_path / "net.html"
    thin = "tc qdisc add dev eth2 root tbf rate 40mbit burst 64kb latency 200ms"
    with on(three_machines[1], thin, "tc qdisc delete dev eth2 root"):
        told = doctor(three_machines, 29701, "--quick", "--html", str(page))
    assert told.codes == [0, 0, 0]
    assert told.report["ok"]
    # 5 ms one way are in the cable; what a loaded machine adds is no less a delay.
    assert told.link(0, 1)["latency"] >= 0.005
    assert told.link(0, 2)["latency"] < 0.005
    assert told.link(1, 2)["forth"] < 40e6 / 8 * 1.5 < told.link(0, 2)["forth"]
    slow = {tuple(finding["data"]["hosts"]): finding for finding in told.findings("slow line")}
    assert ("node0", "node1") in slow
    assert ("node1", "node2") in slow
    assert "times the median" in slow["node0", "node1"]["what"]
    assert "of the nominal" in slow["node1", "node2"]["what"] or "of the median" in slow["node1", "node2"]["what"]
    assert "10.212.0.2" in slow["node1", "node2"]["what"]
    assert told.one("clocks")["status"] == "ok"
    assert told.one("versions")["status"] == "ok"
    assert told.one("collectives")["status"] == "ok"
    assert [point["size"] for point in told.report["all_reduce"]["points"]][:2] == [1024, 4096]
    assert [rank["ok"] for rank in told.report["ranks"]] == [True, True, True]
    assert page.read_text().count("<rect ") == 12  # six ordered pairs, latency and rate


def test_blocked_and_unreachable_pairs_are_named_and_the_rest_is_measured(three_machines: Three) -> None:
    node0, node1, node2 = three_machines
    # As firewalls are set up: what people know of is open, and what the system picks is not.
    rule = f"ip saddr {node1.address} tcp dport != 29702 tcp flags '& (syn | ack)' == syn drop"
    with (
        firewall(node2, rule),
        on(
            node1,
            f"ip route replace unreachable {node0.address}/32 && ip route flush cache",
            f"ip route delete unreachable {node0.address}/32; "
            f"ip route add {node0.address}/32 dev eth0 src {node1.address}",
        ),
    ):
        told = doctor((node2, node0, node1), 29702, "--quick")
    assert told.codes[0] == 1
    by_hosts = {frozenset(finding["data"]["hosts"]): finding for finding in told.findings("connections")}
    assert set(by_hosts) == {frozenset({"node1", "node2"}), frozenset({"node0", "node1"})}
    blocked = by_hosts[frozenset({"node1", "node2"})]
    assert "no answer within 3 s" in blocked["what"]
    assert "this way only" in blocked["what"]
    assert "10.212.0.2" in blocked["what"]
    assert "10.212.0.3" in blocked["what"]
    assert "eth" in blocked["what"]
    unreachable = by_hosts[frozenset({"node0", "node1"})]
    assert "no route to host" in " ".join(unreachable["data"]["errors"])
    # The rest is still measured: node2 and node0, in collectives too.
    assert told.link(0, 1)["forth"] > 0
    assert told.report["all_reduce"]["ranks"] == [0, 1]
    assert told.report["all_reduce"]["points"][0]["seconds"] > 0
    assert told.alarm is not None
    assert told.alarm < 30  # the bar is 10 s


def test_a_line_that_loses_packets_and_one_that_carries_only_small_ones(three_machines: Three) -> None:
    """As a bad cable does, and a switch whose largest packet is smaller than that of the machines."""
    _, node1, node2 = three_machines
    large = f"ip saddr {node1.address} ip length gt 1000 drop"
    # What is marked is a line that is slower than it could be: 2 Gbit/s of the nominal 10.
    thin = "tc qdisc add dev eth2 root tbf rate 2gbit burst 1mb latency 20ms"
    # Every 20th packet, and not one of 20 at random: few are sent over such a line, and some runs would lose none.
    lossy = f"ip saddr {three_machines[0].address} numgen inc mod 20 eq 0 drop"
    with (
        on(three_machines[0], thin, "tc qdisc delete dev eth2 root"),
        firewall(node2, f"{large} && nft add rule ip doctor input {lossy}"),
    ):
        told = doctor(three_machines, 29705, "--quick")
    assert told.codes[0] == 1
    broken = told.one("broken line")
    assert broken["data"]["pairs"] == [[1, 2]]
    assert "nothing came for 5 s while rank 1 sent larger ones to rank 2; small messages pass" in broken["what"]
    assert "ping -M do -s 1472 10.212.0.3" in broken["fix"]
    slow = {tuple(finding["data"]["hosts"]): finding for finding in told.findings("slow line")}
    assert "of the packets from rank 0 to 2 were lost on the way" in slow["node0", "node2"]["what"]
    assert told.report["all_reduce"]["ranks"] == [0, 1]  # those that can talk
    assert [rank["ok"] for rank in told.report["ranks"]] == [True, False, False]


def test_a_machine_that_cannot_reach_the_meeting_point_says_so_and_the_rest_is_measured(three_machines: Three) -> None:
    node0, node1, _ = three_machines
    with firewall(node0, f"ip saddr {node1.address} drop"):
        told = doctor(three_machines, 29704, "--quick", "--patience", "8")
    assert told.codes == [1, 1, 0]
    assert told.report["missing"] == [1]
    assert told.link(0, 2)["forth"] > 0
    assert told.report["all_reduce"]["ranks"] == [0, 2]
    said = " ".join(told.errors.split())
    assert (
        "rank 1 on node1 (eth0 10.212.0.2) cannot connect to 10.212.0.1 port 29704, the rendezvous of all ranks" in said
    )
    assert "nc -vz 10.212.0.1 29704" in said
    assert "socket.cpp" not in said  # torch is not let loose on a way that is closed


def test_a_wrong_interface_and_a_script_that_differs(three_machines: Three, tmp_path: Path) -> None:
    scripts = {}
    for number in range(3):
        scripts[number] = tmp_path / str(number) / "train.py"
        scripts[number].parent.mkdir()
        scripts[number].write_text("print(1)\n" if number else "print(0)\n")
    extra = {1: {"GLOO_SOCKET_IFNAME": "lo"}, 2: {"GLOO_SOCKET_IFNAME": "eth9"}}
    told = doctor(three_machines, 29703, "--quick", extra=extra, scripts=scripts)
    assert told.codes[0] == 1
    itself = next(f for f in told.findings("connections") if f["data"]["hosts"] == ["node0", "node1"])
    assert "127.0.0.1 means the machine itself" in itself["what"]
    assert "GLOO_SOCKET_IFNAME=eth0" in itself["fix"]
    absent = told.one("interface")
    assert "GLOO_SOCKET_IFNAME=eth9 names no interface of this machine" in absent["what"]
    assert absent["what"].startswith("node2: ")
    script = told.one("script")
    assert script["status"] == "error"
    assert "on node1, node2" in script["what"]
    assert [rank["ok"] for rank in told.report["ranks"]] == [False, False, False]


def test_under_srun(slurm: Slurm, tmp_path: Path) -> None:
    argv = ["srun", "-N2", "-n2", sys.executable, "-m", "lockstep", "doctor", "net", "--cpu", "--quick", "--json"]
    done = slurm.run(argv, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [rank["host"] for rank in report["ranks"]] == ["node0", "node1"]
    assert report["all_reduce"]["points"][0]["seconds"] > 0


@pytest.mark.soak
def test_under_lockstep_launch_on_two_machines(two_machines: tuple[Machine, Machine], tmp_path: Path) -> None:
    """Machines that take their own names for 127.0.1.1, two ranks on each, all sizes; then the machines themselves."""
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    for port, program in ((29711, ["net", "--budget", "40"]), (29712, ["--script", str(script)])):
        with two_machines[0].named_loopback(), two_machines[1].named_loopback():
            ranks = []
            for number, machine in enumerate(two_machines):
                argv = [
                    sys.executable,
                    "-m",
                    "lockstep",
                    "launch",
                    "--cpu",
                    "--num_machines",
                    "2",
                    "--num_processes",
                    "4",
                ]
                argv += ["--machine_rank", str(number), "--main_process_ip", two_machines[0].address]
                argv += ["--main_process_port", str(port), "-m", "lockstep", "doctor", *program, "--json"]
                ranks.append(machine.popen(argv, env={"LOCKSTEP_RUN_DIR": str(machine.scratch / str(port))}))
            outs = [rank.communicate(timeout=LIMIT) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], outs
        report = json.loads(outs[0][0])
        assert [rank["host"] for rank in report["ranks"]] == ["node0", "node0", "node1", "node1"]
        assert {rank["interface"] for rank in report["ranks"]} == {"eth0"}
        assert len(report["links"]) == 6
        states = {finding["check"]: finding["status"] for finding in report["findings"]}
        assert states["versions"] == states["clocks"] == "ok"
        if program[0] == "net":
            sizes = [point["size"] for point in report["all_reduce"]["points"]]
            assert (sizes[0], sizes[-1]) == (1 << 10, 1 << 28)
        else:
            assert states["host name"] == "ok"  # the launcher has chosen the interface
            assert states["main port"] == "ok"
