"""A small artifact as files only: a consistent manifest, an ONNX file with external data that no backend opens.

For tests of everything that happens before a backend is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import toys
from edgebuild.artifact import ArtifactWriter, canonical_json
from edgert.cells import Cell
from edgert.manifest import (
    BackendInfo,
    LedgerLine,
    Manifest,
    ModelInfo,
    SourceEntry,
    StateSpec,
    TensorSpec,
    TrafficInfo,
)

CONTEXT, CHUNK, SLOTS = 256, 64, 4
CACHE = CONTEXT + CHUNK
SCHEDULER = """\
# every key, as the plan writes it
runtime:
  adaptive: true
  enable_chunked_prefill: true
  max_prefill_chunk_size: 64
  prefill_decode_ratio: "1:6"
  prefill_decode_ratio_range: [4, 8]
  enable_cuda_graph: true
  graph_bucket_sizes: [16, 64]
  graph_batch_sizes: [1, 2, 4]
  kv_tiers: [128, 256]
  enable_mtp: false
  mtp_num_heads: 0
  mtp_acceptance_threshold: 0.6
  ttft_target_ms: null
  itl_target_ms: null
  itl_p95_ratio: null
  tpot_target_ms: null
  slots: 4
  context_tokens: 256
  queue_limit: 64
  throughput_headroom_fraction: 0.0
  warm_up: true
  check_golden_at_load: true
  memory_margin_fraction: 0.1
  memory_headroom_bytes: 1048576
  soft_temperature_c: null
  hard_temperature_c: null
  power_mode: null
"""


def toy_manifest(**changes: Any) -> Manifest:
    """Two layers, 256 positions, four slots; `changes` replace fields. `files` is empty: the writer fills it."""
    inputs: list[tuple[str, str, tuple[int | str, ...]]] = [
        ("tokens", "int64", ("batch", "rows")),
        ("length", "int64", ("batch",)),
        ("valid", "int64", ("batch",)),
        ("forced", "int64", ("batch",)),
        ("kv_positions", "int64", ("tier",)),
        ("uniform", "float32", ("batch", "logit_rows")),
        ("temperature", "float32", ("batch",)),
        ("top_k", "int64", ("batch",)),
        ("top_p", "float32", ("batch",)),
    ]
    outputs: list[tuple[str, str, tuple[int | str, ...]]] = [
        ("sampled", "int64", ("batch", "logit_rows")),
        ("accepted", "int64", ("batch",)),
        ("next_token", "int64", ("batch",)),
        ("new_length", "int64", ("batch",)),
        ("logits", "float32", ("batch", "logit_rows", 300)),
    ]
    states = []
    for layer in range(2):
        for part in ("key", "value"):
            name = f"{part}.{layer}"
            shape = (2, CACHE, 16)
            states.append(StateSpec(name, f"{name}.out", "float32", "kv", shape))
            inputs.append((name, "float32", ("batch", *shape)))
            outputs.append((f"{name}.out", "float32", ("batch", *shape)))
    cells = [Cell("prefill", 1, rows, tier) for rows in (16, 64) for tier in (128, 256)]
    cells += [Cell("decode", batch, 1, tier) for batch in (1, 2, 4) for tier in (128, 256)]
    fields: dict[str, Any] = {
        "format_version": 1,
        "name": "toy",
        "edgebuild_version": "0.1.0",
        "tools": {"onnx": "1.20.0", "torch": "2.13.0"},
        "state": "complete",
        "model": ModelInfo("llama", "toy", "a" * 64, 64, 2, 320, 300, (2, 0), 1, 2048),
        "source": (SourceEntry("model.safetensors", 1234, "b" * 64),),
        "backend": BackendInfo("onnxruntime", "1.32.0", (), "float32"),
        "context_tokens": CONTEXT,
        "cache_tokens": CACHE,
        "slots": SLOTS,
        "cells": tuple(cells),
        "inputs": tuple(TensorSpec(*entry) for entry in inputs),
        "outputs": tuple(TensorSpec(*entry) for entry in outputs),
        "states": tuple(states),
        "ledger": (LedgerLine("weights", 4096, "1 × 4096 B"), LedgerLine("kv cache", 655360, "4 slots × ...")),
        "budget_bytes": 1 << 30,
        "draft_length": 0,
        "traffic": TrafficInfo("toy.csv", "c" * 64, 100, "made for a test\nCC0"),
        "files": (),
    }
    return Manifest(**{**fields, **changes})


def toy_onnx(directory: Path) -> None:
    """decoder.onnx and decoder.weights: two external tensors, one of them inside a subgraph's node attribute."""
    import onnx
    from onnx import TensorProto, helper

    def external(name: str, offset: int, length: int) -> TensorProto:
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[length // 4])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "decoder.weights"), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
        return tensor

    body = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], value=external("inner", 2048, 1024))],
        "body",
        [],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, [256])],
    )
    graph = helper.make_graph(
        [helper.make_node("If", ["flag"], ["y"], then_branch=body, else_branch=body)],
        "decoder",
        [helper.make_tensor_value_info("flag", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [256])],
        initializer=[external("weight", 0, 2048)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)]), str(directory / "decoder.onnx"))
    weights = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
    (directory / "decoder.weights").write_bytes(weights.tobytes())


def toy_golden() -> dict[str, Any]:
    """Two steps of made-up reference logits."""
    step = {"token": 7, "position": 3, "top_ids": [5, 4, 3, 2, 1], "indices": [0, 5], "values": [0.5, 2.0], "norm": 2.1}
    return {"format_version": 1, "tolerance": 0.001, "cases": [{"prompt_ids": [1, 5, 6], "steps": [step, step]}]}


def write_files(directory: Path) -> None:
    """Everything but the manifest."""
    toy_onnx(directory)
    (directory / "scheduler.yaml").write_text(SCHEDULER)
    (directory / "golden.json").write_bytes(canonical_json(toy_golden()))
    toys.byte_level_tokenizer(300).save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(toys.CHATML)


def make_artifact(target: Path, **changes: Any) -> Path:
    """A complete artifact at `target`."""
    with ArtifactWriter(target) as writer:
        write_files(writer.directory)
        writer.commit(toy_manifest(**changes))
    return target
