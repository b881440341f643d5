"""ONNX formulation of the gated delta rule (`edgebuild.models.ops.gated_delta`) without a loop, for captured graphs.

TensorRT captures no network with a `Loop`. Here the rows are cut in two, front and tail:

tail   the last `TAIL` rows, always there (rows are added before the first; they write nothing: β = 0, decay 0). The
       triangular system of so few rows is solved by substitution, row after row, in elementwise operations.
front  the rows before, in n blocks of 64: n = 0 in a decode cell, whose operations then have nothing to do. A block is
       solved as in delta_form.py; from block to block the state goes S' = M S + N with M = kept·I − write·read and
       N = write·fresh, and all prefixes of that recurrence are formed by doubling (Hillis and Steele 1986): `LEVELS`
       rounds of products, for at most 2^LEVELS blocks.

Which row goes where follows from the row count alone. It is worked out from `positions`, which is the same tensor in
every layer, so that the graph holds it once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir
from onnxscript.onnx_opset import opset24 as op

from edgebuild.export.delta_form import block_inverse, delta_levels
from edgebuild.models.hybrid_config import DELTA_BLOCK
from edgebuild.models.hybrid_config import SPLIT_LEVELS as LEVELS

TAIL = 8  # rows; a decode cell of more takes a block
_MASKED = -1e30
_END = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class _Cut:
    """Where rows go; the same in every layer.

    front [n, 64]       int64: the row that stands there, 0 where none does
    front_real          float32: 1 where one does
    tail                int64 [1]: rows that the tail has more than there are, below 0 where it has fewer
    first               int64 [1]: place of row 0 when the tail stands behind the front
    blocks [n]          int64: 0 .. n − 1
    batch, front_rows   int64 [1]
    """

    front: Any
    front_real: Any
    tail: Any
    first: Any
    blocks: Any
    batch: Any
    front_rows: Any


def gated_delta_split(
    query: Any, key: Any, value: Any, decay: Any, beta: Any, state: Any, positions: Any
) -> tuple[Any, Any]:
    """See ops.gated_delta; at most `MAX_CAPTURED_ROWS` rows.

    Inside, tensors are [.., Hk, r, rows, D]: value heads below their key head.
    """
    key_heads, key_dim = key.shape[1], key.shape[3]
    value_heads, value_dim = value.shape[1], value.shape[3]
    repeat = value_heads // key_heads
    cut = _cut(positions)

    def parts(x: Any, heads: tuple[int, int], width: int, *, masked: bool = False) -> tuple[Any, Any]:
        """[B, heads, q(, width)] → front [n, B, *heads, 64, width], tail [B, *heads, TAIL, width]."""
        rank = len(x.shape)
        # zeros before the first row, or (below 0) rows cut off there: one operation, which writes nothing into a state
        pads = op.Concat(_ints(0, 0), cut.tail, _ints(*[0] * (2 * rank - 3)), axis=0)
        last = op.Reshape(op.Pad(x, pads), _ints(0, *heads, TAIL, width))
        first = op.Gather(x, cut.front, axis=2)
        if masked:
            first = op.Mul(first, cut.front_real)
        first = op.Transpose(first, perm=[2, 0, 1, 3, 4][: 1 + rank])
        return op.Reshape(first, _ints(0, 0, *heads, DELTA_BLOCK, width)), last

    keyed, valued = (key_heads, 1), (key_heads, repeat)
    pieces = [parts(x, keyed, key_dim) for x in (query, key)]
    pieces += [parts(value, valued, value_dim), *(parts(x, valued, 1, masked=True) for x in (decay, beta))]
    state = op.Reshape(state, _ints(0, key_heads, repeat, key_dim, value_dim))
    early_out, early_written, state = _front([piece[0] for piece in pieces], state, cut.blocks, key_dim)
    out, written = _tail([piece[1] for piece in pieces], state)

    def joined(early: Any, late: Any) -> Any:
        shape = op.Concat(cut.batch, _ints(value_heads), cut.front_rows, _ints(value_dim), axis=0)
        early = op.Reshape(op.Transpose(early, perm=[1, 2, 3, 0, 4, 5]), shape, allowzero=1)
        whole = op.Concat(early, op.Reshape(late, _ints(0, value_heads, TAIL, value_dim)), axis=2)
        return op.Slice(whole, cut.first, _ints(_END), _ints(2))

    return joined(early_out, out), joined(early_written, written)


def _cut(positions: Any) -> _Cut:
    """From positions [B, q] alone."""
    rows = op.Shape(positions, start=1, end=2)
    excess = op.Max(op.Sub(rows, _ints(TAIL)), _ints(0))
    blocks = op.Div(op.Add(excess, _ints(DELTA_BLOCK - 1)), _ints(DELTA_BLOCK))
    front_rows = op.Mul(blocks, _ints(DELTA_BLOCK))
    places = op.Add(front_rows, _ints(TAIL))
    added = op.Sub(places, rows)

    def counted(limit: Any) -> Any:
        return op.Range(op.Constant(value_int=0), op.Squeeze(limit, _ints(0)), op.Constant(value_int=1))

    row = op.Sub(counted(places), added)
    real = op.Cast(op.GreaterOrEqual(row, _ints(0)), to=onnx_ir.DataType.FLOAT)
    row = op.Max(row, _ints(0))
    shape = op.Concat(blocks, _ints(DELTA_BLOCK), axis=0)

    def front(x: Any) -> Any:
        return op.Reshape(op.Slice(x, _ints(0), front_rows, _ints(0)), shape, allowzero=1)

    return _Cut(
        front=front(row),
        front_real=front(real),
        tail=op.Sub(_ints(TAIL), rows),
        first=added,
        blocks=counted(blocks),
        batch=op.Shape(positions, start=0, end=1),
        front_rows=front_rows,
    )


def _front(parts: list[Any], state: Any, blocks: Any, key_dim: int) -> tuple[Any, Any, Any]:
    """Outputs and corrections of n blocks [n, B, Hk, r, 64, Dv], and the state behind them."""
    query, key, value, decay, beta = parts
    total = op.CumSum(decay, op.Constant(value_int=-2))
    grown = op.Exp(total)
    levels = op.Constant(value=onnx_ir.tensor(delta_levels()))
    lower = op.Constant(value=onnx_ir.tensor(delta_levels() >= -1))
    between = op.Exp(op.Where(lower, op.Sub(total, _flip(total)), op.Constant(value_float=_MASKED)))
    inverse = block_inverse(op.Mul(op.Mul(beta, op.MatMul(key, _flip(key))), between), levels)
    last = op.Gather(total, _ints(DELTA_BLOCK - 1), axis=4)
    fresh = op.MatMul(inverse, op.Mul(beta, value))
    read = op.MatMul(inverse, op.Mul(op.Mul(beta, grown), key))
    write = _flip(op.Mul(op.Exp(op.Sub(last, total)), key))  # [n, B, Hk, r, Dk, 64]
    identity = op.Constant(value=onnx_ir.tensor(np.eye(key_dim, dtype=np.float32)))
    step = op.Sub(op.Mul(op.Exp(last), identity), op.MatMul(write, read))  # M [n, B, Hk, r, Dk, Dk]
    after = op.MatMul(write, fresh)  # N [n, B, Hk, r, Dk, Dv]
    start = op.Unsqueeze(state, _ints(0))

    def since(first: int) -> Any:
        """float32 [n, 1, 1, 1, 1, 1]: 1 from block `first` on."""
        live = op.Cast(op.GreaterOrEqual(blocks, _ints(first)), to=onnx_ir.DataType.FLOAT)
        return op.Unsqueeze(live, _ints(1, 2, 3, 4, 5))

    # the state before the first block counts as what the first block adds: then no M of finished prefixes is needed
    is_first = op.Sub(op.Constant(value_float=1.0), since(1))
    after = op.Add(after, op.Mul(is_first, op.MatMul(step, start)))
    for level in range(LEVELS):
        live, before = since(2**level), op.Max(op.Sub(blocks, _ints(2**level)), _ints(0))
        after = op.Add(after, op.Mul(live, op.MatMul(step, op.Gather(after, before, axis=0))))
        if level + 1 < LEVELS:
            step = op.Mul(live, op.MatMul(step, op.Gather(step, before, axis=0)))
    states = op.Concat(start, after, axis=0)  # [n + 1, B, Hk, r, Dk, Dv]
    before = op.Gather(states, blocks, axis=0)
    written = op.Sub(fresh, op.MatMul(read, before))
    seen = op.MatMul(op.Mul(grown, query), before)
    out = op.Add(seen, op.MatMul(op.Mul(op.MatMul(query, _flip(key)), between), written))
    return out, written, op.Gather(states, op.Constant(value_int=-1), axis=0)


def _tail(parts: list[Any], state: Any) -> tuple[Any, Any]:
    """Outputs and corrections of the last rows [B, Hk, r, TAIL, Dv]."""
    query, key, value, decay, beta = parts
    index = np.arange(TAIL)
    lower = op.Constant(value=onnx_ir.tensor(index[:, None] >= index[None, :]))
    zero = op.Constant(value_float=0.0)
    total = op.ReduceSum(op.Where(lower, _flip(decay, 5), zero), _ints(-1), keepdims=1)  # [B, Hk, r, TAIL, 1]
    between = op.Exp(op.Where(lower, op.Sub(total, _flip(total, 5)), op.Constant(value_float=_MASKED)))
    grown = op.Exp(total)
    transposed = _flip(key, 5)
    system = op.Mul(op.Mul(beta, op.MatMul(key, transposed)), between)
    known = op.Mul(beta, op.Sub(value, op.Mul(grown, op.MatMul(key, state))))
    known_rows, system_rows = (op.Split(x, axis=3, num_outputs=TAIL) for x in (known, system))
    solved: list[Any] = []
    for place in range(TAIL):
        correction = known_rows[place]
        factors = op.Split(system_rows[place], axis=4, num_outputs=TAIL) if solved else ()
        for earlier, other in enumerate(solved):
            correction = op.Sub(correction, op.Mul(factors[earlier], other))
        solved.append(correction)
    written = op.Concat(*solved, axis=3)
    scores = op.Mul(op.MatMul(query, transposed), between)
    return op.Add(op.Mul(grown, op.MatMul(query, state)), op.MatMul(scores, written)), written


def _flip(x: Any, rank: int = 6) -> Any:
    """The last two dimensions exchanged."""
    return op.Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])


def _ints(*values: int) -> Any:
    return op.Constant(value_ints=list(values))
