"""Blocking calls, awaited: in the caller's context, bounded, never waited for once abandoned."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
import time
from contextlib import aclosing

import pytest

from specrag_integrations.threads import Threads

PLACE: contextvars.ContextVar[str] = contextvars.ContextVar("PLACE", default="nowhere")


def test_a_call_runs_in_a_thread_in_the_callers_context():
    """It sees the caller's context variables, and blocks nobody."""

    async def asked() -> tuple[str, str]:
        PLACE.set("here")
        return await Threads(1).call(
            lambda: (PLACE.get(), threading.current_thread().name), name="draft_0"
        )

    assert asyncio.run(asked()) == ("here", "specrag-draft_0")


@pytest.mark.parametrize("error", [ValueError("its own"), KeyError("k"), SystemExit(3)])
def test_an_exception_is_raised_as_itself(error):
    """What the function raises reaches whoever awaits it."""

    def fail() -> None:
        raise error

    async def asked() -> None:
        with pytest.raises(type(error)) as raised:
            await Threads(1).call(fail, name="draft_0")
        assert raised.value is error

    asyncio.run(asked())


def test_a_stop_iteration_is_not_lost():
    """No future takes one: it is told as an error that names the call."""

    async def asked() -> None:
        with pytest.raises(RuntimeError, match="draft_0 raised StopIteration"):
            await Threads(1).call(lambda: next(iter(())), name="draft_0")

    asyncio.run(asyncio.wait_for(asked(), 5))


def test_no_more_calls_run_at_once_than_allowed():
    """The others wait for a thread that ends."""
    running, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    async def asked() -> None:
        threads = Threads(3)
        await asyncio.gather(*(threads.call(work, name=f"draft_{n}") for n in range(9)))

    asyncio.run(asked())
    assert most == 3


def test_a_cancelled_call_returns_at_once_and_is_known_until_it_ends():
    """It is abandoned: named, and its slot is free only when it has returned."""
    release = threading.Event()

    async def asked() -> None:
        threads = Threads(1)
        call = asyncio.create_task(threads.call(lambda: release.wait(10), name="draft_0"))
        await asyncio.sleep(0.05)
        call.cancel()
        started = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert time.monotonic() - started < 1
        assert threads.abandoned == ("draft_0",)
        waiting = asyncio.create_task(threads.call(lambda: "next", name="draft_1"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        release.set()
        assert await waiting == "next"
        assert threads.abandoned == ()

    asyncio.run(asked())


def test_items_come_as_they_are_made():
    """The first is there before the second is made."""
    seen = threading.Event()

    def pieces():
        yield "a"
        assert seen.wait(5)
        yield "b"

    async def asked() -> list[str]:
        found = []
        async for item in Threads(1).each(pieces, name="fallback_0"):
            found.append(item)
            seen.set()
        return found

    assert asyncio.run(asked()) == ["a", "b"]


def test_an_iterators_exception_follows_its_items():
    """Nothing of what it made is lost."""

    def pieces():
        yield "a"
        raise ValueError("then this")

    async def asked() -> None:
        items = Threads(1).each(pieces, name="fallback_0")
        assert await anext(items) == "a"
        with pytest.raises(ValueError, match="then this"):
            await anext(items)

    asyncio.run(asked())


def test_an_iterator_that_is_left_is_closed_with_its_next_item():
    """Its clean-up runs, and no further item is made."""
    made, closed, go = [], threading.Event(), threading.Event()

    def pieces():
        try:
            for number in range(100):
                made.append(number)
                yield number
                go.wait(5)
        finally:
            closed.set()

    async def asked() -> None:
        threads = Threads(1)
        async with aclosing(threads.each(pieces, name="fallback_0")) as items:
            async for _ in items:
                break
        assert threads.abandoned == ("fallback_0",)
        go.set()
        assert await asyncio.to_thread(closed.wait, 5)

    asyncio.run(asked())
    assert made == [0, 1]


def test_an_abandoned_call_does_not_keep_the_interpreter():
    """A script ends although a call of it hangs, and prints nothing."""
    script = """
import asyncio, time
from specrag_integrations.threads import Threads

async def main():
    try:
        await asyncio.wait_for(Threads(1).call(lambda: time.sleep(60), name="draft_0"), 0.1)
    except TimeoutError:
        print("left")

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    )
    assert (ended.stdout, ended.stderr) == ("left\n", "")
