"""Traces the decoder with fake parameters, writes its ONNX file and streams its weights beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import onnx_ir
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from edgebuild.errors import ExportError
from edgebuild.export.forms import Forms
from edgebuild.export.narrow import split_narrow_products
from edgebuild.export.trace import simplify, trace
from edgebuild.export.weights import WeightFile
from edgebuild.models.config import ModelConfig
from edgebuild.models.decoder import Decoder
from edgebuild.models.drafting import DraftingDecoder
from edgebuild.models.parts import State

_INPUTS = ("tokens", "length", "valid", "forced", "kv_positions", "uniform", "temperature", "top_k", "top_p")
_OUTPUTS = ("sampled", "accepted", "next_token", "new_length", "logits")
_DRAFTING_INPUTS, _DRAFTING_OUTPUTS = ("following",), ("hidden", "next_embedding")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
Progress = Callable[[str, float], None]


class TensorSource(Protocol):
    """Where weights come from: one tensor at a time, under the names of the published checkpoints."""

    def read(self, name: str) -> Tensor: ...


class Traced(Protocol):
    """A module whose weights and constants are streamed: see models.decoder.Decoder."""

    def constants(self) -> dict[str, Tensor]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


@dataclass(frozen=True)
class TensorInfo:
    """One graph input or output. Shape entries are sizes or "batch", "rows", "tier", "logit_rows"."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class ExportedGraph:
    """What was written: the ONNX file, its weights, and the tensors at its boundary."""

    path: Path
    weights_path: Path
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    states: tuple[State, ...]
    weight_bytes: int
    precision: str


def export_decoder(
    config: ModelConfig,
    weights: TensorSource,
    directory: Path,
    *,
    cache_tokens: int,
    token_limit: int,
    precision: str,
    forms: Forms,
    drafting: bool = False,
    progress: Progress = lambda _stage, _fraction: None,
) -> ExportedGraph:
    """Write `decoder.onnx` and `decoder.weights` into `directory`; `drafting`: with what an MTP module needs.

    `progress(stage, fraction)` is called as the work goes on. Raises ExportError when torch cannot express the model.
    """
    dtype = _DTYPES[precision]
    with FakeTensorMode():
        kind = DraftingDecoder if drafting else Decoder
        decoder = kind(config, cache_tokens=cache_tokens, token_limit=token_limit, dtype=dtype)
    decoder.eval()
    progress("trace", 0.0)
    model = _trace_decoder(decoder, forms)
    progress("trace", 1.0)
    weights_path = directory / "decoder.weights"
    with WeightFile(weights_path) as file:
        _stream(model, decoder, weights, file, progress)
    simplify(model)
    if forms.processors:
        split_narrow_products(model, forms.processors)
    extra = (_DRAFTING_INPUTS, _DRAFTING_OUTPUTS) if drafting else ((), ())
    _name_boundary(model, (*_INPUTS, *extra[0]), (*_OUTPUTS, *extra[1]), decoder.states())
    _name_symbols(model.graph, _symbols(model.graph))
    path = directory / "decoder.onnx"
    onnx_ir.save(model, path)
    return ExportedGraph(
        path=path,
        weights_path=weights_path,
        inputs=tuple(_describe(value) for value in model.graph.inputs),
        outputs=tuple(_describe(value) for value in model.graph.outputs),
        states=decoder.states(),
        weight_bytes=file.bytes_written,
        precision=precision,
    )


def _trace_decoder(decoder: Decoder, forms: Forms) -> onnx_ir.Model:
    batch, rows = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("rows", min=1, max=65536)
    # blocks of a sparse attention's tier: the tracer takes a single one for a constant, the graph does not
    least = 1 + decoder.config.block_tokens if decoder.config.block_tokens > 1 else 1
    tier, logit_rows = torch.export.Dim("tier", min=least, max=1 << 22), torch.export.Dim("logit_rows", min=1, max=64)
    # sizes of the example: unequal, and none of them 1, so that no dimension is taken for a constant or for another
    b, q, r, t = 2, 5, 3, 7

    def whole(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    with FakeTensorMode():
        states = decoder.empty_states(b)
        arguments = (
            *(whole(b, q), whole(b), whole(b), whole(b), whole(t)),
            *(torch.empty(b, r), torch.empty(b), whole(b), torch.empty(b)),
            *((whole(b),) if isinstance(decoder, DraftingDecoder) else ()),
            states,
        )
    one = {0: batch}
    dynamic: tuple[Any, ...] = ({0: batch, 1: rows}, one, one, one, {0: tier}, {0: batch, 1: logit_rows}, one, one, one)
    dynamic = (*dynamic, *[one] * (len(arguments) - 1 - len(dynamic)), [one] * len(states))
    return trace(decoder, arguments, dynamic, forms)


def _stream(model: onnx_ir.Model, decoder: Traced, weights: TensorSource, file: WeightFile, progress: Progress) -> None:
    """Give every fake initializer its value, straight from the checkpoint."""
    constants = decoder.constants()
    parameters = dict(decoder.named_parameters())
    pending = [name for name in model.graph.initializers if name in parameters or name in constants]
    for index, name in enumerate(pending):
        tensor = constants.pop(name) if name in constants else weights.read(name).to(parameters[name].dtype)
        if name in parameters and tensor.shape != parameters[name].shape:
            needed = tuple(parameters[name].shape)
            raise ExportError(f"{name}: the model needs shape {needed}, got {tuple(tensor.shape)}")
        model.graph.initializers[name].const_value = file.append(name, tensor)
        progress("weights", (index + 1) / len(pending))
    missing = parameters.keys() - set(pending)
    if missing:
        raise ExportError(f"the exported graph lost parameters: {', '.join(sorted(missing))}")


def _name_boundary(
    model: onnx_ir.Model, own_inputs: Sequence[str], own_outputs: Sequence[str], states: tuple[State, ...]
) -> None:
    """Documented names for inputs and outputs."""
    graph = model.graph
    names = (*own_inputs, *(state.name for state in states))
    outputs = (*own_outputs, *(f"{state.name}.out" for state in states))
    if len(graph.inputs) != len(names) or len(graph.outputs) != len(outputs):
        raise ExportError(
            f"the exported graph has {len(graph.inputs)} inputs and {len(graph.outputs)} outputs, "
            f"expected {len(names)} and {len(outputs)}"
        )
    for value, name in zip((*graph.inputs, *graph.outputs), (*names, *outputs), strict=True):
        value.name = name


def _name_symbols(graph: onnx_ir.Graph, symbols: Mapping[str, str]) -> None:
    """Documented symbols for dynamic dimensions, everywhere."""
    for value in _values(graph):
        if value.shape is not None:
            value.shape = onnx_ir.Shape(
                [symbols.get(str(d.value), d.value) if isinstance(d, onnx_ir.SymbolicDim) else d for d in value.shape]
            )


def _symbols(graph: onnx_ir.Graph) -> dict[str, str]:
    """Tracer symbol → documented symbol, read off the inputs that carry each dimension."""
    tokens, kv_positions, uniform = graph.inputs[0], graph.inputs[4], graph.inputs[5]
    if tokens.shape is None or kv_positions.shape is None or uniform.shape is None:
        raise ExportError("the exported graph has inputs without shapes")
    return {
        str(tokens.shape[0]): "batch",
        str(tokens.shape[1]): "rows",
        str(kv_positions.shape[0]): "tier",
        str(uniform.shape[1]): "logit_rows",
    }


def _values(graph: onnx_ir.Graph) -> Iterator[Any]:
    yield from graph.inputs
    for node in graph.all_nodes():
        yield from node.outputs


def _describe(value: Any) -> TensorInfo:
    names = {
        onnx_ir.DataType.INT64: "int64",
        onnx_ir.DataType.FLOAT: "float32",
        onnx_ir.DataType.FLOAT16: "float16",
        onnx_ir.DataType.BFLOAT16: "bfloat16",
    }
    shape = tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)
    return TensorInfo(value.name, names[value.dtype], shape)
