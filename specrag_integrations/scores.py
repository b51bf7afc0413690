"""Scores: how far a draft deserves trust, by token log-probabilities, and the verifier.

Every term is a mean token log-probability in nats over its exact span, so that terms and drafts of
different lengths can be compared (the paper multiplies probabilities, section 3.3). A *tier* is a
way to get terms out of a kind of server; it fixes the terms before the first draft is scored, so
that drafts are never compared by different ones.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from specrag_integrations.drafts import Draft
from specrag_integrations.errors import ConfigurationError, EndpointError
from specrag_integrations.models import (
    LOGPROB_FLOOR,
    ChatModel,
    ChatReply,
    ChatRequest,
    Step,
    Token,
    TokenCount,
)
from specrag_integrations.prompts import check_messages

log = logging.getLogger("specrag_integrations")

TierName = Literal["reflection", "draft_only"]

_ALTERNATIVES = 20
"""The most most servers return; enough for every spelling of Yes and No that matters."""
_STRIKES = 3
"""Consecutive questions that found a tier impossible before it is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How drafts are scored.

    Args:
        tier: None tries `reflection` and, where the verifier returns no log-probabilities,
            `draft_only`; a name forces that tier.

    Raises:
        ConfigurationError: an unknown tier.
    """

    tier: TierName | None = None

    def __post_init__(self) -> None:
        if self.tier is not None and self.tier not in get_args(TierName):
            raise ConfigurationError(
                f"tier={self.tier!r} is unknown; choose one of {', '.join(get_args(TierName))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One draft's score."""

    draft: int
    """The draft's index."""
    tier: TierName
    value: float | None
    """The weighted sum of the terms, in nats; None: the draft cannot be selected."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Mean token log-probabilities in nats, by name."""
    label_mass: float | None = None
    """How much probability Yes and No got together: low mass means a verifier off the question."""
    missing: str | None = None
    """Why there is no value."""
    cannot: bool = False
    """The server cannot do this tier, as opposed to a request that failed."""
    count: TokenCount = field(default_factory=TokenCount, repr=False)
    model: str | None = None
    seconds: float = 0.0
    arrived: float = 0.0
    """Seconds from the question to this score."""
    attempts: int = 0
    shared_with: int | None = None
    """The index of an equal draft whose verification this is."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {
            "draft": self.draft,
            "tier": self.tier,
            "value": self.value,
            "terms": dict(self.terms),
            "label_mass": self.label_mass,
            "missing": self.missing,
            "seconds": self.seconds,
            "arrived": self.arrived,
            "shared_with": self.shared_with,
        }


class Tier(Protocol):
    """A way to score one draft."""

    @property
    def name(self) -> TierName:
        """The name a `Score` carries."""
        ...

    @property
    def requests(self) -> int:
        """Generating requests per draft."""
        ...

    async def score(self, question: str, draft: Draft) -> Score:
        """Return the draft's score, or one that says what is missing."""
        ...


@dataclass(frozen=True, slots=True)
class Reflection:
    """P(Yes) to whether a draft's answer is correct, from one prefill (paper section 3.3).

    The verifier reads question, rationale and answer, never a passage.

    The first token's alternatives hold several spellings of Yes and of No; each label's
    probabilities are summed and P(Yes) is their share, so that a verifier that puts half its mass
    elsewhere is not read as doubt.
    """

    model: ChatModel
    name: TierName = "reflection"
    requests: int = 1

    async def score(self, question: str, draft: Draft) -> Score:
        """Ask the verifier for one token and read its alternatives."""
        request = ChatRequest(
            messages=check_messages(question, rationale=draft.rationale, answer=draft.answer),
            max_tokens=1,
            top_logprobs=_ALTERNATIVES,
            labels=("Yes", "No"),
        )
        sent = time.perf_counter()
        try:
            reply = await self.model.chat(request, step=Step(kind="verify", index=draft.index))
        except EndpointError as error:
            return Score(
                draft=draft.index,
                tier=self.name,
                value=None,
                missing=str(error),
                model=self.model.name,
                seconds=time.perf_counter() - sent,
                attempts=error.attempts,
            )
        return self._from_reply(reply, draft)

    def _from_reply(self, reply: ChatReply, draft: Draft) -> Score:
        judged = read_labels(reply.tokens[0]) if reply.tokens else None
        value = judged.log_share if judged else None
        return Score(
            draft=draft.index,
            tier=self.name,
            value=value,
            terms={} if value is None else {"reflection": value},
            label_mass=judged.mass if judged else None,
            missing=_why_no_reflection(reply, judged) if value is None else None,
            cannot=judged is None,
            count=reply.count,
            model=reply.model or self.model.name,
            seconds=reply.seconds,
            attempts=reply.attempts,
        )


@dataclass(frozen=True, slots=True)
class DraftOnly:
    """The drafter's own log-probabilities: no request, and the weakest evidence."""

    name: TierName = "draft_only"
    requests: int = 0

    async def score(self, question: str, draft: Draft) -> Score:  # noqa: ARG002 - one protocol
        """Read the score off the draft."""
        rationale, answer = draft.rationale_logprob, draft.answer_logprob
        terms: dict[str, float] = {}
        if rationale and answer:
            terms = {"draft_rationale": rationale.mean, "draft_answer": answer.mean}
            terms["draft"] = (rationale.mean + answer.mean) / 2
        missing = None if terms else "the draft has no rationale"
        if answer is None:
            missing = "the drafter returned no log-probabilities"
        return Score(
            draft=draft.index,
            tier=self.name,
            value=terms.get("draft"),
            terms=terms,
            missing=missing,
            cannot=answer is None,
        )


class Verifier:
    """Scores drafts at the best tier that the servers allow.

    Args:
        model: The large model.
        scoring: Which tier; by default the best that works.
        comparable_drafts: Whether all drafts come from one model, so that the drafter's
            log-probabilities can be compared between drafts.

    Raises:
        ConfigurationError: `draft_only` was forced with different drafting models.
    """

    def __init__(
        self, model: ChatModel, *, scoring: Scoring | None = None, comparable_drafts: bool = True
    ) -> None:
        forced = (scoring or Scoring()).tier
        if forced == "draft_only" and not comparable_drafts:
            raise ConfigurationError(
                "tier='draft_only' compares drafts by their drafter's log-probabilities, which "
                "different drafting models do not share; use one drafter or another tier"
            )
        tiers: list[Tier] = [Reflection(model)]
        if comparable_drafts:
            tiers.append(DraftOnly())
        self._tiers = tuple(tier for tier in tiers if forced is None or tier.name == forced)
        self._first = 0
        self._strikes = 0

    @property
    def requests_per_draft(self) -> int:
        """The most generating requests one draft can cost over all tiers it may descend."""
        return sum(tier.requests for tier in self._tiers)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers a question may use, the one it starts with first."""
        return self._tiers[self._first :]

    def remember(self, scores: Sequence[Score]) -> None:
        """Learn from a question's scores at the first tier.

        One question that found the tier impossible may be bad luck; several in a row are a server.
        """
        if not scores or self._first + 1 == len(self._tiers):
            return
        self._strikes = self._strikes + 1 if all(score.cannot for score in scores) else 0
        if self._strikes >= _STRIKES:
            left, self._first, self._strikes = self._tiers[self._first], self._first + 1, 0
            log.warning(
                "tier %s did not work for %d questions in a row; using %s from now on",
                left.name,
                _STRIKES,
                self._tiers[self._first].name,
            )


# -------------------------------------------------------------------- reading Yes and No


@dataclass(frozen=True, slots=True)
class Judged:
    """Yes and No at one token."""

    log_share: float | None
    """log P(Yes) / (P(Yes) + P(No)); None if neither label is among the alternatives."""
    mass: float
    """P(Yes) + P(No)."""


def read_labels(token: Token) -> Judged | None:
    """Sum the spellings of Yes and No among a token's alternatives.

    A label that is not among them is bounded by the smallest of them: it is at most that likely,
    and log 0 would outweigh every other term. None if the server returned no alternatives.
    """
    # The written token itself is not always listed, and some servers list it twice.
    listed = [
        (text, max(logprob, LOGPROB_FLOOR))
        for text, logprob in dict.fromkeys([*token.alternatives, (token.text, token.logprob)])
        if not math.isnan(logprob)
    ]
    if len(listed) < 2:  # noqa: PLR2004 - one token is no alternative
        return None
    labels: dict[str, list[float]] = {"yes": [], "no": []}
    for text, logprob in listed:
        spelled = text.strip(" \t\r\n\"'*_.,!:\u2581\u0120\u010a").casefold()
        if spelled in labels:
            labels[spelled].append(math.exp(logprob))
    yes, no = sum(labels["yes"]), sum(labels["no"])
    if not yes and not no:
        return Judged(log_share=None, mass=0.0)
    bound = math.exp(min(logprob for _, logprob in listed))
    share = (yes or bound) / ((yes or bound) + (no or bound))
    return Judged(log_share=math.log(share), mass=min(1.0, yes + no))


def _why_no_reflection(reply: ChatReply, judged: Judged | None) -> str:
    if not reply.tokens:
        return "the verifier returned no log-probabilities"
    if judged is None:
        return "the verifier returned no alternatives to its first token"
    return f"neither Yes nor No is among the alternatives to {reply.tokens[0].text!r}"
