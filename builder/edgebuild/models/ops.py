"""The few operations whose ONNX form is ours to choose, as torch custom operators.

Called eagerly they are plain torch (the numeric reference, and what training differentiates). Traced, they stay opaque
calls, which `edgebuild.export` translates into the formulation that the backend measures best. Nothing here knows a
backend.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from edgebuild.models.hybrid_config import DELTA_BLOCK

_MASKED = -1e30  # below any score; finite, so that a fully masked row stays finite


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, in] · weight [out, in]ᵀ (+ bias [out]) → [N, out]. The weight keeps the checkpoint's layout."""
    if torch.compiler.is_exporting():
        result: Tensor = torch.ops.edgebuild.linear(x, weight, bias)
        return result
    return F.linear(x, weight, bias)


def cache_update(cache: Tensor, update: Tensor, start: Tensor) -> Tensor:
    """cache [B, kv_heads, C, D] with update [B, kv_heads, q, D] written at positions start[b] .. start[b] + q - 1."""
    result: Tensor = torch.ops.edgebuild.cache_update(cache, update, start)
    return result


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    kv_positions: Tensor,
    scale: float,
    chosen: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention of each row over the cache positions up to its own.

    query [B, heads, q, D]; caches [B, kv_heads, C, D]; positions [B, q] of the rows; kv_positions [T] = 0..T-1: only
    the first T cache positions are read, and of those that `chosen` [B, q, T] leaves where it is given. Returns
    [B, heads, q, D].
    """
    if torch.compiler.is_exporting():
        result: Tensor = torch.ops.edgebuild.attention(
            query, key_cache, value_cache, positions, kv_positions, scale, chosen
        )
        return result
    return _attention(query, key_cache, value_cache, positions, kv_positions, scale, chosen)


def block_means(cache: Tensor, kv_positions: Tensor, ratio: int) -> Tensor:
    """Means over blocks of `ratio` positions of a cache [B, heads, C, D], as many as cover the first T = kv_positions'
    length → [B, heads, ⌈T / ratio⌉, D]. C must hold whole blocks."""
    if torch.compiler.is_exporting():
        result: Tensor = torch.ops.edgebuild.block_means(cache, kv_positions, ratio)
        return result
    return _block_means(cache, kv_positions, ratio)


def choose_tokens(scores: Tensor, positions: Tensor, kv_positions: Tensor, count: int, ratio: int) -> Tensor:
    """Tokens of the `count` best whole blocks of `ratio`, and all behind the last whole block, for each row.

    scores [B, q, blocks] >= 0; positions [B, q] of the rows; kv_positions [T]. Returns bool [B, q, T].
    """
    if torch.compiler.is_exporting():
        result: Tensor = torch.ops.edgebuild.choose_tokens(scores, positions, kv_positions, count, ratio)
        return result
    return _choose_tokens(scores, positions, kv_positions, count, ratio)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """One token per row: greedy where temperature is 0, else temperature → top-k → top-p → inverse CDF at `uniform`.

    logits float32 [B, R, V]; temperature, top_p float32 [B]; top_k int64 [B] (0 = off); uniform float32 [B, R] in
    [0, 1). Unfiltered rows walk the vocabulary in its own order, filtered rows in descending probability. int64 [B, R].
    """
    if torch.compiler.is_exporting():
        result: Tensor = torch.ops.edgebuild.sample(logits, temperature, top_k, top_p, uniform)
        return result
    return _sample(logits, temperature, top_k, top_p, uniform)


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over q rows from `state` on. All float32; Hv = r·Hk, value head h is of key head h // r.

    query, key [B, Hk, q, Dk] (unit length, the query scaled); value [B, Hv, q, Dv]; decay (logarithm, <= 0), beta
    [B, Hv, q]; state [B, Hv, Dk, Dv]; positions [B, q] of the rows: only its shape counts. Returns outputs [B, Hv, q,
    Dv] and the corrections v' that each row writes, of the same shape: both depend on no later row.
    """
    if torch.compiler.is_exporting():
        result: tuple[Tensor, Tensor] = torch.ops.edgebuild.gated_delta(
            query, key, value, decay, beta, state, positions
        )
        return result
    return _gated_delta(query, key, value, decay, beta, state)


def experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sum over a row's chosen experts of weight · SwiGLU expert.

    x [N, hidden]; chosen int64 [N, k]; weights [N, k]; gate_up [E, 2·inner, hidden]; down [E, hidden, inner].
    Returns [N, hidden].
    """
    if torch.compiler.is_exporting():
        result: Tensor = torch.ops.edgebuild.experts(x, chosen, weights, gate_up, down)
        return result
    return _experts(x, chosen, weights, gate_up, down)


def _block_means(cache: Tensor, kv_positions: Tensor, ratio: int) -> Tensor:
    blocks = (kv_positions.shape[0] + ratio - 1) // ratio
    grouped = cache[:, :, : blocks * ratio].reshape(*cache.shape[:2], blocks, ratio, cache.shape[3])
    means: Tensor = grouped.float().mean(3).to(cache.dtype)
    return means


def _choose_tokens(scores: Tensor, positions: Tensor, kv_positions: Tensor, count: int, ratio: int) -> Tensor:
    blocks = scores.shape[-1]
    complete = (positions + 1) // ratio  # whole blocks that a row sees
    whole = torch.arange(blocks) < complete[..., None]
    best = torch.where(whole, scores, -1.0).topk(min(count, blocks), dim=-1).indices
    chosen = torch.zeros_like(whole).scatter(2, best, True) & whole
    block = kv_positions // ratio
    return chosen[..., block] | (block >= complete[..., None])


def _attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    kv_positions: Tensor,
    scale: float,
    chosen: Tensor | None,
) -> Tensor:
    batch, heads, rows, head_dim = query.shape
    tier, kv_heads = kv_positions.shape[0], key_cache.shape[1]
    group = heads // kv_heads
    keys, values = key_cache[:, :, :tier], value_cache[:, :, :tier]
    # the query heads of one KV group become rows of one product
    folded = query.reshape(batch, kv_heads, group * rows, head_dim)
    seen = kv_positions <= positions[:, :, None]
    seen = seen if chosen is None else seen & chosen
    visible = seen[:, None].repeat(1, 1, group, 1)  # [B, 1, group·q, T]
    scores = (folded @ keys.transpose(-1, -2)).float() * scale
    weights = torch.where(visible, scores, torch.full_like(scores, _MASKED)).softmax(-1)
    return (weights.to(values.dtype) @ values).reshape(batch, heads, rows, head_dim)


def _gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    repeat = value.shape[1] // key.shape[1]
    query, key = query.repeat_interleave(repeat, dim=1), key.repeat_interleave(repeat, dim=1)
    outputs, corrections = [], []
    for start in range(0, value.shape[2], DELTA_BLOCK):
        block = slice(start, start + DELTA_BLOCK)
        q, k, v, b = query[:, :, block], key[:, :, block], value[:, :, block], beta[:, :, block, None]
        total = decay[:, :, block].cumsum(-1)  # [B, Hv, c]
        between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()  # e^(G_i − G_j), j <= i
        system = b * (k @ k.transpose(-1, -2)) * between
        read = v - total[..., None].exp() * (k @ state)
        v = torch.linalg.solve_triangular(system, b * read, upper=False, unitriangular=True)
        outputs.append(total[..., None].exp() * (q @ state) + (q @ k.transpose(-1, -2) * between) @ v)
        corrections.append(v)
        last = total[..., -1:]
        state = last[..., None].exp() * state + (k * (last - total)[..., None].exp()).transpose(-1, -2) @ v
    return torch.cat(outputs, dim=2), torch.cat(corrections, dim=2)


def _experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    mixed = torch.zeros_like(x)
    for expert in torch.unique(chosen).tolist():
        rows, places = torch.where(chosen == expert)
        gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, down[expert]) * weights[rows, places, None]
        mixed.index_add_(0, rows, out)
    return mixed


def _sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    greedy = logits.argmax(-1)
    divisor = torch.where(temperature > 0, temperature, torch.ones_like(temperature))[:, None, None]
    mass = ((logits - logits.amax(-1, keepdim=True)) / divisor).exp()
    plain = _inverse_cdf(mass, uniform)
    sorted_mass, order = mass.sort(stable=True, dim=-1, descending=True)
    ranks = torch.arange(logits.shape[-1])
    limit = torch.where(top_k > 0, top_k, torch.full_like(top_k, logits.shape[-1]))[:, None, None]
    sorted_mass = torch.where(ranks < limit, sorted_mass, 0.0)
    cumulative = sorted_mass.cumsum(-1)
    nucleus = (cumulative - sorted_mass) < top_p[:, None, None] * cumulative[..., -1:]
    choice = _inverse_cdf(torch.where(nucleus, sorted_mass, 0.0), uniform)
    filtered = order.gather(-1, choice[..., None])[..., 0]
    is_filtered = ((top_k > 0) | (top_p < 1))[:, None]
    return torch.where((temperature > 0)[:, None], torch.where(is_filtered, filtered, plain), greedy)


def _inverse_cdf(mass: Tensor, uniform: Tensor) -> Tensor:
    """Index of the first entry whose cumulative mass exceeds uniform · total. mass [..., V] ≥ 0, uniform [...]."""
    cumulative = mass.cumsum(-1)
    return (cumulative <= uniform[..., None] * cumulative[..., -1:]).sum(-1)


@torch.library.custom_op("edgebuild::linear", mutates_args=())
def _linear_op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


@_linear_op.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("edgebuild::cache_update", mutates_args=())
def _cache_update_op(cache: Tensor, update: Tensor, start: Tensor) -> Tensor:
    updated = cache.clone()
    for row, position in enumerate(start.tolist()):
        updated[row, :, position : position + update.shape[2]] = update[row]
    return updated


@_cache_update_op.register_fake
def _(cache: Tensor, update: Tensor, start: Tensor) -> Tensor:
    return torch.empty_like(cache)


@torch.library.custom_op("edgebuild::attention", mutates_args=())
def _attention_op(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    kv_positions: Tensor,
    scale: float,
    chosen: Tensor | None,
) -> Tensor:
    return _attention(query, key_cache, value_cache, positions, kv_positions, scale, chosen)


@_attention_op.register_fake
def _(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    kv_positions: Tensor,
    scale: float,
    chosen: Tensor | None,
) -> Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("edgebuild::block_means", mutates_args=())
def _block_means_op(cache: Tensor, kv_positions: Tensor, ratio: int) -> Tensor:
    return _block_means(cache, kv_positions, ratio)


@_block_means_op.register_fake
def _(cache: Tensor, kv_positions: Tensor, ratio: int) -> Tensor:
    blocks = (kv_positions.shape[0] + ratio - 1) // ratio
    return cache.new_empty((*cache.shape[:2], blocks, cache.shape[3]))


@torch.library.custom_op("edgebuild::choose_tokens", mutates_args=())
def _choose_tokens_op(scores: Tensor, positions: Tensor, kv_positions: Tensor, count: int, ratio: int) -> Tensor:
    return _choose_tokens(scores, positions, kv_positions, count, ratio)


@_choose_tokens_op.register_fake
def _(scores: Tensor, positions: Tensor, kv_positions: Tensor, count: int, ratio: int) -> Tensor:
    return scores.new_empty((*positions.shape, kv_positions.shape[0]), dtype=torch.bool)


@torch.library.custom_op("edgebuild::gated_delta", mutates_args=())
def _gated_delta_op(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    return _gated_delta(query, key, value, decay, beta, state)


@_gated_delta_op.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    return value.new_empty(value.shape), value.new_empty(value.shape)


@torch.library.custom_op("edgebuild::experts", mutates_args=())
def _experts_op(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return _experts(x, chosen, weights, gate_up, down)


@_experts_op.register_fake
def _(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("edgebuild::sample", mutates_args=())
def _sample_op(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    return _sample(logits, temperature, top_k, top_p, uniform)


@_sample_op.register_fake
def _(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[:2], dtype=torch.int64)
