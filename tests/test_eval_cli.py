"""`specrag eval` and `specrag report`, as a user runs them, against a scripted server."""

from __future__ import annotations

import json
import resource
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_server import Fault, ScriptedServer
from test_cli import COMMAND, environment, fails, specrag
from test_eval_runs import respond

from specrag_integrations.cli import _without_secrets
from specrag_integrations.evaluation.folder import held

Scripted = Callable[..., ScriptedServer]


def rows(path: Path, count: int = 4) -> Path:
    passages = [{"id": f"p{n}", "text": f"Fact {n} tells of river {n}."} for n in range(6)]
    lines = [
        {"id": f"q{n}", "question": f"Which river is number {n}?", "passages": passages}
        | {"answers": ["river 0"]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return rows(tmp_path / "rivers.jsonl")


def test_systems_are_compared_and_the_run_is_kept(
    scripted: Scripted, data: Path, tmp_path: Path
) -> None:
    """The tables end with a recommendation; the folder holds outcomes, summary and report."""
    server = scripted(respond, kind="llama.cpp")
    out = tmp_path / "run"
    done = specrag(
        "eval", data, "--drafter", server.base_url, "--out", out, SPECRAG_CACHE=str(tmp_path / "c")
    )
    for name in ("standard", "standard+rationale", "drafter_only", "speculative"):
        assert f"\n{name} " in done.stdout
    assert "Inconclusive: speculative" in " ".join(done.stdout.split())
    assert f"Report: {out / 'report.html'}" in done.stdout
    outcomes = (out / "outcomes.jsonl").read_text().splitlines()
    assert len(outcomes) == 16
    summary = json.loads((out / "summary.json").read_text())
    assert summary["models"]["verifier"]["server"].startswith("llama.cpp")
    assert summary["command"].startswith("specrag eval ")
    assert "</html>" in (out / "report.html").read_text()

    # Nothing is asked again: not by the same command, and not by a remade report.
    server.reset()
    again = specrag(
        "eval", data, "--drafter", server.base_url, "--out", out, SPECRAG_CACHE=str(tmp_path / "c")
    )
    assert again.stdout == done.stdout
    assert len(server.chats) == 2  # the first token of each role
    server.close()
    assert specrag("report", out).stdout == done.stdout


def test_each_sitting_of_a_run_says_who_answered(
    scripted: Scripted, data: Path, tmp_path: Path
) -> None:
    """One that had nothing to ask is none."""
    server, out = scripted(respond, kind="llama.cpp"), tmp_path / "run"
    command = ["eval", data, "--drafter", server.base_url, "--systems", "standard", "--out", out]
    for options in (["--limit", "2"], ["--limit", "2"], ["--seed", "7"]):
        specrag(*command, *options, SPECRAG_CACHE=str(tmp_path / "c"))
    sittings = json.loads((out / "summary.json").read_text())["sittings"]
    assert [one["seed"] for one in sittings] == [0, 7]
    assert all(one["servers"]["verifier"].startswith("llama.cpp") for one in sittings)
    assert sittings[1]["command"].endswith(" --seed 7")


def test_another_run_replays_the_cache(scripted: Scripted, data: Path, tmp_path: Path) -> None:
    """New systems over old replies cost nothing; --fresh asks all of it anew."""
    server = scripted(respond)
    url, cache = server.base_url, {"SPECRAG_CACHE": str(tmp_path / "c")}
    specrag("eval", data, "--drafter", url, "--systems", "speculative", **cache)
    server.reset()
    specrag("eval", data, "--drafter", url, "--systems", "speculative+vote", **cache)
    assert len(server.chats) == 2
    specrag("eval", data, "--drafter", url, "--systems", "speculative", "--fresh", **cache)
    assert len(server.chats) > 20


def test_a_run_that_was_interrupted_goes_on_where_it_was(
    scripted: Scripted, data: Path, tmp_path: Path
) -> None:
    """Ctrl-C keeps what is done, and the same command asks only for the rest."""
    server = scripted(respond, delay=0.3)
    out = tmp_path / "run"
    command = ["eval", str(data), "--drafter", server.base_url, "--systems", "standard"]
    command += ["--out", str(out)]
    cache = {"SPECRAG_CACHE": str(tmp_path / "c")}
    process = subprocess.Popen(
        [*COMMAND, *command],
        env=environment(**cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    outcomes = out / "outcomes.jsonl"
    until = time.monotonic() + 60
    while not (outcomes.exists() and outcomes.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "Traceback" not in told
    kept = len(outcomes.read_text().splitlines())
    assert 1 <= kept < 4

    server.delay = 0.0
    server.reset()
    specrag(*command, **cache)
    assert len(outcomes.read_text().splitlines()) == 4
    assert len(server.chats) <= 2 + 4 - kept


def test_an_endpoint_that_dies_ends_the_run_with_one_line(
    scripted: Scripted, data: Path, tmp_path: Path
) -> None:
    """The line names the endpoint and what is kept; what was done is there."""
    calls = {"n": 0}

    def dying(body: dict[str, object], call: int) -> object:
        calls["n"] += 1
        return respond(body, call) if calls["n"] <= 4 else Fault(503)

    server = scripted(dying)
    out = tmp_path / "run"
    told = fails(
        "eval",
        data,
        "--drafter",
        server.base_url,
        "--systems",
        "standard",
        "--out",
        out,
        SPECRAG_CACHE=str(tmp_path / "c"),
    )
    assert "503" in told
    assert "run the same command to go on" in told
    assert len((out / "outcomes.jsonl").read_text().splitlines()) == 2


def test_a_full_disk_ends_the_run_with_one_line(scripted: Scripted, tmp_path: Path) -> None:
    """What fitted is kept, half a line spoils nothing, and the run goes on once there is room."""
    server = scripted(respond)
    data, out = rows(tmp_path / "rivers.jsonl", 70), tmp_path / "run"
    command = ["eval", str(data), "--drafter", server.base_url, "--systems", "standard"]
    command += ["--out", str(out)]
    cache = {"SPECRAG_CACHE": str(tmp_path / "c")}
    specrag(*command, **cache)  # so that the replies need no room
    whole = (out / "outcomes.jsonl").read_bytes()
    (out / "outcomes.jsonl").unlink()
    room = 36_000  # more than SQLite's index of its log
    assert len(whole) > room
    done = subprocess.run(
        [*COMMAND, *command],
        env=environment(**cache),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "run the same command to go on" in line
    kept = (out / "outcomes.jsonl").read_bytes()
    assert 1 <= kept.count(b"\n") < 70
    specrag(*command, **cache)
    assert len((out / "outcomes.jsonl").read_text().splitlines()) == 70


def test_prices_are_added_up(scripted: Scripted, data: Path, tmp_path: Path) -> None:
    """--table seed shows time, rightness and cost of the three engines."""
    server = scripted(respond)
    done = specrag(
        "eval",
        data,
        "--drafter",
        server.base_url,
        "--price",
        "drafter=1.5:3",
        "--price",
        "verifier=36/h",
        "--table",
        "seed",
        SPECRAG_CACHE=str(tmp_path / "c"),
    )
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("monolithic")]
    assert "100 %" in line
    assert "$" in line


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--systems", "speculativ"], "'speculativ' is unknown"),
        (["--price", "verifier=cheap"], "must read like verifier=0.60:0.80"),
        (["--price", "judge=1:1"], "must read like"),
        (["--price", "verifier=1:1", "--price", "verifier=2/h"], "names verifier twice"),
        (["--top", "3"], "--top goes with --docs"),
        (["--systems", "speculative+calibrated", "--calibration", "none.json"], "none.json"),
        (["--calibration", "none.json"], "goes with a system that is +calibrated"),
        (["--systems", "speculative+calibrated"], "--calibration"),
    ],
)
def test_wrong_usage_is_told_in_one_line(
    server: ScriptedServer, data: Path, tmp_path: Path, options: list[str], told: str
) -> None:
    """The line names the value and the remedy, and nothing has been asked but a first token."""
    cache = {"SPECRAG_CACHE": str(tmp_path / "c")}
    assert told in fails("eval", data, "--drafter", server.base_url, *options, code=2, **cache)
    assert len(server.chats) <= 2


def test_a_bad_line_is_named_before_anything_is_asked(
    server: ScriptedServer, data: Path, tmp_path: Path
) -> None:
    """File and line, and no request."""
    data.write_text(data.read_text() + "{broken\n")
    told = fails("eval", data, "--drafter", server.base_url, SPECRAG_CACHE=str(tmp_path / "c"))
    assert "rivers.jsonl, line 5" in told
    assert not server.chats


def test_the_table_of_costs_tells_of_failures(
    scripted: Scripted, data: Path, tmp_path: Path
) -> None:
    """What was not answered is in no cost, which a reader must know."""
    server = scripted(
        lambda body, call: Fault(400) if "number 1" in str(body) else respond(body, call)
    )
    done = specrag(
        *("eval", data, "--drafter", server.base_url, "--systems", "standard"),
        *("--price", "verifier=1:1", "--table", "seed"),
        SPECRAG_CACHE=str(tmp_path / "c"),
    )
    assert "standard: 1 of 4 questions failed, and count as wrong (" in done.stdout


def test_failures_are_told_and_not_asked_again(
    scripted: Scripted, data: Path, tmp_path: Path
) -> None:
    """A question that the server refuses counts as wrong, is said so, and stays refused."""
    server = scripted(
        lambda body, call: Fault(400) if "number 1" in str(body) else respond(body, call)
    )
    command = ["eval", data, "--drafter", server.base_url, "--systems", "standard"]
    command += ["--out", tmp_path / "run"]
    cache = {"SPECRAG_CACHE": str(tmp_path / "c")}
    done = specrag(*command, **cache)
    told = " ".join(done.stdout.split())
    assert "standard: 1 of 4 questions failed, and count as wrong (" in told
    assert "400" in told.partition("count as wrong (")[2].partition(")")[0]
    server.reset()
    assert specrag(*command, **cache).stdout == done.stdout
    assert len(server.chats) == 2


def test_a_narrow_terminal_cuts_no_name(scripted: Scripted, data: Path, tmp_path: Path) -> None:
    """Whatever its width, each row begins with the whole name of its system."""
    server = scripted(respond)
    cache = {"SPECRAG_CACHE": str(tmp_path / "c"), "COLUMNS": "40"}
    name = "speculative+only_draft_rationale+m2"
    done = specrag("eval", data, "--drafter", server.base_url, "--systems", name, **cache)
    assert any(line.startswith(f"{name} ") for line in done.stdout.splitlines())


def test_a_folder_of_other_models_is_not_written_into(
    scripted: Scripted, data: Path, tmp_path: Path
) -> None:
    """Outcomes of two pairs of models are never mixed."""
    one, other = scripted(respond), scripted(respond, models=("other",))
    out, cache = tmp_path / "run", {"SPECRAG_CACHE": str(tmp_path / "c")}
    specrag("eval", data, "--drafter", one.base_url, "--systems", "standard", "--out", out, **cache)
    told = fails(
        "eval", data, "--drafter", other.base_url, "--systems", "standard", "--out", out, code=2
    )
    assert f"scripted ({one.base_url}) there, other ({other.base_url}) now" in told


def test_features_hold_no_text(scripted: Scripted, data: Path, tmp_path: Path) -> None:
    """What is published of a run: scores, rightness and timings."""
    server = scripted(respond)
    out, features = tmp_path / "run", tmp_path / "features.jsonl"
    cache = {"SPECRAG_CACHE": str(tmp_path / "c")}
    specrag("eval", data, "--drafter", server.base_url, "--out", out, **cache)
    specrag("report", out, "--features", features)
    nowhere = tmp_path / "missing" / "features.jsonl"
    assert "cannot be written" in fails("report", out, "--features", nowhere)
    assert "name another" in fails("report", out, "--features", out / "outcomes.jsonl", code=2)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert f"{loop} cannot be written" in fails("report", out, "--features", loop)
    assert f"{loop}: holds no run" in fails("report", loop, "--features", features)
    text = features.read_text()
    assert len(text.splitlines()) == 16
    assert "river 0" not in text
    assert "reflection" in text


def test_the_names_of_systems_are_listed() -> None:
    """--systems help needs no data and no models."""
    told = specrag("eval", "--systems", "help").stdout
    assert "speculative" in told
    assert "anchorN, leadN" in told


def test_a_report_of_nothing_is_told(tmp_path: Path) -> None:
    """A folder without a run is an error with the command that makes one."""
    assert "holds no run" in fails("report", tmp_path)


def test_a_report_is_not_overwritten_by_one_of_less(
    scripted: Scripted, data: Path, tmp_path: Path
) -> None:
    """Without the questions there is an error, and the old report stays as it is."""
    server, out = scripted(respond), tmp_path / "run"
    command = ["eval", data, "--drafter", server.base_url, "--systems", "standard", "--out", out]
    specrag(*command, SPECRAG_CACHE=str(tmp_path / "c"))
    (out / "questions.jsonl").unlink()
    kept = [(out / name).read_bytes() for name in ("report.html", "summary.json")]
    assert "questions.jsonl is missing; restore it, or run" in fails("report", out)
    assert [(out / name).read_bytes() for name in ("report.html", "summary.json")] == kept


def test_no_secret_of_an_address_is_written(scripted: Scripted, data: Path, tmp_path: Path) -> None:
    """What a URL holds besides host and path is in no file and no output; keys may lie there."""
    server = scripted(respond)
    host = server.base_url.removeprefix("http://")
    out, cache = tmp_path / "run 1", tmp_path / "c"
    done = specrag(
        *("eval", data, "--systems", "standard", "--out", out, "--json"),
        *("--drafter", f"http://joe:pass-one@{host}?api_key=pass-two"),
        f"--verifier=http://joe:pass-one@{host}?api_key=pass-two",
        SPECRAG_CACHE=str(cache),
    )
    files = [one for one in (*out.iterdir(), *cache.iterdir()) if one.is_file()]
    assert len(files) > 5
    for text in (done.stdout, done.stderr, *(one.read_bytes().decode("latin-1") for one in files)):
        assert "pass-" not in text
        assert "joe" not in text
    command = json.loads((out / "summary.json").read_text())["command"]
    assert shlex.split(command)[-4:] == [
        "--json",
        "--drafter",
        server.base_url,
        f"--verifier={server.base_url}",
    ]
    assert str(out) in shlex.split(command)


@pytest.mark.parametrize(
    "argument", ["redis://joe:secret@host", "--out=http://joe:secret@[", "http://:secret@?x"]
)
def test_what_looks_like_an_address_and_is_none_is_masked(argument: str) -> None:
    """It cannot be told which part of it is secret."""
    assert "secret" not in _without_secrets(argument)
    assert _without_secrets(argument).endswith("***")


@pytest.mark.parametrize("argument", ["--limit=5", "-x", "C:\\data", "hub:a/b:c", "wie heißt=es?"])
def test_other_arguments_are_shown_as_they_are(argument: str) -> None:
    """The command can be run again."""
    assert _without_secrets(argument) == argument


@pytest.mark.parametrize("broken", ["file", "below a file", "summary", "manifest"])
def test_a_folder_that_cannot_be_used_is_told_before_models_are_asked(
    server: ScriptedServer, data: Path, tmp_path: Path, broken: str
) -> None:
    """One line with the path, and no request that would be for nothing."""
    out = named = tmp_path / "run"
    if broken == "manifest":
        out.mkdir()
        named = out / "run.json"
        named.mkdir()
    elif broken == "summary":
        named = out / "summary.json"
        named.mkdir(parents=True)
    else:
        out.write_text("")
        out = out / "deeper" if broken == "below a file" else out
    told = fails(
        *("eval", data, "--drafter", server.base_url, "--systems", "standard", "--out", out),
        SPECRAG_CACHE=str(tmp_path / "c"),
    )
    assert f"{named}" in told
    assert "cannot be used" in told
    assert not server.chats


def test_a_folder_is_written_by_one_run_at_a_time(
    server: ScriptedServer, data: Path, tmp_path: Path
) -> None:
    """A second run is told so in one line, before it asks anything; a report only reads."""
    out, cache = tmp_path / "run", {"SPECRAG_CACHE": str(tmp_path / "c")}
    command = ["eval", data, "--drafter", server.base_url, "--systems", "standard", "--out", out]
    with held(out):
        assert f"another run of specrag eval is writing into {out}" in fails(*command, **cache)
        assert not server.chats
        assert "holds no run" in fails("report", out)
    specrag(*command, **cache)


def test_a_name_that_stands_for_something_else_is_not_mixed_in(
    scripted: Scripted, data: Path, tmp_path: Path
) -> None:
    """A folder with outcomes of another set-up under the same name takes no more of it."""
    server = scripted(respond)
    out, cache = tmp_path / "run", {"SPECRAG_CACHE": str(tmp_path / "c")}
    command = ["eval", data, "--drafter", server.base_url, "--systems", "standard", "--out", out]
    specrag(*command, **cache)
    manifest = json.loads((out / "run.json").read_text())
    assert list(manifest["setups"]) == ["standard on rivers"]
    (out / "run.json").write_text(
        json.dumps({**manifest, "setups": {"standard on rivers": "before"}})
    )
    told = fails(*command, code=2, **cache)
    assert "standard on rivers is set up otherwise now" in told
    assert "name another --out" in told
