"""The doctor: what it finds out about servers of every kind, and what it says where they fail."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_replies import max_tokens_of
from scripted_server import (
    Fault,
    Reply,
    ScriptedServer,
    default_respond,
    is_verification,
    prompt_pieces,
)
from test_cli import fails, specrag

from specrag_integrations import costs
from specrag_integrations.costs import Load, Rates, Servers, forecast
from specrag_integrations.display import console, show_diagnosis
from specrag_integrations.doctor import Checkup, Diagnosis, diagnose
from specrag_integrations.endpoint import Endpoint
from specrag_integrations.errors import ConfigurationError, EndpointError, EndpointUnavailableError
from specrag_integrations.local import DRAFTER, EmbeddedPair
from specrag_integrations.pipeline import LEAD

MIRROR = Path(__file__).parents[1] / "weights-mirror.toml"
NOWHERE = "http://127.0.0.1:9/v1"
LOAD = Load(passages=10, tokens=200, per_draft=2)
QUICK = Rates(prefill=2000, decode=100, overhead=0.05, speed_up=4)
SLOW = Rates(prefill=1000, decode=50, overhead=0.1, speed_up=4)
Json = dict[str, Any]
Scripted = Callable[..., ScriptedServer]


def counting(body: Json, call: int) -> Reply:
    """Write exactly as many tokens as are allowed, at once."""
    if is_verification(body):
        return default_respond(body, call)
    tokens = max_tokens_of(body) or 500
    return Reply(" ".join(["one"] * tokens), finish_reason="length")


def examined(*servers: ScriptedServer, **options: Any) -> Diagnosis:
    """Examine one server in both roles, or a drafter and a verifier."""
    endpoints = [Endpoint(server.base_url, max_attempts=1) for server in servers]
    try:
        return diagnose(endpoints[0], endpoints[-1], **options)
    finally:
        for endpoint in endpoints:
            endpoint.close()


def prompts(server: ScriptedServer) -> list[str]:
    """Return the prompts of all but the trial requests."""
    return [chat["messages"][-1]["content"] for chat in server.chats]


def shown(diagnosis: Diagnosis, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is printed of a diagnosis, its white space made even."""
    show_diagnosis(console(), diagnosis)
    return " ".join(capsys.readouterr().out.split())


def works(checkup: Checkup) -> dict[str, bool]:
    """Return which tiers work."""
    return {trial.tier: trial.works for trial in checkup.tiers}


# -------------------------------------------------------------------- what servers are


@pytest.mark.parametrize(
    ("kind", "version", "tier", "evidence"),
    [
        ("vllm", "0.32.0", "prompt_logprobs", r"\d+ of \d+ positions, confirmed by /tokenize"),
        ("llama.cpp", "b11549-abc", "reflection", r"0 of \d+ positions"),
        ("sglang", "0.5.6", "reflection", r"0 of \d+ positions"),
        ("openai", None, "reflection", r"0 of \d+ positions"),
    ],
)
def test_what_a_server_is_and_allows(
    scripted: Scripted, kind: str, version: str | None, tier: str, evidence: str
) -> None:
    """Its kind, version, model and context, and each tier with what a trial brought."""
    found = examined(scripted(counting, kind=kind))
    verifier = found.verifier

    assert verifier.server == (None if kind == "openai" else kind)
    assert verifier.version == version
    assert verifier.model == "scripted"
    assert verifier.context_tokens == (None if kind == "openai" else 8192)
    assert found.tier == tier
    assert works(verifier) == {
        "prompt_logprobs": kind == "vllm",
        "forced_decoding": kind == "llama.cpp",
        "reflection": True,
    }
    assert re.fullmatch(evidence, verifier.tiers[0].evidence)
    assert verifier.drafts is not None
    assert verifier.drafts.works
    assert verifier.drafts.evidence == "log-probabilities of 64 of 64 written tokens"


def test_every_rate_is_measured(scripted: Scripted) -> None:
    """Finite and above 0, whatever the server's speed; and a prediction follows."""
    found = examined(scripted(counting, kind="vllm"))

    for one in (found.drafter, found.verifier):
        for rate in (one.prefill, one.decode, one.speed_up):
            assert rate is not None
            assert math.isfinite(rate)
            assert rate > 0
        assert one.overhead is not None
        assert one.overhead >= 0
        assert one.seconds > 0
    assert found.forecast is not None
    assert math.isfinite(found.forecast.ratio)
    drafts = [option.num_drafts for option in found.forecast.options]
    assert drafts == list(range(2, found.forecast.load.covering + 1))
    assert len(drafts) > 1


def test_no_prompt_is_known_to_a_cache(scripted: Scripted) -> None:
    """All begin differently, but for the one that is repeated to look for the cache."""
    server = scripted(counting)
    examined(server)

    sent = prompts(server)
    repeated = {prompt for prompt in sent if sent.count(prompt) > 1}
    beginnings = {" ".join(prompt.split()[:4]) for prompt in sent}
    assert len(repeated) == 1
    assert len(beginnings) == len(set(sent))


def test_four_requests_are_under_way_at_once(scripted: Scripted) -> None:
    """And never more."""
    server = scripted(counting, delay=0.02)
    examined(server)

    assert server.max_in_flight == 4


def test_prompts_grow_until_they_take_long_enough_to_be_measured(scripted: Scripted) -> None:
    """A fast server is asked to read a lot, though no more than a quarter of its context."""
    server = scripted(counting, kind="vllm", context_tokens=4000)
    examined(server)

    longest = max(len(prompt.split()) for prompt in prompts(server))
    assert 900 < longest < 1100


def test_a_slow_server_is_asked_for_little(scripted: Scripted) -> None:
    """Its longest prompt is the first that takes long enough."""

    async def slow(body: Json, call: int) -> Reply:
        if max_tokens_of(body) == 1:
            await asyncio.sleep(len(prompt_pieces(body["messages"])) / 200)
        return counting(body, call)

    server = scripted(slow)
    examined(server)

    reading = [chat for chat in server.chats if chat["max_tokens"] == 1]
    assert max(len(chat["messages"][0]["content"].split()) for chat in reading) < 200


def test_a_cache_that_the_server_counts(scripted: Scripted) -> None:
    """The evidence is its own count; what every prompt begins with is no cache."""
    seen: set[str] = set()

    def caching(body: Json, call: int) -> Reply:
        prompt = json.dumps(body["messages"])
        tokens, written = len(prompt_pieces(body["messages"])), max_tokens_of(body) or 1
        cached = tokens - 1 if prompt in seen else 3
        seen.add(prompt)
        usage = {"prompt_tokens": tokens, "completion_tokens": written}
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return replace(counting(body, call), usage={**usage, **details})

    cache = examined(scripted(caching)).verifier.cache

    assert cache is not None
    assert cache.seen
    assert re.fullmatch(r"[\d,]+ of [\d,]+ tokens of a repeated prompt", cache.evidence)


def test_what_all_prompts_begin_with_is_no_cache(scripted: Scripted) -> None:
    """A server that reports the template's tokens as cached, always, was not seen to cache more."""
    details = {"prompt_tokens_details": {"cached_tokens": 3}}

    def templated(body: Json, call: int) -> Reply:
        counts = {"prompt_tokens": len(prompt_pieces(body["messages"])), **details}
        return replace(
            counting(body, call), usage={**counts, "completion_tokens": max_tokens_of(body)}
        )

    cache = examined(scripted(templated)).verifier.cache

    assert cache is not None
    assert re.fullmatch(r"a repeated prompt took .* at first .*|by time: .*", cache.evidence)


def test_a_cache_that_shows_in_time_alone(scripted: Scripted) -> None:
    """Is told as such."""
    seen: set[str] = set()

    async def caching(body: Json, call: int) -> Reply:
        prompt = json.dumps(body["messages"])
        if prompt not in seen and max_tokens_of(body) == 1:
            await asyncio.sleep(len(prompt_pieces(body["messages"])) / 250)
        seen.add(prompt)
        return counting(body, call)

    cache = examined(scripted(caching)).verifier.cache

    assert cache is not None
    assert cache.seen
    assert re.fullmatch(r"by time: a repeated prompt is [\d.]+x faster", cache.evidence)


def test_one_endpoint_for_both_roles_is_examined_once(scripted: Scripted) -> None:
    """And shares its hardware with itself."""
    alone, drafter, verifier = scripted(counting), scripted(counting), scripted(counting)
    one, two = examined(alone), examined(drafter, verifier)

    assert one.drafter is one.verifier
    assert one.forecast is not None
    assert one.forecast.servers.shared
    assert two.drafter is not two.verifier
    assert two.forecast is not None
    assert not two.forecast.servers.shared
    assert drafter.chats
    assert not drafter.probes
    assert verifier.probes
    assert len(alone.chats) < len(drafter.chats) + len(verifier.chats)


def test_a_drafter_is_not_asked_for_tiers(scripted: Scripted) -> None:
    """Only whether its drafts come with log-probabilities."""
    found = examined(scripted(counting), scripted(counting))

    assert found.drafter.tiers == ()
    assert found.drafter.drafts is not None
    assert found.drafter.drafts.works


def test_the_progress_names_role_and_probe(scripted: Scripted) -> None:
    """So that somebody who waits knows for what."""
    said: list[str] = []
    examined(scripted(counting), scripted(counting), say=said.append)

    assert said[0] == "asking the drafter who it is"
    assert "measuring the drafter: prefill" in said
    assert "measuring the verifier: tiers" in said
    assert said[-1] == "measuring the verifier: 4 requests at once"


# -------------------------------------------------------------------- servers that disappoint


def test_a_server_without_log_probabilities(scripted: Scripted) -> None:
    """Neither the drafter's nor the verifier's: what is left is to ask for a choice."""
    found = examined(
        scripted(
            lambda body, call: replace(counting(body, call), logprobs=None),
            probe=lambda body, call: replace(default_respond(body, call), logprobs=None),
        )
    )

    assert found.tier == "choice"
    assert not any(works(found.verifier).values())
    assert found.drafter.drafts is not None
    assert not found.drafter.drafts.works
    assert found.drafter.drafts.evidence == "log-probabilities of 0 of 64 written tokens"
    assert found.forecast is not None


def test_a_server_that_refuses_trials(scripted: Scripted) -> None:
    """Its words are the evidence, and the rest is measured."""
    found = examined(scripted(counting, probe=Fault(500)))

    assert works(found.verifier) == dict.fromkeys(
        ("prompt_logprobs", "forced_decoding", "reflection"), False
    )
    assert all("scripted fault" in trial.evidence for trial in found.verifier.tiers)
    assert found.tier == "choice"
    assert found.forecast is not None


def test_a_server_that_ignores_max_tokens(scripted: Scripted) -> None:
    """Is noticed; its rates are there all the same."""
    found = examined(scripted(Reply(" ".join(["one"] * 30))))

    assert any("it ignores max_tokens (30 tokens where" in note for note in found.verifier.notes)
    assert found.verifier.prefill is not None


def test_a_server_that_counts_no_tokens(scripted: Scripted) -> None:
    """Lengths are estimated, and it is said."""
    found = examined(scripted(lambda body, call: replace(counting(body, call), usage=None)))

    assert "it counts no tokens: lengths are estimated" in found.verifier.notes
    assert found.verifier.drafts is not None
    assert found.verifier.drafts.evidence == "log-probabilities of 64 written tokens"
    assert found.forecast is not None
    assert math.isfinite(found.forecast.ratio)


def test_a_model_that_writes_next_to_nothing(scripted: Scripted) -> None:
    """Has no decode rate, so that there is no prediction, but everything else."""
    found = examined(scripted(Reply("OK")))

    assert found.verifier.prefill is not None
    assert found.verifier.decode is None
    assert found.forecast is None
    assert "it wrote 1 tokens where 64 were asked for" in " ".join(found.verifier.notes)
    assert found.verdict.endswith(
        "No prediction: not all rates of the drafter and verifier could be measured."
    )


def test_a_server_that_cuts_prompts(scripted: Scripted) -> None:
    """Prompts of different lengths that cost the same tokens tell nothing of the prefill."""
    usage = {"prompt_tokens": 50, "completion_tokens": 1}
    found = examined(scripted(lambda body, call: replace(counting(body, call), usage=usage)))

    assert found.verifier.prefill is None
    assert found.forecast is None
    assert any("counted as 50 and 50 tokens" in note for note in found.verifier.notes)
    assert any("the server cut the prompt" in note for note in found.verifier.notes)


def test_a_server_that_fails_after_the_first_reply(scripted: Scripted) -> None:
    """Each failure is a note with the server's words, and none is raised."""
    found = examined(
        scripted(lambda body, call: Fault(500) if call else counting(body, call)),
        scripted(counting),
    )

    assert [note.partition(":")[0] for note in found.drafter.notes] == [
        "prefill",
        "the decode rate cannot be measured without a short request's time",
        "4 requests at once cannot be sized without both rates",
    ]
    assert "scripted fault" in found.drafter.notes[0]
    assert found.verifier.rates is not None
    assert found.forecast is None
    assert found.verdict.endswith("not all rates of the drafter could be measured.")


def test_a_server_that_fails_now_and_then(scripted: Scripted) -> None:
    """Requests that had to be sent again are sent once more, and everything is measured."""
    server = scripted(lambda body, call: Fault(503) if call % 5 == 4 else counting(body, call))
    endpoint = Endpoint(server.base_url)
    found = diagnose(endpoint, endpoint)
    endpoint.close()

    assert found.verifier.rates is not None
    assert found.forecast is not None


def test_one_of_four_requests_fails(scripted: Scripted) -> None:
    """The rates of one request remain."""
    server = scripted()

    def overloaded(body: Json, call: int) -> Reply | Fault:
        return Fault(429) if server.in_flight > 1 else counting(body, call)

    server.respond = overloaded
    server.delay = 0.02
    found = examined(server)

    assert found.verifier.decode is not None
    assert found.verifier.speed_up is None
    assert any(note.startswith("4 requests at once: ") for note in found.verifier.notes)


def test_a_verifier_that_thinks_aloud(scripted: Scripted) -> None:
    """Is noted, since its thoughts take time that nobody predicts."""
    found = examined(scripted(counting, thinks=True))

    assert any("it thinks aloud" in note for note in found.verifier.notes)


def test_a_context_too_small_for_the_passages(scripted: Scripted) -> None:
    """Of either role, is noted with what it means."""
    found = examined(scripted(counting, kind="vllm", context_tokens=512))

    assert found.forecast is not None
    longest = 298 + found.forecast.load.longest_tokens
    assert longest == 298 + 200 * LEAD
    assert found.notes == (
        "2,197 tokens do not fit into the verifier's context of 512: standard RAG reads fewer",
        f"{longest:,} tokens do not fit into the drafter's context of 512: drafts fail",
    )


@pytest.mark.parametrize("status", [401, 404, 503])
def test_a_server_that_answers_nothing_at_all(scripted: Scripted, status: int) -> None:
    """Is an error with its words, at once."""
    server = scripted(Fault(status))

    with pytest.raises(EndpointError, match="scripted fault"):
        examined(server)
    assert len(server.chats) == 1


def test_a_drafter_that_is_not_there_is_told_before_anything_is_measured(
    scripted: Scripted,
) -> None:
    """Nobody waits for the verifier to hear of it."""
    verifier = scripted(counting)
    drafter, other = Endpoint(NOWHERE, "any", max_attempts=1), Endpoint(verifier.base_url)

    with pytest.raises(EndpointUnavailableError, match="no connection"):
        diagnose(drafter, other)
    assert not verifier.chats
    other.close()


@pytest.mark.parametrize("wrong", [{"passages": 0}, {"tokens": -1}])
def test_a_question_of_nothing(scripted: Scripted, wrong: dict[str, int]) -> None:
    """Is refused before the first request."""
    server = scripted(counting)

    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        examined(server, **wrong)
    assert not server.requests


# -------------------------------------------------------------------- the verdict


def verdict(servers: Servers, load: Load = LOAD) -> str:
    """Return the verdict on servers of known rates."""
    checkup = Checkup(url="http://gpu/v1", model="any")
    return Diagnosis(
        drafter=checkup,
        verifier=checkup,
        load=load,
        tier="reflection",
        forecast=forecast(servers, load, tier="reflection"),
    ).verdict


def test_the_verdict_on_servers_that_are_made_for_it() -> None:
    """Tier, m, the ratio and where the time goes."""
    assert verdict(Servers(drafter=QUICK, verifier=SLOW)) == (
        "Tier reflection, m = 5: about 2.4x faster than standard RAG on 10 passages of 200 tokens "
        "(drafts 0.84 s, verification 0.21 s, against 2.5 s)."
    )


def test_the_verdict_on_drafts_that_queue() -> None:
    """Fewer drafts may be faster, and what they leave unread is said."""
    drafter = replace(QUICK, speed_up=1)

    assert verdict(Servers(drafter=drafter, verifier=SLOW)) == (
        "Tier reflection, m = 2: about 1.3x faster than standard RAG on 10 passages of 200 tokens "
        "(drafts 1.7 s, verification 0.21 s, against 2.5 s), but its drafts read at most 4 of the "
        "10 passages; m = 5, which reads more, takes 4.4 s."
    )


def test_the_verdict_on_more_passages_than_any_drafts_read() -> None:
    """Ten drafts are the most, and what they leave unread is said as well."""
    told = verdict(Servers(drafter=QUICK, verifier=SLOW), replace(LOAD, passages=100))
    assert "m = 10: " in told
    assert told.endswith("but its drafts read at most 20 of the 100 passages.")


@pytest.mark.parametrize(
    ("drafter", "verifier", "expected"),
    [
        (
            replace(SLOW, speed_up=1),
            SLOW,
            "2.5 s against 8.7 s; 5 drafts at once take as long as 5.0 one after another",
        ),
        (
            replace(QUICK, decode=10),
            SLOW,
            "2.5 s against 5.3 s; writing drafts of 48 tokens takes 4.7 s",
        ),
        (
            replace(QUICK, prefill=200),
            SLOW,
            "2.5 s against 4 s; reading for 5 drafts takes 3.3 s",
        ),
        (
            QUICK,
            replace(SLOW, overhead=1.5, speed_up=0.8),
            "3.9 s against 11 s; verifying 5 drafts takes 10 s",
        ),
    ],
)
def test_the_verdict_where_standard_rag_is_faster(
    drafter: Rates, verifier: Rates, expected: str
) -> None:
    """Both times, and what costs the most."""
    times, reason = expected.split("; ")

    assert verdict(Servers(drafter=drafter, verifier=verifier)) == (
        f"Standard RAG will be faster here: {times} on 10 passages of 200 tokens, since {reason}."
    )


def test_the_verdict_on_a_draw() -> None:
    """Is that both take about the same."""
    drafter = replace(QUICK, decode=47 / 1.916)

    assert verdict(Servers(drafter=drafter, verifier=SLOW)) == (
        "Tier reflection, m = 5: standard RAG takes about the same time: 2.5 s against 2.5 s on "
        "10 passages of 200 tokens."
    )


@pytest.mark.parametrize("passages", [1, 2])
def test_the_verdict_on_passages_that_make_one_draft(passages: int) -> None:
    """There is nothing to choose from."""
    load = Load(passages=passages, tokens=200, per_draft=2)

    told = verdict(Servers(drafter=QUICK, verifier=SLOW), load)
    assert told.startswith("Standard RAG: one draft would read all of ")
    assert told.endswith(
        f" {passages} passage{'s' * (passages > 1)} of 200 tokens, with nothing to choose from."
    )


# -------------------------------------------------------------------- the command


def test_the_command_shows_evidence_rates_and_verdict(scripted: Scripted) -> None:
    """And that it is a prediction, about time alone."""
    server = scripted(counting, kind="llama.cpp")
    told = specrag("doctor", "--drafter", server.base_url, COLUMNS="200").stdout

    assert re.search(r"server +llama\.cpp b11549-abc", told)
    assert re.search(r"tier prompt_logprobs +no \(0 of \d+ positions\)", told)
    assert re.search(r"tier forced_decoding +yes \(\d+ tokens written as given\)", told)
    assert re.search(r"tier draft_only +yes \(log-probabilities of 64 of 64", told)
    assert re.search(r"prefill +[\d,]+ tokens/s", told)
    assert re.search(r"standard RAG( +[\d.,]+ s){2} +- ", told)
    assert "both roles" in told
    assert "about time and not about accuracy" in told


def test_the_command_as_json(scripted: Scripted) -> None:
    """One object with all that is known, and nothing beside it."""
    drafter, verifier = scripted(counting, kind="vllm"), scripted(counting, kind="sglang")
    done = specrag(
        *("doctor", "--drafter", drafter.base_url, "--verifier", verifier.base_url),
        *("--passages", "7", "--tokens", "90", "--json"),
    )

    data = json.loads(done.stdout)
    assert done.stderr == ""
    assert set(data) == {
        *("drafter", "verifier", "tier", "forecast", "notes", "verdict", "caveat"),
    }
    for role in ("drafter", "verifier"):
        assert set(data[role]) == {
            *("url", "model", "server", "version", "context_tokens", "tiers", "drafts", "cache"),
            *("prefill", "overhead", "decode", "speed_up", "notes", "seconds"),
        }
    assert data["drafter"]["server"] == "vllm"
    assert data["drafter"]["tiers"] == []
    assert data["drafter"]["drafts"]["works"] is True
    assert data["verifier"]["server"] == "sglang"
    assert [trial["tier"] for trial in data["verifier"]["tiers"]] == [
        "prompt_logprobs",
        "forced_decoding",
        "reflection",
    ]
    assert data["forecast"]["passages"] == 7
    assert data["forecast"]["tokens"] == 90
    drafts = [option["num_drafts"] for option in data["forecast"]["options"]]
    assert drafts == list(range(2, math.ceil(7 / data["forecast"]["passages_per_draft"]) + 1))
    assert data["forecast"]["passages_of_first_draft"] == LEAD
    assert "7 passages of 90 tokens" in data["verdict"]


def test_the_command_without_a_server() -> None:
    """One line, and the exit code of a failure."""
    assert "no connection" in fails("doctor", "--drafter", NOWHERE, "--drafter-model", "any")


def test_the_command_with_a_wrong_key(scripted: Scripted) -> None:
    """Names the variable, as every command does."""
    server = scripted(counting, api_key="right")

    told = fails("doctor", "--drafter", server.base_url, SPECRAG_API_KEY="wrong")
    assert "SPECRAG_API_KEY" in told


def test_the_command_with_several_models(scripted: Scripted) -> None:
    """One has to be named, for each role."""
    server = scripted(counting, models=("small", "large"))
    assert "name one" in fails("doctor", "--drafter", server.base_url)

    names = ("--drafter-model", "small", "--verifier-model", "large")
    data = json.loads(specrag("doctor", "--drafter", server.base_url, *names, "--json").stdout)
    assert (data["drafter"]["model"], data["verifier"]["model"]) == ("small", "large")
    assert data["forecast"]["shared"] is True


def test_the_command_where_nothing_can_be_predicted(scripted: Scripted) -> None:
    """Shows what it knows and why it knows no more, and is no failure."""
    server = scripted(Reply("OK"))
    told = " ".join(specrag("doctor", "--drafter", server.base_url).stdout.split())

    assert "No prediction" in told
    assert "Predicted:" not in told
    assert "Note both roles: the decode rate cannot be measured" in told


@pytest.mark.parametrize("option", ["--passages", "--tokens"])
def test_the_command_with_numbers_that_make_no_sense(option: str) -> None:
    """Is wrong usage."""
    assert option in fails("doctor", "--drafter", NOWHERE, option, "0", code=2)


def test_two_endpoints_side_by_side(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    """Each in a column of its own; what is not asked of one is a dash."""
    found = examined(scripted(counting, kind="vllm"), scripted(counting, kind="vllm"))
    told = shown(found, capsys)

    assert "drafter verifier" in told
    assert "tier reflection - yes" in told
    assert "taken to run on hardware of their own" in told


def test_the_page_tells_the_numbers_that_are_computed_with() -> None:
    """So that nobody recomputes a prediction with others."""
    page = (Path(__file__).parents[1] / "docs" / "doctor.md").read_text()

    for told in (
        f"R(n*t + {costs.ANSWER_PROMPT}, {costs.ANSWER_WRITTEN} written)",
        f"R(k*t + {costs.DRAFT_PROMPT}, {costs.DRAFT_WRITTEN} written)",
        f"V = R({costs.CHECK_PROMPT + costs.DRAFT_WRITTEN}, 1 written)",
        f"a draft has {costs.DRAFT_WRITTEN} tokens and a brief answer {costs.ANSWER_WRITTEN}",
        f"n / k (2 to {costs.MOST_DRAFTS})",
    ):
        assert told in page


# -------------------------------------------------------------------- real models


@pytest.mark.embedded
def test_real_models_on_this_machine() -> None:
    """The doctor comes to an end, and its prediction is one of this world."""
    with EmbeddedPair(
        drafter="smollm2-135m-instruct", verifier=DRAFTER, registry=str(MIRROR)
    ) as pair:
        found = diagnose(**pair.roles, shared=True)

    assert found.tier == "reflection"
    assert works(found.verifier)["forced_decoding"]
    assert found.verifier.server == "llama.cpp"
    assert found.verifier.context_tokens == 8192
    assert found.verifier.cache is not None
    assert found.verifier.cache.seen
    for one in (found.drafter, found.verifier):
        assert one.rates is not None, one.notes
        assert 1 < one.rates.prefill < 1e6
        assert 0.1 < one.rates.decode < 1e5
    assert found.forecast is not None
    assert 0.001 < found.forecast.ratio < 1000
    assert 0 < found.forecast.standard.seconds < 3600
