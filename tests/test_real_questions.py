"""Real questions, real passages and real models: the whole path on embedded endpoints."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrag_integrations import (
    Answer,
    ConfigurationError,
    EmbeddedPair,
    MultiPerspective,
    NoAnswerError,
    NoAnswerReason,
    SpeculativeRAG,
    StandardRAG,
)
from specrag_integrations.citations import normal_answer
from specrag_integrations.corpus import questions
from specrag_integrations.documents import Row, read_rows

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]

REGISTRY = Path(__file__).parents[1] / "weights-mirror.toml"
ANCHORED: dict[str, Any] = {
    "num_drafts": 3,
    "passages_per_draft": 3,
    "partitioner": MultiPerspective(anchor=1),
}


@pytest.fixture(scope="module")
def small() -> Iterator[EmbeddedPair]:
    """Run SmolLM2 in both roles: it cannot answer, but it speaks the protocol fast."""
    name = "smollm2-135m-instruct"
    with EmbeddedPair(
        drafter=name, verifier=name, num_drafts=5, context_tokens=2048, registry=REGISTRY
    ) as pair:
        yield pair


@pytest.fixture(scope="module")
def pair() -> Iterator[EmbeddedPair]:
    """Run the default pair."""
    with EmbeddedPair(num_drafts=3, registry=REGISTRY) as pair:
        yield pair


def check_whole(answer: Answer, row: Row) -> None:
    """Check what every answer must hold, whatever the models wrote."""
    assert answer.text
    assert answer.passages
    assert set(map(id, answer.passages)) <= set(map(id, answer.trace.passages))
    assert all(1 <= number <= len(answer.passages) for number in answer.citations)
    assert answer.trace.seconds > 0
    assert answer.usage.tokens("drafter").prompt
    json.dumps(answer.to_dict(), allow_nan=False)
    for score in answer.trace.scores:
        assert score.value is None or (math.isfinite(score.value) and score.value <= 0)
    if answer.fallback_reason is None:
        assert answer.tier == "reflection"
        assert answer.selection is not None
        winner = next(d for d in answer.trace.drafts if d.index == answer.selection.winner)
        values = [score.value for score in answer.trace.scores if score.value is not None]
        best = next(s for s in answer.trace.scores if s.draft == winner.index)
        truncated = {d.index for d in answer.trace.drafts if getattr(d, "truncated", False)}
        assert best.value == max(values) or truncated
        assert best.label_mass is not None


def right(text: str, row: Row) -> bool:
    """Whether a text contains one of the accepted answers."""
    return any(normal_answer(gold) in normal_answer(text) for gold in row.answers)


def test_every_way_of_asking_works_on_a_real_server(small: EmbeddedPair) -> None:
    """ask, aask over two asyncio.run, stream and astream answer with real log-probabilities."""
    row = questions()[0]
    rag = SpeculativeRAG(**small.roles)

    async def streamed() -> Answer:
        return [event async for event in rag.astream(row.question, row.passages)][-1].answer  # type: ignore[union-attr]

    answers = [
        rag.ask(row.question, row.passages),
        asyncio.run(rag.aask(row.question, row.passages)),
        asyncio.run(rag.aask(row.question, row.passages)),
        list(rag.stream(row.question, row.passages))[-1].answer,  # type: ignore[union-attr]
        asyncio.run(streamed()),
    ]

    for answer in answers:
        check_whole(answer, row)
        drafts = [d for d in answer.trace.drafts if hasattr(d, "answer_logprob")]
        assert any(draft.answer_logprob for draft in drafts) or answer.fallback_reason


def test_a_real_question_ends_at_its_deadline(small: EmbeddedPair) -> None:
    """A deadline far too short gives an error at once, and the server is free for the next one."""
    row = questions()[0]
    rag = SpeculativeRAG(**small.roles)

    with pytest.raises(NoAnswerError) as raised:
        rag.ask(row.question, row.passages, deadline=0.05)

    assert raised.value.reason is NoAnswerReason.DEADLINE
    check_whole(rag.ask(row.question, row.passages), row)


def test_passages_are_fitted_into_a_real_context(small: EmbeddedPair) -> None:
    """Far more passages than fit are cut to the best-ranked ones by llama.cpp's tokeniser."""
    row = questions()[0]
    many = [f"{number}: {passage.text}" for number in range(15) for passage in row.passages]
    model = small.verifier

    answer = StandardRAG(model, max_tokens=16).ask(row.question, many, deadline=500)

    assert 0 < len(answer.passages) < len(many)
    assert any("fit into the context" in note for note in answer.trace.notes)
    prompt = answer.usage.tokens("verifier").prompt or 0
    context = asyncio.run(model.capabilities()).context_tokens or 0
    assert context * 0.9 < prompt <= context - 16


def test_the_default_pair_answers_bundled_questions(pair: EmbeddedPair) -> None:
    """Of three easy questions the default pair gets at least two right, from the right passages."""
    rows = {row.id: row for row in questions()}
    rag = SpeculativeRAG(**pair.roles, **ANCHORED)

    verdicts = []
    for name in ("demo-01", "demo-03", "demo-06"):
        answer = rag.ask(rows[name].question, rows[name].passages)
        check_whole(answer, rows[name])
        verdicts.append(right(answer.text, rows[name]))

    assert sum(verdicts) >= 2, verdicts


def test_the_demonstration_calibration_fits_the_default_pair(pair: EmbeddedPair) -> None:
    """Every scored draft has a confidence, and the threshold decides who answers."""
    row = questions()[0]
    calibration = pair.calibration
    least = calibration.min_confidence
    rag = SpeculativeRAG(**pair.roles, calibration=calibration, min_confidence=least)

    answer = rag.ask(row.question, row.passages)

    scored = [score for score in answer.trace.scores if score.value is not None]
    assert scored
    assert all(score.confidence is not None and 0 < score.confidence < 1 for score in scored)
    assert not any("another set-up" in note for note in answer.trace.notes)
    if answer.fallback_reason is None:
        assert answer.confidence is not None
        assert answer.confidence >= least
    else:
        assert answer.fallback_reason == "low_confidence"
        assert answer.confidence is None


def test_the_demonstration_calibration_is_of_the_defaults_alone(
    small: EmbeddedPair, pair: EmbeddedPair
) -> None:
    """Other weights, and another number of drafts, are refused by name."""
    for roles, options, named in (
        (small.roles, {}, r"drafter: expected qwen2\.5-coder-0\.5b-instruct-q4_k_m, found SmolLM2"),
        (pair.roles, {"num_drafts": 3}, "num_drafts: expected 5, found 3"),
    ):
        with pytest.raises(ConfigurationError, match=named):
            SpeculativeRAG(**roles, **options, calibration=EmbeddedPair().calibration)


@pytest.mark.parametrize(
    "name", ["hotpotqa_pooled_retrieval", "nq_open_bm25", "fm2_fact_verification"]
)
def test_real_data_is_answered_end_to_end(pair: EmbeddedPair, data_dir: Path, name: str) -> None:
    """One question of each real set gets an answer with its passages, scores and cost."""
    row = next(iter(read_rows(data_dir / f"{name}.jsonl")))
    instructions = None
    if name == "fm2_fact_verification":
        instructions = "The question is a claim. The answer is SUPPORTS or REFUTES."
    rag = SpeculativeRAG(**pair.roles, **ANCHORED, instructions=instructions)

    answer = rag.ask(row.question, row.passages)

    check_whole(answer, row)
    assert len(answer.trace.subsets) == 3
    assert all(0 in subset.ranks for subset in answer.trace.subsets)
