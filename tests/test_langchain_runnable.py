"""SpeculativeRAGRunnable in LangChain's own machinery, against a scripted server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from operator import itemgetter
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="needs the extra `langchain`")

from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import (
    ConfigurableField,
    RunnableBranch,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
)
from langchain_core.runnables.utils import add
from langchain_kit import (
    DOCUMENTS,
    DRAFTS,
    QUESTION,
    Retriever,
    Scripted,
    believing,
    chat,
    fails_drafts,
    is_fallback,
    is_verification,
    make,
    prefers,
    text_of,
    winner,
)
from scripted_server import Fault, Reply, ScriptedServer

from specrag_integrations import (
    ConfigurationError,
    Endpoint,
    InputError,
    MultiPerspective,
    NoAnswerError,
    NoAnswerReason,
    RankStratified,
)
from specrag_integrations.langchain import SpeculativeRAGRunnable, __all__

Ask = Callable[[Any, Any], dict[str, Any]]


async def acollect(parts: AsyncIterator[Any]) -> list[Any]:
    """Return all parts of an asynchronous stream."""
    return [part async for part in parts]


async def one(value: Any) -> AsyncIterator[Any]:
    """Return an asynchronous input of one part."""
    yield value


WAYS: dict[str, Ask] = {
    "invoke": lambda chain, given: chain.invoke(given),
    "ainvoke": lambda chain, given: asyncio.run(chain.ainvoke(given)),
    "batch": lambda chain, given: chain.batch([given])[0],
    "abatch": lambda chain, given: asyncio.run(chain.abatch([given]))[0],
    "stream": lambda chain, given: add(chain.stream(given)),
    "astream": lambda chain, given: add(asyncio.run(acollect(chain.astream(given)))),
    "transform": lambda chain, given: add(chain.transform(iter([given]))),
    "atransform": lambda chain, given: add(asyncio.run(acollect(chain.atransform(one(given))))),
}
ways = pytest.mark.parametrize("ask", WAYS.values(), ids=WAYS)


@pytest.fixture
def server(scripted: Scripted) -> ScriptedServer:
    """Return a server whose verifier trusts river 1."""
    return scripted(prefers(1))


# -------------------------------------------------------------------- the ways of asking


@ways
def test_every_way_of_asking_gives_the_same_output(server: ScriptedServer, ask: Ask) -> None:
    """The parts of a stream add up to what invoke returns."""
    output = ask(make(server), QUESTION)

    assert list(output) == ["question", "context", "answer", "specrag"]
    assert output["question"] == QUESTION
    assert output["answer"] == "river 1"
    assert [document.id for document in output["context"]] == ["d1", "d5", "d0", "d2", "d3", "d4"]
    assert output["specrag"]["tier"] == "reflection"
    assert len(server.chats) == 2 * DRAFTS


@ways
def test_every_way_of_asking_falls_back(server: ScriptedServer, ask: Ask) -> None:
    """Where no draft can be used, the verifier answers from all documents, in their order."""
    server.respond = fails_drafts

    output = ask(make(server), QUESTION)

    assert output["answer"] == "All six rivers are meant [1]."
    assert output["context"] == DOCUMENTS
    assert output["specrag"]["fallback_reason"] == "no_usable_draft"
    assert len([body for body in server.chats if is_fallback(body)]) == 1


@ways
def test_without_documents_no_model_is_asked(server: ScriptedServer, ask: Ask) -> None:
    """An empty retrieval, or one of empty texts, brings `empty_answer`."""
    chain = make(server, retriever=None, empty_answer="Nothing was found.")

    for documents in ([], [Document("  ")]):
        output = ask(chain, {"input": QUESTION, "context": documents})

        assert output == {
            "input": QUESTION,
            "context": documents,
            "answer": "Nothing was found.",
            "specrag": {"no_answer": "no_passages"},
        }
    assert not server.requests


@ways
def test_every_way_of_asking_raises_what_the_core_raises(server: ScriptedServer, ask: Ask) -> None:
    """Without a fallback, a question that cannot be answered is a NoAnswerError with its reason."""
    server.respond = fails_drafts

    with pytest.raises(NoAnswerError) as raised:
        ask(make(server, fallback=None), QUESTION)

    assert raised.value.reason == NoAnswerReason.NO_USABLE_DRAFT
    assert len(raised.value.failures) == DRAFTS


@pytest.mark.parametrize("kind", ["batch", "abatch"])
def test_a_batch_keeps_the_errors_of_its_questions(server: ScriptedServer, kind: str) -> None:
    """With `return_exceptions`, a bad question is an exception among the answers."""
    chain, given = make(server), [QUESTION, "  ", QUESTION]

    if kind == "batch":
        outputs = chain.batch(given, return_exceptions=True)
    else:
        outputs = asyncio.run(chain.abatch(given, return_exceptions=True))

    assert [winner(outputs[0]), winner(outputs[2])] == ["river 1", "river 1"]
    assert isinstance(outputs[1], InputError)
    assert len(server.chats) == 4 * DRAFTS


@pytest.mark.parametrize("kind", ["batch", "abatch", "batch_as_completed", "abatch_as_completed"])
def test_max_concurrency_holds_for_all_requests_of_a_batch(
    server: ScriptedServer, kind: str
) -> None:
    """The limit is one for drafts and verifications of all questions, not one for each."""
    server.delay = 0.02
    chain, config = make(server), {"max_concurrency": 2}
    chain.engine.warmup()
    server.reset()

    asked = getattr(chain, kind)([QUESTION] * 3, config)
    if kind == "abatch":
        asyncio.run(asked)
    elif kind == "abatch_as_completed":
        assert sorted(n for n, _ in asyncio.run(acollect(asked))) == [0, 1, 2]
    elif kind == "batch_as_completed":
        assert sorted(n for n, _ in asked) == [0, 1, 2]

    assert len(server.chats) == 6 * DRAFTS
    assert server.max_in_flight == 2


def test_without_a_limit_all_drafts_are_written_at_once(server: ScriptedServer) -> None:
    """The limit above is a limit: without it more requests are under way."""
    server.delay = 0.05

    make(server).batch([QUESTION] * 3)

    assert server.max_in_flight > 2


def parts_of(kind: str, chain: Any, given: Any = QUESTION) -> list[Any]:
    """Return the parts of a synchronous or asynchronous stream."""
    if kind == "stream":
        return list(chain.stream(given))
    return asyncio.run(acollect(chain.astream(given)))


@pytest.mark.parametrize("kind", ["stream", "astream"])
def test_a_stream_brings_context_then_answer_then_the_record(
    server: ScriptedServer, kind: str
) -> None:
    """The context comes once, before the first word, and how the answer came about last."""
    server.respond = fails_drafts

    parts = parts_of(kind, make(server))

    assert [list(part) for part in parts] == [
        ["question", "context"],
        *[["answer"]] * 6,
        ["specrag"],
    ]
    assert "".join(part["answer"] for part in parts[1:-1]) == "All six rivers are meant [1]."


@pytest.mark.parametrize("kind", ["stream", "astream"])
def test_a_mended_answer_is_shown_when_it_is_final(server: ScriptedServer, kind: str) -> None:
    """A refinement that breaks off leaves the draft; no part of it was shown before."""

    def respond(body: dict[str, Any], call: int) -> Any:
        if is_fallback(body):
            return Fault(stream_break_after=2, reply="river one, as mended")
        return prefers(1)(body, call)

    server.respond = respond

    parts = parts_of(kind, make(server, refine="always"))

    assert [part["answer"] for part in parts if "answer" in part] == ["river 1"]
    assert "not refined" in json.dumps(parts[-1]["specrag"]["trace"]["notes"])


def test_the_context_is_streamed_before_the_fallback_ends(server: ScriptedServer) -> None:
    """The first part is there while the model is still writing."""
    server.respond = lambda body, call: (
        Reply("one two three", chunk_delay=30) if is_fallback(body) else fails_drafts(body, call)
    )

    stream = make(server).stream(QUESTION)
    first = next(stream)
    assert server.wait_for(lambda s: any(map(is_fallback, s.chats)))
    stream.close()

    assert first["context"] == DOCUMENTS
    assert server.wait_idle()
    assert server.aborted == 1


def test_events_tell_of_every_run(server: ScriptedServer) -> None:
    """`astream_events` v2 has one chat model start and end for each draft and verification."""

    async def run() -> list[Any]:
        return await acollect(make(server).astream_events(QUESTION, version="v2"))

    events = asyncio.run(run())

    started = sorted(e["name"] for e in events if e["event"] == "on_chat_model_start")
    ended = sorted(e["name"] for e in events if e["event"] == "on_chat_model_end")
    names = [f"{kind}_{n}" for kind in ("draft", "verify") for n in range(DRAFTS)]
    assert started == ended == names
    assert not [e for e in events if e["event"] == "on_chat_model_stream"]
    root = events[-1]
    assert (root["event"], root["data"]["output"]["answer"]) == ("on_chain_end", "river 1")
    parts = [e for e in events if e["event"] == "on_chain_stream" and not e["parent_ids"]]
    assert [list(e["data"]["chunk"]) for e in parts] == [
        ["question", "context"],
        ["answer"],
        ["specrag"],
    ]


def test_events_stream_the_fallback(server: ScriptedServer) -> None:
    """The tokens of the fallback are events of its run, and of no other."""
    server.respond = fails_drafts

    async def run() -> list[Any]:
        return await acollect(make(server).astream_events(QUESTION, version="v2"))

    streamed = [e for e in asyncio.run(run()) if e["event"] == "on_chat_model_stream"]

    assert {e["name"] for e in streamed} == {"fallback_0"}
    assert "".join(e["data"]["chunk"].text for e in streamed) == "All six rivers are meant [1]."


# -------------------------------------------------------------------- in chains


def lower(output: dict[str, Any]) -> str:
    """Return the answer in small letters."""
    return str(output["answer"]).lower()


CHAINS: dict[str, Callable[[Any], Any]] = {
    "pick": lambda c: c.pick("answer"),
    "pick and parse": lambda c: c.pick("answer") | StrOutputParser(),
    "itemgetter": lambda c: c | itemgetter("answer"),
    "lambda": lambda c: c | RunnableLambda(lower),
    "before": lambda c: RunnableLambda(str.strip) | c,
    "assign": lambda c: c.assign(small=lower) | itemgetter("small"),
    "parallel": lambda c: (
        RunnableParallel(a=c.pick("answer"), q=RunnablePassthrough()) | itemgetter("a")
    ),
    "branch": lambda c: RunnableBranch((lambda q: "river" in q, c), lambda _: "?"),
    "retry": lambda c: c.with_retry(stop_after_attempt=2),
    "fallbacks": lambda c: c.with_fallbacks([RunnableLambda(lambda _: "?")]),
    "config": lambda c: c.with_config(tags=["mine"], run_name="qa"),
    "types": lambda c: c.with_types(input_type=str),
    "bind": lambda c: c.bind(num_drafts=2),
}


@pytest.mark.parametrize("build", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("way", ["invoke", "astream", "batch"])
def test_it_stands_in_a_chain(
    server: ScriptedServer, build: Callable[[Any], Any], way: str
) -> None:
    """`|`, `.pick`, `.assign`, branches, retries and the rest work as for any Runnable."""
    assert winner(WAYS[way](build(make(server)), QUESTION)) == "river 1"


def test_the_usual_chain_of_lcel(server: ScriptedServer) -> None:
    """`{"context": retriever, "question": …} | chain` streams, its input coming in parts."""
    chain = {"context": Retriever(), "question": RunnablePassthrough()} | make(
        server, retriever=None
    )

    output = add(chain.stream(QUESTION))

    assert output["answer"] == "river 1"
    assert output["context"][0].id == "d1"
    assert list(chain.pick("answer").stream(QUESTION)) == ["river 1"]


def test_a_picked_answer_streams_strings(server: ScriptedServer) -> None:
    """`.pick("answer")` streams the fallback word by word, as strings."""
    server.respond = fails_drafts

    words = list(make(server).pick("answer").stream(QUESTION))

    assert words == ["All", " six", " rivers", " are", " meant", " [1]."]


def test_fallbacks_of_the_chain_take_over(server: ScriptedServer) -> None:
    """`.with_fallbacks` catches a NoAnswerError; a retry asks again before."""
    server.respond = fails_drafts
    failing = make(server, fallback=None)

    chain = failing.with_retry(stop_after_attempt=2, wait_exponential_jitter=False)
    output = chain.with_fallbacks([RunnableLambda(lambda _: {"answer": "ask us"})]).invoke(QUESTION)

    assert output == {"answer": "ask us"}
    assert len(server.chats) == 2 * DRAFTS


def test_a_chain_in_the_chain_is_not_confused(server: ScriptedServer) -> None:
    """Two questions on their way at once, one within the other, each get their own documents."""
    inner = make(server, retriever=Retriever(documents=DOCUMENTS[1:3]), num_drafts=2)

    outer = RunnableParallel(a=inner, b=make(server))
    output = outer.invoke(QUESTION)

    assert len(output["a"]["context"]) == 2
    assert len(output["b"]["context"]) == 6
    assert winner(output["a"]) == winner(output["b"]) == "river 1"


# -------------------------------------------------------------------- options of a call


FIELDS: dict[str, Any] = {
    "num_drafts": 2,
    "passages_per_draft": 1,
    "min_confidence": 0.95,
    "accept_confidence": 0.5,
}


def effect(name: str, output: dict[str, Any], server: ScriptedServer) -> None:
    """Check what an option of FIELDS does to a question."""
    trace = output["specrag"]["trace"]
    if name == "num_drafts":
        assert len(trace["drafts"]) == 2
    elif name == "passages_per_draft":
        assert [len(subset) for subset in trace["subsets"]] == [1] * DRAFTS
    elif name == "min_confidence":
        assert output["specrag"]["fallback_reason"] == "low_confidence"
    elif name == "accept_confidence":
        assert any(note.startswith("accepted early") for note in trace["notes"])


def tuned(server: ScriptedServer, name: str) -> SpeculativeRAGRunnable:
    """Return a chain in which an option of FIELDS can have its effect."""
    chain = make(server)
    return make(server, calibration=believing(chain)) if "confidence" in name else chain


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("way", ["ainvoke", "stream", "batch"])
def test_a_number_is_configured_or_bound(server: ScriptedServer, name: str, way: str) -> None:
    """`.configurable_fields`, `.bind` and a keyword argument change it for a call, and no more."""
    chain, value = tuned(server, name), FIELDS[name]
    configurable = chain.configurable_fields(**{name: ConfigurableField(id="it")})
    configured = configurable.with_config(configurable={"it": value})

    for changed in (configured, chain.bind(**{name: value})):
        effect(name, WAYS[way](changed, QUESTION), server)
    effect(name, chain.invoke(QUESTION, **{name: value}), server)

    with pytest.raises(AssertionError):
        effect(name, WAYS[way](chain, QUESTION), server)


@pytest.mark.parametrize("role", ["drafter", "verifier"])
def test_a_model_is_configured_or_bound(
    scripted: Scripted, server: ScriptedServer, role: str
) -> None:
    """Another drafter or verifier can be chosen for a call."""
    other = scripted(prefers(1))
    chain, model = make(server), chat(other)
    configurable = chain.configurable_fields(**{role: ConfigurableField(id="it")})
    configured = configurable.with_config(configurable={"it": model})

    for changed in (configured, chain.bind(**{role: model})):
        other.reset()
        assert winner(changed.invoke(QUESTION)) == "river 1"
        assert len(other.chats) == DRAFTS
        assert {is_verification(body) for body in other.chats} == {role == "verifier"}


def test_alternatives_can_be_configured(scripted: Scripted, server: ScriptedServer) -> None:
    """`.configurable_alternatives` of a drafter are found through the chain's config specs."""
    other = scripted(prefers(1))
    drafter = chat(server).configurable_alternatives(
        ConfigurableField(id="drafter"), default_key="usual", other=chat(other)
    )
    chain = make(server, drafter=drafter)

    chain.invoke(QUESTION, {"configurable": {"drafter": "other"}})

    assert [spec.id for spec in chain.config_specs] == ["drafter"]
    assert len(other.chats) == DRAFTS


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream", "batch", "abatch"])
def test_any_other_keyword_is_a_type_error(server: ScriptedServer, way: str) -> None:
    """A keyword that a call cannot change is refused, and named."""
    with pytest.raises(TypeError, match="deadline cannot be given to a call; only num_drafts"):
        WAYS[way](make(server).bind(deadline=1.0), QUESTION)


def test_what_was_learnt_outlives_a_call(server: ScriptedServer) -> None:
    """The engine is made once, for each set of bound options, and tries its verifier once."""
    chain = make(server)
    bound = chain.bind(num_drafts=2)

    for _ in range(2):
        chain.invoke(QUESTION)
        bound.invoke(QUESTION)

    assert len(server.probes) == 1
    assert chain._variant({"num_drafts": 2}) is chain._variant({"num_drafts": 2})
    assert len(chain._variants) == 1


def test_engines_of_bound_options_are_not_kept_for_ever(server: ScriptedServer) -> None:
    """Of many bound options the latest are kept, and all of them answer."""
    chain = make(server, fallback=None)

    for passages in range(1, 13):
        assert winner(chain.invoke(QUESTION, num_drafts=1, passages_per_draft=passages))

    assert len(chain._variants) == 8


def test_a_copy_with_other_options_has_them(server: ScriptedServer) -> None:
    """`model_copy(update=…)` does not keep the engine of the original."""
    chain = make(server)

    copied = chain.model_copy(update={"num_drafts": 2})

    assert len(copied.invoke(QUESTION)["specrag"]["trace"]["drafts"]) == 2
    assert len(chain.invoke(QUESTION)["specrag"]["trace"]["drafts"]) == DRAFTS


# -------------------------------------------------------------------- shapes


def test_graph_and_schemas_name_what_goes_in_and_out(server: ScriptedServer) -> None:
    """The graph has a node of it; the schemas have the keys, and a string where it retrieves."""
    chain = make(server)
    schema = json.dumps(chain.get_output_jsonschema())

    assert "SpeculativeRAGRunnable" in chain.get_graph().draw_mermaid()
    assert len(chain.get_graph().nodes) == 3
    assert all(f'"{key}"' in schema for key in ("question", "context", "answer", "specrag"))
    assert '"string"' in json.dumps(chain.get_input_jsonschema()["anyOf"])
    alone = json.dumps(make(server, retriever=None).get_input_jsonschema())
    assert "anyOf" not in make(server, retriever=None).get_input_jsonschema()
    assert all(f'"{key}"' in alone for key in ("question", "input", "context"))


def test_a_tool_returns_the_answer_and_its_sources(server: ScriptedServer) -> None:
    """The tool's content is the answer; the documents survive in its artifact."""
    tool = make(server).as_rag_tool("rivers", "Knows rivers.")
    call = {"name": "rivers", "args": {"question": QUESTION}, "id": "1", "type": "tool_call"}

    messages = [tool.invoke(call), asyncio.run(tool.ainvoke(call))]

    for message in messages:
        assert message.content == "river 1"
        assert message.artifact["context"][0].id == "d1"
        assert message.artifact["specrag"]["tier"] == "reflection"
    assert (tool.name, tool.description) == ("rivers", "Knows rivers.")
    with pytest.raises(ConfigurationError, match="needs retriever="):
        make(server, retriever=None).as_rag_tool("rivers", "Knows rivers.")


def test_the_record_is_json(server: ScriptedServer) -> None:
    """`specrag` can be written as JSON whatever the documents' metadata holds."""
    documents = [
        Document(f"Fact number {n} is about river {n}.", metadata={7: {1, 2}, "at": object()})
        for n in range(6)
    ]

    output = make(server, retriever=Retriever(documents=documents)).invoke(QUESTION)

    record = json.loads(json.dumps(output["specrag"], allow_nan=False))
    assert record["passages"][0]["text"] == "Fact number 1 is about river 1."
    assert output["context"][0].metadata[7] == {1, 2}


def test_equal_documents_without_ids_are_all_returned(server: ScriptedServer) -> None:
    """A repeated document is read once, and none is lost from the output."""
    documents = [Document(DOCUMENTS[n].page_content) for n in (0, 1, 0, 2)]

    output = make(server, retriever=None).invoke({"question": QUESTION, "context": documents})

    assert sorted(d.page_content for d in output["context"]) == sorted(
        d.page_content for d in documents
    )
    used = [passage["text"] for passage in output["specrag"]["passages"]]
    assert [d.page_content for d in output["context"]][: len(used)] == used
    assert len(output["specrag"]["trace"]["passages"]) == 3


@pytest.mark.parametrize("way", ["invoke", "stream", "astream"])
def test_citations_of_a_fallback_count_the_context(server: ScriptedServer, way: str) -> None:
    """What could not be read (empty, repeated) comes last: `[2]` is the second of the context."""
    server.respond = fails_drafts
    blank, first, second = Document(" "), DOCUMENTS[0], DOCUMENTS[1]
    documents = [blank, first, Document(first.page_content), second]

    output = WAYS[way](make(server), {"question": QUESTION, "context": documents})

    (asked,) = [body for body in server.chats if is_fallback(body)]
    assert output["context"][:2] == [first, second]
    assert output["context"][2:] == [blank, Document(first.page_content)]
    assert f"[2] {second.page_content}" in text_of(asked)


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
def test_what_did_not_fit_a_fallback_is_not_cited(scripted: Scripted, way: str) -> None:
    """A document that is too long for the verifier's context comes after those that were read."""

    def respond(body: dict[str, Any], call: int) -> Reply | Fault:
        if is_verification(body) or is_fallback(body):
            return prefers(1)(body, call)
        return Fault(400, body={"error": {"message": "no drafts today"}})

    server = scripted(respond, kind="vllm", context_tokens=800)
    long = Document("long " * 1500, id="long")
    chain = make(server, num_drafts=2)

    output = WAYS[way](chain, {"question": QUESTION, "context": [long, *DOCUMENTS[:3]]})

    (asked,) = [body for body in server.chats if is_fallback(body)]
    assert f"[1] {DOCUMENTS[0].page_content}" in text_of(asked)
    assert [document.id for document in output["context"]] == ["d0", "d1", "d2", "long"]
    assert output["specrag"]["passages"][0]["id"] == "d0"


# -------------------------------------------------------------------- inputs


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("falls_back", [False, True])
def test_an_output_may_be_asked_again(server: ScriptedServer, way: str, falls_back: bool) -> None:
    """What an earlier answer left in the input is replaced, streamed or whole."""
    if falls_back:
        server.respond = fails_drafts
    chain = make(server)
    text = "All six rivers are meant [1]." if falls_back else "river 1"

    output = WAYS[way](chain, {"question": QUESTION, "answer": "OLD ", "user": 7})
    again = WAYS[way](chain, output)
    piped = WAYS[way](chain | chain, QUESTION)

    assert [winner(one) for one in (output, again, piped)] == [text] * 3
    assert (output["user"], again["user"]) == (7, 7)
    assert again["specrag"]["text"] == piped["specrag"]["text"] == text


def test_further_keys_are_passed_on(server: ScriptedServer) -> None:
    """The output keeps what came along, and the question's own key."""
    given = {"input": QUESTION, "context": DOCUMENTS, "user": 7}

    output = make(server, retriever=None).invoke(given)

    assert list(output) == ["input", "user", "context", "answer", "specrag"]
    assert output["user"] == 7


def test_given_documents_are_not_retrieved_again(server: ScriptedServer) -> None:
    """A context in the input counts, also where there is a retriever."""
    output = make(server).invoke({"question": QUESTION, "context": DOCUMENTS[:2]})

    assert len(output["context"]) == 2


def test_chat_history_is_read_as_earlier_turns(server: ScriptedServer) -> None:
    """The turns stand in the drafts' prompts, without what tools said, and never in the check."""
    history = [
        ("human", "Is there a ferry?"),
        {"role": "assistant", "content": "There was one."},
        {"role": "tool", "content": "ferries: 0", "tool_call_id": "1"},
    ]

    make(server).invoke({"question": QUESTION, "chat_history": history})

    said = {is_verification(body): text_of(body) for body in server.chats}
    assert "Is there a ferry?" in said[False]
    assert "There was one." in said[False]
    assert "ferries: 0" not in said[False]
    assert "ferry" not in said[True]


BAD_INPUTS: dict[str, tuple[Any, str]] = {
    "formatted": ({"question": "q", "context": "text"}, r"drop `\| format_docs`: context must be"),
    "one document": ({"question": "q", "context": DOCUMENTS[0]}, "must be a list of Document"),
    "strings": ({"question": "q", "context": ["text"]}, r"context\[0\] is a str, not a Document"),
    "no context": ({"question": "q"}, "give a list of Document, or set retriever="),
    "no question": ({"context": DOCUMENTS}, "no 'question' .or 'input'."),
    "a number": (7, "must be a question or a dict .* not a int"),
    "an empty question": ({"question": " ", "context": DOCUMENTS}, "the question is empty"),
    "a question of another kind": ({"question": 7, "context": DOCUMENTS}, "must be a str"),
    "a history of text": (
        {"question": "q", "context": DOCUMENTS, "chat_history": "hello"},
        "chat_history must be a list of messages",
    ),
    "a history of numbers": (
        {"question": "q", "context": DOCUMENTS, "chat_history": [7]},
        "chat_history holds what is no message",
    ),
    "a string": ("q", "no 'context'; give a list of Document, or set retriever="),
}


@pytest.mark.parametrize(("given", "told"), BAD_INPUTS.values(), ids=BAD_INPUTS)
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
def test_a_bad_input_is_named_with_its_remedy(
    server: ScriptedServer, given: Any, told: str, way: str
) -> None:
    """No request is sent for an input that cannot be read."""
    with pytest.raises(InputError, match=told):
        WAYS[way](make(server, retriever=None), given)

    assert not server.requests


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "drafter": ({"drafter": "gpt"}, r"write init_chat_model\('gpt'\)"),
    "address": ({"drafter": "http://gpu/v1"}, r"write Endpoint\('http://gpu/v1'\)"),
    "no verifier": ({"verifier": None}, "verifier is missing"),
    "retriever": ({"retriever": object()}, r"give store.as_retriever\(\)"),
    "num_drafts": ({"num_drafts": "many"}, "num_drafts='many' must be at least 1"),
    "unknown": ({"num_draft": 3}, "takes no num_draft; it takes abandon_calls"),
    "threshold": ({"min_confidence": 0.5}, "calibrat"),
    "empty": ({"empty_answer": 7}, "empty_answer must be a str"),
    "options": ({"options": "anthropic"}, "options='anthropic' must be 'openai' or a function"),
    "prompt": ({"prompt": "text"}, "prompt must be a prompt template"),
    "separator": ({"document_separator": "--"}, "document_separator does nothing without prompt="),
    "no drafters": ({"drafter": []}, "drafter is an empty list"),
}


@pytest.mark.parametrize(("options", "told"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_a_bad_option_fails_at_construction(
    server: ScriptedServer, options: dict[str, Any], told: str
) -> None:
    """It is a ConfigurationError that says what to give instead, not one of pydantic."""
    with pytest.raises(ConfigurationError, match=told):
        make(server, **options)


# -------------------------------------------------------------------- retrievers and models


def test_any_runnable_may_retrieve(server: ScriptedServer) -> None:
    """A function as a Runnable is asked with the question, sync and async."""
    seen = []

    def find(question: str) -> list[Document]:
        seen.append(question)
        return DOCUMENTS

    chain = make(server, retriever=RunnableLambda(find))

    assert winner(chain.invoke(QUESTION)) == winner(asyncio.run(chain.ainvoke(QUESTION)))
    assert seen == [QUESTION, QUESTION]


def test_what_is_no_list_of_documents_is_refused(server: ScriptedServer) -> None:
    """A retriever that returns text is told apart from one that finds nothing."""
    chain = make(server, retriever=RunnableLambda(lambda _: "one long text"))

    with pytest.raises(InputError, match="context must be a list of Document"):
        chain.invoke(QUESTION)


class Shortening(BaseDocumentCompressor):
    """Keeps the first documents, without their ids and with a score in their metadata."""

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        return [Document(d.page_content, metadata={"score": 0.5}) for d in documents[:4]]


def test_ensemble_and_compression_retrievers(server: ScriptedServer) -> None:
    """Retrievers that merge or filter others bring documents without ids or scores."""
    retrievers = pytest.importorskip("langchain_classic.retrievers")
    both = retrievers.EnsembleRetriever(
        retrievers=[Retriever(documents=DOCUMENTS[:3]), Retriever(documents=DOCUMENTS[2:])]
    )
    compressing = retrievers.ContextualCompressionRetriever(
        base_retriever=both, base_compressor=Shortening()
    )

    ensemble = make(server, retriever=both).invoke(QUESTION)
    compressed = asyncio.run(make(server, retriever=compressing).ainvoke(QUESTION))

    assert winner(ensemble) == "river 1"
    assert len(ensemble["context"]) == 6
    assert len(compressed["context"]) == 4


class Counting(Embeddings):
    """Embeddings that tell two kinds of facts apart, and remember what they were asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.asked.append(texts)
        return [[1.0, 0.0] if n % 2 else [0.0, 1.0] for n in range(len(texts))]

    def embed_query(self, text: str) -> list[float]:
        raise AssertionError(text)


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_embeddings_of_langchain_cluster_the_documents(server: ScriptedServer, way: str) -> None:
    """`embedder=` may be LangChain's Embeddings: each draft reads one document of each cluster."""
    embedder = Counting()
    model = chat(server)
    chain = SpeculativeRAGRunnable(
        drafter=model,
        verifier=model,
        retriever=Retriever(),
        num_drafts=DRAFTS,
        passages_per_draft=2,
        partitioner=MultiPerspective(),
        embedder=embedder,
    )

    output = WAYS[way](chain, QUESTION)

    assert embedder.asked == [[document.page_content for document in DOCUMENTS]]
    assert all(
        sorted(rank % 2 for rank in subset) == [0, 1]
        for subset in output["specrag"]["trace"]["subsets"]
    )


def test_endpoints_may_be_given_as_they_are(server: ScriptedServer) -> None:
    """An Endpoint is made a chat model; several drafters take turns."""
    small, large = Endpoint(server.base_url, "small"), Endpoint(server.base_url, "large")

    chain = SpeculativeRAGRunnable(
        drafter=[small, Endpoint(server.base_url, "tiny")],
        verifier=large,
        retriever=Retriever(),
        num_drafts=DRAFTS,
        passages_per_draft=2,
        partitioner=RankStratified(),
    )
    chain.invoke(QUESTION)

    asked = sorted((body["model"], is_verification(body)) for body in server.chats)
    assert asked == [("large", True)] * 3 + [("small", False)] * 2 + [("tiny", False)]
    assert chain.drafter[0].endpoint is small


def test_the_verifier_never_sees_a_document(server: ScriptedServer) -> None:
    """With the default scoring a verification holds the draft alone."""
    make(server, fallback=None).invoke(QUESTION)

    assert not [b for b in server.chats if is_verification(b) and "Fact number" in text_of(b)]


def test_the_deadline_fires_in_every_way(server: ScriptedServer) -> None:
    """A question whose drafts hang ends at its deadline, with the drafts' requests given up."""
    server.delay = 30

    for ask in WAYS.values():
        server.reset()
        chain = make(server, deadline=0.3)
        with pytest.raises(NoAnswerError) as raised:
            ask(chain, QUESTION)
        assert raised.value.reason == NoAnswerReason.DEADLINE
        assert server.wait_idle()
        assert server.aborted == len(server.chats)


@pytest.mark.parametrize("way", ["ainvoke", "astream", "abatch"])
def test_cancelling_the_caller_frees_the_server(server: ScriptedServer, way: str) -> None:
    """All requests of the question are given up with its task."""
    server.delay = 30
    chain = make(server)

    async def run() -> None:
        asking = {
            "ainvoke": lambda: chain.ainvoke(QUESTION),
            "astream": lambda: acollect(chain.astream(QUESTION)),
            "abatch": lambda: chain.abatch([QUESTION, QUESTION]),
        }[way]()
        task = asyncio.ensure_future(asking)
        drafts = DRAFTS * (2 if way == "abatch" else 1)
        assert await asyncio.to_thread(server.wait_for, lambda s: s.in_flight == drafts)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        if way == "abatch":  # LangChain goes on with the first question that was cancelled
            _, rest = await asyncio.wait(rest, timeout=5) if rest else (None, rest)
        assert not rest

    asyncio.run(run())

    assert server.wait_idle()
    assert server.aborted == len(server.chats)


def test_an_accepted_draft_ends_the_others(server: ScriptedServer) -> None:
    """With our own chat models, accepting early cancels what is under way, sync as well."""

    def respond(body: dict[str, Any], call: int) -> Any:
        if not is_verification(body) and "Fact number 1" not in text_of(body):
            return Reply("Rationale: late.\nAnswer: river 0", delay=30)
        return prefers(1)(body, call)

    chain = make(server)
    server.respond = respond

    output = make(server, calibration=believing(chain), accept_confidence=0.8).invoke(QUESTION)

    assert winner(output) == "river 1"
    assert server.wait_for(lambda s: s.aborted == DRAFTS - 1)


# -------------------------------------------------------------------- the package


def test_the_public_names_are_few() -> None:
    """What can be imported is what is meant to be."""
    assert __all__ == sorted(
        [
            "EndpointChat",
            "RunnableChat",
            "SpeculativeRAGRunnable",
            "create_speculative_documents_chain",
        ]
    )


def test_without_langchain_the_extra_is_named() -> None:
    """An import error says what to install."""
    code = "import sys; sys.modules['langchain_core'] = None\nimport specrag_integrations.langchain"

    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert run.returncode == 1
    assert "pip install 'specrag-integrations[langchain]'" in run.stderr


def test_its_repr_names_models_and_no_more(server: ScriptedServer) -> None:
    """Neither instructions nor documents are in it."""
    chain = make(server, instructions="Tell no secrets.")

    assert repr(chain) == str(chain)
    assert repr(chain) == (
        "SpeculativeRAGRunnable(drafter='scripted', verifier='scripted', num_drafts=3, "
        "passages_per_draft=2)"
    )


def test_a_verdict_decides(server: ScriptedServer) -> None:
    """Another verdict makes another answer: the scores are read, not the order."""
    server.respond = prefers(2)

    assert winner(make(server).invoke(QUESTION)) == "river 2"
