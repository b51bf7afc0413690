"""Wording: a request as one server wants it worded."""

from __future__ import annotations

from dataclasses import dataclass, field

from specrag_integrations.dialect import Dialect
from specrag_integrations.models import ChatRequest
from specrag_integrations.replies import Json, mapping

_NO_THINKING = {"enable_thinking": False, "thinking": False}
"""The names that the chat templates of different model families have for it."""
_TAKES_TEMPLATE_OPTIONS = {"vllm", "sglang", "llama.cpp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """What a request's body depends on besides the request itself."""

    model: str
    server: str | None
    dialect: Dialect
    extra_body: Json = field(repr=False)
    label_ids: tuple[int, ...] = ()
    forced_ids: tuple[int, ...] = ()

    def body(self, request: ChatRequest) -> Json:
        """Return the body of a chat request."""
        dialect = self.dialect
        body: Json = {
            "model": self.model,
            "messages": [message.to_dict() for message in request.messages],
            dialect.max_tokens_field: request.max_tokens,
            "temperature": request.temperature,
        }
        if request.top_logprobs is not None:
            # Some servers fail on logprobs without top_logprobs, so at least one is asked for.
            wanted = max(1, request.top_logprobs)
            body |= {"logprobs": True, "top_logprobs": min(wanted, dialect.most_alternatives)}
        if request.score_message is not None:  # any server may be a proxy to a vLLM
            body |= {"prompt_logprobs": 0, "return_token_ids": True}
        if self.label_ids:
            body["logprob_token_ids"] = list(self.label_ids)
        if self.forced_ids:
            literals = " ".join(f"<[{token}]>" for token in self.forced_ids)
            body["grammar"] = f"root ::= {literals}"
            body[dialect.max_tokens_field] = len(self.forced_ids)
        options = template_options(request, self.server, self.extra_body)
        body = {key: value for key, value in body.items() if key not in dialect.refused}
        # What the user asked for is sent also where the server refuses it, and says so.
        return body | self.extra_body | ({} if options.keys() & dialect.refused else options)


def template_options(request: ChatRequest, server: str | None, extra_body: Json) -> Json:
    """Return what the chat template is told; the user's own word counts more than ours."""
    told = extra_body.get("chat_template_kwargs") or {}
    if not request.think and server in _TAKES_TEMPLATE_OPTIONS:
        told = _NO_THINKING | told
    return {"chat_template_kwargs": told} if told else {}


def is_whole(token: object) -> bool:
    """Whether a token of llama.cpp's tokeniser is text; parts of a character come as bytes."""
    fields = mapping(token)
    return isinstance(fields.get("piece"), str) and isinstance(fields.get("id"), int)


def spellings(label: str) -> tuple[str, ...]:
    """Return how a label may be spelled as one token."""
    words = dict.fromkeys((label, label.lower(), label.upper()))
    return tuple(space + word for word in words for space in ("", " "))
