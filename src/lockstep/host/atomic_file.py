"""A file appears under its name when it is complete, or not at all.

It imports nothing that takes time: a rank needs it before anything else is loaded.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Where to write instead; renamed to ``path`` at the end of the block, removed when the block raises."""
    folder, name = os.path.split(os.fspath(path))
    draft = os.path.join(folder, f".{name}.{os.urandom(4).hex()}.part")
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
