"""Verifier: scores drafts at the best tier that the servers allow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from specrag_integrations.drafts import Draft
from specrag_integrations.errors import (
    ConfigurationError,
    InputError,
    LogprobsUnavailableError,
)
from specrag_integrations.models import ChatModel, Step
from specrag_integrations.options import check_kind, check_model, checked_question
from specrag_integrations.portal import portal
from specrag_integrations.prompts import numbered
from specrag_integrations.scores import (
    ASKING,
    DRAFT_TERMS,
    TIERS,
    Score,
    Scoring,
    TierName,
    Verdict,
    score_of,
)
from specrag_integrations.tasks import Tasks
from specrag_integrations.tiers import DraftTier, PoolTier, Tier, TierMaker
from specrag_integrations.trials import Trial, Tryout, working

log = logging.getLogger("specrag_integrations")

Report = Callable[[Score], None]

_STRIKES = 3
"""Consecutive questions that a tier told nothing about before it is given up."""


class Verifier:
    """Scores drafts with a large model, in one short prefill each, by token log-probabilities.

    On its own it scores any drafts: `Verifier(endpoint).score(question, [Draft(rationale=…,
    answer=…), …])`.

    An `Endpoint` is tried once, as a rule with one request of one token, to see which tiers its
    server allows; a model of an application is not, and what it can do shows in its replies.

    Args:
        model: The large model: an `Endpoint`, or another `ChatModel`.
        scoring: Tier, weights, formula and what the verifier reads.
        tiers: Which tiers may be used, the best first; by default the one that `scoring` names, or
            those that read the verifier's log-probabilities.
        comparable_drafts: Whether all drafts come from one model, so that the drafter's
            log-probabilities can be compared between drafts.

    Raises:
        ConfigurationError: terms of the drafter are to count, with different drafting models.
    """

    def __init__(
        self,
        model: ChatModel,
        *,
        scoring: Scoring | None = None,
        tiers: Sequence[TierName] | None = None,
        comparable_drafts: bool = True,
    ) -> None:
        check_model("model", model)
        self.model = model
        check_kind("scoring", scoring, kind=Scoring)
        self.scoring = scoring or Scoring()
        if self.scoring.compares_drafters and not comparable_drafts:
            raise ConfigurationError(
                "the drafter's log-probabilities are to count (tier='draft_only', formula='paper' "
                "or a weight of a draft term), and different drafting models cannot be compared "
                "by them; use one drafter, or other terms"
            )
        self.comparable_drafts = comparable_drafts
        self._wanted = _checked_tiers(tiers, self.scoring)
        self._names = self._wanted
        self._tryout = Tryout(self.model, self.scoring)
        self._strikes = 0
        self._given_up: dict[TierName, str] = {}

    def max_requests(self, num_drafts: int) -> int:
        """Return the most generating requests one question can cost, over all its tiers.

        Trial requests and tokeniser calls are apart, and a retry is counted by the model.
        """
        return sum(TIERS[name].requests(num_drafts) for name in self._wanted)

    def score(self, question: str, drafts: Sequence[Draft]) -> list[Score]:
        """Score drafts; the scores come in their order, `Score.draft` being the place in it.

        Args:
            question: What the drafts answer.
            drafts: Written by hand or by a drafter.

        Raises:
            InputError: an empty question or answer, or passages are to be shown and a draft has
                none.
            EndpointError: no draft could be scored, since every request failed.
            LogprobsUnavailableError: none could, since the server returns no usable
                log-probabilities.
            ConfigurationError: `formula="paper"`, and one of its five terms cannot be had.
        """
        return portal.run(self.ascore(question, drafts))

    async def ascore(self, question: str, drafts: Sequence[Draft]) -> list[Score]:
        """As `score`, without blocking the loop."""
        question = checked_question(question)
        if not isinstance(drafts, Sequence) or isinstance(drafts, str):
            raise InputError(f"drafts must be a list of Draft, not a {type(drafts).__name__}")
        pool = [(index, self._checked(draft, index)) for index, draft in enumerate(drafts)]
        if not pool:
            return []
        async with Tasks() as tasks:
            verification = self.begin(question, tasks=tasks, report=lambda _: None)
            await tasks.all_of([verification.add(draft, index=index) for index, draft in pool])
            await verification.finish(pool)
        self.remember(verification)
        for note in verification.notes:
            log.info("%s", note)
        scores = sorted(verification.current, key=lambda score: score.draft)
        if all(score.value is None for score in scores):
            verification.raise_failure()
        return scores

    def _checked(self, draft: Draft, index: int) -> Draft:
        if not isinstance(draft, Draft):
            raise InputError(f"draft {index} must be a Draft, not a {type(draft).__name__}")
        for name in ("rationale", "answer"):
            if not isinstance(text := getattr(draft, name), str):
                raise InputError(
                    f"draft {index}: its {name} is a {type(text).__name__} and must be a str"
                )
        if not draft.answer.strip():
            raise InputError(f"draft {index} has an empty answer")
        if self.scoring.evidence and not draft.passages:
            raise InputError(
                f"draft {index} has no subset: evidence='passages' shows the verifier its passages"
            )
        return draft

    def begin(self, question: str, *, tasks: Tasks, report: Report) -> Verification:
        """Begin to score a question's drafts; its tiers are found out meanwhile."""
        return Verification(self, question, tasks=tasks, report=report)

    async def tiers(self, tasks: Tasks) -> Plan:
        """Return the tiers the next question may use, found out within `tasks`.

        Raises:
            ConfigurationError: none is left that the scoring's formula allows.
        """
        wanted, names, notes = self._wanted, self._names, []
        trials = await self._tryout.known(names, tasks)
        paper = self.scoring.formula == "paper"
        if trials is None:  # nothing is known, so that only what most servers can is used
            proven = tuple(name for name in names if not TIERS[name].needs_proof)
            names = proven or names
            if names != wanted:
                notes.append(f"{self.model.name} could not be tried yet")
        elif len(names) > 1 or paper:
            names = working(names, trials, self.scoring) or (() if paper else names[-1:])
            first = wanted.index(names[0]) if names else len(wanted)
            notes += [
                f"{trial.tier} does not work with this server ({trial.evidence})"
                for trial in trials
                if not trial.works and trial.tier in wanted[:first]
            ]
        if not names:
            raise ConfigurationError(
                f"formula='paper' needs the verifier's log-probabilities of given text, which "
                f"{self.model.name} does not return ({'; '.join(notes) or 'it cannot be tried'}); "
                "use vLLM or llama.cpp, or leave formula out"
            )
        notes = [*self._given_up.values(), *notes, *self._left_out(names[0])]
        maker = TierMaker(model=self.model, scoring=self.scoring, thinks=self._tryout.thinks)
        return Plan(
            tiers=tuple(maker.make(name) for name in names),
            notes=(f"scored at tier {names[0]}: {'; '.join(notes)}",) if notes else (),
        )

    async def trials(self) -> tuple[Trial, ...]:
        """Try out what the verifier's server returns, and tell the evidence for each tier.

        Raises:
            EndpointError: the server cannot be reached, is busy, or refuses every request.
        """
        return await self._tryout.trials(ASKING)

    def _left_out(self, name: TierName) -> list[str]:
        """Say which weights do nothing at a tier."""
        weights = self.scoring.weights or {}
        lacking = [t for t, weight in weights.items() if weight and t not in TIERS[name].terms]
        return [f"no {', '.join(lacking)} there, so that its weight is left out"] if lacking else []

    def remember(self, verification: Verification) -> None:
        """Learn from a question how the next one is to be asked.

        One question whose first tier told nothing may be bad luck; several in a row are a server.
        """
        self._tryout.thinks = self._tryout.thinks or verification.thinking
        first = verification.first
        if not first or verification.had_no_other or first[0].tier not in self._names:
            return
        self._strikes = self._strikes + 1 if verification.first_was_useless else 0
        if self._strikes >= _STRIKES:
            self._strikes = 0
            left = first[0].tier
            self._names = tuple(name for name in self._names if name != left)
            told = f"{left} told nothing for {_STRIKES} questions in a row ({first[0].missing})"
            self._given_up[left] = told
            log.warning("%s: %s, and is given up", self.model.name, told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The tiers of one question, the one it starts with first."""

    tiers: tuple[Tier, ...]
    notes: tuple[str, ...]
    """Why better ones are left out."""


class Verification:
    """The scores of one question's drafts.

    The first tier judges each draft as it lands; while no draft gets a value, all are read anew at
    the next. Scores of different tiers are never compared.
    """

    def __init__(self, verifier: Verifier, question: str, *, tasks: Tasks, report: Report) -> None:
        self.scores: list[Score] = []
        """All, in order of arrival."""
        self._descents: list[str] = []
        self._verifier = verifier
        self._question = question
        self._tasks = tasks
        self._report = report
        self._plan = tasks.start(verifier.tiers(tasks))
        self._at = 0
        self._verdicts: list[tuple[TierName, Verdict]] = []
        self._shared: dict[object, tuple[int, asyncio.Task[Verdict]]] = {}

    @property
    def tier(self) -> TierName | None:
        """The tier in use; None until it is known."""
        return self._known.tiers[self._at].name if self._known else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the trace must know of how the drafts were scored."""
        told = dict.fromkeys(one.note for one in self._current_verdicts if one.note)
        return (*(self._known.notes if self._known else ()), *self._descents, *told)

    @property
    def _known(self) -> Plan | None:
        done = self._plan.done() and not self._plan.cancelled() and not self._plan.exception()
        return self._plan.result() if done else None

    @property
    def current(self) -> list[Score]:
        """The scores of the tier in use."""
        return [score for score in self.scores if score.tier == self.tier]

    @property
    def first(self) -> list[Score]:
        """The scores of the tier that was used first."""
        return [score for score in self.scores if score.tier == self.scores[0].tier]

    @property
    def had_no_other(self) -> bool:
        """Whether there was no tier below the first."""
        return self._known is None or len(self._known.tiers) == 1

    @property
    def first_was_useless(self) -> bool:
        """Whether the first tier told nothing, and will not, or another that asks did tell."""
        if any(score.value is not None for score in self.first):
            return False
        told = any(score.value is not None for score in self.current)
        asked = self.tier is not None and not TIERS[self.tier].free
        return all(score.cannot for score in self.first) or (told and asked)

    @property
    def thinking(self) -> bool:
        """Whether the verifier was seen to think aloud."""
        return any(verdict.thinking for _, verdict in self._verdicts)

    async def add(self, draft: Draft, *, index: int) -> None:
        """Judge a draft as it lands, if the tier judges drafts one by one."""
        tier = (await asyncio.shield(self._plan)).tiers[0]
        if isinstance(tier, PoolTier):
            return
        await self._judge(tier, draft, index)

    async def finish(self, drafts: Sequence[tuple[int, Draft]], *, free: bool = False) -> None:
        """Judge what only the whole pool can tell, and descend while no draft has a value.

        `free` allows only what sends no request: the time is over.

        Raises:
            ConfigurationError: `formula="paper"`, and its terms cannot be had.
        """
        if not drafts or (free and self.tier is None):
            return
        tiers = (await asyncio.shield(self._plan)).tiers
        if isinstance(tiers[self._at], PoolTier):
            await self._judge_all(tiers[self._at], drafts, free=free)
        for at in range(self._at + 1, len(tiers)):
            scores, tier = self.current, tiers[at]
            # At the deadline, only from a tier that does not work or has not had its turn.
            waits = isinstance(tiers[self._at], PoolTier) and not scores
            late = free and not waits and not any(score.cannot for score in scores)
            if late or any(score.value is not None for score in scores):
                break
            if not TIERS[tier.name].free and (free or self._is_unreachable):
                continue
            if self._lacks_drafter(tier.name, drafts):
                continue
            reason = next((score.missing for score in scores if score.missing), "no score")
            self._descents.append(f"no score at tier {self.tier} ({reason}): using {tier.name}")
            self._at = at
            await self._judge_all(tier, drafts, free=free)
        if self._verifier.scoring.formula == "paper" and all(d.is_mute for _, d in drafts):
            raise ConfigurationError(
                "formula='paper' needs all five terms, and the drafter returned no "
                "log-probabilities (rationale_logprob and answer_logprob of a Draft); "
                "use another drafter, or leave formula out"
            )

    def _lacks_drafter(self, name: TierName, drafts: Sequence[tuple[int, Draft]]) -> bool:
        """Whether a tier counts terms of the drafter that no draft has."""
        counts = set(DRAFT_TERMS).intersection(self._verifier.scoring.weights_at(name))
        return bool(counts) and not any(draft.answer_logprob for _, draft in drafts)

    def raise_failure(self) -> None:
        """Raise what kept every draft from being scored, if one thing did.

        Raises:
            EndpointError: every request failed.
            LogprobsUnavailableError: the server returns no usable log-probabilities.
        """
        errors = [verdict.error for verdict in self._current_verdicts]
        if errors and errors[0] and all(errors):
            raise errors[0]
        if self.tier == "draft_only":
            raise LogprobsUnavailableError(
                "no draft has its drafter's log-probabilities: rationale_logprob, answer_logprob"
            )
        if self.current and all(score.cannot for score in self.current):
            raise LogprobsUnavailableError(
                f"{self._verifier.model.name}: {self.current[0].missing}; "
                "Scoring(tier='choice') needs no log-probabilities"
            )

    @property
    def _current_verdicts(self) -> list[Verdict]:
        return [verdict for name, verdict in self._verdicts if name == self.tier]

    @property
    def _is_unreachable(self) -> bool:
        """Whether no server answered at the tier in use: others would wait for it as well."""
        errors = [verdict.error for verdict in self._current_verdicts]
        return bool(errors) and all(e and e.retryable and e.status_code is None for e in errors)

    async def _judge_all(
        self, tier: Tier, drafts: Sequence[tuple[int, Draft]], *, free: bool
    ) -> None:
        if isinstance(tier, PoolTier):
            if free and not TIERS[tier.name].free:
                return
            verdicts = await tier.judge_all(self._question, [draft for _, draft in drafts])
            for (index, draft), verdict in zip(drafts, verdicts, strict=True):
                self._take(tier, draft, index, verdict)
        elif TIERS[tier.name].free:
            for index, draft in drafts:
                await self._judge(tier, draft, index)
        else:
            await self._tasks.all_of([self._judge(tier, draft, index) for index, draft in drafts])

    async def _judge(self, tier: DraftTier, draft: Draft, index: int) -> None:
        """Judge one draft; equal ones share a verdict, and the copies cost nothing."""
        scoring = self._verifier.scoring
        step = Step(kind="verify", index=index)
        if scoring.formula == "paper" or TIERS[tier.name].free:
            self._take(tier, draft, index, await tier.judge(self._question, draft, step=step))
            return
        shown = numbered(draft.passages) if scoring.evidence else ""
        key = (tier.name, draft.rationale, draft.answer, shown)
        if key not in self._shared:
            judged = self._tasks.start(tier.judge(self._question, draft, step=step))
            self._shared[key] = (index, judged)
        first, judged = self._shared[key]
        verdict = await asyncio.shield(judged)
        if first == index:
            self._take(tier, draft, index, verdict)
        else:
            self._take(tier, draft, index, verdict.paid, shared_with=first)

    def _take(
        self,
        tier: Tier,
        draft: Draft,
        index: int,
        verdict: Verdict,
        *,
        shared_with: int | None = None,
    ) -> None:
        if shared_with is None:
            self._verdicts.append((tier.name, verdict))
        score = score_of(
            draft,
            verdict,
            index=index,
            tier=tier.name,
            scoring=self._verifier.scoring,
            comparable_drafts=self._verifier.comparable_drafts,
        )
        score = replace(score, shared_with=shared_with)
        self.scores.append(score)
        self._report(score)


# -------------------------------------------------------------------- which tiers


def default_tiers(scoring: Scoring) -> tuple[TierName, ...]:
    """Return the tiers that a verifier alone uses, the best first."""
    if scoring.tier is not None:
        return (scoring.tier,)
    if scoring.formula == "paper":
        return ("prompt_logprobs", "forced_decoding")
    return ("prompt_logprobs", "reflection")


def all_tiers(
    scoring: Scoring, *, comparable_drafts: bool, own_selector: bool
) -> tuple[TierName, ...]:
    """Return the tiers of a pipeline, which would rather compare drafts by little than by nothing.

    `choice` and `agreement` bring their own selector, so that another one rules them out.
    """
    tiers = default_tiers(scoring)
    if scoring.tier is not None or scoring.formula == "paper":
        return tiers
    return (
        *tiers,
        *(("choice",) if own_selector else ()),
        *(("draft_only",) if comparable_drafts else ()),
        *(("agreement",) if own_selector else ()),
    )


def _checked_tiers(tiers: Sequence[TierName] | None, scoring: Scoring) -> tuple[TierName, ...]:
    """Return the tiers to use.

    Raises:
        ConfigurationError: one is unknown, or the scoring cannot use it.
    """
    allowed = get_args(TierName)
    if scoring.tier is not None or scoring.formula == "paper":
        allowed = default_tiers(scoring)
    for name in tiers or ():
        if name not in allowed:
            raise ConfigurationError(
                f"tiers name {name!r}; this scoring can use {', '.join(allowed)}"
            )
    scoring.check_tiers(tuple(tiers or ()))
    return tuple(tiers or default_tiers(scoring))
