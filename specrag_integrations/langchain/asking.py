"""Asking: the path of one question through a Runnable, in the four ways that LangChain knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.utils import AddableDict

from specrag_integrations.errors import NoAnswerError, NoAnswerReason
from specrag_integrations.langchain.asked import Asked, asked_of
from specrag_integrations.langchain.call import Call
from specrag_integrations.langchain.documents import Retrieved, checked_documents
from specrag_integrations.langchain.output import Parts, empty_output, whole_output
from specrag_integrations.pipeline import SpeculativeRAG
from specrag_integrations.portal import portal
from specrag_integrations.threads import Threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What it takes to answer: an engine, a retriever, and how to do without documents.

    Its methods are handed to LangChain, which opens the run of the question around them.
    """

    engine: SpeculativeRAG
    retriever: Runnable[Any, Any] | None
    empty_answer: str
    most_calls: int
    """The most calls in threads at once."""
    is_prompted: bool
    """Whether the app's own prompt reads the input."""
    mends: bool
    """Whether the engine may mend a draft."""
    slots: asyncio.Semaphore | None = None
    """The limit that the questions of one batch share."""

    def answer(self, given: Any, config: RunnableConfig) -> AddableDict:
        """Return the output of a question, from synchronous code."""
        asked = self._asked(given)
        call = self._call(asked, self._retrieved(asked, config), config, streams=False)
        try:
            answer = portal.run(call.serve(self.engine.aask(**_question(asked, call))))
        except NoAnswerError as error:
            return self._empty(asked, call, error)
        return whole_output(asked, call, answer)

    async def aanswer(self, given: Any, config: RunnableConfig) -> AddableDict:
        """Return the output of a question."""
        asked = self._asked(given)
        retrieved = await self._aretrieved(asked, config)
        call = self._call(asked, retrieved, config, streams=False)
        try:
            answer = await call.serve(self.engine.aask(**_question(asked, call)))
        except NoAnswerError as error:
            return self._empty(asked, call, error)
        return whole_output(asked, call, answer)

    def parts(self, given: Iterator[Any], config: RunnableConfig) -> Iterator[AddableDict]:
        """Yield the output in parts, from synchronous code."""
        asked = self._asked(_sum(given))
        call = self._call(asked, self._retrieved(asked, config), config)
        parts = Parts(asked, call, mends=self.mends)
        events = call.events(self.engine.astream(**_question(asked, call)))
        with closing(portal.iterate(events)) as found:
            try:
                for event in found:
                    yield from parts.of(event)
            except NoAnswerError as error:
                yield self._empty(asked, call, error)

    async def aparts(
        self, given: AsyncIterator[Any], config: RunnableConfig
    ) -> AsyncIterator[AddableDict]:
        """Yield the output in parts."""
        asked = self._asked(_sum([part async for part in given]))
        call = self._call(asked, await self._aretrieved(asked, config), config)
        parts = Parts(asked, call, mends=self.mends)
        events = call.events(self.engine.astream(**_question(asked, call)))
        async with aclosing(events):
            try:
                async for event in events:
                    for part in parts.of(event):
                        yield part
            except NoAnswerError as error:
                yield self._empty(asked, call, error)

    def _asked(self, given: Any) -> Asked:
        return asked_of(given, retrieves=self.retriever is not None, is_prompted=self.is_prompted)

    def _retrieved(self, asked: Asked, config: RunnableConfig) -> Retrieved:
        if asked.documents is not None or self.retriever is None:
            return Retrieved(asked.documents or ())
        return Retrieved(checked_documents(self.retriever.invoke(asked.question, config)))

    async def _aretrieved(self, asked: Asked, config: RunnableConfig) -> Retrieved:
        if asked.documents is not None or self.retriever is None:
            return Retrieved(asked.documents or ())
        return Retrieved(checked_documents(await self.retriever.ainvoke(asked.question, config)))

    def _call(
        self, asked: Asked, retrieved: Retrieved, config: RunnableConfig, *, streams: bool = True
    ) -> Call:
        limit = config.get("max_concurrency")
        return Call(
            config=config,
            inputs=asked.inputs,
            retrieved=retrieved,
            threads=Threads(self.most_calls),
            slots=self.slots or (asyncio.Semaphore(limit) if limit else None),
            streams=streams or _is_heard(config),
        )

    def _empty(self, asked: Asked, call: Call, error: NoAnswerError) -> AddableDict:
        """Return the output where nothing was retrieved; any other error is raised."""
        if error.reason != NoAnswerReason.NO_PASSAGES:
            raise error
        return empty_output(asked, call, self.empty_answer)


def _is_heard(config: RunnableConfig) -> bool:
    """Whether every token has a listener, as in a streamed graph, however a node is called."""
    handlers = getattr(config.get("callbacks"), "handlers", ())
    return any(hasattr(handler, "tap_output_iter") for handler in handlers)


def _question(asked: Asked, call: Call) -> dict[str, Any]:
    return {
        "question": asked.question,
        "passages": call.retrieved.passages,
        "history": asked.history,
    }


def _sum(parts: Iterable[Any]) -> Any:
    """Return an input that came in parts; what cannot be added up replaces what came before."""
    whole: Any = None
    for part in parts:
        try:
            whole = part if whole is None else whole + part
        except TypeError:
            whole = part
    return whole
