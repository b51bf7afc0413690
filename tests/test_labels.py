"""How much probability a model gave Yes, No or a letter, whatever it wrote."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag_integrations.labels import first_word, is_thinking, read_labels
from specrag_integrations.models import ChatReply, Token


def judged(text, shares):
    """Return a token with alternatives of these probabilities."""
    logs = {word: math.log(share) for word, share in shares.items()}
    return Token(
        text=text,
        data=text.encode(),
        logprob=logs.get(text, -20.0),
        alternatives=tuple(logs.items()),
    )


def share(text, shares, label="Yes", labels=("Yes", "No")):
    """Return P(label) among the labels."""
    return math.exp(read_labels(judged(text, shares), labels).log_share(label))


def tokens(*texts):
    """Return written tokens, of which only the text matters."""
    return tuple(Token(text=text, data=text.encode(), logprob=-1.0) for text in texts)


def word(written, **fields):
    """Return the first word of a reply of these tokens, its text as a server without parser."""
    text = "".join(token.text for token in written)
    return first_word(ChatReply(**{"text": text, "tokens": written, **fields}))


# ---------------------------------------------------------------- Yes and No


def test_p_yes_is_the_share_of_yes_among_both_labels():
    """A verifier that puts half its mass elsewhere does not doubt the draft."""
    labels = read_labels(judged("Maybe", {"Yes": 0.3, "No": 0.1, "Maybe": 0.6}))

    assert math.exp(labels.log_share("Yes")) == pytest.approx(0.75)
    assert math.exp(labels.log_share("No")) == pytest.approx(0.25)
    assert labels.mass == pytest.approx(0.4)


def test_the_probabilities_themselves_are_kept():
    """The paper multiplies by P(Yes) itself, not by its share."""
    labels = read_labels(judged("Maybe", {"Yes": 0.2, " yes": 0.1, "No": 0.1, "Maybe": 0.6}))

    assert math.exp(labels.logprobs["Yes"]) == pytest.approx(0.3)
    assert math.exp(labels.logprobs["No"]) == pytest.approx(0.1)


def test_all_spellings_are_summed():
    """No single spelling holds the probability of the label."""
    spellings = {"Yes": 0.2, " yes": 0.1, "YES": 0.1, "\u2581Yes": 0.1, "\u0120Yes": 0.05}
    spellings |= {"Yes.": 0.05, "**Yes": 0.05, '"Yes"': 0.03, "yes\n": 0.03, "(yes)": 0.02}
    spellings |= {"[Yes]": 0.02, " no": 0.1, "No": 0.15}

    assert share("Yes", spellings) == pytest.approx(0.75)


def test_the_order_of_the_alternatives_does_not_matter():
    """Neither the first spelling nor the written token is preferred."""
    shares = {" yes": 0.1, "Yes": 0.5, "No": 0.4}
    turned = dict(reversed(shares.items()))

    assert share("No", shares) == share("Yes", turned) == pytest.approx(0.6)


@pytest.mark.parametrize("word", ["eyes", "Yesterday", "yess", "Ye", "know", "Nope", "None", "Not"])
def test_words_that_hold_a_label_are_none(word):
    """A verdict by substring would count them."""
    labels = read_labels(judged("Yes", {"Yes": 0.2, "No": 0.2, word: 0.6}))

    assert math.exp(labels.log_share("Yes")) == pytest.approx(0.5)
    assert labels.mass == pytest.approx(0.4)


def test_a_label_that_is_not_listed_is_bounded_by_the_smallest_that_is():
    """It is at most that likely; log 0 would outweigh everything, and a half would be a lie."""
    assert share("Yes", {"Yes": 0.8, "Maybe": 0.15, "So": 0.05}) == pytest.approx(0.8 / 0.85)
    assert share("No", {"No": 0.8, "Maybe": 0.15, "So": 0.05}) == pytest.approx(0.05 / 0.85)


def test_the_bound_adds_nothing_to_the_mass():
    """Mass is what was listed."""
    labels = read_labels(judged("No", {"No": 0.8, "Maybe": 0.15, "So": 0.05}))

    assert labels.mass == pytest.approx(0.8)
    assert math.exp(labels.logprobs["Yes"]) == pytest.approx(0.05)


def test_neither_label_is_no_verdict():
    """Not 0, and not 0.5."""
    labels = read_labels(judged("Paris", {"Paris": 0.9, "Rome": 0.1}))

    assert labels.logprobs == {}
    assert labels.log_share("Yes") is None
    assert labels.mass == 0.0


@pytest.mark.parametrize("listed", [{}, {"Yes": 0.9}])
def test_without_alternatives_nothing_can_be_read(listed):
    """The written token alone says nothing of the other label."""
    assert read_labels(judged("Yes", listed)) is None


def test_the_written_token_counts_once_whether_it_is_listed_or_not():
    """Some servers leave it out of the alternatives, others list it twice."""
    yes, no = math.log(0.6), math.log(0.2)
    without = Token(text="Yes", data=b"Yes", logprob=yes, alternatives=(("No", no),))
    twice = Token(
        text="Yes", data=b"Yes", logprob=yes, alternatives=(("Yes", yes), ("No", no), ("Yes", yes))
    )

    for one in (without, twice):
        assert math.exp(read_labels(one).log_share("Yes")) == pytest.approx(0.75)


def test_the_written_token_counts_once_although_its_number_is_rounded_elsewhere():
    """Two arrays of one reply need not agree in the last digit."""
    listed = (("Yes", -0.5108), ("No", math.log(0.2)))
    odd = Token(text="Yes", data=b"Yes", logprob=math.log(0.6), alternatives=listed)

    assert math.exp(read_labels(odd).log_share("Yes")) == pytest.approx(0.75, abs=1e-4)


def test_equal_texts_of_different_tokens_are_summed():
    """Some tokenisers have one with a space that does not show."""
    listed = (("Yes", math.log(0.4)), ("Yes", math.log(0.2)), ("No", math.log(0.2)))
    two = Token(text="Yes", data=b"Yes", logprob=math.log(0.4), alternatives=listed)

    assert math.exp(read_labels(two).log_share("Yes")) == pytest.approx(0.75)


@pytest.mark.parametrize("never", [-9999.0, -math.inf, -800.0])
def test_never_is_a_small_number_and_no_crash(never):
    """Servers write -9999 or -inf; the logarithm of their exponential does not exist."""
    low = Token(text="No", data=b"No", logprob=-0.1, alternatives=(("Yes", never), ("No", -0.1)))
    labels = read_labels(low)

    assert math.isfinite(labels.log_share("Yes"))
    assert labels.log_share("Yes") <= -99


def test_nan_is_left_out():
    """It says nothing, and would make everything it is added to say nothing."""
    odd = Token(
        text="Yes",
        data=b"Yes",
        logprob=math.log(0.6),
        alternatives=(("YES", math.nan), ("No", math.log(0.2))),
    )

    assert math.exp(read_labels(odd).log_share("Yes")) == pytest.approx(0.75)


WORDS = st.sampled_from(["Yes", " yes", "YES.", "No", " no", "eyes", "Maybe", "the"])


@given(st.dictionaries(WORDS, st.floats(-200, 0), min_size=2))
def test_a_share_is_always_a_probability(logs):
    """Whatever a server returns: never NaN, never above 1, never log 0."""
    text, value = next(iter(logs.items()))
    labels = read_labels(
        Token(text=text, data=text.encode(), logprob=value, alternatives=tuple(logs.items()))
    )

    assert 0.0 <= labels.mass <= 1.0
    if (share := labels.log_share("Yes")) is not None:
        assert math.isfinite(share)
        assert share <= 0.0


# ---------------------------------------------------------------- letters


def test_letters_are_labels_like_any_other():
    """Their shares are of one another, and add up to 1."""
    shares = {"A": 0.1, " B": 0.2, "(b)": 0.1, "c.": 0.1, "The": 0.5}
    found = [share("The", shares, letter, ("A", "B", "C")) for letter in "ABC"]

    assert found == pytest.approx([0.2, 0.6, 0.2])
    assert sum(found) == pytest.approx(1.0)


def test_a_letter_that_is_not_offered_counts_for_nobody():
    """Nor does it count for the whole: the shares are of what was offered."""
    labels = read_labels(judged("A", {"A": 0.3, "B": 0.1, "C": 0.6}), ("A", "B"))

    assert math.exp(labels.log_share("A")) == pytest.approx(0.75)
    assert labels.mass == pytest.approx(0.4)


# ---------------------------------------------------------------- which word


MARKS = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
]


@pytest.mark.parametrize(("begins", "ends"), MARKS)
def test_the_word_behind_a_thinking_block_counts(begins, ends):
    """What a model thinks aloud is no verdict, by whatever marks it is told apart."""
    written = tokens(begins, "\n", "Yes", ", maybe No", ends, "\n\n", "No", ".")

    assert word(written) is written[6]


@pytest.mark.parametrize(("begins", "ends"), MARKS)
def test_the_marks_may_be_spread_over_several_tokens(begins, ends):
    """No tokeniser has to know them."""
    pieces = [*begins, "Yes", *ends, " No"]
    written = tokens(*pieces)

    assert word(written) is written[-1]


@pytest.mark.parametrize("begins", [begins for begins, _ in MARKS])
@pytest.mark.parametrize("before", ["", "\n"])
def test_a_thought_that_was_cut_off_is_no_reply(begins, before):
    """The first token of a thought would be read as the verdict."""
    assert word(tokens(before + begins)) is None
    assert word(tokens(before, begins, "\n", "Yes")) is None


@pytest.mark.parametrize("ends", [ends for _, ends in MARKS])
def test_a_block_that_the_prompt_opened_is_known_by_its_end(ends):
    """Some templates write the opening mark themselves."""
    written = tokens("Well", ", Yes", ends, "\n", "No")

    assert word(written) is written[-1]


def test_two_blocks_are_both_passed_over():
    """Some models think again."""
    written = tokens("<think>", "Yes", "</think>", "\n", "<think>", "hm", "</think>", "No")

    assert word(written) is written[-1]
    assert word(written[:6]) is None


def test_white_space_is_no_word():
    """Some models begin with a line break; tokens without text are parts of a character."""
    written = tokens("", "\n\n", " ", "Yes", ".")

    assert word(written) is written[3]


def test_where_nothing_was_written_there_is_no_word():
    """An empty reply, white space, and a thought with nothing behind it."""
    assert word(()) is None
    assert word(tokens("\n", " ")) is None
    assert word(tokens("<think>", "</think>", "\n")) is None


@pytest.mark.parametrize("parsed", ["Yes.", "\n\nYes."])
def test_a_thought_without_marks_ends_where_the_parsed_text_begins(parsed):
    """A server's parser knows it by other means, and its log-probabilities are of all tokens."""
    written = tokens("So", ", Yes", "\n\n", "Yes", ".")

    assert word(written, text=parsed, thinking=True) is written[3]


def test_a_thought_without_marks_that_was_cut_off_is_no_reply():
    """The text is empty, or is none that was written."""
    written = tokens("Yes", ", so")

    assert word(written, text="", thinking=True) is None
    assert word(written, text="No", thinking=True) is None


def test_where_only_the_reply_proper_has_log_probabilities_its_first_word_counts():
    """Some servers leave the thought's tokens out."""
    written = tokens("Yes", ".")

    assert word(written, thinking=True) is written[0]


def test_without_tokens_there_is_no_word():
    """The text alone has no probability."""
    assert first_word(ChatReply(text="Yes")) is None


def test_a_mark_inside_the_reply_begins_no_thought():
    """Only at the start does it say that the model thinks."""
    written = tokens("Yes", ", see <think>", "…")

    assert word(written) is written[0]


@pytest.mark.parametrize(
    ("reply", "thinks"),
    [
        (ChatReply(text="Yes"), False),
        (ChatReply(text="Yes", thinking=True), True),
        (ChatReply(text="", tokens=tokens("<think>")), True),
        (ChatReply(text="<think>"), True),
        (ChatReply(text="Yes", tokens=tokens("<think>", "hm", "</think>", "Yes")), True),
        (ChatReply(text="Yes", tokens=tokens("hm", "</think>", "Yes")), True),
        (ChatReply(text="I think so", tokens=tokens("I", " think", " so")), False),
        (ChatReply(text=""), False),
    ],
)
def test_thinking_shows_in_a_field_in_the_text_or_in_the_tokens_alone(reply, thinks):
    """A server's parser takes it out of the text, and its tokens stay."""
    assert is_thinking(reply) is thinks
