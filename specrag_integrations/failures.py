"""Failures: a server's refusal, in its own words, as one of our errors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from specrag_integrations.errors import (
    ContextTooSmallError,
    EndpointError,
    EndpointRejectedError,
    EndpointUnavailableError,
    LogprobsUnavailableError,
)
from specrag_integrations.replies import Json, mapping
from specrag_integrations.retries import retry_after


def failure_of(
    said: str,
    status: int | None,
    headers: Mapping[str, str],
    *,
    endpoint: str,
    model: str | None,
) -> EndpointError:
    """Return the error that a status (None: unknown) and the server's words stand for."""
    kind: type[EndpointError] = EndpointRejectedError
    if status != 429 and _is_overflow(said):  # noqa: PLR2004
        kind = ContextTooSmallError
    elif NOT_JSON.search(said):
        kind = LogprobsUnavailableError
    elif status is None or status in {408, 409, 425, 429} or status >= 500:  # noqa: PLR2004
        kind = EndpointUnavailableError
    shown = f"HTTP {status}: " if status else ""
    hint = "; check api_key" if status in {401, 403} else ""
    failure = kind(
        f"{endpoint}: {shown}{said}{hint}",
        endpoint=endpoint,
        model=model,
        status_code=status,
        request_id=headers.get("x-request-id"),
        retry_after=retry_after(headers),
    )
    told = headers.get("x-should-retry")
    if told in {"true", "false"}:
        failure.retryable = told == "true"
    return failure


def words_of(body: object, sent: Json | None = None) -> str:
    """Find the server's own words in the shapes servers use.

    Some repeat the request: what stood in its messages is left out, since errors reach logs, and
    questions and passages must not.
    """
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(key):
            body = body[key]
    text = body if isinstance(body, str) else json.dumps(body, default=str)
    if _HTML.match(text):
        return "an HTML page instead of JSON: is this the URL of an OpenAI-compatible server?"
    text = _without_echo(" ".join(text.split()), sent or {})
    return text if len(text) <= 500 else text[:500] + "…"  # noqa: PLR2004 - a line, not a page


def _without_echo(text: str, sent: Json) -> str:
    """End a server's words where they begin to repeat the request.

    The request may come back whole or in part, and with quotes, line breaks and letters beyond
    ASCII escaped in one way or another, so that longer pieces between those are looked for as well.
    """
    contents = [str(mapping(message).get("content")) for message in sent.get("messages") or []]
    pieces = contents + [piece for content in contents for piece in _ESCAPED.split(content)]
    plain = (" ".join(piece.split()) for piece in pieces)
    echoed = [text.find(piece) for piece in plain if len(piece) >= _TELLING]
    if match := _ECHOED_INPUT.search(text):
        echoed.append(match.start())
    places = [place for place in echoed if place >= 0]
    return text[: min(places)] + "…" if places else text


NOT_JSON = re.compile(r"not JSON compliant|float values? (?:is|are) out of range", re.IGNORECASE)
"""What FastAPI servers answer, as 400 or 500, where a log-probability is infinite or no number."""
_HTML = re.compile(r"\s*<(?:!doctype|html|\?xml)", re.IGNORECASE)
_TELLING = 8
"""Characters from which a repeated piece of a prompt is no coincidence."""
_ESCAPED = re.compile(r"""[^\x20-\x7e]|["'\\]""")
_ECHOED_INPUT = re.compile(r"""['"]?\binput(?:_value)?['"]?\s*[:=]\s*[\[{'"]""")
"""Validation errors of FastAPI servers repeat the request under this name."""
_OVERFLOW = re.compile(
    r"exceed\w*.{0,40}context|context.{0,20}(length|size|window).{0,60}"
    r"(exceed|is \d+|of \d+)|(longer than|too (large|long)).{0,60}context|"
    r"prompt.{0,20}too long|context_length_exceeded",
    re.IGNORECASE,
)


def _is_overflow(message: str) -> bool:
    return bool(_OVERFLOW.search(message))
