"""Verifier: scores drafts at the best tier that the servers allow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

from specrag_integrations.drafts import Draft
from specrag_integrations.errors import (
    ConfigurationError,
    EndpointError,
    InputError,
    LogprobsUnavailableError,
)
from specrag_integrations.labels import is_thinking
from specrag_integrations.models import ChatModel, ChatReply, Step, TokenCount
from specrag_integrations.options import check_kind, checked_question
from specrag_integrations.portal import portal
from specrag_integrations.prompts import PROBE_QUESTION
from specrag_integrations.scores import Score, Scoring, TierName, Verdict, score_of
from specrag_integrations.tasks import Tasks
from specrag_integrations.tiers import (
    FREE,
    PROBE_DRAFT,
    DraftTier,
    ForcedDecoding,
    PoolTier,
    Reflection,
    Tier,
    TierMaker,
    Trial,
)

log = logging.getLogger("specrag_integrations")

Report = Callable[[Score], None]

_STRIKES = 3
"""Consecutive questions that found a tier impossible before it is given up."""
_TRIED: frozenset[TierName] = frozenset({"prompt_logprobs", "forced_decoding", "reflection"})
"""The tiers that a trial request can tell something about."""
_LITTLE_MASS = 0.01
"""Below this probability of Yes and No together, a verifier is not answering the question."""
_OPTIMISTIC: frozenset[TierName] = frozenset({"prompt_logprobs", "forced_decoding"})
"""The tiers that are used only where a trial has shown that they work."""


class Verifier:
    """Scores drafts with a large model, in one short prefill each, by token log-probabilities.

    On its own it scores any drafts: `Verifier(endpoint).score(question, [Draft(rationale=…,
    answer=…), …])`.

    An `Endpoint` is tried once, with one or two requests of one token, to see which tiers its
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
        self.model = _checked_model(model)
        check_kind("scoring", scoring, kind=Scoring)
        self.scoring = scoring or Scoring()
        if self.scoring.compares_drafters and not comparable_drafts:
            raise ConfigurationError(
                "the drafter's log-probabilities are to count (tier='draft_only', formula='paper' "
                "or a weight of a draft term), and different drafting models cannot be compared "
                "by them; use one drafter, or other terms"
            )
        self.comparable_drafts = comparable_drafts
        self._names = _checked_tiers(tiers, self.scoring)
        self._thinks = False
        self._refusal: EndpointError | None = None
        self._strikes = 0
        self._told: set[TierName] = set()

    def max_requests(self, num_drafts: int) -> int:
        """Return the most generating requests one question can cost, over all its tiers.

        Trial requests and tokeniser calls are apart, and a retry is counted by the model.
        """
        per_draft = {"prompt_logprobs": 1, "forced_decoding": 2, "reflection": 1}
        for_all = {"choice": 2}
        return sum(per_draft.get(n, 0) * num_drafts + for_all.get(n, 0) for n in self._names)

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
        pool = [(index, self._checked(draft, index)) for index, draft in enumerate(drafts)]
        if not pool:
            return []
        async with Tasks() as tasks:
            verification = self.begin(question, tasks=tasks, report=lambda _: None)
            await tasks.all_of([verification.add(draft, index=index) for index, draft in pool])
            await verification.finish(pool)
        self.remember(verification)
        scores = sorted(verification.current, key=lambda score: score.draft)
        if all(score.value is None for score in scores):
            verification.raise_failure()
        return scores

    def _checked(self, draft: Draft, index: int) -> Draft:
        if not isinstance(draft, Draft):
            raise InputError(f"draft {index} must be a Draft, not a {type(draft).__name__}")
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

    async def tiers(self) -> tuple[Tier, ...]:
        """Return the tiers the next question may use, the one it starts with first.

        Raises:
            ConfigurationError: none is left that the scoring's formula allows.
        """
        names, trials = self._names, await self._try_out()
        paper = self.scoring.formula == "paper"
        if trials is not None and (len(names) > 1 or paper):
            works = {trial.tier: trial.works for trial in trials}
            names = tuple(
                name
                for name in names
                if works.get(name, name not in _OPTIMISTIC)
                and (works.get("reflection", True) or not self._reflects(name))
            )
        if not names:
            told = (
                "; ".join(f"{t.tier}: {t.evidence}" for t in trials or ()) or "it cannot be tried"
            )
            if not paper:
                raise LogprobsUnavailableError(
                    f"{self.model.name} returns no usable log-probabilities ({told}); "
                    "Scoring(tier='choice') needs none"
                )
            raise ConfigurationError(
                f"formula='paper' needs the verifier's log-probabilities of given text, which "
                f"{self.model.name} does not return ({told}); use vLLM or llama.cpp, or leave "
                "formula out"
            )
        if trials is None and not paper:  # nothing is known: what most servers can
            names = tuple(n for n in names if n not in _OPTIMISTIC) or names
        maker = TierMaker(model=self.model, scoring=self.scoring, thinks=self._thinks)
        return tuple(maker.make(name) for name in names)

    def _reflects(self, name: TierName) -> bool:
        """Whether Yes and No count at a tier."""
        return "reflection" in self.scoring.weights_at(name)

    async def trials(self) -> tuple[Trial, ...]:
        """Try out what the verifier's server returns, and tell the evidence for each tier.

        Raises:
            EndpointError: the server cannot be reached, or refuses every request.
        """
        return await self._tried(("prompt_logprobs", "forced_decoding", "reflection"))

    async def _try_out(self) -> tuple[Trial, ...] | None:
        """Return what trials showed; None where the server failed, so that the next one tries."""
        try:
            trials = await self._tried(self._names)
        except EndpointError as error:
            log.info("%s could not be tried: %s", self.model.name, error)
            return None
        for trial in trials:
            if not trial.works and trial.tier not in self._told:
                self._told.add(trial.tier)
                level = logging.WARNING if trial.tier == "reflection" else logging.INFO
                log.log(level, "%s: no %s: %s", self.model.name, trial.tier, trial.evidence)
        return trials

    async def _tried(self, names: Sequence[TierName]) -> tuple[Trial, ...]:
        if not _TRIED.intersection(names):
            return ()
        reflection = Reflection(model=self.model, scoring=self.scoring)
        scored = "prompt_logprobs" in names and self._refusal is None
        try:
            reply = await self.model.probe(
                reflection.request(PROBE_QUESTION, PROBE_DRAFT, scored=scored)
            )
        except EndpointError as error:
            if not scored or (error.retryable and error.status_code is None):
                raise
            reply = await self.model.probe(reflection.request(PROBE_QUESTION, PROBE_DRAFT))
            self._refusal = error  # it fails on this field alone
        if reply is None:
            return ()
        trials = [await self._trial_of_reflection(reflection, reply)]
        if "prompt_logprobs" in names:
            trials.insert(0, _trial_of_prompt_logprobs(reply, reflection, self._refusal))
        if "forced_decoding" in names:
            trials.insert(1, await self._trial_of_forcing(reflection))
        return tuple(trials)

    async def _trial_of_reflection(self, reflection: Reflection, reply: ChatReply) -> Trial:
        verdict = reflection.read(reply)
        mass = verdict.label_mass or 0.0
        if verdict.label_mass is not None and mass < _LITTLE_MASS and not is_thinking(reply):
            # Perhaps a thinking block that the template opened: its first token bears no mark.
            roomy = replace(reflection, thinks=True)
            more = await self.model.probe(roomy.request(PROBE_QUESTION, PROBE_DRAFT))
            reply = more if more is not None and is_thinking(more) else reply
        thinks = is_thinking(reply)
        self._thinks = self._thinks or thinks
        token = next(iter(reply.tokens or ()), None)
        listed = len(dict(token.alternatives)) if token else 0
        told = f"{listed} alternatives to the first token"
        if thinks:
            told += "; it thinks aloud, so that the word behind its thoughts is read"
        elif listed > 1:
            told += f", Yes and No with {mass:.2g} of the probability"
        works = listed > 1 and (thinks or mass >= _LITTLE_MASS)
        return Trial(tier="reflection", works=works, evidence=told)

    async def _trial_of_forcing(self, reflection: Reflection) -> Trial:
        forcing = ForcedDecoding(reflection=reflection)
        known = await self.model.capabilities()
        if known is None or not known.forces_text:
            return Trial(
                tier="forced_decoding",
                works=False,
                evidence="only llama.cpp's server can be made to write a given text",
            )
        try:
            reply = await self.model.probe(forcing.request(PROBE_QUESTION, PROBE_DRAFT))
        except EndpointError as error:
            return Trial(tier="forced_decoding", works=False, evidence=str(error))
        tokens = (reply.tokens if reply else None) or ()
        works = len(reflection.spans_of(PROBE_DRAFT, tokens)) == 2  # noqa: PLR2004 - both parts
        told = f"{len(tokens)} tokens written as given" if works else "another text was written"
        return Trial(tier="forced_decoding", works=works, evidence=told)

    def remember(self, verification: Verification) -> None:
        """Learn from a question how the next one is to be asked.

        One question that found its first tier impossible may be bad luck; several in a row are a
        server.
        """
        self._thinks = self._thinks or verification.thinking
        first = verification.first
        if not first or verification.had_no_other:
            return
        self._strikes = self._strikes + 1 if all(score.cannot for score in first) else 0
        if self._strikes >= _STRIKES:
            self._strikes = 0
            left = first[0].tier
            self._names = tuple(name for name in self._names if name != left)
            log.warning(
                "tier %s did not work for %d questions in a row and is given up: %s",
                left,
                _STRIKES,
                first[0].missing,
            )


class Verification:
    """The scores of one question's drafts.

    The first tier judges each draft as it lands; while no draft gets a value, all are read anew at
    the next. Scores of different tiers are never compared.
    """

    def __init__(self, verifier: Verifier, question: str, *, tasks: Tasks, report: Report) -> None:
        self.scores: list[Score] = []
        """All, in order of arrival."""
        self.notes: list[str] = []
        self._verifier = verifier
        self._question = question
        self._tasks = tasks
        self._report = report
        self._tiers = tasks.start(verifier.tiers())
        self._at = 0
        self._verdicts: list[tuple[TierName, Verdict]] = []
        self._shared: dict[object, tuple[int, asyncio.Task[Verdict]]] = {}

    @property
    def tier(self) -> TierName | None:
        """The tier in use; None until it is known."""
        known = self._tiers.done() and not self._tiers.cancelled() and not self._tiers.exception()
        return self._tiers.result()[self._at].name if known else None

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
        return len(self._tiers.result()) == 1

    @property
    def thinking(self) -> bool:
        """Whether the verifier was seen to think aloud."""
        return any(verdict.thinking for _, verdict in self._verdicts)

    async def add(self, draft: Draft, *, index: int) -> None:
        """Judge a draft as it lands, if the tier judges drafts one by one."""
        tier = (await asyncio.shield(self._tiers))[0]
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
        tiers = await asyncio.shield(self._tiers)
        if isinstance(tiers[self._at], PoolTier):
            await self._judge_all(tiers[self._at], drafts, free=free)
        for at in range(self._at + 1, len(tiers)):
            scores, tier = self.current, tiers[at]
            # At the deadline, only from a tier that does not work or has not had its turn.
            waits = isinstance(tiers[self._at], PoolTier) and not scores
            late = free and not waits and not any(score.cannot for score in scores)
            if late or any(score.value is not None for score in scores):
                break
            if tier.name not in FREE and (free or self._is_unreachable):
                continue
            reason = next((score.missing for score in scores if score.missing), "no score")
            self.notes.append(f"no score at tier {self.tier} ({reason}): using {tier.name}")
            self._at = at
            await self._judge_all(tier, drafts, free=free)
        impossible = bool(self.scores) and all(score.cannot for score in self.scores)
        if impossible and self._verifier.scoring.formula == "paper":
            raise ConfigurationError(
                f"formula='paper' needs all five terms: {self.current[0].missing}; leave it out"
            )

    def raise_failure(self) -> None:
        """Raise what kept every draft from being scored, if one thing did.

        Raises:
            EndpointError: every request failed.
            LogprobsUnavailableError: the server returns no usable log-probabilities.
        """
        errors = [verdict.error for verdict in self._current_verdicts]
        if errors and errors[0] and all(errors):
            raise errors[0]
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
            if free and tier.name not in FREE:
                return
            verdicts = await tier.judge_all(self._question, [draft for _, draft in drafts])
            for (index, draft), verdict in zip(drafts, verdicts, strict=True):
                self._verdicts.append((tier.name, verdict))
                self._take(tier, draft, index, verdict)
        elif tier.name in FREE:
            for index, draft in drafts:
                await self._judge(tier, draft, index)
        else:
            await self._tasks.all_of([self._judge(tier, draft, index) for index, draft in drafts])

    async def _judge(self, tier: DraftTier, draft: Draft, index: int) -> None:
        """Judge one draft; equal ones share a verdict, and the copies cost nothing."""
        scoring = self._verifier.scoring
        shown = [passage.text for passage in draft.passages] if scoring.evidence else None
        key = (tier.name, draft.rationale, draft.answer, str(shown))
        if scoring.formula == "paper" or tier.name in FREE:
            verdict = await tier.judge(self._question, draft, step=Step(kind="verify", index=index))
            self._verdicts.append((tier.name, verdict))
            self._take(tier, draft, index, verdict)
            return
        if key not in self._shared:
            step = Step(kind="verify", index=index)
            judged = self._tasks.start(tier.judge(self._question, draft, step=step))
            self._shared[key] = (index, judged)
        first, judged = self._shared[key]
        verdict = await asyncio.shield(judged)
        if first == index:
            self._verdicts.append((tier.name, verdict))
            self._take(tier, draft, index, verdict)
        else:
            free = replace(verdict, count=TokenCount(), seconds=0.0, attempts=0)
            self._take(tier, draft, index, free, shared_with=first)

    def _take(
        self,
        tier: Tier,
        draft: Draft,
        index: int,
        verdict: Verdict,
        *,
        shared_with: int | None = None,
    ) -> None:
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


def _trial_of_prompt_logprobs(
    reply: ChatReply, reflection: Reflection, refusal: EndpointError | None
) -> Trial:
    both = reflection.spans_of(PROBE_DRAFT, reply.scored or ())
    works = refusal is None and len(both) == 2  # noqa: PLR2004 - rationale and answer
    told = reply.scored_evidence if refusal is None else str(refusal)
    return Trial(tier="prompt_logprobs", works=works, evidence=told)


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
    return tuple(tiers or default_tiers(scoring))


def _checked_model(model: ChatModel) -> ChatModel:
    if callable(getattr(model, "chat", None)) and not isinstance(model, type):
        return model
    raise ConfigurationError(
        f"model must be an Endpoint or another ChatModel, not {type(model).__name__}; "
        "write Endpoint(base_url, model)"
    )
