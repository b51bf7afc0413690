"""`specrag calibrate`, as a user runs it, against a scripted server, and what its file is for."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_server import Reply, ScriptedServer, is_verification
from test_cli import fails, specrag

from specrag_integrations import (
    Calibration,
    Disjoint,
    EmbeddedPair,
    Endpoint,
    Passage,
    SpeculativeRAG,
)
from specrag_integrations.confidence import Fingerprint, Thresholds
from specrag_integrations.evaluation.calibrating import (
    GRID,
    LEAST_CONTESTED,
    LEAST_QUESTIONS,
    calibrate,
)
from specrag_integrations.evaluation.intervals import precision_bound
from specrag_integrations.evaluation.outcomes import Outcome

Scripted = Callable[..., ScriptedServer]
Json = dict[str, Any]
Beliefs = Callable[[int, int], float]
"""(question, river) -> P(Yes)."""

SYSTEM = "speculative+m2+k1+disjoint"
LABELS = {"labels": ["true", "false"]}
PASSAGES = [Passage(text=f"Fact {n} tells of river {n}.", id=f"p{n}") for n in range(2)]
PAGE = Path(__file__).parents[1] / "docs" / "calibration.md"


def rows(path: Path, count: int, **fields: Any) -> Path:
    """Write questions whose answer is river 0, each with a passage on it and one on another."""
    passages = [{"id": passage.id, "text": passage.text} for passage in PASSAGES]
    lines = [
        {"id": f"q{n}", "question": f"Which river is number {n}?", "passages": passages}
        | {"answers": ["river 0"], **fields}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def telling(question: int, river: int) -> float:
    """Believe in what is right, more or less; of one question in five in nothing much."""
    if question % 5 == 0:
        return 0.3 if river == 0 else 0.45
    return (0.97 if river == 0 else 0.1) - 0.002 * (question % 7)


def blind(question: int, river: int) -> float:
    """Believe in the right draft and in the wrong one by turns, whatever they say."""
    return 0.9 if (question + river) % 2 else 0.2


def judging(believes: Beliefs) -> Callable[[Json, int], Reply]:
    """Draft the river of the passage that is shown; standard RAG answers with river 0."""

    def respond(body: Json, _: int) -> Reply:
        text = "\n".join(message["content"] for message in body["messages"])
        if is_verification(body):
            number = int(text.rsplit("is number ", 1)[1].split("?")[0])
            river = int(text.rsplit("Answer: river ", 1)[1][0])
            p = believes(number, river)
            return Reply("Yes", alternatives={"Yes": math.log(p), "No": math.log(1 - p)})
        if body.get("stream"):
            return Reply("river 0 [1]")
        if "[1] Fact " not in text:
            return Reply("OK")
        river = text.rsplit("[1] Fact ", 1)[1][0]
        return Reply(f"Rationale: [1] says so.\nAnswer: river {river}", logprobs=None)

    return respond


def calibration(fingerprint: Fingerprint) -> Calibration:
    """Return one of any set-up with this fingerprint, with thresholds."""
    return Calibration(
        fingerprint=fingerprint,
        kind="logistic",
        coefficients={"reflection": 1.0},
        thresholds=Thresholds(
            min_confidence=0.3,
            accept_confidence=0.45,
            target=0.9,
            asked=0.9,
            delta=0.1,
            questions=50,
            accepted=22,
            right=22,
        ),
    )


@pytest.fixture
def cache(tmp_path: Path) -> Mapping[str, str]:
    """Keep replies apart from those of other tests."""
    return {"SPECRAG_CACHE": str(tmp_path / "cache")}


def words(text: str) -> str:
    """Return a printed text without its line breaks."""
    return " ".join(text.split())


def test_a_file_is_written_that_other_commands_use(
    scripted: Scripted, tmp_path: Path, cache: Mapping[str, str]
) -> None:
    """It keeps the promise that is printed; a calibrated system falls back where it says so."""
    server, file = scripted(judging(telling), kind="llama.cpp"), tmp_path / "mine.json"
    command = ["calibrate", rows(tmp_path / "rivers.jsonl", 80), "--drafter", server.base_url]
    command += ["--system", SYSTEM, "--target-precision", "0.85", "--delta", "0.2", "--out", file]
    told = words(specrag(*command, **cache).stdout)

    found = Calibration.load(file)
    assert found.thresholds is not None
    assert (found.thresholds.target, found.thresholds.delta) == (0.85, 0.2)
    assert (found.questions, found.thresholds.questions) == (40, 40)
    assert found.min_confidence in GRID
    assert (found.fingerprint.num_drafts, found.fingerprint.tier) == (2, "reflection")
    assert f"Accept from confidence {found.min_confidence:.2f} on" in told
    assert "with probability 0.8, at least 0.85 of the accepted answers are right" in told
    thresholds = found.thresholds
    assert f"{thresholds.accepted} of 40 questions, {thresholds.right} right" in told
    assert f"Written to {file}" in told
    assert not found.demonstration

    # An application with the same set-up has a confidence.
    endpoint = Endpoint(server.base_url)
    with SpeculativeRAG(
        drafter=endpoint,
        verifier=endpoint,
        num_drafts=2,
        passages_per_draft=1,
        partitioner=Disjoint(),
        calibration=found,
        min_confidence=found.min_confidence,
    ) as engine:
        answer = engine.ask("Which river is number 1?", PASSAGES)
    assert found.fingerprint.verifier_server == "llama.cpp"
    assert (answer.text, answer.confidence_kind) == ("river 0", "calibrated")

    # The first question is one in which the verifier believes in nothing much.
    out = tmp_path / "run"
    specrag(
        *("eval", rows(tmp_path / "few.jsonl", 4), "--drafter", server.base_url, "--out", out),
        *("--systems", f"standard,{SYSTEM}+calibrated", "--calibration", file),
        **cache,
    )
    lines = [json.loads(line) for line in (out / "outcomes.jsonl").read_text().splitlines()]
    outcomes = {one["id"]: one for one in lines if one["system"] != "standard"}
    assert {one: outcomes[one]["fallback"] for one in outcomes} == {
        "q0": "low_confidence",
        "q1": None,
        "q2": None,
        "q3": None,
    }
    assert all(outcomes[f"q{n}"]["confidence"] >= found.min_confidence for n in (1, 2, 3))


def test_the_papers_formula_is_calibrated_without_an_early_stop(
    scripted: Scripted, tmp_path: Path, cache: Mapping[str, str]
) -> None:
    """It compares all drafts, and its own calibrated system takes the file."""
    judged = judging(telling)

    def respond(body: Json, call: int) -> Reply:
        return replace(judged(body, call), logprobs=Reply().logprobs)

    server, file, system = scripted(respond, kind="vllm"), tmp_path / "mine.json", f"{SYSTEM}+paper"
    drafter = ("--drafter", server.base_url)
    command = ["calibrate", rows(tmp_path / "rivers.jsonl", 80), *drafter, "--system", system]
    told = words(specrag(*command, "--target-precision", "0.8", "--out", file, **cache).stdout)
    found = Calibration.load(file)
    assert found.thresholds is not None
    assert (found.thresholds.attained, found.accept_confidence) == (True, None)
    assert "stop early" not in told

    out = tmp_path / "run"
    specrag(
        *("eval", rows(tmp_path / "few.jsonl", 4), *drafter, "--out", out),
        *("--systems", f"{system}+calibrated", "--calibration", file),
        **cache,
    )
    lines = [json.loads(line) for line in (out / "outcomes.jsonl").read_text().splitlines()]
    trusted = [one for one in lines if not one["fallback"]]
    assert (len(lines), bool(trusted)) == (4, True)
    assert all(one["confidence"] >= found.min_confidence for one in trusted)


def test_another_set_up_than_the_calibrated_one_is_one_line(
    server: ScriptedServer, tmp_path: Path, cache: Mapping[str, str]
) -> None:
    """The line names what differs, and no question has been asked."""
    file = tmp_path / "mine.json"
    calibration(Fingerprint(num_drafts=2)).save(file)
    systems = ("--systems", "standard,speculative+calibrated", "--calibration", file)
    data = rows(tmp_path / "rivers.jsonl", 4)
    told = fails("eval", data, "--drafter", server.base_url, *systems, code=2, **cache)

    assert "num_drafts: expected 2, found 5" in told
    assert len(server.chats) <= 2


def test_a_precision_out_of_reach_is_said_to_be(
    scripted: Scripted, tmp_path: Path, cache: Mapping[str, str]
) -> None:
    """The file holds what can be promised instead, and more questions are not said to help."""
    server, file = scripted(judging(blind)), tmp_path / "mine.json"
    data = rows(tmp_path / "rivers.jsonl", 80)
    told = words(
        specrag(
            *("calibrate", data, "--drafter", server.base_url, "--system", SYSTEM, "--out", file),
            "--demonstration",
            **cache,
        ).stdout
    )
    found = Calibration.load(file)
    thresholds = found.thresholds

    assert found.demonstration
    assert "No threshold attains 0.9: the accepted are not right often enough." in told
    assert thresholds is not None
    assert not thresholds.attained
    assert 0 < thresholds.target < 0.7
    assert f"at least {thresholds.target:g} of the accepted answers are right" in told


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--limit", str(LEAST_QUESTIONS - 1)], 1, "at least 40 questions with a scored draft"),
        (["--system", "standard"], 2, "--system standard has no drafts"),
        (["--system", "speculative+calibrated"], 2, "leave +calibrated out"),
        (["--system", "speculative+listwise"], 1, "Listwise cannot be replayed"),
        (["--system", "speculative+agreement"], 1, "at the tier agreement drafts have no score"),
        (["--target-precision", "1"], 2, "--target-precision"),
        (["--target-precision", "nan"], 2, "nan is not between 0 and 1"),
        (["--delta", "nan"], 2, "nan is not between 0 and 1"),
        (["--delta", "0"], 2, "--delta"),
        (["--out", "nowhere/mine.json"], 2, "--out nowhere/mine.json cannot be written"),
        (["--out", "."], 2, "--out . cannot be written"),
        (["--out", "m" * 300], 2, "m cannot be written: File name too long"),
    ],
)
def test_what_cannot_be_calibrated_is_told_before_anything_is_asked(
    server: ScriptedServer, tmp_path: Path, options: list[str], code: int, message: str
) -> None:
    """In one line, and no file is written."""
    data, file = rows(tmp_path / "rivers.jsonl", 50), tmp_path / "mine.json"
    url = ("--drafter", server.base_url, "--out", file)

    assert message in fails("calibrate", data, *url, *options, code=code)
    assert not server.chats
    assert not file.exists()


def test_a_loop_of_links_is_one_line(server: ScriptedServer, tmp_path: Path) -> None:
    """Whether it stands for the questions or for the file, before anything is asked."""
    data, loop = rows(tmp_path / "rivers.jsonl", 50), tmp_path / "loop"
    loop.symlink_to(loop)
    url = ("--drafter", server.base_url)

    told = fails("calibrate", data, *url, "--out", loop, code=2)
    assert f"--out {loop} cannot be written: Too many levels of symbolic links" in told
    told = fails("calibrate", loop, *url, "--out", tmp_path / "mine.json")
    assert f"{loop}: cannot be read" in told
    assert not server.chats


def test_questions_that_no_rule_can_judge_are_not_asked(
    scripted: Scripted, tmp_path: Path, cache: Mapping[str, str]
) -> None:
    """Alone they are too few at once; beside others they cost nothing."""
    server, file = scripted(judging(telling)), tmp_path / "mine.json"
    long = rows(tmp_path / "long.jsonl", 50, answers=["river 0 " * 20])
    command = ["--drafter", server.base_url, "--system", SYSTEM, "--out", file]
    told = fails("calibrate", long, *command, **cache)

    assert "at least 40 questions with a scored draft" in told
    assert "there are 0. Those with long answers" in told
    assert not server.chats

    specrag("calibrate", long, rows(tmp_path / "rivers.jsonl", 45), *command, **cache)
    # Of the long ones five are worded as no other: the rest would be found in the cache.
    assert not any("number 49?" in str(body) for body in server.chats)
    assert any("number 44?" in str(body) for body in server.chats)


def test_a_file_that_cannot_be_written_costs_no_reply(
    scripted: Scripted, tmp_path: Path, cache: Mapping[str, str]
) -> None:
    """The line says so, and the same command asks for nothing again."""
    server, data = scripted(judging(telling)), rows(tmp_path / "rivers.jsonl", 50)
    command = ["calibrate", data, "--drafter", server.base_url, "--system", SYSTEM]

    assert "/dev/full cannot be written" in fails(*command, "--out", "/dev/full", **cache)
    server.reset()
    specrag(*command, "--out", tmp_path / "mine.json", **cache)
    assert len(server.chats) <= 3


def test_sets_that_are_asked_in_different_ways_are_told_apart(
    scripted: Scripted, tmp_path: Path, cache: Mapping[str, str]
) -> None:
    """Labels stand in the prompt, so that one set-up cannot hold for claims and questions."""
    server, file = scripted(judging(telling)), tmp_path / "mine.json"
    questions = rows(tmp_path / "rivers.jsonl", 30)
    claims = rows(tmp_path / "claims.jsonl", 30, answers=["true"], meta=LABELS)
    url = ("--drafter", server.base_url)
    told = fails("calibrate", questions, claims, *url, "--out", file, **cache)

    assert "calibrate each set apart" in told
    assert len(server.chats) <= 2
    assert not file.exists()


# ---------------------------------------------------------------- the page


def blocks(language: str) -> list[str]:
    """Return the code blocks of the page in a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def test_the_code_of_the_page_runs(
    scripted: Scripted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As it stands there, but for the URLs of the servers."""
    server = scripted(judging(telling))
    calibration(Fingerprint(num_drafts=5)).save(tmp_path / "calibration.json")
    monkeypatch.chdir(tmp_path)
    known = {"question": "Which river is number 1?", "passages": PASSAGES}
    for block in blocks("python"):
        if "EmbeddedPair" in block:
            continue  # `test_real_questions` does the same with real models
        code = re.sub(r"http://gpu:\d+/v1", server.base_url, block)
        exec(compile(code, PAGE.name, "exec"), known)  # noqa: S102 - our own page

    told = capsys.readouterr().out
    assert told.startswith("river 0 0.4")
    assert "accepted early: draft 0" in told
    assert "0.9 0.9 True" in told


def test_the_shipped_calibration_is_what_its_outcomes_give() -> None:
    """Made anew from the features in docs/results, it is the same, but for rounding."""
    features = PAGE.with_name("results") / "embedded-pair-again.features.jsonl.gz"
    with gzip.open(features, "rt", encoding="utf-8") as file:
        outcomes = [Outcome.from_dict(json.loads(line)) for line in file]
    shipped = EmbeddedPair().calibration
    # It was made from kept replies, which do not tell in which order the scores came.
    mine = [
        replace(one, drafts=tuple(replace(draft, arrived=None) for draft in one.drafts))
        for one in outcomes
        if one.system == "speculative"
    ]

    made = calibrate(mine, fingerprint=shipped.fingerprint, demonstration=True).calibration

    assert shipped.demonstration
    assert shipped.thresholds == made.thresholds
    assert made.kind == shipped.kind == "isotonic"
    assert np.array(made.knots) == pytest.approx(np.array(shipped.knots), abs=1e-6)
    assert replace(made, knots=shipped.knots) == shipped


def test_the_commands_of_the_page_have_the_options_they_are_given() -> None:
    """So that nobody types one that is gone."""
    commands = [one for one in blocks("") if one.startswith("specrag ")]
    for command in commands:
        name = command.split()[1]
        known = specrag(name, "--help").stdout
        for option in re.findall(r"--[a-z-]+", command):
            assert f"{option} " in known, (name, option)
    assert {one.split()[1] for one in commands} == {"calibrate", "eval"}


def test_the_page_tells_the_numbers_that_are_tested_with() -> None:
    """How many accepted answers attain a target, and how many questions are the least."""
    page = PAGE.read_text()
    rows = re.findall(r"^\| (0\.\d+) \|(.*)\|$", page, flags=re.MULTILINE)
    for target, numbers in rows:
        for wrong, number in zip((0, 1, 2, 5), map(int, numbers.split("|")), strict=True):
            enough, less = (precision_bound(n - wrong, n, delta=0.1) for n in (number, number - 1))
            assert less < float(target) <= enough
    assert [target for target, _ in rows] == ["0.7", "0.8", "0.9", "0.95"]
    assert f"It takes {LEAST_CONTESTED} contested questions" in page
    assert f"Fewer than {LEAST_QUESTIONS} are refused" in page
    assert "from 0.05 to 0.95 in steps of 0.05, and 0.99" in page
    assert list(GRID) == pytest.approx([*(step / 20 for step in range(1, 20)), 0.99])


def test_a_calibration_that_cannot_be_written_keeps_the_old_one(tmp_path: Path) -> None:
    """A disk that is full before the whole file is there leaves the file that was there."""
    file = tmp_path / "calibration.json"
    before = calibration(Fingerprint(num_drafts=5))
    before.save(file)
    written = (
        "from specrag_integrations import Calibration; import sys;"
        "Calibration.load(sys.argv[1]).save(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", written, str(file)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "File too large" in done.stderr
    assert Calibration.load(file) == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_calibration_may_go_through_a_link(tmp_path: Path) -> None:
    """The link stays, and what it points to is written; a pipe is no file to be replaced."""
    one = calibration(Fingerprint(num_drafts=5))
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "real.json")
    one.save(link)
    assert link.is_symlink()
    assert Calibration.load(tmp_path / "real.json") == one
    one.save(os.devnull)
    assert not Path(os.devnull).is_file()
    # One that leads to itself leads to no file: that is an OSError as any other.
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    with pytest.raises(OSError, match="symbolic links"):
        one.save(loop)
