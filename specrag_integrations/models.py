"""The seam: what the pipeline asks of a model, and what it hears back.

A `ChatRequest` says what is *wanted*; each model says it in its own wire format. The orchestration
is written once against `ChatModel`, whether an `Endpoint`, a LangChain Runnable or a LlamaIndex
LLM stands behind it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Role = Literal["system", "user", "assistant"]
StepKind = Literal["draft", "verify", "select", "refine", "fallback"]

LOGPROB_FLOOR = -100.0
"""Servers write -9999 or -inf for "never"; one such token must not drown a mean, and e^-100 is as
good as never and has a logarithm."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Role
    content: str = field(repr=False)

    def to_dict(self) -> dict[str, str]:
        """Return the form every chat API takes.

        Half a surrogate pair, as badly cut text holds, cannot be sent and becomes "?".
        """
        return {"role": self.role, "content": self.content.encode(errors="replace").decode()}


def user(content: str) -> Message:
    """Return a user turn."""
    return Message("user", content)


def assistant(content: str) -> Message:
    """Return an assistant turn."""
    return Message("assistant", content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Which step of a question a request belongs to; names spans and traces."""

    kind: StepKind
    index: int = 0

    def __str__(self) -> str:
        return f"{self.kind}_{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One generation, as intent."""

    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float = 0.0
    top_logprobs: int | None = None
    """None: no log-probabilities; 0: those of the written tokens; n: n alternatives as well."""
    labels: tuple[str, ...] = ()
    """First tokens whose probability matters, for servers that can be asked for them by name."""
    score_message: int | None = None
    """Index of an assistant message whose tokens' log-probabilities are wanted as well."""
    forced: str = field(default="", repr=False)
    """The one text the model may write, for its tokens' log-probabilities; empty: any."""
    think: bool = True
    """False: no thinking aloud before the reply, where the model can be told so."""

    @property
    def needs_logprobs(self) -> bool:
        """Whether the text alone would be worth nothing."""
        return bool(self.labels or self.forced)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token and its log-probability in nats."""

    text: str
    data: bytes
    """The token's bytes: a character may be spread over several tokens."""
    logprob: float
    alternatives: tuple[tuple[str, float], ...] = ()
    """(text, log-probability in nats) of the likeliest tokens here, in no certain order."""


def overlapping(lengths: Sequence[int], start: int, end: int) -> list[int]:
    """Return which of some pieces laid end to end overlap [start, end).

    A piece without length belongs to the next that has some: several servers give the first tokens
    of a character no text, and the last all of it, with the white space that the first began with.
    """
    places: list[int] = []
    empty: list[int] = []
    position = 0
    for place, length in enumerate(lengths):
        if not length:
            empty.append(place)
            continue
        if position < end and position + length > start:
            places += [*empty, place]
        empty = []
        position += length
    return places


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """Tokens one request cost, as the server counted them; None where it did not say."""

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None
    """Prompt tokens read from the server's prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """What a model wrote."""

    text: str
    tokens: tuple[Token, ...] | None = None
    """The written tokens; None where the server returned none, or unusable ones."""
    scored: tuple[Token, ...] | None = None
    """The tokens of `ChatRequest.score_message`; None where the server cannot tell."""
    scored_evidence: str = ""
    """What came back for `scored`, such as `0 of 75 positions`."""
    thinking: bool = False
    """The model thought aloud first."""
    finish_reason: str | None = None
    """`stop`, `length`, or what else the server says."""
    count: TokenCount = field(default_factory=TokenCount)
    model: str | None = None
    seconds: float = 0.0
    """From sending to the last byte, queueing and retries included."""
    attempts: int = 1
    """HTTP requests sent for this reply."""
    notes: tuple[str, ...] = ()
    """What a reader of the trace should know, such as a prompt cut by the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """A piece of a streamed reply; the last one carries the whole reply."""

    text: str = ""
    reply: ChatReply | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a server told about itself."""

    server: str | None = None
    """`llama.cpp`, `vllm`, … or None where it does not say."""
    context_tokens: int | None = None
    """Prompt and completion of one request together."""
    counts_tokens: bool = False
    """Whether `count_tokens` asks the server's own tokeniser."""
    forces_text: bool = False
    """Whether `ChatRequest.forced` can be obeyed."""
    weights: str | None = None
    """The quantisation and size of the model's weights, where the server tells."""


class ChatModel(Protocol):
    """A chat model as the pipeline sees it."""

    @property
    def name(self) -> str:
        """A short name for traces, free of secrets."""
        ...

    @property
    def max_attempts(self) -> int:
        """The most HTTP requests one `chat` or `stream` may send."""
        ...

    async def chat(self, request: ChatRequest, *, step: Step) -> ChatReply:
        """Return the whole reply, or raise an `EndpointError`."""
        ...

    def stream(self, request: ChatRequest, *, step: Step) -> AsyncIterator[ChatDelta]:
        """Yield pieces of the reply; the last delta carries it whole."""
        ...

    async def capabilities(self) -> Capabilities | None:
        """Return what the server says of itself, asked once; None for a model of an application.

        None also means that no trial request may be sent: what it can do shows in its replies.
        """
        ...

    async def probe(self, request: ChatRequest) -> ChatReply | None:
        """Send a trial request, the same one only once; None where `capabilities` is None.

        Raises:
            EndpointError: as `chat`; a failure that may pass is not remembered.
        """
        ...

    async def count_tokens(self, messages: Sequence[Message]) -> int | None:
        """Return the length of a templated prompt by the server's tokeniser, or None."""
        ...

    async def aclose(self) -> None:
        """Release connections; the model may be used again afterwards."""
        ...
