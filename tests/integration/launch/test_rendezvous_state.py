"""The state of torch's rendezvous in the job's store: signed, and never unpickled unless it is that state."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from lockstep.job_store.signed_store import SignedStore
from lockstep.launch.rendezvous_backend import SignedBackend
from lockstep.launch.rendezvous_state import check_state

KEY = "lockstep/rendezvous/run"


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def raw() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def backend(raw: Any, secret: str) -> SignedBackend:
    return SignedBackend(SignedStore(raw, secret, "lockstep"), "run")


@pytest.mark.parametrize("secret", ["secret", ""])
def test_torch_meets_by_it_and_a_stranger_cannot_have_anything_run(raw: Any, secret: str, tmp_path: Path) -> None:
    parameters = RendezvousParameters("c10d", "127.0.0.1:0", "run", 1, 1, local_addr="127.0.0.1")
    handler = create_handler(raw, backend(raw, secret), parameters)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    true = raw.get(KEY)
    assert handler.num_nodes_waiting() == 0
    for planted in (pickle.dumps(Touch(tmp_path / "owned")), b"", b"junk", pickle.dumps([1]), true[:-1]):
        raw.set(KEY, planted)
        assert backend(raw, secret).get_state() is None
        assert handler.num_nodes_waiting() == 0
        raw.set(KEY, true)
    assert not (tmp_path / "owned").exists()
    assert handler.shutdown()


def test_a_state_is_replaced_by_who_knows_it_and_in_the_place_of_junk(raw: Any) -> None:
    parameters = RendezvousParameters("c10d", "127.0.0.1:0", "run", 1, 1, local_addr="127.0.0.1")
    first = backend(raw, "secret")
    handler = create_handler(raw, first, parameters)
    handler.next_rendezvous()
    handler.shutdown()
    found = first.get_state()
    assert found is not None
    state, token = found
    later = pickle.dumps(pickle.loads(state), protocol=2)
    assert first.set_state(later, b"an older one") == (state, token, False)
    assert first.set_state(state, token) == (state, token, True)
    raw.set(KEY, "junk")
    assert first.set_state(state, None) == (state, token, True)


def test_a_pickle_with_anything_else_in_it_is_refused(tmp_path: Path) -> None:
    for planted in (Touch(tmp_path / "owned"), [Touch(tmp_path / "owned")], print, 1):
        with pytest.raises(pickle.UnpicklingError):
            check_state(pickle.dumps(planted))
    assert not (tmp_path / "owned").exists()
