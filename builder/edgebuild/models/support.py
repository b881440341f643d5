"""What is known not to run on a backend: said before anything is planned or built. Imports no torch."""

from __future__ import annotations

from edgebuild.errors import CheckpointError
from edgebuild.models.config import ModelConfig


def refuse_backend(backend: str, config: ModelConfig) -> None:
    """Raises CheckpointError where `config` has a part that `backend` lacks."""
    if config.flash is not None and backend != "onnxruntime":
        raise CheckpointError(
            f"{config.family} does not run on {backend}: its n-grams are hashed with an exclusive or, which "
            "TensorRT lacks",
            hint="set `backend: onnxruntime` and `precision: float32` in the profile",
        )
