"""The node of LangGraph: state, reducers, messages and every stream mode."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

pytest.importorskip("langgraph", reason="needs langgraph")

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_kit import (
    DOCUMENTS,
    DRAFTS,
    QUESTION,
    Scripted,
    Tree,
    children,
    fails_drafts,
    is_verification,
    make,
    prefers,
    steps,
    text_of,
    writes,
)
from langchain_kit import Foreign as ForeignModel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from pydantic import BaseModel
from scripted_server import ScriptedServer
from test_langchain_runnable import acollect
from typing_extensions import TypedDict

from specrag_integrations import InputError


class State(TypedDict, total=False):
    """A state whose lists grow."""

    question: str
    context: Annotated[list[Document], operator.add]
    answer: str
    specrag: dict[str, Any]
    log: Annotated[list[str], operator.add]


@pytest.fixture
def server(scripted: Scripted) -> ScriptedServer:
    """Return a server whose verifier trusts river 1."""
    return scripted(prefers(1))


def graph_of(node: Any, state: Any = State, **options: Any) -> Any:
    """Return a graph of one node."""
    graph = StateGraph(state)
    graph.add_node("rag", node)
    graph.add_edge(START, "rag")
    graph.add_edge("rag", END)
    return graph.compile(**options)


Invoke = Callable[[Any, Any], dict[str, Any]]
INVOKES: dict[str, Invoke] = {
    "invoke": lambda graph, state: graph.invoke(state),
    "ainvoke": lambda graph, state: asyncio.run(graph.ainvoke(state)),
}
both = pytest.mark.parametrize("invoke", INVOKES.values(), ids=INVOKES)


@both
def test_a_node_adds_what_it_found_out(server: ScriptedServer, invoke: Invoke) -> None:
    """A list with a reducer that the node only read is not added to itself."""
    graph = graph_of(make(server, retriever=None).as_node())

    state = invoke(graph, {"question": QUESTION, "context": DOCUMENTS, "log": ["asked"]})

    assert state["answer"] == "river 1"
    assert state["context"] == DOCUMENTS
    assert state["log"] == ["asked"]
    assert state["specrag"]["passages"][0]["id"] == "d1"


@both
def test_a_node_that_retrieves_adds_the_documents(server: ScriptedServer, invoke: Invoke) -> None:
    """With a retriever the documents are the node's own, the used ones first."""
    state = invoke(graph_of(make(server).as_node()), {"question": QUESTION})

    assert [document.id for document in state["context"]][:2] == ["d1", "d5"]
    assert len(state["context"]) == len(DOCUMENTS)


@both
def test_a_conversation_gets_one_answer(server: ScriptedServer, invoke: Invoke) -> None:
    """In a MessagesState the last turn of a user is the question, those before it the history."""
    graph = graph_of(make(server).as_node(), MessagesState)
    turns = [HumanMessage("Is there a ferry?"), AIMessage("There was one."), ("user", QUESTION)]

    state = invoke(graph, {"messages": turns})

    assert [message.content for message in state["messages"]] == [
        "Is there a ferry?",
        "There was one.",
        QUESTION,
        "river 1",
    ]
    assert isinstance(state["messages"][-1], AIMessage)
    drafts = [body for body in server.chats if not is_verification(body)]
    assert all("There was one." in text_of(body) for body in drafts)
    assert all(text_of(body).count(QUESTION) == 1 for body in drafts)


def test_a_conversation_goes_on_under_a_checkpointer(server: ScriptedServer) -> None:
    """The second question sees the first answer, and the state is saved between them."""
    graph = graph_of(make(server).as_node(), MessagesState, checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}

    graph.invoke({"messages": [("user", QUESTION)]}, config)
    server.reset()
    state = graph.invoke({"messages": [("user", "And the second?")]}, config)

    assert [m.content for m in state["messages"]][1::2] == ["river 1", "river 1"]
    drafts = [text_of(body) for body in server.chats if not is_verification(body)]
    assert all("river 1" in said for said in drafts)


class Model(BaseModel):
    """A state as a pydantic model."""

    question: str
    context: list[Document] = []
    answer: str = ""


@dataclass
class Data:
    """A state as a dataclass."""

    question: str
    context: list[Document] = field(default_factory=list)
    answer: str = ""


@pytest.mark.parametrize("state", [Model, Data])
def test_a_state_may_be_a_model_or_a_dataclass(server: ScriptedServer, state: Any) -> None:
    """All kinds of state that LangGraph has are read."""
    graph = graph_of(make(server, retriever=None).as_node(), state)

    assert graph.invoke(state(question=QUESTION, context=DOCUMENTS))["answer"] == "river 1"


def test_a_state_without_a_question_is_refused(server: ScriptedServer) -> None:
    """The error names what was looked for."""
    graph = graph_of(make(server).as_node())

    with pytest.raises(InputError, match="no 'question', no 'input' and no message of a user"):
        graph.invoke({"log": ["nothing"]})
    with pytest.raises(InputError, match="a state must be a dict"):
        make(server).as_node().invoke("text")


def test_other_values_of_a_state_stay_out_of_the_record(server: ScriptedServer) -> None:
    """The node asks with question, history and documents alone."""
    tree = Tree()
    graph = graph_of(make(server).as_node())

    graph.invoke({"question": QUESTION, "log": ["private"]}, {"callbacks": [tree]})

    (root,) = tree.roots
    asked = next(run for run in walk(root) if "draft_0" in children(run))
    assert "log" not in asked.inputs


def walk(run: Any) -> Any:
    """Yield a run and all below it."""
    yield run
    for child in run.child_runs:
        yield from walk(child)


def test_the_prompt_of_a_node_reads_the_state(server: ScriptedServer) -> None:
    """With the app's own prompt, other values of the state fill its placeholders."""
    prompt = ChatPromptTemplate.from_template("As {tone}: {context}\n{question}")

    class Toned(State):
        tone: str

    graph = graph_of(make(server, prompt=prompt).as_node(), Toned)
    graph.invoke({"question": QUESTION, "tone": "a pilot"})

    drafts = [text_of(body) for body in server.chats if not is_verification(body)]
    assert all(said.startswith("As a pilot: Fact number") for said in drafts)


@both
def test_each_turn_has_its_own_documents(server: ScriptedServer, invoke: Invoke) -> None:
    """With the app's own prompt as well, a second question is answered from what it retrieves."""
    prompt = ChatPromptTemplate.from_template("{context}\n{question}")
    asked: list[str] = []

    def retrieve(question: str) -> list[Document]:
        asked.append(question)
        return DOCUMENTS[:2] if question == QUESTION else DOCUMENTS[4:]

    class Kept(TypedDict, total=False):
        question: str
        context: list[Document]
        answer: str
        specrag: dict[str, Any]

    chain = make(server, prompt=prompt, retriever=RunnableLambda(retrieve), num_drafts=1)
    graph = graph_of(chain.as_node(), Kept)
    first = invoke(graph, {"question": QUESTION})
    server.reset()
    second = invoke(graph, {**first, "question": "And the last?"})

    assert asked == [QUESTION, "And the last?"]
    assert {document.id for document in second["context"]} == {"d4", "d5"}
    assert not [body for body in server.chats if "Fact number 0" in text_of(body)]
    assert second["answer"] == "river 4"


@both
def test_a_prompt_over_messages_reads_no_traffic_of_tools(
    server: ScriptedServer, invoke: Invoke
) -> None:
    """Placeholders for a conversation are filled with its chat turns alone."""
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Use this:\n{context}"), MessagesPlaceholder("messages")]
    )
    graph = graph_of(make(server, prompt=prompt, num_drafts=1).as_node(), MessagesState)

    invoke(graph, {"messages": tool_turns()})

    drafts = [body for body in server.chats if not is_verification(body)]
    assert [[turn["role"] for turn in body["messages"]] for body in drafts] == [
        ["system", "user", "assistant", "user"]
    ]
    assert "It says none." in text_of(drafts[0])
    assert "ferries" not in text_of(drafts[0])


def test_a_question_that_is_a_message_too_is_asked_once(server: ScriptedServer) -> None:
    """A state may hold the question and end in the same words: they are no earlier turn."""
    messages = [HumanMessage("Is there a ferry?"), AIMessage("No."), HumanMessage(QUESTION)]

    make(server).as_node().invoke({"question": QUESTION, "messages": messages})

    drafts = [text_of(body) for body in server.chats if not is_verification(body)]
    assert {said.count(QUESTION) for said in drafts} == {1}
    assert {said.count("Is there a ferry?") for said in drafts} == {1}


@both
def test_a_node_of_configurable_fields_is_configured(
    server: ScriptedServer, invoke: Invoke
) -> None:
    """What the graph's config sets holds in the node, and in the tool."""
    chain = make(server).configurable_fields(num_drafts=ConfigurableField(id="drafts"))
    config = {"configurable": {"drafts": 1}}
    graph = graph_of(chain.as_node()).with_config(config)
    tool = chain.as_rag_tool("rivers", "Knows rivers.")
    call = {"name": "rivers", "args": {"question": QUESTION}, "id": "1", "type": "tool_call"}

    state = invoke(graph, {"question": QUESTION})

    assert len(state["specrag"]["trace"]["drafts"]) == 1
    assert len(tool.invoke(call, config).artifact["specrag"]["trace"]["drafts"]) == 1
    assert len(tool.invoke(call).artifact["specrag"]["trace"]["drafts"]) == DRAFTS


def test_the_run_of_a_node_is_one_tree(server: ScriptedServer) -> None:
    """All requests hang below the graph's run."""
    tree = Tree()

    graph_of(make(server).as_node()).invoke({"question": QUESTION}, {"callbacks": [tree]})

    (root,) = tree.roots
    names = [name for run in walk(root) for name in children(run)]
    assert sorted(names) == steps()


# -------------------------------------------------------------------- stream modes


def streamed(graph: Any, state: Any, mode: Any, *, sync: bool) -> list[Any]:
    """Return what a graph streams."""
    if sync:
        return list(graph.stream(state, stream_mode=mode))
    return asyncio.run(acollect(graph.astream(state, stream_mode=mode)))


sync_or_not = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])


@sync_or_not
def test_messages_mode_shows_no_draft(server: ScriptedServer, sync: bool) -> None:
    """An accepted draft is one message, the node's; drafts and verdicts never leak."""
    graph = graph_of(make(server).as_node(), MessagesState)

    parts = streamed(graph, {"messages": [("user", QUESTION)]}, "messages", sync=sync)

    assert [(type(message), message.content) for message, _ in parts] == [(AIMessage, "river 1")]


@sync_or_not
def test_messages_mode_streams_the_fallback_once(server: ScriptedServer, sync: bool) -> None:
    """Its tokens are shown as they come, and the node's message is known to be the same."""
    server.respond = fails_drafts
    graph = graph_of(make(server).as_node(), MessagesState)

    parts = streamed(graph, {"messages": [("user", QUESTION)]}, "messages", sync=sync)

    assert "".join(m.content for m, _ in parts) == "All six rivers are meant [1]."
    assert all(isinstance(message, AIMessageChunk) for message, _ in parts)
    assert {metadata["langgraph_node"] for _, metadata in parts} == {"rag"}


@sync_or_not
def test_messages_mode_hides_models_of_the_app_as_well(server: ScriptedServer, sync: bool) -> None:
    """A drafter that is called in threads, or awaited, is tagged just so."""
    drafter = ForeignModel(respond=writes)
    graph = graph_of(make(server, drafter=drafter).as_node(), MessagesState)

    parts = streamed(graph, {"messages": [("user", QUESTION)]}, "messages", sync=sync)

    assert [message.content for message, _ in parts] == ["river 0"]


@sync_or_not
@pytest.mark.parametrize("mode", ["values", "updates", "custom", "debug", "tasks", "checkpoints"])
def test_every_other_mode(server: ScriptedServer, mode: str, sync: bool) -> None:
    """Values and updates hold the node's keys; the other modes work as for any node."""
    saver = InMemorySaver() if mode == "checkpoints" else None
    compiled = graph_of(make(server).as_node(), checkpointer=saver)
    graph = compiled.with_config(configurable={"thread_id": "1"})

    parts = streamed(graph, {"question": QUESTION}, mode, sync=sync)

    if mode == "values":
        assert parts[-1]["answer"] == "river 1"
    elif mode == "updates":
        assert set(parts[0]["rag"]) >= {"answer", "specrag", "context"}
    elif mode == "custom":
        assert parts == []
    elif mode == "debug":
        assert [part["type"] for part in parts] == ["task", "task_result"]
    elif mode == "checkpoints":
        assert parts[-1]["values"]["answer"] == "river 1"
    elif mode == "tasks":
        assert [part["name"] for part in parts] == ["rag", "rag"]
    assert len(server.chats) == 2 * DRAFTS


@sync_or_not
def test_several_modes_at_once(server: ScriptedServer, sync: bool) -> None:
    """A list of modes brings each part with its mode."""
    server.respond = fails_drafts
    graph = graph_of(make(server).as_node(), MessagesState)

    parts = streamed(graph, {"messages": [("user", QUESTION)]}, ["messages", "updates"], sync=sync)

    shown = "".join(part[0].content for mode, part in parts if mode == "messages")
    (update,) = [part for mode, part in parts if mode == "updates"]
    assert shown == "All six rivers are meant [1]."
    assert update["rag"]["messages"][0].content == shown


def test_the_whole_chain_may_be_a_node_as_it_is(server: ScriptedServer) -> None:
    """Without `as_node` a chain can be called by a node of the app's own."""

    def node(state: State) -> dict[str, Any]:
        return {"answer": make(server).invoke(state["question"])["answer"]}

    assert graph_of(node).invoke({"question": QUESTION})["answer"] == "river 1"


# -------------------------------------------------------------------- tools


@both
def test_a_tool_node_keeps_the_sources(server: ScriptedServer, invoke: Invoke) -> None:
    """An agent's tool message has the answer for its model, and the documents for the app."""
    tool = make(server).as_rag_tool("rivers", "Knows rivers.")
    call = {"name": "rivers", "args": {"question": QUESTION}, "id": "1", "type": "tool_call"}
    graph = graph_of(ToolNode([tool]), MessagesState)

    state = invoke(graph, {"messages": [AIMessage("", tool_calls=[call])]})

    message = state["messages"][-1]
    assert isinstance(message, ToolMessage)
    assert message.content == "river 1"
    assert message.artifact["context"][0].id == "d1"


def tool_turns() -> list[Any]:
    """Return a conversation in which tools were used."""
    call = {"name": "t", "args": {}, "id": "1", "type": "tool_call"}
    used = {"type": "tool_use", "id": "2", "name": "t", "input": {}}  # as Anthropic's content
    return [
        HumanMessage("Use the tool."),
        AIMessage("", tool_calls=[call]),
        ToolMessage("ferries: 0", tool_call_id="1"),
        AIMessage([used], tool_calls=[{**call, "id": "2"}]),
        ToolMessage("ferries: 0", tool_call_id="2"),
        AIMessage("It says none."),
        HumanMessage(QUESTION),
    ]


def test_a_question_after_tools_is_answered(server: ScriptedServer) -> None:
    """What tools said in a conversation is left out of its history."""
    make(server).as_node().invoke({"messages": tool_turns()})

    said = "\n".join(text_of(body) for body in server.chats)
    assert "It says none." in said
    assert "ferries: 0" not in said


def test_a_node_stands_in_a_chain_of_runnables(server: ScriptedServer) -> None:
    """It is a Runnable itself."""
    chain = RunnableLambda(lambda q: {"question": q}) | make(server).as_node()

    assert asyncio.run(chain.ainvoke(QUESTION))["answer"] == "river 1"
