"""What README.md and docs/ show works: each page is one test (how: tests/docs/runner.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.runner import ROOT, PageError, check_page

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_code_on_the_page_works(page: Path) -> None:
    problem = ""
    try:
        check_page(page)
    except PageError as error:
        problem = str(error)
    if problem:  # outside the handler: the page's own traceback is the one to show, once
        pytest.fail(problem, pytrace=False)
