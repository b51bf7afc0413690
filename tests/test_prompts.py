"""Every prompt, word for word: a change of a prompt shows here as text."""

from __future__ import annotations

from specrag_integrations import Message, Passage
from specrag_integrations.prompts import (
    answer_messages,
    check_messages,
    draft_messages,
    draft_text,
    numbered,
)

PASSAGES = [Passage(text=" Paris is large. ", title="France"), Passage(text="Rome is old.")]

DRAFT = """\
Read the passages and answer the question. First give a rationale: one short sentence that names \
the evidence and cites its passage like [1]. Then give the answer itself in as few words as \
possible. If the passages do not tell, the answer is "unknown".

[1] France
Paris is large.

[2] Rome is old.

Question: Which city is old?

Write exactly two lines:
Rationale: one short sentence
Answer: the answer only"""

FALLBACK = """\
Read the passages and answer the question in as few words as possible, followed by the number of \
the passage it rests on like [1]. If the passages do not tell, answer "unknown".

[1] France
Paris is large.

[2] Rome is old.

Question: Which city is old?
Answer:"""

CHECK = "Does the rationale support the answer, and does it answer the question? Reply Yes or No."


def test_the_draft_prompt():
    """One user turn: the task, the passages, the question, the format."""
    assert draft_messages("Which city is old?", PASSAGES) == (Message("user", DRAFT),)


def test_the_fallback_prompt():
    """As brief an answer as the drafts give."""
    assert answer_messages("Which city is old?", PASSAGES) == (Message("user", FALLBACK),)


def test_the_verification_prompt():
    """The draft stands as an assistant's turn; no passage is in it."""
    assert check_messages("Which city is old?", rationale="[2] says so.", answer="Rome") == (
        Message("user", "Which city is old?"),
        Message("assistant", "Rationale: [2] says so.\nAnswer: Rome"),
        Message("user", CHECK),
    )


def test_a_draft_without_a_rationale_has_no_empty_header():
    """The verifier reads the answer alone."""
    assert draft_text("", "Rome") == "Answer: Rome"


def test_the_apps_own_words_follow_the_task():
    """In the draft and in the fallback prompt."""
    for messages in (
        draft_messages("Q?", PASSAGES, instructions="Answer in French."),
        answer_messages("Q?", PASSAGES, instructions="Answer in French."),
    ):
        assert '"unknown".\n\nAnswer in French.\n\n[1] France' in messages[-1].content


def test_earlier_turns_come_first():
    """As the turns they were."""
    history = (Message("user", "Hello"), Message("assistant", "Hi"))

    assert draft_messages("Q?", PASSAGES, history=history)[:2] == history
    assert answer_messages("Q?", PASSAGES, history=history)[:2] == history


def test_passages_are_numbered_from_one():
    """The numbers are what citations refer to."""
    assert numbered(PASSAGES) == "[1] France\nParis is large.\n\n[2] Rome is old."
    assert numbered([]) == ""


def test_what_is_constant_for_a_question_comes_first():
    """So that a server's prefix cache serves all drafts of it."""
    one = draft_messages("Q?", PASSAGES[:1])[0].content
    other = draft_messages("Q?", PASSAGES[1:])[0].content

    assert one.split("\n\n")[0] == other.split("\n\n")[0]
