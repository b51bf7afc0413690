"""What a caller may pass as passages, and which of them are worth sending."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from specrag_integrations import InputError, Passage
from specrag_integrations.passages import usable_passages


def test_strings_and_passages_mix_and_keep_their_order():
    """A plain string is a passage; the order of the list is the rank."""
    given = Passage(text="two", id="b")

    usable = usable_passages(["one", given, "three"])

    assert [passage.text for passage in usable.passages] == ["one", "two", "three"]
    assert usable.passages[1] is given
    assert usable.dropped == ()


def test_any_iterable_is_taken_once():
    """A generator serves as well as a list."""
    assert len(usable_passages(text for text in ("one", "two")).passages) == 2


@pytest.mark.parametrize("empty", ["", "  \n\t ", "\u3000"])
def test_empty_passages_are_left_out_with_a_note(empty):
    """White space is no evidence, and the trace says which passage went."""
    usable = usable_passages(["one", Passage(text=empty, id="blank")])

    assert len(usable.passages) == 1
    assert usable.dropped == ("passage 1 blank: empty",)


def test_a_repeated_passage_is_left_out_whatever_its_case_and_spacing():
    """The same text twice would look like independent evidence; the better-ranked copy stays."""
    usable = usable_passages(
        [
            Passage(text="The Forth Bridge", id="a"),
            Passage(text=" the  FORTH\nbridge ", id="b"),
            Passage(text="The Forth Bridge", title="Other", id="c"),
        ]
    )

    assert [passage.id for passage in usable.passages] == ["a", "c"]
    assert usable.dropped == ("passage 1 b: repeats an earlier one",)


@pytest.mark.parametrize(
    "wrong", ["one text", b"bytes", Passage(text="alone"), {"text": "a"}, None, 3]
)
def test_what_is_no_list_of_passages_is_an_input_error(wrong):
    """A single string would otherwise be read letter by letter."""
    with pytest.raises(InputError, match="must be a list of Passage or str"):
        usable_passages(wrong)


@pytest.mark.parametrize("wrong", [None, 3, {"text": "a"}, b"bytes"])
def test_an_item_that_is_no_passage_is_named_by_its_place(wrong):
    """The message says which item, not what it holds."""
    with pytest.raises(InputError, match="passage 1 is a"):
        usable_passages(["fine", wrong])


@pytest.mark.parametrize(("text", "kind"), [(None, "NoneType"), (5, "int"), (b"b", "bytes")])
def test_a_passage_whose_text_is_none_is_told_so(text, kind):
    """A retriever may leave the text out; the message says what it must be."""
    told = f"passage 1: its text is a {kind} and must be a str"
    with pytest.raises(InputError, match=told):
        usable_passages(["fine", Passage(text=text)])


def test_the_repr_holds_no_text():
    """A log line with a passage in it leaks neither text, title, vector nor metadata."""
    secret = Passage(
        text="secret", title="secret", id="7", embedding=[0.25], metadata={"secret": 1}
    )

    assert "secret" not in repr(secret)
    assert "0.25" not in repr(secret)
    assert "7" in repr(secret)


def test_any_metadata_and_any_score_becomes_strict_json():
    """Retrievers hand over numpy scalars, dates and NaN; the JSON form has none of them."""
    passage = Passage(
        text="t",
        score=np.float32(0.5),
        metadata={
            "n": np.int64(3),
            "nan": math.nan,
            "inf": -math.inf,
            1: {"a": (1, 2.5, None, True)},
            "object": math,
        },
    )

    data = json.loads(json.dumps(passage.to_dict(), allow_nan=False))

    assert data["score"] == 0.5
    assert data["metadata"]["n"] == 3
    assert data["metadata"]["nan"] is None
    assert data["metadata"]["inf"] is None
    assert data["metadata"]["1"] == {"a": [1, 2.5, None, True]}
    assert isinstance(data["metadata"]["object"], str)
    assert "embedding" not in data
