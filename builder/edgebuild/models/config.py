"""What a model is, in numbers: one frozen record read from a published config.json (or GGUF metadata in its form).

Imports no torch: a plan that refuses a model must do so in under two seconds. Knows no tensors, only shapes and names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgebuild.errors import CheckpointError
from edgebuild.models.flash_config import GATES, SPARSE_ATTENTION, FlashConfig, read_flash
from edgebuild.models.hybrid_config import (
    ATTENTION,
    DELTA_NET,
    DeltaNetConfig,
    MoeConfig,
    read_delta_net,
    read_layer_kinds,
    read_moe,
    rotary_width,
)
from edgebuild.models.hybrid_config import positive as _whole

# model_type -> attention biases on q, k, v / on o when the config does not say; q/k norm
FAMILIES: Mapping[str, tuple[bool, bool, bool]] = {
    "llama": (False, False, False),
    "qwen2": (True, False, False),
    "qwen3": (False, False, True),
    "qwen3_5": (False, False, True),
    "qwen3_5_moe": (False, False, True),
    "qwen3_next": (False, False, True),
    "qwen4_exp": (False, False, True),
}
# model_type -> partial rotary factor when the config does not say
HYBRID: Mapping[str, float] = {"qwen3_5": 0.25, "qwen3_5_moe": 0.25, "qwen3_next": 0.25, "qwen4_exp": 1.0}
_MROPE_KEYS = {"mrope_section", "mrope_interleaved"}  # of images: for text all three axes are the position

_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_COMMON_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. Kinds and formulas as Transformers' `modeling_rope_utils` defines them.

    kind                    "default", "linear", "llama3" or "yarn"
    theta                   base of the geometric series of wavelengths
    factor                  context extension factor (1.0 for "default")
    low_frequency_factor, high_frequency_factor   llama3 only
    original_context_tokens context of pre-training (llama3, yarn)
    attention_factor        multiplies cos and sin (yarn; 1.0 otherwise)
    beta_fast, beta_slow, truncate   yarn's correction range
    frequency_factors       divisors given one by one (a GGUF's rope_freqs), or () when a formula applies
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_tokens: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model.

    Sizes are counts of elements: `hidden_size`, `intermediate_size`, `head_dim`; `heads` query heads share `kv_heads`
    key/value heads. `context_tokens` is the longest context the model was trained for.

    rotary_dim          dimensions of a head that rotate
    layer_kinds         "full_attention" or "linear_attention" for each layer; empty = all full attention
    gated_attention     q_proj also gives a gate for each head; the attention's output is multiplied by its sigmoid
    zero_centred_norms  norms multiply by 1 + weight
    delta, moe, flash   of hybrid models, else None
    intermediate_size   of the dense feed-forward; with experts in every layer, the width that one token passes
    """

    family: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocabulary_size: int
    context_tokens: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rotary_dim: int
    mtp_layers: int = 0
    layer_kinds: tuple[str, ...] = ()
    gated_attention: bool = False
    zero_centred_norms: bool = False
    delta: DeltaNetConfig | None = None
    moe: MoeConfig | None = None
    flash: FlashConfig | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json. Raises CheckpointError for an unknown family or anything this project would get wrong."""
        config = _text_part(config)
        family = str(config.get("model_type")).removesuffix("_text")
        if family not in FAMILIES:
            raise CheckpointError(
                f"model_type {family!r} is not supported",
                hint=f"supported: {', '.join(sorted(FAMILIES))}; CONTRIBUTING.md says how to add a family",
            )
        hybrid = family in HYBRID
        if family == "qwen4_exp" and config.get("layer_types"):
            same = {SPARSE_ATTENTION: ATTENTION}
            config["layer_types"] = [same.get(kind, kind) for kind in config["layer_types"]]
        _refuse_unsupported(config, (ATTENTION, DELTA_NET) if hybrid else (ATTENTION,))
        qkv_bias, o_bias, qk_norm = FAMILIES[family]
        if family != "qwen2":  # Qwen2 fixes its biases in code, the others read them from the config
            qkv_bias = o_bias = bool(config.get("attention_bias", False))
        heads = _whole(config, "num_attention_heads")
        hidden_size = _whole(config, "hidden_size")
        fixed = {"qwen3": 128, **dict.fromkeys(HYBRID, 256)}
        head_dim = config.get("head_dim") or fixed.get(family, hidden_size // heads)
        kv_heads = config.get("num_key_value_heads") or heads
        if heads % kv_heads:
            raise CheckpointError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        context_tokens = _whole(config, "max_position_embeddings")
        layers = _whole(config, "num_hidden_layers")
        kinds: tuple[str, ...] = ()
        delta, moe, flash, partial = None, None, None, None
        if hybrid:
            kinds = read_layer_kinds(config, layers)
            flash = read_flash(config, kinds) if family == "qwen4_exp" else None
            if DELTA_NET in kinds:
                delta = read_delta_net(config, grouped=family == "qwen3_next", gates=GATES if flash else GATES[:1])
            moe = read_moe(config, layers, renormalise=None if family in ("qwen3_next", "qwen4_exp") else True)
            partial = _partial_rotary(config, HYBRID[family])
            config = _without_partial_rotary(config)
        rotary_dim = rotary_width(partial, head_dim)
        dense = moe is None or not all(moe.layers)
        return cls(
            family=family,
            hidden_size=hidden_size,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=_whole(config, "intermediate_size") if dense or moe is None else moe.active_width,
            vocabulary_size=_whole(config, "vocab_size"),
            context_tokens=context_tokens,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=read_rope(config, context_tokens, rotary_dim),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=qk_norm,
            rotary_dim=rotary_dim,
            layer_kinds=kinds,
            gated_attention=hybrid,
            zero_centred_norms=hybrid,
            delta=delta,
            moe=moe,
            flash=flash,
            mtp_layers=int(config.get("mtp_num_hidden_layers") or config.get("num_nextn_predict_layers") or 0),
        )

    def layer_kind(self, index: int) -> str:
        """ "full_attention" or "linear_attention"."""
        return self.layer_kinds[index] if self.layer_kinds else ATTENTION

    @property
    def attention_layers(self) -> int:
        """Layers that keep keys and values."""
        return sum(self.layer_kind(index) == ATTENTION for index in range(self.layers))

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor the decoder reads, under the names of the published checkpoints."""
        tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary_size, self.hidden_size)}
        for index in range(self.layers):
            layer = f"model.layers.{index}."
            tensors |= {layer + name: shape for name, shape in self._residual_tensors(index).items()}
            if self.delta is not None and self.layer_kind(index) == DELTA_NET:
                mixer, prefix = self.delta.tensors(self.hidden_size), "linear_attn."
            else:
                mixer, prefix = self._attention_tensors(), "self_attn."
            tensors |= {f"{layer}{prefix}{name}": shape for name, shape in mixer.items()}
            experts = self.moe is not None and self.moe.layers[index]
            mlp = self.moe.tensors(self.hidden_size) if self.moe is not None and experts else self._mlp_tensors()
            tensors |= {f"{layer}mlp.{name}": shape for name, shape in mlp.items()}
        if self.flash is None:
            tensors["model.norm.weight"] = (self.hidden_size,)
        else:
            mixer = self.flash.residual_tensors(self.hidden_size, combine=False)
            tensors |= {f"model.hyper_connection_mixer.{name}": shape for name, shape in mixer.items()}
        if not self.tie_word_embeddings:
            tensors["lm_head.weight"] = (self.vocabulary_size, self.hidden_size)
        return tensors

    def _residual_tensors(self, index: int) -> dict[str, tuple[int, ...]]:
        """Name below the layer → shape, of what stands around token mixer and feed-forward."""
        if self.flash is None:
            return {f"{name}.weight": (self.hidden_size,) for name in ("input_layernorm", "post_attention_layernorm")}
        around = self.flash.residual_tensors(self.hidden_size, combine=True)
        places = ("attn_hyper_connection", "mlp_hyper_connection")
        tensors = {f"{place}.{name}": shape for place in places for name, shape in around.items()}
        ngram = self.flash.ngram_tensors(self.hidden_size, index)
        return tensors | {f"ple.{name}": shape for name, shape in ngram.items()}

    def _attention_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name below `self_attn.` → shape."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        tensors: dict[str, tuple[int, ...]] = {}
        for name, rows in (("q_proj", 2 * query if self.gated_attention else query), ("k_proj", kv), ("v_proj", kv)):
            tensors[f"{name}.weight"] = (rows, self.hidden_size)
            if self.qkv_bias:
                tensors[f"{name}.bias"] = (rows,)
        tensors["o_proj.weight"] = (self.hidden_size, query)
        if self.o_bias:
            tensors["o_proj.bias"] = (self.hidden_size,)
        if self.qk_norm:
            tensors["q_norm.weight"] = tensors["k_norm.weight"] = (self.head_dim,)
        indexer = {} if self.flash is None else self.flash.indexer_tensors(self.hidden_size)
        return tensors | {f"indexer.{name}": shape for name, shape in indexer.items()}

    def _mlp_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name below `mlp.` → shape, of a dense feed-forward."""
        tensors: dict[str, tuple[int, ...]] = {}
        wide, narrow = (self.intermediate_size, self.hidden_size), (self.hidden_size, self.intermediate_size)
        for name, shape in (("gate_proj", wide), ("up_proj", wide), ("down_proj", narrow)):
            tensors[f"{name}.weight"] = shape
            if self.mlp_bias:
                tensors[f"{name}.bias"] = shape[:1]
        return tensors

    def weight_elements(self) -> int:
        """Elements of all weights, each counted once (a tied head is the embedding)."""
        return sum(math.prod(shape) for shape in self.expected_tensors().values())

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of key and value cache that one position of one sequence takes, over all layers."""
        return self.attention_layers * (2 * self.kv_heads * self.head_dim + self.index_dim) * element_bytes

    @property
    def block_tokens(self) -> int:
        """Positions that sparse attention chooses together; a cache holds whole blocks. 1 = no sparse attention."""
        return 1 if self.flash is None or self.flash.indexer is None else self.flash.indexer.ratio

    @property
    def index_dim(self) -> int:
        """Elements beside key and value that a layer of sparse attention keeps of a position."""
        return 0 if self.flash is None or self.flash.indexer is None else self.flash.indexer.head_dim

    @property
    def draft_width(self) -> int:
        """Elements of the row that a drafter takes: after the final norm, or all streams before the final mixer."""
        return self.hidden_size * (1 if self.flash is None else self.flash.streams)

    def recurrent_bytes_per_slot(self, element_bytes: int) -> int:
        """Bytes of recurrent state that one sequence takes, over all layers, whatever its length."""
        if self.delta is None:
            return 0
        extra = 0 if self.flash is None else self.flash.state_bytes(self.hidden_size, element_bytes)
        return (self.layers - self.attention_layers) * self.delta.state_bytes(element_bytes) + extra


def read_rope(config: Mapping[str, Any], context_tokens: int, head_dim: int) -> RopeConfig:
    """Rope from `rope_parameters` (Transformers 5), `rope_scaling` + `rope_theta` (before), `rope_type` or `type`."""
    given: dict[str, Any] = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise CheckpointError(
            f"rope type {kind!r} is not supported", hint=f"supported: {', '.join(_ROPE_KINDS)}; nothing was built"
        )
    unknown = set(given) - _COMMON_ROPE_KEYS - _ROPE_KEYS[kind] - {"frequency_factors"}
    if unknown:
        raise CheckpointError(
            f"rope type {kind!r} has unknown parameters {', '.join(sorted(unknown))}",
            hint=f"known: {', '.join(sorted(_ROPE_KEYS[kind] | _COMMON_ROPE_KEYS))}",
        )
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise CheckpointError(f"partial_rotary_factor {partial} is not supported for this family", hint="expected 1.0")
    explicit = tuple(float(value) for value in given.get("frequency_factors", ()))
    if explicit and len(explicit) != head_dim // 2:
        raise CheckpointError(f"{len(explicit)} rope frequency factors for a head_dim of {head_dim}: expected half")
    if kind == "default":
        return RopeConfig(theta=theta, frequency_factors=explicit)
    original = int(
        config.get("original_max_position_embeddings")
        or given.get("original_max_position_embeddings")
        or context_tokens
    )
    factor = given.get("factor")
    if factor is None and kind == "yarn":
        factor = context_tokens / original
    if not isinstance(factor, (int, float)) or factor <= 0:
        raise CheckpointError(f"rope type {kind!r} needs a positive factor, got {factor!r}")
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=float(factor))
    if kind == "llama3":
        low, high = given.get("low_freq_factor"), given.get("high_freq_factor")
        if low is None or high is None or not high > low:
            raise CheckpointError(f"rope type 'llama3' needs low_freq_factor < high_freq_factor, got {low} and {high}")
        return RopeConfig(
            kind="llama3",
            theta=theta,
            factor=float(factor),
            low_frequency_factor=float(low),
            high_frequency_factor=float(high),
            original_context_tokens=original,
        )
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=float(factor),
        original_context_tokens=original,
        attention_factor=_yarn_attention_factor(given, float(factor)),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
    )


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """YaRN (arXiv 2309.00071): 0.1 ln(s) + 1, or the ratio of two such terms when both mscales are given."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mscale, mscale_all = given.get("mscale"), given.get("mscale_all_dim")
    return scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)


def _text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's keys of a nested config; whether the head is tied is said outside, where it is said."""
    if "text_config" not in config:
        return dict(config)
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**config, **config["text_config"], **tied}


def _partial_rotary(config: Mapping[str, Any], default: float) -> float:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return default if partial is None else float(partial)


def _without_partial_rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is left for `read_rope`, which then works on the rotating part of a head alone."""
    plain = {key: value for key, value in config.items() if key != "partial_rotary_factor"}
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key):
            dropped = _MROPE_KEYS | {"partial_rotary_factor"}
            plain[key] = {name: value for name, value in config[key].items() if name not in dropped}
    return plain


def _refuse_unsupported(config: Mapping[str, Any], kinds: tuple[str, ...]) -> None:
    """Settings that would be computed wrong must stop the build, not be ignored."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act {activation!r} is not supported", hint="supported: silu")
    layer_types = config.get("layer_types") or []
    sliding = [kind for kind in layer_types if kind not in kinds]
    windowed = config.get("use_sliding_window") and config.get("sliding_window")
    if sliding or (windowed and not layer_types and config.get("max_window_layers", 0) < config["num_hidden_layers"]):
        raise CheckpointError(
            f"sliding-window attention is not supported (layer types {sorted(set(sliding)) or 'sliding_attention'})",
            hint="only full attention is exported; a checkpoint with use_sliding_window: false works",
        )
