"""What an answer says of the passages it rests on, and whether it is an answer at all."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag_integrations.citations import (
    cited_numbers,
    is_abstention,
    normal_answer,
    without_citations,
    without_dead_citations,
)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("Paris [1]", (1,)),
        ("Paris[2].", (2,)),
        ("Paris [1, 2]", (1, 2)),
        ("Paris [1; 3]", (1, 3)),
        ("Paris [1-3]", (1, 2, 3)),
        ("Paris [1\u20133]", (1, 2, 3)),
        ("Paris [1][3]", (1, 3)),
        ("[3] says so, and [1], and [3]", (3, 1)),
        ("Paris [ 2 ]", (2,)),
        ("Paris [Passage 2]", (2,)),
        ("Paris \u30102\u3011", (2,)),
        ("Paris [4]", ()),
        ("Paris [0]", ()),
        ("Paris [2, 9]", (2,)),
        ("Paris [2-40]", (2, 3)),
        ("in [1998]", ()),
        ("[1990-1995]", ()),
        ("[a], [1.5], [], [x1], (1), 1", ()),
    ],
)
def test_the_numbers_cited_are_those_of_passages_that_exist(text, numbers):
    """Each counts once, in order of appearance; a year in brackets is no citation."""
    assert cited_numbers(text, 3) == numbers


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Paris [1].", "Paris [1]."),
        ("Paris [1, 2]", "Paris [1, 2]"),
        ("Paris [1-2]", "Paris [1-2]"),
        ("Paris [9].", "Paris."),
        ("Paris [9], Rome [1]", "Paris, Rome [1]"),
        ("Paris [1, 9]", "Paris [1]"),
        ("Paris [2-9]", "Paris [2]"),
        ("Paris [1][9]", "Paris [1]"),
        ("[9] Paris", "Paris"),
        ("[0]", ""),
        ("in [1998]", "in [1998]"),
        ("[1990-1995]", "[1990-1995]"),
    ],
)
def test_citations_of_passages_that_do_not_exist_are_removed(text, kept):
    """Nobody can follow them; those that remain keep their numbers."""
    assert without_dead_citations(text, 2) == kept


@given(st.text(alphabet="ab [],;-\u2013129", max_size=40), st.integers(1, 20))
def test_what_remains_cites_the_same_living_passages(text, passages):
    """Removing the dead changes nothing about the living, and leaves no dead."""
    kept = without_dead_citations(text, passages)

    assert set(cited_numbers(kept, passages)) == set(cited_numbers(text, passages))
    assert without_dead_citations(kept, passages) == kept


@pytest.mark.parametrize("unit", [" ", "\n", "[", "[1,", "[1, ", "*", "1", "not ", "[1]", "the "])
def test_no_text_takes_long(unit):
    """Ten thousand characters of repetition are read in no time."""
    text = unit * (10_000 // len(unit))
    started = time.process_time()

    for odd in (text, f"Paris{text}x"):
        cited_numbers(odd, 3)
        without_dead_citations(odd, 3)
        is_abstention(odd)
        normal_answer(odd)

    assert time.process_time() - started < 1


ABSTENTIONS = """
unknown
Unknown.
UNKNOWN
unknown [1]
"unknown"
**unknown**
The answer is unknown.
The answer is: "unknown"
Answer unknown
It is unknown.
It is not known who wrote it.
unknown (the passages do not tell)
Unknown, the passages do not say
unknown; only Rome is mentioned
Unknown - nothing is said of it
unknown per passage [1]
Not stated in the passages.
not mentioned
This is not mentioned in the provided context.
The answer is not in the passages
The answer is not given.
Not specified
not found
N/A
n/a
Unanswerable
no answer
No answer found.
No information is given.
No relevant information found
not enough information
Insufficient evidence.
There is no information about the year.
There is not enough information to answer.
The passages do not tell.
The passages don't say who.
The passages do not mention Paris.
The provided passages do not say
The passage does not state the year
Passage 1 does not tell.
None of the passages mention it.
No passage says so.
Based on the passages, it cannot be determined.
According to the given context, the answer is unknown.
It cannot be determined from the passages
The question cannot be answered.
Unable to determine
I don't know
I don\u2019t know.
I do not know who won.
I cannot answer the question.
I'm sorry, but the passages do not say.
Unfortunately, the text does not mention it.
"""

ANSWERS = """
Unknown Pleasures
unknown pleasures
Unknown Mortal Orchestra
Unknown Soldier
the unknown soldier
The Unknown
an unknown author
unknown to science until 1938
unknowns
Known Unknowns
Not Fade Away
Not Afraid
Not guilty
Not known for speed
not mentioned by name
Not Given Up
not given to anger
Not so
None
None of them
Nobody
No
No, he did not
No, the passages do not say that he died.
no one knows
No One Knows
No Country for Old Men
No answer was given by Nixon
no information theory
Nothing
Zero
Na
NA
N/A Records
nay
I Don't Know Why
I Know
Insufficient information gain
The passages tell of Paris
The passage says 1912
The document did not exist
The context does not matter
Information Society
Yes
-5
"""


@pytest.mark.parametrize("answer", ABSTENTIONS.strip().splitlines())
def test_an_answer_that_says_it_cannot_tell_is_an_abstention(answer):
    """Models say so in many words; such a draft must not win."""
    assert is_abstention(answer)


@pytest.mark.parametrize("answer", ANSWERS.strip().splitlines())
def test_an_answer_that_only_begins_like_one_is_none(answer):
    """Names, denials and zeros are answers, and sodium is Na."""
    assert not is_abstention(answer)


def test_an_explanation_may_follow_in_another_paragraph():
    """Only the beginning counts."""
    assert is_abstention("unknown\n\nThe passages are about Rome.")
    assert not is_abstention("Paris. The year is unknown.")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Paris", "paris."),
        ("The Beatles", "Beatles"),
        ("a lighthouse", "lighthouse"),
        ("Paris [1]", "Paris [2, 3]"),
        ("**Paris**", "Paris"),
        ("U.S.", "US"),
        ("St. Mary's", "St Mary\u2019s"),
        ("1,000", "1000"),
        ("1914\u20131918", "1914-1918"),
        ("\uff30aris", "Paris"),
        (">50 %", "50%"),
        ("B-52", "b 52"),
        ('"Emma"', "Emma"),
        ("snake_case", "snake case"),
    ],
)
def test_equal_answers_are_equal(one, other):
    """Case, articles, punctuation, width and citations do not make another answer."""
    assert normal_answer(one) == normal_answer(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("C", "C#"),
        ("C#", "C++"),
        ("C", "C++"),
        ("5", "-5"),
        ("+5", "-5"),
        ("3.5", "35"),
        ("0.5", "5"),
        ("Vitamin A", "Vitamin"),
        ("A", "B"),
        ("1,5", "15"),
        ("*", "?"),
        ("Paris", "Rome"),
    ],
)
def test_different_answers_stay_different(one, other):
    """A sign, a point or a lone letter can be all there is to an answer."""
    assert normal_answer(one) != normal_answer(other)


@given(st.text(min_size=1, max_size=30).filter(str.strip))
def test_every_answer_has_a_form_and_it_is_stable(answer):
    """The form of a form is itself, and never empty."""
    assert normal_answer(answer)
    assert normal_answer(normal_answer(answer)) == normal_answer(answer)


def test_all_citations_can_be_removed():
    """For comparing and counting what is left."""
    assert without_citations("Paris [1], Rome [2-3].") == "Paris, Rome."
