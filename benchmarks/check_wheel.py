"""Check the installed wheel: what it holds, what it imports, and what it says without extras.

Run in an environment that holds the wheel alone: python -I benchmarks/check_wheel.py
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Fail with the first thing that is wrong."""
    files = {str(path) for path in importlib.metadata.files("specrag-integrations") or []}
    for wanted in ("py.typed", "corpus/questions.jsonl", "local/calibration.json"):
        check(f"specrag_integrations/{wanted}" in files, f"the wheel lacks {wanted}")
    check(not any("mirror" in name for name in files), "the wheel holds the weights mirror")
    check(not any(name.startswith(("tests", "docs")) for name in files), "the wheel holds tests")

    specrag = Path(sys.executable).parent / "specrag"
    version = subprocess.run([specrag, "--version"], capture_output=True, text=True, check=True)
    check(
        importlib.metadata.version("specrag-integrations") in version.stdout,
        f"specrag --version says {version.stdout!r}",
    )
    demo = subprocess.run([specrag, "demo"], capture_output=True, text=True, check=False)
    check(demo.returncode == 1, f"specrag demo without extras ended with {demo.returncode}")
    check("specrag-integrations[local]" in demo.stderr, f"the extra is not named: {demo.stderr}")
    print("the wheel is whole, and says which extra is missing")


def check(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - a check is a boolean
    """Exit with a line where something does not hold."""
    if not holds:
        sys.exit(otherwise)


if __name__ == "__main__":
    main()
