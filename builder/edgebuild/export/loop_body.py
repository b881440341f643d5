"""The body of an ONNX `Loop`, built node by node; values of the graph around it may be used as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir
from onnxscript.onnx_opset import opset24 as op


class LoopBody:
    """Inputs (index, go on, carried ...), outputs (go on, carried ..., one entry a trip of what is collected ...)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[onnx_ir.Node] = []
        self._inputs: list[Any] = []
        self.index: Any = self._input("index", onnx_ir.DataType.INT64, onnx_ir.Shape([]))
        self._go_on = self._input("go_on", onnx_ir.DataType.BOOL, onnx_ir.Shape([]))
        self._kinds: list[onnx_ir.DataType] = []

    def carried(self, name: str, kind: onnx_ir.DataType) -> Any:
        """The next loop-carried value as the body receives it."""
        self._kinds.append(kind)
        return self._input(name, kind, None)

    def node(self, kind: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Append an operator; its output, or a tuple of its outputs."""
        given = [onnx_ir.convenience.convert_attribute(name, value) for name, value in attributes.items()]
        made = onnx_ir.Node("", kind, list(inputs), given, num_outputs=outputs)
        self._nodes.append(made)
        for place, value in enumerate(made.outputs):
            value.name = f"{self._name}_{kind}_{len(self._nodes)}_{place}"
        return made.outputs[0] if outputs == 1 else tuple(made.outputs)

    def constant(self, value: Any) -> Any:
        """A constant from a numpy array."""
        return self.node("Constant", value=onnx_ir.tensor(value))

    def graph(
        self,
        *carried: Any,
        collected: Mapping[Any, tuple[int | str, ...]] | None = None,
        kind: onnx_ir.DataType = onnx_ir.DataType.FLOAT,
    ) -> onnx_ir.Graph:
        """The body. `collected`: value → shape of one trip's entry, of `kind`; without a shape, a loop of no trips
        would collect a tensor of unknown rank."""
        go_on = self.node("Identity", self._go_on)
        go_on.type, go_on.shape = onnx_ir.TensorType(onnx_ir.DataType.BOOL), onnx_ir.Shape([])
        for value, own in zip(carried, self._kinds, strict=True):
            value.type = onnx_ir.TensorType(own)
        for value, shape in (collected or {}).items():
            value.type, value.shape = onnx_ir.TensorType(kind), onnx_ir.Shape(shape)
        outputs = (*carried, *(collected or {}))
        return onnx_ir.Graph(self._inputs, [go_on, *outputs], nodes=self._nodes, name=f"{self._name}_body")

    def _input(self, name: str, kind: onnx_ir.DataType, shape: Any) -> Any:
        value = onnx_ir.Value(name=f"{self._name}_{name}", type=onnx_ir.TensorType(kind), shape=shape)
        self._inputs.append(value)
        return value


def loop(trips: Any, body: onnx_ir.Graph, *initial: Any) -> tuple[Any, ...]:
    """`Loop` without a condition: its final carried values, then what it collected [trips, ...]."""
    first = op.Loop(trips, op.Constant(value=onnx_ir.tensor(np.array(True))), *initial, body=body)
    node = first.producer()
    # torch's recorder repeats the inputs before a variadic one, and gives a variadic output once
    for place, value in enumerate(initial):
        node.replace_input_with(2 + place, value)
    node.resize_inputs(2 + len(initial))
    node.resize_outputs(len(body.outputs) - 1)
    return tuple(node.outputs)
