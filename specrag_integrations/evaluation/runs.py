"""A run: every system answers every question, one at a time, and each outcome is kept at once.

One question is under way at a time, since a time measured beside others' work says nothing; the
order of the systems rotates from question to question, so that none always meets a warm cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specrag_integrations.answers import Answer
from specrag_integrations.citations import normal_answer
from specrag_integrations.confidence import Fingerprint
from specrag_integrations.drafts import Draft, FailedDraft
from specrag_integrations.endpoint import Endpoint
from specrag_integrations.engine import Engine
from specrag_integrations.errors import (
    DraftFormatError,
    EndpointError,
    EvaluationError,
    InputError,
    NoAnswerError,
)
from specrag_integrations.evaluation.cache import CachedModel, ReplyCache
from specrag_integrations.evaluation.metrics import grade
from specrag_integrations.evaluation.outcomes import DraftOutcome, Outcome, Tokens, summed
from specrag_integrations.evaluation.questions import Question
from specrag_integrations.evaluation.systems import Models, System
from specrag_integrations.models import ChatRequest, Step, user
from specrag_integrations.pipeline import SpeculativeRAG
from specrag_integrations.scores import Score
from specrag_integrations.spans import Span, find_spans
from specrag_integrations.usage import ModelRole, StepUsage

Key = tuple[str, str, str]
_WARM_UP = Step(kind="verify")
_UNKNOWN = Tokens(prompt=None, completion=None)
_MOST_FAILURES = 5
"""In a row: then it is the server and not the question, such as one that hangs."""


async def served(
    endpoint: Endpoint, *, cache: ReplyCache, weights: str | None, fresh: bool
) -> tuple[CachedModel, dict[str, Any]]:
    """Return an endpoint behind the cache, and what tells it from others, for a manifest.

    One token is asked for, so that its model is known, and that its first question is not slower
    than the others.

    Args:
        endpoint: The endpoint.
        cache: Where its replies are kept.
        weights: The hash of its weights, where they are known.
        fresh: Ask even what is in the cache.

    Raises:
        EndpointError: it does not answer.
    """
    await endpoint.chat(ChatRequest(messages=(user("Say OK."),), max_tokens=1), step=_WARM_UP)
    facts = await endpoint.capabilities()
    identity = f"weights:{weights}" if weights else f"{endpoint.base_url} {endpoint.name}"
    told = [facts.server if facts else None, await endpoint.version()]
    return CachedModel(endpoint, cache=cache, identity=identity, fresh=fresh), {
        "name": endpoint.name,
        "identity": identity,
        "server": " ".join(filter(None, told)) or None,
        "where": "on this machine" if weights else endpoint.base_url,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come."""

    done: int
    total: int
    system: str
    """Who is answering now."""
    dataset: str
    seconds_left: float | None
    """An estimate from the outcomes of this run; None until there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Questions, systems, and the models they share.

    Args:
        questions: In the order in which they are asked.
        systems: The ways of answering.
        models: Who answers.
    """

    questions: Sequence[Question]
    systems: Sequence[System]
    models: Models
    _engines: dict[tuple[str, str], Engine] = field(default_factory=dict, init=False, repr=False)

    def engines(self) -> list[Engine]:
        """Make every engine now, so that what can never work is told before the first request.

        Raises:
            ConfigurationError: a system's options exclude each other.
        """
        sets = {question.dataset: question for question in self.questions}
        return [self._engine(system, one) for system in self.systems for one in sets.values()]

    def fingerprint(self) -> Fingerprint:
        """Return the set-up of the one system of this run, for its calibration.

        Raises:
            InputError: its questions are not all asked in the same way.
        """
        engines = [one for one in self.engines() if isinstance(one, SpeculativeRAG)]
        found = [engine.fingerprint() for engine in engines]
        if any(other != found[0] for other in found):
            raise InputError(
                "sets of claims have labels of their own in the prompt; calibrate each set apart"
            )
        return found[0]

    async def answer_all(
        self,
        *,
        done: Collection[Key] = (),
        keep: Callable[[Outcome], None],
        show: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        """Answer what is not `done` yet; `keep` gets each outcome as it is there.

        Raises:
            EndpointUnavailableError: a model does not answer any more. What it made of the question
                at hand is not kept.
            EvaluationError: several questions in a row could not be answered; none of these is
                kept.
        """
        open_ = [
            (system, question)
            for number, question in enumerate(self.questions)
            for system in _rotated(self.systems, number)
            if (question.dataset, question.id, system.name) not in done
        ]
        for engine in self.engines() if open_ else []:
            await engine.awarmup()  # imports and trials are no part of a question
        total = len(self.questions) * len(self.systems)
        waiting: list[Outcome] = []  # to be kept once it is known not to be the server
        remaining = _Remaining([system.name for system, _ in open_])
        for system, question in open_:
            show(
                Progress(
                    done=total - remaining.count,
                    total=total,
                    system=system.name,
                    dataset=question.dataset,
                    seconds_left=remaining.seconds,
                )
            )
            started = time.perf_counter()
            outcome = await self.answer(system, question)
            waiting.append(outcome)
            if len(waiting) == _MOST_FAILURES and outcome.failed:
                raise EvaluationError(
                    f"{_MOST_FAILURES} failures in a row, at last: {outcome.error}"
                )
            if not outcome.failed:
                for one in waiting:
                    keep(one)
                waiting = []
            remaining.tick(system.name, time.perf_counter() - started)
        for one in waiting:
            keep(one)

    async def answer(self, system: System, question: Question) -> Outcome:
        """Have one system answer one question.

        Raises:
            EndpointUnavailableError: a model does not answer.
        """
        watched = list({id(m): m for m in (self.models.drafter, self.models.verifier)}.values())
        for model in watched:
            model.live = system.calibrated  # it may stop at the first draft that comes
        before = [(model.replayed, model.unavailable) for model in watched]
        answer, error, answered_after = await _ask(self._engine(system, question), system, question)
        for model, (_, failure) in zip(watched, before, strict=True):
            if model.unavailable is not None and model.unavailable is not failure:
                raise model.unavailable
        replayed = any(m.replayed > count for m, (count, _) in zip(watched, before, strict=True))
        if answer is None:
            return _unanswered(system, question, error, replayed=replayed)
        return outcome_of(answer, system, question, replayed=replayed, first_token=answered_after)

    def _engine(self, system: System, question: Question) -> Engine:
        key = (system.name, question.dataset)
        if key not in self._engines:
            self._engines[key] = system.engine(self.models, question)
        return self._engines[key]


def outcome_of(
    answer: Answer,
    system: System,
    question: Question,
    *,
    replayed: bool,
    first_token: float | None = None,
) -> Outcome:
    """Return what an answer is worth; `first_token` is when the answer itself began, in seconds."""
    text = _answer_in(answer.text) if system.rationale else answer.text
    selection, trace = answer.selection, answer.trace
    winner = selection.winner if selection else None
    if winner is None and selection and selection.ranking:
        winner = selection.ranking[0]  # which would have been it, had it been trusted
    steps = answer.usage.steps
    return Outcome(
        dataset=question.dataset,
        id=question.id,
        system=system.name,
        text=text,
        grades=grade(
            question,
            text,
            passages=answer.passages,
            citations=answer.citations,
            abstained=answer.abstained,
        ),
        passages=tuple(passage.id or "" for passage in answer.passages),
        abstained=answer.abstained,
        fallback=answer.fallback_reason,
        winner=winner,
        tier=answer.tier,
        confidence=answer.confidence,
        drafts=_drafts(answer, question, replayed=replayed),
        replayed=replayed,
        seconds=None if replayed else trace.seconds,
        first_token=None if replayed else first_token,
        stages={} if replayed else _spent(trace.stages),
        drafter=_tokens(system, steps, "drafter", replayed=replayed),
        verifier=_tokens(system, steps, "verifier", replayed=replayed),
        requests=answer.usage.requests,
    )


async def _ask(
    engine: Engine, system: System, question: Question
) -> tuple[Answer | None, Exception | None, float | None]:
    """Return the answer or why there is none, and after how many seconds the answer began."""
    started, written = time.perf_counter(), ""
    lengths: list[tuple[int, float]] = []
    passages = question.passages[: system.top]
    try:
        async for event in engine.astream(question.question, passages, history=question.history):
            if event.type == "delta":
                written = event.text if event.restart else written + event.text
                lengths.append((len(written), time.perf_counter() - started))
            elif event.type == "answer":
                return event.answer, None, _began(event.answer.text, system, lengths)
    except (NoAnswerError, EndpointError) as error:
        return None, error, None
    raise AssertionError("the last event is always the answer")


def _began(text: str, system: System, lengths: Sequence[tuple[int, float]]) -> float | None:
    """Return when the answer in a text began, from how long the text was after how many seconds.

    Where a rationale comes first, that is behind it, which only the whole text tells: a text that
    has just begun may look like an answer.
    """
    start = _answer_span(text).start if system.rationale else 0
    return next((seconds for length, seconds in lengths if length > start), None)


def _answer_in(text: str) -> str:
    return _answer_span(text).of(text)


def _answer_span(text: str) -> Span:
    try:
        return find_spans(text).answer
    except DraftFormatError:
        return Span(len(text), len(text))


def _unanswered(
    system: System, question: Question, error: Exception | None, *, replayed: bool
) -> Outcome:
    return Outcome(
        dataset=question.dataset,
        id=question.id,
        system=system.name,
        grades=grade(question, ""),
        replayed=replayed,
        drafter=_UNKNOWN,
        verifier=_UNKNOWN,
        error=str(error),
    )


def _drafts(answer: Answer, question: Question, *, replayed: bool) -> tuple[DraftOutcome, ...]:
    scores = {score.draft: score for score in answer.trace.scores if score.tier == answer.tier}
    shares = answer.selection.shares if answer.selection else {}
    groups: dict[str, int] = {}
    made = []
    for draft in answer.trace.drafts:
        if isinstance(draft, FailedDraft):
            made.append(DraftOutcome(index=draft.index, ranks=draft.subset.ranks, usable=False))
            continue
        group = groups.setdefault(normal_answer(draft.answer), len(groups))
        made.append(
            _draft(
                draft,
                scores.get(draft.index),
                question,
                group=group,
                share=shares.get(draft.index),
                replayed=replayed,
            )
        )
    return tuple(made)


def _draft(
    draft: Draft,
    score: Score | None,
    question: Question,
    *,
    group: int,
    share: float | None,
    replayed: bool,
) -> DraftOutcome:
    grades = grade(question, draft.answer, abstained=draft.abstained)
    arrived = draft.arrived if score is None else score.arrived
    return DraftOutcome(
        index=draft.index,
        ranks=draft.subset.ranks if draft.subset else (),
        answer=draft.answer,
        right=bool(grades.right),
        f1=grades.f1,
        group=group,
        usable=not draft.abstained,
        truncated=draft.truncated,
        terms=dict(score.terms) if score else {},
        value=score.value if score else None,
        confidence=score.confidence if score else None,
        share=share,
        words=len(f"{draft.rationale} {draft.answer}".split()),
        draft_seconds=draft.seconds,
        verify_seconds=score.seconds if score else 0.0,
        arrived=None if replayed else arrived,
    )


def _tokens(
    system: System, steps: Sequence[StepUsage], role: ModelRole, *, replayed: bool
) -> Tokens:
    own = [step for step in steps if system.role_of(step.role) == role]
    counts = [step.count for step in own]
    return Tokens(
        prompt=summed([count.prompt for count in counts]),
        completion=summed([count.completion for count in counts]),
        busy=None if replayed else _union((s.arrived - s.seconds, s.arrived) for s in own),
    )


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time that at least one of some spans covers."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def _spent(ends: Mapping[str, float]) -> dict[str, float]:
    """Return how long each stage lasted, from when each ended; those that overlap count once."""
    spent, before = {}, 0.0
    for stage, end in sorted(ends.items(), key=lambda item: item[1]):
        spent[stage] = end - before
        before = end
    return spent


def _rotated(systems: Sequence[System], by: int) -> list[System]:
    start = by % len(systems)
    return [*systems[start:], *systems[:start]]


class _Remaining:
    """What is left of a run, and how long it will take at the pace of each system."""

    def __init__(self, names: Sequence[str]) -> None:
        self._left = {name: names.count(name) for name in names}
        self._spent: dict[str, list[float]] = {}

    @property
    def count(self) -> int:
        return sum(self._left.values())

    @property
    def seconds(self) -> float | None:
        """Seconds left; a system that has not answered yet counts as the average."""
        if not self._spent:
            return None
        means = {name: sum(times) / len(times) for name, times in self._spent.items()}
        usual = sum(means.values()) / len(means)
        return sum(count * means.get(name, usual) for name, count in self._left.items())

    def tick(self, name: str, seconds: float) -> None:
        self._left[name] -= 1
        self._spent.setdefault(name, []).append(seconds)
