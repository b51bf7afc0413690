"""Sittings: a run that was stopped goes on later, maybe by other code or on another machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from specrag_integrations.evaluation.machine import commit, machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Sitting:
    """When, by what and on what a part of a run was answered, from its start to its end."""

    seed: int
    servers: Mapping[str, str | None] = field(default_factory=dict)
    """By role: what its server says of itself."""
    made: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    command: str = ""
    version: str = field(default_factory=lambda: version("specrag-integrations"))
    commit: str | None = field(default_factory=commit)
    machine: Mapping[str, Any] = field(default_factory=machine)


def mixed_times(sittings: Sequence[Sitting]) -> str | None:
    """Say in what the sittings differ that some times come from; None where they are alike."""
    known = {"machines": [_processor(one.machine) for one in sittings]}
    for role in ("drafter", "verifier"):
        known[f"servers of the {role}"] = [one.servers.get(role) for one in sittings]
    mixed = []
    for what, told in known.items():
        unlike = [words for words in dict.fromkeys(told) if words]
        if len(unlike) > 1:
            mixed.append(f"{len(unlike)} {what} ({'; '.join(unlike)})")
    if not mixed:
        return None
    return (
        f"The times come from {', and from '.join(mixed)}: measure them anew, with --fresh and an "
        "--out of its own."
    )


def shared_prompts(models: Mapping[str, Mapping[str, Any]], timed: Iterable[str]) -> str | None:
    """Say that two systems' times are no comparison; None where nothing is known against them.

    With one model in both roles the drafter alone is asked the very prompt of standard RAG, and
    whoever comes second finds it in the server's prefix cache.
    """
    drafter, verifier = (models.get(role, {}).get("identity") for role in ("drafter", "verifier"))
    if drafter is None or drafter != verifier or not {"drafter_only", "standard"} <= set(timed):
        return None
    return (
        "One model has both roles, and standard and drafter_only send it the same prompts, which "
        "its server remembers: their times, and the speed-ups, say nothing. Leave drafter_only out."
    )


def _processor(machine: Mapping[str, Any]) -> str | None:
    known = [(machine.get("cpu"), ""), (machine.get("cores"), " cores")]
    return ", ".join(f"{value}{unit}" for value, unit in known if value) or None
