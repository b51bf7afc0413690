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

import pytest
from scripted_server import Fault, ScriptedServer, is_verification

pytest.importorskip("llama_index.core")

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LLMMetadata,
)
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.prompts import PromptTemplate
from llama_index_kit import (
    QUESTION,
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
from specrag_integrations.llama_index import EndpointLLM, LLMChat, SpeculativeSynthesizer
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
