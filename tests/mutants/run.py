# ruff: noqa: T201 - a runner prints
"""Put each listed defect into a copy of the package and see that a test fails.

A mutant is killed when pytest reports a failed test (exit code 1). Anything else pytest may say, a
text that is not found exactly once, and a test that fails on the unchanged package are errors.
A mutant that was not killed is tried once more, alone: a defect that shows by chance, such as a
race, may stay hidden in one run, and is told apart from one that no test notices.

    python tests/mutants/run.py [part of a name …]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "specrag_integrations"
PROCESSES = 2
SECONDS = 120
FAILED = 1  # pytest's exit code where tests were run and some failed


class BrokenMutantError(Exception):
    """A mutant that says nothing: it cannot be made, or its tests cannot be run."""


def run_tests(place: Path, tests: Iterable[str]) -> tuple[int, str]:
    """Run tests against the package in `place`; return pytest's exit code and output."""
    files = [
        f"tests/test_{name}.py{colons}{test and 'test_'}{test}"
        for name, colons, test in (one.partition("::") for one in tests)
    ]
    # -P: the current folder holds the unchanged package, and must not come first.
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:nbmake",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(place),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(place / "hypothesis"),
    }
    done = subprocess.run(
        [*command, f"--timeout={SECONDS}", *files],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def copied(into: Path) -> Path:
    """Copy the package into a folder."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / PACKAGE, into / PACKAGE, ignore=ignore)
    return into


def apply(mutant: Mutant, place: Path) -> None:
    """Change the copy in `place`."""
    path = place / PACKAGE / mutant.file
    text = path.read_text()
    for old, new in mutant.edits:
        if text.count(old) != 1:
            raise BrokenMutantError(f"{mutant.file} holds {text.count(old)} times: {old!r}")
        text = text.replace(old, new)
    compile(text, mutant.file, "exec")
    path.write_text(text)


def killed(mutant: Mutant) -> tuple[bool, str]:
    """Return whether a test noticed, and the line to print."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            place = copied(Path(folder))
            apply(mutant, place)
            code, said = run_tests(place, mutant.tests.split())
        except (BrokenMutantError, SyntaxError) as error:
            return False, f"ERROR     {mutant.name}: {error}"
    seconds = f"{time.perf_counter() - started:4.1f} s"
    what = f"{seconds}  {mutant.file:<13} [{mutant.origin}] {mutant.name}"
    if code == FAILED:
        return True, f"killed    {what}"
    if code == 0:
        return False, f"SURVIVED  {what}: {said.strip().splitlines()[-1]}"
    return False, f"ERROR     {what}: pytest ended with {code}\n{said[-2000:]}"


def unchanged_passes(mutants: Sequence[Mutant]) -> bool:
    """See that the tests pass on an unchanged copy, and that it is the copy they read."""
    names = {name for one in mutants for name in one.tests.split()}
    tests = sorted(name for name in names if name.partition("::")[0] not in names - {name})
    with tempfile.TemporaryDirectory() as folder:
        place = copied(Path(folder))
        show = f"import {PACKAGE}; print({PACKAGE}.__file__)"
        read = subprocess.run(
            [sys.executable, "-P", "-c", show],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(place)},
            capture_output=True,
            text=True,
            check=True,
        )
        if not Path(read.stdout.strip()).resolve().is_relative_to(place.resolve()):
            print(f"the tests would read {read.stdout.strip()} instead of a copy")
            return False
        halves = tests[::2], tests[1::2]
        with ThreadPoolExecutor(PROCESSES) as pool:
            for code, said in pool.map(lambda half: run_tests(place, half), filter(None, halves)):
                if code != 0:
                    print(f"the unchanged package fails its tests ({code})\n{said[-4000:]}")
                    return False
    return True


def main(parts: Sequence[str]) -> int:
    """Run the mutants, or those whose name holds one of `parts`."""
    mutants = [one for one in MUTANTS if not parts or any(part in one.name for part in parts)]
    if len({mutant.name for mutant in mutants}) != len(mutants) or not mutants:
        print("no such mutant, or two of one name")
        return 2
    if not unchanged_passes(mutants):
        return 2
    doubtful = []
    with ThreadPoolExecutor(PROCESSES) as pool:
        for mutant, (dead, line) in zip(mutants, pool.map(killed, mutants), strict=True):
            print(line, flush=True)
            if not dead:
                doubtful.append((mutant, line))
    alive = 0
    for mutant, first in doubtful:  # at the end, where a log that is cut still shows it
        dead, second = killed(mutant)
        alive += not dead
        print(f"tried twice:\n  {first}\n  {second}", flush=True)
    print(f"{len(mutants) - alive}/{len(mutants)} killed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
