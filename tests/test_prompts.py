"""Every prompt, word for word: a change of a prompt shows here as text."""

from __future__ import annotations

from specrag_integrations import Message, Passage
from specrag_integrations.prompts import (
    answer_messages,
    check_messages,
    choice_messages,
    draft_messages,
    draft_text,
    letters,
    numbered,
    refine_messages,
    single_prompt_messages,
)

PASSAGES = [Passage(text=" Paris is large. ", title="France"), Passage(text="Rome is old.")]

DRAFT = """\
<user>
Answer the question from the passages: first one sentence of rationale that cites a passage, then \
the answer in a few words. If the passages do not tell, the answer is unknown.

[1] Harbour Museum
The Harbour Museum stands in a former rope factory. It opened in 1921 and was enlarged forty years \
later.

[2] Harbour Bridge
The Harbour Bridge was built in 1934 by the engineer Ada Lund.

Question: Who built the Harbour Bridge?

Write two lines, Rationale: and Answer:
<assistant>
Rationale: Passage [2] says that the engineer Ada Lund built the Harbour Bridge in 1934.
Answer: Ada Lund
<user>
Answer the question from the passages: first one sentence of rationale that cites a passage, then \
the answer in a few words. If the passages do not tell, the answer is unknown.

[1] France
Paris is large.

[2] Rome is old.

Question: Which city is old?

Write two lines, Rationale: and Answer:"""

FALLBACK = """\
<user>
Answer the question from the passages in a few words, and cite the passage. If the passages do not \
tell, the answer is unknown.

[1] Harbour Museum
The Harbour Museum stands in a former rope factory. It opened in 1921 and was enlarged forty years \
later.

[2] Harbour Bridge
The Harbour Bridge was built in 1934 by the engineer Ada Lund.

Question: Who built the Harbour Bridge?
<assistant>
Ada Lund [2]
<user>
Answer the question from the passages in a few words, and cite the passage. If the passages do not \
tell, the answer is unknown.

[1] France
Paris is large.

[2] Rome is old.

Question: Which city is old?"""

CHECK = """\
<user>
Which city is old?
<assistant>
Rationale: [2] says so.
Answer: Rome
<user>
Is this the correct answer to the question? Reply Yes or No."""


def shown(messages):
    """Return a conversation as text."""
    return "\n".join(f"<{message.role}>\n{message.content}" for message in messages)


def test_the_draft_prompt():
    """An example, then the task, the passages, the question and the format."""
    assert shown(draft_messages("Which city is old?", PASSAGES)) == DRAFT


def test_the_fallback_prompt():
    """As brief an answer as the drafts give."""
    assert shown(answer_messages("Which city is old?", PASSAGES)) == FALLBACK


def test_the_verification_prompt():
    """The draft stands as an assistant's turn; no passage is in it."""
    text = draft_text("[2] says so.", "Rome")

    assert shown(check_messages("Which city is old?", draft=text)) == CHECK


def test_the_verification_prompt_with_passages():
    """They come before the question, numbered as the rationale cites them."""
    messages = check_messages("Which city is old?", draft="Answer: Rome", passages=PASSAGES)

    assert messages[0].content == (
        "[1] France\nParis is large.\n\n[2] Rome is old.\n\nWhich city is old?"
    )


def test_either_part_of_a_draft_may_come_first():
    """The paper's verifier reads the answer first."""
    assert draft_text("[2] says so.", "Rome", answer_first=True) == (
        "Answer: Rome\nRationale: [2] says so."
    )
    assert draft_text("", "Rome", answer_first=True) == "Answer: Rome"


CHOICE = """\
<user>
Question: Which city is old?

Draft A
Rationale: [2] says so.
Answer: Rome

Draft B
Answer: Paris

Which draft gives the correct answer to the question? Reply with its letter only."""
SINGLE_PROMPT = CHOICE[: CHOICE.index("Which draft")] + (
    "Choose the draft that answers the question most accurately, and improve its answer where it "
    "is wrong or unclear. Write two lines: Best: and the draft's letter, then Answer: and the "
    "answer in a few words."
)
REFINE = """\
<user>
A draft answers the question from these passages. Check it against them and write the answer in a \
few words, corrected where it is wrong, and cite the passage. If the passages do not tell, the \
answer is unknown.

[1] France
Paris is large.

[2] Rome is old.

Question: Which city is old?

Rationale: [2] says so.
Answer: Rome"""


def test_the_prompts_that_show_all_drafts():
    """Lettered, in the order given; a draft without a rationale shows its answer alone."""
    drafts = [("[2] says so.", "Rome"), ("", "Paris")]

    assert shown(choice_messages("Which city is old?", drafts)) == CHOICE
    assert shown(single_prompt_messages("Which city is old?", drafts)) == SINGLE_PROMPT


def test_letters_end_with_the_alphabet():
    """Nobody shows more drafts than that in one prompt."""
    assert letters(3) == ("A", "B", "C")
    assert len(letters(40)) == 26


def test_the_prompt_that_mends_a_draft():
    """It holds the draft's own passages, in the order its citations mean."""
    messages = refine_messages(
        "Which city is old?", PASSAGES, rationale="[2] says so.", answer="Rome"
    )

    assert shown(messages) == REFINE


def test_a_draft_without_a_rationale_has_no_empty_header():
    """The verifier reads the answer alone."""
    assert draft_text("", "Rome") == "Answer: Rome"


def test_the_apps_own_words_follow_the_task():
    """In the draft and in the fallback prompt, but not in the example, which stays a prefix."""
    for ask in (draft_messages, answer_messages):
        plain = ask("Q?", PASSAGES)
        told = ask("Q?", PASSAGES, instructions="Answer in French.")

        assert "is unknown.\n\nAnswer in French.\n\n[1] France" in told[-1].content
        assert told[:-1] == plain[:-1]


def test_earlier_turns_come_before_the_question_and_the_apps_system_turn_first():
    """Templates want the system turn at the start."""
    system, hello, hi = Message("system", "S"), Message("user", "Hello"), Message("assistant", "Hi")
    for ask in (draft_messages, answer_messages):
        messages = ask("Q?", PASSAGES, history=(system, hello, hi))

        assert messages[0] == system
        assert messages[-3:-1] == (hello, hi)
        assert messages[-1] == ask("Q?", PASSAGES)[-1]


def test_passages_are_numbered_from_one():
    """The numbers are what citations refer to."""
    assert numbered(PASSAGES) == "[1] France\nParis is large.\n\n[2] Rome is old."
    assert numbered([]) == ""


def test_what_is_constant_comes_first():
    """So that a server's prefix cache serves all drafts of all questions."""
    one, other = draft_messages("Q?", PASSAGES[:1]), draft_messages("R?", PASSAGES[1:])

    assert one[:-1] == other[:-1]
    assert one[-1].content.split("\n\n")[0] == other[-1].content.split("\n\n")[0]
