"""The demonstration corpus: fourteen short documents and twenty questions about them.

The texts were written for this package. Many names in them are close to each other (Stevenson and
Stephenson, Scott and Shackleton, two bridges over the Tay), so that a retriever brings wrong
passages along with the right ones. `importlib.resources` finds the files as well.
"""

from __future__ import annotations

from pathlib import Path

from specrag_integrations.documents import Row, read_rows

__all__ = ["documents_path", "questions", "questions_path"]

_HERE = Path(__file__).parent


def documents_path() -> Path:
    """Return the folder of the documents, to be given to `read_documents`."""
    return _HERE / "documents"


def questions_path() -> Path:
    """Return the passages JSONL of the questions."""
    return _HERE / "questions.jsonl"


def questions() -> list[Row]:
    """Return the questions, each with the eight passages that BM25 retrieves for it.

    `meta` holds "type" (single, bridge, comparison or unanswerable), "documents" (the files that
    answer the question) and "evidence" (the words in them that do). An unanswerable question has no
    answers, no documents and no evidence.
    """
    return read_rows(questions_path())
