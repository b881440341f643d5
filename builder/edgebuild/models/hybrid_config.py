"""The parts of a config.json that only hybrid models have: layer kinds, Gated DeltaNet sizes, experts.

Imports no torch. Knows shapes and published tensor names, nothing of what is computed from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgebuild.errors import CheckpointError

ATTENTION, DELTA_NET = "full_attention", "linear_attention"
DELTA_BLOCK = 64  # rows of the delta rule that are solved together
SPLIT_LEVELS = 5  # of doubling, in the form without a loop: that many blocks in one launch, as a power of two
MAX_CAPTURED_ROWS = DELTA_BLOCK << SPLIT_LEVELS
_DEFAULT_INTERVAL = 4  # every fourth layer is full attention where the config does not say


@dataclass(frozen=True)
class DeltaNetConfig:
    """Gated DeltaNet (arXiv 2412.06464). Each of `key_heads` serves value_heads / key_heads value heads.

    key_dim, value_dim  elements of one head
    kernel              taps of the causal depthwise convolution over [q | k | v]
    grouped             True (Qwen3-Next): `in_proj_qkvz` and `in_proj_ba` hold [q|k|v·r|z·r], [b·r|a·r] head by head;
                        False: `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a` apart
    gate                activation of the output gate: "silu" or "sigmoid"
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    grouped: bool
    gate: str = "silu"

    @property
    def keys(self) -> int:
        """Width of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """What the convolution runs over: queries, keys, values."""
        return 2 * self.keys + self.values

    def tensors(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Name below `linear_attn.` → shape."""
        if self.grouped:
            projections = {"in_proj_qkvz": self.channels + self.values, "in_proj_ba": 2 * self.value_heads}
        else:
            projections = {
                "in_proj_qkv": self.channels,
                "in_proj_z": self.values,
                "in_proj_b": self.value_heads,
                "in_proj_a": self.value_heads,
            }
        return {
            **{f"{name}.weight": (rows, hidden_size) for name, rows in projections.items()},
            "conv1d.weight": (self.channels, 1, self.kernel),
            "A_log": (self.value_heads,),
            "dt_bias": (self.value_heads,),
            "norm.weight": (self.value_dim,),
            "out_proj.weight": (hidden_size, self.values),
        }

    def row_elements(self) -> int:
        """Float32 elements that one row needs at the widest point: window, mixed, keys, values, systems of a block, and
        its part of the block's step matrices (three of [Dk, Dk + Dv] a head; engines: 107 MB at 512 rows of 0.8B)."""
        steps = 3 * self.value_heads * self.key_dim * (self.key_dim + self.value_dim) // DELTA_BLOCK
        return 3 * self.channels + 4 * self.values + 4 * DELTA_BLOCK * self.value_heads + steps

    def state_bytes(self, element_bytes: int) -> int:
        """One sequence's state in one layer: float32 matrices, the convolution's window in the model's precision."""
        matrices = self.value_heads * self.key_dim * self.value_dim
        return 4 * matrices + element_bytes * (self.kernel - 1) * self.channels


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts: softmax router, top-k, optional renormalisation, and one expert that every token passes.

    layers  per decoder layer: True = experts, False = a dense feed-forward
    """

    experts: int
    experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    renormalise: bool
    layers: tuple[bool, ...]

    def tensors(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Name below `mlp.` → shape; experts stacked, whatever the files hold (checkpoint/assembled.py)."""
        inner, shared = self.intermediate_size, self.shared_intermediate_size
        return {
            "gate.weight": (self.experts, hidden_size),
            "experts.gate_up_proj": (self.experts, 2 * inner, hidden_size),
            "experts.down_proj": (self.experts, hidden_size, inner),
            "shared_expert.gate_proj.weight": (shared, hidden_size),
            "shared_expert.up_proj.weight": (shared, hidden_size),
            "shared_expert.down_proj.weight": (hidden_size, shared),
            "shared_expert_gate.weight": (1, hidden_size),
        }

    def chosen_elements(self, hidden_size: int) -> int:
        """Weights of the routed experts that one token passes."""
        return self.experts_per_token * 3 * self.intermediate_size * hidden_size

    @property
    def gathered_rows(self) -> int:
        """Rows up to which gathering experts moves fewer bytes than reading all (export/expert_forms.py, "split"): a
        gathered expert is read, written and read again, one a choice."""
        return max(1, self.experts // (3 * self.experts_per_token))

    def dense_elements(self, hidden_size: int) -> int:
        """Activations of one row that passes every expert, at their widest."""
        return self.experts * max(3 * self.intermediate_size, self.intermediate_size + hidden_size)

    @property
    def active_width(self) -> int:
        """Inner features that one token passes."""
        return self.experts_per_token * self.intermediate_size + self.shared_intermediate_size


def read_layer_kinds(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """ATTENTION or DELTA_NET for each layer, from `layer_types` or `full_attention_interval`."""
    given = config.get("layer_types")
    if given is None:
        interval = positive(config, "full_attention_interval", _DEFAULT_INTERVAL)
        return tuple(DELTA_NET if (index + 1) % interval else ATTENTION for index in range(layers))
    kinds = tuple(str(kind) for kind in given)
    unknown = sorted(set(kinds) - {ATTENTION, DELTA_NET})
    if unknown or len(kinds) != layers:
        raise CheckpointError(
            f"layer_types has {len(kinds)} entries for {layers} layers, unknown: {', '.join(unknown) or 'none'}",
            hint=f"expected {layers} of {ATTENTION!r} and {DELTA_NET!r}",
        )
    return kinds


def read_delta_net(config: Mapping[str, Any], *, grouped: bool, gates: Sequence[str] = ("silu",)) -> DeltaNetConfig:
    """Sizes under the keys `linear_*`; their defaults are the family's. `gates`: output gates that the family has."""
    gate = str(config.get("output_gate_type") or config.get("hidden_act", "silu"))
    delta = DeltaNetConfig(
        key_heads=positive(config, "linear_num_key_heads", 16),
        value_heads=positive(config, "linear_num_value_heads", 32),
        key_dim=positive(config, "linear_key_head_dim", 128),
        value_dim=positive(config, "linear_value_head_dim", 128),
        kernel=positive(config, "linear_conv_kernel_dim", 4),
        grouped=grouped,
        gate="silu" if gate == "swish" else gate,
    )
    if delta.value_heads % delta.key_heads:
        raise CheckpointError(
            f"linear_num_value_heads {delta.value_heads} is not a multiple of linear_num_key_heads {delta.key_heads}"
        )
    if delta.kernel < 2 or delta.gate not in gates:
        raise CheckpointError(
            f"linear_conv_kernel_dim {delta.kernel} with output gate {delta.gate!r} is not supported",
            hint=f"supported: at least 2 taps, {' or '.join(gates)}",
        )
    return delta


def read_moe(config: Mapping[str, Any], layers: int, *, renormalise: bool | None = None) -> MoeConfig | None:
    """The experts, or None where no layer has any. `renormalise` None = the config decides, as in Qwen3-Next."""
    experts = config.get("num_experts", 0)
    step, dense = positive(config, "decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
    sparse = tuple(bool(experts) and index not in dense and (index + 1) % step == 0 for index in range(layers))
    if not any(sparse):
        return None
    moe = MoeConfig(
        experts=positive(config, "num_experts"),
        experts_per_token=positive(config, "num_experts_per_tok"),
        intermediate_size=positive(config, "moe_intermediate_size"),
        shared_intermediate_size=positive(config, "shared_expert_intermediate_size"),
        renormalise=bool(config.get("norm_topk_prob", True)) if renormalise is None else renormalise,
        layers=sparse,
    )
    if moe.experts_per_token > moe.experts:
        raise CheckpointError(f"num_experts_per_tok {moe.experts_per_token} of {moe.experts} experts")
    return moe


def rotary_width(partial: float | None, head_dim: int) -> int:
    """Dimensions of a head that rotate: an even number, all where `partial` is None."""
    width = head_dim if partial is None else int(head_dim * partial)
    if width < 2 or width % 2 or width > head_dim:
        raise CheckpointError(
            f"partial_rotary_factor {partial} of a head_dim of {head_dim} rotates {width} dimensions",
            hint="expected an even number from 2 to head_dim",
        )
    return width


def positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive whole number of the config. Raises CheckpointError."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config: {key} is {value!r}, expected a positive whole number")
    return value
