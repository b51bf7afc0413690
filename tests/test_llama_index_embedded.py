"""A LlamaIndex app with real documents, a local embedding, and real models on this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import Document, PromptTemplate, VectorStoreIndex
from llama_index.core.base.response.schema import AsyncStreamingResponse
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index_kit import WordHashes, watched

from specrag_integrations import MultiPerspective
from specrag_integrations.corpus import documents_path, questions
from specrag_integrations.llama_index import (
    EndpointLLM,
    SpeculativeQueryEngine,
    SpeculativeSynthesizer,
)
from specrag_integrations.local import EmbeddedPair

pytestmark = pytest.mark.embedded

MIRROR = Path(__file__).parents[1] / "weights-mirror.toml"
ROW = questions()[0]
UNSURE = PromptTemplate("{context_str}\n\nWrite this line and nothing else:\nAnswer: unknown")
SIZES: dict[str, Any] = {"partitioner": MultiPerspective(), "passages_per_draft": 2}


@pytest.fixture(scope="module")
def pair() -> Iterator[EmbeddedPair]:
    """Serve the default drafter and verifier for the tests of this module."""
    registry = os.environ.get("SPECRAG_REGISTRY", str(MIRROR))
    with EmbeddedPair(num_drafts=2, context_tokens=2048, registry=registry) as running:
        yield running


@pytest.fixture(scope="module")
def index() -> VectorStoreIndex:
    """Index the demonstration corpus."""
    documents = [
        Document(text=path.read_text(encoding="utf-8"), metadata={"file_name": path.name})
        for path in sorted(documents_path().glob("*.md"))
    ]
    splitter = TokenTextSplitter(chunk_size=120, chunk_overlap=10)
    return VectorStoreIndex.from_documents(
        documents, transformations=[splitter], embed_model=WordHashes()
    )


@pytest.fixture(scope="module")
def engine(pair: EmbeddedPair, index: VectorStoreIndex) -> RetrieverQueryEngine:
    """Return the engine an app has before: standard RAG with the large model."""
    return RetrieverQueryEngine.from_args(
        index.as_retriever(similarity_top_k=4), llm=EndpointLLM(pair.verifier), streaming=True
    )


def speculative(engine: RetrieverQueryEngine, pair: EmbeddedPair, **options: Any) -> Any:
    """Return the same engine after the change of one line."""
    options = {**SIZES, "num_drafts": 2, "max_answer_tokens": 64, **options}
    return SpeculativeQueryEngine.from_engine(engine, drafter=pair.drafter, **options)


def test_a_real_question_is_answered(engine: RetrieverQueryEngine, pair: EmbeddedPair) -> None:
    """The right answer is drafted, the winner's nodes come first, and all of it is traced."""
    counter = TokenCountingHandler()
    plain = speculative(engine, pair, streaming=False, callback_manager=CallbackManager([counter]))

    with watched() as seen:
        response = plain.query(ROW.question)

    told = response.metadata["specrag"]
    used = [told["usage"][role]["prompt_tokens"] for role in ("drafter", "verifier")]
    drafts = {draft["index"]: draft for draft in told["trace"]["drafts"]}
    # Which of two drafts these small models trust more is a close race.
    assert any("Glasgow" in draft["answer"] for draft in drafts.values())
    assert response.response == drafts[told["selection"]["winner"]]["answer"]
    assert [one.node.node_id for one in response.source_nodes[:2]] == told["passages"]
    assert len(response.source_nodes) == 4
    assert told["tier"] == "reflection"
    assert sum("LLMChat.draft > EndpointLLM.achat" in path for path in seen.paths) == 2
    assert any("LLMChat.verify > EndpointLLM.achat" in path for path in seen.paths)
    # The app's own LLM, here the verifier, reports to its own callback manager.
    assert sum(event.prompt_token_count for event in counter.llm_token_counts) == used[0] > 0
    assert used[1] > 0


def test_a_real_answer_is_streamed(engine: RetrieverQueryEngine, pair: EmbeddedPair) -> None:
    """The streaming flag of the app's engine holds, and the loop it was asked in may be gone."""
    streaming = speculative(engine, pair)

    async def asked() -> Any:
        return await streaming.aquery(ROW.question)

    response = asyncio.run(asked())

    assert isinstance(response, AsyncStreamingResponse)
    assert len(response.source_nodes) == 4
    text = str(response)
    told = response.metadata["specrag"]["trace"]
    assert text in {draft["answer"] for draft in told["drafts"]}


def test_a_real_fallback_is_streamed_in_pieces(
    engine: RetrieverQueryEngine, index: VectorStoreIndex, pair: EmbeddedPair
) -> None:
    """Where the drafts do not tell, the large model answers from the app's own prompt."""
    template = PromptTemplate("{context_str}\n\nIn a full sentence: {query_str}")
    streaming = speculative(
        engine,
        pair,
        text_qa_template=template,
        draft_template=UNSURE,
        num_drafts=1,
        max_answer_tokens=24,
    )

    response = streaming.with_retriever(index.as_retriever(similarity_top_k=2)).query(ROW.question)
    assert response.metadata["specrag"]["fallback_reason"] == "no_usable_draft"
    pieces = list(response.response_gen)

    assert len(pieces) > 1
    assert response.metadata["specrag"]["usage"]["verifier"]["completion_tokens"] > 1


def test_an_index_takes_the_synthesizer(index: VectorStoreIndex, pair: EmbeddedPair) -> None:
    """An ordinary engine with our synthesizer, and a local embedding to cluster by."""
    answering = SpeculativeSynthesizer(
        **pair.roles,
        **SIZES,
        num_drafts=1,
        max_answer_tokens=64,
        embedder=WordHashes(),
        only_used=True,
    )

    asked = index.as_query_engine(
        llm=EndpointLLM(pair.verifier), response_synthesizer=answering, similarity_top_k=4
    )
    response = asked.query(ROW.question)

    assert response.response
    assert len(response.source_nodes) == 2
    assert not any("TF-IDF" in note for note in response.metadata["specrag"]["trace"]["notes"])
