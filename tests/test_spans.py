"""Where rationale and answer stand in what weak models write, and how likely they are."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_model import tokens_of

from specrag_integrations.errors import DraftFormatError
from specrag_integrations.models import Token
from specrag_integrations.spans import Span, find_spans, span_logprob, without_thinking

R, A = "Because of [1].", "Paris"

WRITTEN = {
    # as asked for
    f"Rationale: {R}\nAnswer: {A}": (R, A),
    f"\n\n  Rationale:{R}\n  Answer:{A}  \n": (R, A),
    f"RATIONALE: {R}\nANSWER: {A}": (R, A),
    f"rationale: {R}\nanswer: {A}": (R, A),
    f"Rationale: {R}\r\nAnswer: {A}\r\n": (R, A),
    f"Rationale: {R}\rAnswer: {A}": (R, A),
    f"Rationale:\n{R}\n\nAnswer:\n{A}": (R, A),
    f"Rationale: {R}\nAnswer: \n\n{A}": (R, A),
    f"\ufeffRationale: {R}\nAnswer: {A}": (R, A),
    # Markdown
    f"**Rationale:** {R}\n**Answer:** {A}": (R, A),
    f"**Rationale**: {R}\n**Answer**: {A}": (R, A),
    f"**Rationale: {R}**\n**Answer: {A}**": (R, A),
    f"__Rationale:__ {R}\n__Answer:__ {A}": (R, A),
    f"*Rationale:* {R}\n*Answer*: {A}": (R, A),
    f"## Rationale\n{R}\n\n## Answer\n{A}": (R, A),
    f"### Rationale:\n{R}\n\n### Answer:\n**{A}**": (R, A),
    f"## Rationale: {R}\n## Response: {A}": (R, A),
    f"- Rationale: {R}\n- Answer: {A}": (R, A),
    f"* **Rationale:** {R}\n* **Answer:** {A}": (R, A),
    f"\u2022 Rationale: {R}\n\u2022 Answer: {A}": (R, A),
    f"> Rationale: {R}\n> Answer: {A}": (R, A),
    f"Rationale: {R}\n---\nAnswer: {A}": (R, A),
    f"```\nRationale: {R}\nAnswer: {A}\n```": (R, A),
    f"```text\nRationale: {R}\nAnswer: {A}": (R, A),
    # numbers, brackets, other words and signs
    f"1. Rationale: {R}\n2. Answer: {A}": (R, A),
    f"1) **Rationale:** {R}\n2) **Answer:** {A}": (R, A),
    f"1. **Rationale**: {R}\n\n2. **Answer**: {A}": (R, A),
    f"Step 1: Rationale: {R}\nStep 2: Answer: {A}": (R, A),
    f"[Rationale] {R}\n[Answer] {A}": (R, A),
    f"[Rationale]: {R}\n[Answer]: {A}": (R, A),
    f"Rationale (one short sentence): {R}\nAnswer (the answer only): {A}": (R, A),
    f"Rationale\uff1a{R}\nAnswer\uff1a{A}": (R, A),
    f"Rationale - {R}\nAnswer - {A}": (R, A),
    f"Rationale: {R}\nResponse: {A}": (R, A),
    f"Explanation: {R}\nFinal Answer: {A}": (R, A),
    f"Reasoning: {R}\nShort answer: {A}": (R, A),
    f"Rationale: {R}\nThe final answer is: {A}": (R, A),
    f"<rationale>{R}</rationale>\n<answer>{A}</answer>": (R, A),
    f"Rationale: {R}\nAnswer: <answer>{A}</answer>": (R, A),
    # headers missing, or in another place
    f"{R}\nAnswer: {A}": (R, A),
    f"Sure! Here is my answer:\n\nRationale: {R}\nAnswer: {A}": (R, A),
    f"Sure! Here is the answer:\nRationale: {R}\n{A}": (R, A),
    f"{R}\n{A}": (R, A),
    f"{R}\n\n{A}": (R, A),
    f"Answer: {A}": ("", A),
    A: ("", A),
    f"Rationale:\nAnswer: {A}": ("", A),
    f"Rationale: Answer: {A}": ("", A),
    f"Answer: {A}\nRationale: {R}": (R, A),
    f"Answer: {A}\n\nRationale: {R}\n": (R, A),
    f"Answer:\nRationale: {R}\nAnswer: {A}": (R, A),
    f"Rationale: {R} Answer: {A}": (R, A),
    f"Rationale: {R}. Answer: {A}": (f"{R}.", A),
    f"Rationale: see [1] Answer: {A}": ("see [1]", A),
    f"Rationale: see [1], Answer: {A}": ("see [1],", A),
    f"## Rationale\n**Rationale:** {R}\n## Answer\n**Answer:** {A}": (R, A),
    # words that look like headers
    f"Rationale: it asks for the answer: yes.\nAnswer: {A}": ("it asks for the answer: yes.", A),
    f"Rationale: FAQ [1]. Answer: no.\nAnswer: {A}": ("FAQ [1]. Answer: no.", A),
    f"Rationale: {R}\nResponse time is 3 s: quick\nAnswer: {A}": (
        f"{R}\nResponse time is 3 s: quick",
        A,
    ),
    f"Rationale: {R}\nAnswer: Response to Kant": (R, "Response to Kant"),
    # going on
    f"Rationale: {R}\nAnswer: {A}\n\nRationale: no\nAnswer: no": (R, A),
    f"Rationale: {R}\nAnswer: {A}\nRationale: no\nAnswer: no\nRationale:": (R, A),
    f"Rationale: {R} Answer: {A}\n\nI hope this helps!": (R, A),
    f"Rationale: {R}\nAnswer: {A}\nQuestion: who?\nRationale: no\nAnswer: no": (R, A),
    f"Rationale: {R}\nAnswer: {A}\n\nI hope this helps!": (R, A),
    f"Rationale: {R}\nAnswer: {A}\nNote: I may be wrong.": (R, A),
    f"Rationale: {R}\nAnswer: {A}\n### End": (R, A),
    f"Rationale: {R}\nAnswer: {A}\n---\nmore": (R, A),
    f"Rationale: {R}\nAnswer: {A}\n\nAnswer: {A}": (R, A),
    # thinking and special tokens
    f"<think>Answer: no</think>\n\nRationale: {R}\nAnswer: {A}": (R, A),
    f"<think>\n\n</think>\n\nRationale: {R}\nAnswer: {A}": (R, A),
    f"<THINKING>\nRationale: no\nAnswer: no\n</THINKING>Rationale: {R}\nAnswer: {A}": (R, A),
    f"Hm. Answer: no</think>Rationale: {R}\nAnswer: {A}": (R, A),
    f"[THINK]Answer: no[/THINK]Rationale: {R}\nAnswer: {A}": (R, A),
    f"\u25c1think\u25b7Answer: no\u25c1/think\u25b7Rationale: {R}\nAnswer: {A}": (R, A),
    f"Rationale: {R}\nAnswer: {A}<think>now what": (R, A),
    f"<|im_start|>assistant\nRationale: {R}\nAnswer: {A}<|im_end|>": (R, A),
    f"Rationale: {R}\nAnswer: {A}<|im_end|>\n<|im_start|>user\nAnswer: no": (R, A),
    f"<s>Rationale: {R}\nAnswer: {A}</s>": (R, A),
    f"Rationale: {R}\nAnswer: {A}<end_of_turn>\n<eos>": (R, A),
    f"Rationale: {R}\nAnswer: {A} [/INST] no": (R, A),
    f"<\uff5cAssistant\uff5c>Rationale: {R}\nAnswer: {A}<\uff5cend\u2581of\u2581sentence\uff5c>": (
        R,
        A,
    ),
}

ANSWERS = {
    # what belongs to an answer, and what is only around it
    "A*": "A*",
    "*": "*",
    "-5": "-5",
    "+5": "+5",
    "- 5": "- 5",
    "C#": "C#",
    "#1": "#1",
    ">50 %": ">50 %",
    "~3": "~3",
    "3 * 4": "3 * 4",
    "2 ** 3": "2 ** 3",
    "f(x_": "f(x_",
    "a_b": "a_b",
    "[a]": "[a]",
    "3:15": "3:15",
    "Paris.": "Paris.",
    "Paris [1]": "Paris [1]",
    '"Paris"': '"Paris"',
    "\u201cParis\u201d": "\u201cParis\u201d",
    "**Paris**": "Paris",
    "*Paris*": "Paris",
    "_Paris_": "Paris",
    "`Paris`": "Paris",
    "***Paris***": "Paris",
    "**Paris** (France)": "**Paris** (France)",
    "in **Paris**": "in **Paris**",
    "**Paris** or **Rome**": "**Paris** or **Rome**",
    "*Paris* or *Rome*": "*Paris* or *Rome*",
    "one\ntwo\nthree": "one\ntwo\nthree",
    "\n- one\n- two": "- one\n- two",
    "\n```python\nprint(1)\n```": "print(1)",
    "<b>": "<b>",
    "北京": "北京",
    "القاهرة": "القاهرة",
    "👩\u200d🚀 é": "👩\u200d🚀 é",
}


@pytest.mark.parametrize("text", WRITTEN, ids=repr)
def test_what_weak_models_write_is_read(text):
    """Each of these was written by a model, or is a small change of one that was."""
    spans = find_spans(text)

    assert (spans.rationale.of(text), spans.answer.of(text)) == WRITTEN[text]


@pytest.mark.parametrize("written", ANSWERS, ids=repr)
def test_only_what_is_around_an_answer_is_taken_off(written):
    """Emphasis goes; signs and marks that mean something stay."""
    text = f"Rationale: {R}\nAnswer: {written}"

    assert find_spans(text).answer.of(text) == ANSWERS[written]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no text"),
        (" \n\t", "no text"),
        ("<think>Answer: Paris", "no text"),
        ("<|im_end|>", "no text"),
        ("Rationale: because.", "rationale without an answer"),
        ("Rationale: because.\nAnswer:", "answer is empty"),
        ("Rationale: because.\nAnswer: **", "answer is empty"),
        ("Answer:\n\nRationale: because.", "answer is empty"),
    ],
)
def test_a_text_without_an_answer_is_a_format_error_that_keeps_it(text, message):
    """The trace can show what the model wrote; the message holds none of it."""
    with pytest.raises(DraftFormatError, match=message) as caught:
        find_spans(text)

    assert caught.value.text == text
    assert "because" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["Rationale: the passages say", "The passages\nsay that", "<think>Let me", ""]
)
def test_a_text_cut_off_before_its_answer_has_none(text):
    """Its last line is not the answer: nobody knows what that would have been."""
    with pytest.raises(DraftFormatError, match="cut off before the answer"):
        find_spans(text, truncated=True)


def test_a_text_cut_off_within_its_answer_has_one():
    """It may be incomplete, which the draft says of itself."""
    text = "Rationale: because.\nAnswer: Pari"

    assert find_spans(text, truncated=True).answer.of(text) == "Pari"


PIECES = r"""
Rationale:|Answer:|Response|Question:|**|*|_|`|```|#|:|1.|[1]|---|a|é| |
<think>|</think>|</s>|\n|\n\n|\r\n
"""
REPEATED = r"""
 |\n|\t |\n\n|\n*|*|**|_|[|[1,|<|
<think>|</think>|`|#|1. |\n1|the |\nAnswer|\nAnswer:\n|Answer: |-|\n---|(
"""


def listed(pieces):
    """Return the pieces of a list written with bars between them."""
    written = (
        pieces.replace("\n", "").replace(r"\n", "\n").replace(r"\r", "\r").replace(r"\t", "\t")
    )
    return written.split("|")


@given(
    st.lists(st.sampled_from(listed(PIECES)), max_size=25).map("".join) | st.text(max_size=60),
    st.booleans(),
)
def test_spans_lie_within_the_text_and_never_overlap(text, truncated):
    """Nothing is scored twice, and an answer is never empty."""
    try:
        spans = find_spans(text, truncated=truncated)
    except DraftFormatError:
        return
    rationale, answer = spans.rationale, spans.answer

    assert 0 <= answer.start < answer.end <= len(text)
    assert 0 <= rationale.start <= rationale.end <= len(text)
    assert rationale.end <= answer.start or answer.end <= rationale.start
    assert answer.of(text).strip() == answer.of(text)


@pytest.mark.parametrize("unit", listed(REPEATED))
@pytest.mark.parametrize(
    ("before", "after"), [("", ""), ("Rationale: x", "y"), ("", "\nAnswer: z")]
)
def test_no_text_takes_long(unit, before, after):
    """A weak model that repeats itself for 10,000 characters is read in no time."""
    text = before + unit * (10_000 // len(unit)) + after
    started = time.process_time()

    with suppress(DraftFormatError):
        find_spans(text)
    without_thinking(text)

    assert time.process_time() - started < 1


def test_thinking_is_taken_out_of_a_text_that_is_still_being_written():
    """A block that has not ended yet hides what follows it."""
    assert without_thinking("<think>hm</think> Paris") == "Paris"
    assert without_thinking("Paris <think>hm") == "Paris"
    assert without_thinking("hm</think>Paris<|im_end|>") == "Paris"


# ---------------------------------------------------------------- log-probabilities

TEXT = "Rationale: so it is.\nAnswer: Paris, France"
TOKENS = tokens_of(
    ("Rationale", -1.0),
    (":", -2.0),
    (" so", -4.0),
    (" it", -8.0),
    (" is", -16.0),
    (".\n", -32.0),
    ("Answer", -64.0),
    (":", -128.0),
    (" Paris", -256.0),
    (",", -512.0),
    (" France", -1024.0),
)


def of(tokens, text, part):
    """Return the log-probability of a part of a text."""
    start = text.rindex(part)
    return span_logprob(tokens, text, Span(start, start + len(part)))


def test_exactly_the_tokens_of_a_span_are_summed():
    """Each log-probability is a power of two, so the sum tells which tokens are in it."""
    spans = find_spans(TEXT)
    rationale = span_logprob(TOKENS, TEXT, spans.rationale)
    answer = span_logprob(TOKENS, TEXT, spans.answer)

    assert (rationale.total, rationale.tokens) == (-4.0 - 8 - 16 - 32, 4)
    assert (answer.total, answer.tokens) == (-256.0 - 512 - 1024, 3)
    assert answer.mean == pytest.approx(-1792 / 3)


@pytest.mark.parametrize(
    ("part", "total"), [("Paris", -256.0), (",", -512.0), ("France", -1024.0), ("so", -4.0)]
)
def test_an_answer_of_one_token_is_that_token(part, total):
    """Its neighbours on both sides are left out."""
    found = of(TOKENS, TEXT, part)

    assert (found.total, found.tokens, found.mean) == (total, 1, total)


def test_a_long_span_is_not_worth_less_than_a_short_one():
    """The mean is compared, since sums fall with length; nothing underflows."""
    text = "word " * 2000
    long = span_logprob(tokens_of(*[("word ", -0.5)] * 2000), text, Span(0, len(text) - 1))

    assert long.mean == -0.5
    assert long.total == -1000.0


def test_the_answers_own_place_counts_where_its_text_stands_in_the_rationale_too():
    """Spans are places, not words."""
    text = "Rationale: Paris it is.\nAnswer: Paris"
    tokens = tokens_of(
        ("Rationale:", -1.0),
        (" Paris", -2.0),
        (" it is.\n", -4.0),
        ("Answer:", -8),
        (" Paris", -16),
    )
    answer = span_logprob(tokens, text, find_spans(text).answer)

    assert (answer.total, answer.tokens) == (-16.0, 1)


def test_a_character_spread_over_tokens_counts_them_all():
    """Byte-level tokenisers cut characters; positions are counted in bytes."""
    text = "Answer: 北京"
    data = text.encode()
    pieces = [data[:8], data[8:9], data[9:11], data[11:13], data[13:]]
    tokens = [Token(text="?", data=piece, logprob=-(2.0**i)) for i, piece in enumerate(pieces)]

    assert (of(tokens, text, "北京").total, of(tokens, text, "北京").tokens) == (-30.0, 4)
    assert of(tokens, text, "北").total == -2.0 - 4


def test_an_empty_token_belongs_to_the_character_it_begins():
    """Some servers write the first part of a character as an empty token before the whole of it."""
    text = "Answer:é!"
    tokens = tokens_of(("Answer:", -1.0), ("", -2.0), ("é", -4.0), ("", -8.0), ("!", -16.0))

    assert of(tokens, text, "é").total == -6.0
    assert of(tokens, text, "é!").total == -30.0


def test_tokens_may_hold_more_than_the_text():
    """A reasoning parser cuts the thinking out of the text, but not out of the tokens."""
    thinking = tokens_of(("<think>", -5.0), (TEXT, -6.0), ("</think>\n\n", -7.0))
    answer = span_logprob([*thinking, *TOKENS], TEXT, find_spans(TEXT).answer)

    assert (answer.total, answer.tokens) == (-1792.0, 3)


def test_a_text_that_is_not_in_the_tokens_has_no_log_probability():
    """What cannot be placed is unknown, not certain."""
    assert of(TOKENS[:-1], TEXT, "Paris") is None
    assert span_logprob(tokens_of(("other", -1.0)), TEXT, Span(0, 4)) is None


@pytest.mark.parametrize("tokens", [None, ()])
def test_without_tokens_there_is_no_log_probability(tokens):
    """Missing is None, never 0, which would be certainty."""
    assert span_logprob(tokens, TEXT, Span(0, 4)) is None


def test_an_empty_span_has_no_log_probability():
    """A draft without a rationale has no term for it."""
    assert span_logprob(TOKENS, TEXT, Span(4, 4)) is None


def test_half_a_character_is_no_crash():
    """JSON can hold a lone surrogate."""
    text = "Answer: \ud83d"

    assert of(tokens_of(("Answer:", -1.0)), text, "\ud83d") is None


# ---------------------------------------------------------------- tokens and their text


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        # vLLM: the first bytes of a character have no text, the last all of it and the space.
        ([("Answer:", -16.0), ("", -1.0), ("", -2.0), (" 東", -4.0), ("", -8.0), ("京", -32.0)], 5),
        ([("Answer:", -16.0), (" ", -64.0), ("", -2.0), ("東", -4.0), ("京", -32.0)], 3),
        ([("Answer:", -16.0), (" 東京", -4.0), ("", -64.0)], 1),
    ],
)
def test_a_character_has_all_its_tokens(pieces, expected):
    """Also those without text, which come before it; the end of a turn has none and follows."""
    tokens = tokens_of(*pieces)
    text = "Answer: 東京"

    found = span_logprob(tokens, text, Span(8, 10))

    assert found.tokens == expected
    counted = [value for piece, value in pieces if value not in {-16.0, -64.0}]
    assert found.total == sum(counted)


def test_tokens_decoded_without_their_spaces_are_found():
    """Some tokenisers leave them out of single tokens; the words are the same."""
    words = ["Rationale:", "it", "is", "so", ".", "Answer:", "New", "York"]
    tokens = tokens_of(*((word, -1.0 - place) for place, word in enumerate(words)))
    text = "Rationale: it is so.\nAnswer: New York"

    assert span_logprob(tokens, text, Span(11, 20)).total == -(2.0 + 3.0 + 4.0 + 5.0)
    assert span_logprob(tokens, text, Span(29, 37)).total == -(7.0 + 8.0)
    spaced = tokens_of(("Rationale:", -1.0), (" it", -2.0), ("is", -3.0))
    assert span_logprob(spaced, "Rationale: it is", Span(11, 16)) is None
