"""A scripted OpenAI-compatible HTTP server on loopback: the wire shapes of four kinds of server.

It is a real server in a thread of its own, never a patched client. `respond(body, call)` decides
each chat reply; everything it received can be read from the test's thread at any time:

    with ScriptedServer(lambda _, call: Fault(503) if call == 0 else "Yes") as server:
        ...  # talk to server.base_url
    assert len(server.chats) == 2

Tokens are words with the space before them, so a prompt costs its words plus four per message
(`prompt_pieces`), and log-probabilities are hashes (`pseudo_logprob`): tests can compute both.
The shapes are those recorded from vLLM 0.32 and llama.cpp, OpenAI's documented ones, and those of
SGLang's source.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any, Literal, Self

from aiohttp import web
from scripted_replies import (
    BROKEN_PROMPT_LOGPROBS,
    PROBE_QUESTION,
    THOUGHT,
    Answer,
    Fault,
    Forced,
    Json,
    Kind,
    Reply,
    Respond,
    Split,
    Template,
    Writing,
    default_respond,
    extra_forbidden,
    hash_unit,
    is_probe,
    is_verification,
    max_tokens_of,
    p_yes,
    plain_words,
    prompt_pieces,
    pseudo_logprob,
    split_characters,
    unsupported,
    words,
)

__all__ = [
    "BROKEN_PROMPT_LOGPROBS",
    "PROBE_QUESTION",
    "THOUGHT",
    "Fault",
    "Reply",
    "ScriptedServer",
    "default_respond",
    "hash_unit",
    "is_probe",
    "is_verification",
    "p_yes",
    "prompt_pieces",
    "pseudo_logprob",
    "split_characters",
    "unsupported",
    "words",
]

BOS = b"<s>"
_NO_CALL = -1
"""The `call` of a probe that the test's own `respond` answers."""
_MOST_TOKEN_IDS = 128
_OPENAI_MOST_LOGPROBS = 20
_FORCING_GRAMMAR = re.compile(r"\s*root\s*::=\s*((?:<\[\d+\]>\s*)*)")


class ScriptedServer:
    """The server; a context manager. Its options are attributes, read at each request.

    Args:
        respond: Answers the chat requests, or is the answer to all; None: `default_respond`.
        kind: Whose wire shapes to use.
        models: The served names.
        context_tokens: The most a prompt may have.
        api_key: Asked for where the kind of server does.
        delay: Seconds before each chat reply, those to probes excepted.
        refuse: Parameter: the message of the 400 it is answered with, or the whole answer.
        faults: Path: what it answers, whatever is asked.
        drops: Fields of a chat request that are ignored, as LiteLLM's `drop_params` does.
        forbid_extra: Whether fields that OpenAI does not have bring FastAPI's 422.
        probe: Answers the package's trial requests (`is_probe`), which are in `probes` and not in
            `chats`: None: `default_respond`; "respond": as all others, with `call` -1.
        forces: Whether llama.cpp follows a `grammar` of token literals; if not, it ignores it.
        thinks: Whether replies begin with a thinking block, `THOUGHT` or the tokens given here.
            Such replies are cut at `max_tokens`.
        obeys_thinking_switch: Whether `chat_template_kwargs` can prevent that.
        reasoning_parser: Whether the block is in a field of its own instead of the text; the
            log-probabilities are of all tokens either way.
        template: What the chat template does to assistants' turns.
        bos: Whether prompts begin with a special token of their own.
        max_logprobs: The most alternatives vLLM grants; -1: any number.
    """

    def __init__(
        self,
        respond: Respond | Answer | None = None,
        *,
        kind: Kind = "openai",
        models: Sequence[str] = ("scripted",),
        context_tokens: int = 8192,
        api_key: str | None = None,
        delay: float = 0.0,
        refuse: Mapping[str, str | Fault] | None = None,
        faults: Mapping[str, Fault] | None = None,
        drops: Sequence[str] = (),
        forbid_extra: bool = False,
        probe: Respond | Answer | Literal["respond"] | None = None,
        forces: bool = True,
        thinks: bool | Sequence[str] = False,
        obeys_thinking_switch: bool = True,
        reasoning_parser: bool = False,
        template: Template = "plain",
        bos: bool = False,
        max_logprobs: int = 20,
    ) -> None:
        self.respond = respond if respond is not None else default_respond
        self.kind = kind
        self.models = tuple(models)
        self.context_tokens = context_tokens
        self.api_key = api_key
        self.delay = delay
        self.refuse = dict(refuse or {})
        self.faults = dict(faults or {})
        self.drops = tuple(drops)
        self.forbid_extra = forbid_extra
        self.probe = probe
        self.forces = forces
        self.thinks = thinks
        self.obeys_thinking_switch = obeys_thinking_switch
        self.reasoning_parser = reasoning_parser
        self.template = template
        self.bos = bos
        self.max_logprobs = max_logprobs
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
            self._probes: list[Json] = []
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
    def probes(self) -> list[Json]:
        """Bodies of the package's trial requests, refused ones included."""
        with self._state:
            return list(self._probes)

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

    # Tokens.

    @property
    def thought(self) -> Sequence[str]:
        """The tokens of the thinking block; none where the model does not think."""
        return THOUGHT if self.thinks is True else tuple(self.thinks or ())

    def ids(self, pieces: Sequence[bytes]) -> list[int]:
        """Return the tokens' ids; the vocabulary grows with what it sees."""
        return [self._vocabulary.setdefault(p, len(self._vocabulary) + 100) for p in pieces]

    def piece(self, token: int) -> bytes:
        """Return the token with this id, `?` if it is unknown."""
        return next((p for p, known in self._vocabulary.items() if known == token), b"?")

    def prompt(self, body: Json, split: Split = words) -> list[bytes]:
        """Return the tokens of a conversation as the chat template of this server makes it."""
        options = ("add_generation_prompt", "continue_final_message")
        if self.kind not in {"vllm", "sglang"}:
            options = ()
        given = {name: body[name] for name in options if name in body}
        pieces = prompt_pieces(body["messages"], split=split, template=self.template, **given)
        return [BOS, *pieces] if self.bos else pieces

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
            app.router.add_get("/version", self._version)
        elif self.kind == "sglang":
            app.router.add_get("/server_info", self._server_info)
            app.router.add_get("/get_server_info", self._server_info)
        elif self.kind == "llama.cpp":
            app.router.add_post("/apply-template", self._apply_template)
            app.router.add_post("/tokenize", self._tokenize)
            app.router.add_get("/props", self._props)
        listening = socket.create_server(("127.0.0.1", 0))
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05
        )
        try:
            await runner.setup()
            await web.SockSite(runner, listening).start()
            port.set_result(runner.addresses[0][1])
            await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            port.set_exception(error)
        finally:
            # asyncio leaks a connection that it has accepted when its server closes: none is any
            # more, and those that were get their transports first.
            self._loop.remove_reader(listening)
            await asyncio.sleep(0)
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
        return path.startswith("/v1/") or (self.kind == "sglang" and path != "/health")

    def _has_key(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization")
        return self.api_key is None or given == f"Bearer {self.api_key}"

    def _unauthorized(self) -> Json:
        if self.kind in {"vllm", "sglang"}:
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
        if self.kind == "sglang":
            flat = {"object": "error", "message": message, "type": kind}
            return {**flat, "param": param, "code": status}
        code = status if self.kind == "vllm" else code
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def _error(self, status: int, message: str, kind: str, **more: Any) -> web.Response:
        return web.json_response(self._error_body(status, message, kind, **more), status=status)

    # Routes other than chat.

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"}) if self.kind == "llama.cpp" else web.Response()

    async def _list_models(self, _: web.Request) -> web.Response:
        root = self.models[0] if self.models else None
        card: Json = {"root": root, "parent": None, "max_model_len": self.context_tokens}
        kinds: dict[str, Json] = {
            "openai": {"owned_by": "system"},
            "vllm": {"owned_by": "vllm", **card},
            "sglang": {"owned_by": "sglang", **card},
            "llama.cpp": {
                "owned_by": "llamacpp",
                "meta": {"n_vocab": 49152, "n_ctx": self.context_tokens, "n_ctx_train": 131072},
            },
        }
        own = kinds[self.kind]
        data = [{"id": name, "object": "model", "created": 1, **own} for name in self.models]
        return web.json_response({"object": "list", "data": data})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _server_info(self, _: web.Request) -> web.Response:
        name = self.models[0] if self.models else None
        known = {"model_path": name, "served_model_name": name, "context_length": None}
        return web.json_response({**known, "internal_states": [{}], "version": "0.5.6"})

    async def _vllm_tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "messages" in body:
            if (refusal := self._two_ends(body)) is not None:
                return refusal
            pieces = self.prompt(body)
        else:
            pieces = self._with_bos(words(body["prompt"]), body.get("add_special_tokens", True))
        reply = {"count": len(pieces), "max_model_len": self.context_tokens}
        return web.json_response({**reply, "tokens": self.ids(pieces), "token_strs": None})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        split = words if body.get("parse_special", True) else plain_words
        pieces = self._with_bos(split(body["content"]), body.get("add_special", False))
        tokens: list[Any] = self.ids(pieces)
        if body.get("with_pieces"):
            pairs = zip(tokens, pieces, strict=True)
            tokens = [{"id": token, "piece": piece.decode()} for token, piece in pairs]
        return web.json_response({"tokens": tokens})

    def _with_bos(self, pieces: Sequence[str], wanted: bool) -> list[bytes]:
        return [BOS] * (self.bos and wanted) + [piece.encode() for piece in pieces]

    async def _apply_template(self, request: web.Request) -> web.Response:
        body = await request.json()
        pieces = prompt_pieces(body["messages"], template=self.template)
        return web.json_response({"prompt": b"".join(pieces).decode()})

    async def _props(self, _: web.Request) -> web.Response:
        settings = {"n_ctx": self.context_tokens, "params": {}}
        name = self.models[0] if self.models else ""
        known = {"default_generation_settings": settings, "total_slots": 4, "model_path": name}
        return web.json_response({**known, "build_info": "b11549-abc"})

    # Chat.

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except ValueError:
            return self._error(400, "JSON decode error", "invalid_request_error")
        if is_probe(body):
            return await self._chat_probe(request, body)
        with self._state:
            call = len(self._chats)
            self._chats.append(body)
            self._in_flight += 1
            self._max_in_flight = max(self._max_in_flight, self._in_flight)
            self._state.notify_all()
        gone = 0
        try:
            return await self._reply(request, body, self.respond, call, delay=self.delay)
        except (asyncio.CancelledError, ConnectionResetError):
            gone = 0 if self._closing else 1
            raise
        finally:
            with self._state:
                self._in_flight -= 1
                self._aborted += gone
                self._state.notify_all()

    async def _chat_probe(self, request: web.Request, body: Json) -> web.StreamResponse:
        with self._state:
            call = len(self._probes)
            self._probes.append(body)
            self._state.notify_all()
        respond = self.probe
        if respond is None:
            respond = default_respond
        elif respond == "respond":
            respond, call = self.respond, _NO_CALL
        return await self._reply(request, body, respond, call)

    async def _reply(
        self,
        request: web.Request,
        body: Json,
        respond: Respond | Answer,
        call: int,
        *,
        delay: float = 0.0,
    ) -> web.StreamResponse:
        seen = {name: value for name, value in body.items() if name not in self.drops}
        for refusal in self._refusals(seen):
            if refusal is not None:
                return refusal
        return await self._answer(request, seen, respond, call, delay)

    def _refusals(self, body: Json) -> Iterator[web.Response | None]:
        """Yield what a server of this kind answers before it generates anything."""
        yield self._unknown_field(body)
        yield self._too_many_logprobs(body)
        if self.kind == "vllm":
            yield self._two_ends(body)
        yield self._too_long(body)

    def _unknown_field(self, body: Json) -> web.Response | None:
        for param, refusal in self.refuse.items():
            if param in body and isinstance(refusal, Fault):
                return self._faulty(refusal)
            if param in body:
                error = {"message": refusal, "type": "invalid_request_error", "param": param}
                return web.json_response(
                    {"error": {**error, "code": "unsupported_parameter"}}, status=400
                )
        problem = extra_forbidden(body) if self.forbid_extra else None
        return None if problem is None else web.json_response(problem, status=422)

    def _too_many_logprobs(self, body: Json) -> web.Response | None:
        asked = body.get("top_logprobs")
        if self.kind == "sglang":
            return None
        if asked and not body.get("logprobs"):
            message = "top_logprobs requires logprobs to be set to true"
            return self._bad_request(message, "top_logprobs")
        if self.kind == "vllm":
            return self._too_many_for_vllm(body)
        if asked and asked > _OPENAI_MOST_LOGPROBS and self.kind == "openai":
            message = (
                "Invalid 'top_logprobs': integer above maximum value. Expected a value <= 20, "
            )
            message += f"but got {asked} instead."
            return self._bad_request(message, "top_logprobs", code="integer_above_max_value")
        return None

    def _too_many_for_vllm(self, body: Json) -> web.Response | None:
        ids = body.get("logprob_token_ids") or []
        if ids and not body.get("logprobs"):
            message = "when using `logprob_token_ids`, `logprobs` must be set to true."
            return self._bad_request(
                f"{message} (parameter=logprob_token_ids)", "logprob_token_ids"
            )
        asked = [
            ("logprob_token_ids", "logprob_token_ids of length", len(ids), _MOST_TOKEN_IDS),
            ("prompt_logprobs", "prompt logprobs of", body.get("prompt_logprobs"), None),
        ]
        if not ids:
            asked.append(("logprobs", "sample logprobs of", body.get("top_logprobs"), None))
        for param, what, count, fixed in asked:
            most = self.max_logprobs if fixed is None else fixed
            if count and count > most >= 0:
                message = f"Requested {what} {count}, which is greater than max allowed: {most}"
                return self._bad_request(f"{message} (parameter={param}, value={count})", param)
        return None

    def _two_ends(self, body: Json) -> web.Response | None:
        """Refuse a last message that is to be continued and followed by another."""
        if body.get("continue_final_message") and body.get("add_generation_prompt", True):
            flags = "`continue_final_message` and `add_generation_prompt`"
            return self._bad_request(f"Cannot set both {flags} to True.", None)
        return None

    def _bad_request(self, message: str, param: str | None, **more: Any) -> web.Response:
        ours = self.kind in {"vllm", "sglang"}
        kind = "BadRequestError" if ours else "invalid_request_error"
        return self._error(400, message, kind, param=param, **more)

    def _too_long(self, body: Json) -> web.Response | None:
        limit, length = self.context_tokens, max_tokens_of(body) or 0
        if length > limit and self.kind == "vllm":
            message = f"max_tokens={length} cannot be greater than max_model_len={limit}."
            return self._bad_request(message, "max_tokens")
        tokens = len(self.prompt(body))
        if self.kind == "sglang" and tokens <= limit < tokens + length:
            return self._no_room(tokens, length)
        return self._prompt_too_long(tokens) if tokens > limit else None

    def _no_room(self, tokens: int, length: int) -> web.Response:
        message = (
            "Requested token count exceeds the model's maximum context length of "
            f"{self.context_tokens} tokens. You requested a total of {tokens + length} tokens: "
            f"{tokens} tokens from the input messages and {length} tokens for the completion. "
            "Please reduce the number of tokens in the input messages or the completion to fit "
            "within the limit."
        )
        return self._bad_request(message, None)

    def _prompt_too_long(self, tokens: int) -> web.Response:
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
        if self.kind == "sglang":
            message = f"The input ({tokens} tokens) is longer than the model's context length "
            return self._bad_request(f"{message}({limit} tokens).", None)
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

    async def _answer(
        self,
        request: web.Request,
        body: Json,
        respond: Respond | Answer,
        call: int,
        delay: float,
    ) -> web.StreamResponse:
        try:
            answer = self._forced(body)
            if answer is None:
                answer = respond(body, call) if callable(respond) else respond
            if inspect.isawaitable(answer):
                answer = await answer
            if not isinstance(answer, Reply | Forced | Fault | str):
                raise TypeError(f"respond returned {answer!r}")  # noqa: TRY301 - reported alike
        except Exception as error:  # noqa: BLE001 - whatever the test's own function raises
            self.errors.append(error)
            return self._error(400, f"respond raised {error!r}", "invalid_request_error")
        await asyncio.sleep(delay)
        if isinstance(answer, Fault):
            broken = answer.reply if answer.reply is not None else default_respond(body, call)
            return await self._fail(request, answer, Writing(self, body, call, broken))
        writing = Writing(self, body, call, answer)
        await asyncio.sleep(writing.reply.delay)
        if body.get("stream"):
            return await self._stream(request, writing)
        return web.json_response(writing.whole(), headers=dict(writing.reply.headers))

    def _forced(self, body: Json) -> Forced | Fault | None:
        """Return what a grammar forces llama.cpp to write, or its complaint about the grammar."""
        grammar = body.get("grammar")
        ignored = self.kind != "llama.cpp" or not self.forces
        if ignored or not grammar or not isinstance(grammar, str):
            return None
        match = _FORCING_GRAMMAR.fullmatch(grammar)
        if match is None:
            message = "Failed to initialize samplers: failed to parse grammar"
            error = self._error_body(400, message, "invalid_request_error")
            return Fault(400, body=error, headers={})
        tokens = [int(token) for token in re.findall(r"\d+", match[1])]
        if unknown := set(tokens) - set(self._vocabulary.values()):
            message = f"Unexpected empty grammar stack after accepting piece: ? ({min(unknown)})"
            error = self._error_body(500, f"got exception: {message}", "server_error")
            return Fault(500, body=error, headers={})
        limit = max_tokens_of(body)
        pieces = [self.piece(token) for token in tokens]
        return Forced(pieces=pieces[:limit], ended=limit is None or limit > len(pieces))

    async def _fail(
        self, request: web.Request, fault: Fault, writing: Writing | None
    ) -> web.StreamResponse:
        await asyncio.sleep(fault.after)
        if fault.stream_break_after is not None and writing is not None:
            return await self._stream(request, writing, fault)
        if fault.hang:
            await asyncio.Event().wait()
        if fault.close:
            return _drop(request, web.Response())
        return self._faulty(fault)

    def _faulty(self, fault: Fault) -> web.Response:
        if fault.raw is not None:
            headers = {**fault.headers, "Content-Type": fault.content_type}
            return web.Response(body=fault.raw, status=fault.status, headers=headers)
        body = fault.body
        if body is None:
            reason = HTTPStatus(fault.status).phrase
            body = self._error_body(fault.status, f"scripted fault: {reason}", reason)
        return web.json_response(body, status=fault.status, headers=dict(fault.headers))

    async def _stream(
        self, request: web.Request, writing: Writing, fault: Fault | None = None
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


def _event(data: Any) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def _drop(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.close()
    return response
