"""The scripted server speaks as the real ones do, and remembers what it heard."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from dataclasses import replace

import aiohttp
import openai
import pytest
from scripted_server import (
    BROKEN_PROMPT_LOGPROBS,
    PROBE_QUESTION,
    THOUGHT,
    Fault,
    Reply,
    ScriptedServer,
    default_respond,
    is_probe,
    p_yes,
    prompt_pieces,
    pseudo_logprob,
    split_characters,
    unsupported,
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
PROBE = {
    **VERIFY,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"A trial: {PROBE_QUESTION}"},
    ],
}
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


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


def choice_of(server, body, **options):
    """Return the only choice of a good reply."""
    status, reply, _ = post(server, {**body, **options})
    assert status == 200, reply
    return reply["choices"][0]


def entries_of(server, body, **options):
    """Return the written tokens of a good reply."""
    return choice_of(server, body, **options)["logprobs"]["content"]


def error_of(server, body, **options):
    """Return the message and the parameter of a 400."""
    status, reply, _ = post(server, {**body, **options})
    assert status == 400, reply
    return reply["error"]["message"], reply["error"].get("param")


def ids_of(server, text, **options):
    """Return a text's token ids by the server's own tokeniser, without special tokens."""
    if server.kind == "vllm":
        body = {"prompt": text, "add_special_tokens": False}
    else:
        body = {"content": text}
    return post(server, {**body, **options}, "/tokenize")[1]["tokens"]


def forcing(ids):
    """Return the grammar that makes llama.cpp write these tokens."""
    return "root ::= " + " ".join(f"<[{token}]>" for token in ids)


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
        ("vllm", ["", "né"], [[], [110, 195, 169]]),
        ("sglang", ["n�", "�"], [[110, 239, 191, 189], [239, 191, 189]]),
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
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:3]] == ["", "né"]


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


@pytest.mark.parametrize("kind", ["openai", "vllm", "sglang", "llama.cpp"])
def test_keys_and_prompts_that_are_too_long(scripted, kind):
    server = scripted(kind=kind, api_key="right", context_tokens=10)
    status, body, _ = post(server, CHAT, headers={"Authorization": "Bearer wrong"})
    assert status == 401
    assert server.chats == []
    right = {"Authorization": "Bearer right"}
    assert post(server, CHAT, headers=right)[0] == 200
    status, body, _ = post(server, {**VERIFY}, headers=right)
    assert status == 400
    error = body.get("error", body)
    assert {
        "openai": error.get("code") == "context_length_exceeded",
        "vllm": "(parameter=input_tokens, value=11)" in error["message"],
        "sglang": error["message"].startswith("The input (26 tokens) is longer than"),
        "llama.cpp": error.get("n_prompt_tokens") == 13 + 4 * 3 + 1,
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


# ---------------------------------------------------------------- kinds of servers


def test_servers_tell_their_versions(scripted):
    """The version stands at `/version`, `/server_info`, or in llama.cpp's properties."""
    assert get(scripted(kind="vllm"), "/version") == (200, {"version": "0.32.0"})
    sglang = scripted(kind="sglang")
    assert get(sglang, "/get_server_info")[1]["version"] == "0.5.6"
    assert get(sglang, "/server_info") == get(sglang, "/get_server_info")
    assert get(scripted(kind="llama.cpp"), "/props")[1]["build_info"] == "b11549-abc"
    assert get(scripted(kind="openai"), "/version")[0] == 404


def test_sglang_names_itself_and_ignores_what_it_does_not_know(scripted):
    """It has vLLM's model card, any number of alternatives, and no prompt log-probabilities."""
    alternatives = {f"word{i}": -1.0 - i / 100 for i in range(30)}
    server = scripted(Reply("word0", alternatives=alternatives), kind="sglang", context_tokens=99)
    card = get(server, "/v1/models")[1]["data"][0]
    assert (card["owned_by"], card["root"], card["max_model_len"]) == ("sglang", "scripted", 99)
    unknown = {"prompt_logprobs": 0, "return_token_ids": True, "logprob_token_ids": [1], "best": 1}
    status, reply, _ = post(server, {**VERIFY, **unknown, "top_logprobs": 25})
    assert status == 200
    assert not {"prompt_logprobs", "prompt_token_ids"} & set(reply)
    choice = reply["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": "word0",
        "reasoning_content": None,
        "tool_calls": None,
    }
    top = choice["logprobs"]["content"][0]["top_logprobs"]
    assert [(one["token"], one["logprob"]) for one in top] == list(alternatives.items())[:25]
    assert (choice["matched_stop"], reply["usage"]["reasoning_tokens"]) == (None, 0)
    assert post(server, CHAT, "/tokenize")[:2] == (404, {"detail": "Not Found"})
    delta = json.loads(events(server, {**CHAT, "stream": True})[1])["choices"][0]["delta"]
    assert delta == {**choice["message"], "role": None}


def test_sglang_errors_are_flat(scripted):
    """They have no `error` object; a prompt and its completion must fit together."""
    server = scripted(kind="sglang", context_tokens=20)
    status, body, _ = post(server, {**CHAT, "max_tokens": 20})
    assert (status, body["object"], body["type"]) == (400, "error", "BadRequestError")
    assert "maximum context length of 20 tokens. You requested a total of 27" in body["message"]
    assert body["code"] == 400
    assert post(server, {**CHAT, "max_tokens": 13})[0] == 200


# ---------------------------------------------------------------- forced decoding


def test_llama_cpp_writes_the_tokens_of_a_grammar(scripted):
    """Each with its own log-probability, among the candidates the model itself would have had."""
    server = scripted(Fault(503), kind="llama.cpp")
    ids = ids_of(server, "Answer: Jane Austen")
    forced = {"grammar": forcing(ids), "logprobs": True, "top_logprobs": 1}
    choice = choice_of(server, CHAT, **forced, max_tokens=3)
    assert choice["message"]["content"] == "Answer: Jane Austen"
    assert choice["finish_reason"] == "length"
    entries = choice["logprobs"]["content"]
    assert [entry["id"] for entry in entries] == ids
    pieces = ["Answer:", " Jane", " Austen"]
    expected = [(piece, pseudo_logprob(piece, index)) for index, piece in enumerate(pieces)]
    assert [(entry["token"], entry["logprob"]) for entry in entries] == expected
    for entry in entries:
        [likeliest] = entry["top_logprobs"]
        assert likeliest["logprob"] > entry["logprob"]
    assert len(server.chats) == 1


def test_forced_tokens_are_cut_or_end_the_turn(scripted):
    """Too few tokens allowed cut the text; one more brings the end of the turn, without a text."""
    server = scripted(kind="llama.cpp")
    ids = ids_of(server, "one two three")
    forced = {"grammar": forcing(ids), "logprobs": True, "top_logprobs": 1}
    cut = choice_of(server, CHAT, **forced, max_tokens=2)
    assert (cut["message"]["content"], cut["finish_reason"]) == ("one two", "length")
    for limit in ({"max_tokens": 4}, {"max_tokens": 9}, {}):
        ended = choice_of(server, CHAT, **forced, **limit)
        assert (ended["message"]["content"], ended["finish_reason"]) == ("one two three", "stop")
        last = ended["logprobs"]["content"][3]
        assert (last["token"], last["bytes"], last["logprob"]) == ("", [], pseudo_logprob("", 3))
    chunks = [json.loads(line) for line in events(server, {**CHAT, **forced, "stream": True})[:-1]]
    texts = [chunk["choices"][0]["delta"].get("content") for chunk in chunks]
    assert texts == [None, "one", " two", " three", "", None]


def test_grammars_that_cannot_be_followed(scripted):
    """A syntax error is a 400, an unknown token a 500, both in llama.cpp's words."""
    server = scripted(kind="llama.cpp")
    for grammar in ("root ::= <[", "root ::= nonsense", "other ::= <[100]>"):
        message, _ = error_of(server, CHAT, grammar=grammar)
        assert message == "Failed to initialize samplers: failed to parse grammar"
    status, body, _ = post(server, {**CHAT, "grammar": "root ::= <[99]>"})
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert choice_of(server, CHAT, grammar="")["message"]["content"].startswith("Rationale:")


def test_builds_that_do_not_force_ignore_the_grammar(scripted):
    """They answer 200 with what the model wrote of itself."""
    server = scripted("my own words", kind="llama.cpp", forces=False)
    grammar = forcing(ids_of(server, "one two"))
    assert choice_of(server, CHAT, grammar=grammar)["message"]["content"] == "my own words"
    other = scripted("my own words", kind="vllm")
    assert choice_of(other, CHAT, grammar=grammar)["message"]["content"] == "my own words"


def test_special_tokens_come_only_when_asked_for(scripted):
    """Neither the beginning of a prompt nor text that looks like a special token is forced."""
    server = scripted(kind="llama.cpp", bos=True)
    bare = ids_of(server, "one two")
    assert ids_of(server, "one two", add_special=False) == bare
    begun = ids_of(server, "one two", add_special=True, with_pieces=True)
    assert [token["piece"] for token in begun] == ["<s>", "one", " two"]
    special = ids_of(server, "one <|im_end|>")
    plain = ids_of(server, "one <|im_end|>", parse_special=False, with_pieces=True)
    assert [token["piece"] for token in plain] == ["one", " <", "|im_end|>"]
    assert special[1] not in [token["id"] for token in plain]
    grammar = forcing(token["id"] for token in plain)
    assert choice_of(server, CHAT, grammar=grammar)["message"]["content"] == "one <|im_end|>"
    vllm = scripted(kind="vllm", bos=True)
    assert len(ids_of(vllm, "Yes")) == 1
    assert ids_of(vllm, "Yes", add_special_tokens=True)[1:] == ids_of(vllm, "Yes")
    counted = post(vllm, CHAT, "/tokenize")[1]["tokens"]
    asked = {**CHAT, "prompt_logprobs": 0, "return_token_ids": True}
    assert post(vllm, asked)[1]["prompt_token_ids"] == counted
    assert len(counted) == 1 + 3 + 4


# ---------------------------------------------------------------- probes


def test_probes_are_kept_apart(scripted):
    """They are in no list but their own, have no `call`, and the test's `respond` is not asked."""
    calls = []
    server = scripted(lambda _, call: calls.append(call) or f"reply {call}", delay=0.2)
    assert is_probe(PROBE)
    assert not is_probe(VERIFY)
    began = time.monotonic()
    probed = entries_of(server, PROBE)
    assert time.monotonic() - began < 0.2
    likelihood = {top["token"]: math.exp(top["logprob"]) for top in probed[0]["top_logprobs"]}
    yes = likelihood["Yes"] + likelihood[" yes"]
    assert yes / (yes + likelihood["No"]) == pytest.approx(p_yes(PROBE), rel=1e-3)
    assert (server.max_in_flight, server.chats, calls) == (0, [], [])
    assert choice_of(server, CHAT)["message"]["content"] == "reply 0"
    assert (server.chats, server.probes, calls) == ([CHAT], [PROBE], [0])
    assert server.requests == [("POST", "/v1/chat/completions")] * 2
    assert len(server.headers) == 2
    server.reset()
    assert server.probes == []


def test_probes_can_be_answered_otherwise(scripted):
    """By the same function as all others, or by one of their own, which counts them."""

    def respond(body, call):
        return f"call {call}"

    same = scripted(respond, probe="respond")
    assert choice_of(same, PROBE)["message"]["content"] == "call -1"
    own = scripted("the others", probe=respond)
    texts = [choice_of(own, body)["message"]["content"] for body in (PROBE, CHAT, PROBE)]
    assert texts == ["call 0", "the others", "call 1"]
    assert choice_of(scripted(probe=Reply("No")), PROBE)["message"]["content"] == "No"


def test_probes_are_refused_and_fail_like_all_requests(scripted):
    """Refused parameters, broken paths and forced tokens concern them as well."""
    refusing = scripted(refuse={"logprobs": "no logprobs here"})
    assert error_of(refusing, PROBE) == ("no logprobs here", "logprobs")
    assert refusing.probes == [PROBE]
    broken = scripted(faults={"/v1/chat/completions": Fault(503)})
    assert post(broken, PROBE)[0] == 503
    forcing_server = scripted(kind="llama.cpp")
    grammar = forcing(ids_of(forcing_server, "Paris"))
    assert choice_of(forcing_server, PROBE, grammar=grammar)["message"]["content"] == "Paris"


def test_probe_that_is_given_up_is_not_counted(scripted):
    """A hanging probe is neither in flight nor aborted."""
    server = scripted(probe=Fault(hang=True))
    with pytest.raises(asyncio.TimeoutError):
        post(server, PROBE, timeout=aiohttp.ClientTimeout(total=0.3))
    assert (server.in_flight, server.aborted, len(server.probes)) == (0, 0, 1)


# ---------------------------------------------------------------- thinking


@pytest.mark.parametrize("kind", ["openai", "vllm", "sglang", "llama.cpp"])
def test_a_thinking_model_thinks_before_it_answers(scripted, kind):
    """One token is `<think>` and says nothing; with room the answer follows, told as ever."""
    server = scripted(kind=kind, thinks=True)
    choice = choice_of(server, VERIFY)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("<think>", "length")
    [entry] = choice["logprobs"]["content"]
    tops = {top["token"]: top["logprob"] for top in entry["top_logprobs"]}
    assert tops.pop("<think>") == entry["logprob"] > -0.001
    assert tops
    assert max(tops.values()) < -10
    judged = choice_of(server, VERIFY, max_tokens=100)
    verdict = default_respond(VERIFY, 0).text
    assert judged["message"]["content"] == "".join([*THOUGHT, verdict])
    server.respond = Reply("Yes", alternatives={"Yes": -0.5, "No": -1.0})
    choice = choice_of(server, VERIFY, max_tokens=100)
    assert choice["message"]["content"] == "<think>\nThe passages agree.\n</think>Yes"
    assert choice["finish_reason"] == "stop"
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [*THOUGHT, "Yes"]
    tops = [(top["token"], top["logprob"]) for top in entries[-1]["top_logprobs"]]
    assert tops == [("Yes", -0.5), ("No", -1.0)]
    cut = choice_of(server, VERIFY, max_tokens=3)
    assert (cut["message"]["content"], cut["finish_reason"]) == ("<think>\nThe passages", "length")


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_thinking_can_be_switched_off(scripted, switch):
    """Where the template knows the switch and no proxy drops it."""
    off = {"chat_template_kwargs": {switch: False}}
    obeying = scripted("Yes", thinks=True, kind="vllm")
    assert choice_of(obeying, VERIFY, **off)["message"]["content"] == "Yes"
    on = {"chat_template_kwargs": {switch: True}}
    assert choice_of(obeying, VERIFY, **on)["message"]["content"] == "<think>"
    deaf = scripted("Yes", thinks=True, kind="vllm", obeys_thinking_switch=False)
    assert choice_of(deaf, VERIFY, **off)["message"]["content"] == "<think>"
    behind = scripted("Yes", thinks=True, kind="vllm", drops=["chat_template_kwargs"])
    assert choice_of(behind, VERIFY, **off)["message"]["content"] == "<think>"


@pytest.mark.parametrize(
    ("kind", "name", "thought", "none"),
    [
        ("vllm", "reasoning", "\nThe passages agree.\n", None),
        ("sglang", "reasoning_content", "The passages agree.", None),
        ("openai", "reasoning_content", "The passages agree.", None),
        ("llama.cpp", "reasoning_content", "The passages agree.", ""),
    ],
)
def test_a_reasoning_parser_moves_the_thought_out_of_the_text(scripted, kind, name, thought, none):
    """The log-probabilities are still those of all tokens."""
    server = scripted("Yes", kind=kind, thinks=True, reasoning_parser=True)
    choice = choice_of(server, VERIFY, max_tokens=100)
    assert (choice["message"]["content"], choice["message"][name]) == ("Yes", thought)
    assert [e["token"] for e in choice["logprobs"]["content"]] == [*THOUGHT, "Yes"]
    cut = choice_of(server, VERIFY, max_tokens=2)
    assert cut["message"]["content"] == none
    assert cut["message"][name].strip() == "The"
    assert len(cut["logprobs"]["content"]) == 2
    assert choice_of(server, VERIFY, **NO_THINKING)["message"]["content"] == "Yes"


def test_streamed_thoughts(scripted):
    """They come in the text, or in deltas of their own without their marks."""
    asked = {**CHAT, "stream": True}
    plain = scripted("Yes", kind="vllm", thinks=True)
    deltas = [json.loads(line)["choices"][0]["delta"] for line in events(plain, asked)[1:-2]]
    assert deltas == [{"content": piece} for piece in [*THOUGHT, "Yes"]]
    parsed = scripted("Yes", kind="vllm", thinks=True, reasoning_parser=True)
    deltas = [json.loads(line)["choices"][0]["delta"] for line in events(parsed, asked)[1:-2]]
    assert deltas == [*({"reasoning": piece} for piece in THOUGHT[1:-1]), {"content": "Yes"}]
    lines = events(parsed, {**asked, "logprobs": True, "top_logprobs": 1})[1:-2]
    choices = [json.loads(line)["choices"][0] for line in lines]
    tokens = [choice["logprobs"]["content"][0]["token"] for choice in choices]
    assert tokens == [*THOUGHT, "Yes"]
    assert choices[0]["delta"] == {}


def test_a_thinking_block_can_be_given(scripted):
    """Models differ in what stands around `</think>`, and in whether they open it themselves."""
    server = scripted("Yes", thinks=("Hm", "\n", "</think>", "\n\n"))
    choice = choice_of(server, VERIFY, max_tokens=9)
    assert choice["message"]["content"] == "Hm\n</think>\n\nYes"
    assert [entry["token"] for entry in choice["logprobs"]["content"]][-2:] == ["\n\n", "Yes"]


def test_forced_tokens_are_not_thought_about(scripted):
    """A grammar holds from the first token on."""
    server = scripted(kind="llama.cpp", thinks=True)
    grammar = forcing(ids_of(server, "Jane Austen"))
    assert choice_of(server, CHAT, grammar=grammar)["message"]["content"] == "Jane Austen"


# ---------------------------------------------------------------- chat templates


def templated(server, messages, **options):
    """Return a conversation's tokens by `/tokenize`, which must agree with the chat route."""
    body = {"model": "scripted", "messages": messages, **options}
    _, counted, _ = post(server, body, "/tokenize")
    asked = {**body, "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}
    _, reply, _ = post(server, asked)
    ids, rows = reply["prompt_token_ids"], reply["prompt_logprobs"]
    assert ids == counted["tokens"]
    assert reply["usage"]["prompt_tokens"] == counted["count"] == len(rows)
    shown = [row[str(token)]["decoded_token"] for token, row in zip(ids[1:], rows[1:], strict=True)]
    return ["", *shown]


QUESTION, THINKING, CHECK = (
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nJane Austen"},
    {"role": "user", "content": "Sure?"},
)
OPEN = {"add_generation_prompt": False, "continue_final_message": True}


def test_a_template_may_drop_earlier_thoughts(scripted):
    """What stands before `</think>` is left out of all turns but the last."""
    server = scripted(kind="vllm", template="drops-thoughts")
    text = "".join(templated(server, [QUESTION, THINKING, CHECK]))
    assert "assistant\nJane Austen<|im_end|>" in text
    assert "hm" not in text
    last = "".join(templated(server, [QUESTION, THINKING], **OPEN))
    assert last.endswith("assistant\n<think>\nhm\n</think>\n\nJane Austen")


def test_a_template_may_change_what_was_said(scripted):
    """The assistant's text is upper-cased, wherever it stands; the user's is not."""
    server = scripted(kind="vllm", template="upper-cases")
    draft = {"role": "assistant", "content": "Jane Austen"}
    text = "".join(templated(server, [QUESTION, draft, CHECK]))
    assert text.startswith("Who?")
    assert "JANE AUSTEN" in text
    assert "Sure?" in text
    assert "".join(templated(server, [QUESTION, draft], **OPEN)).endswith("\nJANE AUSTEN")


def test_a_template_may_open_the_last_turn_with_an_empty_thought(scripted):
    """The conversation up to the draft is then no prefix of the whole."""
    server = scripted(kind="vllm", template="empty-thought-last")
    draft = {"role": "assistant", "content": "Jane Austen"}
    whole = templated(server, [QUESTION, draft, CHECK])
    assert "<think>" not in whole
    last = templated(server, [QUESTION, draft], **OPEN)
    assert last[-6:] == ["<think>", "\n\n", "</think>", "\n\n", "Jane", " Austen"]
    assert whole[: len(last) - 6] == last[:-6]
    plain = scripted(kind="vllm")
    unfinished = templated(plain, [QUESTION, draft], **OPEN)
    assert templated(plain, [QUESTION, draft, CHECK])[: len(unfinished)] == unfinished


def test_a_last_message_is_continued_or_followed_not_both(scripted):
    """A generation prompt is added unless vLLM is told not to."""
    server = scripted(kind="vllm")
    body = {**CHAT, "continue_final_message": True}
    message, _ = error_of(server, body)
    assert message.startswith("Cannot set both `continue_final_message`")
    assert post(server, body, "/tokenize")[0] == 400
    assert post(server, {**body, "add_generation_prompt": False})[0] == 200


# ---------------------------------------------------------------- vLLM's limits and labels


def test_labels_by_id_come_in_the_order_asked(scripted):
    """The written token first, whatever its rank; unlikely and unknown ones are there as well."""
    alternatives = {"Yes": -0.9, "No": -0.7, " Yes": -3.0}
    server = scripted(Reply("Maybe", alternatives=alternatives), kind="vllm")
    ids = [ids_of(server, text)[0] for text in (" Yes", "Yes", " yes", "No", "YES")]
    assert len(set(ids)) == 5
    [entry] = entries_of(server, VERIFY, top_logprobs=2, logprob_token_ids=[*ids, 99, 98])
    found = [(top["token"], top["logprob"]) for top in entry["top_logprobs"]]
    maybe, *named = found
    assert maybe == ("Maybe", entry["logprob"])
    known = [(" Yes", -3.0), ("Yes", -0.9), (" yes", -20.0), ("No", -0.7), ("YES", -20.0)]
    assert named == [*known, ("?", -20.0), ("?", -20.0)]
    [entry] = entries_of(server, VERIFY, top_logprobs=2, logprob_token_ids=[])
    assert [top["token"] for top in entry["top_logprobs"]] == ["Maybe", "No"]


def test_vllm_grants_a_number_of_alternatives(scripted):
    """`--max-logprobs` bounds both kinds; ids have a limit of their own and replace the number."""
    server = scripted(kind="vllm", max_logprobs=5)
    message, param = error_of(server, VERIFY, top_logprobs=6)
    assert message == (
        "Requested sample logprobs of 6, which is greater than max allowed: 5 "
        "(parameter=logprobs, value=6)"
    )
    assert param == "logprobs"
    message, param = error_of(server, VERIFY, top_logprobs=5, prompt_logprobs=6)
    assert message.startswith(
        "Requested prompt logprobs of 6, which is greater than max allowed: 5"
    )
    assert param == "prompt_logprobs"
    message, param = error_of(server, VERIFY, logprob_token_ids=list(range(129)))
    assert message.startswith("Requested logprob_token_ids of length 129, which is greater than")
    assert param == "logprob_token_ids"
    assert error_of(server, CHAT, logprob_token_ids=[1])[1] == "logprob_token_ids"
    assert post(server, {**VERIFY, "logprob_token_ids": list(range(128))})[0] == 200
    generous = scripted(kind="vllm", max_logprobs=-1)
    assert post(generous, {**VERIFY, "top_logprobs": 300, "prompt_logprobs": 300})[0] == 200


# ---------------------------------------------------------------- ways to be broken


@pytest.mark.parametrize("broken", BROKEN_PROMPT_LOGPROBS)
def test_prompt_log_probabilities_are_broken_in_many_ways(scripted, broken):
    """Always with a 200 and the right ids, so that only the array tells."""

    def respond(body, call):
        return replace(default_respond(body, call), **BROKEN_PROMPT_LOGPROBS[broken])

    server = scripted(respond, kind="vllm")
    _, reply, _ = post(server, {**VERIFY, "prompt_logprobs": 0, "return_token_ids": True})
    ids, rows = reply["prompt_token_ids"], reply.get("prompt_logprobs") or []
    assert len(ids) == reply["usage"]["prompt_tokens"]
    found = {one["logprob"] for row in rows if row for one in row.values()}
    fit = [str(token) in row for token, row in zip(ids[1:], rows[1:], strict=False)]
    problems = {
        "missing": "prompt_logprobs" not in reply,
        "null": reply.get("prompt_logprobs", "missing") is None,
        "empty": reply.get("prompt_logprobs") == [],
        "only the first": rows == [None],
        "short": len(rows) == len(ids) - 1 and all(fit),
        "not finite": found == {"-inf", "NaN"} and all(fit),
        "fillers": found == {-9999.0} and all(fit),
        "shifted": len(rows) == len(ids) and not all(fit),
    }
    assert [name for name, holds in problems.items() if holds] == [broken]


def test_a_proxy_drops_fields_silently(scripted):
    """The request is answered as if it had never held them, but was received whole."""
    heard = []
    server = scripted(
        lambda body, call: heard.append(body) or "No way",
        kind="vllm",
        drops=["logprobs", "top_logprobs", "prompt_logprobs"],
    )
    body = {**VERIFY, "prompt_logprobs": 0}
    _, reply, _ = post(server, body)
    assert reply["choices"][0]["logprobs"] is None
    assert reply["prompt_logprobs"] is None
    assert not {"logprobs", "top_logprobs", "prompt_logprobs"} & set(heard[0])
    assert server.chats == [body]


def test_a_strict_server_forbids_extra_fields(scripted):
    """It names the first field that OpenAI does not have, in FastAPI's shape."""
    server = scripted(forbid_extra=True)
    assert post(server, {**VERIFY, "stream_options": None})[0] == 200
    status, body, _ = post(server, {**VERIFY, "prompt_logprobs": 0, "return_token_ids": True})
    assert status == 422
    assert body == {
        "detail": [
            {
                "type": "extra_forbidden",
                "loc": ["body", "prompt_logprobs"],
                "msg": "Extra inputs are not permitted",
                "input": 0,
            }
        ]
    }


def test_litellm_names_all_unsupported_parameters_at_once(scripted):
    """One message holds a list of them, and a recipe that names them again."""
    server = scripted(refuse=unsupported("logprobs", "top_logprobs"))
    status, body, _ = post(server, VERIFY)
    assert (status, body["error"]["code"]) == (400, "400")
    named = "does not support parameters: ['logprobs', 'top_logprobs'], for model=scripted."
    assert named in body["error"]["message"]
    assert post(server, CHAT)[0] == 200
