"""Every prompt, as a pure function of strings.

What is constant comes first, so that a server's prefix cache serves all drafts. There is no system
turn of ours, since several chat templates have no place for one. Rationale before answer is the
order of the paper's drafter (section 3, appendix G); every sentence here is our own.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrag_integrations.models import Message, assistant, user
from specrag_integrations.passages import Passage

RATIONALE = "Rationale:"
ANSWER = "Answer:"
UNKNOWN = "unknown"
"""What a model is asked to answer where the passages do not tell."""

_DRAFT_TASK = (
    "Answer the question from the passages: first one sentence of rationale that cites a passage, "
    f"then the answer in a few words. If the passages do not tell, the answer is {UNKNOWN}."
)
_DRAFT_FORMAT = f"Write two lines, {RATIONALE} and {ANSWER}"
_ANSWER_TASK = (
    "Answer the question from the passages in a few words, and cite the passage. "
    f"If the passages do not tell, the answer is {UNKNOWN}."
)

# Told how to write, small models copy the description ("the answer only"); shown once, they follow.
# As turns of its own, the example is a prefix that every draft of every question shares.
_EXAMPLE_PASSAGES = (
    Passage(
        title="Harbour Museum",
        text="The Harbour Museum stands in a former rope factory. It opened in 1921 and was "
        "enlarged forty years later.",
    ),
    Passage(
        title="Harbour Bridge",
        text="The Harbour Bridge was built in 1934 by the engineer Ada Lund.",
    ),
)
_EXAMPLE_QUESTION = "Who built the Harbour Bridge?"
_EXAMPLE_RATIONALE = "Passage [2] says that the engineer Ada Lund built the Harbour Bridge in 1934."
EXAMPLE_ANSWER = "Ada Lund"
"""An invented name: a draft that gives it to another question has copied the example."""

_CHECK = "Is this the correct answer to the question? Reply Yes or No."


def draft_messages(
    question: str,
    passages: Sequence[Passage],
    *,
    history: Sequence[Message] = (),
    instructions: str | None = None,
) -> tuple[Message, ...]:
    """Ask for one rationale and one answer from one subset of the passages."""
    example = (
        user(_draft_prompt(_EXAMPLE_QUESTION, _EXAMPLE_PASSAGES, None)),
        assistant(draft_text(_EXAMPLE_RATIONALE, EXAMPLE_ANSWER)),
    )
    return _in_order(example, history, _draft_prompt(question, passages, instructions))


def answer_messages(
    question: str,
    passages: Sequence[Passage],
    *,
    history: Sequence[Message] = (),
    instructions: str | None = None,
) -> tuple[Message, ...]:
    """Ask for an answer from all passages: standard RAG, as brief as the drafts are."""
    example = (
        user(_answer_prompt(_EXAMPLE_QUESTION, _EXAMPLE_PASSAGES, None)),
        assistant(f"{EXAMPLE_ANSWER} [2]"),
    )
    return _in_order(example, history, _answer_prompt(question, passages, instructions))


def check_messages(question: str, *, rationale: str, answer: str) -> tuple[Message, ...]:
    """Ask whether a draft holds, for a Yes or a No as the first token (paper section 3.3).

    The draft stands as an assistant turn, so that its tokens can be scored in the same request.
    """
    return (user(question), assistant(draft_text(rationale, answer)), user(_CHECK))


def draft_text(rationale: str, answer: str) -> str:
    """Return a draft as the verifier reads it."""
    return f"{RATIONALE} {rationale}\n{ANSWER} {answer}" if rationale else f"{ANSWER} {answer}"


def numbered(passages: Sequence[Passage]) -> str:
    """Return passages as `[1] title`, text; the numbers are what citations refer to."""
    return "\n\n".join(
        f"[{number}] {passage.title}\n{passage.text.strip()}"
        if passage.title
        else f"[{number}] {passage.text.strip()}"
        for number, passage in enumerate(passages, start=1)
    )


def _draft_prompt(question: str, passages: Sequence[Passage], instructions: str | None) -> str:
    return _joined(
        _DRAFT_TASK, instructions, numbered(passages), f"Question: {question}", _DRAFT_FORMAT
    )


def _answer_prompt(question: str, passages: Sequence[Passage], instructions: str | None) -> str:
    return _joined(_ANSWER_TASK, instructions, numbered(passages), f"Question: {question}")


def _in_order(
    example: Sequence[Message], history: Sequence[Message], prompt: str
) -> tuple[Message, ...]:
    """Put an app's system turns first, where templates want them, then the example."""
    system = [turn for turn in history if turn.role == "system"]
    others = [turn for turn in history if turn.role != "system"]
    return (*system, *example, *others, user(prompt))


def _joined(*parts: str | None) -> str:
    return "\n\n".join(part for part in parts if part)
