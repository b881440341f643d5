"""Rope metadata of a GGUF under the keys of a config.json. Pure functions on numbers; files are read elsewhere."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from edgebuild.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_PREFIX = "rope.scaling."
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0  # what every published llama3 rope uses
_TOLERANCE = 1e-4  # the factors went through float32 and a division


class Keys(Protocol):
    """Metadata of one architecture without its prefix."""

    def __contains__(self, key: object, /) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, key: str, /) -> Any: ...
    def whole(self, key: str, default: int | None = None) -> int: ...
    def number(self, key: str, default: float | None = None) -> float: ...


def rope_config(keys: Keys, head_dim: int, factors: NDArray[np.float32] | None) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` as a config.json has them.

    factors: the rope_freqs tensor, one divisor for each of the head_dim / 2 frequencies, or None.
    """
    theta = keys.number("rope.freq_base", 10_000.0)
    config: dict[str, Any] = {"rope_theta": theta}
    rotated = keys.whole("rope.dimension_count", head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    scaling = _scaling(keys)
    if factors is not None and not np.all(factors == 1.0):
        if scaling is not None:
            raise CheckpointError(
                f"rope_freqs beside rope scaling {scaling['rope_type']!r}: which one holds is not known"
            )
        scaling = llama3_from_factors(factors, theta, head_dim) or {
            "rope_type": "default",
            "frequency_factors": [float(factor) for factor in factors],
        }
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _scaling(keys: Keys) -> dict[str, Any] | None:
    """`rope.scaling.*`, or the older `rope.scale_linear`."""
    given = {key.removeprefix(_PREFIX) for key in keys if key.startswith(_PREFIX)}
    kind = keys[_PREFIX + "type"] if "type" in given else ("linear" if "factor" in given else "none")
    factor = keys.number(_PREFIX + "factor", keys.number("rope.scale_linear", 1.0))
    if "rope.scale_linear" in keys and "type" not in given:
        kind = "linear"
    known = {"none": {"type", "factor", "original_context_length", "finetuned", "attn_factor"}}
    known["linear"] = known["none"]
    known["yarn"] = known["none"] | {"yarn_beta_fast", "yarn_beta_slow"}
    if kind not in known:
        raise CheckpointError(f"rope scaling {kind!r} is not supported", hint=f"supported: {', '.join(known)}")
    if unknown := sorted(given - known[kind]):
        raise CheckpointError(f"rope scaling {kind!r} has keys whose meaning is not known: {', '.join(unknown)}")
    if (attention := keys.number(_PREFIX + "attn_factor", 1.0)) != 1.0:
        raise CheckpointError(f"rope scaling {kind!r} with an attention factor of {attention} is not supported")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        if original := keys.whole(_PREFIX + "original_context_length", 0):
            scaling["original_max_position_embeddings"] = original
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if theirs in given:
                scaling[ours] = keys.number(_PREFIX + theirs)
    return scaling


def llama3_from_factors(factors: NDArray[np.float32], theta: float, head_dim: int) -> dict[str, Any] | None:
    """The llama3 parameters that yield `factors`, or None. llama.cpp stores the divisors and drops the parameters.

    Low and high frequency factor are taken as the published 1 and 4: then the divisors fix the rest.
    """
    factor = round(float(factors.max()), 3)
    if factor <= 1.0 or len(factors) != head_dim // 2:
        return None
    for original in (8192, 4096, 2048, 16384, 32768, 1024, 512, 256):
        expected = _llama3_factors(theta, head_dim, factor, original)
        if np.allclose(factors, expected, rtol=_TOLERANCE, atol=0.0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": original,
            }
    return None


def _llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> NDArray[np.float64]:
    """Divisors of the inverse frequencies, as `_compute_llama3_parameters` of Transformers has them."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = (original / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    smooth = np.clip(smooth, 0.0, 1.0)  # 0 below the low frequency bound, 1 above the high one
    divisors: NDArray[np.float64] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return divisors
