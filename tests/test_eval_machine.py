"""The commit that a run was made with."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from specrag_integrations.evaluation import machine

PROJECT = '[project]\nname = "specrag-integrations"\n'


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder, as somebody."""
    somebody = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    command = ["git", "-C", str(folder), *somebody, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def committed(folder: Path) -> str:
    """Commit all there is in a repository, and return the commit."""
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "Something")
    return git(folder, "rev-parse", "--short", "HEAD")


def installed(folder: Path) -> Path:
    """Put what tells the commit into a folder, as a part of the package."""
    package = folder / "specrag_integrations"
    (package / "evaluation").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copy(machine.__file__, package / "evaluation" / "machine.py")
    return package


def told_by(package: Path) -> str | None:
    """Return the commit that a package says it is run from."""
    found: str | None = runpy.run_path(str(package / "evaluation" / "machine.py"))["commit"]()
    return found


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout of the project."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    installed(tmp_path)
    committed(tmp_path)
    return tmp_path


def test_the_commit_is_that_of_the_checkout(checkout: Path) -> None:
    """Whatever folder the last commit has changed, it is the one that is run."""
    (checkout / "specrag_integrations" / "pipeline.py").write_text("")
    last = committed(checkout)
    assert told_by(checkout / "specrag_integrations") == last


@pytest.mark.parametrize("changed", ["__init__.py", "new.py"])
def test_a_package_that_differs_from_the_commit_says_so(checkout: Path, changed: str) -> None:
    """A changed file or one more of the package is told of; others are not run."""
    package, last = checkout / "specrag_integrations", git(checkout, "rev-parse", "--short", "HEAD")
    (checkout / "pyproject.toml").write_text(f"{PROJECT}# changed\n")
    assert told_by(package) == last
    (package / changed).write_text("changed = True\n")
    assert told_by(package) == f"{last}+changes"


@pytest.mark.parametrize("place", [".venv/lib/site-packages", "vendor", "."])
def test_a_package_in_a_repository_of_somebody_else_s_has_no_commit(
    tmp_path: Path, place: str
) -> None:
    """Neither where that repository ignores it nor where it keeps a copy."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "somebody-else-s"\n')
    (tmp_path / ".gitignore").write_text(".venv\n")
    package = installed(tmp_path / place)
    committed(tmp_path)
    assert told_by(package) is None


def test_a_package_installed_beside_the_checkout_has_no_commit(checkout: Path) -> None:
    """What is installed into an environment there need not be what is checked out."""
    assert told_by(installed(checkout / ".venv" / "lib")) is None


def test_without_a_repository_there_is_no_commit(tmp_path: Path) -> None:
    """Such as one that pip installed."""
    assert told_by(installed(tmp_path)) is None
