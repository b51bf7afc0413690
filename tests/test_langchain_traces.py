"""What LangChain's callbacks see of a question: one tree, whole, and free of secrets."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="needs the extra `langchain`")

from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import AsyncCallbackHandler, get_usage_metadata_callback
from langchain_core.load import dumpd, dumps, loads
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langchain_core.tracers.schemas import Run
from langchain_kit import (
    DOCUMENTS,
    DRAFTS,
    QUESTION,
    Foreign,
    Scripted,
    Tree,
    chat,
    children,
    fails_drafts,
    make,
    prefers,
    steps,
    winner,
    writes,
)
from openai import AsyncOpenAI
from scripted_server import ScriptedServer
from test_langchain_runnable import Counting, acollect

from specrag_integrations import ConfigurationError, Endpoint, RankStratified
from specrag_integrations.langchain import EndpointChat, SpeculativeRAGRunnable

SECRET = "sk-" + "0123456789" * 2
CONFIG = {"tags": ["mine"], "metadata": {"user": 7}, "run_name": "qa"}

Run_ = Callable[[Any, dict[str, Any]], Any]
WAYS: dict[str, Run_] = {
    "invoke": lambda chain, config: chain.invoke(QUESTION, config),
    "ainvoke": lambda chain, config: asyncio.run(chain.ainvoke(QUESTION, config)),
    "batch": lambda chain, config: chain.batch([QUESTION] * 3, config),
    "abatch": lambda chain, config: asyncio.run(chain.abatch([QUESTION] * 3, config)),
    "stream": lambda chain, config: list(chain.stream(QUESTION, config)),
    "astream": lambda chain, config: asyncio.run(acollect(chain.astream(QUESTION, config))),
    "threads": lambda chain, config: RunnableParallel(a=chain, b=chain).invoke(QUESTION, config),
}
ways = pytest.mark.parametrize("run", WAYS.values(), ids=WAYS)


@pytest.fixture
def server(scripted: Scripted) -> ScriptedServer:
    """Return a server whose verifier trusts river 1."""
    return scripted(prefers(1))


def questions_of(tree: Tree) -> list[Run]:
    """Return the runs of questions, at the root or below it."""
    below = [child for root in tree.roots for child in root.child_runs]
    named = [*tree.roots, *below]
    return [run for run in named if any(child.run_type == "llm" for child in run.child_runs)]


MODELS: dict[str, Callable[[ScriptedServer], Any]] = {
    "ours": chat,
    "a model of the app": lambda _: Foreign(respond=writes),
}


@ways
@pytest.mark.parametrize("drafter", MODELS.values(), ids=MODELS)
def test_each_question_is_one_whole_tree(
    server: ScriptedServer, run: Run_, drafter: Callable[[ScriptedServer], Any]
) -> None:
    """Drafts and verifications are chat-model children of their own question, all ended by then."""
    tree = Tree()
    first_drafts = {"num_drafts": 1} if drafter is not chat else {}
    chain = make(server, drafter=drafter(server), **first_drafts)

    run(chain, {"callbacks": [tree], **CONFIG})

    questions = questions_of(tree)
    assert len(questions) == {"batch": 3, "abatch": 3, "threads": 2}.get(name_of(run), 1)
    for question in questions:
        assert children(question) == steps(first_drafts.get("num_drafts", DRAFTS))
        assert children(question, "retriever") == ["Retriever"]
        for child in question.child_runs:
            assert child.parent_run_id == question.id
            assert child.end_time is not None
            assert child.error is None
    assert not tree.late


def name_of(run: Run_) -> str:
    """Return the name of one of WAYS."""
    return next(name for name, way in WAYS.items() if way is run)


@ways
def test_each_step_has_a_name_tags_model_and_usage(server: ScriptedServer, run: Run_) -> None:
    """What LangSmith and others ask of a model's run is there, beside what the caller gave."""
    tree = Tree()

    run(make(server), {"callbacks": [tree], **CONFIG})

    for child in questions_of(tree)[0].child_runs:
        if child.run_type != "llm":
            continue
        kind, _, index = child.name.partition("_")
        metadata = child.extra["metadata"]
        assert {"mine", f"specrag:{kind}", "nostream"} <= set(child.tags or ())
        assert metadata["user"] == 7
        assert (metadata["specrag_step"], metadata["specrag_index"]) == (kind, int(index))
        assert metadata["ls_model_name"] == "scripted"
        assert metadata["ls_model_type"] == "chat"
        message = child.outputs["generations"][0][0]["message"]["kwargs"]
        assert message["usage_metadata"]["total_tokens"] > 0
        assert message["response_metadata"]["logprobs"]["content"]


def test_the_fallback_is_a_child_that_may_be_streamed(server: ScriptedServer) -> None:
    """It is the one step whose tokens LangGraph is to show."""
    server.respond = fails_drafts
    tree = Tree()

    make(server).invoke(QUESTION, {"callbacks": [tree]})

    tags = {child.name: child.tags for child in tree.roots[0].child_runs}
    assert "specrag:fallback" in tags["fallback_0"]
    assert "nostream" not in tags["fallback_0"]
    assert all("nostream" in tags[f"draft_{n}"] for n in range(DRAFTS))


@ways
def test_usage_is_summed_over_all_steps(server: ScriptedServer, run: Run_) -> None:
    """`get_usage_metadata_callback` adds up what the trace says each request took."""
    with get_usage_metadata_callback() as usage:
        run(make(server), {})

    questions = {"batch": 3, "abatch": 3, "threads": 2}.get(name_of(run), 1)
    counted = usage.usage_metadata["scripted"]
    with get_usage_metadata_callback() as single:
        output = make(server).invoke(QUESTION)
    told = output["specrag"]["usage"]["steps"]
    assert counted["input_tokens"] == questions * sum(step["prompt_tokens"] for step in told)
    assert counted == {
        key: questions * value if isinstance(value, int) else value
        for key, value in single.usage_metadata["scripted"].items()
    }


def test_a_failed_draft_is_an_error_of_its_run_alone(server: ScriptedServer) -> None:
    """The question's run ends well, and says which draft failed."""

    def respond(body: dict[str, Any], call: int) -> Any:
        return fails_drafts(body, call) if call == 0 else prefers(1)(body, call)

    server.respond = respond
    tree = Tree()

    output = make(server).invoke(QUESTION, {"callbacks": [tree]})

    errors = [child.name for child in tree.roots[0].child_runs if child.error]
    assert len(errors) == 1
    assert tree.roots[0].error is None
    failed = [d for d in output["specrag"]["trace"]["drafts"] if "failed" in d]
    assert [f"draft_{d['index']}" for d in failed] == errors
    assert "no drafts today" in failed[0]["failed"]


def test_a_drafter_with_retries_is_a_chain_around_its_model(server: ScriptedServer) -> None:
    """`.with_retry()` and the like appear in the tree as they do in any chain."""
    tree = Tree()

    make(server, drafter=chat(server).with_retry()).invoke(QUESTION, {"callbacks": [tree]})

    (question,) = tree.roots
    drafts = [child for child in question.child_runs if child.name.startswith("draft")]
    assert {run.run_type for run in drafts} == {"chain"}
    assert [len(run.child_runs) for run in drafts] == [1] * DRAFTS


def test_an_asynchronous_handler_hears_of_synchronous_questions(server: ScriptedServer) -> None:
    """Handlers of both kinds are called on both paths."""

    class Counting(AsyncCallbackHandler):
        started = 0

        async def on_chat_model_start(self, *_: Any, **__: Any) -> None:
            self.started += 1

    handler = Counting()

    make(server).invoke(QUESTION, {"callbacks": [handler]})

    assert handler.started == 2 * DRAFTS


def test_a_question_within_a_question_is_its_child(server: ScriptedServer) -> None:
    """A drafter that asks a chain of its own has that chain's tree below its own run."""
    inner = make(server, num_drafts=1)
    drafter = RunnableLambda(lambda _: "Rationale: [1].\nAnswer: " + winner(inner.invoke(QUESTION)))
    tree = Tree()

    make(server, drafter=drafter).invoke(QUESTION, {"callbacks": [tree]})

    (outer,) = tree.roots
    drafts = [child for child in outer.child_runs if child.name.startswith("draft")]
    assert len(drafts) == DRAFTS
    for one in drafts:
        (within,) = one.child_runs
        assert children(within) == steps(1)
    assert not tree.late


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream"])
def test_open_inference_sees_one_tree(server: ScriptedServer, way: str) -> None:
    """The instrumentor of Phoenix shows the question, its retrieval and each model's call."""
    instrumentation = pytest.importorskip("openinference.instrumentation.langchain")
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    spans = memory.InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(spans))
    instrumentor = instrumentation.LangChainInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    try:
        WAYS[way](make(server), {})
    finally:
        instrumentor.uninstrument()

    found = {span.name: span for span in spans.get_finished_spans()}
    root = found.pop("SpeculativeRAGRunnable")
    assert root.parent is None
    assert sorted(found) == sorted([*steps(), "Retriever"])
    assert {span.parent.span_id for span in found.values()} == {root.context.span_id}
    kinds = {name: span.attributes["openinference.span.kind"] for name, span in found.items()}
    assert kinds.pop("Retriever") == "RETRIEVER"
    assert set(kinds.values()) == {"LLM"}
    assert found["draft_0"].attributes["llm.model_name"] == "scripted"
    assert found["draft_0"].attributes["llm.token_count.total"] > 0


# -------------------------------------------------------------------- copies and secrets


def secretive(server: ScriptedServer) -> SpeculativeRAGRunnable:
    """Return a chain whose models have a key."""
    model = EndpointChat(server.base_url, "scripted", api_key=SECRET, max_retries=0)
    return SpeculativeRAGRunnable(
        drafter=model,
        verifier=model.bind(temperature=0.0),
        num_drafts=DRAFTS,
        passages_per_draft=2,
        partitioner=RankStratified(),
    )


GIVEN = {"question": QUESTION, "context": DOCUMENTS}


def test_secrets_are_in_no_text_that_is_written_of_it(scripted: Scripted) -> None:
    """Neither repr, dump, trace nor pickle holds the key; the server does get it."""
    server = scripted(prefers(1), api_key=SECRET)
    chain = secretive(server)
    tree = Tree()

    output = chain.invoke(GIVEN, {"callbacks": [tree]})

    traced = json.dumps([run_json(run) for run in tree.roots], default=repr)
    pickled = pickle.dumps(EndpointChat(server.base_url, api_key=SECRET)).decode("latin-1")
    texts = [
        repr(chain),
        repr(chain.drafter),
        str(chain.drafter),
        repr(chain.drafter.endpoint),
        dumps(chain),
        json.dumps(dumpd(chain.verifier)),
        json.dumps(chain.drafter.model_dump(), default=repr),
        json.dumps(output["specrag"]),
        traced,
        pickled,
    ]
    assert winner(output) == "river 1"
    assert not [text for text in texts if SECRET in text]
    assert "SPECRAG_API_KEY" in dumps(chain)
    assert len(traced) > 10_000


def run_json(run: Run) -> dict[str, Any]:
    """Return all that a tracer would send of a run."""
    return {
        "name": run.name,
        "serialized": run.serialized,
        "inputs": run.inputs,
        "outputs": run.outputs,
        "extra": run.extra,
        "events": run.events,
        "children": [run_json(child) for child in run.child_runs],
    }


@pytest.mark.filterwarnings("ignore:The function `loads` is in beta")  # LangChain's word on it
def test_a_dump_is_loaded_with_its_key(scripted: Scripted) -> None:
    """`loads(dumps(chain))` asks the same servers, with the key from where secrets are kept."""
    server = scripted(prefers(1), api_key=SECRET)
    model = EndpointChat(
        server.base_url, "scripted", api_key=SECRET, max_tokens=64, max_retries=0, timeout=9.0
    )
    chain = SpeculativeRAGRunnable(drafter=model, verifier=model, num_drafts=DRAFTS)
    ours = {
        "valid_namespaces": ["specrag_integrations"],
        "allowed_objects": [SpeculativeRAGRunnable, EndpointChat],
    }

    loaded = loads(dumps(chain), secrets_map={"SPECRAG_API_KEY": SECRET}, **ours)

    assert loaded.invoke(GIVEN)["answer"] == chain.invoke(GIVEN)["answer"]
    assert loaded.num_drafts == DRAFTS
    assert loaded.drafter.endpoint.options == model.endpoint.options
    assert (loaded.drafter.max_tokens, loaded.drafter.timeout) == (64, 9.0)


def test_what_a_body_may_hide_is_not_shown(scripted: Scripted) -> None:
    """`extra_body` may hold a token: it is in no repr and no trace, but in a dump, to be loaded."""
    server = scripted(prefers(1))
    model = chat(server, extra_body={"user_token": SECRET})
    tree = Tree()

    make(server, drafter=model, verifier=model).invoke(GIVEN, {"callbacks": [tree]})

    traced = json.dumps([run_json(run) for run in tree.roots], default=repr)
    assert all(body["user_token"] == SECRET for body in server.chats)
    assert SECRET not in repr(model) + repr(model.with_retry()) + traced
    assert '"model": "scripted"' in traced
    assert SECRET in dumps(model)


def test_bodies_that_differ_are_cached_apart(scripted: Scripted) -> None:
    """What is not shown still tells two models apart, and equal ones share their replies."""
    server, cache = scripted(prefers(1)), InMemoryCache()

    for seed in (1, 2, 1):
        chat(server, cache=cache, extra_body={"seed": seed}).invoke("Fact number 1")

    assert [body["seed"] for body in server.chats] == [1, 2]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"headers": {"X-Team": SECRET}}, "headers"),
        ({"client_factory": AsyncOpenAI}, "client_factory"),
    ],
)
def test_what_a_dump_would_lose_is_refused(
    scripted: Scripted, options: dict[str, Any], named: str
) -> None:
    """A dump that would ask its server otherwise is not written; the chain itself works."""
    server = scripted(prefers(1))
    endpoint = Endpoint(server.base_url, "scripted", **options)
    chain = make(server, drafter=EndpointChat(endpoint=endpoint, cache=InMemoryCache()))
    tree = Tree()

    assert winner(chain.invoke(QUESTION, {"callbacks": [tree]})) == "river 1"
    assert SECRET not in json.dumps([run_json(run) for run in tree.roots], default=repr)
    for part in (chain, chain.drafter):
        with pytest.raises(ConfigurationError, match=named):
            dumps(part)


@pytest.mark.parametrize("copied", ["pickle", "deepcopy", "copy", "cloudpickle"])
def test_copies_answer_after_use(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, copied: str
) -> None:
    """A chain that has been used can be copied and sent to another process, without its key."""
    server = scripted(prefers(1), api_key=SECRET)
    chain = secretive(server)
    asyncio.run(chain.ainvoke(GIVEN))
    chain.bind(num_drafts=2).invoke(GIVEN)
    monkeypatch.setenv("SPECRAG_API_KEY", SECRET)

    if copied == "cloudpickle":
        cloudpickle = pytest.importorskip("cloudpickle")
        other = cloudpickle.loads(cloudpickle.dumps(chain))
    else:
        other = {
            "pickle": lambda: pickle.loads(pickle.dumps(chain)),
            "deepcopy": lambda: copy.deepcopy(chain),
            "copy": lambda: copy.copy(chain),
        }[copied]()

    assert winner(other.invoke(GIVEN)) == "river 1"
    assert winner(asyncio.run(other.ainvoke(GIVEN))) == "river 1"
    assert repr(other) == repr(chain)


def test_a_chain_with_embeddings_is_pickled(server: ScriptedServer) -> None:
    """What a chain made for itself, and could not be pickled, is made anew."""
    model = chat(server)
    chain = SpeculativeRAGRunnable(drafter=model, verifier=model, num_drafts=2, embedder=Counting())
    answer = winner(chain.invoke(GIVEN))

    other = pickle.loads(pickle.dumps(chain))

    assert winner(other.invoke(GIVEN)) == answer


def test_a_copied_model_shares_its_endpoint(server: ScriptedServer) -> None:
    """A deep copy's requests count under the same limit."""
    model = EndpointChat(endpoint=Endpoint(server.base_url, "scripted"))

    assert copy.deepcopy(model).endpoint is model.endpoint
