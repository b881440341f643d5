"""Where each small tensor of a step lies in the two blocks that travel between host and device.

Everything that a step takes from the host is one block, everything it returns is another, so that a step has one
transfer each way. Tensors begin at multiples of 256 bytes, which TensorRT asks of a binding. Pure arithmetic on numpy
views: no CUDA, no TensorRT.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgert.backends.base import StepInputs, StepOutputs
from edgert.cells import Cell

ALIGNMENT = 256
TOKEN_BYTES = 8  # int64


@dataclass(frozen=True)
class Field:
    """One tensor in a block."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def view(self, block: npt.NDArray[np.uint8]) -> npt.NDArray[np.generic]:
        return block[self.offset : self.offset + self.size].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Block:
    """Fields in order, each aligned; `size` is the whole."""

    fields: tuple[Field, ...]
    size: int

    def __getitem__(self, name: str) -> Field:
        return next(field for field in self.fields if field.name == name)

    def views(self, block: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.generic]]:
        return {field.name: field.view(block) for field in self.fields}


@dataclass(frozen=True)
class StepLayout:
    """The blocks of one cell as the engine was built: `rows` and `logit_rows` may exceed what the cell uses."""

    batch: int
    rows: int
    logit_rows: int
    inputs: Block
    outputs: Block

    def draft_fields(self, count: int) -> tuple[Field, ...]:
        """Where the first `count` drafts of each row lie in the outputs."""
        return tuple(self.outputs[f"draft.{place}"] for place in range(count))

    @property
    def draft_pitch(self) -> int:
        """Bytes from the field of one draft to that of the next, where there is one."""
        return _aligned(self.outputs["draft.0"].size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _block(*tensors: tuple[str, str, tuple[int, ...]]) -> Block:
    fields, offset = [], 0
    for name, dtype, shape in tensors:
        field = Field(name, dtype, shape, offset)
        fields.append(field)
        offset += _aligned(field.size)
    return Block(tuple(fields), offset)


def step_layout(batch: int, rows: int, logit_rows: int, *, draft_length: int = 0) -> StepLayout:
    """`first_tokens` and `given_drafts` are no tensors of the engine: that is where the host puts the tokens and the
    drafts that the device does not hold.

    `draft.j` is what the drafter's pass j writes.
    """
    one = (batch,)
    return StepLayout(
        batch,
        rows,
        logit_rows,
        inputs=_block(
            ("tokens", "int64", (batch, rows)),
            ("length", "int64", one),
            ("valid", "int64", one),
            ("forced", "int64", one),
            ("uniform", "float32", (batch, logit_rows)),
            ("temperature", "float32", one),
            ("top_k", "int64", one),
            ("top_p", "float32", one),
            ("first_tokens", "int64", one),
            ("given_drafts", "int64", (draft_length, batch)),
            ("following", "int64", one),
        ),
        outputs=_block(
            ("next_token", "int64", one),
            ("new_length", "int64", one),
            ("accepted", "int64", one),
            ("sampled", "int64", (batch, logit_rows)),
            *((f"draft.{place}", "int64", one) for place in range(draft_length)),
        ),
    )


def write_inputs(views: dict[str, npt.NDArray[np.generic]], step: StepInputs) -> None:
    """A step into an input block; what lies past the cell's own rows stays 0 and is not valid."""
    rows, logit_rows = step.cell.query_rows, step.cell.logit_rows
    views["tokens"][:, :rows] = step.tokens
    views["length"][:] = step.length
    views["valid"][:] = step.valid
    views["forced"][:] = step.forced
    views["uniform"][:, :logit_rows] = step.uniform
    views["temperature"][:] = step.temperature
    views["top_k"][:] = step.top_k
    views["top_p"][:] = step.top_p
    views["first_tokens"][:] = step.tokens[:, 0]
    given = views["given_drafts"]
    count = min(len(given), rows - 1)
    given[:count] = step.tokens[:, 1 : 1 + count].T
    views["following"][:] = -1 if step.following is None else step.following


def read_outputs(
    views: dict[str, npt.NDArray[np.generic]], cell: Cell, logits: npt.NDArray[np.float32] | None, *, drafts: int = 0
) -> StepOutputs:
    """Copies a step's outputs out of an output block (the block is used again). drafts: how many were asked for."""
    return StepOutputs(
        sampled=views["sampled"][:, : cell.logit_rows].astype(np.int64),
        accepted=views["accepted"].astype(np.int64),
        next_token=views["next_token"].astype(np.int64),
        logits=None if logits is None else logits[:, : cell.logit_rows].copy(),
        drafts=np.stack([views[f"draft.{place}"] for place in range(drafts)], axis=1).astype(np.int64)
        if drafts
        else None,
    )
