"""SpeculativeRAG: the path of a question.

Partition the passages, draft from each subset in parallel, verify each draft as soon as it lands,
select the best; or fall back to standard RAG when no draft deserves trust (paper, algorithm 1).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

from specrag_integrations.answers import Answer, Refinement, Trace, dissent_from
from specrag_integrations.citations import cited_numbers, is_abstention
from specrag_integrations.confidence import (
    Calibration,
    Fingerprint,
    Gauge,
    ask_servers,
    check_thresholds,
    named,
    prompt_hash,
)
from specrag_integrations.drafts import Draft, Drafter, FailedDraft
from specrag_integrations.engine import Clock, Engine
from specrag_integrations.errors import (
    ConfigurationError,
    EndpointError,
    NoAnswerError,
    NoAnswerReason,
)
from specrag_integrations.events import (
    DeltaEvent,
    DraftEvent,
    Emit,
    Event,
    FallbackEvent,
    PassagesEvent,
    ScoreEvent,
    SelectedEvent,
)
from specrag_integrations.models import ChatModel, Message, StepKind
from specrag_integrations.options import check_kind, check_model, checked_whole
from specrag_integrations.passages import Passage, Usable
from specrag_integrations.portal import portal
from specrag_integrations.prompts import (
    Template,
    checked_template,
    draft_messages,
    refine_messages,
)
from specrag_integrations.scores import TIERS, Score, Scoring, TierName
from specrag_integrations.selection import (
    BestScore,
    Candidate,
    FallbackReason,
    Pool,
    Selection,
    Selector,
    accepted_first,
    candidates_of,
    is_unsure,
    nothing_usable,
    own_selector,
    select,
)
from specrag_integrations.standard import StandardRAG
from specrag_integrations.subsets import (
    Embedder,
    MultiPerspective,
    Partition,
    Partitioner,
    make_subsets,
)
from specrag_integrations.tasks import Tasks
from specrag_integrations.usage import ModelRole, StepUsage, Usage
from specrag_integrations.verifier import Verification, Verifier, all_tiers

log = logging.getLogger("specrag_integrations")

Refine = Literal["never", "always", "when_unsure"]

# The defaults, in one place: docs/results.md says why they are not the paper's.
NUM_DRAFTS = 5
PASSAGES_PER_DRAFT = 3
LEAD = 5


def default_partitioner(passages_per_draft: int) -> MultiPerspective:
    """Return how subsets are chosen where nobody says how.

    The first draft reads the best-ranked passages, as standard RAG would; the others the best of
    all and one passage of each cluster of the rest.
    """
    return MultiPerspective(
        anchor=min(1, passages_per_draft - 1), lead=max(LEAD, passages_per_draft)
    )


class SpeculativeRAG(Engine):
    """Speculative RAG: small models draft, a large model verifies.

    Args:
        drafter: The small model, or several: draft j goes to model j modulo their number.
        verifier: The large model; it reads drafts, and passages only to fall back or to refine, or
            where `scoring` shows them.
        num_drafts: How many drafts (m in the paper), fewer where the passages allow no more.
        passages_per_draft: How many passages each draft reads (k in the paper).
        partitioner: How subsets are chosen; None: the first draft reads the five best-ranked
            passages whatever `passages_per_draft` says, each other the best one and one of each
            cluster of the rest, `MultiPerspective(anchor=1, lead=5)`.
        embedder: (texts, question) -> array (n, d), sync or async, used for all passages if any
            lacks an embedding; TF-IDF without it.
        scoring: How drafts are scored; by default at the best tier that the verifier's server
            allows. Without `weights` of its own it takes the calibration's.
        selector: How one of them is selected; by default the highest score wins. The tiers `choice`
            and `agreement` bring their own.
        calibration: What `specrag calibrate` measured in this very set-up. It gives answers their
            `confidence`, P(correct).
        min_confidence: A winner below it, or without a confidence, is not trusted, and standard RAG
            answers: `calibration.min_confidence`, or a probability of your own.
        accept_confidence: The first draft to reach it is the answer, and all that is still under
            way is cancelled: `calibration.accept_confidence`, or a probability of your own.
        refine: `"always"` has the verifier mend the winning draft against the draft's own passages,
            `"when_unsure"` only where a rival answer is within 0.1 nats of it, or where it is below
            `min_confidence` and there is no fallback.
        fallback: `"standard"`, or None to raise `NoAnswerError` where no draft can be used.
        draft_template: The app's own prompt for the drafts instead of ours: (question, passages,
            history) -> messages. It must ask for a rationale and an answer, as
            `prompts.draft_request` has a prompt do.
        fallback_template: The app's own prompt for the fallback instead of ours, of the same kind.
        max_answer_tokens: The most tokens of a draft, a refined answer, and a fallback's answer.
        deadline: Seconds a question may take. The best draft scored by then wins.
        instructions: The app's own words, added to our draft, refine and fallback prompts.

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
        calibration: Calibration | None = None,
        min_confidence: float | None = None,
        accept_confidence: float | None = None,
        refine: Refine = "never",
        fallback: Literal["standard"] | None = "standard",
        draft_template: Template | None = None,
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
        self._partitioner: Partitioner = (
            default_partitioner(passages_per_draft) if partitioner is None else partitioner
        )
        check_kind("partitioner", self._partitioner, method="check")
        check_kind("selector", selector, method="select")
        for name in ("reads_scores", "requests"):
            if selector is not None and not hasattr(selector, name):
                raise ConfigurationError(
                    f"selector must say {name}, as specrag_integrations.selection.Selector tells; "
                    f"{type(selector).__name__} does not"
                )
        if refine not in get_args(Refine):
            raise ConfigurationError(
                f"refine={refine!r} must be one of {', '.join(get_args(Refine))}"
            )
        check_kind("embedder", embedder, method="__call__")
        check_kind("scoring", scoring, kind=Scoring)
        check_kind("calibration", calibration, kind=Calibration)
        check_kind("instructions", instructions, kind=str)
        scoring = _scoring(scoring, calibration, selector)
        check_thresholds(
            calibration,
            min_confidence=min_confidence,
            accept_confidence=accept_confidence,
            scoring=scoring,
        )
        self._partitioner.check(num_drafts=num_drafts, passages_per_draft=passages_per_draft)
        self._embedder = embedder
        drafting: Template = partial(draft_messages, instructions=instructions)
        if draft_template is not None:
            drafting = checked_template("draft_template", draft_template)
            others_ours = refine != "never" or (fallback and fallback_template is None)
            _check_used(instructions, used=bool(others_ours))
        self._drafter = Drafter(models=drafters, max_tokens=max_answer_tokens, template=drafting)
        self._model = verifying
        self._selector = selector
        self._refine = refine
        self._verifier = _verifier(
            # Replicas of one model write with the same log-probabilities.
            verifying,
            scoring,
            selector,
            comparable=len({model.name for model in drafters}) == 1,
        )
        self._standard = _standard(
            verifying,
            fallback,
            template=fallback_template,
            instructions=instructions,
            max_tokens=max_answer_tokens,
        )
        self._instructions, self._max_tokens = instructions, max_answer_tokens
        self._calibration = calibration
        self._min_confidence, self._accept_confidence = min_confidence, accept_confidence
        self._setup = Fingerprint(
            tier=scoring.tier,
            prompts=prompt_hash(scoring, drafting),
            num_drafts=num_drafts,
            passages_per_draft=passages_per_draft,
            partitioner=named(self._partitioner),
            selector=named(selector or BestScore()),
            formula=scoring.formula,
            weights={term: weight for term, weight in (scoring.weights or {}).items() if weight},
        )
        if calibration is not None:
            calibration.check(self._setup.with_models(drafters, verifying))
        self.max_requests = self._most_requests(drafters, verifying)

    def __repr__(self) -> str:
        drafters = ", ".join(dict.fromkeys(model.name for model in self._drafter.models))
        return (
            f"SpeculativeRAG(drafter={drafters!r}, verifier={self._models[-1].name!r}, "
            f"num_drafts={self._num_drafts}, passages_per_draft={self._passages_per_draft})"
        )

    def fingerprint(self) -> Fingerprint:
        """Return the set-up that a calibration of this engine would hold for, its servers asked.

        Its tier is known only where `scoring` forces one; an answer tells the tier it used.
        """
        return portal.run(self.afingerprint())

    async def afingerprint(self) -> Fingerprint:
        """As `fingerprint`, without blocking the loop."""
        servers = await ask_servers(self._drafter.models, self._model)
        return replace(
            self._setup.with_models(self._drafter.models, self._model),
            drafter_server=servers.drafter,
            verifier_server=servers.verifier,
        )

    def _most_requests(self, drafters: Sequence[ChatModel], verifier: ChatModel) -> int:
        """Count the generating HTTP requests one question can cost when everything fails."""
        drafting = sum(
            drafters[index % len(drafters)].max_attempts for index in range(self._num_drafts)
        )
        asked = self._verifier.max_requests(self._num_drafts) if self._verifier else 0
        asked += self._selector.requests if self._selector else 0
        asked += (self._refine != "never") + (self._standard is not None)
        return drafting + verifier.max_attempts * asked

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
            accept_confidence=self._accept_confidence,
        )
        work.note(*usable.dropped)
        await self._speculate(work, history)
        selection, candidates = await self._select(work)
        if selection.winner is not None:
            return await self._accepted(work, selection, candidates, history)
        return await self._fallen_back(work, selection, history)

    async def awarmup(self) -> None:
        """As `warmup`, without blocking the loop."""
        await super().awarmup()
        if self._verifier is not None:
            async with Tasks() as tasks:
                await self._verifier.tiers(tasks)

    # ---------------------------------------------------------------- partition, draft, verify

    async def _speculate(self, work: _Work, history: Sequence[Message]) -> None:
        """Fill `work` with drafts and scores, until all are there, one is accepted, or time is up.

        What is still under way then is cancelled.
        """
        scope = asyncio.timeout(work.clock.left)
        try:
            async with scope, Tasks() as tasks:
                if self._verifier is not None:
                    work.verification = self._verifier.begin(
                        work.question, tasks=tasks, report=work.add_score
                    )
                work.gauge = self._gauge(tasks)
                partition = await self._partition(work)
                await tasks.until_first(
                    self._draft_and_verify(work, partition, history, tasks), work.enough.wait()
                )
        except TimeoutError:
            if not scope.expired():
                raise
            work.deadline_hit = True
            work.note(f"DEADLINE: stopped after {work.clock.elapsed:.2f} s{work.cut_off}")
            if work.verification is not None:
                await work.verification.finish(work.pool, free=True)
        finally:
            work.stages["verify"] = work.clock.elapsed
            if self._verifier is not None and work.verification is not None:
                work.note(*work.verification.notes)
                self._verifier.remember(work.verification)
            if work.gauge is not None:
                work.note(*work.gauge.notes, level=logging.WARNING)

    def _gauge(self, tasks: Tasks) -> Gauge | None:
        """Begin to find out whether this question's scores have a confidence."""
        if self._calibration is None:
            return None
        return Gauge(
            self._calibration,
            setup=self._setup,
            drafters=self._drafter.models,
            verifier=self._model,
            tasks=tasks,
        )

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
        self, work: _Work, partition: Partition, history: Sequence[Message], tasks: Tasks
    ) -> None:
        """Draft from all subsets at once; each draft is verified as soon as it lands."""

        async def draft_then_verify(index: int) -> None:
            draft = await self._drafter.draft(
                work.question,
                partition.subsets[index],
                history=history,
                started=work.clock.started,
            )
            work.add_draft(draft)
            if work.verification and isinstance(draft, Draft) and not draft.abstained:
                if work.gauge is not None:
                    await work.gauge.ready()
                await work.verification.add(draft, index=draft.index)

        await tasks.all_of([draft_then_verify(index) for index in range(len(partition.subsets))])
        if work.verification is not None:
            await work.verification.finish(work.pool)

    # ---------------------------------------------------------------- select

    async def _select(self, work: _Work) -> tuple[Selection, list[Candidate]]:
        """Select a draft, in the time that is left where that takes a request."""
        selector = self._selector or own_selector(work.tier)
        scored = self._verifier is not None
        candidates = candidates_of(work.usable_drafts, work.current_scores, scored=scored)
        if work.accepted is not None:
            left = sum(map(len, work.unfinished.values()))
            work.note(
                f"accepted early: draft {work.accepted.draft} at confidence "
                f"{work.accepted.confidence:.2f}, {left} drafts cancelled"
            )
            return accepted_first(candidates, work.accepted.draft), candidates
        if not candidates or (selector.requests and work.deadline_hit):
            return nothing_usable(), candidates
        pool = Pool(question=work.question, candidates=tuple(candidates), model=self._model)
        scope = asyncio.timeout(work.clock.left if selector.requests else None)
        try:
            async with scope:
                selection = await select(pool, selector)
        except TimeoutError:
            if not scope.expired():
                raise
            work.deadline_hit = True
            work.note(f"DEADLINE: no selection after {work.clock.elapsed:.2f} s")
            selection = nothing_usable()
        work.note(*selection.notes)
        if selector.requests:
            work.stages["select"] = work.clock.elapsed
        work.add_selection(selection)
        return self._trusted(work, selection), candidates

    def _trusted(self, work: _Work, selection: Selection) -> Selection:
        """Take the victory from a draft below `min_confidence`, unless it is to be mended."""
        if self._min_confidence is None or selection.winner is None:
            return selection
        confidence = work.confidence_of(selection.winner)
        if confidence is not None and confidence >= self._min_confidence:
            return selection
        told = "no confidence" if confidence is None else f"confidence {confidence:.2f}"
        work.untrusted[selection.winner] = f"{told}, with min_confidence={self._min_confidence:.2f}"
        if self._refine == "when_unsure" and self._standard is None and not work.deadline_hit:
            return selection
        return replace(selection, winner=None, reason=FallbackReason.LOW_CONFIDENCE)

    # ---------------------------------------------------------------- accept or fall back

    async def _accepted(
        self,
        work: _Work,
        selection: Selection,
        candidates: Sequence[Candidate],
        history: Sequence[Message],
    ) -> Answer:
        winner = next(draft for draft in work.usable_drafts if draft.index == selection.winner)
        work.note(*work.failures)
        work.emit(SelectedEvent(selection=selection, passages=winner.passages))
        if winner.truncated:
            work.note(f"the answer may be cut off: draft {winner.index} reached the token limit")
        text, first_token, refined = selection.text or winner.answer, None, False
        unsure = self._refine == "when_unsure" and (
            winner.index in work.untrusted
            or (work.accepted is None and is_unsure(selection, candidates))
        )
        if (self._refine == "always" or unsure) and not work.deadline_hit:
            text, first_token = await self._refined(work, winner, text, history)
            refined = first_token is not None
        else:
            work.emit(DeltaEvent(text=text))
        refined = refined or text != winner.answer
        # What was measured is the draft's own answer.
        confidence = work.confidence_of(winner.index) if text == winner.answer else None
        return Answer(
            text=text,
            rationale=winner.rationale,
            passages=winner.passages,
            citations=cited_numbers(f"{winner.rationale} {text}", len(winner.passages)),
            dissent=dissent_from(winner.answer, work.drafts, work.current_scores),
            confidence=confidence,
            confidence_kind=None if confidence is None else "calibrated",
            abstained=is_abstention(text),
            selection=selection,
            tier=work.tier,
            trace=work.trace(
                first_token=first_token or work.clock.elapsed,
                refinement=Refinement(before=winner.answer, after=text) if refined else None,
            ),
            usage=Usage(steps=tuple(work.steps)),
        )

    async def _refined(
        self, work: _Work, winner: Draft, text: str, history: Sequence[Message]
    ) -> tuple[str, float | None]:
        """Have the verifier mend the draft; return the text and when its first piece came.

        A refinement that fails leaves the draft as it was.

        Raises:
            NoAnswerError: it failed (LOW_CONFIDENCE), and the draft is not trusted as it was.
        """

        def prompt(
            question: str,
            _: Sequence[Passage],  # all or none, since the draft's citations count them
            history: Sequence[Message],
        ) -> tuple[Message, ...]:
            return refine_messages(
                question,
                winner.passages,
                rationale=winner.rationale,
                answer=text,
                history=history,
                instructions=self._instructions,
            )

        shown: list[Event] = []
        sent = time.perf_counter()

        def show(event: Event) -> None:
            shown.append(event)
            work.emit(event)

        try:
            refiner = StandardRAG(self._model, template=prompt, max_tokens=self._max_tokens)
            written = await refiner.write_in_time(
                work.question,
                winner.passages,
                history=history,
                clock=work.clock,
                emit=show,
                kind="refine",
            )
        except NoAnswerError as error:
            reason = "; ".join(error.failures) or str(error)
            if winner.index not in work.untrusted:
                work.note(f"not refined, so the draft stands: {reason}")
            work.deadline_hit = error.reason == NoAnswerReason.DEADLINE
            if isinstance(error.__cause__, EndpointError) and error.__cause__.attempts:
                failed = StepUsage(
                    kind="refine",
                    index=0,
                    role="verifier",
                    model=self._model.name,
                    seconds=time.perf_counter() - sent,
                    arrived=work.clock.elapsed,
                    attempts=error.__cause__.attempts,
                )
                work.steps.append(failed)
            if winner.index in work.untrusted:
                raise NoAnswerError(
                    f"draft {winner.index} is not trusted and could not be mended: {reason}",
                    reason=NoAnswerReason.LOW_CONFIDENCE,
                    failures=[*work.failures, *error.failures],
                ) from error
            work.emit(DeltaEvent(text=text, restart=bool(shown)))
            return text, None
        finally:
            work.stages["refine"] = work.clock.elapsed
        work.note(*written.notes)
        work.steps.append(written.usage)
        return written.text, written.first_token

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
                f"no draft was selected ({reason}), and fallback is off: "
                f"{work.told or 'none can be trusted'}",
                reason=NoAnswerReason(reason),
                failures=work.failures,
            )
        work.note(*work.failures)
        work.note(f"fell back to standard RAG: {reason}")
        try:
            written = await self._standard.write_in_time(
                work.question,
                work.passages,
                history=history,
                clock=work.clock,
                emit=work.emit,
                reads=lambda fitting: work.emit(FallbackEvent(reason=reason, passages=fitting)),
            )
        except NoAnswerError as error:
            raise NoAnswerError(
                f"{error}; before it, no draft was selected ({reason})"
                f"{': ' if work.told else ''}{work.told}",
                reason=error.reason,
                failures=(*work.failures, *error.failures),
            ) from error.__cause__
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
            tier=work.tier,
            trace=work.trace(first_token=written.first_token),
            usage=Usage(steps=tuple(work.steps)),
        )


@dataclass(slots=True, kw_only=True)
class _Work:
    """What is known of a question so far."""

    question: str = field(repr=False)
    passages: tuple[Passage, ...] = field(repr=False)
    clock: Clock
    emit: Emit
    partition: Partition = field(default_factory=lambda: Partition(subsets=()))
    drafts: list[Draft | FailedDraft] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    steps: list[StepUsage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    verification: Verification | None = None
    """None where the selector reads no scores."""
    gauge: Gauge | None = None
    """None without a calibration."""
    accept_confidence: float | None = None
    accepted: Score | None = None
    """The first score to reach it."""
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with `accepted`: nothing more need be awaited."""
    untrusted: dict[int, str] = field(default_factory=dict)
    """By draft, why it won and is not trusted."""
    deadline_hit: bool = False

    def note(self, *texts: str, level: int = logging.INFO) -> None:
        """Keep what a reader of the trace must know, and log it once."""
        for text in texts:
            self.notes.append(text)
            log.log(level, "%s", text)

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
        confidence = self.gauge.confidence(score) if self.gauge else None
        score = replace(score, arrived=self.clock.elapsed, confidence=confidence)
        self.scores.append(score)
        if score.attempts:
            self.steps.append(_step("verify", "verifier", score.draft, score))
        self.emit(ScoreEvent(score=score))
        if self.accepted is None and self._is_enough(score):
            self.accepted = score
            self.enough.set()

    def add_selection(self, selection: Selection) -> None:
        """Take in what a selector has just asked, one request after the other."""
        arrived, asked = self.clock.elapsed, []
        for step in reversed(selection.steps):
            asked.append(replace(step, arrived=arrived))
            arrived -= step.seconds
        self.steps += reversed(asked)

    def _is_enough(self, score: Score) -> bool:
        """Whether a draft is whole and as trustworthy as `accept_confidence` asks."""
        if self.accept_confidence is None or score.confidence is None:
            return False
        whole = {draft.index for draft in self.usable_drafts if not draft.truncated}
        return score.draft in whole and score.confidence >= self.accept_confidence

    @property
    def usable_drafts(self) -> list[Draft]:
        """The drafts that answer."""
        return [d for d in self.drafts if isinstance(d, Draft) and not d.abstained]

    @property
    def pool(self) -> list[tuple[int, Draft]]:
        """The same with their indices, in order."""
        return [(d.index, d) for d in sorted(self.usable_drafts, key=lambda draft: draft.index)]

    @property
    def tier(self) -> TierName | None:
        """The tier in use."""
        return self.verification.tier if self.verification else None

    @property
    def current_scores(self) -> list[Score]:
        """The scores of the tier in use: scores of different tiers are never compared."""
        return [score for score in self.scores if score.tier == self.tier]

    def confidence_of(self, index: int) -> float | None:
        """P(correct) of a draft, where it is known."""
        scores = {score.draft: score for score in self.current_scores}
        return scores[index].confidence if index in scores else None

    @property
    def unfinished(self) -> dict[str, list[int]]:
        """The drafts that would be left unwritten and unscored now."""
        written = {draft.index for draft in self.drafts}
        scored = {score.draft for score in self.current_scores}
        return {
            "not written": [s.index for s in self.partition.subsets if s.index not in written],
            "not scored": [d.index for d in self.usable_drafts if d.index not in scored],
        }

    @property
    def cut_off(self) -> str:
        """The same, for the note on a deadline."""
        return "".join(
            f"; {what}: {', '.join(map(str, sorted(indices)))}"
            for what, indices in self.unfinished.items()
            if indices
        )

    @property
    def why_not(self) -> dict[int, str]:
        """Why each draft that cannot be selected cannot be, by index."""
        reasons = {}
        for draft in self.drafts:
            if isinstance(draft, FailedDraft):
                reasons[draft.index] = draft.reason
            elif draft.abstained:
                reasons[draft.index] = "the passages do not tell"
        for score in self.current_scores:
            if score.value is None:
                reasons[score.draft] = f"not scored: {score.missing}"
        return dict(sorted((reasons | self.untrusted).items()))

    @property
    def failures(self) -> list[str]:
        """The same, one line for each draft."""
        return [f"draft {index}: {reason}" for index, reason in self.why_not.items()]

    @property
    def told(self) -> str:
        """The same in one line, where drafts that failed alike share a word."""
        alike: dict[str, list[str]] = {}
        for index, reason in self.why_not.items():
            alike.setdefault(reason, []).append(str(index))
        return "; ".join(
            f"draft{'s' * (len(drafts) > 1)} {', '.join(drafts)}: {reason}"
            for reason, drafts in alike.items()
        )

    def trace(self, *, first_token: float, refinement: Refinement | None = None) -> Trace:
        """Return all of it as a value."""
        return Trace(
            passages=self.passages,
            subsets=self.partition.subsets,
            drafts=tuple(sorted(self.drafts, key=lambda draft: draft.index)),
            scores=tuple(self.scores),
            refinement=refinement,
            notes=tuple(self.notes),
            deadline_hit=self.deadline_hit,
            stages=dict(self.stages),
            seconds=self.clock.elapsed,
            first_token=first_token,
        )


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


def _scoring(
    given: Scoring | None, calibration: Calibration | None, selector: Selector | None
) -> Scoring:
    """Return how drafts are scored: as given, with the calibration's weights where none are.

    Raises:
        ConfigurationError: there are no scores that could be calibrated.
    """
    if calibration is None:
        return given or Scoring()
    if selector is not None and not selector.reads_scores:
        raise ConfigurationError(
            f"{type(selector).__name__} reads no scores, so that calibration= does nothing"
        )
    scoring = given or Scoring()
    if scoring.tier in {"choice", "agreement"}:
        raise ConfigurationError(
            f"at tier={scoring.tier!r} no draft has a score of its own, so that calibration= does "
            "nothing"
        )
    known = TIERS[scoring.tier or "prompt_logprobs"].terms
    weighable = scoring.weights is None and scoring.formula == "weighted"
    if weighable and calibration.weights and calibration.weights.keys() <= set(known):
        return replace(scoring, weights=calibration.weights)
    return scoring


def _verifier(
    model: ChatModel, scoring: Scoring, selector: Selector | None, *, comparable: bool
) -> Verifier | None:
    """Return what scores the drafts; None for a selector that reads no scores.

    Raises:
        ConfigurationError: the scoring and the selector exclude each other.
    """
    name = type(selector).__name__
    if selector is not None and not selector.reads_scores:
        if scoring != Scoring():
            raise ConfigurationError(f"{name} reads no scores, so that scoring= does nothing")
        return None
    if selector is not None and scoring.tier in {"choice", "agreement"}:
        raise ConfigurationError(
            f"tier={scoring.tier!r} brings its own selector; leave selector={name}(…) out, or "
            "take another tier"
        )
    tiers = all_tiers(scoring, comparable_drafts=comparable, own_selector=selector is None)
    return Verifier(model, scoring=scoring, tiers=tiers, comparable_drafts=comparable)


def _standard(
    model: ChatModel,
    fallback: str | None,
    *,
    template: Template | None,
    instructions: str | None,
    max_tokens: int,
) -> StandardRAG | None:
    """Return what answers where no draft is trusted; None where nothing is to.

    Raises:
        ConfigurationError: there is no such fallback, or no prompt for none.
    """
    if fallback not in {"standard", None}:
        raise ConfigurationError(f"fallback={fallback!r} must be 'standard' or None")
    if fallback is None:
        if template is not None:
            raise ConfigurationError("fallback_template= does nothing with fallback=None")
        return None
    if template is None:
        return StandardRAG(model, instructions=instructions, max_tokens=max_tokens)
    template = checked_template("fallback_template", template)
    return StandardRAG(model, template=template, max_tokens=max_tokens)


def _check_used(instructions: str | None, *, used: bool) -> None:
    """Refuse instructions that no prompt would hold.

    Raises:
        ConfigurationError: there are some, and templates replace all of our prompts.
    """
    if instructions is not None and not used:
        raise ConfigurationError(
            "instructions= does nothing, since templates replace all of our prompts; "
            "put the instructions into these"
        )


def _models(name: str, given: ChatModel | Sequence[ChatModel]) -> tuple[ChatModel, ...]:
    models = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not models:
        raise ConfigurationError(f"{name} is an empty list; give at least one Endpoint")
    for model in models:
        check_model(name, model)
    return models
