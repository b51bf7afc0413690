"""EndpointChat: a chat model of LangChain over an Endpoint."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="needs the extra `langchain`")

from langchain_core.caches import InMemoryCache
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from langchain_core.runnables.utils import add
from langchain_kit import (
    DOCUMENTS,
    DRAFTS,
    QUESTION,
    Scripted,
    chat,
    is_verification,
    make,
    prefers,
    text_of,
    winner,
)
from scripted_server import Fault, Reply, ScriptedServer, default_respond
from test_langchain_runnable import WAYS, acollect

from specrag_integrations import (
    ConfigurationError,
    Endpoint,
    InputError,
    RankStratified,
    Scoring,
    SpeculativeRAG,
)
from specrag_integrations.errors import EndpointRejectedError, EndpointUnavailableError
from specrag_integrations.langchain import EndpointChat

HELLO = Reply("one two three", alternatives={"one": math.log(0.5), "two": math.log(0.25)})


@pytest.fixture
def server(scripted: Scripted) -> ScriptedServer:
    """Return a server that counts to three."""
    return scripted(lambda *_: HELLO)


MODEL_WAYS = {
    "invoke": lambda model, given, **o: model.invoke(given, **o),
    "ainvoke": lambda model, given, **o: asyncio.run(model.ainvoke(given, **o)),
    "stream": lambda model, given, **o: add(model.stream(given, **o)),
    "astream": lambda model, given, **o: add(asyncio.run(acollect(model.astream(given, **o)))),
    "batch": lambda model, given, **o: model.batch([given], **o)[0],
    "abatch": lambda model, given, **o: asyncio.run(model.abatch([given], **o))[0],
}
model_ways = pytest.mark.parametrize("ask", MODEL_WAYS.values(), ids=MODEL_WAYS)


@model_ways
def test_every_way_returns_text_usage_and_log_probabilities(
    server: ScriptedServer, ask: Any
) -> None:
    """A message holds all that the server told, streamed or whole."""
    message = ask(chat(server), "Count.", logprobs=True, top_logprobs=2)

    assert message.text == "one two three"
    assert message.usage_metadata["output_tokens"] == 3
    assert message.usage_metadata["input_token_details"] == {"cache_read": 0}
    told = message.response_metadata
    assert (told["model_name"], told["finish_reason"]) == ("scripted", "stop")
    first, *rest = told["logprobs"]["content"]
    assert first.pop("token") == "one"
    assert first["logprob"] == pytest.approx(math.log(0.5))
    assert [other["token"] for other in first["top_logprobs"]] == ["one", "two"]
    assert [token["token"] for token in rest] == [" two", " three"]


@model_ways
def test_a_reply_ends_at_a_stop(server: ScriptedServer, ask: Any) -> None:
    """The text before the first of them is the reply, given in the call or to the model."""
    assert ask(chat(server), "Count.", stop=["three", " two"]).text == "one"
    assert ask(chat(server, stop=[" three"]), "Count.").text == "one two"
    assert ask(chat(server), "Count.", stop=["four"]).text == "one two three"


def test_options_reach_the_server(server: ScriptedServer) -> None:
    """What the model is made with counts, unless the call says otherwise."""
    model = chat(server, temperature=0.5, max_tokens=9, extra_body={"seed": 7})

    model.invoke("Count.")
    model.invoke("Count.", temperature=0.0, max_tokens=3)
    chat(server).invoke("Count.")

    asked = [(b["temperature"], b["max_tokens"], b.get("seed")) for b in server.chats]
    assert asked == [(0.5, 9, 7), (0.0, 3, 7), (0.0, 256, None)]


def test_messages_of_every_role_are_sent(server: ScriptedServer) -> None:
    """System, user and assistant turns are, with the text of their blocks."""
    chat(server).invoke(
        [
            SystemMessage("Be brief."),
            HumanMessage([{"type": "text", "text": "Count."}]),
            AIMessage([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "one"}]),
            ChatMessage("Go on.", role="user"),
            ChatMessage("Be quick.", role="developer"),
        ]
    )

    assert [(turn["role"], turn["content"]) for turn in server.chats[0]["messages"]] == [
        ("system", "Be brief."),
        ("user", "Count."),
        ("assistant", "one"),
        ("user", "Go on."),
        ("system", "Be quick."),
    ]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (ToolMessage("x", tool_call_id="1"), "a 'tool' message cannot be sent"),
        (
            HumanMessage([{"type": "image_url", "image_url": {"url": "data:"}}]),
            "a message holds a 'image_url' block; only text",
        ),
    ],
)
def test_what_is_no_text_is_refused(server: ScriptedServer, message: Any, told: str) -> None:
    """Nothing is left out silently."""
    with pytest.raises(InputError, match=told):
        chat(server).invoke([message])

    assert not server.requests


def test_an_unknown_option_of_a_call_is_a_type_error(server: ScriptedServer) -> None:
    """A misspelt or unsupported keyword is named, not dropped."""
    with pytest.raises(TypeError, match="takes no max_token in a call"):
        chat(server).invoke("Count.", max_token=3)
    with pytest.raises(ConfigurationError, match="max_tokens=0 must be at least 1"):
        chat(server).invoke("Count.", max_tokens=0)


BAD = {
    "nothing": ({}, "needs a base_url"),
    "no url": ({"base_url": "gpu:8000"}, "is not a URL"),
    "unknown": ({"base_url": "http://x", "max_token": 3}, "takes no max_token"),
    "tokens": ({"base_url": "http://x", "max_tokens": 0}, "max_tokens=0 must be at least 1"),
    "retries": ({"base_url": "http://x", "max_retries": -1}, "max_retries=-1 must be at least 0"),
    "timeout": ({"base_url": "http://x", "timeout": 0}, "request_timeout=0"),
    "endpoint": ({"endpoint": "http://x"}, "endpoint must be a Endpoint"),
    "both": (
        {"endpoint": Endpoint("http://x", "one"), "model": "two"},
        "model='two' contradicts endpoint=",
    ),
    "two addresses": (
        {"endpoint": Endpoint("http://x", "one"), "base_url": "http://y/v1"},
        "base_url='http://y/v1' contradicts endpoint=",
    ),
    "a key": (
        {"endpoint": Endpoint("http://x", "one"), "api_key": "sk-x"},
        "api_key belongs to the endpoint",
    ),
}


@pytest.mark.parametrize(("options", "told"), BAD.values(), ids=BAD)
def test_a_bad_option_fails_at_construction(options: dict[str, Any], told: str) -> None:
    """It is a ConfigurationError that names the value."""
    with pytest.raises(ConfigurationError, match=told):
        EndpointChat(**options)


def test_an_endpoint_brings_all_it_knows(server: ScriptedServer) -> None:
    """Its address, model and limits are shown as the chat model's own."""
    endpoint = Endpoint(
        server.base_url,
        "scripted",
        request_timeout=7.0,
        max_attempts=2,
        headers={"X-Team": "rivers"},
    )

    model = EndpointChat(endpoint=endpoint, temperature=0.5)

    assert model.endpoint is endpoint
    assert (model.base_url, model.model) == (server.base_url, "scripted")
    assert (model.timeout, model.max_retries) == (7.0, 1)
    assert model.invoke("Count.").text == "one two three"
    assert server.headers[-1]["X-Team"] == "rivers"


def test_a_credential_in_the_url_is_not_shown(server: ScriptedServer) -> None:
    """The address is kept without it, and the request has it."""
    model = EndpointChat(server.base_url.replace("http://", "http://me:hidden@"), "scripted")

    model.invoke("Count.")

    assert "hidden" not in repr(model) + str(model.model_dump())
    assert server.headers[-1]["Authorization"].startswith("Basic ")


def test_a_served_model_is_found_out(server: ScriptedServer) -> None:
    """Without a name the only served model is taken, and traced under its name."""
    model = EndpointChat(server.base_url)

    assert model.invoke("Count.").response_metadata["model_name"] == "scripted"
    assert model._get_ls_params()["ls_model_name"] == "scripted"


def test_standard_parameters_are_traced(server: ScriptedServer) -> None:
    """What LangSmith wants to know of a call is told, the call's own options first."""
    model = chat(server, temperature=0.5, stop=["x"])

    assert model._get_ls_params(stop=["y"], max_tokens=3) == {
        "ls_provider": "openai-compatible",
        "ls_model_name": "scripted",
        "ls_model_type": "chat",
        "ls_temperature": 0.5,
        "ls_max_tokens": 3,
        "ls_stop": ["y"],
    }
    assert model._get_ls_params()["ls_stop"] == ["x"]


@pytest.mark.parametrize("way", MODEL_WAYS)
def test_failures_are_ours(server: ScriptedServer, way: str) -> None:
    """A refusal and a server that is down raise the errors of the package."""
    server.respond = lambda *_: Fault(404, body={"error": {"message": "no such model"}})
    with pytest.raises(EndpointRejectedError, match="no such model"):
        MODEL_WAYS[way](chat(server), "Count.")

    server.respond = lambda *_: Fault(503)
    server.reset()
    with pytest.raises(EndpointUnavailableError):
        MODEL_WAYS[way](chat(server, max_retries=1), "Count.")
    assert len(server.chats) == 2


def test_it_works_over_many_event_loops(server: ScriptedServer) -> None:
    """One model serves threads and one `asyncio.run` after the other, over few connections."""
    model = chat(server)

    async def cell() -> list[str]:
        replies = [model.invoke("Count."), await model.ainvoke("Count.")]
        return [reply.text for reply in replies]

    texts = [text for _ in range(3) for text in asyncio.run(cell())]

    assert texts == ["one two three"] * 6
    assert len(server.connections) == 1


def test_closing_a_stream_frees_the_server(server: ScriptedServer) -> None:
    """A reader that leaves early leaves no request behind."""
    server.respond = lambda *_: Fault(hang=True, stream_break_after=2, reply="one two three")

    stream = chat(server).stream("Count.")
    assert isinstance(next(stream), AIMessageChunk)
    stream.close()

    assert server.wait_for(lambda s: s.aborted == 1)


def test_it_stands_in_a_chain_and_is_configured(server: ScriptedServer) -> None:
    """A prompt before it, and a temperature that is chosen for a call."""
    model = chat(server).configurable_fields(temperature=ConfigurableField(id="t"))
    chain = ChatPromptTemplate.from_template("Count to {n}.") | model

    chain.invoke({"n": 3}, {"configurable": {"t": 0.7}})
    chain.invoke({"n": 3})

    assert [body["temperature"] for body in server.chats] == [0.7, 0.0]
    assert text_of(server.chats[0]) == "Count to 3."


def test_callbacks_may_want_every_token(server: ScriptedServer) -> None:
    """`streaming=True` has `invoke` stream, as with LangChain's other models."""
    message = chat(server, streaming=True).invoke("Count.")

    assert server.chats[0]["stream"]
    assert message.text == "one two three"
    assert message.usage_metadata["output_tokens"] == 3


def test_a_cached_reply_keeps_its_scores(scripted: Scripted) -> None:
    """With LangChain's cache a repeated question costs no request, and has the same scores."""
    server = scripted(default_respond)
    model = chat(server, cache=InMemoryCache())
    chain = make(server, drafter=model, verifier=model)

    first = chain.invoke(QUESTION)
    server.reset()
    second = chain.invoke(QUESTION)

    assert not server.chats
    assert winner(second) == winner(first)
    scores = [
        {s["draft"]: s["value"] for s in output["specrag"]["trace"]["scores"]}  # as they came
        for output in (first, second)
    ]
    assert scores[0] == scores[1]


@pytest.mark.parametrize(("kind", "tier"), [("vllm", "prompt_logprobs"), ("openai", "reflection")])
@pytest.mark.parametrize("way", WAYS)
def test_scores_survive_the_message(scripted: Scripted, kind: str, tier: str, way: str) -> None:
    """What vLLM tells of the prompt rides in the message: values are those of the bare core."""
    server = scripted(prefers(1), kind=kind)
    chain = make(server)
    bare = Endpoint(server.base_url, "scripted")

    output = WAYS[way](chain, QUESTION)

    rag = SpeculativeRAG(
        drafter=bare,
        verifier=bare,
        num_drafts=DRAFTS,
        passages_per_draft=2,
        partitioner=RankStratified(),
    )
    answer = rag.ask(QUESTION, [d.page_content for d in DOCUMENTS])
    told = sorted((s["draft"], s["value"]) for s in output["specrag"]["trace"]["scores"])
    assert output["specrag"]["tier"] == answer.tier == tier
    assert told == sorted((score.draft, score.value) for score in answer.trace.scores)
    drafts = {d["index"]: d["answer_logprob"] for d in output["specrag"]["trace"]["drafts"]}
    assert drafts == {d.index: d.answer_logprob.to_dict() for d in answer.trace.drafts}


def test_scores_survive_streaming_handlers(scripted: Scripted) -> None:
    """Where every token has a listener, drafts and verifications are still asked whole."""
    server = scripted(prefers(1), kind="vllm")

    async def run() -> list[Any]:
        return await acollect(make(server).astream_events(QUESTION, version="v2"))

    output = asyncio.run(run())[-1]["data"]["output"]

    assert output["specrag"]["tier"] == "prompt_logprobs"
    assert not [body for body in server.chats if body.get("stream")]


def test_forced_text_is_scored_by_llama_cpp(scripted: Scripted) -> None:
    """The second way to score a given text passes through the chat model as well."""
    server = scripted(prefers(1), kind="llama.cpp")

    output = make(server, scoring=Scoring(tier="forced_decoding")).invoke(QUESTION)

    assert output["specrag"]["tier"] == "forced_decoding"
    assert all(s["terms"]["consistency_answer"] < 0 for s in output["specrag"]["trace"]["scores"])
    assert len([body for body in server.chats if body.get("grammar")]) == 3
    assert len([body for body in server.chats if is_verification(body)]) >= 3


def test_an_endpoint_may_be_given_first(server: ScriptedServer) -> None:
    """As an EndpointLLM takes it: the same endpoint, not a copy."""
    endpoint = Endpoint(server.base_url, "scripted")
    model = EndpointChat(endpoint)
    assert model.endpoint is endpoint
    assert model.invoke("Name a river.").text
