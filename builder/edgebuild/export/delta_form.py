"""ONNX formulation of the gated delta rule (`edgebuild.models.ops.gated_delta`) for any number of rows.

q rows are n = ⌈q / 64⌉ blocks of C = ⌈q / n⌉ rows, the last one padded with rows that write nothing (β = 0, decay 0).
Within a block all rows are solved at once: with A the block's unit lower triangular system (arXiv 2412.06464), the
corrections are A⁻¹ β (V − e^G K S). A⁻¹ is built by doubling: where X inverts the diagonal blocks of s rows, L is the
part of A below them in each pair, X − X L X inverts the blocks of 2s rows; six doublings reach 64. The other product
form, (I + N)(I + N²)(I + N⁴)…, is not used: its powers reach 1e17 where a token repeats, and cancel in float32.

From block to block the state passes through a `Loop` of n − 1 trips: none for a decode step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir
from onnxscript.onnx_opset import opset24 as op

from edgebuild.export.loop_body import LoopBody, loop
from edgebuild.models.hybrid_config import DELTA_BLOCK

_MASKED = -1e30


def delta_levels() -> np.ndarray[Any, Any]:
    """float32 [64, 64]: for i > j the doubling that joins rows i and j (0 = pairs), −1 on the diagonal, −2 above."""
    index = np.arange(DELTA_BLOCK)
    differ = index[:, None] ^ index[None, :]
    level = np.floor(np.log2(np.maximum(differ, 1)))
    return np.where(index[:, None] > index[None, :], level, np.where(differ == 0, -1, -2)).astype(np.float32)


def gated_delta(
    query: Any, key: Any, value: Any, decay: Any, beta: Any, state: Any, _positions: Any = None
) -> tuple[Any, Any]:
    """See ops.gated_delta. Inside, tensors are [n, B, Hk, r, C, D]: blocks first, value heads below their key head."""
    key_heads, key_dim = key.shape[1], key.shape[3]
    value_heads, value_dim = value.shape[1], value.shape[3]
    repeat = value_heads // key_heads
    blocks, block, padding = _partition(value)
    heads = _ints(0, key_heads)

    def by_key_head(x: Any) -> Any:
        padded = op.Pad(x, op.Concat(_ints(0, 0, 0, 0, 0, 0), padding, _ints(0), axis=0))
        split = op.Reshape(padded, op.Concat(heads, _ints(1), blocks, block, _ints(key_dim), axis=0))
        return op.Transpose(split, perm=[3, 0, 1, 2, 4, 5])

    def by_value_head(x: Any, *trailing: int) -> Any:
        zeros = _ints(0, 0, 0, 0, 0) if not trailing else _ints(0, 0, 0, 0, 0, 0)
        ends = (padding,) if not trailing else (padding, _ints(0))
        padded = op.Pad(x, op.Concat(zeros, *ends, axis=0))
        split = op.Reshape(padded, op.Concat(heads, _ints(repeat), blocks, block, _ints(*(trailing or (1,))), axis=0))
        return op.Transpose(split, perm=[3, 0, 1, 2, 4, 5])

    query, key = by_key_head(query), by_key_head(key)
    value, decay, beta = by_value_head(value, value_dim), by_value_head(decay), by_value_head(beta)
    total = op.CumSum(decay, op.Constant(value_int=-2))  # [n, B, Hk, r, C, 1]
    grown = op.Exp(total)
    levels = op.Slice(op.Constant(value=onnx_ir.tensor(delta_levels())), _ints(0, 0), op.Concat(block, block, axis=0))
    masked = op.Constant(value_float=_MASKED)
    lower = op.GreaterOrEqual(levels, op.Constant(value_float=-1.0))
    apart = op.Sub(total, _flip(total))
    between = op.Exp(op.Where(lower, apart, masked))  # e^(G_i − G_j) for j <= i, else 0
    system = op.Mul(op.Mul(beta, op.MatMul(key, _flip(key))), between)
    inverse = block_inverse(system, levels)
    last = op.Slice(total, _ints(-1), _ints(np.iinfo(np.int64).max), _ints(-2))
    weighted_keys = op.Mul(op.Mul(beta, grown), key)
    parts = {
        "fresh": op.MatMul(inverse, op.Mul(beta, value)),  # corrections from an empty state
        "read": op.MatMul(inverse, weighted_keys),  # what of them the state takes back
        "grown_query": op.Mul(grown, query),
        "scores": op.Mul(op.MatMul(query, _flip(key)), between),
        "write": _flip(op.Mul(op.Exp(op.Sub(last, total)), key)),
        "kept": op.Exp(last),
    }
    state = op.Reshape(state, _ints(0, key_heads, repeat, key_dim, value_dim))
    trips = op.Sub(op.Squeeze(blocks, _ints(0)), op.Constant(value_int=1))
    state, early_out, early_written = loop(trips, _body(parts, (key_heads, repeat, value_dim)), state)
    final = {name: op.Gather(part, op.Constant(value_int=-1), axis=0) for name, part in parts.items()}
    written = op.Sub(final["fresh"], op.MatMul(final["read"], state))
    out = op.Add(op.MatMul(final["grown_query"], state), op.MatMul(final["scores"], written))

    def joined(early: Any, latest: Any) -> Any:
        whole = op.Concat(early, op.Unsqueeze(latest, _ints(0)), axis=0)
        rows = op.Reshape(op.Transpose(whole, perm=[1, 2, 3, 0, 4, 5]), _ints(0, value_heads, -1, value_dim))
        return op.Slice(rows, _ints(0), _rows(value_rows), _ints(2))

    value_rows = (blocks, block, padding)
    return joined(early_out, out), joined(early_written, written)


def _rows(partition: tuple[Any, Any, Any]) -> Any:
    blocks, block, padding = partition
    return op.Sub(op.Mul(blocks, block), padding)


def _partition(value: Any) -> tuple[Any, Any, Any]:
    """int64 [1] each: number of blocks, rows of a block, rows of padding."""
    rows = op.Shape(value, start=2, end=3)
    blocks = op.Div(op.Add(rows, _ints(DELTA_BLOCK - 1)), _ints(DELTA_BLOCK))
    block = op.Div(op.Sub(op.Add(rows, blocks), _ints(1)), blocks)
    return blocks, block, op.Sub(op.Mul(blocks, block), rows)


def block_inverse(system: Any, levels: Any) -> Any:
    """(I + strictly lower part of `system`)⁻¹, by doubling."""
    zero = op.Constant(value_float=0.0)

    def part(level: int) -> Any:
        return op.Where(op.Equal(levels, op.Constant(value_float=float(level))), system, zero)

    identity = op.Cast(op.Equal(levels, op.Constant(value_float=-1.0)), to=onnx_ir.DataType.FLOAT)
    inverse = op.Sub(identity, part(0))
    for level in range(1, DELTA_BLOCK.bit_length() - 1):
        inverse = op.Sub(inverse, op.MatMul(op.MatMul(inverse, part(level)), inverse))
    return inverse


def _body(parts: dict[str, Any], sizes: tuple[int, int, int]) -> onnx_ir.Graph:
    """One block of the loop: (i, go on, state) → (go on, state after it, its outputs, its corrections)."""
    body = LoopBody("delta")
    state = body.carried("state", onnx_ir.DataType.FLOAT)
    here = {name: body.node("Gather", part, body.index, axis=0) for name, part in parts.items()}
    written = body.node("Sub", here["fresh"], body.node("MatMul", here["read"], state))
    seen = body.node("MatMul", here["grown_query"], state)
    out = body.node("Add", seen, body.node("MatMul", here["scores"], written))
    added = body.node("MatMul", here["write"], written)
    following = body.node("Add", body.node("Mul", here["kept"], state), added)
    key_heads, repeat, value_dim = sizes
    entry = ("batch", key_heads, repeat, "block", value_dim)
    return body.graph(following, collected={out: entry, written: entry})


def _flip(x: Any) -> Any:
    """Last two of six dimensions exchanged."""
    return op.Transpose(x, perm=[0, 1, 2, 3, 5, 4])


def _ints(*values: int) -> Any:
    return op.Constant(value_ints=list(values))
