"""One spelling for every tensor: whatever layout the checkpoint was published in, the names come out flat.

Knows the layouts of Transformers' text models and of the vision-language models around them; knows no shapes.
"""

from __future__ import annotations

# outer spelling -> flat spelling, first match wins; an empty right side is a vision tower or projector: skipped
_PREFIXES = (
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("language_model.", "model."),
    ("model.visual.", ""),
    ("visual.", ""),
    ("model.vision_tower.", ""),
    ("vision_tower.", ""),
    ("vision_model.", ""),
    ("model.multi_modal_projector.", ""),
    ("multi_modal_projector.", ""),
    # a bare decoder, saved without its language-model head
    ("embed_tokens.", "model.embed_tokens."),
    ("layers.", "model.layers."),
    ("norm.", "model.norm."),
)
# computed from the configuration; files of old Transformers versions still carry it
_DERIVED_SUFFIXES = (
    ".rotary_emb.inv_freq",
    ".ple_embedding.layer_multipliers",
    ".ple_embedding.ngram_heads_vocab_sizes",
    ".ple_embedding.ngram_heads_offsets",
)


def canonical_name(name: str) -> str | None:
    """The flat name of a tensor, or None for one that a text decoder has no use for."""
    if name.endswith(_DERIVED_SUFFIXES):
        return None
    for outer, flat in _PREFIXES:
        if name.startswith(outer):
            return flat + name.removeprefix(outer) if flat else None
    return name
