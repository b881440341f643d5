"""ONNX formulation of the gated delta rule (`edgebuild.models.ops.gated_delta`) without a loop, for captured graphs.

TensorRT does not capture a network with a `Loop`. Here the rows are cut in two, front and tail:

tail   the last `TAIL` rows, always there (rows before the first are added, which write nothing: β = 0, decay 0). The
       triangular system of so few rows is solved by substitution, row after row, in elementwise operations.
front  the rows before, in n blocks of 64: n = 0 in a decode cell, whose operations then work on tensors without
       elements. A block is solved as in delta_form.py; from block to block the state goes S' = M S + N with
       M = kept·I − write·read and N = write·fresh, and all prefixes of that recurrence are formed by doubling
       (Hillis and Steele 1986): `LEVELS` products, for at most 2^LEVELS blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir
from onnxscript.onnx_opset import opset24 as op

from edgebuild.export.delta_form import block_inverse, delta_levels
from edgebuild.models.ops import DELTA_BLOCK

TAIL = 8  # rows: more than any decode cell has
LEVELS = 5
MAX_ROWS = TAIL + DELTA_BLOCK * 2**LEVELS
_MASKED = -1e30
_END = int(np.iinfo(np.int64).max)


def gated_delta_split(query: Any, key: Any, value: Any, decay: Any, beta: Any, state: Any) -> tuple[Any, Any]:
    """See ops.gated_delta; at most `MAX_ROWS` rows. Inside: [.., Hk, r, rows, D], value heads below their key head."""
    key_heads, key_dim = key.shape[1], key.shape[3]
    value_heads, value_dim = value.shape[1], value.shape[3]
    repeat = value_heads // key_heads
    batch, rows = op.Shape(value, start=0, end=1), op.Shape(value, start=2, end=3)
    excess = op.Max(op.Sub(rows, _ints(TAIL)), _ints(0))
    blocks = op.Div(op.Add(excess, _ints(DELTA_BLOCK - 1)), _ints(DELTA_BLOCK))
    front = op.Mul(blocks, _ints(DELTA_BLOCK))
    added = op.Sub(op.Add(front, _ints(TAIL)), rows)

    def cut(x: Any, heads: tuple[int, ...], width: int) -> tuple[Any, Any]:
        """[B, heads, q(, width)] → front [n, B, *heads, 64, width], tail [B, *heads, TAIL, width]."""
        pads = (_ints(0, 0), added, _ints(*[0] * (len(x.shape) - 3), *[0] * len(x.shape)))
        padded = op.Pad(x, op.Concat(*pads, axis=0))
        first = op.Slice(padded, _ints(0), front, _ints(2))
        shape = op.Concat(batch, _ints(*heads), blocks, _ints(DELTA_BLOCK, width), axis=0)
        first = op.Reshape(first, shape, allowzero=1)
        last = op.Reshape(op.Slice(padded, front, _ints(_END), _ints(2)), _ints(0, *heads, TAIL, width))
        return op.Transpose(first, perm=[3, 0, 1, 2, 4, 5]), last

    parts = [cut(x, (key_heads, 1), key_dim) for x in (query, key)]
    parts += [cut(x, (key_heads, repeat), width) for x, width in ((value, value_dim), (decay, 1), (beta, 1))]
    state = op.Reshape(state, _ints(0, key_heads, repeat, key_dim, value_dim))
    early_out, early_written, state = _front([part[0] for part in parts], state, (key_dim, value_dim))
    out, written = _tail([part[1] for part in parts], state)

    def joined(early: Any, late: Any) -> Any:
        early = op.Transpose(early, perm=[1, 2, 3, 0, 4, 5])
        shape = op.Concat(batch, _ints(value_heads), front, _ints(value_dim), axis=0)
        early = op.Reshape(early, shape, allowzero=1)
        whole = op.Concat(early, op.Reshape(late, _ints(0, value_heads, TAIL, value_dim)), axis=2)
        return op.Slice(whole, added, _ints(_END), _ints(2))

    return joined(early_out, out), joined(early_written, written)


def _front(parts: list[Any], state: Any, sizes: tuple[int, int]) -> tuple[Any, Any, Any]:
    """Outputs and corrections of n blocks [n, B, Hk, r, 64, Dv], and the state behind them."""
    query, key, value, decay, beta = parts
    key_dim, value_dim = sizes
    total = op.CumSum(decay, op.Constant(value_int=-2))
    grown = op.Exp(total)
    levels = op.Constant(value=onnx_ir.tensor(delta_levels()))
    lower = op.GreaterOrEqual(levels, op.Constant(value_float=-1.0))
    between = op.Exp(op.Where(lower, op.Sub(total, _flip(total)), op.Constant(value_float=_MASKED)))
    inverse = block_inverse(op.Mul(op.Mul(beta, op.MatMul(key, _flip(key))), between), levels)
    last = op.Slice(total, _ints(-1), _ints(_END), _ints(-2))
    fresh = op.MatMul(inverse, op.Mul(beta, value))
    read = op.MatMul(inverse, op.Mul(op.Mul(beta, grown), key))
    write = _flip(op.Mul(op.Exp(op.Sub(last, total)), key))  # [n, B, Hk, r, Dk, 64]
    identity = op.Constant(value=onnx_ir.tensor(np.eye(key_dim, key_dim + value_dim, dtype=np.float32)))
    steps = op.MatMul(write, op.Concat(op.Neg(read), fresh, axis=-1))
    steps = op.Add(steps, op.Mul(op.Exp(last), identity))  # [M | N]: [n, B, Hk, r, Dk, Dk + Dv]
    count = op.Shape(steps, start=0, end=1)
    start = op.Unsqueeze(state, _ints(0))

    def matrices(x: Any) -> Any:
        return op.Slice(x, _ints(0), _ints(key_dim), _ints(-1))

    def behind(x: Any, length: Any) -> Any:
        """Rows of zeros before x, cut to n: what reaches past the first block adds nothing."""
        padded = op.Pad(x, op.Concat(length, _ints(*[0] * 11), axis=0))
        return op.Slice(padded, _ints(0), count, _ints(0))

    first = op.Slice(steps, _ints(0), _ints(1), _ints(0))  # no block, no first one
    first = op.MatMul(matrices(first), start)
    first = op.Pad(first, op.Concat(_ints(0, 0, 0, 0, 0, key_dim), op.Sub(count, op.Shape(first, start=0, end=1)),
                                    _ints(0, 0, 0, 0, 0), axis=0))  # fmt: skip
    steps = op.Add(steps, first)
    keep = op.Constant(value=onnx_ir.tensor(np.concatenate((np.zeros(key_dim), np.ones(value_dim))).astype(np.float32)))
    for level in range(LEVELS):
        before = behind(steps, _ints(2**level))
        product = op.MatMul(matrices(steps), before)
        steps = op.Add(product, op.Mul(steps, keep))
    after = op.Slice(steps, _ints(key_dim), _ints(_END), _ints(-1))
    states = op.Concat(start, after, axis=0)  # [n + 1, B, Hk, r, Dk, Dv]
    before = op.Slice(states, _ints(0), count, _ints(0))
    written = op.Sub(fresh, op.MatMul(read, before))
    seen = op.MatMul(op.Mul(grown, query), before)
    out = op.Add(seen, op.MatMul(op.Mul(op.MatMul(query, _flip(key)), between), written))
    return out, written, op.Gather(states, op.Constant(value_int=-1), axis=0)


def _tail(parts: list[Any], state: Any) -> tuple[Any, Any]:
    """Outputs and corrections of the last rows [B, Hk, r, TAIL, Dv]."""
    query, key, value, decay, beta = parts
    index = np.arange(TAIL)
    lower = op.Constant(value=onnx_ir.tensor(index[:, None] >= index[None, :]))
    transposed = _flip(decay, 5)  # [B, Hk, r, 1, TAIL]
    total = op.ReduceSum(op.Where(lower, transposed, op.Constant(value_float=0.0)), _ints(-1), keepdims=1)
    between = op.Exp(op.Where(lower, op.Sub(total, _flip(total, 5)), op.Constant(value_float=_MASKED)))
    both = op.Concat(key, query, axis=3)  # [B, Hk, 1, 2·TAIL, Dk]
    products = op.MatMul(both, _flip(key, 5))
    seen = op.MatMul(both, state)  # [B, Hk, r, 2·TAIL, Dv]
    halves = (_ints(0), _ints(TAIL)), (_ints(TAIL), _ints(2 * TAIL))
    system = op.Mul(op.Mul(beta, op.Slice(products, *halves[0], _ints(3))), between)
    grown = op.Exp(total)
    known = op.Mul(beta, op.Sub(value, op.Mul(grown, op.Slice(seen, *halves[0], _ints(3)))))

    def row(x: Any, place: int) -> Any:
        return op.Slice(x, _ints(place), _ints(place + 1), _ints(3))

    solved: list[Any] = []
    for place in range(TAIL):
        correction, factors = row(known, place), row(system, place)
        for earlier, other in enumerate(solved):
            factor = op.Slice(factors, _ints(earlier), _ints(earlier + 1), _ints(4))
            correction = op.Sub(correction, op.Mul(factor, other))
        solved.append(correction)
    written = op.Concat(*solved, axis=3)
    scores = op.Mul(op.Slice(products, *halves[1], _ints(3)), between)
    out = op.Add(op.Mul(grown, op.Slice(seen, *halves[1], _ints(3))), op.MatMul(scores, written))
    return out, written


def _flip(x: Any, rank: int = 6) -> Any:
    """The last two dimensions exchanged."""
    return op.Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])


def _ints(*values: int) -> Any:
    return op.Constant(value_ints=list(values))
