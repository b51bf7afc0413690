"""Systems: the ways of answering that `specrag eval` compares, each known by its name.

A name is a base and what differs from its default: `speculative+m3+k4+vote` is Speculative RAG with
three drafts of four passages, and a vote instead of the best score.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, cast

from specrag_integrations.confidence import Calibration, named
from specrag_integrations.engine import Engine
from specrag_integrations.errors import ConfigurationError
from specrag_integrations.evaluation.baselines import LangChainStuff, LlamaIndexCompact
from specrag_integrations.evaluation.cache import CachedModel
from specrag_integrations.evaluation.questions import Question
from specrag_integrations.pipeline import (
    NUM_DRAFTS,
    PASSAGES_PER_DRAFT,
    SpeculativeRAG,
    default_partitioner,
)
from specrag_integrations.prompts import draft_messages
from specrag_integrations.scores import TIERS, Scoring
from specrag_integrations.selection import AnswerVote, Listwise, SinglePrompt
from specrag_integrations.standard import StandardRAG
from specrag_integrations.subsets import (
    ByCluster,
    Disjoint,
    MultiPerspective,
    Partitioner,
    Random,
    RankStratified,
)
from specrag_integrations.usage import ModelRole

Base = Literal["standard", "drafter_only", "speculative", "llama_index", "langchain"]

_BASES: Mapping[Base, str] = {
    "standard": "the verifier reads all passages and answers briefly",
    "drafter_only": "the drafter reads all passages and answers briefly",
    "speculative": "Speculative RAG with its defaults",
    "llama_index": "LlamaIndex's compact synthesizer with our brief prompt",
    "langchain": "LangChain's stuffing chain with our brief prompt",
}
_SAMPLERS: Mapping[str, Callable[..., Partitioner]] = {
    "multi_perspective": MultiPerspective,
    "by_cluster": ByCluster,
    "disjoint": Disjoint,
    "rank_stratified": RankStratified,
    "random": Random,
}
_TERMS = [term for term in TIERS["prompt_logprobs"].terms if term != "reflection"]
_NUMBERED = re.compile(r"(m|k|anchor|lead|top)-?\d+\Z")
_NUMBER = re.compile(r"(m|k|anchor|lead|top)([1-9]\d{0,3})\Z")
_PARAMETERS = {"m": "num_drafts", "k": "passages_per_draft"}

_COMPARED = ("standard", "speculative")
GROUPS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "main": ("standard", "standard+rationale", "drafter_only", "speculative"),
        "samplers": (
            *_COMPARED,
            *(f"speculative+{name}" for name in _SAMPLERS),
        ),
        "scores": (
            *_COMPARED,
            "speculative+draft_only",
            "speculative+with_draft",
            "speculative+only_draft_rationale",
            "speculative+only_draft_answer",
            "speculative+answer_first",
            "speculative+evidence",
            "speculative+agreement",
        ),
        "selectors": (
            *_COMPARED,
            "speculative+vote",
            "speculative+listwise",
            "speculative+single_prompt",
            "speculative+refine",
        ),
        "drafts": ("standard", *(f"speculative+m{number}" for number in (1, 2, 3, 5))),
        "passages": ("standard", *(f"speculative+k{number}" for number in (1, 2, 3, 5))),
        "frameworks": (
            "standard",
            "llama_index",
            "llama_index+default",
            "langchain",
            "langchain+default",
        ),
    }
)
"""Names that stand for several systems."""
_STAND_FOR = {**GROUPS, **dict.fromkeys(("oracle", "random_draft"), ("speculative",))}
"""The bounds come with every system that drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Who answers."""

    drafter: CachedModel
    verifier: CachedModel
    calibration: Calibration | None = None
    """For the systems that act on a calibrated confidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way of answering."""

    name: str
    base: Base
    top: int | None = None
    """It is given this many of the best-ranked passages; None: all."""
    rationale: bool = False
    """It writes a rationale first, which is not part of its answer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What differs from the defaults of its engine."""
    scoring: Mapping[str, Any] = field(default_factory=dict)
    self_drafting: bool = False
    """The verifier's own model drafts."""
    calibrated: bool = False

    @property
    def description(self) -> str:
        """What it does, in a few words."""
        if self.base == "speculative":
            differs = self.name.split("+")[1:]
            return f"{_BASES[self.base]}{': ' if differs else ''}{', '.join(differs)}"
        told = _BASES[self.base]
        if self.options.get("prompt") == "default":
            told = told.replace("our brief prompt", "its own default prompt")
        told = told.replace("all passages", f"the first {self.top}") if self.top else told
        return (
            told.replace("answers briefly", "writes a rationale first") if self.rationale else told
        )

    @property
    def drafts(self) -> bool:
        """Whether it is a kind of Speculative RAG."""
        return self.base == "speculative"

    def setup(self, models: Models, question: Question) -> str:
        """Return a hash of what the name stands for today, in one set of questions.

        The defaults of m, k, sampler and scoring may change from release to release, and a
        calibration is known by its file.
        """
        defaults = []
        if self.drafts:
            partitioner = named(default_partitioner(PASSAGES_PER_DRAFT))
            defaults = [NUM_DRAFTS, PASSAGES_PER_DRAFT, partitioner, asdict(Scoring())]
        options = {name: _told(value) for name, value in self.options.items()}
        calibration = asdict(models.calibration) if self.calibrated and models.calibration else {}
        known = [self.base, self.top, defaults, options, self.scoring, calibration]
        told = json.dumps([*known, _instructions(question)], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def role_of(self, role: ModelRole) -> ModelRole:
        """Return which of the two models takes a part: an engine alone knows but one."""
        if self.base == "drafter_only":
            return "drafter"
        return "verifier" if self.self_drafting else role

    @property
    def num_drafts(self) -> int:
        """How many drafts it writes at once."""
        return int(self.options.get("num_drafts", NUM_DRAFTS)) if self.drafts else 1

    def engine(self, models: Models, question: Question) -> Engine:
        """Return the engine that answers questions of this one's set.

        Raises:
            ConfigurationError: a combination of options that can never work.
        """
        instructions = _instructions(question)
        model = models.drafter if self.base == "drafter_only" else models.verifier
        if self.base == "llama_index":
            return LlamaIndexCompact(model, instructions=instructions, **self.options)
        if self.base == "langchain":
            return LangChainStuff(model, instructions=instructions, **self.options)
        if self.base != "speculative":
            if self.rationale:
                return StandardRAG(
                    model, template=partial(draft_messages, instructions=instructions)
                )
            return StandardRAG(model, instructions=instructions)
        options = dict(self.options)
        if self.scoring:
            options["scoring"] = Scoring(**self.scoring)
        if self.calibrated:
            options |= _calibrated(self.name, models.calibration)
        drafter = models.verifier if self.self_drafting else models.drafter
        try:
            return SpeculativeRAG(
                drafter=drafter, verifier=models.verifier, instructions=instructions, **options
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"the system {self.name!r}: {error}") from error


def parse_systems(text: str) -> list[System]:
    """Read a list of names, separated by commas; groups stand for their members.

    Raises:
        ConfigurationError: a name is unknown; the message says what there is.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigurationError(f"no system is named; for example {','.join(GROUPS['main'])}")
    members = [member for name in names for member in _STAND_FOR.get(name, [name])]
    return [system_named(name) for name in dict.fromkeys(members)]


def described() -> str:
    """Return the names there are, for people."""
    lines = ["Groups:"]
    lines += [f"  {name:<14}{', '.join(members)}" for name, members in GROUPS.items()]
    lines += ["", "Systems, and what may be added to each with +:"]
    for base, told in _BASES.items():
        lines.append(f"  {base:<14}{told}")
        lines.append(f"  {'':<14}+ {', '.join(_modifiers_of(System(name=base, base=base)))}")
    return "\n".join(lines)


def system_named(name: str) -> System:
    """Return the system with this name.

    Raises:
        ConfigurationError: there is none.
    """
    base, *modifiers = name.split("+")
    if base not in _BASES:
        if name in GROUPS:
            raise ConfigurationError(f"{name!r} stands for several systems; name one of them")
        known = ", ".join([*_BASES, *GROUPS])
        raise ConfigurationError(f"the system {name!r} is unknown; there are {known}")
    system = System(name=name, base=cast(Base, base))
    for modifier in modifiers:
        found = _modified(system, modifier)
        if found is not None and _parts(found) == _parts(system):
            raise ConfigurationError(
                f"the system {name!r}: {modifier!r} replaces another part of it"
            )
        numbered = _NUMBERED.match(modifier)
        if found is None and numbered and f"{numbered[1]}N" in _modifiers_of(system):
            raise ConfigurationError(
                f"the system {name!r}: {modifier!r} takes a number from 1 to 9999"
            )
        if found is None:
            raise ConfigurationError(
                f"the system {name!r}: {base} has no {modifier!r}; it takes "
                f"{', '.join(_modifiers_of(system))}"
            )
        system = found
    return _anchored(system)


def _parts(system: System) -> int:
    """Count what differs from the base."""
    flags = (system.top, system.rationale, system.self_drafting, system.calibrated)
    return len(system.options) + len(system.scoring) + sum(map(bool, flags))


def _modified(system: System, modifier: str) -> System | None:
    """Return the system with one thing changed, or None where its base has no such thing."""
    number = _NUMBER.match(modifier)
    if number and number[1] == "top":
        return dataclasses.replace(system, top=int(number[2]))
    if number and system.drafts:
        return _option(**{_PARAMETERS.get(number[1], number[1]): int(number[2])})(system)
    change = _CHANGES[system.base].get(modifier)
    return change(system) if change else None


def _anchored(system: System) -> System:
    """Turn numbers of anchored and leading passages into the partitioner that has them."""
    options = dict(system.options)
    ranked = {name: options.pop(name) for name in ("anchor", "lead") if name in options}
    if not ranked:
        return system
    if type(options.get("partitioner", MultiPerspective())) is not MultiPerspective:
        raise ConfigurationError(
            f"the system {system.name!r}: only multi_perspective has {' and '.join(ranked)}"
        )
    options["partitioner"] = MultiPerspective(**ranked)
    return dataclasses.replace(system, options=options)


def _modifiers_of(system: System) -> list[str]:
    numbers = ["mN", "kN", "anchorN", "leadN"] if system.drafts else []
    return [*numbers, "topN", *_CHANGES[system.base]]


def _calibrated(name: str, calibration: Calibration | None) -> dict[str, Any]:
    if calibration is None:
        raise ConfigurationError(f"the system {name!r} needs --calibration FILE")
    return {
        "calibration": calibration,
        "min_confidence": calibration.min_confidence,
        "accept_confidence": calibration.accept_confidence,
    }


def _instructions(question: Question) -> str | None:
    """Say what an answer may be where the set has labels: the question is a claim then."""
    if question.kind != "label":
        return None
    return f"The question is a claim. The answer is one of: {', '.join(question.labels)}."


def _told(value: Any) -> Any:
    return named(value) if is_dataclass(value) else value


Change = Callable[[System], System]


def _field(**fields: Any) -> Change:
    return lambda system: dataclasses.replace(system, **fields)


def _option(**options: Any) -> Change:
    return lambda system: dataclasses.replace(system, options={**system.options, **options})


def _scoring(**scoring: Any) -> Change:
    return lambda system: dataclasses.replace(system, scoring={**system.scoring, **scoring})


_FRAMEWORK: Mapping[str, Change] = {"default": _option(prompt="default")}
_CHANGES: Mapping[Base, Mapping[str, Change]] = {
    "standard": {"rationale": _field(rationale=True)},
    "drafter_only": {},
    "llama_index": _FRAMEWORK,
    "langchain": _FRAMEWORK,
    "speculative": {
        **{name: _option(partitioner=sampler()) for name, sampler in _SAMPLERS.items()},
        "vote": _option(selector=AnswerVote()),
        "listwise": _option(selector=Listwise()),
        "single_prompt": _option(selector=SinglePrompt()),
        **{tier: _scoring(tier=tier) for tier in TIERS},
        **{f"only_{term}": _scoring(weights={term: 1.0}) for term in _TERMS},
        "with_draft": _scoring(weights={"reflection": 1.0, "draft": 1.0}),
        "paper": _scoring(formula="paper"),
        "answer_first": _scoring(order="answer_first"),
        "evidence": _scoring(evidence="passages"),
        "refine": _option(refine="always"),
        "refine_when_unsure": _option(refine="when_unsure"),
        "self_drafting": _field(self_drafting=True),
        "calibrated": _field(calibrated=True),
    },
}
"""What may be added to each base."""
