"""Formulations of experts and of the gated delta rule on ONNX Runtime (CPU), one layer each, by row count.

    python benchmarks/hybrid_forms.py

Experts: 64 of 1,024 → 256, 8 a token, float32. Gated delta rule: 16 heads of 128 × 128 (the 0.8B shape). Best of seven
runs on one thread; "dense" (every expert for every row) and "recurrence" (row after row, unrolled) are the yardsticks.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime as ort
import torch
import torch.nn.functional as F
from edgebuild.export.forms import Forms
from edgebuild.export.trace import simplify, trace
from edgebuild.models import ops
from torch import Tensor, nn

EXPERTS, CHOSEN, HIDDEN, INNER = 64, 8, 1024, 256
HEADS, HEAD_DIM = 16, 128
REPEATS = 7


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) * 0.02, requires_grad=False)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * 0.02, requires_grad=False)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return ops.experts(x, chosen, weights, self.gate_up, self.down)


class DenseExperts(Experts):
    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        share = torch.zeros(x.shape[0], EXPERTS).scatter(1, chosen, weights)
        gate, up = (x[None] @ self.gate_up.transpose(1, 2)).chunk(2, -1)
        out = (F.silu(gate) * up) @ self.down.transpose(1, 2)
        return (out * share.T[:, :, None]).sum(0)


class Delta(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        return ops.gated_delta(q, k, v, decay, beta, state, beta[:, 0])[0]


class Recurrence(nn.Module):
    """`rows` is fixed: the graph is unrolled."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        outputs = []
        for row in range(self.rows):
            key = k[:, :, row, :, None]
            state = state * decay[:, :, row, None, None].exp()
            change = beta[:, :, row, None] * (v[:, :, row] - (state * key).sum(2))
            state = state + key * change[:, :, None]
            outputs.append((state * q[:, :, row, :, None]).sum(2))
        return torch.stack(outputs, dim=2)


def session(module: nn.Module, example: tuple[Tensor, ...], dynamic: Any, forms: Forms) -> ort.InferenceSession:
    model = trace(module, example, dynamic, forms)
    simplify(model)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "form.onnx"
        onnx_ir.save(model, path)
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def measure(opened: ort.InferenceSession, arguments: tuple[Tensor, ...], expected: Tensor) -> str:
    names = [value.name for value in opened.get_inputs()]
    feeds = dict(zip(names, (argument.numpy() for argument in arguments), strict=True))
    output, best = opened.run(None, feeds)[0], float("inf")
    error = np.linalg.norm(output - expected.numpy()) / np.linalg.norm(expected.numpy())
    for _ in range(REPEATS):
        started = time.perf_counter()
        opened.run(None, feeds)
        best = min(best, time.perf_counter() - started)
    return f"{1e3 * best:.2f} ms ({error:.0e})"


def experts() -> None:
    rows = torch.export.Dim("n", min=1, max=4096)
    example = (torch.zeros(5, HIDDEN), torch.zeros(5, CHOSEN, dtype=torch.int64), torch.zeros(5, CHOSEN))
    module, dense = Experts(), DenseExperts()
    dense.load_state_dict(module.state_dict())
    dynamic = ({0: rows},) * 3
    sessions = {
        "looped": session(module, example, dynamic, Forms(experts="looped")),
        "gathered": session(module, example, dynamic, Forms(experts="gathered")),
        "dense": session(dense, example, dynamic, Forms()),
    }
    print("| rows | experts used | looped | gathered | dense |\n| ---: | ---: | ---: | ---: | ---: |")
    for count in (1, 4, 16, 64, 256):
        x = torch.randn(count, HIDDEN)
        chosen = torch.rand(count, EXPERTS).argsort(1)[:, :CHOSEN].contiguous()
        arguments = (x, chosen, torch.randn(count, CHOSEN).softmax(1))
        expected = module(*arguments)
        cells = [measure(each, arguments, expected) for each in sessions.values()]
        print(f"| {count} | {len(torch.unique(chosen))} | {' | '.join(cells)} |", flush=True)


def delta() -> None:
    def drawn(count: int) -> tuple[Tensor, ...]:
        shape = (1, HEADS, count, HEAD_DIM)
        q, k = (F.normalize(torch.randn(shape), dim=-1) for _ in range(2))
        decay, beta = -F.softplus(torch.randn(shape[:3])), torch.rand(shape[:3])
        return q, k, torch.randn(shape), decay, beta, torch.randn(1, HEADS, HEAD_DIM, HEAD_DIM)

    rows = torch.export.Dim("q", min=1, max=4096)
    any_rows = session(Delta(), drawn(5), (*({2: rows},) * 5, None), Forms())
    print("\n| rows | blocks | recurrence |\n| ---: | ---: | ---: |")
    for count in (1, 4, 64, 512, 2048):
        arguments = drawn(count)
        expected = Delta()(*arguments)
        row_by_row = "" if count > 4 else measure(
            session(Recurrence(count), arguments, (None,) * 6, Forms()), arguments, expected
        )  # fmt: skip
        print(f"| {count} | {measure(any_rows, arguments, expected)} | {row_by_row} |", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    experts()
    delta()
