"""A GGUF file as a checkpoint: llama.cpp's names, order of rows and metadata, turned back into Hugging Face's.

Tensors are dequantised to float32 block by block, so that reading one holds little more than its result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgebuild.checkpoint.base import Checkpoint, SourceFile, TokenizerFiles
from edgebuild.checkpoint.gguf_file import GgufTensor, read_gguf
from edgebuild.checkpoint.gguf_rope import rope_config
from edgebuild.checkpoint.gguf_tokenizer import read_gguf_tokenizer
from edgebuild.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"
_BLOCK_ELEMENTS = 1 << 20  # dequantised at a time: 4 MB of float32 and about as much scratch
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufCheckpoint(Checkpoint):
    """A single-file GGUF of a known architecture."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = read_gguf(path)
        self._metadata = content.metadata
        self.files = (SourceFile.at(path),)
        self._refuse_unknown()
        self.skipped = tuple(name for name in content.tensors if name == ROPE_FACTORS)  # moved into the configuration
        self._tensors = {hf_name(name): tensor for name, tensor in content.tensors.items() if name != ROPE_FACTORS}
        self._refuse_undequantisable()
        factors = content.tensors.get(ROPE_FACTORS)
        self.config = self._make_config(None if factors is None else self._dequantise(factors).ravel())

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def dtype(self, name: str) -> str:
        return self._stored(name).type_name

    def read(self, name: str) -> torch.Tensor:
        """One tensor as float32; Llama's q and k rows come back in Hugging Face's order."""
        import torch

        values = self._dequantise(self._stored(name))
        if self.config["model_type"] == "llama" and (match := re.search(r"self_attn\.([qk])_proj\.", name)):
            heads = self.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
            values = unpermute(values, heads)
        return torch.from_numpy(values)

    def load_tokenizer(self) -> TokenizerFiles:
        return read_gguf_tokenizer(self._metadata, self.config["vocab_size"])

    def _stored(self, name: str) -> GgufTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self.missing(name)
        return tensor

    def _dequantise(self, tensor: GgufTensor) -> NDArray[np.float32]:
        out: NDArray[np.float32] = np.empty(tensor.shape, dtype=np.float32)
        columns = tensor.shape[-1]
        flat = out.reshape(-1, columns)
        step = max(1, _BLOCK_ELEMENTS // columns)
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            for first in range(0, len(flat), step):
                rows = min(step, len(flat) - first)
                raw = np.fromfile(file, dtype=np.uint8, count=rows * tensor.row_bytes)
                if raw.size != rows * tensor.row_bytes:
                    raise CheckpointError(f"{self.path.name}: {tensor.name!r} is cut short; the file changed")
                block = _dequantise_rows(raw.reshape(rows, tensor.row_bytes), tensor.type_id)
                if not np.isfinite(block).all():
                    raise CheckpointError(
                        f"{self.path.name}: {tensor.name!r} holds values that are not finite", hint="fetch it again"
                    )
                flat[first : first + rows] = block
        return out

    def _refuse_unknown(self) -> None:
        architecture = self._metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{self.path.name}: architecture {architecture!r} is not supported",
                hint=f"supported in a GGUF: {', '.join(sorted(ARCHITECTURES))}",
            )
        if (parts := self._metadata.get("split.count", 1)) > 1:
            raise CheckpointError(
                f"{self.path.name} is one of {parts} parts", hint="join them: llama-gguf-split --merge FIRST OUT"
            )
        if experts := self._metadata.get(f"{architecture}.expert_count"):
            raise CheckpointError(
                f"{self.path.name}: a mixture of {experts} experts is not supported", hint="dense only"
            )

    def _refuse_undequantisable(self) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        for tensor in {tensor.type_id: tensor for tensor in self._tensors.values()}.values():
            block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_id)][1]
            try:
                _dequantise_rows(np.zeros((1, block_bytes), dtype=np.uint8), tensor.type_id)
            except (NotImplementedError, AttributeError) as error:
                raise CheckpointError(
                    f"{self.path.name}: {tensor.name!r} is stored as {tensor.type_name}, which gguf cannot dequantise",
                    hint="requantise it, for example to Q8_0",
                ) from error

    def _make_config(self, rope_factors: NDArray[np.float32] | None) -> dict[str, Any]:
        """GGUF metadata under the keys of a config.json."""
        architecture = self._metadata["general.architecture"]
        own = _Keys(self._metadata, architecture, self.path.name)
        heads = own.whole("attention.head_count")
        hidden_size = own.whole("embedding_length")
        if not heads:
            raise CheckpointError(f"{self.path.name}: {architecture}.attention.head_count is 0")
        head_dim = own.whole("attention.key_length", hidden_size // heads)
        if (value_dim := own.whole("attention.value_length", head_dim)) != head_dim:
            raise CheckpointError(
                f"{self.path.name}: value heads of {value_dim}, key heads of {head_dim}", hint="one size"
            )
        if window := own.whole("attention.sliding_window", 0):
            raise CheckpointError(f"{self.path.name}: a sliding window of {window} tokens is not supported")
        embedding = self._tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise CheckpointError(f"{self.path.name}: no tensor 'token_embd.weight'", hint="a vocabulary-only file?")
        tokenizer_ids = {
            f"{name}_token_id": self._metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")
        }
        config = {
            "architectures": [ARCHITECTURES[architecture]],
            "model_type": architecture,
            "name": self._metadata.get("general.name", self.path.stem),
            "hidden_size": hidden_size,
            "num_hidden_layers": own.whole("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": own.whole("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "intermediate_size": own.whole("feed_forward_length"),
            "vocab_size": embedding.shape[0],
            "max_position_embeddings": own.whole("context_length"),
            "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
            "hidden_act": "silu",
            "attention_bias": architecture == "llama" and "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in self._tensors,
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            **{key: value for key, value in tokenizer_ids.items() if value is not None},
        }
        return {**config, **rope_config(own, head_dim, rope_factors)}


class _Keys(Mapping[str, Any]):
    """The metadata keys of one architecture, without its prefix, read with their types checked."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, file_name: str) -> None:
        self._prefix, self._file_name = architecture + ".", file_name
        self._values = {
            key.removeprefix(self._prefix): value for key, value in metadata.items() if key.startswith(self._prefix)
        }

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or value < 0:
            raise CheckpointError(f"{self._file_name}: {self._prefix}{key} is {value!r}, expected one whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 as the shortest decimal that means it: 1e-05 and not 9.999999747378752e-06."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(f"{self._file_name}: {self._prefix}{key} is {value!r}, expected a number")
        return float(str(np.float32(value)))


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that is not known stays as it is, for the caller to refuse."""
    stem, dot, suffix = name.rpartition(".")
    if suffix in {"weight", "bias"}:
        if stem in _TOP:
            return _TOP[stem] + dot + suffix
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if match and match[2] in _LAYER:
            return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{suffix}"
    return name


def unpermute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of q or k from llama.cpp's interleaved order (pairs 2i, 2i+1 rotate) to rotate-half order (i, i + half).

    The inverse of `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py. values: [heads · head_dim, ...].
    """
    rows = values.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"{rows} rows do not divide into {heads} heads of an even size")
    swapped = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(swapped.reshape(values.shape))


def _dequantise_rows(raw: NDArray[np.uint8], type_id: int) -> NDArray[np.float32]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # a damaged scale is NaN or huge: the caller looks at the result
        values: NDArray[np.float32] = dequantize(raw, GGMLQuantizationType(type_id))
    return values
