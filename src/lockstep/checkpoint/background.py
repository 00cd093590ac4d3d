"""A save that goes on while training does: at most one, and what goes wrong in it is told at the next call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

BAR_AFTER = 2.0
"""Seconds that a write must take before it shows a bar."""


class Background:
    """One thread at a time, whose error is kept until somebody asks."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether one is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], Any]) -> None:
        """Run this in a thread. The one before must have been waited for."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        # No daemon: a script that ends leaves a complete checkpoint.
        self._thread = threading.Thread(target=run, name="lockstep-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until it has ended; raises what it failed with."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


class Bar:
    """Bytes written, shown once it takes long, on the main process."""

    def __init__(self, what: str, total: int, shown: bool) -> None:
        self._bar: Any = None
        if shown:
            from tqdm.auto import tqdm  # loaded where it is used: most writes are short

            self._bar = tqdm(
                total=total, desc=what, unit="B", unit_scale=True, delay=BAR_AFTER, leave=False, disable=None
            )

    def moved(self, count: int) -> None:
        """So many bytes more."""
        if self._bar is not None:
            self._bar.update(count)

    def close(self) -> None:
        """Take it away."""
        if self._bar is not None:
            self._bar.close()
