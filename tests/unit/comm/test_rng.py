"""Seeds and generator states of one process."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from lockstep import current
from lockstep.comm import rng
from lockstep.config.choices import RNGType
from lockstep.errors import ConfigError
from lockstep.process_group.group import Group
from lockstep.topology.topology import Topology

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def generators_are_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    cudnn = torch.backends.cudnn
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    flags = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])
    torch.use_deterministic_algorithms(flags[0])
    cudnn.deterministic, cudnn.benchmark = flags[1:]


def be(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    topology = Topology(
        rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, device=CPU, backend="gloo"
    )
    monkeypatch.setattr(current, "peek", lambda: current.Session(topology=topology, group=Group(topology)))


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


# ---------------------------------------------------------------- set_seed


def test_one_seed_for_all_generators() -> None:
    rng.set_seed(3)
    first = draw()
    assert draw() != first
    rng.set_seed(np.int64(3))  # type: ignore[arg-type]
    assert draw() == first
    rng.set_seed(4)
    assert all(new != old for new, old in zip(draw(), first, strict=True))


def test_device_specific_adds_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    rng.set_seed(12)
    twelve = draw()
    be(monkeypatch, 2, 4)
    rng.set_seed(10, device_specific=True)
    assert draw() == twelve
    rng.set_seed(12)
    assert draw() == twelve


def test_before_joining_the_rank_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    rng.set_seed(11)
    eleven = draw()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    rng.set_seed(10, device_specific=True)
    assert draw() == eleven
    assert current.peek() is None


def test_deterministic() -> None:
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = False, True
    rng.set_seed(0)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic
    rng.set_seed(0, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize("wrong", [None, "1", 1.0, True, -1, 2**32])
def test_a_wrong_seed_is_named_and_changes_nothing(wrong: object) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ConfigError) as caught:
        rng.set_seed(wrong)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"seed={wrong!r} is ")
    assert f"0 to {2**32 - 1}" in str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_largest_seed_works() -> None:
    rng.set_seed(2**32 - 1, device_specific=True)


def test_a_seed_too_large_for_the_last_rank_fails_on_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, 0, 4)
    rng.set_seed(2**32 - 4, device_specific=True)
    with pytest.raises(ConfigError, match=r"seed=4294967293 .*0 to 4294967292 \(the rank is added, and there are 4\)"):
        rng.set_seed(2**32 - 3, device_specific=True)


# ---------------------------------------------------------------- synchronize


def test_alone_nothing_changes_and_no_session_starts() -> None:
    before = torch.get_rng_state()
    rng.synchronize_rng_state("torch")
    rng.synchronize_rng_states([RNGType.TORCH, "generator"], torch.Generator())
    rng.synchronize_rng_states([])
    assert torch.equal(torch.get_rng_state(), before)
    assert current.peek() is None


@pytest.mark.parametrize("wrong", ["numpy", None, 3])
def test_an_unknown_type_is_named(wrong: object) -> None:
    with pytest.raises(ConfigError, match=rf"rng_types={wrong!r} is not known\. Allowed: 'torch'"):
        rng.synchronize_rng_state(wrong)  # type: ignore[arg-type]


def test_the_type_generator_needs_a_generator() -> None:
    with pytest.raises(ConfigError, match=r"generator=None is no torch\.Generator"):
        rng.synchronize_rng_states(["torch", "generator"])


def test_all_problems_at_once_and_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    # A group that has not joined: a collective on it would raise something else.
    be(monkeypatch, 0, 2)
    with pytest.raises(ConfigError) as caught:
        rng.synchronize_rng_states(["xpu", "generator"])
    assert "1. rng_types has 'xpu', but this process computes on 'cpu'" in str(caught.value)
    assert "2. rng_types has 'generator'" in str(caught.value)


def test_a_devices_own_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        state = torch.arange(8, dtype=torch.uint8)

        @classmethod
        def get_rng_state(cls, device: torch.device) -> torch.Tensor:
            assert device == torch.device("xpu", 1)
            return cls.state.clone()

        @classmethod
        def set_rng_state(cls, state: torch.Tensor, device: torch.device) -> None:
            assert device == torch.device("xpu", 1)
            cls.state = state

    def broadcast(group: Group, tree: dict[str, torch.Tensor]) -> None:
        sent.append({name: leaf.clone() for name, leaf in tree.items()})
        for leaf in tree.values():
            leaf.zero_()

    sent: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr(torch, "xpu", Module)
    monkeypatch.setattr(rng.tensors, "broadcast", broadcast)
    be(monkeypatch, 1, 2)
    session = current.peek()
    assert session is not None
    rng.synchronize(session.group, torch.device("xpu", 1), ["xpu"])
    assert [{name: leaf.tolist() for name, leaf in tree.items()} for tree in sent] == [{"xpu": list(range(8))}]
    assert Module.state.tolist() == [0] * 8
