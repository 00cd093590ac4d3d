"""Where a run keeps its files: making the folder, finding it again, and removing old ones.

docs/run-directory.md shows the layout to users; `RunDirectory` is the same in code.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.rundir.constants import VARIABLE, stack_file
from lockstep.rundir.regular_file import read_regular

KEEP = 20
"""How many runs of a project are kept."""

_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_LAYOUT = ("pid", "config.json", "env.json", "logs", "words", "boxes", "stacks", "numerics", "diagnosis.json")
# Nothing tells whether a process of another machine lives; a job that has not written for so long is taken for ended.
_QUIET_SECONDS = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """The folder of one run, and the places in it."""

    path: Path
    """The folder itself, absolute."""

    note: str | None = None
    """What the user has to know about the place: that it is not the one asked for, and why."""

    @property
    def config(self) -> Path:
        """The options of the job, each with where its value came from."""
        return self.path / "config.json"

    @property
    def env(self) -> Path:
        """What `lockstep env` says about the machine."""
        return self.path / "env.json"

    @property
    def logs(self) -> Path:
        """The folder of what the ranks printed."""
        return self.path / "logs"

    def log(self, rank: int, stream: str, attempt: int = 0) -> Path:
        """What a rank printed to ``stream`` ("out" or "err"); restarts have a folder each, the first start has none."""
        folder = self.logs / f"attempt_{attempt}" if attempt else self.logs
        return folder / f"rank_{rank}.{stream}"

    def words(self, rank: int) -> Path:
        """The last words of a rank; a later attempt's replace an earlier one's."""
        return self.path / "words" / f"rank_{rank}.json"

    @property
    def boxes(self) -> Path:
        """The folder of the black boxes."""
        return self.path / "boxes"

    @property
    def stacks(self) -> Path:
        """The folder of Python stacks taken from running ranks."""
        return self.path / "stacks"

    def stack(self, rank: int) -> Path:
        """The stacks of one rank."""
        return self.stacks / stack_file(rank)

    @property
    def numerics(self) -> Path:
        """The folder of what was found out about NaN and infinite values."""
        return self.path / "numerics"

    @property
    def diagnosis(self) -> Path:
        """Why the job stopped, for programs."""
        return self.path / "diagnosis.json"

    @property
    def diagnosis_text(self) -> Path:
        """Why the job stopped, for people."""
        return self.path / "diagnosis.txt"

    @property
    def pid(self) -> Path:
        """Which launchers began and ended this run, a line each."""
        return self.path / "pid"


# ---------------------------------------------------------------- making


def make(asked: str | None, project_dir: str | None, now: float | None = None, keep: int = KEEP) -> RunDirectory:
    """Make the folder of a new run, or take the one that was ``asked`` for, and mark it as this process's.

    An empty text counts as not asked. Where the place cannot be written, the folder is in the temporary folder and
    its ``note`` says why.
    """
    tried = asked or os.path.join(project_dir or ".", ".lockstep", "runs")
    try:
        tried = os.path.abspath(tried)  # ranks may start elsewhere
        if asked:
            return RunDirectory(path=Path(tried), note=_take(Path(tried)))
        path = _fresh(Path(tried), now)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        return _instead(tried, error)
    note = _announce(path)
    _prune(path.parent, path.name, keep)
    return RunDirectory(path=path, note=note)


def sign_out(run: RunDirectory) -> None:
    """Mark the run as ended for this process. Without it a run looks alive to other machines for one more day."""
    with suppress(OSError):
        _sign(run.path, "ended")


def _take(path: Path) -> str | None:
    """Use a folder that was named; it may be there already, or another machine may be making it right now."""
    if not path.is_dir():
        os.makedirs(path.parent, exist_ok=True)
        try:
            path.mkdir()
            path.chmod(0o700)
        except FileExistsError:
            if not path.is_dir():
                raise
    _sign(path, "began")
    inside = path.parent.name == "runs" and path.parent.parent.name == ".lockstep"
    return _announce(path) if inside else None


def _fresh(runs: Path, now: float | None) -> Path:
    """A new folder with a name of its own.

    It is filled under another name first: who prunes at this moment sees it only with the mark that it is in use.
    """
    os.makedirs(runs, exist_ok=True)
    unfinished = runs / f".new-{_token(6)}"
    unfinished.mkdir()
    try:
        unfinished.chmod(0o700)  # not by mkdir, which the umask takes from
        _sign(unfinished, "began")
        path = runs / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{_token(3)}"
        os.rename(unfinished, path)
    except OSError:
        _delete(unfinished)
        raise
    return path


def _instead(tried: str, error: Exception) -> RunDirectory:
    """A folder in the temporary folder, for when the right place cannot be written."""
    import tempfile

    reason = _reason(error)
    try:
        path = Path(tempfile.mkdtemp(prefix="lockstep-run-"))
        path.chmod(0o700)
        _sign(path, "began")
    except OSError as second:
        raise ConfigError(
            f"The run directory cannot be written: {tried} ({reason}), nor can the temporary folder "
            f"({_reason(second)}). Set {VARIABLE} to a folder on a disk that has room and that you may write."
        ) from error
    return RunDirectory(
        path=path,
        note=f"The run directory could not be made in {tried} ({reason}), so it is {path} this time. "
        f"Make that place writable, or set {VARIABLE} to another.",
    )


def _announce(path: Path) -> str | None:
    """Let `latest` point at a run and keep the folder out of git; what goes wrong with the link is returned."""
    runs = path.parent
    # A file that is there is the user's to keep.
    with suppress(OSError), open(runs.parent / ".gitignore", "x", encoding="utf-8") as ignore:
        ignore.write("*\n")
    link = runs / f".latest-{_token(6)}"
    try:
        os.symlink(path.name, link)
        os.replace(link, runs / "latest")
    except OSError as error:
        with suppress(OSError):
            link.unlink()
        return f"The link {runs / 'latest'} could not be set ({_reason(error)}); name this run by {path.name}."
    return None


# ---------------------------------------------------------------- who uses it


def is_running(path: Path) -> bool:
    """Whether a launcher of this run still lives, as far as can be known from here."""
    try:
        text = read_regular(path / "pid").decode("utf-8", "replace")
    except FileNotFoundError:
        return False
    except OSError:
        return True  # not ours to look into, so not ours to judge
    using = set()
    for line in text.splitlines():
        word, _, process = line.partition(" ")
        if word == "began" and process:
            using.add(process)
        elif word == "ended":
            using.discard(process)
    return any(_lives(process, path) for process in using)


def _sign(path: Path, word: str) -> None:
    """Append to the run's `pid` file; launchers of several machines may share it."""
    line = f"{word} {_host()} {os.getpid()} {_started(os.getpid())}\n"
    file = os.open(path / "pid", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def _lives(process: str, path: Path) -> bool:
    host, *numbers = process.split() or [""]
    if host == _host():
        return len(numbers) == 2 and numbers[0].isdigit() and _started(int(numbers[0])) == numbers[1]
    return not _is_quiet(path)


def _host() -> str:
    """This machine, or this container: wherever a process number means the same process."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = "-"
    return f"{os.uname().nodename or '-'}/{numbers}"


def _started(pid: int) -> str | None:
    """When a living process started, in the kernel's ticks: with its number it names one process, not its successor."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses and may hold anything; no later field has parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]


def _is_quiet(path: Path) -> bool:
    """Whether nothing in the folder was written for a day."""
    newest = 0.0
    for folder, _, files in os.walk(path):
        for name in (".", *files):
            with suppress(OSError):
                newest = max(newest, os.lstat(os.path.join(folder, name)).st_mtime)
    return time.time() - newest > _QUIET_SECONDS


# ---------------------------------------------------------------- removing


def _prune(runs: Path, made: str, keep: int) -> None:
    """Remove the oldest runs beyond ``keep``. Others may be doing the same: what is gone already is no error."""
    try:
        folders = _folders(runs)
    except OSError:
        return
    others = sorted((name for name in folders if _NAME.fullmatch(name) and name != made), reverse=True)
    for name in others[max(keep - 1, 0) :]:
        if not is_running(runs / name):
            # Moved aside first: nobody finds half a run, and of two who prune only one goes on.
            aside = runs / f".old-{_token(6)}"
            with suppress(OSError):
                os.rename(runs / name, aside)
                _delete(aside)
    for name in folders:
        # What a launcher left that was killed while it made or removed a run.
        if name.startswith(".old-") or (
            name.startswith(".new-") and not is_running(runs / name) and _is_quiet(runs / name)
        ):
            _delete(runs / name)


def _delete(path: Path) -> None:
    import shutil

    shutil.rmtree(path, ignore_errors=True)


# ---------------------------------------------------------------- finding


def find(text: str | None, start: Path | None = None, asked: str | None = None) -> RunDirectory:
    """The run that a command's argument means.

    ``text`` is a path, a run's name, or the beginning of one; without it the run is ``asked`` ($LOCKSTEP_RUN_DIR),
    else the latest one under ``start`` (the working directory).
    """
    try:
        start = Path(os.path.abspath(start or "."))
        runs = start / ".lockstep" / "runs"
        if text:
            return RunDirectory(path=_named(text, start, runs))
        if asked:
            path = start / asked
            if not path.is_dir():
                raise ConfigError(f"{VARIABLE}={asked} names the run directory, but there is no such folder: {path}.")
            return RunDirectory(path=path)
        latest = _latest(runs)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"The run {text or 'latest'!r} cannot be looked up ({_reason(error)}).") from error
    if latest is None:
        raise ConfigError(
            f"There is no run in {runs}. Go to the folder where the job was started, or name a run directory."
        )
    return RunDirectory(path=latest)


def _named(text: str, start: Path, runs: Path) -> Path:
    path = Path(os.path.abspath(start / text))
    if path.name == "latest" and path.is_symlink() and path.is_dir():
        path = path.parent / os.readlink(path)
    if any(os.path.lexists(path / part) for part in _LAYOUT):
        return path
    # A project, or a folder of runs: the latest of them.
    for folder in (path / ".lockstep" / "runs", path / "runs", path):
        if folder.parts[-2:] == (".lockstep", "runs") and (latest := _latest(folder)):
            return latest
    if text == "latest" and (latest := _latest(runs)):
        return latest
    names = _newest_first(runs)
    if text in names:
        return runs / text
    starting = [name for name in names if name.startswith(text)]
    if len(starting) == 1:
        return runs / starting[0]
    if starting:
        raise ConfigError(
            f"{text!r} is the beginning of {len(starting)} runs' names in {runs}: {_some(starting)}. Give more of it."
        )
    seen = "a folder, but not of a run" if path.is_dir() else "a file" if path.exists() else "not there"
    there = f"The runs there, newest first: {_some(names)}." if names else "There are no runs there."
    raise ConfigError(
        f"No run is called {text!r}. Looked at the path {path} ({seen}) and for names that begin so in {runs}. {there}"
    )


def _latest(runs: Path) -> Path | None:
    """What the link points at; the newest run when the link is missing or broken."""
    with suppress(OSError):
        path = runs / os.readlink(runs / "latest")
        if path.is_dir():
            return path
    names = _newest_first(runs)
    return runs / names[0] if names else None


def _newest_first(runs: Path) -> list[str]:
    """The names of all runs, those that users named included."""
    try:
        folders = _folders(runs)
    except (FileNotFoundError, NotADirectoryError):
        return []

    def began(name: str) -> tuple[str, float]:
        written = folders[name]
        if _NAME.fullmatch(name):
            return name[:15], written
        return time.strftime("%Y%m%d-%H%M%S", time.localtime(written)), written

    return sorted((name for name in folders if not name.startswith(".")), key=began, reverse=True)


def _folders(runs: Path) -> dict[str, float]:
    """Name and time of the folders in ``runs``, links left out."""
    found = {}
    with os.scandir(runs) as entries:
        for entry in entries:
            with suppress(OSError):  # gone since it was listed
                if entry.is_dir(follow_symlinks=False):
                    found[entry.name] = entry.stat(follow_symlinks=False).st_mtime
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _token(size: int) -> str:
    return os.urandom(size).hex()
