"""Runs a decoder module with the interface of graph_runner.GraphRunner: no ONNX in between."""

from __future__ import annotations

import numpy as np
import torch
from edgebuild.models.decoder import Decoder


class ModuleRunner:
    """Holds the states of `batch` sequences; `step` is one launch."""

    def __init__(self, decoder: Decoder, batch: int = 1) -> None:
        self.decoder, self.batch = decoder, batch
        self.tensors = decoder.empty_states(batch)
        self.length = np.zeros(batch, np.int64)

    @property
    def states(self) -> dict[str, np.ndarray]:
        names = [state.name for state in self.decoder.states()]
        return {name: tensor.numpy() for name, tensor in zip(names, self.tensors, strict=True)}

    def step(self, tokens, *, valid=None, forced=None, tier=None, logit_rows=1):
        """One greedy launch; lengths and states move on."""
        tokens = np.asarray(tokens, np.int64).reshape(self.batch, -1)
        rows = tokens.shape[1]
        valid = np.full(self.batch, rows) if valid is None else np.asarray(valid)
        forced = valid if forced is None else np.asarray(forced)
        tier = int(self.length.max()) + rows if tier is None else tier
        zeros = torch.zeros(self.batch)
        with torch.no_grad():
            *named, self.tensors = self.decoder(
                torch.from_numpy(tokens),
                torch.from_numpy(self.length),
                torch.from_numpy(valid.astype(np.int64)),
                torch.from_numpy(forced.astype(np.int64)),
                torch.arange(tier),
                torch.zeros(self.batch, logit_rows),
                zeros,
                torch.zeros(self.batch, dtype=torch.int64),
                torch.ones(self.batch),
                self.tensors,
            )
        names = ("sampled", "accepted", "next_token", "new_length", "logits")
        outputs = {name: tensor.numpy() for name, tensor in zip(names, named, strict=True)}
        self.length = outputs["new_length"]
        return outputs
