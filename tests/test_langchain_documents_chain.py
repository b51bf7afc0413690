"""The chain that stands where create_stuff_documents_chain stood, with the app's own prompt."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="needs the extra `langchain`")

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import CommaSeparatedListOutputParser
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotPromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_kit import (
    DOCUMENTS,
    DRAFTS,
    QUESTION,
    Retriever,
    Scripted,
    Tree,
    chat,
    children,
    fails_drafts,
    is_fallback,
    is_verification,
    make,
    prefers,
    steps,
    text_of,
)
from scripted_server import Reply, ScriptedServer
from test_langchain_runnable import WAYS, acollect

from specrag_integrations import ConfigurationError, Endpoint, InputError, RankStratified
from specrag_integrations.langchain import (
    SpeculativeRAGRunnable,
    create_speculative_documents_chain,
)

PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "You know rivers. Use this:\n{context}"),
        MessagesPlaceholder("chat_history", optional=True),
        ("human", "{input}"),
    ]
)
GIVEN = {"input": QUESTION, "context": DOCUMENTS}


@pytest.fixture
def server(scripted: Scripted) -> ScriptedServer:
    """Return a server whose verifier trusts river 1."""
    return scripted(prefers(1))


def combine(server: ScriptedServer, prompt: Any = PROMPT, **options: Any) -> Any:
    """Return a chain over a server."""
    sizes = {"num_drafts": DRAFTS, "passages_per_draft": 2}
    settings = {**sizes, "partitioner": RankStratified(), **options}
    return create_speculative_documents_chain(
        chat(server), prompt, drafter=chat(server), **settings
    )


def drafts(server: ScriptedServer) -> list[dict[str, Any]]:
    """Return the drafts' requests."""
    return [b for b in server.chats if not is_verification(b) and not is_fallback(b)]


@pytest.mark.parametrize("way", WAYS)
def test_it_returns_the_answers_text(server: ScriptedServer, way: str) -> None:
    """The output is a string, as that of the chain it replaces."""
    assert WAYS[way](combine(server), GIVEN) == "river 1"


def test_the_prompt_writes_drafts_from_subsets(server: ScriptedServer) -> None:
    """Each draft is the prompt with some documents, and one request for rationale and answer."""
    combine(server).invoke(GIVEN)

    assert len(drafts(server)) == DRAFTS
    for body in drafts(server):
        system, last = body["messages"]
        assert system["role"] == "system"
        assert system["content"].startswith("You know rivers. Use this:\nFact number")
        assert system["content"].count("Fact number") == 2
        assert last["role"] == "user"
        assert last["content"].startswith(f"{QUESTION}\n\nWrite two lines. Rationale:")


def test_the_prompt_alone_is_the_fallback(server: ScriptedServer) -> None:
    """The fallback is word for word what the replaced chain sends."""
    stuff = pytest.importorskip("langchain_classic.chains.combine_documents")
    server.respond = fails_drafts
    usual = stuff.create_stuff_documents_chain(chat(server), PROMPT)

    answers = [combine(server).invoke(GIVEN)]
    (fallback,) = [body for body in server.chats if is_fallback(body)]
    server.reset()
    server.respond = lambda *_: Reply("All six rivers are meant [1].")
    answers.append(usual.invoke(GIVEN))

    assert fallback["messages"] == server.chats[0]["messages"]
    assert answers[0] == answers[1]


def test_the_history_stands_where_the_prompt_has_it(server: ScriptedServer) -> None:
    """`chat_history` fills its placeholder, once, in drafts and in the fallback."""
    history = [HumanMessage("Is there a ferry?"), AIMessage("There was one.")]

    for respond in (prefers(1), fails_drafts):
        server.reset()
        server.respond = respond
        combine(server).invoke({**GIVEN, "chat_history": history})
        asked = [body for body in server.chats if not is_verification(body)]
        for body in asked:
            assert [turn["role"] for turn in body["messages"]] == [
                "system",
                "user",
                "assistant",
                "user",
            ]
            assert text_of(body).count("There was one.") == 1


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_a_history_may_be_text_of_the_apps_own(server: ScriptedServer, way: str) -> None:
    """A prompt with `{chat_history}` gets the string that it got before."""
    prompt = ChatPromptTemplate.from_template("{chat_history}\n{context}\n{input}")

    WAYS[way](combine(server, prompt), {**GIVEN, "chat_history": "Human: a ferry?"})

    assert len(drafts(server)) == DRAFTS
    assert all(text_of(body).startswith("Human: a ferry?\nFact") for body in drafts(server))
    with pytest.raises(InputError, match="chat_history must be a list of messages, not str"):
        make(server).invoke({**GIVEN, "chat_history": "Human: a ferry?"})


def test_tools_in_a_history_are_left_out(server: ScriptedServer) -> None:
    """A placeholder is filled with the chat turns of an agent's conversation."""
    call = {"name": "t", "args": {}, "id": "1", "type": "tool_call"}
    history = [
        HumanMessage("Is there a ferry?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage("ferries: 0", tool_call_id="1"),
        AIMessage("There was one."),
    ]

    combine(server).invoke({**GIVEN, "chat_history": history})

    roles = ["system", "user", "assistant", "user"]
    assert [[turn["role"] for turn in body["messages"]] for body in drafts(server)] == [
        roles
    ] * DRAFTS
    assert not [body for body in server.chats if "ferries" in text_of(body)]


def test_every_placeholder_comes_from_the_input(server: ScriptedServer) -> None:
    """Other variables are filled in; one that is missing is named."""
    prompt = ChatPromptTemplate.from_template("In {language}: {context}\n{question}")
    chain = combine(server, prompt)

    chain.invoke({"question": QUESTION, "context": DOCUMENTS, "language": "Latin"})
    assert all(text_of(body).startswith("In Latin: Fact") for body in drafts(server))

    for way in ("invoke", "ainvoke", "stream", "astream"):
        with pytest.raises(InputError, match="the input lacks language, which the prompt"):
            WAYS[way](chain, {"question": QUESTION, "context": DOCUMENTS})


def test_partial_variables_and_string_prompts(server: ScriptedServer) -> None:
    """A prompt of one string, with a variable filled in before, is a prompt as well."""
    prompt = PromptTemplate.from_template("{tone}\n{context}\nQ: {input}").partial(tone="Be brief.")

    assert combine(server, prompt).invoke(GIVEN) == "river 1"

    assert all(text_of(body).startswith("Be brief.\nFact") for body in drafts(server))
    assert {turn["role"] for body in drafts(server) for turn in body["messages"]} == {"user"}


def test_documents_are_written_as_the_app_does(server: ScriptedServer) -> None:
    """`document_prompt` sees the metadata, `document_separator` stands between."""
    chain = combine(
        server,
        document_prompt=PromptTemplate.from_template("<{source}> {page_content}"),
        document_separator="\n--\n",
    )

    chain.invoke(GIVEN)

    for body in drafts(server):
        system = body["messages"][0]["content"]
        assert system.count("\n--\n") == 1
        assert ".md> Fact number" in system


def test_documents_with_equal_texts_are_told_apart(server: ScriptedServer) -> None:
    """Two chapters may say the same: each is written into the prompt with its own metadata."""
    text = DOCUMENTS[1].page_content
    documents = [Document(text, metadata={"title": title}) for title in ("One", "Two")]
    chain = combine(
        server,
        num_drafts=1,
        document_prompt=PromptTemplate.from_template("{title}: {page_content}"),
    )

    chain.invoke({"input": QUESTION, "context": documents})

    (body,) = drafts(server)
    assert f"One: {text}" in text_of(body)
    assert f"Two: {text}" in text_of(body)


def test_a_document_without_the_metadata_is_told_by_langchain(server: ScriptedServer) -> None:
    """The error is LangChain's own, as it is with the chain that this one replaces."""
    chain = combine(server, document_prompt=PromptTemplate.from_template("{page}: {page_content}"))

    with pytest.raises(ValueError, match="page"):
        chain.invoke(GIVEN)


def test_it_stands_in_create_retrieval_chain(server: ScriptedServer) -> None:
    """In the usual chain one line changes: `answer` streams, `context` is what was retrieved."""
    retrieval = pytest.importorskip("langchain_classic.chains")
    chain = retrieval.create_retrieval_chain(Retriever(), combine(server))

    output = chain.invoke({"input": QUESTION})
    parts = asyncio.run(acollect(chain.astream({"input": QUESTION})))

    assert output == {"input": QUESTION, "context": DOCUMENTS, "answer": "river 1"}
    assert [part["answer"] for part in parts if "answer" in part] == ["river 1"]


def test_it_stands_in_an_assignment(server: ScriptedServer) -> None:
    """`RunnablePassthrough.assign(context=…) | chain` is the same without langchain-classic."""
    chain = RunnablePassthrough.assign(context=lambda x: Retriever().invoke(x["input"]))

    assert (chain | combine(server)).invoke({"input": QUESTION}) == "river 1"


def test_an_output_parser_reads_the_answer(server: ScriptedServer) -> None:
    """What the app parses is the answer's text."""
    server.respond = lambda body, call: (
        prefers(1)(body, call)
        if is_verification(body)
        else Reply("Rationale: [1].\nAnswer: one, two")
    )

    chain = combine(server, output_parser=CommaSeparatedListOutputParser())

    assert chain.invoke(GIVEN) == ["one", "two"]


def test_without_documents_the_empty_answer_is_returned(server: ScriptedServer) -> None:
    """No model is asked about nothing."""
    chain = combine(server, empty_answer="Nothing.")

    assert chain.invoke({"input": QUESTION, "context": []}) == "Nothing."
    assert not server.requests


def test_formatted_documents_are_refused(server: ScriptedServer) -> None:
    """A chain that formats documents itself is told to leave that out."""
    with pytest.raises(InputError, match="drop `| format_docs`"):
        combine(server).invoke({"input": QUESTION, "context": "Fact number 1"})


@pytest.mark.parametrize("prompt", [ChatPromptTemplate.from_template("{input}"), "text"])
def test_a_prompt_without_a_place_for_documents_is_refused(
    server: ScriptedServer, prompt: Any
) -> None:
    """It fails at construction, by name."""
    with pytest.raises(ConfigurationError, match="prompt"):
        combine(server, prompt)


def test_the_prompt_decides_the_fingerprint(server: ScriptedServer) -> None:
    """A calibration holds for one prompt: other words are another set-up, other inputs are not."""
    examples = FewShotPromptTemplate(
        examples=[{"a": "1"}],
        example_prompt=PromptTemplate.from_template("{a}"),
        suffix="{context} {input}",
        input_variables=["context", "input"],
    )
    prompts = [PROMPT, PROMPT, ChatPromptTemplate.from_template("{context} {input}"), examples]

    hashes = [
        SpeculativeRAGRunnable(drafter=chat(server), verifier=chat(server), prompt=prompt)
        .engine.fingerprint()
        .prompts
        for prompt in prompts
    ]

    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_the_engine_alone_cannot_fill_the_prompt(server: ScriptedServer) -> None:
    """Asked without the chain, it says so, instead of sending a prompt without the question."""
    texts = [document.page_content for document in DOCUMENTS]

    with pytest.raises(InputError, match="use invoke, ainvoke, stream or astream of the chain"):
        make(server, prompt=PROMPT).engine.ask(QUESTION, texts)

    assert not drafts(server)


def test_a_chain_made_within_a_question_has_its_own_prompt(server: ScriptedServer) -> None:
    """Making a chain while another's question is served does not read that question's input."""
    made: list[str] = []

    def drafter(_: Any) -> str:
        made.append(combine(server, num_drafts=1).invoke(GIVEN))
        return "Rationale: [1].\nAnswer: " + made[-1]

    prompt = ChatPromptTemplate.from_template("{only_mine} {context} {question}")
    given = {"question": QUESTION, "context": DOCUMENTS, "only_mine": "x"}
    chain = create_speculative_documents_chain(
        chat(server), prompt, drafter=RunnableLambda(drafter), num_drafts=1
    )

    assert chain.invoke(given) == made[0]


def test_the_large_model_verifies_and_falls_back(scripted: Scripted) -> None:
    """`llm` judges the drafts of `drafter`; both may be endpoints."""
    small, large = scripted(prefers(1)), scripted(prefers(1))
    chain = create_speculative_documents_chain(
        Endpoint(large.base_url),
        PROMPT,
        drafter=Endpoint(small.base_url),
        num_drafts=DRAFTS,
        passages_per_draft=2,
        partitioner=RankStratified(),
    )

    assert chain.invoke(GIVEN) == "river 1"
    assert [is_verification(body) for body in small.chats] == [False] * DRAFTS
    assert [is_verification(body) for body in large.chats] == [True] * DRAFTS


def test_the_run_has_the_name_of_the_chain(server: ScriptedServer) -> None:
    """Traces show the chain by name, with all steps below it."""
    tree = Tree()

    combine(server).invoke(GIVEN, {"callbacks": [tree]})

    (root,) = tree.roots
    assert root.name == "speculative_documents_chain"
    assert [name for run in root.child_runs for name in children(run)] == steps()


def test_metadata_of_any_kind_passes_through(server: ScriptedServer) -> None:
    """Documents are handed on as they are, whatever their metadata."""
    documents = [
        Document(d.page_content, metadata={"source": "x", "n": {1: object()}}) for d in DOCUMENTS
    ]

    assert combine(server).invoke({"input": QUESTION, "context": documents}) == "river 1"
