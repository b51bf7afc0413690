"""Replies: a `ChatReply` as an `AIMessage`, and back.

An `AIMessage` has no place for log-probabilities of the prompt, so that they ride in its
`response_metadata`; what every LangChain integration puts there stands where all of them put it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from specrag_integrations.errors import ConfigurationError
from specrag_integrations.foreign import finish_reason_of, logprobs_of, tokens_of
from specrag_integrations.models import ChatReply, TokenCount
from specrag_integrations.replies import mapping

_OURS = "specrag"
_WHY = ("finish_reason", "stop_reason", "done_reason")
"""Where the integrations tell why a model stopped."""


def message_of(reply: ChatReply) -> AIMessage:
    """Return a whole reply."""
    return AIMessage(
        content=reply.text, response_metadata=_metadata(reply), usage_metadata=_usage(reply.count)
    )


def last_chunk_of(reply: ChatReply) -> AIMessageChunk:
    """Return what a streamed reply ends with, once its text has been sent."""
    return AIMessageChunk(
        content="", response_metadata=_metadata(reply), usage_metadata=_usage(reply.count)
    )


def reply_of(message: object, *, name: str, seconds: float) -> ChatReply:
    """Return what a Runnable wrote, a message or a string; `name` is the Runnable's.

    Raises:
        ConfigurationError: it wrote something else.
    """
    if isinstance(message, str):
        return ChatReply(text=message, finish_reason="stop", seconds=seconds)
    if not isinstance(message, BaseMessage):
        raise ConfigurationError(
            f"{name} returned a {type(message).__name__}; a drafter or verifier must return an "
            "AIMessage"
        )
    told: Mapping[str, Any] = message.response_metadata
    ours = mapping(told.get(_OURS))
    return ChatReply(
        text=str(message.text),
        tokens=tokens_of(told.get("logprobs")),
        scored=tokens_of(ours.get("scored")),
        scored_evidence=ours.get("scored_evidence", ""),
        thinking=ours.get("thinking", _thought(message)),
        finish_reason=finish_reason_of(*map(told.get, _WHY)),
        count=_count(getattr(message, "usage_metadata", None)),
        model=told.get("model_name") or told.get("model"),
        seconds=seconds,
        attempts=ours.get("attempts", 1),
        notes=tuple(ours.get("notes", ())),
    )


def _metadata(reply: ChatReply) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "model_name": reply.model,
        "finish_reason": reply.finish_reason,
        _OURS: {"attempts": reply.attempts, "notes": list(reply.notes), "thinking": reply.thinking},
    }
    if reply.tokens is not None:
        metadata["logprobs"] = logprobs_of(reply.tokens)
    if reply.scored is not None:
        metadata[_OURS]["scored"] = logprobs_of(reply.scored)
    if reply.scored_evidence:
        metadata[_OURS]["scored_evidence"] = reply.scored_evidence
    return metadata


def _usage(count: TokenCount) -> UsageMetadata | None:
    if count.prompt is None or count.completion is None:
        return None
    usage = UsageMetadata(
        input_tokens=count.prompt,
        output_tokens=count.completion,
        total_tokens=count.prompt + count.completion,
    )
    if count.cached is not None:
        usage["input_token_details"] = InputTokenDetails(cache_read=count.cached)
    return usage


def _count(usage: UsageMetadata | None) -> TokenCount:
    if usage is None:
        return TokenCount()
    return TokenCount(
        prompt=usage["input_tokens"],
        completion=usage["output_tokens"],
        cached=usage.get("input_token_details", InputTokenDetails()).get("cache_read"),
    )


def _thought(message: BaseMessage) -> bool:
    blocks = message.content if isinstance(message.content, list) else []
    kinds = {block.get("type") for block in blocks if isinstance(block, dict)}
    beside = message.additional_kwargs.get("reasoning_content")
    return bool(beside or kinds & {"reasoning", "redacted_thinking", "thinking"})
