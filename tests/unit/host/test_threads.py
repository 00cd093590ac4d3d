"""Ending a thread in which the collector happens to finalize objects of the script."""

from __future__ import annotations

import threading
import time

from lockstep.host.threads import join


class Slow:
    """As torch's iterator over a loader with persistent workers: its finalizer waits for other processes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __del__(self) -> None:
        time.sleep(self.seconds)


def drop(left: list[Slow]) -> None:
    left.clear()


def test_finalizers_are_waited_for() -> None:
    thread = threading.Thread(target=drop, args=([Slow(0.5)],), daemon=True)
    thread.start()
    join(thread, 0.05)
    assert not thread.is_alive()


def test_other_work_is_not() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, daemon=True)
    thread.start()
    began = time.monotonic()
    join(thread, 0.05)
    assert thread.is_alive()
    assert time.monotonic() - began < 30
    done.set()
    thread.join()
