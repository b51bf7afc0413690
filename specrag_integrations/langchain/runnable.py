"""SpeculativeRAGRunnable: Speculative RAG as a Runnable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import Runnable, RunnableConfig, RunnableSerializable
from langchain_core.runnables.config import get_config_list
from langchain_core.runnables.utils import ConfigurableFieldSpec, get_unique_config_specs
from langchain_core.tools import BaseTool
from pydantic import ConfigDict, PrivateAttr, SkipValidation
from typing_extensions import TypedDict

from specrag_integrations.errors import ConfigurationError
from specrag_integrations.langchain.asking import Asking
from specrag_integrations.langchain.call import TRIAL, serving
from specrag_integrations.langchain.configured import ConfiguredRAG
from specrag_integrations.langchain.graph import node_of, tool_of
from specrag_integrations.langchain.model_options import is_foreign
from specrag_integrations.langchain.prompt import DOCUMENT_PROMPT, SEPARATOR, AppPrompt
from specrag_integrations.langchain.runnable_chat import RunnableChat, as_runnable, runnable_chat
from specrag_integrations.options import check_kind
from specrag_integrations.pipeline import NUM_DRAFTS, PASSAGES_PER_DRAFT, Refine, SpeculativeRAG
from specrag_integrations.subsets import Embedder

BINDABLE = (
    "num_drafts",
    "passages_per_draft",
    "min_confidence",
    "accept_confidence",
    "drafter",
    "verifier",
)
"""What `.bind` and the keyword arguments of a call may change for it."""

_SLOTS = "_slots"
_KEPT_VARIANTS = 8
"""Engines of bound options that are kept; each remembers what its models can do."""


class Question(TypedDict, total=False):
    """The input: `question` or `input`, and `context`; further keys are passed on."""

    question: str
    input: str
    context: list[Document]
    chat_history: list[Any]


class Answered(TypedDict, total=False):
    """The output: the question under its own key, and what was found."""

    question: str
    context: list[Document]
    answer: str
    specrag: dict[str, Any]


class SpeculativeRAGRunnable(RunnableSerializable[str | Question, Answered]):
    """Speculative RAG: small models draft, a large model verifies, in any chain of LangChain.

    From a question, with `retriever`, or a dict with `question` (or `input`) and `context`, a list
    of documents, to a dict with the question, `context` (the documents that the answer rests on
    first), `answer` and `specrag`, which tells as JSON how the answer came about. Further keys are
    passed on; `chat_history` is read as earlier turns. A stream brings the context once, when a
    draft is selected, then the answer, then `specrag`.

    Args:
        drafter: The small model, or a list of several: an `Endpoint`, a chat model, or a Runnable
            that ends in one.
        verifier: The large model, likewise.
        retriever: Finds the documents where the input brings none: a retriever, or any Runnable
            from a question to documents. Its time is not part of `deadline`.
        empty_answer: The answer where there are no documents, and no model is asked.
        prompt: The app's own prompt with a place for `context`, instead of ours.
        document_prompt: How one document is written into it.
        document_separator: What stands between two of them.
        options: How models of the app are asked for log-probabilities, where their class is not
            known to take OpenAI's options: `"openai"`, or a function from a `ChatRequest` to
            keyword arguments of `invoke`.
        abandon_calls: Whether `accept_confidence` ends a synchronous question while models of the
            app are still writing: calls in threads cannot be cancelled, and are paid for.
        embedder: As for `SpeculativeRAG`, or LangChain's `Embeddings`.
        num_drafts: As for `SpeculativeRAG`, like all others.

    Raises:
        ConfigurationError: an argument, or a combination, that can never work.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    drafter: Annotated[Any, SkipValidation]
    verifier: Annotated[Any, SkipValidation]
    retriever: Annotated[Any, SkipValidation] = None
    num_drafts: Annotated[int, SkipValidation] = NUM_DRAFTS
    passages_per_draft: Annotated[int, SkipValidation] = PASSAGES_PER_DRAFT
    partitioner: Annotated[Any, SkipValidation] = None
    embedder: Annotated[Any, SkipValidation] = None
    scoring: Annotated[Any, SkipValidation] = None
    selector: Annotated[Any, SkipValidation] = None
    calibration: Annotated[Any, SkipValidation] = None
    min_confidence: Annotated[float | None, SkipValidation] = None
    accept_confidence: Annotated[float | None, SkipValidation] = None
    refine: Annotated[Refine, SkipValidation] = "never"
    fallback: Annotated[Literal["standard"] | None, SkipValidation] = "standard"
    max_answer_tokens: Annotated[int, SkipValidation] = 256
    deadline: Annotated[float | None, SkipValidation] = None
    instructions: Annotated[str | None, SkipValidation] = None
    prompt: Annotated[Any, SkipValidation] = None
    document_prompt: Annotated[Any, SkipValidation] = None
    document_separator: Annotated[str, SkipValidation] = SEPARATOR
    empty_answer: Annotated[str, SkipValidation] = "No documents were found."
    options: Annotated[Any, SkipValidation] = None
    abandon_calls: Annotated[bool, SkipValidation] = False

    _engine: SpeculativeRAG | None = PrivateAttr(default=None)
    _variants: dict[Any, tuple[Mapping[str, Any], SpeculativeRAGRunnable]] = PrivateAttr(
        default_factory=dict
    )

    if not TYPE_CHECKING:  # type checkers read the fields

        def __init__(self, **options: Any) -> None:
            fields = type(self).model_fields
            if unknown := options.keys() - fields:
                raise ConfigurationError(
                    f"SpeculativeRAGRunnable takes no {', '.join(sorted(unknown))}; it takes "
                    f"{', '.join(sorted(fields))}"
                )
            for role in ("drafter", "verifier"):
                if options.get(role) is None:
                    raise ConfigurationError(f"{role} is missing; give an Endpoint or a chat model")
            super().__init__(**{**options, **_roles(options["drafter"], options["verifier"])})
            _check(self)
            self._engine = self._made()

    def __repr__(self) -> str:
        return f"{type(self).__name__}{repr(self.engine).removeprefix('SpeculativeRAG')}"

    def __str__(self) -> str:
        return repr(self)

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        return {**state, "__pydantic_private__": {"_engine": None, "_variants": {}}}

    def __copy__(self) -> Self:
        copied = super().__copy__()
        object.__setattr__(copied, "__pydantic_private__", {"_engine": None, "_variants": {}})
        return copied

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return a copy that shares models and retriever: many of them cannot be copied."""
        return self.__copy__()

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Whether `dumpd` writes what `load` can read."""
        return True

    @property
    def engine(self) -> SpeculativeRAG:
        """The engine of the core, over RunnableChats: for `fingerprint()` and `max_requests`."""
        if self._engine is None:
            self._engine = self._made()
        return self._engine

    @property
    def InputType(self) -> Any:  # noqa: N802 - LangChain's name
        """A string too, where there is a retriever."""
        return Question if self.retriever is None else str | Question

    @property
    def config_specs(self) -> list[ConfigurableFieldSpec]:
        """What can be configured in the models and the retriever."""
        parts = [*_listed(self.drafter), self.verifier, self.retriever]
        return get_unique_config_specs(
            spec for part in parts if isinstance(part, Runnable) for spec in part.config_specs
        )

    # ---------------------------------------------------------------- the Runnable protocol

    def invoke(
        self,
        input: str | Question,  # noqa: A002 - LangChain's name
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Answered:
        """Answer a question.

        Raises:
            InputError: there is no question, or the documents are none.
            NoAnswerError: nothing can be answered; `.reason` says why.
            TypeError: a keyword argument that cannot be changed for a call.
        """
        asking: Any = self._asking(kwargs, sync=True)
        return self._call_with_config(asking.answer, input, config, run_type="chain")

    async def ainvoke(
        self,
        input: str | Question,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Answered:
        """As `invoke`, without blocking the loop."""
        asking: Any = self._asking(kwargs)
        return await self._acall_with_config(asking.aanswer, input, config, run_type="chain")

    def batch(
        self,
        inputs: list[str | Question],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Answered]:
        """Answer several questions; `max_concurrency` holds for all their requests together."""
        kwargs[_SLOTS] = _shared_slots(config, len(inputs))
        return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    async def abatch(
        self,
        inputs: list[str | Question],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Answered]:
        """As `batch`, without blocking the loop."""
        kwargs[_SLOTS] = _shared_slots(config, len(inputs))
        return await super().abatch(inputs, config, return_exceptions=return_exceptions, **kwargs)

    def batch_as_completed(
        self,
        inputs: Sequence[str | Question],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As `batch`, each output with the place of its question as soon as it is there."""
        kwargs[_SLOTS] = _shared_slots(config, len(inputs))
        whole: Any = super()
        return whole.batch_as_completed(
            inputs, config, return_exceptions=return_exceptions, **kwargs
        )

    def abatch_as_completed(
        self,
        inputs: Sequence[str | Question],
        config: RunnableConfig | Sequence[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As `batch_as_completed`, without blocking the loop."""
        kwargs[_SLOTS] = _shared_slots(config, len(inputs))
        whole: Any = super()
        return whole.abatch_as_completed(
            inputs, config, return_exceptions=return_exceptions, **kwargs
        )

    def stream(
        self,
        input: str | Question,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Answered]:
        """Yield the output in parts, which can be added up."""
        yield from self.transform(iter([input]), config, **kwargs)

    async def astream(
        self,
        input: str | Question,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Answered]:
        """As `stream`, without blocking the loop."""

        async def given() -> AsyncIterator[str | Question]:
            yield input

        async with aclosing(self.atransform(given(), config, **kwargs)) as parts:
            async for part in parts:
                yield part

    def transform(
        self,
        input: Iterator[str | Question],  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Answered]:
        """As `stream`, from an input that comes in parts itself."""
        asking: Any = self._asking(kwargs, sync=True)
        yield from self._transform_stream_with_config(input, asking.parts, config, run_type="chain")

    async def atransform(
        self,
        input: AsyncIterator[str | Question],  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[Answered, None]:
        """As `transform`, without blocking the loop."""
        asking: Any = self._asking(kwargs)
        parts: Any = self._atransform_stream_with_config(
            input, asking.aparts, config, run_type="chain"
        )
        async with aclosing(parts):
            async for part in parts:
                yield part

    # ---------------------------------------------------------------- other shapes of it

    def as_rag_tool(self, name: str, description: str) -> BaseTool:
        """Return a tool for agents: its content is the answer, its artifact the whole output.

        Raises:
            ConfigurationError: there is no retriever, and agents have no documents.
        """
        if self.retriever is None:
            raise ConfigurationError("as_rag_tool needs retriever=: an agent has no documents")
        return tool_of(self, name=name, description=description)

    def as_node(self) -> Runnable[Any, dict[str, Any]]:
        """Return a node for LangGraph, from a state to what this node adds to it.

        The question is the state's `question` or `input`, else its last message of a user, with the
        turns before it as history. It adds `answer` and `specrag`, where it retrieves `context`,
        and where the question was a message, one of the assistant. Keys that the graph's state does
        not have are ignored by LangGraph.
        """
        return node_of(self)

    def configurable_fields(self, **kwargs: Any) -> ConfiguredRAG:
        """Return the same with fields that the config of each call sets.

        Raises:
            ValueError: there is no such field.
        """
        configured: Any = super().configurable_fields(**kwargs)
        return ConfiguredRAG(default=configured.default, fields=configured.fields)

    # ---------------------------------------------------------------- options and engines

    def _asking(self, options: dict[str, Any], *, sync: bool = False) -> Asking:
        """Return the way of a question with the options of its call.

        Raises:
            TypeError: an option that cannot be changed for a call.
        """
        slots = options.pop(_SLOTS, None)
        if unknown := options.keys() - set(BINDABLE):
            raise TypeError(
                f"{', '.join(sorted(unknown))} cannot be given to a call; only "
                f"{', '.join(BINDABLE)} can"
            )
        bound = self._variant(options)
        if sync and bound.accept_confidence is not None and leaves_calls(bound):
            bound = self._variant({**options, "accept_confidence": None})
        return Asking(
            engine=bound.engine,
            retriever=bound.retriever,
            empty_answer=bound.empty_answer,
            # As many as can be needed at once: all drafts, and a verification of each.
            most_calls=2 * bound.num_drafts,
            is_prompted=bound.prompt is not None,
            mends=bound.refine != "never",
            slots=slots,
        )

    def _variant(self, options: Mapping[str, Any]) -> SpeculativeRAGRunnable:
        """Return the same with other options, the same one for the same options."""
        if not options:
            return self
        key = tuple(sorted((name, _key(value)) for name, value in options.items()))
        known = self._variants.get(key)
        if known is None:
            given = {name: getattr(self, name) for name in type(self).model_fields}
            # The options are kept with it: as long as it is known by their ids, they live.
            known = dict(options), type(self)(**{**given, **options})
            self._variants[key] = known
            for old in list(self._variants)[:-_KEPT_VARIANTS]:
                self._variants.pop(old, None)
        return known[1]

    def _made(self) -> SpeculativeRAG:
        app = None
        if self.prompt is not None:
            app = AppPrompt(
                prompt=self.prompt,
                document_prompt=self.document_prompt or DOCUMENT_PROMPT,
                separator=self.document_separator,
            )
        with serving(TRIAL):  # it may be made within a question of another
            return SpeculativeRAG(
                drafter=[self._chat(model) for model in _listed(self.drafter)],
                verifier=self._chat(self.verifier),
                num_drafts=self.num_drafts,
                passages_per_draft=self.passages_per_draft,
                partitioner=self.partitioner,
                embedder=_embedder(self.embedder),
                scoring=self.scoring,
                selector=self.selector,
                calibration=self.calibration,
                min_confidence=self.min_confidence,
                accept_confidence=self.accept_confidence,
                refine=self.refine,
                fallback=self.fallback,
                draft_template=app.draft if app else None,
                fallback_template=app.answer if app else None,
                max_answer_tokens=self.max_answer_tokens,
                deadline=self.deadline,
                instructions=self.instructions,
            )

    def _chat(self, model: Runnable[Any, Any]) -> RunnableChat:
        return runnable_chat(model, self.options)


def leaves_calls(chain: SpeculativeRAGRunnable) -> bool:
    """Whether ending a synchronous question early would leave calls running, unasked."""
    models = (*_listed(chain.drafter), chain.verifier)
    return not chain.abandon_calls and any(map(is_foreign, models))


def _roles(drafter: object, verifier: object) -> dict[str, Any]:
    """Return both models as Runnables; a drafter may be a list of them."""
    several = isinstance(drafter, list | tuple)
    drafters = [as_runnable("drafter", model) for model in _listed(drafter)]
    return {
        "drafter": drafters if several else drafters[0],
        "verifier": as_runnable("verifier", verifier),
    }


def _check(given: SpeculativeRAGRunnable) -> None:
    if not isinstance(given.retriever, Runnable | None):
        raise ConfigurationError(
            f"retriever must be a retriever or another Runnable, not a "
            f"{type(given.retriever).__name__}; of a vector store, give store.as_retriever()"
        )
    check_kind("empty_answer", given.empty_answer, kind=str)
    for name in ("document_prompt", "document_separator"):
        if given.prompt is None and getattr(given, name) != type(given).model_fields[name].default:
            raise ConfigurationError(f"{name} does nothing without prompt=")


def _listed(models: Any) -> Sequence[Any]:
    return models if isinstance(models, list | tuple) else [models]


def _key(value: object) -> object:
    return value if isinstance(value, int | float | None) else id(value)


def _embedder(given: Embedder | Embeddings | None) -> Embedder | None:
    if not isinstance(given, Embeddings):
        return given

    def embed(texts: Sequence[str], _: str) -> list[list[float]]:
        return given.embed_documents(list(texts))

    return embed


def _shared_slots(
    config: RunnableConfig | Sequence[RunnableConfig] | None, questions: int
) -> asyncio.Semaphore | None:
    """Return the limit that the requests of several questions share."""
    limits = [one.get("max_concurrency") for one in get_config_list(config, questions)]
    smallest = min((limit for limit in limits if limit), default=None)
    return asyncio.Semaphore(smallest) if smallest else None
