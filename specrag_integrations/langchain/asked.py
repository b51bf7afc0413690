"""Asked: what a Runnable was given, read as a question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from langchain_core.documents import Document

from specrag_integrations.errors import InputError
from specrag_integrations.langchain.documents import checked_documents
from specrag_integrations.langchain.turns import history_of
from specrag_integrations.models import Message
from specrag_integrations.options import checked_question

CONTEXT = "context"
HISTORY = "chat_history"
ANSWER = "answer"
SPECRAG = "specrag"
_OURS = frozenset({ANSWER, CONTEXT, SPECRAG})
"""What an output holds anew; an input that was an output has it as well."""
_QUESTIONS = ("question", "input")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question with what came along."""

    question: str = field(repr=False)
    key: str
    """The name that the input had for it, and that the output has."""
    documents: list[Document] | None = field(repr=False)
    """None where they are yet to be retrieved."""
    history: tuple[Message, ...] = field(repr=False)
    inputs: Mapping[str, Any] = field(repr=False)
    """All that was given, for the app's own prompt."""

    @property
    def passed_on(self) -> dict[str, Any]:
        """What the output begins with: further keys as they came, and the question."""
        return {key: value for key, value in self.inputs.items() if key not in _OURS}


def question_key(given: Mapping[str, Any]) -> str | None:
    """Return the key that a question stands under; None if there is none."""
    return next((key for key in _QUESTIONS if given.get(key) is not None), None)


def asked_of(given: object, *, retrieves: bool, is_prompted: bool) -> Asked:
    """Read a string, or a dict with question and context.

    Args:
        given: The input.
        retrieves: A string will do.
        is_prompted: The app's own prompt reads the input, and may want its history as text.

    Raises:
        InputError: there is no question in it, or no documents.
    """
    if isinstance(given, str):
        given = {_QUESTIONS[0]: given}
    if not isinstance(given, Mapping):
        raise InputError(
            f"the input must be a question or a dict with question and context, "
            f"not a {type(given).__name__}"
        )
    key = question_key(given)
    if key is None:
        raise InputError("the input has no 'question' (or 'input'); give it under that key")
    context = given.get(CONTEXT)
    if context is None and not retrieves:
        raise InputError("the input has no 'context'; give a list of Document, or set retriever=")
    history = given.get(HISTORY) or ()
    return Asked(
        question=checked_question(given[key]),
        key=key,
        documents=None if context is None else checked_documents(context),
        history=() if is_prompted and isinstance(history, str) else history_of(history),
        inputs=dict(given),
    )
