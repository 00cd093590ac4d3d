"""torch's elastic agent, as it is derived from; tests/distributed/test_launchers.py runs real jobs by it."""

from __future__ import annotations

import inspect
import pickle

from torch.distributed.elastic.agent.server import api, local_elastic_agent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.utils import store

from lockstep.launch.rendezvous_state import check_state
from lockstep.torch_internals import elastic


def test_torchs_agent_calls_what_is_derived() -> None:
    source = inspect.getsource(api)
    for name in ("_start_workers", "_monitor_workers", "_shutdown"):
        assert f"self.{name}(" in source
        assert hasattr(LocalElasticAgent, name)
    own = source + inspect.getsource(local_elastic_agent)
    for name in ("_pcontext", "_remaining_restarts", "_store", "_worker_group"):
        assert f"self.{name}" in own


def test_what_torch_has_started_shows_its_streams() -> None:
    source = inspect.getsource(subprocess_handler)
    assert "self._stdout" in source
    assert "self._stderr" in source


def test_the_barrier_at_the_end_of_a_job() -> None:
    assert list(inspect.signature(store._barrier_nonblocking).parameters)[:3] == ["store", "world_size", "key_prefix"]
    assert elastic._TERMINAL_STATE_SYNC_ID in inspect.getsource(api)


def test_the_state_of_a_rendezvous_is_made_of_the_listed_classes() -> None:
    state = dynamic_rendezvous._RendezvousState()
    state.participants[dynamic_rendezvous._NodeDesc("node", 1, 2)] = 0
    assert elastic.is_rendezvous_state(state)
    assert not elastic.is_rendezvous_state({})
    data = pickle.dumps(state)
    assert check_state(data) == data
