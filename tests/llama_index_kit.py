"""What the LlamaIndex tests share: nodes, retrievers, a scripted dialogue, and views of traces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation import root_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.span_handlers import SimpleSpanHandler
from llama_index.core.llms import LLM
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.settings import Settings
from scripted_server import Reply, ScriptedServer, is_verification
from sklearn.feature_extraction.text import HashingVectorizer

from specrag_integrations import Endpoint, RankStratified
from specrag_integrations.llama_index import (
    EndpointLLM,
    SpeculativeQueryEngine,
    SpeculativeSynthesizer,
)

Json = dict[str, Any]
Scripted = Callable[..., ScriptedServer]
QUESTION = "Which river is meant?"
FALLBACK = "standard answer, in many words"


def nodes(count: int = 8, **options: Any) -> list[NodeWithScore]:
    """Return nodes that are easy to tell apart, best first."""
    return [
        NodeWithScore(
            node=TextNode(text=f"Fact number {n} is about river {n}.", id_=f"n{n}", **options),
            score=1.0 - n / 10,
        )
        for n in range(count)
    ]


class Given(BaseRetriever):
    """Returns what it was given; only synchronously, as many retrievers of applications."""

    def __init__(self, found: Sequence[NodeWithScore], **options: Any) -> None:
        self.found = list(found)
        super().__init__(**options)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return self.found


def text_of(body: Json) -> str:
    """Return all that a request says."""
    return "\n".join(message["content"] for message in body["messages"])


def is_fallback(body: Json) -> bool:
    """Tell a fallback's request: it is streamed, or has LlamaIndex's own prompt."""
    said = body["messages"][0]["content"]
    return bool(body.get("stream")) or said.startswith("You are an expert Q&A system")


def is_draft(body: Json) -> bool:
    """Tell a draft's request."""
    return not is_fallback(body) and not is_verification(body)


def yes(p: float) -> Reply:
    """Return a verdict with P(Yes) = p."""
    return Reply("Yes", alternatives={"Yes": math.log(p), "No": math.log(1 - p)})


def lead(body: Json) -> int:
    """Return the number of the first fact that a request shows."""
    return int(text_of(body).split("Fact number ")[1].split()[0])


def dialogue(**p_yes: float) -> Callable[[Json, int], Reply]:
    """Draft "river N [1]" from the subset whose first fact is N; judge it by `rN=`, else 0.1."""

    def respond(body: Json, _: int) -> Reply:
        if is_fallback(body):
            return Reply(FALLBACK)
        if is_verification(body):
            number = body["messages"][1]["content"].split("river ")[1].split()[0]
            return yes(p_yes.get(f"r{number}", 0.1))
        return Reply(f"Rationale: it says so [2].\nAnswer: river {lead(body)} [1]")

    return respond


def unknown(body: Json, _: int) -> Reply:
    """Let every draft say that the passages do not tell, so that the fallback answers."""
    return Reply(FALLBACK) if is_fallback(body) else Reply("Rationale: none.\nAnswer: unknown")


def synthesizer(server: ScriptedServer, **options: Any) -> SpeculativeSynthesizer:
    """Return a synthesizer whose subsets are stable: 3 drafts of 2 nodes."""
    endpoint = Endpoint(server.base_url, "scripted", request_timeout=10)
    defaults: Json = {
        "drafter": endpoint,
        "verifier": endpoint,
        "num_drafts": 3,
        "passages_per_draft": 2,
        "partitioner": RankStratified(),
    }
    return SpeculativeSynthesizer(**{**defaults, **options})


def engine(
    server: ScriptedServer, found: Sequence[NodeWithScore] | None = None, **options: Any
) -> SpeculativeQueryEngine:
    """Return an engine over given nodes."""
    retriever = Given(nodes() if found is None else found)
    return SpeculativeQueryEngine(retriever, synthesizer(server, **options))


def ids(found: Sequence[NodeWithScore]) -> list[str]:
    """Return the ids of nodes."""
    return [one.node.node_id for one in found]


async def text_from(response: Any) -> str:
    """Read an asynchronous stream to its end."""
    return "".join([piece async for piece in response.async_response_gen()])


class Events(BaseEventHandler):
    """Keeps all events."""

    seen: list[Any] = []  # noqa: RUF012 - a field of pydantic's

    def handle(self, event: Any, **_: Any) -> None:
        """Take an event in."""
        self.seen.append(event)


class Tree:
    """The spans and events of what runs inside `watched()`."""

    def __init__(self) -> None:
        self.spans, self.events = SimpleSpanHandler(), Events(seen=[])

    @property
    def paths(self) -> list[str]:
        """One line for each span, from the root down."""
        found = {span.id_: span for span in self.spans.completed_spans}

        def path(span: Any) -> list[str]:
            parent = found.get(span.parent_id)
            if span.parent_id is not None and parent is None:
                return ["(lost)", name(span)]
            return [*(path(parent) if parent else ()), name(span)]

        def name(span: Any) -> str:
            return str(span.id_).rsplit("-", 5)[0]

        return sorted(" > ".join(path(span)) for span in found.values())

    def kinds(self) -> list[str]:
        """Return the names of the events, in order."""
        return [type(event).__name__ for event in self.events.seen]


@contextmanager
def watched() -> Iterator[Tree]:
    """Watch LlamaIndex's instrumentation."""
    tree = Tree()
    root_dispatcher.add_span_handler(tree.spans)
    root_dispatcher.add_event_handler(tree.events)
    try:
        yield tree
    finally:
        root_dispatcher.span_handlers.remove(tree.spans)
        root_dispatcher.event_handlers.remove(tree.events)


@contextmanager
def llm_of_settings(llm: LLM | None) -> Iterator[None]:
    """Set `Settings.llm`, and restore it; None: nothing was ever set."""
    before, Settings._llm = Settings._llm, llm
    try:
        yield
    finally:
        Settings._llm = before


def speaker(scripted: Scripted, *said: str) -> EndpointLLM:
    """Return an LLM for the parts around an engine: it says these in turn, the last for ever."""
    server = scripted(lambda _, call: said[min(call, len(said) - 1)])
    return EndpointLLM(Endpoint(server.base_url, "speaker"))


class WordHashes(BaseEmbedding):
    """A local embedding without weights: which words a text holds, hashed into 512 places."""

    _hashes: Any = PrivateAttr()

    def __init__(self, **data: Any) -> None:
        super().__init__(model_name="word-hashes", **data)
        self._hashes = HashingVectorizer(n_features=512, stop_words="english")

    def _get_text_embedding(self, text: str) -> list[float]:
        return [float(value) for value in self._hashes.transform([text]).toarray()[0]]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)
