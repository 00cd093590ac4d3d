from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.launch import resolve_launch
from lockstep.errors import ConfigError
from lockstep.host import hardware, network
from lockstep.launch.plan import LaunchPlan, LaunchTarget, make_plan

CODE = LaunchTarget(script="train", kind="module", args=("--lr", "1"))
"""A target whose existence is not looked at."""


def plan(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Mapping[str, Any] | None = None,
    devices: int = 0,
    target: LaunchTarget = CODE,
    **more: Any,
) -> LaunchPlan:
    """The plan on a node with so many GPUs."""
    environ = environ or {}
    options = resolve_launch(flags or {}, environ, file or {}, "config.yaml")
    kind = "cuda" if devices else "none"
    return make_plan(options, target, environ, count_accelerators=lambda _: (devices, kind), **more)


def refusal(flags: Mapping[str, Any], **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan(flags, **more)
    return list(caught.value.problems)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


# --- how many ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "devices", "kind", "processes"),
    [
        ({}, 0, "alone", 1),
        ({}, 1, "alone", 1),
        ({}, 4, "agent", 4),
        ({"cpu": True}, 4, "alone", 1),
        ({"cpu": True, "num_processes": 2}, 0, "agent", 2),
        ({"num_processes": 2}, 0, "agent", 2),
        ({"num_processes": 2}, 4, "agent", 2),
        ({"num_processes": 1}, 4, "alone", 1),
        ({"num_processes": 1, "max_restarts": 2}, 4, "agent", 1),
        ({"multi_gpu": True}, 2, "agent", 2),
        ({"gpu_ids": "0,2"}, 4, "agent", 2),
        ({"gpu_ids": "3"}, 4, "alone", 1),
        ({"gpu_ids": "all"}, 4, "agent", 4),
    ],
)
def test_how_many_processes(flags: dict[str, Any], devices: int, kind: str, processes: int) -> None:
    found = plan(flags, devices=devices)
    assert (found.kind, found.processes, found.per_machine, found.machines) == (kind, processes, processes, 1)


def test_more_processes_than_devices() -> None:
    (problem,) = refusal({"num_processes": 4}, devices=2)
    assert "asks for 4 processes on this node, which has 2 accelerators (cuda)" in problem
    assert "Ask for 2 at most, or add --cpu" in problem
    assert plan({"num_processes": 4, "cpu": True}, devices=2).processes == 4


def test_accelerators_that_are_not_there() -> None:
    (problem,) = refusal({"multi_gpu": True})
    assert "torch finds no accelerator" in problem
    assert "lockstep env" in problem


def test_the_choice_is_explained() -> None:
    assert "4 processes (one per cuda)." in plan(devices=4).notes
    assert plan().notes == ()


def test_where_each_value_came_from() -> None:
    found = plan(
        {"num_processes": 2},
        environ={"ACCELERATE_MIXED_PRECISION": "bf16", "LOCKSTEP_USE_CPU": "1"},
        file={"mixed_precision": "fp16", "num_processes": 8, "max_restarts": 3, "gradient_accumulation_steps": 4},
    )
    sources = {name: (one.value, one.source) for name, one in found.options.items() if one.source != "default"}
    assert sources == {
        "num_processes": (2, "flag --num_processes"),
        "mixed_precision": ("bf16", "environment (ACCELERATE_MIXED_PRECISION)"),
        "cpu": (True, "environment (LOCKSTEP_USE_CPU)"),
        "max_restarts": (3, "file (config.yaml)"),
        "gradient_accumulation_steps": (4, "file (config.yaml)"),
    }
    # What the environment says is inherited; what flags and the file say is passed on.
    assert found.env["LOCKSTEP_GRADIENT_ACCUMULATION_STEPS"] == "4"
    assert "LOCKSTEP_MIXED_PRECISION" not in found.env
    assert "LOCKSTEP_USE_CPU" not in found.env


# --- the environment of each process -----------------------------------------------------------------------------


def test_settings_reach_the_processes() -> None:
    found = plan(
        {
            "cpu": True,
            "mixed_precision": "bf16",
            "debug": "true",
            "gradient_accumulation_steps": 2,
            "dynamo_backend": "inductor",
            "dynamo_use_fullgraph": True,
            "dynamo_use_dynamic": False,
        }
    )
    assert found.env == {
        "LOCKSTEP_LAUNCH": "1",
        "PYTHONUNBUFFERED": "1",
        "LOCKSTEP_USE_CPU": "true",
        "LOCKSTEP_MIXED_PRECISION": "bf16",
        "LOCKSTEP_DEBUG_MODE": "true",
        "LOCKSTEP_GRADIENT_ACCUMULATION_STEPS": "2",
        "LOCKSTEP_DYNAMO_BACKEND": "inductor",
        "LOCKSTEP_DYNAMO_USE_FULLGRAPH": "true",
        "LOCKSTEP_DYNAMO_USE_DYNAMIC": "false",
    }


def test_devices_by_number() -> None:
    assert plan({"gpu_ids": "0, 2"}, devices=4).env["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert "CUDA_VISIBLE_DEVICES" not in plan({"gpu_ids": "all"}, devices=4).env


def test_cores_are_shared_out_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "usable_cores", lambda: 8)
    found = plan({"num_processes": 3})
    assert found.env["OMP_NUM_THREADS"] == "2"
    assert any("2 CPU threads for each of 3 processes on 8 cores" in note for note in found.notes)
    assert plan({"num_processes": 32}).env["OMP_NUM_THREADS"] == "1"
    assert plan({"num_processes": 2, "num_cpu_threads_per_process": 7}).env["OMP_NUM_THREADS"] == "7"
    theirs = plan({"num_processes": 2}, environ={"OMP_NUM_THREADS": "5"})
    assert "OMP_NUM_THREADS" not in theirs.env
    assert theirs.notes == ()


def test_one_process_keeps_all_cores() -> None:
    assert "OMP_NUM_THREADS" not in plan().env
    assert plan({"num_cpu_threads_per_process": 3}).env["OMP_NUM_THREADS"] == "3"


# --- the command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "argv"),
    [
        (LaunchTarget(script="a b.py", args=("-x",)), (sys.executable, "-m", "lockstep.launch.worker", "a b.py", "-x")),
        (
            LaunchTarget(script="pkg.mod", args=("-x",), kind="module"),
            (sys.executable, "-m", "lockstep.launch.worker", "-m", "pkg.mod", "-x"),
        ),
        (LaunchTarget(script="bash", args=("-c", "x"), kind="program"), ("bash", "-c", "x")),
    ],
)
def test_the_command_of_a_rank(target: LaunchTarget, argv: tuple[str, ...]) -> None:
    assert target.argv() == argv


def test_targets_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "train.py").touch()
    assert refusal({}, target=LaunchTarget(script="nothing.py")) == [
        f"The script 'nothing.py' does not exist (looked in {tmp_path})."
    ]
    assert "is a folder" in refusal({}, target=LaunchTarget(script="folder.py"))[0]
    assert "not found on the path" in refusal({}, target=LaunchTarget(script="no-such-program", kind="program"))[0]
    assert plan(target=LaunchTarget(script="train.py")).kind == "alone"
    assert plan(target=LaunchTarget(script="sh", kind="program")).argv == ("sh",)


# --- contradictions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"cpu": True, "multi_gpu": True}, "--cpu and --multi_gpu contradict"),
        ({"cpu": True, "gpu_ids": "0,1"}, "--cpu and --gpu_ids 0,1 contradict"),
        ({"cpu": True, "enable_cpu_affinity": True}, "--enable_cpu_affinity"),
        ({"mixed_precision": "fp8"}, "fp8 is not supported yet"),
        ({"mixed_precision": "fp4"}, "--mixed_precision fp4 is unknown. Allowed: no, fp16, bf16"),
        ({"num_processes": 0}, "--num_processes 0 must be 1 or more."),
        ({"num_processes": 3, "num_machines": 2}, "is not a multiple of --num_machines 2"),
        ({"machine_rank": 1}, "--machine_rank 1: with --num_machines 1 node ranks are 0 to 0."),
        ({"machine_rank": 2, "num_machines": 2}, "node ranks are 0 to 1."),
        ({"machine_rank": -1}, "--machine_rank -1 must be 0 or more."),
        ({"main_process_port": 65536}, "must be at most 65535."),
        ({"max_restarts": -1}, "--max_restarts -1 must be 0 or more."),
        ({"monitor_interval": 0.0}, "must be above 0."),
        ({"grace": -1.0}, "--grace -1.0 must be 0 or more."),
        ({"tee": "4"}, "--tee 4 is unknown. Allowed: 0, 1, 2, 3."),
        ({"num_machines": 2}, "needs --main_process_ip (the address of node 0) and --machine_rank"),
        ({"num_machines": 2, "machine_rank": 0}, "needs --main_process_ip (the address of node 0); or"),
        ({"num_machines": 2, "rdzv_endpoint": "host"}, "--rdzv_endpoint host must be HOST:PORT"),
        ({"num_machines": 2, "rdzv_endpoint": "host:port"}, "must be HOST:PORT"),
        ({"num_machines": 2, "rdzv_endpoint": ":29500"}, "must be HOST:PORT"),
        ({"num_machines": 2, "rdzv_endpoint": "::1"}, "an IPv6 address in brackets."),
        ({"num_machines": 2, "rdzv_endpoint": "127.0.0.1:65536"}, "with a port up to 65535"),
        ({"gpu_ids": "0"}, "--gpu_ids 0: torch finds no accelerator"),
        ({"gpu_ids": ","}, "--gpu_ids , must name accelerators"),
        ({"gpu_ids": "1,1"}, "each once"),
        ({"main_process_ip": "a", "rdzv_endpoint": "b:1"}, "both set the rendezvous endpoint"),
        ({"mpirun_hostfile": "hosts", "max_restarts": 2}, "mpirun ends the whole job"),
        ({"mpirun_hostfile": "hosts", "machine_rank": 1, "num_machines": 2}, "mpirun starts all nodes from one"),
    ],
)
def test_what_cannot_be_done(flags: dict[str, Any], text: str) -> None:
    assert text in "\n".join(refusal(flags))


def test_all_contradictions_at_once() -> None:
    assert len(refusal({"num_processes": 0, "tee": "9"}, target=LaunchTarget(script="nothing.py"))) == 3
    found = refusal(
        {"cpu": True, "multi_gpu": True, "gpu_ids": "1", "mixed_precision": "fp8", "machine_rank": 3},
        refused=["said before"],
        target=LaunchTarget(script="nothing.py"),
    )
    assert found[0] == "said before"
    assert len(found) == 6


@given(
    flags=st.fixed_dictionaries(
        {},
        optional={
            "cpu": st.booleans(),
            "multi_gpu": st.booleans(),
            "num_processes": st.integers(-1, 9),
            "num_machines": st.integers(0, 4),
            "machine_rank": st.integers(-1, 4),
            "gpu_ids": st.sampled_from(["all", "0", "0,1", "2"]),
            "main_process_ip": st.just("127.0.0.1"),
            "rdzv_endpoint": st.sampled_from(["127.0.0.1:1", "[::1]:2", "x", ""]),
            "max_restarts": st.integers(-1, 2),
            "num_cpu_threads_per_process": st.integers(0, 3),
        },
    ),
    devices=st.integers(0, 4),
)
def test_every_combination_is_planned_or_refused(flags: dict[str, Any], devices: int) -> None:
    refused: tuple[str, ...] | None = None
    try:
        found = plan(flags, devices=devices)
    except ConfigError as error:
        refused = tuple(error.problems)
    if refused is not None:
        assert refused
        assert all(problem.endswith(".") for problem in refused)
        return
    assert found.processes == found.per_machine * found.machines
    assert found.processes == flags.get("num_processes", found.processes)
    assert (found.kind == "alone") <= (found.processes == 1)
    json.dumps(found.to_dict())


# --- where processes meet ----------------------------------------------------------------------------------------


def test_one_machine_meets_on_any_port() -> None:
    found = plan({"num_processes": 2})
    assert (found.endpoint, found.address, found.env["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1:0", "127.0.0.1", "lo")
    assert "GLOO_SOCKET_IFNAME" not in plan({"num_processes": 2}, environ={"GLOO_SOCKET_IFNAME": "eth7"}).env


def test_a_port_in_use_is_named_with_a_free_one(taken: int) -> None:
    (problem,) = refusal({"num_processes": 2, "main_process_port": taken})
    assert problem.startswith(f"Port {taken} is in use on this node. Free now: ")
    free = int(problem.partition("Free now: ")[2].split()[0])
    assert hardware.is_free(free)
    assert plan({"num_processes": 2, "main_process_port": free}).endpoint == f"127.0.0.1:{free}"


def test_a_port_in_use_on_machine_0_of_several(taken: int) -> None:
    flags = {"num_machines": 2, "num_processes": 2, "main_process_ip": "127.0.0.1", "main_process_port": taken}
    assert f"Port {taken} is in use" in refusal({**flags, "machine_rank": 0})[0]
    # On the others it is node 0 that listens there.
    assert plan({**flags, "machine_rank": 1}).endpoint == f"127.0.0.1:{taken}"


def test_a_port_of_our_own_past_connections_is_free() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()
            client.recv(1)
    assert hardware.is_free(port)  # though the connection is in TIME_WAIT


@pytest.mark.parametrize(
    ("flags", "endpoint"),
    [
        ({"rdzv_endpoint": "127.0.0.1:4711"}, "127.0.0.1:4711"),
        ({"rdzv_endpoint": "localhost:4711"}, "localhost:4711"),
        ({"main_process_ip": "127.0.0.1", "machine_rank": 1}, "127.0.0.1:29500"),
        ({"main_process_ip": "127.0.0.1", "machine_rank": 1, "main_process_port": 4711}, "127.0.0.1:4711"),
    ],
)
def test_several_machines(flags: dict[str, Any], endpoint: str) -> None:
    found = plan({**flags, "num_machines": 2, "num_processes": 4})
    assert (found.kind, found.endpoint, found.machines, found.per_machine) == ("agent", endpoint, 2, 2)
    assert found.machine_rank == flags.get("machine_rank")
    assert found.env["GLOO_SOCKET_IFNAME"] == "lo"
    assert any("network interface lo" in note for note in found.notes)


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_ipv6() -> None:
    flags = {"num_machines": 2, "num_processes": 2}
    for more in ({"rdzv_endpoint": "[::1]:4711"}, {"main_process_ip": "::1", "machine_rank": 1}):
        found = plan({**flags, **more})
        assert found.endpoint.startswith("[::1]:")
        assert (found.address, found.env["GLOO_SOCKET_IFNAME"]) == ("::1", "lo")


def test_a_host_that_cannot_be_found() -> None:
    (problem,) = refusal(
        {"num_machines": 2, "num_processes": 2, "main_process_ip": "no-such-host.invalid", "machine_rank": 1}
    )
    assert "'no-such-host.invalid' cannot be resolved" in problem


@pytest.mark.parametrize(("name", "expected"), [(None, "c10d"), ("static", "c10d"), ("etcd-v2", "etcd-v2")])
def test_the_rendezvous_backend(name: str | None, expected: str) -> None:
    assert plan({"num_processes": 2, "rdzv_backend": name}).rdzv_backend == expected


# --- this machine ------------------------------------------------------------------------------------------------


def test_cores_of_this_process() -> None:
    assert 1 <= hardware.usable_cores() <= len(os.sched_getaffinity(0))


def test_no_accelerator_is_looked_for_where_they_are_hidden() -> None:
    assert hardware.accelerators({"CUDA_VISIBLE_DEVICES": ""}) == (0, "none")


def test_ports() -> None:
    assert not hardware.is_free(70_000)
    assert hardware.is_free(hardware.next_free(65_535))


def test_interfaces() -> None:
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("127.9.9.9") == "lo"
    assert network.interface_of("192.0.2.77") is None
    assert network.route_to("127.0.0.1", 0) == ("127.0.0.1", "lo")


# --- printing ----------------------------------------------------------------------------------------------------


def test_a_plan_as_json() -> None:
    found = json.loads(json.dumps(plan({"num_processes": 2, "cpu": True}).to_dict()))
    assert found["kind"] == "agent"
    assert found["processes"] == 2
    assert found["options"]["num_processes"] == {"value": 2, "source": "flag --num_processes"}
    assert found["argv"][-3:] == ["train", "--lr", "1"]
    assert found["env"]["OMP_NUM_THREADS"]
