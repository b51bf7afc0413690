"""What servers send is checked before it is believed."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag_integrations.errors import MalformedReplyError
from specrag_integrations.models import ChatRequest, Token, assistant, user
from specrag_integrations.replies import (
    Collected,
    Scored,
    read_capabilities,
    read_reply,
    spans_disagree,
)

ASKED = ChatRequest(messages=(user("q"),), max_tokens=5, top_logprobs=2)
SCORED = ChatRequest(
    messages=(user("Who is it?"), assistant("It is 日本."), user("True?")),
    max_tokens=1,
    score_message=1,
)


def body(logprobs=None, **more):
    choice = {"message": {"content": "it is"}, "finish_reason": "stop", "logprobs": logprobs}
    return {"choices": [choice], **more}


def read(data, request=ASKED):
    return read_reply(data, request, endpoint="http://host/v1")


def entry(token, logprob, **more):
    return {"token": token, "logprob": logprob, **more}


def tokens_of(*entries):
    return read(body({"content": list(entries)})).tokens


# ---------------------------------------------------------------- the written tokens


def test_tokens_keep_text_bytes_and_alternatives():
    """A character over two tokens is whole in their bytes; alternatives come in any order."""
    tops = [entry("no", -2.0), entry("yes", -0.1), entry(None, -1.0), entry("odd", None)]
    first, second = tokens_of(
        entry("\\xc3", -0.5, bytes=[0xC3], top_logprobs=tops),
        entry("\\xa9", -0.0, bytes=[0xA9]),
    )
    assert (first.data + second.data).decode() == "é"
    assert (first.logprob, second.logprob) == (-0.5, 0.0)
    assert first.alternatives == (("no", -2.0), ("yes", -0.1))
    assert second.alternatives == ()


@pytest.mark.parametrize("given_bytes", [None, [], "é", [300], [None], 7])
def test_bytes_that_are_none_are_those_of_the_text(given_bytes):
    """Servers without bytes, or with impossible ones, are read by their text."""
    (token,) = tokens_of(entry("é", -1.0, bytes=given_bytes))
    assert token.data == "é".encode()


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        {},
        [],
        "none",
        {"content": None},
        {"content": []},
        {"content": {"token": "it"}},
        {"content": [None]},
        {"content": [entry("it", -1.0), None]},
        {"content": [entry("it", -1.0), entry(" is", None)]},
        {"content": [entry("it", math.nan)]},
        {"content": [entry("it", 0.7)]},
        {"content": [entry("it", True)]},
        {"content": [entry("it", "-1")]},
        {"content": [entry(None, -1.0)]},
        {"content": [entry("it", -9999.0), entry(" is", -9999.0)]},
        {"content": [entry("it", -math.inf)]},
        {"tokens": ["it", " is"], "token_logprobs": [-1.0]},
        {"tokens": ["it"], "token_logprobs": [None]},
        {"tokens": "it", "token_logprobs": -1.0},
    ],
)
def test_an_array_that_tells_nothing_is_none(logprobs):
    """Missing, short, null, not finite, positive or nothing but fillers: the server cannot."""
    reply = read(body(logprobs))
    assert (reply.text, reply.tokens) == ("it is", None)


@pytest.mark.parametrize("filler", [-9999.0, -math.inf, -1e30])
def test_one_filler_is_floored(filler):
    """A single "never" must not drown a mean."""
    assert [token.logprob for token in tokens_of(entry("a", -1.0), entry("b", filler))] == [
        -1,
        -100,
    ]


def test_rounding_above_zero_is_zero():
    """A probability of 1.0000001 is no reason to distrust a server."""
    (token,) = tokens_of(entry("a", 1.2e-7))
    assert token.logprob == 0.0


def test_the_completions_shape_is_read_too():
    """Some servers send it from the chat route."""
    shape = {
        "tokens": ["it", " is"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{"it": -1.0, "he": -1.5}, None],
    }
    first, second = read(body(shape)).tokens
    assert (first.text, first.logprob, first.alternatives) == (
        "it",
        -1.0,
        (("it", -1), ("he", -1.5)),
    )
    assert (second.data, second.alternatives) == (b" is", ())
    del shape["top_logprobs"]
    assert [token.text for token in read(body(shape)).tokens] == ["it", " is"]


def test_tokens_nobody_asked_for_are_not_kept():
    """Without `top_logprobs` in the request there are none in the reply."""
    plain = ChatRequest(messages=ASKED.messages, max_tokens=5)
    assert read(body({"content": [entry("it", -1.0)]}), plain).tokens is None


# ---------------------------------------------------------------- the scored message


def prompt(*pieces):
    """Return vLLM's two arrays for a prompt of these tokens; their log-probabilities count down."""
    ids = list(range(100, 100 + len(pieces)))
    rows = [
        {str(token): {"logprob": -float(index), "rank": 1, "decoded_token": piece}}
        for index, (token, piece) in enumerate(zip(ids, pieces, strict=True))
    ]
    return {"prompt_logprobs": [None, *rows[1:]], "prompt_token_ids": ids}


def scored(arrays, request=SCORED):
    return read(body(**arrays), request).scored


BEFORE = ("<s>", "<user>", "Who", " is", " it?", "<end>", "<assistant>\n")
AFTER = ("<end>", "<user>", "True?", "<end>", "<assistant>\n")


def test_scored_tokens_are_exactly_the_messages():
    """The first bytes of a character count with it, also where the message begins with one."""
    found = scored(prompt(*BEFORE, "It", " is", " 日", "", "本", ".", *AFTER))
    assert [token.text for token in found] == ["It", " is", " 日", "", "本", "."]
    assert [token.logprob for token in found] == [-7, -8, -9, -10, -11, -12]
    request = ChatRequest(
        messages=(user("Who is it?"), assistant("日本"), user("True?")),
        max_tokens=1,
        score_message=1,
    )
    found = scored(prompt(*BEFORE, "", "", "日", "", "本", *AFTER), request)
    assert [token.logprob for token in found] == [-7, -8, -9, -10, -11]


def test_the_first_bytes_of_a_character_may_hold_the_space_before_it():
    """They have no text, and come before the space in the prompt."""
    request = ChatRequest(
        messages=(user("Who is it?"), assistant("It: 日本"), user("True?")),
        max_tokens=1,
        score_message=1,
    )
    found = scored(prompt(*BEFORE, "It", ":", "", "", " 日", "", "本", *AFTER), request)
    assert [token.logprob for token in found] == [-7, -8, -9, -10, -11, -12, -13]


def test_tokens_decoded_without_their_spaces_are_found():
    """Some tokenisers leave them out of single tokens, everywhere; a template leaves out some."""
    bare = ("<s>", "<user>", "Who", "is", "it?", "<end>", "<assistant>\n")
    found = scored(prompt(*bare, "It", "is", "日本", ".", *AFTER))
    assert [token.text for token in found] == ["It", "is", "日本", "."]
    assert scored(prompt(*BEFORE, "It", "is", "日本", ".", *AFTER)) is None


def test_a_token_across_the_edge_belongs_to_the_message():
    """Templates may merge the first word with the line break before it."""
    found = scored(prompt(*BEFORE[:-1], "<assistant>", "\nIt", " is 日本", ".<end>", *AFTER[1:]))
    assert [token.text for token in found] == ["\nIt", " is 日本", ".<end>"]


@pytest.mark.parametrize(
    "pieces",
    [
        (*BEFORE, "It is", *AFTER),
        (*BEFORE, "it is 日本.", *AFTER),
        (*BEFORE, "It", "  is 日本.", *AFTER),
        ("<s>", "Who?", "It is 日本.", "True?"),
        (*BEFORE, "It is 日本.", "<end>"),
        ("<s>", "True?", "It is 日本.", "Who is it?"),
    ],
)
def test_a_template_that_changes_the_text_gives_none(pieces):
    """Cut, rewritten, respaced, dropped or reordered messages are not guessed at."""
    assert scored(prompt(*pieces)) is None


def test_a_text_that_occurs_twice_gives_none():
    """Which of two places is meant cannot be known."""
    request = ChatRequest(
        messages=(user("Who is it?"), assistant("is"), user("True?")), max_tokens=1, score_message=1
    )
    assert scored(prompt(*BEFORE, "is", *AFTER), request) is None
    words = ("<s>", "Who is it?", "<end>", "is", "<end>", "True?")
    assert len(scored(prompt(*words), request)) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda rows, ids: (rows[:-1], ids),
        lambda rows, ids: (rows, ids[:-1]),
        lambda rows, ids: (rows, [token + 1 for token in ids]),
        lambda rows, ids: ([None], ids),
        lambda rows, ids: ([None] * len(ids), ids),
        lambda rows, ids: (None, ids),
        lambda rows, ids: ("rows", "ids"),
        lambda rows, ids: ([*rows[:8], None, *rows[9:]], ids),
        lambda rows, ids: (with_logprob(rows, -9999.0), ids),
        lambda rows, ids: (with_logprob(rows, math.nan), ids),
        lambda rows, ids: (with_logprob(rows, 3.0), ids),
    ],
)
def test_prompt_arrays_that_cannot_be_right_give_none(change):
    """Wrong lengths, foreign ids, nulls, and fillers."""
    arrays = prompt(*BEFORE, "It", " is 日本", ".", *AFTER)
    rows, ids = change(arrays["prompt_logprobs"], arrays["prompt_token_ids"])
    assert scored({"prompt_logprobs": rows, "prompt_token_ids": ids}) is None


@pytest.mark.parametrize(
    ("rows", "ids", "evidence"),
    [
        (lambda rows: None, lambda ids: None, "0 of 14 positions"),
        (lambda rows: [None], lambda ids: ids, "0 of 14 positions"),
        (lambda rows: rows[:-1], lambda ids: ids, "12 of 14 positions"),
        (lambda rows: [None, *rows[:-1]], lambda ids: ids, "0 of 14 positions"),
        (lambda rows: with_logprob(rows, -9999.0), lambda ids: ids, "all are fillers"),
        (lambda rows: rows, lambda ids: ids, "13 of 14 positions"),
    ],
)
def test_the_evidence_counts_what_came_back(rows, ids, evidence):
    """How many of the prompt's tokens have a log-probability, and what is wrong with them."""
    arrays = prompt(*BEFORE, "It is 日本.", *AFTER, "\n")
    data = {
        "prompt_logprobs": rows(arrays["prompt_logprobs"]),
        "prompt_token_ids": ids(arrays["prompt_token_ids"]),
        "usage": {"prompt_tokens": 14},
    }

    assert evidence in read(body(**data), SCORED).scored_evidence


def test_servers_too_old_to_send_token_ids_are_read_all_the_same():
    """Asked for no alternatives, they name at each place the token itself; the length must fit."""
    arrays = prompt(*BEFORE, "It is 日本.", *AFTER)
    data = {"prompt_logprobs": arrays["prompt_logprobs"], "usage": {"prompt_tokens": 13}}

    assert [token.text for token in scored(data)] == ["It is 日本."]
    assert scored({**data, "usage": {"prompt_tokens": 20}}) is None


@pytest.mark.parametrize(
    ("whole_ids", "changed", "agrees"),
    [
        ([1, 2, 3, 4, 5, 6], [1, 2, 9, 5, 6], True),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 5, 6], False),
        ([1, 2, 3, 4, 5, 6], [1, 2, 9, 6], False),
        ([1, 1, 2, 3, 4, 5, 6], [1, 1, 2, 9, 5, 6], False),
    ],
)
def test_a_span_is_checked_against_the_tokeniser(whole_ids, changed, agrees):
    """What two prompts with another text in this place begin and end with is not the message."""
    tokens = tuple(Token(text="x", data=b"x", logprob=-1.0) for _ in range(2))
    found = Scored("", tokens, (1, 2, 3, 4, 5, 6), 2)

    assert (spans_disagree(found, whole_ids, changed) == "") is agrees


def with_logprob(rows, value):
    return [
        row and {token: fields | {"logprob": value} for token, fields in row.items()}
        for row in rows
    ]


# ---------------------------------------------------------------- the rest of a reply


def test_counts_reason_and_model_are_read_where_they_make_sense():
    """What is no whole number or no text is left out."""
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    reply = read(body(usage=usage, model="m"))
    assert (reply.count.prompt, reply.count.completion, reply.count.cached) == (7, 2, 4)
    assert (reply.finish_reason, reply.model) == ("stop", "m")
    odd = read(body(usage={"prompt_tokens": "7", "completion_tokens": True}, model=3))
    assert (odd.count.prompt, odd.count.completion, odd.model) == (None, None, None)
    assert read(body(usage={"prompt_tokens": -5})).count.prompt is None
    assert read(body(usage=[1])).count.prompt is None


def test_a_prompt_the_server_cut_is_noted():
    """Far fewer tokens than the text can have means that part of it was dropped."""
    request = ChatRequest(messages=(user("word " * 1000),), max_tokens=5)
    cut = read(body(usage={"prompt_tokens": 100}), request)
    assert cut.notes == ("5000 characters became 100 tokens: the server cut the prompt",)
    assert read(body(usage={"prompt_tokens": 1000}), request).notes == ()


def test_a_streamed_reply_is_put_together():
    """Text, tokens, usage and reason, from chunks with holes in them."""
    collected = Collected()
    chunks = [
        {"choices": [{"delta": {"role": "assistant", "content": None}}]},
        {"choices": [{"delta": {"content": "it"}, "logprobs": {"content": [entry("it", -1.0)]}}]},
        {"choices": [{"delta": {"content": " is"}, "logprobs": {"content": [entry(" is", -2.0)]}}]},
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 2}, "model": "m"},
        {"choices": None, "usage": None},
    ]
    assert [collected.add(chunk) for chunk in chunks] == ["", "it", " is", "", "", ""]
    reply = read(collected.as_reply())
    assert (reply.text, reply.finish_reason, reply.model) == ("it is", "length", "m")
    assert ([token.logprob for token in reply.tokens], reply.count.completion) == ([-1, -2], 2)


def test_capabilities_are_those_of_the_named_model():
    """The entry of the model in use, else the first; unknown owners tell nothing."""
    entries = [
        {"id": "a", "owned_by": "vllm", "max_model_len": 10},
        {"id": "b", "owned_by": "llamacpp", "meta": {"n_ctx": 20}},
        {"id": "c", "owned_by": "me", "max_model_len": "long"},
    ]
    found = [read_capabilities(entries, name) for name in ("a", "b", "c", None)]
    assert [c.server for c in found] == ["vllm", "llama.cpp", None, "vllm"]
    assert [c.context_tokens for c in found] == [10, 20, None, 10]
    assert [c.counts_tokens for c in found] == [True, True, False, True]
    assert read_capabilities([], "a").server is None


@pytest.mark.parametrize(
    ("meta", "weights"),
    [
        ({"ftype": "Q4_1", "size": 96576768}, "Q4_1, 96576768 bytes"),
        ({"ftype": "Q4_1"}, "Q4_1"),
        ({"ftype": None, "size": 9}, "9 bytes"),
        ({"n_ctx": 20}, None),
    ],
)
def test_a_server_may_tell_its_quantisation(meta, weights):
    """llama.cpp does, with the size of the file."""
    assert read_capabilities([{"id": "a", "meta": meta}], "a").weights == weights


# ---------------------------------------------------------------- anything at all

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-10_000, 400), st.floats(), st.text(max_size=4)
)
KNOWN = """
choices message content logprobs token bytes logprob top_logprobs tokens token_logprobs usage
prompt_tokens prompt_tokens_details cached_tokens finish_reason model prompt_logprobs delta
prompt_token_ids decoded_token id owned_by meta n_ctx max_model_len 5
"""
KEYS = st.sampled_from(KNOWN.split())
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)
OBJECTS = st.dictionaries(KEYS, ANYTHING, max_size=5)
CHOICES = st.fixed_dictionaries(
    {"message": st.fixed_dictionaries({"content": ANYTHING}), "logprobs": ANYTHING | OBJECTS}
)


@given(OBJECTS, CHOICES)
def test_no_json_breaks_the_reader(more, choice):
    """Any JSON object is either a reply or a malformed one; log-probabilities are always usable."""
    for data in (more, more | {"choices": [choice]}):
        for request in (ASKED, SCORED):
            with contextlib.suppress(MalformedReplyError):
                reply = read(data, request)
                for token in (*(reply.tokens or ()), *(reply.scored or ())):
                    assert -100 <= token.logprob <= 0
                    assert isinstance(token.data, bytes)


@given(OBJECTS, OBJECTS)
def test_no_json_breaks_a_stream_or_the_list_of_models(chunk, choice):
    """Chunks and model entries are read as carefully."""
    collected = Collected()
    for data in (chunk, chunk | {"choices": [choice]}):
        assert isinstance(collected.add(data), str)
    with contextlib.suppress(MalformedReplyError):
        read(collected.as_reply())
    read_capabilities([chunk, choice], "a")
