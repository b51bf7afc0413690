"""Print how often the interval of a paired difference holds the true one, and a plain bootstrap's.

Exact over the samples: every outcome of n questions counts by its probability. The true chances of
a win and of a loss run from 0 to 60 %; at worst and on average over them is what is printed.
"""

from itertools import product

import numpy as np
from scipy.stats import multinomial

from specrag_integrations.evaluation.intervals import paired_difference

SIZES = (5, 8, 10, 15, 20, 30)
CHANCES = [step / 20 for step in range(13)]
RESAMPLES = 2000
EDGE = 1e-12  # an end that is the truth holds it


def ends(wins: int, losses: int, n: int, rng: np.random.Generator) -> tuple[float, ...]:
    """Return both ends of our interval, then of a plain bootstrap's."""
    differences = np.repeat([1.0, -1.0, 0.0], [wins, losses, n - wins - losses])
    ours = paired_difference(np.maximum(differences, 0), np.maximum(-differences, 0))
    means = differences[rng.integers(0, n, (RESAMPLES, n))].mean(axis=1)
    return (ours.interval.low, ours.interval.high, *np.quantile(means, [0.025, 0.975]))


def coverages(n: int, rng: np.random.Generator) -> np.ndarray:
    """Return (ours, plain) for each pair of true chances."""
    outcomes = [pair for pair in product(range(n + 1), repeat=2) if sum(pair) <= n]
    found = np.array([ends(wins, losses, n, rng) for wins, losses in outcomes])
    counts = [(wins, losses, n - wins - losses) for wins, losses in outcomes]
    rows = []
    for win, loss in product(CHANCES, repeat=2):
        if not 0 < win + loss <= 1:
            continue
        chances = multinomial.pmf(counts, n, [win, loss, max(0.0, 1 - win - loss)])
        truth = win - loss
        lows, highs = found[:, [0, 2]] - EDGE, found[:, [1, 3]] + EDGE
        rows.append(chances @ ((lows <= truth) & (truth <= highs)))
    return np.array(rows)


def main() -> None:
    """Print a line for each number of questions, and one for all."""
    rng = np.random.default_rng(0)
    by_size = {n: coverages(n, rng) for n in SIZES}
    print("Coverage of 95 % intervals        ours: worst  mean   plain bootstrap: worst  mean")
    for name, found in [*by_size.items(), ("all", np.concatenate(list(by_size.values())))]:
        (worst, plain_worst), (mean, plain_mean) = found.min(axis=0), found.mean(axis=0)
        told = f"{name!s:>4} questions"
        print(f"{told:<32}{worst:13.3f} {mean:5.3f} {plain_worst:23.3f} {plain_mean:5.3f}")


if __name__ == "__main__":
    main()
