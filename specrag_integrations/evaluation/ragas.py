"""RAGAS: faithfulness and factual correctness of answers, judged by a model through the library.

The prompts and the arithmetic are the library's own. Its requests go through our seam instead of
an OpenAI client of its own, so that any endpoint can judge, no tool calling is asked of it, and
its replies can be cached (`CachedModel`): an interrupted run goes on where it was.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import warnings
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from specrag_integrations.citations import without_citations
from specrag_integrations.errors import (
    EndpointError,
    MalformedReplyError,
    MissingDependencyError,
)
from specrag_integrations.models import ChatModel, ChatRequest, Message, Step, assistant, user
from specrag_integrations.options import checked_whole
from specrag_integrations.portal import portal
from specrag_integrations.spans import without_thinking
from specrag_integrations.tasks import Tasks

Form = TypeVar("Form")

CAUTION = (
    "Factual correctness takes an answer apart without its question, so that it suits answers of a "
    "few words badly. Abstentions and failures are not judged."
)
"""What every table of these numbers says beneath it."""

_TRIES = 2
"""How often a judge is asked for a reply that can be read, as by the library's own client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgeable:
    """An answer with all that it is judged by. The repr holds no text."""

    question: str = field(repr=False)
    answer: str = field(repr=False)
    """As it was given; its citations are left out for the judge."""
    contexts: Sequence[str] = field(repr=False)
    """The passages the answer rests on."""
    reference: str = field(default="", repr=False)
    """What it should be; factual correctness needs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a judge made of an answer; where a number is None, `reasons` says why.

    The repr holds no text.
    """

    faithfulness: float | None = None
    """The share of the answer's statements that its contexts support, from 0 to 1."""
    factual_correctness: float | None = None
    """F1 of the claims of answer and reference against each other, from 0 to 1."""
    reasons: tuple[str, ...] = field(default=(), repr=False)


def check_library() -> None:
    """See that the library is there, before anything is paid for.

    Raises:
        MissingDependencyError: ragas is not installed, or an older release that it needs is not.
    """
    _library()


def judged(
    items: Sequence[Judgeable],
    judge: ChatModel,
    *,
    max_tokens: int = 2048,
    max_concurrency: int = 8,
    keep: Callable[[int, Judgement], None] | None = None,
) -> tuple[Judgement, ...]:
    """Judge answers by RAGAS, in their order.

    A judge that fails, or whose reply cannot be read, leaves a None and a reason, and the others
    are judged all the same. The library's telemetry is turned off for this process.

    Args:
        items: The answers.
        judge: The model that judges: an `Endpoint`, or a `CachedModel` over one.
        max_tokens: The most tokens of a reply; long answers are judged statement by statement.
        max_concurrency: The most answers judged at once.
        keep: Given each judgement as it is made, behind the place of its answer; what it raises
            ends the judging.

    Raises:
        ConfigurationError: an argument can never work.
        MissingDependencyError: ragas is not installed, or an older release that it needs is not.
    """
    seats = asyncio.Semaphore(checked_whole("max_concurrency", max_concurrency))
    metrics = _Metrics(_Judge(judge, checked_whole("max_tokens", max_tokens)))
    return portal.run(_all_judged(items, metrics, seats, keep))


async def _all_judged(
    items: Sequence[Judgeable],
    metrics: _Metrics,
    seats: asyncio.Semaphore,
    keep: Callable[[int, Judgement], None] | None,
) -> tuple[Judgement, ...]:
    judgements: dict[int, Judgement] = {}

    async def one(place: int, item: Judgeable) -> None:
        async with seats:
            judgements[place] = await metrics.judge(item)
        if keep is not None:
            keep(place, judgements[place])

    async with Tasks() as tasks:
        await tasks.all_of([one(place, item) for place, item in enumerate(items)])
    return tuple(judgements[place] for place in range(len(items)))


class _Metrics:
    """The library's two metrics."""

    def __init__(self, judge: _Judge) -> None:
        base, faithfulness, factual_correctness = _library()
        # The library asks for an instance of this class, of which it uses `agenerate`.
        base.register(_Judge)
        self._faithfulness: Any = faithfulness(llm=judge)
        self._factual_correctness: Any = factual_correctness(llm=judge)

    async def judge(self, item: Judgeable) -> Judgement:
        """Judge one answer; what is lacking for a metric, or fails it, is among the reasons."""
        answer = without_citations(item.answer).strip()
        contexts = [text for text in item.contexts if text.strip()]
        reasons: list[str] = []
        faithfulness = correctness = None
        if answer and contexts:
            asked = self._faithfulness.ascore(
                user_input=item.question, response=answer, retrieved_contexts=contexts
            )
            faithfulness = await _number("faithfulness", asked, reasons)
        else:
            reasons.append(f"faithfulness: there is no {'context' if answer else 'answer'}")
        if answer and item.reference.strip():
            asked = self._factual_correctness.ascore(response=answer, reference=item.reference)
            correctness = await _number("factual correctness", asked, reasons)
        else:
            lacking = "reference" if answer else "answer"
            reasons.append(f"factual correctness: there is no {lacking}")
        return Judgement(
            faithfulness=faithfulness, factual_correctness=correctness, reasons=tuple(reasons)
        )


def _library() -> tuple[Any, Any, Any]:
    """Return the library's class of judges and its two metrics."""
    # Read when the library first has something to tell, so that it must stand before.
    os.environ["RAGAS_DO_NOT_TRACK"] = "true"
    try:
        with warnings.catch_warnings():
            # It imports packages that announce their own end, for models we never use.
            warnings.simplefilter("ignore")
            from ragas.llms.base import InstructorBaseRagasLLM
            from ragas.metrics.collections import FactualCorrectness, Faithfulness
    except ImportError as error:
        raise MissingDependencyError("ragas", "ragas") from error
    return InstructorBaseRagasLLM, Faithfulness, FactualCorrectness


async def _number(name: str, score: Awaitable[Any], reasons: list[str]) -> float | None:
    """Return a metric's number, or None with its reason among the others."""
    try:
        value = float((await score).value)
    except EndpointError as error:
        reasons.append(f"{name}: {error}")
        return None
    if math.isnan(value):
        reasons.append(f"{name}: the judge found no statements in the answer")
        return None
    return value


class _Judge:
    """A chat model as the library asks it: for a reply of a pydantic model's form."""

    def __init__(self, model: ChatModel, max_tokens: int) -> None:
        self._model = model
        self._max_tokens = max_tokens

    async def agenerate(self, prompt: str, response_model: type[Form]) -> Form:
        """Return the reply to a prompt that shows the form itself.

        Raises:
            EndpointError: the judge failed, or wrote nothing that has this form, twice.
        """
        turns: tuple[Message, ...] = (user(prompt),)
        for _ in range(_TRIES):
            request = ChatRequest(messages=turns, max_tokens=self._max_tokens)
            reply = await self._model.chat(request, step=Step(kind="verify"))
            try:
                form: Form = _in_form(reply.text, response_model)
            except ValueError as error:
                problem = f"{reply.finish_reason}; {error}"
                turns = (
                    user(prompt),
                    assistant(reply.text),
                    user(f"This could not be read: {error}\nWrite the JSON object only."),
                )
            else:
                return form
        raise MalformedReplyError(
            f"{self._model.name} wrote no {response_model.__name__} that can be read ({problem})"
        )

    def generate(self, prompt: str, response_model: type[Form]) -> Form:
        """Not for use: the library's metrics ask asynchronously."""
        raise NotImplementedError


def _in_form(text: str, response_model: Any) -> Any:
    """Read the first JSON object in a reply, which may stand in a code fence or among words.

    Raises:
        ValueError: there is none, or it has another form.
    """
    text = without_thinking(text)
    start = text.find("{")
    if start < 0:
        raise ValueError("there is no JSON object")
    found, _ = json.JSONDecoder(strict=False).raw_decode(text, start)
    try:
        return response_model.model_validate(found)
    except ValidationError as error:
        # Its own text quotes what the judge has written of the answer.
        told = error.errors(include_url=False, include_context=False, include_input=False)
        places = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in told]
        raise ValueError("; ".join(places)) from None
