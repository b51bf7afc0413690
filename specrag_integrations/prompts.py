"""Every prompt, as a pure function of strings.

What is constant for a question comes first, so that a server's prefix cache serves all drafts.
There is no system turn, since several chat templates have no place for one. Rationale before answer
is the order of the paper's drafter (section 3, appendix G); every sentence here is our own.
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
    "Read the passages and answer the question. First give a rationale: one short sentence that "
    "names the evidence and cites its passage like [1]. Then give the answer itself in as few "
    f'words as possible. If the passages do not tell, the answer is "{UNKNOWN}".'
)
_DRAFT_FORMAT = (
    f"Write exactly two lines:\n{RATIONALE} one short sentence\n{ANSWER} the answer only"
)
_ANSWER_TASK = (
    "Read the passages and answer the question in as few words as possible, followed by the number "
    f'of the passage it rests on like [1]. If the passages do not tell, answer "{UNKNOWN}".'
)
_CHECK = "Does the rationale support the answer, and does it answer the question? Reply Yes or No."


def draft_messages(
    question: str,
    passages: Sequence[Passage],
    *,
    history: Sequence[Message] = (),
    instructions: str | None = None,
) -> tuple[Message, ...]:
    """Ask for one rationale and one answer from one subset of the passages."""
    parts = [_DRAFT_TASK, instructions, numbered(passages), f"Question: {question}", _DRAFT_FORMAT]
    return (*history, user(_joined(parts)))


def answer_messages(
    question: str,
    passages: Sequence[Passage],
    *,
    history: Sequence[Message] = (),
    instructions: str | None = None,
) -> tuple[Message, ...]:
    """Ask for an answer from all passages: standard RAG, as brief as the drafts are."""
    parts = [_ANSWER_TASK, instructions, numbered(passages), f"Question: {question}\n{ANSWER}"]
    return (*history, user(_joined(parts)))


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


def _joined(parts: Sequence[str | None]) -> str:
    return "\n\n".join(part for part in parts if part)
