"""Tiers: the ways to get a verdict on drafts out of a kind of server, one small class each.

`scores.TIERS` lists what each needs and costs.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specrag_integrations.citations import normal_answer
from specrag_integrations.drafts import Draft
from specrag_integrations.errors import (
    ContextTooSmallError,
    EndpointError,
    EndpointRejectedError,
    LogprobsUnavailableError,
)
from specrag_integrations.labels import YES_NO, first_word, is_thinking, read_labels
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
from specrag_integrations.prompts import (
    ANSWER,
    RATIONALE,
    asking,
    check_messages,
    choice_messages,
    draft_text,
    letters,
)
from specrag_integrations.scores import UNASKED, Scoring, TierName, Verdict
from specrag_integrations.spans import Span, SpanLogprob, span_logprob, without_thinking

_ALTERNATIVES = 20
"""The most most servers return; enough for every spelling of Yes and No that matters."""
THINKING_TOKENS = 1024
"""Room for what a model thinks aloud before a word that counts."""
_WRONG_KEY = {401, 403}


# -------------------------------------------------------------------- one draft at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Reflection:
    """P(Yes) to whether a draft's answer is correct, from one prefill (paper section 3.3).

    The verifier reads question, rationale and answer; passages only with `evidence="passages"`.
    One that thinks aloud is given room for it, and the word behind its thoughts counts.
    """

    model: ChatModel
    scoring: Scoring
    thinks: bool = False
    name: TierName = "reflection"

    def request(self, question: str, draft: Draft, *, scored: bool = False) -> ChatRequest:
        """Return the verification request; `scored` asks for the draft's own tokens as well."""
        return ChatRequest(
            messages=check_messages(question, draft=self.text(draft), passages=self._shown(draft)),
            max_tokens=THINKING_TOKENS if self.thinks else 1,
            top_logprobs=_ALTERNATIVES,
            labels=YES_NO,
            score_message=1 if scored else None,
            think=False,
        )

    def asked(self, question: str, draft: Draft) -> Message:
        """Return the turn that the draft replies to."""
        return asking(question, self._shown(draft))

    def text(self, draft: Draft) -> str:
        """Return the draft as the verifier reads it."""
        first = self.scoring.order == "answer_first"
        text = draft_text(draft.rationale.strip(), draft.answer.strip(), answer_first=first)
        return text.encode(errors="replace").decode()  # as it is sent

    def _shown(self, draft: Draft) -> Sequence[Passage]:
        return draft.passages if self.scoring.evidence else ()

    def spans_of(self, draft: Draft, tokens: Sequence[Token]) -> dict[str, SpanLogprob]:
        """Return the log-probability of rationale and answer in the tokens of the draft's text."""
        text = self.text(draft)
        parts = {
            "consistency_rationale": (RATIONALE, draft.rationale.strip()),
            "consistency_answer": (ANSWER, draft.answer.strip()),
        }
        if self.scoring.order == "answer_first":
            parts = dict(reversed(parts.items()))
        spans, start = {}, 0
        for name, (header, content) in parts.items():
            if not content:
                continue
            start += len(header) + 1
            span = span_logprob(tokens, text, Span(start, start + len(content)))
            start += len(content) + 1
            if span is not None:
                spans[name] = span
        return spans

    async def judge(self, question: str, draft: Draft, *, step: Step) -> Verdict:
        """Ask the verifier for one token and read its alternatives."""
        reply = await _reply(self.model, self.request(question, draft), step)
        return self.read(reply) if isinstance(reply, ChatReply) else reply

    def read(self, reply: ChatReply) -> Verdict:
        """Read Yes and No off a reply."""
        word = first_word(reply)
        labels = read_labels(word) if word else None
        share = labels.log_share("Yes") if labels else None
        verdict = Verdict(
            label_mass=labels.mass if labels else None,
            thinking=is_thinking(reply),
            count=reply.count,
            model=reply.model or self.model.name,
            seconds=reply.seconds,
            attempts=reply.attempts,
        )
        if labels is None or share is None:
            return replace(verdict, reasons={"reflection": _why_no_label(reply, word)})
        terms = {"reflection": share}
        return replace(verdict, terms=terms, log_yes=labels.logprobs["Yes"])


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Self-consistency and self-reflection from one prefill, as in the paper (section 3.3).

    vLLM returns the log-probability of every token of the prompt, the draft's among them.
    """

    reflection: Reflection
    name: TierName = "prompt_logprobs"

    async def judge(self, question: str, draft: Draft, *, step: Step) -> Verdict:
        """Ask for one token, and for the log-probabilities of the draft's."""
        request = self.reflection.request(question, draft, scored=True)
        reply = await _reply(self.reflection.model, request, step)
        return self.read(reply, draft) if isinstance(reply, ChatReply) else reply

    def read(self, reply: ChatReply, draft: Draft) -> Verdict:
        """Read both off a reply."""
        verdict = self.reflection.read(reply)
        spans = self.reflection.spans_of(draft, reply.scored or ())
        return _with_spans(verdict, spans, draft) or replace(
            verdict, failed=f"no prompt log-probabilities ({reply.scored_evidence})", cannot=True
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedDecoding:
    """The same from llama.cpp, which is made to write the draft: one decode step per token."""

    reflection: Reflection
    name: TierName = "forced_decoding"

    def request(self, question: str, draft: Draft) -> ChatRequest:
        """Return the request that has the draft written."""
        return ChatRequest(
            messages=(self.reflection.asked(question, draft),),
            max_tokens=1,  # as many as the text has, once that is known
            top_logprobs=0,
            forced=self.reflection.text(draft),
            think=False,
        )

    async def judge(self, question: str, draft: Draft, *, step: Step) -> Verdict:
        """Have the draft written, then ask whether it holds."""
        model = self.reflection.model
        written = await _reply(model, self.request(question, draft), step)
        if isinstance(written, Verdict):
            return written
        judged = await self.reflection.judge(question, draft, step=step)
        return _added(self.read(judged, written, draft), written)

    def read(self, judged: Verdict, written: ChatReply, draft: Draft) -> Verdict:
        """Add what the forced text tells to the verdict."""
        if judged.failed is not None:
            return judged
        spans = self.reflection.spans_of(draft, written.tokens or ())
        return _with_spans(judged, spans, draft) or replace(
            judged, failed="the server did not write the text it was given", cannot=True
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOnly:
    """The drafter's own log-probabilities: no request, and weak evidence."""

    name: TierName = "draft_only"

    async def judge(self, question: str, draft: Draft, *, step: Step) -> Verdict:  # noqa: ARG002
        """Return nothing: the draft itself holds what counts."""
        return Verdict()


# -------------------------------------------------------------------- all drafts together


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The verifier reads all answers side by side and writes the letter of the best: text alone.

    Letters have a position bias, so that it is asked twice, in another order; only an answer picked
    both times can be trusted. Drafts with equal answers stand for each other.
    """

    model: ChatModel
    name: TierName = "choice"

    async def judge_all(self, question: str, drafts: Sequence[Draft]) -> Sequence[Verdict]:
        """Ask for the letter in two orders; return how often each draft's answer was picked."""
        options = distinct(drafts)
        if len(options) == 1:
            return [Verdict(terms={"pick": 1.0}, note=UNASKED)] * len(drafts)
        picks: list[str] = []
        asked = Verdict()
        for turn, order in enumerate((options, rotated(options))):
            request = ChatRequest(
                messages=choice_messages(question, [(d.rationale, d.answer) for d in order]),
                max_tokens=THINKING_TOKENS,
                think=False,
            )
            reply = await _reply(self.model, request, Step(kind="verify", index=turn))
            if isinstance(reply, Verdict):
                return [_added(reply, asked), *[reply.paid] * (len(drafts) - 1)]
            asked = _added(asked, reply)
            picked = picked_draft(without_thinking(reply.text), order)
            if picked is None:
                lost = replace(asked, failed="the verifier wrote no draft's letter", cannot=True)
                return [lost, *[lost.paid] * (len(drafts) - 1)]
            picks.append(normal_answer(picked.answer))
        verdicts = [
            Verdict(terms={"pick": picks.count(normal_answer(draft.answer)) / len(picks)})
            for draft in drafts
        ]
        first = replace(asked, terms=verdicts[0].terms)  # what all of it cost is told once
        return [first, *verdicts[1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How many drafts give the same answer: no request, and no model's word on it."""

    name: TierName = "agreement"

    async def judge_all(self, question: str, drafts: Sequence[Draft]) -> Sequence[Verdict]:  # noqa: ARG002
        """Return the logarithm of the share of drafts that give each draft's answer."""
        votes = Counter(normal_answer(draft.answer) for draft in drafts)
        return [
            Verdict(terms={"agreement": math.log(votes[normal_answer(d.answer)] / len(drafts))})
            for d in drafts
        ]


DraftTier = PromptLogprobs | ForcedDecoding | Reflection | DraftOnly
"""Those that judge drafts one by one, as they land."""
PoolTier = Choice | Agreement
"""Those that judge drafts against each other, when all are there."""
Tier = DraftTier | PoolTier


@dataclass(frozen=True, slots=True, kw_only=True)
class TierMaker:
    """Makes the tiers of one verifier.

    Args:
        model: The verifier.
        scoring: The order of a draft's parts, and what is shown beside it.
        thinks: Whether the verifier thinks aloud first, and cannot be told not to.
    """

    model: ChatModel
    scoring: Scoring
    thinks: bool = False

    def make(self, name: TierName) -> Tier:
        """Return the tier of this name."""
        if name == "draft_only":
            return DraftOnly()
        if name == "agreement":
            return Agreement()
        if name == "choice":
            return Choice(model=self.model)
        reflection = Reflection(model=self.model, scoring=self.scoring, thinks=self.thinks)
        if name == "reflection":
            return reflection
        if name == "forced_decoding":
            return ForcedDecoding(reflection=reflection)
        return PromptLogprobs(reflection=reflection)


def distinct(drafts: Sequence[Draft]) -> list[Draft]:
    """Return the first draft of each answer, whole ones before those that were cut off."""
    whole_first = sorted(drafts, key=lambda draft: draft.truncated)
    by_answer: dict[str, Draft] = {}
    for draft in whole_first:
        by_answer.setdefault(normal_answer(draft.answer), draft)
    return list(by_answer.values())[: len(letters(len(by_answer)))]


def rotated(drafts: Sequence[Draft]) -> list[Draft]:
    """Return the drafts in another order, in which none stands where it stood."""
    half = len(drafts) // 2
    return [*drafts[half:], *drafts[:half]]


_LETTER = re.compile(
    r"(?:\W|\b(?:best|draft|answer|option|letter)\b){0,9}([A-Za-z])(?=\s*(?:\Z|[^\w\s']|\n))",
    re.IGNORECASE,
)
_NAMED = re.compile(  # "A" alone may be the article
    r"\b(?:draft|answer|option|letter|is)\b\W{0,9}([A-Z])(?![\w'])|^\W{0,9}([A-Z])\W{0,9}$"
    r"|(?<![\w'])([A-Z])\W{1,9}is (?:right|correct|best)",
    re.IGNORECASE | re.MULTILINE,
)


def picked_draft(text: str, order: Sequence[Draft]) -> Draft | None:
    """Read the letter of a draft, or its answer written out; None where there is neither."""
    offered = dict(zip(letters(len(order)), order, strict=True))
    first = _LETTER.match(text)
    named = {"".join(found).upper() for found in _NAMED.findall(text)} & offered.keys()
    told = {first[1].upper()} if first else named
    if len(told) == 1 and (letter := told.pop()) in offered:
        return offered[letter]
    written = normal_answer(text)
    return next((draft for draft in order if normal_answer(draft.answer) == written), None)


# -------------------------------------------------------------------- replies and costs


async def _reply(model: ChatModel, request: ChatRequest, step: Step) -> ChatReply | Verdict:
    """Return the reply, or the verdict that there is none."""
    sent = time.perf_counter()
    try:
        return await model.chat(request, step=step)
    except EndpointError as error:
        return Verdict(
            failed=str(error),
            cannot=_is_refusal(error),
            error=error,
            model=model.name,
            seconds=time.perf_counter() - sent,
            attempts=error.attempts,
        )


def _is_refusal(error: EndpointError) -> bool:
    """Whether the server would refuse every request of this kind."""
    if isinstance(error, ContextTooSmallError) or error.status_code in _WRONG_KEY:
        return False
    return isinstance(error, EndpointRejectedError | LogprobsUnavailableError)


def _with_spans(verdict: Verdict, spans: Mapping[str, SpanLogprob], draft: Draft) -> Verdict | None:
    """Add the draft's spans to a verdict; None if one of them was not found."""
    wanted = 1 + bool(draft.rationale.strip())
    if len(spans) != wanted:
        return None
    terms = {**verdict.terms, **{name: span.mean for name, span in spans.items()}}
    return replace(verdict, terms=terms, spans=spans)


def _added(verdict: Verdict, other: Verdict | ChatReply) -> Verdict:
    """Add what a further request cost."""
    return replace(
        verdict,
        count=TokenCount(
            prompt=_sum(verdict.count.prompt, other.count.prompt),
            completion=_sum(verdict.count.completion, other.count.completion),
            cached=_sum(verdict.count.cached, other.count.cached),
        ),
        model=verdict.model or other.model,
        seconds=verdict.seconds + other.seconds,
        attempts=verdict.attempts + other.attempts,
    )


def _sum(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else one + other


def _why_no_label(reply: ChatReply, word: Token | None) -> str:
    if not reply.tokens:
        return "the verifier returned no log-probabilities"
    if word is None and not any(token.text.strip() for token in reply.tokens):
        return "the verifier wrote nothing but white space"
    if word is None:
        return "the verifier was still thinking when it reached the token limit"
    if len(dict(word.alternatives)) < 2:  # noqa: PLR2004 - one token is no alternative
        return "the verifier returned no alternatives to its first token"
    return f"neither Yes nor No is among the alternatives to {word.text!r}"
