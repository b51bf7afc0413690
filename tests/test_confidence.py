"""Calibrated confidence: what it says, when it is refused, and what it does to a question."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_model import ScriptedModel, tokens_of
from scripted_server import Fault, Reply, ScriptedServer, is_verification

from specrag_integrations import (
    Answer,
    AnswerVote,
    Calibration,
    ConfigurationError,
    Disjoint,
    Endpoint,
    FallbackReason,
    Listwise,
    MultiPerspective,
    NoAnswerError,
    NoAnswerReason,
    Passage,
    Scoring,
    SpeculativeRAG,
)
from specrag_integrations.confidence import Fingerprint, Thresholds, named, prompt_hash
from specrag_integrations.models import Capabilities, ChatReply

Scripted = Callable[..., ScriptedServer]
Body = dict[str, Any]

PASSAGES = [Passage(text=f"Fact {n} tells of river {n}.", id=f"p{n}") for n in range(4)]
QUESTION = "Which river?"
HANG = 20.0
WAYS = ["ask", "aask", "stream", "astream"]

AS_TOLD = {
    "kind": "isotonic",
    "coefficients": {"reflection": 1.0},
    "knots": tuple((math.log(n / 100), n / 100) for n in range(1, 100)),
}
"""P(correct) is what the verifier says: P(Yes), in hundredths."""
SETUP = Fingerprint(
    drafter=("scripted",),
    verifier="scripted",
    tier="reflection",
    prompts=prompt_hash(Scoring()),
    num_drafts=4,
    passages_per_draft=1,
    partitioner="Disjoint()",
    selector="BestScore()",
    formula="weighted",
    weights={},
)
FOUND = Thresholds(
    min_confidence=0.6,
    accept_confidence=0.8,
    target=0.75,
    asked=0.9,
    delta=0.1,
    questions=50,
    accepted=30,
    right=27,
)


def calibration(fingerprint: Fingerprint = SETUP, **changes: Any) -> Calibration:
    """Return a calibration that takes P(Yes) at its word."""
    return Calibration(fingerprint=fingerprint, **{**AS_TOLD, **changes})


def logistic(**coefficients: float) -> Calibration:
    """Return a logistic calibration of these terms."""
    return calibration(kind="logistic", knots=(), coefficients=coefficients)


def rag(server: ScriptedServer, **options: Any) -> SpeculativeRAG:
    """Return an engine that drafts once from each of four passages."""
    endpoint = Endpoint(server.base_url, "scripted", max_attempts=1)
    settings = {"num_drafts": 4, "passages_per_draft": 1, "partitioner": Disjoint()}
    settings = {"calibration": calibration(), **settings, **options}
    return SpeculativeRAG(drafter=endpoint, verifier=endpoint, **settings)


def river(body: Body) -> int:
    """Return the number of the first river that a request mentions."""
    text = "\n".join(message["content"] for message in body["messages"])
    return int(text.split("river ")[1][0])


def judging(
    p_yes: Mapping[int, float],
    *,
    draft_delays: Mapping[int, float] | None = None,
    verdict_delays: Mapping[int, float] | None = None,
    draft: Mapping[str, Any] | None = None,
) -> Callable[[Body, int], Any]:
    """Draft the river of a passage and judge it by the table, each after its delay."""

    def respond(body: Body, _: int) -> Reply:
        last = body["messages"][-1]["content"]
        if last.startswith("A draft answers"):
            return Reply("the refined river")
        if body.get("stream"):
            return Reply("standard answer [1]")
        n = river(body)
        if is_verification(body):
            p = p_yes.get(n, 0.1)
            labels = {"Yes": math.log(p), "No": math.log(1 - p)}
            return Reply("Yes", alternatives=labels, delay=(verdict_delays or {}).get(n, 0.0))
        text = f"Rationale: [1] says so.\nAnswer: river {n}"
        return Reply(text, delay=(draft_delays or {}).get(n, 0.0), **(draft or {}))

    return respond


def asked(engine: SpeculativeRAG, way: str = "ask", **options: Any) -> Answer:
    """Ask in one of the four ways."""

    async def streamed() -> Answer:
        events = [event async for event in engine.astream(QUESTION, PASSAGES, **options)]
        return events[-1].answer  # type: ignore[union-attr]

    if way == "ask":
        return engine.ask(QUESTION, PASSAGES, **options)
    if way == "aask":
        return asyncio.run(engine.aask(QUESTION, PASSAGES, **options))
    if way == "stream":
        return list(engine.stream(QUESTION, PASSAGES, **options))[-1].answer  # type: ignore[union-attr]
    return asyncio.run(streamed())


def note_of(answer: Answer, part: str) -> str:
    """Return the one note that holds some words."""
    (found,) = (note for note in answer.trace.notes if part in note)
    return found


# ---------------------------------------------------------------- the probability


def test_a_logistic_calibration_is_the_logistic_function_of_a_weighted_sum() -> None:
    """Of the terms it names; the others do not count."""
    fitted = replace(logistic(reflection=2.0, draft_answer=-0.5), intercept=1.0)

    found = fitted.probability({"reflection": -0.25, "draft_answer": -3.0, "draft": -9.0})

    assert found == pytest.approx(1 / (1 + math.exp(-(1.0 - 0.5 + 1.5))), abs=1e-15)


@pytest.mark.parametrize("far", [-1e6, 1e6])
def test_no_term_is_too_far_off(far: float) -> None:
    """A probability stays one where an exponential would overflow."""
    assert logistic(reflection=1.0).probability({"reflection": far}) == (far > 0)


@pytest.mark.parametrize(
    ("at", "probability"),
    [(-9.0, 0.1), (-2.0, 0.1), (-1.5, 0.2), (-1.0, 0.3), (-0.75, 0.5), (-0.5, 0.7), (5.0, 0.7)],
)
def test_an_isotonic_calibration_is_straight_lines_between_its_knots(
    at: float, probability: float
) -> None:
    """And level beyond the first and the last."""
    fitted = calibration(knots=((-2.0, 0.1), (-1.0, 0.3), (-0.5, 0.7)))

    assert fitted.probability({"reflection": at}) == pytest.approx(probability)


def test_a_draft_without_a_term_that_counts_has_no_probability() -> None:
    """Rather than one by other terms."""
    fitted = logistic(reflection=1.0, draft_answer=1.0)

    assert fitted.probability({"reflection": -0.1}) is None


# ---------------------------------------------------------------- the file


def test_a_file_holds_all_of_a_calibration(tmp_path: Path) -> None:
    """What is loaded equals what was saved."""
    setup = replace(SETUP, verifier_server="vllm", weights={"reflection": 0.75, "draft": 0.25})
    for one in (
        calibration(setup, thresholds=FOUND, questions=50, demonstration=True),
        replace(logistic(reflection=1.25), intercept=-0.5),
        calibration(Fingerprint()),
    ):
        one.save(tmp_path / "calibration.json")
        assert Calibration.load(str(tmp_path / "calibration.json")) == one


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 2}, "version is 2, and this release reads 1"),
        ({"kind": "magic"}, "kind='magic'"),
        ({"kind": None}, "kind=None is of the wrong kind"),
        ({"kind": ...}, "kind is missing"),
        ({"more": 1}, "more is unknown"),
        ({"intercept": math.nan}, "finite"),
        ({"intercept": "0"}, "intercept='0'"),
        ({"coefficients": {}}, "no term"),
        ({"coefficients": {"mood": 1.0}}, "mood"),
        ({"coefficients": {"reflection": "1"}}, "finite"),
        ({"knots": []}, "an isotonic calibration has knots"),
        ({"kind": "logistic"}, "an isotonic calibration has knots"),
        ({"knots": [[0.0, 0.5], [-1.0, 0.6]]}, "rise"),
        ({"knots": [[0.0, 0.5], [1.0, 0.4]]}, "rise"),
        ({"knots": [[0.0, 1.5]]}, "from 0 to 1"),
        ({"knots": [[0.0]]}, "pairs"),
        ({"demonstration": 0}, "demonstration=0"),
        ({"fingerprint": None}, "fingerprint=None"),
        ({"fingerprint": {"tier": "reflection"}}, "fingerprint.drafter is missing"),
        ({"fingerprint.tier": "magic"}, "fingerprint.tier='magic'"),
        ({"fingerprint.num_drafts": "4"}, "fingerprint.num_drafts='4'"),
        ({"fingerprint.drafter": [1]}, "fingerprint.drafter"),
        ({"fingerprint.weights": {"mood": 1}}, "mood"),
        ({"thresholds.min_confidence": 0}, "min_confidence=0"),
        ({"thresholds.min_confidence": True}, "min_confidence=True"),
        ({"thresholds.accept_confidence": 0.5}, "below min_confidence"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    """The error says which file, and what is wrong with it."""
    path = tmp_path / "mine.json"
    calibration(thresholds=FOUND).save(path)
    data = json.loads(path.read_text())
    for name, value in change.items():
        inside, _, key = name.rpartition(".")
        place = data[inside] if inside else data
        place[key] = value
        if value is ...:
            del place[key]
    path.write_text(json.dumps(data))

    with pytest.raises(ConfigurationError) as raised:
        Calibration.load(path)

    assert str(path) in str(raised.value)
    assert told in str(raised.value)


@pytest.mark.parametrize("text", [None, "", "[1]", "{", b"\xff\xfe\xff"])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, text: Any) -> None:
    """No file, no JSON, no text, no object."""
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    with pytest.raises(ConfigurationError, match=r"mine\.json is not a calibration: ."):
        Calibration.load(path)


@pytest.mark.parametrize("path", [None, 5, b"mine.json"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    """The message names the value."""
    with pytest.raises(ConfigurationError, match=f"path={path!r} must be a calibration's file"):
        Calibration.load(path)


def test_without_thresholds_none_can_be_taken_for_one() -> None:
    """`min_confidence=None` would switch the check off; without an early stop nothing is lost."""
    with pytest.raises(ConfigurationError, match="no thresholds"):
        _ = calibration().min_confidence
    found = calibration(thresholds=FOUND)

    assert calibration().accept_confidence is None
    assert (found.min_confidence, found.accept_confidence) == (0.6, 0.8)
    assert FOUND.attained is False
    assert replace(FOUND, target=0.9).attained


# ---------------------------------------------------------------- what is refused at once


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"calibration": None, "min_confidence": 0.5}, "specrag calibrate"),
        ({"calibration": None, "accept_confidence": 0.5}, "specrag calibrate"),
        ({"calibration": "calibration.json"}, "must be a Calibration"),
        ({"min_confidence": 0}, "min_confidence=0 must be above 0 and at most 1"),
        ({"min_confidence": 1.01}, "min_confidence"),
        ({"accept_confidence": "0.5"}, "accept_confidence"),
        ({"accept_confidence": True}, "accept_confidence"),
        ({"accept_confidence": math.nan}, "accept_confidence"),
        ({"min_confidence": 0.7, "accept_confidence": 0.6}, "below min_confidence=0.7"),
        ({"selector": Listwise()}, "Listwise reads no scores, so that calibration= does nothing"),
        (
            {
                "selector": Listwise(),
                "calibration": calibration(replace(SETUP, weights={"reflection": 0.5})),
            },
            "Listwise reads no scores, so that calibration= does nothing",
        ),
        ({"scoring": Scoring(tier="choice")}, "at tier='choice' no draft has a score of its own"),
        ({"scoring": Scoring(tier="agreement")}, "tier='agreement'"),
        (
            {"scoring": Scoring(formula="paper"), "accept_confidence": 0.6},
            "leave accept_confidence out",
        ),
    ],
)
def test_thresholds_that_can_never_work_are_refused(
    server: ScriptedServer, options: dict[str, Any], told: str
) -> None:
    """When the engine is made, not with its first question."""
    with pytest.raises(ConfigurationError) as raised:
        rag(server, **options)

    assert told in str(raised.value)
    assert not server.requests


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_drafts": 3}, "num_drafts: expected 4, found 3"),
        ({"passages_per_draft": 2}, "passages_per_draft: expected 1, found 2"),
        (
            {"partitioner": MultiPerspective(anchor=0)},
            "partitioner: expected Disjoint(), found MultiPerspective(anchor=0, lead=0)",
        ),
        (
            {"selector": AnswerVote(temperature=2.0)},
            "selector: expected BestScore(), found AnswerVote(temperature=2.0)",
        ),
        ({"instructions": "Be kind."}, "prompts: expected"),
        ({"scoring": Scoring(order="answer_first")}, "prompts: expected"),
        ({"scoring": Scoring(evidence="passages")}, "prompts: expected"),
        ({"scoring": Scoring(tier="draft_only")}, "tier: expected reflection, found draft_only"),
        ({"scoring": Scoring(formula="paper")}, "formula: expected weighted, found paper"),
        (
            {"scoring": Scoring(weights={"reflection": 1, "draft": 0.5})},
            "weights: expected the default, found reflection=1 draft=0.5",
        ),
    ],
)
def test_another_set_up_is_refused_by_name(
    server: ScriptedServer, options: dict[str, Any], told: str
) -> None:
    """What differs is said with what was expected and what was found; the rest is not."""
    with pytest.raises(ConfigurationError) as raised:
        rag(server, **options)

    assert told in str(raised.value)
    assert str(raised.value).count("expected") == 1
    assert "specrag calibrate" in str(raised.value)


def test_other_models_are_refused_by_name(server: ScriptedServer) -> None:
    """Both roles; an endpoint that has yet to find out its model is compared later."""
    mine = calibration(replace(SETUP, drafter=("small", "tiny"), verifier="large"))

    with pytest.raises(ConfigurationError) as raised:
        rag(server, calibration=mine)

    assert "drafter: expected small, tiny, found scripted" in str(raised.value)
    assert "verifier: expected large, found scripted" in str(raised.value)
    unknown = Endpoint(server.base_url)
    settings = {"num_drafts": 4, "passages_per_draft": 1, "partitioner": Disjoint()}
    SpeculativeRAG(drafter=unknown, verifier=unknown, calibration=mine, **settings)


def test_a_seed_is_no_difference() -> None:
    """It changes which subsets there are, and not what they are worth."""
    assert named(MultiPerspective(seed=3, anchor=1)) == "MultiPerspective(anchor=1, lead=0)"


def test_an_engine_tells_its_own_fingerprint(scripted: Scripted) -> None:
    """With what its servers say of themselves; a calibration of it fits."""
    server = scripted(judging({2: 0.9}), kind="llama.cpp")
    engine = rag(server, calibration=None)
    found = engine.fingerprint()

    assert replace(found, tier="reflection", drafter_server=None, verifier_server=None) == SETUP
    assert found.tier is None
    assert found.drafter_server == found.verifier_server == "llama.cpp"
    fitting = calibration(replace(found, tier="reflection"))
    assert asked(rag(server, calibration=fitting)).confidence == pytest.approx(0.9)


def test_scores_have_the_weights_of_the_calibration(scripted: Scripted) -> None:
    """Where no scoring is given: it was made for them."""
    weights = {"reflection": 0.25, "draft_answer": 0.75}
    mine = calibration(replace(SETUP, weights=weights))
    answer = asked(rag(scripted(judging({})), calibration=mine))

    for score in answer.trace.scores:
        weighed = sum(weight * score.terms[term] for term, weight in weights.items())
        assert score.value == pytest.approx(weighed)


@pytest.mark.parametrize(
    "scoring",
    [
        Scoring(order="answer_first"),
        Scoring(evidence="passages"),
        Scoring(tier="reflection", order="answer_first"),
    ],
)
def test_a_scoring_without_weights_takes_those_of_the_calibration(
    server: ScriptedServer, scoring: Scoring
) -> None:
    """It says how to ask, and the calibration how to weigh what comes back."""
    weights = {"reflection": 0.25, "draft_answer": 0.75}
    mine = calibration(replace(SETUP, prompts=prompt_hash(scoring), weights=weights))

    assert rag(server, calibration=mine, scoring=scoring).fingerprint().weights == weights


@pytest.mark.parametrize(
    ("scoring", "told"),
    [
        (Scoring(weights={"reflection": 1.0}), "weights: expected reflection=0.25"),
        (Scoring(formula="paper"), "formula: expected weighted, found paper"),
        (Scoring(tier="draft_only"), "tier: expected reflection, found draft_only"),
    ],
)
def test_a_scoring_that_cannot_have_the_weights_is_another_set_up(
    server: ScriptedServer, scoring: Scoring, told: str
) -> None:
    """It has weights of its own, a formula without any, or a tier without their terms."""
    weights = {"reflection": 0.25, "draft_answer": 0.75}

    with pytest.raises(ConfigurationError, match="another set-up") as raised:
        rag(server, calibration=calibration(replace(SETUP, weights=weights)), scoring=scoring)

    assert told in str(raised.value)


# ---------------------------------------------------------------- the confidence of an answer


def test_an_answer_has_the_confidence_of_its_draft(scripted: Scripted) -> None:
    """So has every score, in the trace and in the events."""
    server = scripted(judging({0: 0.3, 1: 0.7, 2: 0.5}))
    events = list(rag(server).stream(QUESTION, PASSAGES))
    answer = events[-1].answer  # type: ignore[union-attr]

    assert (answer.text, answer.confidence_kind) == ("river 1", "calibrated")
    assert answer.confidence == pytest.approx(0.7)
    found = {score.draft: score.confidence for score in answer.trace.scores}
    assert found == pytest.approx({0: 0.3, 1: 0.7, 2: 0.5, 3: 0.1})
    shown = {
        event.to_dict()["score"]["draft"]: event.to_dict()["score"]["confidence"]
        for event in events
        if event.type == "score"
    }
    assert shown == found


def test_without_a_calibration_there_is_no_confidence(scripted: Scripted) -> None:
    """A raw score is not a probability."""
    answer = asked(rag(scripted(judging({1: 0.9})), calibration=None))

    assert (answer.confidence, answer.confidence_kind) == (None, None)
    assert {score.confidence for score in answer.trace.scores} == {None}


def test_a_draft_without_a_term_has_no_confidence_and_says_so(scripted: Scripted) -> None:
    """With `min_confidence` it is not trusted either."""
    server = scripted(judging({1: 0.9}, draft={"logprobs": None}))
    mine = logistic(reflection=1.0, draft_answer=1.0)
    plain = asked(rag(server, calibration=mine))
    careful = asked(rag(server, calibration=mine, min_confidence=0.01))

    assert (plain.text, plain.confidence) == ("river 1", None)
    assert (
        note_of(plain, "draft 1: no draft_answer") == "no confidence for draft 1: no draft_answer"
    )
    assert careful.fallback_reason is FallbackReason.LOW_CONFIDENCE


# ---------------------------------------------------------------- min_confidence


@pytest.mark.parametrize("way", WAYS)
def test_a_winner_below_min_confidence_is_not_trusted(scripted: Scripted, way: str) -> None:
    """Standard RAG answers instead, and the trace says of which draft and why."""
    server = scripted(judging({2: 0.55}))
    answer = asked(rag(server, min_confidence=0.6), way)

    assert answer.text == "standard answer [1]"
    assert answer.fallback_reason is FallbackReason.LOW_CONFIDENCE
    assert (answer.confidence, answer.confidence_kind) == (None, None)
    assert answer.selection is not None
    assert answer.selection.winner is None
    assert answer.selection.ranking[0] == 2
    assert note_of(answer, "draft 2:") == "draft 2: confidence 0.55, with min_confidence=0.60"
    assert {rival.answer for rival in answer.dissent} == {f"river {n}" for n in range(4)}


def test_a_winner_at_min_confidence_is_trusted(scripted: Scripted) -> None:
    """The threshold itself is enough."""
    fitted = calibration(kind="logistic", knots=(), coefficients={"draft": 0.0})
    answer = asked(rag(scripted(judging({2: 0.7})), calibration=fitted, min_confidence=0.5))

    assert (answer.text, answer.confidence) == ("river 2", 0.5)
    assert answer.fallback_reason is None


def test_without_fallback_low_confidence_is_the_reason(scripted: Scripted) -> None:
    """And the error names the draft."""
    engine = rag(scripted(judging({2: 0.5})), min_confidence=0.6, fallback=None)

    with pytest.raises(NoAnswerError) as raised:
        asked(engine)

    assert raised.value.reason is NoAnswerReason.LOW_CONFIDENCE
    assert raised.value.failures == ("draft 2: confidence 0.50, with min_confidence=0.60",)


def test_at_the_deadline_a_draft_below_min_confidence_does_not_win(scripted: Scripted) -> None:
    """There is no time left to fall back."""
    delays = {0: HANG}
    server = scripted(judging({2: 0.5}, draft_delays=delays))
    engine = rag(server, min_confidence=0.6, refine="when_unsure")

    with pytest.raises(NoAnswerError) as raised:
        asked(engine, deadline=0.8)

    assert raised.value.reason is NoAnswerReason.DEADLINE
    assert any("confidence 0.50" in failure for failure in raised.value.failures)
    assert asked(rag(server, min_confidence=0.4), deadline=0.8).text == "river 2"


# ---------------------------------------------------------------- accept_confidence


@pytest.mark.parametrize("way", WAYS)
def test_the_first_draft_that_is_trusted_ends_the_work(scripted: Scripted, way: str) -> None:
    """What is still being written or verified is cancelled, and the server sees it."""
    # The first draft is judged before the second, also where the machine is busy.
    delays = {1: 0.5, 3: HANG}
    respond = judging({0: 0.5, 1: 0.9}, draft_delays={2: HANG}, verdict_delays=delays)
    server = scripted(respond)
    started = time.perf_counter()
    answer = asked(rag(server, accept_confidence=0.9, min_confidence=0.9), way)

    assert time.perf_counter() - started < HANG / 2
    assert (answer.text, answer.fallback_reason) == ("river 1", None)
    assert answer.confidence == pytest.approx(0.9)
    assert note_of(answer, "accepted early") == (
        "accepted early: draft 1 at confidence 0.90, 2 drafts cancelled"
    )
    assert answer.selection is not None
    assert (answer.selection.winner, answer.selection.selector) == (1, "accept_confidence")
    assert not answer.trace.deadline_hit
    assert server.wait_for(lambda one: one.aborted == 2)
    assert server.wait_idle()


def test_the_first_to_come_is_accepted_although_a_better_one_would_follow(
    scripted: Scripted,
) -> None:
    """The order of arrival decides among those that reach the threshold, not the index."""
    respond = judging({0: 0.95, 3: 0.8}, draft_delays={0: 1.0, 1: HANG})
    answer = asked(rag(scripted(respond), accept_confidence=0.7))

    assert answer.text == "river 3"
    assert answer.confidence == pytest.approx(0.8)


def test_where_none_reaches_it_the_best_of_all_wins(scripted: Scripted) -> None:
    """As without it."""
    answer = asked(rag(scripted(judging({0: 0.6, 3: 0.8})), accept_confidence=0.81))

    assert answer.text == "river 3"
    assert len(answer.trace.scores) == 4
    assert not any("accepted early" in note for note in answer.trace.notes)


def test_a_draft_that_was_cut_off_is_not_accepted_early(scripted: Scripted) -> None:
    """A whole one is better than it, however the verifier likes it."""

    def respond(body: Body, call: int) -> Any:
        if not is_verification(body) and not body.get("stream") and river(body) == 0:
            return Reply("Rationale: so.\nAnswer: river 0 and", finish_reason="length")
        return judging({0: 0.9, 1: 0.5}, draft_delays={1: 0.3})(body, call)

    answer = asked(rag(scripted(respond), accept_confidence=0.8))

    assert answer.text == "river 1"
    assert len(answer.trace.scores) == 4


def test_what_was_accepted_early_stands_beside_min_confidence(scripted: Scripted) -> None:
    """Both thresholds at once: one ends the work, the other judges what never ended early."""
    both = {"accept_confidence": 0.8, "min_confidence": 0.6}

    assert asked(rag(scripted(judging({1: 0.85})), **both)).text == "river 1"
    assert asked(rag(scripted(judging({1: 0.7})), **both)).text == "river 1"
    assert asked(rag(scripted(judging({1: 0.5})), **both)).text == "standard answer [1]"


# ---------------------------------------------------------------- another set-up, found out late


@pytest.mark.parametrize("way", WAYS)
def test_another_server_means_no_confidence(
    scripted: Scripted, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """Nothing can be trusted or accepted early by it, and both log and trace say so loudly."""
    mine = calibration(replace(SETUP, verifier_server="vllm"))
    server = scripted(judging({1: 0.95}), kind="llama.cpp")
    told = (
        "no confidence, since the calibration is for another set-up: "
        "verifier_server: expected vllm, found llama.cpp"
    )
    with caplog.at_level(logging.WARNING, logger="specrag_integrations"):
        answer = asked(
            rag(server, calibration=mine, min_confidence=0.5, accept_confidence=0.9), way
        )

    assert answer.fallback_reason is FallbackReason.LOW_CONFIDENCE
    assert len(answer.trace.scores) == 4
    assert note_of(answer, "another set-up") == told
    assert note_of(answer, "draft 1:") == "draft 1: no confidence, with min_confidence=0.50"
    assert [record.message for record in caplog.records].count(told) == 1


def test_servers_that_do_not_tell_in_time_mean_no_confidence() -> None:
    """At the deadline a draft can still be scored for free, and nothing is known of the servers."""

    class Silent(ScriptedModel):
        async def capabilities(self) -> Capabilities | None:
            await asyncio.sleep(HANG)
            return None

    tokens = tokens_of(("Rationale:", -0.1), (" so.\nAnswer:", -0.1), (" Rhine", -0.1))
    reply = ChatReply(text="".join(token.text for token in tokens), tokens=tokens)
    engine = SpeculativeRAG(
        drafter=Silent([reply], name="scripted"),
        verifier=ScriptedModel([], name="scripted", known=Capabilities(), tried=ChatReply(text="")),
        num_drafts=4,
        passages_per_draft=1,
        partitioner=Disjoint(),
        calibration=replace(logistic(draft=1.0), fingerprint=replace(SETUP, tier="draft_only")),
    )
    answer = engine.ask(QUESTION, PASSAGES, deadline=0.5)

    assert (answer.text, answer.tier, answer.confidence) == ("Rhine", "draft_only", None)
    assert note_of(answer, "did not tell in time")


def test_another_tier_means_no_confidence(scripted: Scripted) -> None:
    """What was measured by other terms says nothing."""
    mine = calibration(replace(SETUP, tier="prompt_logprobs"))
    answer = asked(rag(scripted(judging({1: 0.95})), calibration=mine, accept_confidence=0.5))

    assert (answer.text, answer.tier, answer.confidence) == ("river 1", "reflection", None)
    assert "tier: expected prompt_logprobs, found reflection" in note_of(answer, "another set-up")


def test_a_model_found_out_late_is_compared_late(scripted: Scripted) -> None:
    """An endpoint without a named model learns it from its server."""
    server = scripted(judging({1: 0.95}), models=["other"])
    unknown = Endpoint(server.base_url)
    with SpeculativeRAG(
        drafter=unknown,
        verifier=unknown,
        num_drafts=4,
        passages_per_draft=1,
        partitioner=Disjoint(),
        calibration=calibration(),
    ) as engine:
        answer = engine.ask(QUESTION, PASSAGES)

    assert answer.confidence is None
    assert "verifier: expected scripted, found other" in note_of(answer, "another set-up")


# ---------------------------------------------------------------- refinement


def test_a_winner_below_min_confidence_is_mended_where_there_is_no_fallback(
    scripted: Scripted,
) -> None:
    """With `refine="when_unsure"`; what the verifier wrote has no confidence of the draft's."""
    server = scripted(judging({2: 0.5}))
    mending = {"min_confidence": 0.6, "refine": "when_unsure"}
    mended = asked(rag(server, fallback=None, **mending))
    fallen = asked(rag(server, **mending))

    assert (mended.text, mended.confidence) == ("the refined river", None)
    assert mended.trace.refinement is not None
    assert note_of(mended, "draft 2:") == "draft 2: confidence 0.50, with min_confidence=0.60"
    assert fallen.fallback_reason is FallbackReason.LOW_CONFIDENCE


def test_a_draft_below_the_threshold_that_could_not_be_mended_is_no_answer(
    scripted: Scripted,
) -> None:
    """Nothing that is not trusted goes out because the refinement failed."""
    verdicts = judging({2: 0.5})

    def respond(body: dict[str, Any], call: int) -> Any:
        if body.get("stream"):
            return Fault(400)
        return verdicts(body, call)

    engine = rag(scripted(respond), fallback=None, min_confidence=0.6, refine="when_unsure")
    shown: list[str] = []
    with pytest.raises(NoAnswerError, match="is not trusted and could not be mended") as raised:
        shown += [event.type for event in engine.stream(QUESTION, PASSAGES)]
    assert raised.value.reason is NoAnswerReason.LOW_CONFIDENCE
    assert "delta" not in shown


def test_a_draft_that_was_accepted_is_sure(scripted: Scripted) -> None:
    """A rival close by is no reason to refine it; `always` is."""
    respond = judging({1: 0.9, 2: 0.9}, draft_delays={0: HANG})
    server = scripted(respond)
    kept = asked(rag(server, accept_confidence=0.85, refine="when_unsure"))
    unsure = asked(rag(scripted(judging({1: 0.9, 2: 0.9})), refine="when_unsure"))
    always = asked(rag(server, accept_confidence=0.85, refine="always"))

    assert kept.text in {"river 1", "river 2"}
    assert unsure.text == always.text == "the refined river"
