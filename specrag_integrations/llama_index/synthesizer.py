"""SpeculativeSynthesizer: nodes in, a response out, in every engine that takes a synthesizer."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self, TypedDict, Unpack

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.events.synthesis import (
    SynthesizeEndEvent,
    SynthesizeStartEvent,
)
from llama_index.core.llms.llm import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle, QueryType, TextNode
from llama_index.core.settings import Settings
from llama_index.core.types import RESPONSE_TEXT_TYPE

from specrag_integrations.confidence import Calibration
from specrag_integrations.endpoint import Endpoint
from specrag_integrations.errors import ConfigurationError, InputError, NoAnswerError
from specrag_integrations.foreign import secrets_of
from specrag_integrations.llama_index.chat import LLMChat, listened
from specrag_integrations.llama_index.llms import EndpointLLM
from specrag_integrations.llama_index.nodes import Sources, embedder_from
from specrag_integrations.llama_index.prompts import (
    DraftTemplate,
    checked_template,
    core_template,
    draft_template,
)
from specrag_integrations.llama_index.responses import (
    Told,
    astreamed,
    empty,
    is_empty,
    replayed,
    streamed,
    whole,
)
from specrag_integrations.pipeline import Refine, SpeculativeRAG
from specrag_integrations.prompts import Template
from specrag_integrations.scores import Scoring
from specrag_integrations.selection import Selector
from specrag_integrations.subsets import Embedder, Partitioner

log = logging.getLogger("specrag_integrations")
dispatcher = get_dispatcher(__name__)

Model = Endpoint | LLM | LLMChat


class Options(TypedDict, total=False):
    """What goes to `SpeculativeRAG` as it is; it tells what each means."""

    num_drafts: int
    passages_per_draft: int
    partitioner: Partitioner | None
    scoring: Scoring | None
    selector: Selector | None
    calibration: Calibration | None
    min_confidence: float | None
    accept_confidence: float | None
    refine: Refine
    fallback: Literal["standard"] | None
    max_answer_tokens: int
    deadline: float | None


class SpeculativeSynthesizer(BaseSynthesizer):
    """Answers from nodes by speculative RAG.

    An engine that is given a synthesizer drops `streaming` and `text_qa_template`, so they are
    given here. A response's `source_nodes` begin with the nodes the answer rests on, in the order
    in which its `[n]` count them; `metadata["specrag"]` tells how it came about.

    Args:
        drafter: The small model, or several: an `Endpoint`, a LlamaIndex LLM, or an `LLMChat`.
        verifier: The large model; None: `Settings.llm`.
        streaming: Whether responses are streamed. An accepted draft comes in one piece.
        text_qa_template: The app's own prompt, of the fallback and, with a request for a rationale
            added, of the drafts. None: LlamaIndex's for the fallback, and the core's for drafts.
        draft_template: The app's own prompt for drafts, which must ask for a rationale and an
            answer; `get_prompts()` shows the one in use.
        embedder: A LlamaIndex embedding, or what `SpeculativeRAG` takes, for nodes without one.
        only_used: Whether `source_nodes` leaves out what the answer does not rest on.
        callback_manager: Gets the events of synthesis and of endpoints; None: that of `Settings`.
        output_cls: Not supported.
        response_mode: Not supported: there is one mode.
        **options: See `SpeculativeRAG`.

    Raises:
        ConfigurationError: an argument, or a combination, that can never work.
    """

    def __init__(
        self,
        drafter: Model | Sequence[Model],
        verifier: Model | None = None,
        *,
        streaming: bool = False,
        text_qa_template: BasePromptTemplate | None = None,
        draft_template: BasePromptTemplate | None = None,
        embedder: Embedder | BaseEmbedding | None = None,
        only_used: bool = False,
        callback_manager: CallbackManager | None = None,
        output_cls: None = None,
        response_mode: None = None,
        **options: Unpack[Options],
    ) -> None:
        _check_supported(output_cls, response_mode, options)
        drafters = tuple(drafter) if isinstance(drafter, list | tuple) else (drafter,)
        if not drafters:
            raise ConfigurationError("drafter is an empty list; give at least one Endpoint")
        verifier = _settings_llm() if verifier is None else verifier
        self._drafters = tuple(_chat("drafter", model) for model in drafters)
        self._verifier = _chat("verifier", verifier)
        # Given a callback manager, LlamaIndex's constructor would set it on an app's own LLM.
        super().__init__(llm=self._verifier.llm, streaming=streaming)
        self._made_here = [
            chat
            for model, chat in zip((*drafters, verifier), self._models, strict=True)
            if isinstance(model, Endpoint)
        ]
        self.callback_manager = callback_manager or Settings.callback_manager
        # Older versions of llama-index-core have no such attribute.
        self._empty_response: str = getattr(self, "_empty_response", "Empty Response")
        self._only_used = only_used
        self._embedder = embedder
        self._options = options
        self._text_qa_template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL
        self._draft_template = draft_template
        self._rag = self._make_rag()
        self._warn_of_retries()

    @property
    def _models(self) -> tuple[LLMChat, ...]:
        return (*self._drafters, self._verifier)

    @property
    def callback_manager(self) -> CallbackManager:
        """Where callbacks are sent, those of endpoints as well; an app's own LLM keeps its own."""
        return self._callback_manager

    @callback_manager.setter
    def callback_manager(self, callback_manager: CallbackManager) -> None:
        self._callback_manager = callback_manager
        for model in self._made_here:
            model.llm.callback_manager = callback_manager

    def _make_rag(self) -> SpeculativeRAG:
        checked_template("text_qa_template", self._text_qa_template, llm=self._llm)
        drafting = self._drafting
        drafter_llm = self._drafters[0].llm
        checked_template("draft_template", drafting, llm=drafter_llm)
        return SpeculativeRAG(
            drafter=self._drafters,
            verifier=self._verifier,
            embedder=embedder_from(self._embedder),
            draft_template=core_template(
                drafting, llm=drafter_llm, numbers=not isinstance(drafting, DraftTemplate)
            ),
            fallback_template=self._fallback_template,
            **self._options,
        )

    @property
    def _fallback_template(self) -> Template | None:
        if self._options.get("fallback", "standard") is None:
            return None
        return core_template(self._text_qa_template, llm=self._llm)

    def _warn_of_retries(self) -> None:
        """Say once what an LLM's own retries can make of one question."""
        retrying = sorted({model.name for model in self._models if model.own_retries})
        if retrying:
            log.warning(
                "%s: retries of its own make up to %d HTTP requests of one question; "
                "an Endpoint has one layer of them, and an LLM with max_retries=0 none",
                ", ".join(retrying),
                self._rag.max_requests,
            )

    # ---------------------------------------------------------------- prompts

    @property
    def _drafting(self) -> BasePromptTemplate:
        return self._draft_template or draft_template(self._text_qa_template)

    def _get_prompts(self) -> dict[str, BasePromptTemplate]:
        return {"text_qa_template": self._text_qa_template, "draft_template": self._drafting}

    def _update_prompts(self, prompts: Mapping[str, BasePromptTemplate]) -> None:
        before = self._text_qa_template, self._draft_template
        given = prompts.get("draft_template", self._draft_template)
        # What `get_prompts` showed may come back: it goes on following the other prompt.
        derived = draft_template(self._text_qa_template)
        self._draft_template = None if given == derived else given
        self._text_qa_template = prompts.get("text_qa_template", self._text_qa_template)
        try:
            self._rag = self._make_rag()
        except ConfigurationError:
            self._text_qa_template, self._draft_template = before
            raise

    # ---------------------------------------------------------------- responses

    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer a query from nodes, the best first.

        Raises:
            NoAnswerError: no draft could be used, and there is no fallback or it failed.
        """
        _check_no_kwargs(response_kwargs)
        with self._announced(query) as (question, ended):
            return ended(self._respond(question, Sources(nodes, additional_source_nodes)))

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """As `synthesize`, without blocking the loop."""
        _check_no_kwargs(response_kwargs)
        with self._announced(query) as (question, ended):
            return ended(await self._arespond(question, Sources(nodes, additional_source_nodes)))

    def get_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Answer a query from texts; a generator where responses are streamed."""
        _check_no_kwargs(response_kwargs)
        return _text_of(self._respond(query_str, _sources_of(text_chunks)))

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """As `get_response`, without blocking the loop."""
        _check_no_kwargs(response_kwargs)
        return _text_of(await self._arespond(query_str, _sources_of(text_chunks)))

    def _respond(self, question: str, sources: Sources) -> RESPONSE_TYPE:
        told = Told(sources, only_used=self._only_used)
        # Chat engines change it from one question to the next.
        streaming = self._streaming
        try:
            if streaming:
                with listened():
                    return streamed(self._rag.stream(question, sources.passages), told)
            answer = self._rag.ask(question, sources.passages)
        except NoAnswerError as error:
            if not is_empty(error):
                raise
            return empty(self._empty_response, told.fields, streaming=streaming, loop=False)
        told.settle(answer)
        return whole(answer.text, told.fields)

    async def _arespond(self, question: str, sources: Sources) -> RESPONSE_TYPE:
        told = Told(sources, only_used=self._only_used)
        streaming = self._streaming
        try:
            if streaming:
                events = self._rag.astream(question, sources.passages)
                own = all(model.endpoint for model in self._models)
                return await (astreamed if own else replayed)(events, told)
            answer = await self._rag.aask(question, sources.passages)
        except NoAnswerError as error:
            if not is_empty(error):
                raise
            return empty(self._empty_response, told.fields, streaming=streaming, loop=True)
        told.settle(answer)
        return whole(answer.text, told.fields)

    @contextmanager
    def _announced(
        self, query: QueryType
    ) -> Iterator[tuple[str, Callable[[RESPONSE_TYPE], RESPONSE_TYPE]]]:
        """Send LlamaIndex's events around a synthesis; yield the question, and what ends it."""
        bundle = QueryBundle(query) if isinstance(query, str) else query
        dispatcher.event(SynthesizeStartEvent(query=bundle))
        told: dict[str, Any] = {EventPayload.QUERY_STR: bundle.query_str}
        with self._callback_manager.event(CBEventType.SYNTHESIZE, payload=told) as event:

            def ended(response: RESPONSE_TYPE) -> RESPONSE_TYPE:
                event.on_end(payload={EventPayload.RESPONSE: response})
                dispatcher.event(SynthesizeEndEvent(query=bundle, response=response))
                return response

            yield bundle.query_str, ended

    # ---------------------------------------------------------------- the engine behind it

    @property
    def rag(self) -> SpeculativeRAG:
        """The core's engine: `max_requests`, `fingerprint`, `warmup` and `close` are there."""
        return self._rag

    # ---------------------------------------------------------------- copies

    def _configuration(self) -> dict[str, Any]:
        *drafters, verifier = (
            model.endpoint if model in self._made_here else model for model in self._models
        )
        return {
            "drafter": drafters,
            "verifier": verifier,
            "streaming": self._streaming,
            "text_qa_template": self._text_qa_template,
            "draft_template": self._draft_template,
            "embedder": self._embedder,
            "only_used": self._only_used,
            **self._options,
        }

    def __copy__(self) -> Self:
        return type(self)(**self._configuration(), callback_manager=self._callback_manager)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the configuration; models, whose clients cannot be copied, are shared."""
        copied = self._configuration()
        for name in ("text_qa_template", "draft_template"):
            copied[name] = copy.deepcopy(copied[name], memo)
        return type(self)(**copied, callback_manager=self._callback_manager)

    def __getstate__(self) -> dict[str, Any]:
        """Return what can be pickled: the configuration, without callbacks.

        Raises:
            pickle.PicklingError: a key of the app's would be written too.
        """
        if isinstance(self._embedder, BaseEmbedding) and secrets_of(self._embedder):
            raise pickle.PicklingError(
                f"embedder: {type(self._embedder).__name__} would be pickled with its key; "
                "make the engine anew where it is used"
            )
        return self._configuration()

    def __setstate__(self, state: dict[str, Any]) -> None:
        SpeculativeSynthesizer.__init__(self, **state)


def _chat(role: str, model: object) -> LLMChat:
    if isinstance(model, Endpoint):
        model = EndpointLLM(model)
    if isinstance(model, StructuredLLM):
        raise ConfigurationError(
            f"{role} is an LLM with an output_cls, and drafts are texts; give the LLM itself"
        )
    if isinstance(model, LLM):
        return LLMChat(model)
    if isinstance(model, LLMChat):
        return model
    raise ConfigurationError(
        f"{role} must be an Endpoint or a LlamaIndex LLM, not a {type(model).__name__}; "
        "write Endpoint(base_url, model)"
    )


def _settings_llm() -> LLM:
    try:
        return Settings.llm
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            "there is no verifier: give verifier=Endpoint(base_url, model), or set Settings.llm"
        ) from error


def _check_supported(output_cls: object, response_mode: object, options: Mapping[str, Any]) -> None:
    if output_cls is not None:
        raise ConfigurationError(
            "output_cls cannot be kept: drafts are a rationale and an answer in words; parse the "
            "response's text, or keep the engine you have for structured answers"
        )
    if response_mode is not None:
        raise ConfigurationError(
            f"response_mode={response_mode!r}: a speculative synthesizer has one mode; leave it out"
        )
    if unknown := sorted(options.keys() - Options.__annotations__.keys()):
        known = ", ".join(sorted({*Options.__annotations__, "embedder"}))
        hints = "; ".join(_INSTEAD[name] for name in unknown if name in _INSTEAD)
        raise ConfigurationError(
            f"{', '.join(unknown)}: there is no such option; known are {known}"
            f"{'; ' if hints else ''}{hints}"
        )


_INSTEAD = {
    "llm": "the large model is verifier=",
    "instructions": "instructions stand in text_qa_template or draft_template here",
}


def _check_no_kwargs(response_kwargs: Mapping[str, Any]) -> None:
    if response_kwargs:
        raise InputError(
            f"a speculative synthesizer takes no {', '.join(sorted(response_kwargs))}; "
            "fill variables of a template with partial_format()"
        )


def _sources_of(texts: Sequence[str]) -> Sources:
    return Sources([NodeWithScore(node=TextNode(text=text)) for text in texts])


def _text_of(response: RESPONSE_TYPE) -> RESPONSE_TEXT_TYPE:
    generator = getattr(response, "response_gen", None)
    return str(response) if generator is None else generator
