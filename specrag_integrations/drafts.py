"""Drafts: a rationale and an answer from one subset, and the drafter that writes them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specrag_integrations.citations import (
    cited_numbers,
    is_abstention,
    normal_answer,
    without_citations,
    without_dead_citations,
)
from specrag_integrations.errors import DraftFormatError, EndpointError
from specrag_integrations.fitting import fitting
from specrag_integrations.models import (
    ChatModel,
    ChatReply,
    ChatRequest,
    Message,
    Step,
    Token,
    TokenCount,
)
from specrag_integrations.passages import Passage
from specrag_integrations.prompts import EXAMPLE_ANSWER, Template, draft_messages
from specrag_integrations.spans import SpanLogprob, find_spans, span_logprob
from specrag_integrations.subsets import Subset

_ANY_CONTEXT = 2048
"""Tokens that the context of any drafter worth asking holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A rationale and an answer; everything else is optional, so that one can be written by hand.

    The repr holds no text, so that a log never leaks a document.
    """

    rationale: str = field(repr=False)
    answer: str = field(repr=False)
    subset: Subset | None = field(default=None, repr=False)
    citations: tuple[int, ...] = ()
    """Numbers cited, in order of appearance: 1 is the first passage of the subset."""
    abstained: bool = False
    """The drafter said that its passages do not tell."""
    truncated: bool = False
    """The reply ended at the token limit, so the answer may be incomplete."""
    rationale_logprob: SpanLogprob | None = None
    """Under the drafter; None without a rationale or without log-probabilities."""
    answer_logprob: SpanLogprob | None = None
    model: str | None = None
    count: TokenCount = field(default_factory=TokenCount, repr=False)
    seconds: float = 0.0
    arrived: float = 0.0
    """Seconds from the question to this draft."""
    attempts: int = 0
    lost_tokens: bool = False
    """Some written tokens came without a log-probability, so that the draft has none."""
    notes: tuple[str, ...] = field(default=(), repr=False)

    @property
    def is_mute(self) -> bool:
        """Whether its drafter returns no log-probabilities, whatever it writes."""
        return self.answer_logprob is None and not self.lost_tokens

    @property
    def index(self) -> int:
        """The subset's index; 0 for a draft written by hand."""
        return self.subset.index if self.subset else 0

    @property
    def passages(self) -> tuple[Passage, ...]:
        """The passages it was written from."""
        return self.subset.passages if self.subset else ()

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form; passages by rank."""
        return {
            "index": self.index,
            "rationale": self.rationale,
            "answer": self.answer,
            "ranks": list(self.subset.ranks) if self.subset else [],
            "citations": list(self.citations),
            "abstained": self.abstained,
            "truncated": self.truncated,
            "rationale_logprob": _span_dict(self.rationale_logprob),
            "answer_logprob": _span_dict(self.answer_logprob),
            "model": self.model,
            "seconds": self.seconds,
            "arrived": self.arrived,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedDraft:
    """A draft that could not be written, as a value: the others still compete."""

    subset: Subset = field(repr=False)
    reason: str
    text: str | None = field(default=None, repr=False)
    """What the model wrote, where it wrote something unreadable."""
    model: str | None = None
    count: TokenCount = field(default_factory=TokenCount, repr=False)
    seconds: float = 0.0
    arrived: float = 0.0
    attempts: int = 0

    @property
    def index(self) -> int:
        """The subset's index."""
        return self.subset.index

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {
            "index": self.index,
            "ranks": list(self.subset.ranks),
            "failed": self.reason,
            "text": self.text,
            "model": self.model,
            "seconds": self.seconds,
            "arrived": self.arrived,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """Writes drafts with one or several small models; draft j goes to model j modulo their number.

    Args:
        models: The drafting models.
        max_tokens: The most tokens of rationale and answer together.
        template: The prompt, which must ask for a rationale and an answer.
    """

    models: tuple[ChatModel, ...]
    max_tokens: int
    template: Template = draft_messages

    def model_for(self, subset: Subset) -> ChatModel:
        """Return the model that drafts from a subset."""
        return self.models[subset.index % len(self.models)]

    async def draft(
        self, question: str, subset: Subset, *, history: Sequence[Message], started: float
    ) -> Draft | FailedDraft:
        """Write one draft; an endpoint's failure or an unreadable text is a `FailedDraft`.

        `started` is the question's start on the clock of `time.perf_counter`.
        """
        model = self.model_for(subset)
        sent = time.perf_counter()

        def prompt(some: Sequence[Passage]) -> tuple[Message, ...]:
            return self.template(question, some, history)

        try:
            read, turns = await fitting(
                model,
                prompt,
                subset.passages,
                max_tokens=self.max_tokens,
                at_least=_ANY_CONTEXT,
            )
            request = ChatRequest(messages=tuple(turns), max_tokens=self.max_tokens, top_logprobs=0)
            reply = await model.chat(request, step=Step(kind="draft", index=subset.index))
        except EndpointError as error:
            now = time.perf_counter()
            return FailedDraft(
                subset=subset,
                reason=str(error),
                model=model.name,
                seconds=now - sent,
                arrived=now - started,
                attempts=error.attempts,
            )
        arrived = time.perf_counter() - started
        try:
            draft = _from_reply(reply, subset.holding(read), model.name, arrived)
        except DraftFormatError as error:
            return FailedDraft(
                subset=subset,
                reason=str(error),
                text=error.text,
                model=reply.model or model.name,
                count=reply.count,
                seconds=reply.seconds,
                arrived=arrived,
                attempts=reply.attempts,
            )
        if len(read) == len(subset.passages):
            return draft
        fit = f"{len(read)} of {len(subset.passages)} passages fit into the context"
        return replace(draft, notes=(*draft.notes, f"draft {subset.index}: {fit}"))


def _from_reply(reply: ChatReply, subset: Subset, name: str, arrived: float) -> Draft:
    truncated = reply.finish_reason == "length"
    spans = find_spans(reply.text, truncated=truncated)
    rationale, answer = spans.rationale.of(reply.text), spans.answer.of(reply.text)
    if not without_citations(answer).strip():
        raise DraftFormatError("the answer is nothing but a citation", text=reply.text)
    if _is_copied(answer, subset):
        raise DraftFormatError("the answer is copied from the prompt's example", text=reply.text)
    cited = cited_numbers(f"{rationale} {answer}", len(subset.passages))
    tokens, notes = _whole_tokens(reply, subset)
    return Draft(
        rationale=without_dead_citations(rationale, len(subset.passages)),
        answer=without_dead_citations(answer, len(subset.passages)),
        subset=subset,
        citations=cited,
        abstained=is_abstention(answer),
        truncated=truncated,
        rationale_logprob=span_logprob(tokens, reply.text, spans.rationale),
        answer_logprob=span_logprob(tokens, reply.text, spans.answer),
        model=reply.model or name,
        count=reply.count,
        seconds=reply.seconds,
        arrived=arrived,
        attempts=reply.attempts,
        lost_tokens=bool(notes),
        notes=(*reply.notes, *notes),
    )


def _whole_tokens(
    reply: ChatReply, subset: Subset
) -> tuple[tuple[Token, ...] | None, tuple[str, ...]]:
    """Return the written tokens, unless some of them came without a log-probability.

    llama.cpp leaves out those that are parts of a character, and a mean over the rest would flatter
    the draft. (The end of the turn is counted and not listed.)
    """
    listed, written = len(reply.tokens or ()), reply.count.completion or 0
    if not listed or listed + 1 >= written:
        return reply.tokens, ()
    lost = f"{listed} of {written} written tokens have a log-probability"
    return None, (f"draft {subset.index}: no draft terms, since {lost}",)


def _is_copied(answer: str, subset: Subset) -> bool:
    """Whether a small model has answered with the example instead of from its passages."""
    copied = normal_answer(EXAMPLE_ANSWER)
    return normal_answer(answer) == copied and not any(
        copied in normal_answer(passage.text) for passage in subset.passages
    )


def _span_dict(span: SpanLogprob | None) -> dict[str, float] | None:
    return None if span is None else span.to_dict()
