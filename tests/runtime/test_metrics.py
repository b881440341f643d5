"""Times as vLLM defines them."""

from __future__ import annotations

import numpy as np
import pytest
from edgert.metrics import RequestMetrics, Usage, percentile
from hypothesis import given
from hypothesis import strategies as st


def metrics(token_s: tuple[float, ...], admitted_s: float | None = 2.0, finished_s: float = 10.0) -> RequestMetrics:
    return RequestMetrics("chat", 1.0, admitted_s, token_s, finished_s, Usage(5, len(token_s)))


def test_definitions() -> None:
    got = metrics((4.0, 5.0, 7.0, 10.0))
    assert got.ttft_ms == 3000
    assert got.tpot_ms == (got.latency_ms - 3000) / 3
    assert got.itl_ms == (1000, 2000, 3000)
    assert (got.queue_ms, got.prefill_ms, got.decode_ms) == (1000, 2000, 6000)
    assert got.usage.total_tokens == 9
    assert got.to_json()["itl_ms"] == {"p50": 2000, "p90": 2800, "p99": 2980}


def test_what_never_happened_is_none_and_not_zero() -> None:
    one = metrics((4.0,))
    assert (one.ttft_ms, one.tpot_ms, one.to_json()["itl_ms"]) == (3000, None, None)
    never = metrics((), admitted_s=None)
    assert (never.ttft_ms, never.tpot_ms, never.queue_ms, never.prefill_ms, never.decode_ms) == (None, None, 9000, 0, 0)
    assert metrics(()).prefill_ms == 8000


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(float(np.percentile(values, share)), abs=1e-6)
