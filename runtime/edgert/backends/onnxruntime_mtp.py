"""The drafter of the ONNX Runtime backend: a second session that takes in what a step committed and drafts in a chain.

Knows the graph mtp.onnx (docs/architecture.md, "Drafting") and its own cache; nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgert.backends.base import Int64s, Setup
from edgert.errors import ArtifactError, BackendError
from edgert.manifest_records import MTP_INPUTS, MTP_OUTPUTS

MODEL_NAME, WEIGHTS_NAME = "mtp.onnx", "mtp.weights"

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class _Bound:
    """A shape at a first slot: buffers and the binding that holds their addresses."""

    inputs: dict[str, Array]
    outputs: dict[str, Array]
    binding: Any


class OnnxDrafter:
    """Rows of the decoder in, drafted tokens out. One cache row per slot, updated in place."""

    def __init__(self, setup: Setup, open_session: Callable[[Path], Any], states: dict[str, Array]) -> None:
        self._session: Any = open_session(setup.artifact / MODEL_NAME)
        self._setup = setup
        self._states = states
        self._width, self._embedding_width = self._check_graph()
        self._bound: dict[tuple[int, int, int, int], _Bound] = {}
        weights = setup.artifact / WEIGHTS_NAME
        self.weight_bytes = weights.stat().st_size if weights.exists() else 0

    @property
    def width(self) -> int:
        """Elements of a hidden row."""
        return self._width

    @property
    def embedding_width(self) -> int:
        return self._embedding_width

    @property
    def buffer_bytes(self) -> int:
        return sum(
            array.nbytes
            for bound in self._bound.values()
            for array in (*bound.inputs.values(), *bound.outputs.values())
        )

    def run(
        self,
        first_slot: int,
        hidden: Array,
        embedding: Array,
        length: Int64s,
        committed: Int64s,
        kv_tier: int,
        draft_length: int,
    ) -> Int64s | None:
        """One pass over the committed rows [B, q, H], then draft_length - 1 chained ones. Drafts [B, draft_length].

        length [B]: position of row 0; committed [B]: rows that count, 0 = idle. Rows that a former step's chain wrote
        at these positions are replaced by what the model's own hidden rows give.
        """
        batch, rows, _ = hidden.shape
        # chained rows lie past the step's own: the tier must reach them
        tier = min(kv_tier + self._setup.draft_length, self._setup.cache_tokens)
        bound = self._binding(first_slot, batch, rows, tier)
        bound.inputs["hidden"][...] = hidden
        bound.inputs["embedding"][...] = embedding
        bound.inputs["length"][...] = length
        bound.inputs["new_length"][...] = length + committed
        self._run(bound)
        if not draft_length:
            return None
        drafts = np.zeros((batch, draft_length), np.int64)
        drafts[:, 0] = bound.outputs["draft"]
        for place in range(1, draft_length):
            chained = self._binding(first_slot, batch, 1, tier)
            chained.inputs["hidden"][...] = bound.outputs["draft_hidden"]
            chained.inputs["embedding"][...] = bound.outputs["draft_embedding"]
            chained.inputs["length"][...] = bound.inputs["new_length"]  # before new_length: it may be the same buffer's
            chained.inputs["new_length"][...] = bound.outputs["next_length"]
            self._run(chained)
            drafts[:, place] = chained.outputs["draft"]
            bound = chained
        return drafts

    def _run(self, bound: _Bound) -> None:
        try:
            self._session.run_with_iobinding(bound.binding)
        except Exception as error:  # onnxruntime's exception classes are private to its extension module
            lines = str(error).splitlines() or [""]
            raise BackendError(f"drafting failed: {type(error).__name__}: {lines[0]}") from error

    def _binding(self, first: int, batch: int, rows: int, tier: int) -> _Bound:
        key = (first, batch, rows, tier)
        if key in self._bound:
            return self._bound[key]
        inputs: dict[str, Array] = {
            "embedding": np.zeros((batch, rows, self._embedding_width), np.float32),
            "hidden": np.zeros((batch, rows, self._width), np.float32),
            "length": np.zeros(batch, np.int64),
            "new_length": np.zeros(batch, np.int64),
            "kv_positions": np.arange(tier, dtype=np.int64),
        }
        outputs: dict[str, Array] = {
            "draft": np.zeros(batch, np.int64),
            "draft_embedding": np.zeros((batch, 1, self._embedding_width), np.float32),
            "draft_hidden": np.zeros((batch, 1, self._width), np.float32),
            "next_length": np.zeros(batch, np.int64),
        }
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for state in self._setup.draft_states:
            part = self._states[state.input][first : first + batch]
            binding.bind_input(state.input, "cpu", 0, part.dtype, part.shape, part.ctypes.data)
            binding.bind_output(state.output, "cpu", 0, part.dtype, part.shape, part.ctypes.data)
        self._bound[key] = _Bound(inputs, outputs, binding)
        return self._bound[key]

    def _check_graph(self) -> tuple[int, int]:
        """The session's inputs and outputs are those this module binds; the widths of a hidden row and an embedding."""
        states = self._setup.draft_states
        found = {value.name: value for value in self._session.get_inputs()}
        outputs = {value.name for value in self._session.get_outputs()}
        expected = {*MTP_INPUTS, *(state.input for state in states)}
        missing = {*MTP_OUTPUTS, *(state.output for state in states)} - outputs
        if found.keys() != expected or missing:
            wrong = sorted((found.keys() ^ expected) | missing)
            raise ArtifactError(f"{MODEL_NAME} does not match the manifest: {', '.join(wrong[:5])}")
        for state in states:
            if tuple(found[state.input].shape[1:]) != state.shape:
                shape = found[state.input].shape[1:]
                raise ArtifactError(f"{MODEL_NAME}: {state.input} is {shape}, the manifest says {list(state.shape)}")
        width, embedding = (found[name].shape[-1] for name in ("hidden", "embedding"))
        if not isinstance(width, int) or not isinstance(embedding, int) or width % embedding:
            raise ArtifactError(f"{MODEL_NAME}: hidden rows of width {width}, embeddings of width {embedding}")
        return width, embedding
