"""Text in and out of an artifact: tokenizer.json and chat_template.jinja. Streaming is in detokenize.py.

Knows no engine and no request. Chat templates run in Jinja's immutable sandbox, as Transformers runs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers

from edgert.detokenize import DecoderKind, Detokenizer, StopMatcher
from edgert.errors import ArtifactError, RequestError
from edgert.manifest import Manifest, load_manifest
from edgert.strictjson import REBUILD, read_bounded

__all__ = ["Detokenizer", "StopMatcher", "TextCodec"]

TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"
MAX_TOKENIZER_BYTES = 256 << 20
MAX_TEMPLATE_BYTES = 1 << 20


class TextCodec:
    """Encodes prompts, renders chats, makes detokenizers. Safe to share between threads."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        bos_token: str = "",
        eos_token: str = "",
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        # a tokenizer saved with truncation or padding on would cut or fill prompts silently
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._kind = DecoderKind.of(tokenizer)
        self._template = _compile(chat_template, clock) if chat_template is not None else None
        self._template_names = {"bos_token": bos_token, "eos_token": eos_token}

    @classmethod
    def from_artifact(
        cls, directory: Path, manifest: Manifest | None = None, *, clock: Callable[[], datetime] = datetime.now
    ) -> TextCodec:
        """Read tokenizer.json and, when there is one, chat_template.jinja. Raises ArtifactError."""
        directory = Path(directory)
        manifest = manifest or load_manifest(directory)
        tokenizer = load_tokenizer(read_bounded(directory / TOKENIZER_NAME, MAX_TOKENIZER_BYTES))
        template = None
        if (directory / TEMPLATE_NAME).exists():
            try:
                template = read_bounded(directory / TEMPLATE_NAME, MAX_TEMPLATE_BYTES).decode("utf-8")
            except UnicodeDecodeError as error:
                raise ArtifactError(f"{TEMPLATE_NAME}: byte {error.start} is not UTF-8", hint=REBUILD) from None
        model = manifest.model
        eos = model.eos_token_ids[0] if model.eos_token_ids else None
        return cls(
            tokenizer,
            chat_template=template,
            bos_token=_spelling(tokenizer, model.bos_token_id),
            eos_token=_spelling(tokenizer, eos),
            clock=clock,
        )

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids. An empty text has none, also where the tokenizer would add a beginning-of-sequence token."""
        if not isinstance(text, str):
            raise RequestError(f"a prompt must be text, found {type(text).__name__}")
        if not text:
            return []
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)
        except (UnicodeEncodeError, TypeError):
            raise RequestError("the prompt is not valid Unicode text", hint="lone surrogates have no UTF-8") from None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """All ids at once; what a Detokenizer's deltas join to."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh stream."""
        return Detokenizer(self._kind, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **names: Any
    ) -> str:
        """The prompt text for a conversation; `names` are passed on to the template (tools, enable_thinking, ...).

        Encode the result with add_special=False: the template writes the special tokens itself.
        """
        if self._template is None:
            raise RequestError("this model has no chat template", hint="use --prompt, or rebuild from a chat model")
        _check_messages(messages)
        import jinja2

        try:
            return str(
                self._template.render(
                    messages=[dict(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    **self._template_names,
                    **names,
                )
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused the conversation: {error}") from None
        except Exception as error:  # a template is a program: whatever it raises fails this request alone
            raise RequestError(f"the chat template failed: {type(error).__name__}: {error}") from None

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **names: Any) -> list[int]:
        """Token ids of the rendered conversation."""
        return self.encode(self.render_chat(messages, **names), add_special=False)


def load_tokenizer(data: bytes) -> tokenizers.Tokenizer:
    """A tokenizers.Tokenizer from the bytes of tokenizer.json. Raises ArtifactError."""
    try:
        return tokenizers.Tokenizer.from_str(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{TOKENIZER_NAME}: byte {error.start} is not UTF-8", hint=REBUILD) from None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is a BaseException
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ArtifactError(f"{TOKENIZER_NAME}: not a tokenizer: {reason}", hint=REBUILD) from None


def _spelling(tokenizer: tokenizers.Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else (tokenizer.id_to_token(token_id) or "")


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise RequestError("a conversation must be a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f'message {index}: expected a mapping with "role" and "content"')
        if "content" not in message and "tool_calls" not in message:
            raise RequestError(f"message {index} ({message['role']}): no content")


def _compile(source: str, clock: Callable[[], datetime]) -> Any:
    """The environment Transformers gives chat templates: trimmed blocks, break and continue, three functions."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: clock().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ArtifactError(f"{TEMPLATE_NAME}:{error.lineno}: {error.message}", hint=REBUILD) from None
    except (jinja2.TemplateError, RecursionError, ValueError, SyntaxError) as error:
        raise ArtifactError(f"{TEMPLATE_NAME}: not a template: {error}", hint=REBUILD) from None
