"""The TensorRT backend on a real GPU, on a toy: numbers against the float32 reference, graphs against eager."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx", reason="the rtx extra is not installed")
pytest.importorskip("polygraphy", reason="the rtx extra is not installed")

from edgebuild import golden
from edgebuild.export import Forms
from edgert import cuda
from edgert.backends import trt_cache
from edgert.backends.tensorrt import TensorRTBackend
from edgert.cells import Cell
from edgert.errors import ArtifactError, BackendError, GoldenMismatch
from edgert.golden import check_golden, load_golden
from gpu_toy import (
    CELLS,
    CONTEXT,
    FOUR,
    LARGE,
    ONE,
    SLOTS,
    SMALL,
    TWO,
    VOCABULARY,
    Toy,
    decode_step,
    generate,
    make_toy,
    prefill,
    relative,
)

pytestmark = pytest.mark.gpu
# of the toy's logits, whose activations are large: the torch module in float16 is itself up to 6e-3 off
TOLERANCE = golden.TOLERANCE["float16"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return [int(i) for i in np.random.default_rng(3).integers(3, VOCABULARY, 200)]


def check(toy: Toy, backend: Any) -> None:
    """Writes the toy's golden vectors and checks a backend against them, as loading an artifact does."""
    (toy.artifact / "golden.json").write_text(json.dumps(toy.golden()))

    class Model:
        vocabulary_size = token_limit = VOCABULARY

    recorded = load_golden(toy.artifact, Model())  # type: ignore[arg-type]
    check_golden(backend, recorded, cells=CELLS, slots=SLOTS, context_tokens=CONTEXT)


def test_teacher_forced_logits_agree_with_the_float32_reference(toy: Toy, ids: list[int]) -> None:
    reference = toy.reference(ids)
    with toy.backend() as backend:
        chunks = prefill(backend, ids[:100], logits=True)
        for number, chunk in enumerate(chunks):
            last = min(100, 16 * (number + 1)) - 1
            assert chunk.logits is not None
            assert relative(chunk.logits[0, 0], reference[last]) <= TOLERANCE
        for position in range(100, 200):
            step = decode_step(ONE, 0, [ids[position]], [position], logits=True)
            logits = backend.launch(step).result().logits
            assert logits is not None
            assert relative(logits[0, 0], reference[position]) <= TOLERANCE, position
        check(toy, backend)
        assert backend.describe()["fallbacks"] == []


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 129])
def test_chunks_of_16_and_of_64_leave_the_same_sequence(toy: Toy, ids: list[int], length: int) -> None:
    reference = toy.reference(ids[:length])[-1]
    with toy.backend() as backend:
        for slot, cell in enumerate((SMALL, LARGE)):
            last = prefill(backend, ids[:length], slot=slot, cell=cell, logits=True)[-1].logits
            assert last is not None
            assert relative(last[0, 0], reference) <= TOLERANCE
        ahead = [backend.launch(decode_step(ONE, slot, [None], [0], logits=True)).result() for slot in (0, 1)]
        assert ahead[0].logits is not None
        assert ahead[1].logits is not None
        assert relative(ahead[0].logits, ahead[1].logits) <= TOLERANCE


def test_a_captured_step_equals_the_eager_one_bit_for_bit(toy: Toy, ids: list[int]) -> None:
    tokens, logits = {}, {}
    for graphs in (True, False):
        with toy.backend(enable_cuda_graph=graphs) as backend:
            tokens[graphs] = generate(backend, ids[:40], 60, slot=2)
            prefill(backend, ids[:33], slot=1)
            logits[graphs] = backend.launch(decode_step(ONE, 1, [5], [33], logits=True)).result().logits
            counters = backend.describe()
            assert (counters["eager_launches"] == 0) is graphs
            assert (counters["graph_replays"] == 0) is not graphs
    assert tokens[True] == tokens[False]
    np.testing.assert_array_equal(logits[True], logits[False])


def test_interleaved_sequences_do_not_disturb_each_other(toy: Toy, ids: list[int]) -> None:
    prompts = [ids[:20], ids[30:67], ids[70:71], ids[80:160]]
    with toy.backend() as backend:
        alone = [generate(backend, prompt, 24, slot=slot, cell=ONE) for slot, prompt in enumerate(prompts)]
        got = [[int(prefill(backend, prompts[slot], slot=slot)[-1].next_token[0])] for slot in (0, 1)]
        tickets = [backend.launch(decode_step(TWO, 0, [None, None], [0, 0])) for _ in range(5)]
        prefill(backend, prompts[3], slot=3)  # another prompt arrives between decode steps
        tickets += [backend.launch(decode_step(TWO, 0, [None, None], [0, 0])) for _ in range(18)]
        for ticket in tickets:
            for row in (0, 1):
                got[row].append(int(ticket.result().next_token[row]))
        assert got == alone[:2]


def test_an_idle_row_of_a_batch_leaves_no_trace(toy: Toy, ids: list[int]) -> None:
    with toy.backend() as backend:
        alone = generate(backend, ids[:50], 12, slot=1)
        got = [int(prefill(backend, ids[:50], slot=1)[-1].next_token[0])]
        for place in range(6):
            step = decode_step(FOUR, 0, [0, got[-1] if place == 0 else None, 0, 0], [0, 50, 0, 0])
            for row in (0, 2, 3):
                step.valid[row] = step.forced[row] = 0
            got.append(int(backend.launch(step).result().next_token[1]))
        for _ in range(3):  # slot 1 sits out, its neighbours step
            step = decode_step(TWO, 0, [7, 0], [0, 56])
            step.valid[1] = step.forced[1] = 0
            backend.launch(step).result()
        got.append(int(backend.launch(decode_step(ONE, 1, [got[-1]], [56])).result().next_token[0]))
        got += [int(backend.launch(decode_step(ONE, 1, [None], [0])).result().next_token[0]) for _ in range(4)]
        assert got == alone


def test_steps_that_are_read_late_or_in_another_order_are_whole(toy: Toy, ids: list[int]) -> None:
    with toy.backend() as backend:
        in_order = generate(backend, ids[:40], 40)
        first = int(prefill(backend, ids[:40])[-1].next_token[0])
        steps = [decode_step(ONE, 0, [None], [0]) for _ in range(39)]
        tickets = [backend.launch(step) for step in steps]
        order = list(range(39))
        random.Random(0).shuffle(order)
        late = {place: int(tickets[place].result().next_token[0]) for place in order}
        assert [first] + [late[place] for place in range(39)] == in_order
        assert tickets[0].result() is tickets[0].result()


def test_a_forced_capture_failure_runs_eagerly_says_why_and_is_counted(
    toy: Toy, ids: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_engine = TensorRTBackend._run_engine
    capturing: list[Cell] = []

    def run(self: TensorRTBackend, each: Any) -> None:
        if each.cell == TWO and capturing:
            self._stream.synchronize()  # not allowed under capture: CUDA invalidates it
        run_engine(self, each)

    capture = TensorRTBackend._capture

    def marked(self: TensorRTBackend, key: Any) -> cuda.CapturedGraph:
        capturing.append(key.cell)
        try:
            return capture(self, key)
        finally:
            capturing.clear()

    monkeypatch.setattr(TensorRTBackend, "_run_engine", run)
    monkeypatch.setattr(TensorRTBackend, "_capture", marked)
    with toy.backend(enable_cuda_graph=False) as backend:
        prefill(backend, ids[:20], slot=0), prefill(backend, ids[:30], slot=1)
        expected = backend.launch(decode_step(TWO, 0, [None, None], [0, 0])).result()
    with caplog.at_level(logging.WARNING), toy.backend() as backend:
        assert [fallback["cell"] for fallback in backend.describe()["fallbacks"]] == [TWO.label]
        assert "cudaErrorStreamCapture" in backend.describe()["fallbacks"][0]["reason"]
        assert TWO.label in caplog.text
        prefill(backend, ids[:20], slot=0), prefill(backend, ids[:30], slot=1)
        got = backend.launch(decode_step(TWO, 0, [None, None], [0, 0])).result()
        assert backend.describe()["eager_launches"] == 1
    np.testing.assert_array_equal(got.next_token, expected.next_token)


def test_a_budget_of_graphs_captures_the_largest(toy: Toy, ids: list[int]) -> None:
    with toy.backend(max_graphs=SLOTS) as backend:
        assert backend.describe()["graphs"] == SLOTS
        prefill(backend, ids[:64], cell=LARGE)
        assert backend.describe()["eager_launches"] == 0
        backend.launch(decode_step(ONE, 0, [None], [0])).result()
        assert backend.describe()["eager_launches"] == 1


def test_decode_prefill_of_another_shape_reset_decode_equals_eager(toy: Toy, ids: list[int]) -> None:
    got = {}
    for graphs in (True, False):
        with toy.backend(enable_cuda_graph=graphs) as backend:
            first = generate(backend, ids[:40], 10)
            prefill(backend, ids[40:140], slot=1, cell=LARGE)
            backend.reset_slot(0)
            got[graphs] = [*first, *generate(backend, ids[:17], 10)]
    assert got[True] == got[False]


def test_a_second_start_takes_its_kernels_from_the_cache_and_a_damaged_cache_is_rebuilt(
    toy: Toy, ids: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with toy.backend() as backend:
        expected = generate(backend, ids[:20], 10)
    with toy.backend() as backend:
        assert backend.describe()["jit_cache"] == "warm"
        assert generate(backend, ids[:20], 10) == expected
    (cache,) = [path for folder in trt_cache.places(toy.artifact) for path in folder.glob("*.jit")]
    cache.write_bytes(cache.read_bytes()[:1000])
    with caplog.at_level(logging.WARNING), toy.backend() as backend:
        assert "damaged" in caplog.text
        assert backend.describe()["jit_cache"] == "cold"
        assert generate(backend, ids[:20], 10) == expected
    assert cache.stat().st_size > 1000


def test_memory_is_accounted_for_and_given_back(toy: Toy) -> None:
    before = cuda.free_bytes()
    with toy.backend() as backend:
        memory = backend.memory()
        per_slot = sum(int(np.prod(state.shape)) * 2 for state in toy.states)
        assert memory["kv_cache"] == SLOTS * per_slot
        assert memory["scratch"] > 0
    with toy.backend():
        pass
    assert before - cuda.free_bytes() < 512 << 20  # the context and its kernels stay, nothing grows with use


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("attention", ["native", "written_out"])
def test_both_formulations_of_attention_are_right_for_every_family(family: str, attention: Any, tmp_path: Path) -> None:
    """Of full attention. test_hybrids has the hybrids' golden vectors, written out as they are shipped; their attention
    is Qwen3's behind a gate, and compiling their delta rule a second time takes minutes."""
    toy = make_toy(tmp_path, family, forms=Forms(attention=attention, sampling="branchless", processors=132))
    with toy.backend() as backend:
        check(toy, backend)


def test_an_engine_with_attention_that_tensorrt_gets_wrong_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgebuild.export import forms
    from onnxscript.onnx_opset import opset24 as op

    def by_key_count(
        query: Any, keys: Any, values: Any, positions: Any, kv_positions: Any, scale: float, _chosen: Any = None
    ) -> Any:
        keys, values = forms._tier(keys, kv_positions), forms._tier(values, kv_positions)
        counts = op.Add(op.ReduceMax(positions, op.Constant(value_ints=[1]), keepdims=0), op.Constant(value_int=1))
        return op.Attention(query, keys, values, None, None, None, counts, scale=scale, is_causal=1)[0]

    monkeypatch.setattr(forms, "_attention_native", by_key_count)
    toy = make_toy(tmp_path, forms=Forms(attention="native", sampling="branchless"))
    with toy.backend() as backend, pytest.raises(GoldenMismatch):
        check(toy, backend)


def test_launches_that_make_no_sense_are_refused(toy: Toy) -> None:
    with toy.backend() as backend:
        with pytest.raises(BackendError, match="not a cell"):
            backend.launch(decode_step(Cell("decode", 1, 1, 64), 0, [1], [0]))
        with pytest.raises(BackendError, match="no such place"):
            backend.launch(decode_step(TWO, 1, [1, 1], [0, 0]))
        with pytest.raises(BackendError, match="no such slot"):
            backend.reset_slot(SLOTS)
    with pytest.raises(BackendError, match="closed"):
        backend.launch(decode_step(ONE, 0, [1], [0]))


def test_a_plan_that_is_cut_in_half_is_refused(toy: Toy, tmp_path: Path) -> None:
    plan = (toy.artifact / "decoder.plan").read_bytes()
    (tmp_path / "decoder.plan").write_bytes(plan[: len(plan) // 2])
    cut = Toy(tmp_path, toy.checkpoint, toy.states)
    with pytest.raises((ArtifactError, BackendError)):
        TensorRTBackend(cut.setup())
    (tmp_path / "decoder.plan").write_bytes(b"no plan at all")
    with pytest.raises(ArtifactError, match="not a TensorRT plan"):
        TensorRTBackend(cut.setup())
