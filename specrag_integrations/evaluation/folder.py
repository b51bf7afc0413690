"""The folder of a run: who was asked, every outcome as it came, and what is made of them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any, Self

from specrag_integrations.errors import ConfigurationError, EvaluationError, InputError
from specrag_integrations.evaluation.judging import judgement_line, read_judgements
from specrag_integrations.evaluation.outcomes import (
    HALF_CHARACTERS,
    Outcome,
    line_of,
    read_lines,
    read_outcomes,
)
from specrag_integrations.evaluation.questions import Question
from specrag_integrations.evaluation.ragas import Judgement
from specrag_integrations.evaluation.report import check_template, report_html
from specrag_integrations.evaluation.runs import Key
from specrag_integrations.evaluation.sittings import Sitting, mixed_times, shared_prompts
from specrag_integrations.evaluation.summary import Compared, Prices, compared, summarised
from specrag_integrations.evaluation.systems import System
from specrag_integrations.models import Message
from specrag_integrations.passages import Passage

QUESTIONS = "questions.jsonl"
OUTCOMES = "outcomes.jsonl"
JUDGEMENTS = "judgements.jsonl"
SUMMARY = "summary.json"
REPORT = "report.html"
_MANIFEST = "run.json"
_LOCK = ".lock"
_REMEDY = "restore that file from a copy, or run specrag eval with another --out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What the outcomes of a run have in common; a run can only go on with the same."""

    models: Mapping[str, Mapping[str, Any]]
    """By role: name, identity, and what the server said of itself at first."""
    prompts: str
    """The hash of all prompts."""
    sittings: Sequence[Sitting]
    """Those that answered something, in their order; this one alone before the first answer."""
    judge: Mapping[str, Any] | None = None
    """Who judged the answers, told like the models; a run can be judged later."""
    setups: Mapping[str, str] = field(default_factory=dict)
    """By "system on data set": the hash of what the system's name stood for."""

    def differences(self, other: Manifest) -> list[str]:
        """Say what of two runs cannot be compared."""
        found = [
            f"{role}: {_named(self.models[role])} there, {_named(other.models[role])} now"
            for role in self.models
            if self.models[role]["identity"] != other.models.get(role, {}).get("identity")
        ]
        if self.prompts != other.prompts:
            found.append("the prompts have changed")
        return found

    @classmethod
    def from_dict(cls, read: Mapping[str, Any]) -> Self:
        """Read what stands in the file.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: something else stands there.
        """
        own = {one.name: read[one.name] for one in fields(cls) if one.name in read}
        told = read["sittings"] if "sittings" in read else [_only_sitting(read)]
        found = cls(**{**own, "sittings": [_sitting(one) for one in told]})
        if not found.sittings:
            raise ValueError("it names no sitting")
        for one in (*found.models.values(), *([found.judge] if found.judge else [])):
            if not all(isinstance(one[name], str) for name in ("name", "identity")):
                raise TypeError("a model has no name or identity")
        return replace(found, setups=dict(found.setups))


def _sitting(read: Mapping[str, Any]) -> Sitting:
    found = Sitting(**read)
    return replace(found, servers=dict(found.servers), machine=dict(found.machine))


def _only_sitting(read: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sitting that older releases told of, beside the rest."""
    own = {one.name: read[one.name] for one in fields(Sitting) if one.name in read}
    return {**own, "servers": {role: one.get("server") for role, one in read["models"].items()}}


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep a folder for one run while the block lasts; it is made where it is missing.

    That a run cannot write there is found out before it has loaded anything.

    Raises:
        EvaluationError: it cannot be written, or another run is at it.
        MissingDependencyError: jinja2, which its report needs, is not installed.
    """
    check_template()
    with _naming(path):
        path.mkdir(parents=True, exist_ok=True)
        for name in (QUESTIONS, OUTCOMES, JUDGEMENTS, SUMMARY, REPORT, _MANIFEST):
            if (path / name).is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path / name)
        lock = (path / _LOCK).open("w")
    with lock:
        _lock(lock, path)
        yield


def _named(model: Mapping[str, Any]) -> str:
    return f"{model['name']} ({model.get('where')})"


class RunFolder:
    """A folder that holds one run, and takes it up again where it was.

    Args:
        path: The folder, made where it is missing; None keeps the run in memory alone.
        manifest: This run's; None to read what there is.

    Raises:
        ConfigurationError: the folder holds a run of other models or prompts.
        EvaluationError: it cannot be read or written; also from every method that writes.
        InputError: it holds something else, or nothing where there should be a run; or, to be read,
            lacks its outcomes or the questions of some.
        MissingDependencyError: jinja2, which its report needs, is not installed.
    """

    def __init__(self, path: Path | None, manifest: Manifest | None = None) -> None:
        self.path = path
        self.outcomes: list[Outcome] = []
        self.judgements: dict[Key, Judgement] = {}
        self.questions: list[Question] = []
        self._files: dict[str, IO[str]] = {}
        self._resumed_by: Manifest | None = None  # until it has answered something
        if path is None:
            assert manifest is not None  # noqa: S101 - else there is nothing to read
            self.manifest = manifest
            return
        check_template()
        with _naming(path):
            self._open(path, manifest)

    def _open(self, path: Path, manifest: Manifest | None) -> None:
        found = self._manifest(path)
        if manifest is None and found is None:
            raise InputError(f"{path}: holds no run of specrag eval; run it with --out {path}")
        if manifest is not None and found is not None and (told := found.differences(manifest)):
            raise ConfigurationError(
                f"{path} holds a run of something else ({'; '.join(told)}); name another --out"
            )
        kept = found or manifest
        assert kept is not None  # noqa: S101 - one of the two is there
        self.manifest = kept
        if found is None:
            path.mkdir(parents=True, exist_ok=True)
            self._write_manifest()
        else:
            self._resumed_by = manifest
        if (path / OUTCOMES).exists():
            self.outcomes = read_outcomes(path / OUTCOMES)
        if (path / JUDGEMENTS).exists():
            self.judgements = read_judgements(path / JUDGEMENTS)
        self.questions = _read_questions(path / QUESTIONS)
        if manifest is None:
            self._check_whole(path)

    def _check_whole(self, path: Path) -> None:
        """Refuse to report on less than was run."""
        again = f"restore it, or run the same specrag eval again with --out {path}"
        for name in (OUTCOMES, QUESTIONS):
            if not (path / name).exists():
                raise InputError(f"{path}: {name} is missing; {again}, which writes it anew")
        known = {(one.dataset, one.id) for one in self.questions}
        answered = {(one.dataset, one.id) for one in self.outcomes}
        if lost := answered - known:
            raise InputError(
                f"{path / QUESTIONS}: lacks {len(lost)} of {len(answered)} questions that "
                f"{OUTCOMES} answers; {again}, which adds them"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for file in self._files.values():
            # What could not be written is still in its buffer, and fails once more.
            with suppress(EvaluationError) if kind else nullcontext(), _naming(self.path):
                file.close()

    def add_questions(self, questions: Sequence[Question]) -> None:
        """Add the questions of a run, so that its report can be remade from the folder alone.

        Raises:
            ConfigurationError: the folder has outcomes of a question that reads otherwise now.
        """
        known = {(one.dataset, one.id): one for one in self.questions}
        for one in questions:
            before = known.setdefault((one.dataset, one.id), one)
            if _line(before) != _line(one):
                raise ConfigurationError(
                    f"{self.path}: the question {one.id!r} of {one.dataset} is another one now; "
                    "name another --out"
                )
        if len(known) == len(self.questions):
            return
        self.questions = list(known.values())
        self.write(QUESTIONS, "".join(_line(one) for one in self.questions))

    def add_judge(self, judge: Mapping[str, Any]) -> None:
        """Say who judges the answers of this run from now on.

        Args:
            judge: Its name, its identity, and what its server says of itself.

        Raises:
            ConfigurationError: the folder has judgements of another one.
        """
        before = self.manifest.judge
        if before is None or not self.judgements:
            self.manifest = replace(self.manifest, judge=judge)
            self._write_manifest()
        elif before["identity"] != judge["identity"]:
            raise ConfigurationError(
                f"{self.path} holds judgements of {before['name']}, and the judge is "
                f"{judge['name']} now; delete {JUDGEMENTS} there, or name another --out"
            )

    def add_setups(self, setups: Mapping[str, str]) -> None:
        """Say what the names of the systems stand for from now on.

        Args:
            setups: By "system on data set", its `System.setup`.

        Raises:
            ConfigurationError: a name stood for something else before.
        """
        known = self.manifest.setups
        changed = [name for name in setups if known.get(name, setups[name]) != setups[name]]
        if changed:
            raise ConfigurationError(
                f"{self.path}: {', '.join(changed)} {'is' if len(changed) == 1 else 'are'} set up "
                "otherwise now, by other defaults or another calibration; name another --out"
            )
        if not known.keys() >= setups.keys():
            self.manifest = replace(self.manifest, setups={**known, **setups})
            self._write_manifest()

    @property
    def report(self) -> Path | None:
        """Where the report lies."""
        return self.path / REPORT if self.path is not None else None

    def summarise(
        self,
        questions: Sequence[Question],
        systems: Sequence[System],
        *,
        prices: Prices | None = None,
    ) -> dict[str, Any]:
        """Return the figures of the run, and write them and their report into the folder.

        Raises:
            EvaluationError: a file cannot be written.
            MissingDependencyError: the report needs jinja2.
        """
        run = compared(questions, systems, self.outcomes, self.judgements)
        figures = summarised(run, prices=prices)
        timed = [row["name"] for row in figures["systems"] if row["total"]]
        summary = {
            **asdict(self.manifest.sittings[0]),
            **asdict(self.manifest),
            "mixed_times": mixed_times(self._timed(run)),
            "shared_prompts": shared_prompts(self.manifest.models, timed),
            **figures,
        }
        if self.path is not None:
            self.write(SUMMARY, json.dumps(summary, ensure_ascii=False, indent=2))
            self.write(REPORT, report_html(summary))
        return summary

    def _timed(self, run: Compared) -> list[Sitting]:
        """Return the sittings that the times of a run come from."""
        outcomes = [one for system in run.systems for one in run.of(system.name)]
        timed = {one.sitting for one in outcomes if one.seconds is not None}
        return [one for number, one in enumerate(self.manifest.sittings) if number in timed]

    def keep(self, outcome: Outcome) -> None:
        """Add an outcome, as one of this sitting; it is on the disk when this returns.

        Raises:
            EvaluationError: it cannot be written; what was kept before is still there.
        """
        if self._resumed_by is not None:
            self._begin(self._resumed_by)
            self._resumed_by = None
        outcome = replace(outcome, sitting=len(self.manifest.sittings) - 1)
        self._append(OUTCOMES, line_of(outcome))
        self.outcomes.append(outcome)

    def _begin(self, mine: Manifest) -> None:
        """Say who answers from now on; of a sitting that answered nothing, nothing is left."""
        if self.outcomes:
            sittings = [*self.manifest.sittings, *mine.sittings]
            self.manifest = replace(self.manifest, sittings=sittings)
        else:
            self.manifest = replace(self.manifest, models=mine.models, sittings=mine.sittings)
        self._write_manifest()

    def keep_judgement(self, key: Key, judgement: Judgement) -> None:
        """Add the judgement of an outcome; it is on the disk when this returns.

        Raises:
            EvaluationError: it cannot be written; what was kept before is still there.
        """
        self._append(JUDGEMENTS, judgement_line(key, judgement))
        self.judgements[key] = judgement

    def write(self, name: str, text: str) -> None:
        """Write one of the folder's files anew; an old one stays until the new one is whole."""
        if self.path is not None:
            draft = self.path / f".{name}.new"
            with _naming(self.path / name):
                draft.write_text(text, encoding="utf-8", errors=HALF_CHARACTERS)
                draft.replace(self.path / name)

    def _append(self, name: str, line: str) -> None:
        if self.path is None:
            return
        path = self.path / name
        with _naming(path):
            if name not in self._files:
                _end_last_line(path)
                self._files[name] = path.open("a", encoding="utf-8", errors=HALF_CHARACTERS)
            file = self._files[name]
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def _write_manifest(self) -> None:
        self.write(_MANIFEST, json.dumps(asdict(self.manifest), indent=2))

    def _manifest(self, folder: Path) -> Manifest | None:
        path = folder / _MANIFEST
        if not path.exists():
            if (folder / OUTCOMES).exists():
                raise InputError(f"{folder}: holds {OUTCOMES} without {_MANIFEST}; {_REMEDY}")
            return None
        try:
            return Manifest.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: not the manifest of a run ({error}); {_REMEDY}") from None


def _line(question: Question) -> str:
    fields = asdict(question)
    fields["passages"] = [passage.to_dict() for passage in question.passages]
    fields["gold"] = None if question.gold is None else sorted(question.gold)
    return json.dumps(fields, ensure_ascii=False) + "\n"


def _read_questions(path: Path) -> list[Question]:
    if not path.exists():
        return []
    return read_lines(path, _question, "a question")


def _question(fields: dict[str, Any]) -> Question:
    gold = fields["gold"]
    return Question(
        **{
            **fields,
            "answers": tuple(fields["answers"]),
            "labels": tuple(fields["labels"]),
            "passages": tuple(Passage(**passage) for passage in fields["passages"]),
            "gold": None if gold is None else frozenset(gold),
            "history": tuple(Message(**turn) for turn in fields["history"]),
        }
    )


def _end_last_line(path: Path) -> None:
    """End the line in which a stopped run has left off: a whole one is kept, half a one is not."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        start = data.rfind(b"\n") + 1
        try:
            json.loads(data[start:].decode())
        except ValueError:
            file.truncate(start)
        else:
            file.write(b"\n")


def _lock(file: IO[str], path: Path) -> None:
    """Lock a file until it is closed, where the system has such locks."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise EvaluationError(
            f"another run of specrag eval is writing into {path}; wait for it, or name another "
            "--out"
        ) from None
    except OSError:
        return  # some networked disks have none


@contextmanager
def _naming(path: Path | None) -> Iterator[None]:
    """Name the file that something is wrong with."""
    try:
        yield
    except OSError as error:
        raise EvaluationError(
            f"{error.filename2 or error.filename or path} cannot be used: {error.strerror or error}"
        ) from error
