"""What LlamaIndex's instrumentation and callbacks see of a question."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_server import Reply, ScriptedServer

pytest.importorskip("llama_index.core")

from llama_index.core.callbacks import (
    CallbackManager,
    CBEventType,
    LlamaDebugHandler,
    TokenCountingHandler,
)
from llama_index_kit import (
    QUESTION,
    Json,
    Scripted,
    dialogue,
    engine,
    synthesizer,
    text_from,
    unknown,
    watched,
)

from specrag_integrations import Endpoint
from specrag_integrations.llama_index import EndpointLLM, SpeculativeQueryEngine

Ask = Callable[[SpeculativeQueryEngine], Any]


def ask(asked: SpeculativeQueryEngine) -> str:
    """Ask synchronously, and read a stream to its end."""
    return str(asked.query(QUESTION))


def aask(asked: SpeculativeQueryEngine) -> str:
    """Ask asynchronously, and read a stream to its end."""

    async def asking() -> str:
        response = await asked.aquery(QUESTION)
        streamed = hasattr(response, "async_response_gen")
        return await text_from(response) if streamed else str(response)

    return asyncio.run(asking())


def tree(kind: str, streaming: bool, *, fallback: bool) -> Counter[str]:
    """Return the paths of a question's spans, and how often each occurs."""
    a = "a" if kind == "aask" else ""
    engine_ = f"SpeculativeQueryEngine.{a}query"
    inner = f"{engine_} > SpeculativeQueryEngine._{a}query"
    synthesis = f"{inner} > SpeculativeSynthesizer.{a}synthesize"
    paths = {
        engine_: 1,
        inner: 1,
        f"{inner} > Given.retrieve": 1,  # which is synchronous
        f"{inner} > Given.retrieve > Given._retrieve": 1,
        synthesis: 1,
        f"{synthesis} > LLMChat.draft": 3,
        f"{synthesis} > LLMChat.draft > EndpointLLM.achat": 3,
    }
    if fallback:
        paths[f"{synthesis} > LLMChat.fallback"] = 1
        paths[f"{synthesis} > LLMChat.fallback > EndpointLLM.astream_chat"] = 1
    else:
        paths[f"{synthesis} > LLMChat.verify"] = 3
        paths[f"{synthesis} > LLMChat.verify > EndpointLLM.achat"] = 3
    return Counter(paths)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("way", [ask, aask])
@pytest.mark.parametrize("fallback", [False, True])
def test_a_question_is_one_tree_of_spans(
    scripted: Scripted, way: Ask, streaming: bool, fallback: bool
) -> None:
    """Engine, retrieval, synthesis, and each step with its LLM under it, however it is asked."""
    asked = engine(scripted(unknown if fallback else dialogue(r2=0.9)), streaming=streaming)

    with watched() as seen:
        way(asked)

    assert Counter(seen.paths) == tree(way.__name__, streaming, fallback=fallback)


def test_questions_at_one_time_are_trees_of_their_own(scripted: Scripted) -> None:
    """Spans of several questions in one loop do not mix."""
    asked = engine(scripted(dialogue(r2=0.9)))

    async def all_at_once() -> None:
        await asyncio.gather(*(asked.aquery(f"{QUESTION} {n}") for n in range(4)))

    with watched() as seen:
        asyncio.run(all_at_once())

    expected = tree("aask", streaming=False, fallback=False)
    assert Counter(seen.paths) == Counter({path: 4 * n for path, n in expected.items()})


@pytest.mark.parametrize("way", [ask, aask])
def test_the_events_are_llama_indexs_own(scripted: Scripted, way: Ask) -> None:
    """Query, retrieval and synthesis begin and end, with six chats; no event is our own."""
    asked = engine(scripted(dialogue(r2=0.9)))

    with watched() as seen:
        way(asked)

    kinds = Counter(seen.kinds())
    for name in ("Query", "Retrieval", "Synthesize"):
        assert kinds[f"{name}StartEvent"] == kinds[f"{name}EndEvent"] == 1
    assert kinds["LLMChatStartEvent"] == kinds["LLMChatEndEvent"] == 6
    assert all(type(event).__module__.startswith("llama_index") for event in seen.events.seen)
    ended = next(e for e in seen.events.seen if type(e).__name__ == "SynthesizeEndEvent")
    assert ended.response.response == "river 2 [1]"


def test_a_failed_synthesis_ends_its_events(scripted: Scripted) -> None:
    """The callback event of a question that fails is ended with the error."""
    debug = LlamaDebugHandler(print_trace_on_end=False)
    asked = synthesizer(scripted(unknown), fallback=None, callback_manager=CallbackManager([debug]))

    with pytest.raises(Exception, match="fallback is off"):
        asked.synthesize(QUESTION, engine(scripted()).retriever.retrieve(QUESTION))

    ((start, end),) = debug.get_event_pairs(CBEventType.SYNTHESIZE)
    assert start.payload["query_str"] == QUESTION  # type: ignore[index]
    assert "fallback is off" in str(end.payload["exception"])  # type: ignore[index]


def counted(respond: Any) -> Callable[[Json, int], Any]:
    """Have every reply say that it used a number of tokens that is its own."""

    def answer(body: Json, call: int) -> Any:
        reply = respond(body, call)
        used = {"prompt_tokens": 100 + call, "completion_tokens": 10 + call}
        return Reply(
            reply.text,
            alternatives=reply.alternatives,
            usage=used | {"total_tokens": 110 + 2 * call},
        )

    return answer


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("way", [ask, aask])
@pytest.mark.parametrize("respond", [dialogue(r2=0.9), unknown], ids=["draft", "fallback"])
def test_tokens_are_counted_once_for_each_request(
    scripted: Scripted, way: Ask, streaming: bool, respond: Any
) -> None:
    """TokenCountingHandler has one entry per request, with what the server counted."""
    server = scripted(counted(respond))
    counter = TokenCountingHandler()
    asked = engine(server, streaming=streaming, callback_manager=CallbackManager([counter]))

    way(asked)

    used = Counter(
        (event.prompt_token_count, event.completion_token_count)
        for event in counter.llm_token_counts
    )
    assert used == Counter((100 + n, 10 + n) for n in range(len(server.chats)))


def test_callbacks_set_later_reach_every_model(scripted: Scripted) -> None:
    """A callback manager that is set on the synthesizer hears drafts and verifications."""
    counter = TokenCountingHandler()
    answering = synthesizer(scripted(counted(dialogue(r2=0.9))))

    answering.callback_manager = CallbackManager([counter])
    answering.synthesize(QUESTION, engine(scripted()).retriever.retrieve(QUESTION))

    assert answering.callback_manager.handlers == [counter]
    assert len(counter.llm_token_counts) == 6


def test_an_llm_of_the_app_keeps_its_callbacks(scripted: Scripted) -> None:
    """Neither a synthesizer nor `from_engine` changes what the app's own LLM reports to."""
    own, other = TokenCountingHandler(), TokenCountingHandler()
    server = scripted(counted(dialogue(r2=0.9)))
    llm = EndpointLLM(Endpoint(server.base_url, "scripted"))
    llm.callback_manager = before = CallbackManager([own])

    asked = engine(server, verifier=llm, callback_manager=CallbackManager([other]))
    asked.query(QUESTION)

    assert llm.callback_manager is before
    assert len(own.llm_token_counts) == 3  # verifications
    assert len(other.llm_token_counts) == 3  # drafts, by an endpoint


# ---------------------------------------------------------------- OpenInference

# The instrumentor asks LlamaIndex's metadata for its old `json()`.
old_json = pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecationWarning")


@pytest.fixture
def exported() -> Iterator[Any]:
    """Instrument LlamaIndex for OpenInference, as Phoenix and Langfuse do; return the spans."""
    instrumentation = pytest.importorskip("openinference.instrumentation.llama_index")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = instrumentation.LlamaIndexInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    if not instrumentor.is_instrumented_by_opentelemetry:
        pytest.skip("the instrumentor takes newer versions of llama-index-core only")
    try:
        yield exporter.get_finished_spans
    finally:
        instrumentor.uninstrument()
        provider.shutdown()


def chain(spans: Any) -> Counter[str]:
    """Return kind and name of each span with its parent's name."""
    names = {span.context.span_id: span.name for span in spans}
    return Counter(
        f"{span.attributes['openinference.span.kind']}: "
        f"{names.get(span.parent.span_id, '?') if span.parent else '-'} > {span.name}"
        for span in spans
    )


@old_json
@pytest.mark.parametrize("way", [ask, aask])
@pytest.mark.parametrize("fallback", [False, True])
def test_open_inference_shows_the_tree_without_warnings(
    scripted: Scripted,
    exported: Any,
    caplog: pytest.LogCaptureFixture,
    way: Ask,
    fallback: bool,
) -> None:
    """One trace: LLM spans with model and tokens under the steps; nothing is logged."""
    asked = engine(scripted(counted(unknown if fallback else dialogue(r2=0.9))))

    with caplog.at_level(logging.WARNING):
        way(asked)

    spans = exported()
    shown = chain(spans)
    models = [s for s in spans if s.attributes["openinference.span.kind"] == "LLM"]
    assert [record.getMessage() for record in caplog.records] == []
    assert len({span.context.trace_id for span in spans}) == 1
    assert sum(span.parent is None for span in spans) == 1
    assert shown["LLM: LLMChat.draft > EndpointLLM.achat"] == 3
    if fallback:
        assert shown["LLM: LLMChat.fallback > EndpointLLM.astream_chat"] == 1
    else:
        assert shown["LLM: LLMChat.verify > EndpointLLM.achat"] == 3
    for span in models:
        assert span.attributes["llm.model_name"] == "scripted"
        assert span.attributes["llm.token_count.prompt"] >= 100
        assert span.attributes["llm.token_count.completion"] >= 10


@old_json
@pytest.mark.parametrize("way", [ask, aask])
def test_a_streamed_fallbacks_span_is_whole(scripted: Scripted, exported: Any, way: Ask) -> None:
    """The LLM span of a streamed fallback has its text and tokens once the stream is read."""
    asked = engine(scripted(counted(unknown)), streaming=True)

    text = way(asked)

    (span,) = [span for span in exported() if span.name == "EndpointLLM.astream_chat"]
    assert text in span.attributes["output.value"]
    assert span.attributes["llm.token_count.completion"] == 13


SECRETS = ("sk-secret-1234567", "hush-hush", "passw0rd")


def secretive(server: ScriptedServer) -> SpeculativeQueryEngine:
    """Return an engine whose endpoints hold a key, a header and a password."""
    endpoint = Endpoint(
        server.base_url.replace("http://", f"http://ada:{SECRETS[2]}@"),
        "scripted",
        api_key=SECRETS[0],
        headers={"X-Team": SECRETS[1]},
    )
    return engine(server, drafter=endpoint, verifier=endpoint)


def test_no_key_is_in_a_span_or_event(scripted: Scripted) -> None:
    """Neither the key nor headers nor a password in the address are in what handlers get."""
    asked = secretive(scripted(dialogue(r2=0.9)))

    with watched() as seen:
        asked.query(QUESTION)

    told = " ".join([repr(event) for event in seen.events.seen])
    told += " ".join(f"{span} {span.__dict__}" for span in seen.spans.completed_spans)
    assert "Fact number" in told
    assert not any(secret in told for secret in SECRETS)


@old_json
def test_no_key_is_in_an_exported_trace(scripted: Scripted, exported: Any) -> None:
    """OpenInference, which writes down the arguments of each call, exports none either."""
    secretive(scripted(dialogue(r2=0.9))).query(QUESTION)

    told = " ".join(str(dict(span.attributes)) for span in exported())
    assert "Fact number" in told
    assert not any(secret in told for secret in SECRETS)
