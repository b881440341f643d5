"""Writes a toy checkpoint as a GGUF, the way llama.cpp's converter does: names through the `gguf` package's own map.

Knows nothing of edgebuild, so that it can check it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, TokenType
from numpy.typing import NDArray


def permute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """`LlamaModel.permute` of convert_hf_to_gguf.py: rotate-half rows to interleaved rows."""
    rows = values.shape[0]
    return values.reshape(heads, 2, rows // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    source: Path,
    target: Path,
    *,
    stored_as: str = "F32",
    pre: str = "gpt-2",
    rope_factors: NDArray[np.float32] | None = None,
    metadata: Mapping[str, Any] | None = None,
    drop: frozenset[str] = frozenset(),
) -> Path:
    """`source` (a toy directory) as one GGUF. Matrices are stored as `stored_as`, vectors as F32.

    metadata: further keys, whole names; drop: GGUF tensor names to leave out.
    """
    from safetensors.torch import load_file

    config = json.loads((source / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(target, family)
    _write_config(writer, config)
    _write_tokenizer(writer, source, config["vocab_size"], pre)
    for key, value in (metadata or {}).items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}[type(value)](
            key, value
        )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], config["num_hidden_layers"])
    kind = GGMLQuantizationType[stored_as]
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            values = tensor.float().numpy()
            if family == "llama" and ".q_proj." in name:
                values = permute(values, config["num_attention_heads"])
            if family == "llama" and ".k_proj." in name:
                values = permute(values, config["num_key_value_heads"])
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if gguf_name is None:
                raise ValueError(f"gguf knows no name for {name}")
            if gguf_name in drop:
                continue
            own = kind if values.ndim == 2 else GGMLQuantizationType.F32
            writer.add_tensor(gguf_name, gguf.quants.quantize(np.ascontiguousarray(values), own), raw_dtype=own)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _write_config(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write_tokenizer(writer: gguf.GGUFWriter, source: Path, rows: int, pre: str) -> None:
    """Tokens by id, then [PADn] entries of type UNUSED up to the embedding's rows, as the converter fills them."""
    state = json.loads((source / "tokenizer.json").read_text())
    template = json.loads((source / "tokenizer_config.json").read_text()).get("chat_template")
    texts = {index: text for text, index in state["model"]["vocab"].items()}
    special = {entry["id"] for entry in state["added_tokens"]}
    fallback = bool(state["model"]["byte_fallback"])
    tokens, types, scores = [], [], []
    for index in range(max(rows, len(texts))):
        text = texts.get(index, f"[PAD{index}]")
        tokens.append(text)
        scores.append(-float(index))
        if index not in texts:
            types.append(TokenType.UNUSED)
        elif index in special:
            types.append(TokenType.UNKNOWN if text == "<unk>" else TokenType.CONTROL)
        elif fallback and text.startswith("<0x"):
            types.append(TokenType.BYTE)
        else:
            types.append(TokenType.NORMAL)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if fallback:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(scores)
        writer.add_add_bos_token(False)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if template is not None:
        writer.add_chat_template(template)
