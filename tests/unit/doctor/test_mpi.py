"""``lockstep doctor mpi`` with hosts that are not there; what stands in for ssh and mpirun are real programs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.doctor import mpi, ssh
from lockstep.doctor.finding import Finding
from lockstep.errors import ConfigError
from lockstep.launch.mpi import INTEL, MPICH, OPEN_MPI, MpiHost

OPEN_MPI_SAYS = "mpirun (Open MPI) 4.1.4"
HYDRA_SAYS = "HYDRA build details:\\n    Version: 4.0.2"


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A PATH with an mpirun that prints a name for each host it is given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program(
        folder / "mpirun", f'[ "$1" = --version ] && echo "{OPEN_MPI_SAYS}" && exit 0; grep -vc "^#" "$2" >&2; cat "$2"'
    )
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def hostfile(folder: Path, text: str) -> str:
    path = folder / "hosts"
    path.write_text(text)
    return str(path)


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no host"),
        ("# only\n\n   # comments\n", "names no host"),
        ("node1 slots=two\n", "line 1"),
        ("node1:0\n", "line 1"),
        ("node1 cores=2\n", "'cores=2' is not known here"),
        ("\x00\x01", "line 1"),
    ],
)
def test_host_files_that_cannot_be_read(text: str, said: str, tmp_path: Path, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=said):
        mpi.examine(hostfile(tmp_path, text), environ)


def test_no_host_file(tmp_path: Path, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        mpi.examine(str(tmp_path / "absent"), environ)


def test_no_mpirun(tmp_path: Path) -> None:
    found = by_check(mpi.examine(hostfile(tmp_path, "localhost\n"), {"PATH": str(tmp_path)}))
    assert found["mpirun"].status == "error"
    assert "openmpi-bin" in found["mpirun"].fix
    assert "mpirun hostname" not in found


def test_the_other_dialects_lines_are_translated(tmp_path: Path, environ: dict[str, str]) -> None:
    found = by_check(mpi.examine(hostfile(tmp_path, "# two of them\nlocalhost:2  # me\n"), environ))
    assert found["host file"].status == "warning"
    assert "line 2, 'localhost:2  # me'" in found["host file"].what
    assert found["host file"].fix == "for Open MPI write: localhost slots=2"
    assert found["mpirun hostname"].status == "ok"
    assert found["mpirun hostname"].data["printed"] == ["localhost slots=2"]  # what the stand-in was given


def test_its_own_lines_are_used_as_they_are(tmp_path: Path, environ: dict[str, str]) -> None:
    path = hostfile(tmp_path, "localhost slots=2\n")
    found = by_check(mpi.examine(path, environ))
    assert found["host file"].status == "ok"
    assert f"--hostfile {path} --map-by ppr:1:node" in found["mpirun hostname"].what


@pytest.mark.parametrize("always", [False, True])
def test_an_mpirun_that_a_signal_has_ended_is_called_once_more(
    always: bool, tmp_path: Path, environ: dict[str, str]
) -> None:
    fate = "kill -PIPE $$" if always else f"mkdir {tmp_path}/once 2> /dev/null && kill -PIPE $$; cat $2"
    program(tmp_path / "bin" / "mpirun", f'[ "$1" = --version ] && echo "{OPEN_MPI_SAYS}" && exit 0; {fate}')
    tried = by_check(mpi.examine(hostfile(tmp_path, "localhost\n"), environ))["mpirun hostname"]
    assert tried.status == ("error" if always else "ok")
    assert ("it was ended by signal 13 (SIGPIPE)" in tried.what) == always


def test_the_guides_command_in_each_dialect() -> None:
    hosts = [MpiHost(name="a"), MpiHost(name="b")]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    for hydra in (MPICH, INTEL):
        shown = mpi.sanity_command("mpirun", hydra, "H", hosts)
        assert " ".join(shown) == "mpirun -f H -n 2 -ppn 1 hostname"
    shown = ["mpirun", "--hostfile", "H", "--map-by", "ppr:1:node", *root, "hostname"]
    assert mpi.sanity_command("mpirun", OPEN_MPI, "H", hosts) == shown


@pytest.mark.parametrize(
    ("line", "open_mpi", "hydra"),
    [
        ("node1", True, True),
        ("node1 slots=2", True, False),
        ("node1:2", False, True),
        ("node1 # slots=2", True, True),
        ("# node1:2 slots=2", True, True),
        ("", True, True),
        ("2001:db8::1", True, True),
    ],
)
def test_who_reads_which_line(line: str, open_mpi: bool, hydra: bool) -> None:
    assert OPEN_MPI.reads(line) == open_mpi
    assert MPICH.reads(line) == hydra


def test_hosts_that_are_not_there_are_told_apart(tmp_path: Path, environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.3", 0)) as server:
        port = server.getsockname()[1]
    client = program(tmp_path / "ssh", f'[ "$1" = -G ] && echo "hostname $2" && echo "port {port}"')
    path = hostfile(tmp_path, "localhost\nno-such-host.invalid\n127.0.0.3\n")
    found = by_check(mpi.examine(path, environ, program=str(client), all_pairs=True))
    assert found["localhost"].status == "ok"
    assert found["no-such-host.invalid: name"].status == "error"
    assert found["127.0.0.3: name"].status == "ok"
    assert "connection refused" in found[f"127.0.0.3: port {port}"].what
    assert "127.0.0.3: ssh" not in found
    assert found["all pairs"].status == "skipped"
    assert found["mpirun hostname"].status == "skipped"
    assert f"--hostfile {path}" in found["mpirun hostname"].data["command"]


@pytest.mark.parametrize(
    ("err", "fix"),
    [
        ("root@node1: Permission denied (publickey,password).", "ssh-copy-id -p 2222 me@node1"),
        ("Host key verification failed.", "ssh-keyscan -H -p 2222 node1 >> ~/.ssh/known_hosts"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "'[node1]:2222'"),
        ("ssh: connect to host node1 port 2222: Connection refused", "sshd runs on node1 at port 2222"),
        ("something new", "ssh -v -p 2222 me@node1"),
    ],
)
def test_what_to_type(err: str, fix: str) -> None:
    to = ssh.SshTarget(host="node1", name="node1", port=2222, user="me")
    assert fix in ssh.remedy(ssh.Answer(code=255, err=err), to)
    assert ssh.remedy(ssh.Answer(code=255, err=err), to, by="node0").startswith("on node0: ")


def test_commands_that_hang_are_given_up() -> None:
    answer = ssh.call(["sleep", "30"], limit=0.3)
    assert answer.code is None
    assert answer.reason == "no answer in time"
    assert ssh.call(["no-such-program"], limit=1).code == 127


def test_another_version_over_there(tmp_path: Path, environ: dict[str, str]) -> None:
    answers = """
[ "$1" = -G ] && echo "hostname 127.0.0.1" && echo "port PORT" && exit 0
for command; do true; done
case "$command" in
  hostname) echo over-there;;
  */mpirun*) echo "sh: not found" >&2; exit 127;;
  mpirun*) echo "mpirun (Open MPI) 5.0.1";;
  *torch*) echo "No module named torch" >&2; exit 1;;
esac
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = program(tmp_path / "ssh", answers.replace("PORT", str(server.getsockname()[1])))
        found = by_check(mpi.examine(hostfile(tmp_path, "node5\n"), environ, program=str(client)))
    assert found["node5: ssh"].status == "ok"
    assert found["node5: mpirun"].status == "error"
    assert found["node5: mpirun"].what == f"mpirun (Open MPI) 5.0.1, and here it is {OPEN_MPI_SAYS}"
    assert found["node5: python"].status == "warning"
    assert found["mpirun hostname"].status == "skipped"


def test_an_mpirun_that_prints_too_little_is_no_success(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    program(folder / "mpirun", f'[ "$1" = --version ] && printf "{HYDRA_SAYS}\\n" && exit 0; true')
    environ = {"PATH": f"{folder}:{os.environ['PATH']}"}
    found = by_check(mpi.examine(hostfile(tmp_path, "localhost\n"), environ))
    assert found["mpirun hostname"].status == "error"
    assert "printed 0 names for 1 hosts" in found["mpirun hostname"].what
    assert "-f " in found["mpirun hostname"].data["command"]


def test_the_command_line(tmp_path: Path, environ: dict[str, str]) -> None:
    argv = [sys.executable, "-m", "lockstep", "doctor", "mpi", "--hostfile"]
    env = {**os.environ, **environ}
    empty = subprocess.run([*argv, hostfile(tmp_path, "# none\n")], env=env, capture_output=True, text=True, timeout=60)
    assert empty.returncode == 2
    assert "names no host" in empty.stderr
    good = subprocess.run(
        [*argv, hostfile(tmp_path, "localhost\n"), "--json"], env=env, capture_output=True, text=True, timeout=60
    )
    assert good.returncode == 0, good.stderr
    assert '"check": "mpirun hostname"' in good.stdout
