"""Foreign: what models of an application raise and return, read as our own values, and back.

Nothing is imported for it: an SDK that is not installed raises nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specrag_integrations.credentials import scrubbed
from specrag_integrations.errors import EndpointError, EndpointTimeoutError
from specrag_integrations.failures import failure_of, words_of
from specrag_integrations.models import Message, Token
from specrag_integrations.replies import read_tokens

_REFUSED = {400, 403, 422}
_FAILURES = frozenset(
    {
        ("aiohttp", "ClientError"),
        ("anthropic", "APIError"),
        ("botocore", "BotoCoreError"),
        ("botocore", "ClientError"),
        ("cohere", "ApiError"),
        ("google", "APIError"),  # google.genai
        ("google", "GoogleAPIError"),  # google.api_core
        ("groq", "APIError"),
        ("grpc", "RpcError"),
        ("httpx", "HTTPError"),
        ("httpx2", "HTTPError"),
        ("mistralai", "MistralError"),
        ("ollama", "ResponseError"),
        ("openai", "APIError"),
        ("requests", "RequestException"),
        ("urllib3", "HTTPError"),
    }
)
"""Package and class from which each SDK derives what goes wrong between it and its server."""
_FINISHED = {"complete", "end_turn", "eos", "eos_token", "stop", "stop_sequence"}
_CUT_OFF = {"length", "max_tokens"}


def endpoint_error(
    error: BaseException,
    *,
    model: str,
    messages: Sequence[Message] = (),
    secrets: Iterable[str] = (),
) -> EndpointError | None:
    """Return our error for an API failure or a time-out of a model; None for anything else.

    What is none of these is a bug, and must be raised as itself. So must a connection that was lost
    to a closed event loop, which openai 2.x reports as any other.

    Args:
        error: What the model raised.
        model: Its name.
        messages: What it was sent; where the server's words repeat it, they are left out.
        secrets: What is masked in the server's words, its key above all.
    """
    if isinstance(error, EndpointError):
        return error
    if not _is_failure(error) or isinstance(error.__cause__, RuntimeError):
        return None
    sent = {"messages": [message.to_dict() for message in messages]}
    said = scrubbed(words_of(getattr(error, "body", None) or str(error), sent), secrets)
    if _timed_out(error):
        return EndpointTimeoutError(f"{model}: {said or 'no reply in time'}", model=model)
    shown = said or type(error).__name__
    return failure_of(shown, _status(error), _headers(error), endpoint=model, model=model)


def refuses_logprobs(error: EndpointError) -> bool:
    """Whether a server says that it does not return log-probabilities: the rest may be welcome."""
    return error.status_code in _REFUSED and "logprob" in str(error).lower()


def secrets_of(component: object) -> list[str]:
    """Return the keys that an application's model or embedding holds, as its fields' names tell."""
    held = {**getattr(component, "__dict__", {})}
    held |= getattr(component, "__pydantic_private__", None) or {}
    found: list[object] = []
    for name, value in held.items():
        secret = getattr(value, "get_secret_value", None)
        if secret is not None or name.endswith(("key", "token", "secret", "password")):
            found.append(secret() if secret else value)
        elif name.endswith("headers") and isinstance(value, Mapping):
            found += value.values()
    return [value for value in found if value and isinstance(value, str)]


def tokens_of(logprobs: object) -> tuple[Token, ...] | None:
    """Read the written tokens' log-probabilities in OpenAI's form, a dict or an SDK's object.

    None where they are absent, or carry no information.
    """
    if (dump := getattr(logprobs, "model_dump", None)) is not None:
        logprobs = dump()
    return read_tokens(logprobs)


def logprobs_of(tokens: Sequence[Token]) -> dict[str, Any]:
    """Return tokens' log-probabilities in OpenAI's form, as `tokens_of` reads them."""
    return {
        "content": [
            {
                "token": token.text,
                "logprob": token.logprob,
                "bytes": list(token.data),
                "top_logprobs": [
                    {"token": text, "logprob": logprob, "bytes": list(text.encode())}
                    for text, logprob in token.alternatives
                ],
            }
            for token in tokens
        ]
    }


def finish_reason_of(*told: object) -> str:
    """Return why a model stopped, in OpenAI's words, from the first place that tells.

    One that does not tell is taken to be done.
    """
    reason = next((str(one) for one in told if one), "stop")
    if reason.lower() in _FINISHED:
        return "stop"
    return "length" if reason.lower() in _CUT_OFF else reason


def _is_failure(error: BaseException) -> bool:
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    return any(
        (kind.__module__.partition(".")[0], kind.__name__) in _FAILURES
        for kind in type(error).__mro__
    )


def _timed_out(error: BaseException) -> bool:
    named = (kind.__name__ for kind in type(error).__mro__)
    return any("Timeout" in name or name == "DeadlineExceeded" for name in named)


def _status(error: BaseException) -> int | None:
    response: Any = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        told = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        told = getattr(error, "status_code", None) or getattr(response, "status_code", None)
        told = told or getattr(error, "code", None)
    return told if isinstance(told, int) and 100 <= told < 600 else None  # noqa: PLR2004 - HTTP


def _headers(error: BaseException) -> Mapping[str, str]:
    headers = getattr(getattr(error, "response", None), "headers", None)
    return {name.lower(): value for name, value in headers.items()} if headers else {}
