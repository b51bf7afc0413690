"""Responses: a question's events as what LlamaIndex returns to an app."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from typing import Any

from llama_index.core.base.response.schema import (
    RESPONSE_TYPE,
    AsyncStreamingResponse,
    Response,
    StreamingResponse,
)

from specrag_integrations.answers import Answer
from specrag_integrations.errors import NoAnswerError, NoAnswerReason
from specrag_integrations.events import (
    AnswerEvent,
    DeltaEvent,
    Event,
    FallbackEvent,
    SelectedEvent,
)
from specrag_integrations.llama_index.nodes import Sources
from specrag_integrations.llama_index.report import Report
from specrag_integrations.passages import Passage
from specrag_integrations.portal import portal


class Told:
    """What a question's events have told, and the response made of it.

    Args:
        sources: The question's nodes.
        only_used: Whether the response's sources are only those that the answer rests on.
    """

    def __init__(self, sources: Sources, *, only_used: bool) -> None:
        self._sources = sources
        self._only_used = only_used
        self._report = Report()
        self._used: Sequence[Passage] = ()
        self._live = False

    def decides(self, event: Event) -> bool:
        """Take in an event; whether it tells who answers, and so the sources."""
        if isinstance(event, SelectedEvent):
            self._used = event.passages
            self._report.update(selection=event.selection.to_dict(), fallback_reason=None)
        elif isinstance(event, FallbackEvent):
            self._used = event.passages
            self._live = True
            self._report.update(selection=None, fallback_reason=event.reason.value)
        return isinstance(event, SelectedEvent | FallbackEvent)

    def piece(self, event: Event) -> str:
        """Take in an event after that; the text it adds to the response.

        A draft's answer comes whole: a refinement of it may break off, and begin anew.
        """
        if isinstance(event, AnswerEvent):
            self._report.fill(event.answer)
            return "" if self._live else event.answer.text
        return event.text if self._live and isinstance(event, DeltaEvent) else ""

    def settle(self, answer: Answer) -> None:
        """Take in an answer that came without events."""
        self._report.fill(answer)
        self._used = answer.passages

    @property
    def fields(self) -> dict[str, Any]:
        """Sources and metadata, the same objects for every kind of response."""
        found = self._sources.first(self._used, only_used=self._only_used)
        metadata: dict[str, Any] = {one.node.node_id: one.node.metadata for one in found}
        return {"source_nodes": found, "metadata": {**metadata, "specrag": self._report}}


def is_empty(error: NoAnswerError) -> bool:
    """Whether there was nothing to answer from, for which LlamaIndex has its empty response."""
    return error.reason is NoAnswerReason.NO_PASSAGES


def streamed(events: Generator[Event, None, None], told: Told) -> StreamingResponse:
    """Return a response as soon as it is known who answers; the rest comes as it is read."""
    for event in events:
        if told.decides(event):
            break

    def pieces() -> Generator[str, None, None]:
        for event in events:
            if piece := told.piece(event):
                yield piece

    return StreamingResponse(response_gen=pieces(), **told.fields)


async def astreamed(events: AsyncGenerator[Event, None], told: Told) -> AsyncStreamingResponse:
    """As `streamed`, for events on the background loop: read from any loop, also a later one."""
    while (event := await portal.hop(_next(events))) is not None:
        if told.decides(event):
            break

    async def pieces() -> AsyncGenerator[str, None]:
        try:
            while (event := await portal.hop(_next(events))) is not None:
                if piece := told.piece(event):
                    yield piece
        finally:
            # Nobody may be left to wait: the reader's loop may be closing.
            asyncio.run_coroutine_threadsafe(events.aclose(), portal.loop)

    return AsyncStreamingResponse(response_gen=pieces(), **told.fields)


async def replayed(events: AsyncGenerator[Event, None], told: Told) -> AsyncStreamingResponse:
    """As `astreamed`, for events on the caller's loop, all of which are heard first."""
    pieces: list[str] = []
    decided = False
    async for event in events:
        if decided:
            pieces.append(told.piece(event))
        decided = decided or told.decides(event)
    return AsyncStreamingResponse(response_gen=_each(filter(None, pieces)), **told.fields)


def whole(text: str, fields: dict[str, Any]) -> Response:
    """Return a response that is not streamed."""
    return Response(response=text, **fields)


def empty(text: str, fields: dict[str, Any], *, streaming: bool, loop: bool) -> RESPONSE_TYPE:
    """Return the response to a question without passages, of the type that was asked for."""
    if not streaming:
        return whole(text, fields)
    if loop:
        return AsyncStreamingResponse(response_gen=_each([text]), **fields)
    return StreamingResponse(response_gen=(piece for piece in [text]), **fields)


async def _next(events: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(events, None)


async def _each(pieces: Iterable[str]) -> AsyncGenerator[str, None]:
    for piece in pieces:
        yield piece
