"""A bar for the search for a batch size: which attempt it is, what fits, what does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class SearchBar:
    """Shown on the main process, where its stderr is a terminal; lines are logged in any case."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._bar: Any = None

    def trying(self, size: int, *, done: int, left: int, fits: int | None, failing: int) -> None:
        """After ``done`` attempts this size is tried; ``left`` attempts, this one included, are the most to come."""
        if not self._shown:
            return
        known = f"{failing} does not fit" if fits is None else f"{fits} fits, {failing} does not"
        text = f"batch size: attempt {done + 1} of at most {done + left}, trying {size} ({known})"
        if self._bar is None:
            from tqdm.auto import tqdm  # loaded where it is used: most batches fit

            look = "{desc} |{bar:20}| {elapsed}"
            self._bar = tqdm(desc=text, total=done + left, initial=done, bar_format=look, leave=False, disable=None)
            return
        self._bar.total, self._bar.n = done + left, done
        self._bar.set_description_str(text)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A region that writes lines: the bar makes room for them."""
        if self._bar is None or self._bar.disable:
            yield
            return
        with self._bar.external_write_mode():
            yield

    def close(self) -> None:
        """Take it away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
