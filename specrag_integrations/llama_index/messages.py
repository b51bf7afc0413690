"""Messages: LlamaIndex's turns as ours, and ours as LlamaIndex's."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock

from specrag_integrations.errors import ConfigurationError
from specrag_integrations.models import Message, Role

_ROLES: dict[MessageRole, Role] = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


def messages_from(turns: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Return LlamaIndex's turns as ours.

    Raises:
        ConfigurationError: a turn holds more than text, or is a tool's.
    """
    return tuple(Message(_role_of(turn), _text_of(turn)) for turn in turns)


def chat_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Return our turns as LlamaIndex's."""
    return [ChatMessage(role=message.role, content=message.content) for message in messages]


def _role_of(turn: ChatMessage) -> Role:
    if turn.role not in _ROLES:
        raise ConfigurationError(
            f"a turn of a {turn.role.value!r} cannot be sent; use system, user and assistant"
        )
    return _ROLES[turn.role]


def _text_of(turn: ChatMessage) -> str:
    others = {type(block).__name__ for block in turn.blocks if not isinstance(block, TextBlock)}
    if others:
        raise ConfigurationError(
            f"only text can be sent, and a turn holds {', '.join(sorted(others))}"
        )
    return turn.content or ""
