from __future__ import annotations

import itertools
import os
import stat
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launch import mpi
from lockstep.launch.mpi import Dialect, MpiHost, MpiJob

OPEN_MPI_4 = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
OPEN_MPI_5 = "mpirun (Open MPI) 5.0.3\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
INTEL_2021 = (
    "Intel(R) MPI Library for Linux* OS, Version 2021.8 Build 20221129 (id: 339ec755a1)\n"
    "Copyright 2003-2022, Intel Corporation.\n"
)
MPICH_4 = (
    "HYDRA build details:\n    Version:                                 4.0.2\n"
    "    Release Date:                            Thu Apr  7 12:34:45 CDT 2022\n"
    "    Process Manager:                         pmi\n"
    "    Bootstrap servers available:             ssh rsh fork slurm ll lsf sge manual persist\n"
)
MVAPICH_2 = (
    "HYDRA build details:\n    Version:                                 3.2.1\n"
    "    Configure options:                       '--prefix=/opt/mvapich2-2.3.7' '--with-device=ch3:mrail'\n"
)


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        (OPEN_MPI_4, mpi.OPEN_MPI),
        (OPEN_MPI_5, mpi.OPEN_MPI),
        ("mpirun (OpenRTE) 2.1.1\n", mpi.OPEN_MPI),
        (INTEL_2021, mpi.INTEL),
        (MPICH_4, mpi.MPICH),
        (MVAPICH_2, mpi.MVAPICH),
    ],
)
def test_version_texts_are_recognised(text: str, dialect: Dialect) -> None:
    assert mpi.recognise(text) is dialect


@pytest.mark.parametrize(("text", "shown"), [("", "''"), ("\n  Some MPI 3\nmore", "'Some MPI 3'")])
def test_another_mpirun_is_refused_with_the_names_of_those_known(text: str, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mpi.recognise(text)
    message = str(caught.value)
    assert f"answers {shown}" in message
    assert "Open MPI, Intel MPI, MVAPICH, MPICH" in message


JOB = MpiJob(hosts=["a", "b"], per_machine=2, env={"X": "1 2", "Y": "z"}, inherited=["NCCL_DEBUG"], as_root=False)


def test_open_mpi() -> None:
    assert mpi.command(mpi.OPEN_MPI, "/bin/mpirun", JOB, ["/bin/python", "t.py"]) == [
        *("/bin/mpirun", "--host", "a:2,b:2", "-n", "4", "--map-by", "ppr:2:node", "--bind-to", "none"),
        *("-x", "X=1 2", "-x", "Y=z", "-x", "NCCL_DEBUG", "/bin/python", "t.py"),
    ]


def test_open_mpi_lets_root_only_when_told() -> None:
    job = MpiJob(hosts=["a"], per_machine=1, env={}, inherited=[], as_root=True)
    assert "--allow-run-as-root" in mpi.command(mpi.OPEN_MPI, "mpirun", job, ["x"])


@pytest.mark.parametrize("dialect", [mpi.INTEL, mpi.MPICH, mpi.MVAPICH], ids=lambda dialect: dialect.name)
def test_the_descendants_of_mpich(dialect: Dialect) -> None:
    assert mpi.command(dialect, "mpirun", JOB, ["/bin/python", "t.py"]) == [
        *("mpirun", "-hosts", "a,b", "-n", "4", "-ppn", "2", "-genv", "X", "1 2", "-genv", "Y", "z"),
        *("/bin/python", "t.py"),
    ]


# --- host files --------------------------------------------------------------------------------------------------


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1\nnode2\n", [MpiHost(name="node1"), MpiHost(name="node2")]),
        (
            "node1 slots=2\nnode2 slots = 4 max_slots=8",
            [MpiHost(name="node1", slots=2), MpiHost(name="node2", slots=4)],
        ),
        ("node1 max-slots=3", [MpiHost(name="node1", slots=3)]),
        ("node1:2\r\n10.0.0.2:3\r\n", [MpiHost(name="node1", slots=2), MpiHost(name="10.0.0.2", slots=3)]),
        ("# all of them\n\n  a.example.org # the first\n\tb\n", [MpiHost(name="a.example.org"), MpiHost(name="b")]),
        (
            "fd00::1\n[fd00::2]:4\n[fd00::3]",
            [MpiHost(name="fd00::1"), MpiHost(name="fd00::2", slots=4), MpiHost(name="fd00::3")],
        ),
        (
            "fe80::1%eth0\n::1\nnode-1.example.org.\n_gw\n10.0.0.1",
            [MpiHost(name=name) for name in ("fe80::1%eth0", "::1", "node-1.example.org.", "_gw", "10.0.0.1")],
        ),
        ("a slots=1\nb\na slots=2\nb", [MpiHost(name="a", slots=3), MpiHost(name="b")]),
    ],
)
def test_host_files_of_all_dialects_are_read(tmp_path: Path, text: str, hosts: list[MpiHost]) -> None:
    assert mpi.read_hostfile(written(tmp_path, text)) == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\nb slots=two\n", "line 2, 'b slots=two': 'two' is not a number of processes"),
        ("a:0", "line 1, 'a:0': '0' is not a number"),
        ("a:", "line 1, 'a:': '' is not a number"),
        ("\n\na gpus=2", "line 3, 'a gpus=2': 'gpus=2' is not known here"),
        ("a b", "'b' is not known here"),
        ("me@a", "'me@a' is not a host's name"),
        ("a,b", "'a,b' is not a host's name"),
        ("-x", "'-x' is not a host's name"),
        (
            "a\n-oProxyCommand=x::y",
            "line 2, '-oProxyCommand=x::y': '-oProxyCommand=x::y' is not a host's name; allowed",
        ),
        ("x::2", "'x::2' is not a host's name"),
        ("--help::1 slots=2", "'--help::1' is not a host's name"),
        ("[-x::1]:2", "'-x::1' is not a host's name"),
        ("[a]:2", "'a' in brackets is not an IPv6 address"),
        ("fe80::1%$(id)", "is not a host's name"),
        ("a;reboot", "'a;reboot' is not a host's name"),
        ("a\x1b[2J", "'a\\x1b[2J' is not a host's name"),
        ("`id`:2", "'`id`' is not a host's name"),
        ("b" * 254, "is not a host's name"),
        ("", "names no host"),
        ("# nobody\n\n", "names no host"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        mpi.read_hostfile(path)
    assert words in str(caught.value)
    assert repr(str(path)) in str(caught.value)
    assert "node1 slots=2 or node1:2" in str(caught.value)


def test_a_host_file_without_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'/dev/zero' cannot be read: it has more than 4096 KiB"):
        mpi.read_hostfile("/dev/zero")


def test_all_bad_lines_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 1, .*line 3, "):
        mpi.read_hostfile(written(tmp_path, "a:x\nb\nc:y"))


def test_a_host_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        mpi.read_hostfile(tmp_path / "none")
    with pytest.raises(ConfigError, match="directory"):
        mpi.read_hostfile(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        mpi.read_hostfile(binary)


# --- the whole command -------------------------------------------------------------------------------------------


def fake_mpirun(folder: Path, version: str, name: str = "mpirun") -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{version}END\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def plan(
    tmp_path: Path, text: str = "a\nb\n", version: str = MPICH_4, **changes: object
) -> tuple[list[str], dict[str, str]]:
    asked = {
        "hostfile": written(tmp_path, text),
        "num_machines": 2,
        "num_processes": 4,
        "main_process_ip": None,
        "main_process_port": 1234,
        "env": {"LOCKSTEP_LAUNCH": "1"},
        "argv": ["/bin/python", "train.py"],
        **(changes if "environ" in changes else {**changes, "environ": fake_mpirun(tmp_path / "bin", version)}),
    }
    return mpi.mpirun_command(**asked)  # type: ignore[arg-type]


def test_the_first_host_is_the_main_one(tmp_path: Path) -> None:
    argv, more = plan(tmp_path)
    assert argv == [
        *(f"{tmp_path}/bin/mpirun", "-hosts", "a,b", "-n", "4", "-ppn", "2", "-genv", "LOCKSTEP_LAUNCH", "1"),
        *("-genv", "MASTER_ADDR", "a", "-genv", "MASTER_PORT", "1234", "/bin/python", "train.py"),
    ]
    assert more == {}


def test_the_main_address_that_is_given_wins_and_a_port_is_found(tmp_path: Path) -> None:
    argv, _ = plan(tmp_path, main_process_ip="10.0.0.9", main_process_port=None)
    assert argv[argv.index("MASTER_ADDR") + 1] == "10.0.0.9"
    assert 20000 <= int(argv[argv.index("MASTER_PORT") + 1]) < 30000


def test_open_mpi_is_told_by_name_what_to_hand_over(tmp_path: Path) -> None:
    environ = {
        **fake_mpirun(tmp_path / "bin", OPEN_MPI_4),
        "WANDB_API_KEY": "secret",
        "PYTHONPATH": "/x",
        "HOME": "/root",
        "LOCKSTEP_LAUNCH": "0",
    }
    argv, _ = plan(tmp_path, environ=environ)
    handed = [value for flag, value in itertools.pairwise(argv) if flag == "-x"]
    assert handed[:3] == ["LOCKSTEP_LAUNCH=1", "MASTER_ADDR=a", "MASTER_PORT=1234"]
    # By name: whoever lists the processes of the node reads their command lines.
    assert handed[3:] == ["LOCKSTEP_JOB_SECRET", "PYTHONPATH", "WANDB_API_KEY"]
    assert ("--allow-run-as-root" in argv) == (os.geteuid() == 0)


def test_intel_is_told_to_keep_to_the_number_per_machine(tmp_path: Path) -> None:
    argv, more = plan(tmp_path, version=INTEL_2021)
    assert argv[1:7] == ["-hosts", "a,b", "-n", "4", "-ppn", "2"]
    assert more == {"I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "0"}


def test_only_as_many_hosts_as_machines_are_used(tmp_path: Path) -> None:
    argv, _ = plan(tmp_path, "a\nb\nc\n")
    assert argv[2] == "a,b"


def test_mpiexec_will_do(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path / "only")}
    fake_mpirun(tmp_path / "only", "", name="mpiexec")
    assert mpi.find_mpirun(environ) == str(tmp_path / "only" / "mpiexec")
    assert mpi.find_mpirun({"PATH": str(tmp_path)}) is None


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        ("a\nb", {"num_processes": 3}, ["num_processes is 3 and num_machines is 2", "multiple of 2"]),
        ("a", {}, ["num_machines is 2, but the host file", "names 1: a"]),
        ("a slots=1\nb slots=2", {}, ["makes 2 for each", "fewer slots: a 1."]),
        ("localhost\nb", {}, ["The first host", "is localhost, which means another machine to b", "--main_process_ip"]),
        ("a\nb", {"num_machines": 0}, ["num_machines is 0"]),
        ("a\nb", {"environ": {"PATH": "/nonexistent"}}, ["neither of mpirun and mpiexec", "openmpi-bin or mpich"]),
        ("a:1", {"num_processes": 5}, ["3 settings", "multiple of 2", "names 1: a", "fewer slots: a 1"]),
    ],
)
def test_what_cannot_work_is_named(tmp_path: Path, text: str, changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(tmp_path, text, **changes)
    for word in words:
        assert word in str(caught.value)


def test_one_machine_under_two_loopback_names_is_one_job(tmp_path: Path) -> None:
    argv, _ = plan(tmp_path, "localhost\n127.0.0.2\n")
    assert argv[2] == "localhost,127.0.0.2"


def test_a_broken_mpirun_is_named(tmp_path: Path) -> None:
    environ = fake_mpirun(tmp_path / "bin", "")
    (tmp_path / "bin" / "mpirun").write_text("#!/nonexistent\n")
    with pytest.raises(ConfigError, match="mpirun --version does not work"):
        plan(tmp_path, environ=environ)
