"""The cache of replies, against a scripted server."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_server import Fault, Reply, ScriptedServer

from specrag_integrations import Endpoint, EndpointError
from specrag_integrations.errors import CacheError
from specrag_integrations.evaluation.cache import CachedModel, ReplyCache
from specrag_integrations.models import ChatDelta, ChatReply, ChatRequest, Step, user
from specrag_integrations.portal import portal

Scripted = Callable[..., ScriptedServer]
STEP = Step(kind="draft")
REQUEST = ChatRequest(messages=(user("Which river?"),), max_tokens=20, top_logprobs=2)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ReplyCache]:
    cache = ReplyCache(tmp_path / "deep" / "replies.sqlite")
    yield cache
    cache.close()


def model_of(server: ScriptedServer, cache: ReplyCache, **options: object) -> CachedModel:
    endpoint = Endpoint(server.base_url, request_timeout=5)
    return CachedModel(endpoint, cache=cache, **{"identity": "one", **options})


def chat(model: CachedModel, request: ChatRequest = REQUEST) -> ChatReply:
    return portal.run(model.chat(request, step=STEP))


def stream(model: CachedModel, request: ChatRequest = REQUEST) -> list[ChatDelta]:
    return list(portal.iterate(model.stream(request, step=STEP)))


def fill(model: CachedModel) -> None:
    for number in range(20):
        chat(model, replace(REQUEST, max_tokens=9000 + number))


def test_the_same_request_is_sent_once(scripted: Scripted, cache: ReplyCache) -> None:
    """A second question with the same request gets the same reply, to the last log-probability."""
    server = scripted(Reply("river one \N{PILE OF POO}"), kind="vllm")
    model = model_of(server, cache)
    first, second = chat(model), chat(model)

    assert first == second
    assert first.tokens
    assert first.tokens[0].alternatives
    assert len(server.chats) == 1
    assert model.replayed == 1


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, max_tokens=21),
        replace(REQUEST, messages=(user("Which river?"), user("!"))),
        replace(REQUEST, temperature=0.5),
        replace(REQUEST, top_logprobs=None),
        replace(REQUEST, labels=("Yes",)),
        replace(REQUEST, think=False),
    ],
)
def test_any_other_request_is_sent(
    scripted: Scripted, cache: ReplyCache, other: ChatRequest
) -> None:
    """Whatever a request differs in, it is another one."""
    server = scripted(Reply("Yes"))
    model = model_of(server, cache)
    chat(model)
    chat(model, other)

    assert len(server.chats) == 2
    assert model.replayed == 0


def test_two_models_do_not_share_replies(scripted: Scripted, cache: ReplyCache) -> None:
    """The identity is part of what was asked."""
    server = scripted(Reply("Yes"))
    chat(model_of(server, cache, identity="one"))
    chat(model_of(server, cache, identity="other"))
    assert len(server.chats) == 2


def test_a_stream_and_a_chat_share_replies(scripted: Scripted, cache: ReplyCache) -> None:
    """A replayed stream brings the whole text, and the reply with it."""
    server = scripted(Reply("river one"))
    model = model_of(server, cache)
    pieces = stream(model)
    again = stream(model)

    assert len(pieces) > 1
    assert "".join(delta.text for delta in pieces) == "river one"
    assert [delta.text for delta in again] == ["river one"]
    assert again[-1].reply == pieces[-1].reply == chat(model)
    assert len(server.chats) == 1


def test_a_failure_is_never_kept(scripted: Scripted, cache: ReplyCache) -> None:
    """What failed is asked again; that a server could not be reached is noted."""
    server = scripted(lambda _, call: Fault(400) if call == 0 else Reply("Yes"))
    model = model_of(server, cache)
    with pytest.raises(EndpointError):
        chat(model)
    assert model.unavailable is None  # it answered
    assert chat(model).text == "Yes"

    server.respond = Fault(503)
    with pytest.raises(EndpointError) as raised:
        stream(model, replace(REQUEST, max_tokens=9))
    assert model.unavailable is raised.value


def test_fresh_asks_again_and_keeps_the_new_reply(scripted: Scripted, cache: ReplyCache) -> None:
    """For timings, what is known is asked anew."""
    server = scripted(lambda _, call: Reply(f"reply {call}"))
    chat(model_of(server, cache))
    fresh = model_of(server, cache, fresh=True)
    assert chat(fresh).text == "reply 1"
    assert fresh.replayed == 0
    assert chat(model_of(server, cache)).text == "reply 1"


def test_what_was_kept_outlives_the_process(scripted: Scripted, tmp_path: Path) -> None:
    """A cache that is opened again, also while another one has it open, knows all replies."""
    server = scripted(Reply("Yes"))
    one = ReplyCache(tmp_path / "replies.sqlite")
    first = chat(model_of(server, one))
    two = ReplyCache(tmp_path / "replies.sqlite")
    assert chat(model_of(server, two)) == first
    assert len(server.chats) == 1
    one.close()
    two.close()


def test_a_file_that_is_no_cache_is_named(tmp_path: Path) -> None:
    """The error names the file and what to do, with no traceback of a library."""
    path = tmp_path / "replies.sqlite"
    path.write_text("something else " * 100)
    with pytest.raises(CacheError, match=r"replies\.sqlite cannot be used .*SPECRAG_CACHE"):
        ReplyCache(path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A file where the folder should be is an error of ours."""
    (tmp_path / "cache").write_text("")
    with pytest.raises(CacheError, match="SPECRAG_CACHE"):
        ReplyCache(tmp_path / "cache" / "replies.sqlite")


def test_a_full_disk_is_an_error_of_ours(scripted: Scripted, tmp_path: Path) -> None:
    """A reply that cannot be kept ends the run with one line; those kept before are still there."""
    server = scripted(Reply("Yes " * 3000), context_tokens=100_000)
    path = tmp_path / "replies.sqlite"
    cache = ReplyCache(path)
    kept = chat(model_of(server, cache))
    size = cache._file.execute("PRAGMA page_count").fetchone()[0]
    cache._file.execute(f"PRAGMA max_page_count = {size + 1}")
    with pytest.raises(CacheError, match="full"):
        fill(model_of(server, cache))
    cache.close()
    with sqlite3.connect(path) as file:
        assert file.execute("SELECT count(*) FROM replies").fetchone()[0] >= 1
    file.close()
    again = ReplyCache(path)
    assert chat(model_of(server, again)) == kept
    again.close()


@pytest.mark.parametrize(
    "damaged", ["{}", "[]", "{broken", '{"tokens": [1], "scored": null}', 7, b"\xff"]
)
def test_a_damaged_reply_is_asked_for_again(
    scripted: Scripted, cache: ReplyCache, damaged: object
) -> None:
    """An entry that cannot be read is as good as none, and the new reply takes its place."""
    server = scripted(lambda _, call: Reply(f"reply {call}"))
    chat(model_of(server, cache))
    with cache._file:
        cache._file.execute("UPDATE replies SET reply = ?", [damaged])
    for _ in range(2):
        assert chat(model_of(server, cache)).text == "reply 1"
    assert len(server.chats) == 2


def test_the_cache_is_for_its_owner_alone(scripted: Scripted, tmp_path: Path) -> None:
    """Nobody else reads the file, nor its log while it is open."""
    cache = ReplyCache(tmp_path / "replies.sqlite")
    chat(model_of(scripted(Reply("Yes")), cache))
    files = list(tmp_path.iterdir())
    assert len(files) == 3
    assert {stat.S_IMODE(one.stat().st_mode) for one in files} == {0o600}
    cache.close()
