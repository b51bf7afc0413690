"""One background loop serves every caller, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import signal
import sys
import threading
import time

import pytest

from specrag_integrations.portal import _CLEAN_UP_SECONDS, portal

NAME = contextvars.ContextVar("NAME", default="nobody")


async def thread_name():
    return threading.current_thread().name


def portal_is_idle():
    """Tell whether no task but the one that asks is left on the portal's loop."""

    async def others():
        for _ in range(20):  # finalisers of generators take a few turns of the loop
            await asyncio.sleep(0)
        return asyncio.all_tasks() - {asyncio.current_task()}

    # A trial request that another module's tests began may go on: it serves later questions.
    return {task.get_coro().__qualname__ for task in portal.run(others())} <= {"Endpoint._try"}


def test_all_callers_share_one_loop():
    """Synchronous code, threads and two `asyncio.run` in a row."""
    loops = {id(portal.loop)}

    async def loop_there():
        return id(asyncio.get_running_loop())

    async def hop():
        return await portal.hop(loop_there())

    loops.add(portal.run(loop_there()))
    loops |= {asyncio.run(hop()), asyncio.run(hop())}
    threads = [
        threading.Thread(target=lambda: loops.add(portal.run(loop_there()))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loops) == 1
    assert portal.run(thread_name()) == "specrag-io"


@pytest.mark.parametrize("error", [LookupError("gone"), KeyError(1), StopAsyncIteration()])
def test_an_exception_passes_unchanged(error):
    """The very object that the coroutine raised reaches the caller."""

    async def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        portal.run(fail())
    assert caught.value is error
    with pytest.raises(type(error)) as caught:
        asyncio.run(portal.hop(fail()))
    assert caught.value is error


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_task_that_exits_does_not_take_the_loop_along(error):
    """Its caller gets the exception; the others go on."""

    async def leave():
        raise error

    with pytest.raises(error):
        portal.run(leave())
    assert portal.run(thread_name()) == "specrag-io"


def test_a_synchronous_call_on_the_portal_itself_is_refused():
    """It would wait for itself for ever."""

    async def call():
        portal.run(thread_name())

    with pytest.raises(RuntimeError, match=r"use the async method \(aask, astream\) there"):
        portal.run(call())
    with pytest.raises(RuntimeError):
        asyncio.run(portal.hop(call()))


def test_hopping_on_the_portal_itself_stays_there():
    """The endpoint is used by coroutines that run there already."""

    async def call():
        task = asyncio.current_task()

        async def inner():
            return asyncio.current_task() is task

        return await portal.hop(inner())

    assert portal.run(call())


def test_a_synchronous_call_inside_a_running_loop_works():
    """As in a notebook."""

    async def cell():
        return portal.run(thread_name())

    assert asyncio.run(cell()) == "specrag-io"


def test_context_variables_reach_the_coroutine_and_its_tasks():
    """Traces opened by the caller stay one tree, in all four ways in."""

    async def seen():
        return await asyncio.create_task(name())

    async def name():
        return NAME.get()

    async def names():
        yield NAME.get()
        yield await seen()

    async def from_a_loop():
        NAME.set("loop")
        return [await portal.hop(seen()), *[item async for item in portal.hop_each(names())]]

    token = NAME.set("caller")
    try:
        assert [portal.run(seen()), *portal.iterate(names())] == ["caller"] * 3
        assert asyncio.run(from_a_loop()) == ["loop"] * 3
    finally:
        NAME.reset(token)
    assert portal.run(seen()) == "nobody"


def test_cancelling_the_caller_cancels_the_coroutine_and_waits_for_its_end():
    """The cancellation is passed on after the clean-up, and no task is left."""
    steps = []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            steps.append("cleaned up")

    async def main():
        task = asyncio.create_task(portal.hop(work()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        steps.append("cancelled")
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(main()) == set()
    assert steps == ["cleaned up", "cancelled"]
    assert portal_is_idle()


def test_a_failing_clean_up_does_not_hide_a_cancellation():
    """The caller asked to be cancelled, and nothing is reported as never retrieved."""
    complaints = []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            raise LookupError

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, c: complaints.append(c))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await portal.hop(work())

    asyncio.run(main())
    gc.collect()
    assert complaints == []
    assert portal_is_idle()


def test_a_coroutine_cancelled_before_it_started_never_runs():
    """Cancelling at once leaves nothing behind either."""

    async def main():
        task = asyncio.create_task(portal.hop(asyncio.sleep(60)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        return task.cancelled()

    assert asyncio.run(main())
    assert portal_is_idle()


def test_a_result_that_raced_a_cancellation_is_dropped():
    """A caller cancelled in the instant of its result is cancelled, without a complaint."""

    async def main():
        for delay in (0.0, 0.0005, 0.001):
            task = asyncio.create_task(portal.hop(asyncio.sleep(delay, "result")))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.wait([task], timeout=5)
            assert task.done()

    asyncio.run(main())
    assert portal_is_idle()


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ there")
def test_an_interrupt_is_passed_on_after_the_clean_up_and_no_later():
    """Ctrl-C does not wait for the longest clean-up allowed, only for this one."""
    steps = []

    async def work():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            steps.append("cleaned up")

    main = threading.main_thread().ident
    timer = threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGINT])
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        portal.run(work())
    assert time.monotonic() - began < _CLEAN_UP_SECONDS / 2
    assert steps == ["cleaned up"]
    assert portal_is_idle()


async def counted(ended):
    """Count for ever, saying when it is closed."""
    try:
        for number in range(1000):
            yield number
            await asyncio.sleep(0)
    finally:
        ended.append(threading.current_thread().name)


async def first_two(items):
    read = []
    async for item in items:
        read.append(item)
        if len(read) == 2:
            break
    await items.aclose()
    return read


@pytest.mark.parametrize("where", ["sync", "foreign loop", "portal"])
def test_a_generator_is_closed_on_the_portal(where):
    """Wherever it is read, and as soon as the reader stops."""
    ended = []
    if where == "sync":
        items = portal.iterate(counted(ended))
        read = [next(items), next(items)]
        items.close()
    elif where == "portal":
        read = portal.run(first_two(portal.hop_each(counted(ended))))
    else:
        read = asyncio.run(first_two(portal.hop_each(counted(ended))))
    assert (read, ended) == ([0, 1], ["specrag-io"])
    assert portal_is_idle()


def test_an_exception_of_a_generator_passes_unchanged():
    """After what came before it."""
    error = LookupError("gone")

    async def items():
        yield 1
        raise error

    async def read():
        return [item async for item in portal.hop_each(items())]

    iterator = portal.iterate(items())
    assert next(iterator) == 1
    with pytest.raises(LookupError) as caught:
        next(iterator)
    assert caught.value is error
    with pytest.raises(LookupError) as caught:
        asyncio.run(read())
    assert caught.value is error


def test_cancelling_a_reader_closes_the_generator():
    """In the middle of waiting for the next item."""
    ended = []

    async def slow():
        try:
            yield 1
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def read():
        async for _ in portal.hop_each(slow()):
            pass

    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await read()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(main()) == set()
    assert ended == [True]
    assert portal_is_idle()


def test_a_slow_coroutine_does_not_hold_up_the_callers_loop():
    """Awaiting is all the caller does."""
    ticks = []

    async def main():
        waiting = asyncio.create_task(portal.hop(asyncio.sleep(0.1)))
        while not waiting.done():
            ticks.append(time.monotonic())
            await asyncio.sleep(0.005)

    asyncio.run(main())
    assert len(ticks) > 5
