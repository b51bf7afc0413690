"""SpeculativeRAG: the path of a question.

Partition the passages, draft from each subset in parallel, verify each draft as soon as it lands,
select the best; or fall back to standard RAG when no draft deserves trust (paper, algorithm 1).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeVar

from specrag_integrations.answers import Answer, ModelRole, StepUsage, Trace, Usage, dissent_from
from specrag_integrations.citations import cited_numbers, is_abstention
from specrag_integrations.drafts import Draft, Drafter, FailedDraft
from specrag_integrations.engine import Clock, Engine
from specrag_integrations.errors import ConfigurationError, NoAnswerError, NoAnswerReason
from specrag_integrations.events import (
    DeltaEvent,
    DraftEvent,
    Emit,
    FallbackEvent,
    PassagesEvent,
    ScoreEvent,
    SelectedEvent,
)
from specrag_integrations.models import ChatModel, Message, StepKind, TokenCount
from specrag_integrations.options import check_kind, checked_whole
from specrag_integrations.passages import Passage, Usable
from specrag_integrations.scores import Score, Scoring, Tier, Verifier
from specrag_integrations.selection import (
    BestScore,
    FallbackReason,
    Selection,
    Selector,
    candidates_of,
    select,
)
from specrag_integrations.standard import StandardRAG, Template
from specrag_integrations.subsets import (
    Embedder,
    MultiPerspective,
    Partition,
    Partitioner,
    make_subsets,
)

log = logging.getLogger("specrag_integrations")

T = TypeVar("T")

# The defaults, in one place: the evaluation is expected to change them.
NUM_DRAFTS = 5
PASSAGES_PER_DRAFT = 2
PARTITIONER: Partitioner = MultiPerspective()


class SpeculativeRAG(Engine):
    """Speculative RAG: small models draft, a large model verifies.

    Args:
        drafter: The small model, or several: draft j goes to model j modulo their number.
        verifier: The large model; it reads drafts, never passages, unless it has to fall back.
        num_drafts: How many drafts (m in the paper), fewer where the passages allow no more.
        passages_per_draft: How many passages each draft reads (k in the paper).
        partitioner: How subsets are chosen.
        embedder: (texts, question) -> array (n, d), sync or async, used for all passages if any
            lacks an embedding; TF-IDF without it.
        scoring: At which tier drafts are scored; by default the best that works.
        selector: How scored drafts are ranked; by default the highest score wins.
        fallback: `"standard"`, or None to raise `NoAnswerError` where no draft can be used.
        fallback_template: The app's own prompt for the fallback.
        max_answer_tokens: The most tokens of a draft, and of a fallback's answer.
        deadline: Seconds a question may take. The best draft scored by then wins.
        instructions: The app's own words, added to the draft and the fallback prompt.

    Raises:
        ConfigurationError: an argument, or a combination, that can never work.
    """

    def __init__(
        self,
        *,
        drafter: ChatModel | Sequence[ChatModel],
        verifier: ChatModel,
        num_drafts: int = NUM_DRAFTS,
        passages_per_draft: int = PASSAGES_PER_DRAFT,
        partitioner: Partitioner | None = None,
        embedder: Embedder | None = None,
        scoring: Scoring | None = None,
        selector: Selector | None = None,
        fallback: Literal["standard"] | None = "standard",
        fallback_template: Template | None = None,
        max_answer_tokens: int = 256,
        deadline: float | None = None,
        instructions: str | None = None,
    ) -> None:
        drafters = _models("drafter", drafter)
        (verifying,) = _models("verifier", [verifier])
        super().__init__(models=[*drafters, verifying], deadline=deadline)
        self._num_drafts = checked_whole("num_drafts", num_drafts)
        self._passages_per_draft = checked_whole("passages_per_draft", passages_per_draft)
        checked_whole("max_answer_tokens", max_answer_tokens)
        if fallback not in {"standard", None}:
            raise ConfigurationError(f"fallback={fallback!r} must be 'standard' or None")
        self._partitioner = PARTITIONER if partitioner is None else partitioner
        check_kind("partitioner", self._partitioner, method="check")
        check_kind("selector", selector, method="rank")
        check_kind("embedder", embedder, method="__call__")
        check_kind("fallback_template", fallback_template, method="__call__")
        check_kind("scoring", scoring, kind=Scoring)
        check_kind("instructions", instructions, kind=str)
        self._partitioner.check(num_drafts=num_drafts, passages_per_draft=passages_per_draft)
        self._embedder = embedder
        self._drafter = Drafter(
            models=drafters, max_tokens=max_answer_tokens, instructions=instructions
        )
        self._verifier = Verifier(
            verifying,
            scoring=scoring,
            comparable_drafts=len({id(drafter) for drafter in drafters}) == 1,
        )
        self._selector: Selector = BestScore() if selector is None else selector
        self._standard = None
        if fallback == "standard":
            self._standard = StandardRAG(
                verifying,
                instructions=instructions,
                template=fallback_template,
                max_tokens=max_answer_tokens,
            )
        self.max_requests = self._most_requests(drafters, verifying)

    def __repr__(self) -> str:
        drafters = ", ".join(dict.fromkeys(model.name for model in self._drafter.models))
        return (
            f"SpeculativeRAG(drafter={drafters!r}, verifier={self._models[-1].name!r}, "
            f"num_drafts={self._num_drafts}, passages_per_draft={self._passages_per_draft})"
        )

    def _most_requests(self, drafters: Sequence[ChatModel], verifier: ChatModel) -> int:
        """Count the generating HTTP requests one question can cost when everything fails."""
        drafting = sum(
            drafters[index % len(drafters)].max_attempts for index in range(self._num_drafts)
        )
        verifying = self._num_drafts * self._verifier.requests_per_draft
        return drafting + verifier.max_attempts * (verifying + (self._standard is not None))

    async def _run(
        self,
        question: str,
        usable: Usable,
        *,
        history: Sequence[Message],
        clock: Clock,
        emit: Emit,
    ) -> Answer:
        work = _Work(
            question=question,
            passages=usable.passages,
            clock=clock,
            emit=emit,
            tiers=self._verifier.tiers,
        )
        work.note(*usable.dropped)
        await self._speculate(work, history)
        selection = select(candidates_of(work.usable_drafts, work.current_scores), self._selector)
        if selection.winner is not None:
            return self._accepted(work, selection)
        return await self._fallen_back(work, selection, history)

    # ---------------------------------------------------------------- partition, draft, verify

    async def _speculate(self, work: _Work, history: Sequence[Message]) -> None:
        """Fill `work` with drafts and scores until all are there or the deadline has passed."""
        scope = asyncio.timeout(work.clock.left)
        try:
            async with scope:
                partition = await self._partition(work)
                try:
                    await self._draft_and_verify(work, partition, history)
                finally:
                    self._verifier.remember(work.current_scores)
                await self._descend(work)
        except TimeoutError:
            if not scope.expired():
                raise
            work.deadline_hit = True
            work.note(f"DEADLINE: stopped after {work.clock.elapsed:.2f} s{work.cut_off}")
            if any(score.cannot for score in work.current_scores):
                await self._descend(work)  # to what costs no request
        finally:
            work.stages["verify"] = work.clock.elapsed

    async def _partition(self, work: _Work) -> Partition:
        partition = await make_subsets(
            work.passages,
            work.question,
            partitioner=self._partitioner,
            num_drafts=self._num_drafts,
            passages_per_draft=self._passages_per_draft,
            embedder=self._embedder,
        )
        work.partition = partition
        work.note(*partition.notes)
        work.stages["partition"] = work.clock.elapsed
        work.emit(PassagesEvent(passages=work.passages, subsets=partition.subsets))
        return partition

    async def _draft_and_verify(
        self, work: _Work, partition: Partition, history: Sequence[Message]
    ) -> None:
        """Draft from all subsets at once; each draft is verified as soon as it lands."""
        async with _Tasks() as tasks:

            async def draft_then_verify(index: int) -> None:
                draft = await self._drafter.draft(
                    work.question,
                    partition.subsets[index],
                    history=history,
                    started=work.clock.started,
                )
                work.add_draft(draft)
                if isinstance(draft, Draft) and not draft.abstained:
                    work.add_score(await shared_score(draft))

            verifications: dict[tuple[str, str], tuple[int, asyncio.Task[Score]]] = {}

            async def shared_score(draft: Draft) -> Score:
                """Verify equal drafts once; the copies cost nothing."""
                key = (draft.rationale, draft.answer)
                if key not in verifications:
                    verification = tasks.start(work.tier.score(work.question, draft))
                    verifications[key] = (draft.index, verification)
                first, verification = verifications[key]
                score = await verification
                return score if first == draft.index else _copy_for(score, draft.index)

            await tasks.all_of(
                [draft_then_verify(index) for index in range(len(partition.subsets))]
            )

    async def _descend(self, work: _Work) -> None:
        """Read all drafts anew at the next tier while none could be scored at this one."""
        for tier in work.tiers[1:]:
            if work.deadline_hit and tier.requests:
                return
            drafts = work.usable_drafts
            if not drafts or candidates_of(drafts, work.current_scores):
                return
            reason = next((s.missing for s in work.current_scores if s.missing), "no score")
            work.note(f"no score at tier {work.tier.name} ({reason}): using {tier.name}")
            work.tier = tier
            async with _Tasks() as tasks:
                scored = [tasks.start(tier.score(work.question, draft)) for draft in drafts]
                for score in scored:
                    work.add_score(await score)

    # ---------------------------------------------------------------- accept or fall back

    def _accepted(self, work: _Work, selection: Selection) -> Answer:
        winner = next(draft for draft in work.usable_drafts if draft.index == selection.winner)
        work.note(*work.failures)
        work.emit(SelectedEvent(selection=selection, passages=winner.passages))
        work.emit(DeltaEvent(text=winner.answer))
        if winner.truncated:
            work.note(f"the answer may be cut off: draft {winner.index} reached the token limit")
        return Answer(
            text=winner.answer,
            rationale=winner.rationale,
            passages=winner.passages,
            citations=winner.citations,
            dissent=dissent_from(winner.answer, work.drafts, work.current_scores),
            selection=selection,
            tier=work.tier.name,
            trace=work.trace(first_token=work.clock.elapsed),
            usage=Usage(steps=tuple(work.steps)),
        )

    async def _fallen_back(
        self, work: _Work, selection: Selection, history: Sequence[Message]
    ) -> Answer:
        if work.deadline_hit:
            raise NoAnswerError(
                f"no draft could be selected within the deadline "
                f"({len(work.drafts)} of {len(work.partition.subsets) or self._num_drafts} drafts "
                f"written, {sum(s.value is not None for s in work.current_scores)} scored)",
                reason=NoAnswerReason.DEADLINE,
                failures=work.failures,
            )
        reason = selection.reason or FallbackReason.NO_USABLE_DRAFT
        if self._standard is None:
            raise NoAnswerError(
                "no draft can be used, and fallback is off: " + "; ".join(work.failures),
                reason=NoAnswerReason.NO_USABLE_DRAFT,
                failures=work.failures,
            )
        work.note(*work.failures)
        work.note(f"fell back to standard RAG: {reason}")
        work.emit(FallbackEvent(reason=reason))
        try:
            written = await self._standard.write_in_time(
                work.question, work.passages, history=history, clock=work.clock, emit=work.emit
            )
        except NoAnswerError as error:
            error.failures = (*work.failures, *error.failures)
            raise
        work.note(*written.notes)
        work.stages["fallback"] = work.clock.elapsed
        work.steps.append(written.usage)
        return Answer(
            text=written.text,
            passages=written.passages,
            citations=cited_numbers(written.text, len(written.passages)),
            dissent=dissent_from(written.text, work.drafts, work.current_scores),
            abstained=is_abstention(written.text),
            selection=selection,
            fallback_reason=reason,
            tier=work.tier.name,
            trace=work.trace(first_token=written.first_token),
            usage=Usage(steps=tuple(work.steps)),
        )


@dataclass(slots=True, kw_only=True)
class _Work:
    """What is known of a question so far."""

    question: str
    passages: tuple[Passage, ...]
    clock: Clock
    emit: Emit
    partition: Partition = field(default_factory=lambda: Partition(subsets=()))
    drafts: list[Draft | FailedDraft] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    steps: list[StepUsage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    tiers: tuple[Tier, ...]
    """The tiers this question may use; what it teaches about them counts from the next one on."""
    tier: Tier = field(init=False)
    deadline_hit: bool = False

    def __post_init__(self) -> None:
        self.tier = self.tiers[0]

    def note(self, *texts: str) -> None:
        """Keep what a reader of the trace must know, and log it once."""
        for text in texts:
            self.notes.append(text)
            log.info("%s", text)

    def add_draft(self, draft: Draft | FailedDraft) -> None:
        """Take a draft in as it lands."""
        self.drafts.append(draft)
        self.stages["draft"] = draft.arrived
        self.steps.append(_step("draft", "drafter", draft.index, draft))
        if isinstance(draft, Draft):
            self.note(*draft.notes)
        self.emit(DraftEvent(draft=draft))

    def add_score(self, score: Score) -> None:
        """Take a score in as it lands."""
        score = replace(score, arrived=self.clock.elapsed)
        self.scores.append(score)
        if score.attempts:
            self.steps.append(_step("verify", "verifier", score.draft, score))
        self.emit(ScoreEvent(score=score))

    @property
    def usable_drafts(self) -> list[Draft]:
        """The drafts that answer."""
        return [d for d in self.drafts if isinstance(d, Draft) and not d.abstained]

    @property
    def current_scores(self) -> list[Score]:
        """The scores of the tier in use: scores of different tiers are never compared."""
        return [score for score in self.scores if score.tier == self.tier.name]

    @property
    def cut_off(self) -> str:
        """The drafts that a deadline now would leave unwritten and unscored, for a note."""
        written = {draft.index for draft in self.drafts}
        scored = {score.draft for score in self.current_scores}
        left = {
            "not written": [s.index for s in self.partition.subsets if s.index not in written],
            "not scored": [d.index for d in self.usable_drafts if d.index not in scored],
        }
        return "".join(
            f"; {what}: {', '.join(map(str, sorted(indices)))}"
            for what, indices in left.items()
            if indices
        )

    @property
    def failures(self) -> list[str]:
        """One line for each draft that cannot be selected, by index."""
        lines = {}
        for draft in self.drafts:
            if isinstance(draft, FailedDraft):
                lines[draft.index] = f"draft {draft.index}: {draft.reason}"
            elif draft.abstained:
                lines[draft.index] = f"draft {draft.index}: the passages do not tell"
        for score in self.current_scores:
            if score.value is None:
                lines[score.draft] = f"draft {score.draft}: not scored: {score.missing}"
        return [lines[index] for index in sorted(lines)]

    def trace(self, *, first_token: float) -> Trace:
        """Return all of it as a value."""
        return Trace(
            passages=self.passages,
            subsets=self.partition.subsets,
            drafts=tuple(sorted(self.drafts, key=lambda draft: draft.index)),
            scores=tuple(self.scores),
            notes=tuple(self.notes),
            deadline_hit=self.deadline_hit,
            stages=dict(self.stages),
            seconds=self.clock.elapsed,
            first_token=first_token,
        )


class _Tasks:
    """Tasks that never outlive their block: leaving it cancels them and waits for their end."""

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

    async def all_of(self, coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Run all; the first exception ends the wait and is raised as itself."""
        tasks = [self.start(coroutine) for coroutine in coroutines]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()


def _step(
    kind: StepKind, role: ModelRole, index: int, cost: Draft | FailedDraft | Score
) -> StepUsage:
    return StepUsage(
        kind=kind,
        index=index,
        role=role,
        model=cost.model,
        seconds=cost.seconds,
        arrived=cost.arrived,
        count=cost.count,
        attempts=cost.attempts,
    )


def _copy_for(score: Score, index: int) -> Score:
    """Return an equal draft's score; it cost nothing again."""
    return replace(
        score, draft=index, shared_with=score.draft, count=TokenCount(), seconds=0.0, attempts=0
    )


def _models(name: str, given: ChatModel | Sequence[ChatModel]) -> tuple[ChatModel, ...]:
    models = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not models:
        raise ConfigurationError(f"{name} is an empty list; give at least one Endpoint")
    for model in models:
        if not callable(getattr(model, "chat", None)):
            raise ConfigurationError(
                f"{name} must be an Endpoint or another ChatModel, not a "
                f"{type(model).__name__}; write Endpoint(base_url, model)"
            )
    return models
