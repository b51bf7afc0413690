"""Credentials: what a server is addressed with and must never be shown."""

from __future__ import annotations

import asyncio
import base64
import inspect
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from specrag_integrations.errors import ConfigurationError

ApiKey = str | Callable[[], str | Awaitable[str]]
KEY_VARIABLE = "SPECRAG_API_KEY"
"""Where keys are read from that are not given as an argument."""

_NO_KEY = "EMPTY"  # what servers without authentication expect to be sent
_KEY_VARIABLES = re.compile(r"SPECRAG_(?:[A-Z]+_)?API_KEY")
_KEY_LIKE = re.compile(r"\b(?:sk|hf|gsk|xai)[-_][\w*-]{8,}")


class Key:
    """The API key or the callable that knows it.

    The client holds this, not the endpoint, which would then never be garbage collected.
    """

    def __init__(self, source: ApiKey | None) -> None:
        self._source = _NO_KEY if source is None else source
        self.last = ""
        if isinstance(self._source, str):
            self.last = _checked_key(self._source)
        elif not callable(self._source):
            raise ConfigurationError(
                f"api_key must be a str or a callable, not a {type(source).__name__}"
            )

    @property
    def is_set(self) -> bool:
        """Whether there is one at all."""
        return self._source != _NO_KEY

    @property
    def option(self) -> str | Callable[[], Awaitable[str]]:
        """What the client takes."""
        return self._source if isinstance(self._source, str) else self._ask

    async def _ask(self) -> str:
        assert callable(self._source)  # noqa: S101 - narrows the type
        # A synchronous callable may ask a vault: not on the loop that carries all requests.
        key = await asyncio.to_thread(self._source)
        self.last = _checked_key(await key if inspect.isawaitable(key) else key)
        return self.last


def key_from_environment() -> str:
    """Return the key of an endpoint that left its own behind.

    Raises:
        ConfigurationError: there is none.
    """
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        raise ConfigurationError(
            f"keys are not pickled, and {KEY_VARIABLE} is not set where the endpoint is used now"
        )
    return key


def _checked_key(key: object) -> str:
    if not isinstance(key, str):
        raise ConfigurationError(f"the api_key callable returned a {type(key).__name__}, not a str")
    if not key or key.split() != [key] or not key.isascii():
        raise ConfigurationError(
            f"{_origin(key)} is empty or holds white space or non-ASCII characters; "
            "strip the line break a file or shell may have added"
        )
    return key


def _origin(key: str) -> str:
    """Name the environment variable that holds a key; the command line passes it on as text."""
    holding = [name for name, value in os.environ.items() if value == key]
    return next(filter(_KEY_VARIABLES.fullmatch, holding), "api_key")


def checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers that can be sent.

    Raises:
        ConfigurationError: they are no mapping, or one is no line of ASCII text.
    """
    if not isinstance(headers, Mapping):
        raise ConfigurationError(
            f"headers must be a mapping of names to values, not a {type(headers).__name__}"
        )
    for name, value in headers.items():
        if not isinstance(name, str):
            raise ConfigurationError(f"a header's name must be a str, not a {type(name).__name__}")
        usable = isinstance(value, str) and value.isascii() and value.isprintable()
        if not usable or value != value.strip():
            raise ConfigurationError(
                f"header {name!r} must be a line of ASCII text without white space around it"
            )
    # openai 2.x compares the name as it is spelled, and would send its own key beside it.
    return {
        "Authorization" if name.lower() == "authorization" else name: value
        for name, value in headers.items()
    }


def split_address(base_url: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """Split a URL into one that can be shown, its query, and its credentials as a header."""
    try:
        parts = urlsplit(base_url.strip())
        host, _ = parts.hostname, parts.port  # reading the port checks it
    except (AttributeError, ValueError):
        host = None
    if not host or parts.scheme not in {"http", "https"}:
        raise ConfigurationError(
            f"base_url {_without_secrets(base_url)!r} is not a URL; "
            "write it with its scheme: http://localhost:8000/v1"
        )
    credentials: dict[str, str] = {}
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        encoded = base64.b64encode(pair.encode()).decode()
        credentials["Authorization"] = f"Basic {encoded}"
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    url = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], path or "/v1", "", ""))
    return url, dict(parse_qsl(parts.query)), credentials


def _without_secrets(url: object) -> str:
    return str(url).rpartition("@")[2].partition("?")[0]


def scrubbed(text: str, secrets: Iterable[str]) -> str:
    """Mask secrets: servers like to echo what they were sent."""
    for secret in secrets:
        if len(secret) > 3 and secret != _NO_KEY:  # noqa: PLR2004 - "a" is no secret
            text = text.replace(secret, "***")
    return _KEY_LIKE.sub("***", text)
