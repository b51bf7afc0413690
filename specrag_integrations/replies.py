"""Replies: what servers send, read into `ChatReply` and `Capabilities`.

Servers that ignore a field answer 200 all the same, so nothing is believed before it was checked:
an array that is missing, short, null, not finite or full of fillers means "cannot".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specrag_integrations.errors import MalformedReplyError
from specrag_integrations.models import (
    LOGPROB_FLOOR,
    Capabilities,
    ChatReply,
    ChatRequest,
    Token,
    TokenCount,
    overlapping,
)

Json = dict[str, Any]

_ROUNDING = 1e-3
"""How far above 0 a log-probability may be by rounding; beyond, it is something else."""
_CUT_PROMPT_RATIO = 10
"""Characters per prompt token beyond which the server must have cut the prompt (usual: 3-5)."""


def read_reply(data: Json, request: ChatRequest, *, endpoint: str) -> ChatReply:
    """Read the body of a chat completion; `endpoint` is its name in errors.

    Raises:
        MalformedReplyError: there is no message in it.
    """
    choice = mapping(next(iter(_items(data.get("choices"))), None))
    message = choice.get("message")
    if not isinstance(message, dict):
        raise MalformedReplyError(
            f"{endpoint}: the reply has no choices[0].message", endpoint=endpoint
        )
    count = _read_count(data.get("usage"))
    finish = choice.get("finish_reason")
    model = data.get("model")
    text = message.get("content")
    scored = read_scored(data, request)
    return ChatReply(
        text=text if isinstance(text, str) else "",
        tokens=read_tokens(choice.get("logprobs")) if request.top_logprobs is not None else None,
        scored=scored.tokens if scored else None,
        scored_evidence=scored.evidence if scored else "",
        thinking=bool(message.get("reasoning") or message.get("reasoning_content")),
        finish_reason=finish if isinstance(finish, str) else None,
        count=count,
        model=model if isinstance(model, str) else None,
        notes=_cut_prompt(request, count),
    )


def _read_count(usage: object) -> TokenCount:
    counts = mapping(usage)
    return TokenCount(
        prompt=_whole(counts.get("prompt_tokens")),
        completion=_whole(counts.get("completion_tokens")),
        cached=_whole(mapping(counts.get("prompt_tokens_details")).get("cached_tokens")),
    )


def _cut_prompt(request: ChatRequest, count: TokenCount) -> tuple[str, ...]:
    """Notice a server that silently keeps only part of a long prompt."""
    characters = sum(len(message.content) for message in request.messages)
    if count.prompt and characters > _CUT_PROMPT_RATIO * count.prompt:
        return (f"{characters} characters became {count.prompt} tokens: the server cut the prompt",)
    return ()


def read_tokens(logprobs: object) -> tuple[Token, ...] | None:
    """Read the written tokens; None where they are missing or carry no information."""
    found = mapping(logprobs)
    entries = _items(found.get("content")) or _from_completions_shape(found)
    tokens = [_read_token(entry) for entry in entries]
    usable = [token for token in tokens if token is not None]
    if not usable or len(usable) != len(tokens):
        return None
    if all(token.logprob <= LOGPROB_FLOOR for token in usable):
        return None  # a server that fills the array without computing anything
    return tuple(usable)


def _read_token(entry: object) -> Token | None:
    fields = mapping(entry)
    text, logprob = fields.get("token"), _logprob(fields.get("logprob"))
    if not isinstance(text, str) or logprob is None:
        return None
    alternatives = [
        (other["token"], value)
        for other in map(mapping, _items(fields.get("top_logprobs")))
        if isinstance(other.get("token"), str)
        and (value := _logprob(other.get("logprob"))) is not None
    ]
    return Token(
        text=text,
        data=_read_bytes(fields.get("bytes"), text),
        logprob=logprob,
        alternatives=tuple(alternatives),
    )


def _read_bytes(raw: object, text: str) -> bytes:
    try:
        return bytes(_items(raw)) or text.encode(errors="replace")
    except (TypeError, ValueError):  # not a list of numbers below 256
        return text.encode(errors="replace")


def _from_completions_shape(found: Json) -> list[Json]:
    """Read the shape of `/v1/completions`, which some servers send from the chat route too."""
    texts, values = _items(found.get("tokens")), _items(found.get("token_logprobs"))
    tops = _items(found.get("top_logprobs")) or [None] * len(texts)
    if not len(texts) == len(values) == len(tops):
        return []
    return [
        {
            "token": text,
            "logprob": value,
            "top_logprobs": [{"token": t, "logprob": v} for t, v in mapping(top).items()],
        }
        for text, value, top in zip(texts, values, tops, strict=True)
    ]


def _logprob(value: object) -> float | None:
    """Return a usable log-probability in nats, floored; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return None
    return None if value > _ROUNDING else min(0.0, max(float(value), LOGPROB_FLOOR))


@dataclass(frozen=True, slots=True)
class Scored:
    """An assistant message's tokens in vLLM's `prompt_logprobs`, or what stands against them."""

    evidence: str
    tokens: tuple[Token, ...] | None = None
    ids: tuple[int, ...] = ()
    """The whole prompt's."""
    start: int = 0
    """The place of the first token in the prompt."""


def read_scored(data: Json, request: ChatRequest) -> Scored | None:
    """Cut the scored message's tokens out of `prompt_logprobs`; None if no message is to be scored.

    The server does not map tokens to messages, so the messages are looked for in the decoded
    prompt, from its start and from its end. A template that changes the text makes this fail, and
    so does a text that occurs twice: never guess.
    """
    if request.score_message is None:
        return None
    entries = [mapping(entry) for entry in _items(data.get("prompt_logprobs"))]
    ids = _prompt_ids(data, entries)
    told = len(_items(data.get("prompt_token_ids")))
    length = told or _read_count(data.get("usage")).prompt or len(entries)
    tokens = [_read_prompt_token(e, i) for e, i in zip(entries, ids or (), strict=False)]
    usable = sum(token is not None for token in tokens)
    positions = f"{usable} of {length} positions"
    if not usable or ids is None or len(entries) != length:
        return Scored(positions)
    pieces = [token.text if token else "" for token in tokens]
    texts = [message.to_dict()["content"] for message in request.messages]
    cut = _places(pieces, texts, request.score_message)
    if cut == _CHANGED and not any(" " in piece for piece in pieces):
        # Some tokenisers decode single tokens without the space before them.
        cut = _places(
            list(map(_squeezed, pieces)), list(map(_squeezed, texts)), request.score_message
        )
    if isinstance(cut, str):
        return Scored(f"{positions}, but {cut}" if usable == length - 1 else positions)
    found = [tokens[place] for place in range(cut[0], cut[-1] + 1)]
    known = tuple(token for token in found if token is not None)
    if len(known) < len(found):
        return Scored(f"{positions}, but not those of the whole message")
    if all(token.logprob <= LOGPROB_FLOOR for token in known):
        return Scored(f"{positions}, but all are fillers")
    return Scored(positions, known, tuple(ids), cut[0])


def _prompt_ids(data: Json, entries: Sequence[Json]) -> list[int] | None:
    """Return the prompt's token ids; servers too old to send them name the token itself alone."""
    ids = data.get("prompt_token_ids")
    if isinstance(ids, list) and all(isinstance(one, int) for one in ids):
        return ids
    named = [next(iter(entry)) for entry in entries if len(entry) == 1]
    if ids is None and len(named) == len(entries) - 1 and all(one.isdecimal() for one in named):
        return [-1, *map(int, named)]  # the first position has no log-probability, and no name
    return None


def _places(pieces: Sequence[str], texts: Sequence[str], index: int) -> list[int] | str:
    """Return the places of the tokens of the text with this index, or why nobody can say."""
    prompt = "".join(pieces)
    end, first, last = 0, -1, len(prompt)
    for text in texts[: index + 1]:
        first = prompt.find(text, end)
        if first < 0:
            return _CHANGED
        end = first + len(text)
    for text in reversed(texts[index:]):
        last = prompt.rfind(text, 0, last)
        if last < 0:
            return _CHANGED
    if first != last:
        return "the message stands in the prompt twice"
    return overlapping([len(piece) for piece in pieces], first, end) or _CHANGED


_CHANGED = "the chat template changes the messages"


def _squeezed(text: str) -> str:
    return "".join(text.replace("\u2581", " ").split())


def _read_prompt_token(entry: Json, token_id: int) -> Token | None:
    fields = mapping(entry.get(str(token_id)))
    text, logprob = fields.get("decoded_token"), _logprob(fields.get("logprob"))
    if logprob is None:
        return None
    text = text if isinstance(text, str) else ""
    return Token(text=text, data=text.encode(errors="replace"), logprob=logprob)


def spans_disagree(scored: Scored, whole: Sequence[int], changed: Sequence[int]) -> str:
    """Check a span found by its text against the server's tokeniser; empty if they agree.

    `whole` are the ids of the same messages, `changed` those of the messages with another text in
    the scored one's place: what both begin and end with is not the message. (Prefixes, the other
    way to find out, mislead with templates that treat the last turn differently.)
    """
    if list(whole) != list(scored.ids) and list(whole)[1:] != list(scored.ids)[1:]:
        return "/tokenize gives another prompt than the chat route"
    head = _common(whole, changed)
    tail = _common(whole[head:][::-1], changed[head:][::-1])
    found = (scored.start, scored.start + len(scored.tokens or ()))
    if found == (head, len(whole) - tail):
        return ""
    return f"the span is {found[0]}-{found[1]} by its text, {head}-{len(whole) - tail} by /tokenize"


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many items both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def read_capabilities(entries: list[Json], model: str | None) -> Capabilities:
    """Read the entries of `/v1/models`."""
    entry = next((entry for entry in entries if entry.get("id") == model), None)
    entry = entry or next(iter(entries), {})
    owners = {"vllm": "vllm", "llamacpp": "llama.cpp", "sglang": "sglang"}
    server = owners.get(str(entry.get("owned_by")))
    meta = mapping(entry.get("meta"))
    context = entry.get("max_model_len") or meta.get("n_ctx")
    size = _whole(meta.get("size"))
    weights = [str(meta.get("ftype") or ""), "" if size is None else f"{size} bytes"]
    return Capabilities(
        server=server,
        context_tokens=_whole(context),
        counts_tokens=server in {"vllm", "llama.cpp"},
        forces_text=server == "llama.cpp",
        weights=", ".join(filter(None, weights)) or None,
    )


@dataclass(slots=True)
class Collected:
    """A streamed reply put together again."""

    attempts: int = 1
    texts: list[str] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Any = None
    model: Any = None
    reasoning: Any = None

    def add(self, chunk: Json) -> str:
        """Take a chunk in and return the text it brings."""
        self.usage = chunk.get("usage") or self.usage
        self.model = chunk.get("model") or self.model
        choice = mapping(next(iter(_items(chunk.get("choices"))), None))
        self.tokens += _items(mapping(choice.get("logprobs")).get("content"))
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = mapping(choice.get("delta"))
        self.reasoning = delta.get("reasoning") or delta.get("reasoning_content") or self.reasoning
        piece = delta.get("content")
        if not isinstance(piece, str):
            return ""
        self.texts.append(piece)
        return piece

    def as_reply(self) -> Json:
        """Return the body that the same request without streaming would have brought."""
        choice = {
            "message": {"content": "".join(self.texts), "reasoning": self.reasoning},
            "finish_reason": self.finish_reason,
            "logprobs": {"content": self.tokens} if self.tokens else None,
        }
        return {"choices": [choice], "usage": self.usage, "model": self.model}


def mapping(value: object) -> Json:
    """Return the value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _whole(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return None
