from __future__ import annotations

import contextlib
import io

import pytest

from lockstep.topology.standard_streams import print_error


def test_what_the_guard_prints_is_seen_though_stderr_is_redirected(capfd: pytest.CaptureFixture[str]) -> None:
    aside = io.StringIO()
    with contextlib.redirect_stderr(aside):
        print_error("──── rank 1 \udcff")
    assert capfd.readouterr().err == "──── rank 1 \\udcff\n"
    assert not aside.getvalue()
