"""The judge of `specrag eval`: the command with the real RAGAS, and what is kept and shown of it.

The tests of the command need the library, the others do not.
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scripted_server import Fault, Reply, ScriptedServer
from test_cli import COMMAND, environment, fails, specrag, until
from test_eval_cli import rows
from test_eval_ragas import given, judge_by_words
from test_eval_runs import respond, text_of
from test_eval_summary import grades, manifest, outcome, question, row

from specrag_integrations import ConfigurationError, Endpoint, InputError, Passage
from specrag_integrations.display import show_evaluation, show_seed_table
from specrag_integrations.errors import EndpointUnavailableError
from specrag_integrations.evaluation.cache import CachedModel, ReplyCache
from specrag_integrations.evaluation.folder import RunFolder
from specrag_integrations.evaluation.judging import (
    judge_answers,
    judgement_line,
    read_judgements,
)
from specrag_integrations.evaluation.outcomes import Outcome
from specrag_integrations.evaluation.ragas import Judgement
from specrag_integrations.evaluation.runs import Progress
from specrag_integrations.evaluation.summary import compared, summarised
from specrag_integrations.evaluation.systems import parse_systems

Scripted = Callable[..., ScriptedServer]
Json = dict[str, Any]
Key = tuple[str, str, str]
JUDGE = {"name": "judge-model", "identity": "judge", "server": "vllm 1", "where": "there"}
SYSTEMS = "standard,drafter_only"


def judging(body: Json, call: int) -> Any:
    """Judge by words; the first token asks for no judgement."""
    return Reply("OK") if text_of(body) == "Say OK." else judge_by_words(body, call)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return rows(tmp_path / "rivers.jsonl")


@pytest.fixture
def without_ragas(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which the library is not to be had."""
    folder = tmp_path / "without"
    folder.mkdir()
    (folder / "ragas.py").write_text("raise ImportError('hidden')\n")
    return {"PYTHONPATH": str(folder)}


# -------------------------------------------------------------------- the command


def test_answers_are_judged_kept_and_shown(
    ragas: Any, scripted: Scripted, data: Path, tmp_path: Path, without_ragas: dict[str, str]
) -> None:
    """Every answer gets its numbers, once; the report is remade without judge and library."""
    server, judge = scripted(respond), scripted(judging, models=("the-judge",), api_key="secret")
    out, cache = tmp_path / "run", {"SPECRAG_CACHE": str(tmp_path / "c")}
    plain = ["eval", data, "--drafter", server.base_url, "--systems", SYSTEMS, "--out", out]
    before = specrag(*plain, **cache)
    assert "RAGAS" not in before.stdout
    server.reset()

    command = [*plain, "--judge", judge.base_url]
    done = specrag(*command, SPECRAG_JUDGE_API_KEY="secret", **cache)

    assert len(server.chats) == 2  # the first token of each role
    kept = read_judgements(out / "judgements.jsonl")
    assert len(kept) == 8
    assert all(one == Judgement(faithfulness=1, factual_correctness=1) for one in kept.values())
    told = " ".join(done.stdout.split())
    assert "Judged by the-judge: 8 of 8 answers. Factual correctness takes" in told
    summary = json.loads((out / "summary.json").read_text())
    assert summary["judge"]["name"] == "the-judge"
    assert row(summary, "standard")["faithfulness"]["n"] == 4
    assert "Judged by RAGAS" in (out / "report.html").read_text()

    judge.reset()
    again = specrag(*command, SPECRAG_JUDGE_API_KEY="secret", **cache)
    assert again.stdout == done.stdout
    assert len(judge.chats) == 1
    judge.close()
    assert specrag("report", out, **without_ragas).stdout == done.stdout


def test_a_run_in_memory_is_judged_too(
    ragas: Any, scripted: Scripted, data: Path, tmp_path: Path
) -> None:
    """Without --out the numbers are printed; --table seed has them in the place of rightness."""
    server, judge = scripted(respond), scripted(judging)
    command = ["eval", data, "--drafter", server.base_url, "--systems", SYSTEMS]
    command += ["--judge", judge.base_url, "--judge-model", "scripted", "--table", "seed"]
    told = specrag(*command, SPECRAG_CACHE=str(tmp_path / "c")).stdout
    assert "factual (RAGAS)" in told
    assert "right" not in told.splitlines()[0]


def test_judging_that_was_interrupted_goes_on_where_it_was(
    ragas: Any, scripted: Scripted, tmp_path: Path
) -> None:
    """Ctrl-C keeps the judgements there are, and only the rest is judged by the same command."""
    data = rows(tmp_path / "rivers.jsonl", 12)

    def distinct(body: Json, call: int) -> Any:
        """Answer each question otherwise, so that no judgement comes from the cache."""
        number = text_of(body).rsplit("Which river is number ", 1)[-1].split("?")[0]
        return Reply(f"It is river {number} [1].") if body.get("stream") else respond(body, call)

    server, judge = scripted(distinct), scripted(judging, delay=0.2)
    out, cache = tmp_path / "run", {"SPECRAG_CACHE": str(tmp_path / "c")}
    command = ["eval", str(data), "--drafter", server.base_url, "--systems", "standard"]
    command += ["--judge", judge.base_url, "--out", str(out)]
    process = subprocess.Popen(
        [*COMMAND, *command],
        env=environment(**cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    judgements = out / "judgements.jsonl"
    assert until(lambda: judgements.exists() and judgements.read_text())
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    assert "12 outcomes and " in told
    kept = judgements.read_text().count("\n")
    assert 1 <= kept < 12

    judge.delay = 0.0
    judge.reset()
    specrag(*command, **cache)
    assert len(judgements.read_text().splitlines()) == 12
    texts = {json.dumps(given(body)) for body in judge.chats[1:]}
    assert texts
    first = json.loads(judgements.read_text().splitlines()[0])["id"]
    number = first.removeprefix("q")
    assert not any(f"number {number}?" in text for text in texts)


def test_a_judge_that_dies_ends_the_run_with_one_line(
    ragas: Any, scripted: Scripted, data: Path, tmp_path: Path
) -> None:
    """The outcomes stay, nothing is kept as if it had been judged, and the line says so."""
    server = scripted(respond)
    judge = scripted(lambda body, call: Reply("OK") if call == 0 else Fault(503))
    out = tmp_path / "run"
    command = ["eval", data, "--drafter", server.base_url, "--systems", "standard", "--out", out]
    command += ["--judge", judge.base_url]
    told = fails(*command, SPECRAG_CACHE=str(tmp_path / "c"))
    assert "503" in told
    assert "4 outcomes are kept in" in told
    assert not (out / "judgements.jsonl").exists()


def test_without_the_library_nothing_is_asked(
    scripted: Scripted, data: Path, tmp_path: Path, without_ragas: dict[str, str]
) -> None:
    """The error says what to install, before any model has been asked."""
    server = scripted(respond)
    command = ["eval", data, "--drafter", server.base_url, "--judge", server.base_url]
    told = fails(*command, SPECRAG_CACHE=str(tmp_path / "c"), **without_ragas)
    assert "specrag-integrations[ragas]" in told
    assert server.requests == []


def test_a_model_of_no_judge_is_wrong_usage(server: ScriptedServer, data: Path) -> None:
    """--judge-model alone would judge nothing."""
    told = fails("eval", data, "--drafter", server.base_url, "--judge-model", "m", code=2)
    assert "--judge-model goes with --judge" in told
    assert server.requests == []


# -------------------------------------------------------------------- what is judged


@pytest.fixture
def judge_of(tmp_path: Path) -> Iterator[Callable[[ScriptedServer], CachedModel]]:
    with closing(ReplyCache(tmp_path / "replies.sqlite")) as cache:
        yield lambda server: CachedModel(
            Endpoint(server.base_url, "scripted"), cache=cache, identity="judge"
        )


def judge_all(
    outcomes: Sequence[Outcome], judge: CachedModel, **options: Any
) -> dict[Key, Judgement]:
    kept: dict[Key, Judgement] = {}
    options = {
        "questions": [question(number) for number in range(4)],
        "systems": parse_systems(SYSTEMS),
        "known": {},
        **options,
    }
    judge_answers(outcomes, judge, keep=kept.__setitem__, **options)
    return kept


def test_the_judge_gets_what_the_answer_rests_on(
    ragas: Any, scripted: Scripted, judge_of: Callable[[ScriptedServer], CachedModel]
) -> None:
    """The passages of the outcome, as the models have read them, and the nearest reference."""
    server = scripted(judge_by_words)
    passages = (
        Passage(text="It is 9 km long.", title="The Lune", id="a"),
        Passage(text="Not read.", id="b"),
        Passage(text="Its source is a well.", id="c"),
    )
    asked = question(0, answers=("the Thames", "river Lune"), passages=passages)
    one = outcome("standard", 0, None, text="It is the Lune [1].", passages=("c", "a"))

    judge_all([one], judge_of(server), questions=[asked])

    inputs = [given(body) for body in server.chats]
    contexts = {data["context"] for data in inputs if "context" in data}
    assert "The Lune\nIt is 9 km long.\nIts source is a well." in contexts
    assert any(data.get("response") == "river Lune" for data in inputs)
    assert not any("Thames" in json.dumps(data) for data in inputs)


def test_only_answers_that_lack_a_judgement_are_judged(
    ragas: Any, scripted: Scripted, judge_of: Callable[[ScriptedServer], CachedModel]
) -> None:
    """Neither abstentions nor failures, nor other systems, nor what was judged; but what failed."""
    server = scripted(judge_by_words)
    text: Json = {"text": "It is river 0.", "passages": ("p0",)}
    outcomes = [
        outcome("standard", 0, True, **text),
        outcome("standard", 1, True, **text),
        outcome("standard", 2, False, **text, abstained=True),
        outcome("standard", 3, None, error="down"),
        outcome("standard", 9, True, **text),
        outcome("drafter_only", 2, True, **text),
        outcome("speculative", 0, True, **text),
    ]
    known = {
        outcomes[0].key: Judgement(faithfulness=0.5, factual_correctness=0.5),
        outcomes[1].key: Judgement(faithfulness=0.5, reasons=("factual correctness: timed out",)),
    }
    told: list[Progress] = []

    kept = judge_all(outcomes, judge_of(server), known=known, show=told.append)

    assert set(kept) == {outcomes[1].key, outcomes[5].key}
    assert all(one.factual_correctness is not None for one in kept.values())
    assert [(now.done, now.total) for now in told] == [(0, 2), (1, 2), (2, 2)]
    assert told[-1].seconds_left == 0


def test_a_judgement_that_fails_the_same_way_is_kept_once(
    ragas: Any, scripted: Scripted, judge_of: Callable[[ScriptedServer], CachedModel]
) -> None:
    """A judge that never finds its form is asked again by no later run: the cache has its words."""
    server = scripted(lambda *_: "I cannot.")
    one = outcome("standard", 0, True, text="It is river 0.", passages=("p0",))
    first = judge_all([one], judge_of(server))
    assert first[one.key].faithfulness is None
    assert len(first[one.key].reasons) == 2
    server.reset()

    assert judge_all([one], judge_of(server), known=first) == {}
    assert server.chats == []


def test_what_is_judged_when_the_judge_dies_is_kept(
    ragas: Any, scripted: Scripted, judge_of: Callable[[ScriptedServer], CachedModel]
) -> None:
    """Judgements made before are not lost; none is made up from the failure."""
    server = scripted(
        lambda body, call: Fault(503) if "river 8" in text_of(body) else judge_by_words(body, call)
    )
    outcomes = [
        outcome("standard", number, True, text=f"It is river {number}.", passages=("p0",))
        for number in range(9)  # one more than are judged at once
    ]
    kept: dict[Key, Judgement] = {}
    with pytest.raises(EndpointUnavailableError, match="503"):
        judge_answers(
            outcomes,
            judge_of(server),
            questions=[question(number) for number in range(9)],
            systems=parse_systems("standard"),
            known={},
            keep=kept.__setitem__,
        )
    assert kept
    assert outcomes[8].key not in kept


# -------------------------------------------------------------------- the folder


def judgement(faithfulness: float | None, factual_correctness: float | None = None) -> Judgement:
    return Judgement(faithfulness=faithfulness, factual_correctness=factual_correctness)


def test_judgements_go_on_where_they_were(tmp_path: Path) -> None:
    """Half a line spoils nothing, and a later judgement replaces an earlier one."""
    first, second = ("rivers", "q0", "standard"), ("rivers", "q1", "standard")
    path = tmp_path / "judgements.jsonl"
    with RunFolder(tmp_path, manifest()) as folder:
        folder.add_judge(JUDGE)
        folder.keep_judgement(first, Judgement(reasons=("faithfulness: timed out",)))
    path.write_text(path.read_text() + '{"dataset": "riv')
    with RunFolder(tmp_path, manifest()) as folder:
        assert folder.judgements == {first: Judgement(reasons=("faithfulness: timed out",))}
        folder.add_judge(JUDGE)
        folder.keep_judgement(first, judgement(0.5, 1.0))
        folder.keep_judgement(second, judgement(None, 0.0))
    assert read_judgements(path) == {first: judgement(0.5, 1.0), second: judgement(None, 0.0)}
    with RunFolder(tmp_path, manifest()) as folder:
        assert folder.manifest.judge == JUDGE


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        judgement_line(("d", "q", "s"), Judgement(faithfulness=1.5)),
        judgement_line(("d", "q", "s"), Judgement(factual_correctness=-1)),
    ],
)
def test_a_line_that_is_no_judgement_is_named(tmp_path: Path, line: str) -> None:
    """Anything else in the file is an error with its place."""
    path = tmp_path / "judgements.jsonl"
    path.write_text(f"{line.strip()}\n{{}}\n")
    with pytest.raises(InputError, match=r"judgements\.jsonl:1: not a judgement of specrag eval"):
        read_judgements(path)


def test_judgements_of_two_judges_are_not_mixed(tmp_path: Path) -> None:
    """Another judge needs another folder, unless there is nothing to mix with."""
    other = {**JUDGE, "name": "new-judge", "identity": "new"}
    with RunFolder(tmp_path, manifest()) as folder:
        folder.add_judge(other)
        folder.add_judge(JUDGE)
        folder.keep_judgement(("rivers", "q0", "standard"), judgement(1.0))
    with RunFolder(tmp_path, manifest()) as folder:
        folder.add_judge({**JUDGE, "server": "vllm 2"})
        with pytest.raises(ConfigurationError, match="of judge-model, and the judge is new-judge"):
            folder.add_judge(other)


def test_a_run_without_a_judge_is_taken_up_by_one(tmp_path: Path) -> None:
    """The folder of an earlier run can be judged, and says by whom."""
    with RunFolder(tmp_path, manifest()) as folder:
        folder.add_questions([question(0)])
        folder.keep(outcome("standard", 0, True))
    with RunFolder(tmp_path, manifest()) as folder:
        folder.add_judge(JUDGE)
        folder.keep_judgement(("rivers", "q0", "standard"), judgement(1.0, 0.25))
        first = folder.summarise([question(0)], parse_systems("standard"))
    with RunFolder(tmp_path) as folder:
        assert folder.summarise(folder.questions, parse_systems("standard")) == first
    assert first["judge"] == JUDGE
    assert first["systems"][0]["factual_correctness"]["value"] == 0.25
    page = (tmp_path / "report.html").read_text()
    assert "judge-model, vllm 1, there" in page


# -------------------------------------------------------------------- figures, tables, the page


def judged_summary(numbers: dict[str, Sequence[tuple[float | None, float | None]]]) -> Json:
    """Return a summary of systems with a pair of numbers for each question; None: not judged."""
    outcomes, judgements = [], {}
    for name, pairs in numbers.items():
        for number, pair in enumerate(pairs):
            one = outcome(name, number, True, grades=grades(True))
            outcomes.append(one)
            if pair != (None, None):
                judgements[one.key] = judgement(*pair)
    questions = [question(number) for number in range(max(map(len, numbers.values())))]
    run = compared(questions, parse_systems(",".join(numbers)), outcomes, judgements)
    return {"judge": JUDGE, **summarised(run)}


def printed(show: Callable[[Console, Json], None], summary: Json) -> str:
    out = io.StringIO()
    show(Console(file=out, width=80), summary)
    return out.getvalue()


STANDARD = [(1.0, 0.5), (0.5, 0.5), (None, 0.5), (None, None)]
OURS = [(0.5, 1.0), (0.5, 0.0), (1.0, None), (0.0, 1.0)]


def test_differences_are_paired_where_both_are_judged() -> None:
    """A mean is over all that was judged; a difference over questions where both answers were."""
    summary = judged_summary({"standard": STANDARD, "speculative": OURS})
    standard, ours = row(summary, "standard"), row(summary, "speculative")
    assert (standard["faithfulness"]["value"], standard["faithfulness"]["n"]) == (0.75, 2)
    assert (ours["faithfulness"]["value"], ours["faithfulness"]["n"]) == (0.5, 4)
    against = ours["against_standard"]
    assert against["faithfulness"]["value"] == pytest.approx(-0.25)
    assert against["faithfulness"]["n"] == 2
    assert against["faithfulness"]["low"] < -0.25 < against["faithfulness"]["high"]
    assert against["factual_correctness"]["value"] == pytest.approx(0.0)
    assert against["factual_correctness"]["n"] == 2


def test_what_was_not_judged_has_no_number() -> None:
    """Nothing is made up, and nothing is shown of a judge."""
    nothing = [(None, None)] * 2
    summary = judged_summary({"standard": nothing, "drafter_only": nothing})
    for name in ("standard", "drafter_only"):
        assert row(summary, name)["faithfulness"] is None
    assert row(summary, "drafter_only")["against_standard"]["factual_correctness"] is None
    assert "RAGAS" not in printed(show_evaluation, summary)


def test_the_table_shows_what_was_judged_with_a_caution() -> None:
    """Only systems with a number are in it; the judge and the count stand beneath it."""
    summary = judged_summary(
        {"standard": STANDARD, "speculative": OURS, "drafter_only": [(None, None)] * 4}
    )
    told = printed(show_evaluation, summary)
    table = told[told.index("judged by RAGAS") :]
    lines = table.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["standard", "speculative"]
    assert "-25 (" in lines[2]
    assert not lines[3].strip()
    assert "Judged by judge-model: 7 of 8 answers." in " ".join(told.split())
    assert "suits answers of a few words badly" in " ".join(told.split())


def test_the_seed_table_is_judged_where_all_engines_are() -> None:
    """Two measures are never mixed in one column."""
    told = printed(show_seed_table, judged_summary({"standard": STANDARD, "speculative": OURS}))
    assert "factual (RAGAS)" in told
    assert "67 % (" in told
    partly = {"standard": STANDARD, "speculative": OURS, "drafter_only": [(1.0, None)] * 4}
    told = printed(show_seed_table, judged_summary(partly))
    assert "RAGAS" not in told
    assert "100 % (" in told


@pytest.mark.parametrize("show", [show_evaluation, show_seed_table])
def test_times_of_several_machines_are_told_of(show: Callable[[Console, Json], None]) -> None:
    """Beneath each table that has times."""
    summary = {**judged_summary({"standard": STANDARD}), "mixed_times": "Of 2 machines."}
    assert "Of 2 machines." in printed(show, summary)


def test_the_page_shows_what_was_judged(tmp_path: Path) -> None:
    """A table of its own with both numbers, their differences and the caution."""
    with RunFolder(tmp_path, manifest()) as folder:
        folder.add_judge(JUDGE)
        folder.add_questions([question(0)])
        for system, pair in (("standard", (1.0, 1.0)), ("drafter_only", (0.5, None))):
            one = outcome(system, 0, True)
            folder.keep(one)
            folder.keep_judgement(one.key, judgement(*pair))
        folder.summarise([question(0)], parse_systems(SYSTEMS))
    html = (tmp_path / "report.html").read_text()
    page = html[html.index("h-judged") :]
    page = page[: page.index("</section>")]
    assert page.count("<tr") == 3
    assert "50.0\u00a0%" in page
    assert "\u221250.0" in page
    assert "not measured" in page
    assert "suits answers of a few words badly" in page
    assert "no judge was named" not in html
