"""Last words: what a rank leaves when an exception ends it, and which rank's failure came first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import env
from lockstep.errors import DataError, PeerFailure, TopologyError
from lockstep.rundir import crash_report, files
from lockstep.rundir.crash_report import CrashReport, first_failure, read_all, write
from lockstep.rundir.layout import RunDirectory

LIMIT = 60


def told(error: BaseException | Callable[[], object], rank: int = 0) -> CrashReport:
    """The last words of a rank that the error ends."""
    try:
        if isinstance(error, BaseException):
            raise error
        error()
    except BaseException as caught:
        return crash_report.from_exception(
            type(caught), caught, caught.__traceback__, rank=rank, local_rank=0, attempt="0"
        )
    raise AssertionError("nothing was raised")


def some(rank: int = 0, **changes: object) -> CrashReport:
    plain = CrashReport(
        rank=rank,
        local_rank=rank,
        host="here",
        pid=1,
        attempt="0",
        time=1.0,
        kind="ValueError",
        message="no",
        traceback="Traceback\n",
        line="train.py:1 in main",
        follows=False,
        cause_rank=None,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


# ---------------------------------------------------------------- what they say


def test_they_say_who_what_and_where() -> None:
    before = time.time()

    def training() -> None:
        json.loads("{")

    try:
        training()
    except ValueError as error:
        said = crash_report.from_exception(type(error), error, error.__traceback__, rank=3, local_rank=1, attempt="a2")
    assert (said.rank, said.local_rank, said.attempt, said.pid) == (3, 1, "a2", os.getpid())
    assert said.host == os.uname().nodename
    assert before <= said.time <= time.time()
    assert said.kind == "JSONDecodeError"
    assert said.message.startswith("Expecting property name")
    line = training.__code__.co_firstlineno + 1
    file = os.path.relpath(__file__) if __file__.startswith(os.getcwd() + os.sep) else __file__
    assert said.line == f"{file}:{line} in training", "the user's line, not json's"
    assert "decoder.py" in said.traceback
    assert said.traceback.endswith(f"JSONDecodeError: {said.message}\n")
    assert not said.follows
    assert said.cause_rank is None


def test_the_process_knows_its_rank() -> None:
    with env.patched({"RANK": "5", "LOCAL_RANK": "2", "LOCKSTEP_ATTEMPT": "x"}):
        said = crash_report.of_this_process(ValueError, ValueError("no"), None)
    assert (said.rank, said.local_rank, said.attempt, said.line) == (5, 2, "x", "")
    with env.patched({"RANK": None, "LOCAL_RANK": "many", "LOCKSTEP_ATTEMPT": None}):
        said = crash_report.of_this_process(ValueError, None, None)
    assert (said.rank, said.local_rank, said.attempt, said.message) == (0, 0, "", "")


def test_what_an_error_came_from_is_told_too() -> None:
    def fail() -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    text = told(fail).traceback
    assert text.index("KeyError: 'first'") < text.index("direct cause") < text.index("ValueError: second")


def run_as_module(tmp_path: Path, script: str) -> CrashReport:
    """The last words of a process whose script is run by the standard library, as ranks' scripts are."""
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "broken.py").write_text("x = 1\nif :\n")
    code = (
        "import runpy, sys\n"
        "from pathlib import Path\n"
        "from lockstep.rundir import crash_report\n"
        "def hook(*error):\n"
        "    assert crash_report.write(Path('run'), crash_report.of_this_process(*error))\n"
        "sys.excepthook = hook\n"
        "sys.path[0] = ''\n"
        "runpy.run_module('train', run_name='__main__', alter_sys=True)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=LIMIT, check=False, capture_output=True)
    (said,) = read_all(tmp_path / "run")
    return said


def test_frames_that_start_the_script_are_left_out(tmp_path: Path) -> None:
    said = run_as_module(tmp_path, "def main():\n    raise OSError('no')\n\nmain()\n")
    assert "runpy" not in said.traceback
    assert "train.py" in said.traceback
    assert said.line == "train.py:2 in main"


def test_frames_of_imports_are_left_out(tmp_path: Path) -> None:
    said = run_as_module(tmp_path, "def main():\n    import missing\n\nimport main_part\n")
    assert said.kind == "ModuleNotFoundError"
    assert "importlib" not in said.traceback
    assert said.line == "train.py:4 in <module>"


@pytest.mark.parametrize("script", ["x = 1\nif :\n", "import broken\n"])
def test_a_script_that_does_not_parse(tmp_path: Path, script: str) -> None:
    said = run_as_module(tmp_path, script)
    name = "broken.py" if "import" in script else "train.py"
    assert said.kind == "SyntaxError"
    assert said.line == f"{name}:2"
    assert f'{name}", line 2' in said.traceback
    assert "runpy" not in said.traceback


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (SystemExit(3), "SystemExit", "3"),
        (SystemExit("no data"), "SystemExit", "no data"),
        (SystemExit(), "SystemExit", "0"),
        (KeyboardInterrupt(), "KeyboardInterrupt", ""),
    ],
)
def test_leaving_is_told_as_what_it_is(error: BaseException, kind: str, message: str) -> None:
    said = told(error)
    assert (said.kind, said.message, said.follows) == (kind, message, False)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class Strange(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [Unprintable, Strange])
def test_an_error_without_a_text(kind: type[Exception], tmp_path: Path) -> None:
    said = told(kind())
    assert said.kind == kind.__name__
    assert "cannot be made" in said.message
    assert kind.__name__ in said.traceback
    assert write(tmp_path, said)


def test_long_texts_keep_both_ends() -> None:
    said = told(ValueError("begin" + "x" * 10_000_000 + "end"))
    assert len(said.message) <= crash_report.MESSAGE_LIMIT
    assert len(said.traceback) <= crash_report.TRACEBACK_LIMIT
    assert said.message.startswith("begin")
    assert said.message.endswith("end")
    assert said.traceback.startswith("Traceback")
    assert said.traceback.endswith("end\n")
    assert "left out" in said.message


def test_endless_recursion_is_told() -> None:
    def deeper() -> None:
        deeper()

    said = told(deeper)
    assert said.kind == "RecursionError"
    assert said.line.endswith("in deeper")
    assert len(said.traceback) < crash_report.TRACEBACK_LIMIT


def test_a_circle_of_causes_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert not told(one).follows


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no groups")
def test_a_group_shows_its_members() -> None:
    text = told(ExceptionGroup("several", [ValueError("a"), KeyError("b")])).traceback  # noqa: F821
    assert "ValueError: a" in text
    assert "KeyError: 'b'" in text


# ---------------------------------------------------------------- who only follows


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def leave_after(error: Exception) -> Callable[[], None]:
    def script() -> None:
        try:
            raise error
        except Exception:
            sys.exit(1)

    return script


@pytest.mark.parametrize(
    ("error", "follows", "cause"),
    [
        (PeerFailure("rank 2 failed", rank=2), True, 2),
        (PeerFailure("the line broke"), True, None),
        (PeerFailure("it was me", rank=1), False, None),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:4"), True, None),
        (RuntimeError("Connection reset by peer"), True, None),
        (RuntimeError("NCCL communicator was aborted"), True, None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, None),
        (ConnectionResetError("Connection reset by peer"), False, None),
        (ValueError("gloo is not what I wanted"), False, None),
        (DataError("Connection closed while reading sample 5"), False, None),
        (caused(TopologyError("no store"), RuntimeError("Connection was likely closed")), True, None),
        (caused(ValueError("wrapped"), PeerFailure("rank 0 failed", rank=0)), True, 0),
        (leave_after(PeerFailure("rank 0 failed", rank=0)), True, 0),
        (leave_after(ValueError("mine")), False, None),
    ],
)
def test_a_consequence_is_told_from_a_cause(
    error: BaseException | Callable[[], object], follows: bool, cause: int | None
) -> None:
    said = told(error, rank=1)
    assert (said.follows, said.cause_rank) == (follows, cause)


# ---------------------------------------------------------------- writing and reading


@given(st.text(), st.text(st.characters()))
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, message: str, odd: str) -> None:
    folder = tmp_path_factory.mktemp("run")
    said = told(ValueError(message + odd + "\ud800"))
    assert write(folder, said)
    assert read_all(folder) == [said]
    said.message.encode()


def test_one_file_a_rank_for_its_owner_only(tmp_path: Path) -> None:
    run = RunDirectory(path=tmp_path / "run")
    for rank in (10, 2):
        assert write(run.path, some(rank))
    assert write(run.path, some(2, attempt="1"))
    assert read_all(run.path) == [some(2, attempt="1"), some(10)]
    assert read_all(run.path, attempt="1") == [some(2, attempt="1")]
    assert {path.name for path in run.words(0).parent.iterdir()} == {"rank_2.json", "rank_10.json"}
    assert oct(run.words(2).stat().st_mode & 0o777) == "0o600"


def test_a_disk_that_fails_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    assert not write(tmp_path / "file", some())
    assert not write(Path("/proc/nowhere"), some())
    assert not write(tmp_path, some(message=object()))
    # A disk that is full says so when the data is written.
    monkeypatch.setattr(files, "private", lambda path, flags: os.open("/dev/full", os.O_WRONLY))
    assert not write(tmp_path, some())
    monkeypatch.undo()
    (tmp_path / "words" / "rank_0.json").mkdir()
    assert not write(tmp_path, some())
    assert [path.name for path in (tmp_path / "words").iterdir()] == ["rank_0.json"]


def test_what_is_not_last_words_is_passed_over(tmp_path: Path) -> None:
    assert read_all(tmp_path) == []
    assert read_all(tmp_path / "nowhere") == []
    assert write(tmp_path, some(0))
    folder = tmp_path / "words"
    whole = (folder / "rank_0.json").read_text()
    data = json.loads(whole)
    spoilt: list[str | dict[str, object]] = [
        whole[:50],
        "",
        "[]",
        "[" * 100_000,
        "\udcff",
        whole,  # of another rank than the file's name says
        {"time": float("nan")},
        {"time": "now"},
        {"pid": True},
        {"follows": 1},
        {"cause_rank": 1.5},
        {"kind": None},
    ]
    for rank, what in enumerate(spoilt, 1):
        text = what if isinstance(what, str) else json.dumps({**data, "rank": rank, **what})
        (folder / f"rank_{rank}.json").write_text(text, errors="surrogateescape")
    del data["kind"]
    (folder / "rank_80.json").write_text(json.dumps({**data, "rank": 80}))
    (folder / "rank_0.json.bak").write_text(whole)
    (folder / ".rank_7.json.123").write_text(whole)
    os.mkfifo(folder / "rank_90.json")
    (folder / "rank_91.json").mkdir()
    (folder / "rank_92.json").symlink_to("rank_0.json")
    (folder / "rank_93.json").write_text(json.dumps({**data, "rank": 93, "kind": "ValueError", "new": 1}))
    assert read_all(tmp_path) == [some(0), some(93, local_rank=0)]


def test_a_reader_never_sees_half_of_them(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.unit.rundir.test_crash_report import some\n"
        "from lockstep.rundir.crash_report import write\n"
        "for number in range(300):\n"
        "    assert write(Path(sys.argv[1]), some(message='x' * (number * 30)))\n"
    )
    assert write(tmp_path, some())
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    try:
        while child.poll() is None:
            assert len(read_all(tmp_path)) == 1
        assert child.returncode == 0
    finally:
        child.kill()
        child.wait(LIMIT)


# ---------------------------------------------------------------- which failure came first


@pytest.mark.parametrize(
    ("said", "exits", "stopped", "first"),
    [
        pytest.param([], {}, (), None, id="nothing"),
        pytest.param([], {0: 0, 1: 0}, (), None, id="all well"),
        pytest.param([some(0, time=2), some(1, time=1)], {0: 1, 1: 1}, (), 1, id="by time"),
        pytest.param([some(0, time=1, follows=True), some(1, time=2)], {0: 1, 1: 1}, (), 1, id="a cause, though later"),
        pytest.param([some(0, follows=True)], {0: 1, 1: -9}, (), 1, id="killed, told by nobody"),
        pytest.param([some(0, follows=True, cause_rank=2)], {0: 1, 1: -9, 2: -11}, (), 2, id="killed, and named"),
        pytest.param([some(0, follows=True)], {0: 1, 1: -15}, (), 0, id="stopped by the launcher"),
        pytest.param([some(0, follows=True, cause_rank=1)], {0: 1, 1: 7}, (), 1, id="left by os._exit, named"),
        pytest.param([some(0, follows=True)], {0: 1, 1: 7}, (), 1, id="left by os._exit"),
        pytest.param([some(0, follows=True, cause_rank=1)], {0: 1, 1: 0}, (), 0, id="named, but it ended well"),
        pytest.param([some(0, follows=True, cause_rank=5)], {0: 1}, (), 0, id="named, on another machine"),
        pytest.param(
            [some(0, time=1, follows=True, cause_rank=1), some(1, time=2, follows=True)],
            {0: 1, 1: 1},
            (),
            1,
            id="followers only, one named",
        ),
        pytest.param([some(0)], {0: 1, 1: -9}, [1], 0, id="killed by the launcher after its grace"),
        pytest.param([some(0, kind="SystemExit")], {0: 143, 1: -9}, [0], 1, id="left when told to"),
        pytest.param([some(0, kind="SystemExit")], {0: 3, 1: -9}, [1], 0, id="left by itself"),
        pytest.param([], {0: -15, 1: -15}, [0], 1, id="ended from outside"),
        pytest.param([], {0: -15, 1: 0}, [0], 0, id="only stopped"),
        pytest.param([some(0), some(1)], {0: 0, 1: 1}, (), 1, id="words of a rank that ended well"),
        pytest.param(
            [
                some(0, time=5),
                some(1, time=1, host="there"),
                some(2, follows=True, cause_rank=0),
            ],
            {0: 1, 1: 1, 2: 1},
            (),
            0,
            id="clocks that do not compare",
        ),
    ],
)
def test_the_first_failure(
    said: list[CrashReport], exits: dict[int, int], stopped: tuple[int, ...], first: int | None
) -> None:
    assert first_failure(said, exits, stopped) == first


RANKS = st.integers(0, 5)
CODES = st.sampled_from([0, 1, 2, 143, -signal.SIGTERM, -signal.SIGKILL, -signal.SIGSEGV])
SAID = st.lists(
    st.builds(
        some,
        RANKS,
        time=st.floats(0, 10),
        follows=st.booleans(),
        cause_rank=st.none() | RANKS,
        kind=st.sampled_from(["ValueError", "SystemExit"]),
        host=st.sampled_from(["here", "there"]),
    ),
    unique_by=lambda one: one.rank,
)


@given(SAID, st.dictionaries(RANKS, CODES), st.sets(RANKS))
def test_a_cause_is_never_passed_over_for_a_consequence(
    said: list[CrashReport], exits: dict[int, int], stopped: set[int]
) -> None:
    first = first_failure(said, exits, stopped)
    by_rank = {one.rank: one for one in said if exits.get(one.rank) != 0}
    failed = {*by_rank, *(rank for rank, code in exits.items() if code != 0)}
    assert (first is None) == (not failed)
    if first is None:
        return
    assert first in failed
    if any(not one.follows for one in by_rank.values()):
        assert first not in by_rank or not by_rank[first].follows
    assert first_failure(said[::-1], dict(reversed(exits.items())), stopped) == first
