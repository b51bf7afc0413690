"""The machine and the code a run was made with."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PROJECT = 'name = "specrag-integrations"'
"""What the `pyproject.toml` of a checkout says."""


def commit() -> str | None:
    """Return the commit of the checkout of this project that the package is run from.

    It ends in `+changes` where the files of the package are others. Installed elsewhere, be it in a
    repository of somebody else's, the package has none.
    """
    package = Path(__file__).resolve().parents[1]
    top = _git(package, "rev-parse", "--show-toplevel")
    if not top or Path(top) != package.parent or not _is_ours(package.parent):
        return None
    head = _git(package, "rev-parse", "--short", "HEAD")
    changes = _git(package, "status", "--porcelain", "--", ".")
    if not head or changes is None:
        return None
    return f"{head}+changes" if changes else head


def _is_ours(folder: Path) -> bool:
    try:
        return _PROJECT in (folder / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git says of a folder; None where it fails, or is not there."""
    try:
        told = subprocess.run(  # noqa: S603 - no part of it comes from outside
            ["git", "-C", str(folder), *arguments],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return told.stdout.strip() if told.returncode == 0 else None


def machine() -> dict[str, Any]:
    """Return what this machine is: its processor, memory in GB, system and Python."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gb": _memory_gb(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (AttributeError, ValueError, OSError):
        return None
