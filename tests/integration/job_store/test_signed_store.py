"""Values of the job's store that prove where they come from: what a stranger writes is as good as absent."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.errors import ConfigError, TopologyError
from lockstep.job_store import signed_store
from lockstep.job_store.signed_store import SignedStore

SHORT = timedelta(seconds=0.1)


@pytest.fixture
def raw() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signed_store, "_reports", itertools.count())


def junk(raw: Any, good: SignedStore) -> dict[str, bytes]:
    """What a stranger can put in the place of ``job/key``, who sees all that is in the store."""
    SignedStore(raw, "another secret", "job").set("other", "1")
    good.set("other", "1")
    tagged = raw.get("job/other")
    good.under("attempt_0").set("key", "1")
    return {
        "nothing": b"",
        "plain": b"1",
        "short": tagged[:31],
        "tag alone": tagged[:32],
        "value of another key": tagged,
        "value of another attempt": raw.get("job/attempt_0/key"),
        "changed value": tagged[:32] + b"2",
        "signed by another": SignedStore(raw, "another secret", "job").sign("job/key", "1"),
        "binary": bytes(range(256)) * 100,
    }


@pytest.mark.parametrize("make", [dist.HashStore, "file", "tcp"], ids=["hash", "file", "tcp"])
def test_what_is_written_is_read_on_every_kind_of_store(make: Any, raw: Any, tmp_path: Path) -> None:
    store = raw if make == "tcp" else dist.FileStore(str(tmp_path / "store"), 1) if make == "file" else make()
    for secret in ("secret", ""):
        one = SignedStore(store, secret, f"job{secret}")
        assert one.peek("a") is None
        one.set("a", b"\0\xff")
        one.under("b").set("c", "text")
        assert one.peek("a") == one.get("a") == b"\0\xff"
        assert one.gather(["b/c", "a"]) == [b"text", b"\0\xff"]
        assert one.peek_all(["a", "b/c"]) == [b"\0\xff", b"text"]
        assert one.peek_all(["a", "missing"]) is None
        assert one.claim("first", "1", int) == one.claim("first", "2", int) == 1
        assert one.delete("a")
        assert not one.delete("a") or make == "file"  # torch's store in a file says so always
        assert one.peek("a") is None
        one.delete_own("b/")
        assert one.peek("b/c") is None
        assert one.peek("first", int) == 1
        one.delete_own()
        assert one.peek("first") is None


def test_what_a_stranger_writes_is_as_good_as_absent(raw: Any, capfd: pytest.CaptureFixture[str]) -> None:
    good = SignedStore(raw, "secret", "job")
    for name, value in junk(raw, good).items():
        raw.set("job/key", value)
        assert good.peek("key") is None, name
        assert good.peek_all(["key", "other"]) is None, name
        with pytest.raises(TopologyError, match=r"Waited 0.1 s for the key 'job/key' of the job's store, which holds"):
            good.get("key", timeout=SHORT)
        raw.set("job/key", value or b"x")  # torch has an empty value claimed as if there was none
        with pytest.raises(TopologyError, match="'job/key' of the job's store holds a value that this job did not"):
            good.claim("key", "mine")
    said = capfd.readouterr().err
    assert said.count("lockstep: ") == 1
    assert "lockstep: the key 'job/key' of the job's store holds a value that this job did not write; it is" in said


def test_a_value_that_never_comes_is_torchs_own_error(raw: Any) -> None:
    with pytest.raises(dist.DistStoreError):
        SignedStore(raw, "secret").get("key", timeout=SHORT)


def test_who_waits_is_not_disturbed_by_who_peeks(raw: Any, capfd: pytest.CaptureFixture[str]) -> None:
    store, peeker = SignedStore(raw.clone(), "secret"), SignedStore(raw.clone(), "secret")
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            store.get("key", timeout=timedelta(seconds=1))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive():
        assert peeker.peek("key") is None
        time.sleep(0.05)
    assert isinstance(failures[0], dist.DistStoreError)
    assert "did not write" not in capfd.readouterr().err


def test_who_waits_gets_the_true_value_though_a_stranger_was_first(raw: Any) -> None:
    good, writer = SignedStore(raw.clone(), "secret"), SignedStore(raw.clone(), "secret")
    raw.set("a", "1")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(good.gather(["a", "b"], int, timedelta(seconds=20))))
    thread.start()
    writer.set("b", "2")
    time.sleep(0.3)
    assert thread.is_alive()
    writer.set("a", "3")
    thread.join(20)
    assert found == [3, 2]


@pytest.mark.parametrize(
    "decode", [int, signed_store.from_json, signed_store.from_text, partial(signed_store.from_fields, dict)]
)
def test_without_a_secret_what_cannot_be_decoded_is_ignored(
    raw: Any, decode: Callable[[bytes], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    store = SignedStore(raw, "")
    for value in (b"\xff\xfe", b"[" * 100_000 + b"\xff", b"{" * 10 + b"\xff", b"1" * 5_000_000 + b"x\xff"):
        raw.set("key", value)
        assert store.peek("key", decode) is None
    assert capfd.readouterr().err.count("Set LOCKSTEP_JOB_SECRET to the same random text for all ranks") == 1


@dataclass(frozen=True, kw_only=True)
class Fields:
    rank: int
    share: float = 0.0
    name: str | None = None
    done: bool = False
    more: tuple[int, ...] = ()


def test_fields_hold_what_they_are_declared_to() -> None:
    read = partial(signed_store.from_fields, Fields)
    assert read(b'{"rank": 1, "share": 1, "name": "x"}') == Fields(rank=1, share=1, name="x")
    for wrong in ('"1"', "null", "1.5", "true", "[1]", '{"a": 1}'):
        with pytest.raises(ValueError, match="rank="):
            read(f'{{"rank": {wrong}}}'.encode())
    for text in (b'{"rank": 1, "name": 2}', b'{"rank": 1, "done": 1}', b'{"rank": 1, "share": "x"}'):
        with pytest.raises(ValueError, match="="):
            read(text)


def test_only_its_own_keys_are_removed(raw: Any) -> None:
    mine, other = SignedStore(raw, "secret", "job"), SignedStore(raw, "secret", "job")
    for store, name in ((mine, "mine"), (other, "other")):
        for generation in (1, 2, 10):
            store.set(f"generation_{generation}/{name}", "x")
    mine.delete_own("generation_", but=["generation_2/"])
    left = [f"generation_{g}/{n}" for g in (1, 2, 10) for n in ("mine", "other")]
    left = [key for key in left if mine.peek(key) is not None]
    assert left == ["generation_1/other", "generation_2/mine", "generation_2/other", "generation_10/other"]


@pytest.mark.skipif(not hasattr(dist.TCPStore, "list_keys"), reason="this torch cannot list the keys of a store")
def test_keys_of_others_and_of_torch_are_removed_where_they_can_be_listed(raw: Any) -> None:
    mine, other = SignedStore(raw, "secret", "job"), SignedStore(raw, "secret", "job")
    for generation in (1, 2, 10):
        other.set(f"generation_{generation}/other", "x")
        raw.set(f"job/generation_{generation}/torch", "x")
    raw.set("generation_1/elsewhere", "x")
    mine.delete_all("generation_", but=["generation_2/"])
    kept = ["generation_1/elsewhere", "job/generation_2/other", "job/generation_2/torch"]
    assert sorted(raw.list_keys()) == kept


def test_a_clone_and_a_part_know_what_the_store_has_written(raw: Any) -> None:
    store = SignedStore(raw, "secret")
    store.clone().set("a/1", "x")
    store.under("a").set("2", "x")
    store.delete_own("a/")
    assert store.peek("a/1") is store.peek("a/2") is None


def serve(port: int, *, answers: int, until: threading.Event) -> None:
    """Listen in the place of a store that has ended: take so many connections, and close each at once."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        until.set()
        for _ in range(answers):
            listener.accept()[0].close()


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_a_clone_names_a_store_that_ends_at_any_moment_of_connecting(
    answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed closes its port some time after its connections."""
    monkeypatch.setattr(signed_store, "_ANSWERS", 1.0)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    client = SignedStore(dist.TCPStore("127.0.0.1", port, wait_for_workers=False), "secret", "job")
    del server
    listening = threading.Event()
    thread = threading.Thread(target=serve, args=(port,), kwargs={"answers": answers, "until": listening})
    thread.start()
    try:
        assert listening.wait(10)
        with pytest.raises(dist.DistNetworkError, match=rf"store at 127.0.0.1:{port} does not answer"):
            client.clone()
    finally:
        thread.join(10)


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        ("", "s", "this one has no LOCKSTEP_JOB_SECRET, the one that hosts the store has LOCKSTEP_JOB_SECRET"),
        ("s", "", "this one has LOCKSTEP_JOB_SECRET, the one that hosts the store has no LOCKSTEP_JOB_SECRET"),
        ("s", "t", "this one has another LOCKSTEP_JOB_SECRET"),
    ],
)
def test_different_secrets_are_named_without_showing_them(raw: Any, mine: str, theirs: str, words: str) -> None:
    signed_store.compare_secrets(raw, theirs, hosts=True)
    signed_store.compare_secrets(raw, theirs, hosts=False)
    with pytest.raises(ConfigError, match=words) as caught:
        signed_store.compare_secrets(raw, mine, hosts=False)
    assert signed_store.fingerprint("s") not in str(caught.value)
