"""Output: an answer as the dict that chains of LangChain pass on, whole and in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.runnables.utils import AddableDict

from specrag_integrations.answers import Answer
from specrag_integrations.errors import NoAnswerReason
from specrag_integrations.events import (
    AnswerEvent,
    DeltaEvent,
    Event,
    FallbackEvent,
    SelectedEvent,
)
from specrag_integrations.langchain.asked import ANSWER, CONTEXT, SPECRAG, Asked
from specrag_integrations.langchain.call import Call


def whole_output(asked: Asked, call: Call, answer: Answer) -> AddableDict:
    """Return the output: what was given, the documents, the answer, and how it came about.

    The documents that the answer rests on come first, in its order: `[1]` in it is the first of
    them. A fallback rests on all that fit into its prompt.
    """
    return AddableDict(
        {
            **_before(asked, call.retrieved.used_first(answer.passages)),
            ANSWER: answer.text,
            SPECRAG: _record(answer, call),
        }
    )


def empty_output(asked: Asked, call: Call, text: str) -> AddableDict:
    """Return the output where there was nothing to answer from."""
    record = {"no_answer": str(NoAnswerReason.NO_PASSAGES)}
    return AddableDict({**_before(asked, call.retrieved.documents), ANSWER: text, SPECRAG: record})


class Parts:
    """The parts of a streamed output, which add up to the whole one.

    Args:
        asked: The question.
        call: Its call.
        mends: Whether the answer may be a draft that is being mended. That may break off, with the
            draft as the answer after all, and no part can be taken back: it is shown when it is
            final.
    """

    def __init__(self, asked: Asked, call: Call, *, mends: bool) -> None:
        self._asked = asked
        self._call = call
        self._mends = mends
        self._waits = False

    def of(self, event: Event) -> Iterator[AddableDict]:
        """Yield what an event adds to the output."""
        match event:
            case SelectedEvent():
                self._waits = self._mends
                documents = self._call.retrieved.used_first(event.passages)
                yield AddableDict(_before(self._asked, documents))
            case FallbackEvent():
                documents = self._call.retrieved.used_first(event.passages)
                yield AddableDict(_before(self._asked, documents))
            case DeltaEvent() if not self._waits:
                yield AddableDict({ANSWER: event.text})
            case AnswerEvent():
                if self._waits:
                    yield AddableDict({ANSWER: event.answer.text})
                yield AddableDict({SPECRAG: _record(event.answer, self._call)})


def _before(asked: Asked, documents: Sequence[Document]) -> dict[str, Any]:
    """Return what is known before the first word."""
    return {**asked.passed_on, CONTEXT: list(documents)}


def _record(answer: Answer, call: Call) -> dict[str, Any]:
    """Return how an answer came about, as JSON."""
    record = answer.to_dict()
    record["abandoned"] = list(call.threads.abandoned)
    record["message_id"] = call.message_id
    return record
