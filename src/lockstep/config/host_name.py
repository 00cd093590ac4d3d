"""What may stand where a host is named: it is part of the command lines of ssh, mpirun and srun."""

from __future__ import annotations

import ipaddress
import re

ALLOWED = "letters, digits, '.', '-' and '_', the first a letter or digit, at most 253; or an IPv4 or IPv6 address"
"""The rule, for error messages."""
LONGEST = 253

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_ZONE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,31}")


def is_host(text: str) -> bool:
    """Whether this is a host's name or address: nothing that a program could take for an option or a shell for more."""
    if len(text) > LONGEST:
        return False
    if ":" not in text:
        return _NAME.fullmatch(text) is not None
    address, percent, zone = text.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return not percent or _ZONE.fullmatch(zone) is not None
