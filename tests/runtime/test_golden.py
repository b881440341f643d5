"""What counts as equal to a golden vector, and what does not."""

from __future__ import annotations

import numpy as np
import pytest
from edgert.errors import ArtifactError, GoldenMismatch
from edgert.golden import Golden, GoldenCase, GoldenStep, check_golden, compare_logits
from fakes import VOCABULARY, FakeBackend, make_cells, toy_logits

ROW = np.array([0.5, 3.0, 2.0, -1.0], np.float32)
STEP = GoldenStep(7, 3, (1, 2), (0, 1, 2, 3), tuple(float(value) for value in ROW), float(np.linalg.norm(ROW)))


def test_equal_logits_have_no_error_and_small_ones_pass() -> None:
    assert compare_logits(ROW, STEP, 1e-3) == (0.0, None)
    assert compare_logits(ROW * np.float32(1.0005), STEP, 1e-3)[1] is None


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (ROW * np.float32(1.01), "relative error 0.01"),
        (np.array([np.nan, 3, 2, -1], np.float32), "not finite"),
        (ROW[:3], "past the 3 logits"),
        (np.append(ROW, np.float32(2.9)), "norm"),
    ],
)
def test_wrong_logits_say_what_is_wrong(logits: np.ndarray, message: str) -> None:
    error, wrong = compare_logits(logits, STEP, 1e-3)
    assert wrong is not None
    assert message in wrong
    assert error >= 0


def test_the_most_likely_token_must_agree_unless_the_reference_has_a_tie() -> None:
    other = ROW.copy()
    other[[1, 2]] = other[[2, 1]]
    assert compare_logits(other, STEP, 0.45)[1] is None  # two best closer than the tolerance: a tie
    part = GoldenStep(7, 3, (1, 2), (0, 3), (0.5, -1.0), STEP.norm)
    assert "most likely token is 2" in str(compare_logits(other, part, 0.01)[1])


def fake_golden(prompt: list[int], tokens: int) -> Golden:
    steps, ids = [], list(prompt)
    for _ in range(tokens):
        row = toy_logits(np.array(ids))
        top = np.argsort(-row)[:5]
        values = tuple(float(value) for value in row)
        steps.append(
            GoldenStep(ids[-1], len(ids) - 1, tuple(top.tolist()), tuple(range(VOCABULARY)), values,
                       float(np.linalg.norm(row)))
        )  # fmt: skip
        ids.append(int(top[1]))  # teacher forcing: not what the model would choose
    return Golden(1e-5, (GoldenCase(tuple(prompt), tuple(steps)),))


def test_the_check_runs_through_the_artifacts_own_chunks_and_cells() -> None:
    cells = make_cells(128, chunks=(4, 16))
    backend = FakeBackend(cells, 4, 160)
    report = check_golden(backend, fake_golden([5] * 37, 6), cells=cells, slots=4, context_tokens=128)
    assert (report.steps, report.worst_error) == (6, 0.0)
    labels = [launch.step.cell.query_rows for launch in backend.launches]
    assert labels == [16, 16, 16, 1, 1, 1, 1, 1]
    assert backend.resets == [0, 0]


def test_a_backend_that_computes_something_else_is_refused() -> None:
    cells = make_cells(128, chunks=(4, 16))
    backend = FakeBackend(cells, 4, 160)
    golden = fake_golden([5] * 37, 6)
    wrong = Golden(golden.tolerance, (GoldenCase((6,) * 37, golden.cases[0].steps),))
    with pytest.raises(GoldenMismatch, match=r"case 0, step 0 \(position 36\)"):
        check_golden(backend, wrong, cells=cells, slots=4, context_tokens=128)


def test_cases_past_the_context_are_cut_and_none_left_is_an_error() -> None:
    cells = make_cells(128, chunks=(4, 16))
    backend = FakeBackend(cells, 4, 160)
    golden = fake_golden([5] * 37, 6)
    assert check_golden(backend, golden, cells=cells, slots=4, context_tokens=39).steps == 3
    with pytest.raises(ArtifactError, match="no case fits a context of 36"):
        check_golden(backend, golden, cells=cells, slots=4, context_tokens=36)
