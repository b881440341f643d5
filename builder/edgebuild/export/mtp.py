"""Traces one draft pass of the MTP module and writes `mtp.onnx` with `mtp.weights`, as export.decoder does the decoder.

Of the model's embedding and head only the rows of tokens that may be drafted are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from edgebuild.errors import ExportError
from edgebuild.export.decoder import (
    _DTYPES,
    ExportedGraph,
    TensorSource,
    _describe,
    _name_boundary,
    _name_symbols,
    _stream,
)
from edgebuild.export.forms import Forms
from edgebuild.export.trace import simplify, trace
from edgebuild.export.weights import WeightFile
from edgebuild.models.config import ModelConfig
from edgebuild.models.drafting import MtpGraph

INPUTS = ("embedding", "hidden", "length", "new_length", "kv_positions")
OUTPUTS = ("draft", "draft_embedding", "draft_hidden", "next_length")


class _Rows:
    """The drafter's weights, and of embedding and head the rows that may be drafted."""

    def __init__(self, weights: TensorSource, draft_tokens: Sequence[int]) -> None:
        self._weights, self._rows = weights, torch.tensor(list(draft_tokens), dtype=torch.int64)

    def read(self, name: str) -> Tensor:
        full = {"draft_embedding.weight": "model.embed_tokens.weight", "draft_head.weight": "lm_head.weight"}.get(name)
        return self._weights.read(name) if full is None else self._weights.read(full)[self._rows]


def export_mtp(
    config: ModelConfig,
    weights: TensorSource,
    directory: Path,
    *,
    cache_tokens: int,
    draft_tokens: Sequence[int],
    precision: str,
    forms: Forms,
) -> ExportedGraph:
    """Write `mtp.onnx` and `mtp.weights` into `directory`. draft_tokens: ids, ascending.

    weights: `mtp.*` tensors and the model's embedding (and head). Raises ExportError when torch cannot express it.
    """
    dtype = _DTYPES[precision]
    with FakeTensorMode():
        module = MtpGraph(config, cache_tokens=cache_tokens, draft_tokens=len(draft_tokens), dtype=dtype)
    module.eval()
    model = _trace(module, forms)
    weights_path = directory / "mtp.weights"
    with WeightFile(weights_path) as file:
        _stream(model, module, _Rows(weights, draft_tokens), file, lambda _stage, _fraction: None)
    ids = model.graph.initializers.get("draft_ids")
    if ids is None:
        raise ExportError("the exported draft pass lost its list of token ids")
    ids.const_value = onnx_ir.tensor(np.asarray(draft_tokens, dtype=np.int64), name="draft_ids")
    simplify(model)
    _name_boundary(model, INPUTS, OUTPUTS, module.states())
    graph = model.graph
    hidden, tier = graph.inputs[1].shape, graph.inputs[4].shape
    if hidden is None or tier is None:
        raise ExportError("the exported draft pass has inputs without shapes")
    _name_symbols(graph, {str(hidden[0]): "batch", str(hidden[1]): "rows", str(tier[0]): "tier"})
    path = directory / "mtp.onnx"
    onnx_ir.save(model, path)
    return ExportedGraph(
        path=path,
        weights_path=weights_path,
        inputs=tuple(_describe(value) for value in graph.inputs),
        outputs=tuple(_describe(value) for value in graph.outputs),
        states=module.states(),
        weight_bytes=file.bytes_written,
        precision=precision,
    )


def _trace(module: MtpGraph, forms: Forms) -> onnx_ir.Model:
    batch, rows = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("rows", min=1, max=65536)
    blocks = module.config.block_tokens  # of a sparse attention's tier: the tracer takes a single one for a constant
    tier = torch.export.Dim("tier", min=1 + blocks if blocks > 1 else 1, max=1 << 22)
    b, q, t = 2, 5, 7  # unequal, and none of them 1: no dimension is taken for a constant or for another
    with FakeTensorMode():
        states = module.empty_states(b)
        embedding, hidden = (
            torch.empty(b, q, width, dtype=module.dtype)
            for width in (module.config.hidden_size, module.config.draft_width)
        )
        whole = torch.zeros(b, dtype=torch.int64)
        arguments = (embedding, hidden, whole, whole.clone(), torch.zeros(t, dtype=torch.int64), states)
    one, both = {0: batch}, {0: batch, 1: rows}
    return trace(module, arguments, (both, both, one, one, {0: tier}, [one] * len(states)), forms)
