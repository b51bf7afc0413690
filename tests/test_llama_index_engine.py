"""The LlamaIndex engine and synthesizer, against a scripted server that speaks real HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Fault, Reply, ScriptedServer, is_verification

pytest.importorskip("llama_index.core")

from llama_index.core import MockEmbedding, PromptTemplate, VectorStoreIndex
from llama_index.core.base.response.schema import (
    AsyncStreamingResponse,
    Response,
    StreamingResponse,
)
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.indices.query.query_transform.base import IdentityQueryTransform
from llama_index.core.postprocessor import LongContextReorder, SimilarityPostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine, TransformQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import ImageNode, MetadataMode, NodeWithScore, QueryBundle, TextNode
from llama_index_kit import (
    FALLBACK,
    QUESTION,
    Given,
    Json,
    Scripted,
    dialogue,
    engine,
    ids,
    is_draft,
    is_fallback,
    llm_of_settings,
    nodes,
    synthesizer,
    text_from,
    text_of,
    unknown,
)

from specrag_integrations import (
    ConfigurationError,
    Endpoint,
    MultiPerspective,
    NoAnswerError,
    NoAnswerReason,
)
from specrag_integrations.llama_index import (
    EndpointLLM,
    SpeculativeQueryEngine,
    SpeculativeSynthesizer,
)
from specrag_integrations.portal import portal

# ---------------------------------------------------------------- the four ways to ask


def test_the_answer_is_the_same_however_it_is_asked_for(scripted: Scripted) -> None:
    """All four ways of asking give one answer with one set of sources."""
    server = scripted(dialogue(r2=0.9))
    plain, streaming = engine(server), engine(server, streaming=True)

    async def asked() -> list[Any]:
        response = await streaming.aquery(QUESTION)
        return [await plain.aquery(QUESTION), (await text_from(response), response)]

    synchronous = plain.query(QUESTION)
    streamed = streaming.query(QUESTION)
    awaited, (text, astreamed) = asyncio.run(asked())

    assert isinstance(synchronous, Response)
    assert isinstance(streamed, StreamingResponse)
    assert isinstance(astreamed, AsyncStreamingResponse)
    texts = [synchronous.response, str(awaited), "".join(streamed.response_gen), text]
    assert set(texts) == {"river 2 [1]"}
    responses = [synchronous, awaited, streamed, astreamed]
    assert {tuple(ids(response.source_nodes)) for response in responses} == {
        tuple(ids(synchronous.source_nodes))
    }
    told = [response.metadata["specrag"]["selection"]["winner"] for response in responses]
    assert len(set(told)) == 1


def test_a_fallback_is_the_same_however_it_is_asked_for(scripted: Scripted) -> None:
    """All four ways fall back, streamed in several pieces, and say why before the first of them."""
    server = scripted(unknown)
    plain, streaming = engine(server), engine(server, streaming=True)

    async def asked() -> tuple[Any, Any, list[str], str]:
        response = await streaming.aquery(QUESTION)
        reason = response.metadata["specrag"]["fallback_reason"]
        pieces = [piece async for piece in response.async_response_gen()]
        return await plain.aquery(QUESTION), response, pieces, reason

    streamed = streaming.query(QUESTION)
    before = streamed.metadata["specrag"]["fallback_reason"]
    pieces = list(streamed.response_gen)
    awaited, astreamed, apieces, abefore = asyncio.run(asked())

    assert pieces == apieces
    assert len(pieces) > 1
    assert {str(plain.query(QUESTION)), str(awaited), "".join(pieces)} == {FALLBACK}
    assert before == abefore == "no_usable_draft"
    for response in (streamed, astreamed, awaited):
        assert ids(response.source_nodes) == [f"n{n}" for n in range(8)]
        assert response.metadata["specrag"]["usage"]["requests"] == 4


def test_queries_work_inside_a_running_loop_and_in_one_after_another(scripted: Scripted) -> None:
    """Synchronous queries in a running loop, three times, and two loops one after another."""
    server = scripted(dialogue(r2=0.9))
    plain, streaming = engine(server), engine(server, streaming=True)

    async def cell() -> list[str]:
        return [str(plain.query(QUESTION)) for _ in range(3)] + [str(streaming.query(QUESTION))]

    async def asked() -> str:
        return str(await plain.aquery(QUESTION)) + await text_from(await streaming.aquery(QUESTION))

    assert set(asyncio.run(cell())) == {"river 2 [1]"}
    assert [asyncio.run(asked()) for _ in range(2)] == ["river 2 [1]river 2 [1]"] * 2


@pytest.mark.parametrize("respond", [dialogue(r2=0.9), unknown], ids=["draft", "fallback"])
def test_an_asynchronous_stream_can_be_read_from_another_loop(
    scripted: Scripted, respond: Any
) -> None:
    """str() in the running loop reads it in a loop of LlamaIndex's; a later loop may as well."""
    streaming = engine(scripted(respond), streaming=True)
    expected = FALLBACK if respond is unknown else "river 2 [1]"

    async def shown() -> str:
        return str(await streaming.aquery(QUESTION))

    async def asked() -> Any:
        return await streaming.aquery(QUESTION)

    assert asyncio.run(shown()) == expected
    response = asyncio.run(asked())
    assert str(response) == expected


PREAMBLE = """
import sys
sys.path.insert(0, {tests!r})
from types import SimpleNamespace
from llama_index_kit import QUESTION, engine, text_from
plain, streaming = (
    engine(SimpleNamespace(base_url={url!r}), streaming=streaming) for streaming in (False, True)
)
"""


@pytest.mark.filterwarnings("ignore")  # what Jupyter's own packages say is not our concern
def test_three_queries_in_a_notebook(scripted: Scripted) -> None:
    """A real kernel, whose loop always runs: three queries, an awaited one, and both streams."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    url = scripted(dialogue(r2=0.9)).base_url
    cells = [
        PREAMBLE.format(tests=str(Path(__file__).parent), url=url),
        *["print(plain.query(QUESTION))"] * 3,
        "print(await plain.aquery(QUESTION))",
        "print(streaming.query(QUESTION))",
        "print(await text_from(await streaming.aquery(QUESTION)))",
        "print(await streaming.aquery(QUESTION))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])

    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()

    # Older versions of LlamaIndex warn while they are imported.
    outputs = [[o.text for o in cell.outputs if o.name == "stdout"] for cell in notebook.cells]
    assert outputs == [[], *[["river 2 [1]\n"]] * 7]


def test_a_query_never_blocks_the_loop(scripted: Scripted) -> None:
    """The loop goes on while a retriever that is only synchronous, and the models, are awaited.

    They go on only once the loop has been seen to.
    """
    beats, went_on = threading.Event(), threading.Event()

    class Slow(Given):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            assert beats.wait(5), "the loop stood still during the retrieval"
            return super()._retrieve(query_bundle)

    def respond(body: Json, call: int) -> Reply:
        assert went_on.wait(5), "the loop stood still during the drafts"
        return dialogue(r2=0.9)(body, call)

    server = scripted(respond)
    asked = SpeculativeQueryEngine(Slow(nodes()), synthesizer(server))

    async def heart() -> None:
        while not beats.is_set() or not server.chats:
            await asyncio.sleep(0.001)
            beats.set()
        went_on.set()

    async def both() -> str:
        beating = asyncio.create_task(heart())
        response = await asked.aquery(QUESTION)
        await beating
        return str(response)

    assert asyncio.run(both()) == "river 2 [1]"


def test_a_synchronous_query_leaves_the_callers_loop_alone(scripted: Scripted) -> None:
    """Nothing is scheduled on the loop that a synchronous query is called in."""
    asked = engine(scripted(dialogue(r2=0.9)))

    async def cell() -> int:
        asked.query(QUESTION)
        return len(asyncio.all_tasks())

    assert asyncio.run(cell()) == 1


def test_a_stream_that_is_left_early_ends_its_request(scripted: Scripted) -> None:
    """Closing the response's generator cancels what is still written, on both paths."""

    def respond(body: Json, call: int) -> Any:
        if is_fallback(body):
            return Reply("word " * 50, chunk_delay=0.2)
        return unknown(body, call)

    server = scripted(respond)
    streaming = engine(server, streaming=True)

    async def leave() -> None:
        response = await streaming.aquery(QUESTION)
        pieces = response.response_gen
        assert await anext(pieces)
        await pieces.aclose()

    response = streaming.query(QUESTION)
    assert next(response.response_gen)
    response.response_gen.close()
    assert server.wait_for(lambda s: s.aborted == 1)
    asyncio.run(leave())
    assert server.wait_for(lambda s: s.aborted == 2)
    assert server.wait_idle()


def test_a_cancelled_query_ends_its_requests(scripted: Scripted) -> None:
    """A cancellation reaches the drafts under way, and nothing is left in flight."""
    server = scripted(Fault(hang=True))
    asked = engine(server)

    async def cancel() -> None:
        asking = asyncio.create_task(asked.aquery(QUESTION))
        assert await asyncio.to_thread(server.wait_for, lambda s: s.in_flight == 3)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(cancel())

    assert server.wait_idle()
    assert server.aborted >= 3


# ---------------------------------------------------------------- nodes and sources


def test_the_winners_nodes_come_first_and_its_citations_count_them(scripted: Scripted) -> None:
    """[n] is the nth source; the others follow as retrieved; all are the retriever's objects."""
    server = scripted(dialogue(r2=0.9))
    found = nodes()

    response = engine(server, found).query(QUESTION)

    shown = next(text_of(b) for b in server.chats if is_draft(b) and "Fact number 2" in text_of(b))
    first, second = response.source_nodes[:2]
    assert f"[1] {first.node.get_content()}" in shown
    assert f"[2] {second.node.get_content()}" in shown
    assert response.response == "river 2 [1]"
    rest = [n for n in ids(found) if n not in ids([first, second])]
    assert ids(response.source_nodes)[2:] == rest
    assert {id(one) for one in response.source_nodes} == {id(one) for one in found}


def test_only_used_nodes_are_sources_where_that_is_asked_for(scripted: Scripted) -> None:
    """`only_used` leaves out what the winner did not read; a fallback reads all that fit."""
    won = engine(scripted(dialogue(r2=0.9)), only_used=True).query(QUESTION)
    fell_back = engine(scripted(unknown), only_used=True).query(QUESTION)

    assert len(won.source_nodes) == 2
    assert ids(won.source_nodes)[0] == "n2"
    assert ids(fell_back.source_nodes) == [f"n{n}" for n in range(8)]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_fallbacks_citations_count_the_nodes_that_fitted(
    scripted: Scripted, streaming: bool
) -> None:
    """A node that did not fit into the context is no source that `[n]` could name."""

    def respond(body: Json, call: int) -> Reply:
        return Reply("River 1 [1].") if is_fallback(body) else unknown(body, call)

    server = scripted(respond, kind="vllm", context_tokens=800)
    found = nodes(6)
    found[0].node.set_content("long " * 1500)  # type: ignore[attr-defined]
    every = engine(server, found, streaming=streaming)
    used = engine(server, found, streaming=streaming, only_used=True)

    async def asked(one: SpeculativeQueryEngine) -> Any:
        return await one.aquery(QUESTION)

    for ask in (lambda one: one.query(QUESTION), lambda one: asyncio.run(asked(one))):
        # Before anything is read of it.
        assert ids(ask(every).source_nodes) == ["n1", "n2", "n3", "n4", "n5", "n0"]
        response = ask(used)
        assert ids(response.source_nodes) == ["n1", "n2", "n3", "n4", "n5"]
        assert str(response) == "River 1 [1]."
    shown = text_of(next(body for body in server.chats if is_fallback(body)))
    assert "Fact number 1" in shown
    assert "long long" not in shown


def test_additional_sources_come_last_and_are_not_read(scripted: Scripted) -> None:
    """They are among the response's sources, and in no prompt."""
    server = scripted(dialogue(r2=0.9))
    extra = NodeWithScore(node=TextNode(text="An extra fact.", id_="extra"))

    response = synthesizer(server).synthesize(QUESTION, nodes(), [extra])

    assert response.source_nodes[-1] is extra
    assert not any("extra fact" in text_of(body) for body in server.chats)


@pytest.mark.parametrize("respond", [dialogue(r2=0.9), unknown], ids=["draft", "fallback"])
def test_sources_are_there_before_the_first_piece(scripted: Scripted, respond: Any) -> None:
    """A stream's sources are attached before anything is read of it, in both modes."""
    streaming = engine(scripted(respond), streaming=True)

    async def asked() -> list[str]:
        return ids((await streaming.aquery(QUESTION)).source_nodes)

    response = streaming.query(QUESTION)

    assert len(response.source_nodes) == 8
    assert asyncio.run(asked()) == ids(response.source_nodes)


def test_the_metadata_tells_how_the_answer_came_about(scripted: Scripted) -> None:
    """It is JSON, holds each draft and score, the nodes' own metadata, and passages by id alone."""
    found = nodes(metadata={"page": 7})
    response = engine(scripted(dialogue(r2=0.9)), found).query(QUESTION)

    told = response.metadata["specrag"]
    assert json.loads(json.dumps(response.metadata)) == response.metadata
    assert response.metadata["n3"] == {"page": 7}
    assert len(told["trace"]["drafts"]) == len(told["trace"]["scores"]) == 3
    assert told["passages"][0] == "n2"
    assert told["tier"] == "reflection"
    assert told["usage"]["requests"] == 6
    assert "Fact number" not in json.dumps(told["trace"]["passages"])
    assert str(told) == "a draft was selected"


def test_a_streams_metadata_is_complete_at_its_end(scripted: Scripted) -> None:
    """The same object is filled in: what the app holds already is whole once the stream is read."""
    response = engine(scripted(unknown), streaming=True).query(QUESTION)
    held = response.metadata["specrag"]
    assert set(held) == {"selection", "fallback_reason"}

    str(response)

    assert held["usage"]["requests"] == 4
    assert held["fallback_reason"] == "no_usable_draft"
    assert str(held) == "fell back to standard RAG (no_usable_draft)"


def test_models_read_what_llama_index_shows_them(scripted: Scripted) -> None:
    """Metadata, excluded keys and templates are applied, in drafts and in the fallback."""
    server = scripted(unknown)
    options: Json = {
        "metadata": {"author": "Ada", "secret": "hidden"},
        "excluded_llm_metadata_keys": ["secret"],
        "text_template": "<{metadata_str}> {content}",
    }
    found = nodes(**options)

    engine(server, found).query(QUESTION)

    seen = found[0].node.get_content(metadata_mode=MetadataMode.LLM)
    assert "author: Ada" in seen
    fallback = next(text_of(body) for body in server.chats if is_fallback(body))
    assert seen in fallback
    assert any(seen in text_of(body) for body in server.chats if is_draft(body))
    assert not any("hidden" in text_of(body) for body in server.chats)


def test_the_nodes_own_embeddings_group_them(scripted: Scripted) -> None:
    """Where every node has one, no embedding is asked for, and clusters follow the vectors."""
    found = nodes(4)
    for place, one in enumerate(found):
        one.node.embedding = [1.0, 0.0] if place % 2 else [0.0, 1.0]
    asked: list[Any] = []

    class Counting(MockEmbedding):
        def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
            asked.append(texts)
            return super()._get_text_embeddings(texts)

    answering = synthesizer(
        scripted(dialogue(r0=0.9)),
        embedder=Counting(embed_dim=2),
        partitioner=MultiPerspective(),
        num_drafts=4,
    )
    response = answering.synthesize(QUESTION, found)

    subsets = response.metadata["specrag"]["trace"]["subsets"]
    assert asked == []
    assert sorted(subsets) == [[0, 1], [0, 3], [1, 2], [2, 3]]


def test_an_embedding_is_asked_once_for_all_nodes(scripted: Scripted) -> None:
    """A LlamaIndex embedding gets all texts in one batch, off the loop, where nodes have none."""
    asked: list[tuple[int, str]] = []

    class Counting(MockEmbedding):
        def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
            asked.append((len(texts), threading.current_thread().name))
            return [[float(len(text)), float(place)] for place, text in enumerate(texts)]

    answering = synthesizer(
        scripted(dialogue(r0=0.9)),
        embedder=Counting(embed_dim=2, embed_batch_size=100),
        partitioner=MultiPerspective(),
    )
    response = asyncio.run(answering.asynthesize(QUESTION, nodes()))

    assert [count for count, _ in asked] == [8]
    assert asked[0][1] not in {"MainThread", "specrag-io"}
    assert not any("TF-IDF" in note for note in response.metadata["specrag"]["trace"]["notes"])


def test_empty_and_image_nodes_are_sources_and_are_not_read(scripted: Scripted) -> None:
    """A node without text is in no prompt, is told of, and stays a source."""
    server = scripted(dialogue(r2=0.9))
    picture = ImageNode(image_path="a.png", id_="picture", metadata={"file": "a.png"})
    found = [
        *nodes(),
        NodeWithScore(node=picture),
        NodeWithScore(node=TextNode(text="  ", id_="blank")),
    ]

    response = engine(server, found).query(QUESTION)

    notes = response.metadata["specrag"]["trace"]["notes"]
    assert ids(response.source_nodes)[-2:] == ["picture", "blank"]
    assert [note for note in notes if "empty" in note] == [
        "passage 8 picture: empty",
        "passage 9 blank: empty",
    ]
    assert not any("a.png" in text_of(body) for body in server.chats)


@pytest.mark.parametrize("found", [[], [NodeWithScore(node=TextNode(text=""))]], ids=["no", "bare"])
def test_without_text_the_response_is_empty_and_of_the_type_asked_for(
    server: ScriptedServer, found: list[NodeWithScore]
) -> None:
    """LlamaIndex's empty response comes back, streamed where streaming is on; nothing is sent."""
    plain, streaming = engine(server, found), engine(server, found, streaming=True)

    async def asked() -> tuple[Any, Any]:
        return await plain.aquery(QUESTION), await streaming.aquery(QUESTION)

    response, streamed = plain.query(QUESTION), streaming.query(QUESTION)
    awaited, astreamed = asyncio.run(asked())

    assert isinstance(response, Response)
    assert isinstance(streamed, StreamingResponse)
    assert isinstance(astreamed, AsyncStreamingResponse)
    assert {str(one) for one in (response, streamed, awaited, astreamed)} == {"Empty Response"}
    assert len(response.source_nodes) == len(found)
    assert server.requests == []


def test_bare_texts_are_answered_from_as_well(scripted: Scripted) -> None:
    """`get_response` and `aget_response` take chunks; streamed, they return generators."""
    server = scripted(dialogue(r0=0.9))
    chunks = [one.node.get_content() for one in nodes(4)]
    plain, streaming = synthesizer(server), synthesizer(server, streaming=True)

    async def asked() -> tuple[str, str]:
        pieces = await streaming.aget_response(QUESTION, chunks)
        return (
            str(await plain.aget_response(QUESTION, chunks)),
            "".join([piece async for piece in pieces]),  # type: ignore[union-attr]
        )

    assert plain.get_response(QUESTION, chunks) == "river 0 [1]"
    assert "".join(streaming.get_response(QUESTION, chunks)) == "river 0 [1]"
    assert asyncio.run(asked()) == ("river 0 [1]", "river 0 [1]")


# ---------------------------------------------------------------- failures


def test_one_failed_draft_does_not_lose_the_answer(scripted: Scripted) -> None:
    """It is told of in the metadata; the others still compete."""

    def respond(body: Json, call: int) -> Any:
        if is_draft(body) and "Fact number 0 " in text_of(body):
            return Fault(400, body={"error": {"message": "no room"}})
        return dialogue(r2=0.9)(body, call)

    response = engine(scripted(respond)).query(QUESTION)

    failed = [d for d in response.metadata["specrag"]["trace"]["drafts"] if "failed" in d]
    assert response.response == "river 2 [1]"
    assert len(failed) == 1
    assert "no room" in failed[0]["failed"]


def test_a_question_without_an_answer_raises_why(scripted: Scripted) -> None:
    """Without a fallback, and where it fails, the error says what failed; in a stream as well."""
    server = scripted(unknown)
    broken = scripted(lambda body, call: Fault(400) if is_fallback(body) else unknown(body, call))

    with pytest.raises(NoAnswerError) as without:
        engine(server, fallback=None).query(QUESTION)
    with pytest.raises(NoAnswerError) as failed:
        asyncio.run(engine(broken).aquery(QUESTION))
    streamed = engine(broken, streaming=True).query(QUESTION)
    with pytest.raises(NoAnswerError) as late:
        str(streamed)

    assert without.value.reason is NoAnswerReason.NO_USABLE_DRAFT
    assert failed.value.reason is late.value.reason is NoAnswerReason.FALLBACK_FAILED


def test_a_refinement_that_breaks_off_leaves_no_traces_in_a_stream(scripted: Scripted) -> None:
    """A draft's answer is streamed once it is settled, so that it never begins anew."""

    def respond(body: Json, call: int) -> Any:
        if is_fallback(body):
            return Fault(500, stream_break_after=2, reply=Reply("half of a refined answer"))
        return dialogue(r2=0.9)(body, call)

    response = engine(scripted(respond), streaming=True, refine="always").query(QUESTION)

    assert "".join(response.response_gen) == "river 2 [1]"


# ---------------------------------------------------------------- taking an engine over


def index_of(count: int = 8) -> VectorStoreIndex:
    """Return a real index over the nodes."""
    return VectorStoreIndex(
        [one.node for one in nodes(count)], embed_model=MockEmbedding(embed_dim=4)
    )


def test_one_line_takes_an_engine_over(scripted: Scripted) -> None:
    """Retriever, postprocessors, LLM, streaming, prompt and callbacks of the engine are kept."""
    server, drafts = scripted(unknown), scripted(unknown)
    counter = TokenCountingHandler()
    manager = CallbackManager([counter])
    llm = EndpointLLM(Endpoint(server.base_url, "large"), callback_manager=manager)
    template = PromptTemplate("In one word. {context_str} Query: {query_str}")
    cutoff = SimilarityPostprocessor(similarity_cutoff=-1.0)
    old = RetrieverQueryEngine.from_args(
        index_of().as_retriever(similarity_top_k=6),
        llm=llm,
        streaming=True,
        text_qa_template=template,
        node_postprocessors=[cutoff],
        callback_manager=manager,
    )
    llm.callback_manager = manager  # which from_args has set to that of `Settings`

    new = SpeculativeQueryEngine.from_engine(old, drafter=Endpoint(drafts.base_url, "small"))
    response = new.query(QUESTION)

    assert isinstance(response, StreamingResponse)
    assert str(response) == FALLBACK
    assert len(response.source_nodes) == 6
    assert new.retriever is old.retriever
    assert new._node_postprocessors == [cutoff]
    assert new.callback_manager is old.callback_manager
    assert text_of(server.chats[-1]).startswith("In one word. ")
    assert all("In one word. " in text_of(body) for body in drafts.chats)
    assert {body["model"] for body in drafts.chats} == {"small"}
    assert len(counter.llm_token_counts) == len(server.chats) + len(drafts.chats)
    assert type(old) is RetrieverQueryEngine
    assert not isinstance(old._response_synthesizer, type(new._response_synthesizer))


def test_an_option_given_to_from_engine_outweighs_the_engines(scripted: Scripted) -> None:
    """The verifier, the streaming flag and the prompt can be others."""
    server, other = scripted(unknown), scripted(unknown)
    llm = EndpointLLM(Endpoint(server.base_url, "large"))
    old = RetrieverQueryEngine.from_args(Given(nodes()), llm=llm, streaming=True)

    new = SpeculativeQueryEngine.from_engine(
        old,
        drafter=Endpoint(other.base_url, "small"),
        verifier=Endpoint(other.base_url, "another"),
        streaming=False,
        text_qa_template=PromptTemplate("Mine: {context_str} {query_str}"),
    )

    assert isinstance(new.query(QUESTION), Response)
    assert text_of(other.chats[-1]).startswith("Mine: ")
    assert server.requests == []


def test_an_engine_of_ours_keeps_its_options(scripted: Scripted) -> None:
    """from_engine takes over the drafting, too; what is given outweighs it."""
    server, other = scripted(unknown), scripted(unknown)
    template = PromptTemplate("Rationale and Answer: {context_str} {query_str}")
    old = engine(server, num_drafts=2, only_used=True, draft_template=template, deadline=60.0)

    new = SpeculativeQueryEngine.from_engine(
        old, drafter=Endpoint(other.base_url, "small"), passages_per_draft=4
    )
    new.query(QUESTION)

    assert len(other.chats) == 2
    assert all(text_of(body).startswith("Rationale and Answer: ") for body in other.chats)
    assert {text_of(body).count("Fact number") for body in other.chats} == {4}
    assert [is_fallback(body) for body in server.chats] == [True]
    kept = new._response_synthesizer._configuration()
    before = old._response_synthesizer._configuration()
    changed = {name for name, value in kept.items() if value != before[name]}
    assert changed == {"drafter", "passages_per_draft"}
    assert kept["verifier"] is before["verifier"]


def test_a_synthesizer_fits_into_an_ordinary_engine(scripted: Scripted) -> None:
    """`index.as_query_engine(response_synthesizer=…)` is the whole change."""
    server = scripted(dialogue(r2=0.9))
    answering = synthesizer(server, streaming=True)

    with llm_of_settings(EndpointLLM(Endpoint(server.base_url, "large"))):
        asked = index_of().as_query_engine(response_synthesizer=answering, similarity_top_k=8)

    response = asked.query(QUESTION)
    assert isinstance(response, StreamingResponse)
    assert str(response).startswith("river ")
    assert len(response.source_nodes) == 8


def test_the_verifier_is_the_llm_of_the_settings_by_default(scripted: Scripted) -> None:
    """Without a verifier it is `Settings.llm`; without one of these, the error says what to set."""
    server, other = scripted(dialogue(r2=0.9)), scripted(dialogue())
    drafter = Endpoint(other.base_url, "small")

    with llm_of_settings(EndpointLLM(Endpoint(server.base_url, "large"))):
        answering = SpeculativeSynthesizer(drafter)
    answering.synthesize(QUESTION, nodes())

    assert {body["model"] for body in server.chats} == {"large"}
    with llm_of_settings(None), pytest.raises(ConfigurationError, match=r"or set Settings.llm"):
        SpeculativeSynthesizer(drafter)


def test_postprocessors_change_what_is_read(scripted: Scripted) -> None:
    """Filtering and reordering happen between retriever and drafts; the order is the rank."""
    server = scripted(unknown)
    asked = SpeculativeQueryEngine(
        Given(nodes()),
        synthesizer(server),
        [SimilarityPostprocessor(similarity_cutoff=0.35), LongContextReorder()],
    )

    response = asked.query(QUESTION)
    awaited = asyncio.run(asked.aquery(QUESTION))

    assert ids(response.source_nodes) == ids(awaited.source_nodes)
    assert sorted(ids(response.source_nodes)) == [f"n{n}" for n in range(7)]
    assert ids(response.source_nodes) != sorted(ids(response.source_nodes))
    trace = response.metadata["specrag"]["trace"]
    assert trace["passages"] == ids(response.source_nodes)


def test_another_retriever_leaves_the_rest_as_it_is(scripted: Scripted) -> None:
    """`with_retriever` keeps class, synthesizer, postprocessors and callbacks."""
    asked = engine(scripted(dialogue(r1=0.9)))

    other = asked.with_retriever(Given(nodes(2)))

    assert type(other) is SpeculativeQueryEngine
    assert other._response_synthesizer is asked._response_synthesizer
    assert other.callback_manager is asked.callback_manager
    assert len(other.query(QUESTION).source_nodes) == 2


def test_several_drafters_take_turns(scripted: Scripted) -> None:
    """A sequence of drafters is taken as the core takes it."""
    first, second, verifier = scripted(), scripted(), scripted(dialogue(r2=0.9))
    first.respond = second.respond = dialogue()
    drafters = [Endpoint(one.base_url, "scripted") for one in (first, second)]

    synthesizer(
        verifier, drafter=drafters, verifier=Endpoint(verifier.base_url, "scripted")
    ).synthesize(QUESTION, nodes())

    assert (len(first.chats), len(second.chats)) == (2, 1)
    assert all(is_verification(body) for body in verifier.chats)


# ---------------------------------------------------------------- what cannot work


class Rich:
    """Stands for a class of structured answers."""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"output_cls": Rich}, "output_cls cannot be kept"),
        ({"response_mode": "compact"}, "has one mode"),
        ({"refine_template": 1}, "refine_template: there is no such option; known are"),
        ({"llm": 1}, "there is no such option; .* the large model is verifier="),
        ({"instructions": "x"}, "instructions stand in text_qa_template or draft_template here"),
        ({"num_drafts": 0}, "num_drafts=0"),
        ({"drafter": "http://gpu:8001"}, "drafter must be an Endpoint or a LlamaIndex LLM"),
        ({"drafter": []}, "drafter is an empty list"),
        ({"verifier": 3}, "verifier must be an Endpoint or a LlamaIndex LLM"),
        ({"text_qa_template": "{context_str}"}, "must be a LlamaIndex prompt template"),
        ({"text_qa_template": PromptTemplate("{query_str}")}, "does not show the passages"),
        ({"draft_template": PromptTemplate("{query_str}")}, "draft_template does not show"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_made(
    server: ScriptedServer, options: Json, told: str
) -> None:
    """Every error names the value and what to do."""
    with pytest.raises(ConfigurationError, match=told):
        synthesizer(server, **options)


def test_an_engine_of_another_kind_is_refused(server: ScriptedServer) -> None:
    """from_engine, the constructor and structured engines say what to write instead."""

    class Answer(BaseModel):
        city: str

    llm = EndpointLLM(Endpoint(server.base_url, "large"))
    drafter = Endpoint(server.base_url, "small")
    structured = RetrieverQueryEngine.from_args(Given(nodes()), llm=llm, output_cls=Answer)
    wrapped = TransformQueryEngine(engine(server), IdentityQueryTransform())
    ordinary = get_response_synthesizer(llm=llm)

    with pytest.raises(ConfigurationError, match="output_cls cannot be kept"):
        SpeculativeQueryEngine.from_engine(structured, drafter=drafter)
    with pytest.raises(ConfigurationError, match="this is a TransformQueryEngine"):
        SpeculativeQueryEngine.from_engine(wrapped, drafter=drafter)
    with pytest.raises(ConfigurationError, match=r"from_args\(retriever, drafter=…"):
        SpeculativeQueryEngine(Given(nodes()), ordinary)
    with pytest.raises(ConfigurationError, match=r"index.as_retriever\(\)"):
        SpeculativeQueryEngine(index_of(), synthesizer(server))  # type: ignore[arg-type]


def test_variables_of_a_call_are_refused_clearly(server: ScriptedServer) -> None:
    """Response arguments that would be lost silently are an error."""
    with pytest.raises(ValueError, match="takes no tone; fill variables"):
        synthesizer(server).synthesize(QUESTION, nodes(), tone="kind")


def test_the_missing_framework_is_named_with_its_extra() -> None:
    """Without llama-index-core, the import says what to install."""
    import subprocess
    import sys

    script = (
        "import sys; sys.modules['llama_index'] = None\n"
        "try:\n    import specrag_integrations.llama_index\n"
        "except ImportError as error: print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )

    assert "pip install 'specrag-integrations[llama-index]'" in said.stdout


def test_the_portal_is_free_after_all(server: ScriptedServer) -> None:
    """No task of a question is left behind on the background loop."""
    engine(server).query(QUESTION)

    async def tasks() -> int:
        return len(asyncio.all_tasks())

    assert portal.run(tasks()) == 1
