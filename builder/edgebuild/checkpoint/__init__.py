"""Checkpoints: a Hugging Face directory or a GGUF file, opened through `open_checkpoint`. Opening imports no torch."""

from __future__ import annotations

from pathlib import Path

from edgebuild.checkpoint.base import Checkpoint, SourceFile, TokenizerFiles, match_tensors
from edgebuild.errors import CheckpointError

__all__ = ["Checkpoint", "SourceFile", "TokenizerFiles", "match_tensors", "open_checkpoint"]


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a directory of safetensors, a GGUF file, or a directory that holds exactly one GGUF file.

    Reads and checks headers only. Raises CheckpointError for what is missing, damaged or of an unknown kind.
    """
    try:
        return _open(Path(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "config.json").is_file() or not ggufs:
            from edgebuild.checkpoint.assembled import assembled
            from edgebuild.checkpoint.directory import DirectoryCheckpoint

            return assembled(DirectoryCheckpoint(path))
        if len(ggufs) > 1:
            names = ", ".join(file.name for file in ggufs)
            raise CheckpointError(f"{path.name} holds {len(ggufs)} GGUF files: {names}", hint="give one of them")
        path = ggufs[0]
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}", hint="give a Hugging Face directory or a .gguf file")
    with path.open("rb") as file:
        magic = file.read(4)
    if path.suffix == ".json":
        raise CheckpointError(
            f"{path.name} is a configuration at most, no checkpoint",
            hint="give the folder with the weights; edgebuild plan takes a configuration alone",
        )
    if magic != b"GGUF":
        raise CheckpointError(
            f"{path.name} is no GGUF file: it starts with {magic!r}",
            hint="give a Hugging Face directory or a .gguf file",
        )
    from edgebuild.checkpoint.gguf_model import GgufCheckpoint

    return GgufCheckpoint(path)
