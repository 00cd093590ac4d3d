"""Which line of the user's script led here, fast enough to be asked at every collective."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from types import CodeType, FrameType

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_NOT_USERS = (_OURS, "<frozen ", "<eval_with_key>")
"""The last one is what torch's compiler calls the code that it writes."""
_BETWEEN = frozenset({contextlib.__file__, functools.__file__})
"""Files of Python's own that stand between the user and us."""


def is_user_file(name: str) -> bool:
    """Whether a file is neither of this package nor of torch."""
    if name.startswith(_NOT_USERS) or name in _BETWEEN:
        return False
    # Looked up, not imported; and not "/torch/" in the name: the user's own folder may be called so.
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return torch is None or not name.startswith(os.path.dirname(torch) + os.sep)


def spell_site(frame: FrameType) -> str:
    """``file:line`` of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def spell_path(frame: FrameType) -> str:
    """All lines of the user's that led to a frame, innermost first.

    Files without their folder: the same script can lie in different places on different nodes.
    """
    lines = []
    here: FrameType | None = frame
    while here is not None:
        if is_user_file(here.f_code.co_filename):
            lines.append(f"{os.path.basename(here.f_code.co_filename)}:{here.f_lineno}")
        here = here.f_back
    return " < ".join(lines)


def find_user_frame(frame: FrameType, passed: dict[int, CodeType]) -> FrameType:
    """The innermost frame of the user's, from ``frame`` outwards; where there is none, the outermost that has a file.

    Code that is not the user's is noted in ``passed`` under its id. It is kept alive there: an id alone may come to
    mean another code.
    """
    outermost = frame
    here: FrameType | None = frame
    while here is not None:
        code = here.f_code
        if id(code) not in passed:
            if is_user_file(code.co_filename):
                return here
            passed[id(code)] = code
        if not code.co_filename.startswith("<"):
            outermost = here
        here = here.f_back
    return outermost
