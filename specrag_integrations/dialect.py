"""Dialect: how one server wants requests worded, learnt from what it refuses."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field

from specrag_integrations.errors import (
    ContextTooSmallError,
    EndpointError,
    EndpointRejectedError,
    LogprobsUnavailableError,
)
from specrag_integrations.failures import NOT_JSON
from specrag_integrations.replies import Json

log = logging.getLogger("specrag_integrations")

_FEWER_ALTERNATIVES = 5
"""What to ask for when a server refuses a number of `top_logprobs` without naming its limit."""


@dataclass(slots=True)
class Dialect:
    """What this server was found to refuse, learnt from its own error messages."""

    max_tokens_field: str = "max_tokens"
    most_alternatives: int = 20
    refused: set[str] = field(default_factory=set)

    def adapt(self, sent: Json, error: EndpointError, said: str) -> bool:
        """Learn from a refusal how to word requests; False if there is nothing to change.

        What was sent decides, not what is known by now: of several requests under way, each is
        refused and each is worth sending again.
        """
        refused = isinstance(error, EndpointRejectedError | LogprobsUnavailableError)
        if not refused or isinstance(error, ContextTooSmallError):
            return False
        unknown = {name for name in _OPTIONAL if name in sent and _names(said, name)}
        if unknown:
            self.refused |= unknown
            return True
        if "max_completion_tokens" in said and "max_tokens" in sent:
            self.max_tokens_field = "max_completion_tokens"
            return True
        if NOT_JSON.search(said) and (sent.get("top_logprobs") or 0) > _FEWER_ALTERNATIVES:
            self.most_alternatives = _FEWER_ALTERNATIVES  # the infinite ones may be further down
            return True
        if "logprobs" in said and "logprobs" in sent:
            allowed = _allowed_alternatives(said, sent.get("top_logprobs") or 0)
            if allowed:
                self.most_alternatives = min(allowed, self.most_alternatives)
            elif "logprobs" not in self.refused:
                self.refused |= {"logprobs", "top_logprobs"}
                log.info("%s refuses log-probabilities: %s", error.endpoint, said)
            return True
        return False


_OPTIONAL = (
    "prompt_logprobs",
    "return_token_ids",
    "logprob_token_ids",
    "chat_template_kwargs",
    "stream_options",
    "temperature",
)
"""Fields a request can do without."""


def _names(said: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", said) is not None


_LIMIT = re.compile(
    r"(?:<=|at most|max\w*|up to|equal to|between \d+ and|\d+ to)\D{0,30}(\d+)", re.IGNORECASE
)


def _allowed_alternatives(said: str, asked: int) -> int:
    """Return how many alternatives a refusing server may grant; 0 for none at all."""
    named = [int(limit) for limit in _LIMIT.findall(said)]
    if named:
        return max((limit for limit in named if limit < asked), default=0)
    return _FEWER_ALTERNATIVES if "top_logprobs" in said and asked > _FEWER_ALTERNATIVES else 0
