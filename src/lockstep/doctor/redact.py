"""Taking secrets out of what is shown to others: tokens, keys, passwords, and addresses with credentials in them.

They are known by the name of what holds them (a variable, an option, a key in a file), by their shape (each service has
its own), and by their value: what one place names a secret is taken out of all others too, in every way it is written.
What has no telling name, no known shape, and is named nowhere as a secret cannot be known: the user reads it through.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from lockstep.doctor import secret_patterns as patterns
from lockstep.doctor.secret_assignments import hide_assigned
from lockstep.doctor.secret_patterns import HIDDEN, names_a_secret

__all__ = ["HIDDEN", "SHORTEST", "Redactor", "names_a_secret"]

SHORTEST = 6
"""Characters that a secret needs to be looked for elsewhere: shorter ones are parts of ordinary words."""


class Redactor:
    """Takes secrets out; what it has learned is taken out everywhere."""

    def __init__(self) -> None:
        self._values: set[str] = set()
        self._known: list[str] | None = None

    # ---------------------------------------------------------------- learning

    def learn(self, environ: Mapping[str, str] | None = None, argv: Sequence[str] = ()) -> Redactor:
        """Remember the secrets that an environment and a command line name; returns itself."""
        for name, value in (environ or {}).items():
            if names_a_secret(name):
                self._remember(value)
            self._learn_text(value)
        for place, start in _argument_secrets(argv).items():
            self._remember(argv[place][start:])
        for word in argv:
            self._learn_text(word)
        return self

    def learn_from(self, structure: Any) -> Redactor:
        """Remember what keys and command lines in nested data name; returns itself."""
        if isinstance(structure, Mapping):
            for key, value in structure.items():
                for text in _texts(value):
                    if _hides(str(key), text):
                        self._remember(text)
                self.learn_from(value)
        elif isinstance(structure, (list, tuple)):
            if all(isinstance(item, str) for item in structure):
                self.learn(argv=structure)
            for item in structure:
                self.learn_from(item)
        elif isinstance(structure, str):
            self._learn_text(structure)
        return self

    def _learn_text(self, text: str) -> None:
        """The passwords in addresses, which may turn up without the address."""
        for found in patterns.IN_URL.finditer(text):
            for part in found[0].split(":", 1)[1:] or [found[0]]:
                self._remember(part)
                self._remember(unquote(part))

    def _remember(self, value: str) -> None:
        value = value.strip()
        if len(value) >= SHORTEST and not patterns.PLAIN.match(value) and value not in self._values:
            self._values.add(value)
            self._known = None

    # ---------------------------------------------------------------- taking out

    def text(self, text: str) -> str:
        """The text without its secrets."""
        for way in self._ways():
            if way in text:
                text = text.replace(way, HIDDEN)
        text = patterns.KEY_BLOCK.sub(HIDDEN, text)
        text = _without_rests_of_keys(text)
        text = patterns.RUN.sub(lambda run: patterns.SHAPE.sub(HIDDEN, run[0]), text)
        text = patterns.IN_PLACE.sub(HIDDEN, text)
        text = patterns.IN_URL.sub(HIDDEN, text)
        for pattern in patterns.IN_CONTEXT:
            text = pattern.sub(rf"\1{HIDDEN}", text)
        for command, secret in patterns.COMMANDS:
            text = _without_arguments(text, command, secret)
        return hide_assigned(text)

    def data(self, structure: Any, name: str = "") -> Any:
        """Nested data without its secrets: what a key names one is hidden whole."""
        if name and not isinstance(structure, (bool, int, float, type(None))) and _hides(name, structure):
            return HIDDEN
        if isinstance(structure, Mapping):
            return {self.text(str(key)): self.data(value, str(key)) for key, value in structure.items()}
        if isinstance(structure, (list, tuple)):
            if structure and all(isinstance(item, str) for item in structure):
                words = self.argv(structure)
                return [HIDDEN if _hides(name, item) else word for item, word in zip(structure, words, strict=True)]
            return [self.data(item) for item in structure]
        return self.text(structure) if isinstance(structure, str) else structure

    def argv(self, words: Sequence[str]) -> list[str]:
        """A command line without its secrets: `--token X`, `--token=X`, `TOKEN=X`, and what looks like one."""
        hidden = _argument_secrets(words)
        shown = []
        for number, word in enumerate(words):
            shown.append(word[: hidden[number]] + HIDDEN if number in hidden else self.text(word))
        return shown

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """An environment without its secrets."""
        return {name: HIDDEN if names_a_secret(name) else self.text(value) for name, value in environ.items()}

    def _ways(self) -> Sequence[str]:
        """All that is known, in every way it is written; the longest first, as one may be the beginning of another."""
        if self._known is None:
            ways = {way for value in self._values for way in _written(value)}
            self._known = sorted(ways, key=len, reverse=True)
        return self._known


def _written(value: str) -> Iterable[str]:
    """The ways in which a text is written: as it is, in JSON, in Python, in an address, in the shell."""
    yield value
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield repr(value)[1:-1]
    yield quote(value, safe="")
    yield quote(value)
    yield quote_plus(value)
    yield value.replace("'", "'\"'\"'")
    # Logs are read line by line: the lines of a long one are looked for one by one.
    yield from (line for line in value.splitlines() if len(line) >= 2 * SHORTEST)


def _without_rests_of_keys(text: str) -> str:
    """Without the lines of a private key whose beginning was cut off: those above its end."""
    pieces, start = [], 0
    for end in patterns.KEY_END.finditer(text):
        lines = text[start : end.start()].splitlines(keepends=True)
        while lines and patterns.KEY_LINE.fullmatch(lines[-1]):
            lines.pop()
        pieces += ["".join(lines), HIDDEN]
        start = end.end()
    return "".join([*pieces, text[start:]]) if pieces else text


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _argument_secrets(words: Sequence[str]) -> dict[int, int]:
    """The words of a command line that hold a secret, and where in the word it begins.

    It stands after an option that names one, or together with it.
    """
    found = {}
    for number, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        if word.startswith("-") and names_a_secret(flag):
            if equals:
                found[number] = len(flag) + 1
            elif number + 1 < len(words):
                found[number + 1] = 0
    return found


def _without_arguments(text: str, command: re.Pattern[str], secret: re.Pattern[str]) -> str:
    """Without what certain commands take as a secret. Once per line, so that no line costs more than its length."""
    pieces, start = [], 0
    while found := command.search(text, start):
        end = text.find("\n", found.end())
        end = len(text) if end < 0 else end
        # From the blank behind the command on, which the argument's pattern begins with.
        pieces += [text[start : found.end() - 1], secret.sub(rf"\1{HIDDEN}", text[found.end() - 1 : end])]
        start = end
    return "".join([*pieces, text[start:]]) if pieces else text


def _hides(name: str, value: Any) -> bool:
    """Whether what a key holds is hidden whole: always, or, of `key` and `tokens`, what looks drawn at random."""
    if names_a_secret(name):
        return True
    return isinstance(value, str) and patterns.secrecy(name) == patterns.Secrecy.RANDOM and patterns.is_random(value)
