"""Splits narrow matrix products along their inner dimension, as a pass over the exported ONNX graph.

A product of few rows with a weight of few columns occupies few processors of a GPU, and TensorRT answers with split-K
kernels that add into memory cleared beforehand. That is slow at decode's two rows: 6.9 µs and 1 µs of clearing for
1,024 columns on an H200, where four smaller products side by side, summed by the kernel that adds the residual, take
4.4 µs. A 0.6B decode step is 16 % shorter for it, and prefill somewhat longer (docs/log.md). Products that share their
input (query, key and value; gate and up) are left alone: the compiler makes one wide product of them.

Partial sums are rounded to the graph's type before they are added: in float16 the error of such a product goes from
2.1e-4 to 2.9e-4, as if the result were rounded once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx_ir

_TILE_COLUMNS = 32  # of the kernels that are chosen for few rows
_LEAST_COLUMNS = 128  # below, a product is short however it is computed
_LEAST_INNER = 64  # elements of a part: below, a part is too short to hide its start
_MOST_PARTS = 4  # a sum of eight is a kernel of its own: 3 % slower than of four
_CROWDING = 1.25  # tiles per processor that still pay: 2 parts of 2,560 columns on 132 processors do, 8 of 1,024 do not


def split_narrow_products(model: onnx_ir.Model, processors: int) -> int:
    """Rewrites the Gemm nodes that are worth it, in place; returns how many. processors: of the device."""
    graph = model.graph
    shared = Counter(node.inputs[0] for node in graph if node.op_type == "Gemm")
    split = 0
    for node in list(graph):
        if node.op_type != "Gemm" or len(node.inputs) != 2 or shared[node.inputs[0]] > 1:
            continue
        weight = node.inputs[1]
        if weight is None or not weight.is_initializer() or weight.shape is None or not _transposed(node):
            continue
        columns, inner = (int(dim) for dim in weight.shape)  # initializers are static
        parts = choose_parts(columns, inner, processors)
        if parts > 1:
            _split(graph, node, columns, inner, parts)
            split += 1
    return split


def choose_parts(columns: int, inner: int, processors: int) -> int:
    """The largest power of two whose tiles run at once on the device; 1 = leave the product whole."""
    parts = 1
    if columns < _LEAST_COLUMNS:
        return parts
    while (
        2 * parts <= _MOST_PARTS
        and 2 * parts * -(-columns // _TILE_COLUMNS) <= _CROWDING * processors
        and inner % (2 * parts) == 0
        and inner // (2 * parts) >= _LEAST_INNER
    ):
        parts *= 2
    return parts


def _transposed(node: onnx_ir.Node) -> bool:
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    plain = attributes.get("transA", 0) == 0 and attributes.get("alpha", 1.0) == 1.0
    return bool(plain and attributes.get("transB", 0) == 1)


def _split(graph: onnx_ir.Graph, node: onnx_ir.Node, columns: int, inner: int, parts: int) -> None:
    """x [M, K] · weight [N, K]ᵀ as the sum over p of x[:, p] [M, K/P] · weight[:, p]ᵀ [K/P, N]."""
    x, weight, result = node.inputs[0], node.inputs[1], node.outputs[0]
    assert x is not None
    assert weight is not None
    name = f"{node.name or result.name}_parts"
    made: list[onnx_ir.Node] = []

    def add(
        operator: str, inputs: Sequence[onnx_ir.Value], attributes: dict[str, object] | None = None
    ) -> onnx_ir.Value:
        made.append(onnx_ir.node(operator, inputs, attributes, name=f"{name}_{len(made)}"))
        return made[-1].outputs[0]

    def ints(label: str, *values: int) -> onnx_ir.Value:
        known = graph.initializers.get(label)
        if known is not None:
            return known
        value = onnx_ir.Value(name=label, const_value=onnx_ir.tensor(np.asarray(values, np.int64), name=label))
        value.shape, value.dtype = onnx_ir.Shape((len(values),)), onnx_ir.DataType.INT64
        graph.register_initializer(value)
        return value

    width = inner // parts
    rows = add("Reshape", (x, ints(f"parts_of_rows_{parts}_{width}", -1, parts, width)))
    rows = add("Transpose", (rows,), {"perm": [1, 0, 2]})  # [P, M, K/P]
    matrix = add("Reshape", (weight, ints(f"parts_of_weight_{columns}_{parts}_{width}", columns, parts, width)))
    matrix = add("Transpose", (matrix,), {"perm": [1, 2, 0]})  # [P, K/P, N]
    total = add("ReduceSum", (add("MatMul", (rows, matrix)), ints("parts_axis", 0)), {"keepdims": 0})
    for value in (made_node.outputs[0] for made_node in made):
        value.dtype = result.dtype
    total.shape = result.shape
    onnx_ir.convenience.replace_nodes_and_values(graph, node, [node], made, [result], [total])
