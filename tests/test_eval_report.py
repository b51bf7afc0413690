import copy
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specrag_integrations.errors import MissingDependencyError
from specrag_integrations.evaluation.report import report_html

VOID = {"meta", "link", "br", "hr", "img", "input", "col", "wbr"}
HOSTILE = (
    "<script>alert('1')</script><img src=\"http://evil.example/x\" onerror=alert(1)>{{ 7 * 7 }}&"
)


class Page(HTMLParser):
    """A page as a reader meets it: its tags, whether they balance, its texts and tables."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.unbalanced: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"td", "th"}:
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def numbers(self, first: str) -> list[list[str]]:
        """Return the rows, without their heads, of the tables whose first column is so named."""
        found = [
            [[" ".join(cell.split()) for cell in row] for row in table]
            for table in self.tables
            if table and " ".join(table[0][0].split()) == first
        ]
        return [row for table in found for row in table[1:]]

    def table(self, *columns: str) -> list[list[str]]:
        """Return the rows of the one table with these columns."""
        (found,) = [table for table in self.tables if table[0] == list(columns)]
        return found[1:]


def interval(value: float, low: float, high: float, n: int = 150) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "n": n}


def system(name: str, accuracy: float, median: float | None, **more: Any) -> dict[str, Any]:
    timed = median is not None
    made = {
        "name": name,
        "description": f"how {name} works",
        "questions": 150,
        "errors": 0,
        "accuracy": interval(accuracy, accuracy - 0.08, accuracy + 0.08),
        "exact": interval(0.31, 0.25, 0.37, 149),
        "f1": interval(0.45, 0.4, 0.5, 149),
        "words": 4.2,
        "abstained": 0.1,
        "fallback": None,
        "citation_precision": None,
        "first_token": {"p50": median, "p95": 2 * (median or 0), "n": 41} if timed else None,
        "total": {"p50": median, "p95": 3 * (median or 0), "n": 40} if timed else None,
        "stages": {"answer": median} if timed else {},
        "tokens": {
            "drafter": {"prompt": 0, "completion": 0},
            "verifier": {"prompt": 1500, "completion": 9},
        },
        "decoded_by_drafter": None,
        "cost": None,
        "against_standard": None,
        "by_dataset": [{"dataset": "nq", "accuracy": interval(0.44, 0.3, 0.58, 50)}],
    }
    return {**made, **more}


def whole() -> dict[str, Any]:
    """Return a summary with every part of the contract."""
    against = {
        "difference": interval(0.012, -0.055, 0.075),
        "wins": 12,
        "losses": 9,
        "ties": 129,
        "p": 0.6636,
        "verdict": "inconclusive",
        "questions_needed": 420,
        "speedup": interval(1.52, 1.31, 1.78, 38),
        "verifier_tokens": 0.55,
    }
    speculative = system(
        "speculative",
        0.532,
        2.9,
        fallback=0.12,
        citation_precision=interval(0.6, 0.5, 0.7, 77),
        stages={"partition": 0.02, "draft": 1.9, "verify": 0.8, "audit": 0.18},
        tokens={
            "drafter": {"prompt": 2100, "completion": 260},
            "verifier": {"prompt": 900, "completion": 5},
        },
        decoded_by_drafter=0.97,
        cost={"value": 1.234, "currency": "$", "per": 1000},
        against_standard=against,
        by_dataset=[
            {
                "dataset": "nq",
                "accuracy": interval(0.47, 0.33, 0.61, 50),
                "difference": interval(0.03, -0.1, 0.16, 50),
            }
        ],
    )
    sitting = {
        "version": "0.1.0",
        "made": "2026-11-30T01:00:00+00:00",
        "commit": "abc123",
        "seed": 7,
        "command": "specrag eval nq.jsonl fm2.jsonl",
        "machine": {
            "cpu": "A processor",
            "cores": 2,
            "memory_gb": 24,
            "system": "Linux",
            "python": "3.11.7",
        },
        "servers": {"drafter": "llama.cpp b1", "verifier": None},
    }
    return {
        **sitting,
        "sittings": [
            sitting,
            {**sitting, "made": "2026-12-01T01:00:00+00:00", "commit": "def456+changes"},
            {**sitting, "made": "2026-12-02T01:00:00+00:00"},
        ],
        "mixed_times": "The times come from 2 machines.",
        "models": {
            "drafter": {"name": "small", "server": "llama.cpp b1", "where": "embedded"},
            "verifier": {"name": "large", "server": None, "where": "http://localhost:8000/v1"},
        },
        "datasets": [
            {"name": "nq", "kind": "short", "questions": 50, "passages": 10.0, "unanswerable": 3},
            {
                "name": "fm2",
                "kind": "label",
                "questions": 100,
                "passages": 9.5,
                "majority": {"label": "SUPPORTS", "share": 0.53},
                "unanswerable": 0,
            },
        ],
        "systems": [
            system("standard", 0.52, 4.1),
            speculative,
            system("slow_and_wrong", 0.41, 6.0, errors=2),
            system("oracle", 0.7, None, bound=True),
            system("replayed", 0.45, None),
        ],
        "selection": [
            {
                "system": "speculative",
                "labels": False,
                "questions": 50,
                "contested": 30,
                "mean": 0.381,
                "selected": 0.512,
                "oracle": 0.643,
                "efficiency": interval(0.5, 0.28, 0.72, 30),
            },
            {
                "system": "speculative",
                "labels": True,
                "questions": 100,
                "contested": 11,
                "mean": 0.48,
                "selected": 0.52,
                "oracle": 0.86,
                "efficiency": None,
            },
        ],
        "risk_coverage": [
            {
                "system": "speculative",
                "n": 150,
                "points": [{"coverage": 0.5, "risk": 0.21}, {"coverage": 1.0, "risk": 0.47}],
            }
        ],
        "reliability": [
            {
                "system": "speculative",
                "bins": [
                    {"confidence": 0.22, "right": 0.25, "low": 0.1, "high": 0.47, "n": 20},
                    {"confidence": 0.81, "right": 0.7, "low": 0.48, "high": 0.86, "n": 21},
                ],
                "brier": 0.2134,
                "ece": 0.0456,
            }
        ],
        "sweeps": {
            "m": [
                {"value": 5, "system": "m5", "accuracy": interval(0.5, 0.4, 0.6), "seconds": 3.1},
                {"value": 1, "system": "m1", "accuracy": interval(0.4, 0.3, 0.5), "seconds": None},
            ],
            "k": [
                {"value": 2, "system": "k2", "accuracy": interval(0.45, 0.4, 0.5), "seconds": 0.25}
            ],
        },
        "failures": [
            {
                "dataset": "nq",
                "id": "nq-7",
                "question": "when was the lighthouse first lit",
                "answers": ["1811", "1 February 1811"],
                "why": "a right draft was not selected",
                "answered": [
                    {"system": "standard", "text": "In 1811.", "right": True},
                    {"system": "speculative", "text": "In 1807.", "right": False},
                    {"system": "silent", "text": "", "right": None},
                ],
                "drafts": [
                    {
                        "index": 0,
                        "answer": "1807",
                        "ranks": [0, 3],
                        "value": -0.213,
                        "right": False,
                        "selected": True,
                    },
                    {
                        "index": 1,
                        "answer": "1811",
                        "ranks": [1],
                        "value": None,
                        "right": True,
                        "selected": False,
                    },
                ],
            }
        ],
        "recommendation": "Standard RAG is as good here; use it.",
    }


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(report_html(whole()))


# -------------------------------------------------------------------- the page as a whole


def everywhere(value: Any, text: str) -> Any:
    """Put a text into every text of a summary, but for those that are a choice of few."""
    if isinstance(value, str):
        return value + text
    if isinstance(value, list):
        return [everywhere(inner, text) for inner in value]
    if isinstance(value, dict):
        return {
            name: inner if name in {"kind", "verdict", "made"} else everywhere(inner, text)
            for name, inner in value.items()
        }
    return value


SUMMARIES = {
    "whole": whole(),
    "nothing": {},
    "all_none": dict.fromkeys(whole()),
    "all_empty": {name: type(value)() if value else None for name, value in whole().items()},
    "one_system": {**whole(), "systems": [system("standard", 0.5, None, by_dataset=None)]},
    "bare_system": {**whole(), "systems": [{"name": "standard"}]},
    "hostile": everywhere(whole(), HOSTILE),
    "right_to_left": everywhere(whole(), "\u202e\u05e9\u05dc\u05d5\u05dd\u2066"),
    "long_words": everywhere(whole(), "x" * 500),
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_every_page_is_well_formed_and_asks_nothing_of_a_network(name: str) -> None:
    """Tags balance, no script and no reference leaves the page, no number is none of one."""
    html = report_html(SUMMARIES[name])
    page = Page(html)

    assert (page.open, page.unbalanced) == ([], [])
    assert html.startswith("<!DOCTYPE html>")
    names = [tag for tag, _ in page.tags]
    assert not {"script", "img", "iframe", "object", "embed", "base", "form"} & set(names)
    attributes = [(tag, *pair) for tag, found in page.tags for pair in found.items()]
    assert [
        one for one in attributes if one[1] in {"href", "src", "srcset", "action", "xlink:href"}
    ] == [("link", "href", "data:,")]
    assert not [one for one in attributes if one[1].startswith("on")]
    assert not re.search(r"url\(|@import", html)
    for tag, attribute, value in attributes:
        if attribute in {"x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height", "r"}:
            assert re.fullmatch(r"-?\d+(\.\d+)?", value or ""), (tag, attribute, value)
        if attribute in {"points", "viewbox"}:
            assert re.fullmatch(r"[-\d., ]+", value or ""), (tag, attribute, value)
    assert not re.search(r"\b(nan|inf|None|Undefined)\b", page.text)


@pytest.mark.parametrize("name", SUMMARIES)
def test_every_chart_has_a_title_a_description_and_its_numbers(name: str) -> None:
    """What a drawing is labelled by is there, once, and each chart folds its table beneath it."""
    page = Page(report_html(SUMMARIES[name]))
    ids = [found["id"] for _, found in page.tags if "id" in found]
    drawings = [found for tag, found in page.tags if tag == "svg" and found.get("role") == "img"]
    figures = sum(tag == "figure" for tag, _ in page.tags)
    tables = sum(
        tag == "table" and "numbers" in (found.get("class") or "") for tag, found in page.tags
    )

    assert len(ids) == len(set(ids))
    assert all(set((found["aria-labelledby"] or "").split()) <= set(ids) for found in drawings)
    assert figures == tables
    assert figures <= len(drawings) <= 2 * figures


def test_the_page_forbids_scripts_and_requests_even_if_a_text_got_through(page: Page) -> None:
    """A content policy in the page allows styles of its own and nothing else."""
    (policy,) = [
        found["content"]
        for tag, found in page.tags
        if tag == "meta" and found.get("http-equiv") == "Content-Security-Policy"
    ]

    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_the_recommendation_is_what_is_read_first(page: Page) -> None:
    """It is the heading, before what was run, the systems, and the rest in its order."""
    text = page.text
    order = [
        "Standard RAG is as good here; use it.",
        "small, llama.cpp b1, embedded",
        "The systems",
        "Accuracy against time",
        "By data set",
        "Does it select the right draft?",
        "Risk against coverage",
        "Does its confidence mean what it says?",
        "How many drafts, of how many passages?",
        "Where the time goes",
        "Failures worth reading",
    ]
    body = text[text.index("measured on your data") :]
    places = [body.index(words) for words in order]

    assert places == sorted(places)


@pytest.mark.parametrize(
    "words",
    [
        "large, server version unknown, http://localhost:8000/v1",
        "A processor, 2 cores, 24 GB, Linux, Python 3.11.7",
        "30 November 2026, 01:00 UTC",
        "specrag-integrations 0.1.0, commit abc123",
        "Seed 7",
        "specrag eval nq.jsonl fm2.jsonl",
        "Went on 1 December 2026, 01:00 UTC; specrag-integrations 0.1.0, commit def456+changes",
        "Went on 2 December 2026, 01:00 UTC; all else as before",
        "and p95. The times come from 2 machines.",
    ],
)
def test_what_was_run_is_said(page: Page, words: str) -> None:
    """Models, servers, machine, date, version, commit, seed and command are on the page.

    Of a later sitting, what was not as in the first.
    """
    assert words in page.text


def test_hostile_texts_are_shown_and_never_run() -> None:
    """Markup and template syntax from data come out as the letters they are."""
    html = report_html(SUMMARIES["hostile"])

    assert "<script" not in html
    assert HOSTILE in Page(html).text
    assert "49" not in Page(report_html({"recommendation": "{{ 7 * 7 }}"})).text


def test_characters_that_no_page_may_hold_are_replaced(tmp_path: Path) -> None:
    """Controls, lone surrogates and direction overrides are written as U+FFFD."""
    path = tmp_path / "report.html"
    path.write_text(
        report_html({"recommendation": "a\x00b\ud800c\u202ed\x1b[31m"}), encoding="utf-8"
    )

    assert "a\ufffdb\ufffdc\ufffdd\ufffd[31m" in path.read_text(encoding="utf-8")


def test_a_page_is_made_from_the_file_of_a_summary(tmp_path: Path) -> None:
    """A summary that went through JSON makes the same page."""
    path = tmp_path / "report.html"
    path.write_text(report_html(json.loads(json.dumps(whole()))), encoding="utf-8")

    assert report_html(whole()) == path.read_text(encoding="utf-8")


def test_the_summary_is_left_as_it_was() -> None:
    """Making a page changes nothing in what it was made from."""
    summary = whole()
    before = copy.deepcopy(summary)
    report_html(summary)

    assert before == summary


def test_without_jinja2_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install."""
    monkeypatch.setitem(sys.modules, "jinja2", None)

    with pytest.raises(MissingDependencyError, match=r"jinja2 .*specrag-integrations\[eval\]"):
        report_html({})


# ------------------------------------------------------------------------ the systems


def row(page: Page, name: str) -> str:
    """Return the row of a system in the table of systems."""
    return next(" | ".join(cells) for cells in page.numbers("System") if cells[0].startswith(name))


@pytest.mark.parametrize(
    "words",
    [
        "how speculative works 150 questions",
        "53.2 % n 150 45.2 to 61.2 %",
        "+1.2 n 150 \u22125.5 to +7.5",
        "inconclusive; about 420 questions would settle it",
        "12 won, 9 lost, 129 equal; p 0.66",
        "45.0 % n 149 40.0 to 50.0 % exact 31.0 % (25.0 to 37.0 %)",
        "| 4.2 |",
        "10.0 % fell back 12.0 %",
        "2.9 s n 41 p95 5.8 s",
        "2.9 s n 40 p95 8.7 s",
        "1.52\u00d7 n 38 1.31 to 1.78\u00d7",
        "2,100 read 260 written 97.0 % of all written",
        "900 read 5 written 0.55\u00d7 standard's",
        "60.0 % n 77 50.0 to 70.0 %",
        "$1.23",
    ],
)
def test_a_system_is_shown_with_its_intervals_and_counts(page: Page, words: str) -> None:
    """Every number of a row stands with what says how far to trust it."""
    assert words in row(page, "speculative")


def test_what_else_differs_is_told_with_its_interval_and_its_test() -> None:
    """F1, exact match, words and citations are compared as rightness is."""
    summary = whole()
    tested = {**interval(-0.087, -0.158, -0.014, 150), "p": 0.009}
    against = {"f1": tested, "words": {**interval(2.1, 1.5, 2.8, 150), "p": 0.0001}}
    summary["systems"][1]["against_standard"] |= against
    summary["systems"][1] |= {"abstained_rightly": interval(0.5, 0.2, 0.8, 10)}
    told = row(Page(report_html(summary)), "speculative")
    assert "to standard \u22128.7 (\u221215.8 to \u22121.4); p 0.009" in told
    assert "to standard 2.1 (1.5 to 2.8); p < 0.001" in told
    assert "where nothing answers 50.0 % (20.0 to 80.0 %)" in told


def test_tokens_that_nobody_counted_are_not_none() -> None:
    """No tokens and unknown tokens are told apart."""
    summary = whole()
    summary["systems"][1]["tokens"]["verifier"] = {"prompt": None, "completion": None}
    page = Page(report_html(summary))
    assert "not counted" in row(page, "speculative")
    assert "none" in row(page, "standard")


def test_what_was_not_measured_is_said_and_not_left_blank(page: Page) -> None:
    """No cell of the tables of systems is empty; a replayed system has no uncached timing."""
    assert row(page, "replayed").count("no uncached timing") == 3
    assert "2 failed" in row(page, "slow_and_wrong")
    assert "the reference" in row(page, "standard")
    assert all(cell for cells in page.numbers("System") for cell in cells)


def test_columns_that_no_system_has_are_left_out_and_named() -> None:
    """A run of one system compares nothing, and the page says what it does not have."""
    page = Page(report_html(SUMMARIES["one_system"]))
    text = page.text

    assert "Difference to standard" not in text
    assert "Speed-up" not in text
    assert "Costs: no prices were given." in text
    assert "Accuracy against time: no uncached timing of a graded system." in text
    assert "not measured" in text


def test_an_empty_run_says_so() -> None:
    """Nothing is recommended, nothing is drawn, and each missing part has its reason."""
    page = Page(report_html({}))

    assert "No recommendation" in page.text
    assert "No system has answered a question." in page.text
    assert not [tag for tag, _ in page.tags if tag == "svg"]
    assert page.text.count("Not in this run") == 1


@pytest.mark.parametrize(
    ("against", "words"),
    [
        ({"verdict": "as_good"}, "as good"),
        ({"verdict": "worse", "questions_needed": 9}, "worse"),
        ({"verdict": None}, "no verdict"),
        ({"p": 0.0004}, "p < 0.001"),
        ({"p": 0.0042}, "p 0.004"),
        ({"wins": None}, "no sign test"),
        ({"p": None}, "12 won, 9 lost, 129 equal"),
        ({"speedup": None}, "no uncached timing"),
        ({"difference": interval(0.4, -0.1, float("inf"))}, "at least \u221210.0"),
    ],
)
def test_a_comparison_is_told_in_words(against: dict[str, Any], words: str) -> None:
    """Verdict, sign test and open ends are said; nothing more is claimed."""
    summary = whole()
    summary["systems"][1]["against_standard"] |= against

    told = row(Page(report_html(summary)), "speculative")
    assert words in told
    assert (
        "would settle" not in told
        or summary["systems"][1]["against_standard"]["verdict"] == "inconclusive"
    )


def test_data_sets_show_what_guessing_would_get(page: Page) -> None:
    """The share of the majority label stands beside what the systems reach."""
    assert "always “ SUPPORTS ”: 53.0 %" in page.text
    assert "3 unanswerable" in page.text
    assert "+3.0 (\u221210.0 to +16.0)" in row_of_dataset(page, "speculative")


def row_of_dataset(page: Page, name: str) -> str:
    """Return the row of a system in the table of data sets."""
    (table,) = [table for table in page.tables if table[0][-1].startswith("fm2")]
    rows = [[" ".join(cell.split()) for cell in cells] for cells in table]
    return next(" | ".join(cells) for cells in rows if cells[0] == name)


# ------------------------------------------------------------------------ charts and numbers


def test_the_numbers_of_accuracy_against_time_are_the_summary_s(page: Page) -> None:
    """Only what is both graded and timed is drawn; the rest is named."""
    columns = ("System", "Right", "Interval", "n", "Median time", "Timed", "On the frontier")

    assert page.table(*columns) == [
        ["standard", "52.0\u00a0%", "44.0 to 60.0\u00a0%", "150", "4.1\u00a0s", "40", "no"],
        ["speculative", "53.2\u00a0%", "45.2 to 61.2\u00a0%", "150", "2.9\u00a0s", "40", "yes"],
        ["slow_and_wrong", "41.0\u00a0%", "33.0 to 49.0\u00a0%", "150", "6.0\u00a0s", "40", "no"],
    ]
    assert "without a graded answer or an uncached timing: \u2068replayed\u2069." in page.text


def test_the_numbers_of_the_selection_are_the_summary_s(page: Page) -> None:
    """Sets of labels stand in a chart of their own, and contested questions are counted."""
    columns = ("System", "Mean draft", "Selected", "Oracle", "Questions", "Efficiency", "Interval")
    first, second = [table for table in page.tables if table[0] == [*columns, "Contested"]]

    assert first[1:] == [
        [
            "speculative",
            "38.1\u00a0%",
            "51.2\u00a0%",
            "64.3\u00a0%",
            "50",
            "0.50",
            "0.28 to 0.72",
            "30",
        ]
    ]
    assert second[1][4:] == ["100", "\u2013", "no interval", "11"]
    assert page.text.index("Short answers") < page.text.index("Sets of labels")


def test_the_numbers_of_the_confidence_are_the_summary_s(page: Page) -> None:
    """Risk by coverage, and right answers by confidence with interval and count."""
    assert page.table("System", "Questions", "Coverage", "Risk") == [
        ["speculative", "150", "50.0\u00a0%", "21.0\u00a0%"],
        ["speculative", "150", "100.0\u00a0%", "47.0\u00a0%"],
    ]
    assert page.table("Confidence", "Right", "Interval", "n") == [
        ["22.0\u00a0%", "25.0\u00a0%", "10.0 to 47.0\u00a0%", "20"],
        ["81.0\u00a0%", "70.0\u00a0%", "48.0 to 86.0\u00a0%", "21"],
    ]
    assert "41 answers, Brier score 0.213, expected calibration error 0.046." in page.text


def test_the_numbers_of_the_sweeps_are_the_summary_s(page: Page) -> None:
    """Values are in order, and a value that was not timed says so."""
    assert page.table("m", "System", "Right", "Interval", "n", "Time") == [
        ["1", "m1", "40.0\u00a0%", "30.0 to 50.0\u00a0%", "150", "no uncached timing"],
        ["5", "m5", "50.0\u00a0%", "40.0 to 60.0\u00a0%", "150", "3.1\u00a0s"],
    ]
    assert page.table("k", "System", "Right", "Interval", "n", "Time") == [
        ["2", "k2", "45.0\u00a0%", "40.0 to 50.0\u00a0%", "150", "0.25\u00a0s"]
    ]


def test_the_numbers_of_the_stages_are_the_summary_s(page: Page) -> None:
    """Known stages come in their order, others after them, with their sum and count."""
    columns = ("System", "partition", "draft", "verify", "answer", "audit", "Sum", "Timed")

    assert page.table(*columns)[:2] == [
        ["standard", "\u2013", "\u2013", "\u2013", "4.1\u00a0s", "\u2013", "4.1\u00a0s", "40"],
        [
            "speculative",
            "0.02\u00a0s",
            "1.9\u00a0s",
            "0.80\u00a0s",
            "\u2013",
            "0.18\u00a0s",
            "2.9\u00a0s",
            "40",
        ],
    ]


def widths(html: str, colour: str) -> list[float]:
    bars = re.findall(r'<rect class="stage ([^"]*)" x="[^"]*" y="[^"]*" width="([^"]*)"', html)
    return [float(width) for classes, width in bars if classes == colour]


def test_bars_are_as_long_as_their_seconds() -> None:
    """In both drawings, a stage that takes twice as long is drawn twice as long."""
    summary = whole()
    for one, spent in zip(summary["systems"], (1.0, 2.0, 4.0, 0.0), strict=False):
        one["stages"] = {"draft": spent}
    summary["systems"][4]["stages"] = {}

    wide, narrow = (
        widths(report_html(summary), "hue-0")[:3],
        widths(report_html(summary), "hue-0")[3:],
    )
    for drawn in (wide, narrow):
        assert pytest.approx([width / drawn[0] for width in drawn], abs=0.01) == [1.0, 2.0, 4.0]


def test_every_stage_has_a_colour_of_its_own() -> None:
    """Whichever systems are compared: the legend tells them all apart, unknown ones too."""
    summary = whole()
    spent = dict.fromkeys(("draft", "verify", "select", "refine", "fallback", "audit"), 1.0)
    summary["systems"][1]["stages"] = {"partition": 1.0, **spent}

    wide = drawing(report_html(summary), "stages", "wide")
    swatches = re.findall(r'width="14" height="12" class="stage ([^"]*)"', wide)
    assert len(set(swatches)) == len(swatches) == 8


def drawing(html: str, figure: str, kind: str) -> str:
    """Return one drawing of a figure."""
    start = html.index(f'aria-labelledby="{figure}-{kind}-title')
    return html[start : html.index("</svg>", start)]


def dots(html: str, figure: str, kind: str) -> dict[str, tuple[float, float]]:
    """Return where a drawing's dots are, by what they are called."""
    circle = r'<circle cx="([^"]*)" cy="([^"]*)"[^>]*><title>([^<:]*)'
    found = re.findall(circle, drawing(html, figure, kind))
    return {name: (float(x), float(y)) for x, y, name in found}


@pytest.mark.parametrize("kind", ["wide", "narrow"])
def test_dots_lie_where_their_numbers_say(kind: str) -> None:
    """Faster is further left, more right is further up, in proportion to the axes."""
    found = dots(report_html(whole()), "frontier", kind)
    (x1, y1), (x2, y2), (x3, y3) = (
        found[name] for name in ("speculative", "standard", "slow_and_wrong")
    )

    assert x1 < x2 < x3
    assert y1 < y2 < y3
    assert (x3 - x2) / (x2 - x1) == pytest.approx((6.0 - 4.1) / (4.1 - 2.9), abs=0.02)
    assert (y3 - y2) / (y2 - y1) == pytest.approx((0.52 - 0.41) / (0.532 - 0.52), abs=0.5)


def test_crowded_names_become_numbers_with_a_key() -> None:
    """Where names would cover each other, dots are numbered and the names listed beneath."""
    summary = whole()
    summary["systems"] = [
        system(f"a system with quite a long name {index}", 0.5, 3.0 + index / 1e3)
        for index in range(25)
    ]
    html = report_html(summary)

    assert '<ol class="key">' in html
    assert "a system with quite a long name 24" in html[html.index('<ol class="key">') :]


def test_equal_systems_are_all_on_the_frontier() -> None:
    """Neither of two equal systems keeps the other off the frontier."""
    summary = {"systems": [system("one", 0.5, 2.0), system("other", 0.5, 2.0)]}
    columns = ("System", "Right", "Interval", "n", "Median time", "Timed", "On the frontier")

    assert [cells[-1] for cells in Page(report_html(summary)).table(*columns)] == ["yes", "yes"]


# ------------------------------------------------------------------------------- failures


def test_a_failure_can_be_read_through(page: Page) -> None:
    """Question, reference, answers and drafts with ranks (from 1), scores and the choice."""
    assert "Reference: 1811 , 1 February 1811 · nq-7" in page.text
    assert "nq : a right draft was not selected" in page.text
    answers = [table for table in page.tables if table[0][0] == "standard"]
    drafts = [table for table in page.tables if table[0][0] == "Draft"]

    assert [[" ".join(cell.split()) for cell in cells] for cells in answers[-1]] == [
        ["standard", "In 1811.", "✓ right"],
        ["speculative", "In 1807.", "✗ wrong"],
        ["silent", "(no answer)", "not judged"],
    ]
    assert [[" ".join(cell.split()) for cell in cells] for cells in drafts[0][1:]] == [
        ["1", "1807", "1, 4", "\u22120.21", "✗ wrong", "selected"],
        ["2", "1811", "2", "not scored", "✓ right", ""],
    ]


def test_a_failure_without_drafts_or_reference_says_so() -> None:
    """Standard RAG writes no drafts; an unanswerable question has no reference."""
    page = Page(report_html({"failures": [{"question": "why?"}]}))

    assert "No drafts were written." in page.text
    assert "Reference: none: nothing in the passages answers it" in page.text
