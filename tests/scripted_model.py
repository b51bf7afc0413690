"""A chat model in memory, for what needs no wire: it answers with what it was given, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specrag_integrations.models import ChatReply, ChatRequest, Step, Token


def tokens_of(*pieces: tuple[str, float]) -> tuple[Token, ...]:
    """Return tokens with their log-probabilities."""
    return tuple(Token(text=text, data=text.encode(), logprob=value) for text, value in pieces)


@dataclass(eq=False)
class ScriptedModel:
    """Answers with its replies in turn, the last one for ever; exceptions are raised."""

    replies: Sequence[ChatReply | Exception | str]
    name: str = "scripted"
    max_attempts: int = 1
    asked: list[tuple[ChatRequest, Step]] = field(default_factory=list)

    async def chat(self, request: ChatRequest, *, step: Step) -> ChatReply:
        """Return the next reply."""
        reply = self.replies[min(len(self.asked), len(self.replies) - 1)]
        self.asked.append((request, step))
        if isinstance(reply, Exception):
            raise reply
        return ChatReply(text=reply) if isinstance(reply, str) else reply
