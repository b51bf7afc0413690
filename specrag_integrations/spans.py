"""Spans: where the rationale and the answer stand in a model's text, and their log-probability."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from specrag_integrations.errors import DraftFormatError
from specrag_integrations.models import Token


@dataclass(frozen=True, slots=True)
class Span:
    """A run of characters, end excluded."""

    start: int
    end: int

    def of(self, text: str) -> str:
        """Cut the span out of its text."""
        return text[self.start : self.end]


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the rationale and the answer stand in a model's text."""

    rationale: Span
    answer: Span


_MARK = r"[\s>*_#`~\-]*"  # Markdown and white space around a header
_HEADER = rf"(?:^|\n){_MARK}(?:\d+[.)]{_MARK})?(?:the\s+)?(?:final\s+|short\s+)?"
# After the colon a sign may belong to the answer: -5, >50 %, ~3, #1.
_COLON = rf"{_MARK}[:\uff1a](?:[ \t]*(?:\*\*|__))?"
_RATIONALE = r"(?:rationale|reasoning|explanation)"
_ANSWER = r"(?:answer|response)"
_RATIONALE_HEADER = re.compile(rf"{_HEADER}{_RATIONALE}(?:{_COLON}|{_MARK}(?=\n))", re.IGNORECASE)
_ANSWER_HEADER = re.compile(
    rf"{_HEADER}{_ANSWER}(?:{_COLON}|{_MARK}(?=\n))"
    rf"|(?<=[.!?\]])[ \t]+(?:final[ \t]+)?{_ANSWER}:",  # on the rationale's own line
    re.IGNORECASE,
)
_THINKING = re.compile(r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_END_OF_THINKING = re.compile(r"</(?:think|thinking|reasoning)>", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>\n]{1,40}\|>|</s>")
_CONTENT = re.compile(r"\S")
_PARAGRAPH = re.compile(r"\n[ \t]*\n")


def find_spans(text: str, *, truncated: bool = False) -> Spans:
    """Find rationale and answer in a model's text.

    Thinking blocks, Markdown, numbering, full-width colons, `Response:` for `Answer:`, a missing
    header and repeated formats are all taken. Without an answer header the last line is the answer,
    unless the text was cut short, when nobody knows what the answer would have been.

    Raises:
        DraftFormatError: there is no answer to be found.
    """
    visible = _blanked(text)
    rationale_header = _RATIONALE_HEADER.search(visible)
    headers = list(_ANSWER_HEADER.finditer(visible))
    if not headers:
        return _without_header(text, visible, rationale_header, truncated=truncated)
    # The answer that belongs to the rationale: models like to go on with a second example.
    first = rationale_header.start() if rationale_header else 0
    header = next((found for found in headers if found.start() >= first), headers[0])
    end_of_answer = _end_of_answer(visible, header.end())
    answer = _trimmed(visible, header.end(), end_of_answer)
    if rationale_header is None:
        rationale = _trimmed(visible, 0, header.start())
    elif rationale_header.start() < header.start():
        rationale = _trimmed(visible, rationale_header.end(), header.start())
    else:
        rationale = _trimmed(visible, rationale_header.end(), len(visible))
    if answer.start >= answer.end:
        raise DraftFormatError("the answer is empty", text=text)
    return Spans(rationale, answer)


def _without_header(
    text: str, visible: str, rationale_header: re.Match[str] | None, *, truncated: bool
) -> Spans:
    if truncated:
        raise DraftFormatError("cut off before the answer", text=text)
    start = rationale_header.end() if rationale_header else 0
    body = _trimmed(visible, start, len(visible))
    if body.start >= body.end:
        raise DraftFormatError("the reply holds no text", text=text)
    line = visible.rfind("\n", body.start, body.end)
    if line < 0:
        if rationale_header:
            raise DraftFormatError("a rationale without an answer", text=text)
        return Spans(Span(body.start, body.start), body)
    return Spans(_trimmed(visible, body.start, line), _trimmed(visible, line, body.end))


def _end_of_answer(visible: str, start: int) -> int:
    """End an answer before the next header, or before a paragraph that follows its first line."""
    content = _CONTENT.search(visible, start)
    found = [
        _RATIONALE_HEADER.search(visible, start),
        _ANSWER_HEADER.search(visible, start),
        _PARAGRAPH.search(visible, content.start()) if content else None,
    ]
    return min([len(visible), *(match.start() for match in found if match)])


def _blanked(text: str) -> str:
    """Blank what is not meant for the reader, keeping every position."""
    blank = lambda match: " " * len(match[0])  # noqa: E731 - used twice, here only
    text = _SPECIAL_TOKEN.sub(blank, _THINKING.sub(blank, text))
    # Some templates open the thinking block in the prompt, so that only its end is seen.
    ends = list(_END_OF_THINKING.finditer(text))
    return " " * ends[-1].end() + text[ends[-1].end() :] if ends else text


def without_thinking(text: str) -> str:
    """Remove thinking blocks and special tokens, also a block that has not ended yet."""
    return _blanked(text).strip()


def _trimmed(text: str, start: int, end: int) -> Span:
    """Take white space and Markdown emphasis off both ends, but leave `A*` and `-5` as they are."""
    while True:
        part = text[start:end]
        start += len(part) - len(part.lstrip())
        end = max(start, end - (len(part) - len(part.rstrip())))
        part = text[start:end]
        pair = next((m for m in ("**", "__", "`", "*", "_") if _is_wrapped(part, m)), None)
        if pair:
            start, end = start + len(pair), end - len(pair)
        elif part.endswith(("**", "__")):  # what opened before the header closes here
            end -= 2
        elif part.startswith(("**", "__")):
            start += 2
        else:
            return Span(start, end)


def _is_wrapped(part: str, mark: str) -> bool:
    return len(part) > 2 * len(mark) and part.startswith(mark) and part.endswith(mark)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanLogprob:
    """The log-probability of a span of text, in nats, over its exact tokens."""

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        """Mean per token: sums fall with length, and would favour short drafts."""
        return self.total / self.tokens


def span_logprob(tokens: Sequence[Token] | None, text: str, span: Span) -> SpanLogprob | None:
    """Sum the log-probabilities of the tokens that overlap a span of the reply's text.

    Tokens are laid out by their bytes, since one character may be spread over several tokens. A
    reply's text may lack what its tokens hold (a stripped thinking block, white space), so the text
    is looked for in the tokens' bytes from the end; None if it is not there.
    """
    if not tokens or span.start >= span.end:
        return None
    stream = b"".join(token.data for token in tokens)
    base = stream.rfind(text.encode())
    if base < 0:
        return None
    start = base + len(text[: span.start].encode())
    end = base + len(text[: span.end].encode())
    total, count, position = 0.0, 0, 0
    for token in tokens:
        following = position + len(token.data)
        if position < end and following > start:
            total += token.logprob
            count += 1
        position = following
    return SpanLogprob(total=total, tokens=count) if count else None
