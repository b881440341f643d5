"""A checkpoint's weights in the torch module: for the golden vectors and for tests, never for the export."""

from __future__ import annotations

import torch

from edgebuild.checkpoint import Checkpoint
from edgebuild.models.config import ModelConfig
from edgebuild.models.decoder import Decoder


def load_decoder(checkpoint: Checkpoint, *, cache_tokens: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder with real weights, in evaluation mode. Holds one copy of the weights in `dtype`."""
    config = ModelConfig.from_hf(checkpoint.config)
    with torch.device("meta"):
        decoder = Decoder(config, cache_tokens=cache_tokens, token_limit=checkpoint.tokenizer.token_limit, dtype=dtype)
    for name, value in decoder.constants().items():
        setattr(decoder, name, value)
    for name, _ in list(decoder.named_parameters()):
        owner, attribute = name.rsplit(".", 1)
        value = torch.nn.Parameter(checkpoint.read(name).to(dtype), requires_grad=False)
        setattr(decoder.get_submodule(owner), attribute, value)
    return decoder.eval()
