"""A two-layer decoder in ONNX with random float16 weights, small enough to build an engine from in a second.

It has the graph inputs and state names that an engine build looks at. It is no language model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, CACHE = 128, 4, 2, 32, 512, 320


def write_toy_decoder(path: Path, *, layers: int = 2, unknown_operator: bool = False) -> int:
    """Writes `path` with its weights beside it as external data; returns the bytes of the weights."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def weight(name: str, *shape: int) -> str:
        weights.append(numpy_helper.from_array((rng.standard_normal(shape) * 0.05).astype(np.float16), name))
        return name

    def ints(name: str, *values: int) -> str:
        weights.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def node(op: str, inputs: list[str], out: str, **attributes: object) -> str:
        domain = "example.unknown" if op == "Frobnicate" else ""
        nodes.append(helper.make_node(op, inputs, [out], name=f"node_{out}", domain=domain, **attributes))
        return out

    weight("embedding", VOCABULARY, HIDDEN)
    ints("split_q", 0, 0, HEADS, HEAD_DIM)
    ints("split_kv", 0, 0, KV_HEADS, HEAD_DIM)
    ints("merge", 0, 0, HEADS * HEAD_DIM)
    ints("zero", 0)
    ints("axis_two", 2)
    ints("axes_mask_keys", 0, 1, 2)
    ints("axes_mask_rows", 1, 3)
    ints("axis_one", 1)
    weights.append(numpy_helper.from_array(np.array(0, np.int64), "start"))
    weights.append(numpy_helper.from_array(np.array(1, np.int64), "step"))

    x = node("Gather", ["embedding", "tokens"], "embedded")
    rows = node("Squeeze", [node("Shape", ["tokens"], "rows_1d", start=1, end=2)], "rows_count")
    offsets = node("Range", ["start", rows, "step"], "offsets")
    positions = node("Add", [node("Unsqueeze", ["length", "axis_one"], "length_2d"), offsets], "positions")
    tier = node("Shape", ["kv_positions"], "tier")
    mask = node(
        "LessOrEqual",
        [
            node("Unsqueeze", ["kv_positions", "axes_mask_keys"], "mask_keys"),
            node("Unsqueeze", [positions, "axes_mask_rows"], "mask_rows"),
        ],
        "mask",
    )
    for i in range(layers):
        heads = {}
        for part, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            flat = node("MatMul", [x, weight(f"w{part}.{i}", HIDDEN, count * HEAD_DIM)], f"{part}_flat.{i}")
            split = node("Reshape", [flat, "split_q" if part == "q" else "split_kv"], f"{part}_split.{i}")
            heads[part] = node("Transpose", [split], f"{part}.{i}", perm=[0, 2, 1, 3])
        visible = {}
        for part, state in (("k", "key"), ("v", "value")):
            cache = node("TensorScatter", [f"{state}.{i}", heads[part], "length"], f"{state}.{i}.out", axis=-2)
            visible[part] = node("Slice", [cache, "zero", tier, "axis_two"], f"{part}_visible.{i}")
        attended = node("Attention", [heads["q"], visible["k"], visible["v"], mask], f"attended.{i}")
        merged = node("Reshape", [node("Transpose", [attended], f"t.{i}", perm=[0, 2, 1, 3]), "merge"], f"merged.{i}")
        out = node("MatMul", [merged, weight(f"wo.{i}", HEADS * HEAD_DIM, HIDDEN)], f"out.{i}")
        x = node("Add", [x, out], f"x.{i}")
    if unknown_operator:
        x = node("Frobnicate", [x], "frobnicated")
    logits = node("MatMul", [x, weight("head", HIDDEN, VOCABULARY)], "half_logits")
    node("Cast", [logits], "logits", to=TensorProto.FLOAT)
    node("ArgMax", ["logits"], "sampled", axis=-1, keepdims=0)

    i64, f16 = TensorProto.INT64, TensorProto.FLOAT16
    states = [f"{state}.{i}" for i in range(layers) for state in ("key", "value")]
    cache_shape = ["batch", KV_HEADS, CACHE, HEAD_DIM]
    graph = helper.make_graph(
        nodes,
        "toy",
        [
            helper.make_tensor_value_info("tokens", i64, ["batch", "rows"]),
            helper.make_tensor_value_info("length", i64, ["batch"]),
            helper.make_tensor_value_info("kv_positions", i64, ["tier"]),
            *(helper.make_tensor_value_info(name, f16, cache_shape) for name in states),
        ],
        [
            helper.make_tensor_value_info("sampled", i64, ["batch", "rows"]),
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "rows", VOCABULARY]),
            *(helper.make_tensor_value_info(f"{name}.out", f16, cache_shape) for name in states),
        ],
        weights,
    )
    opsets = [helper.make_opsetid("", 24)]
    if unknown_operator:
        opsets.append(helper.make_opsetid("example.unknown", 1))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    onnx.save(model, str(path), save_as_external_data=True, location=path.stem + ".weights", size_threshold=1024)
    return (path.parent / f"{path.stem}.weights").stat().st_size
