"""Blocking calls awaited: each runs in a daemon thread of its own, and none is ever joined.

Some models of an application can only be called synchronously. A pool shared by questions would
deadlock where one of them asks a question itself, and a pool that is joined would hold up an
answer, Ctrl-C or the interpreter's end for a call that hangs.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """The blocking calls of one question, awaited on one loop.

    Args:
        limit: The most calls at once; an abandoned one counts until it returns.
    """

    def __init__(self, limit: int) -> None:
        self._slots = asyncio.Semaphore(limit)
        self._numbers = itertools.count()
        self._running: dict[int, tuple[str, asyncio.Future[Any]]] = {}

    @property
    def abandoned(self) -> tuple[str, ...]:
        """Names of the calls that nobody waits for any more, and that have not returned yet."""
        return tuple(name for name, result in self._running.values() if result.cancelled())

    async def call(self, function: Callable[[], T], *, name: str) -> T:
        """Call in a thread, in the caller's context, under a name; raise what it raises.

        A cancellation returns at once, and abandons the call.
        """
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        number = next(self._numbers)
        self._running[number] = (name, result)

        def settle(set_outcome: Callable[[Any], None], outcome: object) -> None:
            del self._running[number]
            self._slots.release()
            if not result.cancelled():
                set_outcome(outcome)

        def run() -> None:
            try:
                outcome: tuple[Callable[[Any], None], object] = result.set_result, function()
            except StopIteration as error:  # no future takes one
                outcome = result.set_exception, RuntimeError(f"{name} raised {error!r}")
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                outcome = result.set_exception, error
            with suppress(RuntimeError):  # the loop is closed, so nobody waits
                loop.call_soon_threadsafe(settle, *outcome)

        threading.Thread(
            target=contextvars.copy_context().run, args=(run,), name=f"specrag-{name}", daemon=True
        ).start()
        return await result

    async def each(
        self, iterate: Callable[[], Iterator[T]], *, name: str
    ) -> AsyncGenerator[T, None]:
        """Yield what an iterator yields in a thread.

        Leaving early abandons it; it is closed once its next item has come.
        """
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[tuple[T] | None] = asyncio.Queue()
        left = threading.Event()

        def run() -> None:
            found = iterate()
            for item in found:
                if left.is_set():
                    if close := getattr(found, "close", None):
                        close()
                    return
                with suppress(RuntimeError):  # the loop is closed, so nobody reads
                    loop.call_soon_threadsafe(items.put_nowait, (item,))

        calling = asyncio.create_task(self.call(run, name=name))
        calling.add_done_callback(lambda _: items.put_nowait(None))
        try:
            while (item := await items.get()) is not None:
                yield item[0]
            calling.result()
        finally:
            left.set()
            calling.cancel()
            await asyncio.wait([calling])
            if not calling.cancelled():
                calling.exception()  # seen, also where the reader left before it was raised
