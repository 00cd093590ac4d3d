"""A run whose files, names and texts were made to act on the terminal of whoever looks at it, or to keep a reader."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.blackbox.box import Box
from lockstep.blackbox.peers import box_path
from lockstep.cli import bundle, main, stacks
from lockstep.doctor.net import findings, html
from lockstep.launch import failure_report
from lockstep.optim import run_summary_file
from lockstep.optim.run_summary import RunSummary
from lockstep.terminal.failure_box import plain
from lockstep.traces.html import write_page
from lockstep.traces.read_trace import open_run
from tests.browser import BROWSER, WHY_NOT, Page
from tests.unit.doctor.net.reports import healthy
from tests.unit.launch.test_failure_report import ended, words
from tests.unit.numerics.making import call, changed, small_run, stat, write

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r"
MARKUP = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
_ACTS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with a black box of a rank whose every text acts on a terminal."""
    made = tmp_path / f"run{ESCAPE}"
    (made / "boxes").mkdir(parents=True)
    (made / "config.json").write_text("{}")
    box = Box.create(
        box_path(made / "boxes", 0), rank=0, world_size=2, local_rank=0, node=0, host=f"host{ESCAPE}", pid=2**22 - 1
    )
    box.phase(f"phase{ESCAPE}")
    box.close("failed", f"ValueError: {ESCAPE}")
    return made


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    main(list(argv))
    said = capsys.readouterr()
    text = said.out + said.err
    assert text.strip()
    assert not _ACTS.search(text), text
    return text


@pytest.mark.parametrize("command", [["watch", "--once"], ["watch", "--json"], ["stacks"], ["stacks", "--json"]])
def test_looking_at_a_run(run: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    text = shown(capsys, *command, str(run))
    assert "\\x1b]0;owned" in text or "\\u001b]0;owned" in text


def test_a_bundle_and_its_list(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (run / "logs").mkdir()
    (run / "logs" / f"rank_0{ESCAPE}.out").write_text("x")
    assert "\\x1b]0;owned" in shown(capsys, "bundle", "--list", str(run))


def test_an_error_that_names_the_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "\\x1b]0;owned" in shown(capsys, "watch", "--once", f"nowhere{ESCAPE}")


def test_a_failure_report(tmp_path: Path) -> None:
    one = words(
        0, host=ESCAPE, message=ESCAPE, traceback=f"T {ESCAPE}\n", line=ESCAPE, cause=ESCAPE, fix=ESCAPE, kind=ESCAPE
    )
    errors = {0: f"\x1b[31mError: red\x1b[0m {ESCAPE.strip()}\n".encode()}
    for said in ([one], []):
        found = failure_report.render_report([ended(0, 1), ended(1, 1)], said, logs=tmp_path, last_errors=errors)
        text = plain(found.box)
        assert not _ACTS.search(text)
        assert not _ACTS.search(failure_report.one_line([ended(0, 1)], said))
    assert "Error: red \\x1b]0;owned" in text


def test_checkpoints_and_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / f"[red]odd{ESCAPE}"
    folder.mkdir()
    (folder / "lockstep_manifest.json").write_text("{")
    for action in ("ls", "verify"):
        assert "[red]odd\\x1b]0;owned" in shown(capsys, "checkpoint", action, str(folder))
    one, other = tmp_path / f"one{ESCAPE}", tmp_path / "two"
    frames = [call(0, f"layer{ESCAPE}", stat(f"output{ESCAPE}"), kind=ESCAPE)]
    write(one, frames)
    write(other, changed(frames, 0, 0, abs_max=9.0))
    assert "\\x1b]0;owned" in shown(capsys, "numerics", "diff", str(one), str(other))


def test_logs_of_nccl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / f"log{ESCAPE}"
    log.write_text(f"node1:10:10 [0] NCCL WARN Call to connect failed : Connection refused {ESCAPE}\n")
    assert "\\x1b]0;owned" in shown(capsys, "doctor", "nccl", str(log))


# ---------------------------------------------------------------- files that are none


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    here = os.open(".", os.O_RDONLY)
    os.chdir(path.parent)  # a socket's name must be short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.fchdir(here)
        os.close(here)


def _private(path: Path) -> None:
    path.symlink_to(path.parents[[*path.parents].index(next(p for p in path.parents if p.name == "run"))].parent / "id")


PLACES = [
    *("config.json", "env.json", "pid", "diagnosis.json", "diagnosis.txt", "words/rank_0.json", "boxes/rank_1.box"),
    *("boxes/rank_0.side.json", "stacks/rank_0.txt", "logs/rank_0.out", "logs/attempt_1/rank_0.err", "nccl/a.log"),
]


@pytest.fixture
def limit() -> Iterator[None]:
    """A command that waits for ever fails the test, and does not keep the others."""

    def late(number: int, frame: object) -> None:
        raise AssertionError("no end within 30 s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("kind", [_pipe, _zero, _socket, _private, Path.mkdir])
def test_no_command_waits_for_what_is_no_file(
    tmp_path: Path, kind: Callable[[Path], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, output = tmp_path / "run", tmp_path / "a.zip"
    (tmp_path / "id").write_text("SECRET OF SOMEBODY ELSE")
    for place in PLACES:
        (run / place).parent.mkdir(parents=True, exist_ok=True)
        kind(run / place)
    own = {"world_size": 2, "local_rank": 0, "node": 0, "host": os.uname().nodename, "pid": os.getpid()}
    Box.create(box_path(run / "boxes", 0), rank=0, **own).close("failed", "ValueError")  # type: ignore[arg-type]
    monkeypatch.setattr(bundle, "_env", lambda: ("", {}))
    monkeypatch.setattr(bundle, "_findings", lambda: ("", []))
    for command in (["watch", "--once"], ["stacks"], ["bundle", "--list"], ["bundle", "--output", str(output)]):
        assert main([*command, str(run)]) in (0, 1)
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        assert "SECRET" not in said.out
    with zipfile.ZipFile(output) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert "SECRET" not in "".join(texts.values())
    if kind is not Path.mkdir:
        gone = {item["name"] for item in json.loads(texts["contents.json"])["left_out"]}
        assert gone >= {place for place in PLACES if place != "pid"}


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("folder", ["logs", "words", "boxes", "stacks", "nccl", "logs/attempt_1"])
def test_no_folder_is_a_way_out_of_the_run(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, outside, output = tmp_path / "run", tmp_path / "outside", tmp_path / "a.zip"
    outside.mkdir()
    asked = {"rank": 0, "local_rank": 0, "host": "h", "pid": 1, "attempt": "", "time": 1.0, "kind": "E", "line": ""}
    asked |= {"message": "SECRET", "traceback": "SECRET", "follows": False, "cause_rank": None}
    for name, text in {"rank_0.json": json.dumps(asked), "rank_0.out": "SECRET", "a.log": " NCCL WARN SECRET"}.items():
        (outside / name).write_text(text)
    Box.create(box_path(outside, 0), rank=0, world_size=1, local_rank=0, node=0, host="SECRET", pid=os.getpid()).close(
        "failed", "SECRET"
    )
    (run / folder).parent.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (run / folder).symlink_to(outside)
    monkeypatch.setattr(bundle, "_env", lambda: ("", {}))
    monkeypatch.setattr(bundle, "_findings", lambda: ("", []))
    assert main(["bundle", "--output", str(output), str(run)]) == 0
    with zipfile.ZipFile(output) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert "SECRET" not in "".join(texts.values())
    assert {"name": folder, "why": "a link"} in json.loads(texts["contents.json"])["left_out"]


@pytest.mark.usefixtures("limit")
def test_a_stack_that_names_a_pipe_or_a_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    for name in (str(tmp_path / "pipe.py"), "/dev/zero", "/proc/kmsg"):
        told = stacks.RankStack(rank=0, pid=1, stack=(stacks.StackFrame(file=name, line=3, function="f"),))
        assert f'File "{name}", line 3, in f' in stacks.show(told)


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, " " * (2 << 20), None])
def test_json_that_is_deep_or_large_or_no_file(
    tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("lockstep_run.json", "model.safetensors.index.json", "rank_0.jsonl")
    for name in names:
        if text is None:
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).write_text(text)
    record = RunSummary(
        per_process=8, processes=2, accumulation=1, learning_rate=0.1, seed=1, precision="no", lockstep="1", torch="2",
        time="",
    )  # fmt: skip
    said = run_summary_file.write_summary(str(tmp_path), record)
    assert "lockstep_run.json cannot be read" in said[0]
    assert run_summary_file.write_summary(str(tmp_path), record) == []  # it was replaced by one that can
    for command in (["estimate", str(tmp_path)], ["numerics", "diff", str(tmp_path), "--ranks", "0", "1"]):
        assert main(command) == 2
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(BROWSER is None, reason=WHY_NOT)
def test_pages_in_a_browser(tmp_path: Path) -> None:
    odd = f"{MARKUP}\x1b[2J"
    network = healthy([odd, "node2"])
    (tmp_path / "net.html").write_text(html.render(network, findings.findings(network)), encoding="utf-8")
    write(tmp_path / "trace", [*small_run(1, 1), call(1, odd, stat(odd), kind=odd)])
    traces = open_run(tmp_path / "trace")
    write_page(traces.traces, tmp_path / "numerics.html", title=odd, notes=lambda: [odd])
    with Page() as browser:
        for name in ("net.html", "numerics.html"):
            browser.open((tmp_path / name).as_uri())
            browser.wait("document.readyState === 'complete' && document.querySelector('h1')")
            if name == "numerics.html":
                browser.wait("document.body.dataset.ready")
            text = browser.evaluate("document.body.innerText")
            assert "<script>document.title='owned'</script><img src=x onerror=" in text
            assert "\\x1b[2J" in text
            assert "\x1b" not in text
            assert browser.evaluate("document.title") != "owned"
            assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert not browser.errors
