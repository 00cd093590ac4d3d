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

HIDDEN = "(hidden)"
"""Stands for what was taken out."""
SHORTEST = 6
"""Characters that a secret needs to be looked for elsewhere: shorter ones are parts of ordinary words."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET = frozenset(
    (
        *("token", "key", "secret", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "auth"),
        *("authorization", "cookie", "bearer", "jwt", "dsn"),
    )
)
"""Words that make a name that of a secret. Tokens in the plural are counted, not kept."""
_ENDINGS = ("password", "passwd", "secret", "token", "apikey", "accesskey", "privatekey", "secretkey", "credentials")
"""Ends of words that do the same: PGPASSWORD, authtoken."""
_HARMLESS = re.compile(
    r"^(?:OLD)?PWD$|AUTH_SOCK|TOKENIZERS?|(?:PAD|BOS|EOS|UNK|SEP|CLS|MASK)_TOKEN|TOKEN_ID|^KEY$|PUBLIC_?KEY"
    r"|(?:SORT|PRIMARY|FOREIGN|CACHE)_?KEY|KEY_?(?:PADDING|FRAME|VALUE)|(?:Error|Exception)$",
    re.IGNORECASE,
)
_SHAPES = [
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"\bhf_[A-Za-z0-9]{16,}"),  # Hugging Face
    re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})"),
    re.compile(r"\bglpat-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\b(?:sk|pk|rk)-(?:[a-z]+-)*[A-Za-z0-9_-]{16,}"),  # OpenAI, Anthropic and others
    re.compile(r"\b(?:sk|pk|rk)_(?:live|test)_[A-Za-z0-9]{16,}"),
    re.compile(r"\b(?:A3T[A-Z0-9]|AKIA|ASIA|AGPA|AIDA|AROA)[A-Z0-9]{16}\b"),  # Amazon
    re.compile(r"\bAIza[A-Za-z0-9_-]{30,}"),  # Google
    re.compile(r"\bya29\.[A-Za-z0-9_-]{20,}"),
    re.compile(r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"),  # Slack
    re.compile(r"\bdckr_pat_[A-Za-z0-9_-]{16,}"),
    re.compile(r"\bnpm_[A-Za-z0-9]{30,}|\bpypi-[A-Za-z0-9_-]{30,}"),
    re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),  # a JSON web token
    re.compile(
        r"(?<=[?&;])(?:sig|X-Amz-Signature|X-Amz-Credential|X-Goog-Signature|AccessKeyId|token)=[^\s&\"'<>]+", re.I
    ),
    re.compile(r"\b(?:AccountKey|SharedAccessKey|SharedAccessSignature)=[^\s;\"']+", re.I),  # Azure
]
_KEY_END = re.compile(r"-----END [A-Z ]*PRIVATE KEY-----")
_KEY_LINE = re.compile(r"[A-Za-z0-9+/=]{1,120}\s*")
_IN_URL = re.compile(r"(?<=://)[^/\s\"'@]*:[^/\s\"']*(?=@)|(?<=://)[^/\s\"'@]+(?=@)")
_HEADER = re.compile(
    r"((?:Authorization|Proxy-Authorization|X-Api-Key|Cookie|Set-Cookie)[\"']?\s*[:=]\s*[\"']?)[^\r\n\"']+", re.I
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9+/=._~-]{8,}")
_VALUE = r"(?P<value>\(hidden\)|\\\"[^\"]*?\\\"|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[^\s\"',;&|)}\]]+)"
_ASSIGNED = re.compile(rf"(?P<lead>(?<![\w.-])-{{0,2}}(?P<name>[A-Za-z_][\w.-]{{0,80}})\\?[\"']?\s*[:=]\s*){_VALUE}")
_OPTION = re.compile(rf"(?P<lead>(?<![\w.-])(?P<name>--?[A-Za-z_][\w.-]{{0,80}})\s+(?!-)){_VALUE}")
_PLAIN = re.compile(r"^(?:None|null|true|false|yes|no|on|off|\d{1,9}(?:\.\d+)?|\(hidden\)|)$", re.IGNORECASE)


def names_a_secret(name: str) -> bool:
    """Whether what goes by this name is a secret: HF_TOKEN, --api-key, clientSecret, db.password."""
    name = name.strip("-")
    words = [word.lower() for word in _WORD.findall(name)]
    telling = any(word in _SECRET or word.endswith(_ENDINGS) for word in words)
    return telling and not _HARMLESS.search(name)


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
                if names_a_secret(str(key)):
                    for text in _texts(value):
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
        for found in _IN_URL.finditer(text):
            for part in found[0].split(":", 1)[1:] or [found[0]]:
                self._remember(part)
                self._remember(unquote(part))

    def _remember(self, value: str) -> None:
        value = value.strip()
        if len(value) >= SHORTEST and not _PLAIN.match(value) and value not in self._values:
            self._values.add(value)
            self._known = None

    # ---------------------------------------------------------------- taking out

    def text(self, text: str) -> str:
        """The text without its secrets."""
        for way in self._ways():
            if way in text:
                text = text.replace(way, HIDDEN)
        for shape in _SHAPES:
            text = shape.sub(HIDDEN, text)
        text = _without_rests_of_keys(text)
        text = _IN_URL.sub(HIDDEN, text)
        text = _HEADER.sub(rf"\1{HIDDEN}", text)
        text = _BEARER.sub(rf"\1 {HIDDEN}", text)
        return _OPTION.sub(_hide_assigned, _ASSIGNED.sub(_hide_assigned, text))

    def data(self, structure: Any, name: str = "") -> Any:
        """Nested data without its secrets: what a key names one is hidden whole."""
        if name and names_a_secret(name) and not isinstance(structure, (bool, int, float, type(None))):
            return HIDDEN
        if isinstance(structure, Mapping):
            return {self.text(str(key)): self.data(value, str(key)) for key, value in structure.items()}
        if isinstance(structure, (list, tuple)):
            if structure and all(isinstance(item, str) for item in structure):
                return self.argv(structure)
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
    for end in _KEY_END.finditer(text):
        lines = text[start : end.start()].splitlines(keepends=True)
        while lines and _KEY_LINE.fullmatch(lines[-1]):
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


def _hide_assigned(found: re.Match[str]) -> str:
    """`token=abc`, `"password": "x"`, `--api-key abc`; numbers and words like None stay, as training logs have many."""
    value = found["value"]
    mark = next((mark for mark in ('\\"', '"', "'") if value.startswith(mark) and len(value) > len(mark)), "")
    if not names_a_secret(found["name"]) or _PLAIN.match(value[len(mark) : len(value) - len(mark)]):
        return found[0]
    return f"{found['lead']}{mark}{HIDDEN}{mark}"
