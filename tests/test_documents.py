"""Files become passages, passages are ranked, and the passages JSONL is read with clear errors."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrag_integrations.documents import (
    WORDS_PER_PASSAGE,
    Index,
    Row,
    find_row,
    rank,
    read_documents,
    read_rows,
    split,
)
from specrag_integrations.errors import InputError
from specrag_integrations.passages import Passage

_SENTENCE = "The wall was built of granite. "


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def error_of(call: Any, *args: Any) -> str:
    """The message of the InputError: one line."""
    with pytest.raises(InputError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


# The splitter

_TEXTS = st.lists(
    st.text("abcXYZé7.!?…\"')#- \t\n", min_size=1, max_size=30)
    | st.sampled_from(["\n\n", "\n## Part\n\n", _SENTENCE, "\n- item", " e.g. ", "Dr. Q. Who? "])
).map("".join)
_SPACELESS_TEXTS = st.text("橋の長い。 a\n")


@given(text=_TEXTS, limit=st.integers(1, 12))
def test_no_word_is_lost(text: str, limit: int) -> None:
    """All words of a document appear, in order, each in one passage."""
    assert text.split() == [word for piece in split(text, limit) for word in piece.split()]


@given(text=_TEXTS, limit=st.integers(1, 12))
def test_no_passage_is_over_the_limit_or_empty(text: str, limit: int) -> None:
    """Every passage has between one word and as many as the limit allows."""
    assert all(1 <= len(piece.split()) <= limit for piece in split(text, limit))


@given(text=_TEXTS, limit=st.integers(1, 12))
def test_passages_are_cut_out_of_the_text_unchanged(text: str, limit: int) -> None:
    """Line breaks and spacing inside a passage stay as they were."""
    end = 0
    for piece in split(text, limit):
        end = text.index(piece, end) + len(piece)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=30), limit=st.integers(9, 20))
def test_a_sentence_that_fits_is_never_cut(sizes: list[int], limit: int) -> None:
    """With sentences shorter than the limit, every passage ends with a full stop."""
    text = " ".join("Word " * (size - 1) + "word." for size in sizes)

    assert all(piece.endswith(".") for piece in split(text, limit))


@given(text=_SPACELESS_TEXTS, limit=st.integers(1, 12))
def test_scripts_without_spaces_are_split_as_well(text: str, limit: int) -> None:
    """A character counts as a word there, and none is lost."""
    pieces = split(text, limit)

    assert "".join(text.split()) == "".join("".join(pieces).split())
    assert all(sum(character in "橋の長い" for character in piece) <= limit for piece in pieces)


def test_paragraphs_stay_whole_where_they_fit() -> None:
    """Short paragraphs share a passage; the next one that does not fit starts another."""
    paragraphs = ["One two three.", "Four five six.", "Seven eight. Nine."]

    assert split("\n\n".join(paragraphs), 7) == [
        "One two three.\n\nFour five six.",
        "Seven eight. Nine.",
    ]


def test_a_heading_goes_with_the_text_below_it() -> None:
    """No passage ends with a heading."""
    assert split("One two three.\n\n## Part\n\nFour five six.", 5) == [
        "One two three.",
        "## Part\n\nFour five six.",
    ]


@pytest.mark.parametrize(
    "sentence",
    ["It met Dr. Grey there.", "It is J. R. Grey again.", "It ran, e.g.  on the wall."],
)
def test_a_full_stop_inside_a_sentence_does_not_end_it(sentence: str) -> None:
    """Titles, initials and abbreviations before a small letter are not cut at."""
    assert [sentence, sentence] == split(f"{sentence} {sentence}", len(sentence.split()))


def test_a_list_without_full_stops_is_cut_between_its_lines() -> None:
    """A block longer than the limit without a sentence end is cut at line breaks."""
    assert split("- one two\n- three\n- four five\n- six", 5) == [
        "- one two\n- three",
        "- four five\n- six",
    ]


def test_a_long_text_is_split_quickly() -> None:
    """A megabyte in one line, without a single full stop, is no trap."""
    text = "word " * 200_000

    assert len(split(text)) == -(-200_000 // WORDS_PER_PASSAGE)


# Files


def test_a_folder_is_read_recursively_in_order(tmp_path: Path) -> None:
    """Sorted by name; hidden files, hidden folders and other suffixes are left out."""
    write(tmp_path / "b.md", "# Beta\n\nSecond.")
    write(tmp_path / "a" / "z.TXT", "First.")
    write(tmp_path / "c.jsonl", '{"text": "Third."}\n')
    write(tmp_path / ".hidden.md", "No.")
    write(tmp_path / ".git" / "x.txt", "No.")
    write(tmp_path / "picture.png", b"\x89PNG")

    passages = read_documents([tmp_path])

    assert [(passage.id, passage.title, passage.text) for passage in passages] == [
        ("a/z.TXT#1", "z.TXT", "First."),
        ("b.md#1", "Beta", "Second."),
        ("c.jsonl:1#1", "c.jsonl", "Third."),
    ]


def test_what_a_folder_does_not_yield_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty note does not refuse a folder, nor do reports in PDF go missing in silence."""
    for name in ("a.pdf", "in/b.PDF", "in/c.docx", "NOTES"):
        write(tmp_path / name, b"x")
    write(tmp_path / "d.md", b"")
    write(tmp_path / "blank.md", b" \n")
    write(tmp_path / "e.md", "Text.")
    (tmp_path / "loop").symlink_to(tmp_path)

    assert [passage.id for passage in read_documents([tmp_path])] == ["e.md#1"]
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{tmp_path}: files passed over: 1 .docx; 2 .md, empty; 2 .pdf; 1 linked folder;"
        " 1 without a suffix. .txt, .md and .jsonl are read."
    )


def test_a_folder_that_is_read_whole_warns_of_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Hidden files are nobody's documents."""
    write(tmp_path / "a.md", "Text.")
    write(tmp_path / ".DS_Store", b"x")

    read_documents([tmp_path])

    assert not caplog.records


def test_metadata_tells_where_a_passage_stood(tmp_path: Path) -> None:
    """Path and position, counted from 1."""
    path = write(tmp_path / "wall.txt", _SENTENCE * 30)

    first, second = read_documents([str(path)])

    assert ("wall.txt#1", {"path": str(path), "position": 1}) == (first.id, first.metadata)
    assert ("wall.txt#2", {"path": str(path), "position": 2}) == (second.id, second.metadata)


def test_a_file_found_twice_is_read_once(tmp_path: Path) -> None:
    """A folder and a file in it may both be named."""
    path = write(tmp_path / "a.md", "Text.")

    assert len(read_documents([tmp_path, path, tmp_path / ".." / tmp_path.name])) == 1


def test_files_of_one_name_keep_different_ids(tmp_path: Path) -> None:
    """The whole path tells them apart."""
    one = write(tmp_path / "one" / "a.md", "One.")
    two = write(tmp_path / "two" / "a.md", "Two.")

    assert [f"{one.as_posix()}#1", f"{two.as_posix()}#1"] == [
        passage.id for passage in read_documents([one, two])
    ]


def test_a_link_back_up_does_not_loop(tmp_path: Path) -> None:
    """Links to folders are not followed."""
    write(tmp_path / "docs" / "a.md", "Text.")
    (tmp_path / "docs" / "up").symlink_to(tmp_path, target_is_directory=True)

    assert len(read_documents([tmp_path])) == 1


@pytest.mark.parametrize(
    ("content", "title", "text"),
    [
        ("# Wall\n\nText.", "Wall", "Text."),
        ("\ufeff# Wall\r\n\r\nText.\r\n", "Wall", "Text."),
        ("Before.\n\n# Wall\n\nText.", "Wall", "Before.\n\n# Wall\n\nText."),
        ("## Part\n\nText.", "a.md", "## Part\n\nText."),
        ("```\n# code\n```\n\n# Wall\n", "Wall", "```\n# code\n```\n\n# Wall"),
        ("# Wall\n", "Wall", "# Wall"),
    ],
    ids=["heading", "windows", "heading later", "no heading", "comment in code", "heading only"],
)
def test_the_first_heading_is_the_title(
    tmp_path: Path, content: str, title: str, text: str
) -> None:
    """A heading that comes first is taken off the text; without one, the file name serves."""
    (passage,) = read_documents([write(tmp_path / "a.md", content)])

    assert (title, text) == (passage.title, passage.text)


def test_documents_as_json_lines(tmp_path: Path) -> None:
    """Id and title are used, other keys kept, separators inside strings left alone."""
    lines = [
        {"id": 7, "title": "Wall", "text": "One\u2028two.", "year": 1856},
        {"text": _SENTENCE * 30},
    ]
    path = write(
        tmp_path / "d.jsonl", "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    )

    passages = read_documents([path])

    assert [passage.id for passage in passages] == ["7#1", "d.jsonl:3#1", "d.jsonl:3#2"]
    assert (passages[0].title, passages[0].text) == ("Wall", "One\u2028two.")
    assert {"year": 1856, "path": str(path), "position": 1} == passages[0].metadata


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt", b"", "empty"),
        ("a.md", b" \n", "empty"),
        ("a.txt", "caf\xe9".encode("latin-1"), "not UTF-8"),
        ("a.txt", b"a\0b", "binary"),
        ("a.pdf", b"%PDF", "a .pdf file cannot be read; give .txt, .md or .jsonl"),
        ("notes", b"text", "without a suffix"),
        ("a.jsonl", b"{", "line 1: not JSON"),
        ("a.jsonl", b'{"text": "x"}\n[1]', "line 2: not an object but list"),
        ("a.jsonl", b'{"title": "x"}', 'line 1: "text" is missing'),
        ("a.jsonl", b'{"text": 1}', 'line 1: "text" must be a string'),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, complaint: str
) -> None:
    """The message holds the path and what is wrong."""
    path = write(tmp_path / name, content)

    message = error_of(read_documents, [path])

    assert str(path) in message
    assert complaint in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """Missing comes before anything about its suffix."""
    assert f"{tmp_path / 'x.pdf'}: no such file" in error_of(read_documents, [tmp_path / "x.pdf"])


def test_a_folder_without_documents_is_an_error(tmp_path: Path) -> None:
    """Other files do not count, nor do empty ones."""
    write(tmp_path / "a.png", b"x")
    write(tmp_path / "b.md", b"")

    assert "holds no .txt, .md or .jsonl file" in error_of(read_documents, [tmp_path])


def test_nothing_to_read_is_an_error() -> None:
    """Neither an empty list nor a bare string, whose letters would be taken for paths."""
    assert "no documents were given" in error_of(read_documents, [])
    assert "not a single one" in error_of(read_documents, "docs")


def test_a_system_error_is_translated(tmp_path: Path) -> None:
    """Any failure of the file system names the file and keeps its cause."""
    (tmp_path / "gone.md").symlink_to(tmp_path / "nowhere.md")

    with pytest.raises(InputError, match=r"gone\.md: cannot be read") as caught:
        read_documents([tmp_path])

    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the superuser may read all files")
def test_a_forbidden_folder_is_named(tmp_path: Path) -> None:
    """The folder that failed is named, not the one above it."""
    inner = write(tmp_path / "inner" / "a.md", "Text.").parent
    inner.chmod(0)

    try:
        assert f"{inner}: cannot be read" in error_of(read_documents, [tmp_path])
    finally:
        inner.chmod(0o700)


# Ranking


def texts(passages: list[Passage]) -> list[str]:
    return [passage.text for passage in passages]


def test_the_passage_that_matches_comes_first() -> None:
    """Its score is set; the other fields are untouched."""
    passages = [Passage(text="the pier"), Passage(text="The Wall", id="w", metadata={"a": 1})]

    best, other = rank("who built the wall?", passages, 5)

    assert (best.id, best.metadata) == ("w", {"a": 1})
    assert best.score is not None
    assert other.score is not None
    assert best.score > other.score > 0
    assert passages[1].score is None


def test_the_title_is_searched() -> None:
    """A passage about "it" is found by the title of its document."""
    passages = [Passage(text="It is long."), Passage(text="It is long.", title="Tay Bridge")]

    assert rank("tay bridge", passages, 1)[0].title == "Tay Bridge"


def test_equal_scores_keep_the_order() -> None:
    """Among many equal passages the first ones are returned, in order."""
    passages = [Passage(text="same words", id=str(number)) for number in range(50)]

    assert [str(number) for number in range(7)] == [
        passage.id for passage in rank("words", passages, 7)
    ]


@pytest.mark.parametrize("question", ["zebra", "", "?!", " "])
def test_a_question_that_matches_nothing_yields_the_first(question: str) -> None:
    """The first ones, with a score of 0."""
    passages = [Passage(text="one"), Passage(text="two"), Passage(text="three")]

    found = rank(question, passages, 2)

    assert [(passage.text, passage.score) for passage in found] == [("one", 0.0), ("two", 0.0)]


@pytest.mark.parametrize(
    "passages", [[], [Passage(text="…")], [Passage(text=""), Passage(text="—")]]
)
def test_passages_without_words_do_not_fail(passages: list[Passage]) -> None:
    """They come back as they are."""
    assert texts(passages) == texts(rank("wall", passages, 3))


@pytest.mark.parametrize(
    ("question", "match", "other"),
    [
        ("Wie heißt die STRASSE?", "Die Straße heißt Allee.", "Die Brücke."),
        ("橋の長さは", "この橋は長い。", "灯台は高い。"),
        ("cafe\u0301", "Le café.", "Le pont."),
        ("мост", "Мост построен.", "Маяк построен."),
    ],
)
def test_any_language_is_searched(question: str, match: str, other: str) -> None:
    """Case, composed letters and scripts without spaces are matched."""
    assert [match] == texts(rank(question, [Passage(text=other), Passage(text=match)], 1))


def test_top_must_be_positive() -> None:
    """Zero passages can answer nothing."""
    assert "at least 1" in error_of(rank, "q", [Passage(text="a")], 0)


def test_ranking_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """Neither stdout nor stderr gets a progress bar."""
    rank("words", [Passage(text="some words")] * 3, 2)

    assert capfd.readouterr() == ("", "")


def test_an_index_serves_many_questions():
    """Each finds what it would find alone, also after one that matches nothing."""
    passages = [Passage(text=text) for text in ("a red door", "a blue wall", "the red wall")]
    index = Index(passages)

    for question in ("red door", "unheard of", "blue wall", "wall"):
        assert index.best(question, 2) == rank(question, passages, 2)


def test_the_import_is_light() -> None:
    """Neither numpy nor bm25s is loaded before something is ranked."""
    code = (
        "import sys, specrag_integrations.corpus, specrag_integrations.documents\n"
        "sys.exit(bool({'numpy', 'bm25s'} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The passages JSONL


def row(**changes: Any) -> str:
    line = {"id": "a", "question": "Q?", "passages": [{"text": "x"}]} | changes
    return json.dumps({key: value for key, value in line.items() if value is not ...})


def test_a_full_row_is_read(tmp_path: Path) -> None:
    """Every key of the format arrives; extras of a passage go into its metadata."""
    line = row(
        answers=["1856"],
        passages=[
            {"id": "p", "title": "T", "text": "x", "score": 2, "is_gold": True},
            {"id": 3, "title": "", "text": "y", "score": None},
            "z",
        ],
        source="s",
        meta={"type": "single"},
        unknown=1,
    )

    (read,) = read_rows(write(tmp_path / "q.jsonl", line))

    assert (
        read.id,
        read.question,
        read.answers,
        read.source,
        read.meta,
    ) == ("a", "Q?", ("1856",), "s", {"type": "single"})
    assert (
        Passage(id="p", title="T", text="x", score=2, metadata={"is_gold": True}),
        Passage(id="3", text="y", metadata={"score": None}),
        Passage(text="z"),
    ) == read.passages


def test_the_least_row_is_read(tmp_path: Path) -> None:
    """A question and a list of passages are enough; the line number is the id."""
    content = f"\n{row(id=..., passages=[])}\r\n{row(id=None)}\n"

    first, second = read_rows(write(tmp_path / "q.jsonl", content))

    assert Row(id="2", question="Q?") == first
    assert Row(id="3", question="Q?", passages=(Passage(text="x"),)) == second


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("nonsense", "not JSON"),
        ('"text"', "not an object but str"),
        (row(question=...), '"question" is missing'),
        (row(question=1), '"question" must be a string, not int'),
        (row(question=" "), '"question" is empty'),
        (row(answers=["", " "]), '"answers" holds nothing but white space'),
        (row(passages=...), '"passages" is missing'),
        (row(passages={"text": "x"}), '"passages" must be a list'),
        (row(passages=["x", {"id": "p"}]), 'passage 2: "text" is missing'),
        (row(passages=[{"text": None}]), 'passage 1: "text" must be a string'),
        (row(passages=[1]), "passage 1: neither an object nor a string but int"),
        (row(passages=[{"text": "x", "title": 1}]), 'passage 1: "title" must be a string'),
        (row(answers="1856"), '"answers" must be a list'),
        (row(answers=[1856]), '"answers" must hold strings only'),
        (row(meta=[1]), '"meta" must be an object'),
        (row(id=1.5), '"id" must be a string'),
        (row(id="first"), "stands on an earlier line"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    """The message holds the file, the line number and what is wrong."""
    path = write(tmp_path / "q.jsonl", f"{row(id='first')}\n{line}\n")

    message = error_of(read_rows, path)

    assert f"{path}, line 2" in message
    assert complaint in message


def test_a_missing_rows_file_is_named(tmp_path: Path) -> None:
    """The error is ours, not the operating system's."""
    assert "q.jsonl: cannot be read" in error_of(read_rows, tmp_path / "q.jsonl")


def test_a_row_is_found_by_its_id() -> None:
    """An unknown id is answered with some that exist."""
    rows = [Row(id=f"r{number}", question="Q?") for number in range(9)]

    assert find_row(rows, "r7") is rows[7]
    assert error_of(find_row, rows, "x").endswith("the file has: r0, r1, r2, r3, r4, …")
    assert error_of(find_row, rows[:2], "x").endswith("the file has: r0, r1")


def test_a_repr_holds_no_question_and_no_answer() -> None:
    """What a user asks does not leak into logs."""
    shown = repr(Row(id="a", question="secret", answers=("secret",), meta={"x": "secret"}))

    assert "secret" not in shown


def _data_files() -> list[Path]:
    named = os.environ.get("SPECRAG_DATA")
    folder = Path(named) if named else Path(__file__).parents[2] / "shared" / "data"
    return sorted(folder.glob("*.jsonl"))


def test_the_evaluation_data_is_there() -> None:
    """Where SPECRAG_DATA names a folder, it must hold data; the default folder may be absent."""
    if not _data_files():
        if "SPECRAG_DATA" in os.environ:
            pytest.fail(f"SPECRAG_DATA={os.environ['SPECRAG_DATA']} holds no .jsonl file")
        pytest.skip("no evaluation data: ../shared/data is absent and SPECRAG_DATA is not set")


@pytest.mark.parametrize("path", _data_files(), ids=lambda path: path.stem)
def test_real_rows_are_read_completely(path: Path) -> None:
    """Every line of the evaluation data becomes a row that says the same."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]

    rows = read_rows(path)

    assert [line["id"] for line in lines] == [read.id for read in rows]
    for line, read in zip(lines, rows, strict=True):
        assert (line["question"], tuple(line["answers"])) == (read.question, read.answers)
        assert (line["source"], line["meta"]) == (read.source, read.meta)
        assert [item["text"] for item in line["passages"]] == [p.text for p in read.passages]
        assert [item.get("is_gold") for item in line["passages"]] == [
            passage.metadata.get("is_gold") for passage in read.passages
        ]
