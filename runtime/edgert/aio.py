"""The engine for asyncio: the same requests, awaited instead of waited for. No thread of its own per request.

async with await AsyncEngine.load("artifacts/demo") as engine:
    async for delta in engine.generate("Once upon a time", max_tokens=40):
        print(delta.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any

from edgert.engine import Chat, Engine, Prompt
from edgert.handles import Completion, Delta, Handle
from edgert.metrics import EngineSnapshot


async def stream(handle: Handle) -> AsyncIterator[Delta]:
    """The handle's deltas from the first on. Raises what the request failed with. Leaving early cancels the request."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()

    def listener() -> None:
        # A loop that has closed belongs to a client that is gone: nobody to tell.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(changed.set)

    handle.add_listener(listener)
    index = 0
    try:
        while True:
            changed.clear()
            fresh, ended, error = handle.deltas_since(index)
            index += len(fresh)
            for delta in fresh:
                yield delta
            if ended:
                if error is not None:
                    raise error
                return
            if not fresh:
                await changed.wait()
    finally:
        handle.cancel()


async def result(handle: Handle) -> Completion:
    """Wait for the end without blocking the loop. Cancelling the task cancels the request."""
    async with contextlib.aclosing(stream(handle)) as deltas:  # type: ignore[type-var]
        async for _ in deltas:
            pass
    return handle.result(timeout=0)


class AsyncEngine:
    """An Engine behind `await`. Use it from one event loop; the Engine inside may be shared with threads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    async def load(cls, path: str | Path, **overrides: Any) -> AsyncEngine:
        """As Engine.load, without blocking the loop."""
        return cls(await asyncio.to_thread(lambda: Engine.load(path, **overrides)))

    def submit(self, prompt: Prompt | None = None, *, chat: Chat | None = None, **request: Any) -> Handle:
        """As Engine.submit; use `stream` or `result` of this module on the handle."""
        return self.engine.submit(prompt, chat=chat, **request)

    def generate(
        self, prompt: Prompt | None = None, *, chat: Chat | None = None, **request: Any
    ) -> AsyncIterator[Delta]:
        """Submit now; iterate over the deltas with `async for`. Never starting that cancels the request, too."""
        handle = self.submit(prompt, chat=chat, **request)
        deltas = stream(handle)
        weakref.finalize(deltas, handle.cancel).atexit = False
        return deltas

    async def complete(self, prompt: Prompt | None = None, *, chat: Chat | None = None, **request: Any) -> Completion:
        """Submit, and wait for the end."""
        return await result(self.submit(prompt, chat=chat, **request))

    def metrics(self) -> EngineSnapshot:
        return self.engine.metrics()

    async def close(self) -> None:
        await asyncio.to_thread(self.engine.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
