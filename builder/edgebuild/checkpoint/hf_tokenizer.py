"""The tokenizer of a Hugging Face directory: tokenizer.json, the chat template, and every id that ends a generation.

Knows the files' names and the two spellings of each key; does not tokenise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from edgebuild.checkpoint.base import TokenizerFiles
from edgebuild.errors import CheckpointError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def read_tokenizer_files(directory: Path, config: Mapping[str, Any]) -> TokenizerFiles:
    """Read the tokenizer of `directory`; `config` is its config.json (of the text model)."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (directory / name).is_file()]
        found = f", only {', '.join(others)}" if others else ""
        raise CheckpointError(
            f"{directory.name}: no tokenizer.json{found}",
            hint="Transformers writes one: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    tokenizer_json = _read_text(path)
    vocabulary = vocabulary_of(tokenizer_json, path.name)
    tokenizer_config = _optional_json(directory / "tokenizer_config.json")
    generation_config = _optional_json(directory / "generation_config.json")
    token_limit = max(vocabulary.values()) + 1
    if isinstance(rows := config.get("vocab_size"), int):
        token_limit = min(token_limit, rows)  # an id without an embedding row cannot be served
    eos = [config.get("eos_token_id"), generation_config.get("eos_token_id")]
    eos.append(_token_id(tokenizer_config.get("eos_token"), vocabulary))
    if "bos_token" in tokenizer_config:
        bos = _token_id(tokenizer_config["bos_token"], vocabulary)
    else:
        bos = next(iter(unite_ids([config.get("bos_token_id")], token_limit)), None)
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(directory, tokenizer_config),
        eos_token_ids=unite_ids(eos, token_limit),
        bos_token_id=bos,
        token_limit=token_limit,
    )


def unite_ids(values: Iterable[Any], token_limit: int) -> tuple[int, ...]:
    """Ids from fields that hold one id, a list of ids or nothing; ids that cannot be sampled are left out."""
    ids: set[int] = set()
    for value in values:
        for token in value if isinstance(value, list) else [value]:
            if type(token) is int and 0 <= token < token_limit:
                ids.add(token)
    return tuple(sorted(ids))


def vocabulary_of(tokenizer_json: str, name: str) -> dict[str, int]:
    """Text -> id of every token, added ones included, after the `tokenizers` library accepted the file."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{name} is no tokenizer that this tokenizers version reads: {error}") from error
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise CheckpointError(f"{name} has an empty vocabulary")
    return vocabulary


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path.name} is not UTF-8: {error.reason}", hint="fetch the file again") from error


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not readable JSON: {error}", hint="fetch the file again") from error
    return content if isinstance(content, dict) else {}


def _token_id(token: Any, vocabulary: Mapping[str, int]) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    return vocabulary.get(text) if isinstance(text, str) else None


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, as in Transformers; of several named ones, "default"."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None
