"""The engine as a caller sees it, on the fake backend: results, ends, refusals, failures, threads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from edgert.aio import AsyncEngine
from edgert.engine import Engine
from edgert.errors import BackendError, EdgertError, QueueFull, RequestError
from edgert.sampling import SamplingParams
from fakes import VOCABULARY, FakeBackend, make_cells, make_runtime, reference

WAIT_S = 30.0


@contextlib.contextmanager
def running(**options: Any) -> Iterator[tuple[Engine, FakeBackend]]:
    runtime = make_runtime(**options)
    with Engine(lambda: runtime) as engine:
        assert isinstance(runtime.backend, FakeBackend)
        yield engine, runtime.backend
    assert not any(thread.name == "edgert" for thread in threading.enumerate())


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * index) % VOCABULARY for index in range(length)]


def greedy(prompt: list[int], tokens: int, context: int = 256) -> list[int]:
    return reference(prompt, SamplingParams(max_tokens=tokens), 0, context)


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 129])
def test_prompts_around_every_chunk_boundary_equal_the_one_shot_result(length: int, run_ahead: int) -> None:
    with running(run_ahead=run_ahead) as (engine, backend):
        done = engine.complete(prompt_of(length), max_tokens=9)
    assert list(done.token_ids) == greedy(prompt_of(length), 9)
    assert done.finish_reason == "length"
    chunks = [launch.step for launch in backend.launches if launch.step.cell.kind == "prefill"]
    assert [int(step.valid[0]) for step in chunks if step.valid[0] == 0] == []
    assert sum(int(step.valid[0]) for step in chunks) == length


def test_a_prompt_that_fills_the_context_gets_exactly_one_token() -> None:
    with running(context=256) as (engine, _):
        done = engine.complete(prompt_of(256), max_tokens=50)
        assert list(done.token_ids) == greedy(prompt_of(256), 50)
        assert (len(done.token_ids), done.finish_reason) == (1, "length")
        near = engine.complete(prompt_of(255), max_tokens=50)
        assert list(near.token_ids) == greedy(prompt_of(255), 50)
        assert (len(near.token_ids), near.finish_reason) == (2, "length")
        with pytest.raises(RequestError, match=r"257 tokens.*256"):
            engine.submit(prompt_of(257))


@pytest.mark.parametrize("bad", ["", [], [""]])
def test_an_empty_prompt_fails_alone_while_another_stream_runs(bad: Any) -> None:
    with running() as (engine, _):
        stream = iter(engine.generate(prompt_of(20), max_tokens=40))
        first = next(stream)
        with pytest.raises(RequestError):
            engine.submit(bad)
        rest = [token for delta in stream for token in delta.token_ids]
        assert [*first.token_ids, *rest] == greedy(prompt_of(20), 40)
        assert engine.metrics().rejected == 1


def test_prompt_ids_reach_to_the_embedding_rows_and_sampled_ids_to_the_tokenizer() -> None:
    with running() as (engine, _):
        done = engine.complete([VOCABULARY + 3], max_tokens=30, temperature=5.0, seed=3)
        assert max(done.token_ids) < VOCABULARY
        for bad in (VOCABULARY + 4, -1):
            with pytest.raises(RequestError, match=f"{bad} is outside the vocabulary of {VOCABULARY + 4}"):
                engine.submit([0, bad])


@pytest.mark.parametrize("prompt", [5, 2.5, [1.5], [True], [[1]], b"ab", {1, 2}, {1: 2}, np.array([[1, 2]])])
def test_a_prompt_of_another_type_is_refused(prompt: Any) -> None:
    with running() as (engine, _), pytest.raises(RequestError):
        engine.submit(prompt)


def test_prompt_and_chat_exclude_each_other() -> None:
    with running() as (engine, _):
        for call in ({}, {"prompt": [1], "chat": "hello"}):
            with pytest.raises(RequestError, match="either prompt or chat"):
                engine.submit(**call)
        with pytest.raises(RequestError, match="no tokenizer"):
            engine.submit("text")


def test_several_requests_at_once_equal_each_alone_whatever_the_sampling() -> None:
    asked = [
        (prompt_of(3, 1), SamplingParams(max_tokens=20)),
        (prompt_of(130, 2), SamplingParams(max_tokens=33, temperature=0.8, seed=11)),
        (prompt_of(64, 3), SamplingParams(max_tokens=5, temperature=1.3, top_k=5, seed=12)),
        (prompt_of(17, 4), SamplingParams(max_tokens=44, temperature=1.0, top_p=0.7, seed=13)),
        (prompt_of(90, 5), SamplingParams(max_tokens=1)),
        (prompt_of(2, 6), SamplingParams(max_tokens=60, temperature=2.0, top_k=9, top_p=0.9, seed=2**64 - 1)),
    ]
    for run_ahead in (0, 1):
        with running(run_ahead=run_ahead) as (engine, _):
            handles = [engine.submit(prompt, params=params) for prompt, params in asked]
            got = [list(handle.result(WAIT_S).token_ids) for handle in handles]
        assert got == [reference(prompt, params, params.seed or 0, 256) for prompt, params in asked]


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_stop_token_ends_the_output_and_is_its_last_id(run_ahead: int) -> None:
    free = greedy(prompt_of(10), 30)
    eos = free[12]
    expected = free[: free.index(eos) + 1]
    with running(eos=[eos], run_ahead=run_ahead) as (engine, _):
        done = engine.complete(prompt_of(10), max_tokens=30)
        assert (list(done.token_ids), done.finish_reason) == (expected, "stop")
        assert list(engine.complete(prompt_of(10), max_tokens=30, ignore_eos=True).token_ids) == free
        assert engine.metrics().discarded_rows == run_ahead
        assert engine.metrics().free_slots == 4


def test_cancel_ends_a_stream_and_frees_its_slot() -> None:
    with running(slots=1, run_ahead=1) as (engine, _):
        handle = engine.submit(prompt_of(4), max_tokens=200)
        stream = iter(handle)
        next(stream)
        handle.cancel()
        list(stream)
        done = handle.result(WAIT_S)
        assert done.finish_reason in ("cancelled", "length")
        assert list(done.token_ids) == greedy(prompt_of(4), 200)[: len(done.token_ids)]
        assert list(engine.complete(prompt_of(30), max_tokens=6).token_ids) == greedy(prompt_of(30), 6)
        handle.cancel()


def test_cancel_in_the_middle_of_a_prefill_frees_the_slot_within_one_chunk() -> None:
    runtime = make_runtime(context=2048, slots=1)
    backend = runtime.backend
    assert isinstance(backend, FakeBackend)
    with Engine(lambda: runtime) as engine:
        handles: list[Any] = []
        go = threading.Event()

        def on_launch(number: int) -> None:
            assert go.wait(WAIT_S)
            if number == 5:
                handles[0].cancel()

        backend.on_launch = on_launch
        handles.append(engine.submit(prompt_of(2000), max_tokens=4))
        after = engine.submit(prompt_of(8), max_tokens=3)
        go.set()
        assert list(after.result(WAIT_S).token_ids) == greedy(prompt_of(8), 3, 2048)
        gone = handles[0].result(WAIT_S)
    assert (gone.token_ids, gone.finish_reason) == ((), "cancelled")
    assert [int(launch.step.valid[0]) for launch in backend.launches[:6]] == [64, 64, 64, 64, 64, 8]


def test_leaving_the_loop_of_generate_cancels() -> None:
    with running(slots=1, context=2048) as (engine, _):
        for _delta in engine.generate(prompt_of(4), max_tokens=2000):
            break
        assert engine.complete(prompt_of(4), max_tokens=2).finish_reason == "length"


def test_a_backend_failure_ends_every_request_with_that_error_and_the_engine_says_so() -> None:
    submitted = threading.Event()

    def on_launch(number: int) -> None:
        if number == 12:
            submitted.wait(WAIT_S)
            raise BackendError("the device fell off the bus")

    with running(on_launch=on_launch, slots=2) as (engine, backend):
        handles = [engine.submit(prompt_of(30, start), max_tokens=100) for start in range(4)]
        submitted.set()
        for handle in handles:
            with pytest.raises(BackendError, match="fell off the bus"):
                handle.result(WAIT_S)
            with pytest.raises(BackendError, match="fell off the bus"):
                list(handle)
        with pytest.raises(BackendError, match=r"engine is failed.*fell off the bus"):
            engine.submit([1])
        assert engine.state == "failed"
        assert engine.metrics().finished == {"error": 4}
        engine.close()
        assert backend.closed


def test_an_error_that_is_not_ours_is_wrapped() -> None:
    def on_launch(number: int) -> None:
        raise ZeroDivisionError(f"launch {number}")

    with running(on_launch=on_launch) as (engine, _), pytest.raises(BackendError, match="ZeroDivisionError"):
        engine.complete([1], max_tokens=2)


def test_a_runtime_that_cannot_be_opened_raises_and_leaves_no_thread() -> None:
    def refuse() -> Any:
        raise BackendError("no device")

    with pytest.raises(BackendError, match="no device"):
        Engine(refuse)
    assert not any(thread.name == "edgert" for thread in threading.enumerate())


def test_the_queue_has_a_bound_and_says_so() -> None:
    go = threading.Event()

    def on_launch(_number: int) -> None:
        assert go.wait(WAIT_S)

    with running(slots=1, queue_limit=2, on_launch=on_launch) as (engine, _):
        first = engine.submit([1], max_tokens=2)
        for _ in range(1000):
            if engine.metrics().prefilling + engine.metrics().decoding:
                break
            threading.Event().wait(0.005)
        handles = [first]
        with pytest.raises(QueueFull, match="queue_limit is 2"):
            handles += [engine.submit([1, 2], max_tokens=2) for _ in range(5)]
        go.set()
        for handle in handles:
            assert handle.result(WAIT_S).finish_reason == "length"


def test_closing_ends_what_runs_and_later_calls_are_refused() -> None:
    with running(context=2048, run_ahead=1) as (engine, backend):
        handles = [engine.submit(prompt_of(50, start), max_tokens=1900) for start in range(6)]
        next(iter(handles[0]))
        engine.close()
        assert {handle.result(WAIT_S).finish_reason for handle in handles} <= {"cancelled", "length"}
        assert backend.closed
        assert engine.state == "closed"
        with pytest.raises(BackendError, match="closed"):
            engine.submit([1])


def test_many_threads_submit_at_once() -> None:
    results: dict[int, list[int]] = {}
    with running(run_ahead=1) as (engine, _):

        def client(number: int) -> None:
            results[number] = list(engine.complete(prompt_of(10 + number, number), max_tokens=12).token_ids)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert results == {number: greedy(prompt_of(10 + number, number), 12) for number in range(16)}


def test_deltas_join_to_the_result_and_the_last_one_carries_the_reason() -> None:
    with running() as (engine, _):
        handle = engine.submit(prompt_of(5), max_tokens=7)
        deltas = list(handle)
        assert [delta.finish_reason for delta in deltas] == [None] * 6 + ["length"]
        assert tuple(token for delta in deltas for token in delta.token_ids) == handle.result(0).token_ids
        assert list(handle) == deltas


def test_metrics_follow_the_definitions() -> None:
    with running() as (engine, _):
        done = engine.complete(prompt_of(20), max_tokens=5, task="chat")
        metrics = done.metrics
        assert (metrics.task, metrics.usage.prompt_tokens, metrics.usage.completion_tokens) == ("chat", 20, 5)
        assert metrics.ttft_ms is not None
        assert metrics.tpot_ms == pytest.approx(sum(metrics.itl_ms) / 4)
        assert metrics.queue_ms + metrics.prefill_ms == pytest.approx(metrics.ttft_ms)
        snapshot = engine.metrics()
        assert (snapshot.prompt_tokens, snapshot.padded_prompt_tokens, snapshot.output_tokens) == (20, 44, 5)


def test_async_streams_side_by_side_and_cancel() -> None:
    async def main() -> None:
        async with AsyncEngine(Engine(lambda: make_runtime(context=2048))) as engine:

            async def one(start: int) -> list[int]:
                stream = engine.generate(prompt_of(20, start), max_tokens=15)
                return [token async for delta in stream for token in delta.token_ids]

            got = await asyncio.gather(*(one(start) for start in range(6)))
            assert got == [greedy(prompt_of(20, start), 15, 2048) for start in range(6)]
            done = await engine.complete(prompt_of(9), max_tokens=3)
            assert list(done.token_ids) == greedy(prompt_of(9), 3, 2048)
            task = asyncio.create_task(engine.complete(prompt_of(9), max_tokens=2000))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(RequestError):
                engine.submit([])

    asyncio.run(main())


def test_a_client_whose_event_loop_is_gone_does_not_stop_the_worker() -> None:
    with running(context=2048) as (engine, _):

        async def leave() -> None:
            stream = AsyncEngine(engine).generate(prompt_of(9), max_tokens=1500)
            await stream.__anext__()

        asyncio.run(leave())
        assert list(engine.complete(prompt_of(5), max_tokens=4).token_ids) == greedy(prompt_of(5), 4, 2048)


def test_a_listener_that_comes_late_is_told_at_once() -> None:
    with running() as (engine, _):
        handle = engine.submit(prompt_of(5), max_tokens=2)
        handle.result(WAIT_S)
        told: list[int] = []
        handle.add_listener(lambda: told.append(1))
        assert told == [1]


def test_a_result_that_does_not_come_in_time_is_a_timeout() -> None:
    go = threading.Event()

    def on_launch(_number: int) -> None:
        assert go.wait(WAIT_S)

    with running(on_launch=on_launch) as (engine, _):
        handle = engine.submit([1], max_tokens=1)
        with pytest.raises(TimeoutError):
            handle.result(0.01)
        go.set()
        assert handle.result(WAIT_S).finish_reason == "length"


def test_three_slots_pad_to_a_batch_of_four_on_a_reserved_slot() -> None:
    with running(slots=3, cells=make_cells(256, batches=(1, 2, 4))) as (engine, backend):
        handles = [engine.submit(prompt_of(9, start), max_tokens=30) for start in range(5)]
        got = [list(handle.result(WAIT_S).token_ids) for handle in handles]
    assert got == [greedy(prompt_of(9, start), 30) for start in range(5)]
    assert backend.slots == 4
    assert 3 not in backend.resets
    assert {launch.step.cell.batch for launch in backend.launches if launch.step.cell.kind == "decode"} >= {1, 4}


def test_an_unknown_keyword_is_refused_with_the_known_ones() -> None:
    with running() as (engine, _):
        with pytest.raises(EdgertError, match=r"'temprature'.*temperature"):
            engine.submit([1], temprature=1)
        with pytest.raises(RequestError, match="not both"):
            engine.submit([1], params=SamplingParams(), top_k=1)


def test_params_and_task_of_another_type_are_refused() -> None:
    """A task that cannot be a key would otherwise end the engine where drafts are counted by task."""
    with running() as (engine, _):
        for bad in ({"params": {"max_tokens": 3}}, {"task": ["chat"]}, {"task": 5}):
            with pytest.raises(RequestError, match=f"{next(iter(bad))} is"):
                engine.submit([1], **bad)


def test_a_listener_that_raises_is_logged_and_ends_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """It runs on the engine's thread: what it raised would end every request, and leave some without an end."""

    def listener() -> None:
        raise ZeroDivisionError

    with running() as (engine, _):
        handle = engine.submit(prompt_of(5), max_tokens=60)
        with contextlib.suppress(ZeroDivisionError):  # at once, where a token is there already
            handle.add_listener(listener)
        other = engine.submit(prompt_of(9), max_tokens=20)
        assert list(handle.result(WAIT_S).token_ids) == greedy(prompt_of(5), 60)
        assert list(other.result(WAIT_S).token_ids) == greedy(prompt_of(9), 20)
        assert engine.state == "ready"
    assert f"a listener of request {handle.id} failed" in caplog.text


@pytest.mark.parametrize("wrap", [lambda engine: engine, AsyncEngine])
def test_deltas_that_nobody_ever_asks_for_are_not_computed(wrap: Any) -> None:
    """A client may be gone before the first one."""
    with running() as (engine, _):
        wrap(engine).generate(prompt_of(5), max_tokens=200)
        gc.collect()
        deadline = time.monotonic() + WAIT_S
        while not engine.metrics().finished.get("cancelled"):
            assert time.monotonic() < deadline, engine.metrics().finished
            time.sleep(0.002)
