"""Streamed text equals the full decode; stop strings cut where a search over the whole text would; chats render."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from pathlib import Path

import pytest
import tokenizers
import toys
from edgert.errors import ArtifactError, RequestError
from edgert.text import StopMatcher, TextCodec, load_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st


@cache
def byte_level() -> TextCodec:
    return TextCodec(toys.byte_level_tokenizer(300), chat_template=toys.CHATML)


@cache
def byte_fallback() -> TextCodec:
    return TextCodec(toys.byte_fallback_tokenizer())


@cache
def metaspace() -> TextCodec:
    tokenizer = toys.byte_fallback_tokenizer()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    return TextCodec(tokenizer)


CODECS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}


def stream(codec: TextCodec, ids: list[int], **options: bool) -> list[str]:
    detokenizer = codec.detokenizer(**options)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=400, deadline=None)
@given(ids=st.lists(st.integers(0, 345), max_size=40), skip=st.booleans())
def test_deltas_of_random_ids_join_to_the_full_decode(name: str, ids: list[int], skip: bool) -> None:
    codec = CODECS[name]()
    assert "".join(stream(codec, ids, skip_special_tokens=skip)) == codec.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab \u00e9\u4f60\U0001f600\U0001f389\n", max_size=30), cut=st.integers(0, 200))
def test_deltas_of_real_text_cut_anywhere_join_to_the_full_decode(name: str, text: str, cut: int) -> None:
    codec = CODECS[name]()
    ids = codec.encode(text, add_special=False)[:cut]
    assert "".join(stream(codec, ids)) == codec.decode(ids)


def test_an_emoji_split_over_tokens_appears_whole_with_its_last_byte() -> None:
    codec = byte_level()
    ids = codec.encode("\U0001f680", add_special=False)
    assert len(ids) > 1
    deltas = stream(codec, ids)
    assert deltas[-2:] == ["\U0001f680", ""]
    assert set(deltas[:-2]) == {""}


def test_output_cut_inside_an_emoji_ends_with_a_replacement_character() -> None:
    codec = byte_level()
    ids = codec.encode("ok \U0001f680", add_special=False)[:-1]
    deltas = stream(codec, ids)
    assert "\ufffd" not in "".join(deltas[:-1])
    assert deltas[-1] == "\ufffd"


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    codec = byte_level()
    ids = [toys.IM_START, *codec.encode("hi", add_special=False), toys.IM_END]
    assert "".join(stream(codec, ids)) == "hi"
    assert "".join(stream(codec, ids, skip_special_tokens=False)) == "<|im_start|>hi<|im_end|>"


def test_a_leading_space_survives_where_the_tokenizer_keeps_it() -> None:
    codec = byte_level()
    assert "".join(stream(codec, codec.encode(" leading", add_special=False))) == " leading"


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    """Counted, not timed: the decoder never sees more than the held run and one token of context."""
    tokenizer = toys.byte_fallback_tokenizer()
    seen: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            seen.append(len(ids))
            return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    codec = TextCodec(Counting())  # type: ignore[arg-type]
    ids = codec.encode("a small model " * 100, add_special=False)
    stream(codec, ids)
    assert max(seen) <= 2


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name() -> None:
    tokenizer = toys.byte_level_tokenizer(300)
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ArtifactError, match="WordPiece"):
        TextCodec(tokenizer)


# stop strings


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read character by character: the first stop string that is complete cuts; the longer of two wins."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=600, deadline=None)
@given(
    deltas=st.lists(st.text(alphabet="abc", max_size=4), max_size=20),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
)
def test_streamed_stops_equal_a_search_over_the_whole_text(deltas: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted, stopped = [], False
    for delta in deltas:
        text, stopped = matcher.push(delta)
        emitted.append(text)
        if stopped:
            break
    if not stopped:
        emitted.append(matcher.finish())
    assert ("".join(emitted), matcher.matched) == naive("".join(deltas), stops)


def test_only_what_could_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("Hello\nUs") == ("Hello", False)
    assert matcher.push("ual") == ("\nUsual", False)
    assert matcher.push(" end\nUser: more") == (" end", True)
    assert matcher.push("late") == ("", True)


@pytest.mark.parametrize("stops", [[""], ["ok", ""], "text"])
def test_an_empty_stop_string_is_refused(stops: list[str]) -> None:
    with pytest.raises(RequestError, match="stop string"):
        StopMatcher(stops)


# encoding and chats


def test_a_saved_truncation_does_not_cut_prompts() -> None:
    tokenizer = toys.byte_level_tokenizer(300)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    ids = TextCodec(tokenizer).encode("a much longer prompt than four tokens")
    assert len(ids) > 4
    assert len(ids) != 64


def test_an_empty_prompt_has_no_tokens() -> None:
    assert byte_fallback().encode("") == []


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(RequestError, match="Unicode"):
        byte_level().encode("\udc80")


def test_a_chat_renders_with_the_generation_prompt() -> None:
    text = byte_level().render_chat([{"role": "user", "content": "hi"}])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert byte_level().encode_chat([{"role": "user", "content": "hi"}])[0] == toys.IM_START


def test_without_a_template_a_chat_is_refused() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        byte_fallback().render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("messages", [[], "hi", 5, {"role": "user"}, [{"content": "x"}], [{"role": "user"}], [3]])
def test_malformed_conversations_are_refused(messages: object) -> None:
    with pytest.raises(RequestError):
        byte_level().render_chat(messages)  # type: ignore[arg-type]


def test_templates_have_the_functions_that_transformers_gives_them() -> None:
    template = (
        "{% for m in messages %}{% if m.content == 'stop' %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{{ strftime_now('%Y') }}{{ missing is defined }}"
    )
    codec = TextCodec(toys.byte_level_tokenizer(300), chat_template=template, clock=lambda: datetime(2024, 5, 1))
    messages = [{"role": "user", "content": "é"}, {"role": "user", "content": "stop"}]
    assert codec.render_chat(messages) == '{"role": "user", "content": "é"}2024False'


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_fails_the_request_alone(template: str) -> None:
    codec = TextCodec(toys.byte_level_tokenizer(300), chat_template=template)
    with pytest.raises(RequestError, match="chat template"):
        codec.render_chat([{"role": "user", "content": "hi"}])


def test_a_template_that_does_not_parse_is_an_artifact_error() -> None:
    with pytest.raises(ArtifactError, match=r"chat_template\.jinja:1"):
        TextCodec(toys.byte_level_tokenizer(300), chat_template="{% for %}")


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b"[1]", b'{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_an_artifact_error(data: bytes) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        load_tokenizer(data)


def test_rendering_equals_transformers(toy_llama: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(toy_llama)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  hi\n"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "bye"},
    ]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert byte_level().render_chat(messages) == expected
