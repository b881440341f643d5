"""Writes the weights of a travelled artifact again from the checkpoint, so that gigabytes need not travel with it.

An artifact that stopped after ONNX may be copied without `decoder.weights`: they are written as the export wrote them,
and the manifest's hash decides whether the result is the same. Traces nothing, holds one tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from edgert.integrity import sha256_file
from edgert.manifest import Manifest

from edgebuild.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from edgebuild.models.config import ModelConfig

GRAPH, WEIGHTS = "decoder.onnx", "decoder.weights"
ALIGNMENT = 4096  # of export.weights, whose import loads torch
OTHERWISE = f"give the checkpoint of the build, or copy {WEIGHTS} itself"
Read = Callable[[str], "torch.Tensor"]
Tensors = Mapping[str, Callable[[], "torch.Tensor"]]


def weights_missing(artifact: Path, manifest: Manifest) -> bool:
    """Whether the manifest lists decoder.weights and the directory lacks it."""
    return any(entry.path == WEIGHTS for entry in manifest.files) and not (artifact / WEIGHTS).exists()


def restore_weights(
    artifact: Path, manifest: Manifest, model: Path, progress: Callable[[float], None] = lambda _fraction: None
) -> None:
    """Write `decoder.weights` from the checkpoint at `model`.

    Raises CheckpointError where the result is not byte for byte what the manifest lists; then nothing is left behind.
    """
    from edgebuild.checkpoint import open_checkpoint
    from edgebuild.models.config import ModelConfig

    entry = next(each for each in manifest.files if each.path == WEIGHTS)
    checkpoint = open_checkpoint(model)
    tensors = decoder_tensors(ModelConfig.from_hf(checkpoint.config), manifest, checkpoint.read)
    hidden = artifact / f".{WEIGHTS}.{os.getpid()}"
    try:
        write_weights(artifact / GRAPH, hidden, tensors, progress)
        digest = sha256_file(hidden)
        if digest != entry.sha256:
            raise CheckpointError(
                f"{model.name}: its weights would be {digest[:16]}..., the artifact was made with "
                f"{entry.sha256[:16]}... ({hidden.stat().st_size} bytes, {entry.bytes} expected)",
                hint=OTHERWISE,
            )
        os.replace(hidden, artifact / WEIGHTS)
    finally:
        hidden.unlink(missing_ok=True)


def decoder_tensors(config: ModelConfig, manifest: Manifest, read: Read) -> Tensors:
    """Every tensor of the decoder, in the order in which the export writes them."""
    import torch

    from edgebuild.models.decoder import Decoder

    dtype: torch.dtype = getattr(torch, manifest.backend.precision)
    with torch.device("meta"):
        limit = manifest.model.token_limit
        decoder = Decoder(config, cache_tokens=manifest.cache_tokens, token_limit=limit, dtype=dtype)

    def cast(name: str, to: torch.dtype) -> Callable[[], torch.Tensor]:
        return lambda: read(name).to(to)

    def computed(value: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: value

    weights = {name: cast(name, parameter.dtype) for name, parameter in decoder.named_parameters()}
    return weights | {name: computed(value) for name, value in decoder.constants().items()}


def write_weights(
    graph: Path, target: Path, tensors: Tensors, progress: Callable[[float], None] = lambda _fraction: None
) -> None:
    """`target` as export.weights writes it. Raises CheckpointError where `graph` expects a tensor somewhere else.

    Tensors that the simplified graph no longer refers to are in the file all the same.
    """
    import torch

    expected = external_tensors(graph)
    with target.open("wb") as file:
        for number, (name, tensor) in enumerate(tensors.items()):
            data = tensor().detach().contiguous().view(torch.uint8).numpy()
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            place = (file.tell(), data.nbytes)
            if expected.pop(name, place) != place:
                raise CheckpointError(f"{graph.name} has {name} elsewhere than byte {place[0]}", hint=OTHERWISE)
            file.write(data.data)
            progress((number + 1) / len(tensors))
    if expected:
        raise CheckpointError(f"{graph.name} needs {', '.join(sorted(expected)[:3])}, no tensor here", hint=OTHERWISE)


def external_tensors(graph: Path) -> dict[str, tuple[int, int]]:
    """Tensors whose data lies outside `graph`: name → (offset, bytes)."""
    import onnx_ir

    found = {}
    for name, value in onnx_ir.load(graph).graph.initializers.items():
        if isinstance(value.const_value, onnx_ir.ExternalTensor):
            found[name] = (value.const_value.offset or 0, value.const_value.length or value.const_value.nbytes)
    return found
