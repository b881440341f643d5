"""Writes a text file whole or not at all: written beside its place, flushed to the disk, then renamed into it."""

from __future__ import annotations

import os
from pathlib import Path

from edgebuild.errors import OutputError


def write_whole(path: Path, text: str) -> None:
    """Keeps the permissions of a file that is replaced. Raises OSError, and then leaves nothing behind."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        if path.exists():
            beside.chmod(path.stat().st_mode & 0o777)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def require_writable(path: Path, *, hint: str) -> None:
    """Before work of hours: that `path` can be written or made. Raises OutputError; `hint` is the next step."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: {folder} is not a folder that can be written to", hint=hint)
