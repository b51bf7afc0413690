"""Which draft is the answer."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag_integrations import BestScore, Draft, FallbackReason, Passage, Score, Subset
from specrag_integrations.selection import candidates_of, select


def draft(index, **options):
    """Return a draft of some subset."""
    subset = Subset(index=index, ranks=(index,), passages=(Passage(text="t"),))
    return Draft(rationale="r", answer="a", subset=subset, **options)


def score(index, value):
    """Return its score."""
    return Score(draft=index, tier="reflection", value=value)


def outcome(values, **changed):
    """Select among drafts with these values; `changed` names drafts by their index."""
    drafts = [draft(i, **changed.get(f"d{i}", {})) for i in range(len(values))]
    scores = [score(i, value) for i, value in enumerate(values)]
    return select(candidates_of(drafts, scores), BestScore())


def test_the_highest_score_wins_wherever_it_stands():
    """Not the first, not the last."""
    assert outcome([-3.0, -1.0, -2.0]).ranking == (1, 2, 0)
    assert outcome([-1.0, -3.0, -2.0]).winner == 0
    assert outcome([-3.0, -2.0, -1.0]).winner == 2


def test_equal_scores_go_to_the_lowest_index_in_whatever_order_drafts_arrive():
    """The same replies give the same answer, also when all scores are zero."""
    drafts = [draft(i) for i in range(4)]
    scores = [score(i, 0.0) for i in range(4)]
    for order in itertools.permutations(range(4)):
        candidates = candidates_of([drafts[i] for i in order], [scores[i] for i in order[::-1]])
        assert select(candidates, BestScore()).ranking == (0, 1, 2, 3)
        assert BestScore().rank(candidates[::-1])[0].draft.index == 0


def test_very_small_scores_are_still_told_apart():
    """In log space nothing underflows to a tie of zeros."""
    assert outcome([-2000.0, -1999.0, -2001.0]).winner == 1


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_a_draft_without_a_finite_score_is_never_selected(bad):
    """Nor does it disturb the order of the others."""
    assert outcome([bad, -9.0, bad, -8.0]).ranking == (3, 1)
    assert outcome([bad, bad]).winner is None


def test_a_draft_that_was_never_scored_is_not_selected():
    """Missing is not zero, and zero would be certainty."""
    chosen = select(candidates_of([draft(0), draft(1)], [score(1, -5.0)]), BestScore())

    assert chosen.ranking == (1,)


def test_an_abstention_is_never_selected():
    """However sure its author is that the passages do not tell."""
    chosen = outcome([-0.1, -5.0], d0={"abstained": True})

    assert chosen.ranking == (1,)


def test_a_draft_that_was_cut_off_ranks_below_all_whole_ones():
    """It is an answer where there is no other."""
    assert outcome([-0.1, -5.0, -9.0], d0={"truncated": True}).ranking == (1, 2, 0)
    assert outcome([-0.1], d0={"truncated": True}).winner == 0


def test_nothing_to_select_has_its_reason():
    """The reason travels to the answer."""
    nothing = outcome([None, None])

    assert (nothing.winner, nothing.ranking) == (None, ())
    assert nothing.reason is FallbackReason.NO_USABLE_DRAFT
    assert nothing.to_dict() == {"winner": None, "ranking": [], "reason": "no_usable_draft"}
    assert outcome([-1.0]).reason is None


def test_a_selector_of_ones_own_decides():
    """The first of what it returns is the answer."""

    class Worst:
        def rank(self, candidates):
            return sorted(candidates, key=lambda one: one.value)

    candidates = candidates_of([draft(0), draft(1)], [score(0, -1.0), score(1, -2.0)])

    assert select(candidates, Worst()).ranking == (1, 0)


@given(st.lists(st.none() | st.floats(), max_size=8), st.randoms(use_true_random=False))
def test_the_winner_is_the_best_of_what_can_be_compared(values, rng: random.Random):
    """For any scores in any order of arrival."""
    drafts = [draft(i) for i in range(len(values))]
    scores = [score(i, value) for i, value in enumerate(values)]
    rng.shuffle(drafts)
    rng.shuffle(scores)
    usable = {i: v for i, v in enumerate(values) if v is not None and math.isfinite(v)}

    chosen = select(candidates_of(drafts, scores), BestScore())

    assert set(chosen.ranking) == set(usable)
    if usable:
        best = max(usable.values())
        assert chosen.winner == min(i for i, v in usable.items() if v == best)
