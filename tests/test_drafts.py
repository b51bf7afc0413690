"""How a reply becomes a draft, or a failure that the others survive."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from scripted_model import ScriptedModel, tokens_of

from specrag_integrations import Draft, FailedDraft, Passage, Subset
from specrag_integrations.drafts import Drafter
from specrag_integrations.errors import EndpointUnavailableError
from specrag_integrations.models import ChatReply, TokenCount

PASSAGES = tuple(Passage(text=f"secret {i}", id=str(i)) for i in range(2))
SUBSET = Subset(index=3, ranks=(0, 4), passages=PASSAGES)
GOOD = "Rationale: as [1] says.\nAnswer: Paris [1]"


def drafted(*replies, subset=SUBSET, **options):
    """Draft once from scripted replies."""
    models = tuple(ScriptedModel([reply], name=f"model-{i}") for i, reply in enumerate(replies))
    drafter = Drafter(models=models, max_tokens=50, **options)
    draft = drafter.draft("Which city?", subset, history=(), started=time.perf_counter())
    return asyncio.run(draft), models


def test_a_reply_becomes_a_rationale_and_an_answer():
    """With the passages it rests on, by number."""
    draft, _ = drafted(GOOD)

    assert isinstance(draft, Draft)
    assert (draft.rationale, draft.answer) == ("as [1] says.", "Paris [1]")
    assert (draft.index, draft.passages, draft.citations) == (3, PASSAGES, (1,))
    assert not draft.abstained
    assert not draft.truncated


def test_only_rationale_and_answer_are_scored():
    """Headers, and what models write around them, are no part of either span."""
    tokens = tokens_of(
        ("Rationale", -64.0), (":", -32.0), (" so.", -1.0), ("\nAnswer:", -16.0), (" Paris", -2.0)
    )
    draft, _ = drafted(ChatReply(text="Rationale: so.\nAnswer: Paris", tokens=tokens))

    assert (draft.rationale_logprob.total, draft.rationale_logprob.tokens) == (-1.0, 1)
    assert (draft.answer_logprob.total, draft.answer_logprob.tokens) == (-2.0, 1)


def test_without_log_probabilities_a_draft_has_none():
    """None, not 0: nothing is certain because nobody counted."""
    draft, _ = drafted(GOOD)

    assert draft.rationale_logprob is None
    assert draft.answer_logprob is None


@pytest.mark.parametrize(("written", "complete"), [(5, True), (6, True), (7, False), (None, True)])
def test_tokens_that_are_not_listed_leave_no_draft_terms(written, complete):
    """llama.cpp leaves out parts of characters; the rest alone would flatter the draft.

    The end of the turn is counted by some servers, and listed by none.
    """
    tokens = tokens_of(
        ("Rationale", -64.0), (":", -32.0), (" so.", -1.0), ("\nAnswer:", -16.0), (" Paris", -2.0)
    )
    reply = ChatReply(
        text="Rationale: so.\nAnswer: Paris", tokens=tokens, count=TokenCount(completion=written)
    )

    draft, _ = drafted(reply)

    assert (draft.answer_logprob is not None) is complete
    told = "draft 3: no draft terms, since 5 of 7 written tokens have a log-probability"
    assert draft.notes == (() if complete else (told,))


def test_the_written_tokens_log_probabilities_are_asked_for():
    """And no alternatives, which would slow the server for every token."""
    _, (model,) = drafted(GOOD)
    request, step = model.asked[0]

    assert (request.top_logprobs, request.temperature, request.max_tokens) == (0, 0.0, 50)
    assert str(step) == "draft_3"


def test_citations_of_passages_the_draft_never_saw_are_dropped():
    """The spans are measured before, on what the model wrote."""
    text = "Rationale: as [1] and [7] say.\nAnswer: Paris [9]"
    tokens = tokens_of(
        ("Rationale: as [1] and", -1.0), (" [7] say.\n", -2.0), ("Answer:", -4), (" Paris [9]", -8)
    )
    draft, _ = drafted(ChatReply(text=text, tokens=tokens))

    assert (draft.rationale, draft.answer) == ("as [1] and say.", "Paris")
    assert draft.citations == (1,)
    assert (draft.rationale_logprob.total, draft.answer_logprob.total) == (-3.0, -8.0)


def test_an_abstention_is_recognised():
    """It is a draft, and it will not be selected."""
    draft, _ = drafted("Rationale: nothing is said.\nAnswer: unknown")

    assert draft.abstained


def test_a_draft_that_reached_the_token_limit_says_so():
    """Its answer may be incomplete."""
    draft, _ = drafted(ChatReply(text=GOOD, finish_reason="length"))

    assert draft.truncated


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (ChatReply(text=""), "no text"),
        (ChatReply(text="<think>hm"), "no text"),
        (ChatReply(text="Rationale: so", finish_reason="length"), "cut off before the answer"),
        (ChatReply(text="Rationale: so"), "rationale without an answer"),
        (ChatReply(text="Rationale: so\nAnswer: [1]"), "nothing but a citation"),
        (ChatReply(text="Rationale: so\nAnswer: [9]"), "nothing but a citation"),
        (ChatReply(text="Rationale: so\nAnswer: Ada Lund"), "copied from the prompt's example"),
    ],
)
def test_an_unreadable_reply_is_a_failed_draft_that_keeps_its_text(reply, reason):
    """It is never verified as an empty string, and its tokens are paid for all the same."""
    counted = ChatReply(
        text=reply.text, finish_reason=reply.finish_reason, count=TokenCount(completion=7)
    )
    failed, _ = drafted(counted)

    assert isinstance(failed, FailedDraft)
    assert reason in failed.reason
    assert (failed.text, failed.count.completion, failed.attempts) == (reply.text, 7, 1)
    assert "so" not in failed.reason.split()


def test_the_examples_answer_counts_where_a_passage_has_it():
    """Only a passage that holds the example's answer makes it an answer."""
    passages = (Passage(text="It is the work of Ada Lund."),)
    draft, _ = drafted(
        ChatReply(text="Rationale: so\nAnswer: Ada Lund"),
        subset=Subset(index=0, ranks=(0,), passages=passages),
    )

    assert isinstance(draft, Draft)


def test_a_failing_endpoint_is_a_failed_draft():
    """With the reason and the requests it took; the other drafts still compete."""
    error = EndpointUnavailableError("server is down")
    error.attempts = 3
    failed, _ = drafted(error)

    assert (failed.index, failed.reason, failed.attempts) == (3, "server is down", 3)
    assert failed.model == "model-0"


def test_a_bug_is_not_a_failed_draft():
    """Everything but an endpoint's error propagates as itself."""
    with pytest.raises(ZeroDivisionError):
        drafted(ZeroDivisionError())


def test_draft_j_goes_to_model_j_modulo_their_number():
    """So that several small models share the work evenly."""
    for index, expected in enumerate(["model-0", "model-1", "model-0"]):
        subset = Subset(index=index, ranks=(0,), passages=PASSAGES[:1])
        draft, _ = drafted(GOOD, GOOD, subset=subset)
        assert draft.model == expected


def test_a_draft_may_be_written_by_hand():
    """Rationale and answer are enough."""
    draft = Draft(rationale="as everybody knows", answer="Paris")

    assert (draft.index, draft.passages, draft.citations) == (0, (), ())


def test_drafts_become_json_and_their_reprs_hold_no_text():
    """A log never leaks what was read or written."""
    good, _ = drafted(GOOD)
    bad, _ = drafted("Rationale: Paris")

    for draft in (good, bad):
        assert "Paris" not in repr(draft)
        assert "secret" not in repr(draft)
        data = json.loads(json.dumps(draft.to_dict(), allow_nan=False))
        assert (data["index"], data["ranks"]) == (3, [0, 4])
