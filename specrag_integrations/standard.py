"""Standard RAG: one call over the passages that fit; the baseline and the fallback."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from specrag_integrations.answers import Answer, Trace
from specrag_integrations.citations import (
    cited_numbers,
    is_abstention,
    without_citations,
    without_dead_citations,
)
from specrag_integrations.engine import Clock, Engine
from specrag_integrations.errors import (
    ConfigurationError,
    EndpointError,
    MalformedReplyError,
    NoAnswerError,
    NoAnswerReason,
)
from specrag_integrations.events import DeltaEvent, Emit, PassagesEvent
from specrag_integrations.fitting import fitting
from specrag_integrations.models import (
    ChatModel,
    ChatReply,
    ChatRequest,
    Message,
    Step,
    StepKind,
)
from specrag_integrations.options import check_model, checked_whole
from specrag_integrations.passages import Passage, Usable
from specrag_integrations.prompts import Template, answer_messages, checked_template
from specrag_integrations.spans import without_thinking
from specrag_integrations.usage import StepUsage, Usage

log = logging.getLogger("specrag_integrations")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What standard RAG wrote."""

    text: str
    passages: tuple[Passage, ...]
    """Those that fitted."""
    usage: StepUsage
    first_token: float
    """Seconds from the question to the first piece of text."""
    notes: tuple[str, ...]


def answer_of(
    text: str,
    *,
    usable: Usable,
    passages: tuple[Passage, ...],
    steps: tuple[StepUsage, ...],
    notes: tuple[str, ...],
    first_token: float,
    clock: Clock,
) -> Answer:
    """Return the answer that was written from `passages` now, and log its notes."""
    for note in notes:
        log.info("%s", note)
    return Answer(
        text=text,
        passages=passages,
        citations=cited_numbers(text, len(passages)),
        abstained=is_abstention(text),
        trace=Trace(
            passages=usable.passages,
            notes=notes,
            stages={"answer": clock.elapsed},
            seconds=clock.elapsed,
            first_token=first_token,
        ),
        usage=Usage(steps=steps),
    )


async def in_time(
    writing: Coroutine[Any, Any, T], *, clock: Clock, model: ChatModel, who: str
) -> T:
    """Await an answer that is being written, in the time that is left; `who` writes it.

    Raises:
        NoAnswerError: the deadline passed (DEADLINE), or the model failed (FALLBACK_FAILED).
    """
    scope = asyncio.timeout(clock.left)
    try:
        async with scope:
            return await writing
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise NoAnswerError(
            f"no answer within the deadline: {model.name} had not answered in full",
            reason=NoAnswerReason.DEADLINE,
        ) from error
    except EndpointError as error:
        raise NoAnswerError(
            f"{who} failed: {error}",
            reason=NoAnswerReason.FALLBACK_FAILED,
            failures=[str(error)],
        ) from error


class StandardRAG(Engine):
    """Ordinary RAG: the large model reads all passages that fit into its context, and answers.

    Args:
        model: The model, an `Endpoint` as a rule.
        instructions: The app's own words, added to the prompt.
        template: The app's whole prompt instead of ours, which asks for a brief answer:
            (question, passages, history) -> messages.
        max_tokens: The most tokens of an answer.
        deadline: Seconds a question may take; None for no limit.

    Raises:
        ConfigurationError: an argument can never work.
    """

    def __init__(
        self,
        model: ChatModel,
        *,
        instructions: str | None = None,
        template: Template | None = None,
        max_tokens: int = 256,
        deadline: float | None = None,
    ) -> None:
        check_model("model", model)
        super().__init__(models=[model], deadline=deadline)
        self.model = model
        if template is not None and instructions is not None:
            raise ConfigurationError(
                "instructions= does nothing, since template= replaces our prompt; put them into it"
            )
        self._prompt: Template = partial(answer_messages, instructions=instructions)
        if template is not None:
            self._prompt = checked_template("template", template)
        self._max_tokens = checked_whole("max_tokens", max_tokens)

    async def _run(
        self,
        question: str,
        usable: Usable,
        *,
        history: Sequence[Message],
        clock: Clock,
        emit: Emit,
    ) -> Answer:
        emit(PassagesEvent(passages=usable.passages))
        written = await self.write_in_time(
            question, usable.passages, history=history, clock=clock, emit=emit
        )
        return answer_of(
            written.text,
            usable=usable,
            passages=written.passages,
            steps=(written.usage,),
            notes=(*usable.dropped, *written.notes),
            first_token=written.first_token,
            clock=clock,
        )

    async def write_in_time(
        self,
        question: str,
        passages: Sequence[Passage],
        *,
        history: Sequence[Message],
        clock: Clock,
        emit: Emit,
        reads: Callable[[tuple[Passage, ...]], None] = lambda _: None,
        kind: StepKind = "fallback",
    ) -> Written:
        """Write an answer, its pieces going to `emit`; `kind` names the step in traces.

        `reads` is told before the first piece which passages fit.

        Raises:
            NoAnswerError: the deadline passed (DEADLINE), or the model failed (FALLBACK_FAILED).
        """
        writing = self._write(
            question, passages, history=history, clock=clock, emit=emit, reads=reads, kind=kind
        )
        return await in_time(writing, clock=clock, model=self.model, who="standard RAG")

    async def _write(
        self,
        question: str,
        passages: Sequence[Passage],
        *,
        history: Sequence[Message],
        clock: Clock,
        emit: Emit,
        reads: Callable[[tuple[Passage, ...]], None],
        kind: StepKind,
    ) -> Written:
        sent = time.perf_counter()

        def prompt(some: Sequence[Passage]) -> tuple[Message, ...]:
            return self._prompt(question, some, history)

        read, turns = await fitting(self.model, prompt, passages, max_tokens=self._max_tokens)
        reads(tuple(read))
        request = ChatRequest(messages=tuple(turns), max_tokens=self._max_tokens)
        first_token: float | None = None
        reply: ChatReply | None = None
        shown = Shown(len(read))
        async for delta in self.model.stream(request, step=Step(kind=kind)):
            reply = delta.reply or reply
            text = delta.text
            if reply and not shown.began:
                text = text or reply.text  # a model that cannot stream brings all of it at once
            if piece := shown.add(text, ended=reply is not None):
                first_token = clock.elapsed if first_token is None else first_token
                emit(DeltaEvent(text=piece))
        if reply is None:
            raise MalformedReplyError(f"{self.model.name}: the stream ended without a reply")
        if not without_citations(shown.text).strip():
            raise MalformedReplyError(f"{self.model.name} wrote no text")
        notes = list(reply.notes)
        if len(read) < len(passages):
            notes.append(f"{len(read)} of {len(passages)} passages fit into the context")
        if reply.finish_reason == "length":
            notes.append(f"the answer was cut off at {self._max_tokens} tokens")
        elif reply.finish_reason != "stop":
            notes.append(f"the answer may be cut off: {_ending(reply.finish_reason)}")
        usage = StepUsage(
            kind=kind,
            index=0,
            role="verifier",
            model=reply.model or self.model.name,
            seconds=time.perf_counter() - sent,
            arrived=clock.elapsed,
            count=reply.count,
            attempts=reply.attempts,
        )
        return Written(
            text=shown.text,
            passages=tuple(read),
            usage=usage,
            first_token=clock.elapsed if first_token is None else first_token,
            notes=tuple(notes),
        )


def _ending(reason: str | None) -> str:
    if reason is None:
        return "the server did not say why it stopped"
    return f"it ended with {reason!r}"


_UNDECIDED = re.compile(
    r"[ \t]{0,3}(?:\[[^\]]{0,200}|\u3010[^\u3011]{0,200}|<[^>]{0,40}|\u25c1[^\u25b7]{0,20})\Z"
)
"""The end of a text that may yet become a dead citation or a thinking block."""


class Shown:
    """What a reader sees of a text that is still being written.

    Thinking and citations of passages that do not exist are left out, so the end of the text is
    held back while it may become one of them: the pieces together are the final text. Only a
    thinking block whose beginning was in the prompt is noticed too late; the text is right then.
    """

    def __init__(self, passages: int) -> None:
        self.text = ""
        self._passages = passages
        self._raw = ""
        self._shown = ""

    @property
    def began(self) -> bool:
        """Whether anything was written."""
        return bool(self._raw)

    def add(self, piece: str, *, ended: bool) -> str:
        """Take a piece in and return what may be shown now."""
        self._raw += piece
        decided = self._raw if ended else _UNDECIDED.sub("", self._raw)
        self.text = without_dead_citations(without_thinking(decided), self._passages).strip()
        if not self.text.startswith(self._shown):
            return ""
        new = self.text[len(self._shown) :]
        self._shown = self.text
        return new
