"""Reaching another node by ssh without being asked for anything: tried in steps, and what to type when one fails."""

from __future__ import annotations

import getpass
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.host.processes import name_signal

RESOLVE = 6.0
CONNECT = 5.0
COMMAND = 20.0
"""Seconds for a question to the name server, for a connection, and for a command on the other node."""
_QUIET = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT:.0f}", "-o", "NumberOfPasswordPrompts=0")
_RESOLVER = (
    "import json, socket, sys; print(json.dumps(sorted({e[4][0] for e in socket.getaddrinfo(sys.argv[1], None)})))"
)


@dataclass(frozen=True, kw_only=True)
class SshTarget:
    """Where ssh goes for a host, after its own configuration files."""

    host: str
    """As it stands in the host file."""
    name: str
    """The name or address it connects to."""
    port: int = 22
    user: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command said."""

    code: int | None
    """Its exit code; None when it did not end in time."""
    out: str = ""
    err: str = ""
    """What it printed as errors."""

    @property
    def ok(self) -> bool:
        """Whether it ended well."""
        return self.code == 0

    @property
    def reason(self) -> str:
        """Why not, in a line: the last that sounds like a reason."""
        if self.code is None:
            return "no answer in time"
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        errors = [line for line in lines if not line.startswith(("Warning: Permanently added", "**"))]
        return errors[-1] if errors else self._ending

    @property
    def _ending(self) -> str:
        if self.code is not None and self.code < 0:
            return f"it was ended by signal {-self.code} ({name_signal(self.code)})"
        return f"exit code {self.code}"


def target(program: str, host: str) -> SshTarget:
    """What ssh makes of a host: aliases, ports and users of its configuration."""
    answer = call([program, "-G", host], limit=CONNECT)
    settings = dict(line.split(" ", 1) for line in answer.out.splitlines() if " " in line) if answer.ok else {}
    port = settings.get("port", "22")
    return SshTarget(
        host=host,
        name=settings.get("hostname", host),
        port=int(port) if port.isdecimal() else 22,
        user=settings.get("user", getpass.getuser()),
    )


def resolve(name: str) -> list[str]:
    """Its addresses; in a process of its own, since a name server that is away cannot be waited for with a limit."""
    answer = call([sys.executable, "-c", _RESOLVER, name], limit=RESOLVE)
    if answer.code is None:
        raise OSError(0, f"the name server gives no answer within {RESOLVE:g} s")
    if not answer.ok:
        raise OSError(0, answer.reason.partition("] ")[2] or answer.reason)
    found: list[str] = json.loads(answer.out)
    return found


def remote(program: str, host: str, command: Sequence[str], limit: float = COMMAND) -> Answer:
    """Run a command on another node, without a question."""
    return call([program, *_QUIET, host, shlex.join(command)], limit=limit)


def onward(program: str, by: str, host: str, limit: float = COMMAND) -> Answer:
    """From one node to another, started from here; what happens on the second is nothing."""
    return remote(program, by, [program, *_QUIET, host, "true"], limit=limit)


def call(argv: Sequence[str], limit: float, env: dict[str, str] | None = None) -> Answer:
    """A program to its end, or to the limit."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
            env=env,
        )
    except subprocess.TimeoutExpired as late:
        return Answer(code=None, out=_text(late.stdout), err=_text(late.stderr))
    except OSError as error:
        return Answer(code=127, err=f"{argv[0]}: {error.strerror}")
    return Answer(code=done.returncode, out=done.stdout, err=done.stderr)


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def remedy(answer: Answer, to: SshTarget, *, by: str = "") -> str:
    """What to type when ssh does not get in; ``by`` is the machine to type it on, when it is not this one."""
    output = answer.err.lower()
    port = f" -p {to.port}" if to.port != 22 else ""
    there = f"{to.user}@{to.name}" if to.user else to.name
    start = f"on {by}: " if by else ""
    if "host identification has changed" in output:
        return f"{start}if {to.name} was set up anew: ssh-keygen -R {_known(to)}"
    if "host key verification failed" in output:
        return f"{start}ssh-keyscan -H{port} {to.name} >> ~/.ssh/known_hosts"
    if "permission denied" in output:
        return f"{start}ssh-copy-id{port} {there}  (first, where there is no key yet: ssh-keygen -t ed25519)"
    if "refused" in output or "timed out" in output or answer.code is None:
        return f"{start}see that sshd runs on {to.name} at port {to.port}, and that no firewall is between"
    if "resolve" in output:
        return f"{start}correct the name in the host file, or add it to /etc/hosts"
    return f"{start}ssh -v{port} {there} shows why"


def _known(to: SshTarget) -> str:
    return to.name if to.port == 22 else f"'[{to.name}]:{to.port}'"
