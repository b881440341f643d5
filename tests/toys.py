"""Tiny random checkpoints in the published Hugging Face format, made through Transformers: the reference writes them.

Each `make_*` fills a directory with config.json, generation_config.json, safetensors, tokenizer.json and
tokenizer_config.json, and returns it. Same arguments, same bytes. Knows nothing of edgebuild.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END = 0, 1, 2  # the toys' special token ids
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "A small model answers the question in one short sentence, then it stops.",
    "def add(a, b):\n    return a + b\n\n\nfor i in range(10):\n    print(i, add(i, 1))\n",
    '{"name": "toy", "layers": 2, "values": [1, 2, 3], "nested": {"on": true}}',
    "She said: “it's fine”, they're here, we've 1234 apples and 56.78 pears.",
    "Straße, façade, naïve, Ελλάδα, Привет мир, 你好，世界, こんにちは, مرحبا.",
    "Emoji: 😀 😀 🎉 🚀 👩‍💻 🇫🇷 and again 😀🎉.",
    "   leading spaces,\ttabs\t\tand  double  spaces  \r\nand trailing ones   ",
)


def byte_level_tokenizer(tokens: int = 300) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `tokens` ids, specials at 0..2; 300 leaves most emoji split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tokens,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if tokenizer.get_vocab_size() != tokens:
        raise ValueError(f"the corpus yields {tokenizer.get_vocab_size()} tokens, {tokens} were asked for")
    return tokenizer


def byte_fallback_tokenizer(tokens: int = 340) -> Tokenizer:
    """A SentencePiece-like BPE with byte fallback, as Llama 2 has: <unk> <s> </s>, <0x00>..<0xFF>, pieces."""
    specials = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    # words keep their mark, so that merges never cross a space
    trained.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("▁?[^▁]+"), "isolated")
    ascii_text = [line.encode("ascii", "ignore").decode() for line in CORPUS]
    trainer = trainers.BpeTrainer(vocab_size=tokens, special_tokens=specials + fallback, show_progress=False)
    trained.train_from_iterator(ascii_text, trainer)
    state = json.loads(trained.to_str())
    state["model"].update(byte_fallback=True, fuse_unk=True)
    state["pre_tokenizer"] = None
    state["added_tokens"] = [entry for entry in state["added_tokens"] if entry["content"] in specials]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def make_llama(directory: Path, *, attention_bias: bool = False, **options: Any) -> Path:
    """A Llama checkpoint; see `_make` for the options."""
    return _make("Llama", directory, attention_bias=attention_bias, **options)


def make_qwen2(directory: Path, **options: Any) -> Path:
    """A Qwen2 checkpoint: biases on q, k and v; see `_make` for the options. Its head_dim is hidden ÷ heads."""
    return _make("Qwen2", directory, **options)


def make_qwen3(directory: Path, **options: Any) -> Path:
    """A Qwen3 checkpoint: RMS norms on q and k; see `_make` for the options."""
    return _make("Qwen3", directory, **options)


def make_qwen3_5(directory: Path, *, nested: bool = False, **options: Any) -> Path:
    """A dense Qwen3.5 checkpoint; see `_make_hybrid`. nested: as published, a text model beside a vision tower."""
    return _make_hybrid("Qwen3_5", directory, nested=nested, **options)


def make_qwen3_5_moe(directory: Path, *, nested: bool = False, **options: Any) -> Path:
    """A Qwen3.5 checkpoint with experts in every layer; see `_make_hybrid`."""
    return _make_hybrid("Qwen3_5Moe", directory, nested=nested, **EXPERTS | options)


def make_qwen3_next(directory: Path, **options: Any) -> Path:
    """A Qwen3-Next checkpoint: grouped projections, experts in the layers that the config names; see `_make_hybrid`."""
    return _make_hybrid("Qwen3Next", directory, **EXPERTS | options)


def make_qwen4_exp(directory: Path, *, nested: bool = False, **options: Any) -> Path:
    """A Qwen3.8-Flash-Next checkpoint: residual streams, sparse attention, an n-gram table in two shards in layer 1."""
    return _make_hybrid("Qwen4Exp", directory, nested=nested, **EXPERTS | FLASH | options)


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
           "shared_expert_intermediate_size": 40}  # fmt: skip
FLASH = {"hc_count": 3, "hc_lowrank": 8, "ple_layer_ids": [2], "ple_embed_dim": 24, "heads_per_ngram": 3,
         "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2,
         "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16,
         "indexer_compress_ratio": 4, "output_gate_type": "sigmoid"}  # fmt: skip


def _make_hybrid(
    family: str,
    directory: Path,
    *,
    nested: bool = False,
    tied: bool = True,
    seed: int = 0,
    vocabulary_rows: int = 320,
    tokens: int = 300,
    hidden: int = 64,
    layers: int = 4,
    interval: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    key_heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 16,
    value_dim: int = 24,
    partial: float = 0.25,
    ffn: int = 128,
    context: int = 2048,
    dtype: str = "float32",
    shards: int = 1,
    tokenizer: Tokenizer | None = None,
    spread: float = 0.12,
    router_spread: float | None = None,
    embedding_spread: float = 0.12,
    **config_overrides: Any,
) -> Path:
    """Write a random hybrid model: every `interval`-th layer is gated attention, the others are Gated DeltaNet.

    spread, embedding_spread, router_spread: of matrices. Half precision stays near where blocks add little to the
    embedding, and where the router is decided: which of two nearly equal experts is taken is else a matter of rounding.
    """
    import transformers

    prefix = family if family == "Qwen3Next" else f"{family}Text"
    if family not in ("Qwen3_5Moe", "Qwen4Exp"):
        config_overrides["intermediate_size"] = ffn
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=vocabulary_rows,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
        layer_types=["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)],
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": partial},
        rms_norm_eps=1e-6,
        initializer_range=spread,
        tie_word_embeddings=tied,
        bos_token_id=IM_START,
        eos_token_id=IM_END,
        pad_token_id=IM_END,
        **config_overrides,
    )
    kind = "ForCausalLM"
    if nested:
        vision = getattr(transformers, f"{family}Config")().vision_config.to_dict() | {
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": hidden,
        }  # fmt: skip
        config = getattr(transformers, f"{family}Config")(
            text_config=config.to_dict(), vision_config=vision, tie_word_embeddings=tied
        )
        kind = "ForConditionalGeneration"

    def wide(name: str) -> tuple[float, float] | None:
        """Mean and spread of what an ordinary start would leave at a constant or near zero."""
        if name.endswith("linear_attn.norm.weight"):
            return 1.0, 0.2
        if name.endswith("conv1d.weight"):
            return 0.0, 0.5
        if name.endswith("embed_tokens.weight"):  # the padding token's zeros would leave sparse attention to chance
            return 0.0, embedding_spread
        if name.endswith("mlp.gate.weight") and router_spread is not None:
            return 0.0, router_spread
        if "norm" in name:
            return 0.0, 0.2
        return (0.0, 0.5) if name.endswith(("dt_bias", "A_log")) else None

    _save(family + kind, config, directory, wide, seed, dtype)
    if shards > 1:
        _split(directory, shards)
    write_tokenizer(directory, tokenizer or byte_level_tokenizer(tokens))
    return directory


def _make(
    family: str,
    directory: Path,
    *,
    tied: bool = True,
    seed: int = 0,
    vocabulary_rows: int = 320,
    tokens: int = 300,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    ffn: int = 128,
    context: int = 2048,
    theta: float = 10_000.0,
    rope: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    shards: int = 1,
    tokenizer: Tokenizer | None = None,
    **config_overrides: Any,
) -> Path:
    """Write a random model of `family` into `directory`.

    rope: Transformers' `rope_parameters` without theta, for example {"rope_type": "linear", "factor": 2.0}.
    shards: 1 → model.safetensors; more → numbered shards and an index.
    tokenizer: the byte-level one with `tokens` ids unless given. vocabulary_rows may exceed the ids it knows.
    """
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocabulary_rows,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=ffn,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", **(rope or {}), "rope_theta": theta},
        rms_norm_eps=1e-5,
        initializer_range=0.12,  # the usual 0.02 leaves logits of tiny models near uniform
        tie_word_embeddings=tied,
        bos_token_id=IM_START,
        eos_token_id=IM_END,
        pad_token_id=IM_END,
        **config_overrides,
    )

    def wide(name: str) -> tuple[float, float] | None:
        if "norm" in name:  # all ones would hide a norm that is skipped or swapped
            return 1.0, 0.2
        return (0.0, 0.3) if name.endswith(".bias") else None

    _save(f"{family}ForCausalLM", config, directory, wide, seed, dtype)
    if shards > 1:
        _split(directory, shards)
    write_tokenizer(directory, tokenizer or byte_level_tokenizer(tokens))
    return directory


def _save(
    architecture: str,
    config: Any,
    directory: Path,
    wide: Callable[[str], tuple[float, float] | None],
    seed: int,
    dtype: str,
) -> None:
    """Make the model, redraw the parameters for which `wide` gives a mean and a spread, and write it."""
    import torch
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, architecture)(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                drawn = wide(name)
                if drawn is not None:
                    parameter.copy_(drawn[0] + drawn[1] * torch.randn_like(parameter))
    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=IM_START, eos_token_id=[IM_END, END_OF_TEXT], pad_token_id=IM_END
    )
    model.save_pretrained(directory)


def _split(directory: Path, shards: int) -> None:
    """Replace model.safetensors by `shards` numbered files and the index that names them."""
    from safetensors.torch import load_file, save_file

    whole = directory / "model.safetensors"
    tensors = load_file(whole)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        save_file(part, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    total_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    whole.unlink()


def write_tokenizer(directory: Path, tokenizer: Tokenizer, *, chat_template: str | None = CHATML) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template inside) into `directory`."""
    tokenizer.save(str(directory / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    byte_level = SPECIALS[0] in vocabulary
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[1] if byte_level else "<s>",
        "eos_token": SPECIALS[2] if byte_level else "</s>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes the key. For config.json spellings that Transformers no longer writes."""
    content = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            content.pop(key, None)
        else:
            content[key] = value
    path.write_text(json.dumps(content, indent=2))
