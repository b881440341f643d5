"""Both ONNX forms of the sampler, and the eager one, against distributions computed here by sorting and summing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir
import onnxruntime as ort
import pytest
import torch
from edgebuild.export.forms import Forms
from edgebuild.export.trace import simplify, trace
from edgebuild.models import ops
from scipy import stats
from torch import Tensor, nn

DRAWS = 100_000
EIGHT = np.array([2.0, 1.0, 0.5, 0.0, -0.5, 3.0, 1.5, -2.0], np.float32)


class Sampler(nn.Module):
    def forward(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
        return ops.sample(logits, temperature, top_k, top_p, uniform)


def eager(logits, temperature, top_k, top_p, uniform):
    arguments = (logits, temperature, top_k, top_p, uniform)
    return ops.sample(*(torch.from_numpy(np.ascontiguousarray(a)) for a in arguments)).numpy()


@pytest.fixture(scope="module", params=["conditional", "branchless", "eager"])
def sampler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """f(logits [B, R, V], temperature [B], top_k [B], top_p [B], uniform [B, R]) → ids."""
    if request.param == "eager":
        return eager
    sessions: dict[int, ort.InferenceSession] = {}

    def run(logits, temperature, top_k, top_p, uniform):
        vocabulary = logits.shape[-1]
        if vocabulary not in sessions:
            directory = tmp_path_factory.mktemp("sampler")
            sessions[vocabulary] = _export(directory / "sampler.onnx", vocabulary, Forms(sampling=request.param))
        feeds = (logits, temperature, top_k, top_p, uniform)
        names = [value.name for value in sessions[vocabulary].get_inputs()]
        return sessions[vocabulary].run(None, dict(zip(names, feeds, strict=True)))[0]

    return run


def _export(path: Path, vocabulary: int, forms: Forms) -> ort.InferenceSession:
    batch, rows = torch.export.Dim("batch"), torch.export.Dim("rows")
    example = (torch.zeros(2, 3, vocabulary), torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.ones(2))
    one = {0: batch}
    dynamic = ({0: batch, 1: rows}, one, one, one, {0: batch, 1: rows})
    model = trace(Sampler(), (*example, torch.zeros(2, 3)), dynamic, forms)
    simplify(model)
    onnx_ir.save(model, path)
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def expected_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Temperature → top-k → renormalise → smallest set with cumulative ≥ top_p → renormalise, in float64."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    cumulative = np.cumsum(p[order])
    p[order[1:][cumulative[:-1] >= top_p]] = 0
    return p / p.sum()


def draw(sampler, logits: np.ndarray, temperature: float, top_k: int, top_p: float, uniform: np.ndarray) -> np.ndarray:
    batch, rows = uniform.shape
    return sampler(
        np.broadcast_to(logits, (batch, rows, logits.shape[-1])).copy(),
        np.full(batch, temperature, np.float32),
        np.full(batch, top_k, np.int64),
        np.full(batch, top_p, np.float32),
        uniform.astype(np.float32),
    )


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 3, 1.0), (1.0, 0, 0.8), (0.9, 5, 0.7), (2.0, 1, 1.0), (1.0, 0, 0.01)],
)
def test_draws_follow_the_target_distribution(sampler, temperature: float, top_k: int, top_p: float) -> None:
    uniform = np.random.default_rng(11).random((100, DRAWS // 100), np.float32)
    drawn = draw(sampler, EIGHT, temperature, top_k, top_p, uniform)
    expected = expected_distribution(EIGHT, temperature, top_k, top_p)
    counts = np.bincount(drawn.ravel(), minlength=8)
    assert counts[expected == 0].sum() == 0
    reachable = expected > 0
    if reachable.sum() > 1:
        result = stats.chisquare(counts[reachable], DRAWS * expected[reachable])
        assert result.pvalue > 1e-3


def test_temperature_zero_is_greedy_next_to_a_sampled_row(sampler) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 50, 37)).astype(np.float32)
    drawn = sampler(
        logits, np.float32([0, 1]), np.int64([0, 0]), np.float32([1, 1]), np.full((2, 50), 0.999, np.float32)
    )
    assert (drawn[0] == logits[0].argmax(-1)).all()
    assert (drawn[1] != logits[1].argmax(-1)).any()


def test_a_row_draws_the_same_whatever_its_neighbours_ask_for(sampler) -> None:
    rng = np.random.default_rng(3)
    logits, uniform = rng.normal(size=(3, 20, 37)).astype(np.float32), rng.random((3, 20), np.float32)
    settings = np.float32([1.0, 0.8, 0.0]), np.int64([0, 4, 0]), np.float32([1.0, 0.9, 1.0])
    together = sampler(logits, *settings, uniform)
    for row in range(3):
        alone = sampler(logits[row : row + 1], *(s[row : row + 1] for s in settings), uniform[row : row + 1])
        assert (together[row] == alone[0]).all()


def test_filters_are_exact_over_a_large_vocabulary(sampler) -> None:
    """20,001 entries take the two-stage path of the branchless form: every top-k set must be the true one."""
    logits = np.random.default_rng(5).normal(size=20_001).astype(np.float32) * 3
    uniform = np.random.default_rng(6).random((4, 200), np.float32)
    drawn = draw(sampler, logits, 1.0, 40, 1.0, uniform)
    best = set(np.argsort(-logits)[:40].tolist())
    assert set(drawn.ravel().tolist()) <= best
    expected = expected_distribution(logits, 1.0, 40, 1.0)
    order = np.argsort(-logits)
    cumulative = np.cumsum(expected[order])
    by_hand = order[np.searchsorted(cumulative, uniform.astype(np.float64), side="right")]
    assert (by_hand == drawn).mean() > 0.99  # float32 sums move a boundary now and then


def test_banned_tokens_are_never_drawn(sampler) -> None:
    logits = EIGHT.copy()
    logits[5] = -np.inf
    uniform = np.random.default_rng(1).random((10, 1000), np.float32)
    uniform[0, :2] = 0.0, np.nextafter(np.float32(1), np.float32(0))
    for settings in ((1.0, 0, 1.0), (1.0, 8, 1.0), (1.0, 0, 0.999), (0.0, 0, 1.0)):
        assert 5 not in draw(sampler, logits, *settings, uniform)
