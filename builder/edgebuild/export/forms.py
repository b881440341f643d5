"""ONNX formulations of the custom operators in `edgebuild.models.ops`, in standard operators of opset 24 only.

Where one thing can be said in several ways, the way is chosen per backend by measurement and the golden vectors have
the last word:

- attention "native": one `Attention` operator with a boolean mask. "written_out": the softmax spelled in its parts with
  the query heads of a KV group folded into query rows.
- sampling "conditional": the branches for temperature and for filters run only when a row asks for them (`If`).
  "branchless": everything is computed, top-k and top-p over the best `BEST` tokens; for backends that capture graphs.
- experts "looped" over those that a row chose, or "gathered" for each row, or "split" (expert_forms.py).
- the gated delta rule "looped" over blocks (delta_form.py), or "split" into blocks and a tail (delta_split.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import onnx_ir
import torch
from onnxscript import FLOAT, INT64, script
from onnxscript.onnx_opset import opset18 as op18  # scripts enter a graph that is raised to 24 afterwards
from onnxscript.onnx_opset import opset24 as op

from edgebuild.export.delta_form import gated_delta
from edgebuild.export.delta_split import gated_delta_split
from edgebuild.export.expert_forms import experts_gathered, experts_looped, experts_split
from edgebuild.export.sparse_form import block_means, choose_tokens

BEST = 64  # candidates that the branchless form filters over
_GROUP = 128  # vocabulary entries per group in the two-stage draw and in the first stage of the top-k
_STAGES = (_GROUP, 16)  # group sizes of the top-k: 151,936 → 64 × 128 → 64 × 16 entries are sorted


@dataclass(frozen=True)
class Forms:
    """The formulation of each operator whose ONNX form is a choice.

    processors: multiprocessors of the device, for which narrow matrix products are split (narrow.py); 0 = left whole.
    """

    attention: Literal["native", "written_out"] = "native"
    sampling: Literal["conditional", "branchless"] = "conditional"
    experts: Literal["looped", "gathered", "split"] = "looped"
    delta: Literal["looped", "split"] = "looped"
    processors: int = 0


FORMS: Mapping[str, Forms] = {
    "onnxruntime": Forms(attention="native", sampling="conditional", experts="looped"),
    "tensorrt": Forms(attention="written_out", sampling="branchless", experts="split", delta="split"),
    "tensorrt-rtx": Forms(attention="written_out", sampling="branchless", experts="split", delta="split"),
}

_DELTA: Mapping[str, Callable[..., Any]] = {"looped": gated_delta, "split": gated_delta_split}
_EXPERTS = {"looped": experts_looped, "gathered": experts_gathered, "split": experts_split}


def translation_table(forms: Forms) -> dict[Callable[..., Any], Callable[..., Any]]:
    """torch operator → function that emits its ONNX form."""
    operators = torch.ops.edgebuild
    attention = {"native": _attention_native, "written_out": _attention_written_out}[forms.attention]
    sample = {"conditional": _sample_conditional, "branchless": _sample_branchless}[forms.sampling]
    return {
        operators.linear.default: _linear,
        operators.cache_update.default: _cache_update,
        operators.attention.default: attention,
        operators.block_means.default: block_means,
        operators.choose_tokens.default: choose_tokens,
        operators.gated_delta.default: _DELTA[forms.delta],
        operators.experts.default: _EXPERTS[forms.experts],
        operators.sample.default: sample,
    }


def functions(opset: int) -> list[onnx_ir.Function]:
    """Scripted functions that are called inside a branch, where the exporter does not look; to be inlined."""
    scripted = [onnx_ir.serde.deserialize_function(f.to_function_proto()) for f in (_inverse_cdf, _mass, _filtered)]
    for function in scripted:
        function.opset_imports[""] = opset
    return scripted


def _ints(*values: int) -> Any:
    return op.Constant(value_ints=list(values))


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    return op.Gemm(x, weight, bias, transB=1) if bias is not None else op.Gemm(x, weight, transB=1)


def _cache_update(cache: Any, update: Any, start: Any) -> Any:
    return op.TensorScatter(cache, update, start, axis=-2, mode="linear")


def _tier(cache: Any, kv_positions: Any) -> Any:
    """The first T positions of a cache [B, kv_heads, C, D]."""
    return op.Slice(cache, _ints(0), op.Shape(kv_positions), _ints(2))


def _visible(positions: Any, kv_positions: Any, chosen: Any) -> Any:
    """bool [B, 1, q, T]: row q sees cache position t."""
    past = op.LessOrEqual(op.Unsqueeze(kv_positions, _ints(0, 1, 2)), op.Unsqueeze(positions, _ints(1, 3)))
    return past if chosen is None else op.And(past, op.Unsqueeze(chosen, _ints(1)))


def _attention_native(
    query: Any, key_cache: Any, value_cache: Any, positions: Any, kv_positions: Any, scale: float, chosen: Any = None
) -> Any:
    keys, values = _tier(key_cache, kv_positions), _tier(value_cache, kv_positions)
    return op.Attention(query, keys, values, _visible(positions, kv_positions, chosen), scale=scale)[0]


def _attention_written_out(
    query: Any, key_cache: Any, value_cache: Any, positions: Any, kv_positions: Any, scale: float, chosen: Any = None
) -> Any:
    keys, values = _tier(key_cache, kv_positions), _tier(value_cache, kv_positions)
    heads, head_dim = query.shape[1], query.shape[3]
    kv_heads = key_cache.shape[1]
    group = heads // kv_heads
    shape = op.Shape(query)
    # [B, heads, q, D] → [B, kv_heads, group·q, D]: the heads that share a KV head are rows of one product
    folded = op.Reshape(query, _ints(0, kv_heads, -1, head_dim))
    scores = op.Cast(_scores(folded, keys, head_dim), to=FLOAT.dtype)
    scores = op.Mul(scores, op.Constant(value_float=scale))
    mask = _visible(positions, kv_positions, chosen)
    mask = op.Concat(*[mask] * group, axis=2) if group > 1 else mask
    scores = op.Where(mask, scores, op.Constant(value_float=-1e30))
    weights = op.Exp(op.Sub(scores, op.ReduceMax(scores, _ints(-1), keepdims=1)))
    total = op.ReduceSum(weights, _ints(-1), keepdims=1)
    mixed = op.MatMul(op.CastLike(weights, values), values)
    return op.Reshape(op.Div(mixed, op.CastLike(total, mixed)), shape)


def _scores(query: Any, keys: Any, head_dim: int) -> Any:
    """query [B, kv_heads, r, D] · keysᵀ [B, kv_heads, T, D] → [B, kv_heads, r, T].

    For query · keysᵀ TensorRT copies the keys transposed: 8.0 µs a layer at 128-wide heads and a tier of 768 (H200),
    where the plain copy for keys · queryᵀ costs 3.3 µs. At 64-wide heads the first form is 2 % faster a step.
    """
    if head_dim < 128:
        return op.MatMul(query, op.Transpose(keys, perm=[0, 1, 3, 2]))
    return op.Transpose(op.MatMul(keys, op.Transpose(query, perm=[0, 1, 3, 2])), perm=[0, 1, 3, 2])


@script()  # type: ignore[untyped-decorator]
def _inverse_cdf(mass: FLOAT[...], uniform: FLOAT[...]) -> INT64[...]:
    """First index whose cumulative mass exceeds uniform · total, over the last axis."""
    cumulative = op18.CumSum(mass, op18.Constant(value_int=-1))
    total = op18.Slice(
        cumulative,
        op18.Constant(value_ints=[-1]),
        op18.Constant(value_ints=[9223372036854775807]),
        op18.Constant(value_ints=[-1]),
    )
    threshold = op18.Unsqueeze(uniform, op18.Constant(value_ints=[-1])) * total
    passed = op18.Cast(cumulative <= threshold, to=7)
    return op18.ReduceSum(passed, op18.Constant(value_ints=[-1]), keepdims=0)


@script()  # type: ignore[untyped-decorator]
def _mass(logits: FLOAT[...], temperature: FLOAT[...]) -> FLOAT[...]:
    """exp((logits − max) / temperature), temperature 0 read as 1."""
    one = op18.Constant(value_float=1.0)
    divisor = op18.Where(temperature > op18.Constant(value_float=0.0), temperature, one)
    divisor = op18.Unsqueeze(divisor, op18.Constant(value_ints=[1, 2]))
    return op18.Exp((logits - op18.ReduceMax(logits, op18.Constant(value_ints=[-1]), keepdims=1)) / divisor)


@script()  # type: ignore[untyped-decorator]
def _filtered(
    mass: FLOAT[...], order: INT64[...], top_k: INT64[...], top_p: FLOAT[...], uniform: FLOAT[...]
) -> INT64[...]:
    """Top-k, then top-p, then inverse CDF over mass in descending order; `order` maps ranks to token ids."""
    zero = op18.Constant(value_float=0.0)
    size = op18.Gather(op18.Shape(mass), op18.Constant(value_int=-1))
    ranks = op18.Range(op18.Constant(value_int=0), size, op18.Constant(value_int=1))
    limit = op18.Where(top_k > op18.Constant(value_int=0), top_k, size)
    kept = op18.Where(ranks < op18.Unsqueeze(limit, op18.Constant(value_ints=[1, 2])), mass, zero)
    cumulative = op18.CumSum(kept, op18.Constant(value_int=-1))
    total = op18.Slice(
        cumulative,
        op18.Constant(value_ints=[-1]),
        op18.Constant(value_ints=[9223372036854775807]),
        op18.Constant(value_ints=[-1]),
    )
    nucleus = (cumulative - kept) < op18.Unsqueeze(top_p, op18.Constant(value_ints=[1, 2])) * total
    choice = _inverse_cdf(op18.Where(nucleus, kept, zero), uniform)
    picked = op18.GatherElements(order, op18.Unsqueeze(choice, op18.Constant(value_ints=[-1])), axis=-1)
    return op18.Squeeze(picked, op18.Constant(value_ints=[-1]))


@script()  # type: ignore[untyped-decorator]
def _sample_conditional(
    logits: FLOAT[...], temperature: FLOAT[...], top_k: INT64[...], top_p: FLOAT[...], uniform: FLOAT[...]
) -> INT64[...]:
    greedy = op18.ArgMax(logits, axis=-1, keepdims=0)
    hot = temperature > op18.Constant(value_float=0.0)
    filters = op18.And(op18.Or(top_k > op18.Constant(value_int=0), top_p < op18.Constant(value_float=1.0)), hot)
    if op18.ReduceMax(op18.Cast(hot, to=7), keepdims=0) > op18.Constant(value_int=0):
        mass = _mass(logits, temperature)
        plain = _inverse_cdf(mass, uniform)
        if op18.ReduceMax(op18.Cast(filters, to=7), keepdims=0) > op18.Constant(value_int=0):
            ranked, order = op18.TopK(
                mass,
                op18.Slice(
                    op18.Shape(mass), op18.Constant(value_ints=[-1]), op18.Constant(value_ints=[9223372036854775807])
                ),
                axis=-1,
                largest=1,
                sorted=1,
            )
            through_filters = _filtered(ranked, order, top_k, top_p, uniform)
            drawn = op18.Where(op18.Unsqueeze(filters, op18.Constant(value_ints=[1])), through_filters, plain)
        else:
            drawn = op18.Identity(plain)
        token = op18.Where(op18.Unsqueeze(hot, op18.Constant(value_ints=[1])), drawn, greedy)
    else:
        token = op18.Identity(greedy)
    return token


def _sample_branchless(logits: Any, temperature: Any, top_k: Any, top_p: Any, uniform: Any) -> Any:
    greedy = op.ArgMax(logits, axis=-1, keepdims=0)
    hot = op.Greater(temperature, op.Constant(value_float=0.0))
    mass = _mass(logits, temperature)
    plain = _draw(mass, uniform, logits.shape[-1])
    ranked, order = _best(mass, logits.shape[-1])
    filtered = _filtered(ranked, order, top_k, top_p, uniform)
    filters = op.Or(op.Greater(top_k, op.Constant(value_int=0)), op.Less(top_p, op.Constant(value_float=1.0)))
    drawn = op.Where(op.Unsqueeze(filters, _ints(1)), filtered, plain)
    return op.Where(op.Unsqueeze(hot, _ints(1)), drawn, greedy)


def _groups(mass: Any, vocabulary: int, *, padding: float, group: int = _GROUP) -> Any:
    """mass [B, R, V] → [B, R, groups, group], filled up with `padding`."""
    short = -vocabulary % group
    if short:
        mass = op.Pad(mass, _ints(0, 0, 0, 0, 0, short), op.Constant(value_float=padding))
    return op.Reshape(mass, _ints(0, 0, -1, group))


def _draw(mass: Any, uniform: Any, vocabulary: int) -> Any:
    """`_inverse_cdf` over a large vocabulary in two stages, the group and then the token in it.

    One CumSum over 151,936 entries takes 168 µs on an H200; a group's sum is exact enough to choose the group, and the
    rest is clamped into the group's own mass, so that an entry without mass is never drawn.
    """
    if vocabulary <= BEST * _GROUP:
        return _inverse_cdf(mass, uniform)
    last, axis = _ints(-1), op.Constant(value_int=-1)
    groups = _groups(mass, vocabulary, padding=0.0)
    sums = op.ReduceSum(groups, last, keepdims=0)  # [B, R, groups]
    cumulative = op.CumSum(sums, axis)
    threshold = op.Mul(op.Unsqueeze(uniform, last), op.Gather(cumulative, last, axis=2))  # [B, R, 1]
    count = -(-vocabulary // _GROUP)
    group = op.ReduceSum(op.Cast(op.LessOrEqual(cumulative, threshold), to=INT64.dtype), last, keepdims=1)
    group = op.Min(group, op.Constant(value_int=count - 1))
    rest = op.Sub(threshold, op.GatherElements(op.Sub(cumulative, sums), group, axis=2))
    index = op.Expand(op.Unsqueeze(group, last), _ints(1, 1, 1, _GROUP))
    row = op.CumSum(op.Squeeze(op.GatherElements(groups, index, axis=2), _ints(2)), axis)  # [B, R, _GROUP]
    whole = op.Gather(row, last, axis=2)
    rest = op.Max(op.Min(rest, op.Mul(whole, op.Constant(value_float=1 - 2.0**-20))), op.Constant(value_float=0.0))
    within = op.ReduceSum(op.Cast(op.LessOrEqual(row, rest), to=INT64.dtype), last, keepdims=0)
    return op.Add(op.Mul(op.Squeeze(group, last), op.Constant(value_int=_GROUP)), within)


def _best(mass: Any, vocabulary: int) -> tuple[Any, Any]:
    """The `BEST` largest entries in order, exactly: the best groups by their maximum hold them all, and so again inside
    those. Sorting 8,192 entries takes 35 µs on an H200, 1,024 take a fifth of that."""
    best, size = min(BEST, vocabulary), vocabulary
    chosen: list[tuple[Any, int]] = []  # of each stage: the groups that were taken, and a group's size
    for group in _STAGES:
        if size <= BEST * group:
            continue
        groups = _groups(mass, size, padding=-1.0, group=group)
        leaders = op.TopK(op.ReduceMax(groups, _ints(-1), keepdims=0), _ints(best), axis=-1, largest=1, sorted=0)[1]
        index = op.Expand(op.Unsqueeze(leaders, _ints(-1)), _ints(1, 1, 1, group))
        mass = op.Reshape(op.GatherElements(groups, index, axis=2), _ints(0, 0, BEST * group))
        size = BEST * group
        chosen.append((leaders, group))
    ranked = op.TopK(mass, _ints(best), axis=-1, largest=1, sorted=1)
    order = ranked[1]
    for leaders, group in reversed(chosen):
        count = op.Constant(value_int=group)
        taken = op.GatherElements(leaders, op.Div(order, count), axis=-1)
        order = op.Add(op.Mul(taken, count), op.Mod(order, count))
    return ranked[0], order
