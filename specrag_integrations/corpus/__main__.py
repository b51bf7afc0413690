"""Retrieve the passages of the demonstration questions anew: python -m specrag_integrations.corpus.

Needed after a change to the documents, the splitter or the ranking. To add a question, append a
line with "passages": [] to `questions.jsonl` first.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from specrag_integrations.corpus import documents_path, questions, questions_path
from specrag_integrations.documents import Row, rank, read_documents
from specrag_integrations.passages import Passage

_PASSAGES_PER_QUESTION = 8


def _retrieved(row: Row, corpus: list[Passage]) -> Row:
    best = rank(row.question, corpus, _PASSAGES_PER_QUESTION)
    return replace(row, passages=tuple(_recorded(passage, row) for passage in best))


def _recorded(passage: Passage, row: Row) -> Passage:
    # Three digits, and no path: the file must be the same on every machine.
    return replace(
        passage,
        score=round(passage.score or 0.0, 3),
        metadata={"is_gold": any(words in passage.text for words in row.meta["evidence"])},
    )


def _line(row: Row) -> str:
    passages = [
        {key: getattr(item, key) for key in ("id", "title", "text", "score")} | dict(item.metadata)
        for item in row.passages
    ]
    record = {
        "id": row.id,
        "question": row.question,
        "answers": row.answers,
        "passages": passages,
        "source": row.source,
        "meta": row.meta,
    }
    return json.dumps(record, ensure_ascii=False) + "\n"


def rewrite(target: Path) -> None:
    """Write the questions with the passages that the corpus yields today."""
    corpus = read_documents([documents_path()])
    lines = [_line(_retrieved(row, corpus)) for row in questions()]
    target.write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    rewrite(questions_path())
