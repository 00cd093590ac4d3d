"""Whether a pickle is the state of torch's dynamic rendezvous, and nothing else.

Torch keeps that state in the job's store, pickled, and unpickles whatever it finds there. Nodes without a common secret
cannot sign it: with or without one, a pickle that names anything but the classes of the state is not given to torch.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from lockstep.torch_internals.elastic import RENDEZVOUS_CLASSES, is_rendezvous_state

_CLASSES = {
    **RENDEZVOUS_CLASSES,
    "datetime": ("datetime", "timedelta", "timezone"),
    "builtins": ("set",),
}


class _Checked(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not part of the state of a rendezvous")
        return super().find_class(module, name)


def check_state(data: bytes) -> bytes:
    """The pickle, if it is one of a rendezvous' state; raises otherwise."""
    state = _Checked(io.BytesIO(data)).load()
    if not is_rendezvous_state(state):
        raise pickle.UnpicklingError(f"{type(state).__name__} is not the state of a rendezvous")
    return data
