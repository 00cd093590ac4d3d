"""The knowledge base: every entry is whole, matches its own examples, and no other entry's."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomllib

from lockstep.doctor.nccl import knowledge, message
from lockstep.doctor.nccl.knowledge import Knowledge, LogPattern
from lockstep.errors import ConfigError

KNOWLEDGE = knowledge.load()
EXAMPLES = [(entry, line) for entry in KNOWLEDGE.entries for line in entry.examples]

GOOD = """
- id: a
  regex: "went (wrong|bad)"
  level: error
  role: cause
  meaning: It went wrong.
  remedies: [Do it again.]
  source: https://example.com/1
  examples: ["it went bad"]
"""


def test_there_are_enough_entries() -> None:
    assert len(KNOWLEDGE.entries) >= 40


@pytest.mark.parametrize(("entry", "line"), EXAMPLES, ids=[f"{entry.id}-{len(line)}" for entry, line in EXAMPLES])
def test_an_example_belongs_to_one_entry(entry: LogPattern, line: str) -> None:
    assert [other.id for other in KNOWLEDGE.entries if other.regex.search(line)] == [entry.id]


@pytest.mark.parametrize(("entry", "line"), EXAMPLES, ids=[f"{entry.id}-{len(line)}" for entry, line in EXAMPLES])
def test_an_example_is_found_the_way_a_log_is_read(entry: LogPattern, line: str) -> None:
    said = message.parse(line.encode())
    # The text after torch's `Last error:` has nothing of NCCL in it, and is read because of the line before.
    if said.level or not line.startswith(("Duplicate GPU", "socketProgressOpt", "Failed to bind")):
        assert any(hint in line.encode() for hint in message.HINTS)
    find = KNOWLEDGE.find_info if said.level == "INFO" else KNOWLEDGE.find
    found = find(said.whole)
    assert found is not None
    assert found.id == entry.id


@pytest.mark.parametrize("entry", KNOWLEDGE.entries, ids=lambda entry: entry.id)
def test_an_entry_is_fit_to_be_read(entry: LogPattern) -> None:
    assert entry.meaning.endswith(".")
    assert "please" not in entry.meaning.lower()
    assert entry.source.startswith("https://")
    # A pattern that matches nothing in particular would explain everything.
    for harmless in ("", "epoch 3 loss 0.1", "node1:1:1 [0] NCCL INFO Connected all rings", "NCCL WARN"):
        assert not entry.regex.search(harmless)


def test_ordinary_lines_are_not_explained() -> None:
    for line in (
        "node1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read",
        "node1:1:2 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>",
        "node1:1:2 [0] graph/search.cc:1 NCCL WARN A message that nobody has seen before",
        "WARNING: the learning rate is large",
    ):
        assert KNOWLEDGE.find(line) is None
        assert KNOWLEDGE.find_info(line) is None


def test_the_file_is_part_of_the_package() -> None:
    root = Path(__file__).resolve().parents[3]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["lockstep"]
    assert "doctor/nccl/knowledge.yaml" in data


def test_a_good_file_is_read() -> None:
    found = knowledge.parse(GOOD)
    assert isinstance(found, Knowledge)
    assert [entry.id for entry in found.entries] == ["a"]
    entry = found.find("something went wrong here")
    assert entry is not None
    assert found.find_info("something went wrong here") is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("went (wrong|bad)", "went (wrong"), "regex is none"),
        (("level: error", "level: fatal"), "level is 'fatal'; allowed: error, warning, note"),
        (("role: cause", "role: guilty"), "allowed for an error: cause, follows"),
        (("https://example.com/1", "somebody said so"), "source has to be an address"),
        (("it went bad", "it went well"), "does not match its example"),
        (("remedies: [Do it again.]", "remedies: []"), "remedies has to be a list of texts"),
        (("  meaning: It went wrong.\n", ""), "meaning is missing"),
        (("  level: error", "  colour: red\n  level: error"), "colour is not a key"),
        (("- id: a", "id: a"), "no YAML"),
    ],
)
def test_a_bad_file_says_what_is_wrong(change: tuple[str, str], said: str) -> None:
    text = GOOD.replace(*change)
    assert text != GOOD
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        knowledge.parse(text)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        knowledge.parse(GOOD + GOOD.replace("level: error", "level: fatal"))
    assert len(error.value.problems) == 1
    with pytest.raises(ConfigError) as error:
        knowledge.parse(GOOD + GOOD)
    assert "two entries have this id" in str(error.value)
    with pytest.raises(ConfigError, match="list of entries"):
        knowledge.parse("a: 1")
