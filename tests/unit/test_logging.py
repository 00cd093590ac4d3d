"""Loggers of one process: levels, who logs, the handler of last resort, and where a record says it came from."""

from __future__ import annotations

import inspect
import io
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockstep.errors import ConfigError
from lockstep.logging import MultiProcessAdapter, get_logger

RANK_1 = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def no_level_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCKSTEP_LOG_LEVEL", "ACCELERATE_LOG_LEVEL", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def name() -> str:
    """A logger that no other test has touched."""
    return f"test_{uuid.uuid4().hex}"


@pytest.fixture
def as_rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in RANK_1.items():
        monkeypatch.setenv(variable, value)


@contextmanager
def bare_root() -> Iterator[None]:
    """The root without handlers, as in a fresh script; pytest puts some there."""
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = before


def line_here() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


# ---------------------------------------------------------------- levels


@pytest.mark.parametrize(("given", "level"), [("DEBUG", 10), ("info", 20), (" Error ", 40), (logging.WARNING, 30)])
def test_the_argument_sets_the_level(name: str, given: str | int, level: int) -> None:
    root = logging.getLogger().level
    assert get_logger(name, log_level=given).logger.level == level
    assert logging.getLogger().level == root


@pytest.mark.parametrize("variable", ["LOCKSTEP_LOG_LEVEL", "ACCELERATE_LOG_LEVEL"])
def test_either_variable_sets_the_level(name: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "ERROR")
    assert get_logger(name).logger.level == logging.ERROR


def test_argument_before_our_variable_before_the_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("LOCKSTEP_LOG_LEVEL", "INFO")
    assert get_logger(name).logger.level == logging.INFO
    assert get_logger(name, log_level="DEBUG").logger.level == logging.DEBUG


def test_without_a_level_it_stays_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger(name).setLevel(17)
    assert get_logger(name).logger.level == 17
    monkeypatch.setenv("LOCKSTEP_LOG_LEVEL", "")
    assert get_logger(name).logger.level == 17


@pytest.mark.parametrize("wrong", ["LOUD", "", -1, True, 1.5])
def test_a_wrong_argument_is_named(name: str, wrong: object) -> None:
    with pytest.raises(ConfigError) as caught:
        get_logger(name, log_level=wrong)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"log_level={wrong!r} ")
    assert "DEBUG, INFO, WARNING, ERROR, CRITICAL" in str(caught.value)


@pytest.mark.parametrize("variable", ["LOCKSTEP_LOG_LEVEL", "ACCELERATE_LOG_LEVEL"])
def test_a_wrong_variable_is_named(name: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "chatty")
    with pytest.raises(ConfigError, match=rf"^{variable}='chatty' .*DEBUG, INFO, WARNING, ERROR, CRITICAL"):
        get_logger(name)


# ---------------------------------------------------------------- who logs


def test_it_is_an_adapter_of_the_logger_of_that_name(name: str) -> None:
    logger = get_logger(name)
    assert isinstance(logger, MultiProcessAdapter)
    assert isinstance(logger, logging.LoggerAdapter)
    assert logger.logger is logging.getLogger(name)


def test_another_rank_is_silent_unless_asked(name: str, as_rank_1: None, caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger(name, log_level="INFO")
    logger.info("default")
    logger.info("main only", main_process_only=True, in_order=True)
    logger.info("all", main_process_only=False)
    assert caplog.messages == ["all"]


def test_the_main_process_logs_what_is_for_it_and_what_is_for_all(name: str, caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger(name, log_level="INFO")
    logger.info("a %s", 1)
    logger.info("b", main_process_only=False)
    logger.info("c", main_process_only=False, in_order=True)
    logger.debug("below the level", main_process_only=False, in_order=True)
    assert caplog.messages == ["a 1", "b", "c"]


def test_in_order_before_the_job_is_joined_says_once_that_it_cannot(
    name: str, as_rank_1: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.logging._memory._said", set())
    logger = get_logger(name, log_level="INFO")
    logger.info("100%% of %d", 7, main_process_only=False, in_order=True)
    logger.info("again", main_process_only=False, in_order=True)
    assert caplog.messages[0].startswith("100% of 7 (in_order: no Accelerator yet")
    assert caplog.messages[1] == "again"


def test_a_contradictory_environment_does_not_stop_logging(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    get_logger(name).error("still said")
    assert caplog.messages == ["still said"]


def test_warning_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    logger, same, other = get_logger(name), get_logger(name), get_logger(f"{name}_other")
    for _ in range(3):
        logger.warning_once("careful %d", 1)
        same.warning_once("careful %d", 1)
    logger.warning_once("careful %d", 2)
    other.warning_once("careful %d", 1)
    assert caplog.messages == ["careful 1", "careful 2", "careful 1"]


def test_a_warning_below_the_level_does_not_count_as_said(name: str, caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger(name, log_level="ERROR")
    logger.warning_once("later")
    logger.setLevel("WARNING")
    logger.warning_once("later")
    assert caplog.messages == ["later"]


def test_the_extra_of_a_call_arrives(name: str, caplog: pytest.LogCaptureFixture) -> None:
    get_logger(name).error("x", extra={"step": 3})
    MultiProcessAdapter(logging.getLogger(name), {"run": "a", "step": 0}).error("y", extra={"step": 4})
    assert caplog.records[0].step == 3  # type: ignore[attr-defined]
    assert (caplog.records[1].run, caplog.records[1].step) == ("a", 4)  # type: ignore[attr-defined]


# ---------------------------------------------------------------- where from


def test_records_point_at_the_callers_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger(name, log_level="DEBUG")
    start = line_here()
    logger.debug("1")
    logger.log(logging.INFO, "2")
    logger.warning_once("3")
    logger.info("4", main_process_only=False, in_order=True)
    logger.exception("5", exc_info=False)
    assert [record.lineno - start for record in caplog.records] == [1, 2, 3, 4, 5]
    assert {record.pathname for record in caplog.records} == {__file__}


def test_stacklevel_counts_as_in_accelerate(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """tests/parity/test_models.py compares it."""
    logger = get_logger(name)

    def helper() -> None:
        logger.error("from the helper", stacklevel=2)
        logger.error("from the caller of the helper", stacklevel=3)
        logger.warning_once("from the caller of the helper, once", stacklevel=3)

    helper()
    assert caplog.records[1].lineno == line_here() - 1
    here = "test_stacklevel_counts_as_in_accelerate"
    assert [record.funcName for record in caplog.records] == ["helper", here, here]


# ---------------------------------------------------------------- the handler of last resort


def test_a_logger_nobody_handles_prints_on_stderr(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with bare_root():
        get_logger(name, log_level="DEBUG").debug("seen")
        assert logging.getLogger().handlers == []
    assert capsys.readouterr() == ("", f"DEBUG {name}: seen\n")


def test_the_rank_is_shown_where_there_are_several(
    name: str, as_rank_1: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with bare_root():
        get_logger(name).error("seen", main_process_only=False)
    assert capsys.readouterr().err == f"ERROR [rank 1] {name}: seen\n"


def test_no_handler_before_the_first_record(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with bare_root():
        logger = get_logger(name, log_level="INFO")
        logger.debug("below the level")
        assert logger.logger.handlers == []
        theirs = io.StringIO()
        logging.basicConfig(stream=theirs, format="theirs %(message)s")
        logger.info("first")
        assert logger.logger.handlers == []
    assert theirs.getvalue() == "theirs first\n"
    assert capsys.readouterr().err == ""


def test_ours_goes_when_another_comes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with bare_root():
        logger = get_logger(name, log_level="INFO")
        logger.info("first")
        theirs = io.StringIO()
        logging.basicConfig(stream=theirs, format="theirs %(message)s")
        logging.getLogger(name).info("second, not through us")
        logger.info("third")
        assert logger.logger.handlers == []
    assert capsys.readouterr().err == f"INFO {name}: first\n"
    assert theirs.getvalue() == "theirs second, not through us\ntheirs third\n"


def test_parent_and_child_print_once_each(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    child = f"{name}.child"
    with bare_root():
        get_logger(child, log_level="INFO").info("1")
        get_logger(name, log_level="INFO").info("2")
        get_logger(child).info("3")
        get_logger(name).info("4")
        get_logger(child).info("5")
    expected = [(child, 1), (name, 2), (child, 3), (name, 4), (child, 5)]
    assert capsys.readouterr().err.splitlines() == [f"INFO {who}: {what}" for who, what in expected]


def test_a_handler_on_the_logger_itself_counts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = io.StringIO()
    with bare_root():
        logging.getLogger(name).addHandler(logging.StreamHandler(theirs))
        get_logger(name).error("x")
    assert theirs.getvalue() == "x\n"
    assert capsys.readouterr().err == ""
