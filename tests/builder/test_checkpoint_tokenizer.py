"""Tokenizers: what a directory or a GGUF says about text, templates and the ids that end a generation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import toys
from edgebuild.checkpoint import open_checkpoint
from edgebuild.checkpoint.gguf_tokenizer import read_gguf_tokenizer
from edgebuild.errors import CheckpointError
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers
from toy_gguf import write_gguf

TEXTS = (
    "",
    "Hello, world! It's they'RE 12345 and 3.14159, ½ and ².",
    "  leading, trailing  \n\n\n\tdef f(x):\r\n        return x ** 2  # 10 %\n",
    "😀 👩‍💻 🇫🇷 e\u0301 café 你好，世界 こんにちは Привет مرحبا नमस्ते",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a" * 300 + " " * 40 + "\n" * 9,
)


@pytest.fixture
def llama(toy_llama: Path, tmp_path: Path) -> Path:
    return shutil.copytree(toy_llama, tmp_path / "llama")


# --- directories ------------------------------------------------------------------------------------------------------


def test_eos_ids_of_config_generation_config_and_tokenizer_are_united(llama: Path) -> None:
    toys.edit_json(llama / "config.json", eos_token_id=[7, 9])
    toys.edit_json(llama / "generation_config.json", eos_token_id=5)
    assert open_checkpoint(llama).tokenizer.eos_token_ids == (2, 5, 7, 9)


def test_eos_ids_that_cannot_be_sampled_are_left_out(llama: Path) -> None:
    toys.edit_json(llama / "config.json", eos_token_id=[2, 310, 5000, -1, True])
    toys.edit_json(llama / "generation_config.json", eos_token_id=None)
    assert open_checkpoint(llama).tokenizer.eos_token_ids == (2,)


def test_the_token_limit_is_the_tokenizers_not_the_embeddings(llama: Path) -> None:
    """320 embedding rows, 300 tokens known."""
    checkpoint = open_checkpoint(llama)
    assert checkpoint.shape("model.embed_tokens.weight")[0] == 320
    assert checkpoint.tokenizer.token_limit == 300


def test_a_tokenizer_with_more_ids_than_rows_is_limited_to_the_rows(tmp_path: Path) -> None:
    directory = toys.make_llama(tmp_path / "short", vocabulary_rows=290)
    assert open_checkpoint(directory).tokenizer.token_limit == 290


def test_added_tokens_past_the_model_vocabulary_count(llama: Path) -> None:
    tokenizer = Tokenizer.from_file(str(llama / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|extra|>"])
    tokenizer.save(str(llama / "tokenizer.json"))
    assert open_checkpoint(llama).tokenizer.token_limit == 301


def test_the_chat_template_file_wins_over_the_config_and_none_is_none(llama: Path) -> None:
    assert open_checkpoint(llama).tokenizer.chat_template == toys.CHATML
    (llama / "chat_template.jinja").write_text("{{ 'file' }}")
    assert open_checkpoint(llama).tokenizer.chat_template == "{{ 'file' }}"
    (llama / "chat_template.jinja").unlink()
    toys.edit_json(llama / "tokenizer_config.json", chat_template=None)
    assert open_checkpoint(llama).tokenizer.chat_template is None


def test_of_named_templates_the_default_is_taken(llama: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    toys.edit_json(llama / "tokenizer_config.json", chat_template=named)
    assert open_checkpoint(llama).tokenizer.chat_template == "plain"


def test_special_tokens_may_be_written_as_objects(llama: Path) -> None:
    toys.edit_json(llama / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"}, bos_token={"content": "a"})
    tokenizer = open_checkpoint(llama).tokenizer
    assert tokenizer.eos_token_ids == (0, 2)
    assert tokenizer.bos_token_id == Tokenizer.from_str(tokenizer.tokenizer_json).token_to_id("a")


def test_a_directory_without_tokenizer_json_says_how_to_make_one(llama: Path) -> None:
    (llama / "tokenizer.json").rename(llama / "tokenizer.model")
    checkpoint = open_checkpoint(llama)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, only tokenizer\.model .*AutoTokenizer"):
        _ = checkpoint.tokenizer


def test_a_broken_tokenizer_json_is_refused(llama: Path) -> None:
    (llama / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Nonsense"}}')
    checkpoint = open_checkpoint(llama)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer"):
        _ = checkpoint.tokenizer


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_is_not_text_is_named(llama: Path, name: str) -> None:
    (llama / name).write_bytes(b"\xff\xfe\x00")
    checkpoint = open_checkpoint(llama)
    with pytest.raises(CheckpointError, match=f"{name} is not UTF-8"):
        _ = checkpoint.tokenizer


# --- GGUF -------------------------------------------------------------------------------------------------------------


def test_a_byte_level_tokenizer_survives_the_gguf(toy_llama: Path, tmp_path: Path) -> None:
    original = Tokenizer.from_file(str(toy_llama / "tokenizer.json"))
    files = open_checkpoint(write_gguf(toy_llama, tmp_path / "toy.gguf")).tokenizer
    rebuilt = Tokenizer.from_str(files.tokenizer_json)
    for text in (*TEXTS, *toys.CORPUS):
        ids = rebuilt.encode(text).ids
        assert ids == original.encode(text).ids
        assert rebuilt.decode(ids, skip_special_tokens=False) == text
    assert (files.token_limit, files.eos_token_ids, files.bos_token_id) == (300, (2,), 1)
    assert files.chat_template == toys.CHATML


def test_a_byte_fallback_tokenizer_survives_the_gguf(tmp_path: Path) -> None:
    """SentencePiece pieces, merges from the scores, bytes for what no piece covers, a leading space."""
    original = toys.byte_fallback_tokenizer()
    source = toys.make_llama(tmp_path / "spm", vocabulary_rows=352, tokenizer=original)
    files = open_checkpoint(write_gguf(source, tmp_path / "toy.gguf")).tokenizer
    rebuilt = Tokenizer.from_str(files.tokenizer_json)
    for text in (*TEXTS[:4], *toys.CORPUS, " one", "  two"):
        ids = rebuilt.encode(text).ids
        assert ids == original.encode(text).ids
        assert rebuilt.decode(ids) == text
    assert files.token_limit == 340


def test_merges_from_scores_are_those_of_transformers() -> None:
    from transformers.convert_slow_tokenizer import generate_merges

    pieces = ["a", "b", "ab", "c", "bc", "abc", "aba", "ba", "cab", "aa", "bb"]
    scores = [-1.0, -1.0, -3.0, -1.0, -3.0, -4.0, -5.0, -3.0, -5.0, -3.0, -9.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [1] * len(pieces),
    }
    state = json.loads(read_gguf_tokenizer(metadata, 100).tokenizer_json)
    reference = generate_merges(
        {piece: index for index, piece in enumerate(pieces)}, dict(zip(pieces, scores, strict=True))
    )
    assert [tuple(pair) for pair in state["model"]["merges"]] == [tuple(pair) for pair in reference]


def test_every_end_of_a_gguf_is_an_eos(toy_llama: Path, tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 9}
    files = open_checkpoint(write_gguf(toy_llama, tmp_path / "toy.gguf", metadata=ends)).tokenizer
    assert files.eos_token_ids == (0, 2, 9)


def minimal(pre: str | None, **more: Any) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer that knows the 256 bytes."""
    keys = {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"],
        "tokenizer.ggml.token_type": [3, *[1] * 257],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        **({} if pre is None else {"tokenizer.ggml.pre": pre}),
        **keys,
    }


def test_begin_of_text_is_added_where_the_file_or_its_kind_says_so() -> None:
    def ids(pre: str, **more: Any) -> list[int]:
        files = read_gguf_tokenizer(minimal(pre, **more), 300)
        found: list[int] = Tokenizer.from_str(files.tokenizer_json).encode("ab").ids
        return found

    assert ids("gpt-2") == [257]
    assert ids("gpt-2", add_bos_token=True) == [0, 257]
    assert ids("llama-bpe") == [0, 257]
    assert ids("llama-bpe", add_bos_token=False) == [257]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (minimal("kimi-k2"), r"pre-tokenizer 'kimi-k2' is not known .*smollm"),
        (minimal(None), r"pre-tokenizer None is not known .*convert the model again"),
        (minimal("gpt-2", model="rwkv"), "tokenizer model 'rwkv' is not supported"),
        (minimal("gpt-2", merges=[]), "no merges"),
        (minimal("gpt-2", merges=["ab"]), "'ab' is not two pieces"),
        (minimal("gpt-2", merges=["x yz"]), "no tokenizer that this tokenizers version reads"),
        (minimal("gpt-2", tokens=["a", "a"], token_type=[1, 1]), "'a' twice"),
        (minimal("gpt-2", token_type=[1]), "another number of token types"),
        ({"tokenizer.ggml.model": "gpt2"}, "no token list"),
        (minimal("x", model="llama", merges=[], scores=[0.0] * 258), "all scores .* are equal"),
    ],
)
def test_what_would_tokenise_wrongly_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_gguf_tokenizer(metadata, 300)


def published_pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizers of the published tokenizer.json files, or those that Transformers builds in code."""
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "qwen2":
        from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

        return Qwen2Tokenizer()._tokenizer.pre_tokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern = TikTokenConverter(vocab_file="none").pattern  # Llama 3's
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_text_is_split_as_the_published_tokenizer_splits_it(pre: str) -> None:
    published = published_pre_tokenizer(pre)
    files = read_gguf_tokenizer(minimal(pre), 300)
    ours = Tokenizer.from_str(files.tokenizer_json).pre_tokenizer
    words = st.sampled_from(
        ["12", "7", " ", "  ", "\n", "\r\n", "\t", "it's", "'LL", "é", "你好", "😀", "½", "_", "...", "a"]
    )

    @settings(max_examples=200, deadline=None)
    @given(st.one_of(st.text(max_size=30), st.lists(words, max_size=14).map("".join)))
    def same(text: str) -> None:
        assert ours.pre_tokenize_str(text) == published.pre_tokenize_str(text)

    same()


# --- the real one -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(demo_gguf: Path) -> Any:
    return open_checkpoint(demo_gguf).tokenizer


def test_smollm2_knows_its_ids(smollm2: Any) -> None:
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json)
    assert [tokenizer.token_to_id(text) for text in toys.SPECIALS] == [0, 1, 2]
    assert (smollm2.token_limit, smollm2.eos_token_ids, smollm2.bos_token_id) == (49_152, (2,), 1)
    assert tokenizer.encode("The capital of France is").tokens == ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_round_trips(smollm2: Any, text: str) -> None:
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json)
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_smollm2_encodes_as_the_published_tokenizer(smollm2: Any) -> None:
    """A tokenizer put together as the published tokenizer.json is, over the GGUF's own vocabulary and merges."""
    from tokenizers import decoders, models

    state = json.loads(smollm2.tokenizer_json)["model"]
    reference = Tokenizer(models.BPE(vocab=state["vocab"], merges=[tuple(pair) for pair in state["merges"]]))
    reference.pre_tokenizer = published_pre_tokenizer("smollm")
    reference.decoder = decoders.ByteLevel()
    ours = Tokenizer.from_str(smollm2.tokenizer_json)
    for text in (*TEXTS[:4], *toys.CORPUS):
        assert ours.encode(text).ids == reference.encode(text).ids


def test_smollm2_renders_its_chat_template(smollm2: Any) -> None:
    import jinja2.sandbox

    template = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(smollm2.chat_template)
    text = template.render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = Tokenizer.from_str(smollm2.tokenizer_json).encode(text).ids
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)
