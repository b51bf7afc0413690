"""The cost model: hand-computed times, and what must hold whatever the rates are."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag_integrations import costs
from specrag_integrations.costs import Load, Rates, Servers, forecast, in_seconds
from specrag_integrations.endpoint import Endpoint
from specrag_integrations.errors import ConfigurationError
from specrag_integrations.local.server import LlamaServer
from specrag_integrations.local.weights import pull
from specrag_integrations.portal import portal
from specrag_integrations.prompts import (
    answer_messages,
    asking,
    check_messages,
    choice_messages,
    draft_messages,
)
from specrag_integrations.scores import TierName

MIRROR = Path(__file__).parents[1] / "weights-mirror.toml"
TIERS: tuple[TierName, ...] = get_args(TierName)
USUAL = Load(passages=10, tokens=200, per_draft=2)
SMALL = Rates(prefill=2000, decode=100, overhead=0.05, speed_up=4)
LARGE = Rates(prefill=1000, decode=50, overhead=0.1, speed_up=4)

positive = st.floats(0.01, 1e6)
rates = st.builds(
    Rates,
    prefill=positive,
    decode=positive,
    overhead=st.floats(0, 10),
    speed_up=st.floats(0.2, 6),
    cached_prefix=st.booleans(),
)
loads = st.builds(
    Load, passages=st.integers(1, 60), tokens=st.integers(1, 2000), per_draft=st.integers(1, 8)
)
servers = st.builds(Servers, drafter=rates, verifier=rates, shared=st.booleans())
tiers = st.sampled_from(TIERS)


def about(value: float) -> object:
    """Return what compares equal to the value, rounding apart."""
    return pytest.approx(value, rel=1e-9)


# -------------------------------------------------------------------- computed by hand


def test_a_request_alone() -> None:
    """Overhead, prompt and every written token but the first, which the prefill yields."""
    assert LARGE.seconds(400, 21) == about(0.1 + 0.4 + 0.4)
    assert LARGE.seconds(400) == about(0.5)


def test_a_cache_counts_where_there_is_one() -> None:
    """What may be cached is paid for without a cache."""
    assert LARGE.seconds(400, cached=300) == about(0.5)
    assert replace(LARGE, cached_prefix=True).seconds(400, cached=300) == about(0.2)


@pytest.mark.parametrize(
    ("speed_up", "four", "seven"), [(4, 1, 1), (2, 2, 3), (1, 4, 7), (0.5, 8, 15), (9, 1, 1)]
)
def test_requests_at_once(speed_up: float, four: float, seven: float) -> None:
    """4 at once take what was measured, and each further one adds as much as those did."""
    server = replace(LARGE, speed_up=speed_up)

    assert server.at_once(1.0, 1) == 1.0
    assert server.at_once(1.0, 4) == about(four)
    assert server.at_once(1.0, 7) == about(seven)


def test_standard_rag() -> None:
    """One request of all passages: 185 + 2000 tokens read, 12 written."""
    cost = Servers(drafter=SMALL, verifier=LARGE).standard(USUAL)

    assert cost.read == about(0.1 + 2.185)
    assert cost.write == about(11 / 50)
    assert cost.seconds == about(2.505)


def test_drafts_that_cost_no_more_than_one() -> None:
    """Five drafts of 250 + 400 tokens and 48 written; then five verifications at once."""
    cost = Servers(drafter=SMALL, verifier=LARGE).speculative(
        USUAL, num_drafts=5, tier="reflection"
    )

    assert cost.read == about(0.05 + 0.325)
    assert cost.write == about(47 / 100)
    assert cost.draft == cost.read + cost.write
    assert cost.verify == about(0.1 + (66 + 48) / 1000)
    assert cost.seconds == about(0.845 + 0.214)
    assert cost.requests == {"draft": 5, "verify": 5}


def test_drafts_that_queue() -> None:
    """Five drafts cost five; the verifier keeps up, so only the last verification is seen."""
    slow = replace(SMALL, speed_up=1)
    cost = Servers(drafter=slow, verifier=replace(LARGE, speed_up=1)).speculative(
        USUAL, num_drafts=5, tier="reflection"
    )

    assert cost.draft == about(5 * 0.845)
    assert cost.verify == about(0.214)


def test_a_verifier_that_does_not_keep_up() -> None:
    """Drafts land together, and verifications queue."""
    queueing = replace(LARGE, speed_up=1)
    cost = Servers(drafter=SMALL, verifier=queueing).speculative(
        USUAL, num_drafts=5, tier="reflection"
    )

    assert cost.verify == about(5 * 0.214)


def test_shared_hardware_does_all_the_work() -> None:
    """Verifications that are done while drafts are written take that time from them."""
    slow = replace(SMALL, speed_up=1)
    shared = Servers(drafter=slow, verifier=replace(LARGE, speed_up=1), shared=True)
    cost = shared.speculative(USUAL, num_drafts=5, tier="reflection")

    assert cost.verify == about(5 * 0.214)


@pytest.mark.parametrize(
    ("tier", "seconds", "cached", "requests"),
    [
        ("prompt_logprobs", 0.214, 0.214, 3),
        ("reflection", 0.214, 0.174, 3),
        # 40 tokens read and 48 written, then 114 read of which 88 are in the cache
        ("forced_decoding", 0.1 + 0.04 + 47 / 50 + 0.214, 0.1 + 0.04 + 0.94 + 0.1 + 0.026, 6),
        ("choice", 2 * (0.1 + (60 + 3 * 52) / 1000 + 1 / 50), 2 * (0.1 + 0.216 + 0.02), 2),
        ("draft_only", 0, 0, 0),
        ("agreement", 0, 0, 0),
    ],
)
def test_every_tier(tier: TierName, seconds: float, cached: float, requests: int) -> None:
    """What verification adds to three drafts, without and with a prefix cache."""
    for cache, expected in ((False, seconds), (True, cached)):
        verifier = replace(LARGE, cached_prefix=cache)
        cost = Servers(drafter=SMALL, verifier=verifier).speculative(USUAL, num_drafts=3, tier=tier)
        assert cost.verify == about(expected)
        assert cost.requests == {"draft": 3, "verify": requests}


def test_a_forecast_takes_the_drafts_that_read_everything_once() -> None:
    """10 passages by 2 are 5 drafts, where that is faster; the ratio is standard to speculative."""
    found = forecast(Servers(drafter=SMALL, verifier=LARGE), USUAL, tier="reflection")

    assert [option.num_drafts for option in found.options] == [2, 3, 4, 5]
    assert found.speculative.num_drafts == 5
    assert found.ratio == about(2.505 / 1.059)


def test_a_forecast_takes_fewer_drafts_where_all_are_too_slow() -> None:
    """As many as stay faster than standard RAG."""
    drafter = replace(SMALL, speed_up=1)
    found = forecast(Servers(drafter=drafter, verifier=LARGE), USUAL, tier="reflection")

    assert found.speculative.num_drafts == 2
    assert found.ratio == about(2.505 / (2 * 0.845 + 0.214))
    assert found.ratio_of(found.options[1]) < 1


def test_a_forecast_of_what_is_never_faster_is_of_the_drafts_that_read_everything() -> None:
    """The comparison is then with what would be run."""
    drafter = replace(SMALL, prefill=200, speed_up=1)
    found = forecast(Servers(drafter=drafter, verifier=LARGE), USUAL, tier="reflection")

    assert found.speculative.num_drafts == 5
    assert found.ratio < 1


@pytest.mark.parametrize(
    ("passages", "per_draft", "covering"),
    [(1, 2, 1), (2, 2, 1), (3, 2, 2), (4, 2, 2), (10, 2, 5), (11, 2, 6), (60, 2, 10), (4, 3, 2)],
)
def test_how_many_drafts_cover_the_passages(passages: int, per_draft: int, covering: int) -> None:
    """As many as passages by a draft's, from 2 to 10; one where a draft reads everything anyway."""
    load = Load(passages=passages, tokens=1, per_draft=per_draft)

    assert load.covering == covering
    assert load.draft_tokens == min(passages, per_draft)


@pytest.mark.parametrize(
    "wrong",
    [{"prefill": 0}, {"decode": -1}, {"speed_up": math.nan}, {"overhead": -0.1}, {"prefill": None}],
)
def test_rates_that_no_server_has(wrong: dict[str, float]) -> None:
    """Are refused where they are given."""
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Rates(**{"prefill": 1.0, "decode": 1.0, **wrong})


def test_a_load_of_nothing() -> None:
    """Is refused."""
    with pytest.raises(ConfigurationError, match="passages=0"):
        Load(passages=0, tokens=200, per_draft=2)


def test_a_forecast_as_json() -> None:
    """Every stage of every option is in it."""
    data = forecast(Servers(drafter=SMALL, verifier=LARGE), USUAL, tier="reflection").to_dict()

    assert data["num_drafts"] == 5
    assert data["standard"]["seconds"] == about(2.505)
    assert data["speculative"] == {k: v for k, v in data["options"][-1].items() if k != "ratio"}
    assert [option["num_drafts"] for option in data["options"]] == [2, 3, 4, 5]
    assert data["tier"] == "reflection"
    assert data["shared"] is False


def test_times_in_words() -> None:
    """Two digits that count."""
    told = [in_seconds(seconds) for seconds in (0.0, 0.0123, 0.9, 1.84, 9.96, 12.3, 1234.5)]

    assert told == ["0 s", "0.012 s", "0.9 s", "1.8 s", "10 s", "12 s", "1,234 s"]


# -------------------------------------------------------------------- whatever the rates


@given(found=servers, load=loads, more=st.integers(1, 20))
def test_more_passages_never_make_standard_rag_faster(
    found: Servers, load: Load, more: int
) -> None:
    """Nor longer ones."""
    usual = found.standard(load).seconds

    assert found.standard(replace(load, passages=load.passages + more)).seconds >= usual
    assert found.standard(replace(load, tokens=load.tokens + more)).seconds >= usual


@pytest.mark.parametrize("which", ["prefill", "decode", "speed_up", "overhead"])
@pytest.mark.parametrize("role", ["drafter", "verifier"])
@given(found=servers, load=loads, tier=tiers, faster=st.floats(1, 10))
def test_a_faster_server_never_makes_speculation_slower(
    role: str, which: str, *, found: Servers, load: Load, tier: TierName, faster: float
) -> None:
    """Whichever of its rates is better, and whichever server it is."""
    slow = getattr(found, role)
    value = getattr(slow, which)
    better = replace(slow, **{which: value / faster if which == "overhead" else value * faster})
    improved = replace(found, **{role: better})

    usual = found.speculative(load, num_drafts=5, tier=tier).seconds
    assert improved.speculative(load, num_drafts=5, tier=tier).seconds <= usual * (1 + 1e-9)


@given(found=servers, load=loads, tier=tiers, drafts=st.integers(1, 10))
def test_one_more_draft_never_saves_time(
    found: Servers, load: Load, tier: TierName, drafts: int
) -> None:
    """So that time alone would always choose the fewest."""
    fewer = found.speculative(load, num_drafts=drafts, tier=tier).seconds

    more = found.speculative(load, num_drafts=drafts + 1, tier=tier).seconds
    assert more >= fewer * (1 - 1e-9)


@given(found=servers, load=loads, tier=tiers)
def test_shared_hardware_is_never_faster(found: Servers, load: Load, tier: TierName) -> None:
    """Nothing is done there for nothing."""
    own = forecast(replace(found, shared=False), load, tier=tier)
    shared = forecast(replace(found, shared=True), load, tier=tier)

    for alone, together in zip(own.options, shared.options, strict=True):
        assert together.seconds >= alone.seconds * (1 - 1e-9)


@given(server=rates, load=loads, tier=tiers)
def test_one_queueing_server_for_both_roles_is_slower_than_standard_rag(
    server: Rates, load: Load, tier: TierName
) -> None:
    """Drafts that read everything once read no less than standard RAG, and write more."""
    queueing = replace(server, speed_up=min(server.speed_up, 1.0))
    servers = Servers(drafter=queueing, verifier=queueing, shared=True)
    found = servers.speculative(
        load, num_drafts=math.ceil(load.passages / load.per_draft), tier=tier
    )

    assert found.seconds >= servers.standard(load).seconds


@given(found=servers, load=loads)
def test_the_paper_s_terms_are_never_cheaper_than_reflection(found: Servers, load: Load) -> None:
    """`prompt_logprobs` reads no cache, and `forced_decoding` writes the draft besides."""
    costs = {
        tier: found.speculative(load, num_drafts=5, tier=tier).seconds
        for tier in ("prompt_logprobs", "forced_decoding", "reflection")
    }

    assert costs["prompt_logprobs"] >= costs["reflection"]
    if not found.verifier.cached_prefix:
        assert costs["forced_decoding"] >= costs["reflection"]


@given(found=servers, load=loads, tier=tiers)
def test_every_time_is_finite_and_the_options_are_in_bounds(
    found: Servers, load: Load, tier: TierName
) -> None:
    """From 2 drafts to 10, or the one that reads everything."""
    predicted = forecast(found, load, tier=tier)
    numbers = [option.num_drafts for option in predicted.options]

    assert numbers == ([1] if load.covering == 1 else list(range(2, load.covering + 1)))
    assert numbers[-1] <= 10
    assert predicted.speculative in predicted.options
    assert math.isfinite(predicted.ratio)
    assert predicted.ratio > 0


# -------------------------------------------------------------------- the constants


@pytest.mark.embedded
def test_the_prompts_are_as_long_as_the_constants_say() -> None:
    """By a real tokeniser, for a question of usual length; within a fifth."""
    question, draft = "In which city was the engineer Robert Stevenson born?", "word " * 47
    weights = pull("smollm2-135m-instruct", registry=str(MIRROR))
    with LlamaServer(weights, slots=1, context_tokens=2048) as server:
        endpoint = Endpoint(server.base_url)
        check = check_messages(question, draft=draft)
        measured = {
            "DRAFT_PROMPT": draft_messages(question, []),
            "DRAFT_PREFIX": draft_messages(question, [])[:2],
            "ANSWER_PROMPT": answer_messages(question, []),
            "ANSWER_PREFIX": answer_messages(question, [])[:2],
            "CHECK_PREFIX": (asking(question),),
            "CHOICE_PROMPT": choice_messages(question, []),
        }
        lengths = {n: portal.run(endpoint.count_tokens(m)) for n, m in measured.items()}
        checked = portal.run(endpoint.count_tokens(check))
        endpoint.close()

    for name, length in lengths.items():
        assert getattr(costs, name) == pytest.approx(length, rel=0.2), name
    assert pytest.approx(checked, rel=0.2) == costs.CHECK_PROMPT + 48


def test_a_first_draft_that_reads_more_is_read_for_once() -> None:
    """It sets the pace where drafts cost no more than one; where they queue, it is one of them."""
    server = Rates(prefill=1000.0, decode=100.0)
    longer, equal = replace(USUAL, lead=5), USUAL
    for speed_up in (1.0, 4.0):
        rates = replace(server, speed_up=speed_up)
        servers = Servers(drafter=rates, verifier=rates)
        read = [
            servers.speculative(load, num_drafts=3, tier="reflection").read
            for load in (longer, equal)
        ]
        assert read[0] - read[1] == pytest.approx(3 * 200 / 1000)  # three passages more, once
    assert longer.longest_tokens == 5 * longer.tokens
    assert replace(longer, passages=4).longest_tokens == 4 * longer.tokens
    assert replace(longer, lead=1).longest_tokens == longer.draft_tokens
