"""A scripted OpenAI-compatible HTTP server on loopback: the wire shapes of three kinds of server.

It is a real server in a thread of its own, never a patched client. `respond(body, call)` decides
each chat reply; everything it received can be read from the test's thread at any time:

    with ScriptedServer(lambda _, call: Fault(503) if call == 0 else "Yes") as server:
        ...  # talk to server.base_url
    assert len(server.chats) == 2

Tokens are words with the space before them, so a prompt costs its words plus four per message
(`prompt_pieces`), and log-probabilities are hashes (`pseudo_logprob`): tests can compute both.
The shapes are those recorded from vLLM 0.32 and llama.cpp, and OpenAI's documented ones.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import inspect
import json
import math
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal, Self

from aiohttp import web

Json = dict[str, Any]
Kind = Literal["openai", "vllm", "llama.cpp"]
Auto = Literal["auto"]
AUTO: Auto = "auto"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Anything but a good reply."""

    status: int = field(default=503, kw_only=False)
    body: Any = None
    """JSON to send; None: an error in the server kind's own shape."""
    headers: Mapping[str, str] = field(default_factory=lambda: {"Retry-After": "0"})
    hang: bool = False
    """Never answer; with `stream_break_after`, fall silent in the middle of the stream."""
    close: bool = False
    """Drop the connection without an answer."""
    after: float = 0.0
    """Seconds before the fault."""
    raw: bytes | None = None
    content_type: str = "application/json"
    stream_break_after: int | None = None
    """Send `reply`, but drop the connection after so many chunks (halfway, if not streamed). With a
    `body`, send that as an error event and end the stream without `[DONE]` instead."""
    reply: Reply | str | None = None
    """What to break; None: the default reply."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the model writes."""

    text: str = field(default="", kw_only=False)
    logprobs: Sequence[tuple[str | bytes, float]] | Auto | None = AUTO
    """The written tokens; None: the server leaves log-probabilities out although asked."""
    alternatives: Mapping[str, float] = field(default_factory=dict)
    """The first token's candidates, as text and log-probability; the written one is added."""
    finish_reason: str | None = "stop"
    usage: Json | Auto | None = AUTO
    model: str | None = None
    prompt_logprobs: list[Any] | Auto | None = AUTO
    prompt_token_ids: list[int] | Auto | None = AUTO
    reasoning: str | None = None
    split_bytes: bool = False
    """Spread every non-ASCII character over two tokens."""
    delay: float = 0.0
    chunk_delay: float = 0.0
    headers: Mapping[str, str] = field(default_factory=dict)
    message: Json = field(default_factory=dict)
    """Merged into the message, such as `{"content": None, "refusal": "…"}` (not streamed)."""
    extra: Json = field(default_factory=dict)
    """Merged into the top level of the answer (not streamed)."""


Answer = Reply | Fault | str
Respond = Callable[[Json, int], Answer | Awaitable[Answer]]


def hash_unit(*parts: object) -> float:
    """Return a number in [0, 1) that depends on the parts alone."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def pseudo_logprob(token: str | bytes, position: int) -> float:
    """Return the log-probability the server makes up for a token, between -4 and 0."""
    data = token.encode() if isinstance(token, str) else token
    return round(-0.001 - 3.998 * hash_unit(data.hex(), position), 4)


def words(text: str) -> list[str]:
    """Split a text into words with the white space before them."""
    return re.findall(r"\s*\S+(?:\s+\Z)?", text) or ([text] if text else [])


def split_characters(text: str) -> list[bytes]:
    """Split a text into words, and those in the middle of every non-ASCII character."""
    return [
        piece for word in words(text) for piece in re.split(rb"(?<=[\xc2-\xf4])", word.encode())
    ]


def prompt_pieces(
    messages: Sequence[Json],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    split: Callable[[str], Sequence[str | bytes]] = words,
) -> list[bytes]:
    """Return the tokens of a ChatML conversation: its words and four more per message.

    For that sum the first message's opening and its end are one token each. What precedes an
    assistant's message is a prefix of the whole, as with real templates.
    """
    roles = [message["role"] for message in messages]
    pieces: list[str | bytes] = [f"<|im_start|>{roles[0]}\n"] if roles else []
    for index, message in enumerate(messages):
        pieces += split(_text(message.get("content")))
        last = index == len(messages) - 1
        if last and continue_final_message:
            break
        pieces += ["<|im_end|>", "\n"] if index else ["<|im_end|>\n"]
        if not last or add_generation_prompt:
            pieces += ["<|im_start|>", f"{'assistant' if last else roles[index + 1]}\n"]
    return [piece.encode() if isinstance(piece, str) else piece for piece in pieces]


def p_yes(body: Json) -> float:
    """Return P(Yes) / (P(Yes) + P(No)) of `default_respond` for a verification."""
    return round(0.05 + 0.9 * hash_unit("yes", body["messages"]), 4)


def is_verification(body: Json) -> bool:
    """Tell whether a request asks for one token and its alternatives."""
    length = body.get("max_completion_tokens", body.get("max_tokens"))
    wants = body.get("top_logprobs") or body.get("logprob_token_ids")
    return length == 1 and bool(wants)


def default_respond(body: Json, call: int) -> Reply:
    """Judge a verification, draft for anything else; both depend on the messages alone."""
    if is_verification(body):
        p = p_yes(body)
        shares = {"Yes": 0.9 * p, " yes": 0.05 * p, "No": 0.95 * (1 - p), "Maybe": 0.05}
        alternatives = {text: math.log(share) for text, share in shares.items()}
        likeliest = max(alternatives, key=alternatives.__getitem__)
        return Reply(likeliest, alternatives=alternatives, finish_reason="length")
    seed = hashlib.sha256(json.dumps(body["messages"]).encode()).hexdigest()
    return Reply(f"Rationale: the passages mention {seed[:6]} twice.\nAnswer: answer {seed[6:8]}")


class ScriptedServer:
    """The server; a context manager. It reads `refuse` and `faults` at each request."""

    def __init__(
        self,
        respond: Respond | Answer | None = None,
        *,
        kind: Kind = "openai",
        models: Sequence[str] = ("scripted",),
        context_tokens: int = 8192,
        api_key: str | None = None,
        delay: float = 0.0,
        refuse: Mapping[str, str] | None = None,
        faults: Mapping[str, Fault] | None = None,
    ) -> None:
        self.respond = respond if respond is not None else default_respond
        self.kind = kind
        self.models = tuple(models)
        self.context_tokens = context_tokens
        self.api_key = api_key
        self.delay = delay
        self.refuse = dict(refuse or {})
        """Parameter: the message of the 400 it is answered with."""
        self.faults = dict(faults or {})
        """Path: what it answers; for the routes other than chat."""
        self.errors: list[Exception] = []
        """What `respond` raised; leaving the context raises the first."""
        self._state = threading.Condition()
        self._vocabulary: dict[bytes, int] = {}
        self._in_flight = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything received so far; `call` starts at 0 again."""
        with self._state:
            self._chats: list[Json] = []
            self._requests: list[tuple[str, str]] = []
            self._headers: list[Mapping[str, str]] = []
            self._connections: set[tuple[str, int]] = set()
            self._aborted = 0
            self._max_in_flight = self._in_flight

    @property
    def chats(self) -> list[Json]:
        """Bodies of the chat requests, refused ones included; `call` is the index in this list."""
        with self._state:
            return list(self._chats)

    @property
    def requests(self) -> list[tuple[str, str]]:
        """(method, path) of every request."""
        with self._state:
            return list(self._requests)

    @property
    def headers(self) -> list[Mapping[str, str]]:
        """Headers of every request, case-insensitive."""
        with self._state:
            return list(self._headers)

    @property
    def connections(self) -> set[tuple[str, int]]:
        """The clients' addresses: one per TCP connection."""
        with self._state:
            return set(self._connections)

    @property
    def in_flight(self) -> int:
        """Chat requests being answered now."""
        return self._in_flight

    @property
    def max_in_flight(self) -> int:
        """The most chat requests answered at one time."""
        return self._max_in_flight

    @property
    def aborted(self) -> int:
        """Chat requests whose client went away."""
        return self._aborted

    def wait_for(self, condition: Callable[[ScriptedServer], object], timeout: float = 5.0) -> bool:
        """Wait until a condition on this server holds; return whether it did in time."""
        with self._state:
            return bool(self._state.wait_for(lambda: condition(self), timeout))

    def wait_idle(self, timeout: float = 5.0) -> bool:
        """Wait until no chat request is being answered."""
        return self.wait_for(lambda server: server.in_flight == 0, timeout)

    def __enter__(self) -> Self:
        port: Future[int] = Future()
        self._closing = False
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(port)), daemon=True, name="scripted-server"
        )
        self._thread.start()
        self.url = f"http://127.0.0.1:{port.result(timeout=30)}"
        self.base_url = f"{self.url}/v1"
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self.close()
        if self.errors and exc_type is None:
            raise self.errors[0]

    def close(self) -> None:
        """Stop at once, dropping requests in flight."""
        if self._thread is not None:
            self._closing = True
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout=30)
            self._thread = None

    async def _serve(self, port: Future[int]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(middlewares=[self._gate], client_max_size=64 * 2**20)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._list_models)
        app.router.add_get("/health", self._health)
        if self.kind == "vllm":
            app.router.add_post("/tokenize", self._vllm_tokenize)
        elif self.kind == "llama.cpp":
            app.router.add_post("/apply-template", self._apply_template)
            app.router.add_post("/tokenize", self._tokenize)
            app.router.add_get("/props", self._props)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05
        )
        try:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port.set_result(runner.addresses[0][1])
            await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            port.set_exception(error)
        finally:
            await runner.cleanup()

    @web.middleware
    async def _gate(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        with self._state:
            self._requests.append((request.method, request.path))
            self._headers.append(request.headers.copy())
            if request.transport is not None:
                self._connections.add(request.transport.get_extra_info("peername")[:2])
            self._state.notify_all()
        if self._needs_key(request.path) and not self._has_key(request):
            return web.json_response(self._unauthorized(), status=401)
        if request.path in self.faults:
            return await self._fail(request, self.faults[request.path], None)
        try:
            return await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            if self.kind == "llama.cpp":
                return self._error(404, "File Not Found", "not_found_error")
            return web.json_response({"detail": error.reason}, status=error.status)

    def _needs_key(self, path: str) -> bool:
        if self.kind == "llama.cpp":
            return path not in ("/health", "/v1/models")
        return path.startswith("/v1/")

    def _has_key(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization")
        return self.api_key is None or given == f"Bearer {self.api_key}"

    def _unauthorized(self) -> Json:
        if self.kind == "vllm":
            return {"error": "Unauthorized"}
        if self.kind == "llama.cpp":
            return self._error_body(401, "Invalid API Key", "authentication_error")
        message = (
            "Incorrect API key provided: ****. You can find your API key at https://example.com."
        )
        return self._error_body(401, message, "invalid_request_error", code="invalid_api_key")

    def _error_body(
        self, status: int, message: str, kind: str, *, param: str | None = None, code: Any = None
    ) -> Json:
        if self.kind == "llama.cpp":
            return {"error": {"code": status, "message": message, "type": kind}}
        code = status if self.kind == "vllm" else code
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def _error(self, status: int, message: str, kind: str, **more: Any) -> web.Response:
        return web.json_response(self._error_body(status, message, kind, **more), status=status)

    # Routes other than chat.

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"}) if self.kind == "llama.cpp" else web.Response()

    async def _list_models(self, _: web.Request) -> web.Response:
        kinds: dict[str, Json] = {
            "openai": {"owned_by": "system"},
            "vllm": {
                "owned_by": "vllm",
                "root": self.models[0] if self.models else None,
                "parent": None,
                "max_model_len": self.context_tokens,
            },
            "llama.cpp": {
                "owned_by": "llamacpp",
                "meta": {"n_vocab": 49152, "n_ctx": self.context_tokens, "n_ctx_train": 131072},
            },
        }
        own = kinds[self.kind]
        data = [{"id": name, "object": "model", "created": 1, **own} for name in self.models]
        return web.json_response({"object": "list", "data": data})

    async def _vllm_tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "messages" in body:
            options = ("add_generation_prompt", "continue_final_message")
            pieces = prompt_pieces(
                body["messages"], **{name: body[name] for name in options if name in body}
            )
        else:
            pieces = [word.encode() for word in words(body["prompt"])]
        reply = {"count": len(pieces), "max_model_len": self.context_tokens}
        return web.json_response({**reply, "tokens": self._ids(pieces), "token_strs": None})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        pieces = words(body["content"])
        tokens: list[Any] = self._ids([piece.encode() for piece in pieces])
        if body.get("with_pieces"):
            pairs = zip(tokens, pieces, strict=True)
            tokens = [{"id": token, "piece": piece} for token, piece in pairs]
        return web.json_response({"tokens": tokens})

    async def _apply_template(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"prompt": b"".join(prompt_pieces(body["messages"])).decode()})

    async def _props(self, _: web.Request) -> web.Response:
        settings = {"n_ctx": self.context_tokens, "params": {}}
        name = self.models[0] if self.models else ""
        return web.json_response(
            {"default_generation_settings": settings, "total_slots": 4, "model_path": name}
        )

    # Chat.

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except ValueError:
            return self._error(400, "JSON decode error", "invalid_request_error")
        with self._state:
            call = len(self._chats)
            self._chats.append(body)
            self._in_flight += 1
            self._max_in_flight = max(self._max_in_flight, self._in_flight)
            self._state.notify_all()
        gone = 0
        try:
            return self._refusal(body) or await self._answer(request, body, call)
        except (asyncio.CancelledError, ConnectionResetError):
            gone = 0 if self._closing else 1
            raise
        finally:
            with self._state:
                self._in_flight -= 1
                self._aborted += gone
                self._state.notify_all()

    def _refusal(self, body: Json) -> web.Response | None:
        """Return the 400 a server of this kind answers before it generates anything."""
        for param, message in self.refuse.items():
            if param in body:
                error = {"message": message, "type": "invalid_request_error", "param": param}
                return web.json_response(
                    {"error": {**error, "code": "unsupported_parameter"}}, status=400
                )
        asked = body.get("top_logprobs")
        if asked and not body.get("logprobs"):
            message = "top_logprobs requires logprobs to be set to true"
            return self._bad_request(message, "top_logprobs")
        if asked and asked > 20 and self.kind == "vllm":
            message = f"Requested sample logprobs of {asked}, which is greater than max allowed: 20"
            return self._bad_request(f"{message} (parameter=logprobs, value={asked})", "logprobs")
        if asked and asked > 20 and self.kind == "openai":
            message = (
                "Invalid 'top_logprobs': integer above maximum value. Expected a value <= 20, "
            )
            message += f"but got {asked} instead."
            return self._bad_request(message, "top_logprobs", code="integer_above_max_value")
        length = body.get("max_completion_tokens", body.get("max_tokens")) or 0
        if length > self.context_tokens and self.kind == "vllm":
            message = f"max_tokens={length} cannot be greater than max_model_len="
            return self._bad_request(f"{message}{self.context_tokens}.", "max_tokens")
        tokens = len(prompt_pieces(body["messages"]))
        return self._too_long(tokens) if tokens > self.context_tokens else None

    def _bad_request(self, message: str, param: str, **more: Any) -> web.Response:
        kind = "BadRequestError" if self.kind == "vllm" else "invalid_request_error"
        return self._error(400, message, kind, param=param, **more)

    def _too_long(self, tokens: int) -> web.Response:
        limit = self.context_tokens
        if self.kind == "llama.cpp":
            message = (
                f"request ({tokens} tokens) exceeds the available context size ({limit} tokens)"
            )
            body = self._error_body(
                400, f"{message}, try increasing it", "exceed_context_size_error"
            )
            body["error"] |= {"n_prompt_tokens": tokens, "n_ctx": limit}
            return web.json_response(body, status=400)
        message = f"This model's maximum context length is {limit} tokens. However, your "
        if self.kind == "openai":
            message += (
                f"messages resulted in {tokens} tokens. Please reduce the length of the messages."
            )
            return self._bad_request(message, "messages", code="context_length_exceeded")
        message += (
            f"prompt contains at least {limit + 1} input tokens, which exceeds this limit even "
            "without any output tokens. Please reduce the length of the input prompt. "
            f"(parameter=input_tokens, value={limit + 1})"
        )
        return self._bad_request(message, "input_tokens")

    async def _answer(self, request: web.Request, body: Json, call: int) -> web.StreamResponse:
        try:
            answer = self.respond(body, call) if callable(self.respond) else self.respond
            if inspect.isawaitable(answer):
                answer = await answer
            if not isinstance(answer, Reply | Fault | str):
                raise TypeError(f"respond returned {answer!r}")  # noqa: TRY301 - reported alike
        except Exception as error:  # noqa: BLE001 - whatever the test's own function raises
            self.errors.append(error)
            return self._error(400, f"respond raised {error!r}", "invalid_request_error")
        await asyncio.sleep(self.delay)
        if isinstance(answer, Fault):
            broken = answer.reply if answer.reply is not None else default_respond(body, call)
            return await self._fail(request, answer, _Writing(self, body, call, broken))
        writing = _Writing(self, body, call, answer)
        await asyncio.sleep(writing.reply.delay)
        if body.get("stream"):
            return await self._stream(request, writing)
        return web.json_response(writing.whole(), headers=dict(writing.reply.headers))

    async def _fail(
        self, request: web.Request, fault: Fault, writing: _Writing | None
    ) -> web.StreamResponse:
        await asyncio.sleep(fault.after)
        if fault.stream_break_after is not None and writing is not None:
            return await self._stream(request, writing, fault)
        if fault.hang:
            await asyncio.Event().wait()
        if fault.close:
            return _drop(request, web.Response())
        if fault.raw is not None:
            headers = {**fault.headers, "Content-Type": fault.content_type}
            return web.Response(body=fault.raw, status=fault.status, headers=headers)
        body = fault.body
        if body is None:
            reason = HTTPStatus(fault.status).phrase
            body = self._error_body(fault.status, f"scripted fault: {reason}", reason)
        return web.json_response(body, status=fault.status, headers=dict(fault.headers))

    async def _stream(
        self, request: web.Request, writing: _Writing, fault: Fault | None = None
    ) -> web.StreamResponse:
        streamed = bool(writing.body.get("stream"))
        content_type = "text/event-stream" if streamed else "application/json"
        response = web.StreamResponse(
            headers={**writing.reply.headers, "Content-Type": content_type}
        )
        await response.prepare(request)
        if streamed:
            stop = None if fault is None else fault.stream_break_after
            for chunk in writing.chunks()[:stop]:
                await response.write(_event(chunk))
                await asyncio.sleep(writing.reply.chunk_delay)
        else:
            data = json.dumps(writing.whole()).encode()
            await response.write(data[: len(data) // 2])
        if fault is None:
            await response.write(b"data: [DONE]\n\n")
        elif fault.hang:
            await asyncio.Event().wait()
        elif fault.body is not None and streamed:
            await response.write(_event(fault.body))
        else:
            return _drop(request, response)
        await response.write_eof()
        return response

    def _ids(self, pieces: Sequence[bytes]) -> list[int]:
        return [self._vocabulary.setdefault(p, len(self._vocabulary) + 100) for p in pieces]

    def _piece(self, token: int) -> bytes:
        return next((p for p, known in self._vocabulary.items() if known == token), b"?")


class _Writing:
    """One reply on its way onto the wire."""

    def __init__(self, server: ScriptedServer, body: Json, call: int, answer: Reply | str) -> None:
        reply = Reply(answer) if isinstance(answer, str) else answer
        self.server, self.body, self.call, self.reply = server, body, call, reply
        split: Callable[[str], Sequence[str | bytes]]
        split = split_characters if reply.split_bytes else words
        self.prompt = prompt_pieces(body["messages"], split=split)
        given = reply.logprobs
        if given is None or isinstance(given, str):
            texts = split(reply.text)
            pairs = [(text, pseudo_logprob(text, index)) for index, text in enumerate(texts)]
            if pairs and _text(pairs[0][0]) in reply.alternatives:
                pairs[0] = (pairs[0][0], reply.alternatives[_text(pairs[0][0])])
        else:
            pairs = list(given)
        self.tokens = [(t.encode() if isinstance(t, str) else t, logprob) for t, logprob in pairs]
        asked = bool(body.get("logprobs")) and given is not None
        self.entries: list[Json] | None = self._entries() if asked else None

    @property
    def base(self) -> Json:
        model = self.reply.model or self.body.get("model") or self.server.models[0]
        return {"id": f"chatcmpl-{self.call}", "created": 1, "model": model}

    def whole(self) -> Json:
        kind, reply = self.server.kind, self.reply
        message: Json = {"role": "assistant", "content": reply.text}
        if kind != "llama.cpp":
            message["refusal"] = None
        message |= self._reasoning(reply.reasoning)
        choice: Json = {"index": 0, "message": message | reply.message}
        choice |= self._logprobs(self.entries)
        choice["finish_reason"] = reply.finish_reason
        answer = {**self.base, "object": "chat.completion", "choices": [choice]}
        if (usage := self._usage()) is not None:
            answer["usage"] = usage
        if kind == "vllm":
            choice |= {"stop_reason": None, "token_ids": None}
            answer |= self._prompt()
        elif kind == "llama.cpp":
            answer |= {"timings": {"prompt_n": len(self.prompt), "predicted_n": len(self.tokens)}}
        return answer | reply.extra

    def chunks(self) -> list[Json]:
        empty = None if self.server.kind == "llama.cpp" else ""
        chunks = [self._chunk({"role": "assistant", "content": empty})]
        thoughts = words(self.reply.reasoning or "")
        chunks += [self._chunk(self._reasoning(thought)) for thought in thoughts]
        texts = _decode_incrementally([token for token, _ in self.tokens])
        for index, text in enumerate(texts):
            entries = None if self.entries is None else [self.entries[index]]
            chunks.append(self._chunk({"content": text}, entries))
        chunks.append(self._chunk({}, finish_reason=self.reply.finish_reason))
        usage = self._usage()
        if usage is not None and (self.body.get("stream_options") or {}).get("include_usage"):
            chunks.append({**chunks[0], "choices": [], "usage": usage})
        return chunks

    def _chunk(
        self, delta: Json, entries: list[Json] | None = None, finish_reason: str | None = None
    ) -> Json:
        choice = {"index": 0, "delta": delta, **self._logprobs(entries)}
        choice["finish_reason"] = finish_reason
        return {**self.base, "object": "chat.completion.chunk", "choices": [choice]}

    def _logprobs(self, entries: list[Json] | None) -> Json:
        if entries is not None:
            return {"logprobs": {"content": entries}}
        return {} if self.server.kind == "llama.cpp" else {"logprobs": None}

    def _reasoning(self, text: str | None) -> Json:
        if text is None:
            return {}
        return {"reasoning_content" if self.server.kind == "llama.cpp" else "reasoning": text}

    def _usage(self) -> Json | None:
        if self.reply.usage != AUTO:
            return self.reply.usage
        prompt, completion = len(self.prompt), len(self.tokens)
        details = None if self.server.kind == "vllm" else {"cached_tokens": 0}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": details,
        }

    def _entries(self) -> list[Json]:
        shown = self._shown([token for token, _ in self.tokens])
        entries = []
        for index, (data, logprob) in enumerate(self.tokens):
            entry = self._entry(data, shown[index], logprob)
            candidates = {text.encode(): value for text, value in self.reply.alternatives.items()}
            if index:
                candidates = {b" or": logprob - 1.0, b" so": logprob - 2.0}
            candidates.pop(data, None)
            ids = self.body.get("logprob_token_ids") if self.server.kind == "vllm" else None
            if ids is None:
                ranked = sorted(candidates.items(), key=lambda pair: -pair[1])
                count = self.body.get("top_logprobs") or 0
            else:
                named = [self.server._piece(token) for token in ids]
                ranked = [(p, candidates.get(p, -20.0)) for p in named if p != data]
                count = len(ranked) + 1
            others = [self._entry(p, p.decode(errors="replace"), value) for p, value in ranked]
            entries.append({**entry, "top_logprobs": [entry, *others][:count]})
        return entries

    def _entry(self, data: bytes, text: str, logprob: float) -> Json:
        if self.server.kind == "vllm":
            data = text.encode()
        entry: Json = {"token": text, "bytes": list(data), "logprob": logprob}
        if self.server.kind == "llama.cpp":
            entry["id"] = self.server._ids([data])[0]
        return entry

    def _shown(self, pieces: Sequence[bytes]) -> list[str]:
        """Return the tokens' text: each kind of server has its way with parts of characters."""
        if self.server.kind == "vllm":
            return _decode_incrementally(pieces)
        if self.server.kind == "llama.cpp":
            return [codecs.getincrementaldecoder("utf-8")("replace").decode(p) for p in pieces]
        return [piece.decode(errors="backslashreplace") for piece in pieces]

    def _prompt(self) -> Json:
        ids, reply = self.server._ids(self.prompt), self.reply
        logprobs: Any = None
        if (wanted := self.body.get("prompt_logprobs")) is not None:
            logprobs = reply.prompt_logprobs
            if logprobs == AUTO:
                logprobs = [None]
                texts = _decode_incrementally(self.prompt)
                for index in range(1, len(ids)):
                    value = pseudo_logprob(self.prompt[index], index)
                    row = {str(ids[index]): _rank(value, 3 if wanted else 1, texts[index])}
                    if wanted:
                        row["1"] = _rank(value / 2, 1, " other")
                    logprobs.append(row)
        token_ids = ids if reply.prompt_token_ids == AUTO else reply.prompt_token_ids
        if not self.body.get("return_token_ids"):
            token_ids = None
        return {"prompt_logprobs": logprobs, "prompt_token_ids": token_ids}


def _rank(logprob: float, rank: int, text: str) -> Json:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


def _text(content: Any) -> str:
    """Return a message's or token's text, whatever form it has."""
    if isinstance(content, bytes):
        return content.decode(errors="replace")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _decode_incrementally(pieces: Sequence[bytes]) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(piece) for piece in pieces]


def _event(data: Any) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def _drop(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.close()
    return response
