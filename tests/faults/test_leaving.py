"""A rank that leaves under torchrun by ways for which Python calls no hook: the others learn of it at once."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.faults.jobs import Job, Result, marks
from tests.ranks import OLD_TORCH, in_soak

AT = marks("leaving.py")
LEFT = r"Rank 1 reached the end of the script after wait_for_everyone #\d+ at \S*"
END = rf"{AT['together']} \(SystemExit at {AT['main']}\)"
SAYS = {
    "code": LEFT + END,
    "text": LEFT + END,
    "zero": LEFT + END,
    # Whichever comes first: the guard, the broken connection in DDP, or torchrun's SIGTERM, and then its summary.
    "backward": rf"SystemExit(, which left the script)? at {AT['main']}",
    "os._exit": r"Rank 1 on \S+ \(pid \d+\) died without an exception\. .* "
    rf"after wait_for_everyone #\d+ at \S*{AT['together']}",
    "atexit": r"Rank 1 reached the end of the script .*\(an atexit callback raised ValueError: the log is closed\)",
}
ROOT = {
    "code": rf"rank : 1 .* exitcode : 3 .* SystemExit, which left the script at {AT['main']}",
    "text": rf"rank : 1 .* exitcode : 1 .* SystemExit, which left the script at {AT['main']}",
    "os._exit": "rank : 1 .* exitcode : 3 ",
}


@pytest.mark.parametrize("how", ["code", *in_soak("os._exit", "atexit", "text", "zero", "backward")])
def test_the_others_learn_of_it_at_once(ended: Callable[[Job], Result], how: str) -> None:
    result = ended(Job(scenario=how, script="leaving.py", launcher="torchrun"))
    assert result.code == 1, result
    # An older torchrun ends the others before they can report it; its summary has the cause in any case.
    guard = rf"Missing rank 1 has finished \(SystemExit at {AT['main']}\)"  # it may be first, on a slow machine
    assert re.search(f"{SAYS[how]}|{guard}", result.words) or (OLD_TORCH and "seen at" in result.text), result
    root = result.words.partition("Root Cause (first observed failure):")[2]
    assert re.search(ROOT.get(how, ""), root), result
    seen = re.search(r"seen at ([\d.]+)", result.text)  # not where torchrun's SIGTERM came first
    if seen is not None:
        fault = re.search(r"fault at ([\d.]+)", result.text)
        assert fault is not None
        assert float(seen[1]) - float(fault[1]) < 15, result  # three times the bar


@pytest.mark.parametrize("how", ["all", *in_soak("caught")])
def test_a_good_end_stays_one(ended: Callable[[Job], Result], how: str) -> None:
    result = ended(Job(scenario=how, script="leaving.py", launcher="torchrun"))
    assert result.code == 0, result
    assert "Rank" not in result.text.replace("[Gloo] Rank", "")  # older ones print who is connected
