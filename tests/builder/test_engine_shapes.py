"""Profile shapes follow from cells, for every cell."""

from __future__ import annotations

import pytest
from edgebuild.engine.shapes import DRAFTER_NEEDS, EngineShape, draft_shapes, engine_shape, input_shapes
from edgebuild.errors import EngineError
from edgert.cells import Cell
from hypothesis import given
from hypothesis import strategies as st

DECLARED = {
    "tokens": (-1, -1),
    "length": (-1,),
    "valid": (-1,),
    "forced": (-1,),
    "kv_positions": (-1,),
    "uniform": (-1, -1),
    "temperature": (-1,),
    "key.0": (-1, 3, 2176, 64),
}


@given(batch=st.integers(1, 8), rows=st.integers(1, 32), tier=st.integers(32, 4096))
def test_a_decode_profile_serves_its_cell_and_no_matrix_product_has_one_row(batch: int, rows: int, tier: int) -> None:
    shape = engine_shape(Cell("decode", batch, rows, tier))
    assert shape.batch == batch
    assert shape.tier == tier
    assert shape.rows >= rows
    assert shape.logit_rows == shape.rows
    assert shape.batch * shape.rows >= 2
    if batch * rows >= 2:
        assert shape.rows == rows


@given(rows=st.integers(2, 512), tier=st.integers(512, 4096))
def test_a_prefill_profile_has_exactly_its_chunk_and_one_row_of_logits(rows: int, tier: int) -> None:
    assert engine_shape(Cell("prefill", 1, rows, tier)) == EngineShape(1, rows, 1, tier)


def test_every_input_gets_a_concrete_shape_with_fixed_cache_dimensions() -> None:
    shapes = input_shapes(EngineShape(batch=2, rows=4, logit_rows=4, tier=512), DECLARED)
    assert shapes == {
        "tokens": (2, 4),
        "length": (2,),
        "valid": (2,),
        "forced": (2,),
        "kv_positions": (512,),
        "uniform": (2, 4),
        "temperature": (2,),
        "key.0": (2, 3, 2176, 64),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key.0": (-1, 3, -1, 64)}, "dimension 2 is dynamic"),
        ({"tokens": (-1,)}, "1 dimensions"),
        ({"tokens": (-1, 7)}, "dimension 1 is 7, the cell needs 4"),
    ],
)
def test_a_graph_that_does_not_fit_the_cell_is_refused(change: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        input_shapes(EngineShape(batch=2, rows=4, logit_rows=4, tier=512), {**DECLARED, **change})


def test_a_graph_without_tokens_is_refused() -> None:
    with pytest.raises(EngineError, match="no input named tokens"):
        input_shapes(EngineShape(1, 2, 2, 64), {"length": (-1,), "kv_positions": (-1,)})


@given(
    cells=st.lists(
        st.one_of(
            st.builds(Cell, st.just("decode"), st.sampled_from([1, 2, 4]), st.integers(1, 6), st.integers(16, 512)),
            st.builds(Cell, st.just("prefill"), st.just(1), st.integers(1, 16), st.integers(16, 512)),
        ),
        min_size=1,
        unique=True,
    ),
    draft_length=st.integers(1, 6),
    cache_tokens=st.integers(16, 600),
)
def test_every_cell_finds_the_passes_that_follow_it(cells: list[Cell], draft_length: int, cache_tokens: int) -> None:
    shapes = draft_shapes(cells, draft_length=draft_length, cache_tokens=cache_tokens)
    assert len(set(shapes)) == len(shapes)
    for cell in cells:
        decoder = engine_shape(cell)
        reach = min(decoder.tier + draft_length, cache_tokens)
        same = [shape for shape in shapes if shape.batch == cell.batch and shape.tier >= reach]
        assert any(shape.rows == decoder.rows for shape in same), "the decoder's rows, in place"
        if draft_length > 1:  # a pass leaves one row a sequence: padding would tear several apart
            assert any(shape.rows == (2 if cell.batch == 1 else 1) for shape in same)


def test_a_drafters_inputs_take_their_width_from_the_graph() -> None:
    declared = {"embedding": (-1, -1, 64), "hidden": (-1, -1, 128), "length": (-1,), "new_length": (-1,),
                "kv_positions": (-1,), "mtp.key.0": (-1, 2, 96, 32)}  # fmt: skip
    shape = EngineShape(batch=2, rows=5, logit_rows=1, tier=70)
    assert input_shapes(shape, declared, DRAFTER_NEEDS) == {
        "embedding": (2, 5, 64), "hidden": (2, 5, 128), "length": (2,), "new_length": (2,), "kv_positions": (70,),
        "mtp.key.0": (2, 2, 96, 32),
    }  # fmt: skip
    del declared["new_length"]
    with pytest.raises(EngineError, match="no input named new_length"):
        input_shapes(shape, declared, DRAFTER_NEEDS)
