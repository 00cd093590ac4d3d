"""Run the code blocks of a Markdown page.

Every ```python (or ```py) block of a page is executed, in order, in one namespace, in one fresh process whose
working directory is empty and temporary. HTML comments, which readers do not see, steer it:

    <!-- test: skip: why -->      before a block: leave this block out; the reason is mandatory
    <!-- test: ranks=2 -->        before a block: run the whole page under torch.distributed.run with 2 processes
    <!-- test: setup              anywhere: Python that runs in its place among the blocks
    model = make_model()
    -->

In ```bash (or ```sh, ```shell, ```console) blocks nothing is run. Lines that start with `lockstep ` or `make ` must
name a subcommand or a target that exists.

`check_page` is called by the tests. As a script (`python runner.py PAGE DONE_FOLDER SECONDS`) this file is what runs
inside the fresh process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
import types
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

from lockstep.testing._member import ensure_server

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT = 120.0

PYTHON = {"python", "py"}
SHELL = {"bash", "sh", "shell", "console"}
_DIRECTIVE = re.compile(r"<!--\s*test:(?P<body>.*?)-->", re.DOTALL)


class PageError(Exception):
    """A page that did not pass; the message names the page and the line."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Code of a page: `line` is the number, in the page, of its first line of code."""

    line: int
    code: str


@dataclass(kw_only=True)
class Page:
    """What is to be run and checked on one page."""

    path: Path
    ranks: int | None = None
    python: list[Block] = field(default_factory=list)
    shell: list[Block] = field(default_factory=list)


# ---------------------------------------------------------------- reading


def read_page(path: Path) -> Page:
    """Collect the blocks of a page and what its comments say about them; a comment that makes no sense raises."""
    page = Page(path=path)
    skip: str | None = None
    waiting: int | None = None  # line of a comment that still needs its block
    for token in MarkdownIt("commonmark").parse(path.read_text(encoding="utf-8")):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            for match in _DIRECTIVE.finditer(token.content):
                at = line + token.content.count("\n", 0, match.start("body"))
                word, _, rest = match["body"].partition("\n")
                word = word.strip()
                if word == "setup":
                    page.python.append(Block(line=at + 1, code=rest))
                elif word.startswith("skip:") and word.removeprefix("skip:").strip() and not rest.strip():
                    skip, waiting = word, at
                elif re.fullmatch(r"ranks=[1-9]\d*", word) and not rest.strip():
                    ranks = int(word.removeprefix("ranks="))
                    if page.ranks not in (None, ranks):
                        raise PageError(f"{path}:{at}: ranks={ranks}, but this page already says ranks={page.ranks}")
                    page.ranks, waiting = ranks, at
                else:
                    raise PageError(
                        f"{path}:{at}: cannot read 'test: {word}'; "
                        "known are 'skip: <reason>', 'ranks=<number>' and 'setup' followed by lines of Python"
                    )
        elif token.type == "inline" and any(_DIRECTIVE.search(child.content) for child in token.children or []):
            raise PageError(f"{path}:{line}: a 'test:' comment has to start its own line, or it goes unseen")
        elif token.type == "fence":
            language = (token.info.split() or [""])[0].lower()
            block = Block(line=line + 1, code=token.content)
            if skip is None and language in PYTHON:
                page.python.append(block)
            elif skip is None and language in SHELL:
                page.shell.append(block)
            skip = waiting = None
        elif waiting is not None:
            break
    if waiting is not None:
        raise PageError(f"{path}:{waiting}: this comment has to stand directly before a code block")
    return page


# ---------------------------------------------------------------- checking, in the test process


def check_page(path: Path, time_limit: float = TIME_LIMIT) -> None:
    """Run the Python of a page and look at its shell lines; raise `PageError` with everything that is wrong."""
    page = read_page(path)
    problems = [problem for block in page.shell for problem in shell_problems(page.path, block)]
    if page.python:
        problems += run_python(page, time_limit)
    if problems:
        raise PageError("\n\n".join(problems))


def run_python(page: Page, time_limit: float) -> list[str]:
    """Execute the Python blocks of a page in a fresh process (or in `page.ranks` of them)."""
    with tempfile.TemporaryDirectory(prefix="lockstep-docs-") as folder:
        work, done = Path(folder, "work"), Path(folder, "done")
        work.mkdir()
        done.mkdir()
        arguments = [__file__, str(page.path.resolve()), str(done), str(time_limit)]
        output = Path(folder, "output")
        with output.open("w"):
            start = start_forked if page.ranks is None else start_ranks
            code = start(arguments, work, output, time_limit, page.ranks or 1)
        ended = f"exit code {code}" if code is not None else f"not finished after {time_limit:g} s, stopped"
        said = output.read_text(encoding="utf-8", errors="replace")
        finished = len(list(done.iterdir()))
    if code == 0 and finished == (page.ranks or 1):
        return []
    if code == 0:
        # os._exit(0), or a child that replaced the process: the blocks after it were never run.
        ended = f"{finished} of {page.ranks or 1} processes reached the end of the page"
    return [f"{page.path}: {ended}\n{said}"]


def start_forked(arguments: list[str], work: Path, output: Path, time_limit: float, _: int) -> int | None:
    """One process, forked from one that has imported torch, which would take most of the time; its exit code."""
    context = multiprocessing.get_context("forkserver")
    ensure_server()
    child = context.Process(target=_forked, args=(arguments, work, output, dict(os.environ)))
    child.start()
    child.join(time_limit)
    code = child.exitcode
    end_tree(child.pid)
    child.join()
    child.close()
    return code


def _forked(arguments: list[str], work: Path, output: Path, environ: dict[str, str]) -> None:
    with open(os.devnull) as nothing, output.open("a") as target:
        os.dup2(nothing.fileno(), 0)
        for number in (1, 2):
            os.dup2(target.fileno(), number)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update({"OMP_NUM_THREADS": "1", **environ})
    os.chdir(work)
    multiprocessing.set_start_method(None, force=True)  # the page's own choice, not how this process was made
    sys.argv[:] = arguments
    script()
    sys.stdout.flush()


def start_ranks(arguments: list[str], work: Path, output: Path, time_limit: float, ranks: int) -> int | None:
    """Several processes, under torchrun; its exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with output.open("a") as target:
        child = subprocess.Popen(
            [*command, *arguments],
            cwd=work,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=target,
            stderr=subprocess.STDOUT,
        )
        try:
            return child.wait(time_limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_tree(child.pid)
            child.wait()


def end_tree(pid: int | None) -> None:
    """Kill a process and all its descendants; torch.distributed.run gives each worker a session of its own."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(pid)
        for process in [*family.children(recursive=True), family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def shell_problems(path: Path, block: Block) -> list[str]:
    """Lines of a shell block that name a `make` target or a `lockstep` subcommand that does not exist."""
    problems = []
    for line, text in enumerate(block.code.splitlines(), start=block.line):
        text = text.strip().removeprefix("$ ")
        if text.startswith(("make ", "lockstep ")):
            program, *words = _words(text)
            if program == "make":
                for word in words:
                    if not word.startswith("-") and "=" not in word and word not in make_targets():
                        problems.append(f"{path}:{line}: the Makefile has no target '{word}'")
            elif words and not words[0].startswith("-") and (complaint := subcommand_complaint(words[0])):
                problems.append(f"{path}:{line}: 'lockstep {words[0]} --help' fails:\n{complaint}")
    return problems


def _words(text: str) -> list[str]:
    """The words of the first command of a line, without its comment."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = []
    try:
        for word in lexer:
            if set(word) <= set("();<>|&"):
                break
            words.append(word)
    except ValueError:
        pass  # a quote that closes on a later line: the words before it are what we need
    return words or text.split()


@functools.cache
def make_targets() -> frozenset[str]:
    """Targets of the Makefile that have a plain name."""
    return frozenset(re.findall(r"^([a-z][\w-]*)\s*:(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


@functools.cache
def subcommand_complaint(name: str) -> str:
    """What `lockstep NAME --help` says when it fails; empty when there is such a subcommand."""
    command = [sys.executable, "-m", "lockstep", name, "--help"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return "" if child.returncode == 0 else (child.stderr or child.stdout or f"exit code {child.returncode}").strip()


# ---------------------------------------------------------------- executing, in the fresh process


def execute(path: Path) -> None:
    """Execute the blocks of a page in a new `__main__`; on the first failure say where and leave with 1."""
    page = read_page(path)
    # As a script's own module, so that what the blocks define can be found by name (pickle, typing); and empty, so
    # that no import of this file makes a block pass that forgot its own.
    sys.argv[:] = [str(path)]
    sys.path[0] = os.getcwd()
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    for number, block in enumerate(page.python, start=1):
        try:
            # Leading newlines make line numbers those of the page: a traceback shows the page's own lines.
            exec(compile("\n" * (block.line - 1) + block.code, str(path), "exec"), main.__dict__)
        except BaseException as error:  # SystemExit too: the blocks after it would not run
            inside = error.__traceback__.tb_next if error.__traceback__ else None
            text = "".join(traceback.format_exception(type(error), error, inside))
            rank = f" on rank {os.environ['RANK']}" if page.ranks else ""
            sys.stdout.flush()
            print(f"{path}:{block.line}: block {number}{rank} failed\n{text}", file=sys.stderr, flush=True)
            # Not sys.exit: it could wait for threads of the block that failed.
            os._exit(1)


def script() -> None:
    """Entry point in the fresh process."""
    page, done, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    # The parent kills without a word at the limit; these stacks, a little earlier, say which line it was.
    faulthandler.dump_traceback_later(seconds * 0.9, exit=False)
    execute(page)
    faulthandler.cancel_dump_traceback_later()
    (done / os.environ.get("RANK", "0")).touch()


if __name__ == "__main__":
    script()
