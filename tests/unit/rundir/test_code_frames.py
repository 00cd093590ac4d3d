"""The user's lines on the way to an error."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from lockstep.rundir.code_frames import CodeFrame, frames_of


def raised(path: Path, text: str | bytes) -> BaseException:
    """What running this script raises."""
    path.write_bytes(textwrap.dedent(text).encode() if isinstance(text, str) else text)
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), {"__name__": "__main__"})
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def frames(error: BaseException) -> tuple[tuple[CodeFrame, ...], str]:
    found, where = frames_of(error, error.__traceback__)
    return tuple(frame for frame in found if "test_code_frames" not in frame.file), where


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


def test_lines_and_what_is_around_them(script: Path) -> None:
    found, where = frames(raised(script, "def step():\n    x = 1\n    raise ValueError(x)\n\nstep()\n"))
    assert [(frame.site, frame.function) for frame in found] == [("train.py:5", "<module>"), ("train.py:3", "step")]
    assert found[1].first == 1
    assert found[1].source == ("def step():", "    x = 1", "    raise ValueError(x)", "", "step()")
    assert where == ""


def test_frames_of_libraries_are_left_out(script: Path) -> None:
    found, where = frames(raised(script, "import json\njson.loads('{')\n"))
    assert [frame.site for frame in found] == ["train.py:2"]
    assert where.startswith("json/decoder.py:")
    assert where.endswith(" in raw_decode")


def test_a_script_that_does_not_parse(script: Path) -> None:
    found, _ = frames(raised(script, "x = 1\ndef broken(:\n    pass\n"))
    assert found[-1].site == "train.py:2"
    assert "def broken(:" in found[-1].source


def test_a_deep_recursion_is_one_frame(script: Path) -> None:
    found, _ = frames(raised(script, "def down(n):\n    return down(n + 1)\n\ndown(0)\n"))
    assert [frame.site for frame in found][:2] == ["train.py:4", "train.py:2"]
    assert found[1].repeats > 100
    assert len(found) <= 4


def test_mutual_recursion_is_bounded(script: Path) -> None:
    limit = sys.getrecursionlimit()
    found, _ = frames(raised(script, "def a():\n    b()\n\ndef b():\n    a()\n\na()\n"))
    assert len(found) <= 16 < limit
    assert found[0].site == "train.py:7"


def test_a_file_that_has_vanished(script: Path) -> None:
    found, _ = frames(raised(script, "import os\nos.remove(__import__('sys')._getframe().f_code.co_filename)\n1 / 0\n"))
    assert (found[0].site, found[0].source) == ("train.py:3", ())


def test_a_file_in_another_encoding(script: Path) -> None:
    found, _ = frames(raised(script, b"# -*- coding: latin-1 -*-\nname = 'caf\xe9'\n1 / 0\n"))
    assert found[0].source[1] == "name = 'caf\u00e9'"
    other = script.with_name("other.py")
    error = raised(other, "1 / 0\n")
    other.write_bytes(b"caf\xe9\n")  # it is no text in its own encoding any more
    found, _ = frames(error)
    assert found[0].source == ("caf\ufffd",)


def test_very_long_lines_are_cut(script: Path) -> None:
    found, _ = frames(raised(script, f"x = '{'y' * 100_000}'\n1 / 0\n"))
    assert max(map(len, found[0].source)) <= 300


def test_as_json_and_back() -> None:
    frame = CodeFrame(file="a.py", line=3, function="f", first=2, source=("x", "y"), repeats=4)
    fields = json.loads(json.dumps({**frame.__dict__, "source": list(frame.source)}))
    assert CodeFrame.from_dict(fields) == frame


@pytest.mark.parametrize(
    "fields", [None, [], {}, {"file": "a"}, {"file": 1, "line": 2, "function": "f", "source": []}, {"source": 3}]
)
def test_what_is_not_a_frame(fields: object) -> None:
    with pytest.raises(ValueError, match="not a frame"):
        CodeFrame.from_dict(fields)
