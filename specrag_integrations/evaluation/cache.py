"""Replies kept by the hash of what was asked, so that no model is asked the same thing twice.

Systems that differ only in how they score or select share their drafts, an interrupted run goes on
where it was, and a new question about old replies costs nothing. A replayed reply says nothing
about time: `CachedModel.replayed` tells how many there were.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specrag_integrations.errors import CacheError, EndpointUnavailableError
from specrag_integrations.models import (
    Capabilities,
    ChatDelta,
    ChatModel,
    ChatReply,
    ChatRequest,
    Message,
    Step,
    Token,
    TokenCount,
)

_FORM = 1  # of a stored reply
_BYTES = "latin-1"  # a byte for a character, whatever the token is


class ReplyCache:
    """Replies in one SQLite file, which any number of processes may share.

    Args:
        path: The file; it and its folder are made where they are missing.

    Raises:
        CacheError: the file cannot be opened, read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.made: set[str] = set()
        """The keys of the replies that were kept by this object."""
        self._lock = threading.Lock()
        with self._failing_as_ours():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)  # texts of questions and passages may be nobody else's
            self._file = sqlite3.connect(path, timeout=60, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)"
            )

    def get(self, key: str) -> ChatReply | None:
        """Return the reply kept under a key, if there is one that can be read."""
        with self._failing_as_ours(), self._lock:
            found = self._file.execute("SELECT reply FROM replies WHERE key = ?", [key]).fetchone()
        return None if found is None else _read(found[0])

    def put(self, key: str, reply: ChatReply) -> None:
        """Keep a reply; it outlives this process, and power cuts but for the last few."""
        self.made.add(key)
        with self._failing_as_ours(), self._lock, self._file:
            self._file.execute(
                "INSERT OR REPLACE INTO replies VALUES (?, ?)", [key, json.dumps(_written(reply))]
            )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @contextmanager
    def _failing_as_ours(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise CacheError(
                f"the cache of replies {self.path} cannot be used ({error}); free its disk or "
                "delete the file, or name another folder in SPECRAG_CACHE"
            ) from error


class CachedModel:
    """A `ChatModel` that asks another one only what it has not been asked before.

    Only whole replies are kept, never failures; what the server says of itself is asked anew. An
    answer from all passages that was kept by the same run is asked for again, to be timed.

    Args:
        model: The model.
        cache: Where the replies are kept.
        identity: What tells this model from all others: its endpoint and name, or the hash of its
            weights.
        fresh: Ask even what is known, and keep the new reply: for timings.
    """

    def __init__(
        self, model: ChatModel, *, cache: ReplyCache, identity: str, fresh: bool = False
    ) -> None:
        self._model = model
        self._cache = cache
        self._identity = identity
        self._fresh = fresh
        self.live = False
        """Set: nothing is replayed, for a policy that depends on which reply comes first."""
        self.replayed = 0
        """Replies that came from the cache so far."""
        self.unavailable: EndpointUnavailableError | None = None
        """The last time that the model could not be reached, retries and all."""

    @property
    def name(self) -> str:
        """The model's name."""
        return self._model.name

    @property
    def max_attempts(self) -> int:
        """The model's."""
        return self._model.max_attempts

    async def chat(self, request: ChatRequest, *, step: Step) -> ChatReply:
        """Return the kept reply, or the model's."""
        key = self._key(request)
        if (kept := self._kept(key, step)) is not None:
            return kept
        with self._noticing():
            reply = await self._model.chat(request, step=step)
        self._cache.put(key, reply)
        return reply

    async def stream(self, request: ChatRequest, *, step: Step) -> AsyncIterator[ChatDelta]:
        """Yield the kept reply in one piece, or the model's pieces."""
        key = self._key(request)
        if (kept := self._kept(key, step)) is not None:
            yield ChatDelta(text=kept.text, reply=kept)
            return
        with self._noticing():
            async for delta in self._model.stream(request, step=step):
                if delta.reply is not None:
                    self._cache.put(key, delta.reply)
                yield delta

    async def capabilities(self) -> Capabilities | None:
        """Return what the server says of itself."""
        return await self._model.capabilities()

    async def probe(self, request: ChatRequest) -> ChatReply | None:
        """Send a trial request."""
        return await self._model.probe(request)

    async def count_tokens(self, messages: Sequence[Message]) -> int | None:
        """Ask the server's tokeniser."""
        return await self._model.count_tokens(messages)

    async def aclose(self) -> None:
        """Release the model's connections; the cache stays open."""
        await self._model.aclose()

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except EndpointUnavailableError as error:
            self.unavailable = error
            raise

    def _kept(self, key: str, step: Step) -> ChatReply | None:
        # Standard RAG and a fallback to it send the same: were one of them replayed, the times
        # would lack just the questions on which speculation failed.
        again = step.kind == "fallback" and key in self._cache.made
        kept = None if self._fresh or self.live or again else self._cache.get(key)
        self.replayed += kept is not None
        return kept

    def _key(self, request: ChatRequest) -> str:
        asked = json.dumps([_FORM, self._identity, dataclasses.asdict(request)], sort_keys=True)
        return hashlib.sha256(asked.encode(errors="surrogatepass")).hexdigest()


def _written(reply: ChatReply) -> dict[str, Any]:
    fields = dataclasses.asdict(reply)
    for tokens in (fields["tokens"], fields["scored"]):
        for token in tokens or ():
            token["data"] = token["data"].decode(_BYTES)
    return fields


def _read(kept: str) -> ChatReply | None:
    """Return a stored reply; None where it is damaged, so that it is asked for again."""
    try:
        fields = json.loads(kept)
        for name in ("tokens", "scored"):
            if fields[name] is not None:
                fields[name] = tuple(_token(token) for token in fields[name])
        fields["count"] = TokenCount(**fields["count"])
        fields["notes"] = tuple(fields["notes"])
        return ChatReply(**fields)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _token(fields: dict[str, Any]) -> Token:
    fields["data"] = fields["data"].encode(_BYTES)
    fields["alternatives"] = tuple((text, logprob) for text, logprob in fields["alternatives"])
    return Token(**fields)
