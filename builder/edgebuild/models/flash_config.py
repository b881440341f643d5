"""What only Qwen3.8-Flash-Next (`qwen4_exp`) has: residual streams, the sparse attention's indexer, the n-gram table.

Imports no torch. Knows shapes and published tensor names, nothing of what is computed from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgebuild.errors import CheckpointError
from edgebuild.models.hybrid_config import DELTA_NET, positive

_MASK = (1 << 64) - 1
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64 (Steele et al. 2014)
_LAYER_STEP = 10007  # between the seeds of two tables
GATES = ("silu", "sigmoid")
SPARSE_ATTENTION = "qwen_sparse_attention"  # as Transformers spells a published "full_attention" of this family


@dataclass(frozen=True)
class IndexerConfig:
    """Chooses, for each query, `budget` tokens in blocks of `ratio` by scores of its own small heads."""

    heads: int
    head_dim: int
    budget: int
    ratio: int


@dataclass(frozen=True)
class NgramConfig:
    """A hashed n-gram embedding that some layers add to every residual stream.

    layers      0-based layers that have one, each with a table of its own
    width       of the embeddings of all n-gram heads together
    kernel      taps of its convolution, `size` columns apart
    size        longest n-gram
    heads       independently hashed heads for each length 2 .. size
    base        the heads' table sizes are the primes from here on
    divisor     the table's rows are padded to a multiple of it
    boundary    token id that n-grams never cross
    """

    layers: tuple[int, ...]
    width: int
    kernel: int
    size: int
    heads: int
    base: int
    divisor: int
    seed: int
    boundary: int

    @property
    def head_width(self) -> int:
        return self.width // ((self.size - 1) * self.heads)

    @property
    def window(self) -> int:
        """Columns of the convolution's past."""
        return (self.kernel - 1) * self.size

    def head_sizes(self, place: int) -> tuple[int, ...]:
        """Rows of each head's part of the table, for the `place`-th layer that has one."""
        count = (self.size - 1) * self.heads
        return _primes_from(self.base, (place + 1) * count)[place * count :]

    def multipliers(self, vocabulary_size: int, place: int) -> tuple[int, ...]:
        """Odd factors of the hash, small enough that a token id times one of them stays within 63 bits."""
        half = max(1, ((1 << 63) - 1) // vocabulary_size // 2)
        seed = self.seed + _LAYER_STEP * place
        return tuple(2 * (_splitmix(seed + _GAMMA * (index + 1)) % half) + 1 for index in range(self.size))

    def table_rows(self, place: int) -> int:
        return -(-sum(self.head_sizes(place)) // self.divisor) * self.divisor


@dataclass(frozen=True)
class FlashConfig:
    """streams residual streams of the hidden size each, mixed at rank `lowrank`."""

    streams: int
    lowrank: int
    indexer: IndexerConfig | None
    ngram: NgramConfig | None

    def residual_tensors(self, hidden: int, *, combine: bool) -> dict[str, tuple[int, ...]]:
        """Name below `attn_hyper_connection.`, `mlp_hyper_connection.` or `hyper_connection_mixer.` → shape."""
        wide = self.streams * hidden
        inject = {"block_inject_weight.weight": (self.streams, wide)} if combine else {}
        return {
            "hc_norm.weight": (wide,),
            "input_mix_weight_down.weight": (self.lowrank, wide),
            "input_mix_weight_up.weight": (wide, self.lowrank),
            **inject,
        }

    def indexer_tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Name below `self_attn.indexer.` → shape."""
        if self.indexer is None:
            return {}
        dim = self.indexer.head_dim
        return {
            "index_qk_proj.weight": ((self.indexer.heads + 1) * dim, hidden),
            "q_layernorm.weight": (dim,),
            "k_layernorm.weight": (dim,),
        }

    def ngram_tensors(self, hidden: int, index: int) -> dict[str, tuple[int, ...]]:
        """Name below `ple.` → shape, for a layer that has an n-gram embedding; else nothing."""
        if self.ngram is None or index not in self.ngram.layers:
            return {}
        ngram, wide = self.ngram, self.streams * hidden
        rows = ngram.table_rows(ngram.layers.index(index))
        return {
            "ple_embedding.ngram_embedding.weight": (rows, ngram.head_width),
            "key_proj.weight": (wide, ngram.width),
            "value_proj.weight": (hidden, ngram.width),
            **{f"norm_{name}.weight": (wide,) for name in ("key", "query", "conv")},
            "conv1d.weight": (wide, 1, ngram.kernel),
        }

    def state_bytes(self, hidden: int, element_bytes: int) -> int:
        """Convolution columns and token ids (float32) of the n-gram embeddings of one sequence."""
        if self.ngram is None:
            return 0
        columns = self.ngram.window * self.streams * hidden
        return len(self.ngram.layers) * (element_bytes * columns + 4 * (self.ngram.size - 1))


def read_flash(config: Mapping[str, Any], kinds: tuple[str, ...]) -> FlashConfig:
    """From the keys `hc_*`, `indexer_*` and `ple_*`. Raises CheckpointError for what the reference refuses too."""
    streams = positive(config, "hc_count", 4)
    if streams < 2:
        raise CheckpointError(f"hc_count {streams}: expected at least 2 residual streams")
    return FlashConfig(streams, positive(config, "hc_lowrank", 320), _indexer(config), _ngram(config, kinds))


def _indexer(config: Mapping[str, Any]) -> IndexerConfig | None:
    keys = [f"indexer_{name}" for name in ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")]
    if all(config.get(key) is None for key in keys):
        return None
    heads, kv_heads, dim, budget, ratio = (positive(config, key) for key in keys)
    if kv_heads != 1 or budget % ratio:
        raise CheckpointError(
            f"indexer with {kv_heads} key heads, budget {budget} in blocks of {ratio}",
            hint="expected one key head and a budget of whole blocks",
        )
    return IndexerConfig(heads, dim, budget, ratio)


def _ngram(config: Mapping[str, Any], kinds: tuple[str, ...]) -> NgramConfig | None:
    layers = tuple(sorted({int(each) - 1 for each in config.get("ple_layer_ids") or ()}))
    if not layers:
        return None
    end = config.get("eos_token_id")
    boundary = end[0] if isinstance(end, list) and end else end
    if not isinstance(boundary, int):
        raise CheckpointError("config: eos_token_id is needed by the n-gram embedding, which ends n-grams there")
    ngram = NgramConfig(
        layers=layers,
        width=positive(config, "ple_embed_dim", positive(config, "hidden_size")),
        kernel=positive(config, "ple_conv_kernel_size", 4),
        size=positive(config, "ngram_size", 3),
        heads=positive(config, "heads_per_ngram", 8),
        base=positive(config, "ngram_vocab_size_base", 20_000_000),
        divisor=positive(config, "make_ngram_vocab_size_divisible_by", 128),
        seed=int(config.get("seed", 1234)),
        boundary=boundary,
    )
    heads = (ngram.size - 1) * ngram.heads
    misplaced = [index + 1 for index in layers if not 0 <= index < len(kinds) or kinds[index] != DELTA_NET]
    if heads < 1 or ngram.width % max(heads, 1) or misplaced:
        raise CheckpointError(
            f"n-gram embedding of width {ngram.width} with {heads} heads in layers {[index + 1 for index in layers]}",
            hint=f"the width must divide by the heads, and the layers be of kind {DELTA_NET}",
        )
    return ngram


def _splitmix(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _primes_from(start: int, count: int) -> tuple[int, ...]:
    """The first `count` primes >= start."""
    found: list[int] = []
    candidate = start
    while len(found) < count:
        if candidate > 1 and all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            found.append(candidate)
        candidate += 1
    return tuple(found)
