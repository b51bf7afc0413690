"""Whole applications: real models in LCEL and LangGraph, a FastAPI endpoint, and the page."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="needs the extra `langchain`")

from langchain_core.callbacks import (
    CallbackManagerForRetrieverRun,
    get_usage_metadata_callback,
)
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.runnables.utils import add
from langchain_kit import (
    DRAFTS,
    QUESTION,
    Retriever,
    Scripted,
    Tree,
    children,
    fails_drafts,
    make,
    prefers,
    text_of,
)
from scripted_server import Reply, ScriptedServer
from test_langchain_runnable import acollect

from specrag_integrations import EmbeddedPair
from specrag_integrations.corpus import questions
from specrag_integrations.langchain import (
    EndpointChat,
    SpeculativeRAGRunnable,
    create_speculative_documents_chain,
)

ROOT = Path(__file__).parents[1]
REGISTRY = os.environ.get("SPECRAG_REGISTRY", str(ROOT / "weights-mirror.toml"))
SMOL = "smollm2-135m-instruct"


class Corpus(BaseRetriever):
    """Brings the passages that BM25 found for the bundled questions."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        (row,) = [row for row in questions() if row.question == query]
        return [
            Document(passage.text, metadata={"title": passage.title})
            for passage in row.passages[:3]
        ]


@pytest.fixture(scope="module")
def pair() -> Iterator[EmbeddedPair]:
    """Run a small real model in both roles."""
    with EmbeddedPair(
        drafter=SMOL, verifier=SMOL, num_drafts=2, context_tokens=2048, registry=REGISTRY
    ) as pair:
        yield pair


def check_whole(output: dict[str, Any]) -> None:
    """Check what every output must hold, whatever the model wrote."""
    assert output["answer"]
    assert output["context"]
    assert all(isinstance(document, Document) for document in output["context"])
    record = json.loads(json.dumps(output["specrag"], allow_nan=False))
    assert record["text"] == output["answer"]
    assert record["abandoned"] == []
    assert record["tier"] == "reflection" or record["fallback_reason"]


def walk(run: Any) -> Iterator[Any]:
    """Yield a run and all below it."""
    yield run
    for child in run.child_runs:
        yield from walk(child)


# -------------------------------------------------------------------- real models


@pytest.mark.embedded
def test_a_chain_of_lcel_over_a_real_server(pair: EmbeddedPair) -> None:
    """Whole and streamed, sync and async; every request is in the tree, and counted."""
    question = questions()[0].question
    chain = {"context": Corpus(), "question": RunnablePassthrough()} | SpeculativeRAGRunnable(
        **pair.roles, num_drafts=2, max_answer_tokens=24
    )
    tree = Tree()

    with get_usage_metadata_callback() as usage:
        outputs = [chain.invoke(question, {"callbacks": [tree]})]
    outputs.append(add(asyncio.run(acollect(chain.astream(question)))))

    for output in outputs:
        check_whole(output)
        assert output["question"] == question
    (root,) = tree.roots
    (asked,) = [run for run in root.child_runs if run.name == "SpeculativeRAGRunnable"]
    steps = [step for step in outputs[0]["specrag"]["usage"]["steps"] if step["attempts"]]
    assert children(asked) == sorted({f"{step['kind']}_{step['index']}" for step in steps})
    counted = sum(one["total_tokens"] for one in usage.usage_metadata.values())
    told = sum(step["prompt_tokens"] + step["completion_tokens"] for step in steps)
    assert counted == told > 0


@pytest.mark.embedded
def test_a_node_of_langgraph_over_a_real_server(pair: EmbeddedPair) -> None:
    """A conversation's question is answered in its state, and its updates are streamed."""
    graphs = pytest.importorskip("langgraph.graph", reason="needs langgraph")
    question = questions()[1].question
    node = SpeculativeRAGRunnable(
        **pair.roles, retriever=Corpus(), num_drafts=2, max_answer_tokens=24
    ).as_node()
    graph = graphs.StateGraph(graphs.MessagesState)
    graph.add_node("rag", node)
    graph.add_edge(graphs.START, "rag")
    compiled = graph.compile()
    given = {"messages": [("user", question)]}

    modes = ["updates", "messages", "values"]
    tree = Tree()
    streamed = compiled.astream(given, {"callbacks": [tree]}, stream_mode=modes)
    parts = asyncio.run(acollect(streamed))

    state = [part for mode, part in parts if mode == "values"][-1]
    assert [message.type for message in state["messages"]] == ["human", "ai"]
    (update,) = [part for mode, part in parts if mode == "updates"]
    (message,) = update["rag"]["messages"]
    shown = [part[0] for mode, part in parts if mode == "messages"]
    assert {one.id for one in shown} == {message.id}
    assert "Rationale" not in "".join(one.content for one in shown)
    (root,) = tree.roots
    assert [name for run in walk(root) for name in children(run) if name.startswith("draft")]
    assert not tree.late


@pytest.mark.embedded
def test_the_apps_own_prompt_over_a_real_server(pair: EmbeddedPair) -> None:
    """The app's prompt drafts with a real model; its answer is streamed as text."""
    row = questions()[0]
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer from this:\n{context}"), ("human", "{input}")]
    )
    chain = create_speculative_documents_chain(
        pair.verifier, prompt, drafter=pair.drafter, num_drafts=2, max_answer_tokens=24
    )
    documents = [Document(passage.text) for passage in row.passages[:3]]

    parts = list(chain.stream({"input": row.question, "context": documents}))

    assert all(isinstance(part, str) for part in parts)
    assert "".join(parts).strip()


@pytest.mark.embedded
def test_a_real_chat_model_streams_what_it_writes(pair: EmbeddedPair) -> None:
    """The pieces of a stream are the whole reply, with the server's count of its tokens."""
    model = EndpointChat(endpoint=pair.drafter, max_tokens=12)

    whole = model.invoke("What is the capital of France?", logprobs=True)
    streamed = add(model.stream("What is the capital of France?"))

    assert streamed.text == whole.text
    assert whole.usage_metadata["output_tokens"] == 12
    assert streamed.usage_metadata["output_tokens"] == 12
    assert whole.response_metadata["finish_reason"] == "length"
    assert len(whole.response_metadata["logprobs"]["content"]) == 12


# -------------------------------------------------------------------- an HTTP endpoint of the app


@pytest.fixture
def server(scripted: Scripted) -> ScriptedServer:
    """Return a server whose verifier trusts river 1."""
    return scripted(prefers(1))


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an ASGI application on loopback, and stop it in the end."""
    uvicorn = pytest.importorskip("uvicorn", reason="needs uvicorn")
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", lifespan="off")
    running = uvicorn.Server(config)
    thread = threading.Thread(
        target=lambda: asyncio.run(running.serve(sockets=[listening])), daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join(20)
        listening.close()


def web_app(chain: Any) -> Any:
    """Return an application that streams a chain's answer as server-sent events."""
    fastapi = pytest.importorskip("fastapi", reason="needs fastapi")
    responses = pytest.importorskip("fastapi.responses")
    app = fastapi.FastAPI()

    @app.get("/ask")
    async def ask(question: str) -> Any:
        async def events() -> AsyncIterator[str]:
            async for part in chain.astream(question):
                shown = {key: value for key, value in part.items() if key == "answer"}
                sources = [document.id for document in part.get("context", [])]
                yield f"data: {json.dumps({**shown, 'sources': sources})}\n\n"

        return responses.StreamingResponse(events(), media_type="text/event-stream")

    return app


def ask_over_http(url: str) -> Any:
    """Open a question's stream of events."""
    return urllib.request.urlopen(f"{url}/ask?question=Which+river", timeout=30)  # noqa: S310


def test_an_answer_is_streamed_over_http(server: ScriptedServer) -> None:
    """The sources come first, then the answer's pieces."""
    server.respond = fails_drafts

    with serving(web_app(make(server))) as url, ask_over_http(url) as reply:
        lines = [json.loads(line[6:]) for line in reply if line.startswith(b"data: ")]

    assert lines[0]["sources"] == ["d0", "d1", "d2", "d3", "d4", "d5"]
    assert "".join(line.get("answer", "") for line in lines) == "All six rivers are meant [1]."


@pytest.mark.parametrize("when", ["while drafting", "while answering"])
def test_a_client_that_leaves_frees_the_servers(server: ScriptedServer, when: str) -> None:
    """A disconnect in the middle of a question gives up every request that is under way."""
    drafting = when == "while drafting"
    if drafting:
        server.delay = 30
    else:
        server.respond = lambda body, call: (
            Reply("one two three", chunk_delay=30)
            if body.get("stream")
            else fails_drafts(body, call)
        )
    waiting, asked = (DRAFTS, DRAFTS) if drafting else (1, DRAFTS + 1)

    with serving(web_app(make(server))) as url:
        client = socket.create_connection(url.removeprefix("http://").split(":"))
        client.sendall(b"GET /ask?question=Which+river HTTP/1.1\r\nHost: app\r\n\r\n")
        assert server.wait_for(lambda s: s.in_flight == waiting and len(s.chats) == asked)
        client.close()
        assert server.wait_for(lambda s: s.aborted == waiting, timeout=10)
        assert server.wait_idle()


def test_many_clients_are_served_at_once(server: ScriptedServer) -> None:
    """Questions of several clients share one loop, and each gets its own answer."""
    with serving(web_app(make(server))) as url:
        replies: list[bytes] = []

        def client() -> None:
            with ask_over_http(url) as reply:
                replies.append(reply.read())

        clients = [threading.Thread(target=client) for _ in range(4)]
        for one in clients:
            one.start()
        for one in clients:
            one.join(30)

    assert len(replies) == 4
    assert all(b"river 1" in reply for reply in replies)


def test_the_loop_of_the_app_is_never_blocked(server: ScriptedServer) -> None:
    """While drafts are under way, everything else on the loop goes on."""
    server.delay = 30
    chain = make(server)

    async def run() -> None:
        asking = asyncio.create_task(chain.ainvoke(QUESTION))
        while server.in_flight < DRAFTS:  # noqa: ASYNC110 - seen from the loop that the question runs on
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.wait([asking])

    asyncio.run(run())

    assert server.wait_for(lambda s: s.aborted == DRAFTS)


# -------------------------------------------------------------------- the page


def blocks() -> list[str]:
    """Return the page's blocks of Python, in order."""
    text = (ROOT / "docs" / "langchain.md").read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def test_every_block_of_the_page_runs(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, as it stands there, with the servers of the page on loopback."""
    for needed in ("langchain_openai", "langgraph", "langchain_classic", "cloudpickle"):
        pytest.importorskip(needed, reason="the page uses it")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    server.respond = lambda body, call: (
        Reply("The Rhine.") if "Name a river" in text_of(body) else prefers(0)(body, call)
    )
    names: dict[str, Any] = {"retriever": Retriever(), "question": QUESTION}
    code = blocks()
    assert len(code) >= 10

    for block in code:
        here = re.sub(r"http://gpu:800\d/v1", server.base_url, block)
        before = len(server.chats)
        exec(compile(here, "docs/langchain.md", "exec"), names)  # noqa: S102 - our own page
        if "FastAPI()" in block:
            with serving(names["app"]) as url, ask_over_http(url) as reply:
                assert b'"river 0"' in reply.read()
        asks = re.search(r"\.(a?invoke|a?stream|batch)\(", block)
        assert bool(asks) == (len(server.chats) > before), block

    assert "river 0" in capsys.readouterr().out
