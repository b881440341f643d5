"""The TensorRT backend's chain of graphs, on host memory: the same steps as on ONNX Runtime give the same outputs."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toys
from drafting_toy import CELLS, CONTEXT, LONGEST, SLOTS, TOKENS, Toy, export_toy, make_engine, prompt_of
from edgebuild.checkpoint import open_checkpoint
from edgebuild.drafter import find_drafter
from edgebuild.golden import make_golden
from edgebuild.golden_drafts import ReferenceDrafter
from edgebuild.models.config import ModelConfig
from edgert.backends import tensorrt
from edgert.backends.base import StepInputs, StepOutputs
from edgert.backends.onnxruntime import OnnxRuntimeBackend
from edgert.backends.tensorrt import TensorRTBackend
from edgert.cells import Cell
from edgert.errors import ArtifactError, BackendError, GoldenMismatch
from edgert.golden import Golden, check_golden, load_golden
from edgert.step import empty_step
from host_tensorrt import on_the_host

FAMILIES = {"llama": toys.make_llama, "qwen3_5": toys.make_qwen3_5}


@pytest.fixture(scope="module", params=FAMILIES)
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    directory = tmp_path_factory.mktemp("drafting")
    # a slot's state must be a multiple of a device's alignment
    sizes = {} if request.param == "llama" else {"key_dim": 16, "value_dim": 16}
    return export_toy(FAMILIES[request.param](directory / "model", **sizes), directory)


@pytest.fixture
def host(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_host(monkeypatch, CELLS, draft_length=LONGEST, cache_tokens=toy.setup.cache_tokens)


def opened(toy: Toy, **changes: Any) -> TensorRTBackend:
    backend = TensorRTBackend(dataclasses.replace(toy.setup, options={}, **changes))
    backend.warm_up()
    return backend


class Conversation:
    """Random legal steps on two slots: prompts in chunks, verified drafts, changing draft lengths, idle neighbours."""

    def __init__(self, backend: Any, seed: int, *, altered: float = 0.5) -> None:
        """altered: share of drafts that are not verified as they were made."""
        self.backend, self.rng, self.altered = backend, np.random.default_rng(seed), altered
        self.length, self.token = [0] * SLOTS, [0] * SLOTS
        self.drafts: list[list[int]] = [[] for _ in range(SLOTS)]
        self.seen: list[tuple[Any, ...]] = []

    def run(self) -> list[tuple[Any, ...]]:
        for _ in range(3):
            for slot in range(SLOTS):
                self.backend.reset_slot(slot)
                self.prefill(slot, prompt_of(int(self.rng.integers(1, 60)), int(self.rng.integers(99))))
            for _ in range(6):
                self.decode([[0], [1], [0, 1], [0, 1]][self.rng.integers(4)], int(self.rng.integers(1, LONGEST + 1)))
        return self.seen

    def prefill(self, slot: int, prompt: tuple[int, ...]) -> None:
        start = 0
        while start < len(prompt):
            rows = int(self.rng.choice([8, 32]))
            count = min(rows, len(prompt) - start)
            step = empty_step(Cell("prefill", 1, rows, self.tier(start + count)), slot)
            step.tokens[0, :count] = prompt[start : start + count]
            step.length[0], step.valid[0], step.forced[0] = start, count, count
            start += count
            drafts = int(self.rng.integers(1, LONGEST + 1)) if start == len(prompt) else 0
            following = np.array(prompt[start : start + 1] or [-1], np.int64)
            step = dataclasses.replace(step, prime=True, draft_length=drafts, following=following)
            self.commit(step, self.backend.launch(step).result(), [slot])

    def decode(self, slots: list[int], drafts: int) -> None:
        slots = [slot for slot in slots if self.length[slot] + LONGEST < CONTEXT - LONGEST]
        if not slots:
            return
        batch, first = (2, 0) if self.rng.random() < 0.5 or len(slots) > 1 else (1, slots[0])
        rows = max(1 + len(self.drafts[slot]) for slot in slots)
        longest = max(self.length[slot] for slot in range(first, first + batch))
        step = empty_step(Cell("decode", batch, rows, self.tier(longest + rows)), first)
        for row in range(batch):
            slot = first + row
            step.length[row] = self.length[slot]
            if slot in slots:
                tokens = [self.token[slot], *self.drafts[slot]]
                step.tokens[row, : len(tokens)] = tokens
                step.valid[row], step.forced[row] = len(tokens), 1
        step = dataclasses.replace(step, prime=True, draft_length=drafts)
        self.commit(step, self.backend.launch(step).result(), slots)

    def commit(self, step: StepInputs, out: StepOutputs, slots: list[int]) -> None:
        for slot in slots:
            row = slot - step.first_slot
            self.length[slot] = int(step.length[row] + step.forced[row] + out.accepted[row])
            self.token[slot] = int(out.next_token[row])
            self.drafts[slot] = [] if out.drafts is None else out.drafts[row].tolist()
            sampled = out.sampled[row, : 1 + int(out.accepted[row])].tolist()
            self.seen.append((slot, self.length[slot], sampled, self.token[slot], self.drafts[slot]))
            if self.drafts[slot] and self.rng.random() < self.altered:
                self.drafts[slot][-1] = int(self.rng.integers(TOKENS))

    @staticmethod
    def tier(reach: int) -> int:
        return 64 if reach <= 64 else CONTEXT


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "eager"])
def test_the_same_steps_as_on_onnx_runtime_give_the_same_tokens_and_drafts(toy: Toy, graphs: bool) -> None:
    reference = OnnxRuntimeBackend(toy.setup)
    backend = TensorRTBackend(dataclasses.replace(toy.setup, options={"enable_cuda_graph": graphs}))
    backend.warm_up()
    for seed in range(4):
        assert Conversation(backend, seed).run() == Conversation(reference, seed).run()
    counters = backend.describe()
    assert (counters["graph_replays"] > 0) is graphs
    backend.close()


@pytest.mark.usefixtures("host")
def test_drafts_that_come_true_are_accepted_and_ids_equal_those_without_drafts(toy: Toy) -> None:
    prompts = [prompt_of(n, 3) for n in (1, 4, 8, 33, 64, 91, 95)]
    with make_engine(toy, 0) as engine:
        plain = [engine.complete(list(p), max_tokens=12).token_ids for p in prompts]
    for length in (1, 2, 4):
        setup = dataclasses.replace(toy.setup, options={}, draft_length=length)
        with make_engine(dataclasses.replace(toy, setup=setup), length, backend=opened_quietly) as engine:
            handles = [engine.submit(list(p), max_tokens=12) for p in prompts]
            assert [handle.result().token_ids for handle in handles] == plain
            described = engine.describe()
        assert described["fallbacks"] == []


def opened_quietly(setup: Any) -> TensorRTBackend:
    backend = TensorRTBackend(setup)
    backend.warm_up()
    return backend


@pytest.mark.usefixtures("host")
def test_a_step_that_drafts_is_one_launch_of_one_graph(toy: Toy) -> None:
    backend = opened(toy)
    Conversation(backend, 0).prefill(0, prompt_of(40))
    described = backend.describe()
    assert described["eager_launches"] == 0
    assert described["drafter"]["draft_length"] == LONGEST
    for drafts in range(LONGEST + 1):
        step = dataclasses.replace(empty_step(Cell("decode", 1, 5, 64), 1), prime=drafts > 0, draft_length=drafts)
        out = backend.launch(step).result()
        assert (out.drafts is None) is (drafts == 0)
        assert out.drafts is None or out.drafts.shape == (1, drafts)
    assert backend.describe()["eager_launches"] == 0
    memory = backend.memory()
    kv = sum(4 * int(np.prod(s.shape)) for s in (*toy.setup.states, *toy.setup.draft_states) if s.kind == "kv")
    assert memory["kv_cache"] == SLOTS * kv
    assert "drafter_weights" in memory
    backend.close()


@pytest.mark.usefixtures("host")
def test_what_the_device_holds_is_not_sent_again(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(toy)
    sent: list[list[bool]] = []
    send = backend._host_rows_to_slot
    monkeypatch.setattr(
        backend, "_host_rows_to_slot", lambda *given: (sent.append((~given[3]).tolist()), send(*given))[1]
    )
    conversation = Conversation(backend, 0, altered=0.0)
    for slot in (0, 1):
        backend.reset_slot(slot)
        conversation.prefill(slot, prompt_of(20))
    sent.clear()
    for drafts in (2, 1, 4):
        conversation.decode([0, 1], drafts)
    assert sent == []
    conversation.drafts[0][1] = (conversation.drafts[0][1] + 1) % TOKENS  # another draft than the one that was made
    conversation.decode([0, 1], 3)
    assert sent == [[True, False]]
    sent.clear()
    conversation.token[1] = (conversation.token[1] + 1) % TOKENS  # another token than the one that was sampled
    conversation.decode([0, 1], 2)
    assert sent == [[False, True]]
    backend.reset_slot(0)
    conversation.prefill(0, prompt_of(3))
    assert sent[1:] == [[True]]
    backend.close()


def verify(first: int, rows: dict[int, list[int]], drafts: int) -> StepInputs:
    """A decode step from slot `first` on that makes `drafts` drafts. rows: slot → its token and drafts."""
    step = empty_step(Cell("decode", len(rows), max(map(len, rows.values())), CONTEXT), first)
    for row, tokens in enumerate(rows.values()):
        step.tokens[row, : len(tokens)] = tokens
        step.valid[row], step.forced[row] = len(tokens), 1
    return dataclasses.replace(step, prime=True, draft_length=drafts)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("slots", [[0], [1], [0, 1]])
def test_a_step_launched_before_the_one_before_it_is_read_verifies_its_drafts(
    toy: Toy, graphs: bool, slots: list[int]
) -> None:
    """Token, length and drafts go from step to step on the device; what the host says instead is not looked at.

    A random drafter is never right, so every other step its first draft is set right, in both runs alike.
    """
    lengths = [3, 1, LONGEST, LONGEST, 2, 3, 1]
    prompts = {slot: prompt_of(20, 7 * slot) for slot in (0, 1)}

    def begun() -> tuple[Any, Conversation]:
        backend = opened_quietly(dataclasses.replace(toy.setup, options={"enable_cuda_graph": graphs}))
        conversation = Conversation(backend, 0, altered=0.0)
        for slot, prompt in prompts.items():
            backend.reset_slot(slot)
            conversation.prefill(slot, prompt)
        return backend, conversation

    backend, conversation = begun()
    truth: dict[int, dict[int, int]] = {slot: {} for slot in slots}  # slot → length → token sampled there
    for _ in range(30):
        for slot in slots:
            truth[slot][conversation.length[slot]] = conversation.token[slot]
            conversation.drafts[slot] = []
            conversation.decode([slot], 1)
    backend.close()

    backend, conversation = begun()
    read, corrected = [], []
    for number, drafts in enumerate(lengths):
        right = {slot: truth[slot][conversation.length[slot] + 1] for slot in slots} if number % 2 else {}
        corrected.append(right)
        for slot, token in right.items():
            conversation.drafts[slot][0] = token
        step = verify(slots[0], {s: [conversation.token[s], *conversation.drafts[s]] for s in slots}, drafts)
        step.length[:] = [conversation.length[slot] for slot in slots]
        read.append(backend.launch(step).result())
        conversation.commit(step, read[-1], slots)
    assert sum(int(out.accepted.sum()) for out in read) >= 3 * len(slots)
    backend.close()

    backend, conversation = begun()
    made, tickets = {slot: len(conversation.drafts[slot]) for slot in slots}, []
    for right, drafts in zip(corrected, lengths, strict=True):
        for slot, token in right.items():
            ctypes.c_int64.from_address(backend._draft_row(slot)).value = token
        step = verify(slots[0], {slot: [5] * (1 + made[slot]) for slot in slots}, drafts)
        step.length[:], step.from_device[:] = 1, True
        made = dict.fromkeys(slots, drafts)
        tickets.append(backend.launch(step))
    for out, ticket in zip(read, tickets, strict=True):
        unread = ticket.result()
        assert (unread.sampled == out.sampled).all()
        assert (unread.drafts == out.drafts).all()
        assert (unread.accepted == out.accepted).all()
    backend.close()


def golden_of(toy: Toy, directory: Path) -> Golden:
    """Written by the builder from the reference modules, read as an artifact's is."""
    checkpoint = open_checkpoint(toy.source)
    config = ModelConfig.from_hf(checkpoint.config)
    drafter = find_drafter(checkpoint, config, toy.setup.artifact.parent / "mtp.safetensors")
    assert drafter is not None
    reference = ReferenceDrafter(config, drafter, range(TOKENS))
    document = make_golden(checkpoint, precision="float32", chunk_sizes=[8, 32], context_tokens=CONTEXT,
                           drafter=reference, draft_length=LONGEST)  # fmt: skip
    (directory / "golden.json").write_text(json.dumps(document))

    class Model:
        vocabulary_size, token_limit = 320, TOKENS

    return load_golden(directory, Model())  # type: ignore[arg-type]


@pytest.mark.usefixtures("host")
def test_golden_drafts_hold_on_both_backends_and_another_drafter_is_refused_by_its_drafts(
    toy: Toy, tmp_path: Path
) -> None:
    golden = golden_of(toy, tmp_path)
    limits: Any = {"cells": CELLS, "slots": SLOTS, "context_tokens": CONTEXT}
    for backend in (OnnxRuntimeBackend(toy.setup), opened(toy)):
        for length in (LONGEST, 2):
            report = check_golden(backend, golden, **limits, draft_length=length)
            assert report.drafts > 0.8 * length * (report.steps - len(golden.cases))
        assert check_golden(backend, golden, **limits).drafts == 0
        backend.close()
    other = Path(shutil.copytree(toy.setup.artifact, tmp_path / "other"))
    weights = np.fromfile(other / "mtp.weights", np.float32)
    weights[: len(weights) // 2] *= -1
    weights.tofile(other / "mtp.weights")
    for opener in (OnnxRuntimeBackend, opened_quietly):
        backend = opener(dataclasses.replace(toy.setup, artifact=other, options={}))
        with pytest.raises(GoldenMismatch, match=r"case 0, step 0: draft \d is token \d+, the reference's is \d+"):
            check_golden(backend, golden, **limits, draft_length=LONGEST)
        check_golden(backend, golden, **limits)  # the model itself is right


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda steps: steps[0]["drafts"]["tokens"].append(1), "5 tokens, 4 margins"),
        (lambda steps: steps[0]["drafts"]["tokens"].__setitem__(0, 300), "tokens"),
        (lambda steps: steps[0]["drafts"].update(more=1), "unknown key"),
        (lambda steps: steps[-1].update(drafts=steps[0]["drafts"]), "after the last step"),
    ],
)
def test_golden_drafts_are_read_strictly(toy: Toy, tmp_path: Path, change: Any, message: str) -> None:
    golden_of(toy, tmp_path)
    document = json.loads((tmp_path / "golden.json").read_text())
    change(document["cases"][0]["steps"])
    (tmp_path / "golden.json").write_text(json.dumps(document))

    class Model:
        vocabulary_size, token_limit = 320, TOKENS

    with pytest.raises(ArtifactError, match=message):
        load_golden(tmp_path, Model())  # type: ignore[arg-type]


@pytest.mark.usefixtures("host")
def test_an_artifact_with_a_drafter_runs_without_it(toy: Toy) -> None:
    backend = opened(toy, draft_length=0, draft_states=())
    step = empty_step(Cell("prefill", 1, 8, 64), 0)
    step.tokens[0, :3], step.valid[0], step.forced[0] = [5, 6, 7], 3, 3
    assert backend.launch(dataclasses.replace(step, prime=True)).result().drafts is None
    assert "drafter" not in backend.describe()
    backend.close()


def test_more_drafts_than_the_drafter_makes_and_plans_that_do_not_serve_are_refused(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_host(monkeypatch, CELLS, draft_length=LONGEST, cache_tokens=toy.setup.cache_tokens)
    backend = opened(toy)
    step = empty_step(Cell("decode", 1, 5, 64), 0)
    with pytest.raises(BackendError, match="5 drafts were asked for, the drafter makes 4"):
        backend.launch(dataclasses.replace(step, prime=True, draft_length=5))
    backend.close()
    on_the_host(monkeypatch, CELLS, draft_length=1, cache_tokens=toy.setup.cache_tokens)
    with pytest.raises(ArtifactError, match="no profile for"):
        opened(toy)


@pytest.mark.parametrize(
    ("content", "first_runs_s", "stored"),
    [
        (b"as it was", (2.0, 3.0), False),
        (b"as it was, and more", (0.2, 0.3), True),
        (b"other one", (2.0, 3.0), True),  # no longer than before, but what was there spared no cell the compiler
        (b"other one", (0.2, 3.0), False),
        (b"less", (2.0, 3.0), True),
        (b"less", (0.2, 3.0), False),  # a start with fewer cells, one of them new: the others' kernels stay
        (b"", (2.0, 3.0), False),
    ],
)
def test_a_jit_cache_is_written_where_there_is_more_or_where_it_was_of_no_use(
    toy: Toy,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    content: bytes,
    first_runs_s: tuple[float, float],
    stored: bool,
) -> None:
    artifact = tmp_path / "artifact"
    shutil.copytree(toy.setup.artifact, artifact)
    (artifact / "decoder.plan").write_bytes(b"ftrt")
    cells = (Cell("prefill", 1, 8, 64), Cell("decode", 1, 1, 64))
    on_the_host(monkeypatch, cells, draft_length=0, cache_tokens=toy.setup.cache_tokens)
    setup = dataclasses.replace(toy.setup, artifact=artifact, cells=cells, draft_length=0, draft_states=(), options={})
    written: list[bytes] = []
    store = tensorrt.trt_cache.store
    monkeypatch.setattr(tensorrt.trt_cache, "store", lambda *of: (written.append(of[2]), store(*of)))

    def started(held: bytes) -> TensorRTBackend:
        monkeypatch.setattr(tensorrt.Engine, "cache_content", lambda _: held)
        backend = TensorRTBackend(setup)
        for each, seconds in zip(backend._cells.values(), first_runs_s, strict=True):
            each.jit_s = seconds
        return backend

    backend = started(b"as it was")
    backend._store_caches()
    assert backend.describe()["jit_cache"] == "cold"
    backend.close()
    backend = started(content)
    backend._store_caches()
    assert backend.describe()["jit_cache"] == "warm"
    backend.close()
    assert written == [b"as it was", *([content] if stored else [])]
