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
_HEADER = rf"(?:^|\n){_MARK}(?:\d+[.)]\s*)?{_MARK}(?:the\s+)?(?:final\s+|short\s+)?"
_COLON = rf"{_MARK}[:\uff1a]{_MARK}"
_RATIONALE_HEADER = re.compile(
    rf"{_HEADER}(?:rationale|reasoning|explanation){_COLON}", re.IGNORECASE
)
_ANSWER_HEADER = re.compile(rf"{_HEADER}(?:answer|response){_COLON}", re.IGNORECASE)
_INLINE_ANSWER = re.compile(r"(?<=[.!?\]])\s+(?:final\s+)?(?:answer|response):\s*", re.IGNORECASE)
_BARE_HEADER = re.compile(
    rf"(?:^|\n){_MARK}(?:final\s+)?(answer|response|rationale){_MARK}(?=\n)", re.IGNORECASE
)
_THINKING = re.compile(r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_END_OF_THINKING = re.compile(r"</(?:think|thinking|reasoning)>", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>\n]{1,40}\|>|</s>")
_CONTENT = re.compile(r"\S")
_PARAGRAPH = re.compile(r"\n[ \t]*\n")
_EDGES = " \t\r\n*_#`~>"


def find_spans(text: str, *, truncated: bool = False) -> Spans:
    """Find rationale and answer in a model's text.

    Thinking blocks, Markdown, numbering, full-width colons, `Response:` for `Answer:`, a missing
    header and repeated formats are all taken. Without an answer header the last line is the answer,
    unless the text was cut short, when nobody knows what the answer would have been.

    Raises:
        DraftFormatError: there is no answer to be found.
    """
    visible = _blanked(text)
    headers = list(_ANSWER_HEADER.finditer(visible)) or list(_INLINE_ANSWER.finditer(visible))
    headers = headers or [m for m in _BARE_HEADER.finditer(visible) if m[1].lower() != "rationale"]
    rationale_header = _RATIONALE_HEADER.search(visible)
    if headers and rationale_header:
        # The answer that belongs to the rationale: models like to go on with a second example.
        after = [header for header in headers if header.start() >= rationale_header.start()]
        header = (after or headers)[0]
    elif headers:
        header = headers[0]
    else:
        return _without_header(text, visible, rationale_header, truncated=truncated)
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


def _trimmed(text: str, start: int, end: int) -> Span:
    while start < end and text[start] in _EDGES:
        start += 1
    while end > start and text[end - 1] in _EDGES:
        end -= 1
    return Span(start, end)


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
