"""Turns: a conversation as LangChain's messages, and as ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    convert_to_messages,
)

from specrag_integrations.errors import InputError
from specrag_integrations.models import Message, Role

_ROLES: Mapping[str, Role] = {
    "ai": "assistant",
    "assistant": "assistant",
    "developer": "system",
    "human": "user",
    "system": "system",
    "user": "user",
}
_KINDS = {"assistant": AIMessage, "system": SystemMessage, "user": HumanMessage}
_THOUGHTS = {"reasoning", "redacted_thinking", "thinking"}
_TOOLS = {"tool_call", "tool_use"}


def to_langchain(turns: Iterable[Message]) -> list[BaseMessage]:
    """Return our turns as LangChain's messages."""
    return [_KINDS[turn.role](content=turn.to_dict()["content"]) for turn in turns]


def from_langchain(messages: Sequence[BaseMessage]) -> tuple[Message, ...]:
    """Return LangChain's messages as our turns.

    Raises:
        InputError: one is neither system, user nor assistant, or holds more than text.
    """
    turns = []
    for message in messages:
        role = _role(message)
        if role is None:
            raise InputError(f"a {message.type!r} message cannot be sent; only chat turns can")
        turns.append(Message(role, _text(message)))
    return tuple(turns)


def history_of(messages: object) -> tuple[Message, ...]:
    """Return a conversation, in any form that LangChain takes, without the traffic of tools.

    Raises:
        InputError: it is no conversation.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InputError(f"chat_history must be a list of messages, not {type(messages).__name__}")
    try:
        read = convert_to_messages(messages)
    except (NotImplementedError, ValueError) as error:
        raise InputError(f"chat_history holds what is no message: {type(error).__name__}") from None
    return from_langchain([turn for turn in read if _role(turn) and _text(turn).strip()])


def without_tools(messages: Iterable[BaseMessage]) -> list[BaseMessage]:
    """Return what is left of messages without the traffic of tools."""
    return [message for message in messages if not _is_of_tools(message)]


def _is_of_tools(message: BaseMessage) -> bool:
    if isinstance(message, AIMessage) and message.tool_calls:
        return not _text(message).strip()
    return message.type in {"function", "tool"}


def _role(message: BaseMessage) -> Role | None:
    return _ROLES.get(message.role if isinstance(message, ChatMessage) else message.type)


def _text(message: BaseMessage) -> str:
    for block in message.content if isinstance(message.content, list) else ():
        kind = block.get("type") if isinstance(block, dict) else "text"
        if kind != "text" and kind not in _THOUGHTS | _TOOLS:
            raise InputError(f"a message holds a {kind!r} block; only text can be sent")
    return str(message.text)
