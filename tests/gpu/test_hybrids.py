"""Qwen hybrids as TensorRT-RTX engines in float16 on a real GPU: numbers, recurrent state, rollback, captured graphs.

Logits and states are compared with the torch module in float32 (which tests/models compare with Transformers). Of two
experts whose router logits are nearly equal float16 may take the other; a row so touched is off by up to 0.1, and
so are rows after it, through the convolutions' windows and the states. `explain` finds out which were taken.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("tensorrt_rtx", reason="the rtx extra is not installed")
pytest.importorskip("polygraphy", reason="the rtx extra is not installed")

import torch
import toys
from edgebuild.checkpoint import open_checkpoint
from edgebuild.engine.tensorrt import build_engine
from edgebuild.export import FORMS, export_decoder
from edgebuild.golden import TOLERANCE, make_golden
from edgebuild.models import load_decoder
from edgebuild.models.config import ModelConfig
from edgebuild.models.moe import SparseMlp
from edgert import cuda
from edgert.backends.base import Setup, StepInputs, StepOutputs
from edgert.backends.tensorrt import TensorRTBackend
from edgert.cells import Cell
from edgert.golden import check_golden, load_golden
from edgert.manifest_records import StateSpec
from edgert.step import empty_step

pytestmark = pytest.mark.gpu
CACHE, CONTEXT, SLOTS, VOCABULARY = 448, 256, 4, 300
SMALL, LARGE = Cell("prefill", 1, 16, 256), Cell("prefill", 1, 160, 256)  # within the tail; blocks of 64 and a tail
ONE, DRAFTS, BATCH = Cell("decode", 1, 1, 256), Cell("decode", 1, 4, 256), Cell("decode", 4, 4, 256)
CELLS = (SMALL, LARGE, ONE, DRAFTS, BATCH)
LIMIT = TOLERANCE["float16"]
# of router logits: they reach 20, where float16 has steps of 0.016, and torch's float16 has them up to 0.06 off
NEAR = 0.1
ROUNDS = 3  # one row's swaps: it may have one a layer
REACH = 9  # rows over which three convolutions of 4 carry a row's expert on at full strength
# a slot's state must be a multiple of the device's alignment; experts enough that a step of a few rows gathers
# blocks add little to the embedding: float16 itself is else up to 1.6e-2 from float32 on a toy
SIZES = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 64, "key_dim": 32, "value_dim": 32, "spread": 0.05,
         "embedding_spread": 0.5}  # fmt: skip
EXPERTS = {"num_experts": 24, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "router_spread": 0.6}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_5": (toys.make_qwen3_5, {"ffn": 256}),
    "qwen3_5_moe": (toys.make_qwen3_5_moe, EXPERTS),
    "qwen3_next": (toys.make_qwen3_next, {"ffn": 256, "mlp_only_layers": [1], **EXPERTS}),
}
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Swap:
    """One expert of a row taken in place of another whose router logit is higher by less than NEAR."""

    router: int
    row: int
    left: int
    taken: int


class Reference:
    """The float32 module, with or without swaps."""

    def __init__(self, checkpoint: Any) -> None:
        self.decoder = load_decoder(checkpoint, cache_tokens=CACHE)
        self._routers = [layer.mlp for layer in self.decoder.layers if isinstance(layer.mlp, SparseMlp)]
        self._swaps: Sequence[Swap] = ()
        self.router_logits: dict[int, torch.Tensor] = {}  # of the last run, before its swaps
        for number, router in enumerate(self._routers):
            router.gate.register_forward_hook(self._hook(number))

    def _hook(self, number: int) -> Callable[[Any, Any, torch.Tensor], torch.Tensor]:
        def swap(_module: Any, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
            self.router_logits[number] = logits
            changed = logits.clone()
            for each in self._swaps:
                if each.router == number:
                    changed[each.row, each.left] = logits[each.row, each.taken] - 1e-3
            return changed

        return swap

    def run(self, ids: Sequence[int], swaps: Sequence[Swap] = ()) -> tuple[Floats, dict[str, Floats]]:
        """Logits after every token [n, V], and every state after the last."""
        decoder, self._swaps = self.decoder, swaps
        with torch.no_grad():
            start = torch.zeros(1, dtype=torch.int64)
            hidden, kept = decoder.backbone(
                torch.tensor([list(ids)]), start, torch.arange(CACHE), decoder.empty_states(1)
            )
            logits = decoder.head(hidden)[:, :VOCABULARY].float().numpy()
            after = decoder.commit(kept, start)
        names = [state.name for state in decoder.states()]
        return logits, {name: state[0].float().numpy() for name, state in zip(names, after, strict=True)}

    def near(self, rows: range) -> list[Swap]:
        """Swaps that rounding may make in these rows of the last run."""
        found = []
        for number, router in enumerate(self._routers):
            for row in rows:
                logits = self.router_logits[number][row]
                order = logits.argsort(descending=True).tolist()
                for left, taken in itertools.product(order[: router.top_k], order[router.top_k :]):
                    if float(logits[left] - logits[taken]) < NEAR:
                        found.append(Swap(number, row, left, taken))
        return found


def explain(
    reference: Reference, ids: Sequence[int], first: int, rows: Sequence[Floats]
) -> tuple[list[float], list[Swap], dict[str, Floats]]:
    """Errors of rows first, first + 1, ... against the reference with the swaps that bring each within LIMIT, those
    swaps, and the states after all `ids`.

    A row within LIMIT of the reference so far adds none. Else those that are near in it and in REACH rows before it are
    tried, and the best one is kept, up to ROUNDS times. What they do to later rows the reference computes: no row is
    excused.
    """
    swaps: list[Swap] = []
    errors = []
    logits, after = reference.run(ids)
    for row, actual in enumerate(rows, first):
        error = relative(actual, logits[row])
        for _ in range(ROUNDS):
            if error <= LIMIT:
                break
            tried = [
                (relative(actual, reference.run(ids, [*swaps, swap])[0][row]), swap)
                for swap in reference.near(range(max(0, row - REACH), row + 1))
                if swap not in swaps
            ]
            best, chosen = min(tried, key=lambda each: each[0], default=(error, None))
            if chosen is None or best >= error:
                reference.run(ids, swaps)
                break
            error = best
            swaps.append(chosen)
            logits, after = reference.run(ids, swaps)
        errors.append(error)
    return errors, swaps, after


@dataclass(frozen=True)
class Hybrid:
    """An engine of one family beside its reference."""

    artifact: Path
    checkpoint: Any
    states: tuple[StateSpec, ...]

    def reference(self, ids: Sequence[int]) -> tuple[Floats, dict[str, Floats]]:
        """Logits after every token [n, V], and every state after the last, in float32."""
        return Reference(self.checkpoint).run(ids)

    def open(self, **options: Any) -> TensorRTBackend:
        """Warm; the caller closes it."""
        backend = TensorRTBackend(
            Setup(self.artifact, CELLS, SLOTS, CACHE, VOCABULARY, self.states, {"flavour": "tensorrt-rtx", **options})
        )
        backend.warm_up()
        return backend


def make_hybrid(directory: Path, family: str) -> Hybrid:
    """Checkpoint → ONNX in float16 → engine with the cells above."""
    make, options = FAMILIES[family]
    make(directory / "checkpoint", **SIZES, **options)
    checkpoint = open_checkpoint(directory / "checkpoint")
    artifact = directory / "artifact"
    artifact.mkdir()
    graph = export_decoder(
        ModelConfig.from_hf(checkpoint.config), checkpoint, artifact, cache_tokens=CACHE, token_limit=VOCABULARY,
        precision="float16", forms=FORMS["tensorrt-rtx"],
    )  # fmt: skip
    build_engine(graph.path, artifact / "decoder.plan", CELLS)
    states = tuple(StateSpec(s.name, s.name + ".out", s.dtype, s.kind, s.shape) for s in graph.states)
    return Hybrid(artifact, checkpoint, states)


@pytest.fixture(scope="module", params=FAMILIES)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return make_hybrid(tmp_path_factory.mktemp("hybrid"), request.param)


@pytest.fixture(scope="module")
def backend(hybrid: Hybrid) -> Iterator[TensorRTBackend]:
    opened = hybrid.open()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return [int(i) for i in np.random.default_rng(3).integers(3, VOCABULARY, 240)]


def relative(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    difference = np.linalg.norm(actual.astype(np.float64) - expected.astype(np.float64))
    return float(difference / max(float(np.linalg.norm(expected.astype(np.float64))), 1e-30))


def prefill(backend: TensorRTBackend, ids: Sequence[int], chunks: Sequence[int], cell: Cell, slot: int = 0) -> Floats:
    """A prompt in chunks of these sizes (the last as often as needed), each padded to the cell; the last logits."""
    backend.reset_slot(slot)
    position, place, outputs = 0, 0, None
    while position < len(ids):
        count = min(chunks[min(place, len(chunks) - 1)], len(ids) - position)
        step = empty_step(cell, slot)
        step.tokens[0, :count] = ids[position : position + count]
        step.length[0] = position
        step.valid[0] = step.forced[0] = count
        outputs = backend.launch(replace(step, want_logits=True)).result()
        position, place = position + count, place + 1
    assert outputs is not None
    assert outputs.logits is not None
    return outputs.logits[0, 0].copy()


def rows_step(cell: Cell, rows: dict[int, tuple[int, Sequence[int]]]) -> StepInputs:
    """Batch row → (length, token and drafts); rows that are left out are idle."""
    step = empty_step(cell, 0)
    for row, (length, tokens) in rows.items():
        step.tokens[row, : len(tokens)] = tokens
        step.length[row] = length
        step.valid[row], step.forced[row] = len(tokens), 1
    return replace(step, want_logits=True)


def launch(backend: TensorRTBackend, cell: Cell, rows: dict[int, tuple[int, Sequence[int]]]) -> StepOutputs:
    return backend.launch(rows_step(cell, rows)).result()


def state(backend: TensorRTBackend, hybrid: Hybrid, slot: int) -> dict[str, npt.NDArray[Any]]:
    """What the device holds of a slot, caches aside."""
    read = {}
    for spec in hybrid.states:
        if spec.kind == "kv":
            continue
        memory, dtype = backend._states._memory[spec.input], np.dtype(spec.dtype)
        size = int(np.prod(spec.shape)) * dtype.itemsize
        pinned = cuda.PinnedMemory(size)
        backend._stream.copy(pinned.address, memory.address + slot * size, size, cuda.TO_HOST)
        backend._stream.synchronize()
        read[spec.input] = pinned.bytes[:size].view(dtype).reshape(spec.shape).copy()
        pinned.free()
    return read


def check_state(actual: dict[str, npt.NDArray[Any]], expected: dict[str, Any], limit: float = LIMIT) -> None:
    for name, value in actual.items():
        assert relative(value, expected[name]) <= limit, name


def test_golden_vectors_pass_and_every_cell_is_captured(hybrid: Hybrid, backend: TensorRTBackend) -> None:
    golden = make_golden(hybrid.checkpoint, precision="float16", chunk_sizes=(16, 160), context_tokens=CONTEXT)
    (hybrid.artifact / "golden.json").write_text(json.dumps(golden))

    class Model:
        vocabulary_size = token_limit = VOCABULARY

    recorded = load_golden(hybrid.artifact, Model())  # type: ignore[arg-type]
    check_golden(backend, recorded, cells=CELLS, slots=SLOTS, context_tokens=CONTEXT)
    assert backend.describe()["fallbacks"] == []
    assert backend.describe()["eager_launches"] == 0


@pytest.mark.parametrize(
    ("chunks", "cell"), [([16], SMALL), ([1, 2, 3], SMALL), ([160], LARGE), ([5, 70, 130], LARGE), ([97], LARGE)]
)
def test_prefill_in_chunks_gives_the_references_logits_and_state(
    hybrid: Hybrid, backend: TensorRTBackend, ids: list[int], chunks: list[int], cell: Cell
) -> None:
    """Boundaries inside the convolution's window, chunks of one to three blocks, padded tails."""
    logits, after = hybrid.reference(ids[:201])
    assert relative(prefill(backend, ids[:201], chunks, cell), logits[-1]) <= LIMIT
    check_state(state(backend, hybrid, 0), after)


def test_decode_step_by_step_equals_one_shot(hybrid: Hybrid, backend: TensorRTBackend, ids: list[int]) -> None:
    prefill(backend, ids[:100], [16], SMALL)
    rows = []
    for position in range(100, 200):
        outputs = launch(backend, ONE, {0: (position, [ids[position]])})
        assert outputs.logits is not None
        rows.append(outputs.logits[0, 0].copy())
    errors, swaps, after = explain(Reference(hybrid.checkpoint), ids[:200], 100, rows)
    print(f"largest error {max(errors):.1e}, {len(swaps)} nearly equal experts swapped: {swaps}")
    assert max(errors) <= LIMIT, sorted(errors)[-5:]
    assert len({swap.row for swap in swaps}) <= 0.1 * len(rows)  # without experts there are none to swap
    check_state(state(backend, hybrid, 0), after)


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_rejected_rows_leave_no_trace(hybrid: Hybrid, backend: TensorRTBackend, ids: list[int], right: int) -> None:
    """Four rows, of which the drafts after `right` are wrong; then a step without drafts."""
    prefill(backend, ids[:50], [16], SMALL, slot=1)
    tokens = [ids[50]]
    for place in range(5):
        outputs = backend.launch(replace(rows_step(ONE, {0: (50 + place, [tokens[-1]])}), first_slot=1)).result()
        tokens.append(int(outputs.next_token[0]))
    prefill(backend, ids[:50], [16], SMALL)
    drafts = [*tokens[1 : 1 + right], *((token + 1) % VOCABULARY for token in tokens[1 + right : 4])]
    outputs = launch(backend, DRAFTS, {0: (50, [tokens[0], *drafts])})
    assert int(outputs.accepted[0]) == right
    assert int(outputs.next_token[0]) == tokens[1 + right]
    committed = [*ids[:50], *tokens[: 1 + right]]
    logits, after = hybrid.reference([*committed, tokens[1 + right]])
    check_state(state(backend, hybrid, 0), hybrid.reference(committed)[1])
    last = launch(backend, ONE, {0: (len(committed), [tokens[1 + right]])})
    assert last.logits is not None
    assert relative(last.logits[0, 0], logits[-1]) <= LIMIT
    check_state(state(backend, hybrid, 0), after)


def test_sequences_share_a_batch_with_an_idle_slot(hybrid: Hybrid, backend: TensorRTBackend, ids: list[int]) -> None:
    """Three rows at work with different drafts, the third idle: each as the reference says, the idle one untouched."""
    prompts = {0: ids[:40], 1: ids[50:67], 2: ids[60:90], 3: ids[10:80]}
    for slot, prompt in prompts.items():
        prefill(backend, prompt, [16], SMALL, slot=slot)
    idle = state(backend, hybrid, 2)
    fed = {slot: list(prompt) for slot, prompt in prompts.items() if slot != 2}
    for step in range(4):
        rows = {slot: (len(done), [ids[100 + step], *ids[110 : 110 + slot]]) for slot, done in fed.items()}
        outputs = launch(backend, BATCH, rows)
        for slot, (_, tokens) in rows.items():
            fed[slot] += tokens[: 1 + int(outputs.accepted[slot])]
    for slot, done in fed.items():
        check_state(state(backend, hybrid, slot), hybrid.reference(done)[1])
    for name, value in state(backend, hybrid, 2).items():
        np.testing.assert_array_equal(value, idle[name])


def test_a_captured_step_equals_the_eager_one_bit_for_bit(hybrid: Hybrid, ids: list[int]) -> None:
    found: dict[bool, list[npt.NDArray[Any]]] = {}
    for graphs in (True, False):
        opened = hybrid.open(enable_cuda_graph=graphs)
        try:
            results = [prefill(opened, ids[:201], [160], LARGE)]
            for place in range(12):
                outputs = launch(opened, DRAFTS, {0: (201 + place, ids[201 + place : 203 + place])})
                assert outputs.logits is not None
                results.append(outputs.logits[0, : 1 + int(outputs.accepted[0])].copy())
            results += [value for _, value in sorted(state(opened, hybrid, 0).items())]
            assert (opened.describe()["eager_launches"] == 0) is graphs
        finally:
            opened.close()
        found[graphs] = results
    for captured, eager in zip(found[True], found[False], strict=True):
        np.testing.assert_array_equal(captured, eager)


@pytest.mark.parametrize("k", [1, 3])
def test_a_prompt_of_one_and_k_tokens_is_prefill(
    hybrid: Hybrid, backend: TensorRTBackend, ids: list[int], k: int
) -> None:
    logits, after = hybrid.reference(ids[: 1 + k])
    assert relative(prefill(backend, ids[: 1 + k], [16], SMALL), logits[-1]) <= LIMIT
    check_state(state(backend, hybrid, 0), after)
