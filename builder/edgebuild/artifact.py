"""Writes an artifact so that it is either whole and in place, or not there.

Files go to a hidden directory beside the target (same file system), are hashed and flushed, the manifest last; one
rename publishes them. Same contents, same bytes: canonical JSON, no dates. Knows nothing of what the files mean.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from edgert.config import CONFIG_NAME
from edgert.costs import COSTS_NAME
from edgert.errors import ArtifactError
from edgert.integrity import sha256_file
from edgert.manifest import MANIFEST_NAME, FileEntry, Manifest, load_manifest, parse_manifest

from edgebuild.errors import OutputError

BUILDING, REPLACED = "building", "replaced"
SPARE_BYTES = 16 << 20  # manifest, report and file system overhead beyond what the plan counts


def canonical_json(document: Any) -> bytes:
    """The same document always gives the same bytes. Raises ValueError for NaN and infinities."""
    return (json.dumps(document, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


class ArtifactWriter:
    """`with ArtifactWriter(target, needed_bytes=...) as writer:` write files, then `writer.commit(manifest)`.

    Leaving without a commit, or by an exception, removes everything written. A process that dies leaves a hidden
    directory without the target's name; the next build of the same target removes it.
    """

    def __init__(self, target: Path, *, needed_bytes: int = 0) -> None:
        self.target = Path(os.path.realpath(target))
        self.needed_bytes = needed_bytes
        self.directory = self.target.parent / f".{self.target.name}.{BUILDING}-{os.getpid()}"
        self.kept: tuple[Path, ...] = ()
        self._lock: int | None = None
        self._sealed: dict[str, tuple[int, FileEntry]] = {}  # name -> (mtime in ns, entry): hashed once

    def __enter__(self) -> ArtifactWriter:
        if not self.target.name:
            raise OutputError(f"{self.target}: cannot be replaced by an artifact", hint="name a directory below it")
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._tidy()
            check_replaceable(self.target)
            self._check_space()
            self.directory.mkdir()
            self._lock = _lock(self.directory)
        except OSError as error:
            raise self._explain(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        free = shutil.disk_usage(self.target.parent).free if isinstance(error, OSError) else 0
        shutil.rmtree(self.directory, ignore_errors=True)
        self._unlock()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise self._full(free) from error

    def write(self, name: str, data: bytes | str) -> Path:
        """Write one file below the artifact."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)
        return path

    def write_json(self, name: str, document: Any) -> Path:
        return self.write(name, canonical_json(document))

    def seal(self, manifest: Manifest) -> Manifest:
        """Hash and flush every file written, then write the manifest that lists them. The artifact can be loaded now.

        `manifest.files` is replaced; may be called again after more files were written. Raises ArtifactError where the
        manifest contradicts itself.
        """
        entries = []
        for path in sorted(path for path in self.directory.rglob("*") if path.is_file()):
            name = path.relative_to(self.directory).as_posix()
            if name == MANIFEST_NAME:
                continue
            entries.append(self._entry(path, name))
        sealed = replace(manifest, files=tuple(entries))
        data = canonical_json(sealed.to_json())
        sealed = parse_manifest(json.loads(data))  # what is written is what can be read
        _flush(self.write(MANIFEST_NAME, data))
        _flush(self.directory)
        return sealed

    def _entry(self, path: Path, name: str) -> FileEntry:
        status = path.stat()
        known = self._sealed.get(name)
        if known is not None and known[0] == status.st_mtime_ns and known[1].bytes == status.st_size:
            return known[1]
        _flush(path)
        entry = FileEntry(name, status.st_size, sha256_file(path))
        self._sealed[name] = (status.st_mtime_ns, entry)
        return entry

    def publish(self) -> Path:
        """Put the sealed directory in the target's place; an artifact that was there is removed afterwards.

        What a person or the device added to that one is first copied beside the target: `kept` names the copies.
        """
        if not (self.directory / MANIFEST_NAME).is_file():
            raise OutputError(f"{self.target}: the artifact is not sealed yet", hint="call seal() before publish()")
        check_replaceable(self.target)
        self.kept = self._keep_additions()
        aside = self.target.parent / f".{self.target.name}.{REPLACED}-{os.getpid()}"
        had_old = self.target.exists()
        old_lock = _lock(self.target) if had_old else None  # another build's tidying must not take it for a leftover
        if had_old:
            self.target.rename(aside)
        try:
            self.directory.rename(self.target)
        except BaseException:
            if had_old:
                aside.rename(self.target)
            raise
        _flush(self.target.parent)
        self._unlock()
        if had_old:
            shutil.rmtree(aside, ignore_errors=True)
        if old_lock is not None:
            os.close(old_lock)
        return self.target

    def _keep_additions(self) -> tuple[Path, ...]:
        """Copies of an edited scheduler.yaml and of measured costs, unless the new artifact has the same."""
        if not (self.target / MANIFEST_NAME).is_file():
            return ()
        built = {entry.path: entry.sha256 for entry in load_manifest(self.target).files}
        kept = []
        for name in (CONFIG_NAME, COSTS_NAME):
            old, new = self.target / name, self.directory / name
            if not old.is_file() or sha256_file(old) == built.get(name):
                continue
            if new.is_file() and new.read_bytes() == old.read_bytes():
                continue
            copy, number = self.target.parent / f"{self.target.name}.{name}", 1
            while copy.exists() and copy.read_bytes() != old.read_bytes():
                number += 1
                copy = copy.with_name(f"{self.target.name}.{number}.{name}")
            if not copy.exists():
                shutil.copyfile(old, copy)
            kept.append(copy)
        return tuple(kept)

    def commit(self, manifest: Manifest) -> Manifest:
        """`seal`, then `publish`."""
        sealed = self.seal(manifest)
        self.publish()
        return sealed

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _tidy(self) -> None:
        """Remove what dead builds of this target left; give an old artifact its place back if one died in between."""
        for path in sorted(self.target.parent.glob(f".{_escape(self.target.name)}.*-*")):
            kind, _, pid = path.name[len(self.target.name) + 2 :].partition("-")
            if kind not in (BUILDING, REPLACED) or not pid.isdigit() or not path.is_dir():
                continue
            lock = _try_lock(path)
            if lock is None:
                continue  # a live build holds it
            if kind == REPLACED and not self.target.exists():
                path.rename(self.target)
            else:
                shutil.rmtree(path, ignore_errors=True)
            os.close(lock)

    def _check_space(self) -> None:
        free = shutil.disk_usage(self.target.parent).free
        if self.needed_bytes and free < self.needed_bytes + SPARE_BYTES:
            raise self._full(free)

    def _full(self, free: int) -> OutputError:
        needed = f"about {self.needed_bytes + SPARE_BYTES} bytes" if self.needed_bytes else "more"
        return OutputError(
            f"{self.target.parent}: the artifact needs {needed}, {free} bytes are free",
            hint="free some space or choose another --output; nothing was left behind",
        )

    def _explain(self, error: OSError) -> OutputError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return self._full(shutil.disk_usage(self.target.parent).free)
        if error.errno == errno.EEXIST and error.filename == str(self.directory):
            return OutputError(f"{self.directory}: this process builds {self.target} already")
        return OutputError(
            f"{self.target}: cannot be written: {error.strerror or error}", hint="choose another --output"
        )


def check_replaceable(target: Path) -> None:
    """The target is free, empty, or an artifact with nothing but its own files (and measured costs, which end with it).

    Raises OutputError.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise OutputError(f"{target}: is a file", hint="choose another --output")
    names = {path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir()}
    if not names:
        return
    choose = "choose another --output, or remove it yourself"
    try:
        manifest = load_manifest(target)
    except ArtifactError as error:
        raise OutputError(f"{target}: exists and is not a readable artifact: {error.args[0]}", hint=choose) from None
    foreign = sorted(names - {entry.path for entry in manifest.files} - {MANIFEST_NAME, COSTS_NAME})
    if foreign:
        raise OutputError(f"{target}: holds {foreign[0]!r}, which is not part of the artifact there", hint=choose)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(directory: Path) -> int:
    """An open descriptor that holds the directory's lock for as long as this process lives."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # a file system without locks: only the tidying of dead builds is weaker
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _try_lock(directory: Path) -> int | None:
    """The directory's lock, or None while another process holds it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _escape(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)
