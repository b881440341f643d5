"""Strict reading of JSON that may be damaged or hostile: every refusal is an ArtifactError that says where and why.

Knows JSON and types, not what a manifest means. Nothing here evaluates or unpickles anything.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgert.errors import ArtifactError

# What PyYAML raises, besides YAMLError, for a value that is not what its tag says: 2024-13-45, !!bool x, !!int ""
BAD_YAML_VALUE = (ValueError, OverflowError, LookupError, AttributeError, RecursionError)
REBUILD = "copy the artifact again, or rebuild it with edgebuild"
MAX_DEPTH = 32
MAX_DIGITS = 20  # 2**64 has 20; a longer number is an attack on the parser, not a size
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file, refused before reading when it is larger than `max_bytes`."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactError(f"{path}: not a regular file", hint=REBUILD)
        if status.st_size > max_bytes:
            raise ArtifactError(f"{path}: {status.st_size} bytes, at most {max_bytes} are read", hint=REBUILD)
        return path.read_bytes()
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file", hint="give the directory that edgebuild wrote") from None
    except OSError as error:
        raise ArtifactError(
            f"{path}: cannot be read: {error.strerror or error}", hint="check its permissions"
        ) from None


def parse_json(data: bytes, name: str) -> Any:
    """JSON without duplicate keys, NaN, infinities, long numbers or deep nesting; `name` stands in the error."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{name}: byte {error.start} is not UTF-8", hint=REBUILD) from None
    _check_depth(text, name)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                raise ArtifactError(f"{name}: key {key!r} stands twice in one object", hint=REBUILD)
            found[key] = value
        return found

    def constant(word: str) -> Any:
        raise ArtifactError(f"{name}: {word} is not a number that JSON allows", hint=REBUILD)

    def integer(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise ArtifactError(f"{name}: a number of {len(digits)} digits", hint=REBUILD)
        return int(digits)

    def real(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ArtifactError(f"{name}: {digits[:40]} is beyond a 64-bit float", hint=REBUILD)
        return value

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_int=integer, parse_float=real)
    except json.JSONDecodeError as error:
        raise ArtifactError(
            f"{name}:{error.lineno}:{error.colno}: not valid JSON: {error.msg.lower()}", hint=REBUILD
        ) from None
    except (RecursionError, ValueError) as error:
        raise ArtifactError(f"{name}: not valid JSON: {error}", hint=REBUILD) from None


def _check_depth(text: str, name: str) -> None:
    depth = 0
    for match in _TOKEN.finditer(text):
        mark = match.group()
        if mark in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ArtifactError(f"{name}: nested deeper than {MAX_DEPTH} levels", hint=REBUILD)
        elif mark in "]}":
            depth -= 1


def show(value: Any) -> str:
    """A value for an error line: JSON-like, at most 60 characters."""
    text = json.dumps(value, ensure_ascii=True) if not isinstance(value, (dict, list)) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class Node:
    """One JSON value and where it stands (`manifest.json: cells[3].batch`)."""

    value: Any
    where: str

    def fail(self, expected: str, *, hint: str = REBUILD) -> ArtifactError:
        return ArtifactError(f"{self.where}: expected {expected}, found {show(self.value)}", hint=hint)

    def fields(self, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Node]:
        """The members of an object: none missing, none unknown."""
        if not isinstance(self.value, dict):
            raise self.fail("an object")
        required, optional = list(required), list(optional)
        join = "." if ": " in self.where else ": "
        for key in self.value:
            if key not in required and key not in optional:
                near = difflib.get_close_matches(key, [*required, *optional], 1)
                guess = f"; did you mean {near[0]!r}?" if near else ""
                raise ArtifactError(f"{self.where}: unknown key {show(key)}{guess}", hint=REBUILD)
        for key in required:
            if key not in self.value:
                raise ArtifactError(f"{self.where}: key {key!r} is missing", hint=REBUILD)
        return {key: Node(value, f"{self.where}{join}{key}") for key, value in self.value.items()}

    def mapping(self, most: int) -> dict[str, Node]:
        """The members of an object with free keys."""
        if not isinstance(self.value, dict) or len(self.value) > most:
            raise self.fail(f"an object of at most {most} entries")
        return {Node(key, self.where).text(): Node(value, f"{self.where}.{key}") for key, value in self.value.items()}

    def items(self, least: int, most: int) -> Iterator[Node]:
        if not isinstance(self.value, list):
            raise self.fail("a list")
        if not least <= len(self.value) <= most:
            raise ArtifactError(f"{self.where}: {len(self.value)} entries, expected {least} to {most}", hint=REBUILD)
        return iter([Node(value, f"{self.where}[{index}]") for index, value in enumerate(self.value)])

    def integer(self, low: int, high: int) -> int:
        if not isinstance(self.value, int) or isinstance(self.value, bool) or not low <= self.value <= high:
            raise self.fail(f"a whole number from {low} to {high}")
        return self.value

    def number(self, low: float, high: float) -> float:
        if not isinstance(self.value, (int, float)) or isinstance(self.value, bool) or not low <= self.value <= high:
            raise self.fail(f"a number from {low} to {high}")
        return float(self.value)

    def text(self, *, least: int = 0, most: int = 4096, multiline: bool = False) -> str:
        """A string without control characters or lone surrogates: it may end up on a terminal."""
        if not isinstance(self.value, str):
            raise self.fail("a string")
        if not least <= len(self.value) <= most:
            raise self.fail(f"a string of {least} to {most} characters")
        flat = self.value.replace("\n", " ").replace("\t", " ") if multiline else self.value
        if not flat.isprintable():
            raise self.fail("a string without control characters")
        return self.value

    def choice(self, allowed: Iterable[str]) -> str:
        allowed = tuple(allowed)
        if not isinstance(self.value, str) or self.value not in allowed:
            raise self.fail("one of " + ", ".join(allowed))
        return self.value

    def sha256(self) -> str:
        if not isinstance(self.value, str) or not re.fullmatch(r"[0-9a-f]{64}", self.value):
            raise self.fail("a SHA-256 in 64 lower-case hexadecimal digits")
        return self.value
