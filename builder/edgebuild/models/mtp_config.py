"""What an MTP module is made of: its configuration and the names and shapes of its tensors. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from edgebuild.models.config import ModelConfig

PREFIX = "mtp."


def mtp_config(config: ModelConfig) -> ModelConfig:
    """The model's configuration for its one MTP layer: full attention, and experts if the last layer has them."""
    moe = config.moe
    if moe is not None:
        moe = replace(moe, layers=moe.layers[-1:]) if moe.layers[-1] else None
    flash = None if config.flash is None else replace(config.flash, ngram=None)
    return replace(config, layers=1, layer_kinds=(), delta=None, moe=moe, flash=flash)


def expected_mtp_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every `mtp.*` tensor of this model; 15 in a dense one with q and k norms, 31 in Flash-Next."""
    hidden = config.hidden_size
    taken = "model.layers.0." if config.flash is None else ("model.layers.0.", "model.hyper_connection_mixer.")
    below = {
        PREFIX + name.removeprefix("model."): shape
        for name, shape in mtp_config(config).expected_tensors().items()
        if name.startswith(taken)
    }
    if config.flash is not None:
        return {
            "mtp.fc_embedding.weight": (hidden, hidden),
            "mtp.fc_hidden.weight": (hidden, hidden),
            "mtp.pre_fc_norm_embedding.weight": (hidden,),
            "mtp.pre_fc_norm_hidden.weight": (config.draft_width,),
            **below,
        }
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "mtp.norm.weight": (hidden,),
        **below,
    }
