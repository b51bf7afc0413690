"""Tasks that never outlive the block they were started in."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Tasks:
    """Tasks of a block: leaving it cancels them and waits for their end."""

    def __init__(self) -> None:
        self._started: list[asyncio.Task[Any]] = []
        self._leaving = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leaving = True
        for task in self._started:
            task.cancel()
        await asyncio.gather(*self._started, return_exceptions=True)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start one task, unless the block is being left."""
        if self._leaving:
            coroutine.close()
            raise asyncio.CancelledError
        task = asyncio.create_task(coroutine)
        self._started.append(task)
        return task

    async def until_first(self, *coroutines: Coroutine[Any, Any, object]) -> None:
        """Run all until one ends, as the others do with the block; its exception is raised."""
        tasks = self._start_all(coroutines)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def all_of(self, coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Run all; the first exception ends the wait and is raised as itself."""
        tasks = self._start_all(coroutines)
        if not tasks:
            return
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    def _start_all(self, coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[asyncio.Task[T]]:
        if self._leaving:  # none of them may be left without an end
            for coroutine in coroutines[1:]:
                coroutine.close()
        return [self.start(coroutine) for coroutine in coroutines]
