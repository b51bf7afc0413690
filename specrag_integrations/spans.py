"""Spans: where the rationale and the answer stand in a model's text, and their log-probability."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from specrag_integrations.errors import DraftFormatError
from specrag_integrations.models import Token, overlapping


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


# Every repetition here is bounded or possessive, so that no text takes long.
_HEADER = re.compile(
    r"""
    ^[ \t>*_#`~\-\u2022]*+                              # Markdown, or what was blanked
    (?:(?:step[ \t]+)?\d{1,2}[.):][ \t*_]{0,8})?        # 1.  2)  Step 3:
    \[?(?:the[ \t]+)?(?:final[ \t]+|short[ \t]+|brief[ \t]+)?
    (?:(?P<rationale>rationale|reasoning|explanation)|(?P<answer>(?:answer|response)(?:[ \t]+is)?))
    \]?(?:[ \t]{0,2}\([^()\n]{0,80}\))?[ \t*_`~]{0,8}
    # After the colon a sign may belong to the answer: -5, >50 %, ~3, #1.
    (?:[:\uff1a](?:\*{1,2}|__)?|[ \t][\-\u2013\u2014=][ \t]|(?<=\])[ \t]|$)
    """,
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
_INLINE_HEADER = re.compile(  # on the rationale's own line
    r"(?:(?<=[.!?\])])[ \t]|(?<=\s)(?=(?-i:A)))(?:final[ \t])?(?P<answer>answer|response)[:\uff1a]",
    re.IGNORECASE,
)
_AFTER_ANSWER = re.compile(  # what models like to go on with
    r"^(?:[ \t>*_\-]*+(?:question|passages?|evidence|sources?|note|confidence|instructions?"
    r"|user|human|assistant)[ \t*_]{0,8}[:\uff1a]|#{1,6}[ \t])|\n[ \t]*+\n",
    re.IGNORECASE | re.MULTILINE,
)
_THINKING = re.compile(
    r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)"
    r"|\[THINK\].*?(?:\[/THINK\]|\Z)|\u25c1think\u25b7.*?(?:\u25c1/think\u25b7|\Z)",
    re.DOTALL | re.IGNORECASE,
)
THINKING_BEGINS = re.compile(
    r"\s*(?:<(?:think|thinking|reasoning)>|\[THINK\]|\u25c1think\u25b7)", re.IGNORECASE
)
THINKING_ENDS = re.compile(
    r"</(?:think|thinking|reasoning)>|\[/THINK\]|\u25c1/think\u25b7", re.IGNORECASE
)
_END_OF_TURN = re.compile(
    r"<\|(?:im_end|eot_id|endoftext|end_of_text)\|>|<\uff5cend\u2581of\u2581sentence\uff5c>"
    r"|</s>|<eos>|<end_of_turn>|\[/?INST\]"
)
_NOT_TEXT = re.compile(  # special tokens, tags, code fences, horizontal rules, invisible marks
    r"<[|\uff5c][^<>\n]{1,40}[|\uff5c]>|</?s>|<(?:bos|eos|start_of_turn|end_of_turn)>|\[/?INST\]"
    r"|</?(?:rationale|explanation|answer|response)>|[\u200b\ufeff]"
    r"|^[ \t]*+(?:```[\w+\-]{0,20}|-{3,}+|={3,}+|\*{3,}+|_{3,}+)[ \t]*+$",
    re.IGNORECASE | re.MULTILINE,
)
_CONTENT = re.compile(r"\S")


def find_spans(text: str, *, truncated: bool = False) -> Spans:
    """Find rationale and answer in a model's text.

    Thinking blocks, Markdown, numbering, full-width colons, `Response:` for `Answer:`, a missing
    header and repeated formats are all taken. Without an answer header the last line is the answer,
    unless the text was cut short, when nobody knows what the answer would have been.

    Raises:
        DraftFormatError: there is no answer to be found.
    """
    visible = _blanked(text)
    headers = list(_HEADER.finditer(visible))
    if not any(header["answer"] for header in headers):
        headers += _INLINE_HEADER.finditer(visible)
        headers.sort(key=lambda header: header.start())
    rationales, answers = _sections(visible, headers)
    if not any(header["answer"] for header in headers):
        start = rationales[0].start if rationales else 0
        return _without_header(text, visible, start, truncated=truncated)
    if not answers:
        raise DraftFormatError("the answer is empty", text=text)
    # The answer that belongs to the rationale: models like to go on with a second example.
    first = min((span.end for span in rationales), default=0)
    answer = next((span for span in answers if span.start >= first), answers[0])
    before = [span for span in rationales if span.end <= answer.start]
    if before or rationales:
        return Spans(before[-1] if before else rationales[0], answer)
    if any(header.lastgroup == "rationale" for header in headers):
        return Spans(Span(answer.start, answer.start), answer)
    start = next(header.start() for header in headers if header["answer"])
    return Spans(_trimmed(visible, 0, start), answer)


def _sections(visible: str, headers: Sequence[re.Match[str]]) -> tuple[list[Span], list[Span]]:
    """Return the rationales and answers that are not empty, each from its header to the next."""
    rationales: list[Span] = []
    answers: list[Span] = []
    ends = [*(header.start() for header in headers), len(visible)][1:]
    for header, end in zip(headers, ends, strict=True):
        is_answer = header["answer"] is not None
        cut = _end_of_answer(visible, header.end(), end) if is_answer else end
        span = _trimmed(visible, header.end(), cut)
        if span.start < span.end:
            (answers if is_answer else rationales).append(span)
    return rationales, answers


def _without_header(text: str, visible: str, start: int, *, truncated: bool) -> Spans:
    if truncated:
        raise DraftFormatError("cut off before the answer", text=text)
    body = _trimmed(visible, start, len(visible))
    if body.start >= body.end:
        raise DraftFormatError("the reply holds no text", text=text)
    line = visible.rfind("\n", body.start, body.end)
    if line < 0:
        if start:
            raise DraftFormatError("a rationale without an answer", text=text)
        return Spans(Span(body.start, body.start), body)
    answer = _trimmed(visible, line, body.end)
    if answer.start >= answer.end:
        raise DraftFormatError("the last line holds no answer", text=text)
    return Spans(_trimmed(visible, body.start, line), answer)


def _end_of_answer(visible: str, start: int, end: int) -> int:
    """End an answer before what models go on with, such as a paragraph after its first line."""
    content = _CONTENT.search(visible, start, end)
    found = _AFTER_ANSWER.search(visible, content.start(), end) if content else None
    return found.start() if found else end


def _blanked(text: str) -> str:
    """Blank what is not meant for the reader, keeping every position."""
    text = text.replace("\r\n", " \n").replace("\r", "\n")
    text = _without_blocks(text)
    return _NOT_TEXT.sub(lambda match: " " * len(match[0]), text)


def without_thinking(text: str) -> str:
    """Remove thinking blocks, also one that has not ended yet, and what follows a turn's end."""
    return _without_blocks(text).strip()


def _without_blocks(text: str) -> str:
    """Blank thinking blocks and what follows the end of the turn, keeping every position."""
    text = _THINKING.sub(lambda match: " " * len(match[0]), text)
    # Some templates open the thinking block in the prompt, so that only its end is seen.
    ends = list(THINKING_ENDS.finditer(text))
    text = " " * ends[-1].end() + text[ends[-1].end() :] if ends else text
    turn = next((end for end in _END_OF_TURN.finditer(text) if text[: end.start()].strip()), None)
    return text[: turn.start()].ljust(len(text)) if turn else text


def _trimmed(text: str, start: int, end: int) -> Span:
    """Take white space and Markdown emphasis off both ends, but leave `A*` and `-5` as they are."""
    while True:
        part = text[start:end]
        start += len(part) - len(part.lstrip())
        end = max(start, end - (len(part) - len(part.rstrip())))
        part = text[start:end]
        pair = next((m for m in ("**", "__", "`", "*", "_") if _is_wrapped(part, m)), None)
        single = next((m for m in ("**", "__") if part.count(m) % 2), None)
        if pair:
            start, end = start + len(pair), end - len(pair)
        elif single and part.endswith(single):  # what opened before the header closes here
            end -= 2
        elif single and part.startswith(single):
            start += 2
        else:
            return Span(start, end)


def _is_wrapped(part: str, mark: str) -> bool:
    inner = part[len(mark) : -len(mark)]
    return bool(inner) and part == f"{mark}{inner}{mark}" and mark not in inner


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanLogprob:
    """The log-probability of a span of text, in nats, over its exact tokens."""

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        """Mean per token: sums fall with length, and would favour short drafts."""
        return self.total / self.tokens

    def to_dict(self) -> dict[str, float]:
        """Return a JSON-able form."""
        return {"total": self.total, "mean": self.mean, "tokens": self.tokens}


def span_logprob(tokens: Sequence[Token] | None, text: str, span: Span) -> SpanLogprob | None:
    """Sum the log-probabilities of the tokens that overlap a span of the reply's text.

    Tokens are laid out by their bytes, since one character may be spread over several tokens. A
    reply's text may lack what its tokens hold (a stripped thinking block, white space), so the text
    is looked for in the tokens' bytes from the end; None if it is not there. Some tokenisers decode
    single tokens without the space before them: then white space is left out of the comparison.
    """
    if not tokens or span.start >= span.end:
        return None
    parts = (text[: span.start], span.of(text), text[span.end :])
    pieces = [token.data for token in tokens]
    found = _found(pieces, [_bytes(part) for part in parts])
    if not found and not any(b" " in piece for piece in pieces):
        squeezed = [_squeezed(_bytes(part)) for part in parts]
        found = _found([_squeezed(piece) for piece in pieces], squeezed)
    if not found:
        return None
    return SpanLogprob(total=sum(tokens[place].logprob for place in found), tokens=len(found))


def _found(pieces: Sequence[bytes], parts: Sequence[bytes]) -> list[int]:
    """Return which pieces overlap the middle one of three parts of a text."""
    before, part, after = parts
    base = b"".join(pieces).rfind(before + part + after)
    if base < 0 or not part:
        return []
    start = base + len(before)
    return overlapping([len(piece) for piece in pieces], start, start + len(part))


def _squeezed(data: bytes) -> bytes:
    return b"".join(data.replace("\u2581".encode(), b" ").split())


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # JSON may hold half a character
