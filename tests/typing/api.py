"""The public surface as a type checker sees it: checked by mypy, never run."""

from collections.abc import AsyncIterator, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from specrag_integrations import (
    Answer,
    AnswerVote,
    Calibration,
    ChatModel,
    Draft,
    Endpoint,
    Listwise,
    MultiPerspective,
    Passage,
    Price,
    Score,
    Scoring,
    Selection,
    SinglePrompt,
    SpeculativeRAG,
    StandardRAG,
    Verifier,
)
from specrag_integrations.selection import Pool, Selector


def embed(texts: Sequence[str], question: str) -> NDArray[np.float64]:
    """Return one row per text."""
    return np.ones((len(texts), len(question)))


async def embed_later(texts: Sequence[str], question: str) -> NDArray[np.float64]:
    """Return one row per text, asynchronously."""
    return embed(texts, question)


class First:
    """A selector of one's own."""

    reads_scores = True
    requests = 0

    async def select(self, pool: Pool) -> Selection:
        """Take the first draft."""
        index = pool.candidates[0].draft.index
        return Selection(winner=index, ranking=(index,))


SELECTORS: Sequence[Selector] = [AnswerVote(), Listwise(), SinglePrompt(), First()]


async def use() -> None:
    """Use everything a reader of the README would."""
    endpoint: ChatModel = Endpoint("http://localhost:8000", "model", api_key=lambda: "key")
    rag = SpeculativeRAG(
        drafter=[endpoint, endpoint],
        verifier=endpoint,
        partitioner=MultiPerspective(anchor=1),
        passages_per_draft=3,
        embedder=embed,
        scoring=Scoring(tier="reflection"),
    )
    SpeculativeRAG(drafter=endpoint, verifier=endpoint, embedder=embed_later, fallback=None)
    for selector in SELECTORS:
        SpeculativeRAG(drafter=endpoint, verifier=endpoint, selector=selector, refine="when_unsure")
    calibration = Calibration.load("calibration.json")
    SpeculativeRAG(
        drafter=endpoint,
        verifier=endpoint,
        calibration=calibration,
        min_confidence=calibration.min_confidence,
        accept_confidence=calibration.accept_confidence,
    )
    verifier = Verifier(endpoint, scoring=Scoring(formula="paper", order="answer_first"))
    scores: list[Score] = verifier.score("question", [Draft(rationale="because", answer="this")])
    answer: Answer = rag.ask("question", [Passage(text="text"), "text"], history=[])
    answer = await StandardRAG(endpoint).aask("question", ["text"], deadline=1.5)
    events: Iterator[object] = rag.stream("question", ["text"])
    later: AsyncIterator[object] = rag.astream("question", ["text"])
    cost: float | None = answer.usage.cost({"drafter": Price(input=0.1, output=0.2)})
    del events, later, cost, scores
