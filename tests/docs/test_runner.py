"""The runner of code blocks on small pages of its own: what it runs, what it refuses, and what it says."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.runner import PageError, check_page, read_page, shell_problems

WritePage = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> WritePage:
    def write(text: str) -> Path:
        page = tmp_path / "page.md"
        page.write_text(textwrap.dedent(text))
        return page

    return write


def test_blocks_share_a_namespace_in_order_with_hidden_setup(write: WritePage) -> None:
    page = write("""\
        # Title
        <!-- test: setup
        import os

        start = 40
        -->
        ```python
        total = start + 1
        ```
        Prose.

        1. A list:

           ```py
           total += 1
           ```

        ```python title="last"
        assert total == 42
        assert __name__ == "__main__"
        assert os.listdir() == []
        assert "Block" not in globals()
        open("left.txt", "w").close()
        ```
        """)
    check_page(page)
    assert [path.name for path in page.parent.iterdir()] == ["page.md"]


def test_a_failing_block_names_page_line_and_shows_the_traceback(write: WritePage) -> None:
    page = write("""\
        ```python
        def half(x):
            return x / 0
        ```

        Some prose.

        ```python
        print("so far")
        half(3)
        ```
        """)
    with pytest.raises(PageError) as caught:
        check_page(page)
    message = str(caught.value)
    assert f"{page}:9: block 2 failed" in message
    assert f'File "{page}", line 10' in message
    assert f'File "{page}", line 3, in half' in message
    assert "return x / 0" in message
    assert "ZeroDivisionError" in message
    assert "so far" in message
    assert "runner.py" not in message


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("1 +", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os; os._exit(0)", "0 of 1 processes reached the end"),
    ],
)
def test_no_way_of_ending_early_counts_as_success(write: WritePage, code: str, words: str) -> None:
    page = write(f"```python\n{code}\n```\n\n```python\nx = 1\n```\n")
    with pytest.raises(PageError, match=words):
        check_page(page)


def test_a_block_that_hangs_is_stopped_and_its_line_shown(write: WritePage) -> None:
    page = write("```python\nimport threading\n\nthreading.Event().wait()\n```\n")
    with pytest.raises(PageError) as caught:
        check_page(page, time_limit=3)
    message = str(caught.value)
    assert "not finished after 3 s" in message
    assert 'page.md", line 4 in <module>' in message


def test_skip_needs_a_reason_and_takes_out_one_block(write: WritePage) -> None:
    check_page(
        write("""\
        <!-- test: skip: needs a GPU -->
        ```python
        raise RuntimeError
        ```

        ```python
        x = 1
        ```
        """)
    )
    with pytest.raises(PageError, match=r"page.md:1: cannot read 'test: skip:'"):
        check_page(write("<!-- test: skip: -->\n```python\nx = 1\n```\n"))


def test_ranks_runs_the_whole_page_on_each_rank(write: WritePage) -> None:
    check_page(
        write("""\
        ```python
        import os
        ```
        <!-- test: ranks=2 -->
        ```python
        assert os.environ["WORLD_SIZE"] == "2"
        ```
        """)
    )


def test_a_failing_rank_is_named(write: WritePage) -> None:
    page = write("""\
        <!-- test: ranks=2 -->
        ```python
        import os

        assert os.environ["RANK"] == "0", "only rank 0 is content"
        ```
        """)
    with pytest.raises(PageError) as caught:
        check_page(page)
    assert f"{page}:3: block 1 on rank 1 failed" in str(caught.value)
    assert "only rank 0 is content" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- test: rank=2 -->\n```python\n```\n", "1: cannot read 'test: rank=2'"),
        ("<!-- test: ranks=0 -->\n```python\n```\n", "1: cannot read 'test: ranks=0'"),
        ("<!-- test: skip: why -->\nProse.\n", "1: this comment has to stand directly before a code block"),
        ("<!-- test: ranks=2 -->\n", "1: this comment has to stand directly before a code block"),
        ("Prose <!-- test: skip: why -->\n", "1: a 'test:' comment has to start its own line"),
        (
            "<!-- test: ranks=2 -->\n```python\n```\n\n<!-- test: ranks=3 -->\n```python\n```\n",
            "5: ranks=3, but this page already says ranks=2",
        ),
    ],
)
def test_a_comment_that_would_do_nothing_is_an_error(write: WritePage, text: str, words: str) -> None:
    with pytest.raises(PageError, match=words):
        read_page(write(text))


def test_other_comments_and_languages_are_left_alone(write: WritePage) -> None:
    page = read_page(write("<!-- a note -->\n```yaml\na: 1\n```\n\n```\nplain\n```\n"))
    assert (page.python, page.shell, page.ranks) == ([], [], None)


def test_shell_lines_name_existing_targets(write: WritePage) -> None:
    page = read_page(
        write("""\
        ```bash
        cd somewhere && make nothing
        make demo        # comments and options do not count
        $ make -j2 PYTHON=python3.12 test && echo done
        make tests
        ```
        """)
    )
    assert shell_problems(page.path, page.shell[0]) == [f"{page.path}:5: the Makefile has no target 'tests'"]


def test_shell_lines_name_existing_subcommands(write: WritePage) -> None:
    page = write("""\
        ```bash
        lockstep --help
        lockstep no-such-thing --flag "open quote
        ```
        """)
    with pytest.raises(PageError, match=r"page.md:3: 'lockstep no-such-thing --help' fails"):
        check_page(page)
    check_page(write("<!-- test: skip: a later release -->\n```bash\nlockstep no-such-thing\n```\n"))
