"""Citations and abstentions: what an answer says of the passages it rests on."""

from __future__ import annotations

import re
import unicodedata

from specrag_integrations.prompts import UNKNOWN

_SOURCES = (
    r"(?:(?:the|these|those|any|your|provided|given|available|retrieved|supplied) )*"
    r"(?:passages?|contexts?|texts?|documents?|evidence|sources?)(?: \[?\d\]?)?"
)
_TELL = (
    r"(?:tell|say|state|mention|specify|provide|contain|give|answer|indicate|include|identify|name"
    r"|reveal|support|describe|address|have)s?\b"
)
_SUBJECT = (
    r"(?:(?:(?:the )?answer(?: to (?:the|this) question)?|it|this|that|the question)(?: is)?:? )?"
)
_FORMULA = (
    rf"(?:{UNKNOWN}|unanswerable|n/a|not(?= in )"
    r"|not (?:known|stated|specified|mentioned|provided|given|found|available|answerable)"
    r"|(?:cannot|can't|could not) be (?:determined|answered|known|found)"
    r"|(?:unable|impossible) to (?:determine|answer|tell|say)"
    r"|(?:no|not enough|insufficient) (?:relevant )?(?:information|evidence|answer)"
    r"(?: is| was)?(?: given| provided| available| found)?)"
)
_EXPLANATION = (  # what may follow the formula; the rest of a name may not
    r"\"?(?:$|\s*[.,;:!(\n]|\s+[\-\u2013\u2014]\s"
    r"|\s+(?:whether|who|what|when|where|which|why|how|if)\b"
    rf"|\s+(?:in|by|from|within|per|according to|based on) {_SOURCES}\b)"
)
_ABSTENTION = re.compile(
    r"(?:(?:i'm |i am )?sorry,? |unfortunately,? )?(?:but )?"
    rf"(?:(?:based on|according to|from|in) {_SOURCES},? )?"
    r"(?:i (?:do not|don't|cannot|can't|could not) (?:know|tell|answer|determine|find)\b"
    r"(?! (?-i:[A-Z]))"
    rf"|{_SOURCES} (?:do|does|did)(?: not|n't) {_TELL}"
    rf"|(?:none of|no) {_SOURCES} {_TELL}"
    r"|there(?: is|'s) (?:no|not enough|insufficient) (?:information|evidence|mention|answer)\b"
    rf'|{_SUBJECT}"?{_FORMULA}{_EXPLANATION})',
    re.IGNORECASE,
)
_NUMBERS = r"\d{1,2}(?:\s?[,;\u2013-]\s?\d{1,2}){0,20}"
_CITATION = re.compile(
    rf"[ \t]{{0,3}}[\[\u3010]\s?(?:passages?\s)?({_NUMBERS})\s?[\]\u3011]", re.IGNORECASE
)


def is_abstention(answer: str) -> bool:
    """Whether an answer says that the passages do not tell.

    Only its beginning counts, and what follows must be an explanation: "Unknown Pleasures", "Not
    Fade Away", "None" and "Na" are answers.
    """
    bare = _CITATION.sub("", answer).replace("\u2019", "'").strip(" \"'*_.,!\u201c\u201d")
    return _ABSTENTION.match(bare) is not None


def cited_numbers(text: str, passages: int) -> tuple[int, ...]:
    """Return the numbers of existing passages cited as [n], each once, in order of appearance."""
    numbers = (number for match in _CITATION.finditer(text) for number in _numbers(match[1]))
    return tuple(dict.fromkeys(number for number in numbers if 1 <= number <= passages))


def without_dead_citations(text: str, passages: int) -> str:
    """Remove citations of passages that do not exist, keeping those that do."""

    def kept(match: re.Match[str]) -> str:
        alive = [number for number in _numbers(match[1]) if 1 <= number <= passages]
        if len(alive) == len(_numbers(match[1])):
            return match[0]
        return f" [{', '.join(map(str, alive))}]" if alive else ""

    return _CITATION.sub(kept, text).strip()


def without_citations(text: str) -> str:
    """Remove all citations."""
    return _CITATION.sub("", text)


def _numbers(cited: str) -> list[int]:
    """Read `1`, `1, 3` and `1-3`."""
    numbers: list[int] = []
    for part in re.split(r"[,;]", cited):
        ends = [int(end) for end in re.split(r"[\u2013-]", part)]
        numbers += range(min(ends), max(ends) + 1)
    return numbers


_ARTICLE = re.compile(r"\b(?:an|the)\b|\ba\b(?=\s+\w)")  # "Vitamin A" ends in no article
_JOINED = re.compile(r"['\u2019]|\.(?!\d)|(?<=\d),(?=\d{3})")  # U.S., St Mary's, 1,000
_PUNCTUATION = re.compile(
    # All but the point of 3.5, the signs of -5 and +5, and what tells C, C# and C++ apart.
    r"(?!\.\d|(?<!\w)[+\-]\d|(?<=\w)#(?!\w)|(?<=\w)\+{1,2}(?!\w)|(?<=\w\+)\+(?!\w))[^\w\s]|_"
)


def normal_answer(answer: str) -> str:
    """Return the form in which equal answers are equal: case, articles, punctuation, citations."""
    bare = unicodedata.normalize("NFKC", without_citations(answer)).casefold()
    bare = _PUNCTUATION.sub(" ", _JOINED.sub("", bare))
    return " ".join(_ARTICLE.sub(" ", bare).split()) or answer.strip().casefold()
