"""Report: the page that shows what an evaluation found, one file without scripts or requests.

Texts of questions, passages and models are untrusted: they are escaped and cannot turn the
direction of what stands beside them, and a policy in the page forbids scripts and requests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from specrag_integrations.errors import MissingDependencyError
from specrag_integrations.evaluation import estimates, figures
from specrag_integrations.evaluation.estimates import Estimate
from specrag_integrations.evaluation.figures import Figure
from specrag_integrations.evaluation.ragas import CAUTION

_TEMPLATE = "report.html.j2"
_STANDARD = "standard"
_SURE = 0.001
"""p-values below are written as such."""
_UNREADABLE = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)
"""What a page of UTF-8 may not hold, though JSON may, and what turns the direction of text."""

# A summary, with what each part holds where a run left it out. A list holds any number of what is
# in it, a tuple one or None: None then says that it was not measured.
_ESTIMATE = (None,)
_TIMING = ({"p50": None, "p95": None, "n": None},)
_TOKENS = {"prompt": None, "completion": None}
_TESTED = ({"value": None, "low": None, "high": None, "n": None, "p": None},)
_MODEL = ({"name": "unnamed model", "server": None, "where": None},)
_SWEPT = [{"value": None, "system": "unnamed", "accuracy": _ESTIMATE, "seconds": None}]
_SITTING: dict[str, Any] = {
    "version": "",
    "made": "",
    "commit": None,
    "seed": None,
    "command": "",
    "machine": {"cpu": None, "cores": None, "memory_gb": None, "system": None, "python": None},
    "servers": {"drafter": None, "verifier": None},
}
_SUMMARY: dict[str, Any] = {
    **_SITTING,
    "sittings": [_SITTING],
    "mixed_times": None,
    "shared_prompts": None,
    "models": {"drafter": _MODEL, "verifier": _MODEL},
    "judge": _MODEL,
    "datasets": [
        {
            "name": "unnamed",
            "kind": "short",
            "questions": None,
            "passages": None,
            "majority": ({"label": "", "share": None},),
            "unanswerable": 0,
        }
    ],
    "systems": [
        {
            "name": "unnamed",
            "description": "",
            "bound": False,
            "questions": None,
            "errors": 0,
            "accuracy": _ESTIMATE,
            "exact": _ESTIMATE,
            "f1": _ESTIMATE,
            "words": None,
            "abstained": None,
            "abstained_rightly": _ESTIMATE,
            "abstained_wrongly": _ESTIMATE,
            "fallback": None,
            "citation_precision": _ESTIMATE,
            "faithfulness": _ESTIMATE,
            "factual_correctness": _ESTIMATE,
            "first_token": _TIMING,
            "total": _TIMING,
            "stages": (None,),
            "tokens": {"drafter": _TOKENS, "verifier": _TOKENS},
            "decoded_by_drafter": None,
            "cost": ({"value": None, "currency": "$", "per": 1000},),
            "against_standard": (
                {
                    "difference": _ESTIMATE,
                    "wins": None,
                    "losses": None,
                    "ties": None,
                    "p": None,
                    "verdict": None,
                    "questions_needed": None,
                    "speedup": _ESTIMATE,
                    "verifier_tokens": None,
                    "exact": _TESTED,
                    "f1": _TESTED,
                    "citation_precision": _TESTED,
                    "words": _TESTED,
                    "faithfulness": _TESTED,
                    "factual_correctness": _TESTED,
                },
            ),
            "by_dataset": [{"dataset": "unnamed", "accuracy": _ESTIMATE, "difference": _TESTED}],
        }
    ],
    "selection": [
        {
            "system": "unnamed",
            "labels": False,
            "questions": None,
            "contested": None,
            "mean": None,
            "selected": None,
            "oracle": None,
            "efficiency": _ESTIMATE,
        }
    ],
    "risk_coverage": [
        {
            "system": "unnamed",
            "n": None,
            "questions": None,
            "points": [{"coverage": None, "risk": None}],
        }
    ],
    "reliability": [
        {
            "system": "unnamed",
            "n": None,
            "questions": None,
            "bins": [{"confidence": None, "right": None, "low": None, "high": None, "n": None}],
            "brier": None,
            "ece": None,
        }
    ],
    "sweeps": {"m": _SWEPT, "k": _SWEPT},
    "failures": [
        {
            "dataset": "unnamed",
            "id": "",
            "question": "",
            "answers": [""],
            "why": "",
            "answered": [{"system": "unnamed", "text": "", "right": None}],
            "drafts": [
                {
                    "index": None,
                    "answer": "",
                    "ranks": [None],
                    "value": None,
                    "right": None,
                    "selected": False,
                }
            ],
        }
    ],
    "recommendation": "",
}

_KINDS = {"short": "short answers", "label": "labels", "long": "long answers"}
_VERDICTS = {
    "better": "better",
    "worse": "worse",
    "as_good": "as good",
    "inconclusive": "inconclusive",
}
_SWEEPS = {"m": "number of drafts", "k": "passages per draft"}


def check_template() -> None:
    """Find out before a long run that its report can be written.

    Raises:
        MissingDependencyError: jinja2 is not installed.
    """
    try:
        import jinja2  # noqa: F401 - finding it is the point
    except ImportError:
        raise MissingDependencyError("jinja2", "eval") from None


def report_html(summary: Mapping[str, Any]) -> str:
    """Return the page of a `summary.json`; parts that a run did not have are named, not blank.

    Raises:
        MissingDependencyError: jinja2 is not installed.
    """
    check_template()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        between=estimates.between,
        count=estimates.count,
        estimate=Estimate.read,
        number=estimates.number,
        percent=estimates.percent,
        points=estimates.points,
        seconds=estimates.seconds,
        times=estimates.times,
    )
    environment.globals.update(
        number=estimates.number,
        p_value=_p_value,
        percent=estimates.percent,
        points=estimates.points,
        times=estimates.times,
        no_timing=estimates.NO_TIMING,
    )
    found = _complete(_SUMMARY, _clean(summary))
    return environment.get_template(_TEMPLATE).render(_page(found))


# ------------------------------------------------------------------------ a whole summary


def _complete(shape: Any, found: Any) -> Any:
    """Return what was found in the whole shape of a summary, so that no part is missing."""
    if isinstance(shape, tuple):
        return None if found is None else _complete(shape[0], found)
    if isinstance(shape, list):
        return [_complete(shape[0], one) for one in found or ()]
    if isinstance(shape, dict):
        return {name: _complete(inner, (found or {}).get(name)) for name, inner in shape.items()}
    return shape if found is None else found


def _clean(value: Any) -> Any:
    """Return the value without numbers that are none and characters that no page may hold."""
    if isinstance(value, str):
        return _UNREADABLE.sub("\ufffd", value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_clean(name): _clean(inner) for name, inner in value.items()}
    if isinstance(value, Sequence):
        return [_clean(inner) for inner in value]
    return value


# ------------------------------------------------------------------------------- the page


def _page(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the template shows: the summary, its figures, and words for both."""
    systems = found["systems"]
    standard = next((one for one in systems if one["name"] == _STANDARD), None)
    reference = standard["accuracy"] if standard else None
    sections = _sections(found)
    return {
        "summary": found,
        "made": _date(found["made"]),
        "facts": _facts(found),
        "kinds": _KINDS,
        "standard": standard,
        "verdict": _verdict,
        "sign_test": _sign_test,
        "strip": lambda system: figures.strip(system["accuracy"], reference),
        "shown": {
            name: any(one[name] is not None for one in systems) for name in _SUMMARY["systems"][0]
        },
        "costs": _costs(systems),
        "judged": [one for one in systems if one["faithfulness"] or one["factual_correctness"]],
        "caution": CAUTION,
        "of_dataset": _of_dataset,
        "sections": sections,
        "missing": _missing(found, sections),
    }


def _sections(found: Mapping[str, Any]) -> dict[str, list[Figure]]:
    """Return the charts of each section; none where the run has no numbers for it."""
    systems = found["systems"]
    made: dict[str, list[Figure | None]] = {
        "frontier": [figures.frontier(systems)],
        "selection": [
            figures.selection(
                [row for row in found["selection"] if bool(row["labels"]) is labels],
                name=name,
                title=title,
            )
            for labels, name, title in (
                (False, "selection", "Short answers"),
                (True, "selection-labels", "Sets of labels"),
            )
        ],
        "risk": [figures.risk_coverage(found["risk_coverage"])],
        "reliability": [
            figures.reliability(one, name=f"reliability-{index}")
            for index, one in enumerate(found["reliability"])
        ],
        "sweeps": [
            figures.sweep(found["sweeps"].get(letter, []), letter=letter, meaning=meaning)
            for letter, meaning in _SWEEPS.items()
        ],
        "stages": [figures.stages(systems)],
    }
    return {name: [one for one in drawn if one is not None] for name, drawn in made.items()}


def _missing(found: Mapping[str, Any], sections: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the parts this run cannot show, each with its reason."""
    reasons = {
        "frontier": ("Accuracy against time", f"{estimates.NO_TIMING} of a graded system."),
        "selection": ("Selection", "no system wrote drafts that were graded."),
        "risk": ("Risk against coverage", "too few graded answers with a confidence."),
        "reliability": (
            "Reliability",
            "too few graded answers with a confidence; specrag calibrate makes one.",
        ),
        "sweeps": ("Numbers of drafts and passages", "the run had one setting only."),
        "stages": ("Where the time goes", f"{estimates.NO_TIMING} of any stage."),
    }
    missing = [reason for name, reason in reasons.items() if not sections[name]]
    if not found["failures"]:
        missing.append(("Failures", "none were picked out."))
    if not any(system["cost"] for system in found["systems"]):
        missing.append(("Costs", "no prices were given."))
    if not any(one["faithfulness"] or one["factual_correctness"] for one in found["systems"]):
        missing.append(("Judgements", "no judge was named; specrag eval takes one by --judge."))
    return missing


def _date(made: str) -> str:
    try:
        when = datetime.fromisoformat(made)
    except ValueError:
        return made or "date unknown"
    return f"{when.day} {when:%B %Y, %H:%M %Z}".strip()


def _facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what was run, where and when: what somebody needs who wants to run it again."""
    models = found["models"].items()
    facts = [(role.capitalize(), _model(model)) for role, model in models if model]
    if found["judge"]:
        facts.append(("Judge", _model(found["judge"])))
    facts += [("Questions", _questions(found["datasets"])), ("Machine", _machine(found["machine"]))]
    if found["seed"] is not None:
        facts.append(("Seed", str(found["seed"])))
    facts += [("Made", _date(found["made"])), ("By", _code(found))]
    if found["command"]:
        facts.append(("Command", found["command"]))
    return [*facts, *(("Went on", told) for told in _later(found["sittings"]))]


def _later(sittings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Tell of each sitting after the first when it was, and what was not as in the first."""
    for sitting in sittings[1:]:
        both = zip(_setting(sitting), _setting(sittings[0]), strict=True)
        other = [words for words, before in both if words != before]
        yield "; ".join([_date(sitting["made"]), *(other or ["all else as before"])])


def _setting(sitting: Mapping[str, Any]) -> list[str]:
    servers = sitting["servers"]
    return [
        _machine(sitting["machine"]),
        *(f"{role} {servers[role] or 'server version unknown'}" for role in servers),
        f"seed {sitting['seed']}",
        _code(sitting),
    ]


def _code(sitting: Mapping[str, Any]) -> str:
    version = " ".join(part for part in ("specrag-integrations", sitting["version"]) if part)
    return f"{version}, commit {sitting['commit'] or 'unknown'}"


def _model(model: Mapping[str, Any]) -> str:
    return ", ".join(
        (model["name"], model["server"] or "server version unknown", model["where"] or "")
    ).strip(", ")


def _questions(datasets: Sequence[Mapping[str, Any]]) -> str:
    named = [
        f"{estimates.listed([one['name']])} {estimates.count(one['questions'])}" for one in datasets
    ]
    return ", ".join(named) or "none"


def _machine(machine: Mapping[str, Any]) -> str:
    parts = [
        machine["cpu"],
        f"{machine['cores']} cores" if machine["cores"] else None,
        f"{estimates.number(machine['memory_gb'], 0)} GB" if machine["memory_gb"] else None,
        machine["system"],
        f"Python {machine['python']}" if machine["python"] else None,
    ]
    return ", ".join(part for part in parts if part) or "unknown"


def _verdict(against: Mapping[str, Any]) -> str:
    """Return the comparison with standard RAG in words, and what would settle an open one."""
    words = _VERDICTS.get(against["verdict"], "no verdict")
    needed = against["questions_needed"]
    if against["verdict"] == "inconclusive" and needed:
        return f"{words}; about {estimates.count(needed)} questions would settle it"
    return words


def _sign_test(against: Mapping[str, Any]) -> str:
    if against["wins"] is None or against["losses"] is None:
        return "no sign test"
    ties = "" if against["ties"] is None else f", {against['ties']} equal"
    chance = "" if against["p"] is None else f"; {_p_value(against['p'])}"
    return f"{against['wins']} won, {against['losses']} lost{ties}{chance}"


def _p_value(p: float) -> str:
    if p < _SURE:
        return f"p\u00a0<\u00a0{_SURE}"
    return f"p\u00a0{estimates.number(p, 2 if p >= 10 * _SURE else 3)}"


def _costs(systems: Sequence[Mapping[str, Any]]) -> str:
    """Return for how many questions costs are."""
    per = {system["cost"]["per"] for system in systems if system["cost"]}
    return ", ".join(estimates.count(number) for number in sorted(per))


def _of_dataset(system: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    return next((one for one in system["by_dataset"] if one["dataset"] == name), None)
