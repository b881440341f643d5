"""Rotary position embedding as two tables: cos and sin per position, for the positions that the cache can hold.

Formulas and their order of float32 operations follow Transformers' `modeling_rope_utils` (the numeric reference), which
cites YaRN (arXiv 2309.00071) and Llama 3.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from edgebuild.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32 [head_dim / 2], radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    if rope.kind == "yarn":
        return _yarn(rope, rope.theta**exponents, head_dim)
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    if rope.frequency_factors:
        frequencies = frequencies / torch.tensor(rope.frequency_factors, dtype=torch.float32)
    return frequencies


def rope_tables(rope: RopeConfig, head_dim: int, positions: int) -> tuple[Tensor, Tensor]:
    """(cos, sin), each float32 [positions, head_dim / 2], scaled by the attention factor."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half form over the first dimensions of each head: x [B, heads, q, head_dim]; cos, sin [B, 1, q, half]."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(parts if 2 * half == x.shape[-1] else (*parts, x[..., 2 * half :]), dim=-1)


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    context = rope.original_context_tokens
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    wavelengths = 2 * math.pi / frequencies
    long = wavelengths > context / low
    scaled = torch.where(long, frequencies / rope.factor, frequencies)
    smooth = (context / wavelengths - low) / (high - low)
    between = ~(wavelengths < context / high) & ~long
    return torch.where(between, (1 - smooth) * scaled / rope.factor + smooth * scaled, scaled)


def _yarn(rope: RopeConfig, wavelengths: Tensor, head_dim: int) -> Tensor:
    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original context."""
        return (
            head_dim * math.log(rope.original_context_tokens / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp needs a width
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    extrapolated = 1 - ramp
    return (1.0 / (rope.factor * wavelengths)) * (1 - extrapolated) + (1.0 / wavelengths) * extrapolated
