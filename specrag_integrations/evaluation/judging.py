"""Judging: the answers of a run go to a judge, and each judgement is kept at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specrag_integrations.evaluation.cache import CachedModel
from specrag_integrations.evaluation.metrics import token_f1
from specrag_integrations.evaluation.outcomes import Outcome, read_lines
from specrag_integrations.evaluation.questions import Question
from specrag_integrations.evaluation.ragas import Judgeable, Judgement, judged
from specrag_integrations.evaluation.runs import Key, Progress
from specrag_integrations.evaluation.systems import System
from specrag_integrations.passages import Passage


def judge_answers(
    outcomes: Iterable[Outcome],
    judge: CachedModel,
    *,
    questions: Sequence[Question],
    systems: Sequence[System],
    known: Mapping[Key, Judgement],
    keep: Callable[[Key, Judgement], None],
    show: Callable[[Progress], None] = lambda _: None,
) -> None:
    """Have the answers of some systems to some questions judged, but for those that are.

    A judgement that lacks a number is tried again. Abstentions and failures are no answers.

    Args:
        outcomes: The outcomes of a run, also of other systems and questions.
        judge: Who judges.
        questions: Which questions.
        systems: Which systems.
        known: The judgements that there are.
        keep: Given each judgement as it is made.
        show: Told how far it has come.

    Raises:
        EndpointUnavailableError: the judge does not answer any more. What it made of the answers at
            hand is not kept.
        MissingDependencyError: ragas is not installed.
    """
    asked = {(one.dataset, one.id): one for one in questions}
    names = {system.name for system in systems}
    open_ = [
        (one, asked[one.dataset, one.id])
        for one in outcomes
        if one.system in names and (one.dataset, one.id) in asked and _is_open(one, known)
    ]
    started = time.perf_counter()
    done = 0

    def tell() -> None:
        spent = time.perf_counter() - started
        outcome, _ = open_[min(done, len(open_) - 1)]
        show(
            Progress(
                done=done,
                total=len(open_),
                system="judging",
                dataset=outcome.dataset,
                seconds_left=spent / done * (len(open_) - done) if done else None,
            )
        )

    def keep_one(place: int, judgement: Judgement) -> None:
        nonlocal done
        if judge.unavailable is not None:
            raise judge.unavailable
        key = open_[place][0].key
        if judgement != known.get(key):
            keep(key, judgement)
        done += 1
        tell()

    if open_:
        tell()
        judged([_judgeable(*pair) for pair in open_], judge, keep=keep_one)


def read_judgements(path: Path) -> dict[Key, Judgement]:
    """Read a file of judgements, of which a later one replaces an earlier one.

    Raises:
        InputError: a line is not a judgement; the message names it.
    """
    return dict(read_lines(path, _read, "a judgement"))


def judgement_line(key: Key, judgement: Judgement) -> str:
    """Return a judgement as a line of such a file."""
    dataset, id_, system = key
    fields = {"dataset": dataset, "id": id_, "system": system, **asdict(judgement)}
    return json.dumps(fields, ensure_ascii=False) + "\n"


def _is_open(outcome: Outcome, known: Mapping[Key, Judgement]) -> bool:
    if outcome.error is not None or outcome.abstained or not outcome.text.strip():
        return False
    judgement = known.get(outcome.key, Judgement())
    return judgement.faithfulness is None or judgement.factual_correctness is None


def _judgeable(outcome: Outcome, question: Question) -> Judgeable:
    return Judgeable(
        question=question.question,
        answer=outcome.text,
        contexts=[_shown(one) for one in question.passages if one.id in outcome.passages],
        # The judge compares with one reference: as in SQuAD, the accepted answer that is nearest.
        reference=max(
            question.answers, key=lambda answer: token_f1(outcome.text, [answer]), default=""
        ),
    )


def _shown(passage: Passage) -> str:
    """Return a passage as the models have read it: its title may say what it is about."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


def _read(fields: Mapping[str, Any]) -> tuple[Key, Judgement]:
    numbers = {name: fields[name] for name in ("faithfulness", "factual_correctness")}
    for name, value in numbers.items():
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}")
    judgement = Judgement(**numbers, reasons=tuple(fields["reasons"]))
    return (fields["dataset"], fields["id"], fields["system"]), judgement
