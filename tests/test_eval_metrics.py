"""What an answer is worth against the reference, as the field's own scripts judge it."""

from __future__ import annotations

import string

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specrag_integrations.citations import is_abstention, without_citations
from specrag_integrations.evaluation.metrics import (
    contains,
    exact_match,
    grade,
    label_of,
    majority,
    normalised,
    token_f1,
)
from specrag_integrations.evaluation.questions import Question
from specrag_integrations.passages import Passage

FEVER = ("SUPPORTS", "REFUTES", "NOT ENOUGH INFO")
PUBHEALTH = ("true", "false", "mixture", "unproven")

unhurried = settings(deadline=None)  # the machine may be busy
WORDS = "the a an The A Paris paris. yes Yes. No noanswer U.S. well-known 1,000 's an- % - 42"
words = st.lists(st.sampled_from(WORDS.split()), max_size=6).map(" ".join)


def asked(*answers, **fields):
    """Return a question with a reference."""
    return Question(**{"id": "1", "dataset": "d", "question": "?", "answers": answers, **fields})


def claim(label, labels=("SUPPORTS", "REFUTES"), **fields):
    """Return a claim of a set of labels."""
    return asked(label, kind="label", labels=labels, **fields)


# What SQuAD's and HotpotQA's scripts do, in the words of their papers: an independent reading.


def squad_words(text):
    """Lower the case, delete ASCII punctuation, then drop articles, then split at white space."""
    kept = "".join("" if sign in string.punctuation else sign for sign in text.lower())
    return [word for word in kept.split() if word not in {"a", "an", "the"}]


def hotpot_f1(prediction, truth):
    """Harmonic mean of precision and recall of the bag of words; yes and no are all or nothing."""
    ours, theirs = squad_words(prediction), squad_words(truth)
    for side in (ours, theirs):
        if len(side) == 1 and side[0] in {"yes", "no", "noanswer"} and ours != theirs:
            return 0.0
    left, shared = list(theirs), 0
    for word in ours:
        if word in left:
            left.remove(word)
            shared += 1
    if not shared:
        return 0.0
    precision, recall = shared / len(ours), shared / len(theirs)
    return 2 * precision * recall / (precision + recall)


# ---------------------------------------------------------------- SQuAD and HotpotQA


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Denver Broncos", "denver broncos"),
        ("  Santa   Clara,\tCalifornia.\n", "santa clara california"),
        ("an apple a day", "apple day"),
        ("Levi's Stadium", "levis stadium"),
        ("10-13%", "1013"),
        ("$1.2 billion", "12 billion"),
        ("Theatre, another, Aan", "theatre another aan"),
        ("THE THE", ""),
        ("snake_case (sic)", "snakecase sic"),
    ],
)
def test_normalisation_is_squads(text, expected):
    """Case, punctuation without a space in its place, articles, white space: in that order."""
    assert normalised(text) == expected


@unhurried
@given(st.text(st.sampled_from(string.printable.replace("[", ""))) | words)
@example("a.b the-a A")
def test_on_ascii_normalisation_is_squads_to_the_letter(text):
    """But for citations, which their answers have none of."""
    assert normalised(text).split() == squad_words(text)


@pytest.mark.parametrize(
    ("text", "answer", "exact", "f1"),
    [
        ("Denver Broncos", "The Denver Broncos", True, 1.0),
        ("the Chief of Protocol.", "Chief of Protocol", True, 1.0),
        ("Denver Broncos won", "Denver Broncos", False, 0.8),
        ("Broncos", "the Denver Broncos", False, 2 / 3),
        ("in Paris in France", "in Paris", False, 2 / 3),
        ("Carolina Panthers", "Denver Broncos", False, 0.0),
        ("yes", "yes", True, 1.0),
        ("Yes.", "yes", True, 1.0),
        ("no", "yes", False, 0.0),
        ("Yes, both were directors", "yes", False, 0.0),
        ("yes", "yes and no", False, 0.0),
        ("noanswer", "noanswer at all", False, 0.0),
        ("", "Denver", False, 0.0),
    ],
)
def test_exact_match_and_f1_are_hotpotqas(text, answer, exact, f1):
    """Worked by hand; yes and no share no words with what is not the same."""
    assert exact_match(text, [answer]) is exact
    assert token_f1(text, [answer]) == pytest.approx(f1)


@unhurried
@given(words, words.filter(squad_words))
def test_f1_is_that_of_another_implementation(text, answer):
    """Whatever the words."""
    assert token_f1(text, [answer]) == pytest.approx(hotpot_f1(text, answer))
    assert exact_match(text, [answer]) == (squad_words(text) == squad_words(answer))


@unhurried
@given(words, st.lists(words, min_size=1, max_size=4))
def test_the_best_of_the_accepted_answers_counts(text, answers):
    """A second spelling can only help."""
    assert token_f1(text, answers) == max(token_f1(text, [answer]) for answer in answers)
    assert exact_match(text, answers) == any(exact_match(text, [answer]) for answer in answers)
    assert contains(text, answers) == any(contains(text, [answer]) for answer in answers)


@unhurried
@given(st.text(max_size=30), st.text(max_size=30))
def test_the_measures_go_with_each_other(text, answer):
    """What is the same has F1 1, and what holds nothing has no exact match."""
    if exact_match(text, [answer]) and answer.strip():
        assert token_f1(text, [answer]) == 1.0
    assert 0.0 <= token_f1(text, [answer]) <= 1.0


def test_without_accepted_answers_nothing_is_shared():
    """A question that cannot be answered has no best answer."""
    assert token_f1("Paris", []) == 0.0
    assert not contains("Paris", [])
    assert not exact_match("Paris", [])


# ---------------------------------------------------------------- beyond ASCII


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Mission: Impossible - Fallout", "Mission: Impossible \u2013 Fallout"),
        ("UTC-09:00", "UTC\u221209:00"),
        ("March 11", "March\u00a011"),
        ("Hydrogen", "Hydro\u00adgen"),
        ("\u201cO\u2019Brien\u201d", "O'Brien"),
        ("O\u00b4Brien", "O'Brien"),
        ("Cafe\u0301", "Caf\u00e9"),
        ("\ufb01sh", "fish"),
        ("\uff15", "5"),
        ("1/2", "\u00bd"),
        ("\u6771\u4eac\u3002", "\u6771\u4eac"),
        (
            "\u0422\u0430\u0442\u0430\u0440\u043b\u0430\u0440",
            "\u0442\u0430\u0442\u0430\u0440\u043b\u0430\u0440",
        ),
    ],
)
def test_typography_makes_no_difference(text, answer):
    """Dashes, curly quotes, spaces, ligatures and composed letters are as on a keyboard."""
    assert exact_match(text, [answer])
    assert exact_match(answer, [text])
    assert token_f1(text, [answer]) == 1.0


def test_accents_make_a_difference():
    """As in the published scripts."""
    assert not exact_match("Najera", ["N\u00e1jera"])


def test_in_scripts_without_spaces_a_character_is_a_word():
    """As MLQA counts Chinese: three of the four characters are shared."""
    assert token_f1("\u6771\u4eac\u90fd", ["\u6771\u4eac\u90fd\u5e81"]) == pytest.approx(6 / 7)


# ---------------------------------------------------------------- references of nothing


@pytest.mark.parametrize("answer", ["The", "A", "%", "-", "[1, 2]", "+"])
def test_a_reference_that_normalises_to_nothing_is_still_compared(answer):
    """Otherwise all such would be one, and any answer without words would match them."""
    assert exact_match(answer, [answer])
    assert contains(answer, [answer])
    assert token_f1(answer, [answer]) == 1.0
    for other in ({"The", "A", "%", "-", "[1, 2]", "+", "cat", ""}) - {answer}:
        assert not exact_match(other, [answer])
        assert not contains(other, [answer])
        assert token_f1(other, [answer]) == 0.0


@pytest.mark.parametrize(
    ("text", "answer", "held"),
    [
        ("The band is The The", "The", True),
        ("It is the sign (%)", "%", True),
        ("5%", "%", False),
        ("well-known", "-", False),
        ("", "", False),
        ("cat", "", False),
        ("cat", "  ", False),
    ],
)
def test_a_reference_of_signs_must_stand_alone(text, answer, held):
    """And a reference of nothing at all is held by nothing."""
    assert contains(text, [answer]) is held


# ---------------------------------------------------------------- containment


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It was Ada Lund who built it.", "Ada Lund"),
        ("Lund, the engineer [2]", "The engineer"),
        ("a Paris-based firm", "Paris"),
        ("Ada Lund's bridge", "Ada Lund"),
        ("Ada Lund\u2019s bridge", "Ada Lund"),
        ("London\u2014the capital", "London"),
        ("a singer-songwriter", "singer songwriter"),
        ("The Wall", '"The Wall"'),
        ("the 2013-14 season", "2013\u201314"),
        ("over 1,000 men", "1000"),
        ("the U.S.-based firm", "U.S."),
        ("The A-Team", "A-Team"),
        ("\u9996\u90fd\u306f\u6771\u4eac\u3067\u3059\u3002", "\u6771\u4eac"),
        ("15\u6708", "15"),
        ("\uc11c\uc6b8\uc740 \uc218\ub3c4", "\uc11c\uc6b8"),
    ],
)
def test_an_answer_holds_a_reference(text, answer):
    """In whole words, with punctuation for a space."""
    assert contains(text, [answer])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("the party", "art"),
        ("Lund Ada", "Ada Lund"),
        ("3-4", "4"),
        ("2013-14", "2013"),
        ("1,000", "1"),
        ("3.5", "5"),
        ("10:30", "10"),
        ("the team", "A-Team"),
        ("the cat", "a-1"),
        ("1", "a-1"),
        ("", "a-a"),
        ("15\u6708", "5\u6708"),
        ("", "Paris"),
    ],
)
def test_a_part_of_a_word_is_not_held(text, answer):
    """Nor a part of a number, nor the words in another order."""
    assert not contains(text, [answer])


@unhurried
@given(words, words.filter(squad_words), words)
def test_what_is_written_around_a_reference_does_not_matter(before, answer, behind):
    """But for yes and no, which are what a text says and not what it mentions."""
    if squad_words(answer) not in (["yes"], ["no"]):
        assert contains(f"{before} {answer} {behind}", [answer])


@unhurried
@given(words, words.filter(squad_words))
def test_what_is_not_in_the_text_is_not_held(text, answer):
    """Containment by words implies containment by characters."""
    if contains(text, [answer]):
        squeezed = ["".join(squad_words(side)) for side in (text, answer)]
        assert squeezed[1] in squeezed[0]


@pytest.mark.parametrize(
    ("text", "answer", "held"),
    [
        ("No.", "no", True),
        ("No, they were not", "no", True),
        ("Yes, there is no doubt", "yes", True),
        ("Yes, there is no doubt", "no", False),
        ("There is no evidence of it", "no", False),
        ("No one knows", "no", False),
        ("The answer is no", "no", True),
        ("The Noh theatre", "no", False),
    ],
)
def test_yes_and_no_must_be_what_the_answer_says(text, answer, held):
    """The word alone stands in many an answer."""
    assert contains(text, [answer]) is held


# ---------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("text", "labels", "label"),
    [
        ("SUPPORTS", FEVER, "SUPPORTS"),
        ("refutes.", FEVER, "REFUTES"),
        ("**REFUTES** [1]", FEVER, "REFUTES"),
        ("Answer: Refuted", FEVER, "REFUTES"),
        ("The passages support the claim", FEVER, "SUPPORTS"),
        ("not enough info", FEVER, "NOT ENOUGH INFO"),
        ("NOT_ENOUGH_INFO", FEVER, "NOT ENOUGH INFO"),
        ("There is not enough information.", FEVER, "NOT ENOUGH INFO"),
        ("Supported, not refuted", FEVER, "SUPPORTS"),
        ("contradicts", ("SUPPORT", "CONTRADICT"), "CONTRADICT"),
        ("This is true.", PUBHEALTH, "true"),
        ("mostly true", PUBHEALTH, "true"),
        ("False. That it is true was never shown.", PUBHEALTH, "false"),
        ("half-true", ("true", "half-true"), "half-true"),
        ("It is \u201cHalf True\u201d", ("true", "half-true"), "half-true"),
        ("'not supported'", ("supported", "not supported"), "not supported"),
        ("not supported at all", ("supported", "not supported"), "not supported"),
        ("Yes, there is no doubt", ("yes", "no"), "yes"),
        ("No they are not", ("yes", "no"), "no"),
        ("I read them all.\nNo", ("yes", "no"), "no"),
        ("The answer is no because of that", ("Yes", "No"), "No"),
        ("The claim that Paris is not in Spain is true.", ("true", "false"), "true"),
        ("B", ("A", "B"), "B"),
        ("(A) cat", ("A", "B"), "A"),
        ("A is correct", ("A", "B"), "A"),
        ("A good reason is B", ("A", "B"), "B"),
        ("a", ("A", "B"), "A"),
        (
            "\u8fd9\u4e2a\u8bf4\u6cd5\u662f\u6b63\u786e\u7684",
            ("\u6b63\u786e", "\u9519\u8bef"),
            "\u6b63\u786e",
        ),
    ],
)
def test_the_label_an_answer_names(text, labels, label):
    """The first one, in whole words, the longest where several begin alike."""
    assert label_of(text, labels) == label


@pytest.mark.parametrize(
    ("text", "labels", "label"),
    [
        ("This claim is not true", ("true", "false"), "false"),
        ("It isn\u2019t really true", ("true", "false"), "false"),
        ("I do not think that this claim is true", ("true", "false"), "false"),
        ("not supported", ("SUPPORTS", "REFUTES"), "REFUTES"),
        ("No evidence supports the claim", ("SUPPORTS", "REFUTES"), "REFUTES"),
        ("None of the passages support it", ("SUPPORTS", "REFUTES"), "REFUTES"),
        ("is not clearly supported", ("supported", "not supported"), "not supported"),
        ("\u662f\u4e0d\u6b63\u786e\u7684", ("\u6b63\u786e", "\u9519\u8bef"), "\u9519\u8bef"),
        ("This claim is not true", PUBHEALTH, None),
        ("not supported", FEVER, None),
        ("This is not true; it is false.", PUBHEALTH, "false"),
    ],
)
def test_what_is_not_the_one_label_of_two_is_the_other(text, labels, label):
    """Of three, nobody knows which; what is named next may tell."""
    assert label_of(text, labels) == label


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("true or false", ("true", "false")),
        ("True/False", ("true", "false")),
        ("neither true nor false", ("true", "false")),
        ("The passages do not support or refute it", ("SUPPORTS", "REFUTES")),
        ("I cannot say whether the claim is true", PUBHEALTH),
        ("It is partly true", PUBHEALTH),
        ("untrue", ("true", "false")),
        ("There is no evidence", ("yes", "no")),
        ("A cat", ("A", "B")),
        ("Paris", FEVER),
        ("", FEVER),
        ("Paris", ()),
        ("Paris", ("", '"')),
    ],
)
def test_an_answer_without_a_label(text, labels):
    """Named in one breath with another, left open, inside a word, or not at all."""
    assert label_of(text, labels) is None


@unhurried
@given(st.sampled_from(FEVER + PUBHEALTH), st.sampled_from(["{}", " {}.", '"{}"', "**{}** [3]"]))
def test_a_label_alone_is_given_whatever_its_case(label, form):
    """In the spelling of the set."""
    labels = FEVER + PUBHEALTH
    for spelled in (label, label.lower(), label.upper(), label.title(), label.replace(" ", "-")):
        assert label_of(form.format(spelled), labels) == label


@unhurried
@given(st.text(max_size=40), st.lists(st.text(max_size=6), max_size=4))
def test_any_text_and_any_labels_can_be_read(text, labels):
    """What comes is a label of the set or none."""
    assert label_of(text, labels) in {*labels, None}


# ---------------------------------------------------------------- grades


def test_a_short_answer_is_right_if_it_holds_the_reference():
    """Exact match and F1 tell how much it says besides."""
    grades = grade(asked("Ada Lund", "Lund"), "It was Ada Lund [2]")

    assert (grades.right, grades.contained, grades.exact) == (True, True, False)
    assert grades.f1 == pytest.approx(2 * 2 / (4 + 2))
    assert grades.words == 4
    assert grades.label is None


def test_a_labelled_claim_is_right_by_its_label():
    """Not by the word, which may stand behind a "not"."""
    assert grade(claim("SUPPORTS"), "supported").right is True
    refuted = grade(claim("true", ("true", "false")), "This is not true")

    assert (refuted.right, refuted.contained, refuted.label) == (False, True, "false")
    assert grade(claim("True", ("true", "false")), "true").right is True
    assert grade(claim("SUPPORTS"), "Paris").right is False


def test_the_label_of_a_claim_counts_where_its_set_has_no_list():
    """The accepted answers are labels in any case."""
    assert grade(claim("half-true", labels=()), "Half true.").right is True


def test_a_long_answer_is_not_judged_by_rule():
    """Its F1 is there, for what it is worth."""
    grades = grade(asked("They are made of rope.", kind="long"), "Made of rope")

    assert grades.right is None
    assert grades.f1 == pytest.approx(2 * 3 / (3 + 5))
    assert grade(asked("Rope.", kind="long"), "unknown", abstained=True).right is None


@pytest.mark.parametrize("kind", ["short", "label", "long"])
def test_an_abstention_is_right_where_there_is_nothing_to_answer_with(kind):
    """And an answer is wrong there, whatever it says."""
    abstained = grade(asked(kind=kind), "unknown", abstained=True)
    answered = grade(asked(kind=kind), "Paris")

    assert (abstained.right, abstained.exact, abstained.f1) == (True, True, 1.0)
    assert (answered.right, answered.contained, answered.f1) == (False, False, 0.0)


def test_an_abstention_is_wrong_where_there_is_an_answer():
    """Also if its explanation holds the reference."""
    text = "unknown: the passages mention Paris only"
    grades = grade(asked("Paris"), text, abstained=True)

    assert (grades.right, grades.contained, grades.exact, grades.f1) == (False, False, False, 0.0)
    assert grade(claim("SUPPORTS"), "not stated", abstained=True).right is False
    assert grade(claim("SUPPORTS"), "not stated", abstained=True).label is None


@pytest.mark.parametrize("text", ["unknown", "There is not enough information"])
def test_an_abstention_gives_the_label_that_says_the_same(text):
    """In FEVER, whoever does not know has answered."""
    assert is_abstention(text)
    right = grade(claim("NOT ENOUGH INFO", FEVER), text, abstained=True)
    wrong = grade(claim("SUPPORTS", FEVER), text, abstained=True)

    assert (right.label, right.right, right.contained) == ("NOT ENOUGH INFO", True, True)
    assert (wrong.label, wrong.right, wrong.contained) == ("NOT ENOUGH INFO", False, False)


def test_citation_precision_is_the_share_of_gold_among_the_cited():
    """A number that counts no passage is not gold, nor is a passage without an id."""
    passages = [Passage(text="a", id="p1"), Passage(text="b", id="p2"), Passage(text="c")]
    question = asked("x", gold=frozenset({"p2"}))

    def precision(*citations, asking=question):
        return grade(asking, "x", passages=passages, citations=citations).citation_precision

    assert precision(2) == 1.0
    assert precision(1, 2) == 0.5
    assert precision(2, 3, 4, 0) == 0.25
    assert precision(1) == 0.0
    assert precision() is None
    assert precision(1, asking=asked("x")) is None
    assert precision(1, asking=asked("x", gold=frozenset())) == 0.0


def test_the_majority_is_the_label_that_is_right_most_often():
    """Whatever its case, and where several are accepted, each counts."""
    questions = [claim("true"), claim("True"), claim("false"), asked("mixture", "false")]

    assert majority([*questions, claim("TRUE")]) == ("true", 0.6)
    assert majority([]) == ("", 0.0)
    assert majority([asked()]) == ("", 0.0)


def test_every_reference_of_the_question_sets_is_right_as_an_answer(data_dir):
    """No reference of theirs is lost to normalisation."""
    from specrag_integrations.documents import read_rows

    for path in sorted(data_dir.glob("*.jsonl")):
        for row in read_rows(path):
            for answer in row.answers:
                assert exact_match(answer, [answer]), (path.name, answer)
                assert contains(f"It is {answer}", [answer]) or normalised(answer) in {"yes", "no"}
                assert without_citations(answer).strip(), (path.name, answer)
