"""What the LangChain tests share: documents, a server that knows its answer, and a tracer."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.tracers import BaseTracer
from langchain_core.tracers.schemas import Run
from scripted_server import Fault, Reply, ScriptedServer, is_verification

from specrag_integrations import Calibration, RankStratified
from specrag_integrations.langchain import EndpointChat, SpeculativeRAGRunnable

Body = dict[str, Any]
Scripted = Callable[..., ScriptedServer]

QUESTION = "Which river is meant?"
DOCUMENTS = [
    Document(f"Fact number {n} is about river {n}.", id=f"d{n}", metadata={"source": f"{n}.md"})
    for n in range(6)
]
DRAFTS = 3


class Retriever(BaseRetriever):
    """Finds the same documents for every question."""

    documents: list[Document] = DOCUMENTS

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        return self.documents


def text_of(body: Body) -> str:
    """Return all that a request says."""
    return "\n".join(message["content"] for message in body["messages"])


def is_fallback(body: Body) -> bool:
    """Tell standard RAG: the only request of ours that is streamed."""
    return bool(body.get("stream"))


def lead(body: Body) -> int:
    """Return the number of the fact that a prompt shows first."""
    return int(text_of(body).split("Fact number ")[1].split()[0])


def yes(p: float) -> Reply:
    """Return a verdict with P(Yes) = p."""
    return Reply("Yes", alternatives={"Yes": math.log(p), "No": math.log(1 - p)})


def draft(body: Body) -> Reply:
    """Return a draft that answers with the river of its first fact."""
    return Reply(f"Rationale: passage [1] says so.\nAnswer: river {lead(body)}")


def prefers(river: int) -> Callable[[Body, int], Reply]:
    """Return a responder whose verifier trusts one river, and whose fallback has its own words."""

    def respond(body: Body, _: int) -> Reply:
        if is_fallback(body):
            return Reply("All six rivers are meant [1].")
        if is_verification(body):
            named = body["messages"][1]["content"].rsplit(" ", 1)[1]
            return yes(0.9 if named == str(river) else 0.2)
        return draft(body)

    return respond


def fails_drafts(body: Body, _: int) -> Reply | Fault:
    """Refuse every draft, so that standard RAG has to answer."""
    if is_fallback(body):
        return Reply("All six rivers are meant [1].")
    return Fault(400, body={"error": {"message": "no drafts today"}})


def chat(server: ScriptedServer, **options: Any) -> EndpointChat:
    """Return our chat model for a server."""
    return EndpointChat(server.base_url, "scripted", **{"max_retries": 0, **options})


def make(server: ScriptedServer, **options: Any) -> SpeculativeRAGRunnable:
    """Return a chain whose subsets are stable, two documents each."""
    model = chat(server)
    sizes = {"num_drafts": DRAFTS, "passages_per_draft": 2}
    settings = {**sizes, "partitioner": RankStratified(), "retriever": Retriever()}
    return SpeculativeRAGRunnable(**{"drafter": model, "verifier": model, **settings, **options})


def believing(chain: SpeculativeRAGRunnable) -> Calibration:
    """Return a calibration of a chain that takes its P(Yes) at its word."""
    fingerprint = replace(chain.engine.fingerprint(), tier="reflection")
    return Calibration(
        fingerprint=fingerprint,
        kind="isotonic",
        coefficients={"reflection": 1.0},
        knots=tuple((math.log(n / 100), n / 100) for n in range(1, 100)),
    )


def winner(output: Any) -> str:
    """Return the answer of an output, a string itself in some chains."""
    return output if isinstance(output, str) else output["answer"]


class Tree(BaseTracer):
    """Keeps every run tree, and which runs ended after their parent."""

    def __init__(self) -> None:
        super().__init__()
        self.roots: list[Run] = []
        self.late: list[str] = []
        self._ended: set[Any] = set()
        self._guard = threading.Lock()

    def _persist_run(self, run: Run) -> None:
        with self._guard:
            self.roots.append(run)

    def _end_trace(self, run: Run) -> None:
        with self._guard:
            self._ended.add(run.id)
            if run.parent_run_id in self._ended:
                self.late.append(run.name)
        super()._end_trace(run)


def steps(count: int = DRAFTS) -> list[str]:
    """Return the names of a question's model runs when nothing goes wrong."""
    return sorted([f"{kind}_{n}" for kind in ("draft", "verify") for n in range(count)])


def children(run: Run, kind: str = "llm") -> list[str]:
    """Return the names of a run's children of one kind."""
    return sorted(child.name for child in run.child_runs if child.run_type == kind)


class Foreign(BaseChatModel):
    """A chat model of an application, which takes no options and tells no log-probabilities."""

    respond: Callable[[str], Any]
    seen: Any = None
    """A list to which the name of each call's thread is added."""

    @property
    def _llm_type(self) -> str:
        return "foreign"

    def _note(self, kind: str) -> None:
        if self.seen is not None:
            self.seen.append(f"{kind}{threading.current_thread().name}")

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
    ) -> ChatResult:
        self._note("")
        return _result(self.respond(_said(messages)))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
    ) -> ChatResult:
        self._note("async ")
        answer = self.respond(_said(messages))
        return _result(await answer if asyncio.iscoroutine(answer) else answer)


def _said(messages: Sequence[BaseMessage]) -> str:
    return "\n".join(str(message.text) for message in messages)


def _result(text: str) -> ChatResult:
    usage = {"input_tokens": 2, "output_tokens": 1, "total_tokens": 3}
    message = AIMessage(text, usage_metadata=usage, response_metadata={"model_name": "foreign"})
    return ChatResult(generations=[ChatGeneration(message=message)])


def writes(said: str) -> str:
    """Answer as a model without log-probabilities: drafts, letters, and one answer from all."""
    if "Reply with its letter" in said:
        return "A"
    if "Write two lines" in said:
        return "Rationale: passage [1] says so.\nAnswer: river 0"
    return "All six rivers are meant [1]."
