"""EndpointChat: an `Endpoint` as a LangChain chat model."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.load import dumpd
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import Field, SecretStr

from specrag_integrations.credentials import KEY_VARIABLE
from specrag_integrations.endpoint import Endpoint
from specrag_integrations.errors import ConfigurationError
from specrag_integrations.langchain.replies import last_chunk_of, message_of
from specrag_integrations.langchain.turns import from_langchain
from specrag_integrations.models import ChatDelta, ChatReply, ChatRequest, Step
from specrag_integrations.options import check_kind, checked_whole
from specrag_integrations.portal import portal

_STEP = Step(kind="draft")
"""HTTP has no steps; the run that the caller's config names is what traces show."""
_MAX_TOKENS = 256
_PER_CALL = frozenset(
    {
        "forced",
        "labels",
        "logprobs",
        "max_tokens",
        "score_message",
        "stream",  # read by LangChain
        "temperature",
        "think",
        "top_logprobs",
    }
)


class EndpointChat(BaseChatModel):
    """A chat model behind an OpenAI-compatible URL, as LangChain knows chat models.

    All its requests go through one `Endpoint`: one background loop, one pool of connections and one
    limit for all threads and event loops, so that it may be used from any of them, copied and
    pickled. Its messages carry log-probabilities in `response_metadata["logprobs"]`.

    Args:
        base_url: The server, with or without `/v1`.
        model: The served name; None takes the only one.
        api_key: Never shown, pickled or dumped, nor kept here; what was loaded anew reads
            `SPECRAG_API_KEY`.
        temperature: 0 writes the likeliest tokens.
        max_tokens: The most tokens of a reply; None: 256.
        stop: Texts that end a reply. They are looked for in the whole reply, which is then streamed
            in one piece.
        timeout: Seconds one HTTP request may take, before a retry.
        max_retries: How often a request is tried again.
        max_concurrency: The most HTTP requests under way at once.
        extra_body: Merged into the body of every request; in no repr and no trace.
        streaming: Whether `invoke` streams as well, for callbacks that want every token.
        endpoint: An `Endpoint` instead of all that says where and how: for headers, proxies and
            embedded servers.

    Raises:
        ConfigurationError: an argument can never work, or contradicts `endpoint`.
    """

    base_url: str = ""
    model: str | None = None
    api_key: SecretStr | None = None
    temperature: float = 0.0
    max_tokens: int | None = None
    stop: list[str] | None = None
    timeout: float = 60.0
    max_retries: int = 2
    max_concurrency: int = 32
    extra_body: dict[str, Any] = Field(default_factory=dict, repr=False)
    streaming: bool = False
    endpoint: Endpoint = Field(default=cast("Endpoint", None), exclude=True, repr=False)

    if not TYPE_CHECKING:  # type checkers read the fields

        def __init__(
            self, base_url: str | Endpoint | None = None, model: str | None = None, **options: Any
        ) -> None:
            if unknown := options.keys() - type(self).model_fields:
                raise ConfigurationError(
                    f"EndpointChat takes no {', '.join(sorted(unknown))}; a server's own options "
                    "go into extra_body"
                )
            if isinstance(base_url, Endpoint):
                base_url, options = None, {"endpoint": base_url, **options}
            given = {"base_url": base_url, "model": model}
            options |= {name: value for name, value in given.items() if value is not None}
            endpoint = options.pop("endpoint", None)
            check_kind("endpoint", endpoint, kind=Endpoint)
            if endpoint is None:
                endpoint = _made(options)
            else:
                _check_agreement(endpoint, options)
            # The key is the endpoint's alone, which knows how to keep it.
            told = {**_shown(endpoint), "api_key": None, "endpoint": endpoint}
            super().__init__(**{**options, **told})
            if self.max_tokens is not None:
                checked_whole("max_tokens", self.max_tokens)

    @property
    def _llm_type(self) -> str:
        return "specrag-endpoint"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {
            "base_url": self.base_url,
            "model": self.endpoint.name,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens or _MAX_TOKENS,
            "stop": self.stop,
        }

    @property
    def lc_secrets(self) -> dict[str, str]:
        """The key, by the variable that it is loaded from."""
        return {"api_key": KEY_VARIABLE}

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Whether `dumpd` writes what `load` can read."""
        return True

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """That there is a key, where there is one: LangChain puts the variable in its place."""
        return {"api_key": KEY_VARIABLE} if self.endpoint.has_key else {}

    def to_json(self) -> Any:
        """Return what `dumpd` writes and `load` reads: all of it but the key.

        Raises:
            ConfigurationError: what is loaded would ask its server otherwise.
        """
        if self.endpoint.options["client_factory"] is not None:
            raise ConfigurationError(
                f"{self.endpoint!r} has a client_factory, which cannot be dumped; make the chat "
                "model where it is used"
            )
        try:
            pickle.dumps(self.endpoint)
        except pickle.PicklingError as error:
            raise ConfigurationError(f"it cannot be dumped: {error}") from None
        return super().to_json()

    @property
    def _serialized(self) -> dict[str, Any]:
        """What traces show, and caches tell models apart by: a dump may hold and refuse more."""
        shown: dict[str, Any] = dict(super().to_json())
        kwargs = {name: dumpd(value) for name, value in shown.get("kwargs", {}).items()}
        if self.extra_body:
            body = json.dumps(self.extra_body, sort_keys=True, default=repr).encode()
            kwargs["extra_body"] = f"sha256 {hashlib.sha256(body).hexdigest()[:16]}"
        return {**shown, "kwargs": kwargs}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = LangSmithParams(
            ls_provider="openai-compatible",
            # A call that names another model is refused, and traced with what it asked for.
            ls_model_name=kwargs.get("model") or self.endpoint.name,
            ls_model_type="chat",
            ls_temperature=kwargs.get("temperature", self.temperature),
            ls_max_tokens=kwargs.get("max_tokens") or self.max_tokens or _MAX_TOKENS,
        )
        if ends := stop or self.stop:
            params["ls_stop"] = ends
        return params

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002 - LangChain reports
        **kwargs: Any,
    ) -> ChatResult:
        asked = self.endpoint.chat(self._request(messages, kwargs), step=_STEP)
        return _result(portal.run(asked), self._ends(stop))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002 - as above
        **kwargs: Any,
    ) -> ChatResult:
        reply = await self.endpoint.chat(self._request(messages, kwargs), step=_STEP)
        return _result(reply, self._ends(stop))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with closing(portal.iterate(self._chunks(messages, stop, kwargs))) as chunks:
            for chunk in chunks:
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with aclosing(self._chunks(messages, stop, kwargs)) as chunks:
            async for chunk in chunks:
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _chunks(
        self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]
    ) -> Any:
        request, ends = self._request(messages, options), self._ends(stop)
        deltas = cast("Any", self.endpoint.stream(request, step=_STEP))
        sent = False
        async with aclosing(deltas):
            delta: ChatDelta
            async for delta in deltas:
                if delta.text and not ends:
                    sent = True
                    yield _chunk(AIMessageChunk(content=delta.text))
                if delta.reply is not None:
                    reply = _ended(delta.reply, ends)
                    if reply.text and not sent:
                        yield _chunk(AIMessageChunk(content=reply.text))
                    yield _chunk(last_chunk_of(reply))

    def _ends(self, stop: list[str] | None) -> Sequence[str]:
        return stop or self.stop or ()

    def _request(self, messages: Sequence[BaseMessage], options: Mapping[str, Any]) -> ChatRequest:
        """Return what is wanted, by the options of this call.

        Raises:
            TypeError: there is no such option.
        """
        if unknown := options.keys() - _PER_CALL:
            raise TypeError(f"EndpointChat takes no {', '.join(sorted(unknown))} in a call")
        top = options.get("top_logprobs")
        limit = options.get("max_tokens")
        if limit is None:
            limit = self.max_tokens or _MAX_TOKENS
        return ChatRequest(
            messages=from_langchain(messages),
            max_tokens=checked_whole("max_tokens", limit),
            temperature=options.get("temperature", self.temperature),
            top_logprobs=0 if top is None and options.get("logprobs") else top,
            labels=tuple(options.get("labels", ())),
            score_message=options.get("score_message"),
            forced=options.get("forced", ""),
            think=options.get("think", True),
        )


def _made(options: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint that some options of a chat model describe."""
    fields = EndpointChat.model_fields

    def option(name: str) -> Any:
        return options.get(name, fields[name].get_default(call_default_factory=True))

    key = option("api_key")
    if not options.get("base_url"):
        raise ConfigurationError("EndpointChat needs a base_url, such as http://localhost:8000/v1")
    return Endpoint(
        options["base_url"],
        option("model"),
        api_key=key.get_secret_value() if isinstance(key, SecretStr) else key,
        extra_body=option("extra_body"),
        request_timeout=option("timeout"),
        max_concurrency=option("max_concurrency"),
        max_attempts=1 + checked_whole("max_retries", option("max_retries"), at_least=0),
    )


def _shown(endpoint: Endpoint) -> dict[str, Any]:
    """Return the fields that tell what an endpoint is."""
    options = endpoint.options
    return {
        "base_url": options["base_url"],
        "model": options["model"],
        "extra_body": options["extra_body"],
        "timeout": options["request_timeout"],
        "max_retries": options["max_attempts"] - 1,
        "max_concurrency": options["max_concurrency"],
    }


def _check_agreement(endpoint: Endpoint, given: Mapping[str, Any]) -> None:
    """Refuse what is given beside an endpoint and says otherwise.

    Raises:
        ConfigurationError: naming it.
    """
    if given.get("api_key") is not None:
        raise ConfigurationError("api_key belongs to the endpoint: Endpoint(…, api_key=…)")
    for name, value in _shown(endpoint).items():
        if name in given and given[name] != value:
            raise ConfigurationError(
                f"{name}={given[name]!r} contradicts endpoint={endpoint!r}; give one of them"
            )


def _ended(reply: ChatReply, ends: Sequence[str]) -> ChatReply:
    """Cut a reply off before the first of the texts that end it."""
    places = [place for end in ends if (place := reply.text.find(end)) >= 0]
    if not places:
        return reply
    return replace(reply, text=reply.text[: min(places)], finish_reason="stop", tokens=None)


def _result(reply: ChatReply, ends: Sequence[str]) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=message_of(_ended(reply, ends)))])


def _chunk(message: AIMessageChunk) -> ChatGenerationChunk:
    return ChatGenerationChunk(message=message)
