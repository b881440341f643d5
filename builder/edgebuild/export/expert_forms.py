"""ONNX formulations of `edgebuild.models.ops.experts`, for any number of rows.

"looped" goes over the experts that at least one row chose, and takes that expert's rows through it: each used expert's
weights are read once, others never. So a decode step reads top-k experts a row, and a prefill chunk is grouped. It
needs shapes that depend on data (Unique, NonZero).
"gathered" copies the weights of a row's experts side by side, for at most `ROWS_TOGETHER` rows at a time. All shapes
are fixed by the row count; every row reads its own k experts, so that long chunks read experts many times over.
Measured in docs/log.md: on the CPU the first is the faster one at every row count.
"split" is for captured graphs, which take no `Loop`: a cell of few rows gathers, one of many passes each row through
every expert, weighted by 0 where it was not chosen. Both are in the graph, one of them without rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir
from onnxscript.onnx_opset import opset24 as op

from edgebuild.export.loop_body import LoopBody, loop

ROWS_TOGETHER = 4
_AXIS_0, _AXIS_1 = np.array([0], np.int64), np.array([1], np.int64)


def experts_looped(x: Any, chosen: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    """See ops.experts."""
    used = op.Unique(op.Reshape(chosen, _ints(-1)), sorted=1)[0]
    trips = op.Squeeze(op.Shape(used), _ints(0))
    empty = op.CastLike(op.ConstantOfShape(op.Shape(x), value=onnx_ir.tensor(np.zeros(1, np.float32))), x)
    body = LoopBody("experts")
    mixed = body.carried("mixed", x.dtype)
    expert = body.node("Gather", used, body.index, axis=0)
    hits = body.node("Equal", chosen, expert)  # [N, k], at most one a row
    zero = body.node("CastLike", body.constant(np.float32(0)), weights)
    share = body.node("ReduceSum", body.node("Where", hits, weights, zero), body.constant(_AXIS_1), keepdims=1)
    any_hit = body.node(
        "ReduceMax", body.node("Cast", hits, to=onnx_ir.DataType.INT64), body.constant(_AXIS_1), keepdims=0
    )
    rows = body.node("Squeeze", body.node("NonZero", any_hit), body.constant(_AXIS_0))
    inner = body.node("Gemm", body.node("Gather", x, rows, axis=0), body.node("Gather", gate_up, expert), transB=1)
    gate, up = body.node("Split", inner, outputs=2, axis=-1, num_outputs=2)
    inner = body.node("Mul", body.node("Mul", gate, body.node("Sigmoid", gate)), up)
    out = body.node("Gemm", inner, body.node("Gather", down, expert), transB=1)
    out = body.node("Mul", out, body.node("Gather", share, rows, axis=0))
    places = body.node("Unsqueeze", rows, body.constant(_AXIS_1))
    mixed = body.node("ScatterND", mixed, places, out, reduction="add")
    return loop(trips, body.graph(mixed), empty)[0]


def experts_gathered(x: Any, chosen: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    """See ops.experts. N rows are n = ⌈N / ROWS_TOGETHER⌉ groups; the last one runs outside the loop, so that a decode
    step has none."""
    rows = op.Shape(x, start=0, end=1)
    groups = op.Div(op.Add(rows, _ints(ROWS_TOGETHER - 1)), _ints(ROWS_TOGETHER))
    together = op.Div(op.Sub(op.Add(rows, groups), _ints(1)), groups)
    padding = op.Concat(_ints(0, 0), op.Sub(op.Mul(groups, together), rows), _ints(0), axis=0)

    def grouped(values: Any) -> Any:
        shape = op.Concat(groups, together, _ints(values.shape[1]), axis=0)
        return op.Reshape(op.Pad(values, padding), shape)

    parts = [grouped(values) for values in (x, chosen, weights)]
    body = LoopBody("gathered")
    none = body.carried("none", onnx_ir.DataType.INT64)
    early = _gathered(body.node, [body.node("Gather", part, body.index) for part in parts], gate_up, down)
    graph = body.graph(body.node("Identity", none), collected={early: ("together", x.shape[1])}, kind=x.dtype)
    trips = op.Sub(op.Squeeze(groups, _ints(0)), op.Constant(value_int=1))
    collected = loop(trips, graph, op.Constant(value_int=0))[1]
    final = [op.Gather(part, op.Constant(value_int=-1), axis=0) for part in parts]
    whole = op.Concat(collected, op.Unsqueeze(_gathered(_node, final, gate_up, down), _ints(0)), axis=0)
    return op.Slice(op.Reshape(whole, _ints(-1, x.shape[1])), _ints(0), rows, _ints(0))


def _gathered(node: Any, group: Sequence[Any], gate_up: Any, down: Any) -> Any:
    """One group (x [n, hidden], chosen and weights [n, k]) → [n, hidden]; `node` adds an operator at its place."""
    x, chosen, weights = group

    def axes(*values: int) -> Any:
        return node("Constant", value_ints=list(values))

    column = node("Unsqueeze", x, axes(1, 3))  # [n, 1, hidden, 1]
    inner = node("MatMul", node("Gather", gate_up, chosen, axis=0), column)  # [n, k, 2·inner, 1]
    half = gate_up.shape[1] // 2
    gate, up = (node("Slice", inner, axes(start), axes(start + half), axes(2)) for start in (0, half))
    inner = node("Mul", node("Mul", gate, node("Sigmoid", gate)), up)
    out = node("Squeeze", node("MatMul", node("Gather", down, chosen, axis=0), inner), axes(3))  # [n, k, hidden]
    return node("ReduceSum", node("Mul", out, node("Unsqueeze", weights, axes(2))), axes(1), keepdims=0)


def experts_split(x: Any, chosen: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    """See ops.experts. The weights keep their layout in both parts: an engine holds them once, nothing folds them."""
    rows = op.Shape(x, start=0, end=1)
    few = op.LessOrEqual(rows, _ints(gathered_rows(gate_up.shape[0], chosen.shape[1])))
    late = op.Where(few, rows, _ints(0))
    early = op.Sub(rows, late)
    dense = _dense([op.Slice(values, _ints(0), early, _ints(0)) for values in (x, chosen, weights)], gate_up, down)
    group = [op.Slice(values, _ints(0), late, _ints(0)) for values in (x, chosen, weights)]
    return op.Concat(dense, _gathered(_node, group, gate_up, down), axis=0)


def gathered_rows(experts: int, used: int) -> int:
    """See MoeConfig.gathered_rows."""
    return max(1, experts // (3 * used))


def _dense(group: Sequence[Any], gate_up: Any, down: Any) -> Any:
    """Every row through every expert, rows as columns: x [n, hidden], chosen and weights [n, k] → [n, hidden]."""
    x, chosen, weights = group
    experts, half = gate_up.shape[0], gate_up.shape[1] // 2
    hits = op.Equal(
        op.Unsqueeze(chosen, _ints(0)), op.Constant(value=onnx_ir.tensor(np.arange(experts)[:, None, None]))
    )
    zero = op.CastLike(op.Constant(value_float=0.0), weights)
    shares = op.ReduceSum(op.Where(hits, op.Unsqueeze(weights, _ints(0)), zero), _ints(2), keepdims=0)  # [E, n]
    inner = op.MatMul(gate_up, op.Unsqueeze(op.Transpose(x, perm=[1, 0]), _ints(0)))  # [E, 2·inner, n]
    gate, up = (op.Slice(inner, _ints(start), _ints(start + half), _ints(1)) for start in (0, half))
    inner = op.Mul(op.Mul(op.Mul(gate, op.Sigmoid(gate)), up), op.Unsqueeze(shares, _ints(1)))
    return op.Transpose(op.ReduceSum(op.MatMul(down, inner), _ints(0), keepdims=0), perm=[1, 0])


def _node(kind: str, *inputs: Any, **attributes: Any) -> Any:
    return getattr(op, kind)(*inputs, **attributes)


def _ints(*values: int) -> Any:
    return op.Constant(value_ints=list(values))
