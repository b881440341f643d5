"""Greedy decoding by Transformers, as the outside judge of the runtime: plain forward passes over its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch


def load_reference(directory: Path) -> Any:
    """The checkpoint as Transformers reads it, float32, eager attention."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    return model.to(torch.float32).eval()


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int, token_limit: int) -> list[int]:
    """The next `count` tokens, each the most likely of the first `token_limit`."""
    fed, cache, found = torch.tensor([list(prompt)]), None, []
    for _ in range(count):
        out = model(fed, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        token = int(out.logits[0, -1, :token_limit].argmax())
        found.append(token)
        fed = torch.tensor([[token]])
    return found


def random_prompts(lengths: Sequence[int], token_limit: int, first: int = 3) -> list[list[int]]:
    """A prompt of each length, of ordinary tokens: none below `first`."""
    rng = np.random.default_rng(0)
    return [[int(token) for token in rng.integers(first, token_limit, length)] for length in lengths]


def around(chunk_sizes: Sequence[int], most: int) -> list[int]:
    """Lengths up to `most` at, before and after every boundary that chunks of these sizes can make."""
    edges = {*chunk_sizes, *(chunk_sizes[-1] + size for size in chunk_sizes), 3 * chunk_sizes[-1]}
    lengths = {1, 2, *(edge + step for edge in edges for step in (-1, 0, 1))}
    return sorted(length for length in lengths if 1 <= length <= most)
