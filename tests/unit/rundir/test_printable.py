from __future__ import annotations

import unicodedata

import pytest

from lockstep.rundir.printable import printable, uncoloured


def test_every_control_character_is_written_out_and_nothing_else_changes() -> None:
    for code in range(0x110000):
        char = chr(code)
        shown = printable(char)
        control = unicodedata.category(char) in ("Cc", "Cs") and char not in "\t\n"
        assert (shown != char) == (
            control or code in {0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)}
        )
        if control:
            assert shown.startswith("\\")
            assert shown.isprintable()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("50%\r100%\r\n", "50%\\r100%\\r\n"),
        ("\x9b2J", "\\x9b2J"),
        ("a\tb\nc é 漢 ███▍", "a\tb\nc é 漢 ███▍"),
        ("gpj.\u202eexe", "gpj.\\u202eexe"),
    ],
)
def test_texts(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_colours_can_be_left_out() -> None:
    assert uncoloured("\x1b[1;31mred\x1b[0m \x1b[2J") == "red \x1b[2J"
