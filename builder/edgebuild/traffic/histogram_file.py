"""Our own traffic file: a histogram as YAML, exact in both directions.

Counts are sparse `length:count` pairs; the decode contexts, where nearly every length occurs, are `context:change`
pairs (steps at this context minus steps at the one before).
"""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import yaml
from edgert.strictjson import BAD_YAML_VALUE

from edgebuild.errors import TrafficError
from edgebuild.traffic.histogram import LONGEST_TOKENS, Counts, Histogram

MARK = "edgebuild_traffic"
VERSION = 1
LONGEST_TEXT = 4096
_FIELDS = {
    MARK,
    "name",
    "source_sha256",
    "attribution",
    "requests",
    "skipped",
    "tasks",
    "burstiness",
    "prompt_counts",
    "output_counts",
    "decode_context_changes",
}


def dump_histogram(histogram: Histogram) -> str:
    """The YAML text of a histogram; `parse_histogram` gives the same histogram back."""
    plain = {
        MARK: VERSION,
        "name": histogram.name,
        "source_sha256": histogram.source_sha256,
        "attribution": histogram.attribution,
        "requests": histogram.requests,
        "skipped": dict(histogram.skipped),
        "tasks": dict(histogram.tasks),
        **({} if histogram.burstiness is None else {"burstiness": histogram.burstiness}),
    }
    text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=110)
    text += "# size: entries of the array; counts: length:requests, lengths that do not occur are left out\n"
    text += _section("prompt_counts", "counts", histogram.prompt_counts)
    text += _section("output_counts", "counts", histogram.output_counts)
    text += "# decode steps at each context length, as context:change from the context before\n"
    changes = np.diff(histogram.decode_context_counts, prepend=0)
    return text + _section("decode_context_changes", "changes", changes)


def _section(name: str, key: str, values: Counts) -> str:
    at = np.flatnonzero(values)
    pairs = " ".join(f"{a}:{b}" for a, b in zip(at.tolist(), values[at].tolist(), strict=True))
    head = f"{name}:\n  size: {values.size}\n  {key}: "
    if not pairs:
        return head + '""\n'
    return head + ">-\n" + "".join(f"    {line}\n" for line in textwrap.wrap(pairs, 110))


def parse_histogram(text: str, where: str, sha256: str) -> Histogram:
    """The histogram in a YAML text. `sha256` stands in where the file names no source. Raises TrafficError."""
    try:
        data = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, *BAD_YAML_VALUE) as error:
        raise TrafficError(f"{where}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict) or data.get(MARK) != VERSION:
        version = data.get(MARK) if isinstance(data, dict) else None
        raise TrafficError(f"{where}: {MARK} is {version!r}, this edgebuild reads version {VERSION}")
    unknown = sorted(str(key) for key in data if key not in _FIELDS)
    missing = sorted(_FIELDS - set(data) - {"source_sha256", "attribution", "skipped", "tasks", "burstiness"})
    if unknown or missing:
        raise TrafficError(f"{where}: missing fields: {missing or 'none'}; unknown fields: {unknown or 'none'}")
    changes = _array(data, "decode_context_changes", "changes", where)
    histogram = Histogram(
        name=_text(data, "name", where),
        source_sha256=_text(data, "source_sha256", where) or sha256,
        attribution=_text(data, "attribution", where),
        requests=_whole(data["requests"], f"{where}: requests"),
        skipped=_tally(data, "skipped", where),
        prompt_counts=_array(data, "prompt_counts", "counts", where),
        output_counts=_array(data, "output_counts", "counts", where),
        decode_context_counts=np.cumsum(changes),
        tasks=_tally(data, "tasks", where),
        burstiness=_burstiness(data, where),
    )
    if problems := histogram.problems():
        raise TrafficError(f"{where}: the counts contradict each other: {'; '.join(problems)}")
    return histogram


def _text(data: dict[Any, Any], key: str, where: str) -> str:
    value = data.get(key, "")
    if not isinstance(value, str):
        raise TrafficError(f"{where}: {key} is {value!r}, expected a text")
    return shown_text(value, key, where)


def shown_text(value: str, key: str, where: str) -> str:
    """The text, if a manifest can carry it: the runtime refuses what does not print, and more than LONGEST_TEXT."""
    flat = value.replace("\n", " ").replace("\t", " ") if key == "attribution" else value
    if not flat.isprintable():
        raise TrafficError(f"{where}: {key} has characters that do not print: {value[:60]!r}")
    if len(value) > LONGEST_TEXT:
        raise TrafficError(f"{where}: {key} has {len(value):,} characters, at most {LONGEST_TEXT:,} are carried along")
    return value


def _burstiness(data: dict[Any, Any], where: str) -> float | None:
    value = data.get("burstiness")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.01 <= value <= 100:
        raise TrafficError(f"{where}: burstiness is {value!r}, expected a number from 0.01 to 100 (1 = Poisson)")
    return float(value)


def _whole(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TrafficError(f"{what} is {value!r}, expected a whole number of at least 0")
    return value


def _tally(data: dict[Any, Any], key: str, where: str) -> dict[str, int]:
    value = data.get(key, {})
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise TrafficError(f"{where}: {key} is {value!r}, expected names with counts")
    return {name: _whole(count, f"{where}: {key}.{name}") for name, count in value.items()}


def _array(data: dict[Any, Any], section: str, key: str, where: str) -> Counts:
    value = data[section]
    if not isinstance(value, dict) or set(value) != {"size", key} or not isinstance(value[key], str):
        raise TrafficError(f"{where}: {section} needs exactly `size` (a number) and `{key}` (a text)")
    size = _whole(value["size"], f"{where}: {section}.size")
    if size > 2 * LONGEST_TOKENS + 2:
        raise TrafficError(f"{where}: {section}.size is {size:,}, at most {2 * LONGEST_TOKENS + 2:,} is read")
    array = np.zeros(size, np.int64)
    last = -1
    for pair in value[key].split():
        try:
            at, count = (int(part) for part in pair.split(":"))
            if not last < at < size or not -(2**62) < count < 2**62:
                raise ValueError
        except ValueError:
            raise TrafficError(
                f"{where}: {section} has {pair[:40]!r} after length {last}: expected length:count, "
                f"rising, below {size:,}"
            ) from None
        array[at] = count
        last = at
    return array
