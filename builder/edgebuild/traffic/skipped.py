"""Words for the rows of a trace that are left out: why, how many, and where the first of each kind stands.

Every reason reads on after a number ("2 negative"), and there is a fixed set of them, whatever the trace holds.
"""

from __future__ import annotations

from collections.abc import Mapping

NOT_WHOLE = "not a whole number"
NEGATIVE = "negative"
NO_PROMPT = "with no prompt tokens"
NO_OUTPUT = "with no output tokens"
_LONGEST_SHOWN = 40  # characters of a value


def without(column: str) -> str:
    """The reason for a row that lacks a column, or whose field there is empty."""
    return f"without {column}"


def shown(column: str, value: object) -> str:
    """A column and its value on one line: control characters escaped, a long value cut, a nested one left out."""
    if isinstance(value, (dict, list)):
        return f"{column} {'{…}' if isinstance(value, dict) else '[…]'}"
    text = repr(value[: _LONGEST_SHOWN + 1] if isinstance(value, str) else value)
    return f"{column} {text if len(text) <= _LONGEST_SHOWN + 2 else text[:_LONGEST_SHOWN] + '…'}"


def skipped_text(skipped: Mapping[str, int], first: Mapping[str, str]) -> str:
    """One line on all rows left out, the most frequent reason first.

    skipped   reason -> rows; not empty
    first     reason -> where the first such row stands, for the reasons of which that is known
    """
    total = sum(skipped.values())
    parts = []
    for reason, rows in sorted(skipped.items(), key=lambda item: -item[1]):
        place = f" ({first[reason]})" if first.get(reason) else ""
        parts.append(f"{rows:,} {reason}{place}" if len(skipped) > 1 else f"{reason}{place}")
    return f"skipped {total:,} {'row' if total == 1 else 'rows'}: {', '.join(parts)}"
