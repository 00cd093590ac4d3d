"""Which line of the user's script led here."""

from __future__ import annotations

import sys
from pathlib import Path

_OURS = str(Path(__file__).resolve().parents[1])


def user_site() -> str:
    """``file:line`` of the innermost caller outside this package and torch."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OURS) and "/torch/" not in name and not name.endswith("contextlib.py"):
            return f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
