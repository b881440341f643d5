"""The tokenizer inside a GGUF, rebuilt as a `tokenizers` JSON: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

A GGUF names its pre-tokenizer and leaves the expression to the reader. The expressions below are those of the published
tokenizer.json files, as llama.cpp's src/llama-vocab.cpp quotes them; an unknown name is refused, because a wrong split
gives other ids without any error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edgebuild.checkpoint.base import TokenizerFiles
from edgebuild.checkpoint.hf_tokenizer import unite_ids, vocabulary_of
from edgebuild.errors import CheckpointError

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # token types; 1 is normal, 6 a byte
_KEY = "tokenizer.ggml."

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# pre-tokenizer name -> the expressions that split, one after the other, each match a piece of its own
_SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"), (_GPT2,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    # llama.cpp's own fallback, for files that say so themselves
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
# whole words of the vocabulary are taken before any merge
_IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"}
_ADDS_BOS = _IGNORE_MERGES  # where the file does not say
_NFC = {"qwen2", "deepseek-r1-qwen", "qwen35"}  # these publish a Unicode normaliser


def read_gguf_tokenizer(metadata: Mapping[str, Any], vocabulary_rows: int) -> TokenizerFiles:
    """The tokenizer of a GGUF. vocabulary_rows: rows of the embedding, more than which no id may be."""
    kind = metadata.get(_KEY + "model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise CheckpointError(
            f"the GGUF's tokenizer model {kind!r} is not supported", hint=f"supported: {', '.join(builders)}"
        )
    texts, types = _tokens(metadata)
    state = builders[kind](metadata, texts, types)
    tokenizer_json = json.dumps(state, ensure_ascii=False)
    known = vocabulary_of(tokenizer_json, "the tokenizer made from the GGUF")
    token_limit = min(max(known.values()) + 1, vocabulary_rows)
    # end of sequence, of turn, of message: a generation ends at any of them
    eos = unite_ids((metadata.get(f"{_KEY}{name}_token_id") for name in ("eos", "eot", "eom")), token_limit)
    template = metadata.get("tokenizer.chat_template")
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        chat_template=template if isinstance(template, str) else None,
        eos_token_ids=eos,
        bos_token_id=next(iter(unite_ids([metadata.get(_KEY + "bos_token_id")], token_limit)), None),
        token_limit=token_limit,
    )


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    texts = metadata.get(_KEY + "tokens")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise CheckpointError("the GGUF holds no token list", hint="convert the model again, with its tokenizer")
    types = metadata.get(_KEY + "token_type", [1] * len(texts))
    if not isinstance(types, list) or len(types) != len(texts):
        raise CheckpointError(f"the GGUF lists {len(texts)} tokens and another number of token types")
    used = [text for text, kind in zip(texts, types, strict=True) if kind != _UNUSED]
    if len(set(used)) != len(used):
        twice = next(text for text in used if used.count(text) > 1)
        raise CheckpointError(f"the GGUF's vocabulary holds {twice!r} twice: ids and texts would not correspond")
    return texts, types


def _state(
    texts: list[str], types: list[int], model: dict[str, Any], merges: list[tuple[str, str]], **parts: Any
) -> dict[str, Any]:
    """A tokenizer.json. Unused entries (rows that only pad the embedding) stay out of the vocabulary."""
    numbered = [(index, text, kind) for index, (text, kind) in enumerate(zip(texts, types, strict=True))]
    added = [
        {
            "id": index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, text, kind in numbered
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    vocabulary = {text: index for index, text, kind in numbered if kind != _UNUSED}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
        **parts,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            **model,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _byte_level(metadata: Mapping[str, Any], texts: list[str], types: list[int]) -> dict[str, Any]:
    """Byte-level BPE, with merges in the file."""
    pre = metadata.get(_KEY + "pre")
    if not isinstance(pre, str) or pre not in _SPLITS:
        known = f"known: {', '.join(sorted(_SPLITS))}"
        if pre is None:
            known = (
                f"the file is of before May 2024: convert the model again, or write {_KEY}pre with gguf-new-metadata"
            )
        raise CheckpointError(f"the GGUF's pre-tokenizer {pre!r} is not known", hint=known)
    merges = _merges(metadata)
    if merges is None:
        raise CheckpointError("the GGUF's byte-level tokenizer has no merges", hint="convert the model again")
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in _SPLITS[pre]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _state(
        texts,
        types,
        {"ignore_merges": pre in _IGNORE_MERGES},
        merges,
        normalizer={"type": "NFC"} if pre in _NFC else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        post_processor=_post_processor(metadata, texts, pre in _ADDS_BOS) or byte_level,
        decoder={**byte_level, "use_regex": True},
    )


def _sentencepiece(metadata: Mapping[str, Any], texts: list[str], types: list[int]) -> dict[str, Any]:
    """SentencePiece BPE with byte fallback: the order of merges follows from the scores."""
    merges = _merges(metadata)
    if merges is None:
        merges = _merges_from_scores(metadata, texts, types)
    unknown = next((text for text, kind in zip(texts, types, strict=True) if kind == _UNKNOWN), None)
    prefix = bool(metadata.get(_KEY + "add_space_prefix", True))
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    unmark = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    normalizers = [{"type": "Prepend", "prepend": "▁"}, mark] if prefix else [mark]
    decoders: list[dict[str, Any]] = [unmark, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _state(
        texts,
        types,
        {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
        merges,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        post_processor=_post_processor(metadata, texts, adds_bos=True),
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    lines = metadata.get(_KEY + "merges")
    if not isinstance(lines, list) or not lines:
        return None
    merges = []
    for line in lines:
        left, space, right = str(line).partition(" ")
        if not (left and space and right):
            raise CheckpointError(f"the GGUF's merge {line!r} is not two pieces")
        merges.append((left, right))
    return merges


def _merges_from_scores(metadata: Mapping[str, Any], texts: list[str], types: list[int]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, best score first: Transformers' conversion of a SentencePiece model."""
    scores = metadata.get(_KEY + "scores")
    if not isinstance(scores, list) or len(scores) != len(texts):
        raise CheckpointError("the GGUF's SentencePiece tokenizer has no score for each token")
    pieces = {text: index for index, (text, kind) in enumerate(zip(texts, types, strict=True)) if kind == 1}
    if len(pieces) > 1 and len({scores[index] for index in pieces.values()}) == 1:
        raise CheckpointError(
            "all scores of the GGUF's tokenizer are equal, so the order of its merges is lost",
            hint="convert the model again from a checkpoint that has tokenizer.model",
        )
    ranked = []
    for piece, index in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ids = (index, pieces[left], pieces[right])
                ranked.append((-scores[index], -len(left), -len(right), *ids, left, right))
    ranked.sort()
    return [entry[-2:] for entry in ranked]


def _post_processor(metadata: Mapping[str, Any], texts: list[str], adds_bos: bool) -> dict[str, Any] | None:
    """The begin token before a text, and the end token after it, where the file (or its kind) adds them."""
    prefix = _special(metadata, texts, "bos") if metadata.get(_KEY + "add_bos_token", adds_bos) else None
    suffix = _special(metadata, texts, "eos") if metadata.get(_KEY + "add_eos_token", False) else None
    if prefix is None and suffix is None:
        return None

    def around(middle: str, type_id: int) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"Sequence": {"id": middle, "type_id": type_id}}]
        if prefix is not None:
            parts.insert(0, {"SpecialToken": {"id": texts[prefix], "type_id": type_id}})
        if suffix is not None:
            parts.append({"SpecialToken": {"id": texts[suffix], "type_id": type_id}})
        return parts

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {
            texts[token]: {"id": texts[token], "ids": [token], "tokens": [texts[token]]}
            for token in (prefix, suffix)
            if token is not None
        },
    }


def _special(metadata: Mapping[str, Any], texts: list[str], name: str) -> int | None:
    token = metadata.get(f"{_KEY}{name}_token_id")
    return token if type(token) is int and 0 <= token < len(texts) else None
