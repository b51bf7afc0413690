"""Labels: how much probability a model gave Yes, No or a letter as the first word of its reply."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from specrag_integrations.models import LOGPROB_FLOOR, ChatReply, Token
from specrag_integrations.spans import THINKING_BEGINS, THINKING_ENDS

YES_NO = ("Yes", "No")

_AROUND = " \t\r\n\"'*_.,!:()[]\u2581\u0120\u010a"
"""What may stand around a label, the marks of several tokenisers for white space included."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels at one token."""

    logprobs: Mapping[str, float]
    """log P of each label in nats, summed over its spellings; empty if none is listed."""
    mass: float
    """How much probability they have together: little means a model off the question."""

    def log_share(self, label: str) -> float | None:
        """Return log P(label) / Σ P(labels), at most 0; None if no label is listed.

        A model that puts half its mass elsewhere is thereby not read as doubt.
        """
        if not self.logprobs:
            return None
        whole = math.log(sum(math.exp(logprob) for logprob in self.logprobs.values()))
        return min(0.0, self.logprobs[label] - whole)


def read_labels(token: Token, labels: Sequence[str] = YES_NO) -> Labels | None:
    """Sum the spellings of each label among a token's alternatives, which are in no certain order.

    A label that is not among them is bounded by the smallest of them: it is at most that likely,
    and log 0 would outweigh every other term. None if the server returned no alternatives.
    """
    # The written token itself is not always listed, and some servers list it twice.
    found = dict.fromkeys(token.alternatives)
    if token.text not in {text for text, _ in found}:
        found[token.text, token.logprob] = None
    listed = [(text, max(p, LOGPROB_FLOOR)) for text, p in found if not math.isnan(p)]
    if len(listed) < 2:  # noqa: PLR2004 - one token is no alternative
        return None
    summed = dict.fromkeys(labels, 0.0)
    spelled = {label.casefold(): label for label in labels}
    for text, logprob in listed:
        if label := spelled.get(text.strip(_AROUND).casefold()):
            summed[label] += math.exp(logprob)
    mass = sum(summed.values())
    if not mass:
        return Labels({}, 0.0)
    bound = min(logprob for _, logprob in listed)
    logprobs = {label: math.log(p) if p else bound for label, p in summed.items()}
    return Labels(logprobs, min(1.0, mass))


def first_word(reply: ChatReply) -> Token | None:
    """Return the first token of the reply proper, behind a thinking block and white space.

    None where there is none, or where the model was still thinking when it was cut off.
    """
    tokens: Sequence[Token] = reply.tokens or ()
    if reply.thinking and not any(THINKING_ENDS.search(token.text) for token in tokens):
        tokens = _behind_thoughts(reply)
    written = ""
    began, start = False, 0
    for index, token in enumerate(tokens):
        written += token.text
        began = began or bool(THINKING_BEGINS.match(written))
        if THINKING_ENDS.search(written):
            written, began, start = "", False, index + 1
    if began:
        return None
    return next((token for token in tokens[start:] if token.text.strip()), None)


def _behind_thoughts(reply: ChatReply) -> Sequence[Token]:
    """Return the tokens of the text, where the thoughts before it bear no mark we know."""
    tokens, text = reply.tokens or (), reply.text.strip()
    written = "".join(token.text for token in tokens)
    start = written.rfind(text) if text else -1
    if start < 0:
        return ()
    ends = accumulate(len(token.text) for token in tokens)
    return [token for token, end in zip(tokens, ends, strict=True) if end > start]


def is_thinking(reply: ChatReply) -> bool:
    """Whether the model thought aloud before its reply, or was about to."""
    text = "".join(token.text for token in reply.tokens or ()) or reply.text
    return reply.thinking or bool(THINKING_BEGINS.match(text) or THINKING_ENDS.search(text))
