"""LLMChat: an LLM of LlamaIndex as the pipeline sees a model."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.llm import LLM

from specrag_integrations.endpoint import Endpoint
from specrag_integrations.errors import (
    ConfigurationError,
    EndpointError,
    EndpointRejectedError,
    LogprobsUnavailableError,
    MalformedReplyError,
)
from specrag_integrations.foreign import (
    endpoint_error,
    finish_reason_of,
    refuses_logprobs,
    secrets_of,
    tokens_of,
)
from specrag_integrations.llama_index.llms import EndpointLLM, EndpointResponse
from specrag_integrations.llama_index.messages import chat_messages
from specrag_integrations.models import (
    Capabilities,
    ChatDelta,
    ChatReply,
    ChatRequest,
    Message,
    Step,
    StepKind,
    TokenCount,
)
from specrag_integrations.portal import portal
from specrag_integrations.threads import Threads

dispatcher = get_dispatcher(__name__)

Options = Callable[[ChatRequest], Mapping[str, Any]]
"""(request) -> the keyword arguments of one call of an LLM."""

_FOR_A_READER = {"draft", "fallback", "refine"}
"""The steps that write what an app's user may read: an LLM's own system prompt belongs there."""


def openai_options(request: ChatRequest) -> dict[str, Any]:
    """Word a request for LlamaIndex's classes over OpenAI's chat API."""
    options: dict[str, Any] = {"max_tokens": request.max_tokens}
    if request.top_logprobs is not None:
        options["logprobs"] = True
        if request.top_logprobs:
            options["top_logprobs"] = request.top_logprobs
    return options


_OPENAI = {"OpenAI", "AzureOpenAI", "OpenAILike", "OpenRouter"}
_PACKAGES = (
    "llama_index.llms.openai",
    "llama_index.llms.azure_openai",
    "llama_index.llms.openrouter",
)
"""Classes that are known to take OpenAI's options, and pass on what comes back."""


def _step(kind: StepKind) -> Callable[..., Awaitable[ChatResponse]]:
    """Return the method that is one kind of step, and its span."""

    async def step(
        self: LLMChat,  # noqa: ARG001 - names the span
        index: int,  # noqa: ARG001 - shown in the span
        messages: list[ChatMessage],
        call: _Call,
    ) -> ChatResponse:
        return await call(messages)

    step.__name__ = kind
    return dispatcher.span(step)


_listened: ContextVar[bool] = ContextVar("specrag_listened", default=False)


@contextmanager
def listened() -> Iterator[None]:
    """Say that what is written meanwhile is read piece by piece, as it comes."""
    before = _listened.set(True)
    try:
        yield
    finally:
        _listened.reset(before)


class LLMChat:
    """A LlamaIndex LLM as a model of the pipeline, each of its steps a span of its own.

    An `EndpointLLM` is asked for all that its server can tell. Any other LLM keeps its own settings
    and retries, and is asked for log-probabilities only where its class is known to take that.

    Called on the background loop, as a synchronous query does, another LLM is called synchronously
    in a thread: its asynchronous client belongs to the app's own loop.

    Args:
        llm: The LLM.
        options: (request) -> the keyword arguments of one call, for a class that is not known,
            such as `lambda request: {"max_tokens": request.max_tokens}`. Log-probabilities are read
            from `raw`, in OpenAI's shape.

    Raises:
        ConfigurationError: an argument can never work.
    """

    def __init__(self, llm: LLM, *, options: Options | None = None) -> None:
        if not isinstance(llm, LLM):
            raise ConfigurationError(
                f"llm must be a LlamaIndex LLM, not a {type(llm).__name__}; an Endpoint is one as "
                "EndpointLLM(endpoint)"
            )
        if options is not None and not callable(options):
            raise ConfigurationError(
                f"options must be a function of a ChatRequest, not a {type(options).__name__}"
            )
        self.llm = llm
        self.options = options
        self._copies: dict[int, LLM] = {}
        self._mute = False
        """A request for log-probabilities was refused: drafts are asked for without them."""
        self._wording: Options | None = options or (
            openai_options if _takes_openai_options(llm) else None
        )

    def __repr__(self) -> str:
        return f"LLMChat({type(self.llm).__name__}, model={self.name!r})"

    @property
    def endpoint(self) -> Endpoint | None:
        """The endpoint behind an `EndpointLLM`; None for any other."""
        return self.llm.endpoint if isinstance(self.llm, EndpointLLM) else None

    @property
    def name(self) -> str:
        """The model's name, or its class's where it has none."""
        if self.endpoint is not None:
            return self.endpoint.name
        named = self.llm.metadata.model_name
        return named if named and named != "unknown" else type(self.llm).__name__

    @property
    def own_retries(self) -> int:
        """How often an app's LLM tries again by itself, as far as it tells."""
        retries = getattr(self.llm, "max_retries", 0)
        return retries if self.endpoint is None and isinstance(retries, int) else 0

    @property
    def max_attempts(self) -> int:
        """The most HTTP requests one call may send."""
        if self.endpoint is not None:
            return self.endpoint.max_attempts
        # OpenAI's classes try anew around a client that does so as well.
        layers = max(1, self.own_retries) if _is_openai(self.llm) else 1
        # One more where log-probabilities are asked for and refused.
        return layers * (1 + self.own_retries) + (self._wording is not None)

    # ---------------------------------------------------------------- the ChatModel protocol

    async def chat(self, request: ChatRequest, *, step: Step) -> ChatReply:
        """Return the whole reply.

        Raises:
            EndpointError: an API failure or a time-out; what is neither is raised as itself.
        """
        sent, could_do_without = time.perf_counter(), self._asks_needlessly(request)
        try:
            written = await self._spanned(request, step, None)
        except EndpointRejectedError as refusal:
            if not could_do_without or not refuses_logprobs(refusal):
                raise
            # Reasoning models refuse log-probabilities, and a draft is worth something without.
            self._mute = True
            try:
                written = await self._spanned(request, step, None)
            except EndpointError as error:
                error.attempts += refusal.attempts
                raise
            reply = self._reply(written, request, time.perf_counter() - sent)
            return replace(reply, attempts=reply.attempts + refusal.attempts)
        return self._reply(written, request, time.perf_counter() - sent)

    async def stream(self, request: ChatRequest, *, step: Step) -> AsyncGenerator[ChatDelta, None]:
        """Yield the reply in pieces, otherwise as `chat`.

        An app's LLM is heard to the end first where nobody reads the pieces, and where its own loop
        is the caller's: they may be read from another one.
        """
        sent = time.perf_counter()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        # The span lasts as long as the writing: it cannot be that of a generator.
        writing = asyncio.create_task(self._spanned(request, step, pieces.put_nowait))
        writing.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield ChatDelta(text=piece)
            reply = self._reply(writing.result(), request, time.perf_counter() - sent)
            yield ChatDelta(reply=reply)
        finally:
            writing.cancel()
            await asyncio.wait([writing])
            if not writing.cancelled():
                writing.exception()  # seen, also where the reader left before it was raised

    async def capabilities(self) -> Capabilities | None:
        """Return what the server says of itself; None for an app's LLM."""
        told = await self.endpoint.capabilities() if self.endpoint else None
        if told is None or told.context_tokens is None:
            return told
        # No tokeniser makes more of the system prompt than it has bytes.
        taken = len((self.llm.system_prompt or "").encode())
        return replace(told, context_tokens=told.context_tokens - taken)

    async def probe(self, request: ChatRequest) -> ChatReply | None:
        """Send a trial request; None for an app's LLM."""
        return await self.endpoint.probe(request) if self.endpoint else None

    async def count_tokens(self, messages: Sequence[Message]) -> int | None:
        """Return a prompt's length by the server's tokeniser; None for an app's LLM."""
        return await self.endpoint.count_tokens(messages) if self.endpoint else None

    async def aclose(self) -> None:
        """Close an endpoint's connections; an app's LLM is the app's to close."""
        if self.endpoint is not None:
            await self.endpoint.aclose()

    # ---------------------------------------------------------------- copies

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return what can be pickled.

        Raises:
            pickle.PicklingError: it is an app's LLM, whose key would be written too.
        """
        if self.endpoint is None:
            raise pickle.PicklingError(
                f"{self.name}: {type(self.llm).__name__} would be pickled with its key; take an "
                "Endpoint, which leaves its own out, or make the engine anew where it is used"
            )
        return vars(self)

    # ---------------------------------------------------------------- spans, one for each step

    async def _spanned(
        self, request: ChatRequest, step: Step, emit: Callable[[str], None] | None
    ) -> ChatResponse:
        messages = chat_messages(request.messages)
        if self.endpoint is None:
            self._refuse_what_it_cannot(request)
        if step.kind in _FOR_A_READER and self.llm.system_prompt:
            system = ChatMessage(role=MessageRole.SYSTEM, content=self.llm.system_prompt)
            messages.insert(0, system)
        call = self._call(request, step, emit)
        try:
            written: ChatResponse = await getattr(self, step.kind)(step.index, messages, call)
        except Exception as error:
            ours = endpoint_error(
                error, model=self.name, messages=request.messages, secrets=secrets_of(self.llm)
            )
            if ours is None or ours is error:
                raise
            raise ours from error
        return written

    draft = _step("draft")
    verify = _step("verify")
    select = _step("select")
    refine = _step("refine")
    fallback = _step("fallback")

    # ---------------------------------------------------------------- requests and replies

    def _refuse_what_it_cannot(self, request: ChatRequest) -> None:
        """Send nothing that could tell nothing.

        Raises:
            EndpointError: the request is worth nothing without what an app's LLM cannot tell.
        """
        error: EndpointError | None = None
        if request.forced:
            error = EndpointRejectedError(f"{self.name} cannot be made to write a given text")
        elif request.needs_logprobs and self._wording is None:
            error = LogprobsUnavailableError(
                f"{self.name}: {type(self.llm).__name__} is not known to return log-probabilities; "
                "LLMChat(llm, options=…) tells how to ask for them"
            )
        if error is not None:
            error.attempts = 0
            raise error

    def _asks_needlessly(self, request: ChatRequest) -> bool:
        """Whether log-probabilities will be asked for that the request could do without."""
        wanted = request.top_logprobs is not None and not request.needs_logprobs
        return wanted and self._wording is not None and not self._mute

    def _call(self, request: ChatRequest, step: Step, emit: Callable[[str], None] | None) -> _Call:
        if self.endpoint is not None:
            return _Call(llm=self.llm, options=_intent(request), emit=emit)
        if self._mute and not request.needs_logprobs:
            request = replace(request, top_logprobs=None)
        options = dict(self._wording(request)) if self._wording else {}
        if not (_listened.get() and portal.here()):
            # Nobody reads the pieces as they come, and whole replies tell the tokens they cost.
            emit = None
        elif self._wording is openai_options and _counts_streams(self.llm):
            options["stream_options"] = {"include_usage": True}
        return _Call(llm=self._limited(request, step), options=options, emit=emit)

    def _limited(self, request: ChatRequest, step: Step) -> LLM:
        """Return the LLM, or a copy where its own `max_tokens` would outweigh a verification's.

        OpenAI's classes prefer their own to a call's, and would write on after the first token.
        """
        own = getattr(self.llm, "max_tokens", None) or 0
        judges = step.kind not in _FOR_A_READER
        if not (judges and _takes_openai_options(self.llm) and own > request.max_tokens):
            return self.llm
        if request.max_tokens not in self._copies:
            copied = self.llm.model_copy(update={"max_tokens": request.max_tokens})
            self._copies[request.max_tokens] = copied
        return self._copies[request.max_tokens]

    def _reply(self, written: ChatResponse, request: ChatRequest, seconds: float) -> ChatReply:
        if isinstance(written, EndpointResponse) and written.reply is not None:
            return written.reply
        choice = _first(_field(written.raw, "choices"))
        tokens = None
        if request.top_logprobs is not None:
            tokens = tokens_of(_field(choice, "logprobs"))
        if request.needs_logprobs and tokens is None:
            raise LogprobsUnavailableError(f"{self.name} returned no usable log-probabilities")
        return ChatReply(
            text=written.message.content or "",
            tokens=tokens,
            finish_reason=finish_reason_of(
                _field(choice, "finish_reason"),
                _field(written.raw, "stop_reason"),
                _field(written.raw, "done_reason"),
            ),
            count=_count(_field(written.raw, "usage")),
            model=self.name,
            seconds=seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of an LLM, in the way that fits its class and the loop it is called on."""

    llm: LLM
    options: Mapping[str, Any]
    emit: Callable[[str], None] | None
    """Takes the pieces of a stream; None: the reply is wanted whole."""

    def __repr__(self) -> str:
        return f"{type(self.llm).__name__}({dict(self.options)})"

    async def __call__(self, messages: Sequence[ChatMessage]) -> ChatResponse:
        if self.emit is None:
            return await self._whole(messages)
        return await self._streamed(messages, self.emit)

    async def _whole(self, messages: Sequence[ChatMessage]) -> ChatResponse:
        if not isinstance(self.llm, EndpointLLM) and (portal.here() or _is_sync_only(self.llm)):
            calling = partial(self.llm.chat, messages, **self.options)
            return await Threads(1).call(calling, name=type(self.llm).__name__)
        return await self.llm.achat(messages, **self.options)

    async def _streamed(
        self, messages: Sequence[ChatMessage], emit: Callable[[str], None]
    ) -> ChatResponse:
        text, last, ended = "", None, None
        try:
            async with aclosing(await self._responses(messages)) as responses:
                async for last in responses:
                    piece = last.delta
                    if piece is None:  # only the text so far
                        piece = (last.message.content or "")[len(text) :]
                    text += piece
                    emit(piece)
                    ended = last.raw if _field(last.raw, "choices") else ended
        except NotImplementedError:
            if text:
                raise
            return await self._whole(messages)  # a class that cannot stream
        if last is None:
            raise MalformedReplyError(f"{type(self.llm).__name__}: the stream holds no replies")
        if isinstance(last, EndpointResponse):
            return last
        written = ChatMessage(role=MessageRole.ASSISTANT, content=text)
        raw = last.raw
        if ended is not None and not _field(raw, "choices"):
            # The tokens used come in a chunk of their own, after the one that says why it ended.
            raw = {"choices": _field(ended, "choices"), "usage": _field(raw, "usage")}
        return last.model_copy(update={"message": written, "raw": raw})

    async def _responses(
        self, messages: Sequence[ChatMessage]
    ) -> AsyncGenerator[ChatResponse, None]:
        if isinstance(self.llm, EndpointLLM):
            stream: AsyncGenerator[ChatResponse, None]
            stream = await self.llm.astream_chat(messages, **self.options)
            return stream
        calling = partial(self.llm.stream_chat, messages, **self.options)
        return Threads(1).each(calling, name=type(self.llm).__name__)


def _is_sync_only(llm: LLM) -> bool:
    """Whether `achat` would block the loop: `CustomLLM`'s calls `chat`."""
    inherited = inspect.getattr_static(CustomLLM, "achat")
    return isinstance(llm, CustomLLM) and inspect.getattr_static(type(llm), "achat") is inherited


def _takes_openai_options(llm: LLM) -> bool:
    # As a completion model it takes others of the same names.
    return _is_openai(llm) and llm.metadata.is_chat_model


def _is_openai(llm: LLM) -> bool:
    return any(
        kind.__name__ in _OPENAI and kind.__module__.startswith(_PACKAGES)
        for kind in type(llm).__mro__
    )


def _counts_streams(llm: LLM) -> bool:
    """Whether it is known to take the request to tell the tokens of a stream.

    OpenAI's own class speaks to OpenAI; others inherit from it, for servers that may refuse it.
    """
    return type(llm).__name__ == "OpenAI" and _takes_openai_options(llm)


def _intent(request: ChatRequest) -> dict[str, Any]:
    """Return a request as an `EndpointLLM` takes it: what differs from a plain one."""
    plain = ChatRequest(messages=(), max_tokens=0)
    named = (field.name for field in fields(request) if field.name != "messages")
    told = {name: getattr(request, name) for name in named}
    kept = {name: value for name, value in told.items() if value != getattr(plain, name)}
    return {"temperature": request.temperature, **kept}


def _field(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _first(value: object) -> object:
    return value[0] if isinstance(value, Sequence) and value else None


def _count(usage: object) -> TokenCount:
    def told(*names: str) -> int | None:
        found = (_field(usage, name) for name in names)
        return next((count for count in found if isinstance(count, int)), None)

    return TokenCount(
        prompt=told("prompt_tokens", "input_tokens"),
        completion=told("completion_tokens", "output_tokens"),
    )
