"""Keeps what TensorRT-RTX compiled at first use, so that a later start need not compile.

The artifact is immutable, so the cache lies beside it in `<artifact>.cache/`, or in the user's cache folder where that
cannot be written. The file's name holds everything that the content depends on. A damaged file is never handed to
TensorRT: it is reported, and made anew. This module knows bytes and files only.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)
_MAGIC = b"edgert-jit-1\n"


@dataclass(frozen=True)
class CacheKey:
    """What compiled kernels depend on. plan: sha256 of decoder.plan; driver: CUDA version as 13000."""

    device: str
    compute_capability: str
    driver: int
    tensorrt: str
    plan: str

    @property
    def file_name(self) -> str:
        device = "".join(c if c.isalnum() else "-" for c in self.device).strip("-").lower()
        return f"{device}-{self.compute_capability}-{self.driver}-{self.tensorrt}-{self.plan[:16]}.jit"


def places(artifact: Path) -> list[Path]:
    """Folders to look in, and to write to, in this order."""
    resolved = artifact.resolve()
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    tag = hashlib.sha256(str(resolved).encode()).hexdigest()[:12]
    return [resolved.parent / f"{resolved.name}.cache", user / "edgert" / f"{resolved.name}-{tag}"]


def load(artifact: Path, key: CacheKey) -> bytes | None:
    """The cached content, or None when there is none that is whole; a damaged file is warned about and removed."""
    for folder in places(artifact):
        path = folder / key.file_name
        try:
            content = path.read_bytes()
        except OSError:
            continue
        digest, payload = content[len(_MAGIC) : len(_MAGIC) + 32], content[len(_MAGIC) + 32 :]
        if content.startswith(_MAGIC) and payload and hashlib.sha256(payload).digest() == digest:
            return payload
        logger.warning("%s is damaged (%d bytes): kernels are compiled anew", path, len(content))
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def store(artifact: Path, key: CacheKey, payload: bytes) -> Path | None:
    """Writes the content whole or not at all; None (and a warning) where no folder can be written."""
    for folder in places(artifact):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=folder, prefix=".jit-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, folder / key.file_name)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            logger.info("no JIT cache in %s: %s", folder, error.strerror)
            continue
        return folder / key.file_name
    logger.warning("the JIT cache of %s could not be written anywhere: every start compiles", artifact)
    return None


def plan_hash(plan: Path) -> str:
    """From the plan's size and its two ends: it names a cache; the content is guarded by the manifest's hashes."""
    digest = hashlib.sha256()
    with plan.open("rb") as file:
        size = plan.stat().st_size
        digest.update(str(size).encode() + file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()
