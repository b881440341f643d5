"""ONNX formulations for sparse attention: means over blocks of keys, and the best blocks for each row as a mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir
from onnxscript.onnx_opset import opset24 as op


def block_means(cache: Any, kv_positions: Any, ratio: int) -> Any:
    """See ops.block_means."""
    width = _ints(ratio)
    blocks = op.Div(op.Add(op.Shape(kv_positions), _ints(ratio - 1)), width)
    part = op.Slice(cache, _ints(0), op.Mul(blocks, width), _ints(2))
    grouped = op.Reshape(part, op.Concat(_ints(0, 0), blocks, width, _ints(cache.shape[3]), axis=0))
    return op.CastLike(op.ReduceMean(op.Cast(grouped, to=onnx_ir.DataType.FLOAT), _ints(3), keepdims=0), cache)


def choose_tokens(scores: Any, positions: Any, kv_positions: Any, count: int, ratio: int) -> Any:
    """See ops.choose_tokens."""
    width = op.Constant(value_int=ratio)
    complete = op.Unsqueeze(op.Div(op.Add(positions, op.Constant(value_int=1)), width), _ints(-1))  # [B, q, 1]
    blocks = op.Shape(scores, start=2, end=3)
    numbers = op.Range(op.Constant(value_int=0), op.Squeeze(blocks, _ints(0)), op.Constant(value_int=1))
    whole = op.Less(numbers, complete)
    ranked = op.TopK(op.Where(whole, scores, op.Constant(value_float=-1.0)), op.Min(_ints(count), blocks), axis=-1)
    empty = op.ConstantOfShape(op.Shape(scores), value=onnx_ir.tensor(np.zeros(1, np.float32)))
    ones = op.Expand(op.Constant(value_float=1.0), op.Shape(ranked[1]))
    best = op.Greater(op.ScatterElements(empty, ranked[1], ones, axis=2), op.Constant(value_float=0.5))
    block = op.Div(kv_positions, width)
    return op.Or(op.Gather(op.And(best, whole), block, axis=2), op.GreaterOrEqual(block, complete))


def _ints(*values: int) -> Any:
    return op.Constant(value_ints=list(values))
