"""Documents: files read as passages, ranked with BM25; and the reader of the passages JSONL.

This is the retriever of the command line, for trying the package on a folder of notes. An
application brings its own. The format of the JSONL is described in `docs/passages-jsonl.md`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrag_integrations.errors import InputError
from specrag_integrations.passages import Passage

if TYPE_CHECKING:
    from bm25s import BM25

log = logging.getLogger("specrag_integrations")

WORDS_PER_PASSAGE = 120

_SUFFIXES = (".txt", ".md", ".jsonl")

# Scripts written without spaces: each character counts, and is matched, as a word.
_SPACELESS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_SPACELESS}]\s*|[^\s{_SPACELESS}]+\s*")
_TERM = re.compile(rf"[{_SPACELESS}]|[^\W{_SPACELESS}]+")

# Where a text may be cut, best place first; each match ends at a cut.
_BORDERS = (
    # An empty line, except below a heading, which belongs to what follows it.
    re.compile(r"^(?!#{1,6} )[^\S\n]*\S.*\n(?:[^\S\n]*\n)+", re.MULTILINE),
    # The end of a sentence; not an initial, a common title, or a full stop before a small letter.
    re.compile(
        r"(?<!\b\w)(?<!\bDr|\bMr|\bMs|\bSt|\bNo|\bvs)(?<!\bMrs)"
        r"[.!?…][\"'”’»)\]]*\s++(?![a-zà-ÿ])|[。！？][」』”’）]*\s*"  # noqa: RUF001
    ),
    re.compile(r"\n"),
    _WORD,
)

# A fenced block is matched first, so that a comment in code is not taken for a heading.
_HEADING = re.compile(r"^```.*?^```|^# +(\S[^\n]*)", re.MULTILINE | re.DOTALL)

_IDS_SHOWN = 5

_BLANK = 4096  # bytes: a larger file is not looked through for text before it is read


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a passages JSONL: a question with its retrieved passages.

    The repr holds no question and no answer, so that a log never leaks them.
    """

    id: str
    """Unique in its file; the line number where the line names none."""
    question: str = field(repr=False)
    answers: tuple[str, ...] = field(default=(), repr=False)
    """Accepted answers; none where there is no reference or the question cannot be answered."""
    passages: tuple[Passage, ...] = ()
    """Best first, as the retriever gave them."""
    source: str | None = None
    """The data set the question comes from."""
    meta: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Anything else that is known about the question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    id: str
    title: str
    text: str
    metadata: Mapping[str, Any]


def read_documents(paths: Iterable[str | os.PathLike[str]]) -> list[Passage]:
    """Read files, and folders of files, and split them into passages.

    A `.txt` or `.md` file is one document; its title is its first heading, or its name. Each line
    of a `.jsonl` file is one, an object with "text" and optionally "title" and "id". Folders are
    read recursively, in the order of the names, without hidden files. Empty files in them, files
    of other kinds and links to folders are passed over, and a warning in the log counts them.

    A passage's id is `path#n`, the path relative to the folder given and n counting from 1; in a
    `.jsonl` the document's own id, or `path:line`, takes the place of the path. The metadata holds
    the full "path", the "position" n, and whatever else a line of a `.jsonl` said.

    Raises:
        InputError: there is nothing to read, or a file is missing, empty, unreadable, not UTF-8
            text, or of another kind.
    """
    if isinstance(paths, str | os.PathLike):
        raise InputError("paths must be a list of files and folders, not a single one")
    return [
        passage
        for path, name in _named(_files(Path(given) for given in paths))
        for document in _documents(path, name)
        for passage in _passages(document)
    ]


def split(text: str, limit: int = WORDS_PER_PASSAGE) -> list[str]:
    """Cut a text into pieces of at most `limit` words, at the ends of paragraphs or sentences.

    Only a sentence longer than the limit is cut inside, between lines if it has several. Nothing
    but the white space around the cuts is lost.
    """
    return [piece for part in _pieces(text, limit, _BORDERS) if (piece := part.strip())]


def rank(question: str, passages: Sequence[Passage], top: int) -> list[Passage]:
    """Return the `top` passages that match one question best; see `Index`."""
    return Index(passages).best(question, top)


class Index:
    """Passages made ready for any number of questions, by BM25.

    Title and text are searched, in any language: there is no stemming and no list of stop words.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = passages
        self._texts = [_terms(f"{passage.title or ''}\n{passage.text}") for passage in passages]
        self._vocabulary = {term for text in self._texts for term in text}

    def best(self, question: str, top: int) -> list[Passage]:
        """Return the `top` passages that match a question best, each with its score.

        Equal scores keep the order given, so a question that shares no word with any passage yields
        the first ones with a score of 0.

        Raises:
            InputError: `top` is not positive.
        """
        if top < 1:
            raise InputError(f"the number of passages to retrieve must be at least 1, not {top}")
        scores = self._scores(_terms(question))
        best_first = sorted(range(len(scores)), key=lambda index: -scores[index])
        return [replace(self._passages[index], score=scores[index]) for index in best_first[:top]]

    def _scores(self, query: Sequence[str]) -> list[float]:
        """Return one score for each passage."""
        known = [term for term in query if term in self._vocabulary]
        # bm25s fails on an empty query and on an empty vocabulary: both mean that nothing matches.
        if not known:
            return [0.0] * len(self._texts)
        # All scores, not bm25s's own top k, which refuses k > n and breaks ties arbitrarily.
        return [float(score) for score in self._bm25.get_scores(known)]

    @cached_property
    def _bm25(self) -> BM25:
        import bm25s

        index = bm25s.BM25()
        index.index(self._texts, show_progress=False)
        return index


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Read a passages JSONL; see `docs/passages-jsonl.md`.

    Raises:
        InputError: the file cannot be read, or a line is not what the format asks for; the message
            names the line.
    """
    rows: dict[str, Row] = {}
    for number, where, record in records_of(Path(path)):
        row = row_of(record, number, where)
        if row.id in rows:
            raise InputError(f"{where}: the id {row.id!r} stands on an earlier line as well")
        rows[row.id] = row
    return list(rows.values())


def find_row(rows: Iterable[Row], row_id: str) -> Row:
    """Return the row with this id.

    Raises:
        InputError: there is none; the message names some ids that exist.
    """
    by_id = {row.id: row for row in rows}
    if row_id in by_id:
        return by_id[row_id]
    shown = ", ".join(islice(by_id, _IDS_SHOWN))
    more = ", …" if len(by_id) > _IDS_SHOWN else ""
    raise InputError(f"no question has the id {row_id!r}; the file has: {shown}{more}")


# Files


def _files(paths: Iterable[Path]) -> list[tuple[Path, str]]:
    """Return each file once, with its path relative to the folder it was found through."""
    files: dict[Path, tuple[Path, str]] = {}
    for given in paths:
        with _io_errors(given):
            if given.is_dir():
                readable = _readable(given, list(_inside(given)))
                found = [(path, path.relative_to(given).as_posix()) for path in readable]
            else:
                found = [(_known_file(given), given.name)]
        if not found:
            raise InputError(f"{given}: this folder holds no {_kinds()} file with text")
        for path, name in found:
            files.setdefault(path.resolve(), (path, name))
    if not files:
        raise InputError(f"no documents were given; name {_kinds()} files or folders of them")
    return list(files.values())


def _inside(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _inside(entry)
        elif not entry.is_fifo():  # reading one waits
            yield entry


def _readable(folder: Path, found: Sequence[Path]) -> list[Path]:
    """Return the files of a kind that can be read, and say what else there was."""
    passed_over: Counter[str] = Counter()
    readable = []
    for path in found:
        suffix = path.suffix.lower()
        if path.is_dir():  # a link: it could lead back up and never end
            passed_over["linked folder"] += 1
        elif suffix not in _SUFFIXES:
            passed_over[suffix or "without a suffix"] += 1
        elif path.stat().st_size < _BLANK and not path.read_bytes().strip():
            passed_over[f"{suffix}, empty"] += 1
        else:
            readable.append(path)
    if passed_over:
        kinds = "; ".join(f"{count} {kind}" for kind, count in sorted(passed_over.items()))
        log.warning("%s: files passed over: %s. %s are read.", folder, kinds, _kinds(" and "))
    return readable


def _known_file(path: Path) -> Path:
    if not path.exists():
        raise InputError(f"{path}: no such file or folder; check the path")
    if path.is_fifo():
        raise InputError(f"{path}: this is a pipe; give a file")
    if path.suffix.lower() not in _SUFFIXES:
        kind = f"a {path.suffix} file" if path.suffix else "a file without a suffix"
        raise InputError(f"{path}: {kind} cannot be read; give {_kinds()}")
    return path


def _kinds(joint: str = " or ") -> str:
    return f"{', '.join(_SUFFIXES[:-1])}{joint}{_SUFFIXES[-1]}"


def _named(files: Sequence[tuple[Path, str]]) -> Iterator[tuple[Path, str]]:
    """Keep the short names, but for files from different folders that share one."""
    uses = Counter(name for _, name in files)
    for path, name in files:
        yield path, name if uses[name] == 1 else path.as_posix()


def read_text(path: Path) -> str:
    """Return a file's text.

    Raises:
        InputError: it is missing, empty, unreadable or not UTF-8 text.
    """
    try:
        with _io_errors(path):
            text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: this is not UTF-8 text; save it as UTF-8") from error
    if "\0" in text:
        raise InputError(f"{path}: this is a binary file; give a text file in UTF-8")
    if not text.strip():
        raise InputError(f"{path}: this file is empty; fill it or leave it out")
    return text


@contextmanager
def _io_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Below a folder, the file that failed is not the path that was given.
        name = error.filename or path
        raise InputError(
            f"{name}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from error


# Documents and their passages


def _documents(path: Path, name: str) -> Iterator[_Document]:
    if path.suffix.lower() == ".jsonl":
        for number, where, record in records_of(path):
            yield _Document(
                id=_optional_id(record, where) or f"{name}:{number}",
                title=_optional_text(record, "title", where) or path.name,
                text=_text(record, "text", where),
                metadata={**_without(record, "id", "title", "text"), "path": str(path)},
            )
    else:
        title, text = _title_and_text(read_text(path))
        yield _Document(id=name, title=title or path.name, text=text, metadata={"path": str(path)})


def _title_and_text(text: str) -> tuple[str | None, str]:
    """Find the heading of a document, and take it off the text when it comes first."""
    heading = next((found for found in _HEADING.finditer(text) if found[1]), None)
    if heading is None:
        return None, text
    body = text[heading.end() :]
    comes_first = not text[: heading.start()].strip()
    return heading[1].strip(), body if comes_first and body.strip() else text


def _passages(document: _Document) -> Iterator[Passage]:
    for position, text in enumerate(split(document.text), start=1):
        yield Passage(
            id=f"{document.id}#{position}",
            title=document.title,
            text=text,
            metadata={**document.metadata, "position": position},
        )


def _pieces(text: str, limit: int, borders: Sequence[re.Pattern[str]]) -> list[str]:
    """Cut at the best borders that make the pieces fit; joined, they are the text again."""
    if not borders or words_in(text) <= limit:
        return [text]
    best, *others = borders
    cuts = [0, *(border.end() for border in best.finditer(text)), len(text)]
    parts = (text[start:end] for start, end in pairwise(cuts))
    return _packed([piece for part in parts for piece in _pieces(part, limit, others)], limit)


def _packed(pieces: Sequence[str], limit: int) -> list[str]:
    """Join neighbours while they fit."""
    packed: list[str] = []
    room = 0
    for piece in pieces:
        size = words_in(piece)
        if packed and size <= room:
            packed[-1] += piece
            room -= size
        else:
            packed.append(piece)
            room = limit - size
    return packed


def words_in(text: str) -> int:
    """Count words."""
    return sum(1 for _ in _WORD.finditer(text))


# Ranking


def _terms(text: str) -> list[str]:
    return _TERM.findall(unicodedata.normalize("NFKC", text).casefold())


# JSON lines


def records_of(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield each object of a JSONL with its line number and a name of the place for messages."""
    # Not splitlines: JSON strings may hold the other characters at which that cuts.
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON ({error}); write one object a line") from error
        if not isinstance(record, dict):
            raise InputError(
                f"{where}: not an object but {type(record).__name__}; write one JSON object a line"
            )
        yield number, where, record


def row_of(record: dict[str, Any], number: int, where: str) -> Row:
    """Read one object of a passages JSONL; `where` is its place, for messages.

    Raises:
        InputError: it is no row; the message says what is wrong.
    """
    question = _text(record, "question", where)
    if not question.strip():
        raise InputError(f'{where}: "question" is empty')
    answers = _list(record.get("answers", []), "answers", where)
    if not all(isinstance(answer, str) for answer in answers):
        raise InputError(f'{where}: "answers" must hold strings only')
    if answers and not any(answer.strip() for answer in answers):
        raise InputError(
            f'{where}: "answers" holds nothing but white space; write the '
            "answer, or [] where there is none"
        )
    if "passages" not in record:
        raise InputError(f'{where}: "passages" is missing; give a list, which may be empty')
    passages = _list(record["passages"], "passages", where)
    meta = record.get("meta") or {}
    if not isinstance(meta, dict):
        raise InputError(f'{where}: "meta" must be an object, not {type(meta).__name__}')
    return Row(
        id=_optional_id(record, where) or str(number),
        question=question,
        answers=tuple(answers),
        passages=tuple(
            _passage(item, f"{where}, passage {rank}")
            for rank, item in enumerate(passages, start=1)
        ),
        source=_optional_text(record, "source", where),
        meta=meta,
    )


def _passage(item: Any, where: str) -> Passage:
    if isinstance(item, str):
        return Passage(text=item)
    if not isinstance(item, dict):
        raise InputError(f"{where}: neither an object nor a string but {type(item).__name__}")
    score = item.get("score")
    scored = isinstance(score, int | float) and not isinstance(score, bool)
    return Passage(
        text=_text(item, "text", where),
        id=_optional_id(item, where),
        title=_optional_text(item, "title", where),
        score=score if scored else None,
        metadata=_without(item, "id", "title", "text", *(["score"] if scored else [])),
    )


def _text(record: dict[str, Any], key: str, where: str) -> str:
    if key not in record:
        raise InputError(f'{where}: "{key}" is missing')
    value = record[key]
    if not isinstance(value, str):
        raise InputError(f'{where}: "{key}" must be a string, not {type(value).__name__}')
    return value


def _optional_text(record: dict[str, Any], key: str, where: str) -> str | None:
    """Return None for a missing, null or empty text."""
    return None if record.get(key) is None else _text(record, key, where) or None


def _optional_id(record: dict[str, Any], where: str) -> str | None:
    value = record.get("id")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _optional_text(record, "id", where)


def _list(value: Any, key: str, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f'{where}: "{key}" must be a list, not {type(value).__name__}')
    return value


def _without(record: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}
