"""One background event loop for all our I/O.

A pooled HTTP client belongs to the loop that opened its connections. With one long-lived loop,
calls from plain scripts, notebooks, threads and any number of `asyncio.run` share one client, one
pool and one concurrency limit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import os
import sys
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
)
from contextlib import aclosing, suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_CLEAN_UP_SECONDS = 5.0


class _Work(Generic[T]):
    """A coroutine handed to another loop, whose end can be awaited even after a cancellation."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self.outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._coroutine = coroutine
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        # The caller's context travels along, so that traces opened there stay one tree.
        loop.call_soon_threadsafe(self._start, context=contextvars.copy_context())

    def _start(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.outcome.cancel()
            self.outcome.set_running_or_notify_cancel()  # else whoever waits for it goes on waiting
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())

    def cancel(self) -> None:
        """Cancel the coroutine; `outcome` completes once its clean-up has run."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Portal:
    """A lazily started daemon thread with an event loop; made anew in a forked child."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop, started on first use."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=_serve, args=(self._loop,), name="specrag-io", daemon=True
                ).start()
            return self._loop

    def runs(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether this is the portal's loop, in this process."""
        return loop is self._loop and not loop.is_closed()

    def here(self) -> bool:
        """Whether the caller already runs on the portal's loop."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine from synchronous code and return its result.

        An interrupt (Ctrl-C) cancels the coroutine and waits for its clean-up, so that no request
        is left in flight.

        Raises:
            RuntimeError: called from a coroutine that runs on the portal itself, where waiting
                would never end; use the async method there.
        """
        if self.here():
            coroutine.close()
            raise RuntimeError(
                "a synchronous specrag call was made inside specrag's own event loop; "
                "use the async method (aask, astream) there"
            )
        work = _Work(coroutine, self.loop)
        try:
            return work.outcome.result()
        except BaseException:
            if not work.outcome.done():
                work.cancel()
                concurrent.futures.wait([work.outcome], timeout=_CLEAN_UP_SECONDS)
            raise

    async def hop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine on the portal's loop from any loop.

        A cancellation crosses over, and is not passed on before the coroutine has cleaned up.
        """
        if self.here():
            return await coroutine
        work = _Work(coroutine, self.loop)
        waiter = asyncio.wrap_future(work.outcome)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if not waiter.done():
                work.cancel()
                await asyncio.wait([waiter], timeout=_CLEAN_UP_SECONDS)
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # marks it as seen: the cancellation outranks it
            raise

    async def hop_each(self, items: AsyncGenerator[T, None]) -> AsyncIterator[T]:
        """Iterate from any loop over a generator that runs on the portal's loop."""
        if self.here():
            async with aclosing(items):
                async for item in items:
                    yield item
            return
        try:
            while True:
                try:
                    item = await self.hop(_next(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            await self.hop(_close(items))

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Iterate from synchronous code; closing the iterator closes the generator."""
        try:
            while True:
                try:
                    item = self.run(_next(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if sys.is_finalizing():
                pass  # the loop's thread is frozen, and waiting for it would never end
            elif self.here():
                # A forgotten iterator's garbage may be collected on any thread, the portal's too,
                # where nobody can wait.
                _Work(_close(items), self.loop)
            else:
                self.run(_close(items))

    def end(self, close: Callable[[], Awaitable[None]], *, seconds: float) -> None:
        """Cancel every task, then await `close`, all on the portal's loop; for the process's exit.

        Nothing may be left to begin: what starts while the interpreter ends is frozen half-way,
        and complains.
        """
        if self._loop is not None:
            ending = asyncio.run_coroutine_threadsafe(_end(close, seconds / 2), self._loop)
            concurrent.futures.wait([ending], timeout=seconds)


async def _end(close: Callable[[], Awaitable[None]], seconds: float) -> None:
    loop = asyncio.get_running_loop()
    # No thread can be started any more, so tasks may have failed already (the HTTP client looks up
    # names in one); nobody is left to be told.
    loop.set_exception_handler(lambda *_: None)
    deadline = loop.time() + seconds
    # A task that is cancelled may start others to clean up.
    while (tasks := asyncio.all_tasks() - {asyncio.current_task()}) and loop.time() < deadline:
        # Cancelled before its first step, a wrapper would never await the coroutine it holds.
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=deadline - loop.time())
    await close()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    while not loop.is_closed():
        # A task that exits the process ends the loop as well, and must not: its caller gets the
        # exception, and the others go on.
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items)


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()


portal = Portal()
