"""Scores: how far a draft deserves trust, by token log-probabilities.

Every log-probability term is a mean per token in nats over its exact span, so that terms and drafts
of different lengths can be compared (the paper multiplies probabilities, section 3.3). A *tier* is
a way to get terms out of a kind of server; it fixes the terms before the first draft is scored, so
that drafts are never compared by different ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from specrag_integrations.drafts import Draft
from specrag_integrations.errors import ConfigurationError, EndpointError
from specrag_integrations.models import TokenCount
from specrag_integrations.options import check_kind
from specrag_integrations.spans import SpanLogprob

TierName = Literal[
    "prompt_logprobs", "forced_decoding", "reflection", "choice", "draft_only", "agreement"
]
Formula = Literal["weighted", "paper"]
Order = Literal["rationale_first", "answer_first"]

DRAFT_TERMS = ("draft_rationale", "draft_answer", "draft")
_CONSISTENCY_TERMS = ("consistency_rationale", "consistency_answer")
_FIVE = ("draft_rationale", "draft_answer", *_CONSISTENCY_TERMS, "reflection")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFacts:
    """What is known of a tier before any server is asked."""

    terms: tuple[str, ...]
    default: str
    """The term that counts until weights have been fitted."""
    per_draft: int = 0
    """Requests for each draft; such a tier asks about one draft at a time."""
    for_all: int = 0
    """Requests for all drafts together."""
    needs_proof: bool = False
    """Whether it is used only where a trial request has shown that it works."""

    @property
    def free(self) -> bool:
        """Whether it sends no request."""
        return not self.per_draft and not self.for_all

    def requests(self, num_drafts: int) -> int:
        """Return how many requests so many drafts take."""
        return self.per_draft * num_drafts + self.for_all


_ALL_TERMS = (*DRAFT_TERMS, *_CONSISTENCY_TERMS, "reflection")
TIERS: Mapping[TierName, TierFacts] = {
    "prompt_logprobs": TierFacts(
        terms=_ALL_TERMS, default="reflection", per_draft=1, needs_proof=True
    ),
    "forced_decoding": TierFacts(
        terms=_ALL_TERMS, default="reflection", per_draft=2, needs_proof=True
    ),
    "reflection": TierFacts(terms=(*DRAFT_TERMS, "reflection"), default="reflection", per_draft=1),
    "choice": TierFacts(terms=("pick",), default="pick", for_all=2),
    "draft_only": TierFacts(terms=DRAFT_TERMS, default="draft"),
    "agreement": TierFacts(terms=("agreement",), default="agreement"),
}
"""From the most telling to the least."""
ASKING: tuple[TierName, ...] = tuple(name for name, facts in TIERS.items() if facts.per_draft)
"""The tiers that ask the verifier about one draft at a time: what a trial can tell about."""
UNASKED = "the drafts give one answer only: no verifier has judged it"
"""The note of a pick where there was no choice: nobody's word on the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How drafts are scored.

    The terms, where the tier has them: `draft_rationale` and `draft_answer`, the drafter's mean
    token log-probability of what it wrote, and `draft`, the mean of the two;
    `consistency_rationale` and `consistency_answer`, the verifier's for the same text after the
    question alone (the paper's self-consistency); `reflection`, log P(Yes) / (P(Yes) + P(No)) to
    whether the answer is correct (its self-reflection).

    Args:
        tier: None tries the tiers from the most telling to the least and takes the first that the
            verifier's server allows; a name forces that tier.
        weights: By term; those left out are 0, and a tier leaves out the terms it does not have. By
            default `reflection` alone counts (`draft` at the tier `draft_only`).
        formula: `"weighted"` adds up weight times term, in nats. `"paper"` is the logarithm of the
            printed product (section 3.3), by sums instead of means: (P(rationale) + P(answer))
            under the drafter, times P(rationale, answer) under the verifier, times P(Yes). It needs
            all five terms, scores equal drafts apart, and favours short drafts as the paper's does.
        order: Which comes first in the verifier's prompt; the paper's is `"answer_first"`.
        evidence: `"passages"` shows the verifier the passages of the draft's subset as well; by
            default it reads none.

    Raises:
        ConfigurationError: an unknown value, or a combination that can never work.
    """

    tier: TierName | None = None
    weights: Mapping[str, float] | None = None
    formula: Formula = "weighted"
    order: Order = "rationale_first"
    evidence: Literal["passages"] | None = None

    def __post_init__(self) -> None:
        _check_one_of("tier", self.tier, (None, *get_args(TierName)))
        _check_one_of("formula", self.formula, get_args(Formula))
        _check_one_of("order", self.order, get_args(Order))
        _check_one_of("evidence", self.evidence, (None, "passages"))
        if self.weights is not None:
            self._check_weights()
        if self.formula == "paper":
            if self.weights is not None:
                raise ConfigurationError("formula='paper' has no weights; leave them out")
            lacks = [t for t in _FIVE if self.tier and t not in TIERS[self.tier].terms]
            if lacks:
                raise ConfigurationError(
                    f"formula='paper' needs all five terms; tier={self.tier!r} has no "
                    f"{', '.join(lacks)}: use tier='prompt_logprobs' (vLLM) or "
                    "'forced_decoding' (llama.cpp)"
                )
        self.check_tiers((self.tier,) if self.tier else ())

    def check_tiers(self, names: Sequence[TierName]) -> None:
        """Accept tiers of which at least one asks the verifier about a single draft, if it must.

        Raises:
            ConfigurationError: order or evidence would do nothing.
        """
        options = {"evidence": self.evidence, "order": self.order}
        given = {n: v for n, v in options.items() if v not in {None, "rationale_first"}}
        if given and names and not set(ASKING).intersection(names):
            name, value = next(iter(given.items()))
            raise ConfigurationError(
                f"{name}={value!r} does nothing at tier={names[0]!r}, which asks the verifier "
                f"about no single draft; use one of {', '.join(ASKING)}"
            )

    def _check_weights(self) -> None:
        assert self.weights is not None  # noqa: S101 - narrows the type
        check_kind("weights", self.weights, kind=Mapping)
        known = TIERS[self.tier or "prompt_logprobs"].terms
        for term, weight in self.weights.items():
            if term not in known:
                at = f" at tier={self.tier!r}" if self.tier else ""
                raise ConfigurationError(
                    f"weights name {term!r}; the terms{at} are {', '.join(known)}"
                )
            number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not number or not math.isfinite(weight):
                raise ConfigurationError(f"weights[{term!r}]={weight!r} must be a finite number")
        if not any(self.weights.values()):
            raise ConfigurationError("weights are all 0, which makes all drafts equal")

    def weights_at(self, tier: TierName) -> dict[str, float]:
        """Return the weights that count at a tier, none of them 0."""
        if self.formula == "paper":
            return dict.fromkeys(_FIVE, 1.0)
        facts = TIERS[tier]
        counted = {t: w for t, w in (self.weights or {}).items() if w and t in facts.terms}
        return counted or {facts.default: 1.0}

    @property
    def compares_drafters(self) -> bool:
        """Whether terms of the drafter count, which different drafting models do not share."""
        drafters = self.formula == "paper" or self.tier == "draft_only"
        return drafters or any(self.weights[t] for t in self.weights or () if t in DRAFT_TERMS)  # type: ignore[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One draft's score."""

    draft: int
    """The draft's index."""
    tier: TierName
    value: float | None
    """What drafts are ranked by; None: the draft cannot be selected. In nats, but at the tier
    `choice`, where it is the share of requests that picked the draft's answer."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """By name; mean token log-probabilities in nats where they are log-probabilities."""
    spans: Mapping[str, SpanLogprob] = field(default_factory=dict)
    """The sum in nats, the number of tokens and the mean of the terms that stand for a text."""
    label_mass: float | None = None
    """How much probability Yes and No got together: low mass means a verifier off the question."""
    confidence: float | None = None
    """P(correct), in a pipeline with a calibration for this set-up."""
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
            "spans": {term: span.to_dict() for term, span in self.spans.items()},
            "label_mass": self.label_mass,
            "confidence": self.confidence,
            "missing": self.missing,
            "seconds": self.seconds,
            "arrived": self.arrived,
            "shared_with": self.shared_with,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a tier found out about one draft."""

    terms: Mapping[str, float] = field(default_factory=dict)
    spans: Mapping[str, SpanLogprob] = field(default_factory=dict)
    log_yes: float | None = None
    """log P(Yes) itself, in nats."""
    label_mass: float | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why the server told nothing of a term."""
    failed: str | None = None
    """Why there is no verdict at all."""
    cannot: bool = False
    """There will be none either, however often this server is asked."""
    error: EndpointError | None = None
    """What failed, where a request did."""
    thinking: bool = False
    """The verifier thinks aloud before it answers."""
    note: str = ""
    """What a reader of the trace must know of it."""
    count: TokenCount = field(default_factory=TokenCount)
    model: str | None = None
    seconds: float = 0.0
    attempts: int = 0

    @property
    def paid(self) -> Verdict:
        """The same for a draft that shares it: another one has paid for it."""
        return replace(self, count=TokenCount(), seconds=0.0, attempts=0)


def score_of(
    draft: Draft,
    verdict: Verdict,
    *,
    index: int,
    tier: TierName,
    scoring: Scoring,
    comparable_drafts: bool,
) -> Score:
    """Put a draft's score together from the drafter's log-probabilities and a verdict.

    Each draft has its own drafter's terms, also where equal drafts share one verdict.
    """
    spans, reasons = dict(verdict.spans), dict(verdict.reasons)
    terms = dict(verdict.terms)
    if comparable_drafts and "draft" in TIERS[tier].terms:
        own = _draft_spans(draft)
        spans |= own
        terms |= {name: span.mean for name, span in own.items()}
        if len(own) == 2:  # noqa: PLR2004 - rationale and answer
            terms["draft"] = sum(span.mean for span in own.values()) / 2
        if draft.answer_logprob is None:
            reasons |= dict.fromkeys(DRAFT_TERMS, "the drafter returned no log-probabilities")
    score = Score(
        draft=index,
        tier=tier,
        value=None,
        terms={name: terms[name] for name in TIERS[tier].terms if name in terms},
        spans={name: spans[name] for name in TIERS[tier].terms if name in spans},
        label_mass=verdict.label_mass,
        count=verdict.count,
        model=verdict.model,
        seconds=verdict.seconds,
        attempts=verdict.attempts,
    )
    if verdict.failed is not None:
        return replace(score, missing=verdict.failed, cannot=verdict.cannot)
    weights = scoring.weights_at(tier)
    for name in weights:
        if name not in terms:
            missing = reasons.get(name) or f"the draft has no rationale, so no {name}"
            # At other tiers than its own, the drafter's silence says nothing of the verifier.
            cannot = name in reasons and (name not in DRAFT_TERMS or tier == "draft_only")
            return replace(score, missing=missing, cannot=cannot)
    if scoring.formula == "paper":
        return replace(score, value=_paper_product(spans, verdict.log_yes))
    return replace(score, value=sum(weight * terms[name] for name, weight in weights.items()))


def _draft_spans(draft: Draft) -> dict[str, SpanLogprob]:
    both = {"draft_rationale": draft.rationale_logprob, "draft_answer": draft.answer_logprob}
    return {name: span for name, span in both.items() if span is not None}


def _paper_product(spans: Mapping[str, SpanLogprob], log_yes: float | None) -> float:
    """Return log rho of the paper's section 3.3; its rho_draft is a sum of two probabilities.

    In log space throughout: the product of a few dozen probabilities underflows.
    """
    assert log_yes is not None  # noqa: S101 - `reflection` is there, and comes from it
    one, other = spans["draft_rationale"].total, spans["draft_answer"].total
    drafted = max(one, other) + math.log1p(math.exp(-abs(one - other)))
    consistent = sum(spans[name].total for name in _CONSISTENCY_TERMS)
    return drafted + consistent + log_yes


def _check_one_of(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        named = ", ".join(str(one) for one in known if one is not None)
        raise ConfigurationError(f"{name}={value!r} is unknown; choose one of {named}")
