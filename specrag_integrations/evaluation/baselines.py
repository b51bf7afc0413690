"""Baselines: what LlamaIndex and LangChain answer with the same model from the same passages.

They show whether our own standard RAG is a straw man. The prompt, the packing of the passages and
the calls are the frameworks'; the requests go through the model that every other system uses, so
that tokens, caches and failures are counted alike. The frameworks are imported where an engine is
made, never with this module.
"""

from __future__ import annotations

import logging
import re
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import cache
from typing import Any, Literal, cast, get_args

from specrag_integrations.answers import Answer
from specrag_integrations.citations import without_citations
from specrag_integrations.engine import Clock, Engine
from specrag_integrations.errors import (
    ConfigurationError,
    ContextTooSmallError,
    MalformedReplyError,
    MissingDependencyError,
)
from specrag_integrations.events import DeltaEvent, Emit, PassagesEvent
from specrag_integrations.models import ChatModel, ChatReply, ChatRequest, Message, Role, Step
from specrag_integrations.options import checked_whole
from specrag_integrations.passages import Passage, Usable
from specrag_integrations.prompts import answer_messages, numbered
from specrag_integrations.standard import Shown, answer_of, in_time
from specrag_integrations.usage import StepUsage

log = logging.getLogger("specrag_integrations")

PromptChoice = Literal["default", "ours"]
"""The framework's own prompt, or the brief one of our standard RAG in the framework's template."""

_ROLES: dict[str, Role] = {"system": "system", "human": "user", "ai": "assistant"}
"""LangChain's names of the roles, and ours."""

_NO_ROOM = re.compile(r"context size|chunk size", re.IGNORECASE)
"""In the message of the ValueError by which LlamaIndex says that not even the prompt fits."""


class _Asked:
    """The model, as a framework asks it during one question, and what that took."""

    def __init__(self, model: ChatModel, *, max_tokens: int, clock: Clock) -> None:
        self.max_tokens = max_tokens
        self.steps: list[StepUsage] = []
        self.notes: list[str] = []
        self._model = model
        self._clock = clock

    async def pieces(self, messages: Iterable[Message]) -> AsyncIterator[str]:
        """Yield the reply to some turns as it comes: at least one piece, which may be empty."""
        sent = time.perf_counter()
        step = Step(kind="fallback", index=len(self.steps))
        request = ChatRequest(messages=tuple(messages), max_tokens=self.max_tokens)
        began = False
        reply: ChatReply | None = None
        async for delta in self._model.stream(request, step=step):
            reply = delta.reply or reply
            text = delta.text
            if reply and not began:
                text = text or reply.text  # a model that cannot stream brings all of it at once
            if text:
                began = True
                yield text
        if reply is None:
            raise MalformedReplyError(f"{self._model.name}: the stream ended without a reply")
        self._account(reply, step, time.perf_counter() - sent)
        if not began:
            yield ""

    def _account(self, reply: ChatReply, step: Step, seconds: float) -> None:
        self.notes += reply.notes
        if reply.finish_reason == "length":
            self.notes.append(f"{step}: the reply was cut off at {self.max_tokens} tokens")
        elif reply.finish_reason != "stop":
            self.notes.append(f"{step}: the reply ended with {reply.finish_reason!r}")
        self.steps.append(
            StepUsage(
                kind=step.kind,
                index=step.index,
                role="verifier",
                model=reply.model or self._model.name,
                seconds=seconds,
                arrived=self._clock.elapsed,
                count=reply.count,
                attempts=reply.attempts,
            )
        )


class _Framework(Engine):
    """An engine whose answer a framework writes from all passages.

    Args:
        model: The model, as for `StandardRAG`.
        prompt: Whose prompt is used.
        instructions: The app's own words, added to our prompt; the default prompts have no place
            for them.
        max_tokens: The most tokens of a reply.
        deadline: Seconds a question may take; None for no limit.

    Raises:
        ConfigurationError: an argument can never work.
        MissingDependencyError: the framework is not installed.
    """

    framework: str

    def __init__(
        self,
        model: ChatModel,
        *,
        prompt: PromptChoice = "ours",
        instructions: str | None = None,
        max_tokens: int = 256,
        deadline: float | None = None,
    ) -> None:
        super().__init__(models=[model], deadline=deadline)
        if prompt not in get_args(PromptChoice):
            raise ConfigurationError(f"prompt={prompt!r} must be one of {get_args(PromptChoice)}")
        self.model = model
        self.prompt = prompt
        self._instructions = instructions
        self._max_tokens = checked_whole("max_tokens", max_tokens)
        self._load()  # now, so that no question waits for an import

    @abstractmethod
    def _load(self) -> None:
        """Import the framework.

        Raises:
            MissingDependencyError: it is not installed.
        """

    @abstractmethod
    def _pieces(
        self,
        question: str,
        passages: Sequence[Passage],
        history: Sequence[Message],
        asked: _Asked,
    ) -> AsyncIterator[str]:
        """Yield the framework's answer as it is written."""

    async def _run(
        self,
        question: str,
        usable: Usable,
        *,
        history: Sequence[Message],
        clock: Clock,
        emit: Emit,
    ) -> Answer:
        emit(PassagesEvent(passages=usable.passages))
        asked = _Asked(self.model, max_tokens=self._max_tokens, clock=clock)
        notes = list(usable.dropped)
        if history and self.prompt == "default":
            notes.append(f"{self.framework}'s own prompt has no place for earlier turns")
        shown = Shown(len(usable.passages))
        writing = self._show(
            shown,
            self._pieces(question, usable.passages, history, asked),
            clock=clock,
            emit=emit,
        )
        first_token = await in_time(writing, clock=clock, model=self.model, who=self.framework)
        if len(asked.steps) > 1:
            notes.append(f"{self.framework} asked {len(asked.steps)} times")
        return answer_of(
            shown.text,
            usable=usable,
            passages=usable.passages,
            steps=tuple(asked.steps),
            notes=(*notes, *asked.notes),
            first_token=first_token,
            clock=clock,
        )

    async def _show(
        self, shown: Shown, pieces: AsyncIterator[str], *, clock: Clock, emit: Emit
    ) -> float:
        """Show the pieces as they come, and return the seconds to the first that can be read."""
        first_token: float | None = None

        def show(text: str, *, ended: bool) -> None:
            nonlocal first_token
            if piece := shown.add(text, ended=ended):
                first_token = clock.elapsed if first_token is None else first_token
                emit(DeltaEvent(text=piece))

        async for text in pieces:
            show(text, ended=False)
        show("", ended=True)
        if not without_citations(shown.text).strip():
            raise MalformedReplyError(f"{self.model.name} wrote no text")
        return clock.elapsed if first_token is None else first_token


class LlamaIndexCompact(_Framework):
    """LlamaIndex's compact response synthesizer, the one of `index.as_query_engine()`.

    It packs all passages into as few prompts as the context the server tells of allows (LlamaIndex
    assumes 3900 tokens where it does not), by LlamaIndex's own tokeniser; each prompt after the
    first asks to refine the answer so far. Our prompt goes in as `text_qa_template`; `refine`
    stays LlamaIndex's. Titles are metadata of the nodes, which its own prompt shows.
    """

    framework = "LlamaIndex"

    def _load(self) -> None:
        try:
            from llama_index.core.utils import get_tokenizer
        except ImportError as error:
            raise MissingDependencyError("llama-index-core", "baselines") from error
        _llama_index_model()
        get_tokenizer()

    async def _pieces(
        self,
        question: str,
        passages: Sequence[Passage],
        history: Sequence[Message],
        asked: _Asked,
    ) -> AsyncIterator[str]:
        from llama_index.core import get_response_synthesizer
        from llama_index.core.llms import LLMMetadata
        from llama_index.core.schema import NodeWithScore, TextNode

        told = await self.model.capabilities()
        metadata = LLMMetadata(
            num_output=self._max_tokens, is_chat_model=True, model_name=self.model.name
        )
        if told and told.context_tokens:
            metadata.context_window = told.context_tokens
        ours = self.prompt == "ours"
        if ours:
            nodes = [TextNode(text=text) for text in _numbered_texts(passages)]
        else:
            nodes = [
                TextNode(text=p.text, metadata={"title": p.title} if p.title else {})
                for p in passages
            ]
        synthesizer = get_response_synthesizer(
            llm=_llama_index_model()(asked, metadata),
            response_mode=cast("Any", "compact"),
            text_qa_template=_llama_index_template(history, self._instructions) if ours else None,
            streaming=True,
        )
        try:
            response: Any = await synthesizer.asynthesize(
                question, [NodeWithScore(node=node) for node in nodes]
            )
        except ValueError as error:
            if not _NO_ROOM.search(str(error)):
                raise
            raise ContextTooSmallError(
                f"{self.model.name}: LlamaIndex finds no room for the passages in a context of "
                f"{metadata.context_window} tokens beside an answer of {self._max_tokens} ({error})"
            ) from error
        async for piece in response.async_response_gen():
            yield piece


class LangChainStuff(_Framework):
    """LangChain's stuffing chain: `create_stuff_documents_chain`, all passages in one prompt.

    What does not fit is the server's to refuse. LangChain's own prompt is the one its
    question-answering chains choose for chat models. A document is shown by its text alone, so
    there the title stands in the text, above it.
    """

    framework = "LangChain"

    def _load(self) -> None:
        try:
            import langchain_classic.chains.combine_documents
            import langchain_classic.chains.question_answering.stuff_prompt  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError("langchain-classic", "baselines") from error
        _langchain_model()

    async def _pieces(
        self,
        question: str,
        passages: Sequence[Passage],
        history: Sequence[Message],
        asked: _Asked,
    ) -> AsyncIterator[str]:
        from langchain_classic.chains.combine_documents import create_stuff_documents_chain
        from langchain_classic.chains.question_answering.stuff_prompt import PROMPT_SELECTOR
        from langchain_core.documents import Document

        model = _langchain_model()(asked=asked)
        prompt: Any
        if self.prompt == "ours":
            prompt = _langchain_template(history, self._instructions)
            texts = _numbered_texts(passages)
        else:
            prompt = PROMPT_SELECTOR.get_prompt(model)
            texts = [f"{p.title}\n{p.text}" if p.title else p.text for p in passages]
        chain = create_stuff_documents_chain(model, prompt)
        documents = [Document(page_content=text) for text in texts]
        async for piece in chain.astream({"context": documents, "question": question}):
            yield piece


def _numbered_texts(passages: Sequence[Passage]) -> list[str]:
    """Return each passage as our prompt shows it; both frameworks put an empty line between."""
    return [
        f"[{number}]{numbered([passage]).removeprefix('[1]')}"
        for number, passage in enumerate(passages, start=1)
    ]


def _our_turns(
    history: Sequence[Message], instructions: str | None, *, question: str, context: str
) -> tuple[Sequence[Message], str]:
    """Return our prompt's earlier turns, and its last as a template.

    Its variables are those two and, where there are any, the instructions: braces in these would be
    taken for variables of their own.
    """
    slot = Passage(text=context)
    told = instructions and "{instructions}"
    *earlier, last = answer_messages(question, [slot], history=history, instructions=told)
    return earlier, last.content.replace(numbered([slot]), context)


def _llama_index_template(history: Sequence[Message], instructions: str | None) -> Any:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import ChatPromptTemplate

    earlier, last = _our_turns(
        history, instructions, question="{query_str}", context="{context_str}"
    )
    # Every message is a template, so that the words of the earlier ones are values as well.
    words = {f"turn_{number}": turn.content for number, turn in enumerate(earlier)}
    turns = [
        ChatMessage(role=turn.role, content=f"{{{name}}}")
        for name, turn in zip(words, earlier, strict=True)
    ]
    template = ChatPromptTemplate([*turns, ChatMessage(role="user", content=last)])
    return template.partial_format(instructions=instructions or "", **words)


def _langchain_template(history: Sequence[Message], instructions: str | None) -> Any:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
    from langchain_core.prompts import ChatPromptTemplate

    kinds = {"system": SystemMessage, "user": HumanMessage, "assistant": AIMessage}
    earlier, last = _our_turns(history, instructions, question="{question}", context="{context}")
    # Messages are taken as they are; only a (role, text) pair is a template.
    turns = [kinds[turn.role](turn.content) for turn in earlier]
    template = ChatPromptTemplate.from_messages([*turns, ("human", last)])
    return template.partial(instructions=instructions or "")


@cache
def _llama_index_model() -> Any:
    """Return a LlamaIndex LLM that asks through an `_Asked`; only what the synthesizer needs."""
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.llms import ChatMessage, ChatResponse, CustomLLM, LLMMetadata

    class Model(CustomLLM):
        _asked: Any = PrivateAttr()
        _metadata: Any = PrivateAttr()

        def __init__(self, asked: _Asked, metadata: LLMMetadata) -> None:
            super().__init__()
            self._asked = asked
            self._metadata = metadata

        @property
        def metadata(self) -> LLMMetadata:
            return cast("LLMMetadata", self._metadata)

        async def astream_chat(self, messages: Sequence[ChatMessage], **_: Any) -> Any:
            turns = [Message(cast("Role", m.role.value), m.content or "") for m in messages]

            async def responses() -> AsyncIterator[ChatResponse]:
                text = ""
                async for piece in self._asked.pieces(turns):
                    text += piece
                    message = ChatMessage(role="assistant", content=text)
                    yield ChatResponse(message=message, delta=piece)

            return responses()

        def complete(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

        def stream_complete(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    return Model


@cache
def _langchain_model() -> Any:
    """Return a LangChain chat model that asks through an `_Asked`; only what a chain streams."""
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessageChunk, BaseMessage
    from langchain_core.outputs import ChatGenerationChunk, ChatResult

    class Model(BaseChatModel):
        asked: Any

        @property
        def _llm_type(self) -> str:
            return "specrag-baseline"

        async def _astream(
            self, messages: list[BaseMessage], *_: Any, **__: Any
        ) -> AsyncIterator[ChatGenerationChunk]:
            turns = [Message(_ROLES[m.type], str(m.text)) for m in messages]
            async for piece in self.asked.pieces(turns):
                yield ChatGenerationChunk(message=AIMessageChunk(content=piece))

        def _generate(self, *_: Any, **__: Any) -> ChatResult:
            raise NotImplementedError

    return Model
