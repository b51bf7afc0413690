"""Confidence: how likely a draft is right, from its terms, where somebody has measured it.

A raw score is no probability, and no threshold on one works across models. `specrag calibrate`
measures on questions with known answers how often drafts of such terms are right, and finds the
thresholds that keep a promise. A `Calibration` holds that, with the set-up it holds for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self, get_args

from specrag_integrations.errors import ConfigurationError
from specrag_integrations.models import Capabilities, ChatModel
from specrag_integrations.passages import Passage
from specrag_integrations.prompts import (
    Template,
    check_messages,
    draft_messages,
    draft_text,
    turns_hash,
)
from specrag_integrations.scores import TIERS, Score, Scoring, TierName
from specrag_integrations.tasks import Tasks

log = logging.getLogger("specrag_integrations")

Kind = Literal["logistic", "isotonic"]

_VERSION = 1
_KNOWN_TERMS = TIERS["prompt_logprobs"].terms
_COMMAND = "specrag calibrate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The set-up a calibration holds for; None where something is not known.

    Seeds are left out: they change which subsets a question gets, and not what drafts are worth.
    """

    drafter: tuple[str, ...] | None = None
    """The models' names, each once."""
    verifier: str | None = None
    drafter_server: str | None = None
    """The kind of server and the quantisation, as far as it tells."""
    verifier_server: str | None = None
    tier: TierName | None = None
    prompts: str | None = None
    """The hash of what drafter and verifier are told, see `prompt_hash`."""
    num_drafts: int | None = None
    passages_per_draft: int | None = None
    partitioner: str | None = None
    selector: str | None = None
    formula: str | None = None
    weights: Mapping[str, float] | None = None
    """Those of `Scoring`, none of them 0; empty: the tier's own term alone."""

    def differences(self, found: Fingerprint) -> list[str]:
        """Return one line for each entry that is known in both and not the same."""
        both = {f.name: (getattr(self, f.name), getattr(found, f.name)) for f in fields(self)}
        return [
            f"{name}: expected {_shown(mine)}, found {_shown(theirs)}"
            for name, (mine, theirs) in both.items()
            if mine is not None and theirs is not None and mine != theirs
        ]

    def with_models(self, drafters: Sequence[ChatModel], verifier: ChatModel) -> Fingerprint:
        """Return the same with the models' names, as far as they are known by now."""
        names = [_name_of(model) for model in drafters]
        known = tuple(dict.fromkeys(name for name in names if name))
        return replace(self, drafter=known if all(names) else None, verifier=_name_of(verifier))


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """What the servers of a set-up say of themselves, told as a fingerprint tells it."""

    drafter: str | None
    verifier: str | None


async def ask_servers(drafters: Sequence[ChatModel], verifier: ChatModel) -> Servers:
    """Ask the models' servers what they are; those of an application do not tell."""
    told = [_told(await model.capabilities()) for model in drafters]
    known = dict.fromkeys(one for one in told if one)
    return Servers(
        drafter="; ".join(known) if all(told) else None,
        verifier=_told(await verifier.capabilities()),
    )


def prompt_hash(scoring: Scoring, template: Template = draft_messages) -> str:
    """Return a hash that changes with every word drafter or verifier are told."""
    passages = [Passage(text="text", title="title")]
    draft = draft_text("rationale", "answer", answer_first=scoring.order == "answer_first")
    shown = passages if scoring.evidence else []
    turns = (
        *template("question", passages, ()),
        *check_messages("question", draft=draft, passages=shown),
    )
    return turns_hash(turns)


def named(thing: object) -> str:
    """Return how a partitioner or selector is told apart from others, its seed left out."""
    name = type(thing).__name__
    options = [f.name for f in fields(thing)] if is_dataclass(thing) else []
    told = (f"{option}={getattr(thing, option)!r}" for option in options if option != "seed")
    return f"{name}({', '.join(told)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Thresholds found on questions with known answers, and what they promise.

    With probability 1 - `delta` over those questions, at least `target` of the answers accepted by
    them are right: for exchangeable questions in the same set-up, with the same retriever.
    """

    min_confidence: float
    accept_confidence: float | None
    """None where no threshold for it keeps the promise."""
    target: float
    """The precision that they attain."""
    asked: float
    """The precision that was asked for; more than `target` where no threshold attains it."""
    delta: float
    questions: int
    """How many they were found on."""
    accepted: int
    """How many of these `min_confidence` alone accepts."""
    right: int
    """How many of the accepted are right."""

    def __post_init__(self) -> None:
        for name in ("min_confidence", "accept_confidence", "target", "asked", "delta"):
            if (value := getattr(self, name)) is not None:
                checked_share(name, value)
        if self.accept_confidence is not None:
            _check_order(self.min_confidence, self.accept_confidence)
        if not 0 <= self.right <= self.accepted <= self.questions:
            raise ConfigurationError(
                f"right={self.right} of accepted={self.accepted} of questions={self.questions} "
                "cannot be"
            )

    @property
    def attained(self) -> bool:
        """Whether they attain what was asked for."""
        return self.target >= self.asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a draft's terms say of P(correct), in one set-up.

    `Calibration.load(path)` reads what `specrag calibrate` wrote:

        calibration = Calibration.load("calibration.json")
        SpeculativeRAG(…, calibration=calibration, min_confidence=calibration.min_confidence)

    Raises:
        ConfigurationError: numbers that make no probability.
    """

    fingerprint: Fingerprint
    kind: Kind
    """`logistic`: the logistic function of intercept + Σ coefficient * term. `isotonic`: straight
    lines between `knots` at that sum."""
    coefficients: Mapping[str, float]
    """By term. A draft without one of these has no confidence."""
    intercept: float = 0.0
    knots: tuple[tuple[float, float], ...] = ()
    """(sum, probability) in ascending order."""
    thresholds: Thresholds | None = None
    questions: int = 0
    """How many it was fitted on; those of the thresholds are others."""
    demonstration: bool = False
    """Made to show how it works: the questions are not those of any application."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigurationError(
                f"kind={self.kind!r} must be one of {', '.join(get_args(Kind))}"
            )
        named_terms = {*self.coefficients, *self.weights}
        unknown = sorted(named_terms.difference(_KNOWN_TERMS))
        if unknown or not self.coefficients:
            raise ConfigurationError(
                f"coefficients or weights name {', '.join(unknown) or 'no term'}; the terms are "
                f"{', '.join(_KNOWN_TERMS)}"
            )
        numbers = [self.intercept, *self.coefficients.values(), *self.weights.values()]
        numbers += [number for knot in self.knots for number in knot]
        if not all(_is_number(number) for number in numbers):
            raise ConfigurationError(
                "intercept, coefficients, weights and knots must be finite numbers"
            )
        if (self.kind == "isotonic") != bool(self.knots):
            raise ConfigurationError("an isotonic calibration has knots, and no other has")
        rising = all(x0 < x1 and y0 <= y1 for (x0, y0), (x1, y1) in pairwise(self.knots))
        if not rising or any(not 0 <= probability <= 1 for _, probability in self.knots):
            raise ConfigurationError("knots must rise, with probabilities from 0 to 1")

    @property
    def min_confidence(self) -> float:
        """The confidence below which an answer should not be trusted.

        It keeps the promise of `thresholds`, at `thresholds.target`.

        Raises:
            ConfigurationError: no threshold keeps any promise.
        """
        if self.thresholds is None:
            raise ConfigurationError(
                f"this calibration has no thresholds: no confidence is precise enough; run "
                f"{_COMMAND} with more questions or a lower target, or leave min_confidence out"
            )
        return self.thresholds.min_confidence

    @property
    def accept_confidence(self) -> float | None:
        """The confidence at which no further draft need be awaited.

        Beside `min_confidence` it keeps the same promise. None: all drafts must be awaited.
        """
        return self.thresholds.accept_confidence if self.thresholds else None

    @property
    def weights(self) -> Mapping[str, float]:
        """The weights of `Scoring` it was made with; empty: the tier's own term alone."""
        return self.fingerprint.weights or {}

    def probability(self, terms: Mapping[str, float]) -> float | None:
        """Return P(correct) of a draft with these terms; None where one it needs is missing."""
        if any(term not in terms for term in self.coefficients):
            return None
        at = self.intercept + sum(c * terms[term] for term, c in self.coefficients.items())
        return _between(self.knots, at) if self.knots else (1 + math.tanh(at / 2)) / 2

    def check(self, found: Fingerprint) -> None:
        """Refuse another set-up.

        Raises:
            ConfigurationError: it differs in what is known of it; every difference is named.
        """
        if differences := self.fingerprint.differences(found):
            raise ConfigurationError(
                f"the calibration was made for another set-up ({'; '.join(differences)}); run "
                f"{_COMMAND} for this one"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON; an old file stays until the new one is whole.

        Raises:
            OSError: the file cannot be written.
        """
        written = json.dumps({"version": _VERSION, **asdict(self)}, indent=2, allow_nan=False)
        place = Path(path)
        with suppress(FileNotFoundError):
            place.stat()  # a loop of links: `resolve` would raise what is no OSError
        if place.exists() and not place.is_file():  # a pipe, or /dev/stdout
            place.write_text(written + "\n", encoding="utf-8")
            return
        place = place.resolve()  # where a link points to, for the link is to stay
        draft = place.with_name(f".{place.name}.new")
        try:
            draft.write_text(written + "\n", encoding="utf-8")
            draft.replace(place)
        except OSError:
            with suppress(OSError):
                draft.unlink()
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote.

        Raises:
            ConfigurationError: the file cannot be read, or is no calibration; it says why.
        """
        if not isinstance(path, str | os.PathLike):
            raise ConfigurationError(f"path={path!r} must be a calibration's file, a str or Path")
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls._from_json(read)
        except OSError as error:
            reason = error.strerror or str(error)
        except (ConfigurationError, ValueError) as error:
            reason = str(error)
        raise ConfigurationError(f"{os.fspath(path)} is not a calibration: {reason}")

    @classmethod
    def _from_json(cls, read: object) -> Self:
        if not isinstance(read, dict):
            raise ConfigurationError("it holds no object")
        if read.get("version") != _VERSION:
            raise ConfigurationError(
                f"version is {read.get('version')!r}, and this release reads {_VERSION}"
            )
        found = _checked_fields(cls, {n: v for n, v in read.items() if n != "version"})
        fingerprint = _checked_fields(Fingerprint, found["fingerprint"], inside="fingerprint")
        if (drafter := fingerprint["drafter"]) is not None:
            if not all(isinstance(name, str) for name in drafter):
                raise ConfigurationError("fingerprint.drafter must hold names")
            fingerprint["drafter"] = tuple(drafter)
        if fingerprint["tier"] not in {None, *TIERS}:
            raise ConfigurationError(f"fingerprint.tier={fingerprint['tier']!r} is unknown")
        thresholds = found["thresholds"]
        if thresholds is not None:
            thresholds = Thresholds(**_checked_fields(Thresholds, thresholds, inside="thresholds"))
        knots = found["knots"]
        if not all(isinstance(knot, list) and len(knot) == 2 for knot in knots):  # noqa: PLR2004
            raise ConfigurationError("knots must be pairs")
        return cls(
            **{
                **found,
                "fingerprint": Fingerprint(**fingerprint),
                "knots": tuple((at, probability) for at, probability in knots),
                "thresholds": thresholds,
            }
        )


class Gauge:
    """Gives the scores of one question their confidence, where the set-up is the calibrated one.

    What an engine cannot know before it asks, the servers and the tier they allow, is compared
    here; a difference is no error then, but there is no confidence.
    """

    def __init__(
        self,
        calibration: Calibration,
        *,
        setup: Fingerprint,
        drafters: Sequence[ChatModel],
        verifier: ChatModel,
        tasks: Tasks,
    ) -> None:
        self._calibration = calibration
        self._setup = setup
        self._drafters = drafters
        self._verifier = verifier
        self._asked = tasks.start(ask_servers(drafters, verifier))
        self._reasons: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Why there was no confidence."""
        return tuple(self._reasons)

    async def ready(self) -> None:
        """Wait until the servers have told what they are."""
        await asyncio.shield(self._asked)

    def confidence(self, score: Score) -> float | None:
        """Return P(correct) of the scored draft; None where nothing is known of it."""
        if score.value is None:
            return None
        if reason := self._other_setup(score.tier):
            self._reasons[reason] = None
            return None
        found = self._calibration.probability(score.terms)
        if found is None:
            lacks = [t for t in self._calibration.coefficients if t not in score.terms]
            self._reasons[f"no confidence for draft {score.draft}: no {', '.join(lacks)}"] = None
        return found

    def _other_setup(self, tier: TierName) -> str | None:
        """Say how the set-up in use is another one."""
        if not self._asked.done() or self._asked.cancelled():
            return "no confidence: the servers did not tell in time what they are"
        servers = self._asked.result()
        found = replace(
            self._setup.with_models(self._drafters, self._verifier),
            drafter_server=servers.drafter,
            verifier_server=servers.verifier,
            tier=tier,
        )
        differences = self._calibration.fingerprint.differences(found)
        told = (
            f"no confidence, since the calibration is for another set-up: {'; '.join(differences)}"
        )
        return told if differences else None


def check_thresholds(
    calibration: Calibration | None,
    *,
    min_confidence: float | None,
    accept_confidence: float | None,
    scoring: Scoring,
) -> None:
    """Accept thresholds that can work.

    Raises:
        ConfigurationError: one is no probability, has no calibration, or excludes the other.
    """
    given = {"min_confidence": min_confidence, "accept_confidence": accept_confidence}
    for name, value in given.items():
        if value is None:
            continue
        checked_share(name, value)
        if calibration is None:
            raise ConfigurationError(
                f"{name}={value!r} needs calibration=: no threshold on a raw score works across "
                f"models; run {_COMMAND} on questions with known answers, and give "
                "calibration=Calibration.load(…)"
            )
    if min_confidence is not None and accept_confidence is not None:
        _check_order(min_confidence, accept_confidence)
    if accept_confidence is not None and scoring.formula == "paper":
        raise ConfigurationError("formula='paper' compares all drafts; leave accept_confidence out")


def checked_share(name: str, value: float) -> float:
    """Return a number above 0 and at most 1.

    Raises:
        ConfigurationError: it is none.
    """
    if not _is_number(value) or not 0 < value <= 1:
        raise ConfigurationError(f"{name}={value!r} must be above 0 and at most 1")
    return value


def _check_order(min_confidence: float, accept_confidence: float) -> None:
    if accept_confidence < min_confidence:
        raise ConfigurationError(
            f"accept_confidence={accept_confidence!r} is below min_confidence={min_confidence!r}: "
            "what is not trusted cannot end the work"
        )


def _between(knots: Sequence[tuple[float, float]], at: float) -> float:
    """Return the height at a place on straight lines between knots, level beyond them."""
    right = bisect_left(knots, at, key=lambda knot: knot[0])
    if right == 0:
        return knots[0][1]
    if right == len(knots):
        return knots[-1][1]
    (x0, y0), (x1, y1) = knots[right - 1], knots[right]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def _told(capabilities: Capabilities | None) -> str | None:
    parts = [capabilities.server, capabilities.weights] if capabilities else []
    return ", ".join(part for part in parts if part) or None


def _name_of(model: ChatModel) -> str | None:
    """Return a model's name; None while only its address is known."""
    return None if "://" in model.name else model.name


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, Mapping):
        return " ".join(f"{term}={weight:g}" for term, weight in value.items()) or "the default"
    return str(value)


def _is_number(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)  # type: ignore[arg-type]


_JSON_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "fingerprint": dict,
    "coefficients": dict,
    "weights": dict,
    "thresholds": dict,
    "knots": list,
    "drafter": list,
    "demonstration": bool,
    "questions": int,
    "num_drafts": int,
    "passages_per_draft": int,
    "accepted": int,
    "right": int,
    "intercept": (int, float),
    "min_confidence": (int, float),
    "accept_confidence": (int, float),
    "target": (int, float),
    "asked": (int, float),
    "delta": (int, float),
}
"""What stands in the file where it is not a string."""
_OPTIONAL = {"thresholds", "accept_confidence", *(f.name for f in fields(Fingerprint))}


def _checked_fields(kind: type, read: Mapping[str, Any], *, inside: str = "") -> dict[str, Any]:
    """Return the fields of a dataclass, all of them there and of the right kind.

    Raises:
        ConfigurationError: one is missing, unknown, or of another kind.
    """
    names = {f.name for f in fields(kind)}
    place = f"{inside}." if inside else ""
    for name in sorted(names ^ read.keys()):
        raise ConfigurationError(f"{place}{name} is {'unknown' if name in read else 'missing'}")
    for name, value in read.items():
        wanted = _JSON_KINDS.get(name, str)
        if not isinstance(value, wanted) and not (value is None and name in _OPTIONAL):
            raise ConfigurationError(f"{place}{name}={value!r} is of the wrong kind")
    return dict(read)
