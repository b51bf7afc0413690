"""RAGAS: the real library, judged by a scripted server."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from scripted_server import Fault, Reply, ScriptedServer

from specrag_integrations import ConfigurationError, Endpoint
from specrag_integrations.errors import CacheError, EndpointError, MissingDependencyError
from specrag_integrations.evaluation.cache import CachedModel, ReplyCache
from specrag_integrations.evaluation.ragas import Judgeable, Judgement, _in_form, _Judge, judged
from specrag_integrations.portal import portal

Scripted = Callable[..., ScriptedServer]

ADA = Judgeable(
    question="Who built the bridge?",
    answer="Ada Lund built it [1]. It is blue [2].",
    contexts=["Ada Lund built the bridge.", "The bridge is red."],
    reference="Ada Lund built the bridge. It opened in 1934.",
)


def given(body: dict[str, Any]) -> dict[str, Any]:
    """Return the input that the library's prompt ends with."""
    prompt = body["messages"][0]["content"]
    found = re.search(
        r"same with the following input\s*input:\s*(\{.*\})\s*Output:", prompt, re.DOTALL
    )
    assert found, prompt
    data: dict[str, Any] = json.loads(found[1])
    return data


def judge_by_words(body: dict[str, Any], call: int) -> str:
    """Judge as a model would: sentences are statements, supported if their words are there."""
    data = given(body)
    if "statements" in data:
        verdicts = [
            {
                "statement": statement,
                "reason": "compared",
                "verdict": int(statement.split()[-1].strip(".") in data["context"]),
            }
            for statement in data["statements"]
        ]
        return json.dumps({"statements": verdicts})
    text = data.get("answer") or data["response"]
    sentences = [part.strip() for part in text.split(".") if part.strip()]
    return json.dumps({"statements" if "answer" in data else "claims": sentences})


def test_the_library_scores_what_the_judge_says(ragas: Any, scripted: Scripted) -> None:
    """Both metrics are the library's, from the judge's verdicts on statements and claims."""
    server = scripted(judge_by_words)
    answer = Judgeable(
        question="Who built the bridge?",
        answer="The builder was Lund [1]. The bridge is blue [2].",
        contexts=["The builder of the bridge was Lund.", "The bridge is red."],
        reference="It was built by Lund. It opened in 1934. The bridge is blue.",
    )

    (judgement,) = judged([answer], Endpoint(server.base_url))

    assert judgement.faithfulness == 0.5  # Lund is in the contexts, blue is not
    # Both claims are in the reference, and of its three claims the answer has two.
    assert judgement.factual_correctness == pytest.approx(2 / (2 + 0.5 * 1), abs=0.005)
    assert judgement.reasons == ()


def test_the_judge_reads_question_contexts_and_reference(ragas: Any, scripted: Scripted) -> None:
    """All that an answer is judged by is in the requests, and no citation."""
    server = scripted(judge_by_words)
    judged([ADA], Endpoint(server.base_url))

    inputs = [given(body) for body in server.chats]
    assert inputs[0] == {
        "question": ADA.question,
        "answer": "Ada Lund built it. It is blue.",
    }
    assert inputs[1]["context"] == "Ada Lund built the bridge.\nThe bridge is red."
    assert any(data.get("response") == ADA.reference for data in inputs)
    assert all(
        "[1]" not in body["messages"][0]["content"].split("input:")[-1] for body in server.chats
    )


def test_a_judge_that_fails_leaves_a_reason(ragas: Any, scripted: Scripted) -> None:
    """One answer without a judgement does not cost the others theirs; the order is kept."""

    def respond(body: dict[str, Any], call: int) -> Any:
        return Fault(400) if "DOWN" in json.dumps(given(body)) else judge_by_words(body, call)

    down = Judgeable(question="q", answer="It is DOWN.", contexts=["c"], reference="DOWN")
    server = scripted(respond)

    first, failed, last = judged([ADA, down, ADA], Endpoint(server.base_url))

    assert first == last
    assert first.faithfulness is not None
    assert (failed.faithfulness, failed.factual_correctness) == (None, None)
    assert [reason.split(":")[0] for reason in failed.reasons] == [
        "faithfulness",
        "factual correctness",
    ]
    assert all("HTTP 400" in reason for reason in failed.reasons)


def test_one_metric_may_fail_alone(ragas: Any, scripted: Scripted) -> None:
    """What could be judged is kept."""

    def respond(body: dict[str, Any], call: int) -> str:
        return "I cannot." if "response" in given(body) else judge_by_words(body, call)

    (judgement,) = judged([ADA], Endpoint(scripted(respond).base_url))

    assert judgement.faithfulness is not None
    assert judgement.factual_correctness is None
    (reason,) = judgement.reasons
    assert reason.startswith("factual correctness: ")
    assert "ClaimDecompositionOutput" in reason
    assert "no JSON object" in reason


def test_no_statements_are_no_number(ragas: Any, scripted: Scripted) -> None:
    """Where the judge finds nothing to check, the answer is neither faithful nor unfaithful."""
    server = scripted(lambda body, _: json.dumps({"statements": [], "claims": []}))
    (judgement,) = judged([ADA], Endpoint(server.base_url))

    assert judgement.faithfulness is None
    assert "found no statements" in judgement.reasons[0]


@pytest.mark.parametrize(
    ("item", "reasons"),
    [
        (
            Judgeable(question="q", answer=" [1] ", contexts=["c"], reference="r"),
            ("faithfulness: there is no answer", "factual correctness: there is no answer"),
        ),
        (
            Judgeable(question="q", answer="a", contexts=[" "]),
            ("faithfulness: there is no context", "factual correctness: there is no reference"),
        ),
    ],
)
def test_what_lacks_is_told_without_asking(
    ragas: Any, scripted: Scripted, item: Judgeable, reasons: tuple[str, ...]
) -> None:
    """Nothing is sent for an answer that cannot be judged."""
    server = scripted(judge_by_words)

    assert judged([item], Endpoint(server.base_url)) == (Judgement(reasons=reasons),)
    assert server.chats == []


def test_no_more_answers_are_judged_at_once_than_allowed(ragas: Any, scripted: Scripted) -> None:
    """Each judgement is given on as it is made, and few requests are under way."""
    server = scripted(judge_by_words, delay=0.02)
    kept: list[int] = []

    judged(
        [ADA] * 5,
        Endpoint(server.base_url),
        max_concurrency=2,
        keep=lambda place, _: kept.append(place),
    )

    assert sorted(kept) == [0, 1, 2, 3, 4]
    assert server.max_in_flight == 2


def test_nothing_to_judge_is_nothing(ragas: Any, scripted: Scripted) -> None:
    """No answers bring no judgements."""
    assert judged([], Endpoint(scripted().base_url)) == ()


def test_judgements_replay_from_the_cache(ragas: Any, scripted: Scripted, tmp_path: Path) -> None:
    """An interrupted run does not pay twice: the judge's replies can be kept like any other."""
    server = scripted(judge_by_words)
    cache = ReplyCache(tmp_path / "replies")
    first = judged([ADA], CachedModel(Endpoint(server.base_url), cache=cache, identity="m"))
    sent = len(server.chats)

    again = judged([ADA], CachedModel(Endpoint(server.base_url), cache=cache, identity="m"))

    assert again == first
    assert len(server.chats) == sent > 0


def test_what_is_no_failure_of_the_judge_is_raised_as_itself(
    ragas: Any, scripted: Scripted, tmp_path: Path
) -> None:
    """A cache that cannot be used is not taken for a judge's failure, nor wrapped in a group."""
    server = scripted(judge_by_words)
    cache = ReplyCache(tmp_path / "replies")
    judge = CachedModel(Endpoint(server.base_url), cache=cache, identity="m")
    cache.close()

    with pytest.raises(CacheError):
        judged([ADA, ADA], judge)


def test_the_library_does_not_report_home(ragas: Any, scripted: Scripted) -> None:
    """Its telemetry is off once it has been used."""
    judged([ADA], Endpoint(scripted(judge_by_words).base_url))

    assert importlib.import_module("ragas._analytics").do_not_track()


@pytest.mark.parametrize(
    "text",
    [
        '{"claims": ["a"]}',
        'Here:\n```json\n{"claims": ["a"]}\n```\nDone {well}.',
        '<think>{"claims": []}</think>{"claims": ["a"]}',
    ],
)
def test_the_reply_is_found_among_words(text: str) -> None:
    """Fences, words and thinking around the JSON are passed over."""
    assert _in_form(text, Form).data == {"claims": ["a"]}


class Form:
    """A stand-in for the library's pydantic models."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    @classmethod
    def model_validate(cls, data: dict[str, Any]) -> Form:
        if "claims" not in data:
            raise ValueError("claims are missing")
        return cls(data)


def test_a_reply_of_another_form_is_asked_for_again(scripted: Scripted) -> None:
    """The judge is told what was wrong, once."""
    server = scripted(lambda _, call: '{"x": 1}' if call == 0 else '{"claims": []}')
    judge = _Judge(Endpoint(server.base_url), 64)

    form = portal.run(judge.agenerate("prompt", Form))

    assert form.data == {"claims": []}
    first, second = (body["messages"] for body in server.chats)
    assert [turn["content"] for turn in first] == ["prompt"]
    assert [turn["role"] for turn in second] == ["user", "assistant", "user"]
    assert "claims are missing" in second[2]["content"]


def test_what_the_judge_wrote_is_not_in_the_reason() -> None:
    """The reason names the field and what it should be: reasons are shown and kept."""

    class Claims(BaseModel):
        claims: list[int]

    with pytest.raises(ValueError, match=r"^claims\.1: Input should be a valid integer") as raised:
        _in_form('{"claims": [1, "a private word"]}', Claims)
    assert "private" not in str(raised.value)


def test_the_repr_of_a_judgement_has_no_text() -> None:
    """Its reasons may quote a server."""
    assert "private" not in repr(Judgement(reasons=("400: a private word",)))


def test_a_judge_that_never_writes_the_form_is_an_error(scripted: Scripted) -> None:
    """Two replies that cannot be read are a failure of the judge, with the reason."""
    server = scripted(Reply("no", finish_reason="length"))

    with pytest.raises(EndpointError, match=r"no Form that can be read \(length; there is no JSON"):
        portal.run(_Judge(Endpoint(server.base_url), 64).agenerate("prompt", Form))

    assert len(server.chats) == 2


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, scripted: Scripted) -> None:
    """The error says what to install, before anything is sent."""
    monkeypatch.setitem(sys.modules, "ragas.llms.base", None)
    server = scripted()

    with pytest.raises(MissingDependencyError, match=r"specrag-integrations\[ragas\]"):
        judged([ADA], Endpoint(server.base_url))

    assert server.requests == []


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"max_concurrency": 0}])
def test_wrong_options_are_refused(scripted: Scripted, options: dict[str, Any]) -> None:
    """The error comes before the library is needed."""
    with pytest.raises(ConfigurationError):
        judged([ADA], Endpoint(scripted().base_url), **options)
