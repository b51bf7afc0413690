"""RunnableChat: any chat model of LangChain as a `ChatModel`, the seam to the core."""

from __future__ import annotations

import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, cast

from langchain_core.messages import AIMessageChunk
from langchain_core.runnables import Runnable

from specrag_integrations.endpoint import Endpoint
from specrag_integrations.errors import (
    ConfigurationError,
    EndpointRejectedError,
    LogprobsUnavailableError,
)
from specrag_integrations.foreign import endpoint_error
from specrag_integrations.langchain.call import SHOWN, Call, current_call
from specrag_integrations.langchain.chat_model import EndpointChat
from specrag_integrations.langchain.model_options import (
    Options,
    checked_options,
    is_foreign,
    leaves,
    most_attempts,
    options_for,
    warn_of_retries,
)
from specrag_integrations.langchain.replies import reply_of
from specrag_integrations.langchain.turns import to_langchain
from specrag_integrations.models import (
    Capabilities,
    ChatDelta,
    ChatReply,
    ChatRequest,
    Message,
    Step,
)
from specrag_integrations.portal import portal

_DEAD_CONNECTIONS = 100
"""The most idle connections that OpenAI's clients keep, and so the most that may be dead."""


class RunnableChat:
    """A LangChain chat model, or a Runnable that ends in one, as the core's `ChatModel`.

    An `EndpointChat` is asked on any loop. A model of the application is never driven from our
    background loop, to which its connections do not belong: asynchronous questions await it where
    they run, synchronous ones call it in a thread.

    Args:
        runnable: From messages to an `AIMessage`: a chat model, bound, configurable, with retries
            or fallbacks, or a chain.
        options: How it is asked for log-probabilities, where its class is not known to take
            OpenAI's options: `"openai"`, or a function from a `ChatRequest` to keyword arguments.

    Raises:
        ConfigurationError: it is no Runnable, or there are no such options.
    """

    def __init__(self, runnable: Runnable[Any, Any], *, options: Options | None = None) -> None:
        if not isinstance(runnable, Runnable):
            raise ConfigurationError(
                f"a {type(runnable).__name__} is no Runnable; give a chat model of LangChain"
            )
        self.runnable = runnable
        self._options = options_for(runnable, checked_options(options))
        models = list(leaves(runnable))
        ours = [model for model in models if isinstance(model, EndpointChat)]
        self.is_foreign = is_foreign(runnable)
        """Whether an application's own model may answer."""
        self._endpoint = _only(ours) if not self.is_foreign else None
        self._name = self._endpoint.name if self._endpoint else _name_of(runnable, models[0])
        warn_of_retries(runnable, self._name)
        self._refuses = False
        """Whether it was seen to refuse log-probabilities."""

    def __repr__(self) -> str:
        return f"RunnableChat({self.name!r})"

    @property
    def name(self) -> str:
        """The model's name where it tells one."""
        return self._endpoint.name if self._endpoint else self._name

    @property
    def max_attempts(self) -> int:
        """The most HTTP requests one call may send, as far as the model tells."""
        return most_attempts(self.runnable)

    async def chat(self, request: ChatRequest, *, step: Step) -> ChatReply:
        """Return the whole reply.

        Raises:
            EndpointError: the model's server failed, or has no log-probabilities where nothing else
                counts. Anything else that the model raises is raised as itself.
        """
        self._check(request)
        call = current_call() or Call()
        async with call.slot():
            started = time.perf_counter()
            try:
                message = await self._ask(request, step, call)
            except EndpointRejectedError as error:
                if not self._learns_from(error, request):
                    raise
                self._check(request)
                message = await self._ask(request, step, call)
            return reply_of(message, name=self.name, seconds=time.perf_counter() - started)

    async def stream(self, request: ChatRequest, *, step: Step) -> AsyncIterator[ChatDelta]:
        """Yield pieces of the reply; the last delta carries it whole.

        Raises:
            EndpointError: as `chat`.
        """
        call = current_call() or Call()
        async with call.slot():
            started, whole = time.perf_counter(), None
            async with aclosing(self._pieces(request, step, call)) as pieces:
                async for piece in pieces:
                    whole = _added(whole, piece)
                    if text := _text(piece):
                        yield ChatDelta(text=text)
            if whole is None:
                return
            if step.kind in SHOWN:
                call.message_id = getattr(whole, "id", None)
            seconds = time.perf_counter() - started
        yield ChatDelta(reply=reply_of(whole, name=self.name, seconds=seconds))

    async def capabilities(self) -> Capabilities | None:
        """Return what the server of an `EndpointChat` says of itself; None for any other model."""
        return await self._endpoint.capabilities() if self._endpoint else None

    async def probe(self, request: ChatRequest) -> ChatReply | None:
        """Send a trial request to the server of an `EndpointChat`; it is no run of the question."""
        return await self._endpoint.probe(request) if self._endpoint else None

    async def count_tokens(self, messages: Sequence[Message]) -> int | None:
        """Return a prompt's length by the tokeniser of an `EndpointChat`; None for any other."""
        return await self._endpoint.count_tokens(messages) if self._endpoint else None

    async def aclose(self) -> None:
        """Close the connections of an `EndpointChat`; any other model is the application's."""
        if self._endpoint:
            await self._endpoint.aclose()

    async def _ask(self, request: ChatRequest, step: Step, call: Call) -> object:
        asked = (to_langchain(request.messages), call.child(step))
        options = self._wanted(request)
        with self._translated(request):
            if self._in_thread:
                invoke = partial(self.runnable.invoke, *asked, **options)
                return await call.threads.call(invoke, name=str(step))
            return await self._on_this_loop(partial(self.runnable.ainvoke, *asked, **options))

    async def _pieces(
        self, request: ChatRequest, step: Step, call: Call
    ) -> AsyncGenerator[object, None]:
        asked = (to_langchain(request.messages), call.child(step))
        options = self._wanted(request, streamed=True)
        if self._in_thread:
            pieces: Any = call.threads.each(
                partial(self.runnable.stream, *asked, **options), name=str(step)
            )
        else:
            pieces = self._streamed_on_this_loop(partial(self.runnable.astream, *asked, **options))
        with self._translated(request):
            async with aclosing(pieces):
                async for piece in pieces:
                    yield piece

    async def _on_this_loop(self, ask: Callable[[], Awaitable[object]]) -> object:
        """Ask until it goes through a connection that belongs to this loop.

        Clients of an application keep their connections, and where it runs one event loop after
        the other, those of the last fail. Each that fails is thrown away by its client.
        """
        for _ in range(_DEAD_CONNECTIONS):
            try:
                return await ask()
            except Exception as error:
                if not _came_from_a_closed_loop(error):
                    raise
        return await ask()

    async def _streamed_on_this_loop(
        self, ask: Callable[[], AsyncIterator[object]]
    ) -> AsyncGenerator[object, None]:
        """As `_on_this_loop`, up to the first piece."""
        for attempt in range(_DEAD_CONNECTIONS + 1):
            began = False
            try:
                async with aclosing(cast("AsyncGenerator[object, None]", ask())) as pieces:
                    async for piece in pieces:
                        began = True
                        yield piece
            except Exception as error:
                last = attempt == _DEAD_CONNECTIONS
                if began or last or not _came_from_a_closed_loop(error):
                    raise
            else:
                return

    @property
    def _in_thread(self) -> bool:
        return self.is_foreign and portal.here()

    def _wanted(self, request: ChatRequest, *, streamed: bool = False) -> Mapping[str, Any]:
        if self._options is None or self._refuses:
            return {}
        options = self._options(request)
        # Where every token has a listener, LangChain would stream drafts as well.
        return options if self.is_foreign or streamed else {**options, "stream": False}

    def _check(self, request: ChatRequest) -> None:
        """Refuse what would be worth nothing, before it is paid for."""
        lacks = self._options is None or self._refuses
        if (request.needs_logprobs and lacks) or (request.forced and self.is_foreign):
            error = LogprobsUnavailableError(
                f"{self.name} is not known to return log-probabilities; where it does, say how "
                "with options=",
                model=self.name,
            )
            error.attempts = 0
            raise error

    def _learns_from(self, error: EndpointRejectedError, request: ChatRequest) -> bool:
        """Whether a refusal is of log-probabilities, which are then never asked for again."""
        asked = self.is_foreign and "logprobs" in self._wanted(request)
        self._refuses = self._refuses or (asked and "logprobs" in str(error))
        return asked and self._refuses

    @contextmanager
    def _translated(self, request: ChatRequest) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            known = endpoint_error(error, model=self.name, messages=request.messages)
            if known is None or known is error:
                raise
            raise known from error


def _came_from_a_closed_loop(error: BaseException | None) -> bool:
    """Whether a connection failed because the event loop that opened it has ended."""
    while error is not None:
        if isinstance(error, RuntimeError) and "Event loop is closed" in str(error):
            return True
        error = error.__cause__
    return False


def as_runnable(role: str, model: object) -> Runnable[Any, Any]:
    """Return a drafter or verifier as a Runnable: an `Endpoint` becomes an `EndpointChat`.

    Raises:
        ConfigurationError: it is neither.
    """
    if isinstance(model, Endpoint):
        return EndpointChat(endpoint=model)
    if isinstance(model, Runnable):
        return model
    hint = f"; write init_chat_model({model!r})" if isinstance(model, str) else ""
    raise ConfigurationError(
        f"{role} must be an Endpoint or a chat model of LangChain, not a "
        f"{type(model).__name__}{hint}"
    )


def _only(models: Sequence[EndpointChat]) -> Endpoint | None:
    """Return the one endpoint behind some models; None where they are several."""
    endpoints = {id(model.endpoint): model.endpoint for model in models}
    return next(iter(endpoints.values())) if len(endpoints) == 1 else None


def _name_of(runnable: Runnable[Any, Any], model: object) -> str:
    told = (getattr(model, name, None) for name in ("model_name", "model", "model_id"))
    return next((name for name in told if isinstance(name, str) and name), runnable.get_name())


def _added(whole: object, piece: object) -> object:
    """Add a piece to what has come; only chunks and strings can be, else the last one counts."""
    for kind in (AIMessageChunk, str):
        if isinstance(whole, kind) and isinstance(piece, kind):
            return cast("Any", whole) + piece
    return piece


def _text(piece: object) -> str:
    return piece if isinstance(piece, str) else str(getattr(piece, "text", ""))
