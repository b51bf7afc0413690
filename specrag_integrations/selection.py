"""Selection: which draft is the answer, and why ordinary RAG takes over when none is."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from specrag_integrations.citations import normal_answer, without_dead_citations
from specrag_integrations.drafts import Draft
from specrag_integrations.errors import ConfigurationError, DraftFormatError, EndpointError
from specrag_integrations.labels import first_word, read_labels
from specrag_integrations.models import ChatModel, ChatReply, ChatRequest, Step
from specrag_integrations.options import checked_positive, checked_whole
from specrag_integrations.prompts import (
    ANSWER,
    BEST,
    choice_messages,
    letters,
    single_prompt_messages,
)
from specrag_integrations.scores import Score, TierName
from specrag_integrations.spans import find_spans, without_thinking
from specrag_integrations.tiers import distinct, picked_draft, rotated
from specrag_integrations.usage import StepUsage


class FallbackReason(StrEnum):
    """Why no draft was selected."""

    NO_USABLE_DRAFT = "no_usable_draft"
    """All drafts failed, abstained or could not be scored."""
    DISAGREEMENT = "disagreement"
    """The verifier picked another answer when it was asked in another order, or as many drafts
    give one answer as another."""
    LOW_CONFIDENCE = "low_confidence"
    """The best draft's confidence is below `min_confidence`, or it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A draft that may be selected, with its score where the selector reads scores."""

    draft: Draft
    score: Score | None = None
    value: float = 0.0
    """The score's value: always finite; 0 without a score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What a selector selects from."""

    question: str = field(repr=False)
    candidates: tuple[Candidate, ...]
    """At least one, by the drafts' index."""
    model: ChatModel = field(repr=False)
    """The verifier, for selectors that ask it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The outcome: a winner, or the reason there is none."""

    winner: int | None
    """The index of the selected draft."""
    ranking: tuple[int, ...]
    """The indices of all candidates, best first."""
    reason: FallbackReason | None = None
    selector: str = ""
    """Who selected."""
    shares: Mapping[int, float] = field(default_factory=dict)
    """By draft, what a selector made of it: its answer's share of the votes, or the probability of
    its letter. Empty where the scores alone decide."""
    text: str | None = field(default=None, repr=False)
    """The winner's answer as the selector wrote it anew; None: as it was drafted."""
    notes: tuple[str, ...] = ()
    steps: tuple[StepUsage, ...] = field(default=(), repr=False)
    """What the selector asked a model, one request after the other."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {
            "winner": self.winner,
            "ranking": list(self.ranking),
            "reason": self.reason.value if self.reason else None,
            "selector": self.selector,
            "shares": {str(index): share for index, share in self.shares.items()},
        }


class Selector(Protocol):
    """A rule that selects one of the candidates."""

    @property
    def reads_scores(self) -> bool:
        """Whether drafts must be scored one by one; without it, no draft is verified."""
        ...

    @property
    def requests(self) -> int:
        """The most generating requests it adds to a question."""
        ...

    async def select(self, pool: Pool) -> Selection:
        """Return a selection among the candidates.

        An `EndpointError` of the verifier means that nothing could be selected.
        """
        ...


@dataclass(frozen=True, slots=True)
class BestScore:
    """The highest score wins, as in the paper (algorithm 1, line 13).

    A draft that was cut off ranks below all whole ones. Equal scores go to the lower index, so that
    the same replies always give the same answer, in whatever order they arrived.
    """

    reads_scores: ClassVar[bool] = True
    requests: ClassVar[int] = 0

    async def select(self, pool: Pool) -> Selection:
        """Order by wholeness, score and index."""
        return _first_of([one.draft.index for one in sorted(pool.candidates, key=_rank)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisputed:
    """The best answer, where it stands alone at the top.

    The tiers `choice` and `agreement` bring this selector: an answer picked in one order and not in
    the other, or one with as many votes as another, is not to be trusted.
    """

    reads_scores: ClassVar[bool] = True
    requests: ClassVar[int] = 0

    async def select(self, pool: Pool) -> Selection:
        """Trust nothing that another answer equals."""
        ranked = sorted(pool.candidates, key=lambda one: (-one.value, *_rank(one)))
        ranking = tuple(one.draft.index for one in ranked)
        top = [one for one in ranked if one.value == ranked[0].value]
        if len({normal_answer(one.draft.answer) for one in top}) > 1:
            return Selection(winner=None, ranking=ranking, reason=FallbackReason.DISAGREEMENT)
        return _first_of(ranking)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerVote:
    """Drafts with the same answer vote together, each by softmax(score / temperature).

    Confidence-informed self-consistency (CISC, arXiv 2502.06233). The best draft of the answer with
    the most votes wins.

    Args:
        temperature: In the unit of the scores, nats as a rule. Near 0 the best score decides alone;
            far above the scores' spread every draft has the same vote.

    Raises:
        ConfigurationError: a temperature of 0 or below.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        checked_positive("temperature", self.temperature)

    reads_scores: ClassVar[bool] = True
    requests: ClassVar[int] = 0

    async def select(self, pool: Pool) -> Selection:
        """Add the votes up by answer."""
        candidates = pool.candidates
        top = max(one.value for one in candidates)
        weights = [math.exp((one.value - top) / self.temperature) for one in candidates]
        votes: dict[str, float] = {}
        for one, weight in zip(candidates, weights, strict=True):
            answer = normal_answer(one.draft.answer)
            votes[answer] = votes.get(answer, 0.0) + weight / sum(weights)
        shares = {one.draft.index: votes[normal_answer(one.draft.answer)] for one in candidates}
        ranked = sorted(
            candidates, key=lambda one: (-round(shares[one.draft.index], 12), *_rank(one))
        )
        ranking = [one.draft.index for one in ranked]
        return replace(_first_of(ranking), shares=shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listwise:
    """The verifier reads all answers side by side; the letter it finds likeliest wins.

    One request for all drafts instead of one for each. Letters have a position bias: where the two
    likeliest are close, the drafts are shown again in another order and the log-probabilities are
    averaged. Needs a verifier that returns log-probabilities.

    Args:
        margin: In nats: how much likelier the best letter must be than the next to be taken at
            once.

    Raises:
        ConfigurationError: a margin of 0 or below.
    """

    margin: float = 1.0

    def __post_init__(self) -> None:
        checked_positive("margin", self.margin)

    reads_scores: ClassVar[bool] = False
    requests: ClassVar[int] = 2

    async def select(self, pool: Pool) -> Selection:
        """Read the letters' log-probabilities, in one or two orders."""
        candidates, model = pool.candidates, pool.model
        options = distinct([one.draft for one in candidates])
        asked: list[Mapping[str, float]] = []
        steps: list[StepUsage] = []
        notes: tuple[str, ...] = ()
        for order in (options, rotated(options)):
            if len(options) == 1 or (asked and _margin(asked[0]) >= self.margin):
                break
            request = ChatRequest(
                messages=choice_messages(pool.question, [(d.rationale, d.answer) for d in order]),
                max_tokens=1,
                top_logprobs=20,
                labels=letters(len(order)),
                think=False,
            )
            try:
                reply = await model.chat(request, step=Step(kind="select", index=len(steps)))
            except EndpointError as error:
                if not asked:
                    raise
                notes = (f"the drafts were shown in one order only: {error}",)
                steps.append(_failed_step(model, error, len(steps)))
                break
            steps.append(_step(model, reply, len(steps)))
            read = _letter_logprobs(reply, order)
            if read is None:
                note = "the verifier gave no draft's letter a probability"
                return replace(nothing_usable(), notes=(note,), steps=tuple(steps))
            asked.append(read)
        shares = _by_draft(candidates, asked)
        ranked = sorted(candidates, key=lambda one: (-shares[one.draft.index], *_rank(one)))
        return replace(
            _first_of([one.draft.index for one in ranked]),
            shares=shares,
            notes=notes,
            steps=tuple(steps),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SinglePrompt:
    """All drafts in one prompt: the model selects and rewrites in one generation.

    What most descriptions of the method show. It is here to be compared: its choice has no
    probability, and it writes tokens where the other selectors read one.

    Args:
        max_tokens: The most it may write.

    Raises:
        ConfigurationError: less than one token.
    """

    max_tokens: int = 256

    def __post_init__(self) -> None:
        checked_whole("max_tokens", self.max_tokens)

    reads_scores: ClassVar[bool] = False
    requests: ClassVar[int] = 1

    async def select(self, pool: Pool) -> Selection:
        """Ask for the best draft's letter and its improved answer."""
        model = pool.model
        order = [one.draft for one in pool.candidates][: len(letters(len(pool.candidates)))]
        request = ChatRequest(
            messages=single_prompt_messages(
                pool.question, [(d.rationale, d.answer) for d in order]
            ),
            max_tokens=self.max_tokens,
            think=False,
        )
        reply = await model.chat(request, step=Step(kind="select"))
        steps = (_step(model, reply, 0),)
        letter, text = _best_and_answer(without_thinking(reply.text))
        winner = picked_draft(letter or text or "", order)
        # It has seen citations of other subsets as well.
        text = without_dead_citations(text, len(winner.passages)) if text and winner else None
        if winner is None:
            note = "the verifier named no draft"
            return replace(nothing_usable(), notes=(note,), steps=steps)
        cut_off = reply.finish_reason == "length"
        notes = (f"the selection was cut off at {self.max_tokens} tokens",) if cut_off else ()
        rest = [draft.index for draft in order if draft is not winner]
        return replace(
            _first_of([winner.index, *rest]),
            text=text,
            notes=notes,
            steps=steps,
        )


UNSURE = 0.1
"""In nats: a rival answer this close to the winner's leaves the choice open."""


def is_unsure(selection: Selection, candidates: Sequence[Candidate]) -> bool:
    """Whether a rival answer is within `UNSURE` of the winner's."""
    if not selection.shares and any(one.score is None for one in candidates):
        return False  # nothing was measured

    def value_of(one: Candidate) -> float:
        if not selection.shares:
            return one.value
        share = selection.shares.get(one.draft.index, 0.0)
        return math.log(share) if share > 0 else -math.inf

    winner = next(one for one in candidates if one.draft.index == selection.winner)
    answer = normal_answer(winner.draft.answer)
    rivals = [value_of(one) for one in candidates if normal_answer(one.draft.answer) != answer]
    return bool(rivals) and value_of(winner) - max(rivals) <= UNSURE


def own_selector(tier: TierName | None) -> Selector:
    """Return the selector that a tier brings, the default one for most."""
    return Undisputed() if tier in {"choice", "agreement"} else BestScore()


def candidates_of(
    drafts: Sequence[Draft], scores: Sequence[Score], *, scored: bool = True
) -> list[Candidate]:
    """Pair the drafts that may be selected with their scores, in index order."""
    usable = sorted((d for d in drafts if not d.abstained), key=lambda draft: draft.index)
    if not scored:
        return [Candidate(draft=draft) for draft in usable]
    by_draft = {score.draft: score for score in scores}
    return [
        Candidate(draft=draft, score=score, value=score.value)
        for draft in usable
        if (score := by_draft.get(draft.index)) is not None
        and score.value is not None
        and math.isfinite(score.value)
    ]


async def select(pool: Pool, selector: Selector) -> Selection:
    """Select a winner, or say why there is none.

    Raises:
        ConfigurationError: the selector returned no `Selection`, or drafts it was not given.
    """
    name = type(selector).__name__
    try:
        selecting = selector.select(pool)
        if not inspect.isawaitable(selecting):
            raise ConfigurationError(f"{name}.select must be a coroutine: async def select(…)")
        selection = await selecting
    except EndpointError as error:
        step = _failed_step(pool.model, error, 0)
        note = f"{name} could not select: {error}"
        return replace(nothing_usable(), selector=name, notes=(note,), steps=(step,))
    if not isinstance(selection, Selection):
        raise ConfigurationError(
            f"{name}.select must return a Selection, not a {type(selection).__name__}"
        )
    known = {candidate.draft.index for candidate in pool.candidates}
    ranking = selection.ranking
    winner = selection.winner
    if (
        len(set(ranking)) < len(ranking)
        or not known.issuperset(ranking)
        or winner not in {None, *known}
    ):
        raise ConfigurationError(
            f"{name}.select must return candidates it was given, each at most once; it returned "
            f"the winner {winner} and the ranking {list(ranking)} of {sorted(known)}"
        )
    if winner is None and selection.reason is None:
        selection = replace(selection, reason=FallbackReason.NO_USABLE_DRAFT)
    return replace(selection, selector=selection.selector or name)


def accepted_first(candidates: Sequence[Candidate], winner: int) -> Selection:
    """Return the selection of the draft that ended the work: the first at `accept_confidence`."""
    others = [one for one in sorted(candidates, key=_rank) if one.draft.index != winner]
    ranking = [winner, *(one.draft.index for one in others)]
    return replace(_first_of(ranking), selector="accept_confidence")


def nothing_usable() -> Selection:
    """Return the selection from an empty pool."""
    return Selection(winner=None, ranking=(), reason=FallbackReason.NO_USABLE_DRAFT)


def _first_of(ranking: Sequence[int]) -> Selection:
    return Selection(winner=ranking[0], ranking=tuple(ranking))


def _rank(candidate: Candidate) -> tuple[bool, float, int]:
    return candidate.draft.truncated, -candidate.value, candidate.draft.index


# -------------------------------------------------------------------- reading a selector's replies


def _letter_logprobs(reply: ChatReply, order: Sequence[Draft]) -> dict[str, float] | None:
    """Return log P of each answer's letter, normalised over the letters shown."""
    word = first_word(reply)
    named = letters(len(order))
    labels = read_labels(word, named) if word else None
    if labels is None or not labels.logprobs:
        return None
    return {
        normal_answer(draft.answer): labels.log_share(letter) or 0.0
        for letter, draft in zip(named, order, strict=True)
    }


def _margin(logprobs: Mapping[str, float]) -> float:
    best, second = sorted(logprobs.values(), reverse=True)[:2]
    return best - second


def _by_draft(
    candidates: Sequence[Candidate], asked: Sequence[Mapping[str, float]]
) -> dict[int, float]:
    """Average the log-probabilities of the orders, and give each draft its answer's share."""
    answers = {one.draft.index: normal_answer(one.draft.answer) for one in candidates}
    if not asked:  # one answer alone
        return dict.fromkeys(answers, 1.0)
    means = {
        answer: sum(one.get(answer, -math.inf) for one in asked) / len(asked)
        for answer in set(answers.values())
    }
    whole = sum(math.exp(mean) for mean in means.values())
    return {index: math.exp(means[answer]) / whole for index, answer in answers.items()}


def _best_and_answer(text: str) -> tuple[str, str | None]:
    """Return what stands behind `Best:`, else in the first line, and the answer below it.

    Either may be missing.
    """
    start = text.casefold().find(BEST.casefold())
    if start >= 0:
        text = text[start + len(BEST) :]
    elif text.casefold().lstrip().startswith(ANSWER.casefold()):
        text = f"\n{text}"
    letter, _, rest = text.lstrip(" ").partition("\n")
    try:
        return letter.strip(), find_spans(rest).answer.of(rest) or None
    except DraftFormatError:
        return letter.strip(), None


def _failed_step(model: ChatModel, error: EndpointError, index: int) -> StepUsage:
    return StepUsage(
        kind="select",
        index=index,
        role="verifier",
        model=model.name,
        seconds=0.0,  # nobody has measured it
        attempts=error.attempts,
    )


def _step(model: ChatModel, reply: ChatReply, index: int) -> StepUsage:
    return StepUsage(
        kind="select",
        index=index,
        role="verifier",
        model=reply.model or model.name,
        seconds=reply.seconds,
        count=reply.count,
        attempts=reply.attempts,
    )
