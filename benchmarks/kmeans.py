"""Print what k-means spends on the passages of a question, by its number of starts.

Run: python benchmarks/kmeans.py
"""

from __future__ import annotations

import statistics
import time

from sklearn.cluster import KMeans

from specrag_integrations.corpus import questions
from specrag_integrations.subsets import _vectors

STARTS = (1, 2, 4, 10)
CLUSTERS = 3
ROUNDS = 5


def main() -> None:
    """Cluster the bundled questions' passages and print times and inertias."""
    vectors = [_vectors(row.passages, None, []) for row in questions()]
    for starts in STARTS:
        times, inertias = [], []
        for _ in range(ROUNDS):
            for array in vectors:
                began = time.perf_counter()
                kmeans = KMeans(CLUSTERS, n_init=starts, random_state=0).fit(array)
                times.append(time.perf_counter() - began)
                inertias.append(kmeans.inertia_)
        print(
            f"{starts:3} starts: {statistics.median(times) * 1000:5.2f} ms a question (median), "
            f"mean inertia {statistics.mean(inertias):.4f}"
        )


if __name__ == "__main__":
    main()
