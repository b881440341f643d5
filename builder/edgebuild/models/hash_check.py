"""What a file says of Qwen3.8-Flash-Next's n-gram hash against what the configuration gives. Imports no torch.

The factors and sizes are not read like other tensors, because they are computed as Transformers computes them;
a checkpoint hashed in another way would look up other rows of its table, silently.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from edgebuild.checkpoint.base import Checkpoint
from edgebuild.checkpoint.safetensors_header import read_header
from edgebuild.errors import CheckpointError
from edgebuild.models.config import ModelConfig

_OWNER = ".ple.ple_embedding."


def refuse_other_hashes(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Compare what the files say of the n-gram hash with what is computed. Raises CheckpointError."""
    ngram = None if config.flash is None else config.flash.ngram
    if ngram is None:
        return
    computed: dict[str, tuple[int, ...]] = {}
    for place, index in enumerate(ngram.layers):
        sizes = ngram.head_sizes(place)
        below = f"layers.{index}{_OWNER}"
        computed[below + "layer_multipliers"] = ngram.multipliers(config.vocabulary_size, place)
        computed[below + "ngram_heads_vocab_sizes"] = sizes
        computed[below + "ngram_heads_offsets"] = tuple(sum(sizes[:head]) for head in range(len(sizes)))
    for name, stored in _integers(checkpoint):
        expected = next((values for end, values in computed.items() if name.endswith(end)), None)
        if stored != expected:
            wanted = list(expected or ())[:3]
            raise CheckpointError(
                f"{checkpoint.path.name}: {name} is {list(stored)[:3]}, the configuration gives {wanted}",
                hint="config.json (seed, vocab_size, ngram_*, ple_layer_ids) and the weights must belong together",
            )


def _integers(checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and values of every skipped int64 tensor of an n-gram embedding."""
    for source in checkpoint.files:
        if source.path.suffix != ".safetensors":
            continue
        for name, tensor in read_header(source.path).items():
            if _OWNER in name and tensor.dtype == "I64":
                with source.path.open("rb") as file:
                    file.seek(tensor.offset)
                    yield name, struct.unpack(f"<{tensor.bytes // 8}q", file.read(tensor.bytes))
