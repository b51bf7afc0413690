"""Each tier: what it asks a server, and what it makes of the answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from scripted_model import ScriptedModel, tokens_of
from scripted_replies import plain_words
from scripted_server import (
    BROKEN_PROMPT_LOGPROBS,
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

from specrag_integrations import Draft, Endpoint, Passage, Scoring, Subset
from specrag_integrations.errors import (
    ContextTooSmallError,
    EndpointRejectedError,
    EndpointTimeoutError,
    LogprobsUnavailableError,
)
from specrag_integrations.models import ChatReply, Step, Token, TokenCount
from specrag_integrations.tiers import TierMaker, distinct, picked_draft, rotated

Scripted = Callable[..., ScriptedServer]
Body = dict[str, Any]

QUESTION = "Which city?"
CHECK = "Is this the correct answer to the question? Reply Yes or No."
CHOICE = "Which draft gives the correct answer to the question? Reply with its letter only."
DRAFT = Draft(rationale="Passage [1] says so.", answer="Paris, France")
TEXT = "Rationale: Passage [1] says so.\nAnswer: Paris, France"
NO_THINKING = {"enable_thinking": False, "thinking": False}


def draft(answer: str, rationale: str = "it says so", **options: Any) -> Draft:
    """Return a draft by its answer."""
    return Draft(rationale=rationale, answer=answer, **options)


def tier(model: Any, name: str, *, thinks: bool = False, **scoring: Any) -> Any:
    """Return a tier of a model."""
    return TierMaker(model=model, scoring=Scoring(**scoring), thinks=thinks).make(name)


def judged(
    server: ScriptedServer,
    name: str,
    one: Draft = DRAFT,
    *,
    question: str = QUESTION,
    thinks: bool = False,
    **scoring: Any,
) -> Any:
    """Return the verdict on one draft over the wire."""
    judge = tier(Endpoint(server.base_url, max_attempts=1), name, thinks=thinks, **scoring)
    return asyncio.run(judge.judge(question, one, step=Step(kind="verify")))


def turns(text: str = TEXT, question: str = QUESTION) -> list[Body]:
    """Return the conversation in which a draft is verified."""
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": text},
        {"role": "user", "content": CHECK},
    ]


def share(body: Body) -> float:
    """Return the reflection that the scripted server's default reply stands for."""
    return math.log(p_yes(body))


def mean(found: list[float]) -> float:
    """Return the mean of some log-probabilities."""
    return sum(found) / len(found)


def in_prompt(server: ScriptedServer, body: Body, first: int, count: int) -> list[float]:
    """Return the log-probabilities of words of the assistant's turn, the header being word 0."""
    start = len(prompt_pieces(body["messages"][:1])) + first
    pieces = server.prompt(body)
    return [pseudo_logprob(pieces[at], at) for at in range(start, start + count)]


# ---------------------------------------------------------------- reflection


def yes(p: float, text: str = "Yes") -> ChatReply:
    """Return a reply whose first token has these alternatives."""
    alternatives = (("Yes", math.log(p)), ("No", math.log(1 - p)), ("Maybe", -9.0))
    token = Token(text=text, data=text.encode(), logprob=-0.1, alternatives=alternatives)
    return ChatReply(text=text, tokens=(token,))


def verdict(reply: Any, one: Draft = DRAFT, **options: Any) -> Any:
    """Return the verdict of the tier `reflection` on a reply."""
    reflection = tier(ScriptedModel([reply]), "reflection", **options)
    return asyncio.run(reflection.judge(QUESTION, one, step=Step(kind="verify")))


def test_reflection_asks_openai_for_one_token_and_its_alternatives(scripted: Scripted) -> None:
    """The verifier reads question, rationale and answer; no field is sent that OpenAI lacks."""
    server = scripted()
    found = judged(server, "reflection")

    assert server.chats == [
        {
            "model": "scripted",
            "messages": turns(),
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": True,
            "top_logprobs": 20,
        }
    ]
    assert found.terms == {"reflection": pytest.approx(share(server.chats[0]), abs=1e-3)}
    assert found.label_mass == pytest.approx(0.95, abs=1e-3)
    assert (found.spans, found.reasons, found.failed) == ({}, {}, None)
    assert (found.model, found.attempts, found.count.completion) == ("scripted", 1, 1)
    assert found.count.prompt == len(server.prompt(server.chats[0]))


def test_reflection_tells_sglang_not_to_think(scripted: Scripted) -> None:
    """Through the chat template, under the names of two model families."""
    server = scripted(kind="sglang")
    judged(server, "reflection")

    assert server.chats[0]["chat_template_kwargs"] == NO_THINKING
    assert "logprob_token_ids" not in server.chats[0]
    assert "prompt_logprobs" not in server.chats[0]


def test_reflection_asks_vllm_for_its_labels_by_their_ids(scripted: Scripted) -> None:
    """Every spelling that is one token, however unlikely; the tokeniser is asked once."""
    server = scripted(kind="vllm")
    judge = tier(Endpoint(server.base_url), "reflection")
    for _ in range(2):
        found = asyncio.run(judge.judge(QUESTION, DRAFT, step=Step(kind="verify")))
    spelled = [s + w for w in ("Yes", "yes", "YES", "No", "no", "NO") for s in ("", " ")]

    assert server.chats[1]["logprob_token_ids"] == server.ids([word.encode() for word in spelled])
    assert server.requests.count(("POST", "/tokenize")) == len(spelled)
    assert found.terms["reflection"] == pytest.approx(share(server.chats[1]), abs=1e-3)


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ("rationale_first", TEXT),
        ("answer_first", "Answer: Paris, France\nRationale: Passage [1] says so."),
    ],
)
def test_the_order_of_the_prompt_can_be_the_papers(order: str, text: str) -> None:
    """Which scores the answer without its rationale."""
    model = ScriptedModel([yes(0.75)])
    asyncio.run(
        tier(model, "reflection", order=order).judge(QUESTION, DRAFT, step=Step(kind="verify"))
    )

    assert model.asked[0][0].messages[1].content == text


PASSAGES = (Passage(text="Paris is large.", title="France"), Passage(text="Rome is old."))
FROM_PASSAGES = replace(DRAFT, subset=Subset(index=1, ranks=(2, 4), passages=PASSAGES))


@pytest.mark.parametrize("name", ["reflection", "prompt_logprobs", "forced_decoding"])
def test_no_passage_reaches_the_verifier_unless_it_is_asked_for(
    scripted: Scripted, name: str
) -> None:
    """The paper's verifier reads the rationale instead, which is what makes it cheap."""
    server = scripted(kind="llama.cpp")
    judged(server, name, FROM_PASSAGES)

    for body in server.chats:
        assert body["messages"][0]["content"] == QUESTION
        assert "large" not in str(body)


@pytest.mark.parametrize("name", ["reflection", "prompt_logprobs", "forced_decoding"])
def test_passages_as_evidence_stand_before_the_question(scripted: Scripted, name: str) -> None:
    """Numbered as the draft's citations are, in every request about it."""
    server = scripted(kind="llama.cpp")
    judged(server, name, FROM_PASSAGES, evidence="passages")

    assert server.chats
    for body in server.chats:
        assert body["messages"][0]["content"] == (
            "[1] France\nParis is large.\n\n[2] Rome is old.\n\nWhich city?"
        )


@pytest.mark.parametrize("text", ["Yes", "No", "Yes.", "Maybe", "**Yes"])
def test_the_text_of_the_verdict_does_not_matter(text: str) -> None:
    """Only the probabilities do: "No" at P(Yes) = 0.49 is no certain no."""
    shares = {"Yes": 0.49, "No": 0.01, "Maybe": 0.5}
    listed = tuple((word, math.log(share)) for word, share in shares.items())
    maybe = Token(text="Maybe", data=b"", logprob=math.log(0.5), alternatives=listed)

    assert math.exp(verdict(ChatReply(text=text, tokens=(maybe,))).terms["reflection"]) == (
        pytest.approx(0.98)
    )


def test_the_probability_of_yes_itself_is_kept_for_the_papers_formula() -> None:
    """Beside its share of both labels."""
    shares = (("Yes", math.log(0.3)), ("No", math.log(0.1)))
    found = verdict(
        ChatReply(
            text="So",
            tokens=(Token(text="So", data=b"So", logprob=-0.7, alternatives=shares),),
        )
    )

    assert math.exp(found.log_yes) == pytest.approx(0.3)
    assert math.exp(found.terms["reflection"]) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (ChatReply(text="Yes"), "the verifier returned no log-probabilities"),
        (ChatReply(text="Yes", tokens=()), "the verifier returned no log-probabilities"),
        (
            ChatReply(text="Yes", tokens=tokens_of(("Yes", -0.1))),
            "the verifier returned no alternatives to its first token",
        ),
        (
            ChatReply(text="", tokens=tokens_of(("<think>", 0.0))),
            "the verifier was still thinking when it reached the token limit",
        ),
        (
            ChatReply(
                text="Hm",
                tokens=(
                    replace(tokens_of(("Hm", -0.1))[0], alternatives=(("Hm", -0.1), ("So", -3.0))),
                ),
            ),
            "neither Yes nor No is among the alternatives to 'Hm'",
        ),
    ],
)
def test_a_reply_without_a_verdict_gives_its_reason(reply: ChatReply, reason: str) -> None:
    """The text "Yes" alone is worth nothing: what is missing is said, not made up."""
    found = verdict(reply)

    assert (found.terms, found.log_yes, found.failed) == ({}, None, None)
    assert found.reasons == {"reflection": reason}


@pytest.mark.parametrize(
    ("error", "cannot"),
    [
        (EndpointTimeoutError("too slow"), False),
        (EndpointRejectedError("no such field", status_code=400), True),
        (EndpointRejectedError("who are you?", status_code=401), False),
        (EndpointRejectedError("not you", status_code=403), False),
        (ContextTooSmallError("too long", status_code=400), False),
        (LogprobsUnavailableError("not JSON compliant", status_code=500), True),
    ],
)
def test_a_failed_request_is_a_verdict_that_says_whether_to_ask_again(
    error: Any, cannot: bool
) -> None:
    """A refusal of the request's kind stays; a wrong key, a long draft or a slow server may not."""
    error.attempts = 2
    found = verdict(error)

    assert (found.failed, found.cannot, found.error) == (str(error), cannot, error)
    assert (found.attempts, found.model, found.terms) == (2, "scripted", {})


# ---------------------------------------------------------------- thinking


def test_a_verifier_that_thinks_aloud_is_given_room_and_its_word_behind_it_counts(
    scripted: Scripted,
) -> None:
    """And one that does not is asked for one token."""
    server = scripted(thinks=True)
    found = judged(server, "reflection", thinks=True)

    assert server.chats[0]["max_tokens"] == 1024
    assert found.terms["reflection"] == pytest.approx(share(server.chats[0]), abs=1e-3)
    assert found.thinking


@pytest.mark.parametrize("parser", [False, True])
def test_the_first_token_of_a_thought_is_no_verdict(scripted: Scripted, parser: bool) -> None:
    """Yes and No are among its alternatives, without a meaning."""
    server = scripted(thinks=True, reasoning_parser=parser)
    found = judged(server, "reflection")

    assert found.terms == {}
    assert "still thinking" in found.reasons["reflection"]
    assert found.thinking


def test_a_thought_that_only_the_servers_parser_knows_is_no_verdict_either(
    scripted: Scripted,
) -> None:
    """Where the template opens the block, its first token bears no mark: the field tells."""
    block = ("\nThe", " passages", " agree.\n", "</think>")
    server = scripted(thinks=block, reasoning_parser=True)
    found = judged(server, "reflection")

    assert found.terms == {}
    assert found.thinking


# ---------------------------------------------------------------- prompt log-probabilities


def test_prompt_logprobs_ask_vllm_for_everything_in_one_request(scripted: Scripted) -> None:
    """The log-probabilities of the prompt, without alternatives, and the labels by their ids."""
    server = scripted(kind="vllm")
    judged(server, "prompt_logprobs")
    (body,) = server.chats

    assert len(body.pop("logprob_token_ids")) == 12
    assert body == {
        "model": "scripted",
        "messages": turns(),
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": True,
        "top_logprobs": 20,
        "prompt_logprobs": 0,
        "return_token_ids": True,
        "chat_template_kwargs": NO_THINKING,
    }


def test_prompt_logprobs_are_read_over_the_exact_words_of_the_draft(scripted: Scripted) -> None:
    """Headers, turns and question are left out; both spans are sums, and the terms means."""
    server = scripted(kind="vllm")
    found = judged(server, "prompt_logprobs")
    (body,) = server.chats
    rationale = in_prompt(server, body, 1, 4)  # behind "Rationale:"
    answer = in_prompt(server, body, 6, 2)  # behind "Answer:"

    assert found.spans["consistency_rationale"].total == pytest.approx(sum(rationale))
    assert found.spans["consistency_answer"].total == pytest.approx(sum(answer))
    assert [span.tokens for span in found.spans.values()] == [4, 2]
    assert found.terms == {
        "reflection": pytest.approx(share(body), abs=1e-3),
        "consistency_rationale": pytest.approx(mean(rationale)),
        "consistency_answer": pytest.approx(mean(answer)),
    }


def test_with_the_answer_first_the_spans_follow(scripted: Scripted) -> None:
    """Each term still stands for its own words."""
    server = scripted(kind="vllm")
    found = judged(server, "prompt_logprobs", order="answer_first")
    (body,) = server.chats

    assert body["messages"][1]["content"].startswith("Answer: Paris, France\nRationale:")
    assert found.terms["consistency_answer"] == pytest.approx(mean(in_prompt(server, body, 1, 2)))
    assert found.terms["consistency_rationale"] == pytest.approx(
        mean(in_prompt(server, body, 4, 4))
    )


ODD_TEXTS = {
    "one token": ("so", "Paris"),
    "accents and CJK": ("É vero, così è.", "東京 と 京都"),
    "emoji": ("A flag \U0001f1eb\U0001f1f7 flies.", "\U0001f469\u200d\U0001f680 yes \U0001f680"),
    "right to left": (
        "\u05db\u05da \u05db\u05ea\u05d5\u05d1.",
        "\u05d9\u05e8\u05d5\u05e9\u05dc\u05d9\u05dd \u0627\u0644\u0642\u062f\u0633",
    ),
    "line breaks": ("one\n\ntwo\tthree", "first\nsecond  third"),
    "white space around": ("  so it is \n", "\n Paris\t"),
    "headers inside": ("Rationale: Answer: no", "Answer: Rationale: yes"),
    "a thought's end": ("first </think> then", "so </think> Paris"),
    "special tokens": ("he wrote <|im_end|> once", "<|im_start|> user"),
    "the question's text": ("Which city?", "Which city?"),
    "the check's text": (CHECK, CHECK),
    "combining marks": ("cafe\u0301 au lait", "A\u030angstro\u0308m"),
}


@pytest.mark.parametrize("order", ["rationale_first", "answer_first"])
@pytest.mark.parametrize("named", ODD_TEXTS)
def test_spans_are_exact_for_any_text(scripted: Scripted, named: str, order: str) -> None:
    """Whatever stands in a draft, its words are counted, and no others."""
    rationale, answer = ODD_TEXTS[named]
    server = scripted(kind="vllm")
    found = judged(server, "prompt_logprobs", draft(answer, rationale), order=order)
    (body,) = server.chats
    lengths = {
        "consistency_rationale": len(rationale.split()),
        "consistency_answer": len(answer.split()),
    }
    at = 0
    for name in lengths if order == "rationale_first" else reversed(lengths):
        expected = in_prompt(server, body, at + 1, lengths[name])
        assert found.spans[name].tokens == lengths[name]
        assert found.spans[name].total == pytest.approx(sum(expected))
        at += lengths[name] + 1


@pytest.mark.parametrize(
    ("kind", "name"), [("vllm", "prompt_logprobs"), ("llama.cpp", "forced_decoding")]
)
def test_half_a_character_is_a_question_mark_everywhere(
    scripted: Scripted, kind: str, name: str
) -> None:
    """JSON may hold one, and no server can be sent it: it is no reason to lose a draft."""
    found = judged(scripted(kind=kind), name, draft("Rome", "so \ud83d it is"))

    assert [span.tokens for span in found.spans.values()] == [4, 1]


def test_a_question_that_repeats_the_draft_does_not_shift_the_spans(scripted: Scripted) -> None:
    """The draft's own turn is meant, not the text that looks like it."""
    server = scripted(kind="vllm")
    found = judged(server, "prompt_logprobs", question=f"{TEXT}\n{TEXT}")
    (body,) = server.chats

    assert found.terms["consistency_answer"] == pytest.approx(mean(in_prompt(server, body, 6, 2)))


def test_a_character_that_is_spread_over_tokens_counts_where_its_text_is(
    scripted: Scripted,
) -> None:
    """All of its tokens: with vLLM the last has the text, and the first the space before it."""
    server = scripted(
        lambda body, call: replace(default_respond(body, call), split_bytes=True),
        kind="vllm",
        faults={"/tokenize": Fault(404)},
    )
    found = judged(server, "prompt_logprobs", draft("日本", "見よ."))
    (body,) = server.chats
    start = len(prompt_pieces(body["messages"][:1]))
    pieces = server.prompt(body, split_characters)
    assert [piece[-1:] for piece in pieces[start + 1 : start + 4]] == [b"\xe8", b"\xe3", b"."]
    expected = {"consistency_rationale": (1, 2, 3), "consistency_answer": (5, 6, 7)}

    for name, places in expected.items():
        logs = [pseudo_logprob(pieces[start + at], start + at) for at in places]
        assert (found.spans[name].tokens, found.spans[name].total) == (3, pytest.approx(sum(logs)))


def test_a_draft_without_a_rationale_is_scored_by_its_answer(scripted: Scripted) -> None:
    """There is nothing else; the term of the rationale is missing, and nobody makes it up."""
    server = scripted(kind="vllm")
    found = judged(server, "prompt_logprobs", draft("Paris", ""))
    (body,) = server.chats

    assert body["messages"][1]["content"] == "Answer: Paris"
    assert found.terms.keys() == {"reflection", "consistency_answer"}
    assert found.terms["consistency_answer"] == pytest.approx(mean(in_prompt(server, body, 1, 1)))


def test_a_prompt_that_begins_with_a_special_token_is_no_obstacle(scripted: Scripted) -> None:
    """Its first position has no log-probability either way."""
    server = scripted(kind="vllm", bos=True)
    found = judged(server, "prompt_logprobs")
    (body,) = server.chats
    start = 1 + len(prompt_pieces(body["messages"][:1])) + 6
    pieces = server.prompt(body)

    assert found.spans["consistency_answer"].total == pytest.approx(
        sum(pseudo_logprob(pieces[at], at) for at in (start, start + 1))
    )


EVIDENCE = {
    "missing": "0 of {n} positions",
    "null": "0 of {n} positions",
    "empty": "0 of {n} positions",
    "only the first": "0 of {n} positions",
    "short": "{short} of {n} positions",
    "not finite": "0 of {n} positions",
    "fillers": "{all} of {n} positions, but all are fillers",
    "shifted": "0 of {n} positions",
}


@pytest.mark.parametrize("broken", BROKEN_PROMPT_LOGPROBS)
def test_an_array_that_cannot_be_right_means_cannot(scripted: Scripted, broken: str) -> None:
    """With the evidence; all of these come with a 200, and with a verdict that looks well."""
    server = scripted(
        lambda body, call: replace(default_respond(body, call), **BROKEN_PROMPT_LOGPROBS[broken]),
        kind="vllm",
    )
    found = judged(server, "prompt_logprobs")
    n = len(server.prompt(server.chats[0]))
    told = EVIDENCE[broken].format(n=n, all=n - 1, short=n - 2)

    assert found.failed == f"no prompt log-probabilities ({told})"
    assert found.cannot
    assert found.spans == {}


def test_an_array_of_another_prompt_means_cannot(scripted: Scripted) -> None:
    """One position too many, with ids to match."""

    def respond(body: Body, call: int) -> Reply:
        return replace(
            default_respond(body, call),
            prompt_logprobs=lambda rows: [*rows, {"1": {"logprob": -1}}],
        )

    found = judged(scripted(respond, kind="vllm"), "prompt_logprobs")

    assert found.cannot


def test_a_draft_with_a_hole_in_its_positions_means_cannot(scripted: Scripted) -> None:
    """A mean over what is left would be the mean of something else."""
    server = scripted(kind="vllm")
    judged(server, "prompt_logprobs")
    start = len(prompt_pieces(server.chats[0]["messages"][:1]))
    server.respond = lambda body, call: replace(
        default_respond(body, call),
        prompt_logprobs=lambda rows: [*rows[: start + 2], None, *rows[start + 3 :]],
    )

    found = judged(server, "prompt_logprobs")

    assert found.cannot
    assert found.spans == {}


@pytest.mark.parametrize("kind", ["openai", "sglang", "llama.cpp"])
def test_a_server_that_ignores_the_field_cannot(scripted: Scripted, kind: str) -> None:
    """It answers 200 all the same."""
    server = scripted(kind=kind)
    found = judged(server, "prompt_logprobs")

    assert server.chats[0]["prompt_logprobs"] == 0
    assert found.failed == (
        f"no prompt log-probabilities (0 of {len(server.prompt(server.chats[0]))} positions)"
    )
    assert found.cannot


def test_a_template_that_alters_the_draft_means_cannot(scripted: Scripted) -> None:
    """The tokens of another text say nothing of this one."""
    found = judged(scripted(kind="vllm", template="upper-cases"), "prompt_logprobs")

    assert found.cannot
    assert "but the chat template changes the messages" in found.failed


def test_a_template_that_drops_thoughts_concerns_only_drafts_that_hold_one(
    scripted: Scripted,
) -> None:
    """Qwen3's and DeepSeek's do so in all turns but the last."""
    server = scripted(kind="vllm", template="drops-thoughts")

    assert judged(server, "prompt_logprobs", draft("Paris", "hm </think> so")).cannot
    assert judged(server, "prompt_logprobs").terms.keys() == {
        "reflection",
        "consistency_rationale",
        "consistency_answer",
    }


def test_a_template_that_treats_the_last_turn_otherwise_is_no_obstacle(scripted: Scripted) -> None:
    """The draft is not the last turn, in the prompt and in what it is compared with."""
    server = scripted(kind="vllm", template="empty-thought-last")
    found = judged(server, "prompt_logprobs")

    assert found.failed is None
    assert found.terms["consistency_answer"] == pytest.approx(
        mean(in_prompt(server, server.chats[0], 6, 2))
    )


def test_log_probabilities_that_were_found_do_not_save_a_reply_without_labels(
    scripted: Scripted,
) -> None:
    """Both come from one request, and each has its own reason."""
    server = scripted(Reply("Hm", alternatives={"So": -1.0}), kind="vllm", refuse={})
    server.faults = {"/tokenize": Fault(404)}
    found = judged(server, "prompt_logprobs")

    assert found.terms.keys() == {"consistency_rationale", "consistency_answer"}
    assert found.reasons == {"reflection": "neither Yes nor No is among the alternatives to 'Hm'"}


# ---------------------------------------------------------------- the span's cross-check


class OddTokeniser(ScriptedServer):
    """Its /tokenize makes the assistant's header and the text behind it one token, once."""

    async def _vllm_tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "messages" not in body or body["messages"][1]["content"] != "0":
            return await super()._vllm_tokenize(request)
        pieces = self.prompt(body)
        at = pieces.index(b"0")
        joined = [*pieces[: at - 1], pieces[at - 1] + pieces[at], *pieces[at + 1 :]]
        return web.json_response({"count": len(joined), "tokens": self.ids(joined)})


def evidence(server: ScriptedServer) -> Any:
    """Return what came back for the scored turn, and what is said of it."""
    judge = tier(Endpoint(server.base_url, max_attempts=1), "prompt_logprobs")
    request = judge.reflection.request(QUESTION, DRAFT, scored=True)
    return asyncio.run(judge.reflection.model.chat(request, step=Step(kind="verify")))


def test_the_tokeniser_confirms_a_span(scripted: Scripted) -> None:
    """Two calls, the first time only."""
    server = scripted(kind="vllm")
    endpoint = Endpoint(server.base_url)
    judge = tier(endpoint, "prompt_logprobs")
    request = judge.reflection.request(QUESTION, DRAFT, scored=True)
    replies = [asyncio.run(endpoint.chat(request, step=Step(kind="verify"))) for _ in range(3)]
    n = len(server.prompt(server.chats[0]))

    assert {reply.scored_evidence for reply in replies} == {
        f"{n - 1} of {n} positions, confirmed by /tokenize"
    }
    assert server.requests.count(("POST", "/tokenize")) == 12 + 2


def test_a_tokeniser_that_gives_another_prompt_is_believed_against_the_text(
    scripted: Scripted,
) -> None:
    """The template of the chat route is not the one that is known."""
    server = scripted(kind="vllm", faults={"/tokenize": Fault(200, body={"tokens": [1, 2, 3]})})
    reply = evidence(server)

    assert reply.scored is None
    assert "but /tokenize gives another prompt than the chat route" in reply.scored_evidence
    assert judged(server, "prompt_logprobs").cannot


def test_a_tokeniser_that_puts_the_span_elsewhere_is_believed_against_the_text() -> None:
    """A template may write the message's text somewhere else as well."""
    with OddTokeniser(kind="vllm") as server:
        reply = evidence(server)
        found = judged(server, "prompt_logprobs")
    start = len(prompt_pieces(turns()[:1]))
    length = len(words(TEXT))

    assert reply.scored is None
    assert reply.scored_evidence.endswith(
        f", but the span is {start}-{start + length} by its text, "
        f"{start - 1}-{start + length} by /tokenize"
    )
    assert found.cannot
    assert "by /tokenize" in found.failed


@pytest.mark.parametrize(
    "absent",
    [
        Fault(404),
        Fault(200, body={"count": 3}),
        Fault(200, raw=b"<html>", content_type="text/html"),
    ],
)
def test_where_no_tokeniser_can_be_asked_the_text_alone_is_believed(
    scripted: Scripted, absent: Fault
) -> None:
    """Proxies have no such route; the evidence says that nobody confirmed it."""
    server = scripted(kind="vllm", faults={"/tokenize": absent})
    reply = evidence(server)

    assert "(not cross-checked: " in reply.scored_evidence
    assert len(reply.scored) == len(words(TEXT))
    assert judged(server, "prompt_logprobs").terms.keys() >= {"consistency_answer"}


# ---------------------------------------------------------------- forced decoding


def test_forced_decoding_has_llama_cpp_write_the_draft_and_then_judge_it(
    scripted: Scripted,
) -> None:
    """A grammar of its own tokens, as many as the text has, and the usual verdict."""
    server = scripted(kind="llama.cpp")
    found = judged(server, "forced_decoding")
    forced, check = server.chats
    pieces = plain_words(TEXT)
    literals = " ".join(f"<[{token}]>" for token in server.ids([p.encode() for p in pieces]))

    assert forced == {
        "model": "scripted",
        "messages": turns()[:1],
        "max_tokens": len(pieces),
        "temperature": 0.0,
        "logprobs": True,
        "top_logprobs": 1,
        "grammar": f"root ::= {literals}",
        "chat_template_kwargs": NO_THINKING,
    }
    assert check["messages"] == turns()
    assert (check["max_tokens"], check["top_logprobs"]) == (1, 20)
    assert "grammar" not in check
    logs = [pseudo_logprob(piece, at) for at, piece in enumerate(pieces)]
    assert found.terms == {
        "reflection": pytest.approx(share(check), abs=1e-3),
        "consistency_rationale": pytest.approx(mean(logs[1:5])),
        "consistency_answer": pytest.approx(mean(logs[6:])),
    }
    assert [span.tokens for span in found.spans.values()] == [4, 2]


@pytest.mark.parametrize("named", [*ODD_TEXTS])
def test_forced_spans_are_exact_for_any_text(scripted: Scripted, named: str) -> None:
    """Also where a tokeniser knows a word of it as a special token."""
    rationale, answer = ODD_TEXTS[named]
    found = judged(
        scripted(kind="llama.cpp"),
        "forced_decoding",
        draft(answer, rationale),
        order="answer_first",
    )
    text = f"Answer: {answer.strip()}\nRationale: {rationale.strip()}"
    logs = [pseudo_logprob(piece, at) for at, piece in enumerate(plain_words(text))]
    count = len(plain_words(f"Answer: {answer.strip()}")) - 1

    assert found.terms["consistency_answer"] == pytest.approx(mean(logs[1 : 1 + count]))
    assert found.terms["consistency_rationale"] == pytest.approx(mean(logs[2 + count :]))


def test_what_both_requests_cost_is_added(scripted: Scripted) -> None:
    """Tokens, attempts and seconds."""
    server = scripted(kind="llama.cpp", delay=0.05)
    found = judged(server, "forced_decoding")
    prompts = [len(server.prompt(body)) for body in server.chats]

    assert found.attempts == 2
    assert found.count.prompt == sum(prompts)
    assert found.count.completion == len(plain_words(TEXT)) + 1
    assert found.seconds >= 0.1


def test_a_server_that_ignores_the_grammar_cannot(scripted: Scripted) -> None:
    """It writes what it likes, with log-probabilities of that."""
    found = judged(scripted(kind="llama.cpp", forces=False), "forced_decoding")

    assert found.failed == "the server did not write the text it was given"
    assert found.cannot


@pytest.mark.parametrize("kind", ["openai", "vllm", "sglang"])
def test_another_kind_of_server_is_not_asked_to_write_a_text(scripted: Scripted, kind: str) -> None:
    """It would ignore the grammar, or read it in another way."""
    server = scripted(kind=kind)
    found = judged(server, "forced_decoding")

    assert server.chats == []
    assert "only llama.cpp's server can be made to write a given text" in found.failed
    assert found.cannot


def test_a_request_that_was_never_sent_is_not_counted(scripted: Scripted) -> None:
    """Usage counts HTTP requests."""
    assert judged(scripted(), "forced_decoding").attempts == 0


def test_a_draft_that_could_not_be_forced_is_not_judged(scripted: Scripted) -> None:
    """The second request would be for nothing."""
    route = "/v1/chat/completions"
    server = scripted(kind="llama.cpp", faults={route: Fault(503)})
    found = judged(server, "forced_decoding")

    assert server.requests.count(("POST", route)) == 1
    assert (found.cannot, found.attempts) == (False, 1)


def test_a_draft_that_was_written_and_not_judged_has_no_verdict(scripted: Scripted) -> None:
    """What was paid for it is counted."""
    server = scripted(Fault(503), kind="llama.cpp")  # what is forced is not asked of `respond`
    found = judged(server, "forced_decoding")

    assert len(server.chats) == 2
    assert "503" in found.failed
    assert (found.terms, found.attempts) == ({}, 2)
    assert found.count.completion == len(plain_words(TEXT))


# ---------------------------------------------------------------- choice

PARIS, ROME, OSLO = draft("Paris"), draft("Rome"), draft("Oslo")


def chosen(replies: Any, drafts: list[Draft]) -> tuple[Any, ScriptedModel]:
    """Return the verdicts of the tier `choice`, and the model."""
    model = ScriptedModel(replies)
    return asyncio.run(tier(model, "choice").judge_all(QUESTION, drafts)), model


def picks(verdicts: Any) -> list[float | None]:
    """Return how often each draft's answer was picked."""
    return [one.terms.get("pick") for one in verdicts]


def test_a_choice_is_asked_twice_in_two_orders_as_text_alone(scripted: Scripted) -> None:
    """Nothing is asked for that a server may lack."""
    server = scripted("B")
    model = Endpoint(server.base_url)
    asyncio.run(tier(model, "choice").judge_all(QUESTION, [PARIS, ROME, OSLO]))

    def prompt(*answers: str) -> str:
        listed = "\n\n".join(
            f"Draft {letter}\nRationale: it says so\nAnswer: {answer}"
            for letter, answer in zip("ABC", answers, strict=True)
        )
        return f"Question: Which city?\n\n{listed}\n\n{CHOICE}"

    assert server.chats == [
        {
            "model": "scripted",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 1024,
            "temperature": 0.0,
        }
        for content in (prompt("Paris", "Rome", "Oslo"), prompt("Rome", "Oslo", "Paris"))
    ]


def test_an_answer_that_is_picked_in_both_orders_is_agreed_on() -> None:
    """By its letter in each."""
    verdicts, model = chosen(["B", "A"], [PARIS, ROME, OSLO])

    assert picks(verdicts) == [0.0, 1.0, 0.0]
    assert [str(step) for _, step in model.asked] == ["verify_0", "verify_1"]


def test_a_letter_that_is_picked_by_its_place_is_no_agreement() -> None:
    """A model that always writes A has picked two answers."""
    verdicts, _ = chosen(["A", "A"], [PARIS, ROME, OSLO])

    assert picks(verdicts) == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("replies", [["I cannot tell."], ["A", "Both are right."], ["A", ""]])
def test_a_text_without_a_letter_means_cannot(replies: list[str]) -> None:
    """Nobody guesses; what it cost is told, once."""
    counted = [ChatReply(text=text, count=TokenCount(prompt=10, completion=1)) for text in replies]
    verdicts, model = chosen(counted, [PARIS, ROME])

    assert [one.failed for one in verdicts] == ["the verifier wrote no draft's letter"] * 2
    assert all(one.cannot for one in verdicts)
    assert [one.attempts for one in verdicts] == [len(model.asked), 0]
    assert verdicts[0].count.prompt == 10 * len(model.asked)


def test_an_answer_may_be_written_instead_of_its_letter() -> None:
    """In its own form; models do so."""
    verdicts, _ = chosen(["Rome.", "The  rome"], [PARIS, ROME])

    assert picks(verdicts) == [0.0, 1.0]


@pytest.mark.parametrize(
    "written", ["<think>A or B?</think>\n\nB", "hm, A?\n</think>B", "[THINK]A[/THINK] B"]
)
def test_what_is_thought_aloud_picks_nothing(written: str) -> None:
    """The letter behind it does."""
    verdicts, _ = chosen([written, "A"], [PARIS, ROME])

    assert picks(verdicts) == [0.0, 1.0]


def test_equal_answers_are_shown_once_and_picked_together() -> None:
    """They stand for each other, in whatever form they are written."""
    verdicts, model = chosen(["A", "B"], [PARIS, ROME, draft("paris.", "another reason")])

    assert picks(verdicts) == [1.0, 0.0, 1.0]
    assert model.asked[0][0].messages[0].content.count("Draft ") == 2
    assert "another reason" not in model.asked[0][0].messages[0].content


def test_one_answer_needs_no_request() -> None:
    """There is nothing to choose."""
    verdicts, model = chosen([], [PARIS, draft("PARIS")])

    assert picks(verdicts) == [1.0, 1.0]
    assert model.asked == []


def test_a_second_request_that_fails_leaves_no_pick() -> None:
    """One order alone is not to be trusted; what both cost is told."""
    error = EndpointTimeoutError("too slow")
    error.attempts = 3
    first = ChatReply(text="A", count=TokenCount(prompt=10, completion=1))
    verdicts, _ = chosen([first, error], [PARIS, ROME])

    assert [one.failed for one in verdicts] == ["too slow"] * 2
    assert [one.cannot for one in verdicts] == [False, False]
    assert [one.attempts for one in verdicts] == [1 + 3, 0]
    assert [one.count.prompt for one in verdicts] == [10, None]


def test_what_a_choice_costs_is_told_once() -> None:
    """With the first draft; the sum over all drafts is what was paid."""
    replies = [
        ChatReply(text="B", count=TokenCount(prompt=10, completion=2, cached=4), seconds=1.0),
        ChatReply(text="A", count=TokenCount(prompt=12, completion=1), seconds=2.0, attempts=2),
    ]
    verdicts, _ = chosen(replies, [PARIS, ROME, draft("rome")])

    assert verdicts[0].count == TokenCount(prompt=22, completion=3, cached=4)
    assert (verdicts[0].attempts, verdicts[0].seconds) == (3, 3.0)
    assert {(one.attempts, one.seconds, one.count) for one in verdicts[1:]} == {
        (0, 0.0, TokenCount())
    }


# ---------------------------------------------------------------- orders and letters


def test_whole_drafts_stand_for_their_answer_before_those_that_were_cut_off() -> None:
    """In the order of the drafts otherwise."""
    cut = draft("rome", "cut", truncated=True)
    whole = draft("Rome", "whole")

    assert distinct([cut, PARIS, whole]) == [PARIS, whole]
    assert distinct([cut, PARIS]) == [PARIS, cut]


def test_no_more_answers_are_shown_than_there_are_letters() -> None:
    """The first 26."""
    assert len(distinct([draft(f"city {n}") for n in range(40)])) == 26


@pytest.mark.parametrize("count", range(2, 9))
def test_in_the_rotated_order_none_stands_where_it_stood(count: int) -> None:
    """And all are there."""
    drafts = [draft(str(n)) for n in range(count)]
    turned = rotated(drafts)

    assert sorted(one.answer for one in turned) == sorted(one.answer for one in drafts)
    assert all(one is not other for one, other in zip(drafts, turned, strict=True))


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("B.", "B"),
        (" B\n", "B"),
        ("**B**", "B"),
        ("(b)", "B"),
        ("[B]", "B"),
        ('"B"', "B"),
        ("`B`", "B"),
        ("Draft C", "C"),
        ("draft c.", "C"),
        ("**Draft B**", "B"),
        ("Answer: B", "B"),
        ("Best draft: B", "B"),
        ("Option B: it cites the passage", "B"),
        ("Letter B", "B"),
        ("B\n\nDraft A is wrong.", "B"),
        ("B: the others contradict the passage", "B"),
        ("The best draft is B.", "B"),
        ("The correct answer is given by draft C", "C"),
        ("I think that B is right", "B"),
        ("Rome", "B"),
        ("rome.", "B"),
        ("the Rome", "B"),
        ("A better answer is B", "B"),
        ("A careful reading shows that the second is correct.", None),
        ("Canberra is right. A draft that says Rome has misread it.", None),
        ("A", "A"),
        ("I would take\nB", "B"),
        ("A and B", None),
        ("Either B or C", None),
        ("Neither", None),
        ("None", None),
        ("D", None),
        ("Draft E", None),
        ("Paris or Rome", None),
        ("It is B's", None),
        ("Because", None),
        ("Bern", None),
        ("", None),
        ("...", None),
        ("1", None),
    ],
)
def test_a_letter_is_read_in_many_spellings_and_never_guessed(
    text: str, letter: str | None
) -> None:
    """An article, a word and a letter that was not offered are none."""
    order = [PARIS, ROME, OSLO]
    found = picked_draft(text, order)

    assert found is (order["ABC".index(letter)] if letter else None)


# ---------------------------------------------------------------- without a request


def test_agreement_is_the_logarithm_of_an_answers_share() -> None:
    """Of all drafts, in whatever form the answer is written."""
    drafts = [PARIS, draft("paris."), ROME, draft("The Paris")]
    verdicts = asyncio.run(tier(ScriptedModel([]), "agreement").judge_all(QUESTION, drafts))

    assert [math.exp(one.terms["agreement"]) for one in verdicts] == pytest.approx(
        [0.75, 0.75, 0.25, 0.75]
    )
    assert {one.attempts for one in verdicts} == {0}


def test_draft_only_asks_nobody() -> None:
    """What counts is in the draft."""
    model = ScriptedModel([])
    found = asyncio.run(tier(model, "draft_only").judge(QUESTION, DRAFT, step=Step(kind="verify")))

    assert (found.terms, found.failed, found.attempts) == ({}, None, 0)
    assert model.asked == []


# ---------------------------------------------------------------- letters, once more


@pytest.mark.parametrize("text", ["Draft A or draft B", "The answer is A, or option C"])
def test_two_letters_that_are_named_are_none(text: str) -> None:
    """Either may be meant."""
    assert picked_draft(text, [PARIS, ROME, OSLO]) is None


def test_a_choice_is_made_without_thinking_aloud(scripted: Scripted) -> None:
    """Where the server knows the switch."""
    server = scripted("B", kind="vllm")
    asyncio.run(tier(Endpoint(server.base_url), "choice").judge_all(QUESTION, [PARIS, ROME]))

    switches = [body.get("chat_template_kwargs") for body in server.chats]
    assert switches == [{"enable_thinking": False, "thinking": False}] * 2
