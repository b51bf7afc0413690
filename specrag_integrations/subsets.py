"""Subsets: which passages each draft reads, and the partitioners that choose them.

The paper clusters the passages by content and gives every draft one passage of each cluster, so
that each draft sees several perspectives and no draft reads everything (section 3.1, algorithm 1).
A partitioner decides *how* subsets are made; the engine says *how many* and how large.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import operator
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from specrag_integrations.errors import ConfigurationError
from specrag_integrations.options import checked_whole
from specrag_integrations.passages import Passage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    Vectors = NDArray[np.float64]

Embedder = Callable[[Sequence[str], str], "ArrayLike | Awaitable[ArrayLike]"]
"""(texts, question) -> an array of shape (len(texts), d); sync (run in a thread) or async."""
Ranks = tuple[int, ...]
"""Places in the list of passages, 0 being the top-ranked one, in ascending order."""

_KMEANS_STARTS = 4  # 1 clusters worse, 10 cost twice the time for little: benchmarks/kmeans.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """The passages one draft reads, in rank order."""

    index: int
    ranks: Ranks
    passages: tuple[Passage, ...]

    def holding(self, read: Sequence[Passage]) -> Subset:
        """Return the subset without the passages that are not among these very ones."""
        kept = {id(passage) for passage in read}
        pairs = zip(self.ranks, self.passages, strict=True)
        left = [(rank, passage) for rank, passage in pairs if id(passage) in kept]
        return replace(
            self,
            ranks=tuple(rank for rank, _ in left),
            passages=tuple(passage for _, passage in left),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The subsets of one question."""

    subsets: tuple[Subset, ...]
    notes: tuple[str, ...] = ()
    """Why there are fewer subsets, or other vectors, than asked for."""


class Partitioner(Protocol):
    """A way to choose subsets."""

    needs_vectors: bool
    """Whether `partition` wants vectors; without them embedding is skipped."""

    def check(self, *, num_drafts: int, passages_per_draft: int) -> None:
        """Raise a `ConfigurationError` for numbers that can never work with this partitioner."""
        ...

    def partition(
        self, count: int, vectors: Vectors | None, *, num_drafts: int, passages_per_draft: int
    ) -> list[Ranks]:
        """Return at most `num_drafts` subsets of the ranks 0 … count - 1, no two of them equal.

        `vectors` has shape (count, d) and unit rows; None unless `needs_vectors`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiPerspective:
    """One passage of each cluster in every subset: the paper's sampling.

    The first subset holds the best-ranked passage of each cluster; the others are drawn at random.
    Sampling that forgets the ranking throws away what the retriever knew, so that two options keep
    it. With `anchor`, the first passages in rank order are in every subset as well, and the rest
    form `passages_per_draft - anchor` clusters. With `lead`, one subset more comes first, the
    `lead` top-ranked passages whatever `passages_per_draft` says: it is one of `num_drafts`.
    """

    anchor: int = 0
    lead: int = 0
    seed: int = 0
    needs_vectors = True

    def __post_init__(self) -> None:
        checked_whole("anchor", self.anchor, at_least=0)
        checked_whole("lead", self.lead, at_least=0)
        _check_seed(self.seed)

    def check(self, *, num_drafts: int, passages_per_draft: int) -> None:
        """Refuse an anchor that leaves nothing to vary between several drafts."""
        equal = self.lead == passages_per_draft <= self.anchor  # the lead is what all others read
        if num_drafts - bool(self.lead) + equal > 1 and self.anchor >= passages_per_draft:
            raise ConfigurationError(
                f"anchor={self.anchor} fills passages_per_draft={passages_per_draft}, so all "
                "drafts would read the same; lower anchor or raise passages_per_draft"
            )

    def partition(
        self, count: int, vectors: Vectors | None, *, num_drafts: int, passages_per_draft: int
    ) -> list[Ranks]:
        """Cluster what is not anchored, then draw unique subsets with one passage of each."""
        if not self.lead:
            return self._perspectives(count, vectors, num_drafts, passages_per_draft)
        leading = tuple(range(min(self.lead, count)))
        others = self._perspectives(count, vectors, num_drafts, passages_per_draft)
        return [leading, *(ranks for ranks in others if ranks != leading)][:num_drafts]

    def _perspectives(
        self, count: int, vectors: Vectors | None, num_drafts: int, passages_per_draft: int
    ) -> list[Ranks]:
        anchored = range(min(self.anchor, passages_per_draft, count))
        rest = range(len(anchored), count)
        wanted = min(passages_per_draft - len(anchored), len(rest))
        if not wanted or vectors is None:
            return [tuple(range(min(passages_per_draft, count)))]
        clusters = _clusters(vectors[rest.start :], wanted, self.seed)
        drawn = _draw(clusters, num_drafts, self.seed)
        return [tuple(sorted([*anchored, *(rest[place] for place in places)])) for places in drawn]


def _check_seed(seed: int) -> None:
    if checked_whole("seed", seed, at_least=0) >= 2**32:
        raise ConfigurationError(f"seed={seed} must be below 2 ** 32, which scikit-learn asks for")


class _AnyNumbers:
    """A partitioner that works with any numbers."""

    __slots__ = ()

    def check(self, *, num_drafts: int, passages_per_draft: int) -> None:
        """Accept everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByCluster(_AnyNumbers):
    """A whole cluster for each draft, so `num_drafts` clusters; their sizes vary.

    The paper measured this to lose 2 points against one passage of each cluster (its table 3); it
    suits corpora whose clusters are topics.
    """

    seed: int = 0
    needs_vectors = True

    def __post_init__(self) -> None:
        _check_seed(self.seed)

    def partition(
        self,
        count: int,
        vectors: Vectors | None,
        *,
        num_drafts: int,
        passages_per_draft: int,  # noqa: ARG002 - the clusters decide
    ) -> list[Ranks]:
        """Return the clusters, the one with the top-ranked passage first."""
        if vectors is None:
            return [tuple(range(count))]
        return sorted(tuple(cluster) for cluster in _clusters(vectors, num_drafts, self.seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Disjoint(_AnyNumbers):
    """Subsets that share no passage, so that one poisoned passage reaches one draft only."""

    needs_vectors = False

    def partition(
        self,
        count: int,
        vectors: Vectors | None,  # noqa: ARG002 - the ranks suffice
        *,
        num_drafts: int,
        passages_per_draft: int,
    ) -> list[Ranks]:
        """Deal the best-ranked passages out in turn, as long as they last."""
        used = min(count, num_drafts * passages_per_draft)
        drafts = min(num_drafts, used)
        return [tuple(range(first, used, drafts)) for first in range(drafts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStratified(_AnyNumbers):
    """One passage of each of `passages_per_draft` bands of the ranking."""

    seed: int = 0
    needs_vectors = False

    def __post_init__(self) -> None:
        _check_seed(self.seed)

    def partition(
        self,
        count: int,
        vectors: Vectors | None,  # noqa: ARG002 - the ranks suffice
        *,
        num_drafts: int,
        passages_per_draft: int,
    ) -> list[Ranks]:
        """Cut the ranking into bands of equal size, then draw unique subsets across them."""
        bands = _bands(range(count), min(passages_per_draft, count))
        return [tuple(sorted(places)) for places in _draw(bands, num_drafts, self.seed)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Random(_AnyNumbers):
    """Unique random subsets: the paper's ablation, and a baseline for the others."""

    seed: int = 0
    needs_vectors = False

    def __post_init__(self) -> None:
        _check_seed(self.seed)

    def partition(
        self,
        count: int,
        vectors: Vectors | None,  # noqa: ARG002 - chance suffices
        *,
        num_drafts: int,
        passages_per_draft: int,
    ) -> list[Ranks]:
        """Draw until there are enough, or all subsets there are."""
        size = min(passages_per_draft, count)
        wanted = min(num_drafts, math.comb(count, size))
        rng = random.Random(self.seed)  # noqa: S311 - reproducible sampling, no secret
        drawn: dict[Ranks, None] = {}
        while len(drawn) < wanted:
            drawn[tuple(sorted(rng.sample(range(count), size)))] = None
        return list(drawn)


async def make_subsets(
    passages: Sequence[Passage],
    question: str,
    *,
    partitioner: Partitioner,
    num_drafts: int,
    passages_per_draft: int,
    embedder: Embedder | None = None,
) -> Partition:
    """Choose the subsets of a question's passages, off the caller's loop.

    Vectors are the passages' own where all have one; else the embedder's for all; else TF-IDF over
    character n-grams, which needs no model and works in every script.

    Raises:
        ConfigurationError: the embedder returned something that is not one row per passage, or the
            partitioner broke its promise.
    """
    notes: list[str] = []
    vectors: Vectors | None = None
    if partitioner.needs_vectors and len(passages) > 1:
        embedded = await _embedded(passages, question, embedder)
        vectors = await asyncio.to_thread(_vectors, passages, embedded, notes)
    found = await asyncio.to_thread(
        partitioner.partition,
        len(passages),
        vectors,
        num_drafts=num_drafts,
        passages_per_draft=passages_per_draft,
    )
    found = _checked(found, len(passages), num_drafts, partitioner)
    if len(found) < num_drafts:
        notes.append(
            f"{len(found)} of {num_drafts} drafts: {type(partitioner).__name__} finds no more "
            f"different subsets of the {len(passages)} usable passages"
        )
    subsets = (
        Subset(index=index, ranks=ranks, passages=tuple(passages[rank] for rank in ranks))
        for index, ranks in enumerate(found)
    )
    return Partition(subsets=tuple(subsets), notes=tuple(notes))


async def _embedded(
    passages: Sequence[Passage], question: str, embedder: Embedder | None
) -> ArrayLike | None:
    """Return the vectors that passages or embedder bring, unchecked; None if there are none."""
    own = [passage.embedding for passage in passages if passage.embedding is not None]
    if len(own) == len(passages):
        return own
    if embedder is None:
        return None
    texts = [
        f"{passage.title}\n{passage.text}" if passage.title else passage.text
        for passage in passages
    ]
    if inspect.iscoroutinefunction(embedder) or inspect.iscoroutinefunction(
        getattr(embedder, "__call__", None)  # noqa: B004 - an object with an async __call__
    ):
        result: Any = embedder(texts, question)
    else:
        result = await asyncio.to_thread(embedder, texts, question)
    vectors: ArrayLike | None = await result if inspect.isawaitable(result) else result
    return [] if vectors is None else vectors


def _vectors(passages: Sequence[Passage], embedded: ArrayLike | None, notes: list[str]) -> Vectors:
    """Return unit rows; TF-IDF where there is nothing better, or nothing finite."""
    import numpy as np

    if embedded is None:
        lacking = sum(passage.embedding is None for passage in passages)
        if lacking < len(passages):
            notes.append(
                f"{lacking} of {len(passages)} passages lack an embedding: clustered by TF-IDF"
            )
    else:
        try:
            array = np.asarray(embedded, dtype=np.float64)
        except (TypeError, ValueError):
            array, got = np.empty(0), _unusual(embedded)
        else:
            got = f"shape {array.shape}"
        if array.ndim != 2 or len(array) != len(passages) or not array.shape[1]:  # noqa: PLR2004
            raise ConfigurationError(
                f"the embeddings of {len(passages)} passages must be one array of shape "
                f"({len(passages)}, d); got {got}"
            )
        if np.isfinite(array).all():
            return _unit_rows(array)
        bad = [
            f"passage {row} {passages[row].label}"
            for row in map(int, np.flatnonzero(~np.isfinite(array).all(axis=1)))
        ]
        notes.append(f"embeddings not finite ({', '.join(bad)}): clustered by TF-IDF instead")
    return _unit_rows(_tfidf([f"{passage.title or ''} {passage.text}" for passage in passages]))


def _unusual(embedded: object) -> str:
    """Say what is wrong with vectors that make no array."""
    rows = embedded if isinstance(embedded, Iterable) else ()
    lengths = sorted({len(row) for row in rows if isinstance(row, Sized)})
    if len(lengths) > 1:
        return f"rows that differ in length: {', '.join(map(str, lengths))}"
    return "what is no array of numbers"


def _tfidf(texts: Sequence[str]) -> Vectors:
    import numpy as np
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True)
    return np.asarray(vectorizer.fit_transform(texts).toarray(), dtype=np.float64)


def _unit_rows(array: Vectors) -> Vectors:
    """Scale rows to length 1, so that k-means groups by direction; zero rows stay zero."""
    import numpy as np

    # By the largest number first: the squares of very large and very small ones leave the range.
    array = _divided(array, np.abs(array).max(axis=1, keepdims=True))
    return _divided(array, np.linalg.norm(array, axis=1, keepdims=True))


def _divided(array: Vectors, by: Vectors) -> Vectors:
    import numpy as np

    quotients: Vectors = np.divide(array, by, out=np.zeros_like(array), where=by > 0)
    return quotients


def _clusters(vectors: Vectors, wanted: int, seed: int) -> list[list[int]]:
    """Return min(wanted, n) non-empty clusters of row numbers, each ascending.

    Equal rows cannot be told apart by content; where that leaves too few clusters, the largest is
    split by rank, so that equal or nearly equal passages still make different subsets.
    """
    import numpy as np
    from sklearn.cluster import KMeans

    wanted = min(wanted, len(vectors))
    distinct = min(wanted, len(np.unique(vectors.round(9), axis=0)))
    labels = np.zeros(len(vectors), dtype=int)
    if distinct > 1:
        kmeans = KMeans(n_clusters=distinct, n_init=_KMEANS_STARTS, random_state=seed)
        labels = kmeans.fit(vectors).labels_
    clusters = [np.flatnonzero(labels == label).tolist() for label in np.unique(labels)]
    while len(clusters) < wanted:
        clusters.sort(key=len)
        clusters += _bands(clusters.pop(), 2)
    return sorted(clusters)


def _bands(places: Sequence[int], count: int) -> list[list[int]]:
    """Cut a sequence into `count` runs whose lengths differ by at most one."""
    edges = [len(places) * band // count for band in range(count + 1)]
    return [list(places[low:high]) for low, high in itertools.pairwise(edges)]


def _draw(groups: Sequence[Sequence[int]], wanted: int, seed: int) -> Iterable[list[int]]:
    """Draw different combinations with one member of each group.

    The first holds each group's best-ranked member, so that the top-ranked passage is always read;
    the others are equally likely. A combination is a number written with one digit per group, so
    that drawing without replacement is drawing distinct numbers: it ends, however few there are.
    """
    total = math.prod(len(group) for group in groups)
    rng = random.Random(seed)  # noqa: S311 - reproducible sampling, no secret
    # `range` cannot be sampled beyond this; nobody will miss the combinations above it.
    others = rng.sample(range(1, min(total, 2**62)), min(wanted, total) - 1)
    for number in [0, *others]:
        members, left = [], number
        for group in groups:
            left, digit = divmod(left, len(group))
            members.append(group[digit])
        yield members


def _checked(
    found: Iterable[Iterable[int]], count: int, num_drafts: int, partitioner: Partitioner
) -> list[Ranks]:
    """Return what a partitioner found, in rank order, if it kept its promise."""
    try:
        ranks = [tuple(sorted(map(operator.index, subset))) for subset in found]
    except TypeError:
        ranks = []
    kept = all(r and len(set(r)) == len(r) and r[0] >= 0 and r[-1] < count for r in ranks)
    if not (kept and 1 <= len(ranks) <= num_drafts and len(set(ranks)) == len(ranks)):
        raise ConfigurationError(
            f"{type(partitioner).__name__}.partition must return 1 to {num_drafts} different "
            f"non-empty subsets of the ranks 0 to {count - 1}; got {found!r}"
        )
    return ranks
