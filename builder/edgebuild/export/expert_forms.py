"""ONNX formulations of `edgebuild.models.ops.experts`, for any number of rows.

"looped" goes over the experts that at least one row chose, and takes that expert's rows through it: each used expert's
weights are read once, others never. So a decode step reads top-k experts a row, and a prefill chunk is grouped. It
needs shapes that depend on data (Unique, NonZero).
"gathered" copies the weights of every row's experts side by side. All shapes are fixed by the row count, so a graph can
be captured; memory grows with rows · k · expert, which suits decode and short chunks only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir
from onnxscript.onnx_opset import opset24 as op

from edgebuild.export.loop_body import LoopBody, loop

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
    """See ops.experts."""
    column = op.Unsqueeze(x, _ints(1, 3))  # [N, 1, hidden, 1]
    inner = op.MatMul(op.Gather(gate_up, chosen, axis=0), column)  # [N, k, 2·inner, 1]
    halves = op.Split(inner, axis=2, num_outputs=2)
    inner = op.Mul(op.Mul(halves[0], op.Sigmoid(halves[0])), halves[1])
    out = op.Squeeze(op.MatMul(op.Gather(down, chosen, axis=0), inner), _ints(3))  # [N, k, hidden]
    return op.ReduceSum(op.Mul(out, op.Unsqueeze(weights, _ints(2))), _ints(1), keepdims=0)


def _ints(*values: int) -> Any:
    return op.Constant(value_ints=list(values))
