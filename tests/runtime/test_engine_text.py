"""The engine with a real tokenizer: streamed text, stop strings, chat, and failures of one request alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import toys
from edgert.backends.base import StepInputs
from edgert.engine import Engine
from edgert.errors import KvWriteError, RequestError
from edgert.loading import Runtime
from edgert.text import TextCodec
from edgert.worker import Worker
from fakes import VOCABULARY, FakeBackend, make_runtime

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(toys.byte_level_tokenizer(), chat_template=TEMPLATE)


@pytest.fixture
def engine(codec: TextCodec) -> Iterator[Engine]:
    runtime = make_runtime(context=512, text=codec)
    with Engine(lambda: runtime) as running:
        yield running


def ascii_prompt(codec: TextCodec) -> list[int]:
    """Token ids inside the toy vocabulary."""
    return [token % VOCABULARY for token in codec.encode("abc def")]


def test_streamed_text_joins_to_the_full_decode(engine: Engine, codec: TextCodec) -> None:
    handle = engine.submit(ascii_prompt(codec), max_tokens=60, temperature=1.0, seed=1)
    text = "".join(delta.text for delta in handle)
    done = handle.result()
    assert text == done.text == codec.decode(done.token_ids)


def test_a_stop_string_over_token_borders_ends_the_output_and_is_cut(engine: Engine, codec: TextCodec) -> None:
    free = engine.complete(ascii_prompt(codec), max_tokens=60, temperature=1.0, seed=2)
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 3]
    handle = engine.submit(ascii_prompt(codec), max_tokens=60, temperature=1.0, seed=2, stop=[stop])
    text = "".join(delta.text for delta in handle)
    done = handle.result()
    assert done.finish_reason == "stop"
    assert text == done.text == free.text[: free.text.index(stop)]
    assert free.token_ids[: len(done.token_ids)] == done.token_ids
    assert stop in codec.decode(done.token_ids)
    assert stop not in codec.decode(done.token_ids[:-1])


def test_a_stop_string_that_never_completes_loses_no_text(engine: Engine, codec: TextCodec) -> None:
    free = engine.complete(ascii_prompt(codec), max_tokens=30, temperature=1.0, seed=3)
    almost = free.text[-2:] + "\x00never"
    done = engine.complete(ascii_prompt(codec), max_tokens=30, temperature=1.0, seed=3, stop=[almost])
    assert (done.text, done.finish_reason) == (free.text, "length")


def test_an_empty_text_is_refused_and_ids_outside_the_rows_too(engine: Engine) -> None:
    with pytest.raises(RequestError, match="empty"):
        engine.submit("")
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.submit([VOCABULARY + 4])
    with pytest.raises(RequestError):
        engine.submit(chat=[])


def test_a_text_a_list_of_ids_and_a_chat_are_the_same_prompt(codec: TextCodec) -> None:
    runtime = make_runtime(context=512, text=codec)
    backend = runtime.backend
    assert isinstance(backend, FakeBackend)
    wide = runtime.__class__(**{**vars(runtime), "vocabulary_size": 300})
    with Engine(lambda: wide) as engine:
        for asked in ({"prompt": "user: hi\n"}, {"chat": "hi"}, {"prompt": codec.encode("user: hi\n")}):
            engine.complete(max_tokens=1, **asked)  # type: ignore[arg-type]
    steps: list[StepInputs] = [launch.step for launch in backend.launches]
    assert len({step.tokens.tobytes() for step in steps}) == 1


def test_a_fault_in_the_hosts_own_record_stops_the_engine_before_the_launch() -> None:
    runtime = make_runtime(on_launch=lambda number: advance() if number == 3 else None)
    backend = runtime.backend
    assert isinstance(backend, FakeBackend)
    workers: list[Worker] = []

    class Watched(Runtime):
        def worker(self, clock: Callable[[], float]) -> Worker:
            workers.append(super().worker(clock))
            return workers[-1]

    def advance() -> None:
        workers[0]._slots.launched(0, 1, 0)

    watched = Watched(**vars(runtime))
    with Engine(lambda: watched) as engine:
        handle = engine.submit([1, 2, 3], max_tokens=9)
        with pytest.raises(KvWriteError, match="the slot ends at"):
            handle.result(30)
        assert engine.state == "failed"
    assert len(backend.launches) == 3
