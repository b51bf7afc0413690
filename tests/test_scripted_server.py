"""The scripted server speaks as the real ones do, and remembers what it heard."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time

import aiohttp
import openai
import pytest
from scripted_server import (
    Fault,
    Reply,
    ScriptedServer,
    default_respond,
    p_yes,
    prompt_pieces,
    pseudo_logprob,
    split_characters,
    words,
)

CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "Who wrote Emma?"}]}
VERIFY = {
    **CHAT,
    "messages": [
        *CHAT["messages"],
        {"role": "assistant", "content": "Rationale: her name\nAnswer: Austen"},
        {"role": "user", "content": "Does it hold? Yes or No."},
    ],
    "max_tokens": 1,
    "logprobs": True,
    "top_logprobs": 20,
}


def post(server, body, path="/v1/chat/completions", **options):
    async def send():
        async with (
            aiohttp.ClientSession() as session,
            session.post(server.url + path, json=body, **options) as response,
        ):
            return response.status, await response.json(content_type=None), response.headers

    return asyncio.run(send())


def get(server, path):
    async def send():
        async with aiohttp.ClientSession() as session, session.get(server.url + path) as response:
            return response.status, await response.json(content_type=None)

    return asyncio.run(send())


def events(server, body):
    async def send():
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{server.base_url}/chat/completions", json=body) as response,
        ):
            return (await response.text()).split("\n\n")

    return [line.removeprefix("data: ") for line in asyncio.run(send()) if line]


def test_words_and_characters_keep_every_byte():
    text = "  two\nwörds 日本 "
    assert "".join(words(text)) == text
    assert words("a b\n\nc ") == ["a", " b", "\n\nc "]
    assert b"".join(split_characters(text)) == text.encode()
    assert split_characters("né") == [b"n\xc3", b"\xa9"]
    assert words("") == []


def test_conversation_costs_its_words_and_four_per_message():
    messages = VERIFY["messages"]
    total = sum(len(message["content"].split()) for message in messages)
    whole = prompt_pieces(messages)
    assert len(whole) == total + 4 * len(messages)
    asked = prompt_pieces(messages[:1])
    assert whole[: len(asked)] == asked
    unfinished = prompt_pieces(
        messages[:2], add_generation_prompt=False, continue_final_message=True
    )
    assert whole[: len(unfinished)] == unfinished
    assert unfinished[-1] == b" Austen"


def test_default_replies_are_read_by_the_real_client(server):
    async def ask():
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="any") as client:
            draft = await client.chat.completions.create(**CHAT)
            verdict = await client.chat.completions.create(**VERIFY)
            return draft, verdict, await client.models.list()

    draft, verdict, models = asyncio.run(ask())
    assert draft.choices[0].message.content == default_respond(CHAT, 0).text
    assert draft.choices[0].message.content.startswith("Rationale: ")
    assert "\nAnswer: " in draft.choices[0].message.content
    assert draft.choices[0].logprobs is None
    assert draft.usage.prompt_tokens == 3 + 4
    first = verdict.choices[0].logprobs.content[0]
    likelihood = {top.token: math.exp(top.logprob) for top in first.top_logprobs}
    yes, no = likelihood["Yes"] + likelihood[" yes"], likelihood["No"]
    assert yes / (yes + no) == pytest.approx(p_yes(VERIFY))
    assert first.top_logprobs[0].token == first.token == verdict.choices[0].message.content
    assert verdict.choices[0].finish_reason == "length"
    assert models.data[0].id == "scripted"
    assert server.chats == [CHAT, VERIFY]
    assert server.requests[-1] == ("GET", "/v1/models")
    assert server.headers[0]["authorization"] == "Bearer any"
    assert len(server.connections) == 1


def test_logprobs_are_given_made_up_or_left_out(scripted):
    asked = {**CHAT, "logprobs": True, "top_logprobs": 2}
    replies = [
        Reply("No way", alternatives={"Yes": -2.0, "No": -0.2, "Eh": -9.0}),
        Reply("No", logprobs=[("N", -1.0), (b"o", -9999.0)]),
        Reply("No", logprobs=None),
    ]
    server = scripted(lambda _, call: replies[call])
    made_up = post(server, asked)[1]["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in made_up] == ["No", " way"]
    assert [top["token"] for top in made_up[0]["top_logprobs"]] == ["No", "Yes"]
    assert [made_up[0]["logprob"], made_up[1]["logprob"]] == [-0.2, pseudo_logprob(" way", 1)]
    given = post(server, asked)[1]["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["logprob"]) for entry in given] == [("N", -1.0), ("o", -9999.0)]
    assert post(server, asked)[1]["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("kind", "shown", "data"),
    [
        ("openai", ["n\\xc3", "\\xa9"], [[110, 195], [169]]),
        ("vllm", ["n", "é"], [[110], [195, 169]]),
        ("llama.cpp", ["n", "�"], [[110, 195], [169]]),
    ],
)
def test_split_characters_look_as_each_server_shows_them(scripted, kind, shown, data):
    server = scripted(Reply("né", split_bytes=True), kind=kind)
    body = {**CHAT, "logprobs": True, "top_logprobs": 1}
    _, reply, _ = post(server, body)
    content = reply["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == shown
    assert [entry["bytes"] for entry in content] == data
    assert reply["choices"][0]["message"]["content"] == "né"
    chunks = [json.loads(event) for event in events(server, {**body, "stream": True})[:-1]]
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:3]] == ["n", "é"]


def test_stream_brings_role_tokens_reason_usage_and_done(scripted):
    server = scripted(Reply("one two", finish_reason="length"))
    asked = {**CHAT, "stream": True, "logprobs": True, "stream_options": {"include_usage": True}}
    *lines, done = events(server, asked)
    chunks = [json.loads(line) for line in lines]
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "one"},
        {"content": " two"},
        {},
    ]
    entries = chunks[2]["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [" two"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 2)
    assert "usage" not in json.loads(events(server, {**CHAT, "stream": True})[-2])


def test_faults_come_in_many_forms(scripted):
    faults = [
        Fault(429, headers={"Retry-After": "1"}),
        Fault(200, raw=b"<html>", content_type="text/html"),
        Fault(close=True),
        Fault(stream_break_after=2),
    ]
    server = scripted(lambda _, call: faults[call])
    status, body, headers = post(server, CHAT)
    assert (status, headers["Retry-After"]) == (429, "1")
    assert body["error"]["message"] == "scripted fault: Too Many Requests"
    with pytest.raises(json.JSONDecodeError):
        post(server, CHAT)
    with pytest.raises(aiohttp.ServerDisconnectedError):
        post(server, CHAT)
    with pytest.raises(aiohttp.ClientPayloadError):
        post(server, CHAT)
    assert server.wait_idle()
    assert server.aborted == 0


def test_streams_break_or_end_in_an_error(scripted):
    error = {"error": {"message": "engine died"}}
    faults = [Fault(stream_break_after=2, reply="a b c"), Fault(stream_break_after=2, body=error)]
    server = scripted(lambda _, call: faults[call])
    with pytest.raises(aiohttp.ClientPayloadError):
        events(server, {**CHAT, "stream": True})
    *_, last = events(server, {**CHAT, "stream": True})
    assert json.loads(last) == error


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_away_is_counted(scripted, stream):
    server = scripted(Fault(hang=True, stream_break_after=1 if stream else None))
    with pytest.raises(asyncio.TimeoutError):
        post(server, {**CHAT, "stream": stream}, timeout=aiohttp.ClientTimeout(total=0.3))
    assert server.wait_idle()
    assert (server.aborted, server.in_flight, server.max_in_flight) == (1, 0, 1)


def test_requests_in_flight_are_counted_and_a_reset_forgets(scripted):
    server = scripted("fine", delay=0.2)

    async def ask(count):
        async with aiohttp.ClientSession() as session:
            url = f"{server.base_url}/chat/completions"
            replies = await asyncio.gather(*(session.post(url, json=CHAT) for _ in range(count)))
            assert await asyncio.to_thread(server.wait_idle)
            for reply in replies:
                reply.release()

    asyncio.run(ask(4))
    assert server.max_in_flight == 4
    assert len(server.connections) == 4
    server.reset()
    assert (server.chats, server.requests, server.max_in_flight) == ([], [], 0)
    assert server.wait_for(lambda s: s.chats, timeout=0.01) is False


def test_respond_may_wait_for_other_requests(scripted):
    both = asyncio.Barrier(2)

    async def respond(body, call):
        await both.wait()
        return f"reply {call}"

    server = scripted(respond)

    async def ask():
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="any") as client:
            asked = (client.chat.completions.create(**CHAT) for _ in range(2))
            return {reply.choices[0].message.content for reply in await asyncio.gather(*asked)}

    assert asyncio.run(ask()) == {"reply 0", "reply 1"}


def test_error_in_respond_fails_the_test_that_wrote_it():
    def respond(body, call):
        raise LookupError("no script for this")

    with pytest.raises(LookupError, match="no script"), ScriptedServer(respond) as server:
        assert post(server, CHAT)[0] == 400


def test_leaving_drops_what_is_in_flight():
    began = time.monotonic()
    with (
        ScriptedServer(Fault(hang=True)) as server,
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client,
    ):
        data = json.dumps(CHAT).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        assert server.wait_for(lambda s: s.in_flight == 1)
        server.close()
        assert client.recv(100) == b""
    assert time.monotonic() - began < 5
    assert (server.in_flight, server.aborted) == (0, 0)


@pytest.mark.parametrize("kind", ["openai", "vllm", "llama.cpp"])
def test_keys_and_prompts_that_are_too_long(scripted, kind):
    server = scripted(kind=kind, api_key="right", context_tokens=10)
    status, body, _ = post(server, CHAT, headers={"Authorization": "Bearer wrong"})
    assert status == 401
    assert server.chats == []
    right = {"Authorization": "Bearer right"}
    assert post(server, CHAT, headers=right)[0] == 200
    status, body, _ = post(server, {**VERIFY}, headers=right)
    assert status == 400
    assert {
        "openai": body["error"].get("code") == "context_length_exceeded",
        "vllm": "(parameter=input_tokens, value=11)" in body["error"]["message"],
        "llama.cpp": body["error"].get("n_prompt_tokens") == 13 + 4 * 3 + 1,
    }[kind], body


def test_refused_parameters(scripted):
    server = scripted(refuse={"max_tokens": "Use 'max_completion_tokens' instead."})
    status, body, _ = post(server, VERIFY)
    assert (status, body["error"]["param"]) == (400, "max_tokens")
    assert post(server, CHAT)[0] == 200
    assert len(server.chats) == 2


def test_vllm_scores_the_prompt_and_tokens_by_id(scripted):
    server = scripted(kind="vllm")
    _, counted, _ = post(server, VERIFY, "/tokenize")
    assert (counted["count"], counted["max_model_len"]) == (len(counted["tokens"]), 8192)
    _, label, _ = post(server, {"prompt": "Yes"}, "/tokenize")
    body = {**VERIFY, "prompt_logprobs": 1, "return_token_ids": True}
    _, reply, _ = post(server, body | {"logprob_token_ids": label["tokens"]})
    ids, rows = reply["prompt_token_ids"], reply["prompt_logprobs"]
    assert ids == counted["tokens"]
    assert len(rows) == len(ids) == reply["usage"]["prompt_tokens"]
    assert rows[0] is None
    texts = [row[str(token)]["decoded_token"] for token, row in zip(ids[1:], rows[1:], strict=True)]
    assert "Rationale: her name\nAnswer: Austen<|im_end|>" in "".join(texts)
    tops = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert "Yes" in {top["token"] for top in tops}
    assert len(tops) <= 2
    assert post(server, {**CHAT, "max_tokens": 9000})[1]["error"]["param"] == "max_tokens"
    assert get(server, "/v1/models")[1]["data"][0]["max_model_len"] == 8192


def test_llama_cpp_routes(scripted):
    server = scripted(kind="llama.cpp", context_tokens=512)
    _, templated, _ = post(server, CHAT, "/apply-template")
    assert templated["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n")
    _, tokens, _ = post(server, {"content": "one two one"}, "/tokenize")
    assert len(tokens["tokens"]) == 3
    _, pieces, _ = post(server, {"content": "one two", "with_pieces": True}, "/tokenize")
    assert [token["piece"] for token in pieces["tokens"]] == ["one", " two"]
    assert get(server, "/props")[1]["default_generation_settings"]["n_ctx"] == 512
    model = get(server, "/v1/models")[1]["data"][0]
    assert (model["owned_by"], model["meta"]["n_ctx"]) == ("llamacpp", 512)
    _, reply, _ = post(server, {**CHAT, "prompt_logprobs": 0, "return_token_ids": True})
    assert "prompt_logprobs" not in reply
    assert "logprobs" not in reply["choices"][0]


def test_routes_are_absent_or_fail_as_told(scripted):
    server = scripted(faults={"/v1/models": Fault(500)})
    assert post(server, CHAT, "/tokenize")[:2] == (404, {"detail": "Not Found"})
    assert get(server, "/v1/models")[0] == 500
    assert get(server, "/health")[0] == 200
    assert server.chats == []
