"""A tracker of a user's own, for tests."""

from __future__ import annotations

from typing import Any

from lockstep.tracking import GeneralTracker, on_main_process


class Recorder(GeneralTracker):
    """Remembers what is called, and fails where it is told to."""

    requires_logging_directory = False

    def __init__(self, name: str = "recorder", *, fails: dict[str, Exception] | None = None) -> None:
        self.name = name
        self.calls: list[tuple[Any, ...]] = []
        self._fails = fails or {}
        super().__init__()

    @property
    def tracker(self) -> list[tuple[Any, ...]]:
        return self.calls

    @on_main_process
    def start(self) -> None:
        self._note("start")

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._note("config", values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._note("log", values, step, kwargs)

    @on_main_process
    def finish(self) -> None:
        self._note("finish")

    def _note(self, method: str, *arguments: Any) -> None:
        if method in self._fails:
            raise self._fails[method]
        self.calls.append((method, *arguments))
