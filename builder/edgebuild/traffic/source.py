"""Reading a trace file once, in blocks: plain or gzip, hashed on the way, with progress by bytes on disk.

Knows nothing of formats.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from edgebuild.errors import TrafficError

Progress = Callable[[int, int], None]  # (bytes read from disk, bytes on disk)

BLOCK_BYTES = 4 << 20
LONGEST_LINE_BYTES = 64 << 20


class _HashingFile(io.RawIOBase):
    """A raw file that hashes what is read from it."""

    def __init__(self, path: Path, progress: Progress | None) -> None:
        self._file = path.open("rb", buffering=0)
        self._total = path.stat().st_size
        self._done = 0
        self._progress = progress
        self.sha256 = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object, /) -> int:
        read = self._file.readinto(buffer)  # type: ignore[arg-type]
        if read:
            self.sha256.update(memoryview(buffer)[:read])  # type: ignore[arg-type]
            self._done += read
            if self._progress is not None:
                self._progress(self._done, self._total)
        return read or 0

    def close(self) -> None:
        self._file.close()
        super().close()


class Source:
    """One pass over a trace. `blocks()` gives whole lines, `sha256()` the hash of the file on disk."""

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path = path
        try:
            self._raw = _HashingFile(path, progress)
        except OSError as error:
            raise TrafficError(f"{path}: {error.strerror or error}") from error
        buffered = io.BufferedReader(self._raw, 1 << 20)
        gzipped = buffered.peek(2)[:2] == b"\x1f\x8b"
        self._file: BinaryIO = gzip.GzipFile(fileobj=buffered) if gzipped else buffered  # type: ignore[assignment]
        self._head = b""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    def _read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise TrafficError(f"{self.path}: cannot read it to the end: {error}") from error

    def head(self) -> bytes:
        """The first block, without moving on; a byte order mark is dropped."""
        if not self._head:
            head = self._read(BLOCK_BYTES).removeprefix(b"\xef\xbb\xbf")
            # one object a line: detection needs the first line whole, however long it is
            while head.lstrip()[:1] == b"{" and b"\n" not in head and len(head) < LONGEST_LINE_BYTES:
                more = self._read(BLOCK_BYTES)
                if not more:
                    break
                head += more
            self._head = head
        return self._head

    def chunks(self) -> Iterator[bytes]:
        """The whole file in pieces that end anywhere."""
        block = self.head()
        self._head = b""
        while block:
            yield block
            block = self._read(BLOCK_BYTES)

    def blocks(self) -> Iterator[bytes]:
        """The whole file in pieces that end with a line end; the last line gets one if it has none."""
        rest = b""
        for chunk in self.chunks():
            cut = chunk.rfind(b"\n") + 1
            if not cut:
                rest += chunk
                if len(rest) > LONGEST_LINE_BYTES:
                    raise TrafficError(
                        f"{self.path}: a line is longer than {LONGEST_LINE_BYTES >> 20} MiB",
                        hint="one request a line is expected",
                    )
                continue
            yield rest + chunk[:cut] if rest else chunk[:cut]
            rest = chunk[cut:]
        if rest:
            yield rest + b"\n"

    def sha256(self) -> str:
        """Hash of the file as it lies on disk; reads what is left of it first."""
        while self._raw.read(BLOCK_BYTES):
            pass
        return self._raw.sha256.hexdigest()
