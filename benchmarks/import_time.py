"""Print what importing the package costs in CPU, beside what importing asyncio costs.

Run: python benchmarks/import_time.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys

PROBE = "import time; {}; print(time.process_time())"
RUNS = 11
IMPORTS = {
    "nothing": "pass",
    "asyncio": "import asyncio",
    "specrag_integrations": "from specrag_integrations import SpeculativeRAG, Endpoint, Passage",
}


def milliseconds(statement: str) -> float:
    """Return the median CPU time of fresh interpreters that run the statement."""
    times = [
        float(subprocess.check_output([sys.executable, "-c", PROBE.format(statement)]))
        for _ in range(RUNS)
    ]
    return statistics.median(times) * 1000


def main() -> None:
    """Measure and print."""
    measured = {name: milliseconds(statement) for name, statement in IMPORTS.items()}
    for name, value in measured.items():
        print(f"{name:24}{value:7.1f} ms CPU (median of {RUNS})")
    above = measured["specrag_integrations"] - measured["asyncio"]
    print(f"specrag_integrations costs {above:.1f} ms above asyncio (aim: at most 60)")


if __name__ == "__main__":
    main()
