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
from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import WeakValueDictionary

from langchain_core.messages import AIMessageChunk
from langchain_core.runnables import Runnable

from specrag_integrations.endpoint import Endpoint
from specrag_integrations.errors import (
    ConfigurationError,
    EndpointError,
    EndpointRejectedError,
    LogprobsUnavailableError,
)
from specrag_integrations.foreign import endpoint_error, refuses_logprobs
from specrag_integrations.langchain.call import SHOWN, Call, current_call
from specrag_integrations.langchain.chat_model import EndpointChat
from specrag_integrations.langchain.model_options import (
    Options,
    checked_options,
    counts_streams,
    is_foreign,
    leaves,
    most_attempts,
    options_for,
    secrets_within,
    takes_stream,
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
_MOST_ASKINGS = 2
"""With an option, and without it where it was refused."""


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
        self._given = options  # kept alive: `runnable_chat` knows it by its id
        self._options = options_for(runnable, checked_options(options))
        models = list(leaves(runnable))
        ours = [model for model in models if isinstance(model, EndpointChat)]
        self.is_foreign = is_foreign(runnable)
        """Whether an application's own model may answer."""
        self._endpoint = _only(ours) if not self.is_foreign else None
        self._name = self._endpoint.name if self._endpoint else _name_of(runnable, models[0])
        warn_of_retries(runnable, self._name)
        self._takes_stream = takes_stream(runnable)
        self._counts_streams = counts_streams(runnable)
        """Whether a stream is asked for its tokens' number, until that is refused."""
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
        # One more where log-probabilities, or the number of a stream's tokens, are refused.
        spare = self.is_foreign and (self._options is not None or self._counts_streams)
        return most_attempts(self.runnable) + spare

    async def chat(self, request: ChatRequest, *, step: Step) -> ChatReply:
        """Return the whole reply.

        Raises:
            EndpointError: the model's server failed, or has no log-probabilities where nothing else
                counts. Anything else that the model raises is raised as itself.
        """
        call = current_call() or Call()
        async with call.slot():
            started = time.perf_counter()
            for refused in range(_MOST_ASKINGS):
                options = self._wanted(request)
                try:
                    self._check(request)
                    message = await self._ask(request, step, call, options)
                    break
                except EndpointError as error:
                    if not self._learns_from(error, options, refused):
                        raise
            return self._reply(message, started, refused)

    async def stream(self, request: ChatRequest, *, step: Step) -> AsyncIterator[ChatDelta]:
        """Yield pieces of the reply; the last delta carries it whole.

        Raises:
            EndpointError: as `chat`.
        """
        call = current_call() or Call()
        async with call.slot():
            started, whole = time.perf_counter(), None
            for refused in range(_MOST_ASKINGS):
                options = self._wanted(request, streamed=self._streams(call))
                try:
                    async with aclosing(self._pieces(request, step, call, options)) as pieces:
                        async for piece in pieces:
                            whole = _added(whole, piece)
                            if text := _text(piece):
                                yield ChatDelta(text=text)
                    break
                except EndpointError as error:
                    if not self._learns_from(error, options, refused) or whole is not None:
                        raise
            if whole is None:
                return
            if step.kind in SHOWN:
                call.message_id = getattr(whole, "id", None)
            reply = self._reply(whole, started, refused)
        yield ChatDelta(reply=reply)

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

    async def _ask(
        self, request: ChatRequest, step: Step, call: Call, options: Mapping[str, Any]
    ) -> object:
        asked = (to_langchain(request.messages), call.child(step))
        with self._translated(request):
            if self._in_thread:
                invoke = partial(self.runnable.invoke, *asked, **options)
                return await call.threads.call(invoke, name=str(step))
            return await self._on_this_loop(partial(self.runnable.ainvoke, *asked, **options))

    async def _pieces(
        self, request: ChatRequest, step: Step, call: Call, options: Mapping[str, Any]
    ) -> AsyncGenerator[object, None]:
        if not self._streams(call):
            yield await self._ask(request, step, call, options)
            return
        asked = (to_langchain(request.messages), call.child(step))
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

    def _streams(self, call: Call) -> bool:
        """Whether an answer is streamed: some clients tell tokens only of what is not."""
        return call.streams or not self.is_foreign

    def _wanted(self, request: ChatRequest, *, streamed: bool = False) -> Mapping[str, Any]:
        known = None if self._refuses else self._options
        options = {} if known is None else known(request)
        if streamed:
            return {**options, "stream_usage": True} if self._counts_streams else options
        # Where every token has a listener, LangChain would stream drafts as well.
        return {**options, "stream": False} if self._takes_stream else options

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

    def _learns_from(self, error: EndpointError, options: Mapping[str, Any], refused: int) -> bool:
        """Whether an option that was sent is refused: it is never sent again, and all else once.

        Other requests with it may be under way, and fail after it is known.
        """
        error.attempts += refused
        if not self.is_foreign or refused:
            return False
        told = any("logprob" in name for name in options) and refuses_logprobs(error)
        uncounted = (
            "stream_usage" in options
            and isinstance(error, EndpointRejectedError)
            and "stream_options" in str(error)
        )
        self._refuses |= told
        self._counts_streams &= not uncounted
        return told or uncounted

    def _reply(self, message: object, started: float, refused: int) -> ChatReply:
        seconds = time.perf_counter() - started
        reply = reply_of(message, name=self.name, seconds=seconds)
        return replace(reply, attempts=reply.attempts + refused)

    @contextmanager
    def _translated(self, request: ChatRequest) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            known = endpoint_error(
                error,
                model=self.name,
                messages=request.messages,
                secrets=secrets_within(self.runnable),
            )
            if known is None or known is error:
                raise
            raise known from error


_KNOWN: WeakValueDictionary[tuple[int, int], RunnableChat] = WeakValueDictionary()


def runnable_chat(runnable: Runnable[Any, Any], options: Options | None) -> RunnableChat:
    """Return a Runnable as a ChatModel, the same one for as long as a chain has it.

    Configurable fields make a chain anew for every call, and what was learnt of its models is not
    to be forgotten.
    """
    # It keeps what it was made of, so that no other object has these ids while it is known.
    key = id(runnable), id(options)
    known = _KNOWN.get(key)
    if known is None:
        known = _KNOWN[key] = RunnableChat(runnable, options=options)
    return known


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
    hint = ""
    if isinstance(model, str):
        hint = f"; write {'Endpoint' if '://' in model else 'init_chat_model'}({model!r})"
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
