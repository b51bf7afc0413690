"""Call: one question on its way, and what its requests to models share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs

from specrag_integrations.events import Event
from specrag_integrations.langchain.documents import Retrieved
from specrag_integrations.models import Step
from specrag_integrations.threads import Threads

T = TypeVar("T")

SHOWN = frozenset({"fallback", "refine"})
"""The steps whose text is the answer; LangGraph is to stream no other."""


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One question: an engine outlives it, so that its models look up whose question they serve.

    A context variable carries it, into tasks and threads alike. A question within a question, of a
    drafter that is a chain of its own, has its own call.
    """

    config: RunnableConfig = field(default_factory=RunnableConfig)
    """The one that children inherit."""
    inputs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    retrieved: Retrieved = field(default_factory=lambda: Retrieved(()), repr=False)
    threads: Threads = field(default_factory=lambda: Threads(1))
    """For the calls that can only be made in one."""
    slots: asyncio.Semaphore | None = None
    """The limit that `max_concurrency` sets."""
    streams: bool = True
    """Whether somebody reads the answer while it is being written."""
    message_id: str | None = None
    """Of the message that was streamed as the answer."""

    def child(self, step: Step) -> RunnableConfig:
        """Return the config of one request: a child run with a name and tags of its own."""
        hidden = [] if step.kind in SHOWN else ["nostream"]
        return merge_configs(
            self.config,
            {
                "run_name": str(step),
                "tags": [f"specrag:{step.kind}", *hidden],
                "metadata": {"specrag_step": step.kind, "specrag_index": step.index},
            },
        )

    def slot(self) -> AbstractAsyncContextManager[None]:
        """Wait for a place under the limit, and hold it."""
        return nullcontext() if self.slots is None else self.slots

    async def serve(self, asking: Coroutine[Any, Any, T]) -> T:
        """Await a question as this call."""
        with serving(self):
            return await asking

    async def events(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """Yield a question's events as this call.

        The engine works in one task, which starts with the first event: no variable need be set
        across a `yield`.
        """
        async with aclosing(events):
            with serving(self):
                first = await anext(events)
            yield first
            async for event in events:
                yield event


TRIAL = Call()
"""No question: a chain is being made, and its prompt is tried."""

_CALL: ContextVar[Call | None] = ContextVar("specrag_langchain_call", default=None)


def current_call() -> Call | None:
    """Return the question that is being served here; None outside of one."""
    return _CALL.get()


@contextmanager
def serving(call: Call) -> Iterator[None]:
    """Serve a question in this block."""
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)
