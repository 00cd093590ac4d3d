"""Where torch's dynamic rendezvous keeps its state: in the job's store, signed, under a key of its own."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from lockstep.job_store import store_server
from lockstep.job_store.signed_store import NOTHING, SignedStore, compare_secrets
from lockstep.launch.rendezvous_state import check_state


def open_c10d(parameters: RendezvousParameters, secret: str) -> tuple[RendezvousHandler, TCPStore]:
    """Called on: all nodes. Torch's rendezvous over a store that one of them hosts, and the store."""
    store, hosts = _open_store(parameters)
    if parameters.max_nodes > 1:
        compare_secrets(store, secret, hosts=hosts)
    backend = SignedBackend(SignedStore(store, secret, "lockstep"), parameters.run_id)
    return create_handler(store, backend, parameters), store


def _open_store(parameters: RendezvousParameters) -> tuple[TCPStore, bool]:
    """The store in which the nodes meet, and whether this one hosts it."""
    host, _, port = parameters.endpoint.rpartition(":")
    host, timeout = host.strip("[]"), timedelta(seconds=parameters.get_as_int("read_timeout", 60) or 60)
    told = parameters.get_as_bool("is_host")
    if told or (told is None and store_server.is_here(host)):
        try:
            return store_server.host_store(host, int(port), nodes=parameters.max_nodes, timeout=timeout), True
        except DistError:
            if told:
                raise
    return TCPStore(host, int(port), is_master=False, timeout=timeout, wait_for_workers=False), False


class SignedBackend(RendezvousBackend):
    """Torch's c10d backend, with a signed state."""

    def __init__(self, store: SignedStore, run_id: str) -> None:
        self._store = store
        self._key = store.full(f"rendezvous/{run_id}")

    @property
    def name(self) -> str:
        """As ``--rdzv_backend`` has it."""
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state, and the bytes that it stands for in the store."""
        found = self._swap(NOTHING, NOTHING)
        state = self._store.open(self._key, found, check_state)
        return None if state is None else (state, found)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state that ``token`` stands for; the state there is then, and whether it is this one."""
        mine = self._store.sign(self._key, state)
        found = self._swap(token if isinstance(token, bytes) else b"", mine)
        if found != mine and self._store.open(self._key, found, check_state) is None:
            found = self._swap(found, mine)  # a stranger's value: in its place
        if found == mine:
            return state, mine, True
        there = self._store.open(self._key, found, check_state)
        return None if there is None else (there, found, False)

    def _swap(self, expected: bytes, new: bytes) -> bytes:
        try:
            found: bytes = self._store.raw.compare_set(self._key, expected, new)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("The connection to the job's store has failed.") from error
        return found
