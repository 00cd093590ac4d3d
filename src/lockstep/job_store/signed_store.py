"""The job's store as our code uses it: each value carries an HMAC under the job's secret, and is checked when read.

Whoever reaches the port of torch's store can read, overwrite and delete what is in it. So a value counts only if its
tag fits its key and the secret, and if it can be decoded. Any other value is as good as absent: a reader that waits
keeps waiting for the true one, and the first of them is reported. In a job without a secret values are not tagged; what
cannot be decoded is ignored there too. The full key carries attempt, session and generation, so a value of an earlier
one does not count either. Nobody can be kept from deleting a key, or from putting back an older value of the same key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from lockstep.errors import ConfigError, TopologyError
from lockstep.host.network import knock

VARIABLE = "LOCKSTEP_JOB_SECRET"
"""Where a process finds the secret of its job: the same for all of them."""

_POLL = 0.05
_ANSWERS = 5.0
"""Seconds for a new connection to the store."""
NOTHING = b"\0lockstep: nothing here"
"""Asked for in exchange for itself: torch has no other call that reads a key and does not wait for it."""

_PLAIN = frozenset(("int", "float", "str", "bool", "None"))
_reports = itertools.count()


def read_secret(environ: Mapping[str, str]) -> str:
    """The job's secret; empty where nobody has made one."""
    return environ.get(VARIABLE, "").strip()


def fingerprint(secret: str) -> str:
    """What may be shown of a secret, to see whether two processes have the same."""
    return _tag(secret.encode(), "fingerprint", b"").hex()[:16] if secret else "none"


def describe_difference(own: str, other: str) -> str:
    """How the secrets of two processes differ, by their fingerprints: "has no X", for the one whose is ``own``."""
    if own == fingerprint(""):
        return f"has no {VARIABLE}"
    return f"has {VARIABLE}" if other == fingerprint("") else f"has another {VARIABLE}"


def compare_secrets(store: Any, secret: str, *, hosts: bool) -> None:
    """Called on: the launchers of all nodes. Raise where this one's secret is not that of the node that ``hosts``."""
    # Not signed: it is what tells whether signatures fit.
    key, mine = "lockstep/secret", fingerprint(secret)
    if hosts:
        store.set(key, mine)
    theirs = store.get(key).decode(errors="replace")
    if theirs != mine:
        raise ConfigError(
            f"The nodes have different secrets for the job's store: this one {describe_difference(mine, theirs)}, the "
            f"one that hosts the store {describe_difference(theirs, mine)}. Set {VARIABLE} to the same value on every "
            "node, or on none."
        )


def from_json(data: bytes) -> Any:
    """Decode what `set` was given as JSON."""
    return json.loads(data)


def from_fields(kind: Any, data: bytes) -> Any:
    """A dataclass out of JSON; raises unless each field that is a number, a text or a flag holds one."""
    made = kind(**json.loads(data))
    check_fields(made)
    return made


def check_fields(made: Any) -> None:
    """Raise unless each field of a dataclass that is a number, a text or a flag holds one."""
    for field in dataclasses.fields(made):
        allowed = str(field.type).split(" | ")
        value = getattr(made, field.name)
        name = "None" if value is None else type(value).__name__
        if name not in allowed and _PLAIN.issuperset(allowed) and not (name == "int" and "float" in allowed):
            raise ValueError(f"{field.name}={value!r}")


def from_text(data: bytes) -> str:
    """Decode what `set` was given as a text."""
    return data.decode()


def _tag(secret: bytes, key: str, value: bytes) -> bytes:
    name = key.encode()
    return hmac.digest(secret, len(name).to_bytes(8, "big") + name + value, hashlib.sha256)


class SignedStore:
    """A part of torch's store, below a prefix. One that several threads use is cloned: a connection has one lock."""

    def __init__(self, store: Any, secret: str, prefix: str = "", *, written: set[str] | None = None) -> None:
        self.raw = store
        """Torch's own store, without the prefix."""
        self._secret = secret
        self._prefix = prefix
        self._written: set[str] = set() if written is None else written
        """Full keys that this process has set and not deleted."""

    def under(self, prefix: str) -> SignedStore:
        """The part below a further prefix, on the same connection."""
        return SignedStore(self.raw, self._secret, self.full(prefix), written=self._written)

    def clone(self) -> SignedStore:
        """The same part on a connection of its own; torch's DistNetworkError where nobody serves the store any more."""
        return SignedStore(_connect_again(self.raw), self._secret, self._prefix, written=self._written)

    def full(self, key: str) -> str:
        """The key as torch's store has it."""
        return f"{self._prefix}/{key}" if self._prefix else key

    # --- writing -----------------------------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value. Sent and not answered: a store that has gone is not noticed here."""
        full = self.full(key)
        self._written.add(full)
        self.raw.set(full, self.sign(full, value))

    def claim(self, key: str, value: str | bytes, decode: Callable[[bytes], Any] = bytes) -> Any:
        """Write a value if nobody has; the value of whoever was first.

        Raises where something else is in its place: then nobody can know who was first.
        """
        full = self.full(key)
        mine = self.sign(full, value)
        there = self.raw.compare_set(full, b"", mine)
        if there == mine:
            self._written.add(full)
        found = self.open(full, there, decode)
        if found is None:
            raise TopologyError(
                f"The ranks cannot agree: the key {full!r} of the job's store holds a value that this job did not "
                f"write. {_remedy(bool(self._secret))}"
            )
        return found

    def delete(self, key: str) -> bool:
        """Remove a key; whether it was there, which is true for one of several that try."""
        full = self.full(key)
        self._written.discard(full)
        return bool(self.raw.delete_key(full))

    def delete_own(self, prefix: str = "", *, but: Sequence[str] = ()) -> None:
        """Remove what this process has written below a prefix, except below those of ``but``."""
        self._delete(list(self._written), prefix, but)  # in one step: other threads write meanwhile

    def delete_all(self, prefix: str, *, but: Sequence[str]) -> None:
        """Remove whatever anybody has written below a prefix, except below those of ``but``: torch's own keys too.

        Not every torch lists the keys of a store, and only of a TCPStore; elsewhere it is what this process wrote.
        """
        listed = hasattr(self.raw, "list_keys") and type(self.raw).__name__ == "TCPStore"
        self._delete(self.raw.list_keys() if listed else list(self._written), prefix, but)

    def _delete(self, keys: Sequence[str], prefix: str, but: Sequence[str]) -> None:
        below, kept = self.full(prefix), tuple(self.full(each) for each in but)
        for full in keys:
            if full.startswith(below) and not full.startswith(kept):
                self._written.discard(full)
                self.raw.delete_key(full)

    # --- reading -----------------------------------------------------------------------------------------------

    def peek(self, key: str, decode: Callable[[bytes], Any] = bytes) -> Any:
        """The value, if there is one; None otherwise. Does not wait."""
        full = self.full(key)
        return self.open(full, self.raw.compare_set(full, NOTHING, NOTHING), decode)

    def peek_all(self, keys: Sequence[str], decode: Callable[[bytes], Any] = bytes) -> list[Any] | None:
        """The values, if there is one for each of these keys; None otherwise. Does not wait."""
        # Torch's own check first: one message, however many keys.
        if not self.raw.check([self.full(key) for key in keys]):
            return None
        found = [self.peek(key, decode) for key in keys]
        return None if None in found else found

    def get(self, key: str, decode: Callable[[bytes], Any] = bytes, timeout: timedelta | None = None) -> Any:
        """The value, once there is one. After the timeout, torch's DistStoreError."""
        return self.gather([key], decode, timeout)[0]

    def gather(
        self, keys: Sequence[str], decode: Callable[[bytes], Any] = bytes, timeout: timedelta | None = None
    ) -> list[Any]:
        """The values of several keys, once all are there. After the timeout, torch's DistStoreError.

        Where somebody else's value is in the place of one by then, a TopologyError.
        """
        timeout = self.raw.timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout.total_seconds()
        found: dict[str, Any] = {}
        foreign = False
        while missing := [key for key in keys if found.get(key) is None]:
            left = deadline - time.monotonic()
            if foreign and left <= 0:
                raise TopologyError(
                    f"Waited {timeout.total_seconds():g} s for the key {self.full(missing[0])!r} of the job's store, "
                    f"which holds a value that this job did not write. {_remedy(bool(self._secret))}"
                )
            self.raw.wait([self.full(key) for key in missing], timedelta(seconds=max(left, 0.001)))
            found.update((key, self.peek(key, decode)) for key in missing)
            # Torch ends a wait for a key that another client peeks at, too: it is there only if a check says so.
            missing = [key for key in missing if found[key] is None]
            foreign = bool(missing) and self.raw.check([self.full(key) for key in missing])
            if foreign:  # look again until the true value is there
                time.sleep(_POLL)
        return [found[key] for key in keys]

    # --- proof -------------------------------------------------------------------------------------------------

    def sign(self, full: str, value: str | bytes) -> bytes:
        """The value as it stands in torch's store under this full key."""
        data = value.encode() if isinstance(value, str) else value
        return _tag(self._secret.encode(), full, data) + data if self._secret else data

    def open(self, full: str, data: bytes, decode: Callable[[bytes], Any] = bytes) -> Any:
        """What `sign` was given, decoded; None where there is nothing, or not a value of this job."""
        if data == NOTHING:
            return None
        if self._secret:
            tag, data = data[:32], data[32:]
            if not hmac.compare_digest(tag, _tag(self._secret.encode(), full, data)):
                _report(full, signed=True)
                return None
        try:
            return decode(data)
        except Exception:  # whatever a stranger's bytes make of a decoder
            _report(full, signed=bool(self._secret))
            return None


def _connect_again(store: Any) -> Any:
    """Another connection to torch's store. Torch's own clone would try for as long as the timeout of the store."""
    from torch.distributed import DistNetworkError  # loaded where there is a store: launchers do without torch

    server = store
    while hasattr(server, "underlying_store"):
        server = server.underlying_store
    host = getattr(server, "host", None)
    if host and (why := knock(host, server.port, _ANSWERS)):
        raise DistNetworkError(f"The job's store at {host}:{server.port} does not answer ({why}).")
    if type(store).__name__ != "TCPStore":
        return store.clone()
    # Its host may end right now: a process that is killed closes its port some time after its connections.
    limit, libuv = timedelta(seconds=_ANSWERS), store.libuvBackend
    try:
        made = type(store)(host, store.port, timeout=limit, wait_for_workers=False, use_libuv=libuv)
    except DistNetworkError as error:
        why = str(error).splitlines()[0]
        raise DistNetworkError(f"The job's store at {host}:{store.port} does not answer ({why}).") from None
    made.set_timeout(store.timeout)
    return made


def _report(full: str, *, signed: bool) -> None:
    if next(_reports) == 0:
        print(
            f"lockstep: the key {full[:200]!r} of the job's store holds a value that this job did not write; it is "
            f"ignored, and so are further ones. {_remedy(signed)}",
            file=sys.stderr,
            flush=True,
        )


def _remedy(signed: bool) -> str:
    proof = "" if signed else f"Set {VARIABLE} to the same random text for all ranks, so that values are signed. "
    return f"{proof}See that only the job's nodes can reach the store's port, and who else runs processes there."
