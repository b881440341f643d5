"""Sizes as people write them, `64 GiB`, into bytes. Strict: the unit must be there, spelt as the standard has it."""

from __future__ import annotations

import difflib
import re
from decimal import Decimal

UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
PATTERN = r"^[0-9]+(\.[0-9]+)? ?(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)$"


def parse_bytes(value: object) -> int:
    """Bytes of a whole number, or of a text such as `64 GiB` or `1.5 GB`. Raises ValueError with what was expected."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no size: expected bytes as a whole number, or a text such as 64 GiB")
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
    if match is None:
        raise ValueError(f"{value!r} is no size: expected a number and a unit, such as 64 GiB")
    number, unit = match.groups()
    if not unit:
        raise ValueError(f"{value!r} has no unit: expected one of {', '.join(UNITS)}")
    if unit not in UNITS:
        lowered = {name.lower(): name for name in UNITS}
        near = difflib.get_close_matches(unit.lower(), lowered, n=1, cutoff=0.5)
        meant = f" (did you mean {lowered[near[0]]}?)" if near else ""
        raise ValueError(f"{unit!r} is no unit of bytes{meant}: expected one of {', '.join(UNITS)}")
    size = Decimal(number) * UNITS[unit]
    if size != int(size):
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(size)


def human_bytes(size: int) -> str:
    """A size for people, decimal as in data sheets: `64.0 GB`."""
    for unit in ("TB", "GB", "MB", "kB"):
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:.1f} {unit}"
    return f"{size} B"
