"""A memory fence: what this thread has stored is seen by other processes before it reads anything after the fence.

Python has none by name. Ranks that write what they are about to do and then read what others have written need it, or
two that do so at once may miss each other.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from threading import Lock

_LOCKED = ("x86_64", "amd64", "i386", "i686")
_SYSCALL = {
    "aarch64": 283,
    "arm64": 283,
    "riscv64": 283,
    "loongarch64": 283,
    "ppc64le": 365,
    "s390x": 356,
    "x86_64": 324,
}
_SEQUENTIAL = 5
"""``memory_order_seq_cst``."""
_QUERY, _GLOBAL_EXPEDITED = 0, 1 << 1


def make() -> Callable[[], object] | None:
    """A fence for this machine; None where there is none."""
    machine = platform.machine().lower()
    return _by_lock() if machine in _LOCKED else by_libatomic() or by_membarrier(machine)


def _by_lock() -> Callable[[], object]:
    """Of a lock that nobody else has: on x86 every instruction that takes one is a full fence, on ARM it is not."""
    lock = Lock()
    acquire, release = lock.acquire, lock.release

    def fence() -> None:
        acquire()
        release()

    return fence


def by_libatomic() -> Callable[[], object] | None:
    """The C language's own, out of the compiler's library where that is installed; 0.4 us."""
    try:
        fence = ctypes.PyDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError):
        return None
    fence.restype, fence.argtypes = None, [ctypes.c_int]
    return lambda: fence(_SEQUENTIAL)


def by_membarrier(machine: str) -> Callable[[], object] | None:
    """The kernel's (Linux 4.16); 6 us.

    The command asked for is a fence in the thread that calls it, and in processes that have registered, which is none.
    """
    number = _SYSCALL.get(machine)
    if platform.system() != "Linux" or number is None:
        return None
    syscall = ctypes.PyDLL(None).syscall  # without letting go of the GIL: it does not wait
    syscall.restype = ctypes.c_long
    syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_uint, ctypes.c_int]
    supported = syscall(number, _QUERY, 0, 0)
    if supported < 0 or not supported & _GLOBAL_EXPEDITED or syscall(number, _GLOBAL_EXPEDITED, 0, 0) != 0:
        return None  # an old kernel, or a container that forbids it
    return lambda: syscall(number, _GLOBAL_EXPEDITED, 0, 0)
