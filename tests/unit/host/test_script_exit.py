"""How a script ended, read off its frame."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import atexit
from lockstep.host import script_exit

frame = script_exit.script_frame()
atexit.register(lambda: print([script_exit.left_by_exception(frame)]))
print([script_exit.left_by_exception(frame)])


def main():
    {body}


{call}
"""


@pytest.mark.parametrize(
    ("body", "call", "left"),
    [
        ("raise SystemExit(3)", "main()", "script.py:14"),
        ("raise SystemExit(0)", "if True:\n    main()", "script.py:15"),
        ("return 4", "raise SystemExit(main())", "script.py:14"),
        ("return 4", "try:\n    main()\nfinally:\n    raise SystemExit", "script.py:17"),
        ("raise SystemExit(3)", "try:\n    main()\nexcept SystemExit:\n    pass", ""),
        ("return 4", "main()", ""),
        ("return 4", "main() if main() else None", ""),
        ("return 4", "if main() == 3:\n    raise SystemExit", ""),
        ("return 4", "for _ in range(2):\n    main()", ""),
        ("return 4", "with open(__file__):\n    main()", ""),
        ("raise ValueError", "main()", "script.py:14"),  # for which an excepthook is called
    ],
)
@pytest.mark.parametrize("how", ["script", "module"])
def test_the_line_at_which_an_exception_left_it(tmp_path: Path, body: str, call: str, left: str, how: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(body=body, call=call))
    command = ["script.py"] if how == "script" else ["-m", "script"]
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["['']", f"['{left}']"], done.stderr
