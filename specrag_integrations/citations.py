"""Citations and abstentions: what an answer says of the passages it rests on."""

from __future__ import annotations

import re

from specrag_integrations.prompts import UNKNOWN

_ABSTENTION = re.compile(
    rf"(?:the answer is )?(?:{UNKNOWN}|not (?:known|stated|specified|mentioned|provided|given)"
    r"|unanswerable|no answer|n/?a|i (?:do not|don't|cannot|can't) (?:know|tell|answer|determine)"
    r"|(?:it )?(?:is )?(?:not|cannot be) determined|no information|(?:there is )?not enough "
    r"information|insufficient information|(?:the )?(?:passages?|context|text|documents?) "
    r"(?:do|does) not \w+)\b",
    re.IGNORECASE,
)
_CITATION = re.compile(r"\s*\[(\d{1,2}(?:\s*[,;\u2013-]\s*\d{1,2})*)\]")


def is_abstention(answer: str) -> bool:
    """Whether an answer says that the passages do not tell.

    Only its beginning counts, so that "Unknown Pleasures" by its full name is still an answer.
    """
    bare = _CITATION.sub("", answer).strip(" \"'*_.,!")
    found = _ABSTENTION.match(bare)
    if found is None:
        return False
    # After the formula only an explanation may follow, not the rest of a name.
    rest = bare[found.end() :].lstrip(" \"'")
    return not rest or not rest[0].isupper()


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

    return _CITATION.sub(kept, text)


def without_citations(text: str) -> str:
    """Remove all citations."""
    return _CITATION.sub("", text)


def _numbers(cited: str) -> list[int]:
    """Read `1`, `1, 3` and `1-3`."""
    numbers: list[int] = []
    for part in re.split(r"\s*[,;]\s*", cited):
        first, _, last = re.sub(r"\s", "", part).replace("\u2013", "-").partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = re.compile(r"[^\w\s]|_")


def normal_answer(answer: str) -> str:
    """Return the form in which equal answers are equal: case, articles, punctuation, citations."""
    bare = _PUNCTUATION.sub(" ", without_citations(answer).casefold())
    return " ".join(_ARTICLE.sub(" ", bare).split()) or answer.strip().casefold()
