"""Self-consistency from a real llama.cpp server, against one request per token."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrag_integrations import ConfigurationError, Draft, Endpoint, Scoring, Verifier
from specrag_integrations.local.server import LlamaServer
from specrag_integrations.local.weights import pull
from specrag_integrations.prompts import draft_text
from specrag_integrations.spans import SpanLogprob

pytestmark = pytest.mark.embedded

QUESTION = "What is the capital of France?"
DRAFTS = [
    Draft(rationale="The French government sits in Paris [1].", answer="Paris"),
    Draft(rationale="The French government sits in Paris [1].", answer="Tokyo"),
    Draft(rationale="Bananas grow on the moon.", answer="Tōkyō"),
    Draft(rationale="", answer="It is\nParis"),
    Draft(rationale="She </think> so.", answer="باريس"),
]
PARTS = ("rationale", "answer")
NOISE = 0.03
"""Nats per token that batch mates and cached prefixes move a log-probability by."""


@pytest.fixture(scope="module")
def server() -> Iterator[LlamaServer]:
    """Serve the smallest real model."""
    mirror = Path(__file__).parents[1] / "weights-mirror.toml"
    weights = pull(
        "smollm2-135m-instruct", registry=os.environ.get("SPECRAG_REGISTRY", str(mirror))
    )
    with LlamaServer(weights, slots=2, context_tokens=1024, alias="smol") as running:
        yield running


def post(server: LlamaServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send one request without any client library."""
    url = server.base_url.removesuffix("/v1") + path
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310 - our own server
        return dict(json.load(reply))


def token_by_token(server: LlamaServer, question: str, text: str) -> list[float]:
    """Return log P of each token of a text that replies to a question, by one request each.

    A bias makes the server write the token; what it reports is the probability without the bias.
    """
    turns = [{"role": "user", "content": question}]
    prompt = post(server, "/apply-template", {"messages": turns})["prompt"]
    ids = post(server, "/tokenize", {"content": prompt, "add_special": True})["tokens"]
    logprobs = []
    for token in ids_of(server, text):
        asked = {"prompt": ids, "n_predict": 1, "n_probs": 1, "temperature": 0}
        reply = post(server, "/completion", {**asked, "logit_bias": [[token, 1000.0]]})
        (written,) = reply["completion_probabilities"]
        assert written["id"] == token
        logprobs.append(float(written["logprob"]))
        ids = [*ids, token]
    return logprobs


def ids_of(server: LlamaServer, text: str) -> list[int]:
    """Return a text's token ids."""
    return list(post(server, "/tokenize", {"content": text, "parse_special": False})["tokens"])


@pytest.mark.parametrize("index", range(len(DRAFTS)))
def test_forced_sums_equal_those_of_one_request_per_token(server: LlamaServer, index: int) -> None:
    """Of rationale and answer alone, without their headers."""
    draft = DRAFTS[index]
    verifier = Verifier(Endpoint(server.base_url), scoring=Scoring(tier="forced_decoding"))

    (score,) = verifier.score(QUESTION, [draft])

    whole = draft_text(draft.rationale, draft.answer)
    reference = token_by_token(server, QUESTION, whole)
    count = len(reference) - len(ids_of(server, whole[: len(whole) - len(draft.answer) - 1]))
    answer = score.spans["consistency_answer"]
    assert answer.tokens == count
    assert answer.total == pytest.approx(sum(reference[-count:]), abs=NOISE * count)
    if draft.rationale:
        start = len(ids_of(server, "Rationale:"))
        rationale = score.spans["consistency_rationale"]
        headed = whole[: whole.index(draft.rationale) + len(draft.rationale)]
        assert rationale.tokens == len(ids_of(server, headed)) - start
        expected = sum(reference[start : start + rationale.tokens])
        assert rationale.total == pytest.approx(expected, abs=NOISE * rationale.tokens)
    assert score.terms["reflection"] <= 0
    assert score.attempts == 2


def test_parts_of_characters_have_no_log_probability(server: LlamaServer) -> None:
    """llama.cpp leaves such tokens out of its replies: the draft has no score, with the reason."""
    verifier = Verifier(Endpoint(server.base_url), scoring=Scoring(tier="forced_decoding"))

    plain, emoji = verifier.score(
        QUESTION, [DRAFTS[0], Draft(rationale="It is.", answer="東京 🗼")]
    )

    assert plain.value is not None
    assert emoji.value is None
    assert emoji.missing is not None
    assert "parts of a character" in emoji.missing


def test_a_written_emoji_leaves_the_draft_without_draft_terms(server: LlamaServer) -> None:
    """A mean over the tokens that are listed would flatter it."""
    reply = post(
        server,
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": QUESTION}],
            "grammar": 'root ::= "🗼 Paris"',
            "logprobs": True,
            "top_logprobs": 1,
            "temperature": 0,
        },
    )

    (choice,) = reply["choices"]
    assert choice["message"]["content"] == "🗼 Paris"
    assert len(choice["logprobs"]["content"]) + 1 < reply["usage"]["completion_tokens"]


def test_the_paper_formula_can_be_had_from_llama_cpp(server: LlamaServer) -> None:
    """Its five terms: two of the drafter, two of the forced text, and P(Yes)."""
    drafter = SpanLogprob(total=-2.0, tokens=2)
    draft = Draft(
        rationale="The French government sits in Paris.",
        answer="Paris",
        rationale_logprob=drafter,
        answer_logprob=drafter,
    )
    verifier = Verifier(Endpoint(server.base_url), scoring=Scoring(formula="paper"))

    (score,) = verifier.score(QUESTION, [draft])

    assert score.tier == "forced_decoding"
    assert score.value is not None
    assert score.value < sum(score.spans[f"consistency_{part}"].total for part in PARTS)
    with pytest.raises(ConfigurationError, match="the drafter returned no log-probabilities"):
        verifier.score(QUESTION, [DRAFTS[0]])
