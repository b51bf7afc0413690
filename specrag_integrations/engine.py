"""Engine: the four ways to ask a question, over one coroutine.

`ask`, `aask`, `stream` and `astream` run the same `_run` in one task. A streamed question's events
go through a queue: no time-out, task group or context variable lives across a `yield`, since
frameworks run each step of an async generator in a task of its own.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from specrag_integrations.answers import Answer
from specrag_integrations.errors import (
    ConfigurationError,
    InputError,
    NoAnswerError,
    NoAnswerReason,
)
from specrag_integrations.events import AnswerEvent, Emit, Event
from specrag_integrations.models import ChatModel, Message
from specrag_integrations.options import checked_question
from specrag_integrations.passages import Passage, Usable, usable_passages
from specrag_integrations.portal import portal

History = Sequence[Message | Mapping[str, str]] | None
Passages = Iterable[Passage | str]


class Clock:
    """A question's start, and the time it has left."""

    def __init__(self, deadline: float | None) -> None:
        self.started = time.perf_counter()
        self._deadline = deadline

    @property
    def elapsed(self) -> float:
        """Seconds since the question."""
        return time.perf_counter() - self.started

    @property
    def left(self) -> float | None:
        """Seconds left, at least 0; None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self.elapsed)


class Engine(ABC):
    """Answers questions from passages."""

    def __init__(self, *, models: Sequence[ChatModel], deadline: float | None) -> None:
        self._models = tuple({id(model): model for model in models}.values())
        self._deadline = checked_deadline(deadline)

    @abstractmethod
    async def _run(
        self,
        question: str,
        usable: Usable,
        *,
        history: Sequence[Message],
        clock: Clock,
        emit: Emit,
    ) -> Answer:
        """Answer in one task from passages of which there is at least one; report to `emit`."""

    def ask(
        self,
        question: str,
        passages: Passages,
        *,
        history: History = (),
        deadline: float | None = None,
    ) -> Answer:
        """Answer a question from its retrieved passages, best first.

        Works in scripts, threads, notebooks and inside a running loop (which it blocks: use `aask`
        there).

        Args:
            question: The question.
            passages: In the retriever's order; strings are taken too.
            history: Earlier turns, for questions that refer to them.
            deadline: Seconds for this question instead of the engine's own.

        Raises:
            InputError: an empty question, or passages of the wrong type.
            NoAnswerError: nothing can be answered; `.reason` says why.
        """
        passages = _materialised(passages)
        return portal.run(self.aask(question, passages, history=history, deadline=deadline))

    async def aask(
        self,
        question: str,
        passages: Passages,
        *,
        history: History = (),
        deadline: float | None = None,
    ) -> Answer:
        """Answer a question without blocking the loop; otherwise as `ask`."""
        return await self._asked(question, passages, history, deadline, lambda _: None)

    def stream(
        self,
        question: str,
        passages: Passages,
        *,
        history: History = (),
        deadline: float | None = None,
    ) -> Generator[Event, None, None]:
        """Yield events while a question is worked on, the answer last; otherwise as `ask`.

        Closing the iterator cancels what is still under way.
        """
        passages = _materialised(passages)
        return portal.iterate(self.astream(question, passages, history=history, deadline=deadline))

    async def astream(
        self,
        question: str,
        passages: Passages,
        *,
        history: History = (),
        deadline: float | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Yield events without blocking the loop; otherwise as `stream`."""
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        asked = asyncio.create_task(
            self._asked(question, passages, history, deadline, events.put_nowait)
        )
        asked.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            yield AnswerEvent(answer=asked.result())
        finally:
            asked.cancel()
            await asyncio.wait([asked])
            if not asked.cancelled():
                asked.exception()  # seen, also where the reader left before it was raised

    async def _asked(
        self,
        question: str,
        passages: Passages,
        history: History,
        deadline: float | None,
        emit: Emit,
    ) -> Answer:
        clock = Clock(self._deadline if deadline is None else checked_deadline(deadline))
        question, turns = checked_question(question), checked_history(history)
        usable = usable_passages(passages)
        if not usable.passages:
            raise NoAnswerError(
                "there are no passages to answer from", reason=NoAnswerReason.NO_PASSAGES
            )
        return await self._run(question, usable, history=turns, clock=clock, emit=emit)

    def warmup(self) -> None:
        """Do now what the first question would wait for: imports, connections, model names."""
        portal.run(self.awarmup())

    async def awarmup(self) -> None:
        """As `warmup`, without blocking the loop."""
        await asyncio.gather(
            asyncio.to_thread(_first_imports), *(model.capabilities() for model in self._models)
        )

    def close(self) -> None:
        """Close the models' connections; a later question opens new ones."""
        portal.run(self.aclose())

    async def aclose(self) -> None:
        """As `close`, without blocking the loop."""
        for model in self._models:
            await model.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


def checked_deadline(deadline: float | None) -> float | None:
    """Return a usable deadline.

    Raises:
        ConfigurationError: it is not a number of seconds above 0.
    """
    number = isinstance(deadline, int | float) and not isinstance(deadline, bool)
    if deadline is not None and not (number and deadline > 0):
        raise ConfigurationError(f"deadline={deadline!r} must be seconds above 0, or None")
    return deadline


def checked_history(history: History) -> tuple[Message, ...]:
    """Return earlier turns as messages.

    Raises:
        InputError: a turn is neither a `Message` nor a dict with role and content.
    """
    turns: list[Message] = []
    if history is None:
        return ()
    if not isinstance(history, Iterable) or isinstance(history, str | Mapping):
        raise InputError(f"history must be a list of turns, not a {type(history).__name__}")
    for turn in history:
        if isinstance(turn, Mapping):
            role, content = turn.get("role"), turn.get("content")
            if role in {"system", "user", "assistant"} and isinstance(content, str):
                turns.append(Message(role, content))  # type: ignore[arg-type]
                continue
        elif isinstance(turn, Message):
            turns.append(turn)
            continue
        raise InputError(
            "each turn of history must be a Message or "
            "{'role': 'system'|'user'|'assistant', 'content': str}"
        )
    return tuple(turns)


def _materialised(passages: Passages) -> Passages:
    """Run a lazy retriever on its caller's thread, not on the one that carries all requests."""
    return list(passages) if isinstance(passages, Iterator) else passages


def _first_imports() -> None:
    import sklearn.cluster
    import sklearn.feature_extraction.text  # noqa: F401 - loading them is the point
