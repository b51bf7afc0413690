"""Endpoint: an OpenAI-compatible chat server, and the only HTTP of the package."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
import os
import re
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
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from specrag_integrations.errors import (
    ConfigurationError,
    ContextTooSmallError,
    EndpointError,
    EndpointRejectedError,
    EndpointTimeoutError,
    EndpointUnavailableError,
    MalformedReplyError,
)
from specrag_integrations.models import (
    Capabilities,
    ChatDelta,
    ChatReply,
    ChatRequest,
    Message,
    Step,
)
from specrag_integrations.portal import portal
from specrag_integrations.replies import Collected, Json, read_capabilities, read_reply

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from tenacity import AsyncRetrying, RetryCallState

ApiKey = str | Callable[[], str | Awaitable[str]]
ClientFactory = Callable[..., "AsyncOpenAI"]
log = logging.getLogger("specrag_integrations")

_NO_KEY = "EMPTY"  # what servers without authentication expect to be sent
_CONNECT_SECONDS = 5.0
_LONGEST_RETRY_AFTER = 60.0
_FEWER_ALTERNATIVES = {20: 5, 5: 1}
"""What to ask for when a server refuses a number of `top_logprobs`."""


@dataclass(slots=True)
class _Dialect:
    """What this server was found to refuse, learnt from its own error messages."""

    max_tokens_field: str = "max_tokens"
    most_alternatives: int = 20
    refused: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Connection:
    """What belongs to one event loop: the pooled client and the concurrency limit."""

    loop: asyncio.AbstractEventLoop
    client: AsyncOpenAI
    slots: asyncio.Semaphore
    model_lookup: asyncio.Lock


class Endpoint:
    """A chat model behind an OpenAI-compatible URL: vLLM, SGLang, llama.cpp, OpenAI and others.

    All I/O runs on one background loop, so that one client, one connection pool and one concurrency
    limit serve every thread and event loop of the process (a new one after a fork).

    Args:
        base_url: With or without `/v1`, e.g. `http://gpu:8000`.
        model: The served name; None asks `/v1/models` and takes the only one.
        api_key: A string, or a sync or async callable asked before each request.
        headers: Sent with every request; never shown.
        extra_body: Merged into the body of every chat request, e.g. `chat_template_kwargs`.
        request_timeout: Seconds one HTTP request may take, before a retry.
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
        self.base_url = _normal_url(base_url)
        self.model = model
        self.request_timeout = _positive("request_timeout", request_timeout)
        self.max_concurrency = int(_positive("max_concurrency", max_concurrency))
        self._max_attempts = int(_positive("max_attempts", max_attempts))
        self._api_key = _checked_key(api_key)
        self._headers = dict(headers or {})
        self._extra_body = dict(extra_body or {})
        self._client_factory = client_factory
        self._shown_url = _without_secrets(self.base_url)
        self._served: str | None = model
        self._capabilities: Capabilities | None = None
        self._dialect = _Dialect()
        self._connection: _Connection | None = None

    def __repr__(self) -> str:
        return f"Endpoint({self._shown_url!r}, model={self._served!r})"

    @property
    def name(self) -> str:
        """The model's name where it is known, else the address."""
        return self._served or self._shown_url

    @property
    def max_attempts(self) -> int:
        """The most HTTP requests one call may send."""
        return self._max_attempts

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

    async def _chat(self, request: ChatRequest) -> ChatReply:
        started = time.perf_counter()
        model = await self._model_name()
        attempts = 0
        try:
            async for attempt in _retrying(self._max_attempts):
                with attempt:
                    attempts = attempt.retry_state.attempt_number
                    data = await self._post_chat(request, model)
                    reply = read_reply(data, request, endpoint=self._shown_url)
        except EndpointError as error:
            error.attempts = attempts
            raise
        return replace(reply, seconds=time.perf_counter() - started, attempts=attempts)

    async def _post_chat(self, request: ChatRequest, model: str) -> Json:
        connection = await self._connect()
        async with connection.slots:
            with self._translated(self._dialect):
                async with asyncio.timeout(self.request_timeout):
                    return await self._json(
                        connection.client.post(
                            "/chat/completions", cast_to=object, body=self._body(request, model)
                        )
                    )

    async def _stream(self, request: ChatRequest) -> AsyncGenerator[ChatDelta, None]:
        started = time.perf_counter()
        model = await self._model_name()
        collected = Collected()
        async with aclosing(self._chunks(request, model, collected)) as chunks:
            async for chunk in chunks:
                if piece := collected.add(chunk):
                    yield ChatDelta(text=piece)
        reply = read_reply(collected.as_reply(), request, endpoint=self._shown_url)
        seconds = time.perf_counter() - started
        yield ChatDelta(reply=replace(reply, seconds=seconds, attempts=collected.attempts))

    async def _chunks(
        self, request: ChatRequest, model: str, collected: Collected
    ) -> AsyncGenerator[Json, None]:
        connection = await self._connect()
        slot = _Slot(connection.slots)
        try:
            async for attempt in _retrying(self._max_attempts):
                with attempt:
                    collected.attempts = attempt.retry_state.attempt_number
                    await slot.take()
                    try:
                        chunks = await self._open_stream(connection.client, request, model)
                        first = await self._next_chunk(chunks)
                    except BaseException:
                        slot.give_back()  # nobody waits for us while we wait to try again
                        raise
            try:
                chunk = first
                while chunk is not None:
                    yield chunk
                    chunk = await self._next_chunk(chunks)
            finally:
                await chunks.close()
        finally:
            slot.give_back()

    async def _open_stream(
        self, client: AsyncOpenAI, request: ChatRequest, model: str
    ) -> Any:  # AsyncStream[object]; its class is only importable with openai itself
        from openai import AsyncStream

        body = self._body(request, model) | {"stream": True}
        if "stream_options" not in self._dialect.refused:
            body["stream_options"] = {"include_usage": True}
        # llama.cpp closes the socket after a stream although it announced keep-alive; a pooled
        # connection would then fail under the next request.
        options: Any = {"headers": {"Connection": "close"}}
        with self._translated(self._dialect):
            return await client.post(
                "/chat/completions",
                cast_to=object,
                body=body,
                options=options,
                stream=True,
                stream_cls=AsyncStream[object],
            )

    async def _next_chunk(self, chunks: Any) -> Json | None:
        with self._translated():
            async for chunk in chunks:
                if isinstance(chunk, dict):
                    return chunk
                raise MalformedReplyError(
                    f"{self._shown_url}: a streamed event is not a JSON object",
                    endpoint=self._shown_url,
                )
        return None

    def _body(self, request: ChatRequest, model: str) -> Json:
        dialect = self._dialect
        body: Json = {
            "model": model,
            "messages": [message.to_dict() for message in request.messages],
            dialect.max_tokens_field: request.max_tokens,
            "temperature": request.temperature,
        }
        if request.top_logprobs is not None:
            # Some servers fail on logprobs without top_logprobs, so at least one is asked for.
            wanted = max(1, request.top_logprobs)
            body |= {"logprobs": True, "top_logprobs": min(wanted, dialect.most_alternatives)}
        if request.score_message is not None and self._is("vllm"):
            body |= {"prompt_logprobs": 0, "return_token_ids": True}
        body = {key: value for key, value in body.items() if key not in dialect.refused}
        return body | self._extra_body

    def _is(self, server: str) -> bool:
        return self._capabilities is not None and self._capabilities.server == server

    async def _model_name(self) -> str:
        if self._served is None:
            connection = await self._connect()
            async with connection.model_lookup:
                if self._served is None:
                    self._served = _only_model(await self._models(), self._shown_url)
        return self._served

    async def _models(self) -> list[Json]:
        connection = await self._connect()
        data: Json = {}
        async for attempt in _retrying(self._max_attempts):
            with attempt, self._translated():
                async with asyncio.timeout(self.request_timeout):
                    data = await self._json(connection.client.get("/models", cast_to=object))
        entries = data.get("data")
        return [entry for entry in entries or [] if isinstance(entry, dict)]

    async def _learn_capabilities(self) -> Capabilities:
        if self._capabilities is None:
            try:
                entries = await self._models()
            except EndpointRejectedError:
                entries = []  # no such route: the server says nothing of itself
            except EndpointError:
                return Capabilities()  # not an answer, so not remembered
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
            log.info("%s: cannot count tokens: %s", self._shown_url, type(error).__name__)
        return None

    async def _post_root(self, path: str, body: Json) -> Json:
        """Post to a route beside `/v1`."""
        connection = await self._connect()
        url = self.base_url.removesuffix("/v1") + path
        with self._translated():
            async with asyncio.timeout(self.request_timeout):
                return await self._json(connection.client.post(url, cast_to=object, body=body))

    async def _json(self, response: Awaitable[object]) -> Json:
        data = await response
        if isinstance(data, dict):
            return data
        raise MalformedReplyError(
            f"{self._shown_url}: the reply is not a JSON object; is this an OpenAI-compatible URL?",
            endpoint=self._shown_url,
            model=self._served,
        )

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if self._connection is None:
            # The first import takes half a second: not on the loop that others wait on.
            await asyncio.to_thread(_import_clients)
        if self._connection is None or self._connection.loop is not loop:
            if self._connection is not None:
                # A forked child: the sockets are the parent's, so they are left alone.
                _INHERITED.append(self._connection)
            self._connection = _Connection(
                loop=loop,
                client=self._new_client(),
                slots=asyncio.Semaphore(self.max_concurrency),
                model_lookup=asyncio.Lock(),
            )
            closing = weakref.finalize(self, _close_later, self._connection, os.getpid())
            closing.atexit = False
        return self._connection

    def _new_client(self) -> AsyncOpenAI:
        import openai

        options: dict[str, Any] = {
            "base_url": self.base_url,
            "api_key": self._api_key if isinstance(self._api_key, str) else self._asked_key,
            "default_headers": self._headers,
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

    async def _asked_key(self) -> str:
        assert callable(self._api_key)  # noqa: S101 - narrows the type
        # A synchronous callable may ask a vault: not on the loop that carries all requests.
        key = await asyncio.to_thread(self._api_key)
        return await key if inspect.isawaitable(key) else key

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and connection.loop is asyncio.get_running_loop():
            await connection.client.close()

    @contextmanager
    def _translated(self, dialect: _Dialect | None = None) -> Iterator[None]:
        """Turn the client library's errors into ours; everything else is a bug and passes."""
        import openai

        try:
            yield
        except openai.APIStatusError as error:
            translated = self._from_status(error)
            if dialect is not None and _adapt(dialect, translated):
                translated.retryable = True
                translated.retry_after = 0.0
            raise translated from error
        except (openai.APITimeoutError, TimeoutError) as error:
            raise EndpointTimeoutError(
                f"{self._shown_url}: no reply within {self.request_timeout:g} s",
                endpoint=self._shown_url,
                model=self._served,
            ) from error
        except openai.APIConnectionError as error:
            raise self._unreachable(error) from error
        except openai.APIError as error:  # an error event inside a stream
            raise EndpointUnavailableError(
                f"{self._shown_url}: {self._scrubbed(error.message)}",
                endpoint=self._shown_url,
                model=self._served,
            ) from error
        except json.JSONDecodeError as error:
            raise MalformedReplyError(
                f"{self._shown_url}: the reply is not valid JSON ({error.msg})",
                endpoint=self._shown_url,
                model=self._served,
            ) from error
        except Exception as error:
            # openai 2.x lets its HTTP library's errors out of a stream, and that library has
            # another name in openai 3.x.
            if type(error).__module__.partition(".")[0] in {"httpx", "httpx2"}:
                raise self._unreachable(error) from error
            raise

    def _unreachable(self, error: Exception) -> EndpointUnavailableError:
        cause = error.__cause__ or error
        detail = self._scrubbed(str(cause) or type(cause).__name__)
        return EndpointUnavailableError(
            f"{self._shown_url}: no connection ({detail}); is the server running?",
            endpoint=self._shown_url,
            model=self._served,
        )

    def _from_status(self, error: Any) -> EndpointError:
        status = int(error.status_code)
        headers = error.response.headers
        said = self._scrubbed(_server_message(error))
        kind: type[EndpointError] = EndpointRejectedError
        if status in {408, 409, 425, 429} or status >= 500:  # noqa: PLR2004 - HTTP's own numbers
            kind = EndpointUnavailableError
        elif _is_overflow(said):
            kind = ContextTooSmallError
        hint = "; check api_key" if status in {401, 403} else ""
        translated = kind(
            f"{self._shown_url}: HTTP {status}: {said}{hint}",
            endpoint=self._shown_url,
            model=self._served,
            status_code=status,
            request_id=headers.get("x-request-id"),
            retry_after=_retry_after(headers),
        )
        told = headers.get("x-should-retry")
        if told in {"true", "false"}:
            translated.retryable = told == "true"
        return translated

    def _scrubbed(self, text: str) -> str:
        """Servers like to echo what they were sent: keep keys out of messages."""
        secrets = [self._api_key if isinstance(self._api_key, str) else "", *self._headers.values()]
        for secret in secrets:
            if len(secret) > 3 and secret != _NO_KEY:  # noqa: PLR2004 - "a" is no secret
                text = text.replace(secret, "***")
        return _KEY_LIKE.sub("***", text)


_INHERITED: list[_Connection] = []
_KEY_LIKE = re.compile(r"\b(?:sk|hf|gsk|xai)[-_][\w*-]{8,}")


class _Slot:
    """A place under the concurrency limit that is given back exactly once."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._taken = False

    async def take(self) -> None:
        await self._slots.acquire()
        self._taken = True

    def give_back(self) -> None:
        if self._taken:
            self._taken = False
            self._slots.release()


# -------------------------------------------------------------------- retries


def _retrying(attempts: int) -> AsyncRetrying:
    from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

    return AsyncRetrying(
        stop=stop_after_attempt(attempts),
        wait=_wait,
        retry=retry_if_exception(_worth_retrying),
        reraise=True,
    )


def _worth_retrying(error: BaseException) -> bool:
    if not isinstance(error, EndpointError) or not error.retryable:
        return False
    return (error.retry_after or 0.0) <= _LONGEST_RETRY_AFTER


def _wait(state: RetryCallState) -> float:
    from tenacity import wait_exponential_jitter

    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, EndpointError) and error.retry_after is not None:
        return error.retry_after
    return wait_exponential_jitter(initial=0.25, max=8.0, jitter=0.25)(state)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Read `Retry-After` (seconds or a date) or the millisecond form some servers send."""
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
        return max(0.0, milliseconds / 1000)
    value = headers.get("retry-after")
    if (seconds := _number(value)) is not None:
        return max(0.0, seconds)
    if value:
        from email.utils import parsedate_to_datetime

        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        except ValueError:
            return None
    return None


def _number(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _adapt(dialect: _Dialect, error: EndpointError) -> bool:
    """Learn from a refusal how to word the request; False if there is nothing to change."""
    if not isinstance(error, EndpointRejectedError) or isinstance(error, ContextTooSmallError):
        return False
    said = str(error)
    if "max_completion_tokens" in said and dialect.max_tokens_field == "max_tokens":
        dialect.max_tokens_field = "max_completion_tokens"
        return True
    if "top_logprobs" in said and dialect.most_alternatives in _FEWER_ALTERNATIVES:
        dialect.most_alternatives = _FEWER_ALTERNATIVES[dialect.most_alternatives]
        return True
    if "logprobs" in said and "logprobs" not in dialect.refused:
        dialect.refused |= {"logprobs", "top_logprobs"}
        log.warning("%s refuses log-probabilities: %s", error.endpoint, said)
        return True
    for name in ("stream_options", "temperature"):
        if name in said and name not in dialect.refused:
            dialect.refused.add(name)
            return True
    return False


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


def _server_message(error: Any) -> str:
    """Find the server's own words in the shapes servers use."""
    body = error.body
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(key):
            body = body[key]
    if isinstance(body, str) and body.strip():
        text = body
    elif body is not None:
        text = json.dumps(body, default=str)
    else:
        text = error.response.text or error.message
    text = " ".join(text.split())
    return text if len(text) <= 500 else text[:500] + "…"  # noqa: PLR2004 - a line, not a page


_OVERFLOW = re.compile(
    r"exceed\w*.{0,40}context|context.{0,20}(length|size|window).{0,60}"
    r"(exceed|is \d+|of \d+)|prompt.{0,20}too long|context_length_exceeded",
    re.IGNORECASE,
)


def _is_overflow(message: str) -> bool:
    return bool(_OVERFLOW.search(message))


# -------------------------------------------------------------------- small checks


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigurationError(f"{name}={value!r} must be a number above 0")
    return value


def _checked_key(key: ApiKey | None) -> ApiKey:
    if key is None:
        return _NO_KEY
    if isinstance(key, str) and (not key or key.split() != [key] or not key.isascii()):
        raise ConfigurationError(
            "api_key is empty or holds white space or non-ASCII characters; "
            "strip the line break a file or shell may have added"
        )
    return key


def _normal_url(base_url: str) -> str:
    parts = urlsplit(base_url.strip() if isinstance(base_url, str) else "")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        shown = _without_secrets(base_url) if isinstance(base_url, str) else repr(base_url)
        raise ConfigurationError(
            f"base_url {shown!r} is not a URL; write it with its scheme: http://localhost:8000/v1"
        )
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return urlunsplit(parts._replace(path=path or "/v1", fragment=""))


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _close_later(connection: _Connection, process: int) -> None:
    """Close a forgotten endpoint's connections on the loop they belong to."""
    if os.getpid() != process or connection.loop.is_closed():
        return
    connection.loop.call_soon_threadsafe(
        lambda: connection.loop.create_task(connection.client.close())
    )
