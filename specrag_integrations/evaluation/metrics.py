"""Metrics: what an answer is worth against the reference, as the field's own scripts judge it.

Exact match and F1 are those of SQuAD and HotpotQA, containment is the paper's. What is written
otherwise than in ASCII is read as MLQA's script does: all Unicode punctuation is punctuation, and a
character of a script without spaces is a word.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import zip_longest

from specrag_integrations.citations import is_abstention, without_citations
from specrag_integrations.evaluation.outcomes import Grades
from specrag_integrations.evaluation.questions import Question
from specrag_integrations.passages import Passage

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_FREE_ARTICLE = re.compile(r"(?<!\S)(?:a|an|the)(?!\S)")
_UNSPACED = re.compile(
    # Thai to Tibetan, Burmese, Khmer, kana, Han, Hangul, whose particles cling to the word.
    r"([\u0e00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff"
    r"\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff])"
)
_CLOSED = ("yes", "no", "noanswer")
"""Answers that HotpotQA compares as a whole: sharing a word with them is worth nothing."""


def grade(
    question: Question,
    text: str,
    *,
    passages: Sequence[Passage] = (),
    citations: Sequence[int] = (),
    abstained: bool = False,
) -> Grades:
    """Judge an answer.

    An abstention is right where there is nothing to answer with, whatever the kind of the question,
    and then all measures are 1, as in SQuAD 2.0. Elsewhere it is wrong by all of them, but in a set
    with a label that says the same (NOT ENOUGH INFO) it gives that label.

    Args:
        question: What was asked, with its reference.
        text: The answer, with or without citations.
        passages: What the citations count.
        citations: The numbers it cites, from 1.
        abstained: Whether it says that the passages do not tell.
    """
    answers = question.answers
    label = _label_given(question, text, abstained=abstained)
    if abstained or not answers:
        contained = exact = abstained and (not answers or _accepted(label, answers))
        f1 = float(exact)
    else:
        contained, exact = contains(text, answers), exact_match(text, answers)
        f1 = token_f1(text, answers)
    right: bool | None = contained
    if answers and question.kind == "label":
        right = _accepted(label, answers)
    elif not question.is_judged:
        right = None
    return Grades(
        right=right,
        contained=contained,
        exact=exact,
        f1=f1,
        words=len(_tokens(_with_articles(text))),
        label=label,
        citation_precision=_citation_precision(question, passages, citations),
    )


def normalised(text: str) -> str:
    """Return the form in which SQuAD compares: no case, punctuation, articles or citations.

    On ASCII this is SQuAD's normalisation to the letter. Beyond it, Unicode's compatible forms are
    one (NFKC), its punctuation, the minus sign and what does not show are removed as well.
    """
    return " ".join(_ARTICLE.sub(" ", _with_articles(text)).split())


def contains(text: str, answers: Sequence[str]) -> bool:
    """Whether an answer holds one of the accepted ones in whole normalised words.

    Punctuation may stand for a space, but not within a number: "Paris-based" and "Paris's" hold
    "Paris", and "3-4" does not hold "4". In scripts without spaces any part is whole. An accepted
    "yes" or "no" must be what the text says (`label_of`): "no" stands in "there is no evidence".
    """
    return any(_contains(text, answer) for answer in answers)


def exact_match(text: str, answers: Sequence[str]) -> bool:
    """Whether an answer is one of the accepted ones, but for case, punctuation and articles."""
    return any(_tokens_of(text, answer) == _tokens_of(answer, answer) for answer in answers)


def token_f1(text: str, answers: Sequence[str]) -> float:
    """Return HotpotQA's F1 of the words shared with an accepted answer, the greatest over them.

    Where either side is "yes", "no" or "noanswer", it is 1 or 0: such answers share no words.
    """
    return max((_f1(text, answer) for answer in answers), default=0.0)


def _f1(text: str, answer: str) -> float:
    ours, theirs = _tokens_of(text, answer), _tokens_of(answer, answer)
    if ours != theirs and any(" ".join(side) in _CLOSED for side in (ours, theirs)):
        return 0.0
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0


def _contains(text: str, answer: str) -> bool:
    reading = _reading(answer)
    wanted = reading(answer)
    if wanted in ("yes", "no"):
        return label_of(text, ("yes", "no")) == wanted
    if reading in (_bare, _verbatim):
        # A reference of nothing but signs: "5%" is not "%", and "well-known" is not "-".
        return bool(wanted) and bool(re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", reading(text)))
    forms = (normalised, _apart) if reading is normalised else (reading,)
    return any(
        f" {' '.join(_tokens(form(answer)))} " in f" {' '.join(_tokens(form(text)))} "
        for form in forms
        if form(answer)
    )


# ------------------------------------------------------------------ how a text is read


def _reading(answer: str) -> Callable[[str], str]:
    """Return the first normalisation that leaves something of a reference.

    The published scripts leave nothing of "The", "%" and "[1, 2]", so that all of them are equal.
    """
    readings = (normalised, _with_articles, _bare, _verbatim)
    return next((reading for reading in readings if reading(answer)), normalised)


def _tokens_of(text: str, answer: str) -> list[str]:
    """Return the words of a text, read as a reference has to be."""
    return _tokens(_reading(answer)(text))


def _with_articles(text: str) -> str:
    return " ".join("".join(sign for sign in _bare(text) if not _is_mark(sign)).split())


def _bare(text: str) -> str:
    return _verbatim(without_citations(text))


def _verbatim(text: str) -> str:
    # NFKC would make a space and an accent of a lone acute, which is a careless apostrophe.
    plain = unicodedata.normalize("NFKC", text.replace("\u00b4", "'")).lower()
    return " ".join(plain.split())


@lru_cache(maxsize=4096)
def _is_mark(sign: str) -> bool:
    kind = unicodedata.category(sign)
    # Minus and fraction slash are symbols to Unicode, and their ASCII twins are punctuation here.
    return sign in string.punctuation or kind[0] == "P" or kind == "Cf" or sign in "\u2212\u2044"


def _apart(text: str) -> str:
    """Put a space for every mark, but not within a number.

    An article is one here only where it stands free, lest "A-Team" be any team.
    """
    signs = _FREE_ARTICLE.sub(" ", _bare(text))
    around = zip(f" {signs}", signs, f"{signs[1:]} ", strict=False)
    spaced = (
        " " if _is_mark(sign) and not _within(before, sign, after) else sign
        for before, sign, after in around
    )
    return _with_articles("".join(spaced))


def _within(before: str, sign: str, after: str) -> bool:
    return (before.isdigit() and after.isdigit()) or unicodedata.category(sign) == "Cf"


def _tokens(text: str) -> list[str]:
    return _UNSPACED.sub(r" \1 ", text).split()


# ------------------------------------------------------------------ labels

_BENT = (  # words that models bend as the sentence wants
    r"support(?:s|ed|ing)?",
    r"refut(?:e|es|ed|ing)",
    r"contradict(?:s|ed|ing)?",
    r"info(?:rmation)?",
)
_NO = (  # as an answer, not as the first word of "no evidence" within a sentence
    r"(?:(?:(?<=^)|(?<=[.,:;!?(] )|(?<=[.:(])|(?<=answer is ))no(?! one\b| doubt\b)"
    r"|no(?=$| ?[.,:;!?)]))"
)
_A = r"A(?! (?!is\b|was\b|because\b|since\b)[a-z])"  # the letter, not the article
_FILLER = (
    r"(?: (?:an?|the|this|that|it|is|be|been|of|to|by|passages?|evidence|claim|statement|think"
    r"|believe|say|actually|clearly|completely|conclusively|directly|entirely|exactly|explicitly"
    r"|fully|necessarily|quite|really|simply|strictly))"
)
_NEGATED = re.compile(
    r"(?:\b(?:not|never|no|none|neither|nor|cannot|hardly|barely|without)|n't)"
    rf"{_FILLER}{{0,5}} $|[\u4e0d\u6ca1\u672a\u975e] (?:\u662f )?$",
    re.IGNORECASE,
)
_OPEN = re.compile(rf"\b(?:whether|if|half|partly|partially){_FILLER}{{0,5}} $", re.IGNORECASE)
_JOINT = re.compile(rf",? (?:or|and|nor){_FILLER}{{0,3}} | ?/ ?", re.IGNORECASE)


def label_of(text: str, labels: Sequence[str]) -> str | None:
    """Return the label an answer gives, in the spelling of the set; None if it gives none.

    It is the first one named: in whole words, the longest where several begin alike, whatever the
    case, hyphens and the ending of the common verbs ("is supported" gives SUPPORTS). What is not
    asserted is passed over: behind "whether", "if" or "partly", and behind a negation ("is not
    true"), which in a set of two gives the other label. Two labels in one breath ("true or false",
    "neither supports nor refutes") are none.
    """
    plain = _label_form(without_citations(text))
    forms = ((_label_form(label).casefold(), label) for label in reversed(labels))
    spelled = {form: label for form, label in forms if form}
    if (whole := spelled.get(plain.strip(" .!?").casefold())) is not None or not spelled:
        return whole
    naming, order = _naming(tuple(spelled.values()))
    mentions = [(match, order[(match.lastindex or 0) - 1]) for match in naming.finditer(plain)]
    for (match, label), following in zip_longest(mentions, mentions[1:]):
        if following and following[1] != label:
            between = match.end(), following[0].start()
            if _JOINT.fullmatch(plain, *between):
                return None
        before = plain[max(0, match.start() - 99) : match.start()]
        if _NEGATED.search(before):
            others = [other for other in order if other != label]
            if len(others) == 1:
                return others[0]
        elif not _OPEN.search(before):
            return label
    return None


def majority(questions: Sequence[Question]) -> tuple[str, float]:
    """Return the label that is right most often, and its share of the questions.

    It is what a system must beat that reads nothing; ("", 0.0) where there is no label.
    """
    counts: Counter[str] = Counter()
    spelled: dict[str, str] = {}
    for question in questions:
        forms = {_label_form(answer).casefold(): answer for answer in question.answers}
        counts.update(forms.keys())
        for form, answer in forms.items():
            spelled.setdefault(form, answer)
    if not counts:
        return "", 0.0
    [(form, count)] = counts.most_common(1)
    return spelled[form], count / len(questions)


def _label_given(question: Question, text: str, *, abstained: bool) -> str | None:
    if question.kind != "label":
        return None
    labels = (*question.labels, *question.answers)
    if not abstained:
        return label_of(text, labels)
    spelled = ((label, re.sub(r"(?i)\binfo\b", "information", label)) for label in labels)
    return next((label for label, form in spelled if is_abstention(_label_form(form))), None)


def _accepted(label: str | None, answers: Sequence[str]) -> bool:
    if label is None:
        return False
    return _label_form(label).casefold() in {_label_form(answer).casefold() for answer in answers}


def _label_form(text: str) -> str:
    """Return a text on one line, without quotes and emphasis, in which hyphens are spaces."""
    plain = unicodedata.normalize("NFKC", text).replace("\u2019", "'")
    plain = re.sub(r"[\"*`\u201c\u201d]|(?<!\w)'|'(?!\w)", "", plain)
    plain = re.sub(r"(?<=\w)[-_\u2010\u2011](?=\w)", " ", plain)
    return " ".join(_UNSPACED.sub(r" \1 ", re.sub(r"\s*\n", ". ", plain.strip())).split())


@lru_cache(maxsize=64)
def _naming(labels: tuple[str, ...]) -> tuple[re.Pattern[str], tuple[str, ...]]:
    """Return what finds labels, a group for each, and the labels in the order of the groups."""
    order = tuple(sorted(labels, key=len, reverse=True))
    groups = "|".join(f"({_named(_label_form(label))})" for label in order)
    return re.compile(rf"(?<!\w)(?:{groups})(?!\w)", re.IGNORECASE), order


def _named(label: str) -> str:
    if label.casefold() == "no":
        return _NO
    if len(label) == 1 and not _UNSPACED.match(label):
        return f"(?-i:{_A if label == 'A' else re.escape(label)})"
    return " ".join(_bent(word) for word in label.split())


def _bent(word: str) -> str:
    forms = (form for form in _BENT if re.fullmatch(form, word, re.IGNORECASE))
    return next(forms, re.escape(word))


# ------------------------------------------------------------------ citations


def _citation_precision(
    question: Question, passages: Sequence[Passage], citations: Sequence[int]
) -> float | None:
    gold = question.gold
    if gold is None or not citations:
        return None
    cited = [passages[n - 1].id if 1 <= n <= len(passages) else None for n in citations]
    return sum(name in gold for name in cited) / len(cited)
