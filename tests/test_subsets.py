"""Which passages each draft reads."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import re
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag_integrations import (
    ByCluster,
    ConfigurationError,
    Disjoint,
    MultiPerspective,
    Passage,
    Random,
    RankStratified,
)
from specrag_integrations.subsets import make_subsets

ALL = [
    MultiPerspective(),
    MultiPerspective(anchor=1),
    ByCluster(),
    Disjoint(),
    RankStratified(),
    Random(),
]


def subsets(passages, partitioner=None, *, m=5, k=2, question="question", embedder=None):
    """Return the partition of some passages."""
    return asyncio.run(
        make_subsets(
            passages,
            question,
            partitioner=partitioner or MultiPerspective(),
            num_drafts=m,
            passages_per_draft=k,
            embedder=embedder,
        )
    )


def placed(*rows):
    """Return one passage for each vector."""
    return [Passage(text=f"text {i}", id=str(i), embedding=row) for i, row in enumerate(rows)]


def clustered(*sizes):
    """Return passages in clusters of these sizes, far apart from each other."""
    rows = []
    for cluster, size in enumerate(sizes):
        for member in range(size):
            row = np.zeros(len(sizes) + 1)
            row[cluster] = 1.0
            row[-1] = 0.001 * member
            rows.append(row.tolist())
    return placed(*rows)


def ranks_of(partition):
    """Return the ranks of all subsets."""
    return [subset.ranks for subset in partition.subsets]


# ---------------------------------------------------------------- the paper's sampling


def test_every_subset_has_one_passage_of_each_cluster():
    """Two clusters of five: every draft sees both perspectives."""
    found = ranks_of(subsets(clustered(5, 5)))

    assert len(found) == 5
    assert all(first < 5 <= second for first, second in found)


def test_more_drafts_than_the_smallest_cluster_has_passages():
    """Drawing without replacement would end after two drafts: passages may be drawn again."""
    found = ranks_of(subsets(clustered(2, 8), m=10))

    assert len(set(found)) == 10


@pytest.mark.parametrize(("sizes", "exist"), [((1, 9), 9), ((1, 1, 8), 8), ((2, 2), 4)])
def test_the_number_of_subsets_is_capped_where_no_more_exist(sizes, exist):
    """The paper's loop would never end here; the shortfall is noted."""
    partition = subsets(clustered(*sizes), m=20, k=len(sizes))

    assert len(set(ranks_of(partition))) == exist
    (note,) = partition.notes
    assert note.startswith(f"{exist} of 20 drafts: MultiPerspective finds no more")
    assert f"the {sum(sizes)} usable passages" in note


def test_no_note_where_all_drafts_could_be_made():
    """Notes tell of what went otherwise than asked for, and of nothing else."""
    assert subsets(clustered(5, 5)).notes == ()


@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 2), (2, 2), (2, 5), (3, 3)])
def test_as_few_passages_as_a_draft_reads_make_one_subset_of_all(n, k):
    """With n ≤ k all drafts would be equal, so there is one."""
    for partitioner in (MultiPerspective(), RankStratified(), Random()):
        partition = subsets(clustered(*[1] * n), partitioner, k=k)

        assert ranks_of(partition) == [tuple(range(n))]
        assert len(partition.notes) == 1


def test_equal_embeddings_still_make_different_subsets():
    """What cannot be told apart by content is split by rank."""
    found = ranks_of(subsets(placed(*[[1.0, 2.0]] * 6)))

    assert len(set(found)) == 5
    assert all(len(set(ranks)) == 2 for ranks in found)


def test_zero_vectors_are_a_cluster_of_their_own():
    """A zero vector has no direction, and divides by nothing."""
    found = ranks_of(subsets(placed([0, 0], [0, 0], [1, 0], [1, 0.01]), m=4))

    assert all(first < 2 <= second for first, second in found)


def test_length_does_not_decide_the_cluster():
    """Vectors are compared by direction, so a long document is not a perspective of its own."""
    found = ranks_of(subsets(placed([1, 0], [100, 1], [0, 1], [1, 100]), m=4))

    assert all(first < 2 <= second for first, second in found)


def test_vectors_beyond_the_range_of_squares_are_compared_all_the_same():
    """The square of 1e200 is infinite, and that of 1e-200 is zero."""
    found = ranks_of(subsets(placed([1e200, 0], [1e-200, 0], [0, 1e200], [0, 1e-200]), m=4))

    assert all(first < 2 <= second for first, second in found)


@given(
    rows=st.lists(
        st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=3, max_size=3),
        min_size=1,
        max_size=9,
    ),
    m=st.integers(1, 8),
    k=st.integers(1, 5),
    anchor=st.integers(0, 2),
)
@settings(max_examples=40, deadline=None)
def test_subsets_are_unique_of_the_right_size_and_in_rank_order(rows, m, k, anchor):
    """Whatever the vectors are, each draft reads min(k, n) passages and no two read the same."""
    if anchor >= k:
        anchor = 0
    found = ranks_of(subsets(placed(*rows), MultiPerspective(anchor=anchor), m=m, k=k))

    assert 1 <= len(found) <= m
    assert len(set(found)) == len(found)
    for ranks in found:
        assert len(ranks) == min(k, len(rows))
        assert list(ranks) == sorted(set(ranks))
        assert set(range(min(anchor, len(rows)))) <= set(ranks) <= set(range(len(rows)))


def test_a_subset_knows_its_index_and_its_passages():
    """Passages stand in rank order, as the ranks do."""
    passages = clustered(3, 3)
    partition = subsets(passages)

    assert [subset.index for subset in partition.subsets] == list(range(5))
    for subset in partition.subsets:
        assert subset.passages == tuple(passages[rank] for rank in subset.ranks)


# ---------------------------------------------------------------- anchors


def test_anchored_passages_are_in_every_subset():
    """The best-ranked passages reach every draft, and count in its size."""
    found = ranks_of(subsets(clustered(5, 5), MultiPerspective(anchor=2), m=4, k=3))

    assert len(set(found)) == 4
    assert all(ranks[:2] == (0, 1) and len(ranks) == 3 for ranks in found)


def test_fewer_passages_than_anchors_make_one_subset():
    """All there is, once."""
    assert ranks_of(subsets(clustered(1, 1), MultiPerspective(anchor=3), k=4)) == [(0, 1)]


@pytest.mark.parametrize("option", ["anchor", "lead"])
@pytest.mark.parametrize("number", [-1, 1.5, True, "1", None])
def test_anchor_and_lead_are_whole_numbers(option, number):
    """Anything else is refused when the partitioner is made."""
    with pytest.raises(ConfigurationError, match=f"{option}="):
        MultiPerspective(**{option: number})


def test_an_anchor_that_leaves_nothing_to_vary_is_refused():
    """All drafts would read the same; a single draft may be all anchor."""
    with pytest.raises(ConfigurationError, match="anchor=2 fills passages_per_draft=2"):
        MultiPerspective(anchor=2).check(num_drafts=2, passages_per_draft=2)
    MultiPerspective(anchor=2).check(num_drafts=1, passages_per_draft=2)
    MultiPerspective(anchor=1).check(num_drafts=5, passages_per_draft=2)


def test_a_leading_subset_comes_before_the_perspectives():
    """It holds the top-ranked passages, and the others are drawn as without it."""
    passages = clustered(5, 5)
    others = ranks_of(subsets(passages, MultiPerspective(anchor=1), m=4, k=3))

    found = ranks_of(subsets(passages, MultiPerspective(anchor=1, lead=5), m=5, k=3))

    assert found == [(0, 1, 2, 3, 4), *others]


def test_a_leading_subset_counts_as_a_draft():
    """A single draft is the leading one, and no other subset equals it."""
    passages = clustered(5, 5)
    assert ranks_of(subsets(passages, MultiPerspective(lead=4), m=1, k=2)) == [(0, 1, 2, 3)]
    assert ranks_of(subsets(passages[:3], MultiPerspective(lead=5), m=4, k=3)) == [(0, 1, 2)]
    MultiPerspective(anchor=2, lead=5).check(num_drafts=2, passages_per_draft=2)
    with pytest.raises(ConfigurationError, match="anchor=2 fills"):
        MultiPerspective(anchor=2, lead=5).check(num_drafts=3, passages_per_draft=2)


# ---------------------------------------------------------------- the other partitioners


def test_by_cluster_gives_each_draft_a_whole_cluster():
    """Nothing is shared and nothing left out; the top-ranked passage's cluster comes first."""
    found = ranks_of(subsets(clustered(3, 2, 4), ByCluster(), m=3))

    assert found == [(0, 1, 2), (3, 4), (5, 6, 7, 8)]


def test_disjoint_subsets_share_no_passage():
    """One poisoned passage reaches one draft; the best-ranked passages are used first."""
    assert ranks_of(subsets(clustered(9, 9), Disjoint(), m=4, k=2)) == [
        (0, 4),
        (1, 5),
        (2, 6),
        (3, 7),
    ]


def test_disjoint_drafts_are_fewer_where_passages_are():
    """Three passages make three drafts, and the trace says so."""
    partition = subsets(clustered(2, 1), Disjoint(), m=5, k=2)

    assert ranks_of(partition) == [(0,), (1,), (2,)]
    assert len(partition.notes) == 1


def test_rank_stratified_takes_one_passage_of_each_band():
    """Every draft has one of the better and one of the worse half."""
    found = ranks_of(subsets(clustered(10), RankStratified(), m=20, k=2))

    assert len(set(found)) == 20
    assert all(first < 5 <= second for first, second in found)


def test_random_subsets_are_unique_and_end_with_all_there_are():
    """Three pairs of three passages exist, so no more are drawn."""
    found = ranks_of(subsets(clustered(3), Random(), m=10, k=2))

    assert sorted(found) == [(0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize("partitioner", ALL, ids=repr)
def test_one_hundred_passages_and_eight_per_draft_take_no_time(partitioner):
    """The number of possible subsets (20 digits) is no reason to wait."""
    rng = np.random.default_rng(0)
    passages = placed(*rng.normal(size=(100, 32)).tolist())
    subsets(passages, partitioner, m=20, k=8)  # imports
    started = time.perf_counter()

    found = ranks_of(subsets(passages, partitioner, m=20, k=8))

    assert time.perf_counter() - started < 2
    assert len({frozenset(ranks) for ranks in found}) == len(found)


@pytest.mark.parametrize("partitioner", ALL, ids=repr)
def test_the_same_question_gets_the_same_subsets(partitioner):
    """Global random state is neither read nor moved."""
    passages = clustered(4, 3, 5)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global state is what is tested
    first = ranks_of(subsets(passages, partitioner))
    random.seed(2)
    np.random.seed(2)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()  # noqa: NPY002

    again = ranks_of(subsets(passages, partitioner))

    after = random.getstate(), np.random.get_state()  # noqa: NPY002
    assert first == again
    assert before[0] == after[0]
    assert all(np.array_equal(one, other) for one, other in zip(before[1], after[1], strict=True))


def test_another_seed_draws_other_subsets():
    """The seed is an option, not an ornament."""
    passages = clustered(9, 9)

    drawn = {tuple(ranks_of(subsets(passages, MultiPerspective(seed=seed)))) for seed in range(5)}

    assert len(drawn) > 1


# ---------------------------------------------------------------- embeddings


def texts_about(*subjects):
    """Return passages whose texts are about different things."""
    return [Passage(text=f"{subject} {i} {subject}") for i, subject in enumerate(subjects)]


def test_without_embeddings_texts_are_clustered_by_their_words():
    """TF-IDF needs no model, and works in any script."""
    passages = texts_about("lighthouse", "海王星は惑星", "lighthouse", "海王星は惑星")
    partition = subsets(passages, m=4)

    assert sorted(ranks_of(partition)) == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert partition.notes == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_embeddings_that_are_not_finite_are_named_and_replaced(bad):
    """One broken vector would poison every distance."""
    passages = placed([1.0, 0.0], [1.0, bad], [0.0, 1.0])
    partition = subsets(passages, m=2)

    assert "embeddings not finite (passage 1 1): clustered by TF-IDF instead" in partition.notes
    assert len(partition.subsets) == 2


def test_some_passages_without_an_embedding_fall_back_to_their_words():
    """Vectors of different origin are never mixed; the trace says so."""
    passages = [*placed([1.0, 0.0], [0.0, 1.0]), Passage(text="bare")]
    partition = subsets(passages, m=2)

    assert partition.notes == ("1 of 3 passages lack an embedding: clustered by TF-IDF",)


def embed_by_length(texts, question):
    """Place texts by whether they are longer than the question."""
    return [[1.0, 0.0] if len(text) > len(question) else [0.0, 1.0] for text in texts]


async def embed_later(texts, question):
    """Do so asynchronously."""
    await asyncio.sleep(0)
    return embed_by_length(texts, question)


@dataclass
class Embedder:
    """An object with an async `__call__`."""

    async def __call__(self, texts, question):
        return await embed_later(texts, question)


@pytest.mark.parametrize(
    "embedder",
    [
        embed_by_length,
        embed_later,
        Embedder(),
        functools.partial(embed_later),
        lambda *asked: embed_later(*asked),  # noqa: PLW0108 - a plain function
        lambda texts, question: np.asarray(embed_by_length(texts, question), dtype=np.float32),
    ],
    ids=["sync", "async", "async call", "partial", "returns a coroutine", "numpy"],
)
def test_an_embedder_may_be_sync_or_async_and_hears_the_question(embedder):
    """The same texts form other clusters under a longer question."""
    passages = [Passage(text=text) for text in ("a" * 5, "b" * 20, "c" * 5, "d" * 20)]

    near = ranks_of(subsets(passages, m=4, question="q" * 10, embedder=embedder))
    far = ranks_of(subsets(passages, m=4, question="q" * 50, embedder=embedder))

    assert sorted(near) == [(0, 1), (0, 3), (1, 2), (2, 3)]
    assert sorted(far) == [(0, 2), (0, 3), (1, 2), (1, 3)]


def test_an_embedder_reads_title_and_text_of_all_passages():
    """It is asked once for all, since vectors of different models cannot be compared."""
    asked = []

    def embedder(texts, question):
        asked.append((list(texts), question))
        return np.eye(len(texts))

    passages = [Passage(text="text", title="Title"), *placed([1.0, 0.0])]
    subsets(passages, embedder=embedder, question="why?")

    assert asked == [(["Title\ntext", "text 0"], "why?")]


def test_the_passages_own_embeddings_come_first():
    """Where all have one, no embedder is asked."""

    def embedder(texts, question):
        raise AssertionError

    assert len(subsets(clustered(3, 3), embedder=embedder).subsets) == 5


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (None, "shape (0,)"),
        ([1.0, 2.0, 3.0], "shape (3,)"),
        ([[1.0], [2.0]], "shape (2, 1)"),
        ([[1.0], [2.0], [3.0, 4.0]], "rows that differ in length: 1, 2"),
        ([[], [], []], "shape (3, 0)"),
        ([["a"], ["b"], ["c"]], "what is no array of numbers"),
        (np.zeros((3, 2, 2)), "shape (3, 2, 2)"),
        ("abc", "what is no array of numbers"),
        (object, "what is no array of numbers"),
        ([1.0, [2.0], 3.0], "what is no array of numbers"),
    ],
    ids=repr,
)
def test_an_embedder_must_return_one_row_per_passage(wrong, got):
    """The message says what was expected and what came."""
    told = re.escape(f"one array of shape (3, d); got {got}") + "$"
    with pytest.raises(ConfigurationError, match=told):
        subsets([Passage(text=text) for text in "abc"], embedder=lambda texts, question: wrong)


def test_an_embedders_own_error_is_not_relabelled():
    """A bug in the caller's code reaches the caller as itself."""

    def embedder(texts, question):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        subsets([Passage(text=text) for text in "abc"], embedder=embedder)


@pytest.mark.parametrize("partitioner", [Disjoint(), RankStratified(), Random()], ids=repr)
def test_a_partitioner_that_needs_no_vectors_asks_for_none(partitioner):
    """Nobody pays for embeddings that are not used."""

    def embedder(texts, question):
        raise AssertionError

    subsets([Passage(text=text) for text in "abc"], partitioner, embedder=embedder)


# ---------------------------------------------------------------- a partitioner of one's own


@dataclass
class Fixed:
    """Returns what it was given."""

    found: object
    needs_vectors: bool = False

    def check(self, *, num_drafts, passages_per_draft):
        """Accept everything."""

    def partition(self, count, vectors, *, num_drafts, passages_per_draft):
        """Return it."""
        return self.found


@pytest.mark.parametrize(
    "broken",
    [
        [],
        [()],
        [(0, 1), (1, 0)],
        [(0, 0)],
        [(0, 3)],
        [(-1, 0)],
        [(0,), (1,), (2,)],
        [("0",)],
        [(0.0,)],
        None,
        3,
        [None],
    ],
    ids=repr,
)
def test_a_partitioner_that_breaks_its_promise_is_named(broken):
    """Too many, equal, empty or impossible subsets are a mistake of its author."""
    with pytest.raises(ConfigurationError, match=r"Fixed.partition must return 1 to 2 different"):
        subsets(clustered(3), Fixed(broken), m=2)


def test_a_partitioner_may_return_numpy_numbers_in_any_order():
    """They become plain ranks in rank order, fit for JSON."""
    found = ranks_of(subsets(clustered(3), Fixed([np.array([2, 0]), {1}]), m=2))

    assert found == [(0, 2), (1,)]
    assert all(type(rank) is int for ranks in found for rank in ranks)


def test_the_loop_stays_free_while_subsets_are_made():
    """Embedding and clustering run in threads: another task's heart goes on beating."""
    where = set()

    class Slow(Fixed):
        def partition(self, *args, **options):
            where.add(threading.get_ident())
            time.sleep(0.2)
            return [(0,)]

    def embedder(texts, question):
        where.add(threading.get_ident())
        time.sleep(0.2)
        return np.eye(len(texts))

    async def beat():
        last, longest = time.perf_counter(), 0.0
        while True:
            await asyncio.sleep(0.01)
            now = time.perf_counter()
            last, longest = now, max(longest, now - last)
            beats.append(longest)

    async def main():
        heart = asyncio.create_task(beat())
        await make_subsets(
            [Passage(text="a"), Passage(text="b")],
            "question",
            partitioner=Slow(None, needs_vectors=True),
            num_drafts=2,
            passages_per_draft=1,
            embedder=embedder,
        )
        heart.cancel()

    beats: list[float] = []
    asyncio.run(main())

    assert len(beats) > 10
    assert threading.get_ident() not in where


def test_the_first_subset_holds_the_best_of_each_cluster():
    """The top-ranked passage is always read by a draft, whatever chance brings to the others."""
    for seed in range(20):
        first, *_ = ranks_of(
            subsets(clustered(4, 5), m=3, k=2, partitioner=MultiPerspective(seed=seed))
        )
        assert first == (0, 4)


@pytest.mark.parametrize("kind", [MultiPerspective, ByCluster, RankStratified, Random])
@pytest.mark.parametrize("seed", ["x", -1, 1.5, None, 2**32, True])
def test_a_seed_that_scikit_learn_would_refuse_is_refused_at_once(kind, seed):
    """By name, and not by a library when the first question is asked."""
    with pytest.raises(ConfigurationError, match="seed="):
        kind(seed=seed)
    assert kind(seed=2**32 - 1).seed == 2**32 - 1


def test_an_anchor_that_leaves_only_the_lead_is_refused():
    """Two drafts would read the same two passages, so that there would be one."""
    with pytest.raises(ConfigurationError, match="anchor=2 fills passages_per_draft=2"):
        MultiPerspective(anchor=2, lead=2).check(num_drafts=2, passages_per_draft=2)
    MultiPerspective(anchor=2, lead=3).check(num_drafts=2, passages_per_draft=2)
