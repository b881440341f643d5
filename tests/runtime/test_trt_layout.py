"""A step survives the way through a block, whatever its shape; a block never overlaps itself."""

from __future__ import annotations

import numpy as np
from edgert.backends.base import StepInputs
from edgert.backends.trt_layout import ALIGNMENT, read_outputs, step_layout, write_inputs
from edgert.cells import Cell
from hypothesis import given
from hypothesis import strategies as st

shapes = st.tuples(st.integers(1, 8), st.integers(1, 64), st.integers(1, 16))


@given(shapes)
def test_fields_are_aligned_and_apart(shape: tuple[int, int, int]) -> None:
    layout = step_layout(*shape)
    for block in (layout.inputs, layout.outputs):
        end = 0
        for field in block.fields:
            assert field.offset % ALIGNMENT == 0
            assert field.offset >= end
            end = field.offset + field.size
        assert end <= block.size


@given(batch=st.integers(1, 4), rows=st.integers(1, 6), padding=st.integers(0, 3), seed=st.integers(0, 2**32 - 1))
def test_a_step_is_written_whole_and_its_padding_stays_zero(batch: int, rows: int, padding: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    step = StepInputs(
        cell=Cell("decode", batch, rows, 64),
        first_slot=0,
        tokens=rng.integers(1, 1000, (batch, rows)),
        length=rng.integers(0, 50, batch),
        valid=rng.integers(0, rows + 1, batch),
        forced=rng.integers(0, 2, batch),
        from_device=np.zeros(batch, np.bool_),
        uniform=rng.random((batch, rows), np.float32),
        temperature=rng.random(batch, np.float32),
        top_k=rng.integers(0, 50, batch),
        top_p=rng.random(batch, np.float32),
    )
    layout = step_layout(batch, rows + padding, rows + padding)
    block = np.zeros(layout.inputs.size, np.uint8)
    views = layout.inputs.views(block)
    write_inputs(views, step)
    for name in ("length", "valid", "forced", "temperature", "top_k", "top_p"):
        np.testing.assert_array_equal(views[name], getattr(step, name))
    np.testing.assert_array_equal(views["tokens"][:, :rows], step.tokens)
    np.testing.assert_array_equal(views["first_tokens"], step.tokens[:, 0])
    assert not views["tokens"][:, rows:].any()
    assert not views["uniform"][:, rows:].any()


@given(batch=st.integers(1, 40), drafts=st.integers(1, 6))
def test_drafts_lie_a_constant_distance_apart_that_holds_a_row_of_them(batch: int, drafts: int) -> None:
    layout = step_layout(batch, 1 + drafts, 1 + drafts, draft_length=drafts)
    places = [field.offset for field in layout.draft_fields(drafts)]
    assert places == [places[0] + n * layout.draft_pitch for n in range(drafts)]
    assert layout.draft_pitch >= layout.outputs["draft.0"].size  # one draft alone is copied as a row, too


def test_outputs_are_cut_to_the_cell_and_do_not_change_when_the_block_is_used_again() -> None:
    layout = step_layout(2, 4, 4)
    block = np.zeros(layout.outputs.size, np.uint8)
    views = layout.outputs.views(block)
    views["sampled"][:] = np.arange(8).reshape(2, 4)
    views["next_token"][:] = [7, 9]
    outputs = read_outputs(views, Cell("decode", 2, 3, 64), np.ones((2, 4, 5), np.float32))
    block[:] = 255
    np.testing.assert_array_equal(outputs.sampled, [[0, 1, 2], [4, 5, 6]])
    np.testing.assert_array_equal(outputs.next_token, [7, 9])
    assert outputs.logits is not None
    assert outputs.logits.shape == (2, 3, 5)
