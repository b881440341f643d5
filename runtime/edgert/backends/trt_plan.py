"""A plan file as TensorRT reads it: the library's own bytes, or packed.

TensorRT-RTX stores the source text of every kernel once for each optimization profile, four to eight megabytes a
profile that shrink to a thirtieth, between weights that do not shrink. A packed plan is a zip archive of its blocks in
order: those of text deflated, those of weights stored. It is read block by block, so a load never holds a second copy
of the weights in host memory. This module knows bytes; `pack_plan` is what the builder writes with.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import zipfile
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from edgert.errors import ArtifactError

BLOCK_BYTES = 4 << 20
_PROBE_BYTES, _PROBES = 16 << 10, 4
_AHEAD = 3  # blocks
_WORTH = 0.8  # of its size: a block that shrinks less is stored as it is
_PLAN_MAGIC, _ZIP_MAGIC = b"trt", b"PK"
# of a zip member: magic, ..., length of name and of extra field; the data follows those
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def pack_plan(content: Any, path: Path) -> int:
    """Writes `content` (a buffer) packed to the new file `path`; returns its size. The same content, the same file."""
    view = memoryview(content).cast("B")
    with zipfile.ZipFile(path, "x") as archive:
        for number, start in enumerate(range(0, len(view), BLOCK_BYTES)):
            block = view[start : start + BLOCK_BYTES]
            way = zipfile.ZIP_DEFLATED if _shrinks(block) else zipfile.ZIP_STORED
            # a fixed date: zipfile would write today's
            archive.writestr(zipfile.ZipInfo(f"{number:06d}"), bytes(block), compress_type=way, compresslevel=6)
    return path.stat().st_size


def _shrinks(block: memoryview) -> bool:
    step = max(1, len(block) // _PROBES)
    probes = b"".join(block[start : start + _PROBE_BYTES] for start in range(0, len(block), step))
    return len(zlib.compress(probes, 1)) < _WORTH * len(probes)


def is_packed(path: Path) -> bool:
    """Raises ArtifactError for a file that is neither a plan nor a packed one, OSError as opening does."""
    with path.open("rb") as file:
        head = file.read(4)
    if head.startswith(_ZIP_MAGIC):
        return True
    if head[1:] != _PLAN_MAGIC:
        raise ArtifactError(f"{path.name} is not a TensorRT plan (it begins with {head!r})")
    return False


class PackedPlan:
    """The content of a packed plan by offset. Raises ArtifactError if damaged.

    The manifest's hash guards the file, so zipfile gives the index alone: it would sum up and copy the stored blocks.
    Those are views of the mapped file, which TensorRT copies to the device from where they lie; packed ones are
    inflated in threads, a few blocks ahead. Pages that were read are let go, so that a load stays small. As with any
    mapped file, one that shrinks under a load ends the process: an artifact is replaced, not written over.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._blocks = archive.infolist()
        except zipfile.BadZipFile as error:
            raise self._damaged(error) from error
        with path.open("rb") as file:
            self._file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._threads = ThreadPoolExecutor(_AHEAD)
        self._coming: dict[int, Future[memoryview]] = {}
        self._number, self._content = -1, memoryview(b"")
        try:
            self.size = self._check()
        except ArtifactError:
            self.close()
            raise

    def _check(self) -> int:
        """Bytes of the plan."""
        sizes = [block.file_size for block in self._blocks]
        if not sizes or any(size != BLOCK_BYTES for size in sizes[:-1]) or not 0 < sizes[-1] <= BLOCK_BYTES:
            raise self._damaged(f"{len(sizes)} blocks, not of {BLOCK_BYTES:,} bytes each")
        if bytes(self._block(0)[1:4]) != _PLAN_MAGIC:
            raise ArtifactError(f"{self._path.name} does not hold a TensorRT plan")
        return sum(sizes)

    def read(self, offset: int, count: int) -> memoryview:
        """At most `count` bytes from `offset` on, no further than the end of a block; none at the end."""
        if not 0 <= offset < self.size:
            return memoryview(b"")
        number, start = divmod(offset, BLOCK_BYTES)
        if number != self._number:
            self._let_go()
            near = range(number, min(number + 1 + _AHEAD, len(self._blocks)))
            self._coming = {each: self._coming.get(each) or self._threads.submit(self._block, each) for each in near}
            self._content, self._number = self._coming.pop(number).result(), number
        return self._content[start : start + count]

    def _block(self, number: int) -> memoryview:
        block = self._blocks[number]
        try:
            magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(self._file, block.header_offset)
            start = block.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
            content = memoryview(self._file)[start : start + block.compress_size]
            if block.compress_type == zipfile.ZIP_DEFLATED:
                content = memoryview(zlib.decompress(content, wbits=-zlib.MAX_WBITS, bufsize=BLOCK_BYTES))
                if zlib.crc32(content) != block.CRC:
                    raise self._damaged(f"the checksum of block {number}")
        except (zlib.error, struct.error) as error:
            raise self._damaged(error) from error
        if magic != b"PK\3\4" or len(content) != block.file_size:
            raise self._damaged(f"block {number} is not where it should be")
        if block.compress_type == zipfile.ZIP_STORED:
            self._advise(number, mmap.MADV_WILLNEED)
        return content

    def _let_go(self) -> None:
        """Unmaps the pages of the block that was read; the system may keep them cached."""
        read, self._number, self._content = self._number, -1, memoryview(b"")
        if read >= 0:
            self._advise(read, mmap.MADV_DONTNEED)

    def _advise(self, number: int, advice: int) -> None:
        block = self._blocks[number]
        first = block.header_offset - block.header_offset % mmap.PAGESIZE
        self._file.madvise(advice, first, min(block.compress_size, len(self._file) - first))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._coming, self._content = {}, memoryview(b"")
        with contextlib.suppress(BufferError):  # a view of it is still in someone's hands: it goes with that
            self._file.close()

    def _damaged(self, why: object) -> ArtifactError:
        return ArtifactError(f"{self._path.name} is damaged: {why}", hint="copy the artifact again, or rebuild it")


def stream_reader(trt: Any, plan: PackedPlan, errors: list[Exception]) -> Any:
    """What TensorRT reads a plan through. An exception must not pass through its C++: it is kept in `errors`."""

    class Reader(trt.IStreamReaderV2):  # type: ignore[misc]  # the base class is only known at run time
        def __init__(self) -> None:
            trt.IStreamReaderV2.__init__(self)
            self.place = 0

        def read(self, num_bytes: int, stream: int) -> memoryview:  # noqa: ARG002
            try:
                content = plan.read(self.place, num_bytes)
            except Exception as error:  # kept, and raised by the one who loads
                errors.append(error)
                return memoryview(b"")
            self.place += len(content)
            return content

        def seek(self, offset: int, where: Any) -> bool:
            base = {trt.SeekPosition.SET: 0, trt.SeekPosition.CUR: self.place, trt.SeekPosition.END: plan.size}[where]
            place = base + offset
            if not 0 <= place <= plan.size:
                return False
            self.place = place
            return True

    return Reader()
