"""Sets of questions are read in our own and in published formats, with clear errors.

All rows are invented.
"""

from __future__ import annotations

import csv
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specrag_integrations import Passage
from specrag_integrations.errors import InputError, MissingDependencyError
from specrag_integrations.evaluation.questions import Question, read_questions
from specrag_integrations.models import assistant, user


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_lines(path: Path, *records: Any) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def line(number: int = 1, **changes: Any) -> dict[str, Any]:
    """A row of our own JSONL; `...` leaves a key out."""
    record = {
        "id": f"q{number}",
        "question": f"Who built wall {number}?",
        "answers": [f"Mason {number}"],
        "passages": ["The wall."],
    }
    record |= changes
    return {key: value for key, value in record.items() if value is not ...}


def error_of(*paths: Any, **options: Any) -> str:
    """The message of the InputError: one line."""
    with pytest.raises(InputError) as caught:
        read_questions(paths, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def texts(question: Question) -> list[tuple[str | None, str]]:
    return [(passage.title, passage.text) for passage in question.passages]


@pytest.fixture
def docs(tmp_path: Path) -> list[Path]:
    """Two documents to search."""
    write(tmp_path / "docs" / "pier.md", "# Pier\n\nThe pier was opened in 1871.")
    write(tmp_path / "docs" / "wall.md", "# Wall\n\nThe wall was built by Ada Stone.")
    return [tmp_path / "docs"]


# Our own format


def test_a_row_becomes_a_question(tmp_path: Path) -> None:
    """Everything of the row that an evaluation needs arrives."""
    passages = [
        {"id": "a", "title": "Wall", "text": "Ada Stone built it.", "is_gold": True},
        {"id": "b", "text": "A pier.", "score": 0.5, "is_gold": False},
    ]
    path = write_lines(tmp_path / "walls.jsonl", line(answers=["Ada Stone"], passages=passages))

    (question,) = read_questions([path])

    assert question == Question(
        id="q1",
        dataset="walls",
        question="Who built wall 1?",
        answers=("Ada Stone",),
        passages=(
            Passage(id="a", title="Wall", text="Ada Stone built it.", metadata={"is_gold": True}),
            Passage(id="b", text="A pier.", score=0.5, metadata={"is_gold": False}),
        ),
        gold=frozenset({"a"}),
    )
    assert question.answerable
    assert "Ada" not in repr(question)


def test_an_answer_counts_once_and_only_with_words(tmp_path: Path) -> None:
    """Repeated and blank answers are dropped."""
    path = write_lines(tmp_path / "q.jsonl", line(answers=["Ada", " ", "Ada", "", "A. Stone"]))

    assert read_questions([path])[0].answers == ("Ada", "A. Stone")


@pytest.mark.parametrize(
    "changes",
    [
        {"answers": []},
        {"answers": ["Nothing is known."], "meta": {"answerable": False}},
        {"answers": ["Nothing is known."], "meta": {"answerable": "UNANSWERABLE"}},
    ],
)
def test_an_unanswerable_question_has_no_answers(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Be it said by empty answers or by a mark; a partial answer is one."""
    partial = line(2, meta={"answerable": "PARTIAL"})
    path = write_lines(tmp_path / "q.jsonl", line(**changes), partial)

    empty, part = read_questions([path])

    assert (empty.answers, empty.answerable) == ((), False)
    assert (part.answers, part.answerable) == (("Mason 2",), True)


def test_a_set_of_unanswerable_questions_is_read(tmp_path: Path) -> None:
    """Where all are marked there need not be any reference."""
    path = write_lines(tmp_path / "q.jsonl", line(answers=[], meta={"answerable": False}))

    assert not read_questions([path])[0].answerable


def test_a_set_without_references_is_an_error(tmp_path: Path) -> None:
    """Otherwise every answer would count as one to a question that has none."""
    path = write_lines(tmp_path / "q.jsonl", line(answers=[]), line(2, answers=[]))

    assert error_of(path).startswith(f"{path}: no question has a reference answer")


def test_a_row_without_the_key_of_its_answers_is_an_error(tmp_path: Path) -> None:
    """A misspelt key would read as a question that cannot be answered."""
    path = write_lines(tmp_path / "q.jsonl", line(), line(2, answers=..., answer="x"))

    assert error_of(path).startswith(f'{path}, line 2: "answers" is missing')


def test_gold_is_unknown_where_nothing_is_marked(tmp_path: Path) -> None:
    """A set whose passages carry no mark has no gold; in a marked one it may be empty."""
    marked = [{"id": "a", "text": "x", "is_gold": False}]
    plain = write_lines(tmp_path / "plain.jsonl", line(), line(2))
    some = write_lines(tmp_path / "some.jsonl", line(passages=marked), line(2))

    questions = read_questions([plain, some])

    assert [question.gold for question in questions] == [None, None, frozenset(), frozenset()]


@pytest.mark.parametrize("ids", [["a", "a"], ["a", None], [None, None], ["2", None]])
def test_passages_are_numbered_unless_each_has_its_own_id(
    tmp_path: Path, ids: list[str | None]
) -> None:
    """The gold follows the numbers."""
    passages = [{"id": item, "text": "x", "is_gold": bool(n)} for n, item in enumerate(ids)]
    path = write_lines(tmp_path / "q.jsonl", line(passages=passages))

    (question,) = read_questions([path])

    assert [passage.id for passage in question.passages] == ["1", "2"]
    assert question.gold == {"2"}


@pytest.mark.parametrize(
    "turns",
    [
        [["user", "And the pier?"], ["agent", "Built in 1871."]],
        [
            {"role": "user", "content": "And the pier?"},
            {"role": "assistant", "content": "Built in 1871."},
        ],
        [
            {"speaker": "User", "text": "And the pier?"},
            {"speaker": "Agent", "text": "Built in 1871."},
        ],
    ],
)
def test_earlier_turns_are_kept(tmp_path: Path, turns: Any) -> None:
    """Written as pairs or as messages."""
    path = write_lines(tmp_path / "q.jsonl", line(meta={"history": turns}))

    assert read_questions([path])[0].history == (user("And the pier?"), assistant("Built in 1871."))


def test_nulls_are_not_given(tmp_path: Path) -> None:
    """A key whose value is null says no more than a key that is not there."""
    keys = ("answerable", "answer_kind", "labels", "history")
    path = write_lines(tmp_path / "q.jsonl", line(meta=dict.fromkeys(keys)))
    twin = write_lines(tmp_path / "m.jsonl", musique(answerable=None))

    question, published = read_questions([path, twin])

    assert (question.answers, question.kind, question.history) == (("Mason 1",), "short", ())
    assert published.answerable
    assert not published.id.endswith("unanswerable")


@pytest.mark.parametrize(
    ("meta", "complaint"),
    [
        (5, '"meta" must be an object, not int'),
        ({"answerable": "maybe"}, "false, unanswerable, no, not 'maybe'"),
        ({"answerable": 3}, '"answerable" must be one of true, answerable, partial, yes'),
        ({"answer_kind": "essay"}, "must be one of short, label, long, not 'essay'"),
        ({"labels": "towns"}, "\"labels\" must be a list of strings, not 'towns'"),
        ({"labels": [1, 2]}, '"labels" must be a list of strings, not [1, 2]'),
        ({"history": "text"}, '"history" must be a list of turns, not str'),
        ({"history": {"a": 1}}, '"history" must be a list of turns, not dict'),
        (
            {"history": [["user", "x"], ["narrator", "y"]]},
            "turn 2 of \"history\" has the role 'narrator'; give one of system, user, human, ",
        ),
        ({"history": [["user", "x"], ["agent"]]}, 'turn 2 of "history" must be ["user", "…"] or {'),
        ({"history": [1]}, 'turn 1 of "history" must be ["user", "…"] or {"role": "user", '),
    ],
)
def test_what_is_not_understood_of_meta_is_named(tmp_path: Path, meta: Any, complaint: str) -> None:
    """Passed over, it would let another question be asked, or judged, than was meant."""
    path = write_lines(tmp_path / "q.jsonl", line(), line(2, meta=meta))

    message = error_of(path)

    assert message.startswith(f"{path}, line 2: ")
    assert complaint in message


# The kind of a set


def claims(count: int, *labels: str, **changes: Any) -> list[dict[str, Any]]:
    return [line(n, answers=[labels[n % len(labels)]], **changes) for n in range(count)]


@pytest.mark.parametrize(
    ("rows", "kind", "labels"),
    [
        (claims(8, "Yes", "no"), "label", ("Yes", "no")),
        (claims(8, "Yes", "yes.", "no", "No"), "label", ("Yes", "no")),
        (claims(7, "yes", "no"), "short", ()),
        (claims(12, "a b", "c", "d", "e", "f"), "short", ()),
        (claims(15, "a b", "c", "d", "e", "f"), "label", ("a b", "c", "d", "e", "f")),
        (claims(40, "b", "c", "d", "e", "f", "g", "h"), "short", ()),
        (claims(20, "yes"), "short", ()),
        ([*claims(9, "yes", "no"), line(9, answers=["yes", "yeah"])], "short", ()),
        ([*claims(9, "yes", "no"), line(9, answers=[])], "label", ("yes", "no")),
        (claims(2, "true", meta={"labels": ["true", "false"]}), "label", ("true", "false")),
        (claims(2, "Dundee", meta={"labels": ["towns", "rivers"]}), "short", ()),
        (claims(2, "true", "false", meta={"answer_kind": "label"}), "label", ("true", "false")),
        (claims(9, "yes", "no", meta={"answer_kind": "long-form"}), "label", ("yes", "no")),
        (claims(3, "brief", meta={"answer_kind": "long-form"}), "long", ()),
        (claims(9, "yes", "no", meta={"answer_kind": "short"}), "short", ()),
        (claims(3, "word " * 30, meta={"answer_kind": "short"}), "short", ()),
        (claims(3, "word " * 21), "long", ()),
        (claims(3, "word " * 20), "short", ()),
        (claims(3, "a", "b", "word " * 99), "short", ()),
    ],
)
def test_the_kind_is_that_of_the_set(
    tmp_path: Path, rows: list[dict[str, Any]], kind: str, labels: tuple[str, ...]
) -> None:
    """Labels are few answers for many questions, or named; long answers are long or said to be."""
    questions = read_questions([write_lines(tmp_path / "q.jsonl", *rows)])

    assert {(question.kind, question.labels) for question in questions} == {(kind, labels)}


def test_a_limit_does_not_change_what_a_set_is(tmp_path: Path) -> None:
    """Kind, labels and gold come from all of its rows."""
    rows = claims(20, "yes", "no")
    rows[3]["passages"] = [{"text": "x", "is_gold": True}]

    questions = read_questions([write_lines(tmp_path / "q.jsonl", *rows)], limit=2)

    assert [(one.kind, one.labels) for one in questions] == [("label", ("yes", "no"))] * 2
    assert all(question.gold is not None for question in questions)


# Drawing


def test_a_larger_limit_extends_a_smaller_one(tmp_path: Path) -> None:
    """The draw goes by id and seed, whatever the order of the file."""
    rows = [line(number) for number in range(50)]
    path = write_lines(tmp_path / "a" / "q.jsonl", *rows)
    turned = write_lines(tmp_path / "b" / "q.jsonl", *reversed(rows))

    few = [question.id for question in read_questions([path], limit=5)]
    many = [question.id for question in read_questions([path], limit=20)]
    every = [question.id for question in read_questions([path], limit=99)]

    assert (len(few), len(many), len(every)) == (5, 20, 50)
    assert every[:20] == many
    assert many[:5] == few
    assert few == [question.id for question in read_questions([turned], limit=5)]
    assert few != [question.id for question in read_questions([path], limit=5, seed=1)]
    assert few != [row["id"] for row in rows][:5]


def test_what_was_chosen_on_some_is_confirmed_on_others(tmp_path: Path) -> None:
    """`skip` leaves out the first of the draw, so that two samples share no question."""
    path = write(tmp_path / "q.jsonl", "".join(f"{json.dumps(line(n))}\n" for n in range(20)))
    both = [one.id for one in read_questions([path], limit=10)]
    assert [one.id for one in read_questions([path], limit=6)] == both[:6]
    assert [one.id for one in read_questions([path], limit=4, skip=6)] == both[6:]
    with pytest.raises(InputError, match="skip=20 leaves no question of q"):
        read_questions([path], limit=4, skip=20)


def test_without_a_limit_the_order_stays(tmp_path: Path) -> None:
    """A file is read from top to bottom."""
    path = write_lines(tmp_path / "q.jsonl", *[line(number) for number in (3, 1, 2)])

    assert [question.id for question in read_questions([path])] == ["q3", "q1", "q2"]


def test_a_limit_is_per_file(tmp_path: Path) -> None:
    """Each set gives as many."""
    paths = [
        write_lines(tmp_path / f"{name}.jsonl", *[line(number) for number in range(9)])
        for name in ("one", "two")
    ]

    questions = read_questions(paths, limit=3)

    assert Counter(question.dataset for question in questions) == {"one": 3, "two": 3}


def test_numbers_must_be_positive(tmp_path: Path) -> None:
    """Nothing can be asked of no questions and no passages."""
    path = write_lines(tmp_path / "q.jsonl", line())

    assert "limit must be at least 1, not 0" in error_of(path, limit=0)
    assert "top must be at least 1, not 0" in error_of(path, top=0)


# Names


def test_a_set_is_named_by_its_file(tmp_path: Path) -> None:
    """Files that share a name are told apart by as many folders as it takes."""
    paths = [
        write_lines(tmp_path / name, line())
        for name in ("plain.v1.jsonl", "a/q.jsonl", "b/q.jsonl", "x/c/r.json", "y/c/r.jsonl")
    ]

    assert [question.dataset for question in read_questions(paths)] == [
        "plain.v1",
        "a/q",
        "b/q",
        "x/c/r",
        "y/c/r",
    ]


def test_a_set_given_twice_is_an_error(tmp_path: Path) -> None:
    """Its outcomes could not be told apart, however the path is written."""
    path = write_lines(tmp_path / "q.jsonl", line())

    message = error_of(path, tmp_path / "." / ".." / tmp_path.name / "q.jsonl")

    assert "another set has the same name" in message


def test_paths_must_be_a_list(tmp_path: Path) -> None:
    """The letters of a bare string would be taken for paths."""
    with pytest.raises(InputError, match="not a single one"):
        read_questions("q.jsonl")


# Errors


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", ": this file is empty"),
        (b"[]", ": there is no question in this set"),
        (b"id\tquestion\tpossible_answers\n", ": there is no question in this set"),
        ("caf\xe9".encode("latin-1"), ": this is not UTF-8"),
        (b"Who built the wall?", ": neither JSON nor a table"),
        (b"[{]", ": not JSON (Expecting property name"),
        (b"[1]", ", row 1: not an object but int"),
        (b'{"question": "Q?",', ", line 1: not JSON"),
        (b'{"Data": 1}', ': "Data" must be a list, not int'),
        (b'{"name": "x", "value": 1}', ", line 1: of no known format (Self-RAG, HotpotQA"),
        (b"{}", "; its keys are: none"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, content: bytes, complaint: str
) -> None:
    """The message holds the path and what is wrong."""
    path = write(tmp_path / "q.jsonl", content)

    message = error_of(path)

    assert message.startswith(str(path))
    assert complaint in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The error is ours, not the operating system's."""
    assert "gone.jsonl: cannot be read" in error_of(tmp_path / "gone.jsonl")


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        ("nonsense", "not JSON"),
        (json.dumps(line(2, question=...)), '"question" is missing'),
        (json.dumps(line(2, question=" ")), '"question" is empty'),
        (json.dumps(line(2, passages=...)), "this question has no passages; name documents"),
        (json.dumps(line(2, answers=[1])), '"answers" must hold strings only'),
        (json.dumps(line(1)), "the id 'q1' stands earlier in this set"),
        (json.dumps(line(2, passages=[])), "this question has no passages; name documents"),
        (json.dumps(line(2, passages=[" "])), "this question has no passages; name documents"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, second: str, complaint: str) -> None:
    """The message holds the file, the line number and what is wrong."""
    path = write(tmp_path / "q.jsonl", f"{json.dumps(line())}\n\n{second}\n")

    message = error_of(path, limit=1)

    assert message.startswith(f"{path}, line 3: ")
    assert complaint in message


# Documents


def test_documents_stand_in_for_missing_passages(tmp_path: Path, docs: list[Path]) -> None:
    """The best by BM25, and only where a question has none; their gold is unknown."""
    own = [{"id": "a", "text": "Mine.", "is_gold": True}]
    path = write_lines(
        tmp_path / "q.jsonl",
        line(question="Who built the wall?", passages=[]),
        line(2, passages=own),
    )

    first, second = read_questions([path], docs=docs, top=1)

    assert texts(first) == [("Wall", "The wall was built by Ada Stone.")]
    assert [passage.id for passage in first.passages] == ["wall.md#1"]
    assert first.gold is None
    assert (texts(second), second.gold) == ([(None, "Mine.")], {"a"})


def test_documents_are_read_even_where_none_is_needed(tmp_path: Path) -> None:
    """A wrong path is not passed over."""
    path = write_lines(tmp_path / "q.jsonl", line())

    assert "nowhere: no such file" in error_of(path, docs=[tmp_path / "nowhere"])


# Published formats


def hotpot(**changes: Any) -> dict[str, Any]:
    record = {
        "_id": "5a",
        "question": "Who built the wall of the town with the pier?",
        "answer": "Ada Stone",
        "type": "bridge",
        "context": [
            ["Wall", ["The wall is old.", " Ada Stone built it."]],
            ["Fog", ["It is grey."]],
        ],
        "supporting_facts": [["Wall", 1]],
    }
    return record | changes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {  # the hub's
            "context": {
                "title": ["Wall", "Fog"],
                "sentences": [["The wall is old.", " Ada Stone built it."], ["It is grey."]],
            },
            "supporting_facts": {"title": ["Wall"], "sent_id": [1]},
        },
        {
            "context": [
                {"title": "Wall", "sentences": ["The wall is old.", "Ada Stone built it."]},
                {"title": "Fog", "sentences": ["It is grey."]},
            ],
            "supporting_facts": [{"title": "Wall", "sent_id": 1}],
        },
    ],
    ids=["published", "hub", "objects"],
)
@pytest.mark.parametrize("whole", [True, False], ids=["list", "lines"])
def test_hotpotqa_is_read(tmp_path: Path, changes: dict[str, Any], whole: bool) -> None:
    """Sentences are joined; a paragraph with a supporting fact is gold."""
    record = hotpot(**changes)
    path = write(tmp_path / "hotpot.json", json.dumps([record], indent=1) if whole else "")
    if not whole:
        write_lines(path, record)

    (question,) = read_questions([path])

    assert (question.id, question.answers, question.kind) == ("5a", ("Ada Stone",), "short")
    assert texts(question) == [
        ("Wall", "The wall is old. Ada Stone built it."),
        ("Fog", "It is grey."),
    ]
    assert question.gold == {"1"}


def test_hotpotqa_without_facts_has_no_gold(tmp_path: Path) -> None:
    """What is withheld is not taken for "none"."""
    path = write(tmp_path / "hotpot.json", json.dumps([hotpot(supporting_facts=[])]))

    assert read_questions([path])[0].gold is None


def musique(**changes: Any) -> dict[str, Any]:
    record = {
        "id": "2hop__1_2",
        "question": "Who built the wall of the town with the pier?",
        "paragraphs": [
            {"idx": 0, "title": "Fog", "paragraph_text": "It is grey.", "is_supporting": False},
            {"idx": 7, "title": "Wall", "paragraph_text": "By Ada.", "is_supporting": True},
        ],
        "answer": "Ada Stone",
        "answer_aliases": ["Ada"],
        "answerable": True,
    }
    return record | changes


def test_musique_is_read(tmp_path: Path) -> None:
    """Aliases are accepted; the twin of a question, of the same id, cannot be answered."""
    path = write_lines(tmp_path / "musique.jsonl", musique(), musique(answerable=False))

    question, twin = read_questions([path])

    assert (question.id, question.answers) == ("2hop__1_2", ("Ada Stone", "Ada"))
    assert texts(question) == [("Fog", "It is grey."), ("Wall", "By Ada.")]
    assert ([passage.id for passage in question.passages], question.gold) == (["0", "7"], {"7"})
    assert (twin.id, twin.answers) == ("2hop__1_2-unanswerable", ())


def trivia(**changes: Any) -> dict[str, Any]:
    record = {
        "Question": "Who built the wall?",
        "QuestionId": "tc_1",
        "Answer": {
            "Value": "Ada Stone",
            "Aliases": ["Ada Stone", "A. Stone"],
            "NormalizedAliases": ["ada stone", "a stone"],
            "Type": "WikipediaEntity",
        },
        "SearchResults": [
            {"Title": "Walls", "Description": "The wall … Ada Stone …", "Filename": "1/1.txt"},
            {"Title": "Blank", "Description": "", "Filename": "1/2.txt"},
        ],
        "EntityPages": [{"Title": "Ada Stone", "Filename": "Ada.txt", "DocSource": "Search"}],
    }
    return record | changes


@pytest.mark.parametrize("indent", [None, 2])
def test_triviaqa_is_read(tmp_path: Path, indent: int | None) -> None:
    """The file is one object; without documents the snippets of the search are the passages."""
    content = json.dumps({"Data": [trivia()], "Domain": "Web"}, indent=indent)

    (question,) = read_questions([write(tmp_path / "web-dev.json", content)])

    assert (question.id, question.question) == ("tc_1", "Who built the wall?")
    assert question.answers == ("Ada Stone", "A. Stone")
    assert texts(question) == [("Walls", "The wall … Ada Stone …")]
    assert question.gold is None


def test_documents_are_better_than_snippets(tmp_path: Path, docs: list[Path]) -> None:
    """Who names documents wants them searched."""
    path = write(tmp_path / "web-dev.json", json.dumps({"Data": [trivia()]}))

    (question,) = read_questions([path], docs=docs, top=1)

    assert texts(question) == [("Wall", "The wall was built by Ada Stone.")]


def hub_trivia() -> dict[str, Any]:
    return {
        "question": "Who built the wall?",
        "question_id": "tc_1",
        "answer": {"value": "Ada Stone", "aliases": ["A. Stone"], "type": "Name"},
        "entity_pages": {
            "title": ["Wall"],
            "filename": ["Wall.txt"],
            "wiki_context": ["Fog is grey. " * 60 + "\n\n" + "The wall is Ada Stone's. " * 30],
        },
        "search_results": {"title": [], "description": [], "search_context": []},
    }


def test_the_documents_of_triviaqa_are_cut_and_searched(tmp_path: Path, docs: list[Path]) -> None:
    """The hub's form holds whole pages, which go before documents of one's own."""
    path = write_lines(tmp_path / "trivia.jsonl", hub_trivia())

    (question,) = read_questions([path], docs=docs, top=2)

    assert question.answers == ("Ada Stone", "A. Stone")
    assert [passage.id for passage in question.passages] == ["1", "2"]
    assert all(len(passage.text.split()) <= 120 for passage in question.passages)
    assert question.passages[0].title == "Wall"
    assert question.passages[0].text.endswith("The wall is Ada Stone's.")


def test_a_withheld_answer_is_none(tmp_path: Path) -> None:
    """TriviaQA's test questions have no reference, so that the set cannot be used."""
    withheld = hub_trivia() | {"answer": {"value": "<unk>", "aliases": []}}

    assert "no question has a reference" in error_of(write_lines(tmp_path / "t.jsonl", withheld))


POPQA_HEADER = "id\tsubj\tprop\tobj\ts_aliases\tquestion\tpossible_answers\n"
POPQA_ROW = (
    '7\tWall\tbuilder\tAda Stone\t"[""Old Wall""]"\tWho built the wall?'
    '\t"[""Ada Stone"", ""A. Stone""]"\n'
)


def test_popqa_is_read(tmp_path: Path, docs: list[Path]) -> None:
    """The published table has no passages."""
    path = write(tmp_path / "popqa.tsv", POPQA_HEADER + POPQA_ROW)

    (question,) = read_questions([path], docs=docs, top=1)

    assert (question.id, question.question) == ("7", "Who built the wall?")
    assert question.answers == ("Ada Stone", "A. Stone")
    assert texts(question) == [("Wall", "The wall was built by Ada Stone.")]
    assert error_of(path).startswith(f"{path}, line 2: this question has no passages")


def test_a_bad_line_of_a_table_is_named(tmp_path: Path, docs: list[Path]) -> None:
    """Rows that run over several lines, and lines before the header, count as they stand."""
    long = POPQA_ROW.replace("Wall\t", '"Wall\n(town)"\t', 1)
    path = write(tmp_path / "popqa.tsv", f"\n{POPQA_HEADER}{long}8\tWall\n")
    wrong = write(tmp_path / "wrong.tsv", POPQA_HEADER + POPQA_ROW.replace("[", "<"))

    assert error_of(path, docs=docs) == f'{path}, line 5: "question" is missing in a PopQA row'
    assert f"{wrong}, line 2: not written like a PopQA row (Expecting" in error_of(wrong, docs=docs)


PUBHEALTH_HEADER = "\tclaim_id\tclaim\texplanation\tmain_text\tlabel\tsubjects\n"


def test_pubhealth_is_read(
    tmp_path: Path, docs: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A claim is judged by its label, from documents; its own article is never shown."""
    rows = [
        "0\t101\tThe wall is Ada Stone's.\tIt is.\tFact check: it is true.\ttrue\twalls\n",
        '1\t102\t"The ""pier"" cures fog."\tNo.\tFact check: it is false.\t False\tpiers\n',
        "2\t103\tFog is grey.\tWho knows.\tFact check.\tnan\tfog\n",
        "3\t104\tThis line is cut off.\n",
    ]
    path = write(tmp_path / "test.tsv", PUBHEALTH_HEADER + "".join(rows))

    with caplog.at_level(logging.WARNING):
        questions = read_questions([path], docs=docs)

    assert [(one.id, one.question, one.answers) for one in questions] == [
        ("101", "The wall is Ada Stone's.", ("true",)),
        ("102", 'The "pier" cures fog.', ("false",)),
    ]
    labels = ("true", "false", "mixture", "unproven")
    assert {(one.kind, one.labels) for one in questions} == {("label", labels)}
    shown = [passage.text for one in questions for passage in one.passages]
    assert not any("Fact check" in text for text in shown)
    assert caplog.messages == [f"{path}: claims left out because no label is given: 2"]
    assert "with --docs" in error_of(path)


def test_a_long_article_costs_no_table(tmp_path: Path, docs: list[Path]) -> None:
    """A cell may be longer than csv allows by default, and its limit is what it was afterwards."""
    row = "0\t101\tThe wall is old.\tIt is.\t{}\ttrue\twalls\n"
    path = write(tmp_path / "test.tsv", PUBHEALTH_HEADER + row.format("x" * 200_000))
    before = csv.field_size_limit()

    (question,) = read_questions([path], docs=docs)

    assert question.id == "101"
    assert csv.field_size_limit() == before


def test_pubhealth_is_read_from_lines(tmp_path: Path, docs: list[Path]) -> None:
    """The same columns as JSONL."""
    record = {"claim_id": 5, "claim": "The wall is old.", "main_text": "Yes.", "label": "mixture"}
    path = write_lines(tmp_path / "claims.jsonl", record)

    (question,) = read_questions([path], docs=docs, top=1)

    assert (question.id, question.answers, question.kind) == ("5", ("mixture",), "label")
    assert texts(question) == [("Wall", "The wall was built by Ada Stone.")]


def ctxs(*scores: Any) -> list[dict[str, Any]]:
    return [
        {"id": str(number), "title": "Wall", "text": f"The wall {number}.", "score": score}
        for number, score in enumerate(scores)
    ]


@pytest.mark.parametrize(
    ("record", "answers"),
    [
        ({"question": "Q?", "answers": ["Ada"], "possible_answers": '["A"]'}, ("Ada",)),
        ({"question": "Q?", "answer": "Ada"}, ("Ada",)),
        ({"question": "Q?", "possible_answers": '["Ada", "A"]'}, ("Ada", "A")),
    ],
)
def test_the_files_of_self_rag_bring_passages(
    tmp_path: Path, record: dict[str, Any], answers: tuple[str, ...]
) -> None:
    """Scores written as strings are read; the line stands in for a missing id."""
    path = write_lines(
        tmp_path / "popqa.jsonl", record | {"ctxs": ctxs("1.5", 0.5, None, "?", "nan")}
    )

    (question,) = read_questions([path])

    assert (question.id, question.answers, question.kind) == ("1", answers, "short")
    assert [passage.score for passage in question.passages] == [1.5, 0.5, None, None, None]
    assert texts(question)[0] == ("Wall", "The wall 0.")


def test_the_claims_of_self_rag_are_judged_by_label(tmp_path: Path) -> None:
    """However few they are; an article beside the passages is not shown."""
    rows = [
        {"claim": "It is old.", "label": "SUPPORTS", "answers": ["true"], "main_text": "Yes."},
        {"claim": "It is new.", "label": "REFUTES", "question": "Is it new?", "main_text": "No."},
    ]
    path = write_lines(tmp_path / "health.jsonl", *[row | {"ctxs": ctxs(1)} for row in rows])

    first, second = read_questions([path])

    assert [first.question, second.question] == ["It is old.", "Is it new?"]
    assert [first.answers, second.answers] == [("true",), ("REFUTES",)]
    assert first.kind == second.kind == "label"
    assert texts(first) == texts(second) == [("Wall", "The wall 0.")]


def malformed() -> list[tuple[dict[str, Any], str]]:
    paragraph = {"idx": 0, "title": "Fog"}
    return [
        (hotpot(context=[["Wall"]]), "not written like a HotpotQA row"),
        (hotpot(context=[["Wall", [1]]]), "not written like a HotpotQA row"),
        (hotpot(context=[{"title": "Wall"}]), '"sentences" is missing in a HotpotQA row'),
        (hotpot(context={"title": ["a"], "sentences": []}), "not written like a HotpotQA row"),
        (hotpot(question=3), '"question" must be a string'),
        (musique(paragraphs=[paragraph]), '"paragraph_text" is missing in a MuSiQue row'),
        (musique(paragraphs=3), "not written like a MuSiQue row"),
        (trivia(Answer="Ada"), "not written like a TriviaQA row"),
        (trivia(Question=""), '"question" is empty'),
        ({"ctxs": ctxs(1), "answers": ["x"]}, '"claim" is missing in a Self-RAG row'),
        ({"question": "Q?", "answers": ["x"], "ctxs": [{"title": "x"}]}, '"text" is missing'),
        ({"question": "Q?", "possible_answers": "Ada"}, "not written like a PopQA row"),
        ({"question": "Q?", "context": "x", "answers": {"text": []}}, '"answers" must be a list'),
    ]


@pytest.mark.parametrize(("record", "complaint"), malformed())
def test_a_malformed_published_row_is_named(
    tmp_path: Path, record: dict[str, Any], complaint: str
) -> None:
    """The format it was taken for is named, and the row."""
    path = write(tmp_path / "q.json", json.dumps([record]))

    message = error_of(path)

    assert message.startswith(f"{path}, row 1")
    assert complaint in message


def test_a_single_object_over_several_lines_is_read(tmp_path: Path) -> None:
    """A file of one question need not be squeezed into a line."""
    path = write(tmp_path / "q.json", json.dumps(line(), indent=2))

    assert [question.id for question in read_questions([path])] == ["q1"]


# The hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for data sets, with the library's own cache beside it."""
    datasets = pytest.importorskip("datasets", reason="the extra `hub` is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


def test_a_set_of_the_hub_is_read(hub: Path) -> None:
    """The rows are those of the files; the validation split is taken where none is named."""
    write_lines(hub / "walls" / "train.jsonl", hotpot(_id="t"))
    write_lines(hub / "walls" / "validation.jsonl", hotpot(_id="v"), hotpot(_id="w"))
    name = f"hub:{hub}/walls"

    usual = read_questions([name])

    assert [(question.id, question.dataset) for question in usual] == [
        ("v", "walls"),
        ("w", "walls"),
    ]
    assert texts(usual[0])[0] == ("Wall", "The wall is old. Ada Stone built it.")
    assert usual[0].gold == {"1"}
    for given in (f"{name}:train", f"{name}:default:train", f"{name}:train[:1]"):
        assert [question.id for question in read_questions([given])] == ["t"]
    assert [one.dataset for one in read_questions([f"{name}:train", f"{name}:validation"])] == [
        "train/walls",
        "validation/walls",
        "validation/walls",
    ]


def test_numbered_labels_get_their_names(hub: Path, docs: list[Path]) -> None:
    """A set may hold numbers for labels, and a negative one for none."""
    import datasets

    label = datasets.ClassLabel(names=["false", "mixture", "true", "unproven"])
    text = datasets.Value("string")
    columns = {"claim_id": ["1", "2"], "claim": ["It is old.", "It is new."], "label": [2, -1]}
    features = datasets.Features({"claim_id": text, "claim": text, "label": label})
    (hub / "claims").mkdir()
    made = datasets.Dataset.from_dict(columns, features=features)
    made.to_parquet(str(hub / "claims" / "test.parquet"))

    (question,) = read_questions([f"hub:{hub}/claims"], docs=docs)

    assert (question.id, question.answers) == ("1", ("true",))


def test_keys_that_only_other_rows_have_are_no_values(hub: Path) -> None:
    """A table has every column in every row."""
    import datasets

    marked = [{"id": "a", "text": "x", "is_gold": True}, {"id": None, "text": "y", "is_gold": None}]
    (hub / "q").mkdir()
    made = datasets.Dataset.from_list([line(passages=marked), line(2, passages=None)])
    made.to_parquet(str(hub / "q" / "test.parquet"))

    with pytest.raises(InputError, match="row 2: this question has no passages"):
        read_questions([f"hub:{hub}/q"])
    (first,) = read_questions([f"hub:{hub}/q::test[:1]"])

    assert [passage.metadata for passage in first.passages] == [{"is_gold": True}, {}]


def test_the_only_split_is_taken_whatever_its_name(hub: Path) -> None:
    """Of several with unusual names one has to be named."""
    for file in ("one/data/easy", "two/data/easy", "two/data/hard"):
        write_lines(hub / f"{file}-00000-of-00001.jsonl", line())

    assert [one.id for one in read_questions([f"hub:{hub}/one"])] == ["q1"]
    assert [one.id for one in read_questions([f"hub:{hub}/two::hard"])] == ["q1"]
    assert "name one of its splits: easy, hard" in error_of(f"hub:{hub}/two")


def test_a_failure_of_the_hub_is_one_clear_line(hub: Path) -> None:
    """An unknown set, split or configuration is named, and so is a bad row."""
    write_lines(hub / "q" / "test.jsonl", line(), line(2, question=" "))
    name = f"hub:{hub}/q"

    assert f"{name}:train: datasets cannot load this (" in error_of(f"{name}:train")
    assert f"{name}:hard:test: datasets cannot load this (" in error_of(f"{name}:hard:test")
    assert "datasets cannot load this (" in error_of(f"hub:{hub}/gone")
    assert error_of(name) == f'{name}, row 2: "question" is empty'


@pytest.mark.parametrize("given", ["hub:", "hub::test", "hub:a:b:c:d"])
def test_a_set_of_the_hub_must_be_written_right(given: str) -> None:
    """The message says how."""
    assert error_of(given).startswith(f"{given}: write it as hub:NAME")


def test_the_hub_needs_datasets() -> None:
    """Where the library is absent, the extra is named."""
    try:
        import datasets  # noqa: F401
    except ImportError:
        with pytest.raises(MissingDependencyError, match=r"specrag-integrations\[hub\]"):
            read_questions(["hub:walls"])
    else:
        pytest.skip("datasets is installed")


# Real sets

_SHORT = ("short", 0)
_LONG = ("long", 0)
_REAL = {
    # kind and number of labels; of all, how many have gold, cannot be answered, follow on others
    "2wikimultihopqa": (_SHORT, 127, 127, 0, 0),
    "clapnq_longform": (_LONG, 76, 48, 28, 0),
    "fm2_fact_verification": (("label", 2), 210, 210, 0, 0),
    "freshqa_toolqa_retrieved": (_SHORT, 72, None, 0, 0),
    "hotpotqa_distractor": (_SHORT, 220, 220, 0, 0),
    "hotpotqa_pooled_retrieval": (_SHORT, 145, 145, 0, 0),
    "mtragun_enterprise": (_LONG, 54, 43, 11, 46),
    "musique": (_SHORT, 107, 107, 0, 0),
    "nq_open_bm25": (_SHORT, 172, 172, 0, 0),
    "popqa_triviaqa_retrieved": (_SHORT, 68, None, 0, 0),
    "pubhealth_fact_verification": (("label", 4), 78, 78, 0, 0),
    "ramdocs_conflict": (_SHORT, 148, 148, 0, 0),
    "sec10q_finance_docs": (_LONG, 29, None, 0, 0),
    "tatqa_finance": (_SHORT, 108, 108, 0, 0),
    "techqa_it_support": (_LONG, 82, 82, 0, 0),
}


def test_the_real_sets_come_out_as_they_are_described(data_dir: Path) -> None:
    """Kind, labels, gold, unanswerable questions and earlier turns of all fifteen."""
    questions = read_questions([data_dir / f"{name}.jsonl" for name in _REAL])

    for name, expected in _REAL.items():
        of_it = [question for question in questions if question.dataset == name]
        ((kind, labels),) = {(question.kind, len(question.labels)) for question in of_it}
        known = {question.gold is not None for question in of_it}
        assert len(known) == 1
        gold = sum(bool(question.gold) for question in of_it) if known == {True} else None
        empty = sum(not question.answerable for question in of_it)
        later = sum(bool(question.history) for question in of_it)
        assert (name, ((kind, labels), len(of_it), gold, empty, later)) == (name, expected)
    for question in questions:
        ids = [passage.id for passage in question.passages]
        assert len(set(ids)) == len(ids)
        assert (question.gold or set()) <= set(ids)
        assert question.history == () or question.history[-1].role == "assistant"
