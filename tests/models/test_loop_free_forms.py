"""The ONNX forms for captured graphs, operator by operator, against the torch reference; and that no loop is left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime as ort
import pytest
import torch
import toys
from edgebuild.checkpoint import open_checkpoint
from edgebuild.errors import ProfileError
from edgebuild.export import FORMS, export_decoder
from edgebuild.export.delta_split import TAIL
from edgebuild.export.expert_forms import gathered_rows
from edgebuild.export.trace import simplify, trace
from edgebuild.models import ops
from edgebuild.models.config import ModelConfig
from edgebuild.models.hybrid_config import MAX_CAPTURED_ROWS
from edgebuild.models.support import refuse_backend
from torch import Tensor, nn

B, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 2, 4, 16, 24
EXPERTS, USED, HIDDEN, INNER = 12, 2, 16, 8


class Delta(nn.Module):
    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        return ops.gated_delta(*given)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator), requires_grad=False)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER, generator=generator), requires_grad=False)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return ops.experts(x, chosen, weights, self.gate_up, self.down)


def session_of(module: nn.Module, given: Sequence[Tensor], dynamic: Any, path: Path) -> ort.InferenceSession:
    model = trace(module, tuple(given), dynamic, FORMS["tensorrt-rtx"])
    simplify(model)
    onnx_ir.save(model, path)
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession, given: Sequence[Tensor]) -> list[np.ndarray]:
    names = [value.name for value in session.get_inputs()]
    return session.run(None, {name: value.numpy() for name, value in zip(names, given, strict=True)})


def delta_inputs(rows: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    query, key = (drawn(B, KEY_HEADS, rows, KEY_DIM) for _ in range(2))
    query, key = query / query.norm(dim=-1, keepdim=True) / 4, key / key.norm(dim=-1, keepdim=True)
    decay = -0.3 * torch.rand(B, VALUE_HEADS, rows, generator=generator)
    beta = torch.rand(B, VALUE_HEADS, rows, generator=generator)
    state = drawn(B, VALUE_HEADS, KEY_DIM, VALUE_DIM)
    positions = torch.zeros(B, rows, dtype=torch.int64)
    return query, key, drawn(B, VALUE_HEADS, rows, VALUE_DIM), decay, beta, state, positions


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory) -> ort.InferenceSession:
    batch, rows = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("rows", min=1, max=65536)
    by_head, dynamic = {0: batch, 2: rows}, ({0: batch}, {0: batch, 1: rows})
    shapes = (((by_head,) * 5 + dynamic),)
    return session_of(Delta(), delta_inputs(5), shapes, tmp_path_factory.mktemp("delta") / "delta.onnx")


@pytest.mark.parametrize("rows", [1, 2, 5, TAIL, TAIL + 1, 71, 72, 73, 130, 700, MAX_CAPTURED_ROWS])
def test_delta_rule_without_a_loop_for_any_number_of_rows(delta: ort.InferenceSession, rows: int) -> None:
    """Tail alone; a block of one row and 63 added ones; whole blocks; more blocks than a power of two; the most."""
    given = delta_inputs(rows)
    expected = ops._gated_delta(*given[:6])
    for found, wanted in zip(run(delta, given), expected, strict=True):
        assert np.linalg.norm(found - wanted.numpy()) <= 1e-6 * np.linalg.norm(wanted.numpy())


def test_chunks_beyond_what_the_form_takes_are_refused(tmp_path: Path) -> None:
    toys.make_qwen3_5(tmp_path, layers=2, interval=2)
    config = ModelConfig.from_hf(open_checkpoint(tmp_path).config)
    refuse_backend("tensorrt-rtx", config, MAX_CAPTURED_ROWS)
    refuse_backend("onnxruntime", config, 1 << 20)
    with pytest.raises(ProfileError, match=r"max_chunk 2,049: qwen3_5 on tensorrt-rtx takes at most 2,048"):
        refuse_backend("tensorrt-rtx", config, MAX_CAPTURED_ROWS + 1)


@pytest.mark.parametrize("rows", [1, 2, 3, 40])
def test_experts_gathered_or_all(rows: int, tmp_path: Path) -> None:
    """Up to `gathered_rows` rows take the weights of their own experts, more pass every expert."""
    assert gathered_rows(EXPERTS, USED) == 2
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:USED] for _ in range(rows)])
    given = (torch.randn(rows, HIDDEN, generator=generator), chosen, torch.rand(rows, USED, generator=generator))
    module = Experts()
    any_rows = torch.export.Dim("rows", min=1, max=65536)
    example = (torch.zeros(5, HIDDEN), torch.zeros(5, USED, dtype=torch.int64), torch.zeros(5, USED))
    session = session_of(module, example, ({0: any_rows},) * 3, tmp_path / "experts.onnx")
    expected = ops._experts(*given, module.gate_up, module.down).numpy()
    (found,) = run(session, given)
    assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected)


def test_what_tensorrt_gets_has_no_loop_no_branch_and_no_copy_of_a_weight(tmp_path: Path) -> None:
    """TensorRT-RTX does not capture a network with a `Loop`; a folded transpose would put experts into the file."""
    toys.make_qwen3_next(tmp_path, layers=2, interval=2)
    checkpoint = open_checkpoint(tmp_path)
    graph = export_decoder(
        ModelConfig.from_hf(checkpoint.config), checkpoint, tmp_path, cache_tokens=64, token_limit=300,
        precision="float16", forms=FORMS["tensorrt-rtx"],
    )  # fmt: skip
    model = onnx.load(str(graph.path), load_external_data=False)
    assert not {"Loop", "If", "Scan"} & {node.op_type for node in model.graph.node}
    inside = [tensor for tensor in model.graph.initializer if not tensor.external_data]
    assert max(int(np.prod(tensor.dims)) for tensor in inside) <= 64 * 64  # masks of a block
