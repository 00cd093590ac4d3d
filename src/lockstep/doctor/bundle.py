"""A zip for a bug report: what a run left behind and what this machine is like, without secrets.

Every part is made by itself: one that cannot be read says so in its place, and the rest is still there. The run may be
over, running, half there, or missing.
"""

from __future__ import annotations

import json
import os
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.blackbox import processes
from lockstep.blackbox import read as boxes
from lockstep.blackbox.snapshot import Snapshot
from lockstep.doctor.redact import Redactor
from lockstep.errors import ConfigError
from lockstep.guard.diagnose import diagnose
from lockstep.guard.explain import explain
from lockstep.guard.watcher import together
from lockstep.rundir import place, words
from lockstep.rundir.place import RunDirectory

LINES = 200
"""Lines of a log that are taken, from its end."""
_WINDOW = 1 << 18
"""Bytes from the end of a log that are looked at."""
_LONGEST = 4000
"""Characters of a line."""
_HISTORY = 16
"""Collectives of a rank."""
_LARGEST_FILE = 16 << 20
"""Bytes of a file that is taken whole."""
_MOST_RANKS = 4096
"""Ranks whose logs are taken; of more, those with the smallest numbers."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One file of the zip, before it is made."""

    name: str
    """Its name there."""
    what: str
    """What it is, in a few words."""
    make: Callable[[], str]
    """Gives its text, without secrets."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """One file of the zip that was made."""

    name: str
    """Its name."""
    what: str
    """What it is."""
    size: int
    """Its bytes, unpacked."""


def redactor_for(directory: RunDirectory | None, environ: Mapping[str, str], argv: Sequence[str] = ()) -> Redactor:
    """One that knows the secrets of this environment, of the job's command line, and of its ranks that still run."""
    found = Redactor().learn(environ, argv)
    if directory is None:
        return found
    for file in (directory.config, directory.env):
        with suppress(OSError, ValueError, RecursionError):
            found.learn_from(json.loads(_whole(file)))
    for box in _boxes(directory):
        found.learn(processes.environ_of(box.pid) if box.alive and box.host == os.uname().nodename else {})
    return found


def parts(
    directory: RunDirectory | None,
    redactor: Redactor,
    *,
    env: Callable[[], tuple[str, Any]],
    findings: Callable[[], tuple[str, Any]],
) -> list[Part]:
    """What goes into the zip. ``env`` and ``findings`` give a report as text and as data, when they are asked."""
    made = [
        # First, because its checks are forks of this process: torch and its threads come with the next one.
        *_both("doctor", "what `lockstep doctor` finds on this machine", findings, redactor),
        *_both("env", "versions, devices, settings and variables, as `lockstep env` shows them", env, redactor),
    ]
    if directory is not None:
        made += _of_run(directory, redactor)
    return made


def write(output: Path, made: Sequence[Part], about: Mapping[str, Any], told: Callable[[Part], None]) -> list[Written]:
    """Make the parts and write the zip; ``told`` is called before each. Nobody else can read it."""
    draft = output.with_name(f".{output.name}.{os.getpid()}")
    written: list[Written] = []
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for part in made:
                told(part)
                data = _made(part).encode("utf-8", "backslashreplace")
                archive.writestr(part.name, data)
                written.append(Written(name=part.name, what=part.what, size=len(data)))
            contents = {**about, "contents": [asdict(item) for item in written]}
            archive.writestr("contents.json", json.dumps(contents, indent=1) + "\n")
        # Not over a file that was not there before: two may be writing.
        os.link(draft, output)
    except FileExistsError:
        raise ConfigError(f"{output} is there already. Name another file with --output, or remove it.") from None
    except OSError as error:
        raise ConfigError(
            f"The bundle cannot be written to {output} ({error.strerror or error}). Name another place with --output."
        ) from None
    finally:
        with suppress(OSError):
            draft.unlink()
    return written


def _made(part: Part) -> str:
    try:
        return part.make()
    except Exception as error:  # whatever one part meets, the others are worth having
        reason = getattr(error, "strerror", None) or str(error)
        return f"(this part could not be made: {type(error).__name__}: {reason})\n"


def _both(name: str, what: str, make: Callable[[], tuple[str, Any]], redactor: Redactor) -> Iterator[Part]:
    """A report for people and for programs; it is made once, also when that fails."""
    kept: list[tuple[str, Any] | Exception] = []

    def once() -> tuple[str, Any]:
        if not kept:
            try:
                kept.append(make())
            except Exception as error:
                kept.append(error)
        if isinstance(kept[0], Exception):
            raise kept[0]
        return kept[0]

    yield Part(name=f"{name}.txt", what=what, make=lambda: redactor.text(once()[0]) + "\n")
    yield Part(name=f"{name}.json", what="the same for programs", make=lambda: _json(once()[1], redactor))


# ---------------------------------------------------------------- what a run left behind


def _of_run(directory: RunDirectory, redactor: Redactor) -> Iterator[Part]:
    yield Part(name="run/state.json", what="the run: its place, and whether it runs", make=lambda: _state(directory))
    for file, what in (
        (directory.config, "how the job was started, each value with where it came from"),
        (directory.env, "the machine that started it"),
    ):
        if _is_file(file):
            yield Part(name=f"run/{file.name}", what=what, make=lambda file=file: _file(file, redactor))  # type: ignore[misc]
    yield from _diagnosis(directory, redactor)
    yield Part(
        name="run/words.json", what="what ended each rank that said so", make=lambda: _words(directory, redactor)
    )
    yield Part(
        name="run/boxes.json",
        what="what each rank was doing last, from its black box",
        make=lambda: _json([_box(box) for box in _boxes(directory)], redactor),
    )
    for folder, what in (
        (_logs(directory), f"what the ranks printed, the last {LINES} lines of each"),
        (directory.stacks, f"Python stacks, the last {LINES} lines of each rank"),
        (directory.path / "nccl", f"NCCL's logs, the last {LINES} lines of each process"),
    ):
        for file in _files(folder)[: 2 * _MOST_RANKS]:
            name = f"run/{folder.name}/{file.relative_to(folder)}"
            yield Part(name=name, what=what, make=lambda file=file: redacted_tail(file, redactor))  # type: ignore[misc]
    if _files(directory.path / "nccl"):
        yield from _both("run/nccl", "what NCCL's logs say", lambda: _nccl(directory), redactor)


def _state(directory: RunDirectory) -> str:
    running = place.is_running(directory.path)
    missing = [
        path.name
        for path in (directory.config, directory.env, directory.logs, directory.boxes, directory.diagnosis)
        if not path.exists()
    ]
    ranks = [box.rank for box in _boxes(directory)]
    told = {"name": directory.path.name, "running": running, "ranks with a black box": ranks, "not there": missing}
    return json.dumps(told, indent=1) + "\n"


def _diagnosis(directory: RunDirectory, redactor: Redactor) -> Iterator[Part]:
    """What the guard wrote; if it wrote nothing, what it says about the boxes now."""
    found = [file for file in (directory.diagnosis_text, directory.diagnosis) if _is_file(file)]
    for file in found:
        yield Part(
            name=f"run/{file.name}",
            what="why the job stopped, or what it waited for",
            make=lambda file=file: _file(file, redactor),  # type: ignore[misc]
        )
    if not found:
        yield Part(
            name="run/diagnosis.txt",
            what="what the guard says about the ranks now; it wrote nothing while the job ran",
            make=lambda: redactor.text(_diagnose(directory)) + "\n",
        )


def _diagnose(directory: RunDirectory) -> str:
    found = _boxes(directory, history=boxes.HISTORY)
    if not found:
        return "No rank has a black box, so there is nothing to go by."
    said = diagnose(found)
    return explain(said) if said is not None else "Nothing is out of step, as far as the black boxes show."


def _boxes(directory: RunDirectory, history: int = _HISTORY) -> list[Snapshot]:
    try:
        return together(boxes.read_all(directory.boxes, history=history))
    except (OSError, ValueError):
        return []


def _box(box: Snapshot) -> dict[str, Any]:
    return asdict(replace(box, pace=box.pace[-_HISTORY:]))


def _words(directory: RunDirectory, redactor: Redactor) -> str:
    return _json([asdict(one) for one in words.read_all(directory.path)], redactor)


def _logs(directory: RunDirectory) -> Path:
    """Where the ranks' output is: in the run directory, unless the job was started with --log_dir."""
    if not directory.logs.is_dir():
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            asked = json.loads(_whole(directory.config))["options"]["log_dir"]["value"]
            if asked and Path(asked).is_dir():
                return Path(asked)
    return directory.logs


def _nccl(directory: RunDirectory) -> tuple[str, Any]:
    from lockstep.doctor.nccl import report
    from lockstep.doctor.nccl.read import read

    reading = read([str(directory.path)])
    return "\n".join(report.lines(reading, 100)), [finding.plain() for finding in reading.findings]


# ---------------------------------------------------------------- files


def redacted_tail(path: Path, redactor: Redactor, lines: int = LINES) -> str:
    """The last lines of a file without secrets: these are taken out first, so that no cut can spare half of one."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _WINDOW))
        data = file.read(_WINDOW)
    text = data.decode("utf-8", "replace")
    if size > len(data):
        # It begins in the middle of something: to the next line, or, in one long line, to the next word.
        cut = text.find("\n") if "\n" in text else next((n for n, char in enumerate(text) if char.isspace()), len(text))
        text = text[cut + 1 :]
    found = redactor.text(text).splitlines()
    more = len(found) > lines or size > len(data)
    kept = [line if len(line) <= _LONGEST else f"{line[:_LONGEST]} [... cut here]" for line in found[-lines:]]
    note = [f"[the last {len(kept)} lines of {size} bytes]"] if more else []
    return "\n".join([*note, *kept]) + "\n"


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.rglob("*") if _is_file(file) and not file.name.startswith("."))
    except OSError:
        return []


def _is_file(path: Path) -> bool:
    """Whether there is a file of that name; no link to elsewhere, and no pipe, which would keep us waiting."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _whole(path: Path) -> str:
    with open(path, "rb") as file:
        return file.read(_LARGEST_FILE).decode("utf-8", "replace")


def _file(path: Path, redactor: Redactor) -> str:
    text = _whole(path)
    with suppress(ValueError, RecursionError):
        return _json(json.loads(text), redactor)
    return redactor.text(text)


def _json(structure: Any, redactor: Redactor) -> str:
    # Once more as text: a secret that is spread over keys and values is found only there.
    return redactor.text(json.dumps(redactor.data(structure), indent=1, default=str)) + "\n"
