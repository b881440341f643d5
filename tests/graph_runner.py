"""Runs an exported decoder on ONNX Runtime with plain arrays, one sequence per batch row: no slots, no scheduler."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort


class GraphRunner:
    """Holds the caches of `batch` sequences and feeds the graph as docs/architecture.md describes it."""

    def __init__(self, path: Path, batch: int = 1) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.batch = batch
        self.states = {
            value.name: np.zeros((batch, *value.shape[1:]), np.float32)
            for value in self.session.get_inputs()
            if "." in value.name
        }
        self.length = np.zeros(batch, np.int64)

    def step(self, tokens, *, valid=None, forced=None, tier=None, logit_rows=1, uniform=None, temperature=0.0, top_k=0,
             top_p=1.0):  # fmt: skip
        """One launch; lengths and states move on. Returns the graph's first five outputs by name."""
        tokens = np.asarray(tokens, np.int64).reshape(self.batch, -1)
        rows = tokens.shape[1]
        valid = np.full(self.batch, rows) if valid is None else np.asarray(valid)
        forced = valid if forced is None else np.asarray(forced)
        tier = int(self.length.max()) + rows if tier is None else tier
        feeds = {
            "tokens": tokens,
            "length": self.length,
            "valid": valid.astype(np.int64),
            "forced": forced.astype(np.int64),
            "kv_positions": np.arange(tier, dtype=np.int64),
            "uniform": np.zeros((self.batch, logit_rows), np.float32) if uniform is None else uniform,
            "temperature": np.broadcast_to(np.float32(temperature), self.batch).astype(np.float32),
            "top_k": np.broadcast_to(np.int64(top_k), self.batch).astype(np.int64),
            "top_p": np.broadcast_to(np.float32(top_p), self.batch).astype(np.float32),
            **self.states,
        }
        names = [value.name for value in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(None, feeds), strict=True))
        self.states = {name: outputs[f"{name}.out"] for name in self.states}
        self.length = outputs["new_length"]
        return {name: outputs[name] for name in ("sampled", "accepted", "next_token", "new_length", "logits")}
