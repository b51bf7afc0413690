"""Questions with their references and passages, in our own JSONL and in published formats."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import math
import os
import re
import reprlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from specrag_integrations.citations import normal_answer
from specrag_integrations.documents import (
    Index,
    Row,
    rank,
    read_documents,
    read_text,
    records_of,
    row_of,
    split,
    words_in,
)
from specrag_integrations.errors import InputError, MissingDependencyError
from specrag_integrations.models import Message, Role
from specrag_integrations.passages import Passage

log = logging.getLogger("specrag_integrations")

Kind = Literal["short", "label", "long"]

_HUB = "hub:"
# In a name with one colon, these are splits and anything else is a configuration.
_SPLITS = ("validation", "dev", "test", "train")

# A set is one of labels when few answers serve many questions.
_MOST_LABELS = 6
_FEWEST_LABELLED = 8
_QUESTIONS_PER_LABEL = 3
_LONG_WORDS = 20

_PUBHEALTH_LABELS = ("true", "false", "mixture", "unproven")
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "agent": "assistant",
}
_ANSWERABLE = ("true", "answerable", "partial", "yes")
_UNANSWERABLE = ("false", "unanswerable", "no")
_KINDS: tuple[Kind, ...] = ("short", "label", "long")
_COLON = re.compile(r":(?![^\[]*\])")  # not the one of a slice
_INNER_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question, what it should be answered with, and what was retrieved for it.

    The repr holds no question and no answer.
    """

    id: str
    """Unique in its data set."""
    dataset: str
    """The name of the set: the file's, without its ending."""
    question: str = field(repr=False)
    answers: tuple[str, ...] = field(default=(), repr=False)
    """Accepted answers; none where the question cannot be answered."""
    passages: tuple[Passage, ...] = ()
    kind: Kind = "short"
    """How an answer is judged, the same for a whole set: by containment, by its label (few answers
    for all questions: claims), or not by rule (answers of many words)."""
    labels: tuple[str, ...] = field(default=(), repr=False)
    """All labels of a set of labels."""
    gold: frozenset[str] | None = None
    """The ids of the passages that hold the evidence; None where it is unknown."""
    history: tuple[Message, ...] = field(default=(), repr=False)
    """Earlier turns."""

    @property
    def answerable(self) -> bool:
        """Whether there is anything to answer with."""
        return bool(self.answers)

    @property
    def is_judged(self) -> bool:
        """Whether a rule tells right answers from wrong ones: none does for long ones."""
        return self.kind != "long" or not self.answerable


def read_questions(
    paths: Sequence[str | os.PathLike[str]],
    *,
    docs: Sequence[str | os.PathLike[str]] = (),
    top: int = 10,
    limit: int | None = None,
    skip: int = 0,
    seed: int = 0,
) -> list[Question]:
    """Read sets of questions, each a file whose format is recognised by its content.

    Known are the passages JSONL (`docs/passages-jsonl.md`); HotpotQA, and 2WikiMultihopQA, which is
    written alike; MuSiQue; TriviaQA; PopQA and PubHealth as they were published; and the files of
    Self-RAG, which hold retrieved passages. `hub:NAME[:CONFIG][:SPLIT]` loads a set through the
    library `datasets`; NAME may be a folder, and the split is the validation split where none is
    named.

    A set is named by its file, or by folder and file where two files share a name. Whole documents
    (TriviaQA's on the hub) are cut up, and the best passages taken. The article that a PubHealth
    row brings along is no evidence, since it may state the verdict. The same goes for a search
    engine's snippets (TriviaQA's files) where `docs` are given: then these are searched instead.

    Args:
        paths: The files.
        docs: Files and folders for `read_documents`: where a question has no passages, they are
            taken from these by BM25.
        top: How many passages to take from documents.
        limit: How many questions to take of each set, drawn by hash: a larger limit extends a
            smaller one. Without it all are taken, in the order of the file.
        skip: How many of those drawn to leave out: what was chosen on the first 25 is confirmed on
            others with skip=25.
        seed: Another one draws others.

    Raises:
        InputError: a file or a set cannot be read, a row is not what its format asks for, an id
            stands twice in a set, no question of a set has a reference, or one has neither
            passages nor `docs`; the message names the file and the line or row.
        MissingDependencyError: a set of the hub is asked for without `datasets`.
    """
    if isinstance(paths, str | os.PathLike):
        raise InputError("paths must be a list of files, not a single one")
    for name, number, least in (("limit", limit, 1), ("top", top, 1), ("skip", skip, 0)):
        if number is not None and number < least:
            raise InputError(f"{name} must be at least {least}, not {number}")
    sources = [_source(os.fspath(path)) for path in paths]
    names = _names(sources)
    library = _Library(index=Index(read_documents(docs)) if docs else None, top=top)
    questions = []
    for source, name in zip(sources, names, strict=True):
        found = _found(source)
        for one in found:
            library.check(one)
        of_the_set = _traits([one.row for one in found], name)
        if limit is not None or skip:
            drawn = sorted(found, key=lambda one: _lot(one.row.id, seed))[skip:]
            found = drawn[:limit]
        questions += [_question(one, library, of_the_set) for one in found]
    if not questions:
        raise InputError(f"skip={skip} leaves no question of {', '.join(names)}")
    return questions


# Sets

_Record = tuple[int, str, dict[str, Any]]
"""A number, a name of the place for messages, and what stands there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    given: str
    parts: tuple[str, ...]
    """What it can be named by, the nearest last."""
    records: Callable[[], Iterator[_Record]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A row of any format."""

    where: str
    row: Row
    evidence: Literal["passages", "documents", "snippets"] = "passages"
    history: tuple[Message, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """What all questions of a set have in common."""

    dataset: str
    kind: Kind
    labels: tuple[str, ...]
    marks_gold: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Library:
    """The documents to search for questions without passages."""

    index: Index | None
    top: int

    def check(self, found: _Found) -> None:
        if self.index is None and not _legible(found.row.passages):
            raise InputError(
                f"{found.where}: this question has no passages; name documents to retrieve them "
                "from with --docs"
            )

    def answers_for(self, found: _Found) -> bool:
        """Whether the passages come from here."""
        own = _legible(found.row.passages)
        return self.index is not None and (found.evidence == "snippets" or not own)

    def passages_for(self, found: _Found) -> tuple[Passage, ...]:
        row = found.row
        if self.index is not None and self.answers_for(found):
            return _identified(self.index.best(row.question, self.top))
        if found.evidence == "documents":
            pieces = [
                replace(document, text=text)
                for document in row.passages
                for text in split(document.text)
            ]
            return _identified(rank(row.question, pieces, self.top))
        return _identified(row.passages)


def _source(given: str) -> _Source:
    if given.startswith(_HUB):
        return _hub_source(given)
    path = Path(given)
    parts = (*path.parent.resolve().parts[1:], path.stem)
    return _Source(given=given, parts=parts, records=lambda: _file_records(path))


def _names(sources: Sequence[_Source]) -> list[str]:
    """Name each set by as few of its parts as tell it from the others."""
    seen: set[tuple[str, ...]] = set()
    for source in sources:
        if source.parts in seen:
            raise InputError(
                f"{source.given}: another set has the same name; leave one out or rename it"
            )
        seen.add(source.parts)
    return [_name(source.parts, seen) for source in sources]


def _name(parts: tuple[str, ...], others: set[tuple[str, ...]]) -> str:
    ends = (parts[-length:] for length in range(1, len(parts)))
    unique = (end for end in ends if sum(other[-len(end) :] == end for other in others) == 1)
    return "/".join(next(unique, parts))


def _found(source: _Source) -> list[_Found]:
    """Read a whole set, and check what a row alone cannot tell."""
    found: dict[str, _Found] = {}
    form: _Format | None = None
    left_out = 0
    for number, where, record in source.records():
        form = form or _format_of(record, where)
        one = form.read(record, number, where)
        if one is None:
            left_out += 1
            continue
        if one.row.id in found:
            raise InputError(f"{where}: the id {one.row.id!r} stands earlier in this set as well")
        found[one.row.id] = one
    if not found:
        raise InputError(f"{source.given}: there is no question in this set")
    rows = [one.row for one in found.values()]
    if not any(row.answers or _marked_unanswerable(row.meta) for row in rows):
        raise InputError(
            f"{source.given}: no question has a reference answer, so that nothing can be judged; "
            "take a file or a split with answers"
        )
    if left_out:
        log.warning("%s: claims left out because no label is given: %d", source.given, left_out)
    return list(found.values())


def _lot(row_id: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{row_id}".encode(errors="surrogatepass")).hexdigest()


# What a set and a question are like


def _traits(rows: Sequence[Row], dataset: str) -> _Traits:
    labels = _labels(rows)
    return _Traits(
        dataset=dataset,
        kind="label" if labels else _kind_of_texts(rows),
        labels=labels,
        marks_gold=any("is_gold" in item.metadata for row in rows for item in row.passages),
    )


def _labels(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the labels of a set of labels, and none for other sets."""
    answers = [answer for row in rows for answer in row.answers]
    named = dict.fromkeys(label for row in rows for label in _named_labels(row.meta))
    # The key may mean something else, such as topics.
    if named and {normal_answer(answer) for answer in answers} <= set(map(normal_answer, named)):
        return tuple(named)
    distinct: dict[str, str] = {}
    for answer in answers:
        distinct.setdefault(normal_answer(answer), answer)
    single = all(len(row.answers) <= 1 for row in rows)
    few = 1 < len(distinct) <= _MOST_LABELS
    many = len(answers) >= max(_FEWEST_LABELLED, _QUESTIONS_PER_LABEL * len(distinct))
    stated = _stated_kind(rows)
    if stated == "label" or (stated != "short" and single and few and many):
        return tuple(distinct.values())
    return ()


def _named_labels(meta: Mapping[str, Any]) -> list[str]:
    return meta.get("labels") or []


def _kind_of_texts(rows: Sequence[Row]) -> Kind:
    stated = _stated_kind(rows)
    if stated is not None:
        return stated
    sizes = [words_in(answer) for row in rows for answer in row.answers]
    return "long" if sizes and statistics.median(sizes) > _LONG_WORDS else "short"


def _stated_kind(rows: Sequence[Row]) -> Kind | None:
    """Return what most rows say themselves."""
    kinds = Counter(_kind_named(row.meta.get("answer_kind")) for row in rows)
    return kinds.most_common(1)[0][0]


def _kind_named(word: Any) -> Kind | None:
    return next((kind for kind in _KINDS if _plain_word(word).startswith(kind)), None)


def _question(found: _Found, library: _Library, traits: _Traits) -> Question:
    row = found.row
    passages = library.passages_for(found)
    marked = traits.marks_gold and not library.answers_for(found)
    return Question(
        id=row.id,
        dataset=traits.dataset,
        question=row.question,
        answers=row.answers,
        passages=passages,
        kind=traits.kind,
        labels=traits.labels,
        gold=frozenset(_gold(passages)) if marked else None,
        history=found.history,
    )


def _gold(passages: Sequence[Passage]) -> Iterator[str]:
    for passage in passages:
        if passage.id is not None and passage.metadata.get("is_gold"):
            yield passage.id


def _identified(passages: Sequence[Passage]) -> tuple[Passage, ...]:
    """Number the passages, from 1, unless each has an id of its own."""
    ids = {passage.id for passage in passages}
    if None not in ids and len(ids) == len(passages):
        return tuple(passages)
    return tuple(replace(item, id=str(place)) for place, item in enumerate(passages, start=1))


def _legible(passages: Sequence[Passage]) -> bool:
    return any(passage.text.strip() for passage in passages)


def _history(turns: Any, where: str) -> tuple[Message, ...]:
    """Read turns written as pairs or as messages."""
    if turns is None:
        return ()
    if not isinstance(turns, list):
        raise InputError(f'{where}: "history" must be a list of turns, not {type(turns).__name__}')
    return tuple(
        _turn(turn, f'{where}: turn {number} of "history"')
        for number, turn in enumerate(turns, start=1)
    )


def _turn(turn: Any, where: str) -> Message:
    if isinstance(turn, Mapping):
        turn = [turn.get("role", turn.get("speaker")), turn.get("content", turn.get("text"))]
    match turn:
        case [str(role), str(text)] if role.casefold() in _ROLES:
            return Message(_ROLES[role.casefold()], text)
        case [str(role), str()]:
            raise InputError(
                f"{where} has the role {reprlib.repr(role)}; give one of {', '.join(_ROLES)}"
            )
    raise InputError(f'{where} must be ["user", "…"] or {{"role": "user", "content": "…"}}')


def _marked_unanswerable(meta: Mapping[str, Any]) -> bool:
    return _plain_word(meta.get("answerable")) in _UNANSWERABLE


def _plain_word(value: Any) -> str:
    return str(value).strip().casefold()


def _check_meta(meta: Mapping[str, Any], where: str) -> None:
    """Refuse what would be passed over, so that another question were asked than was meant."""
    answerable, kind, labels = (meta.get(key) for key in ("answerable", "answer_kind", "labels"))
    marks = (*_ANSWERABLE, *_UNANSWERABLE)
    if answerable is not None and _plain_word(answerable) not in marks:
        told = f'"answerable" must be one of {", ".join(marks)}, not {reprlib.repr(answerable)}'
        raise InputError(f"{where}: {told}")
    if kind is not None and _kind_named(kind) is None:
        told = f'"answer_kind" must be one of {", ".join(_KINDS)}, not {reprlib.repr(kind)}'
        raise InputError(f"{where}: {told}")
    listed = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    if labels is not None and not listed:
        raise InputError(f'{where}: "labels" must be a list of strings, not {reprlib.repr(labels)}')


# Formats: each turns its own record into one of ours


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    name: str
    recognises: Callable[[Mapping[str, Any]], bool]
    translated: Callable[[dict[str, Any]], dict[str, Any] | None]
    """Return the record as a line of the passages JSONL, with "evidence" where its passages are
    none; or None where it is of no use."""

    def read(self, record: dict[str, Any], number: int, where: str) -> _Found | None:
        try:
            line = self.translated(record)
        except KeyError as error:
            raise InputError(
                f'{where}: "{error.args[0]}" is missing in a {self.name} row'
            ) from None
        except (TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{where}: not written like a {self.name} row ({error})") from error
        if line is None:
            return None
        evidence = line.pop("evidence", "passages")
        row = row_of(line, number, where)
        _check_meta(row.meta, where)
        answers = dict.fromkeys(answer for answer in row.answers if answer.strip())
        kept = () if _marked_unanswerable(row.meta) else tuple(answers)
        return _Found(
            where=where,
            row=replace(row, answers=kept),
            evidence=evidence,
            history=_history(row.meta.get("history"), where),
        )


def _format_of(record: Mapping[str, Any], where: str) -> _Format:
    for form in _FORMATS:
        if form.recognises(record):
            return form
    names = ", ".join(dict.fromkeys(form.name for form in _FORMATS))
    keys = ", ".join(map(str, record)) or "none"
    raise InputError(f"{where}: of no known format ({names}); its keys are: {keys}")


def _ours(record: dict[str, Any]) -> dict[str, Any]:
    known = ("id", "question", "answers", "passages", "source", "meta")
    meta = record.get("meta") or {}
    if isinstance(meta, Mapping) and not _marked_unanswerable(meta):
        _ = record["answers"]  # without the key, a misspelt one would read as "unanswerable"
    return {"passages": [], **{key: record[key] for key in known if key in record}}


def _hotpot(record: dict[str, Any]) -> dict[str, Any]:
    facts = _objects(record.get("supporting_facts"), "title", "sent_id")
    gold = {fact["title"] for fact in facts}
    paragraphs = _objects(record["context"], "title", "sentences")
    return {
        "id": record.get("_id", record.get("id")),
        "question": record["question"],
        "answers": _texts(record.get("answer")),
        "passages": [
            {
                "title": paragraph["title"],
                # The sentences of HotpotQA begin with a space, those of 2WikiMultihopQA do not.
                "text": " ".join(text.strip() for text in _texts(paragraph["sentences"])),
            }
            | ({"is_gold": paragraph["title"] in gold} if gold else {})
            for paragraph in paragraphs
        ],
    }


def _musique(record: dict[str, Any]) -> dict[str, Any]:
    twin = _marked_unanswerable(record)
    return {
        # In the full set each question has an unanswerable twin of the same id.
        "id": f"{record['id']}-unanswerable" if twin else record["id"],
        "question": record["question"],
        "answers": _texts(record.get("answer"), record.get("answer_aliases")),
        "passages": [
            {
                "id": paragraph["idx"],
                "title": paragraph["title"],
                "text": paragraph["paragraph_text"],
            }
            | ({"is_gold": paragraph["is_supporting"]} if "is_supporting" in paragraph else {})
            for paragraph in _objects(record["paragraphs"])
        ],
        "meta": {"answerable": record.get("answerable")},
    }


def _trivia(record: dict[str, Any]) -> dict[str, Any]:
    record = _snake_case(record)  # the hub's spelling; otherwise the two forms are the same
    answer = record.get("answer") or {}
    pages = [*_objects(record.get("search_results")), *_objects(record.get("entity_pages"))]
    documents = _titled(pages, "search_context", "wiki_context")
    return {
        "id": record["question_id"],
        "question": record["question"],
        # The hub writes "<unk>" where the answer is withheld.
        "answers": [
            text for text in _texts(answer.get("value"), answer.get("aliases")) if text != "<unk>"
        ],
        "passages": documents or _titled(pages, "description"),
        "evidence": "documents" if documents else "snippets",
    }


def _popqa(record: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": record.get("id"),
        "question": record["question"],
        "answers": _texts(_listed(record["possible_answers"])),
        "passages": [],
    }


def _pubhealth(record: dict[str, Any]) -> dict[str, Any] | None:
    label = str(record.get("label")).strip().casefold()
    # The published files hold a few lines without a label, or with another column in its place.
    if label not in _PUBHEALTH_LABELS:
        return None
    return {
        "id": record.get("claim_id"),
        "question": record["claim"],
        "answers": [label],
        "passages": [],
        "meta": {"labels": list(_PUBHEALTH_LABELS)},
    }


def _self_rag(record: dict[str, Any]) -> dict[str, Any]:
    passages = _objects(record.get("ctxs", record.get("top_contexts")))
    answers = (
        _texts(record.get("answers"), record.get("answer"))
        or _texts(_listed(record.get("possible_answers", "[]")))
        or _texts(record.get("label"))
    )
    return {
        "id": record.get("id"),
        "question": record["question"] if "question" in record else record["claim"],
        "answers": answers,
        # Some of its retrievers write the scores as strings.
        "passages": [passage | {"score": _number(passage.get("score"))} for passage in passages],
        "meta": {"answer_kind": "label"} if "claim" in record else {},
    }


# The more telling first; ours, which others resemble, last.
_FORMATS = (
    _Format(
        name="Self-RAG",
        recognises=lambda record: "ctxs" in record or "top_contexts" in record,
        translated=_self_rag,
    ),
    _Format(
        name="HotpotQA",
        recognises=lambda record: isinstance(record.get("context"), list | dict),
        translated=_hotpot,
    ),
    _Format(
        name="MuSiQue",
        recognises=lambda record: {"question", "paragraphs"} <= record.keys(),
        translated=_musique,
    ),
    _Format(
        name="TriviaQA",
        recognises=lambda record: not record.keys().isdisjoint(("QuestionId", "question_id")),
        translated=_trivia,
    ),
    _Format(
        name="PopQA",
        recognises=lambda record: "possible_answers" in record,
        translated=_popqa,
    ),
    _Format(
        name="PubHealth",
        recognises=lambda record: {"claim", "claim_id"} <= record.keys(),
        translated=_pubhealth,
    ),
    _Format(
        name="passages JSONL",
        recognises=lambda record: not record.keys().isdisjoint(("passages", "answers")),
        translated=_ours,
    ),
)


def _objects(value: Any, *keys: str) -> list[dict[str, Any]]:
    """Read a list of objects, be it also written as tuples or as one list for each key."""
    if isinstance(value, Mapping):
        rows = zip(*value.values(), strict=True)
        return [dict(zip(value, row, strict=True)) for row in rows]
    return [
        dict(item) if isinstance(item, Mapping) else dict(zip(keys, item, strict=True))
        for item in value or ()
    ]


def _texts(*values: Any) -> list[Any]:
    """Read strings and lists of strings as one list; nothing where there is None."""
    texts: list[Any] = []
    for value in values:
        texts += value if isinstance(value, list) else [] if value is None else [value]
    return texts


def _listed(value: Any) -> Any:
    """Read a list that may be written as a string of JSON."""
    return json.loads(value) if isinstance(value, str) else value


def _titled(pages: Sequence[Mapping[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Return the pages that have a text under one of these keys."""
    texts = [(page, page.get(key)) for page in pages for key in keys]
    return [
        {"title": page.get("title"), "text": text}
        for page, text in texts
        if isinstance(text, str) and text.strip()
    ]


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _snake_case(value: Any) -> Any:
    """Write the keys of an object as_this, where they are written AsThis, at all depths."""
    if isinstance(value, Mapping):
        return {
            _INNER_CAPITAL.sub("_", key).lower(): _snake_case(item) for key, item in value.items()
        }
    return [_snake_case(item) for item in value] if isinstance(value, list) else value


# Files


def _file_records(path: Path) -> Iterator[_Record]:
    text = read_text(path)
    first = text.lstrip().partition("\n")[0]
    if first.startswith("["):
        return _list_records(text, path)
    if first.startswith("{"):
        return _object_records(text, first, path)
    if "\t" in first:
        return _table_records(text, path)
    raise InputError(f"{path}: neither JSON nor a table with tabs; give a file of questions")


def _object_records(text: str, first: str, path: Path) -> Iterator[_Record]:
    """Read a JSONL, or a file that is one object as a whole, as TriviaQA's are."""
    line = _object(first)
    whole = _object(text) if line is None else line
    if whole is None or (line is not None and "Data" not in line):
        return records_of(path)
    items = whole.get("Data", [whole])
    if not isinstance(items, list):
        raise InputError(f'{path}: "Data" must be a list, not {type(items).__name__}')
    return _listed_records(items, path)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _list_records(text: str, path: Path) -> Iterator[_Record]:
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error}); write one list, or one object a line") from (
            error
        )
    return _listed_records(items, path)


def _listed_records(items: Sequence[Any], path: Path) -> Iterator[_Record]:
    for number, item in enumerate(items, start=1):
        where = f"{path}, row {number}"
        if not isinstance(item, dict):
            raise InputError(f"{where}: not an object but {type(item).__name__}")
        yield number, where, item


def _table_records(text: str, path: Path) -> Iterator[_Record]:
    table = text.lstrip("\n")
    skipped = text.count("\n") - table.count("\n")
    rows = csv.DictReader(io.StringIO(table, newline=""), delimiter="\t")
    ended = 1  # the line of the header
    while True:
        # A field in quotes may run over several lines: name the first.
        number = skipped + ended + 1
        where = f"{path}, line {number}"
        try:
            with _cells_up_to(len(table)):
                record = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(f"{where}: not a line of a table with tabs ({error})") from error
        ended = rows.line_num
        yield number, where, {key: item for key, item in record.items() if item is not None}


@contextmanager
def _cells_up_to(characters: int) -> Iterator[None]:
    """Let cells be so long for a while: the limit is the process's, and others may rely on it."""
    before = csv.field_size_limit(characters)
    try:
        yield
    finally:
        csv.field_size_limit(before)


# The hub


def _hub_source(given: str) -> _Source:
    name, *rest = _COLON.split(given.removeprefix(_HUB))
    if len(rest) == 1 and rest[0].partition("[")[0] in _SPLITS:
        rest = ["", *rest]
    config, split_name, *more = (*rest, "", "")[: max(2, len(rest))]
    if not name or more:
        raise InputError(f"{given}: write it as hub:NAME, hub:NAME:CONFIG or hub:NAME:CONFIG:SPLIT")
    path = Path(name)
    return _Source(
        given=given,
        parts=(*path.parts[:-1], split_name, ".".join(filter(None, (path.name, config)))),
        records=lambda: _hub_records(given, name, config or None, split_name or None),
    )


def _hub_records(
    given: str, name: str, config: str | None, split_name: str | None
) -> Iterator[_Record]:
    try:
        import datasets
    except ImportError:
        raise MissingDependencyError("datasets", "hub") from None
    try:
        if split_name is None:
            split_name = _usual_split(datasets.get_dataset_split_names(name, config), given)
        rows: Any = datasets.load_dataset(name, config, split=split_name)
    except InputError:
        raise
    # It raises the errors of whichever libraries it reads and connects with.
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{given}: datasets cannot load this ({said}); check the name and the connection"
        ) from error
    names = {key: kind.names for key, kind in rows.features.items() if hasattr(kind, "names")}
    for number, record in enumerate(rows, start=1):
        yield number, f"{given}, row {number}", _plain(_labelled(record, names))


def _usual_split(splits: Sequence[str], given: str) -> str:
    for usual in _SPLITS:
        if usual in splits:
            return usual
    if len(splits) == 1:
        return splits[0]
    raise InputError(f"{given}: name one of its splits: {', '.join(splits)}")


def _labelled(record: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Write labels as words where the set has them as numbers; a negative one means none."""
    return {
        key: (names[key][value] if value >= 0 else None)
        if key in names and isinstance(value, int)
        else value
        for key, value in record.items()
    }


def _plain(value: Any) -> Any:
    """Leave out keys without a value: the table behind the set has all keys in all rows."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value
