"""Models of an application: ChatOpenAI, chains and others, which are never ours to drive."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="needs the extra `langchain`")

from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_kit import (
    DOCUMENTS,
    DRAFTS,
    QUESTION,
    Foreign,
    Retriever,
    Scripted,
    Tree,
    believing,
    chat,
    children,
    draft,
    fails_drafts,
    is_verification,
    lead,
    make,
    prefers,
    steps,
    text_of,
    winner,
    writes,
    yes,
)
from scripted_server import Fault, Reply, ScriptedServer
from test_langchain_runnable import WAYS, acollect

from specrag_integrations import NoAnswerError, NoAnswerReason, SpeculativeRAG
from specrag_integrations.langchain import RunnableChat, SpeculativeRAGRunnable
from specrag_integrations.models import ChatRequest, Step, user

PORTAL = "specrag-io"

# langchain-openai closes no connection of a loop that has ended.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def forgotten_clients() -> Iterator[None]:
    """Have what langchain-openai leaves open collected here, where its warnings are expected."""
    yield
    if utils := sys.modules.get("langchain_openai.chat_models._client_utils"):
        cached = utils._cached_async_httpx_client
        if cached.cache_info().currsize:
            cached.cache_clear()
            gc.collect()


@pytest.fixture
def server(scripted: Scripted) -> ScriptedServer:
    """Return a server whose verifier trusts river 1."""
    return scripted(prefers(1))


def chat_openai(server: ScriptedServer, **options: Any) -> Any:
    """Return the application's own client of a server."""
    openai = pytest.importorskip("langchain_openai", reason="needs langchain-openai")
    given = {"model": "scripted", "api_key": "none", "max_retries": 0, **options}
    return openai.ChatOpenAI(base_url=server.base_url, **given)


# -------------------------------------------------------------------- ChatOpenAI


@pytest.mark.parametrize("way", WAYS)
def test_chat_openai_drafts_and_verifies(server: ScriptedServer, way: str) -> None:
    """A user's ChatOpenAI in both roles is scored at `reflection`, whatever the way of asking."""
    model = chat_openai(server)

    output = WAYS[way](make(server, drafter=model, verifier=model), QUESTION)

    assert winner(output) == "river 1"
    assert output["specrag"]["tier"] == "reflection"
    assert all(draft["answer_logprob"] for draft in output["specrag"]["trace"]["drafts"])
    assert len(server.chats) == 2 * DRAFTS


def test_chat_openai_survives_two_event_loops(server: ScriptedServer) -> None:
    """One `asyncio.run` after the other loses no draft.

    langchain-openai shares one pool of connections between equal clients, and connections of a
    closed loop are dead; they are used up, one failed request each.
    """
    for _ in range(2):
        model = chat_openai(server)

        async def ask(model: Any = model) -> dict[str, Any]:
            chain = make(server, drafter=model, verifier=model, fallback=None)
            first, second = await chain.ainvoke(QUESTION), await chain.ainvoke(QUESTION)
            assert winner(first) == winner(second)
            return second

        server.reset()
        output = asyncio.run(ask())
        assert winner(output) == "river 1"
        assert output["specrag"]["tier"] == "reflection"
        assert len(output["specrag"]["trace"]["scores"]) == DRAFTS


def test_chat_openai_answers_sync_and_async_in_one_process(server: ScriptedServer) -> None:
    """Sync, in a running loop, and async in that loop: each uses the client made for it."""
    model = chat_openai(server)
    chain = make(server, drafter=model, verifier=model)

    async def cell() -> list[str]:
        return [
            winner(chain.invoke(QUESTION)),
            winner(await chain.ainvoke(QUESTION)),
            winner(chain.invoke(QUESTION)),
        ]

    assert winner(chain.invoke(QUESTION)) == "river 1"
    assert asyncio.run(cell()) == ["river 1"] * 3


def test_chat_openai_falls_back_and_streams(server: ScriptedServer) -> None:
    """Its fallback is streamed word by word, sync and async."""
    server.respond = fails_drafts
    model = chat_openai(server)
    chain = make(server, drafter=model, verifier=model)
    words = ["All", " six", " rivers", " are", " meant", " [1]."]

    assert list(chain.pick("answer").stream(QUESTION)) == words
    assert asyncio.run(acollect(chain.pick("answer").astream(QUESTION))) == words


def test_the_options_of_a_users_model_stay_his(server: ScriptedServer) -> None:
    """Drafts are written as the model is set up; only the check is limited to its word."""
    model = chat_openai(server, max_tokens=77, temperature=0.3)

    make(server, drafter=model, verifier=model).invoke(QUESTION)

    limits = {is_verification(b): b.get("max_completion_tokens") for b in server.chats}
    assert limits == {False: 77, True: 1}
    assert {body["temperature"] for body in server.chats} == {0.3}


def refuses(body: dict[str, Any], _: int) -> Reply | Fault:
    """Answer without log-probabilities, and refuse to tell any."""
    if body.get("logprobs"):
        message = "logprobs are not supported with reasoning models"
        return Fault(400, body={"error": {"message": message}}, headers={})
    return Reply(writes(text_of(body)))


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_a_server_that_refuses_log_probabilities_is_asked_once(
    scripted: Scripted, way: str
) -> None:
    """The refusal costs one more request and no draft, then the letters of `choice` decide.

    All drafts are under way when the first refusal comes.
    """
    server = scripted(refuses)
    server.delay = 0.05
    model = chat_openai(server)
    chain = make(server, drafter=model, verifier=model)

    first = WAYS[way](chain, QUESTION)
    asked = len(server.chats)
    second = WAYS[way](chain, QUESTION)

    assert [draft.get("failed") for draft in first["specrag"]["trace"]["drafts"]] == [None] * DRAFTS
    assert first["specrag"]["usage"]["requests"] == asked <= chain.engine.max_requests
    assert first["specrag"]["tier"] == second["specrag"]["tier"] == "choice"
    assert winner(first) == winner(second) == "river 0"
    assert len([b for b in server.chats[asked:] if b.get("logprobs")]) == 0
    assert len([b for b in server.chats[:asked] if b.get("logprobs")]) <= 2 * DRAFTS


def test_another_refusal_is_not_of_log_probabilities(server: ScriptedServer) -> None:
    """A draft that is refused for what it says is not asked for again, and nothing is learnt."""
    message = "the content was filtered"
    server.respond = lambda body, call: (
        prefers(1)(body, call)
        if is_verification(body) or lead(body) != 0
        else Fault(400, body={"error": {"message": message}}, headers={})
    )
    model = chat_openai(server)
    chain = make(server, drafter=model, verifier=model)

    for _ in range(2):
        server.reset()
        output = chain.invoke(QUESTION)
        assert output["specrag"]["tier"] == "reflection"
        assert len(server.chats) == output["specrag"]["usage"]["requests"] == 2 * DRAFTS - 1
        assert all(body["logprobs"] for body in server.chats)


def test_what_fails_without_log_probabilities_too_is_counted(server: ScriptedServer) -> None:
    """A failed draft tells of both requests, and the engine's most requests hold for them."""

    def respond(body: dict[str, Any], call: int) -> Reply | Fault:
        return refuses(body, call) if body.get("logprobs") else fails_drafts(body, call)

    server.respond = respond
    chain = make(server, drafter=chat_openai(server), num_drafts=1)

    output = chain.invoke(QUESTION)

    assert winner(output) == "All six rivers are meant [1]."
    assert len(server.chats) == 3  # the draft with and without, and the fallback
    assert output["specrag"]["usage"]["requests"] == 3


def test_what_a_model_refuses_is_known_to_every_chain(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Configured anew with each call, a chain asks a model no second time, nor warns again."""
    server.respond = refuses
    model = chat_openai(server, max_retries=1).with_retry(stop_after_attempt=2)
    chain = make(server, drafter=model, verifier=Foreign(respond=writes)).configurable_fields(
        num_drafts=ConfigurableField(id="drafts")
    )
    for drafts in (1, 2):
        server.reset()
        chain.invoke(QUESTION, {"configurable": {"drafts": drafts}})

    assert [body.get("logprobs") for body in server.chats] == [None, None]
    assert len([r for r in caplog.records if "multiply" in r.getMessage()]) == 1


# -------------------------------------------------------------------- streams and counts


def speaks(body: dict[str, Any], _: int) -> Reply:
    """Draft and verify, whether streamed or not; answer whatever else is asked."""
    if is_verification(body):
        return yes(0.9)
    return draft(body) if "Write two lines" in text_of(body) else Reply("All six [1].")


@pytest.mark.parametrize("listener", ["astream_events", "messages"])
def test_drafts_of_chat_openai_are_never_streamed(server: ScriptedServer, listener: str) -> None:
    """Where every token has a listener, drafts and verdicts are whole, scored and counted."""
    server.respond = speaks
    model = chat_openai(server)
    chain = make(server, drafter=model, verifier=model)

    with get_usage_metadata_callback() as usage:
        if listener == "astream_events":
            events = asyncio.run(acollect(chain.astream_events(QUESTION, version="v2")))
            assert not [e for e in events if e["event"] == "on_chat_model_stream"]
        else:
            graphs = pytest.importorskip("langgraph.graph", reason="needs langgraph")
            graph = graphs.StateGraph(graphs.MessagesState)
            graph.add_node("rag", chain.as_node())
            graph.add_edge(graphs.START, "rag")
            given = {"messages": [("user", QUESTION)]}
            shown = list(graph.compile().stream(given, stream_mode="messages"))
            assert [message.text for message, _ in shown] == ["river 0"]

    assert len(server.chats) == 2 * DRAFTS
    assert not [body for body in server.chats if body.get("stream")]
    assert usage.usage_metadata["scripted"]["output_tokens"] > 0


def undrafted(body: dict[str, Any], call: int) -> Reply | Fault:
    """Refuse drafts; answer in one way or the other."""
    if "Write two lines" in text_of(body):
        return Fault(400, body={"error": {"message": "no drafts today"}}, headers={})
    return speaks(body, call)


@pytest.mark.parametrize("way", WAYS)
def test_a_fallback_of_chat_openai_is_counted(server: ScriptedServer, way: str) -> None:
    """It is streamed only to who streams, and its tokens are told in either case."""
    server.respond = undrafted
    chain = make(server, verifier=chat_openai(server))

    with get_usage_metadata_callback() as usage:
        output = WAYS[way](chain, QUESTION)

    (step,) = [s for s in output["specrag"]["usage"]["steps"] if s["kind"] == "fallback"]
    assert winner(output) == "All six [1]."
    assert step["prompt_tokens"] > 0
    assert step["completion_tokens"] == 3
    assert usage.usage_metadata["scripted"]["output_tokens"] == 3
    (body,) = [b for b in server.chats if "Write two lines" not in text_of(b)]
    assert bool(body.get("stream")) == ("stream" in way or "transform" in way)


def test_a_listener_has_the_fallback_of_an_unstreamed_question(server: ScriptedServer) -> None:
    """A node of LangGraph is invoked, and its graph streams: the words are shown and counted."""
    graphs = pytest.importorskip("langgraph.graph", reason="needs langgraph")
    server.respond = undrafted
    graph = graphs.StateGraph(graphs.MessagesState)
    graph.add_node("rag", make(server, verifier=chat_openai(server)).as_node())
    graph.add_edge(graphs.START, "rag")
    compiled = graph.compile()
    given = {"messages": [("user", QUESTION)]}

    with get_usage_metadata_callback() as usage:
        shown = list(compiled.stream(given, stream_mode="messages"))

    assert [m.text for m, _ in shown if m.text] == ["All", " six", " [1]."]
    assert usage.usage_metadata["scripted"]["output_tokens"] == 3


def test_a_server_that_cannot_count_a_stream_still_streams(server: ScriptedServer) -> None:
    """Where `stream_options` is refused, the answer is streamed without it, from then on."""

    def respond(body: dict[str, Any], call: int) -> Reply | Fault:
        if body.get("stream_options"):
            told = {"error": {"message": "unknown field stream_options"}}
            return Fault(400, body=told, headers={})
        return undrafted(body, call)

    server.respond = respond
    chain = make(server, verifier=chat_openai(server), num_drafts=1)
    outputs = [WAYS["stream"](chain, QUESTION), WAYS["astream"](chain, QUESTION)]

    assert [winner(output) for output in outputs] == ["All six [1]."] * 2
    assert [output["specrag"]["usage"]["requests"] for output in outputs] == [3, 2]
    assert len([body for body in server.chats if body.get("stream_options")]) == 1


def test_who_wants_no_count_of_a_stream_is_heeded(server: ScriptedServer) -> None:
    """`stream_usage=False` of the model stays as it is."""
    server.respond = undrafted
    chain = make(server, verifier=chat_openai(server, stream_usage=False))

    assert winner(WAYS["stream"](chain, QUESTION)) == "All six [1]."
    assert not [body for body in server.chats if body.get("stream_options")]


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
def test_the_key_of_a_users_model_is_masked(server: ScriptedServer, way: str) -> None:
    """A server that repeats the key does not bring it into the trace."""
    key = "tenant 4f9a27c1d0"
    told = {"error": {"message": f"no such key: {key}"}}
    server.respond = lambda *_: Fault(401, body=told, headers={})
    model = chat_openai(server, api_key=key)
    chain = make(server, drafter=model | StrOutputParser(), verifier=model)

    with pytest.raises(NoAnswerError) as raised:
        WAYS[way](chain, QUESTION)

    assert "no such key" in str(raised.value.failures)
    assert key not in str(raised.value.failures)


@pytest.mark.parametrize("way", ["ainvoke", "astream"])
def test_cancelling_ends_the_requests_of_chat_openai(server: ScriptedServer, way: str) -> None:
    """Asynchronous requests of the app's own client are given up with the caller's task."""
    server.delay = 30
    chain = make(server, drafter=chat_openai(server))

    async def run() -> None:
        asking = chain.ainvoke(QUESTION) if way == "ainvoke" else acollect(chain.astream(QUESTION))
        task = asyncio.ensure_future(asking)
        assert await asyncio.to_thread(server.wait_for, lambda s: s.in_flight == DRAFTS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.wait_for, lambda s: s.aborted == DRAFTS)

    asyncio.run(run())

    assert server.wait_idle()


@pytest.mark.parametrize("status", [429, 500, 401])
def test_failures_of_a_users_client_are_values(server: ScriptedServer, status: int) -> None:
    """What openai raises is told in the trace, as our own endpoints' failures are."""
    fault = Fault(status, body={"error": {"message": "not now"}}, headers={})
    server.respond = lambda body, _: (
        fault if "Write two lines" in text_of(body) else Reply("standard [1]")
    )

    output = make(server, drafter=chat_openai(server), verifier=chat_openai(server)).invoke(
        QUESTION
    )

    assert winner(output) == "standard [1]"
    assert all("not now" in d["failed"] for d in output["specrag"]["trace"]["drafts"])


def test_chat_openai_is_never_driven_from_our_loop(server: ScriptedServer) -> None:
    """Its synchronous client works in threads, and its asynchronous one on the caller's loop."""
    threads: list[str] = []

    class Noting(Tree):
        def on_llm_end(self, *args: Any, **kwargs: Any) -> Any:
            threads.append(threading.current_thread().name)
            return super().on_llm_end(*args, **kwargs)

    model = chat_openai(server)
    chain = make(server, drafter=model, verifier=model)

    chain.invoke(QUESTION, {"callbacks": [Noting()]})

    assert len(threads) == 2 * DRAFTS
    assert PORTAL not in threads
    assert all(name.startswith("specrag-") for name in threads)


# -------------------------------------------------------------------- models without options


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_only_writes_is_asked_for_letters(server: ScriptedServer, way: str) -> None:
    """Without known options nothing is asked for that it may not take; `choice` decides."""
    seen: list[str] = []
    model = Foreign(respond=writes, seen=seen)

    output = WAYS[way](make(server, drafter=model, verifier=model), QUESTION)

    assert winner(output) == "river 0"
    assert output["specrag"]["tier"] == "choice"
    assert not server.requests
    assert not [name for name in seen if PORTAL in name]
    is_async = way.startswith("a")
    assert all(name.startswith("async") == is_async for name in seen)
    assert len(seen) == DRAFTS  # equal drafts leave nothing to choose from


def test_options_say_how_an_unknown_model_is_asked(server: ScriptedServer) -> None:
    """`options="openai"`, or a function, is given where no class is known."""
    ours = chat(server)
    seen: list[dict[str, Any]] = []

    def call(messages: Any, config: Any, **kwargs: Any) -> Any:
        seen.append(kwargs)
        return ours.invoke(messages, config, **kwargs)

    unknown = RunnableLambda(call)
    by_name = make(server, drafter=unknown, verifier=unknown, options="openai")
    by_function = make(
        server,
        drafter=unknown,
        verifier=unknown,
        options=lambda request: {"logprobs": True, "top_logprobs": request.top_logprobs},
    )

    assert by_name.invoke(QUESTION)["specrag"]["tier"] == "reflection"
    assert {frozenset(kwargs) for kwargs in seen} == {
        frozenset({"logprobs", "top_logprobs"}),
        frozenset({"logprobs", "top_logprobs", "max_tokens"}),
    }
    seen.clear()
    assert by_function.invoke(QUESTION)["specrag"]["tier"] == "reflection"
    assert {frozenset(kwargs) for kwargs in seen} == {frozenset({"logprobs", "top_logprobs"})}


def test_wrapped_models_are_known_by_what_they_wrap(server: ScriptedServer) -> None:
    """Bound, configured, retried and falling back, ours stays ours, and is scored as ours."""
    model = chat(server)
    wrapped = [
        model.bind(temperature=0.5),
        model.with_config(tags=["x"]),
        model.with_retry(),
        model.with_fallbacks([chat(server)]),
        model.bind(temperature=0.5).with_retry().with_config(tags=["x"]),
    ]

    for one in wrapped:
        output = make(server, drafter=one, verifier=one).invoke(QUESTION)
        assert winner(output) == "river 1"
        assert output["specrag"]["tier"] == "reflection"
    assert not [RunnableChat(one) for one in wrapped if RunnableChat(one).is_foreign]


def test_one_foreign_fallback_makes_a_model_foreign(server: ScriptedServer) -> None:
    """Options that only ours takes are not sent where another may get them."""
    mixed = chat(server).with_fallbacks([Foreign(respond=writes)])

    assert RunnableChat(mixed).is_foreign
    assert winner(make(server, drafter=mixed).invoke(QUESTION)) == "river 1"


def test_a_chain_may_draft(server: ScriptedServer) -> None:
    """A chain that ends in a string, sync and async, drafts as well."""
    chain = Foreign(respond=writes) | StrOutputParser()

    for way in ("invoke", "ainvoke"):
        output = WAYS[way](make(server, drafter=chain), QUESTION)
        assert winner(output) == "river 0"


def test_a_model_of_another_kind_is_a_bug_and_raised(server: ScriptedServer) -> None:
    """What is no message is named, and not taken for a failed draft."""
    drafter = RunnableLambda(lambda _: {"text": "river 0"})

    with pytest.raises(ValueError, match="returned a dict; a drafter or verifier must return"):
        make(server, drafter=drafter).invoke(QUESTION)


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
def test_a_bug_of_a_users_model_is_raised_as_itself(server: ScriptedServer, way: str) -> None:
    """Only failures of servers are values."""

    def broken(_: str) -> str:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        WAYS[way](make(server, drafter=Foreign(respond=broken)), QUESTION)


def test_a_time_out_of_a_users_model_is_a_failed_draft(server: ScriptedServer) -> None:
    """Time-outs are failures of servers, whoever raises them."""

    def late(_: str) -> str:
        raise TimeoutError("no reply")

    output = make(server, drafter=Foreign(respond=late)).invoke(QUESTION)

    assert winner(output) == "All six rivers are meant [1]."
    assert all("no reply" in d["failed"] for d in output["specrag"]["trace"]["drafts"])


def test_what_finished_a_reply_is_read_in_every_dialect(server: ScriptedServer) -> None:
    """`max_tokens` of one and `length` of another both mean that a draft was cut off."""
    for told in ({"stop_reason": "max_tokens"}, {"done_reason": "length"}):
        drafter = RunnableLambda(
            lambda _, told=told: AIMessage(
                "Rationale: [1].\nAnswer: river 1", response_metadata=told
            )
        )
        output = make(server, drafter=drafter).invoke(QUESTION)
        assert all(draft["truncated"] for draft in output["specrag"]["trace"]["drafts"])


# -------------------------------------------------------------------- threads


def test_a_drafter_that_asks_our_chain_does_not_deadlock(server: ScriptedServer) -> None:
    """Each question has its own bounded threads, so that questions within questions get theirs."""

    def level(inner: Any) -> SpeculativeRAGRunnable:
        drafter = Foreign(respond=lambda _: f"Rationale: [1].\nAnswer: {winner(inner())}")
        return make(server, drafter=drafter, num_drafts=2)

    bottom = make(server, drafter=Foreign(respond=writes), num_drafts=2)
    middle = level(lambda: bottom.invoke(QUESTION, {"max_concurrency": 1}))
    top = level(lambda: middle.invoke(QUESTION, {"max_concurrency": 1}))
    done: list[str] = []

    thread = threading.Thread(
        target=lambda: done.extend(
            winner(one) for one in top.batch([QUESTION] * 2, {"max_concurrency": 1})
        ),
        daemon=True,
    )
    thread.start()
    thread.join(timeout=30)

    assert done == ["river 0", "river 0"]


class Gate:
    """A drafter whose first call answers and whose others wait until the gate opens."""

    def __init__(self, quick: int = 1) -> None:
        self.open = threading.Event()
        self.waiting = threading.Semaphore(0)
        self._quick = quick
        self._guard = threading.Lock()

    def __call__(self, said: str) -> str:
        with self._guard:
            quick, self._quick = self._quick > 0, self._quick - 1
        if not quick:
            self.waiting.release()
            self.open.wait(20)
        return "Rationale: [1] says so.\nAnswer: river 1"


@pytest.fixture
def gate() -> Any:
    """Return a gate that is opened at the end."""
    gate = Gate()
    yield gate
    gate.open.set()


def test_the_deadline_leaves_threads_behind_and_says_so(server: ScriptedServer, gate: Gate) -> None:
    """The answer is there at once, with the calls that are still running named."""
    for way in ("invoke", "stream"):
        gate._quick = 1
        began = time.monotonic()
        chain = make(server, drafter=Foreign(respond=gate), deadline=1.0)
        output = WAYS[way](chain, QUESTION)

        assert winner(output) == "river 1"
        assert output["specrag"]["trace"]["deadline_hit"]
        assert len(output["specrag"]["abandoned"]) == DRAFTS - 1
        assert all(name.startswith("draft_") for name in output["specrag"]["abandoned"])
        assert time.monotonic() - began < 10  # the gate is shut for 20 s


def test_nothing_is_abandoned_in_a_whole_question(server: ScriptedServer) -> None:
    """The list is empty where every call has returned."""
    output = make(server, drafter=Foreign(respond=writes)).invoke(QUESTION)

    assert output["specrag"]["abandoned"] == []


def test_ctrl_c_returns_at_once(server: ScriptedServer, gate: Gate) -> None:
    """An interrupt does not wait for calls in threads, which nobody can end."""
    chain = make(server, drafter=Foreign(respond=gate))

    def interrupt() -> None:
        for _ in range(DRAFTS - 1):
            gate.waiting.acquire()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        chain.invoke(QUESTION)

    assert time.monotonic() - began < 10  # the gate is shut for 20 s


def test_a_synchronous_question_is_not_ended_early_unasked(
    server: ScriptedServer, gate: Gate
) -> None:
    """With a model of the app, `accept_confidence` waits for calls that are paid for anyway."""
    drafter = Foreign(respond=gate)
    calibration = believing(make(server, drafter=drafter))
    options = {"drafter": drafter, "calibration": calibration, "accept_confidence": 0.5}
    waits = make(server, **options)
    leaves = make(server, **options, abandon_calls=True)

    gate._quick = 1
    early = leaves.invoke(QUESTION)
    gate._quick = 1
    threading.Timer(0.5, gate.open.set).start()
    late = waits.invoke(QUESTION)

    assert len(early["specrag"]["abandoned"]) == DRAFTS - 1
    assert len(early["specrag"]["trace"]["drafts"]) == 1
    assert late["specrag"]["abandoned"] == []
    assert len(late["specrag"]["trace"]["drafts"]) == DRAFTS


def test_an_asynchronous_question_is_ended_early(server: ScriptedServer) -> None:
    """There the other drafts are cancelled, so that nothing is left running."""
    cancelled: list[bool] = []
    calls = iter(range(10))

    async def respond() -> str:
        if next(calls):
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise
        return "Rationale: [1] says so.\nAnswer: river 1"

    drafter = Foreign(respond=lambda _: respond())
    calibration = believing(make(server, drafter=drafter))
    chain = make(server, drafter=drafter, calibration=calibration, accept_confidence=0.5)

    output = asyncio.run(chain.ainvoke(QUESTION))

    assert winner(output) == "river 1"
    assert cancelled == [True] * (DRAFTS - 1)


def test_the_deadline_fires_with_models_of_the_app(server: ScriptedServer, gate: Gate) -> None:
    """No draft in time is a NoAnswerError, in every way of asking."""
    gate._quick = 0
    drafter = Foreign(respond=gate)

    for way in ("invoke", "stream", "batch"):
        with pytest.raises(NoAnswerError) as raised:
            WAYS[way](make(server, drafter=drafter, deadline=0.2), QUESTION)
        assert raised.value.reason == NoAnswerReason.DEADLINE


# -------------------------------------------------------------------- RunnableChat alone


def test_the_core_takes_a_runnable_chat(server: ScriptedServer) -> None:
    """`SpeculativeRAG(drafter=RunnableChat(llm))` works without any chain, sync and async."""
    model = RunnableChat(chat_openai(server))
    seen: list[str] = []
    writer = RunnableChat(Foreign(respond=writes, seen=seen))
    texts = [document.page_content for document in DOCUMENTS]
    rag = SpeculativeRAG(drafter=writer, verifier=model, num_drafts=2)

    assert rag.ask(QUESTION, texts).text == "river 0"
    assert asyncio.run(rag.aask(QUESTION, texts)).text == "river 0"
    assert (writer.name, model.name) == ("Foreign", "scripted")
    assert not [name for name in seen if PORTAL in name]


def test_attempts_are_counted_through_wrappers(server: ScriptedServer) -> None:
    """`max_requests` of the engine holds for retries of LangChain as well."""
    model = chat(server, max_retries=1)

    assert RunnableChat(model).max_attempts == 2
    assert RunnableChat(model.with_retry(stop_after_attempt=3)).max_attempts == 6
    assert RunnableChat(model.with_fallbacks([model])).max_attempts == 4
    assert RunnableChat(Foreign(respond=writes)).max_attempts == 1
    assert RunnableChat(chat_openai(server, max_retries=2)).max_attempts == 4


def test_two_layers_of_retries_are_told(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """`.with_retry()` around a client with retries multiplies requests, and is warned of once."""
    make(server, drafter=chat(server, max_retries=2).with_retry(stop_after_attempt=3))
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("scripted: the 3 attempts of .with_retry() multiply")
    assert "to 9 requests" in told

    caplog.clear()
    make(server, drafter=chat(server, max_retries=0).with_retry(stop_after_attempt=3))
    assert not caplog.records


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
def test_the_responses_api_is_asked_for_text_alone(server: ScriptedServer, way: str) -> None:
    """A ChatOpenAI that uses it takes no options of chat completions; here its server has none."""
    model = chat_openai(server, use_responses_api=True)

    with pytest.raises(NoAnswerError) as raised:
        WAYS[way](make(server, drafter=model, verifier=model), QUESTION)

    assert {path for _, path in server.requests} == {"/v1/responses"}
    assert all("404" in failure for failure in raised.value.failures)


def test_a_forced_text_is_never_asked_of_a_users_model(server: ScriptedServer) -> None:
    """What only llama.cpp can be made to do is refused before a request is sent."""
    request = ChatRequest(messages=(user("Say it."),), max_tokens=1, forced="Paris")

    with pytest.raises(Exception, match="is not known to return log-probabilities"):
        asyncio.run(RunnableChat(chat_openai(server)).chat(request, step=Step(kind="verify")))

    assert not server.requests


def test_threads_carry_the_run_of_the_caller(server: ScriptedServer) -> None:
    """A model called in a thread finds the question's run as its parent."""
    tree = Tree()

    make(server, drafter=Foreign(respond=writes), num_drafts=1).invoke(
        QUESTION, {"callbacks": [tree]}
    )

    assert children(tree.roots[0]) == steps(1)


def test_many_threads_share_a_chain(server: ScriptedServer) -> None:
    """Questions from many threads at once each get their own answer and documents."""
    chain = make(server, retriever=None, drafter=Foreign(respond=writes))
    outputs: dict[int, Any] = {}

    def ask(number: int) -> None:
        given = {"question": QUESTION, "context": DOCUMENTS[: number + 2]}
        outputs[number] = chain.invoke(given)

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(30)

    assert {n: len(output["context"]) for n, output in outputs.items()} == {
        n: n + 2 for n in range(4)
    }
    assert Retriever().documents == DOCUMENTS
