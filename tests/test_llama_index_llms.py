"""EndpointLLM as an LLM of LlamaIndex, and other LLMs as models of the pipeline."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import math
import pickle
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from pydantic import SecretStr
from scripted_server import Fault, Reply, ScriptedServer, is_verification

pytest.importorskip("llama_index.core")

from llama_index.core import MockEmbedding
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.prompts import PromptTemplate
from llama_index.core.settings import Settings
from llama_index_kit import (
    FALLBACK,
    QUESTION,
    Given,
    Json,
    Scripted,
    dialogue,
    engine,
    is_draft,
    nodes,
    synthesizer,
    text_from,
    text_of,
    unknown,
    watched,
)

from specrag_integrations import ConfigurationError, Endpoint, EndpointError
from specrag_integrations.errors import EndpointTimeoutError, LogprobsUnavailableError
from specrag_integrations.foreign import secrets_of
from specrag_integrations.llama_index import (
    EndpointLLM,
    LLMChat,
    SpeculativeQueryEngine,
    SpeculativeSynthesizer,
)
from specrag_integrations.llama_index.chat import openai_options
from specrag_integrations.models import ChatRequest, Step, user

HELLO = [ChatMessage(role="user", content="Hello?")]
KEY = "sk-secret-1234567"


def llm_of(server: ScriptedServer, **options: Any) -> EndpointLLM:
    """Return the server's model as an LLM."""
    return EndpointLLM(Endpoint(server.base_url, "scripted", max_attempts=1), **options)


# ---------------------------------------------------------------- EndpointLLM


def test_an_endpoint_speaks_in_all_of_llama_indexs_ways(scripted: Scripted) -> None:
    """chat, complete and predict, each synchronous, asynchronous, whole and streamed."""
    llm = llm_of(scripted("Good morning to you"))

    async def asked() -> list[str]:
        chats = [piece async for piece in await llm.astream_chat(HELLO)]
        completed = [piece async for piece in await llm.astream_complete("Hello?")]
        return [
            str((await llm.achat(HELLO)).message.content),
            (await llm.acomplete("Hello?")).text,
            "".join(str(piece.delta) for piece in chats),
            str(chats[-1].message.content),
            "".join(str(piece.delta) for piece in completed),
            completed[-1].text,
            await llm.apredict(PromptTemplate("Hello?")),
        ]

    chats, completed = list(llm.stream_chat(HELLO)), list(llm.stream_complete("Hello?"))
    said = [
        str(llm.chat(HELLO).message.content),
        llm.complete("Hello?").text,
        "".join(str(piece.delta) for piece in chats),
        str(chats[-1].message.content),
        "".join(str(piece.delta) for piece in completed),
        completed[-1].text,
        llm.predict(PromptTemplate("Hello?")),
        "".join(llm.stream(PromptTemplate("Hello?"))),
        *asyncio.run(asked()),
    ]

    assert set(said) == {"Good morning to you"}
    assert len(chats) > 2


def test_a_call_is_worded_as_it_is_asked(server: ScriptedServer) -> None:
    """max_tokens, temperature and log-probabilities of a call outweigh those of the LLM."""
    llm = llm_of(server, max_tokens=7, temperature=0.5)

    llm.chat(HELLO)
    told = llm.chat(HELLO, max_tokens=1, temperature=0.0, logprobs=True, top_logprobs=5)

    first, second = server.chats
    assert (first["max_tokens"], first["temperature"]) == (7, 0.5)
    assert "logprobs" not in first
    assert (second["max_tokens"], second["temperature"]) == (1, 0.0)
    assert second["top_logprobs"] == 5
    (choice,) = told.raw["choices"]
    (token, *_) = choice["logprobs"]["content"]
    assert {"token", "logprob", "bytes", "top_logprobs"} <= set(token)
    assert told.raw["usage"]["total_tokens"] > 0
    assert json.loads(json.dumps(told.raw)) == told.raw


def test_what_a_call_cannot_take_is_refused(server: ScriptedServer) -> None:
    """An argument that would be lost is an error that says where it belongs."""
    with pytest.raises(ConfigurationError, match=r"takes no stop; .* Endpoint\(extra_body=…\)"):
        llm_of(server).chat(HELLO, stop=["."])
    with pytest.raises(ConfigurationError, match=r"EndpointLLM\(Endpoint\(base_url, model\)\)"):
        EndpointLLM("http://gpu:8001")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"has no temprature; it has .* Endpoint\(extra"):
        EndpointLLM(Endpoint(server.base_url, "m"), temprature=0.7)


def test_a_stream_that_is_left_in_a_loops_last_act_ends_quietly(
    scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    """Its request ends, and nothing complains of a generator that was not closed."""
    server = scripted(Reply("one two three four five six seven", chunk_delay=0.05))

    async def leave(llm: EndpointLLM) -> None:
        pieces = await llm.astream_chat(HELLO)
        assert await anext(pieces)
        await pieces.aclose()

    for _ in range(10):
        asyncio.run(leave(llm_of(server)))

    assert server.wait_idle()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_an_endpoints_failure_is_ours(scripted: Scripted) -> None:
    """The server's own message is in the error, however it was asked."""
    llm = llm_of(scripted(Fault(400, body={"error": {"message": "no such adapter"}})))

    async def asked() -> None:
        await llm.achat(HELLO)

    for call in (lambda: llm.chat(HELLO), lambda: list(llm.stream_chat(HELLO))):
        with pytest.raises(EndpointError, match="no such adapter"):
            call()
    with pytest.raises(EndpointError, match="no such adapter"):
        asyncio.run(asked())


def test_a_serialised_llm_holds_no_secret(server: ScriptedServer) -> None:
    """Dumps, reprs and what callbacks see have neither the key nor the endpoint's headers."""
    endpoint = Endpoint(server.base_url, "m", api_key=KEY, headers={"X-Team": "hush-hush"})
    llm = EndpointLLM(endpoint, max_tokens=9)

    told = [llm.to_json(), repr(llm), str(llm), str(llm.dict()), repr(LLMChat(llm))]
    told += [str(llm.metadata), llm.model_dump_json()]

    assert json.loads(llm.to_json())["max_tokens"] == 9
    assert not any("secret" in text or "hush" in text for text in told)
    assert "endpoint" not in llm.dict()


def test_a_copied_llm_shares_its_endpoint(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies use the same connections; a pickled one has no key, and asks the same server."""
    monkeypatch.setenv("SPECRAG_API_KEY", "another-key")
    llm = EndpointLLM(Endpoint(server.base_url, "m", api_key=KEY), max_tokens=9)
    llm.chat(HELLO)  # with a client that could not be pickled

    pickled = pickle.dumps(llm)
    restored = pickle.loads(pickled)

    assert copy.copy(llm).endpoint is copy.deepcopy(llm).endpoint is llm.endpoint
    assert KEY.encode() not in pickled
    assert restored.max_tokens == 9
    assert restored.chat(HELLO).message.content


# ---------------------------------------------------------------- an app's own LLM


def reply_to(messages: Sequence[ChatMessage]) -> str:
    """Say what a model of an app would say to the pipeline's prompts."""
    text = "\n".join(str(message.content) for message in messages)
    if "Reply with its letter only" in text:
        wanted = text.index("Answer: river 2")
        return text[:wanted].rsplit("Draft ", 1)[1][0]
    if "Write two lines" in text:
        return f"Rationale: so it says.\nAnswer: river {text.split('Fact number ')[1].split()[0]}"
    return "a standard answer"


class Own(CustomLLM):
    """An app's LLM with only synchronous methods; keeps what it was called with."""

    seen: list[Any] = []  # noqa: RUF012 - a field of pydantic's
    fail: Any = None

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=True, model_name="own-model")

    def _said(self, messages: Sequence[ChatMessage], kwargs: Json) -> ChatResponse:
        self.seen.append((messages, kwargs, threading.current_thread().name))
        if self.fail is not None:
            raise self.fail
        return ChatResponse(message=ChatMessage(role="assistant", content=reply_to(messages)))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self._said(messages, kwargs)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Any:
        def pieces() -> Any:
            text = ""
            for word in str(self._said(messages, kwargs).message.content).split(" "):
                text += f" {word}" if text else word
                yield ChatResponse(message=ChatMessage(role="assistant", content=text))

        return pieces()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponse:
        raise AssertionError

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **_: Any) -> Any:
        raise AssertionError


class Async(Own):
    """An app's LLM that has asynchronous methods as well."""

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        await asyncio.sleep(0)
        return self._said(messages, kwargs)


def own(kind: type[Own] = Own, **options: Any) -> Own:
    """Return a fresh one."""
    return kind(seen=[], **options)


def answering(llm: Any, **options: Any) -> SpeculativeSynthesizer:
    """Return a synthesizer with an app's LLM in both roles."""
    return synthesizer(
        SimpleNamespace(base_url="http://unused:1/v1"),
        **{  # type: ignore[arg-type]
            "drafter": llm,
            "verifier": llm,
            **options,
        },
    )


def test_an_apps_llm_answers_at_the_tier_of_text_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is asked of it that it may not take, and a request that tells nothing is not sent."""
    llm = own()

    response = answering(llm).synthesize(QUESTION, nodes())

    told = response.metadata["specrag"]
    assert response.response == "river 2"
    assert told["tier"] == "choice"
    assert len(llm.seen) == told["usage"]["requests"] == 5  # 3 drafts, and the choice in two orders
    assert all(kwargs == {} for _, kwargs, _ in llm.seen)
    assert "HTTP requests of one question" not in caplog.text


@pytest.mark.parametrize("kind", [Own, Async])
def test_a_synchronous_query_calls_it_in_threads(kind: type[Own]) -> None:
    """Its asynchronous client belongs to the app's loop, and is left alone."""
    llm = own(kind)

    answering(llm).synthesize(QUESTION, nodes())

    assert {name for _, _, name in llm.seen} == {f"specrag-{kind.__name__}"}


def test_an_asynchronous_query_uses_the_apps_own_loop() -> None:
    """Its asynchronous methods are awaited where the app awaits the query."""
    llm = own(Async)

    asyncio.run(answering(llm).asynthesize(QUESTION, nodes()))

    assert {name for _, _, name in llm.seen} == {"MainThread"}


def test_an_llm_without_asynchronous_methods_never_blocks_the_loop() -> None:
    """CustomLLM's `achat` would: it is called in a thread."""
    llm = own()

    asyncio.run(answering(llm).asynthesize(QUESTION, nodes()))

    assert {name for _, _, name in llm.seen} == {"specrag-Own"}


@pytest.mark.parametrize("kind", [Own, Async])
def test_its_fallback_is_streamed(kind: type[Own]) -> None:
    """Piece by piece where the query is synchronous; else it is heard first, and read anywhere."""
    template = PromptTemplate("Plainly: {context_str} {query_str}")
    forgetful = PromptTemplate("Say: unknown. {context_str}")

    class Vague(kind):  # type: ignore[misc, valid-type]
        def _said(self, messages: Sequence[ChatMessage], kwargs: Json) -> ChatResponse:
            said = super()._said(messages, kwargs)
            if "Say: unknown" in str(messages[-1].content):
                said.message.content = "Answer: unknown"
            return said

    llm = own(Vague)
    streaming = answering(llm, streaming=True, text_qa_template=template, draft_template=forgetful)

    async def asked() -> Any:
        return await streaming.asynthesize(QUESTION, nodes())

    async def read() -> str:
        return await text_from(await asked())

    pieces = list(streaming.synthesize(QUESTION, nodes()).response_gen)
    assert pieces == ["a", " standard", " answer"]
    assert asyncio.run(read()) == str(asyncio.run(asked())) == "a standard answer"


def test_a_class_that_cannot_stream_answers_whole() -> None:
    """NotImplementedError from `stream_chat` is no failure of the fallback."""

    class Whole(Own):
        def stream_chat(self, messages: Sequence[ChatMessage], **_: Any) -> Any:
            raise NotImplementedError

        def _said(self, messages: Sequence[ChatMessage], kwargs: Json) -> ChatResponse:
            said = super()._said(messages, kwargs)
            if "Write two lines" in str(messages[-1].content):
                said.message.content = "Answer: unknown"
            return said

    streamed = answering(own(Whole), streaming=True).synthesize(QUESTION, nodes())

    assert str(streamed) == "a standard answer"


def test_its_own_system_prompt_stands_before_what_a_reader_reads() -> None:
    """Drafts and fallbacks have it, as in LlamaIndex's own engine; judgements do not."""
    llm = own(system_prompt="You are a river guide.")

    answering(llm).synthesize(QUESTION, nodes())

    judged = [m for m, _, _ in llm.seen if "letter only" in str(m[-1].content)]
    drafted = [m for m, _, _ in llm.seen if "letter only" not in str(m[-1].content)]
    assert len(judged) == 2
    assert {str(messages[0].content) for messages in drafted} == {"You are a river guide."}
    assert not any("river guide" in str(messages[0].content) for messages in judged)


def test_the_system_prompt_of_an_endpoint_llm_stands_there_as_well(scripted: Scripted) -> None:
    """Drafts and the fallback have it; verifications, and an endpoint itself, have none."""

    def respond(body: Json, call: int) -> Any:
        return dialogue(r2=0.9)(body, call) if is_verification(body) else unknown(body, call)

    server = scripted(respond)
    llm = llm_of(server, system_prompt="You are a river guide.")
    drafts = scripted(dialogue())
    drafter = EndpointLLM(Endpoint(drafts.base_url, "s"), system_prompt="Be brief.")

    engine(server, drafter=llm, verifier=llm).query(QUESTION)
    unread, server.respond = list(server.chats), dialogue(r2=0.9)
    server.reset()
    engine(server, drafter=drafter, verifier=llm).query(QUESTION)

    assert {body["messages"][0]["content"] for body in unread} == {"You are a river guide."}
    assert {bool(body.get("stream")) for body in unread} == {False, True}
    assert {body["messages"][0]["content"] for body in drafts.chats} == {"Be brief."}
    assert len(server.chats) == 3
    assert all(is_verification(body) for body in server.chats)
    assert not any("river guide" in text_of(body) for body in server.chats)


def test_a_system_prompt_takes_room_from_the_context(scripted: Scripted) -> None:
    """A fallback leaves out what would not fit beside it."""
    server = scripted(kind="vllm", context_tokens=800)

    async def room(llm: EndpointLLM) -> int | None:
        told = await LLMChat(llm).capabilities()
        return told.context_tokens if told else None

    assert asyncio.run(room(llm_of(server))) == 800
    assert asyncio.run(room(llm_of(server, system_prompt="é" * 150))) == 500


def test_its_api_failure_is_a_failed_draft(scripted: Scripted) -> None:
    """A time-out or an API error of it is told of in the trace; the other models still answer."""
    server = scripted(dialogue(r2=0.9))
    llm = own(fail=TimeoutError("too slow"))
    endpoint = Endpoint(server.base_url, "scripted")

    response = synthesizer(server, drafter=[endpoint, llm]).synthesize(QUESTION, nodes())

    failed = [d for d in response.metadata["specrag"]["trace"]["drafts"] if "failed" in d]
    assert len(failed) == 1
    assert "own-model: " in failed[0]["failed"]
    assert response.response.startswith("river ")


@pytest.mark.parametrize("error", [RuntimeError("Event loop is closed"), KeyError("bug")])
def test_its_bugs_propagate_as_themselves(error: Exception) -> None:
    """What is no API failure is not swallowed, in both ways of asking."""
    broken = answering(own(fail=error))

    with pytest.raises(type(error)) as synchronous:
        broken.synthesize(QUESTION, nodes())
    with pytest.raises(type(error)) as awaited:
        asyncio.run(broken.asynthesize(QUESTION, nodes()))

    assert synchronous.value is awaited.value is error


def test_its_steps_are_spans_of_the_same_tree() -> None:
    """Threads keep the tree: each call of its is under its step, synchronous or not."""
    llm = own()

    with watched() as seen:
        answering(llm).synthesize(QUESTION, nodes())
        asyncio.run(answering(llm).asynthesize(QUESTION, nodes()))

    assert sum(path.endswith("LLMChat.draft > Own.chat") for path in seen.paths) == 6
    assert sum(path.endswith("LLMChat.verify > Own.chat") for path in seen.paths) == 4
    assert not any("(lost)" in path for path in seen.paths)


class Logprobs(Own):
    """Returns log-probabilities in OpenAI's shape where it is asked for them."""

    def _said(self, messages: Sequence[ChatMessage], kwargs: Json) -> ChatResponse:
        response = super()._said(messages, kwargs)
        text = str(messages[-1].content)
        if "Reply Yes or No" in text:
            p = 0.9 if "river 2" in str(messages[1].content) else 0.2
            response.message.content = "Yes"
            top = [("Yes", p), ("No", 1 - p)]
            alternatives = [{"token": t, "logprob": math.log(q)} for t, q in top]
            first = {"token": "Yes", "logprob": math.log(p), "top_logprobs": alternatives}
            content = [SimpleNamespace(**first)] if kwargs.get("objects") else [first]
            choice = {"finish_reason": "stop", "logprobs": {"content": content}}
            response.raw = {"choices": [choice], "usage": {"prompt_tokens": 5}}
        return response


def test_an_own_class_can_be_told_how_to_ask_for_log_probabilities() -> None:
    """`LLMChat(llm, options=…)` words each call; what comes back is read from `raw`."""
    llm = own(Logprobs)

    def options(request: ChatRequest) -> Json:
        return {"max_tokens": request.max_tokens, "top_logprobs": request.top_logprobs}

    response = answering(LLMChat(llm, options=options)).synthesize(QUESTION, nodes())

    told = response.metadata["specrag"]
    scores = {score["draft"]: score["value"] for score in told["trace"]["scores"]}
    assert told["tier"] == "reflection"
    assert response.response == "river 2"
    assert scores[told["selection"]["winner"]] == pytest.approx(math.log(0.9))
    judged = [kwargs for m, kwargs, _ in llm.seen if "Yes or No" in str(m[-1].content)]
    assert judged == [{"max_tokens": 1, "top_logprobs": 20}] * 3
    assert told["usage"]["verifier"]["prompt_tokens"] == 15


def test_what_an_llm_cannot_do_is_said_before_it_is_asked() -> None:
    """Requests that need log-probabilities cost nothing where they cannot be had."""
    llm = own()
    request = ChatRequest(messages=(user("?"),), max_tokens=1, labels=("Yes", "No"), top_logprobs=5)
    forced = ChatRequest(messages=(user("?"),), max_tokens=1, forced="text")

    async def asked(chat: LLMChat, request: ChatRequest) -> None:
        await chat.chat(request, step=Step(kind="verify"))

    with pytest.raises(LogprobsUnavailableError, match=r"LLMChat\(llm, options=…\)") as refused:
        asyncio.run(asked(LLMChat(llm), request))
    with pytest.raises(EndpointError, match="cannot be made to write a given text"):
        asyncio.run(asked(LLMChat(llm), forced))
    with pytest.raises(LogprobsUnavailableError, match="returned no usable") as returned:
        asyncio.run(asked(LLMChat(llm, options=lambda _: {}), request))

    assert (refused.value.attempts, returned.value.attempts) == (0, 1)
    assert len(llm.seen) == 1


def test_an_error_of_its_keeps_its_cause() -> None:
    """The app's own exception is the cause of ours."""
    error = TimeoutError("too slow")

    async def asked() -> None:
        request = ChatRequest(messages=(user("?"),), max_tokens=1)
        await LLMChat(own(fail=error)).chat(request, step=Step(kind="draft"))

    with pytest.raises(EndpointTimeoutError, match="own-model") as raised:
        asyncio.run(asked())

    assert raised.value.__cause__ is error


class Client(CustomLLM):
    """An app's LLM over the SDK of OpenAI, which can only answer whole."""

    url: str
    api_key: str = "hunter2-of-the-app"

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=True, model_name="client")

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        with openai.OpenAI(base_url=self.url, api_key=self.api_key, max_retries=0) as client:
            turns: Any = [{"role": turn.role.value, "content": turn.content} for turn in messages]
            told = client.chat.completions.create(model="scripted", messages=turns, **kwargs)
        text = told.choices[0].message.content
        return ChatResponse(message=ChatMessage(role="assistant", content=text), raw=told)

    def stream_chat(self, messages: Sequence[ChatMessage], **_: Any) -> Any:
        raise AssertionError

    def complete(self, prompt: str, formatted: bool = False, **_: Any) -> CompletionResponse:
        raise AssertionError

    def stream_complete(self, prompt: str, formatted: bool = False, **_: Any) -> Any:
        raise AssertionError


def client_of(server: ScriptedServer) -> LLMChat:
    """Return one that is asked for log-probabilities."""
    return LLMChat(Client(url=server.base_url), options=openai_options)


def drafts_of(response: Any) -> list[Json]:
    """Return the drafts that a response tells of."""
    drafts: list[Json] = response.metadata["specrag"]["trace"]["drafts"]
    return drafts


def sent_drafts(server: ScriptedServer) -> list[bool]:
    """Return, for each draft that was asked for, whether with log-probabilities."""
    return [bool(body.get("logprobs")) for body in server.chats if is_draft(body)]


def refusal(message: str) -> Fault:
    """Return a 400 in a server's words."""
    return Fault(400, body={"error": {"message": message}})


def test_refused_log_probabilities_cost_no_draft(scripted: Scripted) -> None:
    """All concurrent drafts are asked for again without, and from then on at once without."""

    def respond(body: Json, call: int) -> Any:
        if is_draft(body) and body.get("logprobs"):
            return refusal("logprobs is not supported with this model")
        return dialogue(r2=0.9)(body, call)

    server = scripted(respond)
    asked = engine(server, drafter=client_of(server))

    for sent in ([True] * 3 + [False] * 3, [False] * 3):
        server.reset()
        response = asked.query(QUESTION)
        assert not any("failed" in draft for draft in drafts_of(response))
        assert sorted(sent_drafts(server), reverse=True) == sent
        assert response.metadata["specrag"]["usage"]["requests"] == len(server.chats)


@pytest.mark.parametrize("message", ["content was filtered", "context length is 800 tokens"])
def test_a_refusal_of_something_else_is_not_asked_twice(scripted: Scripted, message: str) -> None:
    """One rejected draft costs one request, and the next question still has log-probabilities."""

    def respond(body: Json, call: int) -> Any:
        if is_draft(body) and "Fact number 0 " in text_of(body):
            return refusal(message)
        return dialogue(r2=0.9)(body, call)

    server = scripted(respond)
    asked = engine(server, drafter=client_of(server))

    for _ in range(2):
        server.reset()
        response = asked.query(QUESTION)
        assert [message in draft.get("failed", "") for draft in drafts_of(response)].count(True)
        assert sent_drafts(server) == [True] * 3
        assert response.metadata["specrag"]["usage"]["requests"] == len(server.chats)


def test_a_draft_that_fails_in_both_ways_costs_two_requests(scripted: Scripted) -> None:
    """Refused with log-probabilities, then without: both requests are told of."""

    def respond(body: Json, call: int) -> Any:
        if is_draft(body):
            return refusal("logprobs are off" if body.get("logprobs") else "content was filtered")
        return dialogue()(body, call)

    server = scripted(respond)

    response = engine(server, drafter=client_of(server)).query(QUESTION)

    usage = response.metadata["specrag"]["usage"]
    assert [s["attempts"] for s in usage["steps"] if s["kind"] == "draft"] == [2, 2, 2]
    assert usage["requests"] == len(server.chats) == 7


def test_a_fallback_that_nobody_streams_comes_whole_and_counted(scripted: Scripted) -> None:
    """Most servers count no tokens of a stream unless asked to: none is asked for in vain."""
    server = scripted(unknown)
    asked = engine(server, verifier=client_of(server))

    async def awaited() -> Any:
        return await asked.aquery(QUESTION)

    for response in (asked.query(QUESTION), asyncio.run(awaited())):
        *_, last = response.metadata["specrag"]["usage"]["steps"]
        assert str(response) == FALLBACK
        assert last["kind"] == "fallback"
        assert last["prompt_tokens"] > 0
        assert last["completion_tokens"] > 0
    assert not any(body.get("stream") for body in server.chats)


def test_a_key_that_a_server_echoes_is_masked(scripted: Scripted) -> None:
    """The key of an app's LLM is in no failed draft, whatever it looks like."""

    def respond(body: Json, call: int) -> Any:
        if is_draft(body):
            return refusal("Incorrect API key provided: hunter2-of-the-app, or of-a-header")
        return dialogue()(body, call)

    server = scripted(respond)
    llm = Client(url=server.base_url)

    response = engine(server, drafter=llm).query(QUESTION)

    told = json.dumps(response.metadata["specrag"])
    assert "Incorrect API key provided: ***" in told
    assert "hunter2" not in told


def test_keys_are_found_by_the_names_of_fields() -> None:
    """Plain and secret strings, private ones, and headers; limits are none."""

    class Keyed(Own):
        api_key: str = "plain"
        azure_ad_token: SecretStr = SecretStr("veiled")
        default_headers: dict[str, str] = {"X-Team": "header"}  # noqa: RUF012 - pydantic's
        secret: str | None = None
        max_tokens: int = 5
        _key: str = PrivateAttr(default="private")

    assert sorted(secrets_of(Keyed(seen=[]))) == ["header", "plain", "private", "veiled"]
    assert secrets_of(own()) == []


class Retrying(Own):
    """An app's LLM with retries of its own."""

    max_retries: int = 3


def test_a_warning_says_what_retries_of_its_own_can_cost(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once, with the most requests of one question; an endpoint needs none."""
    with caplog.at_level(logging.WARNING, logger="specrag_integrations"):
        made = answering(own(Retrying))
        made.update_prompts({"text_qa_template": PromptTemplate("{context_str} {query_str}")})
        synthesizer(server)
        answering(own())

    (record,) = caplog.records
    assert f"make up to {made.rag.max_requests} HTTP requests of one question" in record.message
    assert made.rag.max_requests == 4 * answering(own()).rag.max_requests


def test_what_is_no_llm_is_refused(server: ScriptedServer) -> None:
    """LLMChat says what to write instead."""
    with pytest.raises(ConfigurationError, match=r"EndpointLLM\(endpoint\)"):
        LLMChat(Endpoint(server.base_url, "m"))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="options must be a function"):
        LLMChat(own(), options={"logprobs": True})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="an LLM with an output_cls"):
        synthesizer(server, verifier=own().as_structured_llm(ChatMessage))


def test_an_llm_without_a_name_is_called_by_its_class() -> None:
    """Traces name something."""

    class Nameless(Own):
        @property
        def metadata(self) -> LLMMetadata:
            return LLMMetadata(is_chat_model=True)

    assert LLMChat(own(Nameless)).name == "Nameless"
    assert LLMChat(own()).name == "own-model"


# ---------------------------------------------------------------- copies


def test_a_copy_of_an_engine_answers_by_itself(scripted: Scripted) -> None:
    """Copies keep the configuration, share the models, and change without the original."""
    server = scripted(unknown)
    asked = engine(server, streaming=True, only_used=True)

    copies = [copy.copy(asked._response_synthesizer), copy.deepcopy(asked._response_synthesizer)]
    for copied in copies:
        copied.update_prompts({"text_qa_template": PromptTemplate("Copy: {context_str}")})
        assert str(copied.synthesize(QUESTION, nodes()))
        assert text_of(server.chats[-1]).startswith("Copy: ")
    deep = copy.deepcopy(asked)

    assert str(deep.query(QUESTION)) == str(asked.query(QUESTION))
    assert not text_of(server.chats[-1]).startswith("Copy: ")
    assert deep._response_synthesizer is not asked._response_synthesizer
    assert [copied.callback_manager for copied in copies] == [asked.callback_manager] * 2


class Locked(LlamaDebugHandler):
    """A handler that cannot be copied or pickled, as those with a client."""

    def __init__(self) -> None:
        super().__init__(print_trace_on_end=False)
        self.lock = threading.Lock()


def test_a_copied_engine_keeps_its_callbacks(scripted: Scripted) -> None:
    """Copies share callbacks and retriever, also where a handler could not be copied."""
    server, handler = scripted(dialogue(r2=0.9)), Locked()
    manager = CallbackManager([handler])
    asked = SpeculativeQueryEngine(
        Given(nodes(), callback_manager=manager),
        synthesizer(server, callback_manager=manager),
        [SimilarityPostprocessor(similarity_cutoff=-1.0)],
        manager,
    )

    for copied in (copy.copy(asked), copy.deepcopy(asked)):
        handler.flush_event_logs()
        assert str(copied.query(QUESTION)) == "river 2 [1]"
        assert len(handler.get_event_pairs(CBEventType.QUERY)) == 1
        assert copied.retriever is asked.retriever
        assert copied.callback_manager is manager
    copied.update_prompts(
        {"response_synthesizer:text_qa_template": PromptTemplate("{context_str}")}
    )
    assert copied.get_prompts() != asked.get_prompts()

    restored = pickle.loads(pickle.dumps(asked))
    assert str(restored.query(QUESTION)) == "river 2 [1]"
    assert restored.retriever.callback_manager is Settings.callback_manager
    assert asked.retriever.callback_manager is manager
    (postprocessor,) = asked._node_postprocessors
    assert postprocessor.callback_manager is manager


def test_what_holds_a_key_of_the_apps_is_not_pickled(server: ScriptedServer) -> None:
    """An app's LLM or embedding would take its key along; copies share it instead."""

    class Embedding(MockEmbedding):
        api_key: str = ""

    client = Client(url=server.base_url)
    keyless = MockEmbedding(embed_dim=2)
    for made in (
        engine(server, drafter=client),
        synthesizer(server, verifier=client),
        LLMChat(client),
    ):
        with pytest.raises(pickle.PicklingError, match="Client would be pickled with its key"):
            pickle.dumps(made)
    with pytest.raises(pickle.PicklingError, match="embedder: Embedding would be pickled with"):
        pickle.dumps(synthesizer(server, embedder=Embedding(embed_dim=2, api_key=KEY)))

    assert pickle.loads(pickle.dumps(synthesizer(server, embedder=keyless)))
    copied = copy.deepcopy(engine(server, drafter=client))._response_synthesizer
    assert copied._drafters[0].llm is client
    chat = LLMChat(client)
    assert copy.copy(chat) is copy.deepcopy(chat) is chat


def test_a_pickled_engine_has_no_key_and_answers(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configuration, prompts and options travel; clients, keys and callbacks do not."""
    monkeypatch.setenv("SPECRAG_API_KEY", "another-key")
    server.respond = dialogue(r2=0.9)
    endpoint = Endpoint(server.base_url, "scripted", api_key=KEY)
    template = PromptTemplate("Pickled: {context_str} {query_str}")
    asked = engine(
        server, drafter=endpoint, verifier=endpoint, text_qa_template=template, only_used=True
    )
    asked.query(QUESTION)
    server.reset()

    pickled = pickle.dumps(asked)
    restored = pickle.loads(pickled)
    response = restored.query(QUESTION)

    assert KEY.encode() not in pickled
    assert response.response == "river 2 [1]"
    assert len(response.source_nodes) == 2
    assert len(server.chats) == 6
    assert any("Pickled: " in text_of(body) for body in server.chats if is_draft(body))
    assert sum(is_verification(body) for body in server.chats) == 3
