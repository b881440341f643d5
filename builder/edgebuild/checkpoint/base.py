"""What every checkpoint offers, whatever its container: configuration, tensor names and shapes, tensors, tokenizer.

Imports no torch until a tensor is read. Does not know what a model needs: `match_tensors` is told.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgebuild.errors import CheckpointError

if TYPE_CHECKING:
    import torch

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LISTED = 8  # names spelled out in an error before "and N more"


@dataclass(frozen=True)
class SourceFile:
    """A file that the build reads. `name` is relative to the checkpoint, `bytes` its size when it was opened."""

    name: str
    bytes: int
    path: Path

    @classmethod
    def at(cls, path: Path) -> SourceFile:
        return cls(name=path.name, bytes=path.stat().st_size, path=path)

    def sha256(self) -> str:
        """Hex digest of the content, computed on first use (about 1 s per GB)."""
        status = self.path.stat()
        return _sha256(self.path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)
def _sha256(path: Path, size: int, modified_ns: int) -> str:  # noqa: ARG001 — size and time belong to the cache key
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class TokenizerFiles:
    """What the runtime needs to turn text into ids and back.

    tokenizer_json  a `tokenizers.Tokenizer` in its own JSON
    chat_template   Jinja source, or None where the checkpoint has none
    eos_token_ids   every id that ends a generation, ascending
    bos_token_id    the id that templates call bos_token, or None
    token_limit     ids at or past it are unknown to the tokenizer, though embedding rows may exist for them
    """

    tokenizer_json: str
    chat_template: str | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    token_limit: int


class Checkpoint(ABC):
    """An opened checkpoint: headers are read and checked, tensors are not.

    config   the keys of a published config.json, also for a GGUF
    files    every file the build depends on
    skipped  tensors of the files that this project leaves out on purpose (vision towers, derived buffers)
    """

    path: Path
    config: dict[str, Any]
    files: tuple[SourceFile, ...]
    skipped: tuple[str, ...]

    @abstractmethod
    def names(self) -> frozenset[str]:
        """Canonical Hugging Face names, for example model.layers.0.self_attn.q_proj.weight."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, from the header."""

    @abstractmethod
    def dtype(self, name: str) -> str:
        """How one tensor is stored: "F32", "BF16", "Q4_1", ..."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """One tensor, in memory of its own: native float dtype, or float32 where the file is quantised."""

    @abstractmethod
    def load_tokenizer(self) -> TokenizerFiles:
        """Read the tokenizer; `tokenizer` keeps the result."""

    @cached_property
    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer. Raises CheckpointError where the checkpoint has none that can be used."""
        return self.load_tokenizer()

    def missing(self, name: str) -> CheckpointError:
        """The error for a name that is not in this checkpoint."""
        return CheckpointError(f"{self.path.name}: no tensor {name!r} among {len(self.names())}")


def match_tensors(
    expected: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint, *, ignored_prefixes: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Check that every expected tensor is there in its shape and that every tensor there is used.

    Returns the names left out: those under `ignored_prefixes`, and the copy of the embedding that some tied checkpoints
    carry as lm_head.weight. Raises CheckpointError naming what is missing, unused, or of another shape.
    """
    names = checkpoint.names()
    left_out = {name for name in names - expected.keys() if name.startswith(ignored_prefixes)}
    if HEAD in names and HEAD not in expected and EMBEDDING in names & expected.keys():
        if not _same(checkpoint, HEAD, EMBEDDING):
            raise CheckpointError(
                f"{checkpoint.path.name}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}",
                hint="set tie_word_embeddings to false in config.json if the head is meant to be used",
            )
        left_out.add(HEAD)
    problems = []
    if missing := sorted(expected.keys() - names):
        problems.append(f"{len(missing)} missing: {_some(missing)}")
    if unused := sorted(names - expected.keys() - left_out):
        problems.append(f"{len(unused)} that nothing uses: {_some(unused)}")
    wrong = [
        f"{name} is {list(checkpoint.shape(name))}, expected {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in names and checkpoint.shape(name) != tuple(shape)
    ]
    if wrong:
        problems.append(f"{len(wrong)} of another shape: {_some(wrong)}")
    if problems:
        hint = "config.json and the weights must belong together; nothing was built"
        if HEAD in missing:
            hint = f"tie_word_embeddings is false, so {HEAD} must be there; set it to true if the head is the embedding"
        raise CheckpointError(f"{checkpoint.path.name}: tensors do not match — {'; '.join(problems)}", hint=hint)
    return tuple(sorted(left_out))


def _same(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Whether two tensors hold the same numbers. Holds both: only a tied head beside its embedding gets here."""
    if checkpoint.shape(first) != checkpoint.shape(second):
        return False
    import torch

    return torch.equal(checkpoint.read(first), checkpoint.read(second))


def _some(items: list[str]) -> str:
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return ", ".join(items[:_LISTED]) + more
