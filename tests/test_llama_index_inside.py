"""The engine inside LlamaIndex's own parts: routers, agents, chats, retrievers, evaluators."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core import Document, MockEmbedding, SummaryIndex, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, LLMMetadata, MessageRole
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.evaluation import (
    BatchEvalRunner,
    FaithfulnessEvaluator,
    GuidelineEvaluator,
    RelevancyEvaluator,
)
from llama_index.core.indices.query.query_transform import HyDEQueryTransform
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import HierarchicalNodeParser, TokenTextSplitter, get_leaf_nodes
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetryGuidelineQueryEngine,
    RetryQueryEngine,
    RetrySourceQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import TreeSummarize
from llama_index.core.retrievers import AutoMergingRetriever, QueryFusionRetriever
from llama_index.core.schema import IndexNode, MetadataMode
from llama_index.core.selectors import LLMMultiSelector, LLMSingleSelector
from llama_index.core.storage import StorageContext
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.tools import QueryEngineTool
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from llama_index_kit import (
    QUESTION,
    Given,
    Scripted,
    dialogue,
    engine,
    ids,
    is_draft,
    llm_of_settings,
    nodes,
    speaker,
    synthesizer,
    text_from,
    text_of,
)

from specrag_integrations.llama_index import SpeculativeQueryEngine

RIVER = "river 2 [1]"


@pytest.fixture(autouse=True)
def _an_app_has_an_llm(scripted: Scripted) -> Iterator[None]:
    """Set `Settings.llm`, which several of LlamaIndex's parts resolve whatever they are given."""
    with llm_of_settings(speaker(scripted, "unused")):
        yield


def memory() -> ChatMemoryBuffer:
    """Return a memory; the default one leaves a database's connection open."""
    return ChatMemoryBuffer.from_defaults()


def tool(scripted: Scripted, name: str, **options: Any) -> QueryEngineTool:
    """Return an engine of ours as a tool."""
    answering = engine(scripted(dialogue(r2=0.9)), **options)
    return QueryEngineTool.from_defaults(answering, name=name, description=f"knows {name}")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_tool_is_called_in_both_ways(scripted: Scripted, streaming: bool) -> None:
    """Both calls return the text, also of a stream that is shown in the running loop."""
    rivers = tool(scripted, "rivers", streaming=streaming)

    async def called() -> str:
        return (await rivers.acall(QUESTION)).content

    assert rivers.call(QUESTION).content == RIVER
    assert asyncio.run(called()) == RIVER


def test_a_router_takes_one_engine(scripted: Scripted) -> None:
    """A single selection answers as the engine does, streamed or not, in both ways."""
    chosen = json.dumps([{"choice": 2, "reason": "it is wet"}])
    llm = speaker(scripted, chosen)
    tools = [tool(scripted, "roads"), tool(scripted, "rivers", streaming=True)]
    router = RouterQueryEngine(LLMSingleSelector.from_defaults(llm), tools, llm=llm)

    async def asked() -> tuple[Any, str]:
        response = await router.aquery(QUESTION)
        return response, await text_from(response)

    streamed = router.query(QUESTION)
    response, text = asyncio.run(asked())

    assert isinstance(streamed, StreamingResponse)
    assert isinstance(response, AsyncStreamingResponse)
    assert str(streamed) == text == RIVER
    assert response.metadata["selector_result"].ind == 1
    assert response.metadata["specrag"]["tier"] == "reflection"


def test_a_router_takes_several_engines(scripted: Scripted) -> None:
    """A multiple selection sums up the answers of streaming and other engines, in both ways."""
    chosen = json.dumps([{"choice": 1, "reason": "a"}, {"choice": 2, "reason": "b"}])
    llm, summing = speaker(scripted, chosen), speaker(scripted, "both rivers")
    tools = [tool(scripted, "roads"), tool(scripted, "rivers", streaming=True)]
    router = RouterQueryEngine(
        LLMMultiSelector.from_defaults(llm), tools, llm=llm, summarizer=TreeSummarize(summing)
    )

    response = router.query(QUESTION)
    awaited = asyncio.run(router.aquery(QUESTION))

    assert str(response) == str(awaited) == "both rivers"
    assert len(response.source_nodes) == len(awaited.source_nodes) == 16


def test_sub_questions_are_asked_and_answered(scripted: Scripted) -> None:
    """Both the sub-questions' engine and the last synthesizer may be ours, in any loop."""
    questions = json.dumps(
        {"items": [{"sub_question": f"{one}?", "tool_name": "rivers"} for one in "ab"]}
    )
    asking = speaker(scripted, f"```json\n{questions}\n```")
    said = "Rationale: both say so.\nAnswer: the second river 2"
    final = scripted(lambda body, call: said if is_draft(body) else dialogue()(body, call))
    asked = SubQuestionQueryEngine.from_defaults(
        [tool(scripted, "rivers")],
        question_gen=LLMQuestionGenerator.from_defaults(asking),
        response_synthesizer=synthesizer(final),
        verbose=False,
    )

    async def both() -> list[Any]:
        return [asked.query(QUESTION), await asked.aquery(QUESTION)]

    responses = [asked.query(QUESTION), *asyncio.run(both())]

    assert {str(response) for response in responses} == {"the second river 2"}
    assert "Response: river 2" in responses[0].source_nodes[0].node.get_content()
    assert {len(response.source_nodes) for response in responses} == {2 + 16}


class Agent(FunctionCallingLLM):
    """Calls the tool once with the question, then says what it heard."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=True, is_function_calling_model=True, model_name="agent")

    def _answer(self, messages: Sequence[ChatMessage]) -> ChatResponse:
        heard = [m.content for m in messages if m.role == MessageRole.TOOL]
        text = f"I heard: {heard[0]}" if heard else ""
        return ChatResponse(message=ChatMessage(role="assistant", content=text), delta=text)

    def _prepare_chat_with_tools(self, tools: Any, chat_history: Any = None, **_: Any) -> Any:
        return {"messages": chat_history}

    def get_tool_calls_from_response(self, response: ChatResponse, **_: Any) -> list[ToolSelection]:
        if response.message.content:
            return []
        call = ToolSelection(tool_id="1", tool_name="rivers", tool_kwargs={"input": QUESTION})
        return [call]

    def chat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponse:
        return self._answer(messages)

    async def achat(self, messages: Sequence[ChatMessage], **_: Any) -> ChatResponse:
        return self._answer(messages)

    async def astream_chat(self, messages: Sequence[ChatMessage], **_: Any) -> Any:
        async def pieces() -> Any:
            yield self._answer(messages)

        return pieces()

    def stream_chat(self, *_: Any, **__: Any) -> Any:
        raise AssertionError

    complete = acomplete = stream_complete = astream_complete = stream_chat


# LlamaIndex's workflows look at every attribute of an agent, pydantic's old ones as well.
@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecationWarning")
@pytest.mark.parametrize("streaming", [False, True])
def test_an_agent_uses_the_engine_as_a_tool(scripted: Scripted, streaming: bool) -> None:
    """A FunctionAgent calls the engine, a streaming one as well, and goes on with its text."""
    agent = FunctionAgent(tools=[tool(scripted, "rivers", streaming=streaming)], llm=Agent())

    async def asked() -> str:
        return str(await agent.run(QUESTION, memory=memory()))

    assert asyncio.run(asked()) == f"I heard: {RIVER}"


def test_a_workflow_step_asks_the_engine(scripted: Scripted) -> None:
    """A step awaits the engine as any other coroutine."""
    answering = engine(scripted(dialogue(r2=0.9)))

    class Flow(Workflow):
        @step
        async def ask(self, event: StartEvent) -> StopEvent:
            return StopEvent(result=str(await answering.aquery(event.question)))

    async def asked() -> str:
        return str(await Flow(timeout=30).run(question=QUESTION))

    assert asyncio.run(asked()) == RIVER


@pytest.mark.parametrize("passing", [True, False])
def test_retrying_engines_judge_the_answer(scripted: Scripted, passing: bool) -> None:
    """The retry engines call `_query` itself; a failed judgement asks again."""
    server = scripted(dialogue(r2=0.9))
    judge = speaker(scripted, "YES" if passing else "NO")
    guide = json.dumps({"passing": passing, "feedback": "no"})
    answering = engine(server)
    retrying = [
        RetryQueryEngine(answering, RelevancyEvaluator(llm=judge), max_retries=1),
        RetryGuidelineQueryEngine(
            answering, GuidelineEvaluator(llm=speaker(scripted, guide)), max_retries=1
        ),
    ]
    for one in retrying:
        server.reset()
        assert str(one.query(QUESTION)) == RIVER
        assert len(server.chats) == (6 if passing else 12)


def test_a_retry_with_fewer_sources_starts_from_ours(scripted: Scripted) -> None:
    """RetrySourceQueryEngine judges our answer, and returns it where that passes."""
    answering, judge = engine(scripted(dialogue(r2=0.9))), speaker(scripted, "YES")

    asked = RetrySourceQueryEngine(answering, RelevancyEvaluator(llm=judge), llm=judge)

    assert str(asked.query(QUESTION)) == RIVER


def test_a_transformed_query_is_retrieved_and_answered(scripted: Scripted) -> None:
    """With HyDE, what was made up is for the retriever; the drafts read the question itself."""
    server = scripted(dialogue(r2=0.9))
    seen: list[Any] = []

    class Watching(Given):
        def _retrieve(self, query_bundle: Any) -> Any:
            seen.append(query_bundle.embedding_strs)
            return super()._retrieve(query_bundle)

    hyde = HyDEQueryTransform(llm=speaker(scripted, "A made-up river."))
    asked = TransformQueryEngine(
        SpeculativeQueryEngine(Watching(nodes()), synthesizer(server)), hyde
    )

    assert str(asked.query(QUESTION)) == str(asyncio.run(asked.aquery(QUESTION))) == RIVER
    assert seen == [["A made-up river.", QUESTION]] * 2
    assert not any("made-up" in text_of(body) for body in server.chats)


def test_a_citing_engine_takes_the_synthesizer(scripted: Scripted) -> None:
    """CitationQueryEngine's chunks are read as nodes; [n] counts the response's sources."""
    server = scripted(dialogue(r2=0.9))
    asked = CitationQueryEngine.from_args(
        VectorStoreIndex([one.node for one in nodes()], embed_model=MockEmbedding(embed_dim=2)),
        retriever=Given(nodes()),
        response_synthesizer=synthesizer(server),
    )

    responses = [asked.query(QUESTION), asyncio.run(asked.aquery(QUESTION))]

    for response in responses:
        assert str(response) == RIVER
        assert response.source_nodes[0].node.get_content() == (
            "Source 3:\nFact number 2 is about river 2.\n"
        )


def test_a_condensing_chat_engine_asks_the_engine(scripted: Scripted) -> None:
    """It flips the streaming flag for each turn, and gets what it asked for."""
    answering = engine(scripted(dialogue(r2=0.9)))
    chat = CondenseQuestionChatEngine.from_defaults(
        answering, llm=speaker(scripted, "Which river, again?"), memory=memory()
    )

    async def turns() -> list[str]:
        said = await chat.achat("And now?")
        streamed = await chat.astream_chat("And then?")
        return [said.response, "".join([piece async for piece in streamed.async_response_gen()])]

    assert chat.chat(QUESTION).response == RIVER
    assert "".join(chat.stream_chat("Once more?").response_gen).strip() == RIVER
    assert [text.strip() for text in asyncio.run(turns())] == [RIVER, RIVER]
    assert answering._response_synthesizer._streaming is False
    assert len(chat.chat_history) == 8


def test_an_index_becomes_a_condensing_chat_engine(scripted: Scripted) -> None:
    """`as_chat_engine("condense_question", response_synthesizer=…)` keeps the synthesizer."""
    index = VectorStoreIndex([one.node for one in nodes()], embed_model=MockEmbedding(embed_dim=2))
    llm = speaker(scripted, "condensed?")
    chat = index.as_chat_engine(
        "condense_question",
        llm=llm,
        memory=memory(),
        response_synthesizer=synthesizer(scripted(dialogue(r2=0.9))),
        similarity_top_k=8,
    )

    assert chat.chat(QUESTION).response.startswith("river ")


def test_an_engine_behind_an_index_node_is_retrieved(scripted: Scripted) -> None:
    """Its answer becomes a node, in both ways; the next model does not read the whole report."""
    inner = engine(scripted(dialogue(r2=0.9)))
    index = SummaryIndex(objects=[IndexNode(text="rivers", index_id="rivers", obj=inner)])

    async def found() -> Any:
        return await index.as_retriever().aretrieve(QUESTION)

    for one in (*index.as_retriever().retrieve(QUESTION), *asyncio.run(found())):
        assert one.node.get_content() == RIVER
        shown = one.node.get_content(metadata_mode=MetadataMode.LLM)
        assert "trace" not in shown
        assert "Rationale" not in shown


def test_evaluators_judge_the_response(scripted: Scripted) -> None:
    """Faithfulness and relevancy read text and sources of the response."""
    judging = scripted("YES")
    judge = speaker(scripted, "YES")
    judge.endpoint = type(judge.endpoint)(judging.base_url, "judge")
    response = engine(scripted(dialogue(r2=0.9)), only_used=True).query(QUESTION)

    faithful = FaithfulnessEvaluator(llm=judge).evaluate_response(QUESTION, response)
    relevant = RelevancyEvaluator(llm=judge).evaluate_response(QUESTION, response)

    assert faithful.passing
    assert relevant.passing
    assert faithful.contexts == [one.get_content() for one in response.source_nodes]
    assert any("river 2 [1]" in text_of(body) for body in judging.chats)


# LlamaIndex's own runner calls it.
@pytest.mark.filterwarnings(r"ignore:asyncio_module\(\) is deprecated:DeprecationWarning")
def test_many_questions_are_judged_at_once(scripted: Scripted) -> None:
    """BatchEvalRunner asks the engine for several queries and judges each."""
    answering = engine(scripted(dialogue(r2=0.9)))
    faithful = FaithfulnessEvaluator(llm=speaker(scripted, "YES"))

    async def judged() -> Any:
        runner = BatchEvalRunner({"faithful": faithful}, workers=2)
        return await runner.aevaluate_queries(answering, queries=["a?", "b?", "c?"])

    found = asyncio.run(judged())

    assert [one.response for one in found["faithful"]] == [RIVER] * 3
    assert all(one.passing for one in found["faithful"])


def test_fused_results_are_answered_from(scripted: Scripted) -> None:
    """QueryFusionRetriever merges two retrievers' nodes by rank, synchronously and not."""
    llm = speaker(scripted, "another question?")
    fusing = QueryFusionRetriever(
        [Given(nodes()[:5]), Given(nodes()[3:])],
        llm=llm,
        mode="reciprocal_rerank",
        num_queries=2,
        similarity_top_k=8,
        use_async=False,
    )
    asked = SpeculativeQueryEngine(fusing, synthesizer(scripted(dialogue(r3=0.9))))

    responses = [asked.query(QUESTION), asyncio.run(asked.aquery(QUESTION))]

    assert {str(response) for response in responses} == {"river 3 [1]"}
    assert sorted(ids(responses[0].source_nodes)) == [f"n{n}" for n in range(8)]


def test_merged_parents_are_answered_from(scripted: Scripted) -> None:
    """AutoMergingRetriever replaces leaves by their parent, which is read and is the source."""
    # The default splitter of older versions downloads a word list.
    splitters = {
        name: TokenTextSplitter(chunk_size=size, chunk_overlap=0)
        for name, size in (("large", 128), ("small", 32))
    }
    parser = HierarchicalNodeParser.from_defaults(
        node_parser_ids=list(splitters), node_parser_map=splitters
    )
    text = " ".join(f"Fact number {n} is about river {n}." for n in range(12))
    made = parser.get_nodes_from_documents([Document(text=text)])
    store = SimpleDocumentStore()
    store.add_documents(made)
    context = StorageContext.from_defaults(docstore=store)
    leaves = VectorStoreIndex(
        get_leaf_nodes(made), storage_context=context, embed_model=MockEmbedding(embed_dim=2)
    )
    merging = AutoMergingRetriever(leaves.as_retriever(similarity_top_k=8), context, verbose=False)
    asked = SpeculativeQueryEngine(merging, synthesizer(scripted(dialogue(r0=0.9))))

    responses = [asked.query(QUESTION), asyncio.run(asked.aquery(QUESTION))]

    parents = {one.node_id for one in made} - {one.node_id for one in get_leaf_nodes(made)}
    for response in responses:
        assert str(response).startswith("river ")
        assert set(ids(response.source_nodes)) & parents


def test_a_reranker_decides_which_nodes_are_read(scripted: Scripted) -> None:
    """LLMRerank's order is the rank of the passages, and what it leaves out is not read."""
    ranking = "Doc: 6, Relevance: 9\nDoc: 2, Relevance: 8\nDoc: 4, Relevance: 7"
    rerank = LLMRerank(llm=speaker(scripted, ranking), top_n=3)
    server = scripted(dialogue(r5=0.9))
    asked = SpeculativeQueryEngine(Given(nodes()), synthesizer(server, num_drafts=2), [rerank])

    response = asked.query(QUESTION)
    awaited = asyncio.run(asked.aquery(QUESTION))

    assert response.metadata["specrag"]["trace"]["passages"] == ["n5", "n1", "n3"]
    assert sorted(ids(awaited.source_nodes)) == ["n1", "n3", "n5"]
