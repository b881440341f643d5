"""Token ids to text while they arrive: nothing is emitted that a later token could still change.

The deltas of one Detokenizer join to exactly what the tokenizer decodes from all ids at once. Cost per token does not
grow with the text. Knows tokenizers' decoder kinds, not chat, requests or the engine.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from edgert.errors import ArtifactError, RequestError

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# decoders whose output for a token depends on nothing but the tokens before it, and on those only by whether any exist
_LOCAL = {"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}


class TokenizerLike(Protocol):
    """The part of tokenizers.Tokenizer that is used here."""

    def id_to_token(self, id: int) -> str | None: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def get_added_tokens_decoder(self) -> dict[int, Any]: ...
    def to_str(self) -> str: ...


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class DecoderKind:
    """What the tokenizer's decoder is, read once per artifact. Raises ArtifactError for one that cannot be streamed."""

    def __init__(self, tokenizer: TokenizerLike, decoder: Any) -> None:
        self.tokenizer = tokenizer
        parts = _flatten(decoder)
        kinds = [str(part.get("type")) for part in parts]
        self.byte_level = kinds == ["ByteLevel"]
        self.byte_fallback = "ByteFallback" in kinds
        unknown = [] if self.byte_level else [part for part in parts if not _is_local(part)]
        if unknown:
            raise ArtifactError(
                f"tokenizer.json: a decoder of type {unknown[0].get('type')!r} cannot be streamed",
                hint=f"supported: ByteLevel, or a sequence of {', '.join(sorted(_LOCAL))}",
            )
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token.content for token in added.values() if token.special)
        self._alphabet = byte_alphabet() if self.byte_level else {}
        self._pieces: dict[int, str | None] = {}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def of(cls, tokenizer: TokenizerLike) -> DecoderKind:
        return cls(tokenizer, json.loads(tokenizer.to_str()).get("decoder"))

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's spelling, or None for ids the tokenizer does not know."""
        if token_id not in self._pieces:
            self._pieces[token_id] = self.tokenizer.id_to_token(token_id)
        return self._pieces[token_id]

    def piece_bytes(self, token_id: int, piece: str) -> bytes:
        """What a byte-level piece stands for; a piece outside the alphabet (an added token) is its own UTF-8."""
        found = self._bytes.get(token_id)
        if found is None:
            codes = [self._alphabet.get(character) for character in piece]
            known = [code for code in codes if code is not None]
            found = bytes(known) if len(known) == len(codes) else piece.encode("utf-8")
            self._bytes[token_id] = found
        return found


def _flatten(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [part for entry in decoder.get("decoders", []) for part in _flatten(entry)]
    return [decoder]


def _is_local(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    if kind == "Strip":
        return bool(part.get("stop", 0) == 0)  # stripping the end would need the end
    if kind == "Replace":
        pattern: str = part.get("pattern", {}).get("String", "")
        return len(pattern) == 1  # a longer one could span two tokens
    return kind in _LOCAL


class Detokenizer:
    """One stream of tokens. `push` returns the text that became certain; `finish` the rest, once."""

    def __init__(self, kind: DecoderKind, *, skip_special_tokens: bool = True) -> None:
        self._kind = kind
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []  # the last token emitted: tells the decoder that this is not the beginning
        self._held: list[int] = []  # byte-fallback tokens whose run may go on

    def push(self, token_id: int) -> str:
        piece = self._kind.piece(token_id)
        if piece is None or (self._skip_special and piece in self._kind.special):
            return ""
        if self._kind.byte_level:
            return self._utf8.decode(self._kind.piece_bytes(token_id, piece))
        self._held.append(token_id)
        if self._kind.byte_fallback and _BYTE_PIECE.fullmatch(piece):
            return ""  # the decoder judges a run of bytes as a whole
        return self._release()

    def finish(self) -> str:
        """The text of what is still held: an unfinished character becomes U+FFFD, as in a full decode."""
        if self._kind.byte_level:
            return self._utf8.decode(b"", final=True)
        return self._release() if self._held else ""

    def _release(self) -> str:
        decode = self._kind.tokenizer.decode
        before = decode(self._context, skip_special_tokens=False) if self._context else ""
        after = decode([*self._context, *self._held], skip_special_tokens=False)
        self._context = self._held[-1:]  # never a byte, unless the stream ends with it
        self._held = []
        return after[len(before) :]


class StopMatcher:
    """Cuts a stream at the first stop string that becomes complete; the stop string itself is not emitted.

    Of two that end at the same character, the longer one counts. Text is held back only while it could still be the
    beginning of a stop string. The result does not depend on how the text is divided into deltas.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or any(not isinstance(stop, str) or not stop for stop in stops):
            raise RequestError("a stop string is empty or not text", hint="pass a list of non-empty strings")
        self._stops = tuple(dict.fromkeys(stops))
        self._pending = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """(text to emit, whether a stop string was completed). After a match nothing more is emitted."""
        if self.matched is not None:
            return "", True
        if not self._stops:
            return text, False
        self._pending += text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if ends:
            _, start, self.matched = min(ends)
            emit, self._pending = self._pending[:start], ""
            return emit, True
        keep = max(_overlap(self._pending, stop) for stop in self._stops)
        cut = len(self._pending) - keep
        emit, self._pending = self._pending[:cut], self._pending[cut:]
        return emit, False

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        rest, self._pending = self._pending, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
