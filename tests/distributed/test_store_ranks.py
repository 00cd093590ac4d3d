"""The job's store: it does not grow, a stranger's values are not believed, and it listens where the job is."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Accelerator, current
from lockstep.comm.agree import agree
from lockstep.job_store import signed_store
from lockstep.logging import get_logger
from lockstep.testing import run_ranks
from tests.distributed.test_launch import environment
from tests.durations import Note
from tests.ranks import free_port, join

LIMIT = 120.0
UNDER_ATTACK = 300.0
"""Seconds for a job that may have to wait for several timeouts."""
NOBODY = 65534

# --- it does not grow ------------------------------------------------------------------------------------------------


def save_in_background(accelerator: Accelerator, folder: Path, number: int) -> None:
    accelerator.save_state(folder / str(number % 3), blocking=False, durable=False)
    accelerator.wait_for_checkpoint()


def save(accelerator: Accelerator, folder: Path, number: int) -> None:
    accelerator.save_state(folder / str(number % 3), durable=False)


def save_on_main(accelerator: Accelerator, folder: Path, number: int) -> None:
    if accelerator.is_main_process:
        accelerator.save_state(folder / str(number % 3), durable=False)
    accelerator.wait_for_everyone()


def trigger(accelerator: Accelerator, folder: Path, number: int) -> None:
    if accelerator.process_index == number % accelerator.num_processes:
        accelerator.set_trigger()
    assert accelerator.check_trigger()


def log(accelerator: Accelerator, folder: Path, number: int) -> None:
    get_logger("lockstep.tests").warning("line %d", number, main_process_only=False, in_order=True)


def audit(accelerator: Accelerator, folder: Path, number: int) -> None:
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2))
    for _ in loader:
        pass
    accelerator._state.loaders.clear()


def recover(accelerator: Accelerator, folder: Path, number: int) -> None:
    def step() -> None:
        if accelerator.process_index == number % accelerator.num_processes:
            raise ValueError(number)
        accelerator.wait_for_everyone()

    assert not agree(accelerator._session.group, step).ok


def meet_bad_numbers(accelerator: Accelerator, folder: Path, number: int) -> None:
    model, optimizer = accelerator._state.models[0], accelerator._state.optimizers[0]
    accelerator.backward(model(torch.full((2, 1), float("nan"))).sum())
    optimizer.step()
    optimizer.zero_grad()


KINDS: dict[str, tuple[Callable[[Accelerator, Path, int], None], int, int]] = {
    "saves in the background": (save_in_background, 3, 10),
    "saves": (save, 3, 10),
    "saves of the main process alone": (save_on_main, 80, 160),
    "triggers": (trigger, 3, 10),
    "log lines in order": (log, 3, 10),
    "audits": (audit, 3, 10),
    "recoveries": (recover, 3, 8),
    "bad numbers": (meet_bad_numbers, 10, 16),
}
"""What is done, after how often all keys that stay are there, and how often in all."""


def keys_after(kind: str, count: int, folder: Path) -> list[list[str]]:
    """What the store holds after a few rounds, and after many."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    store: Any = accelerator._session.group.store.raw
    found = []
    for number in range(count):
        do, warm, _ = KINDS[kind]
        do(accelerator, folder, number)
        if number in (warm - 1, count - 1):
            accelerator.wait_for_everyone()
            time.sleep(0.2)  # what is on its way
            found.append(sorted(store.list_keys()))
            accelerator.wait_for_everyone()
    return found


@pytest.mark.skipif(not hasattr(dist.TCPStore, "list_keys"), reason="this torch cannot list the keys of a store")
@pytest.mark.parametrize("count", [None, pytest.param(1000, marks=pytest.mark.soak_long)])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.soak) if KINDS[kind][2] > 100 else kind for kind in KINDS]
)
def test_the_store_does_not_grow(kind: str, count: int | None, tmp_path: Path, note: Note) -> None:
    count = count or KINDS[kind][2]
    skip = {"LOCKSTEP_NAN_POLICY": "skip"}
    before, after = run_ranks(keys_after, 2, kind, count, tmp_path, timeout=60.0 + 2 * count, env=skip)[0]
    note(f"{count} {kind}: {len(before)} keys after a few, {len(after)} in the end")
    assert len(after) <= len(before) + 2, (before, after)


def sessions(count: int) -> list[tuple[int, int]]:
    """Leave the job and join it again: the keys of the store, and those that this rank remembers."""
    found = []
    for _ in range(count):
        store = join().store
        found.append((store.raw.num_keys(), len(store._written)))
        current.reset()
    return found


@pytest.mark.skipif(not hasattr(dist.TCPStore, "list_keys"), reason="this torch cannot list the keys of a store")
@pytest.mark.parametrize("count", [8, pytest.param(1000, marks=pytest.mark.soak_long)])
def test_sessions_leave_nothing_behind(count: int) -> None:
    for counts in run_ranks(sessions, 2, count, timeout=60.0 + count):
        for kind in zip(*counts, strict=True):
            assert max(kind) <= min(kind) + 2, counts


# --- ranks that do not have the same secret ---------------------------------------------------------------------------


def join_with(secrets: list[str | None]) -> None:
    rank = int(os.environ["RANK"])
    own = secrets[rank]
    if own is None:
        os.environ.pop(signed_store.VARIABLE, None)
    else:
        os.environ[signed_store.VARIABLE] = own
    join(seconds=20)


@pytest.mark.parametrize(
    ("secrets", "words"),
    [
        (["a", None], ["rank 0 has LOCKSTEP_JOB_SECRET, rank 1 has no", "rank 1 has no LOCKSTEP_JOB_SECRET, rank 0"]),
        (["a", "b"], ["rank 1 has another LOCKSTEP_JOB_SECRET", "rank 0 has another LOCKSTEP_JOB_SECRET"]),
    ],
)
def test_ranks_with_different_secrets_say_so_at_once(secrets: list[str | None], words: list[str]) -> None:
    outcomes = run_ranks(join_with, 2, secrets, on_failure="collect")
    for outcome, text in zip(outcomes, words, strict=True):
        assert outcome.error_type == "TopologyError"
        assert text in outcome.error_text


def train_unsigned(folder: Path) -> float:
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(*_model())
    save_in_background(accelerator, folder, 0)
    return float(next(model.parameters()).sum())


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_job_without_a_secret_works(tmp_path: Path) -> None:
    one, other = run_ranks(train_unsigned, 2, tmp_path, env={signed_store.VARIABLE: None})
    assert one == other


# --- a launched job ---------------------------------------------------------------------------------------------------

LOOK = """
import json, os, sys
import psutil
from lockstep import Accelerator
accelerator = Accelerator()
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    launcher = psutil.Process().parent()
    processes = [launcher, *launcher.children(recursive=True)]
    json.dump({
        "listeners": [[c.laddr.ip for c in p.net_connections(kind="inet") if c.status == "LISTEN"] for p in processes],
        "commands": [p.cmdline() for p in processes],
        "secret": os.environ["LOCKSTEP_JOB_SECRET"],
    }, open(sys.argv[1], "w"))
accelerator.wait_for_everyone()
"""


def test_a_launched_job_listens_on_loopback_and_its_secret_is_in_no_file_or_command(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    words = [sys.executable, "-m", "lockstep", "launch", "--cpu", "--num_processes", "2"]
    seen = tmp_path / "seen.json"
    done = subprocess.run(
        [*words, "look.py", str(seen)],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(seen.read_text())
    seen.unlink()
    addresses = [address for each in found["listeners"] for address in each]
    assert len(addresses) >= 3  # the store, and a listener of gloo's for each rank
    assert set(addresses) == {"127.0.0.1"}
    secret = found["secret"]
    assert re.fullmatch("[0-9a-f]{64}", secret)
    assert secret not in json.dumps(found["commands"]) + done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 3
    assert [path for path in files if secret.encode() in path.read_bytes()] == []


JOB = """
import sys
from datetime import timedelta
import torch
from torch.utils.data import DataLoader, TensorDataset
from lockstep import Accelerator, InitProcessGroupKwargs
from lockstep.comm.agree import agree
accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=20))])
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
loader = DataLoader(TensorDataset(torch.arange(16.0).unsqueeze(1)), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
print("joined", flush=True)
total = 0.0
for epoch in range(2):
    for number, (batch,) in enumerate(loader):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        total += float(accelerator.gather_for_metrics(batch).sum())
    accelerator.save_state(f"state{epoch}", blocking=False)
    def step():
        if accelerator.process_index == epoch % 2:
            raise ValueError(epoch)
        accelerator.wait_for_everyone()
    agree(accelerator._session.group, step)
accelerator.wait_for_checkpoint()
print("sum", total, "weight", float(next(model.parameters())), flush=True)
"""


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def is_ours(key: str) -> bool:
    """Torch's own keys of a process group are bare numbers and devices below the prefix of its generation."""
    return key.startswith("lockstep/") and not re.search(r"/generation_\d+/\d+/", key)


def attack(port: int, owned: Path, log: Path) -> None:
    """As another user: overwrite every key of ours that there is, again and again."""
    written = log.open("w")
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    values = [pickle.dumps(Touch(owned)), b"", b"0", b'[{"house": 0}]', b"[" * 50_000, bytes(range(256)), b"together"]
    seen: dict[str, int] = {}
    store: Any = None
    until = time.monotonic() + UNDER_ATTACK
    while time.monotonic() < until:
        try:
            if store is None:
                store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            for key in store.list_keys():
                if is_ours(key) and seen.get(key, 0) < len(values):
                    store.set(key, values[seen.get(key, 0)])
                    seen[key] = seen.get(key, 0) + 1
            written.write(f"{sum(seen.values())}\n")
            written.flush()
        except RuntimeError:
            store = None  # the job is not there yet, or has ended
        time.sleep(0.05)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.skipif(not hasattr(dist.TCPStore, "list_keys"), reason="this torch cannot list the keys of a store")
def test_a_stranger_on_the_machine_is_not_believed(tmp_path: Path, note: Note) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    tmp_path.chmod(0o777)
    port, owned = free_port(), tmp_path / "owned"
    context = multiprocessing.get_context("fork")
    stranger = context.Process(target=attack, args=(port, owned, tmp_path / "written"), daemon=True)
    stranger.start()
    try:
        words = [sys.executable, "-m", "lockstep", "launch", "--cpu", "--num_processes", "2"]
        done = subprocess.run(
            [*words, "--main_process_port", str(port), "job.py"],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=UNDER_ATTACK,
            check=False,
        )
    finally:
        stranger.kill()
        stranger.join()
    overwritten = int((tmp_path / "written").read_text().split()[-1])
    note(f"{overwritten} values overwritten, exit code {done.returncode}")
    assert overwritten > 10, done.stderr
    assert not owned.exists()
    assert "holds a value that this job did not write" in done.stderr, done.stderr
    if done.returncode == 0:
        found = re.findall(r"sum (\S+) weight (\S+)", done.stdout)
        assert len(found) == 2, done.stdout
        assert {total for total, _ in found} == {"240.0"}
        assert len({weight for _, weight in found}) == 1
    else:
        assert re.search(r"(TopologyError|CheckpointError|PeerFailure)( at |: )", done.stderr), done.stderr
