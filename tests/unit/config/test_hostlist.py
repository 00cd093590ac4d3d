from __future__ import annotations

import contextlib
import itertools
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import hostlist
from lockstep.errors import TopologyError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("vm", ["vm"]),
        (" vm ", ["vm"]),
        ("a,b-1,c.example.org", ["a", "b-1", "c.example.org"]),
        (
            "node[01-03,07],gpu5-[1-2]x",
            ["node01", "node02", "node03", "node07", "gpu5-1x", "gpu5-2x"],
        ),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("n[98-100]", ["n98", "n99", "n100"]),
        ("n[0-0]", ["n0"]),
        ("n[3,1,2]", ["n3", "n1", "n2"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("[1-2][3-4]", ["13", "14", "23", "24"]),
        ("a[1],a[1]", ["a1", "a1"]),
    ],
)
def test_expands(text: str, hosts: list[str]) -> None:
    assert hostlist.expand(text) == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a host's name is missing at character 1"),
        (",a", "a host's name is missing at character 1"),
        ("a,", "a host's name is missing at character 3"),
        ("a,,b", "a host's name is missing at character 3"),
        ("a[1-2", "'[' at character 2 has no partner"),
        ("a1-2]", "']' at character 5 has no partner"),
        ("a[[1-2]]", "'[' at character 2 has no partner"),
        ("a[1-2]]", "']' at character 7 has no partner"),
        ("a b", "' ' at character 2"),
        ("a[]", "[] holds ''"),
        ("a[1,]", "[1,] holds ''"),
        ("a[1-]", "holds '1-'"),
        ("a[-2]", "holds '-2'"),
        ("a[1-2-3]", "holds '1-2-3'"),
        ("a[x-z]", "holds 'x-z'"),
        ("a[1 - 2]", "holds '1 - 2'"),
        ("a[3-1]", "the range '3-1' runs backwards"),
        ("a[1-" + "9" * 30 + "]", "neither a number nor a range"),
        ("-oProxyCommand=x,b", "'-oProxyCommand=x' is not a host's name"),
        ("a,-b[1-2]", "'-b[1-2]' is not a host's name; allowed are letters, digits,"),
        ("a;reboot", "'a;reboot' is not a host's name"),
        ("$(id)", "'$(id)' is not a host's name"),
        ("n::b", "'n::b' is not a host's name"),
        ("a" * 300, "is not a host's name"),
    ],
)
def test_bad_lists_are_named(text: str, words: str) -> None:
    with pytest.raises(TopologyError) as caught:
        hostlist.expand(text)
    assert f"The host list {hostlist.shortened(text)} cannot be read" in str(caught.value)
    assert words in str(caught.value)
    assert "set MASTER_ADDR" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "a[1-999999999999999999]",
        "a" + "[0-9]" * 2000,
        "a[1-60000],b[1-60000]",
        "a[0-65536]",
    ],
)
def test_expansion_is_bounded(text: str) -> None:
    with pytest.raises(TopologyError, match="more than 65536 hosts") as caught:
        hostlist.expand(text)
    assert len(str(caught.value)) < 400


def test_the_largest_list() -> None:
    assert len(hostlist.expand("a[0-65535]")) == hostlist.MOST_HOSTS


class Piece(NamedTuple):
    """A part of a host's name: how the list writes it, and what it stands for."""

    written: str
    meant: list[str]


LETTERS = st.text("abcxyz0189-._", min_size=1, max_size=5).map(lambda text: Piece(text, [text]))


@st.composite
def brackets(draw: st.DrawFn) -> Piece:
    written, meant = [], []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, 1200))
        last = first + draw(st.integers(0, 4))
        width = draw(st.integers(1, 5))
        alone = first == last and draw(st.booleans())
        written.append(str(first).zfill(width) + ("" if alone else "-" + str(last).zfill(width)))
        meant += [str(number).zfill(width) for number in range(first, last + 1)]
    return Piece(f"[{','.join(written)}]", meant)


@st.composite
def names(draw: st.DrawFn) -> Piece:
    pieces = draw(st.lists(st.one_of(LETTERS, brackets()), min_size=1, max_size=4).filter(_small))
    meant = ["".join(parts) for parts in itertools.product(*(piece.meant for piece in pieces))]
    return Piece("".join(piece.written for piece in pieces), meant)


def _small(pieces: list[Piece]) -> bool:
    # A name that begins with a dash would be an option of ssh and srun.
    return sum(len(piece.meant) > 1 for piece in pieces) <= 2 and pieces[0].meant[0][0] not in "-."


@given(st.lists(names(), min_size=1, max_size=5))
def test_expand_gives_what_was_meant(generated: list[Piece]) -> None:
    text = ",".join(name.written for name in generated)
    assert hostlist.expand(text) == [host for name in generated for host in name.meant]


@given(st.text("a1-,[] x0", max_size=30))
def test_any_text_gives_hosts_or_our_error(text: str) -> None:
    hosts: list[str] = []
    with contextlib.suppress(TopologyError):
        hosts = hostlist.expand(text)
        assert hosts
    assert all(host and not set(host) & set("[], ") for host in hosts)
