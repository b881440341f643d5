"""How one request wants its tokens chosen, and the random numbers for it.

This module knows neither logits nor batches: the graph samples, from one uniform number per row. The number for output
position p of a request depends on the request's seed and p alone, so batching, chunking and drafting do not change it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from edgert.errors import RequestError

SEED_LIMIT = 2**64


@dataclass(frozen=True)
class SamplingParams:
    """What a caller may ask for. Raises RequestError where it is made, so a bad value never reaches the worker.

    max_tokens      output tokens at most; the context may end the output earlier
    temperature     0 = greedy, the default; logits are divided by it otherwise
    top_k           keep the k most likely tokens; 0 = off
    top_p           keep the smallest set whose probability reaches p, at least one token; 1 = off
                    (TensorRT engines filter among the 64 likeliest tokens, whatever top_k and top_p ask for)
    seed            0 <= seed < 2**64; None = a fresh one for each request
    stop            strings that end the output; the text before the match is kept, the match is not
    stop_token_ids  tokens that end the output, besides the model's own
    ignore_eos      go on past the model's end-of-sequence tokens (for measuring)
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, Iterable) or isinstance(value, bytes):
                raise RequestError(f"{name} is {value!r}: expected a list")
            object.__setattr__(self, name, tuple(value))
        _whole("max_tokens", self.max_tokens, 1, None)
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        if self.seed is not None:
            _whole("seed", self.seed, 0, SEED_LIMIT - 1)
        _real("temperature", self.temperature, "0 or more", lambda value: value >= 0)
        _real("top_p", self.top_p, "above 0 and at most 1", lambda value: 0 < value <= 1)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop holds {text!r}: expected non-empty strings")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, None)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}: expected true or false")

    def seeded(self) -> int:
        """The request's seed: the one given, or a fresh one."""
        return secrets.randbits(64) if self.seed is None else self.seed


def uniform(seed: int, position: int) -> np.float32:
    """The uniform number in [0, 1) for output position `position` (0 = the first sampled token).

    Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) as numpy implements it, with key
    `seed` and counter `position`: the top 24 bits of the first 64-bit word, times 2**-24, exact in float32.
    """
    word = np.random.Philox(key=seed, counter=position).random_raw()
    return np.float32((int(word) >> 40) * 2.0**-24)


def _whole(name: str, value: object, low: int, high: int | None) -> None:
    good = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not good or value < low or (high is not None and value > high):  # type: ignore[operator]
        bound = f"{low} or more" if high is None else f"{low} to {high}"
        raise RequestError(f"{name} is {value!r}: expected a whole number, {bound}")


def _real(name: str, value: object, expected: str, accepts: object) -> None:
    good = isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)
    try:
        good = good and math.isfinite(value) and accepts(value)  # type: ignore[arg-type,operator]
    except OverflowError:  # a whole number that no float holds
        good = False
    if not good:
        raise RequestError(f"{name} is {repr(value)[:40]}: expected a number {expected}")
