"""Which draft is the answer."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_model import ScriptedModel
from scripted_server import Reply, ScriptedServer

from specrag_integrations import (
    AnswerVote,
    BestScore,
    ConfigurationError,
    Draft,
    Endpoint,
    FallbackReason,
    Listwise,
    Passage,
    RankStratified,
    Score,
    Scoring,
    Selection,
    SinglePrompt,
    SpeculativeRAG,
    Subset,
)
from specrag_integrations.errors import EndpointTimeoutError
from specrag_integrations.models import ChatReply, Token, TokenCount
from specrag_integrations.selection import (
    Candidate,
    Pool,
    Undisputed,
    candidates_of,
    is_unsure,
    own_selector,
    select,
)

Scripted = Callable[..., ScriptedServer]

QUESTION = "Which city?"
CHOICE = "Which draft gives the correct answer to the question? Reply with its letter only."


def draft(index: int, answer: str = "a", **options: Any) -> Draft:
    """Return a draft of some subset."""
    subset = Subset(index=index, ranks=(index,), passages=(Passage(text="t"),))
    return Draft(rationale=f"r{index}", answer=answer, subset=subset, **options)


def score(index: int, value: float | None) -> Score:
    """Return its score."""
    return Score(draft=index, tier="reflection", value=value)


def pool(candidates: Sequence[Candidate], model: Any = None) -> Pool:
    """Return what a selector is given."""
    return Pool(
        question=QUESTION, candidates=tuple(candidates), model=model or ScriptedModel(["unused"])
    )


def selected(candidates: Sequence[Candidate], selector: Any = None, model: Any = None) -> Selection:
    """Select one of at least one candidate."""
    return asyncio.run(select(pool(candidates, model), selector or BestScore()))


def outcome(values: Sequence[float | None], selector: Any = None, **changed: Any) -> Selection:
    """Select among drafts with these values; `changed` names drafts by their index."""
    drafts = [draft(i, **changed.get(f"d{i}", {})) for i in range(len(values))]
    scores = [score(i, value) for i, value in enumerate(values)]
    return selected(candidates_of(drafts, scores), selector)


def answers(*named: tuple[str, float]) -> list[Candidate]:
    """Return candidates by their answers and values."""
    drafts = [draft(i, answer) for i, (answer, _) in enumerate(named)]
    return candidates_of(drafts, [score(i, value) for i, (_, value) in enumerate(named)])


# ---------------------------------------------------------------- which drafts may be selected


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_a_draft_without_a_finite_score_is_never_selected(bad: float | None) -> None:
    """Nor does it disturb the order of the others."""
    assert outcome([bad, -9.0, bad, -8.0]).ranking == (3, 1)
    assert candidates_of([draft(0), draft(1)], [score(0, bad), score(1, bad)]) == []


def test_a_draft_that_was_never_scored_is_not_selected() -> None:
    """Missing is not zero, and zero would be certainty."""
    assert selected(candidates_of([draft(0), draft(1)], [score(1, -5.0)])).ranking == (1,)


def test_an_abstention_is_never_selected() -> None:
    """However sure its author is that the passages do not tell."""
    assert outcome([-0.1, -5.0], d0={"abstained": True}).ranking == (1,)
    unscored = candidates_of([draft(0, abstained=True), draft(1)], [], scored=False)
    assert [one.draft.index for one in unscored] == [1]


def test_a_selector_that_reads_no_scores_is_given_drafts_without_any() -> None:
    """By their index, in whatever order they arrived."""
    found = candidates_of([draft(2), draft(0)], [], scored=False)

    assert [(one.draft.index, one.score, one.value) for one in found] == [
        (0, None, 0.0),
        (2, None, 0.0),
    ]


# ---------------------------------------------------------------- the best score


def test_the_highest_score_wins_wherever_it_stands() -> None:
    """Not the first, not the last."""
    assert outcome([-3.0, -1.0, -2.0]).ranking == (1, 2, 0)
    assert outcome([-1.0, -3.0, -2.0]).winner == 0
    assert outcome([-3.0, -2.0, -1.0]).winner == 2


def test_equal_scores_go_to_the_lowest_index_in_whatever_order_drafts_arrive() -> None:
    """The same replies give the same answer, also when all scores are zero."""
    drafts = [draft(i) for i in range(4)]
    scores = [score(i, 0.0) for i in range(4)]
    for order in itertools.permutations(range(4)):
        candidates = candidates_of([drafts[i] for i in order], [scores[i] for i in order[::-1]])
        assert selected(candidates).ranking == (0, 1, 2, 3)
        assert selected(candidates[::-1]).ranking == (0, 1, 2, 3)


def test_very_small_scores_are_still_told_apart() -> None:
    """In log space nothing underflows to a tie of zeros."""
    assert outcome([-2000.0, -1999.0, -2001.0]).winner == 1


def test_a_draft_that_was_cut_off_ranks_below_all_whole_ones() -> None:
    """It is an answer where there is no other."""
    assert outcome([-0.1, -5.0, -9.0], d0={"truncated": True}).ranking == (1, 2, 0)
    assert outcome([-0.1], d0={"truncated": True}).winner == 0


def test_a_selection_tells_who_selected_and_becomes_json() -> None:
    """Where the scores alone decide there are no shares, and where there is a winner no reason."""
    assert outcome([-1.0, -2.0]).to_dict() == {
        "winner": 0,
        "ranking": [0, 1],
        "reason": None,
        "selector": "BestScore",
        "shares": {},
    }


@given(st.lists(st.none() | st.floats(), max_size=8), st.randoms(use_true_random=False))
def test_the_winner_is_the_best_of_what_can_be_compared(values: Any, rng: random.Random) -> None:
    """For any scores in any order of arrival."""
    drafts = [draft(i) for i in range(len(values))]
    scores = [score(i, value) for i, value in enumerate(values)]
    rng.shuffle(drafts)
    rng.shuffle(scores)
    usable = {i: v for i, v in enumerate(values) if v is not None and math.isfinite(v)}

    candidates = candidates_of(drafts, scores)
    assert {one.draft.index for one in candidates} == set(usable)
    if usable:
        chosen = selected(candidates)
        assert set(chosen.ranking) == set(usable)
        best = max(usable.values())
        assert chosen.winner == min(i for i, v in usable.items() if v == best)


# ---------------------------------------------------------------- votes by answer


def test_drafts_with_the_same_answer_vote_together() -> None:
    """Each by softmax(score / temperature); two fair drafts outvote one that is a little better."""
    chosen = selected(
        answers(("Rome", math.log(0.4)), ("Paris", math.log(0.3)), ("paris.", math.log(0.3))),
        AnswerVote(),
    )

    assert chosen.shares == {0: pytest.approx(0.4), 1: pytest.approx(0.6), 2: pytest.approx(0.6)}
    assert (chosen.winner, chosen.ranking) == (1, (1, 2, 0))
    assert chosen.selector == "AnswerVote"


def test_the_best_draft_of_the_answer_with_the_most_votes_wins() -> None:
    """Not its first one."""
    chosen = selected(answers(("Paris", -3.0), ("Rome", -0.5), ("Paris", -0.6)), AnswerVote())

    paris = (math.exp(-3.0) + math.exp(-0.6)) / (math.exp(-3.0) + math.exp(-0.5) + math.exp(-0.6))
    assert paris < 0.5
    assert chosen.winner == 1
    chosen = selected(answers(("Paris", -3.0), ("Rome", -0.5), ("Paris", -0.45)), AnswerVote())
    assert (chosen.winner, chosen.ranking) == (2, (2, 0, 1))


@pytest.mark.parametrize(
    ("temperature", "rome"),
    [(1.0, 0.5 / (0.5 + 0.25 + 0.25)), (2.0, math.sqrt(0.5) / (math.sqrt(0.5) + 1.0))],
)
def test_the_temperature_divides_the_scores(temperature: float, rome: float) -> None:
    """At 2, probabilities become their square roots."""
    chosen = selected(
        answers(("Rome", math.log(0.5)), ("Paris", math.log(0.25)), ("Paris", math.log(0.25))),
        AnswerVote(temperature=temperature),
    )

    assert chosen.shares[0] == pytest.approx(rome)


def test_at_a_low_temperature_the_best_score_decides_and_at_a_high_one_the_number() -> None:
    """The limits of the two rules it lies between."""
    three_to_one = answers(("Rome", -0.1), ("Paris", -2.0), ("Paris", -2.0), ("Paris", -2.0))

    cold = selected(three_to_one, AnswerVote(temperature=1e-3))
    warm = selected(three_to_one, AnswerVote(temperature=1e6))
    assert (cold.winner, cold.shares[0]) == (0, pytest.approx(1.0))
    assert (warm.winner, warm.shares[0]) == (1, pytest.approx(0.25, abs=1e-5))


def test_votes_of_scores_far_below_0_do_not_underflow() -> None:
    """Only their differences count."""
    chosen = selected(
        answers(("Rome", -2000.0), ("Paris", -2000.5), ("Paris", -2000.5)), AnswerVote()
    )

    assert chosen.winner == 1
    assert sum(chosen.shares[i] for i in (0, 1)) == pytest.approx(1.0)


def test_equal_votes_go_to_the_better_draft_and_then_to_the_lower_index() -> None:
    """The last bit of a sum must not decide."""
    thirds = [("Rome", -1.0), ("Paris", -1.0), ("Oslo", -1.0)]
    for order in itertools.permutations(range(3)):
        assert selected([answers(*thirds)[i] for i in order], AnswerVote()).ranking == (0, 1, 2)
    halves = [("Paris", math.log(0.3)), ("Rome", math.log(0.6)), ("Paris", math.log(0.3))]
    assert selected(answers(*halves), AnswerVote()).winner == 1


def test_of_an_answers_drafts_a_whole_one_wins() -> None:
    """Both vote."""
    cut = candidates_of(
        [draft(0, "Paris", truncated=True), draft(1, "Paris"), draft(2, "Rome")],
        [score(0, -0.1), score(1, -2.0), score(2, -0.5)],
    )

    assert selected(cut, AnswerVote()).ranking == (1, 0, 2)


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan, math.inf, "1", True])
def test_a_temperature_is_a_number_above_0(temperature: Any) -> None:
    """The message names the value."""
    with pytest.raises(ConfigurationError, match="temperature=.* must be a number above 0"):
        AnswerVote(temperature=temperature)


# ---------------------------------------------------------------- the selectors that tiers bring


def test_tiers_that_count_bring_a_selector_of_another_kind() -> None:
    """What all others tell of a draft can be ranked."""
    for tier in ("choice", "agreement"):
        assert isinstance(own_selector(tier), Undisputed)
    for tier in (None, "prompt_logprobs", "forced_decoding", "reflection", "draft_only"):
        assert isinstance(own_selector(tier), BestScore)


def test_an_answer_that_stands_alone_at_the_top_is_the_answer() -> None:
    """By its best draft, a whole one before one that was cut off."""
    chosen = selected(answers(("Rome", 0.0), ("Paris", 1.0), ("paris.", 1.0)), Undisputed())
    assert (chosen.winner, chosen.ranking, chosen.reason) == (1, (1, 2, 0), None)

    cut = [draft(0, "Paris", truncated=True), draft(1, "Rome"), draft(2, "Paris")]
    scores = [score(0, 1.0), score(1, 0.0), score(2, 1.0)]
    assert selected(candidates_of(cut, scores), Undisputed()).ranking == (2, 0, 1)


@pytest.mark.parametrize(
    ("named", "ranking"),
    [
        ([("Rome", 0.0), ("Paris", 0.5), ("Oslo", 0.5)], (1, 2, 0)),
        ([("Rome", -0.9), ("Oslo", -1.6), ("Paris", -0.9), ("Rome", -0.9)], (0, 2, 3, 1)),
        ([("Paris", 0.0), ("Rome", 0.0)], (0, 1)),
    ],
)
def test_an_answer_that_another_equals_is_not_trusted(named: Any, ranking: Any) -> None:
    """Standard RAG takes over; the ranking is kept for a reader of the trace."""
    chosen = selected(answers(*named), Undisputed())

    assert (chosen.winner, chosen.ranking) == (None, ranking)
    assert chosen.reason is FallbackReason.DISAGREEMENT
    assert chosen.to_dict()["reason"] == "disagreement"


def test_among_equal_scores_one_answer_is_no_dispute() -> None:
    """All drafts may agree."""
    chosen = selected(answers(("Paris", 0.0), ("paris", 0.0)), Undisputed())

    assert (chosen.winner, chosen.ranking) == (0, (0, 1))


@pytest.mark.parametrize("tier", ["choice", "agreement"])
def test_a_tier_with_a_selector_of_its_own_takes_no_other(tier: Any) -> None:
    """Named together they are a mistake, found at construction."""
    model = ScriptedModel([])
    for selector in (BestScore(), AnswerVote()):
        with pytest.raises(
            ConfigurationError, match=f"tier='{tier}' brings its own selector; leave selector="
        ):
            SpeculativeRAG(
                drafter=model, verifier=model, scoring=Scoring(tier=tier), selector=selector
            )


@pytest.mark.parametrize("selector", [Listwise(), SinglePrompt()])
def test_a_scoring_beside_a_selector_that_reads_no_scores_is_a_mistake(selector: Any) -> None:
    """It would do nothing."""
    model = ScriptedModel([])
    with pytest.raises(ConfigurationError, match="reads no scores, so that scoring= does nothing"):
        SpeculativeRAG(
            drafter=model, verifier=model, scoring=Scoring(tier="reflection"), selector=selector
        )


# ---------------------------------------------------------------- listwise

CITIES = ("Paris", "Rome", "Oslo")


def letter(shares: Mapping[str, float]) -> ChatReply:
    """Return a reply whose first token has these alternatives."""
    listed = tuple((word, math.log(share)) for word, share in shares.items())
    word, value = max(listed, key=lambda pair: pair[1])
    token = Token(text=word, data=word.encode(), logprob=value, alternatives=listed)
    return ChatReply(
        text=word, tokens=(token,), count=TokenCount(prompt=100, completion=1), seconds=0.5
    )


def listwise(
    replies: Any, named: Sequence[str] = CITIES, **options: Any
) -> tuple[Selection, ScriptedModel]:
    """Select by letters; return the selection and the model."""
    model = ScriptedModel(replies)
    candidates = candidates_of([draft(i, one) for i, one in enumerate(named)], [], scored=False)
    return selected(candidates, Listwise(**options), model), model


def test_one_request_is_enough_where_a_letter_is_far_ahead() -> None:
    """By the margin, in nats."""
    chosen, model = listwise([letter({"A": 0.1, "B": 0.8, "C": 0.1})])

    assert (chosen.winner, chosen.ranking) == (1, (1, 0, 2))
    assert chosen.shares == {
        0: pytest.approx(0.1),
        1: pytest.approx(0.8),
        2: pytest.approx(0.1),
    }
    assert len(model.asked) == 1
    assert chosen.selector == "Listwise"


def test_the_letters_are_asked_for_by_name_in_one_token(scripted: Scripted) -> None:
    """On the wire: their ids, as many as there are answers; nothing of the passages."""
    reply = Reply("B", alternatives={"A": -3.0, "B": -0.1, "C": -4.0})
    server = scripted(reply, kind="vllm")
    candidates = candidates_of([draft(i, city) for i, city in enumerate(CITIES)], [], scored=False)
    chosen = selected(candidates, Listwise(), Endpoint(server.base_url))
    (body,) = server.chats

    assert chosen.winner == 1
    spelled = [space + one for c in "ABC" for one in (c, c.lower()) for space in ("", " ")]
    assert body.pop("logprob_token_ids") == server.ids([word.encode() for word in spelled])
    listed = "\n\n".join(
        f"Draft {name}\nRationale: r{at}\nAnswer: {city}"
        for at, (name, city) in enumerate(zip("ABC", CITIES, strict=True))
    )
    assert body == {
        "model": "scripted",
        "messages": [{"role": "user", "content": f"Question: Which city?\n\n{listed}\n\n{CHOICE}"}],
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": True,
        "top_logprobs": 20,
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
    }


def test_the_letter_written_does_not_matter() -> None:
    """Its probability does, over all its spellings."""
    token = Token(
        text="A",
        data=b"A",
        logprob=math.log(0.4),
        alternatives=(("A", math.log(0.4)), ("B", math.log(0.3)), (" b", math.log(0.3))),
    )
    chosen, _ = listwise([ChatReply(text="A", tokens=(token,))], CITIES[:2], margin=0.1)

    assert chosen.winner == 1


def biased(request: Any) -> ChatReply:
    """Prefer Paris by 0.3 nats, whatever stands first by 0.5."""
    prompt = request.messages[0].content
    first = prompt.index("Answer: Paris") < prompt.index("Answer: Rome")
    a, b = (0.5 + 0.3, 0.0) if first else (0.5, 0.3)
    whole = math.exp(a) + math.exp(b)
    return letter({"A": math.exp(a) / whole, "B": math.exp(b) / whole})


@pytest.mark.parametrize("named", [("Paris", "Rome"), ("Rome", "Paris")])
def test_a_bias_for_the_first_letter_is_cancelled_by_the_other_order(named: Any) -> None:
    """What is left is what the verifier thinks of the answers."""
    chosen, model = listwise(biased, named)
    paris = named.index("Paris")

    assert len(model.asked) == 2
    assert chosen.winner == paris
    expected = math.exp(0.3) / (1 + math.exp(0.3))
    assert chosen.shares[paris] == pytest.approx(expected)
    assert [str(step) for _, step in model.asked] == ["select_0", "select_1"]


def test_the_log_probabilities_of_both_orders_are_averaged() -> None:
    """By answer, not by letter: the second order is Rome, Oslo, Paris."""
    replies = [
        letter({"A": 0.4, "B": 0.35, "C": 0.25}),
        letter({"A": 0.5, "B": 0.2, "C": 0.3}),
    ]
    chosen, model = listwise(replies)
    means = {
        0: math.sqrt(0.4 * 0.3),  # Paris: A, then C
        1: math.sqrt(0.35 * 0.5),  # Rome: B, then A
        2: math.sqrt(0.25 * 0.2),  # Oslo: C, then B
    }

    shown = [request.messages[0].content for request, _ in model.asked]
    assert [text.index("Paris") < text.index("Rome") for text in shown] == [True, False]
    assert chosen.winner == 1
    assert chosen.shares == {
        index: pytest.approx(mean / sum(means.values())) for index, mean in means.items()
    }


@pytest.mark.parametrize(("margin", "requests"), [(0.5, 1), (1.0, 2), (1.5, 2)])
def test_the_margin_decides_whether_it_is_asked_again(margin: float, requests: int) -> None:
    """0.7 nats here."""
    even = {"A": math.exp(0.7) / (1 + math.exp(0.7)), "B": 1 / (1 + math.exp(0.7))}
    _, model = listwise([letter(even)], CITIES[:2], margin=margin)

    assert len(model.asked) == requests


def test_equal_answers_share_a_letter_and_its_probability() -> None:
    """The best draft among them is the winner; whole ones come first."""
    model = ScriptedModel([letter({"A": 0.05, "B": 0.95})])
    drafts = [
        draft(0, "Paris"),
        draft(1, "Rome", truncated=True),
        draft(2, "rome"),
    ]
    chosen = selected(candidates_of(drafts, [], scored=False), Listwise(), model)

    assert chosen.ranking == (2, 1, 0)
    assert chosen.shares == {
        0: pytest.approx(0.05),
        1: pytest.approx(0.95),
        2: pytest.approx(0.95),
    }
    assert model.asked[0][0].messages[0].content.count("Draft ") == 2


def test_one_answer_needs_no_request() -> None:
    """There is nothing to choose."""
    chosen, model = listwise([], ["Paris", "paris"])

    assert (chosen.winner, chosen.shares) == (0, {0: 1.0, 1: 1.0})
    assert model.asked == []


def test_a_second_order_that_fails_leaves_the_first_and_a_note() -> None:
    """One order is better than none."""
    close = letter({"A": 0.4, "B": 0.6})
    chosen, model = listwise([close, EndpointTimeoutError("too slow")], CITIES[:2])

    assert (chosen.winner, len(model.asked)) == (1, 2)
    assert chosen.notes == ("the drafts were shown in one order only: too slow",)
    assert chosen.shares[1] == pytest.approx(0.6)


def test_a_first_request_that_fails_selects_nothing() -> None:
    """With the reason in a note, and what it cost."""
    error = EndpointTimeoutError("too slow")
    error.attempts = 3
    chosen, _ = listwise([error])

    assert (chosen.winner, chosen.reason) == (None, FallbackReason.NO_USABLE_DRAFT)
    assert chosen.notes == ("Listwise could not select: too slow",)
    assert [(step.kind, step.role, step.attempts) for step in chosen.steps] == [
        ("select", "verifier", 3)
    ]


@pytest.mark.parametrize(
    "reply",
    [
        "A",
        ChatReply(text="A", tokens=()),
        letter({"The": 0.9, "I": 0.1}),
        letter({"<think>": 0.9, "A": 0.1}),
    ],
)
def test_a_verifier_without_a_letter_selects_nothing(reply: Any) -> None:
    """The text alone does not count here: the tier `choice` reads that."""
    chosen, _ = listwise([reply])

    assert (chosen.winner, chosen.selector) == (None, "Listwise")
    assert chosen.reason is FallbackReason.NO_USABLE_DRAFT
    assert chosen.notes == ("the verifier gave no draft's letter a probability",)
    assert len(chosen.steps) == 1


def test_what_a_selector_asks_is_counted() -> None:
    """Every request with its tokens and seconds."""
    chosen, _ = listwise([letter({"A": 0.5, "B": 0.5})], CITIES[:2])

    assert [(step.kind, step.index, step.role, step.seconds) for step in chosen.steps] == [
        ("select", 0, "verifier", 0.5),
        ("select", 1, "verifier", 0.5),
    ]
    assert {step.count for step in chosen.steps} == {TokenCount(prompt=100, completion=1)}


@pytest.mark.parametrize("margin", [0, -1.0, math.nan, "1"])
def test_a_margin_is_a_number_above_0(margin: Any) -> None:
    """The message names the value."""
    with pytest.raises(ConfigurationError, match="margin=.* must be a number above 0"):
        Listwise(margin=margin)


# ---------------------------------------------------------------- all in one prompt


def single(text: Any, named: Sequence[str] = CITIES, **options: Any) -> tuple[Selection, Any]:
    """Select and rewrite in one generation; return the selection and the model."""
    model = ScriptedModel([text])
    candidates = candidates_of([draft(i, one) for i, one in enumerate(named)], [], scored=False)
    return selected(candidates, SinglePrompt(**options), model), model


@pytest.mark.parametrize(
    "text",
    [
        "Best: B\nAnswer: Rome, Italy",
        "**Best:** Draft B\n**Answer:** Rome, Italy",
        "<think>Best: A\nAnswer: Paris</think>Best: B.\nAnswer: Rome, Italy",
        "best: (b)\n\nAnswer: Rome, Italy",
    ],
)
def test_the_model_selects_and_rewrites_in_one_generation(text: str) -> None:
    """Its choice, its words, and the others in their order."""
    chosen, model = single(text)

    assert (chosen.winner, chosen.ranking, chosen.text) == (1, (1, 0, 2), "Rome, Italy")
    assert chosen.shares == {}
    (request, step), *more = model.asked
    assert more == []
    assert (request.max_tokens, request.top_logprobs, str(step)) == (256, None, "select_0")
    assert [one.kind for one in chosen.steps] == ["select"]


def test_it_may_write_so_much_and_no_more() -> None:
    """As told."""
    _, model = single("Best: A\nAnswer: Paris", max_tokens=20)

    assert model.asked[0][0].max_tokens == 20


@pytest.mark.parametrize("text", ["Best: B", "B", "**B**", "Draft B"])
def test_a_choice_without_an_answer_leaves_the_draft_as_it_was(text: str) -> None:
    """A letter is no answer."""
    chosen, _ = single(text)

    assert (chosen.winner, chosen.text) == (1, None)


@pytest.mark.parametrize(("text", "anew"), [("Answer: Oslo", "Oslo"), ("Oslo", None)])
def test_an_answer_that_is_one_of_the_drafts_is_a_choice(text: str, anew: str | None) -> None:
    """Also without its letter."""
    chosen, _ = single(text)

    assert (chosen.winner, chosen.text) == (2, anew)


@pytest.mark.parametrize("text", ["", "I cannot tell.", "Best: D\nAnswer: Bern", "Answer: Bern"])
def test_a_text_that_names_no_draft_selects_nothing(text: str) -> None:
    """Nobody guesses whose passages an answer rests on."""
    chosen, _ = single(text)

    assert (chosen.winner, chosen.text) == (None, None)
    assert chosen.reason is FallbackReason.NO_USABLE_DRAFT
    assert chosen.notes == ("the verifier named no draft",)
    assert len(chosen.steps) == 1


def test_a_failed_request_selects_nothing() -> None:
    """Its reason is a note."""
    chosen, _ = single(EndpointTimeoutError("too slow"))

    assert chosen.winner is None
    assert chosen.notes == ("SinglePrompt could not select: too slow",)


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True])
def test_it_must_be_allowed_to_write(tokens: Any) -> None:
    """The message names the value."""
    with pytest.raises(ConfigurationError, match="max_tokens="):
        SinglePrompt(max_tokens=tokens)


# ---------------------------------------------------------------- how sure


def unsure(named: Sequence[tuple[str, float]], selector: Any = None) -> bool:
    """Whether a selection among these answers and values is an unsure one."""
    candidates = answers(*named)
    return is_unsure(selected(candidates, selector), candidates)


def test_a_rival_answer_within_a_tenth_of_a_nat_leaves_the_choice_open() -> None:
    """Another draft of the same answer is no rival, and one answer alone has none."""
    assert unsure([("Paris", -1.0), ("Rome", -1.09)])
    assert not unsure([("Paris", -1.0), ("Rome", -1.11)])
    assert not unsure([("Paris", -1.0), ("paris.", -1.01), ("Rome", -2.0)])
    assert not unsure([("Paris", -1.0)])


def test_the_best_rival_counts() -> None:
    """Wherever it stands."""
    assert unsure([("Oslo", -9.0), ("Rome", -1.05), ("Paris", -1.0), ("Bern", -5.0)])


def test_where_answers_have_shares_those_are_compared() -> None:
    """By their logarithms: what the selector decided by."""
    outvoted = [("Rome", -1.0), ("Paris", -1.3), ("Paris", -1.3)]

    assert not unsure(outvoted, AnswerVote())
    assert unsure([("Rome", -1.0), ("Paris", -1.7), ("Paris", -1.7)], AnswerVote())
    assert not unsure([("Rome", 0.0), ("Paris", 1.0)], Undisputed())


# ---------------------------------------------------------------- selectors of one's own


class Worst:
    """The lowest score wins."""

    reads_scores = True
    requests = 0

    async def select(self, given: Pool) -> Selection:
        ranked = sorted(given.candidates, key=lambda one: one.value)
        ranking = tuple(one.draft.index for one in ranked)
        return Selection(winner=ranking[0], ranking=ranking)


class Fixed:
    """Returns what it was told to."""

    reads_scores = True
    requests = 0

    def __init__(self, selection: Selection) -> None:
        self._selection = selection

    async def select(self, given: Pool) -> Selection:
        return self._selection


def test_a_selector_of_ones_own_decides() -> None:
    """It is named in the selection."""
    chosen = outcome([-1.0, -2.0], Worst())

    assert (chosen.winner, chosen.ranking, chosen.selector) == (1, (1, 0), "Worst")


def test_a_selector_may_select_nothing() -> None:
    """For a reason of its own, or for the usual one."""
    nothing = Selection(winner=None, ranking=())
    chosen = outcome([-1.0], Fixed(nothing))

    assert (chosen.winner, chosen.reason) == (None, FallbackReason.NO_USABLE_DRAFT)
    named = Selection(winner=None, ranking=(), reason=FallbackReason.DISAGREEMENT, selector="mine")
    assert outcome([-1.0], Fixed(named)) == named


@pytest.mark.parametrize(
    "selection",
    [
        Selection(winner=7, ranking=(0, 1)),
        Selection(winner=0, ranking=(0, 7)),
        Selection(winner=0, ranking=(0, 0, 1)),
    ],
)
def test_a_selector_that_returns_what_it_was_not_given_is_named(selection: Selection) -> None:
    """With what it returned and what it was given."""
    with pytest.raises(ConfigurationError, match=r"Fixed.select must return candidates .*\[0, 1\]"):
        outcome([-1.0, -2.0], Fixed(selection))


@pytest.mark.parametrize(("returned", "kind"), [(5, "int"), (None, "NoneType")])
def test_a_selector_that_returns_no_selection_is_named(returned: Any, kind: str) -> None:
    """With the type of what it returned."""
    with pytest.raises(
        ConfigurationError, match=f"Fixed.select must return a Selection, not a {kind}"
    ):
        outcome([-1.0, -2.0], Fixed(returned))


def test_a_selector_of_ones_own_serves_a_whole_question(scripted: Scripted) -> None:
    """It reads the scores of all drafts, and may ask the verifier."""
    seen: list[Pool] = []

    class First(Worst):
        async def select(self, given: Pool) -> Selection:
            seen.append(given)
            return Selection(winner=0, ranking=(0,))

    endpoint = Endpoint(scripted().base_url)
    rag = SpeculativeRAG(
        drafter=endpoint,
        verifier=endpoint,
        num_drafts=2,
        passages_per_draft=1,
        partitioner=RankStratified(),
        selector=First(),
    )
    answer = rag.ask(QUESTION, ["Text one.", "Text two."])
    (given,) = seen

    assert answer.selection is not None
    assert answer.selection.selector == "First"
    assert (given.question, given.model) == (QUESTION, endpoint)
    assert [one.draft.index for one in given.candidates] == [0, 1]
    assert [one.value for one in given.candidates] == [
        one.score.value for one in given.candidates if one.score
    ]


# ---------------------------------------------------------------- in a whole question


def rag(server: ScriptedServer, **options: Any) -> SpeculativeRAG:
    """Return an engine that drafts from each of three passages."""
    endpoint = Endpoint(server.base_url, max_attempts=1)
    return SpeculativeRAG(
        drafter=endpoint,
        verifier=endpoint,
        num_drafts=3,
        passages_per_draft=1,
        partitioner=RankStratified(),
        **options,
    )


def cities(verdict: Callable[[str], Any]) -> Callable[[dict[str, Any], int], Any]:
    """Draft the city of a passage; ask `verdict` for what is said to all drafts together."""

    def respond(body: dict[str, Any], _: int) -> Any:
        prompt = body["messages"][-1]["content"]
        if body.get("stream"):
            return "standard answer"
        if "Draft A" in prompt:
            return verdict(prompt)
        city = next(city for city in CITIES if f"[1] {city}" in prompt)
        return f"Rationale: [1] says so.\nAnswer: {city}"

    return respond


def lettered(prompt: str, city: str) -> str:
    """Return the letter that an answer has in a prompt."""
    return prompt.partition(f"Answer: {city}")[0].rpartition("Draft ")[2][0]


PASSAGES = [f"{city} is a city." for city in CITIES]


def test_listwise_verifies_no_draft_and_is_counted(scripted: Scripted) -> None:
    """One request for all drafts instead of one for each; it is a step of the question."""

    def verdict(prompt: str) -> Reply:
        best = lettered(prompt, "Oslo")
        return Reply(best, alternatives={best: -0.1, **{c: -4.0 for c in "ABC" if c != best}})

    server = scripted(cities(verdict))
    answer = rag(server, selector=Listwise()).ask(QUESTION, PASSAGES)

    assert (answer.text, answer.tier, answer.trace.scores) == ("Oslo", None, ())
    assert len(server.chats) == answer.usage.requests == 3 + 1
    assert server.probes == []
    assert [step.kind for step in answer.usage.steps].count("select") == 1
    assert "select" in answer.trace.stages


def test_a_second_request_of_listwise_follows_the_first(scripted: Scripted) -> None:
    """The steps say so: hardware paid by the hour is busy with one after the other."""
    close = {"A": -0.9, "B": -1.0, "C": -1.1}
    server = scripted(cities(lambda _: Reply("A", alternatives=close, delay=0.2)))
    answer = rag(server, selector=Listwise()).ask(QUESTION, PASSAGES)

    first, second = (step for step in answer.usage.steps if step.kind == "select")
    assert first.seconds >= 0.2
    assert first.arrived == pytest.approx(second.arrived - second.seconds)
    assert second.arrived <= answer.trace.seconds


def test_the_choice_tier_needs_text_alone_and_two_requests(scripted: Scripted) -> None:
    """A verifier that picks the same answer in both orders is believed."""
    server = scripted(cities(lambda prompt: lettered(prompt, "Rome")))
    answer = rag(server, scoring=Scoring(tier="choice")).ask(QUESTION, PASSAGES)

    assert (answer.text, answer.tier, answer.fallback_reason) == ("Rome", "choice", None)
    assert len(server.chats) == answer.usage.requests == 3 + 2
    assert [score.value for score in sorted(answer.trace.scores, key=lambda s: s.draft)].count(
        1.0
    ) == 1


def test_a_verifier_that_disagrees_with_itself_is_not_believed(scripted: Scripted) -> None:
    """Standard RAG answers, and the reason says why."""
    server = scripted(cities(lambda _: "A"))
    answer = rag(server, scoring=Scoring(tier="choice")).ask(QUESTION, PASSAGES)

    assert answer.text == "standard answer"
    assert answer.fallback_reason is FallbackReason.DISAGREEMENT
    assert answer.usage.requests == 3 + 2 + 1


def test_a_single_prompts_answer_is_the_answer_and_the_trace_keeps_the_draft(
    scripted: Scripted,
) -> None:
    """Both texts; the passages are the chosen draft's."""
    server = scripted(
        cities(lambda prompt: f"Best: {lettered(prompt, 'Rome')}\nAnswer: Rome, Italy [1]")
    )
    answer = rag(server, selector=SinglePrompt()).ask(QUESTION, PASSAGES)

    assert (answer.text, answer.citations) == ("Rome, Italy [1]", (1,))
    assert [passage.text for passage in answer.passages] == ["Rome is a city."]
    assert answer.trace.refinement is not None
    assert answer.trace.refinement.to_dict() == {"before": "Rome", "after": "Rome, Italy [1]"}
    assert answer.usage.requests == 3 + 1


def test_a_single_prompts_answer_cites_no_passage_that_does_not_exist(scripted: Scripted) -> None:
    """As a draft's does not: the reader could not look it up."""
    server = scripted(cities(lambda prompt: f"Best: {lettered(prompt, 'Rome')}\nAnswer: Rome [3]"))

    assert rag(server, selector=SinglePrompt()).ask(QUESTION, PASSAGES).text == "Rome"


def test_answers_are_voted_on_by_their_scores(scripted: Scripted) -> None:
    """The vote's shares are in the selection."""
    server = scripted()
    answer = rag(server, selector=AnswerVote(temperature=0.5)).ask(QUESTION, PASSAGES)

    assert answer.selection is not None
    assert answer.selection.selector == "AnswerVote"
    assert sum(answer.selection.shares.values()) == pytest.approx(1.0)
    assert answer.tier == "reflection"


def test_it_is_told_not_to_think_aloud() -> None:
    """Its tokens are for the letter and the answer."""
    _, model = single("Best: A\nAnswer: Paris")

    assert not model.asked[0][0].think
