"""From a model on disk to a function that counts tokens, for traces that hold text. Knows no trace format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgebuild.errors import TrafficError

ACCEPTED = "--tokenizer takes a GGUF file, a tokenizer.json, or a folder with one of them: a checkpoint or an artifact"
_TOKENIZER = "tokenizer.json"


def token_counter(path: Path) -> Callable[[str], int]:
    """text -> tokens, without the special tokens that a template would add.

    path   a GGUF, a tokenizer.json, or a folder with a tokenizer.json (a checkpoint, an artifact) or one GGUF

    Raises TrafficError for anything else, CheckpointError for a GGUF that is damaged or whose tokenizer is unknown.
    """
    from tokenizers import Tokenizer

    file = _file_of(path)
    try:
        with file.open("rb") as opened:
            begin = opened.read(64)
        if begin.startswith(b"GGUF"):
            text = _of_gguf(file)
        elif begin.lstrip().startswith(b"{"):
            text = file.read_text(encoding="utf-8")
        else:
            raise TrafficError(f"{file}: neither a GGUF nor a tokenizer.json", hint=ACCEPTED)
    except OSError as error:
        raise TrafficError(f"{file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TrafficError(f"{file}: neither a GGUF nor a tokenizer.json", hint=ACCEPTED) from error
    try:
        loaded = Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise TrafficError(
            f"{file}: JSON, but not a tokenizer: {' '.join(str(error).split())}", hint=ACCEPTED
        ) from error
    loaded.no_truncation()

    def count(text: str) -> int:
        return len(loaded.encode(text, add_special_tokens=False).ids)

    return count


def _file_of(path: Path) -> Path:
    """The file that holds the tokenizer: a folder's tokenizer.json goes before its GGUF, as in a build."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise TrafficError(f"{path}: no such tokenizer", hint=ACCEPTED)
    if (path / _TOKENIZER).is_file():
        return path / _TOKENIZER
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    held = f"holds {len(found)} GGUF files" if found else f"holds no {_TOKENIZER} and no GGUF"
    raise TrafficError(f"{path}: the folder {held}", hint="give one of them" if found else ACCEPTED)


def _of_gguf(file: Path) -> str:
    """The tokenizer.json that a build would make of a GGUF. Its architecture does not matter: nothing else is read."""
    from edgebuild.checkpoint.gguf_file import read_gguf
    from edgebuild.checkpoint.gguf_tokenizer import read_gguf_tokenizer

    metadata = read_gguf(file).metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    return read_gguf_tokenizer(metadata, len(tokens) if isinstance(tokens, list) else 0).tokenizer_json
