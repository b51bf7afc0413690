"""EndpointLLM: an `Endpoint` as an LLM of LlamaIndex."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, cast

from llama_index.core.base.llms.generic_utils import (
    achat_to_completion_decorator,
    astream_chat_to_completion_decorator,
    chat_to_completion_decorator,
    stream_chat_to_completion_decorator,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.llms import LLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback

from specrag_integrations.endpoint import Endpoint
from specrag_integrations.errors import ConfigurationError, MalformedReplyError
from specrag_integrations.foreign import logprobs_of
from specrag_integrations.llama_index.messages import messages_from
from specrag_integrations.models import ChatDelta, ChatReply, ChatRequest, Step
from specrag_integrations.portal import portal

_STEP = Step(kind="fallback")
"""An endpoint reads nothing from it."""
_INTENT = frozenset({"labels", "score_message", "forced", "think"})
"""What only the core asks for, see `ChatRequest`."""


class EndpointResponse(ChatResponse):
    """A reply of an endpoint; `raw` has it in the shape of OpenAI's API."""

    _reply: ChatReply | None = PrivateAttr(default=None)

    @property
    def reply(self) -> ChatReply | None:
        """The whole reply; None before the end of a stream."""
        return self._reply


class EndpointLLM(LLM):
    """A chat model behind an OpenAI-compatible URL, wherever LlamaIndex takes an LLM.

    Its requests share the endpoint's connections, concurrency limit and retries. Serialised, it
    holds neither the endpoint nor a key.

    Args:
        endpoint: The server and its model.
        max_tokens: The most tokens of a reply.
        temperature: 0 for the likeliest reply.
        context_window: What LlamaIndex packs prompts into, in tokens.

    Raises:
        ConfigurationError: no `Endpoint`, or an option that there is not.
    """

    endpoint: Endpoint = Field(exclude=True, repr=False)
    max_tokens: int = Field(default=256, gt=0)
    temperature: float = Field(default=0.0, ge=0.0)
    context_window: int = Field(default=DEFAULT_CONTEXT_WINDOW, gt=0)

    def __init__(self, endpoint: Endpoint, **data: Any) -> None:
        if not isinstance(endpoint, Endpoint):
            raise ConfigurationError(
                f"endpoint must be an Endpoint, not a {type(endpoint).__name__}; "
                "write EndpointLLM(Endpoint(base_url, model))"
            )
        unknown = data.keys() - type(self).model_fields.keys() - {"class_name"}
        if unknown:  # the base class would drop them
            raise ConfigurationError(
                f"EndpointLLM has no {', '.join(sorted(unknown))}; it has max_tokens, temperature "
                "and context_window, and what the server takes for every request belongs into "
                "Endpoint(extra_body=…)"
            )
        super().__init__(endpoint=endpoint, **data)  # type: ignore[call-arg]

    @classmethod
    def class_name(cls) -> str:
        """Return the name in serialised forms."""
        return "EndpointLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex wants to know of a model; its name is the address until it is asked."""
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.max_tokens,
            is_chat_model=True,
            model_name=self.endpoint.name,
        )

    # ---------------------------------------------------------------- chat

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Return the reply; `max_tokens`, `temperature` and `top_logprobs` may be given.

        Raises:
            EndpointError: with the server's own message.
        """
        return self._ask(messages, **kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """As `chat`, without blocking the loop."""
        return await self._aask(messages, **kwargs)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """As `chat`, in pieces; the last response has `raw`."""
        return self._stream(messages, **kwargs)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """As `stream_chat`, without blocking the loop."""
        return await self._astream(messages, **kwargs)

    # ---------------------------------------------------------------- complete

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:  # noqa: ARG002, FBT001, FBT002
        """Chat with one user turn."""
        return chat_to_completion_decorator(self._ask)(prompt, **kwargs)

    @llm_completion_callback()
    async def acomplete(
        self,
        prompt: str,
        formatted: bool = False,  # noqa: ARG002, FBT001, FBT002
        **kwargs: Any,
    ) -> CompletionResponse:
        """As `complete`, without blocking the loop."""
        return await achat_to_completion_decorator(self._aask)(prompt, **kwargs)

    @llm_completion_callback()
    def stream_complete(
        self,
        prompt: str,
        formatted: bool = False,  # noqa: ARG002, FBT001, FBT002
        **kwargs: Any,
    ) -> CompletionResponseGen:
        """As `complete`, in pieces."""
        return stream_chat_to_completion_decorator(self._stream)(prompt, **kwargs)

    @llm_completion_callback()
    async def astream_complete(
        self,
        prompt: str,
        formatted: bool = False,  # noqa: ARG002, FBT001, FBT002
        **kwargs: Any,
    ) -> CompletionResponseAsyncGen:
        """As `stream_complete`, without blocking the loop."""
        stream = astream_chat_to_completion_decorator(self._astream)
        return await stream(prompt, **kwargs)

    # ---------------------------------------------------------------- without events

    def _ask(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return portal.run(self._chat(self._request(messages, kwargs)))

    async def _aask(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await self._chat(self._request(messages, kwargs))

    def _stream(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return portal.iterate(self._pieces(self._request(messages, kwargs)))

    async def _astream(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        return self._pieces(self._request(messages, kwargs))

    # ---------------------------------------------------------------- requests and replies

    def _request(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> ChatRequest:
        """Word a call as the endpoint takes it.

        Raises:
            ConfigurationError: an argument that it does not take.
        """
        asked = dict(kwargs)
        limit = asked.pop("max_tokens", None)
        temperature = asked.pop("temperature", None)
        logprobs = asked.pop("logprobs", None)
        alternatives = asked.pop("top_logprobs", 0 if logprobs else None)
        intent = {name: asked.pop(name) for name in _INTENT & asked.keys()}
        if asked:
            raise ConfigurationError(
                f"EndpointLLM takes no {', '.join(sorted(asked))}; what the server takes for every "
                "request belongs into Endpoint(extra_body=…)"
            )
        return ChatRequest(
            messages=messages_from(messages),
            max_tokens=self.max_tokens if limit is None else limit,
            temperature=self.temperature if temperature is None else temperature,
            top_logprobs=alternatives,
            **intent,
        )

    async def _chat(self, request: ChatRequest) -> EndpointResponse:
        return _response(await self.endpoint.chat(request, step=_STEP))

    async def _pieces(self, request: ChatRequest) -> AsyncGenerator[ChatResponse, None]:
        text, reply = "", None
        stream = cast(AsyncGenerator[ChatDelta, None], self.endpoint.stream(request, step=_STEP))
        # Left early, the request ends at once, and not with a loop that closes before it has ended.
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                reply = delta.reply
                if delta.text:
                    text += delta.text
                    yield ChatResponse(message=_said(text), delta=delta.text)
        if reply is None:
            raise MalformedReplyError(f"{self.endpoint.name}: the stream ended without a reply")
        yield _response(reply, delta="" if text else reply.text)


def _said(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=text)


def _response(reply: ChatReply, delta: str | None = None) -> EndpointResponse:
    response = EndpointResponse(message=_said(reply.text), delta=delta, raw=_raw(reply))
    response._reply = reply  # noqa: SLF001 - a field would be part of every trace
    return response


def _raw(reply: ChatReply) -> dict[str, Any]:
    """Return a reply in OpenAI's shape, from which handlers read the tokens used."""
    prompt, completion = reply.count.prompt, reply.count.completion
    raw: dict[str, Any] = {
        "model": reply.model,
        "choices": [
            {
                "index": 0,
                "finish_reason": reply.finish_reason,
                "message": {"role": "assistant", "content": reply.text},
                "logprobs": None if reply.tokens is None else logprobs_of(reply.tokens),
            }
        ],
    }
    if prompt is not None and completion is not None:
        raw["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
    return raw
