"""What is known not to run on a backend: said before anything is planned or built. Imports no torch."""

from __future__ import annotations

from edgebuild.errors import CheckpointError, ProfileError
from edgebuild.models.config import ModelConfig
from edgebuild.models.hybrid_config import MAX_CAPTURED_ROWS


def refuse_backend(backend: str, config: ModelConfig, max_chunk: int) -> None:
    """Raises CheckpointError where `config` has a part that `backend` lacks, ProfileError for chunks it cannot take."""
    if config.flash is not None and backend != "onnxruntime":
        raise CheckpointError(
            f"{config.family} does not run on {backend}: its n-grams are hashed with an exclusive or, which "
            "TensorRT lacks",
            hint="set `backend: onnxruntime` and `precision: float32` in the profile",
        )
    if config.delta is not None and backend != "onnxruntime" and max_chunk > MAX_CAPTURED_ROWS:
        raise ProfileError(
            f"max_chunk {max_chunk:,}: {config.family} on {backend} takes at most {MAX_CAPTURED_ROWS:,} tokens",
            hint=f"set limits.max_chunk to {MAX_CAPTURED_ROWS} or less",
        )
