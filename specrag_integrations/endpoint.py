"""Endpoint: an OpenAI-compatible chat server, and the only HTTP of the package."""

from __future__ import annotations

import asyncio
import atexit
import copy
import json
import logging
import os
import pickle
import time
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from specrag_integrations.credentials import (
    ApiKey,
    Key,
    checked_headers,
    key_from_environment,
    scrubbed,
    split_address,
)
from specrag_integrations.dialect import Dialect
from specrag_integrations.errors import (
    ConfigurationError,
    EndpointError,
    EndpointRejectedError,
    EndpointTimeoutError,
    EndpointUnavailableError,
    LogprobsUnavailableError,
    MalformedReplyError,
)
from specrag_integrations.failures import failure_of, words_of
from specrag_integrations.models import (
    Capabilities,
    ChatDelta,
    ChatReply,
    ChatRequest,
    Message,
    Step,
)
from specrag_integrations.options import check_json, checked_positive, checked_whole
from specrag_integrations.portal import portal
from specrag_integrations.replies import (
    Collected,
    Json,
    mapping,
    read_capabilities,
    read_reply,
    read_scored,
    spans_disagree,
)
from specrag_integrations.retries import with_retries
from specrag_integrations.wording import Wording, is_whole, spellings, template_options

if TYPE_CHECKING:
    from openai import AsyncOpenAI

ClientFactory = Callable[..., "AsyncOpenAI"]
log = logging.getLogger("specrag_integrations")

_CONNECT_SECONDS = 5.0
_EXIT_SECONDS = 1.0
_NO_SUCH_ROUTE = {400, 403, 404, 405}
"""Answers of a server that will never list its models; any other failure may pass."""
_ADAPTATIONS = 8
"""How often a trial request may be refused: it finds out what a server takes, field by field."""
_VERSIONS = {
    "vllm": ("/version", "version"),
    "llama.cpp": ("/props", "build_info"),
    "sglang": ("/get_server_info", "version"),
}
"""Server: the route that tells its version, and the field."""
_SAID_NO = {400, 422}
"""Refusals of a trial request that stay; a wrong key or a model still loading may pass."""
_STAND_INS = ("0", "Z", "#")
"""What stands for a message's text while its place in a prompt is looked for."""


@dataclass(slots=True)
class _Lookup:
    """`/models` being asked; those who come meanwhile share the outcome."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    failures: int = 0
    error: EndpointError | None = None


@dataclass(slots=True)
class _Trial:
    """A trial request under way."""

    task: asyncio.Task[ChatReply]
    waiting: int = 0
    """Questions that wait for it; nobody's trial is not sent again."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Connection:
    """What belongs to one event loop: the pooled client and the concurrency limit."""

    loop: asyncio.AbstractEventLoop
    client: AsyncOpenAI
    slots: asyncio.Semaphore
    lookup: _Lookup = field(default_factory=_Lookup)
    trials: dict[ChatRequest, _Trial] = field(default_factory=dict)
    """Trial requests under way: those who come meanwhile share the outcome."""

    async def end_trials(self) -> None:
        """Cancel what is under way for questions to come."""
        tasks = [trial.task for trial in self.trials.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Endpoint:
    """A chat model behind an OpenAI-compatible URL: vLLM, SGLang, llama.cpp, OpenAI and others.

    All I/O runs on one background loop, so that one client, one connection pool and one concurrency
    limit serve every thread and event loop of the process (a new one after a fork).

    Args:
        base_url: With or without `/v1`, e.g. `http://gpu:8000`. A user and password in it are sent
            as a header and never shown, its query with every request; the HTTP library logs URLs,
            so that a key belongs into `api_key` or `headers`.
        model: The served name; None asks `/v1/models` and takes the only one.
        api_key: A string, or a sync or async callable asked before each request.
        headers: Sent with every request; never shown.
        extra_body: Merged into the body of every chat request, e.g. `chat_template_kwargs`.
        request_timeout: Seconds one HTTP request may take, before a retry; of a streamed one, the
            longest silence.
        max_concurrency: The most HTTP requests under way at once.
        max_attempts: The most HTTP requests for one call; 429, 5xx, time-outs and lost
            connections are tried again, after `Retry-After` where the server sends one.
        client_factory: Called with the keyword arguments of `openai.AsyncOpenAI`, returns a client:
            the place for proxies, TLS and Azure, e.g. `lambda **_: AsyncAzureOpenAI(...)`.

    Raises:
        ConfigurationError: an argument can never work.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: ApiKey | None = None,
        headers: Mapping[str, str] | None = None,
        extra_body: Mapping[str, Any] | None = None,
        request_timeout: float = 60.0,
        max_concurrency: int = 32,
        max_attempts: int = 3,
        client_factory: ClientFactory | None = None,
    ) -> None:
        self.base_url, query, credentials = split_address(base_url)
        if model is not None and not (isinstance(model, str) and model.strip()):
            raise ConfigurationError(f"model={model!r} must be a served model's name, or None")
        if client_factory is not None and not callable(client_factory):
            raise ConfigurationError(
                f"client_factory must be a callable that returns an openai.AsyncOpenAI, not a "
                f"{type(client_factory).__name__}"
            )
        self.model = model
        self.request_timeout = checked_positive("request_timeout", request_timeout)
        self.max_concurrency = checked_whole("max_concurrency", max_concurrency)
        self._max_attempts = checked_whole("max_attempts", max_attempts)
        self._key = Key(api_key)
        self._headers = credentials | checked_headers({} if headers is None else headers)
        self._query = query
        self._extra_body = _checked_body({} if extra_body is None else extra_body)
        self._client_factory = client_factory
        self._served: str | None = model
        self._listed: list[Json] | None = None
        self._capabilities: Capabilities | None = None
        self._dialect = Dialect()
        self._label_ids: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._span_check: str | None = None
        self._trials: dict[ChatRequest, ChatReply | EndpointRejectedError] = {}
        self._connection: _Connection | None = None
        self._closing: weakref.finalize[..., Endpoint] | None = None

    def __repr__(self) -> str:
        return f"Endpoint({self.base_url!r}, model={self._served!r})"

    def __copy__(self) -> Self:
        """Return this very endpoint: a copy's own connections would go beyond the limit."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """As `__copy__`."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the options without the key: the copy reads `SPECRAG_API_KEY`.

        Raises:
            PicklingError: there are headers or a query, which may hold secrets.
        """
        if self._headers or self._query:
            raise pickle.PicklingError(
                f"{self!r} has {'headers' if self._headers else 'a query in its URL'}, which may "
                "hold secrets and are never pickled; make the endpoint where it is used"
            )
        return _unpickled, (type(self), self.options, self._key.is_set)

    @property
    def name(self) -> str:
        """The model's name where it is known, else the address."""
        return self._served or self.base_url

    @property
    def max_attempts(self) -> int:
        """The most HTTP requests one call may send."""
        return self._max_attempts

    @property
    def has_key(self) -> bool:
        """Whether it sends a key."""
        return self._key.is_set

    @property
    def options(self) -> dict[str, Any]:
        """What it was made with, but for the key, headers and the URL's query."""
        return {
            "base_url": self.base_url,
            "model": self.model,
            "extra_body": dict(self._extra_body),
            "request_timeout": self.request_timeout,
            "max_concurrency": self.max_concurrency,
            "max_attempts": self._max_attempts,
            "client_factory": self._client_factory,
        }

    # ---------------------------------------------------------------- the ChatModel protocol

    async def chat(self, request: ChatRequest, *, step: Step) -> ChatReply:  # noqa: ARG002
        """Send one chat request and return the whole reply.

        Raises:
            EndpointError: with the server's own message, after the attempts allowed.
        """
        return await portal.hop(self._chat(request))

    def stream(
        self,
        request: ChatRequest,
        *,
        step: Step,  # noqa: ARG002 - names traces, and HTTP has none
    ) -> AsyncIterator[ChatDelta]:
        """Yield the reply in pieces; only the time before the first piece is ever retried.

        Raises:
            EndpointError: as `chat`.
        """
        return portal.hop_each(self._stream(request))

    async def capabilities(self) -> Capabilities:
        """Ask `/v1/models` once what the server says of itself; unknown where it says nothing."""
        return await portal.hop(self._learn_capabilities())

    async def probe(self, request: ChatRequest) -> ChatReply:
        """Send a trial request, the same one only once, whoever asks.

        Raises:
            EndpointError: as `chat`; a refusal is remembered, a failure that may pass is not.
        """
        return await portal.hop(self._probe(request))

    async def version(self) -> str | None:
        """Return the server's version where it has a route that tells (vLLM, llama.cpp, SGLang)."""
        return await portal.hop(self._version())

    async def count_tokens(self, messages: Sequence[Message]) -> int | None:
        """Return the length in tokens of the templated prompt, by the server's own tokeniser.

        vLLM's `/tokenize` and llama.cpp's `/apply-template` are known; None elsewhere.
        """
        return await portal.hop(self._count_tokens(messages))

    async def aclose(self) -> None:
        """Close the connections; the next call opens new ones."""
        await portal.hop(self._disconnect())

    def close(self) -> None:
        """Close the connections, from synchronous code."""
        portal.run(self._disconnect())

    # ---------------------------------------------------------------- on the portal's loop

    async def _chat(
        self,
        request: ChatRequest,
        *,
        adaptations: int = 0,
        wanted: Callable[[], bool] = lambda: True,
    ) -> ChatReply:
        """Send a request until it is answered, or not `wanted` any more."""
        started = time.perf_counter()
        wording = await self._ready(request)
        asked = request

        async def send() -> ChatReply:
            nonlocal asked
            try:
                data = await self._post_chat(asked, wording)
            except EndpointError as error:
                lacking = isinstance(error, LogprobsUnavailableError)
                if lacking and asked.top_logprobs is not None and not request.needs_logprobs:
                    asked = replace(asked, top_logprobs=None)
                    error.retryable, error.retry_after = True, 0.0
                error.retryable = error.retryable and wanted()
                raise
            reply = read_reply(data, asked, endpoint=self.base_url)
            return await self._checked_span(reply, data, asked) if reply.scored else reply

        reply, sent = await with_retries(self._max_attempts, send, adaptations=adaptations)
        return replace(reply, seconds=time.perf_counter() - started, attempts=sent)

    async def _ready(self, request: ChatRequest) -> Wording:
        """Learn what the wording of a request depends on, the model's name first of all."""
        try:
            if request.needs_logprobs or not request.think:
                await self._learn_capabilities()
            model = await self._model_name()
            return Wording(
                model=model,
                server=self._server,
                dialect=self._dialect,
                extra_body=self._extra_body,
                label_ids=await self._ids_of_labels(request.labels, model),
                forced_ids=await self._ids_of_forced(request.forced),
            )
        except EndpointError as error:
            error.attempts = 0  # nothing was generated yet
            raise

    async def _post_chat(self, request: ChatRequest, wording: Wording) -> Json:
        async with self._turn() as client:
            body = wording.body(request)
            with self._translated(body):
                posted = client.post("/chat/completions", cast_to=object, body=body)
                return await self._json(posted, body)

    async def _probe(self, request: ChatRequest) -> ChatReply:
        if request not in self._trials:
            await self._ready(request)
        under_way = (await self._connect()).trials
        outcome = self._trials.get(request)  # others may have been quicker
        if isinstance(outcome, EndpointRejectedError):
            raise copy.copy(outcome) from outcome
        if outcome is not None:
            return outcome
        if request not in under_way:
            task = asyncio.create_task(self._try(request, under_way))
            task.add_done_callback(_seen)
            under_way[request] = _Trial(task)
        trial = under_way[request]
        trial.waiting += 1
        try:
            # It outlives a question that has no time for it, since the next one needs it as well.
            return await asyncio.shield(trial.task)
        finally:
            trial.waiting -= 1

    async def _try(self, request: ChatRequest, under_way: dict[ChatRequest, _Trial]) -> ChatReply:
        try:
            self._trials[request] = reply = await self._chat(
                request, adaptations=_ADAPTATIONS, wanted=lambda: under_way[request].waiting > 0
            )
        except EndpointRejectedError as error:
            if error.status_code in _SAID_NO:
                self._trials[request] = error
            raise
        finally:
            del under_way[request]
        return reply

    async def _checked_span(self, reply: ChatReply, data: Json, request: ChatRequest) -> ChatReply:
        """Believe in spans found by their text once the server's tokeniser has confirmed one."""
        check = self._span_check
        if check is None:
            check, lasting = await self._compare_span(data, request)
            self._span_check = check if lasting else None
        believed = None if ", but " in check else reply.scored
        return replace(reply, scored=believed, scored_evidence=f"{reply.scored_evidence}{check}")

    async def _compare_span(self, data: Json, request: ChatRequest) -> tuple[str, bool]:
        """Return what the tokeniser says of a span, and whether it would say so again."""
        scored, index = read_scored(data, request), request.score_message
        assert scored is not None and index is not None  # noqa: S101, PT018 - narrows the types
        turns = [message.to_dict() for message in request.messages]
        changed = [*turns]
        text = turns[index]["content"]
        # It must not share its first or last token with the text, or it would hide that.
        other_text = next(c for c in _STAND_INS if c not in {text[:1].upper(), text[-1:].upper()})
        changed[index] = {**turns[index], "content": other_text}
        try:
            whole, other = (
                await self._tokenized(turns, request),
                await self._tokenized(changed, request),
            )
        except (EndpointError, KeyError, TypeError) as error:
            passing = isinstance(error, EndpointError) and error.retryable
            return f" (not cross-checked: {type(error).__name__} from /tokenize)", not passing
        disagreement = spans_disagree(scored, whole, other)
        return f", but {disagreement}" if disagreement else ", confirmed by /tokenize", True

    async def _tokenized(self, turns: Sequence[Json], request: ChatRequest) -> list[int]:
        """Return a conversation's token ids by vLLM's tokeniser."""
        body = {"model": await self._model_name(), "messages": turns}
        body |= template_options(request, self._server, self._extra_body)
        tokens: list[int] = (await self._post_root("/tokenize", body))["tokens"]
        return tokens

    async def _ids_of_labels(self, labels: tuple[str, ...], model: str) -> tuple[int, ...]:
        """Return the ids of the labels' spellings that are one token each; vLLM's only."""
        if not labels or self._server != "vllm" or "logprob_token_ids" in self._dialect.refused:
            return ()
        if labels not in self._label_ids:
            ids: dict[int, None] = {}
            try:
                for label in labels:
                    for spelled in spellings(label):
                        body = {"model": model, "prompt": spelled, "add_special_tokens": False}
                        tokens = (await self._post_root("/tokenize", body))["tokens"]
                        ids |= dict.fromkeys(tokens if len(tokens) == 1 else ())
            except (EndpointError, KeyError, TypeError) as error:
                log.info("%s: no ids of labels: %s", self.base_url, type(error).__name__)
                if isinstance(error, EndpointError) and error.retryable:
                    return ()
                ids = {}
            self._label_ids[labels] = tuple(ids)
        return self._label_ids[labels]

    async def _ids_of_forced(self, text: str) -> tuple[int, ...]:
        """Return the ids of the one text that may be written; llama.cpp's only.

        Raises:
            EndpointRejectedError: the server is not known to be one that can be forced.
            LogprobsUnavailableError: it would not tell the log-probability of all tokens.
        """
        if not text:
            return ()
        if self._server != "llama.cpp":
            raise EndpointRejectedError(
                f"{self.base_url}: only llama.cpp's server can be made to write a given text",
                endpoint=self.base_url,
                model=self._served,
            )
        body = {"content": text, "add_special": False, "parse_special": False, "with_pieces": True}
        tokens = (await self._post_root("/tokenize", body)).get("tokens") or []
        whole: list[int] = [token["id"] for token in tokens if is_whole(token)]
        if len(whole) < len(tokens):
            raise LogprobsUnavailableError(
                f"{self.base_url}: {len(tokens) - len(whole)} of the text's {len(tokens)} tokens "
                "are parts of a character, for which llama.cpp returns no log-probability",
                endpoint=self.base_url,
                model=self._served,
            )
        return tuple(whole)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[AsyncOpenAI]:
        """Wait for a place under the concurrency limit, and hold it."""
        connection = await self._connect()
        async with connection.slots:
            yield connection.client

    async def _stream(self, request: ChatRequest) -> AsyncGenerator[ChatDelta, None]:
        started = time.perf_counter()
        wording = await self._ready(request)
        collected = Collected()
        async with aclosing(self._chunks(request, wording, collected)) as chunks:
            async for chunk in chunks:
                if piece := collected.add(chunk):
                    yield ChatDelta(text=piece)
        reply = read_reply(collected.as_reply(), request, endpoint=self.base_url)
        seconds = time.perf_counter() - started
        yield ChatDelta(reply=replace(reply, seconds=seconds, attempts=collected.attempts))

    async def _chunks(
        self, request: ChatRequest, wording: Wording, collected: Collected
    ) -> AsyncGenerator[Json, None]:
        sent = {"messages": [message.to_dict() for message in request.messages]}
        async with AsyncExitStack() as held:

            async def begin() -> tuple[Any, Json]:
                # A failed attempt keeps nothing: neither its place nor its connection.
                async with AsyncExitStack() as opened:
                    client = await opened.enter_async_context(self._turn())
                    chunks = await self._open_stream(client, request, wording)
                    opened.push_async_callback(chunks.close)
                    first = await self._next_chunk(chunks, sent)
                    if first is None:
                        raise MalformedReplyError(
                            f"{self.base_url}: the streamed reply holds no events; "
                            "is this an OpenAI-compatible URL?",
                            endpoint=self.base_url,
                            model=self._served,
                        )
                    await held.enter_async_context(opened.pop_all())
                    return chunks, first

            (chunks, first), collected.attempts = await with_retries(self._max_attempts, begin)
            chunk: Json | None = first
            try:
                while chunk is not None:
                    yield chunk
                    chunk = await self._next_chunk(chunks, sent)
            except EndpointError as error:
                error.attempts = collected.attempts
                raise

    async def _open_stream(
        self, client: AsyncOpenAI, request: ChatRequest, wording: Wording
    ) -> Any:  # AsyncStream[object]; its class is only importable with openai itself
        from openai import AsyncStream

        body = wording.body(request) | {"stream": True}
        if "stream_options" not in self._dialect.refused:
            body["stream_options"] = {"include_usage": True}
        # llama.cpp closes the socket after a stream although it announced keep-alive; a pooled
        # connection would then fail under the next request.
        options: Any = {"headers": {"Connection": "close"}}
        with self._translated(body):
            async with asyncio.timeout(self.request_timeout):
                return await client.post(
                    "/chat/completions",
                    cast_to=object,
                    body=body,
                    options=options,
                    stream=True,
                    stream_cls=AsyncStream[object],
                )

    async def _next_chunk(self, chunks: Any, sent: Json) -> Json | None:
        with self._translated(sent):
            # The client's own time-out starts anew with every byte, keep-alive comments included.
            async with asyncio.timeout(self.request_timeout):
                chunk = await anext(chunks, None)
        if chunk is None or isinstance(chunk, dict):
            return chunk
        raise MalformedReplyError(
            f"{self.base_url}: a streamed event is not a JSON object",
            endpoint=self.base_url,
            model=self._served,
        )

    @property
    def _server(self) -> str | None:
        return self._capabilities.server if self._capabilities else None

    async def _model_name(self) -> str:
        if self._served is None:
            self._served = _only_model(await self._list_models(), self.base_url)
        return self._served

    async def _list_models(self) -> list[Json]:
        """Ask `/models` once; those who wait while it is asked share the outcome."""
        if self._listed is not None:
            return self._listed
        lookup = (await self._connect()).lookup
        failures = lookup.failures
        async with lookup.lock:
            if self._listed is not None:
                return self._listed
            if lookup.error is not None and lookup.failures > failures:
                raise copy.copy(lookup.error) from lookup.error
            try:
                # Where the name is known, a question need not wait long for the rest.
                attempts = self._max_attempts if self._served is None else 1
                data, _ = await with_retries(attempts, self._get_models)
            except EndpointError as error:
                error.attempts = 0  # those were no generating requests
                lookup.error = error
                lookup.failures += 1
                raise
        found = data.get("data")
        entries = [e for e in found if isinstance(e, dict)] if isinstance(found, list) else []
        self._listed = entries or None  # a server that serves none yet is asked again
        return entries

    async def _get_models(self) -> Json:
        async with self._turn() as client:
            with self._translated():
                return await self._json(client.get("/models", cast_to=object))

    async def _learn_capabilities(self) -> Capabilities:
        if self._capabilities is None:
            try:
                entries = await self._list_models()
            except EndpointError as error:
                if error.status_code not in _NO_SUCH_ROUTE:
                    return Capabilities()  # not an answer, so not remembered
                entries = []  # the server says nothing of itself
            self._capabilities = read_capabilities(entries, self._served)
        return self._capabilities

    async def _count_tokens(self, messages: Sequence[Message]) -> int | None:
        server = (await self._learn_capabilities()).server
        turns = [message.to_dict() for message in messages]
        try:
            if server == "vllm":
                body = {"model": await self._model_name(), "messages": turns}
                return int((await self._post_root("/tokenize", body))["count"])
            if server == "llama.cpp":
                prompt = (await self._post_root("/apply-template", {"messages": turns}))["prompt"]
                text = {"content": prompt, "add_special": True}
                return len((await self._post_root("/tokenize", text))["tokens"])
        except (EndpointError, KeyError, TypeError, ValueError) as error:
            log.info("%s: cannot count tokens: %s", self.base_url, type(error).__name__)
        return None

    async def _post_root(self, path: str, body: Json) -> Json:
        """Post to a route beside `/v1`."""
        # What must not come back in an error: a text, or the messages themselves.
        text = {"content": body.get("content") or body.get("prompt")}
        sent = {"messages": body.get("messages") or [text]}
        async with self._turn() as client:
            with self._translated(sent):
                url = self._beside(path)
                return await self._json(client.post(url, cast_to=object, body=body), sent)

    async def _get_root(self, path: str) -> Json:
        """Get a route beside `/v1`."""
        async with self._turn() as client:
            with self._translated():
                return await self._json(client.get(self._beside(path), cast_to=object))

    def _beside(self, path: str) -> str:
        return self.base_url.removesuffix("/v1") + path

    async def _version(self) -> str | None:
        server = (await self._learn_capabilities()).server
        path, key = _VERSIONS.get(server or "", ("", ""))
        try:
            found = (await self._get_root(path)).get(key) if path else None
        except EndpointError as error:
            log.info("%s: no version: %s", self.base_url, type(error).__name__)
            found = None
        return found if isinstance(found, str) else None

    async def _json(self, response: Awaitable[object], sent: Json | None = None) -> Json:
        async with asyncio.timeout(self.request_timeout):
            data = await response
        if not isinstance(data, dict):
            raise MalformedReplyError(
                f"{self.base_url}: the reply is not a JSON object; "
                "is this an OpenAI-compatible URL?",
                endpoint=self.base_url,
                model=self._served,
            )
        if data.get("error") and not data.get("choices"):
            # Some proxies report errors with a 200.
            raise self._from_reported(data["error"], sent)
        return data

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self._connection is None:
            # The first import takes half a second: not on the loop that others wait on.
            await asyncio.to_thread(_import_clients)
        if self._connection is None or self._connection.loop is not loop:
            self._forget_connection()
            self._connection = _Connection(
                loop=loop,
                client=self._new_client(),
                slots=asyncio.Semaphore(self.max_concurrency),
            )
            _OPEN.add(self._connection)
            self._closing = weakref.finalize(self, _close_later, self._connection, os.getpid())
            self._closing.atexit = False
        return self._connection

    def _forget_connection(self) -> _Connection | None:
        connection, self._connection = self._connection, None
        if self._closing is not None:
            self._closing.detach()
        if connection is not None and connection.loop is not asyncio.get_running_loop():
            # A forked child: the sockets are the parent's, so they are left alone.
            _INHERITED.append(connection)
            return None
        return connection

    def _new_client(self) -> AsyncOpenAI:
        import openai

        options: dict[str, Any] = {
            "base_url": self.base_url,
            "api_key": self._key.option,
            "default_headers": self._headers,
            "default_query": self._query,
            "max_retries": 0,  # retries have one layer, ours
            "timeout": openai.Timeout(
                self.request_timeout, connect=min(_CONNECT_SECONDS, self.request_timeout)
            ),
        }
        if self._client_factory is None:
            return openai.AsyncOpenAI(**options, http_client=openai.DefaultAsyncHttpxClient())
        client = self._client_factory(**options)
        if not isinstance(client, openai.AsyncOpenAI):
            raise ConfigurationError(
                f"client_factory returned a {type(client).__name__}; "
                "it must return an openai.AsyncOpenAI"
            )
        return client.with_options(max_retries=0)

    async def _disconnect(self) -> None:
        connection = self._forget_connection()
        if connection is not None:
            await connection.end_trials()
            await connection.client.close()

    @contextmanager
    def _translated(self, sent: Json | None = None) -> Iterator[None]:
        """Turn the client library's errors into ours; everything else is a bug and passes.

        A refusal of the chat request `sent` may teach another wording, worth a retry.
        """
        import openai

        try:
            yield
        except openai.APIStatusError as error:
            said = self._said(error, sent)
            translated = self._failure(said, error.status_code, error.response.headers)
            if sent is not None and self._dialect.adapt(sent, translated, said):
                translated.retryable = True
                translated.retry_after = 0.0
            raise translated from error
        except (openai.APITimeoutError, TimeoutError) as error:
            raise self._timed_out() from error
        except openai.APIConnectionError as error:
            raise self._unreachable(error) from error
        except openai.APIResponseValidationError as error:
            raise MalformedReplyError(
                f"{self.base_url}: {self._said(error)}",
                endpoint=self.base_url,
                model=self._served,
                status_code=error.status_code,
            ) from error
        except openai.APIError as error:  # an error event inside a stream
            reported = self._from_reported(error.body or error.message, sent)
            error.args = (str(reported),)  # tracebacks show the cause as well
            raise reported from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise MalformedReplyError(
                f"{self.base_url}: the reply is not valid JSON ({error.__class__.__name__})",
                endpoint=self.base_url,
                model=self._served,
            ) from error
        except Exception as error:
            # openai 2.x lets its HTTP library's errors out of a stream, and that library has
            # another name in openai 3.x.
            if type(error).__module__.partition(".")[0] in {"httpx", "httpx2"}:
                late = "TimeoutException" in {kind.__name__ for kind in type(error).__mro__}
                raise (self._timed_out() if late else self._unreachable(error)) from error
            raise

    def _timed_out(self) -> EndpointTimeoutError:
        return EndpointTimeoutError(
            f"{self.base_url}: no reply within {self.request_timeout:g} s",
            endpoint=self.base_url,
            model=self._served,
        )

    def _unreachable(self, error: Exception) -> EndpointUnavailableError:
        cause = error.__cause__ or error
        detail = self._scrubbed(str(cause) or type(cause).__name__)
        return EndpointUnavailableError(
            f"{self.base_url}: no connection ({detail}); is the server running?",
            endpoint=self.base_url,
            model=self._served,
        )

    def _from_reported(self, body: object, sent: Json | None) -> EndpointError:
        """Read an error that came with a 200, in a stream or from a proxy."""
        code = mapping(body).get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else None  # noqa: PLR2004
        return self._failure(self._scrubbed(words_of(body, sent)), status, {})

    def _failure(self, said: str, status: int | None, headers: Mapping[str, str]) -> EndpointError:
        return failure_of(said, status, headers, endpoint=self.base_url, model=self._served)

    def _said(self, error: Any, sent: Json | None = None) -> str:
        """Return the server's own words, in which keys are masked, in the cause as well."""
        body = error.body if error.body is not None else error.response.text
        said = self._scrubbed(words_of(body or error.message, sent))
        error.args = (said,)  # tracebacks show the cause as well
        return said

    def _scrubbed(self, text: str) -> str:
        values = [word for value in self._headers.values() for word in value.split()]
        return scrubbed(text, [self._key.last, *values, *self._query.values()])


_INHERITED: list[_Connection] = []
_OPEN: weakref.WeakSet[_Connection] = weakref.WeakSet()


def _unpickled(kind: type[Endpoint], options: dict[str, Any], has_key: bool) -> Endpoint:  # noqa: FBT001
    return kind(**options, api_key=key_from_environment if has_key else None)


def _seen(task: asyncio.Task[ChatReply]) -> None:
    """Take note of a trial's failure, which nobody may be waiting for any more."""
    if not task.cancelled():
        task.exception()


def _import_clients() -> None:
    import openai  # noqa: F401
    import tenacity  # noqa: F401 - loading them is the point


def _only_model(entries: list[Json], shown_url: str) -> str:
    names = [str(entry["id"]) for entry in entries if entry.get("id")]
    if len(names) == 1:
        return names[0]
    if not names:
        raise EndpointRejectedError(
            f"{shown_url} lists no models; name one: Endpoint(url, model)", endpoint=shown_url
        )
    listed = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")  # noqa: PLR2004
    raise EndpointRejectedError(
        f"{shown_url} serves {len(names)} models ({listed}); name one: Endpoint(url, model)",
        endpoint=shown_url,
    )


def _checked_body(extra_body: Mapping[str, Any]) -> Json:
    """Return what can be merged into the body of a request.

    Raises:
        ConfigurationError: it is no mapping, or JSON cannot hold it.
    """
    if not isinstance(extra_body, Mapping):
        raise ConfigurationError(f"extra_body must be a mapping, not a {type(extra_body).__name__}")
    body = dict(extra_body)
    if not isinstance(body.get("chat_template_kwargs", {}), Mapping):
        raise ConfigurationError("extra_body['chat_template_kwargs'] must be a mapping")
    check_json("extra_body", body)
    return body


def _close_later(connection: _Connection, process: int) -> None:
    """Close a forgotten endpoint's connections on the loop they belong to."""
    if os.getpid() != process:
        _INHERITED.append(connection)
    elif not connection.loop.is_closed():
        asyncio.run_coroutine_threadsafe(connection.client.close(), connection.loop)


@atexit.register
def _close_at_exit() -> None:
    """End and close what nobody did, so that no task and no socket is left to complain."""
    portal.end(_close_open, seconds=_EXIT_SECONDS)


async def _close_open() -> None:
    for connection in list(_OPEN):
        if portal.runs(connection.loop):  # not those a fork has inherited
            await connection.client.close()
    await asyncio.sleep(0)  # transports close their sockets one turn later
