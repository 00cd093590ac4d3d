"""The checks of one node, run for real here, and on what is known to be wrong."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.doctor.checks import cpu, devices, disk, kernel, memory, names, network, ports, ulimits
from lockstep.doctor.context import DoctorContext
from lockstep.doctor.finding import Finding
from lockstep.host import cgroups, interfaces
from lockstep.host.interfaces import Interface

LO = Interface(name="lo", up=True, addresses=("127.0.0.1",))
ETH = Interface(name="eth0", up=True, addresses=("192.0.2.7",), speed=1000)
FAST = Interface(name="ens9", up=True, addresses=("198.51.100.7",), speed=100_000)


@pytest.mark.parametrize(("release", "status"), [("4.18.0-500.el8", "warning"), ("5.5.0", "ok"), ("6.1.0-13", "ok")])
def test_kernel(release: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.platform, "system", lambda: "Linux")
    monkeypatch.setattr(kernel.platform, "release", lambda: release)
    finding = kernel.version(DoctorContext())
    assert finding.status == status
    assert release in finding.what


def test_kernel_of_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.platform, "system", lambda: "Darwin")
    assert kernel.version(DoctorContext()).status == "skipped"


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert memory.shared(DoctorContext()).data["total"] == shutil.disk_usage("/dev/shm").total
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 20, free=60 << 20))
    small = memory.shared(DoctorContext())
    assert small.status == "warning"
    assert "--shm-size" in small.fix
    monkeypatch.setattr(memory, "SHARED", str(tmp_path / "absent"))
    assert "there is no" in memory.shared(DoctorContext()).what


def test_memory_limit_of_the_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "memory", lambda: 3 << 30)
    assert "the control group allows 3.0 GiB" in memory.allowed(DoctorContext()).what
    tight = memory.allowed(DoctorContext(processes=4))
    assert tight.status == "warning"
    assert "for 4 processes" in tight.what
    monkeypatch.setattr(cgroups, "memory", lambda: None)
    assert "no control group" in memory.allowed(DoctorContext()).what


@pytest.fixture
def few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_open_files(few_files: None) -> None:
    found = {finding.check: finding for finding in ulimits.all_of_them(DoctorContext())}
    assert found["open files"].status == "warning"
    assert found["open files"].fix == "ulimit -n 65536"
    assert found["open files"].data["soft"] == 512
    assert set(found) == {"open files", "locked memory", "processes"}


def test_locked_memory_matters_with_infiniband(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ulimits.resource, "getrlimit", lambda kind: (65536, 65536))
    monkeypatch.setattr(ulimits, "_infiniband", lambda: [])
    assert ulimits._locked().status == "ok"
    monkeypatch.setattr(ulimits, "_infiniband", lambda: ["mlx5_0"])
    assert ulimits._locked().status == "error"
    assert "mlx5_0" in ulimits._locked().what


def test_processes_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ulimits.resource, "getrlimit", lambda kind: (300, 300))
    monkeypatch.setattr(ulimits.os, "geteuid", lambda: 1000)
    assert ulimits._processes().status == "warning"
    assert ulimits._threads_of_user() >= 1


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = disk.room(DoctorContext(folder=tmp_path / "not" / "yet"))
    assert str(tmp_path / "not" / "yet") in finding.what
    assert list(tmp_path.iterdir()) == []
    usage = SimpleNamespace(total=100 << 30, free=1 << 30)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage)
    assert disk.room(DoctorContext(folder=tmp_path)).status == "warning"
    usage.free = 1 << 20
    assert disk.room(DoctorContext(folder=tmp_path)).status == "error"


def test_a_folder_that_cannot_be_written() -> None:
    finding = disk.room(DoctorContext(folder=Path("/proc/here")))
    assert finding.status == "error"
    assert "nothing can be written in /proc" in finding.what


def test_cores_and_threads() -> None:
    usable = cpu.usable_cores()
    assert cpu.cores(DoctorContext()).data["usable"] == usable
    assert cpu.cores(DoctorContext(processes=usable + 1)).status == "warning"
    many = cpu.threads(DoctorContext(processes=2, environ={"OMP_NUM_THREADS": str(usable + 1)}))
    assert many.status == "warning"
    assert many.fix == f"export OMP_NUM_THREADS={max(1, usable // 2)}"
    assert cpu.threads(DoctorContext(processes=1, environ={"OMP_NUM_THREADS": "1"})).status == "ok"
    assert cpu.threads(DoctorContext(processes=1)).status == "ok"
    assert cpu.threads(DoctorContext(environ={"OMP_NUM_THREADS": "four"})).status == "error"


def test_a_process_that_is_tied_to_one_core() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        finding = cpu.cores(DoctorContext(processes=2))
    finally:
        os.sched_setaffinity(0, before)
    assert finding.status == "warning"
    if len(before) > 1:
        assert "this process is tied to 1" in finding.what


# --- the network -----------------------------------------------------------------------------------------------------


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A node with these interfaces, whose name resolves to this."""

    def make(present: list[Interface], resolved: list[str], route: str | None = None) -> None:
        monkeypatch.setattr(interfaces, "read", lambda: present)
        monkeypatch.setattr(interfaces, "resolve", lambda name: resolved)
        monkeypatch.setattr(network, "route_to", lambda address, port: ("192.0.2.7", route))

    return make


@pytest.mark.parametrize(
    ("resolved", "machines", "environ", "status"),
    [
        (["192.0.2.7"], 2, {}, "ok"),
        (["127.0.1.1"], 1, {}, "warning"),
        (["127.0.1.1"], 2, {}, "error"),
        (["127.0.1.1"], 2, {"GLOO_SOCKET_IFNAME": "eth0"}, "ok"),
        (["203.0.113.5"], 2, {}, "error"),
        ([], 2, {}, "error"),
        ([], 1, {}, "warning"),
    ],
)
def test_host_name(resolved: list[str], machines: int, environ: dict[str, str], status: str, net: Any) -> None:
    net([LO, ETH], resolved)
    finding = names.own(DoctorContext(machines=machines, environ=environ))
    assert finding.status == status
    if status == "error":
        assert f"192.0.2.7 {socket.gethostname()}" in finding.fix


def test_gloo_on_the_loopback_of_several_machines_is_an_error(net: Any) -> None:
    net([LO, ETH, FAST], ["127.0.1.1"])
    gloo, nccl = network.chosen(DoctorContext(machines=2))
    assert (gloo.status, gloo.fix) == ("error", "export GLOO_SOCKET_IFNAME=ens9")
    assert nccl.status == "warning"  # eth0 leads out, only not as fast
    gloo, nccl = network.chosen(DoctorContext(machines=1))
    assert (gloo.status, nccl.status) == ("ok", "ok")


def test_the_route_decides(net: Any) -> None:
    net([LO, ETH, FAST], ["192.0.2.7"], route="eth0")
    gloo, nccl = network.chosen(DoctorContext(machines=2, main_address="192.0.2.1"))
    assert (gloo.status, nccl.status) == ("ok", "ok")
    assert gloo.data["likely"] == "eth0"


def test_a_variable_that_names_no_interface(net: Any) -> None:
    net([LO, ETH], ["192.0.2.7"])
    environ = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "^eth,lo"}
    findings = list(network.chosen(DoctorContext(environ=environ)))
    assert [finding.status for finding in findings] == ["error", "error"]
    assert "eth7" in findings[0].what


def test_an_address_without_a_name() -> None:
    findings = list(network.chosen(DoctorContext(main_address="no-such-host.invalid", machines=2)))
    assert findings[0].check == "route"
    assert findings[0].status == "error"


def test_ipv6(net: Any) -> None:
    six = Interface(name="eth0", up=True, addresses=("2001:db8::7",))
    net([LO, six], [])
    assert "IPv6 addresses only" in network.ipv6(DoctorContext()).what
    assert network.ipv6(DoctorContext(environ={"NCCL_SOCKET_FAMILY": "AF_INET"})).status == "error"
    net([LO, ETH], [])
    assert network.ipv6(DoctorContext()).what == "IPv4 only"


def test_a_port_in_use_and_a_free_one() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        taken = ports.main_port(DoctorContext(main_port=port))
        assert taken.status == "warning"
        assert f"pid {os.getpid()}" in taken.what
        assert taken.data["free"] != port
        assert ports.main_port(DoctorContext(main_port=port, main_address="127.0.0.1", launched=True)).status == "ok"
    assert ports.main_port(DoctorContext(main_port=port)).status == "ok"
    gone = ports.main_port(DoctorContext(main_port=port, main_address="127.0.0.1", launched=True))
    assert gone.status == "error"
    assert "connection refused" in gone.what


def test_the_firewall_check_talks_to_this_machine() -> None:
    assert ports.firewall(DoctorContext()).status in ("ok", "skipped")


# --- accelerators, as far as that goes without any -------------------------------------------------------------------


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    if torch.accelerator.is_available():
        pytest.skip("there is one")
    found: dict[str, Finding] = {finding.check: finding for finding in devices.by_torch(DoctorContext())}
    assert found["accelerators"].status == "ok"
    assert found["GPU models"].status == "skipped"
    assert found["GPU peer access"].status == "skipped"
    driver = tmp_path / "version"
    driver.write_text("NVRM version: 550.54\nGCC\n")
    monkeypatch.setattr(devices, "_DRIVER", driver)
    unused = devices.versions(DoctorContext())
    assert unused.status == "error"
    assert "NVRM version: 550.54" in unused.what


def test_unequal_gpus_are_named() -> None:
    assert devices.judge_models([("H100", 80 << 30), ("H100", (80 << 30) - (1 << 20))]).status == "ok"
    unequal = devices.judge_models([("H100", 80 << 30), ("A10", 24 << 30)])
    assert unequal.status == "warning"
    assert "1: A10, 24.0 GiB" in unequal.what
    assert "GPU 1, 24.0 GiB" in unequal.why
    assert devices.judge_models([("A100", 80 << 30), ("A100", 40 << 30)]).status == "warning"


def smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("rows", "status", "said"),
    [
        ("0, H100, 0, 0x0000000000000001, 40, 1, 80", "ok", "1 GPU, no errors"),
        ("0, H100, [N/A], [Not Supported], 40, 1, 80", "ok", "1 GPU"),
        ("0, H100, 0, 0x0000000000000004, 40, 1, 80", "ok", "1 GPU"),  # a power limit somebody has set
        ("0, H100, 3, 0x0, 40, 1, 80", "error", "GPU 0: 3 memory errors"),
        ("0, A, 0, 0x0, 40, 1, 80\n1, B, 0, 0x0000000000000048, 93, 1, 80", "warning", "GPU 1 is slowed down"),
    ],
)
def test_what_nvidia_smi_says(
    rows: str, status: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, f"printf '{rows}\\n'", monkeypatch)
    finding = devices.health(DoctorContext())
    assert finding.status == status
    assert said in finding.what


@pytest.mark.parametrize("known", ["clocks_throttle_reasons.active", "clocks_event_reasons.active", "none"])
def test_fields_that_a_driver_does_not_know_are_asked_for_otherwise(
    known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers before 535 have one name for why a GPU is slowed down, and later ones another."""
    script = f"""
    for field in clocks_event_reasons.active clocks_throttle_reasons.active; do
      case "$1" in *$field*)
        [ $field = {known} ] || {{ echo "Field \\"$field\\" is not a valid field to query."; exit 2; }};;
      esac
    done
    case "$1" in *{known}*) echo "0, A, 0, 0x0000000000000040, 93, 1, 80";; *) echo "0, A, 0, 93, 1, 80";; esac
    """
    smi(tmp_path, script, monkeypatch)
    finding = devices.health(DoctorContext())
    assert finding.status == ("ok" if known == "none" else "warning"), finding
    assert finding.data["gpus"][0]["temperature"] == "93"


def test_nvidia_smi_that_fails_or_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", monkeypatch)
    failed = devices.health(DoctorContext())
    assert failed.status == "error"
    assert "version mismatch" in failed.what
    monkeypatch.setattr(devices, "_SMI_SECONDS", 0.3)
    smi(tmp_path, "exec sleep 20", monkeypatch)
    assert "no answer within 0.3 s" in devices.health(DoctorContext()).what
