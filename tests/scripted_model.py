"""A chat model in memory, for what needs no wire: it answers with what it was given, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specrag_integrations.models import Capabilities, ChatReply, ChatRequest, Step, Token

Said = ChatReply | Exception | str


def tokens_of(*pieces: tuple[str, float]) -> tuple[Token, ...]:
    """Return tokens with their log-probabilities."""
    return tuple(Token(text=text, data=text.encode(), logprob=value) for text, value in pieces)


@dataclass(eq=False)
class ScriptedModel:
    """Answers with its replies in turn, the last one for ever, or as a function of the request.

    Exceptions are raised.
    """

    replies: Sequence[Said] | Callable[[ChatRequest], Said]
    name: str = "scripted"
    max_attempts: int = 1
    tried: ChatReply | Exception | None = None
    """The answer to every trial; None: a model of an application, which must not be tried."""
    known: Capabilities | None = None
    asked: list[tuple[ChatRequest, Step]] = field(default_factory=list)
    trials: list[ChatRequest] = field(default_factory=list)

    async def chat(self, request: ChatRequest, *, step: Step) -> ChatReply:
        """Return the next reply."""
        turn = len(self.asked)
        self.asked.append((request, step))
        if callable(self.replies):
            return _reply(self.replies(request))
        return _reply(self.replies[min(turn, len(self.replies) - 1)])

    async def capabilities(self) -> Capabilities | None:
        """Return what is known of it besides its replies."""
        return self.known

    async def probe(self, request: ChatRequest) -> ChatReply | None:
        """Answer a trial."""
        self.trials.append(request)
        return None if self.tried is None else _reply(self.tried)


def _reply(said: Said) -> ChatReply:
    if isinstance(said, Exception):
        raise said
    return ChatReply(text=said) if isinstance(said, str) else said
