"""torch's elastic agent and the state of its rendezvous."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID, RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.utils import store as store_util


class ElasticAgent(LocalElasticAgent):
    """Torch's agent for the ranks of one host, with names for what a subclass adds to.

    Torch has made it to be derived from, but by underscore names: ``_start_workers``, ``_monitor_workers``,
    ``_shutdown``, ``_pcontext``, ``_remaining_restarts``, ``_store``, ``_worker_group``, and of what it has started
    ``handler._stdout`` and ``_stderr``; 2.9 to 2.13. Without them: an agent of our own.
    """

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ids = super()._start_workers(worker_group)
        self.after_start(worker_group)
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        if self._pcontext is not None:
            self.end_workers(death_sig)

    def after_start(self, worker_group: WorkerGroup) -> None:
        """The ranks have been started."""

    def monitor(self, worker_group: WorkerGroup) -> RunResult:
        """See how the ranks are; called again and again."""
        return super()._monitor_workers(worker_group)

    def end_workers(self, death_sig: signal.Signals) -> None:
        """End the ranks, at the end of the job or before a restart."""
        super()._shutdown(death_sig)

    @property
    def handlers(self) -> Mapping[int, Any]:
        """What torch keeps of each rank that it has started, by local rank; ``proc`` is its process."""
        context: Any = self._pcontext
        return context.subprocess_handlers if context is not None else {}

    def close_streams(self) -> None:
        """Let go of the ends that the ranks write to: torch would keep its own open, also of ranks that are gone."""
        for handler in self.handlers.values():
            for end in filter(None, (handler._stdout, handler._stderr)):
                end.close()

    def limit_close(self, seconds: float) -> None:
        """Give ranks that are ended so much time: some of torch's calls say 30 s, and 2.9 takes no other."""
        context: Any = self._pcontext
        close = context.close
        context.close = lambda death_sig=None, timeout=None: close(death_sig, seconds)

    @property
    def restarts_left(self) -> int:
        """How often the ranks may still be started again."""
        return self._remaining_restarts

    @restarts_left.setter
    def restarts_left(self, count: int) -> None:
        self._remaining_restarts = count

    @property
    def job_store(self) -> Any:
        """The store of the rendezvous."""
        return self._store

    @property
    def node_rank(self) -> int:
        """Which of the hosts this is, since the rendezvous."""
        return self._worker_group.group_rank or 0

    def excuse(self) -> None:
        """Have agents that wait for this one at the end of the job not do so: they would wait 5 minutes.

        Needs ``store_util._barrier_nonblocking`` and ``_TERMINAL_STATE_SYNC_ID``; 2.9 to 2.13. Without them: a host
        whose ranks ended well stays for 5 minutes after another host's have failed.
        """
        store_util._barrier_nonblocking(self._store, self._worker_group.group_world_size or 1, _TERMINAL_STATE_SYNC_ID)


RENDEZVOUS_CLASSES = {"torch.distributed.elastic.rendezvous.dynamic_rendezvous": ("_RendezvousState", "_NodeDesc")}
"""The classes that the pickled state of torch's dynamic rendezvous is made of.

Needs these names; 2.9 to 2.13. Without them: nodes of a job could not join it, as its state would be refused.
"""


def is_rendezvous_state(value: Any) -> bool:
    """Whether an object is the whole state of a rendezvous; see ``RENDEZVOUS_CLASSES``."""
    return type(value).__name__ == "_RendezvousState"
