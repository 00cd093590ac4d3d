from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import ConfigError
from lockstep.utils import convert_file_size_to_int


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (1234, 1234),
        ("1KB", 1000),
        ("5MB", 5_000_000),
        ("5.0GB", 5 * 10**9),
        ("2TB", 2 * 10**12),
        ("1KiB", 1024),
        ("1.5MiB", 3 * 2**19),
        ("1GIB", 2**30),
        ("8Gb", 10**9),
        ("8gb", 10**9),
        (" 10 GB ", 10**10),
    ],
)
def test_a_size_as_people_write_it(text: int | str, expected: int) -> None:
    assert convert_file_size_to_int(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GB", "5", "5XB", "-1GB", -1, "1.2.3GB", "infGB", "nanMB", "1e999GB", "5GB5", "٣GB"]
)
def test_what_is_none_is_refused_with_the_units(text: int | str) -> None:
    with pytest.raises(ConfigError, match="KiB, MiB, GiB"):
        convert_file_size_to_int(text)


@given(st.integers(0, 10**6), st.sampled_from(["KB", "MB", "GB", "TB"]))
def test_decimal_units_are_powers_of_a_thousand(number: int, unit: str) -> None:
    assert convert_file_size_to_int(f"{number}{unit}") == number * 1000 ** (1 + "KMGT".index(unit[0]))
