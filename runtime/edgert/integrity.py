"""An artifact's files against its manifest, before any backend sees one.

Knows hashes and sizes; opens no engine. Whether this device can run the plan is for the backend to say.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgert.config import CONFIG_NAME
from edgert.costs import COSTS_NAME
from edgert.errors import ArtifactError, UnfinishedArtifact
from edgert.manifest_records import MANIFEST_NAME, Manifest, drafter_file
from edgert.onnx_external import check_external_data
from edgert.strictjson import REBUILD

EDITABLE = (CONFIG_NAME,)  # read strictly by config.py, so that a user may edit it
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileCheck:
    """What was found of one listed file. `status`: "ok", or "edited" for the one file that may be."""

    path: str
    bytes: int
    status: Literal["ok", "edited"]


def sha256_file(path: Path, *, progress: Callable[[int], None] | None = None) -> str:
    """Hexadecimal SHA-256; `progress` is told the bytes of each block."""
    digest = hashlib.sha256()
    buffer = bytearray(BLOCK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(view[:size])
            if progress is not None:
                progress(size)
    return digest.hexdigest()


def check_files(
    directory: Path,
    manifest: Manifest,
    level: Literal["full", "sizes"] = "full",
    *,
    on_file: Callable[[FileCheck], None] | None = None,
) -> list[FileCheck]:
    """Every listed file is there, is a plain file inside the artifact, and has its size (and, "full", its hash).

    A file that is not listed is refused too; names with a leading dot are ignored. Raises ArtifactError.
    """
    directory = Path(directory)
    root = directory.resolve()
    _refuse_unlisted(directory, manifest)
    checks = []
    sizes: dict[str, int] = {}
    for entry in manifest.files:
        path = directory / entry.path
        found = _size_inside(path, root, entry.path)
        edited = False
        if found != entry.bytes:
            edited = entry.path in EDITABLE
            if not edited:
                raise ArtifactError(f"{entry.path}: {found} bytes, the manifest says {entry.bytes}", hint=REBUILD)
        elif level == "full":
            digest = _hash(path, entry.path)
            if digest != entry.sha256:
                edited = entry.path in EDITABLE
                if not edited:
                    raise ArtifactError(
                        f"{entry.path}: SHA-256 is {digest[:16]}..., the manifest says {entry.sha256[:16]}...",
                        hint=REBUILD,
                    )
        sizes[entry.path] = found
        checks.append(FileCheck(entry.path, found, "edited" if edited else "ok"))
        if on_file is not None:
            on_file(checks[-1])
    decoder = manifest.decoder_file
    if decoder.endswith(".onnx"):
        check_external_data(directory / decoder, sizes)
        if manifest.draft_length:
            check_external_data(directory / drafter_file(manifest.backend.name, manifest.state), sizes)
    return checks


def _hash(path: Path, name: str) -> str:
    try:
        return sha256_file(path)
    except OSError as error:
        raise ArtifactError(
            f"{name}: cannot be read: {error.strerror or error}", hint="check its permissions"
        ) from None


def _size_inside(path: Path, root: Path, name: str) -> int:
    try:
        resolved = path.resolve(strict=True)
        status = resolved.stat()
    except FileNotFoundError:
        raise ArtifactError(f"{name}: listed in {MANIFEST_NAME}, but not there", hint=REBUILD) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise ArtifactError(f"{name}: cannot be read: {error}", hint=REBUILD) from None
    if not resolved.is_relative_to(root):
        raise ArtifactError(f"{name}: is a link to {resolved}, outside the artifact", hint="copy the file itself")
    if not stat.S_ISREG(status.st_mode):
        raise ArtifactError(f"{name}: not a regular file", hint=REBUILD)
    return status.st_size


def _refuse_unlisted(directory: Path, manifest: Manifest) -> None:
    listed = {entry.path for entry in manifest.files} | {MANIFEST_NAME, COSTS_NAME}  # costs are measured on the device
    parents = {path.rsplit("/", 1)[0] for path in listed if "/" in path}
    for base, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = Path(base).relative_to(directory).as_posix()
        prefix = "" if below == "." else f"{below}/"
        for name in names:
            if not name.startswith(".") and prefix + name not in listed:
                raise ArtifactError(
                    f"{ascii(prefix + name)[1:-1]}: in the artifact, but not listed in {MANIFEST_NAME}",
                    hint="move it out, or rebuild with edgebuild",
                )
        for name in folders:
            path = prefix + name
            if path in listed or not any(p == path or p.startswith(path + "/") for p in parents):
                raise ArtifactError(
                    f"{ascii(path)[1:-1]}: a directory that {MANIFEST_NAME} does not list",
                    hint="move it out, or rebuild with edgebuild",
                )


def require_complete(manifest: Manifest, directory: Path) -> None:
    """A resumable artifact has no engine yet. Raises UnfinishedArtifact."""
    if manifest.state != "complete":
        raise UnfinishedArtifact(
            f"{directory}: stopped after ONNX, it has no {manifest.backend.name} engine yet",
            hint=f"on the device: edgebuild resume {shlex.quote(str(directory))}",
        )
