"""A zip for a bug report: what a run left behind and what this machine is like, without secrets.

Every part is made by itself: one that cannot be read says so in its place, and the rest is still there. The run may be
over, running, half there, or missing.
"""

from __future__ import annotations

import json
import os
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
from lockstep.guard.render import explain
from lockstep.guard.source import read_lines
from lockstep.guard.watcher import together
from lockstep.rundir import crash_report, layout
from lockstep.rundir.layout import RunDirectory
from lockstep.rundir.printable import printable, uncoloured
from lockstep.rundir.regular_file import DirectoryEntry, list_regular, open_regular, read_json, read_regular

LINES = 200
"""Lines of a log that are taken, from its end."""
FIRST_LINES = 50
"""Lines from its beginning, of one that is longer than `_WINDOW`."""
_WINDOW = 1 << 18
"""Bytes of a log that are taken, from its end; a quarter of it from the beginning."""
_MARGIN = 1 << 16
"""Bytes that are read beyond, and not taken: a secret that a cut goes through shows what it is by what is around it."""
_LONGEST = 4000
"""Characters of a line."""
_HISTORY = 16
"""Collectives of a rank."""
_LARGEST_FILE = 4 << 20
"""Bytes of a file that is taken whole."""
_LARGEST = 128 << 20
"""Bytes of the whole, unpacked: what comes after is left out."""
_MOST_RANKS = 4096
"""Ranks whose logs are taken; of more, those with the smallest numbers."""


@dataclass(frozen=True, kw_only=True)
class BundleInput:
    """One file of the zip, before it is made."""

    name: str
    what: str
    """What it is, in a few words."""
    make: Callable[[], str]
    """Gives its text, without secrets."""


@dataclass(frozen=True, kw_only=True)
class BundledFile:
    """One file of the zip that was made."""

    name: str
    what: str
    size: int
    """Its bytes, unpacked."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A file of the run that is not in the zip."""

    name: str
    """Its place in the run directory."""
    why: str


def redactor_for(directory: RunDirectory | None, environ: Mapping[str, str], argv: Sequence[str] = ()) -> Redactor:
    """One that knows the secrets of this environment, of the job's command line, and of its ranks that still run."""
    found = Redactor().learn(environ, argv)
    if directory is None:
        return found
    for file in (directory.config, directory.env):
        with suppress(OSError, ValueError, RecursionError):
            found.learn_from(read_json(file, below=directory.path, limit=_LARGEST_FILE))
    for box in _boxes(directory):
        found.learn(processes.environ_of(box.pid) if box.alive and box.host == os.uname().nodename else {})
    return found


def parts(
    directory: RunDirectory | None,
    redactor: Redactor,
    *,
    env: Callable[[], tuple[str, Any]],
    findings: Callable[[], tuple[str, Any]],
) -> list[BundleInput]:
    """What goes into the zip. ``env`` and ``findings`` give a report as text and as data, when they are asked."""
    made = [
        # First, because its checks are forks of this process: torch and its threads come with the next one.
        *_both("doctor", "what `lockstep doctor` finds on this machine", findings, redactor),
        *_both("env", "versions, devices, settings and variables, as `lockstep env` shows them", env, redactor),
    ]
    if directory is not None:
        made += _of_run(directory, redactor)
    return made


def left_out(directory: RunDirectory) -> list[LeftOut]:
    """What lies where the bundle looks, and is not taken: links, pipes, devices, and logs that are elsewhere."""
    files = (directory.config, directory.env, directory.diagnosis_text, directory.diagnosis)
    found = [listed for file in files for listed in list_regular(file, directory.path, 1) if listed.why_not]
    for folder in (directory.words(0).parent, directory.boxes, *(folder for folder, _ in _folders(directory))):
        found += [listed for listed in _listed(directory, folder) if listed.why_not]
    made = [LeftOut(name=str(one.path.relative_to(directory.path)), why=one.why_not) for one in found]
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        asked = str(read_json(directory.config, below=directory.path)["options"]["log_dir"]["value"] or "")
        if asked and not Path(asked).is_relative_to(directory.path):
            made.append(LeftOut(name="logs", why=f"the ranks' output is outside the run directory, in {asked}"))
    return made


def write(
    output: Path,
    made: Sequence[BundleInput],
    about: Mapping[str, Any],
    progress: Callable[[BundleInput], None],
    gone: Sequence[LeftOut] = (),
) -> list[BundledFile]:
    """Make the parts and write the zip; ``progress`` is called before each. Nobody else can read it."""
    draft = output.with_name(f".{output.name}.{os.getpid()}")
    written: list[BundledFile] = []
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            gone = list(gone)
            for part in made:
                progress(part)
                data = _made(part).encode("utf-8", "backslashreplace")
                if sum(item.size for item in written) + len(data) > _LARGEST:
                    gone.append(LeftOut(name=part.name, why=f"the bundle would have more than {_LARGEST >> 20} MiB"))
                    continue
                archive.writestr(part.name, data)
                written.append(BundledFile(name=part.name, what=part.what, size=len(data)))
            contents = {
                **about,
                "contents": [asdict(item) for item in written],
                "left_out": [asdict(it) for it in gone],
            }
            archive.writestr("contents.json", json.dumps(contents, indent=1) + "\n")
        # Not over a file that was not there before: two may be writing.
        os.link(draft, output)
    except FileExistsError:
        raise ConfigError(f"{output} exists. Name another file with --output, or remove it.") from None
    except OSError as error:
        raise ConfigError(
            f"The bundle cannot be written to {output} ({error.strerror or error}). Name another place with --output."
        ) from None
    finally:
        with suppress(OSError):
            draft.unlink()
    return written


def _made(part: BundleInput) -> str:
    try:
        return part.make()
    except Exception as error:  # whatever one part meets, the others are worth having
        reason = getattr(error, "strerror", None) or str(error)
        return f"(this part could not be made: {type(error).__name__}: {reason})\n"


def _both(name: str, what: str, make: Callable[[], tuple[str, Any]], redactor: Redactor) -> Iterator[BundleInput]:
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

    yield BundleInput(name=f"{name}.txt", what=what, make=lambda: redactor.text(once()[0]) + "\n")
    yield BundleInput(name=f"{name}.json", what="the same for programs", make=lambda: _json(once()[1], redactor))


# ---------------------------------------------------------------- what a run left behind


def _of_run(directory: RunDirectory, redactor: Redactor) -> Iterator[BundleInput]:
    yield BundleInput(
        name="run/state.json", what="the run: its place, and whether it runs", make=lambda: _state(directory)
    )
    for file, what in (
        (directory.config, "how the job was started, each value with where it came from"),
        (directory.env, "the machine that started it"),
    ):
        if _is_file(file, directory):
            yield BundleInput(
                name=f"run/{file.name}",
                what=what,
                make=lambda file=file: _file(file, directory, redactor),  # type: ignore[misc]
            )
    yield from _diagnosis(directory, redactor)
    yield BundleInput(
        name="run/words.json", what="what ended each rank that said so", make=lambda: _words(directory, redactor)
    )
    yield BundleInput(
        name="run/boxes.json",
        what="what each rank was doing last, from its black box",
        make=lambda: _json([_box(box) for box in _boxes(directory)], redactor),
    )
    for folder, what in _folders(directory):
        for listed in _listed(directory, folder):
            if not listed.why_not:
                yield BundleInput(
                    name=f"run/{folder.name}/{listed.path.relative_to(folder)}",
                    what=what,
                    make=lambda file=listed.path: redacted_tail(file, redactor, below=directory.path),  # type: ignore[misc]
                )
    logs = [one.path for one in _listed(directory, directory.path / "nccl") if not one.why_not]
    if logs:
        logs += [one.path for one in _listed(directory, directory.logs) if not one.why_not]
        yield from _both("run/nccl", "what NCCL's logs say", lambda: _nccl(directory, logs), redactor)


def _folders(directory: RunDirectory) -> Iterator[tuple[Path, str]]:
    """The folders of which every file is taken, and what is in them."""
    yield _logs(directory), f"what the ranks printed, the last {LINES} lines of each"
    yield directory.stacks, f"Python stacks, the last {LINES} lines of each rank"
    yield directory.path / "nccl", f"NCCL's logs, the last {LINES} lines of each process"


def _listed(directory: RunDirectory, folder: Path) -> Iterator[DirectoryEntry]:
    return list_regular(folder, directory.path, 2 * _MOST_RANKS)


def _state(directory: RunDirectory) -> str:
    running = layout.is_running(directory.path)
    missing = [
        path.name
        for path in (directory.config, directory.env, directory.logs, directory.boxes, directory.diagnosis)
        if not path.exists()
    ]
    ranks = [box.rank for box in _boxes(directory)]
    progress = {"name": directory.path.name, "running": running, "ranks with a black box": ranks, "not there": missing}
    return json.dumps(progress, indent=1) + "\n"


def _diagnosis(directory: RunDirectory, redactor: Redactor) -> Iterator[BundleInput]:
    """What the guard wrote; if it wrote nothing, what it says about the boxes now."""
    found = [file for file in (directory.diagnosis_text, directory.diagnosis) if _is_file(file, directory)]
    for file in found:
        yield BundleInput(
            name=f"run/{file.name}",
            what="why the job stopped, or what it waited for",
            make=lambda file=file: _file(file, directory, redactor),  # type: ignore[misc]
        )
    if not found:
        yield BundleInput(
            name="run/diagnosis.txt",
            what="what the guard says about the ranks now; it wrote nothing while the job ran",
            make=lambda: redactor.text(_diagnose(directory)) + "\n",
        )


def _diagnose(directory: RunDirectory) -> str:
    found = _boxes(directory, history=boxes.HISTORY)
    if not found:
        return "No rank has a black box, so there is nothing to go by."
    diagnosis = diagnose(found)
    if diagnosis is None:
        return "Nothing is out of step, as far as the black boxes show."
    return explain(diagnosis, _script)


def _script(path: str) -> Sequence[str]:
    """The lines of a script that a black box names: nothing else may get into the bundle by its name."""
    return read_lines(path) if path.endswith(".py") else ()


def _boxes(directory: RunDirectory, history: int = _HISTORY) -> list[Snapshot]:
    try:
        if directory.boxes.is_symlink():
            return []
        return together(boxes.read_all(directory.boxes, history=history))
    except (OSError, ValueError):
        return []


def _box(box: Snapshot) -> dict[str, Any]:
    return asdict(replace(box, pace=box.pace[-_HISTORY:]))


def _words(directory: RunDirectory, redactor: Redactor) -> str:
    found = [] if directory.words(0).parent.is_symlink() else crash_report.read_all(directory.path)
    return _json([asdict(one) for one in found], redactor)


def _logs(directory: RunDirectory) -> Path:
    """Where the ranks' output is, if it is in the run directory."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        asked = Path(read_json(directory.config, below=directory.path)["options"]["log_dir"]["value"])
        if ".." not in asked.parts and asked != directory.path and asked.is_relative_to(directory.path):
            return asked
    return directory.logs


def _nccl(directory: RunDirectory, logs: Sequence[Path]) -> tuple[str, Any]:
    from lockstep.doctor.nccl import report
    from lockstep.doctor.nccl.read import read
    from lockstep.doctor.nccl.reader import Log

    reading = read([], logs=[Log(name=str(log), path=log, asked_for=False, below=directory.path) for log in logs])
    return "\n".join(report.lines(reading, 100)), [finding.plain() for finding in reading.findings]


# ---------------------------------------------------------------- files


def redacted_tail(path: Path, redactor: Redactor, lines: int = LINES, *, below: Path | None = None) -> str:
    """The last lines of a file without secrets, and the first of one that is very long.

    Secrets are taken out before anything is cut off, so that no cut can spare half of one.
    """
    with open_regular(path, below) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _WINDOW - _MARGIN))
        data = file.read(_WINDOW + _MARGIN)
        head = b""
        if size > len(data):
            file.seek(0)
            head = file.read(_WINDOW // 4 + _MARGIN)
    text = _decoded(data)
    if size > len(data):
        # It begins in the middle of something: to the next line, or, in one long line, to the next word.
        cut = text.find("\n") if "\n" in text else next((n for n, char in enumerate(text) if char.isspace()), len(text))
        text = text[cut + 1 :]
    whole = _shown(text, redactor).splitlines()
    found = _tail_of(whole, lines)
    more = len(found) < len(whole) or size > len(data)
    kept = [line if len(line) <= _LONGEST else f"{line[:_LONGEST]} [... cut here]" for line in found]
    note = [f"[the last {len(kept)} lines of {size} bytes]"] if more else []
    if head:
        first = _shown(_decoded(head), redactor)[: _WINDOW // 4].splitlines()[:FIRST_LINES]
        first = [line if len(line) <= _LONGEST else f"{line[:_LONGEST]} [... cut here]" for line in first]
        note = [f"[the first {len(first)} lines]", *first, "", *note]
    return "\n".join([*note, *kept]) + "\n"


def _tail_of(whole: Sequence[str], lines: int) -> Sequence[str]:
    """The last lines that are not longer together than a window."""
    found = whole[-lines:]
    room, first = _WINDOW, len(found)
    while first and (room := room - min(len(found[first - 1]), _LONGEST)) >= 0:
        first -= 1
    return found[first:]


def _decoded(data: bytes) -> str:
    return uncoloured(data.decode("utf-8", "replace")).replace("\r\n", "\n")


def _shown(text: str, redactor: Redactor) -> str:
    """Without secrets and colours, and with no control character that acts on the reader's terminal."""
    return printable(redactor.text(text))


def _is_file(path: Path, directory: RunDirectory) -> bool:
    return any(not listed.why_not for listed in list_regular(path, directory.path, 1))


def _file(path: Path, directory: RunDirectory, redactor: Redactor) -> str:
    data = read_regular(path, below=directory.path, limit=_LARGEST_FILE)
    with suppress(ValueError, RecursionError):
        return _json(json.loads(data), redactor)
    return _shown(_decoded(data), redactor)


def _json(structure: Any, redactor: Redactor) -> str:
    # Once more as text: a secret that is spread over keys and values is found only there.
    return redactor.text(json.dumps(redactor.data(structure), indent=1, default=str)) + "\n"
