"""Which files are the user's."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.blackbox.sites import find_user_frame, is_user_file, spell_site

OURS = os.path.dirname(lockstep.__file__)


@pytest.mark.parametrize(
    ("name", "is_users"),
    [
        ("/home/me/train.py", True),
        ("train.py", True),
        ("<stdin>", True),
        ("/home/me/torch/train.py", True),
        (OURS + "_extra/train.py", True),
        (f"{OURS}/comm/tensors.py", False),
        (f"{os.path.dirname(torch.__file__)}/nn/modules/module.py", False),
        (contextlib.__file__, False),
        ("<frozen runpy>", False),
        ("<eval_with_key>.3", False),
    ],
)
def test_is_user_file(name: str, is_users: bool) -> None:
    assert is_user_file(name) == is_users


def test_the_innermost_frame_of_the_users_is_found() -> None:
    names: dict[str, object] = {"sys": sys}
    exec(compile("def inner():\n    return sys._getframe()", f"{OURS}/anything.py", "exec"), names)
    inner = names["inner"]
    assert callable(inner)
    passed: dict[int, object] = {}
    frame = inner()
    assert spell_site(find_user_frame(frame, passed)).startswith(f"{__file__}:")  # type: ignore[arg-type]
    assert list(passed.values()) == [inner.__code__]  # type: ignore[attr-defined]


def test_where_all_is_ours_the_outermost_file_is_named(tmp_path: Path) -> None:
    import subprocess

    code = (
        "import sys; from lockstep.blackbox import sites; "
        f"sites._NOT_USERS = (*sites._NOT_USERS, {str(tmp_path)!r}, '<string>'); "
        f"sys.path.insert(0, {str(tmp_path)!r}); import outer"
    )
    (tmp_path / "outer.py").write_text("import inner\n")
    (tmp_path / "inner.py").write_text(
        "import sys\nfrom lockstep.blackbox.sites import *\nprint(spell_site(find_user_frame(sys._getframe(), {})))\n"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert child.stdout.strip() == f"{tmp_path}/outer.py:1"
