"""What the benchmarks share: model shapes, decoders with random weights, the bandwidth floor.

Random weights are enough for time and memory (shapes decide both); they say nothing of text. A shape is exported once
(`export_shape`, any machine with torch), then filled and built where it is measured (`fill_weights`, needs onnx and
numpy only), so that gigabytes need not travel.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from edgert.backends.base import StepInputs, Ticket
from edgert.cells import Cell

PRECISION_BYTES = 2  # float16


@dataclass(frozen=True)
class Shape:
    """A decoder by its sizes. Embedding and head are tied."""

    name: str
    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int

    @property
    def weight_bytes(self) -> int:
        """Bytes that one decode step reads: every matrix once; the tied table once, as the head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return PRECISION_BYTES * (
            self.layers * (attention + 3 * self.hidden * self.ffn) + self.vocabulary * self.hidden
        )

    def kv_bytes(self, tokens: int) -> int:
        """Cache bytes of `tokens` positions of one sequence."""
        return PRECISION_BYTES * 2 * self.layers * self.kv_heads * self.head_dim * tokens

    def config(self) -> dict[str, Any]:
        """As a published config.json would say it."""
        return {
            "model_type": self.family,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": True,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "attention_bias": False,
        }


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("smollm2", "llama", 576, 30, 9, 3, 64, 1536, 49152),
        Shape("0.6b", "qwen3", 1024, 28, 16, 8, 128, 3072, 151936),
        Shape("4b", "qwen3", 2560, 36, 32, 8, 128, 9728, 151936),
    )
}


@dataclass(frozen=True)
class Exported:
    """What `export_shape` leaves beside decoder.onnx, as info.json. States: name, kind, shape per slot."""

    shape: str
    cache_tokens: int
    states: tuple[tuple[str, str, tuple[int, ...]], ...]
    draft_states: tuple[tuple[str, str, tuple[int, ...]], ...] = ()

    def save(self, directory: Path) -> None:
        (directory / "info.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, directory: Path) -> Exported:
        raw = json.loads((directory / "info.json").read_text())
        states, drafts = (
            tuple((name, kind, tuple(shape)) for name, kind, shape in raw.get(key, ()))
            for key in ("states", "draft_states")
        )
        return cls(raw["shape"], raw["cache_tokens"], states, drafts)


def export_shape(
    shape: Shape,
    directory: Path,
    *,
    cache_tokens: int,
    attention: Any,
    sampling: Any,
    draft_tokens: Sequence[int] = (),
    **choices: Any,
) -> Exported:
    """decoder.onnx in float16 with a data file of the right size and no content (sparse). choices: fields of Forms.

    draft_tokens: with a drafter in `mtp-N`/mtp.onnx for each number of tokens that may be drafted.
    """
    import torch
    from edgebuild.export import Forms, decoder, mtp
    from edgebuild.models.config import ModelConfig
    from edgebuild.models.decoder import Decoder
    from edgebuild.models.mtp_config import expected_mtp_tensors

    config = ModelConfig.from_hf(shape.config())
    with torch.device("meta"):
        module = Decoder(config, cache_tokens=cache_tokens, token_limit=shape.vocabulary, dtype=torch.float16)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    shapes |= expected_mtp_tensors(config)

    class Nothing:
        def read(self, name: str) -> torch.Tensor:
            return torch.zeros((), dtype=torch.float16).expand(shapes[name])

    directory.mkdir(parents=True, exist_ok=True)
    forms = Forms(attention=attention, sampling=sampling, **choices)
    drafter: Any = ()
    with sparse_weights():
        for count in draft_tokens:
            (directory / f"mtp-{count}").mkdir(exist_ok=True)
            drafter = mtp.export_mtp(
                config,
                Nothing(),
                directory / f"mtp-{count}",
                cache_tokens=cache_tokens,
                draft_tokens=range(count),
                precision="float16",
                forms=replace(forms, processors=0),  # as a build leaves the drafter's products
            ).states
        graph = decoder.export_decoder(
            config,
            Nothing(),
            directory,
            cache_tokens=cache_tokens,
            token_limit=shape.vocabulary,
            precision="float16",
            forms=forms,
            drafting=bool(draft_tokens),
        )
    states, drafts = (tuple((s.name, s.kind, s.shape) for s in each) for each in (graph.states, drafter))
    info = Exported(shape.name, cache_tokens, states, drafts)
    info.save(directory)
    return info


@contextmanager
def sparse_weights() -> Iterator[None]:
    """Exports inside write weight files of the right size that hold the rope tables and nothing else (sparse): the
    graph folds what it makes of those tables into constants of its own."""
    import onnx_ir
    import torch
    from edgebuild.export import decoder, mtp, weights

    kinds = {torch.float32: onnx_ir.DataType.FLOAT, torch.float16: onnx_ir.DataType.FLOAT16}

    class Sparse(weights.WeightFile):
        def append(self, name: str, tensor: torch.Tensor) -> onnx_ir.ExternalTensor:
            if name.startswith("rope_"):
                return super().append(name, tensor)
            offset, size = -(-self._file.tell() // 4096) * 4096, tensor.numel() * tensor.element_size()
            self._file.seek(offset + size)
            self.bytes_written += size
            shape = onnx_ir.Shape(tuple(tensor.shape))
            place = {"name": name, "base_dir": str(self.path.parent)}
            return onnx_ir.ExternalTensor(self.path.name, offset, size, kinds[tensor.dtype], shape=shape, **place)

        def __exit__(self, *_: Any) -> None:
            self._file.truncate(self._file.tell())
            self._file.close()

    before, decoder.WeightFile, mtp.WeightFile = decoder.WeightFile, Sparse, Sparse
    try:
        yield
    finally:
        decoder.WeightFile = mtp.WeightFile = before


def fill_weights(onnx_path: Path, weights_path: Path, *, seed: int = 0) -> int:
    """Random float16 content for every external tensor of `onnx_path`; returns the bytes. Norms are 1, rope is true."""
    import onnx

    model = onnx.load(str(onnx_path), load_external_data=False)
    rng = np.random.default_rng(seed)
    noise = (rng.standard_normal(1 << 22) * 0.02).astype(np.float16)
    written = 0
    with weights_path.open("wb") as file:
        for tensor in model.graph.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if not place:
                continue
            file.seek(int(place["offset"]))
            count = int(np.prod(tensor.dims))
            if tensor.name.startswith("rope_"):
                positions, half = tensor.dims
                angle = np.arange(positions)[:, None] * 1e6 ** -(np.arange(half) / half)
                file.write((np.cos(angle) if "cos" in tensor.name else np.sin(angle)).astype(np.float16).tobytes())
            elif "norm" in tensor.name:
                file.write(np.ones(count, np.float16).tobytes())
            else:
                start = int(rng.integers(0, 1 << 20))
                while count:
                    part = noise[start : start + count]
                    file.write(part.tobytes())
                    count, start = count - len(part), 0
            written = max(written, file.tell())
        file.truncate(max(written, int(weights_size(model))))
    return written


def weights_size(model: Any) -> int:
    """Bytes up to the end of the last external tensor."""
    ends = [0]
    for tensor in model.graph.initializer:
        place = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
        if place:
            ends.append(place["offset"] + place["length"])
    return max(ends)


def copy_bandwidth(size: int = 2 << 30, repeats: int = 10) -> float:
    """Bytes per second of a large device-to-device copy, read and written both counted: the ceiling used here."""
    from edgert import cuda

    stream = cuda.Stream()
    source, target = cuda.DeviceMemory(size), cuda.DeviceMemory(size)
    start, end = cuda.Event(timing=True), cuda.Event(timing=True)
    times = []
    for _ in range(repeats):
        start.record(stream)
        stream.copy(target.address, source.address, size, cuda.ON_DEVICE)
        end.record(stream)
        end.wait()
        times.append(end.ms_since(start))
    for each in (source, target, start, end, stream):
        each.free() if isinstance(each, cuda.DeviceMemory) else each.close()
    return 2 * size / (float(np.median(times)) / 1e3)


def run_steps(backend: Any, steps: Iterable[StepInputs], *, ahead: bool) -> tuple[list[float], list[float]]:
    """Seconds from one step's result to the next one's, and those that each launch took the host.

    ahead: a step is launched before the one before it is read.
    """
    wall, host = [], []
    flying: list[Ticket] = []
    previous = time.perf_counter()
    for step in steps:
        began = time.perf_counter()
        flying.append(backend.launch(step))
        host.append(time.perf_counter() - began)
        if len(flying) > ahead:
            flying.pop(0).result()
            now = time.perf_counter()
            wall.append(now - previous)
            previous = now
    while flying:
        flying.pop(0).result()
    return wall, host


def floor_ms(shape: Shape, context_tokens: int, batch: int, bytes_per_s: float) -> float:
    """The least time a decode step can take: its bytes over the measured bandwidth."""
    return 1e3 * (shape.weight_bytes + batch * shape.kv_bytes(context_tokens)) / bytes_per_s


def setup_for(
    artifact: Path,
    info: Exported,
    cells: Sequence[Cell],
    slots: int,
    options: Mapping[str, Any],
    *,
    draft_length: int = 0,
) -> Any:
    """What the backend is opened with."""
    from edgert.backends.base import Setup
    from edgert.manifest_records import StateSpec

    states, drafts = (
        tuple(StateSpec(name, name + ".out", "float16", kind, shape) for name, kind, shape in each)
        for each in (info.states, info.draft_states)
    )
    vocabulary = SHAPES[info.shape].vocabulary
    return Setup(
        artifact,
        tuple(cells),
        slots,
        info.cache_tokens,
        vocabulary,
        states,
        options,
        draft_length=draft_length,
        draft_states=drafts if draft_length else (),
    )
