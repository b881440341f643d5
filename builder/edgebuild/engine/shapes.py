"""The shape that each cell gives to each graph input: pure arithmetic, no TensorRT.

One cell = one optimization profile with min = opt = max, so that the compiler specialises every kernel. A cell of one
query row and batch 1 is built with two rows: TensorRT stores the weights a second time for one-row matrix products
(measured: 21.4 MB + 11.5 MB on a 19.2 MB model), and a second row costs no time where bytes dominate. The runtime
reads the rows of a profile back from the engine and pads with an invalid row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgert.cells import Cell

from edgebuild.errors import EngineError

# graph input -> its symbolic dimensions; every other input is a state: [batch, fixed ...]
INPUT_DIMS: Mapping[str, tuple[str, ...]] = {
    "tokens": ("batch", "rows"),
    "length": ("batch",),
    "valid": ("batch",),
    "forced": ("batch",),
    "kv_positions": ("tier",),
    "uniform": ("batch", "logit_rows"),
    "temperature": ("batch",),
    "top_k": ("batch",),
    "top_p": ("batch",),
}
MIN_MATRIX_ROWS = 2


@dataclass(frozen=True)
class EngineShape:
    """What an optimization profile is built for; `rows` and `logit_rows` are per sequence."""

    batch: int
    rows: int
    logit_rows: int
    tier: int

    def dim(self, symbol: str) -> int:
        """The size of one symbolic dimension: batch, rows, logit_rows or tier."""
        return int(getattr(self, symbol))


def engine_shape(cell: Cell, *, min_matrix_rows: int = MIN_MATRIX_ROWS) -> EngineShape:
    """The profile of a cell. `min_matrix_rows` is the fewest rows (batch × rows) a matrix product may have."""
    rows = max(cell.query_rows, -(-min_matrix_rows // cell.batch))
    logit_rows = 1 if cell.kind == "prefill" else rows
    return EngineShape(batch=cell.batch, rows=rows, logit_rows=logit_rows, tier=max(cell.kv_tier, rows))


def input_shapes(shape: EngineShape, declared: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Concrete shapes of every graph input. `declared` holds the network's own shapes, −1 where dynamic.

    Raises EngineError when the network lacks an input, has one of another rank, or a state has a dynamic dimension
    other than the batch.
    """
    missing = [name for name in ("tokens", "length", "kv_positions") if name not in declared]
    if missing:
        raise EngineError(
            f"the ONNX graph has no input named {', '.join(missing)} (it has {', '.join(declared)})",
            hint="export the decoder with this version of edgebuild",
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for name, dims in declared.items():
        if name in INPUT_DIMS:
            symbols = INPUT_DIMS[name]
            if len(symbols) != len(dims):
                raise EngineError(f"graph input {name} has {len(dims)} dimensions, expected {list(symbols)}")
            wanted = tuple(shape.dim(symbol) for symbol in symbols)
        else:
            wanted = (shape.batch, *(int(dim) for dim in dims[1:]))
        for axis, (have, want) in enumerate(zip(dims, wanted, strict=True)):
            if want < 0:
                raise EngineError(f"state {name}{list(dims)}: dimension {axis} is dynamic; only the batch may be")
            if have not in (-1, want):
                raise EngineError(f"graph input {name}{list(dims)}: dimension {axis} is {have}, the cell needs {want}")
        shapes[name] = wanted
    return shapes
