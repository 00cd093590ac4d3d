"""The run directory: where it is made, what it falls back to, which runs are kept, how one is found again."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.rundir import layout
from lockstep.rundir.layout import RunDirectory, find, is_running, make, sign_out

LIMIT = 60
NOON = time.mktime((2025, 3, 14, 12, 0, 0, 0, 0, -1))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project, which is the working directory; what falls back stays in the test's own folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return folder


@pytest.fixture
def runs(project: Path) -> Path:
    return project / ".lockstep" / "runs"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A living process that is not this one."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate(timeout=LIMIT)


def ended(runs: Path, name: str) -> Path:
    """A run that nobody uses any more."""
    path = runs / name
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def names(runs: Path) -> set[str]:
    return {entry.name for entry in runs.iterdir()}


def signed(pid: int) -> str:
    return f"began {layout._host()} {pid} {layout._started(pid)}\n"


# ---------------------------------------------------------------- making


def test_a_run_has_a_name_of_its_own_under_the_working_directory(runs: Path) -> None:
    run = make(None, None, now=NOON)
    assert run.note is None
    assert run.path.is_absolute()
    assert run.path.parent == runs
    assert run.path.name.startswith("20250314-120000-")
    assert layout._NAME.fullmatch(run.path.name)
    assert make(None, None, now=NOON).path != run.path
    assert not [name for name in names(runs) if name.startswith(".")]


def test_a_project_directory_is_made_when_it_is_not_there(project: Path) -> None:
    run = make(None, "out/first")
    assert run.path.parent == project / "out" / "first" / ".lockstep" / "runs"


def test_an_empty_variable_counts_as_unset(runs: Path) -> None:
    assert make("", "").path.parent == runs


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o277])
def test_only_its_owner_can_read_it_whatever_the_umask(project: Path, umask: int) -> None:
    (project / ".lockstep" / "runs").mkdir(parents=True)
    before = os.umask(umask)
    try:
        made = [make(None, None), make("elsewhere", None), make("/proc/nowhere", None)]
    finally:
        os.umask(before)
    assert [oct(run.path.stat().st_mode & 0o777) for run in made] == ["0o700"] * 3


def test_git_does_not_see_runs(project: Path) -> None:
    make(None, None)
    ignore = project / ".lockstep" / ".gitignore"
    assert ignore.read_text() == "*\n"
    ignore.write_text("mine\n")
    make(None, None)
    assert ignore.read_text() == "mine\n"


def test_latest_points_at_the_newest_and_moves_with_the_project(project: Path, runs: Path) -> None:
    make(None, None)
    second = make(None, None)
    assert os.readlink(runs / "latest") == second.path.name
    project.rename(project.parent / "moved")
    assert (project.parent / "moved" / ".lockstep" / "runs" / "latest").resolve().name == second.path.name


def test_a_link_that_cannot_be_set_is_told(runs: Path) -> None:
    (runs / "latest").mkdir(parents=True)
    run = make(None, None)
    assert run.path.parent == runs
    assert run.note is not None
    assert str(runs / "latest") in run.note
    assert run.path.name in run.note
    assert names(runs) == {"latest", run.path.name}


# ---------------------------------------------------------------- a place that was asked for


def test_the_folder_asked_for_is_used_as_it_is(project: Path, runs: Path) -> None:
    for name in ("20200101-000000-00000a", "20200101-000000-00000b"):
        ended(runs, name)
    there = project / "mine"
    there.mkdir(mode=0o755)
    there.chmod(0o755)
    (there / "notes").write_text("kept")
    run = make("mine", "ignored", keep=1)
    assert run == RunDirectory(path=there, note=None)
    assert oct(there.stat().st_mode & 0o777) == "0o755"
    assert (there / "notes").read_text() == "kept"
    assert len(names(runs)) == 2
    assert not (project / "ignored").exists()


def test_the_folder_asked_for_is_made_with_its_parents(project: Path) -> None:
    assert make("a/b/c", None).path == project / "a" / "b" / "c"
    assert not (project / ".lockstep").exists()


def test_several_machines_may_share_the_folder(project: Path) -> None:
    first = make(None, None)
    second = make(str(first.path), None)
    assert second.path == first.path
    assert second.note is None
    assert first.pid.read_text().count("began") == 2


def test_latest_follows_a_folder_asked_for_among_the_runs(runs: Path) -> None:
    make(None, None)
    run = make(".lockstep/runs/mine", None)
    assert os.readlink(runs / "latest") == "mine"
    assert find(None).path == run.path == find("mine").path


# ---------------------------------------------------------------- places that cannot be written


def check_fallback(run: RunDirectory, tried: str, reason: int) -> None:
    assert run.path.parent == Path(tempfile.gettempdir())
    assert run.note is not None
    for part in (tried, os.strerror(reason), str(run.path), "LOCKSTEP_RUN_DIR"):
        assert part in run.note
    assert is_running(run.path)


def test_a_file_in_the_way(project: Path) -> None:
    (project / ".lockstep").write_text("")
    check_fallback(make(None, None), str(project / ".lockstep" / "runs"), errno.ENOTDIR)
    (project / "taken").write_text("")
    check_fallback(make("taken", None), "taken", errno.EEXIST)
    check_fallback(make("taken/below", None), "taken/below", errno.EEXIST)


def test_a_dangling_link_in_the_way(project: Path) -> None:
    (project / "link").symlink_to("nowhere")
    check_fallback(make("link", None), "link", errno.EEXIST)
    assert not (project / "nowhere").exists()


def test_a_place_nobody_may_write(project: Path) -> None:
    # /proc refuses root as well, and an existing folder of it shows that being there is not being writable.
    check_fallback(make("/proc/nowhere", None), "/proc/nowhere", errno.ENOENT)
    check_fallback(make(None, "/proc/nowhere"), "/proc/nowhere", errno.ENOENT)
    check_fallback(make("/proc/self/task", None), "/proc/self/task", errno.ENOENT)


def test_a_full_disk_leaves_no_half_made_run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    errors = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    def no_room(file: int, data: bytes) -> int:
        if errors:
            raise errors.pop()
        return write(file, data)

    monkeypatch.setattr(layout.os, "write", no_room)
    check_fallback(make(None, None), str(runs), errno.ENOSPC)
    assert names(runs) == set()


def test_a_name_no_file_can_have(project: Path) -> None:
    run = make("a\0b", None)
    assert run.path.parent == Path(tempfile.gettempdir())


def test_a_working_directory_that_is_gone(project: Path) -> None:
    project.rmdir()
    try:
        check_fallback(make(None, None), ".lockstep/runs", errno.ENOENT)
        with pytest.raises(ConfigError, match=os.strerror(errno.ENOENT)):
            find(None)
    finally:
        project.mkdir()


def test_nowhere_at_all_is_an_error_that_says_both(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    with pytest.raises(ConfigError, match=r"/proc/nothing .*temporary folder.*LOCKSTEP_RUN_DIR"):
        make("/proc/nothing", None)


# ---------------------------------------------------------------- which runs are kept


def test_the_last_runs_are_kept(runs: Path) -> None:
    old = [ended(runs, f"20200101-0000{second:02}-00000a").name for second in range(30)]
    made = make(None, None)
    assert names(runs) == {*old[-19:], made.path.name, "latest"}
    assert make(None, None, keep=1).path.name in names(runs)
    # The one made before is still in use: by this process.
    assert len(names(runs)) == 3


def test_what_is_not_a_run_is_never_removed(project: Path, runs: Path) -> None:
    ended(runs, "mine")
    (runs / "20200101-000000-00000a").write_text("a file with the name of a run")
    outside = project / "outside"
    outside.mkdir()
    (outside / "precious").write_text("")
    (runs / "20200101-000000-00000b").symlink_to(outside)
    (ended(runs, "20200101-000000-00000c") / "link").symlink_to(outside)
    made = make(None, None, keep=1)
    assert names(runs) == {"mine", "20200101-000000-00000a", "20200101-000000-00000b", made.path.name, "latest"}
    assert (outside / "precious").exists()


def test_a_run_in_use_is_kept(runs: Path, sleeper: subprocess.Popen[bytes]) -> None:
    used = ended(runs, "20200101-000000-00000a")
    (used / "pid").write_text(signed(sleeper.pid))
    reused = ended(runs, "20200101-000000-00000b")
    (reused / "pid").write_text(signed(sleeper.pid).rpartition(" ")[0] + " 1\n")
    torn = ended(runs, "20200101-000000-00000c")
    (torn / "pid").write_text(f"began {layout._host()}\nbegan\nwhat is this\n\0")
    make(None, None, keep=1)
    assert used.is_dir()
    assert not reused.exists(), "another process that has the number of the one that is gone"
    assert not torn.exists()
    sleeper.kill()
    # Not waited for yet: dead all the same.
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(used)
    make(None, None, keep=1)
    assert not used.exists()


def test_a_run_that_was_signed_out_is_not_in_use(runs: Path) -> None:
    run = make(None, None)
    assert is_running(run.path)
    sign_out(run)
    assert not is_running(run.path)
    make(str(run.path), None)
    assert is_running(run.path), "the same process took it up again"
    sign_out(RunDirectory(path=runs / "not there"))
    assert not is_running(runs / "not there")


def test_a_run_of_another_machine_is_kept_while_it_writes(runs: Path) -> None:
    run = ended(runs, "20200101-000000-00000a")
    (run / "pid").write_text("began elsewhere/pid:[1] 12 34\n")
    log = RunDirectory(path=run).log(0, "out")
    log.parent.mkdir()
    log.write_text("step 1")
    long_ago = time.time() - 25 * 3600
    for path in (run / "pid", run / "config.json", log.parent, run):
        os.utime(path, (long_ago, long_ago))
    make(None, None, keep=1)
    assert run.is_dir()
    os.utime(log, (long_ago, long_ago))
    make(None, None, keep=1)
    assert not run.exists()


def test_what_a_killed_launcher_left_is_cleared(runs: Path) -> None:
    ended(runs, ".old-00000a")
    making = ended(runs, ".new-00000b")
    left = ended(runs, ".new-00000c")
    long_ago = time.time() - 25 * 3600
    for path in (left / "config.json", left):
        os.utime(path, (long_ago, long_ago))
    run = make(None, None)
    assert names(runs) == {making.name, run.path.name, "latest"}


MANY = """
import sys
from pathlib import Path
from lockstep.rundir.layout import make, sign_out

print(flush=True)
input()
for _ in range(25):
    run = make(None, None, keep=3)
    assert run.note is None, run.note
    assert run.pid.is_file(), "pruned while in use"
    sign_out(run)
"""


def test_launchers_at_once_do_not_trouble_each_other(runs: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", MANY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        ends = []
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        for child in children:
            ends.append((child.communicate(timeout=LIMIT)[1], child.returncode))
    finally:
        for child in children:
            child.kill()
            child.wait(LIMIT)
    assert ends == [("", 0)] * 4
    last = make(None, None, keep=3)
    assert len([name for name in names(runs) if layout._NAME.fullmatch(name)]) <= 3
    assert not [name for name in names(runs) if name.startswith(".latest")]
    assert find(None).path == last.path


# ---------------------------------------------------------------- finding


def test_the_latest_run_is_found_without_a_name(project: Path) -> None:
    make(None, None)
    run = make(None, None)
    for text in (None, "", "latest", ".lockstep/runs/latest", ".", ".lockstep", ".lockstep/runs", str(project)):
        assert find(text) == RunDirectory(path=run.path)
    assert find(None, start=project).path == run.path


def test_a_run_is_found_by_path_name_and_beginning(project: Path, runs: Path) -> None:
    first = ended(runs, "20240101-000000-aaaaaa")
    second = ended(runs, "20250101-000000-bbbbbb")
    for text in (str(first), ".lockstep/runs/20240101-000000-aaaaaa", "20240101-000000-aaaaaa", "2024"):
        assert find(text).path == first
    assert find("2025").path == second
    elsewhere = make("elsewhere", None)
    assert find("elsewhere").path == elsewhere.path
    # A folder that only happens to have such a name is not in the way.
    (project / "2024").mkdir()
    assert find("2024").path == first


def test_the_variable_comes_before_latest_and_after_the_argument(project: Path, runs: Path) -> None:
    latest = make(None, None)
    mine = make("mine", None)
    assert find(None, asked="mine").path == mine.path
    assert find("latest", asked="mine").path == latest.path
    assert find(None, asked="").path == latest.path
    with pytest.raises(ConfigError, match=r"LOCKSTEP_RUN_DIR=gone .*no such folder"):
        find(None, asked="gone")


def test_the_newest_run_stands_in_for_a_broken_link(runs: Path) -> None:
    ended(runs, "20240101-000000-aaaaaa")
    newest = ended(runs, "20250101-000000-bbbbbb")
    assert find(None).path == newest
    (runs / "latest").symlink_to("gone")
    assert find(None).path == newest
    assert find("latest").path == newest


def test_what_is_not_found_is_told_with_what_there_is(project: Path, runs: Path) -> None:
    with pytest.raises(ConfigError) as none:
        find(None)
    assert str(runs) in str(none.value)
    with pytest.raises(ConfigError, match="There are no runs there"):
        find("x")
    for day in range(1, 8):
        ended(runs, f"2025010{day}-000000-aaaaaa")
    with pytest.raises(ConfigError) as unknown:
        find("x")
    text = str(unknown.value)
    assert "'x'" in text
    assert f"{project / 'x'} (not there)" in text
    assert str(runs) in text
    there = [f"2025010{day}-000000-aaaaaa" for day in (7, 6, 5, 4, 3)]
    assert ", ".join(there) + " and 2 more" in text
    (project / "x").mkdir()
    with pytest.raises(ConfigError, match="a folder, but not of a run"):
        find("x")
    with pytest.raises(ConfigError, match=r"beginning of 7 runs' names.*Give more of it"):
        find("2025")


def test_names_that_make_no_path(project: Path) -> None:
    for text in ("a\0b", "x" * 5000):
        with pytest.raises(ConfigError):
            find(text)


# ---------------------------------------------------------------- the layout


def test_the_page_shows_every_place() -> None:
    run = RunDirectory(path=Path("run"))
    places = [
        run.config,
        run.env,
        run.log(0, "out"),
        run.log(0, "err"),
        run.log(0, "out", attempt=1),
        run.words(0),
        run.stack(0),
        run.boxes,
        run.numerics,
        run.diagnosis,
        run.diagnosis_text,
        run.pid,
    ]
    assert [str(path.relative_to("run")) for path in places] == [
        "config.json",
        "env.json",
        "logs/rank_0.out",
        "logs/rank_0.err",
        "logs/attempt_1/rank_0.out",
        "words/rank_0.json",
        "stacks/rank_0.txt",
        "boxes",
        "numerics",
        "diagnosis.json",
        "diagnosis.txt",
        "pid",
    ]
    page = Path(__file__).parents[3] / "docs" / "run-directory.md"
    text = page.read_text(encoding="utf-8")
    for path in places:
        for part in path.relative_to("run").parts:
            assert part.replace("rank_0", "rank_<n>").replace("attempt_1", "attempt_<k>") in text


def test_neither_torch_nor_rich_is_needed() -> None:
    code = (
        "import sys, lockstep.rundir.layout, lockstep.rundir.crash_report; print({'torch', 'rich'} & set(sys.modules))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (child.stdout, child.stderr) == ("set()\n", "")
