"""Texts that records of a black box name by their place and hash, as the rank writes them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from lockstep.blackbox import layout

_EMPTY = object()


class TextTable:
    """One table of texts in the file. A new text takes the place of the oldest: the table never fills up."""

    __slots__ = ("_keys", "_next", "_table", "known")

    def __init__(self, table: layout.Table) -> None:
        self._table = table
        self._keys: list[Any] = [_EMPTY] * table.slots
        self._next = 0
        self.known: dict[Any, tuple[int, int, object]] = {}
        """Hash, place from 1, and what must live as long as the key does."""

    @property
    def full(self) -> bool:
        """Whether the next text takes another one's place."""
        return self._keys[self._next] is not _EMPTY

    def add(self, buffer: Any, words: memoryview, key: Hashable, text: str, kept: object = None) -> tuple[int, int]:
        """Write a text; what it is named by in records from now on."""
        slot = self._next
        self._next = (slot + 1) % self._table.slots
        self.known.pop(self._keys[slot], None)
        mark = layout.hash_text(text)
        data = layout.fit(text, mark, self._table)
        start = self._table.start + slot * self._table.size
        first, last = start // layout.WORD, (start + self._table.size) // layout.WORD - 1
        text_start = start + 2 * layout.WORD
        buffer[text_start : text_start + len(data)] = data
        words[first + 1] = len(data)
        words[last] = layout.check_of_words(mark, len(data)) ^ layout.check_of(data)
        words[first] = mark
        self._keys[slot] = key
        self.known[key] = (mark, slot + 1, kept)
        return mark, slot + 1
