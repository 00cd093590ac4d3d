"""Which trackers there are, and what `log_with` refuses."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep import Accelerator, ConfigError, ProjectConfiguration
from lockstep.config.choices import LoggerType
from lockstep.host.packages import is_installed
from lockstep.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
    registry,
)
from tests.unit.tracking.recording import Recorder

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def known() -> Iterator[None]:
    before = dict(LOGGER_TYPE_TO_CLASS)
    yield
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "is_installed", lambda *names: False)


def test_every_type_has_a_class_of_that_name() -> None:
    assert set(LOGGER_TYPE_TO_CLASS) == {kind.value for kind in LoggerType} - {"all"}
    for name, kind in LOGGER_TYPE_TO_CLASS.items():
        assert kind.name == name
        assert issubclass(kind, GeneralTracker)


@pytest.mark.parametrize(
    "asked", ["jsonl", "JSONL", LoggerType.JSONL, ["jsonl", LoggerType.JSONL], ("jsonl",), ["jsonl", "jsonl"]]
)
def test_the_ways_to_ask_for_one(asked: Any) -> None:
    assert filter_trackers(asked, "logs") == [LoggerType.JSONL]


def test_nothing_is_asked_for() -> None:
    assert filter_trackers(None) == filter_trackers([]) == []
    assert Accelerator().log_with == Accelerator().trackers == []


def test_objects_stay_what_they_are() -> None:
    own = Recorder()
    assert filter_trackers([own, "jsonl"], "logs") == [own, LoggerType.JSONL]


BAD: list[tuple[Any, str]] = [
    ("tensorbord", r"log_with='tensorbord' is not a tracker\. Allowed: 'all', 'aim', .*'tensorboard', .*'wandb'"),
    (3, r"log_with=3 is not a tracker"),
    ({"wandb"}, r"log_with=\{'wandb'\} is not a tracker"),
    (Recorder, r"Give an object of it, not the class"),
    ("jsonl", r"log_with='jsonl' writes to a folder, and there is none\. Pass project_dir="),
    ([Recorder(), Recorder()], r"log_with has 2 trackers named 'recorder'.*Give each a name of its own"),
    ([Recorder("wandb"), "wandb"], r"log_with has 2 trackers named 'wandb'"),
]


@pytest.mark.parametrize(("asked", "words"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_what_cannot_be(asked: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Accelerator(log_with=asked)


def test_all_that_is_wrong_is_one_error() -> None:
    with pytest.raises(ConfigError, match="5 settings cannot be used") as caught:
        Accelerator(log_with=["nope", "jsonl", Recorder(), Recorder(), 7], mixed_precision="int3")
    for words in ("mixed_precision='int3'", "log_with='nope'", "log_with=7", "'jsonl' writes to", "2 trackers named"):
        assert words in str(caught.value)


def test_a_package_that_is_missing(nothing_installed: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 settings") as caught:
        Accelerator(log_with=["wandb", "tensorboard", "jsonl"], project_dir=tmp_path)
    assert "log_with='wandb': the package is not installed. Install it (pip install wandb)" in str(caught.value)
    assert "'jsonl':" not in str(caught.value)


def test_all_means_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "is_installed", lambda *names: names[0] in ("tensorboardX", "mlflow"))
    assert get_available_trackers() == [LoggerType.TENSORBOARD, LoggerType.MLFLOW]
    own = Recorder("mlflow")
    assert filter_trackers(["all", own], "logs") == [own, LoggerType.TENSORBOARD]


def test_all_where_nothing_is_installed_says_so(nothing_installed: None, caplog: pytest.LogCaptureFixture) -> None:
    assert Accelerator(log_with="all").log_with == []
    assert "log_with='all': no tracker's package is installed, so nothing is logged" in caplog.text


def test_a_folder_of_that_name_is_not_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("some_tracker")
    (tmp_path / "some_tracker" / "__init__.py").touch()
    sys.path_importer_cache.clear()
    assert is_installed("some_tracker")
    assert not is_installed("no_such_package.part")


def test_the_logging_folder_will_do(tmp_path: Path) -> None:
    config = ProjectConfiguration(logging_dir=str(tmp_path))
    assert Accelerator(log_with="jsonl", project_config=config).log_with == [LoggerType.JSONL]


def test_a_class_that_lacks_something() -> None:
    class Unnamed(GeneralTracker):
        requires_logging_directory = False

    with pytest.raises(NotImplementedError, match=r"Unnamed does not define name, tracker\."):
        Unnamed()

    class Careless(Recorder):
        requires_logging_directory = False

        def __init__(self) -> None:
            """Calls no other."""

    with pytest.raises(ConfigError, match=r"Careless does not define name\."):
        Accelerator(log_with=Careless())


class Registered(GeneralTracker):
    name = "registered"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str, *, colour: str = "red") -> None:
        super().__init__()
        self.made = (run_name, logging_dir, colour)

    @property
    def tracker(self) -> tuple[str, ...]:
        return self.made


def test_a_registered_class(known: None, tmp_path: Path) -> None:
    register_tracker_class(Registered)
    accelerator = Accelerator(log_with="registered", project_dir=tmp_path)
    accelerator.init_trackers("run", init_kwargs={"registered": {"colour": "blue"}, "unknown": {"x": 1}})
    assert accelerator.get_tracker("registered", unwrap=True) == ("run", str(tmp_path), "blue")
    with pytest.raises(ConfigError, match="'registered' writes to a folder"):
        filter_trackers("registered")


def test_what_cannot_be_registered(known: None) -> None:
    class Empty(Registered):
        name = ""

    class Undecided(GeneralTracker):
        name = "undecided"

    for wrong, words in ((Recorder(), "not a subclass"), (Empty, "name must be"), (Undecided, "requires_logging")):
        with pytest.raises(ConfigError, match=words):
            register_tracker_class(wrong)  # type: ignore[arg-type]
    register_tracker_class(Registered)
    with pytest.warns(UserWarning, match=re.escape("'registered' was Registered and is now Registered")):
        register_tracker_class(Registered)
