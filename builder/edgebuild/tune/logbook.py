"""`tuning.jsonl`: one JSON object a line (see records), appended, flushed, and read strictly.

A line that was cut off while it was written is the only damage that is forgiven: it is the last one and has no newline.
Anything else that is wrong is refused with its line, and a file that is no logbook is left as it is. Knows lines, not
what they are for.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from pydantic import ValidationError

from edgebuild.errors import TuningError
from edgebuild.tune.records import FORMAT_VERSION, Result, Trial

MAX_LOGBOOK_BYTES = 64 << 20
FIRST_BYTES = b'{"format_version":'  # of every line
KINDS: dict[str, type[Trial] | type[Result]] = {"trial": Trial, "result": Result}

Line: TypeAlias = Trial | Result


@dataclass(frozen=True)
class Logbook:
    """torn_bytes: length of a half-written last line that was left out."""

    lines: tuple[Line, ...]
    torn_bytes: int = 0

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(line for line in self.lines if isinstance(line, Trial))

    @property
    def results(self) -> tuple[Result, ...]:
        return tuple(line for line in self.lines if isinstance(line, Result))


def read_logbook(path: Path) -> Logbook:
    """Every whole line. Raises TuningError naming file, line and what was expected."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_LOGBOOK_BYTES:
            raise TuningError(f"{path}: {path.stat().st_size:,} bytes, at most {MAX_LOGBOOK_BYTES:,} are read")
        data = path.read_bytes()
    except OSError as error:
        raise TuningError(
            f"{path}: cannot be read: {error.strerror or error}", hint="make one: edgebuild tune"
        ) from None
    whole, _, torn = data.rpartition(b"\n")
    lines = whole.split(b"\n") if whole else []
    return Logbook(tuple(parse_line(line, f"{path}:{n}") for n, line in enumerate(lines, 1)), len(torn))


def parse_line(line: bytes, where: str) -> Line:
    """One line; `where` stands in the error."""
    hint = "put the line back as it was, or give another --logbook"
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TuningError(f"{where}: not JSON: {error}", hint=hint) from None
    if not isinstance(document, dict):
        raise TuningError(f"{where}: expected an object, found {type(document).__name__}", hint=hint)
    version, kind = document.get("format_version"), document.get("kind")
    if version != FORMAT_VERSION:
        raise TuningError(f"{where}: format_version is {version!r}, this edgebuild reads {FORMAT_VERSION}", hint=hint)
    if not isinstance(kind, str) or kind not in KINDS:
        raise TuningError(f"{where}: kind is {kind!r}: expected one of {', '.join(KINDS)}", hint=hint)
    try:
        return KINDS[kind].model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise TuningError(f"{where}: {place or kind}: {first['msg'][0].lower()}{first['msg'][1:]}", hint=hint) from None


class LogbookWriter:
    """`with LogbookWriter(path) as book:` holds the file alone; `append` returns when the line is on the disk.

    A half-written last line is cut off first; `torn_bytes` says how much that was. A file with anything else that no
    logbook has is refused untouched: `--logbook` may name the wrong file.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._file: int | None = None
        self.torn_bytes = 0

    def __enter__(self) -> LogbookWriter:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise TuningError(
                f"{self.path}: cannot be written: {error.strerror or error}", hint="give another --logbook"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            self._file = None
            raise TuningError(
                f"{self.path}: another tuning run writes to it", hint="wait for it, or give another --logbook"
            ) from None
        try:
            self._cut_torn_line(self._file)
        except TuningError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def append(self, line: Line) -> None:
        """One write, one flush. Raises TuningError when the disk does not take it; nothing half-written stays then."""
        if self._file is None:
            raise ValueError("the logbook is not open")
        data = line.model_dump_json().encode() + b"\n"
        size = os.fstat(self._file).st_size
        try:
            _write_all(self._file, data, os.write)
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, size)
            raise TuningError(
                f"{self.path}: cannot be written: {error.strerror or error}", hint="free some space and run again"
            ) from None

    def _cut_torn_line(self, file: int) -> None:
        size = os.fstat(file).st_size
        end = size
        while end:
            start = max(0, end - (1 << 16))
            at = os.pread(file, end - start, start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        torn = size - end
        if torn:
            read_logbook(self.path)
            first = os.pread(file, len(FIRST_BYTES), end)
            if first != FIRST_BYTES[: len(first)]:
                raise TuningError(
                    f"{self.path}: not a logbook: its last line has no end and begins with {first!r}",
                    hint="give another --logbook",
                )
            os.ftruncate(file, end)
        self.torn_bytes = torn


def _write_all(file: int, data: bytes, write: Callable[[int, bytes], int]) -> None:
    while data:
        data = data[write(file, data) :]
