"""Secrets that stand beside their name in a text: assignments, options, pairs, lists and blocks, however nested.

The text is read once, from left to right. Only the name is taken from it first; whether its value is one more name
(`client = Client(api_key='x')`) shows when the value is read in its turn.
"""

from __future__ import annotations

import re

from lockstep.doctor.secret_patterns import HIDDEN, Secrecy, is_random, is_secret, secrecy

_QUOTED = r"\\\"(?:[^\"\\\n]|\\[^\"\n])*\\\"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
_NAME = r"[A-Za-z_][\w.-]{0,80}"
_VALUE = (
    rf"(?:[A-Za-z_]\w{{0,30}}\((?=[\"']))?(?:[bBrRuUfF]{{1,2}}(?=[\"']))?(?P<value>\(hidden\)|\"\"\"[\s\S]*?\"\"\"|'''[\s\S]*?'''|{_QUOTED}"
    r"|\\?[\"'][^\n]*|[^\s\"',;&|)}\]]+)"
)
_READ_VALUE = re.compile(_VALUE)
_ASSIGNED = re.compile(
    rf"(?<![\w.-])-{{0,2}}(?P<name>{_NAME})(?P<close>\\?[\"']?\]?)[ \t]*(?P<sign>:=|=>|==?|:(?!//))[ \t]*"
)
_LINE_START = re.compile(r"[ \t]*(?:-[ \t]+|export[ \t]+|declare[ \t]+-\w+[ \t]+)?[\"']?")
_STOP = re.compile(r"[ \t]+(?:[\w.-]{1,80}[ \t]*[:=]|[|#&;\\])|,(?=[ \t]|$)|;|[\"')}\]]?[ \t\r]*$")
_BLOCK = re.compile(r"(?:![\w-]{1,40}[ \t]+)?[|>][-+\d]{0,3}[ \t]*\r?\n")
_NOTHING = re.compile(r"[ \t]*\r?\n")
_ENTRY = re.compile(rf"([ \t]*(?:-[ \t]+)?(?:[\"']?{_NAME}[\"']?:[ \t]+)?)([^\r\n]*)")
_ITEM = re.compile(rf"(?P<lead>\s*(?:,\s*)?)(?P<value>{_QUOTED}|[^\s\"',\[\]{{}}:=()]+)")
_VALUE_IN_MAPPING = re.compile(rf"(?<=:)[ \t]*(?:{_QUOTED})")
_FLAT = re.compile(r"\{[^{}]*\}")

_PAIRS = (
    re.compile(rf"(?P<lead>(?<![\w.-])--?(?P<name>{_NAME})\s+(?!-)){_VALUE}"),
    re.compile(
        rf"(?P<lead>(?P<mark>[\"'])(?:--?|:)?(?P<name>{_NAME})(?P=mark)[ \t]*,\s{{0,40}}(?:[a-z_]{{1,20}}=)?b?)"
        rf"(?P<value>{_QUOTED})(?![ \t]*:)"
    ),
    re.compile(
        rf"(?P<lead>\bname[\"']?[ \t]*[:=][ \t]*[\"']?(?P<name>{_NAME})[\"']?[ \t]*[,\n]\s{{0,40}}[\"']?value[\"']?"
        rf"[ \t]*[:=][ \t]*){_VALUE}"
    ),
    re.compile(rf"(?P<lead>\b(?:setenv|setx|ENV|set)[ \t]+(?P<name>{_NAME})[ \t]+){_VALUE}"),
    re.compile(rf"(?P<lead><(?P<name>{_NAME})>)(?P<value>[^<\n]{{1,4000}})(?=</)"),
)
_SHORT = re.compile(r"(?P<lead>(?<=\s)-(?:p|pw)\s+)(?P<value>[^\s\"',;&|)}\]]{12,})")


def hide_assigned(text: str) -> str:
    """The text without the secrets that have a name in it."""
    for pattern in _PAIRS:
        text = pattern.sub(_hide_pair, text)
    text = _SHORT.sub(lambda found: found["lead"] + (HIDDEN if is_random(found["value"]) else found["value"]), text)
    pieces, start = [], 0
    while found := _ASSIGNED.search(text, start):
        end, shown = found.end(), ""
        if secrecy(found["name"]) != Secrecy.NONE:
            end, shown = _value(text, found)
        pieces += [text[start : found.end()], shown]
        start = end
    return "".join([*pieces, text[start:]])


def _hide_pair(found: re.Match[str]) -> str:
    mark, value = _unquoted(found["value"])
    if not is_secret(found["name"], value, quoted=bool(mark)):
        return found[0]
    return f"{found[0][: found.start('value') - found.start()]}{mark}{HIDDEN}{mark}"


def _value(text: str, found: re.Match[str]) -> tuple[int, str]:
    """Where what the name holds ends, and how it is shown; an end at its beginning where there is nothing to hide."""
    name, start = found["name"], found.end()
    if found["sign"] == ":":
        if block := _BLOCK.match(text, start):
            return _block(text, found, block.end(), whole=True)
        if nothing := _NOTHING.match(text, start):
            return _block(text, found, nothing.end(), whole=False)
    if text.startswith(("[", "("), start) and not text.startswith(HIDDEN, start):
        return _list(text, name, start)
    if text.startswith("{", start) and (flat := _FLAT.match(text, start)):
        return flat.end(), f"{{{HIDDEN}}}" if secrecy(name) == Secrecy.ALWAYS else _mapping(flat[0], name)
    read = _READ_VALUE.match(text, start)
    if read is None:
        return start, ""
    mark, value = _unquoted(read["value"])
    if not is_secret(name, value, quoted=bool(mark)):
        return start, ""
    end = read.end()
    if not mark and secrecy(name) == Secrecy.ALWAYS and _begins_line(text, found):
        line_end = text.find("\n", start)
        stop = _STOP.search(text, end, len(text) if line_end < 0 else line_end)
        end = stop.start() if stop is not None else end
    return end, f"{text[start : read.start('value')]}{mark}{HIDDEN}{mark}"


def _begins_line(text: str, found: re.Match[str]) -> bool:
    before = text[max(0, found.start() - 60) : found.start()]
    line = before.rpartition("\n")[2]
    return (len(line) < 60 or found.start() <= 60) and _LINE_START.fullmatch(line) is not None


def _unquoted(value: str) -> tuple[str, str]:
    """The sign of quotation, and what is inside; one that is not closed ends with the line."""
    for mark in ('\\"', '"""', "'''", '"', "'"):
        if value.startswith(mark):
            return mark, value[len(mark) :].removesuffix(mark)
    return "", value


def _list(text: str, name: str, start: int) -> tuple[int, str]:
    """Each item that is a secret; a list that holds more than texts ends there."""
    pieces, end = [text[start]], start + 1
    while item := _ITEM.match(text, end):
        mark, value = _unquoted(item["value"])
        hidden = is_secret(name, value, quoted=bool(mark))
        pieces.append(f"{item['lead']}{mark}{HIDDEN}{mark}" if hidden else item[0])
        end = item.end()
    return end, "".join(pieces)


def _mapping(text: str, name: str) -> str:
    """What is a secret under the name of the whole, or under its own."""

    def hide(found: re.Match[str]) -> str:
        mark, value = _unquoted(found[0].lstrip())
        return f" {mark}{HIDDEN}{mark}" if is_secret(name, value) else found[0]

    inner = hide_assigned(text[1:-1])
    return f"{{{_VALUE_IN_MAPPING.sub(hide, inner)}}}"


def _block(text: str, found: re.Match[str], start: int, *, whole: bool) -> tuple[int, str]:
    """The lines below a name in YAML that belong to it: the text of a block, or the entries of a list or mapping."""
    line = text[max(0, found.start() - 200) : found.start()].rpartition("\n")[2]
    depth = len(line) - len(line.lstrip(" \t"))
    pieces, end = [text[found.end() : start]], start
    while end < len(text):
        stop = text.find("\n", end)
        stop = len(text) if stop < 0 else stop + 1
        below = text[end:stop]
        bare = below.strip()
        indent = len(below) - len(below.lstrip(" \t"))
        if bare and not (indent > depth or (not whole and indent == depth and bare.startswith("- "))):
            break
        shown = _entry(below, found["name"], whole=whole)
        if shown == below and any(secrecy(inner["name"]) != Secrecy.NONE for inner in _ASSIGNED.finditer(below)):
            break  # it has a name of its own, which says more about it
        pieces.append(shown)
        end = stop
    return end, "".join(pieces)


def _entry(line: str, name: str, *, whole: bool) -> str:
    found = _ENTRY.match(line)
    if found is None or not found[2]:
        return line
    if whole:
        indent = line[: len(line) - len(line.lstrip(" \t"))]
        return indent + HIDDEN + line[found.end() :]
    mark, value = _unquoted(found[2].rstrip(" \t,"))
    return f"{found[1]}{mark}{HIDDEN}{mark}{line[found.end() :]}" if is_secret(name, value) else line
