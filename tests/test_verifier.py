"""The verifier: scores of any drafts, at the best tier that a server allows."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from scripted_model import ScriptedModel
from scripted_server import (
    BROKEN_PROMPT_LOGPROBS,
    THOUGHT,
    Fault,
    Reply,
    ScriptedServer,
    default_respond,
    is_verification,
    p_yes,
    prompt_pieces,
    pseudo_logprob,
    unsupported,
)

from specrag_integrations import (
    Draft,
    Endpoint,
    Passage,
    RankStratified,
    Score,
    Scoring,
    SpeculativeRAG,
    Subset,
    Verifier,
)
from specrag_integrations.errors import (
    ConfigurationError,
    EndpointError,
    EndpointRejectedError,
    EndpointTimeoutError,
    EndpointUnavailableError,
    InputError,
    LogprobsUnavailableError,
)
from specrag_integrations.models import ChatReply, ChatRequest, Token
from specrag_integrations.spans import SpanLogprob

Scripted = Callable[..., ScriptedServer]
Body = dict[str, Any]

QUESTION = "Which city?"
ROUTE = ("POST", "/v1/chat/completions")
PARIS = Draft(rationale="It says so.", answer="Paris")
ROME = Draft(rationale="It is old.", answer="Rome, Italy")
BARE = Draft(rationale="", answer="Oslo")
DRAFTS = [PARIS, ROME]


def verifier(server: ScriptedServer, *, attempts: int = 1, **options: Any) -> Verifier:
    """Return a verifier on a scripted server."""
    return Verifier(Endpoint(server.base_url, max_attempts=attempts), **options)


def answered(body: Body) -> str:
    """Return the answer of the draft that a request verifies."""
    return str(body["messages"][1]["content"].partition("Answer: ")[2])


def by_answer(server: ScriptedServer) -> dict[str, Body]:
    """Return the verifications by their draft's answer."""
    return {answered(body): body for body in server.chats if len(body["messages"]) > 1}


def yes(p: float, **options: Any) -> Reply:
    """Return a verdict with P(Yes) = p."""
    return Reply("Yes", alternatives={"Yes": math.log(p), "No": math.log(1 - p)}, **options)


def reply(p: float) -> ChatReply:
    """Return the same as a model in memory says it."""
    listed = (("Yes", math.log(p)), ("No", math.log(1 - p)))
    token = Token(text="Yes", data=b"Yes", logprob=math.log(p), alternatives=listed)
    return ChatReply(text="Yes", tokens=(token,))


def values(scores: Sequence[Score]) -> list[float | None]:
    """Return what drafts are ranked by."""
    return [score.value for score in scores]


# ---------------------------------------------------------------- drafts written by hand


def test_drafts_written_by_hand_are_scored_by_vllm_with_all_it_tells(scripted: Scripted) -> None:
    """P(Yes), and the sum, the number of tokens and the mean of rationale and answer."""
    server = scripted(kind="vllm")
    scores = verifier(server).score(QUESTION, DRAFTS)
    bodies = by_answer(server)

    assert len(server.chats) == 2
    for index, (draft, score) in enumerate(zip(DRAFTS, scores, strict=True)):
        body = bodies[draft.answer]
        start = len(prompt_pieces(body["messages"][:1]))
        pieces = server.prompt(body)
        logs = [pseudo_logprob(piece, at) for at, piece in enumerate(pieces)][start:]
        expected = {"consistency_rationale": logs[1:4], "consistency_answer": logs[5:]}
        expected["consistency_answer"] = expected["consistency_answer"][: 1 + index]  # its words

        assert (score.draft, score.tier, score.missing) == (index, "prompt_logprobs", None)
        assert score.value == score.terms["reflection"]
        assert score.value == pytest.approx(math.log(p_yes(body)), abs=1e-3)
        for term, found in score.spans.items():
            assert found.tokens == len(expected[term])
            assert found.total == pytest.approx(sum(expected[term]))
            assert found.mean == score.terms[term] == pytest.approx(found.total / found.tokens)
        assert score.spans.keys() == expected.keys()
        assert (score.count.prompt, score.count.completion) == (len(pieces), 1)
        assert (score.attempts, score.model) == (1, "scripted")
        assert score.seconds > 0


def test_scores_come_in_the_order_of_the_drafts(scripted: Scripted) -> None:
    """Whichever is judged first; all are asked about at the same time."""
    delays = {"A": 0.3, "B": 0.15, "C": 0.0}
    chances = {"A": 0.2, "B": 0.4, "C": 0.6}
    server = scripted(lambda body, _: yes(chances[answered(body)], delay=delays[answered(body)]))
    drafts = [Draft(rationale="r", answer=letter) for letter in "ABC"]

    scores = verifier(server).score(QUESTION, drafts)

    assert [math.exp(value or 0) for value in values(scores)] == pytest.approx([0.2, 0.4, 0.6])
    assert [score.draft for score in scores] == [0, 1, 2]
    assert server.max_in_flight == 3


def test_a_loop_need_not_be_blocked(scripted: Scripted) -> None:
    """`ascore` gives the same scores."""
    server = scripted()
    one = verifier(server)

    assert values(asyncio.run(one.ascore(QUESTION, DRAFTS))) == values(one.score(QUESTION, DRAFTS))


def test_without_drafts_nothing_is_asked(scripted: Scripted) -> None:
    """Not even what the server can do."""
    server = scripted()

    assert verifier(server).score(QUESTION, []) == []
    assert server.requests == []


@pytest.mark.parametrize(
    ("question", "drafts", "named"),
    [
        (" ", DRAFTS, "the question is empty"),
        (None, DRAFTS, "the question must be a str"),
        (QUESTION, [PARIS, Draft(rationale="r", answer=" \n")], "draft 1 has an empty answer"),
        (QUESTION, [PARIS, "Rome"], "draft 1 must be a Draft, not a str"),
        (
            QUESTION,
            [PARIS, Draft(rationale="r", answer=1856)],  # type: ignore[arg-type]
            "draft 1: its answer is a int and must be a str",
        ),
        (
            QUESTION,
            [Draft(rationale=None, answer="Rome")],  # type: ignore[arg-type]
            "draft 0: its rationale is a NoneType and must be a str",
        ),
    ],
)
def test_what_cannot_be_scored_is_named_before_anything_is_asked(
    scripted: Scripted, question: Any, drafts: Any, named: str
) -> None:
    """By its place in the list."""
    server = scripted()
    with pytest.raises(InputError, match=named):
        verifier(server).score(question, drafts)
    assert server.requests == []


def test_passages_can_only_be_shown_where_a_draft_has_some(scripted: Scripted) -> None:
    """The message says how a draft gets them: by its subset."""
    shown = Scoring(evidence="passages")
    with pytest.raises(InputError, match="draft 0 has no subset: evidence='passages'"):
        verifier(scripted(), scoring=shown).score(QUESTION, [PARIS])


@pytest.mark.parametrize(
    ("model", "named"),
    [(Endpoint, "not the class Endpoint"), ("http://gpu:8000", "not str"), (None, "not NoneType")],
)
def test_a_verifier_needs_a_model(model: Any, named: str) -> None:
    """An object with `chat`; the message says how to make one."""
    with pytest.raises(ConfigurationError, match=rf"{named}; write Endpoint\(base_url, model\)"):
        Verifier(model)


def test_scoring_is_a_scoring() -> None:
    """Not a tier's name."""
    with pytest.raises(ConfigurationError, match="scoring must be a Scoring"):
        Verifier(ScriptedModel([]), scoring="reflection")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scoring", "tiers"),
    [(None, ("magic",)), (Scoring(formula="paper"), ("reflection",))],
)
def test_tiers_are_checked_where_they_are_given(scoring: Any, tiers: Any) -> None:
    """An unknown one, and one that the scoring cannot use."""
    with pytest.raises(ConfigurationError):
        Verifier(ScriptedModel([]), scoring=scoring, tiers=tiers)


@pytest.mark.parametrize(
    "scoring",
    [Scoring(tier="draft_only"), Scoring(formula="paper"), Scoring(weights={"draft": 1.0})],
)
def test_different_drafters_are_not_compared_by_their_own_word(scoring: Scoring) -> None:
    """Log-probabilities of different models have different scales."""
    with pytest.raises(ConfigurationError, match="different drafting models"):
        Verifier(ScriptedModel([]), scoring=scoring, comparable_drafts=False)


def test_a_draft_that_could_not_be_verified_has_no_value_and_its_reason(
    scripted: Scripted,
) -> None:
    """The others have theirs."""
    server = scripted(lambda body, _: Fault(503) if answered(body) == "Paris" else yes(0.6))
    paris, rome = verifier(server).score(QUESTION, DRAFTS)

    assert (paris.value, paris.cannot) == (None, False)
    assert "503" in (paris.missing or "")
    assert rome.value == pytest.approx(math.log(0.6), abs=1e-6)


def test_where_every_request_fails_the_failure_is_raised(scripted: Scripted) -> None:
    """After the attempts allowed at each tier."""
    server = scripted(Fault(503))
    with pytest.raises(EndpointUnavailableError, match="503"):
        verifier(server, attempts=2, tiers=("reflection",)).score(QUESTION, DRAFTS)
    assert len(server.chats) == 2 * 2


def test_an_application_model_without_log_probabilities_is_named() -> None:
    """With what needs none."""
    model = ScriptedModel(["Yes"], name="some-model")
    with pytest.raises(
        LogprobsUnavailableError,
        match=r"some-model: the verifier returned no log-probabilities; Scoring\(tier='choice'\)",
    ):
        Verifier(model).score(QUESTION, DRAFTS)


def test_a_server_without_log_probabilities_is_named(scripted: Scripted) -> None:
    """Although a trial showed it before the first draft was."""
    server = scripted(drops=("logprobs", "top_logprobs"))
    with pytest.raises(LogprobsUnavailableError, match="Scoring"):
        verifier(server).score(QUESTION, DRAFTS)


def test_a_tier_without_log_probabilities_serves_any_model() -> None:
    """The verifier alone can be asked for it by name."""
    scores = Verifier(ScriptedModel(["B", "A"]), scoring=Scoring(tier="choice")).score(
        QUESTION, DRAFTS
    )

    assert values(scores) == [0.0, 1.0]
    assert {score.tier for score in scores} == {"choice"}


# ---------------------------------------------------------------- equal drafts


def by(rationale: float, answer: float, **options: Any) -> Draft:
    """Return the same draft from a drafter that found it so likely."""
    return replace(
        PARIS,
        rationale_logprob=SpanLogprob(total=rationale, tokens=1),
        answer_logprob=SpanLogprob(total=answer, tokens=1),
        **options,
    )


def test_equal_drafts_share_one_request(scripted: Scripted) -> None:
    """The copy costs nothing, says whose verification it has, and keeps its own drafter's terms."""
    server = scripted(kind="vllm")
    first, other, copy = verifier(server).score(QUESTION, [by(-1, -2), ROME, by(-3, -4)])

    assert len(server.chats) == 2
    assert copy.value == first.value != other.value
    assert (first.shared_with, other.shared_with, copy.shared_with) == (None, None, 0)
    assert (copy.attempts, copy.seconds, copy.count.prompt) == (0, 0.0, None)
    assert (first.terms["draft"], copy.terms["draft"]) == (-1.5, -3.5)
    assert copy.spans["consistency_answer"] == first.spans["consistency_answer"]


def test_the_papers_formula_scores_equal_drafts_apart(scripted: Scripted) -> None:
    """As the paper does."""
    server = scripted(kind="vllm")
    scores = verifier(server, scoring=Scoring(formula="paper")).score(
        QUESTION, [by(-1, -2), by(-3, -4)]
    )

    assert len(server.chats) == 2
    assert [score.shared_with for score in scores] == [None, None]


@pytest.mark.parametrize(("evidence", "requests"), [(None, 1), ("passages", 2)])
def test_equal_drafts_from_other_passages_are_equal_unless_the_passages_are_shown(
    scripted: Scripted, evidence: Any, requests: int
) -> None:
    """What the verifier reads decides."""
    server = scripted()
    drafts = [
        replace(PARIS, subset=Subset(index=n, ranks=(n,), passages=(Passage(text=f"Text {n}."),)))
        for n in range(2)
    ]
    scores = verifier(server, scoring=Scoring(evidence=evidence)).score(QUESTION, drafts)

    assert len(server.chats) == requests
    assert len(scores) == 2


@pytest.mark.parametrize("change", [{"rationale": "Other words."}, {"answer": "Lyon"}])
def test_drafts_that_differ_are_verified_apart(scripted: Scripted, change: Any) -> None:
    """In one part or the other."""
    server = scripted()
    verifier(server).score(QUESTION, [PARIS, replace(PARIS, **change)])

    assert len(server.chats) == 2


# ---------------------------------------------------------------- the paper's formula


def test_the_papers_formula_is_the_product_of_what_the_servers_told(scripted: Scripted) -> None:
    """The drafter's two probabilities added, times the verifier's of the text and of Yes."""
    server = scripted(kind="vllm")
    (score,) = verifier(server, scoring=Scoring(formula="paper")).score(QUESTION, [by(-1.5, -0.5)])
    (body,) = server.chats
    pieces = server.prompt(body)
    start = len(prompt_pieces(body["messages"][:1]))
    logs = [pseudo_logprob(piece, at) for at, piece in enumerate(pieces)][start:]
    rationale, answer = sum(logs[1:4]), logs[5]

    drafted = math.exp(-1.5) + math.exp(-0.5)
    p_yes_itself = 0.95 * p_yes(body)  # the rest of the mass is No's and Maybe's
    expected = drafted * math.exp(rationale + answer) * p_yes_itself
    assert math.exp(score.value or 0) == pytest.approx(expected, rel=1e-3)


def test_the_papers_formula_is_had_from_llama_cpp_by_forced_decoding(scripted: Scripted) -> None:
    """Which is slower, and found out by the trial."""
    server = scripted(kind="llama.cpp")
    (score,) = verifier(server, scoring=Scoring(formula="paper")).score(QUESTION, [by(-1.5, -0.5)])

    assert score.tier == "forced_decoding"
    assert score.value is not None
    assert len(server.chats) == 2


def test_a_server_that_cannot_tell_all_five_terms_is_no_place_for_the_papers_formula(
    scripted: Scripted,
) -> None:
    """The error gives the evidence and the way out; no draft is sent."""
    server = scripted()
    with pytest.raises(ConfigurationError) as raised:
        verifier(server, scoring=Scoring(formula="paper")).score(QUESTION, [by(-1, -1)])

    assert "which scripted does not return (prompt_logprobs does not " in str(raised.value)
    assert "use vLLM or llama.cpp, or leave formula out" in str(raised.value)
    assert server.chats == []


def test_a_model_of_an_application_is_no_place_for_it_either() -> None:
    """Nothing is known of what it returns, and nothing may be tried."""
    with pytest.raises(ConfigurationError, match="it cannot be tried"):
        Verifier(ScriptedModel([reply(0.5)]), scoring=Scoring(formula="paper")).score(
            QUESTION, [by(-1, -1)]
        )


def test_without_the_drafters_word_the_papers_formula_is_an_error(scripted: Scripted) -> None:
    """Not a product of fewer factors."""
    with pytest.raises(
        ConfigurationError, match="all five terms, and the drafter returned no log-probabilities"
    ):
        verifier(scripted(kind="vllm"), scoring=Scoring(formula="paper")).score(QUESTION, DRAFTS)


def test_one_draft_without_a_rationale_has_no_product(scripted: Scripted) -> None:
    """The others do."""
    bare = replace(BARE, answer_logprob=SpanLogprob(total=-1.0, tokens=1))
    whole, lacking = verifier(scripted(kind="vllm"), scoring=Scoring(formula="paper")).score(
        QUESTION, [by(-1, -1), bare]
    )

    assert whole.value is not None
    assert (lacking.value, lacking.missing) == (
        None,
        "the draft has no rationale, so no draft_rationale",
    )


def test_a_server_that_is_down_is_no_wrong_option(scripted: Scripted) -> None:
    """It may be up again with the next question."""
    server = scripted(kind="vllm", faults={ROUTE[1]: Fault(503)})
    one = verifier(server, scoring=Scoring(formula="paper"))
    with pytest.raises(EndpointError):
        one.score(QUESTION, [by(-1, -1)])


# ---------------------------------------------------------------- trials


def test_a_server_is_tried_once_for_all_questions(scripted: Scripted) -> None:
    """Also for other verifiers of the same endpoint; trials are no questions."""
    server = scripted(kind="vllm")
    endpoint = Endpoint(server.base_url)
    for one in (Verifier(endpoint), Verifier(endpoint, scoring=Scoring(weights={"draft": 1.0}))):
        for question in ("Which?", "Why?"):
            one.score(question, [by(-1, -1)])

    assert len(server.probes) == 1
    assert len(server.chats) == 4


def test_questions_that_come_first_at_the_same_time_share_one_trial(scripted: Scripted) -> None:
    """From threads and from loops of their own."""
    server = scripted(kind="vllm")
    one = verifier(server)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: one.score(f"Question {n}?", DRAFTS), range(8)))

    assert len(server.probes) == 1
    assert {score.tier for scores in found for score in scores} == {"prompt_logprobs"}


def test_a_model_of_an_application_is_not_tried() -> None:
    """A trial would be somebody's money; what it can do shows in its replies."""
    model = ScriptedModel([reply(0.7)])
    scores = Verifier(model).score(QUESTION, DRAFTS)

    assert {score.tier for score in scores} == {"reflection"}
    assert len(model.asked) == 2
    assert {request.score_message for request, _ in model.asked} == {None}


@pytest.mark.parametrize("tier", ["choice", "agreement", "draft_only"])
def test_a_tier_that_a_trial_tells_nothing_of_is_not_tried(scripted: Scripted, tier: Any) -> None:
    """Nobody pays for what nobody asked."""
    server = scripted("A")
    verifier(server, scoring=Scoring(tier=tier)).score(QUESTION, [by(-1, -1)])

    assert server.probes == []


def test_a_trial_asks_only_for_what_may_be_used(scripted: Scripted) -> None:
    """A named tier is the only one."""
    server = scripted(kind="vllm")
    scores = verifier(server, scoring=Scoring(tier="reflection")).score(QUESTION, DRAFTS)

    assert len(server.probes) == 1
    assert "prompt_logprobs" not in server.probes[0]
    assert {score.tier for score in scores} == {"reflection"}


def test_where_the_trial_is_refused_another_asks_for_less(scripted: Scripted) -> None:
    """Some servers fail on the field alone, with words that name nothing; it is remembered."""
    told = {"error": {"message": "invalid request"}}
    server = scripted(kind="vllm", refuse={"prompt_logprobs": Fault(400, body=told)})
    one = verifier(server)
    for _ in range(2):
        scores = one.score(QUESTION, DRAFTS)

    assert {score.tier for score in scores} == {"reflection"}
    assert ["prompt_logprobs" in body for body in server.probes] == [True, False]


def test_a_server_that_fails_on_the_field_is_not_tried_again_for_every_question(
    scripted: Scripted,
) -> None:
    """Engines without it crash (vLLM issues 5344, 8268, 10234); the rest of the server works."""
    server = scripted(kind="vllm", refuse={"prompt_logprobs": Fault(500)})
    one = verifier(server)
    one.score(QUESTION, DRAFTS)
    tried = len(server.probes)
    scores = one.score(QUESTION, DRAFTS)

    assert {score.tier for score in scores} == {"reflection"}
    assert len(server.probes) == tried


def test_a_failed_trial_costs_one_question_its_best_tier_and_is_repeated(
    scripted: Scripted,
) -> None:
    """A server that was starting up is not a server that cannot."""
    server = scripted(kind="vllm", probe=Fault(503))
    one = verifier(server)
    first = one.score(QUESTION, DRAFTS)
    server.probe = None
    second = one.score(QUESTION, DRAFTS)

    assert {score.tier for score in first} == {"reflection"}
    assert {score.tier for score in second} == {"prompt_logprobs"}


def test_a_wrong_key_is_not_remembered_either(scripted: Scripted) -> None:
    """It may be renewed."""
    server = scripted(kind="vllm", api_key="right")
    keys = ["wrong"]
    one = Verifier(Endpoint(server.base_url, "scripted", api_key=lambda: keys[-1], max_attempts=1))
    with pytest.raises(EndpointRejectedError, match="401"):
        one.score(QUESTION, DRAFTS)
    keys.append("right")

    assert {score.tier for score in one.score(QUESTION, DRAFTS)} == {"prompt_logprobs"}


WITH_ALTERNATIVES = "{} alternatives to the first token, Yes and No with 0.95 of the probability"
NO_FORCING = "only llama.cpp's server can be made to write a given text"


@pytest.mark.parametrize(
    ("options", "evidence"),
    [
        (
            {"kind": "vllm"},
            {
                "prompt_logprobs": (True, "45 of 46 positions, confirmed by /tokenize"),
                "forced_decoding": (False, NO_FORCING),
                "reflection": (True, WITH_ALTERNATIVES.format(12)),
            },
        ),
        (
            {"kind": "openai"},
            {
                "prompt_logprobs": (False, "0 of 46 positions"),
                "forced_decoding": (False, NO_FORCING),
                "reflection": (True, WITH_ALTERNATIVES.format(4)),
            },
        ),
        (
            {"kind": "llama.cpp"},
            {
                "prompt_logprobs": (False, "0 of 46 positions"),
                "forced_decoding": (True, "15 tokens written as given"),
                "reflection": (True, WITH_ALTERNATIVES.format(4)),
            },
        ),
        (
            {"kind": "llama.cpp", "forces": False},
            {
                "prompt_logprobs": (False, "0 of 46 positions"),
                "forced_decoding": (False, "another text was written"),
                "reflection": (True, WITH_ALTERNATIVES.format(4)),
            },
        ),
        (
            {"kind": "sglang", "probe": Reply("Yes", logprobs=None)},
            {
                "prompt_logprobs": (False, "0 of 46 positions"),
                "forced_decoding": (False, NO_FORCING),
                "reflection": (False, "0 alternatives to the first token"),
            },
        ),
        (
            {"kind": "vllm", "template": "upper-cases"},
            {
                "prompt_logprobs": (
                    False,
                    "45 of 46 positions, but the chat template changes the messages",
                ),
                "forced_decoding": (False, NO_FORCING),
                "reflection": (True, WITH_ALTERNATIVES.format(12)),
            },
        ),
        (
            {"kind": "vllm", "faults": {"/tokenize": Fault(404)}},
            {
                "prompt_logprobs": (
                    True,
                    "45 of 46 positions (not cross-checked: EndpointRejectedError from /tokenize)",
                ),
                "forced_decoding": (False, NO_FORCING),
                "reflection": (True, WITH_ALTERNATIVES.format(4)),
            },
        ),
    ],
)
def test_a_trial_tells_its_evidence(scripted: Scripted, options: Any, evidence: Any) -> None:
    """For each tier, what came back, in a line."""
    trials = asyncio.run(verifier(scripted(**options)).trials())

    assert {trial.tier: (trial.works, trial.evidence) for trial in trials} == evidence


@pytest.mark.parametrize("broken", BROKEN_PROMPT_LOGPROBS)
def test_an_array_that_cannot_be_right_is_found_out_by_the_trial(
    scripted: Scripted, broken: str
) -> None:
    """No question is asked at a tier that would not work; the evidence counts positions."""

    def respond(body: Body, call: int) -> Reply:
        return replace(default_respond(body, call), **BROKEN_PROMPT_LOGPROBS[broken])

    server = scripted(respond, kind="vllm", probe="respond")
    one = verifier(server)
    scores = one.score(QUESTION, DRAFTS)
    trial = asyncio.run(one.trials())[0]

    assert {score.tier for score in scores} == {"reflection"}
    assert not any("prompt_logprobs" in body for body in server.chats)
    assert (trial.tier, trial.works) == ("prompt_logprobs", False)
    assert " of 46 positions" in trial.evidence


def test_a_server_that_cannot_be_reached_is_tried_once(scripted: Scripted) -> None:
    """Asking for less does not help there."""
    server = scripted(kind="vllm", faults={ROUTE[1]: Fault(close=True)})
    with pytest.raises(EndpointUnavailableError):
        asyncio.run(verifier(server).trials())
    assert server.requests.count(ROUTE) == 1


def test_a_text_that_cannot_be_forced_is_evidence_of_that_tier_alone(scripted: Scripted) -> None:
    """The server's own words."""
    server = scripted(kind="llama.cpp", faults={"/tokenize": Fault(404)})
    trials = {trial.tier: trial for trial in asyncio.run(verifier(server).trials())}

    assert not trials["forced_decoding"].works
    assert "HTTP 404" in trials["forced_decoding"].evidence
    assert trials["reflection"].works


def test_trials_of_a_server_that_cannot_be_asked_raise(scripted: Scripted) -> None:
    """There is no evidence either way."""
    server = scripted(faults={ROUTE[1]: Fault(503)})
    with pytest.raises(EndpointUnavailableError, match="503"):
        asyncio.run(verifier(server).trials())


def test_there_are_no_trials_of_a_model_of_an_application() -> None:
    """Nothing is sent to it."""
    model = ScriptedModel([])

    assert asyncio.run(Verifier(model).trials()) == ()
    assert model.asked == []


# ---------------------------------------------------------------- servers as they come

LITELLM = ("prompt_logprobs", "return_token_ids", "chat_template_kwargs", "logprob_token_ids")
NO_LOGPROBS = ("logprobs", "top_logprobs", *LITELLM)
REFUSES_ALL = "logprobs are not supported with reasoning models"


@pytest.mark.parametrize(
    ("options", "tier"),
    [
        pytest.param({"kind": "vllm"}, "prompt_logprobs", id="vLLM"),
        pytest.param({"kind": "sglang"}, "reflection", id="SGLang"),
        pytest.param({"kind": "llama.cpp"}, "reflection", id="llama.cpp"),
        pytest.param({"kind": "openai"}, "reflection", id="OpenAI"),
        pytest.param({"kind": "vllm", "drops": LITELLM}, "reflection", id="a proxy that drops"),
        pytest.param(
            {"kind": "openai", "refuse": unsupported(*LITELLM)},
            "reflection",
            id="a proxy that refuses",
        ),
        pytest.param({"kind": "vllm", "forbid_extra": True}, "reflection", id="a strict server"),
        pytest.param({"kind": "vllm", "max_logprobs": 5}, "prompt_logprobs", id="few alternatives"),
        pytest.param(
            {"drops": NO_LOGPROBS, "respond": "A"}, "agreement", id="log-probabilities are dropped"
        ),
        pytest.param(
            {"respond": Reply("A", logprobs=None), "probe": "respond"},
            "agreement",
            id="log-probabilities are ignored",
        ),
        pytest.param(
            {"refuse": {"logprobs": REFUSES_ALL}, "respond": "A"},
            "agreement",
            id="log-probabilities are refused",
        ),
    ],
)
def test_the_right_tier_is_found_with_one_warning_at_most(
    scripted: Scripted, options: Any, tier: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether a server knows a field, drops it, refuses it or answers 200 without heeding it."""
    server = scripted(**options)
    one = verifier(server, tiers=("prompt_logprobs", "reflection", "agreement"))
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            scores = one.score(QUESTION, DRAFTS)

    assert {score.tier for score in scores} == {tier}
    assert None not in values(scores)
    assert len(server.chats) == (0 if tier == "agreement" else 8)
    assert len(caplog.records) == (1 if tier == "agreement" else 0)


UNMARKED = ("\nThe", " passages", " agree.\n", "</think>")
"""A block that the template opens: its first token bears no mark."""


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"kind": "vllm", "thinks": THOUGHT}, 1),
        ({"kind": "sglang", "thinks": THOUGHT}, 1),
        ({"kind": "llama.cpp", "thinks": THOUGHT}, 1),
        ({"kind": "vllm", "thinks": UNMARKED}, 1),
        # OpenAI's API has no switch for it, and some models have none either.
        ({"kind": "openai", "thinks": THOUGHT}, 1024),
        ({"kind": "openai", "thinks": THOUGHT, "reasoning_parser": True}, 1024),
        *(
            (
                {
                    "kind": kind,
                    "thinks": block,
                    "reasoning_parser": parser,
                    "obeys_thinking_switch": False,
                },
                1024,
            )
            for kind in ("vllm", "sglang", "llama.cpp")
            for block, parser in ((THOUGHT, False), (THOUGHT, True), (UNMARKED, True))
        ),
    ],
)
def test_a_verifier_that_thinks_is_told_not_to_or_read_behind_its_thoughts(
    scripted: Scripted, options: Any, tokens: int
) -> None:
    """With a parser in the server or without; one trial finds out which."""
    server = scripted(**options)
    scores = verifier(server).score(QUESTION, DRAFTS)
    bodies = by_answer(server)

    assert len(server.probes) == 1
    assert {body["max_tokens"] for body in server.chats} == {tokens}
    for draft, score in zip(DRAFTS, scores, strict=True):
        expected = math.log(p_yes(bodies[draft.answer]))
        assert score.value == pytest.approx(expected, abs=1e-3)


def test_a_thought_without_marks_is_found_out_by_the_trial(scripted: Scripted) -> None:
    """The template opens the block and nobody parses it: Yes and No get a millionth together.

    A second trial, with room, shows the block's end.
    """
    server = scripted(kind="vllm", thinks=UNMARKED, obeys_thinking_switch=False)
    one = verifier(server)
    for _ in range(2):
        scores = one.score(QUESTION, DRAFTS)
    bodies = by_answer(server)

    assert [body["max_tokens"] for body in server.probes] == [1, 1024]
    for draft, score in zip(DRAFTS, scores, strict=True):
        assert score.value == pytest.approx(math.log(p_yes(bodies[draft.answer])), abs=1e-3)


def test_a_verifier_that_answers_something_else_is_found_out_by_the_trial(
    scripted: Scripted,
) -> None:
    """Yes and No are listed, and next to impossible: what they share tells nothing."""
    shares = {"Paris": -0.01, "Yes": -14.0, "No": -13.0}
    server = scripted(Reply("Paris", alternatives=shares), probe="respond")
    scores = verifier(server, tiers=("reflection", "agreement")).score(QUESTION, DRAFTS)

    assert {score.tier for score in scores} == {"agreement"}


def test_a_model_of_an_application_that_thinks_is_learnt_from_its_first_question() -> None:
    """That one descends a tier; the next is given room."""
    thinking = Token(text="<think>", data=b"<think>", logprob=0.0, alternatives=(("Yes", -14.0),))

    def answer(request: ChatRequest) -> ChatReply:
        end = Token(text="</think>", data=b"</think>", logprob=0.0)
        word = reply(0.8).tokens or ()
        written = (thinking, end, *word)[: request.max_tokens]
        return ChatReply(text="".join(token.text for token in written), tokens=written)

    model = ScriptedModel(answer)
    one = Verifier(model, tiers=("reflection", "agreement"))
    first, second = one.score(QUESTION, [PARIS]), one.score(QUESTION, [PARIS])

    assert first[0].tier == "agreement"
    assert second[0].tier == "reflection"
    assert math.exp(second[0].value or 0) == pytest.approx(0.8)


# ---------------------------------------------------------------- descending a tier

BOTH: Any = ("reflection", "agreement")
NEITHER = ChatReply(
    text="Hm", tokens=(replace((reply(0.5).tokens or ())[0], text="Hm", alternatives=()),)
)


def test_while_no_draft_has_a_value_all_are_read_anew_at_the_next_tier() -> None:
    """They are compared by the same terms, and the scores of one tier alone are returned."""
    model = ScriptedModel([NEITHER])
    scores = Verifier(model, tiers=BOTH).score(QUESTION, [PARIS, ROME, PARIS])

    assert [score.tier for score in scores] == ["agreement"] * 3
    assert [math.exp(value or 0) for value in values(scores)] == pytest.approx(
        [2 / 3, 1 / 3, 2 / 3]
    )


def test_one_draft_with_a_value_keeps_the_tier() -> None:
    """The others lack theirs, and are not scored by something else."""
    model = ScriptedModel([NEITHER, reply(0.3)])
    scores = Verifier(model, tiers=BOTH).score(QUESTION, DRAFTS)

    assert [score.tier for score in scores] == ["reflection"] * 2
    assert sorted(score.value is None for score in scores) == [False, True]


def test_a_request_that_failed_for_all_descends_as_well() -> None:
    """A draft compared by little is better than none."""
    model = ScriptedModel([EndpointUnavailableError("overloaded", status_code=503)])
    scores = Verifier(model, tiers=("reflection", "choice", "agreement")).score(QUESTION, DRAFTS)

    assert {score.tier for score in scores} == {"agreement"}
    assert len(model.asked) == 2 + 1  # both drafts, and one choice


def test_where_no_server_answers_others_are_not_waited_for() -> None:
    """The next tier's requests would go to the same one."""
    model = ScriptedModel([EndpointTimeoutError("no reply")])
    scores = Verifier(model, tiers=("reflection", "choice", "agreement")).score(QUESTION, DRAFTS)

    assert {score.tier for score in scores} == {"agreement"}
    assert len(model.asked) == 2


def test_a_descent_is_in_the_trace_of_a_question(scripted: Scripted) -> None:
    """With the reason, and the scores of both tiers."""

    def respond(body: Body, call: int) -> Any:
        usual = default_respond(body, call)
        if not is_verification(body):
            return usual
        return replace(usual, **BROKEN_PROMPT_LOGPROBS["only the first"])

    server = scripted(respond, kind="vllm")  # the trial was answered well
    endpoint = Endpoint(server.base_url, max_attempts=1)
    rag = SpeculativeRAG(
        drafter=endpoint,
        verifier=endpoint,
        num_drafts=2,
        passages_per_draft=1,
        partitioner=RankStratified(),
    )
    answer = rag.ask(QUESTION, ["Text one.", "Text two."])

    assert answer.tier == "reflection"
    assert [score.tier for score in answer.trace.scores] == [
        *["prompt_logprobs"] * 2,
        *["reflection"] * 2,
    ]
    (note,) = [note for note in answer.trace.notes if "no score at tier" in note]
    assert "no score at tier prompt_logprobs (no prompt log-probabilities (0 of " in note
    assert note.endswith("): using reflection")
    assert answer.usage.requests == 2 + 2 + 2 == len(server.chats)


def test_the_drafters_own_word_is_a_tier_to_descend_to() -> None:
    """It is in the drafts, and nothing is asked; equal drafts have their own."""
    model = ScriptedModel([NEITHER])
    scores = Verifier(model, tiers=("reflection", "draft_only")).score(
        QUESTION, [by(-1, -2), by(-3, -4)]
    )

    assert [(score.tier, score.value) for score in scores] == [
        ("draft_only", -1.5),
        ("draft_only", -3.5),
    ]
    assert len(model.asked) == 1


def test_a_choice_that_the_deadline_cuts_off_is_replaced_by_what_needs_no_request(
    scripted: Scripted,
) -> None:
    """The drafts are there, and how many agree can be counted."""

    def respond(body: Body, call: int) -> Any:
        if "Draft A" in body["messages"][0]["content"]:
            return Reply("A", delay=20.0)
        text = str(body["messages"][-1]["content"])
        return Reply(
            "Rationale: r.\nAnswer: " + ("Rome" if "Text two" in text else "Oslo"), logprobs=None
        )

    server = scripted(respond, probe="respond")
    endpoint = Endpoint(server.base_url, max_attempts=1)
    rag = SpeculativeRAG(
        drafter=endpoint,
        verifier=endpoint,
        num_drafts=3,
        passages_per_draft=1,
        partitioner=RankStratified(),
    )
    answer = rag.ask(QUESTION, ["Text one.", "Text two.", "Text three."], deadline=1.5)

    assert (answer.text, answer.tier) == ("Oslo", "agreement")
    assert answer.trace.deadline_hit


# ---------------------------------------------------------------- three in a row


def test_three_questions_in_a_row_move_the_tier(caplog: pytest.LogCaptureFixture) -> None:
    """One may be bad luck; three are a server. It is logged once."""
    model = ScriptedModel([NEITHER])
    one = Verifier(model, tiers=BOTH)
    asked = []
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            one.score(QUESTION, [PARIS])
            asked.append(len(model.asked))

    assert asked == [1, 2, 3, 3, 3]
    (record,) = caplog.records
    assert record.message == (
        "scripted: reflection told nothing for 3 questions in a row "
        "(the verifier returned no alternatives to its first token), and is given up"
    )


def test_a_question_that_worked_starts_the_count_anew() -> None:
    """One draft that could be scored is enough."""
    replies = [NEITHER, NEITHER, reply(0.5), NEITHER, NEITHER, reply(0.5), NEITHER]
    model = ScriptedModel(replies)
    one = Verifier(model, tiers=BOTH)
    for _ in replies:
        scores = one.score(QUESTION, [PARIS])

    assert len(model.asked) == len(replies)
    assert scores[0].tier == "agreement"


def test_one_draft_that_could_be_scored_is_enough() -> None:
    """A server that can is known by one."""
    model = ScriptedModel(
        lambda request: reply(0.5) if "Rome" in request.messages[1].content else NEITHER
    )
    one = Verifier(model, tiers=BOTH)
    for _ in range(4):
        scores = one.score(QUESTION, DRAFTS)

    assert {score.tier for score in scores} == {"reflection"}


@pytest.mark.parametrize(
    "error",
    [
        EndpointTimeoutError("slow"),
        EndpointUnavailableError("busy", status_code=429),
        EndpointRejectedError("who are you?", status_code=401),
    ],
)
def test_a_failure_that_may_pass_moves_no_tier(error: EndpointError) -> None:
    """It says nothing of what the server can do."""
    model = ScriptedModel([error])
    one = Verifier(model, tiers=BOTH)
    for _ in range(5):
        one.score(QUESTION, [PARIS])

    assert len(model.asked) == 5


def test_a_refusal_moves_it() -> None:
    """What a server will not do it will not do tomorrow."""
    model = ScriptedModel([EndpointRejectedError("no logprobs", status_code=400)])
    one = Verifier(model, tiers=BOTH)
    for _ in range(5):
        one.score(QUESTION, [PARIS])

    assert len(model.asked) == 3


def test_a_question_without_drafts_teaches_nothing() -> None:
    """It neither counts nor starts the count anew."""
    model = ScriptedModel([NEITHER])
    one = Verifier(model, tiers=BOTH)
    for drafts in ([PARIS], [PARIS], [], [PARIS], [PARIS]):
        one.score(QUESTION, drafts)

    assert len(model.asked) == 3


def test_a_named_tier_is_never_given_up() -> None:
    """There is nothing to descend to."""
    model = ScriptedModel([NEITHER])
    one = Verifier(model, scoring=Scoring(tier="reflection"))
    for _ in range(5):
        with pytest.raises(LogprobsUnavailableError):
            one.score(QUESTION, [PARIS])

    assert len(model.asked) == 5


def test_the_last_tier_that_may_work_is_never_given_up() -> None:
    """A tier that a trial ruled out, or that needs a trial, is no way down."""
    model = ScriptedModel([NEITHER] * 4 + [reply(0.5)])
    one = Verifier(model)
    for _ in range(4):
        with pytest.raises(LogprobsUnavailableError):
            one.score(QUESTION, [PARIS])

    assert one.score(QUESTION, [PARIS])[0].tier == "reflection"


# ---------------------------------------------------------------- the most it can cost


@pytest.mark.parametrize(
    ("tiers", "requests"),
    [
        (("prompt_logprobs",), 5),
        (("forced_decoding",), 10),
        (("reflection",), 5),
        (("choice",), 2),
        (("draft_only",), 0),
        (("agreement",), 0),
        (("prompt_logprobs", "reflection", "choice", "draft_only", "agreement"), 12),
    ],
)
def test_the_most_requests_of_a_question_are_known_before(tiers: Any, requests: int) -> None:
    """All tiers together: a question may descend them all."""
    assert Verifier(ScriptedModel([]), tiers=tiers).max_requests(5) == requests


def test_no_question_costs_more(scripted: Scripted) -> None:
    """When every request fails in the worst way, trials apart."""
    server = scripted(Fault(503), kind="vllm")
    one = verifier(server, tiers=("prompt_logprobs", "reflection", "choice", "agreement"))
    one.score(QUESTION, DRAFTS)

    assert len(server.chats) <= one.max_requests(2) == 2 + 2 + 2
    assert len(server.chats) == 2 + 2 + 1
