"""Profile shapes follow from cells, for every cell."""

from __future__ import annotations

import pytest
from edgebuild.engine.shapes import EngineShape, engine_shape, input_shapes
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
