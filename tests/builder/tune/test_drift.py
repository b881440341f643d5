"""Drift: each request against itself, first fifth against last fifth; what cannot be told is no drift."""

from __future__ import annotations

from typing import Any

import pytest
from edgebuild.tune.drift import drift_of, verdict_of
from hypothesis import given
from hypothesis import strategies as st


def sample(at: float, request: int, ttft: float, memory: int | None = 1000) -> dict[str, Any]:
    return {"at_s": at, "request": request, "ttft_ms": ttft, "tpot_ms": ttft / 10, "memory_bytes": memory}


@given(st.floats(0, 3), st.randoms())
def test_requests_of_different_lengths_are_compared_with_themselves(growth: float, random: Any) -> None:
    order = list(range(100))
    random.shuffle(order)  # which request runs when is luck; each is as slow as it is long
    samples = [
        sample(at, request % 5, 10.0 ** (request % 5) * (1 + (growth if at >= 50 else 0)))
        for at, request in enumerate(order)
    ]
    drift = drift_of(samples, 99.0, 0.05)
    if drift.ttft is not None:
        assert drift.ttft == pytest.approx(growth, abs=1e-9)
        if abs(growth - 0.05) > 1e-6:  # rounding decides at the edge
            assert verdict_of(drift)[0] is (growth <= 0.05)


def test_memory_that_grows_is_drift_and_memory_that_shrinks_is_none() -> None:
    grows = [sample(at, at % 4, 10.0, 1000 + at) for at in range(101)]
    held, reason = verdict_of(drift_of(grows, 100.0, 0.05))
    assert not held
    assert "memory +7.8%: 5% is allowed" in reason
    assert verdict_of(drift_of(grows[::-1], 100.0, 0.05))[0] is False  # time orders them, not the list
    shrinks = [sample(at, at % 4, 10.0, 1000 - at) for at in range(101)]
    assert verdict_of(drift_of(shrinks, 100.0, 0.05))[0]


@pytest.mark.parametrize("samples", [[], [sample(1, 0, 5.0, None)], [sample(1, 0, 5.0), sample(99, 1, 50.0)]])
def test_what_cannot_be_told_is_said_and_does_not_count(samples: list[dict[str, Any]]) -> None:
    drift = drift_of(samples, 100.0, 0.05)
    assert (drift.ttft, drift.tpot) == (None, None)
    held, reason = verdict_of(drift)
    assert held
    assert "too short to tell" in reason
