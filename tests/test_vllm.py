"""A real vLLM on this machine's CPU: what its log-probabilities are worth, and how it fails.

`make test-vllm` makes the environment and runs these; they use a model of 135 million parameters,
whose judgement is worth nothing, so that no test looks at what it answers.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

from specrag_integrations import (
    Draft,
    Endpoint,
    MultiPerspective,
    NoAnswerError,
    Scoring,
    SpeculativeRAG,
    Verifier,
)
from specrag_integrations.errors import ContextTooSmallError, LogprobsUnavailableError
from specrag_integrations.labels import read_labels
from specrag_integrations.models import ChatReply, ChatRequest, Message, Step, assistant, user
from specrag_integrations.prompts import check_messages, draft_text

if not os.environ.get("SPECRAG_VLLM"):
    pytest.skip("needs a real vLLM: run `make test-vllm`", allow_module_level=True)
# A start takes half a minute, and two on a busy machine.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SCRIPTS = Path(__file__).parent / "vllm"
CONTEXT_TOKENS = 2048
STEP = Step(kind="verify")
QUESTION = "What is the capital of France?"
CHECK = user("Is this the correct answer to the question? Reply Yes or No.")
SEAT = "The French president and both houses of parliament sit in Paris, on the Seine."
SUPPORT = user("Does the rationale support the answer, yes or no?")
CAPITAL = "Paris is the seat of the French government and its largest city."
DRAFTS = {
    name: (user(QUESTION), assistant(draft), check)
    for name, draft, check in (
        ("sensible", f"Rationale: {SEAT}\nAnswer: Paris", CHECK),
        ("wrong", f"Rationale: {SEAT}\nAnswer: Tokyo", CHECK),
        ("nonsense", "Rationale: Seven is blue because kettles swim.\nAnswer: Tokyo", CHECK),
        ("sensible in one line", f"{CAPITAL} Answer: Paris", SUPPORT),
        ("wrong in one line", f"{CAPITAL} Answer: Tokyo", SUPPORT),
        (
            "nonsense in one line",
            "Bananas grow on the moon because wood is purple. Answer: Tokyo",
            SUPPORT,
        ),
    )
}
ABOUT_PASSAGES = "Who built the lighthouse of Port Ellery?"
PASSAGES = [
    "Port Ellery has had a lighthouse since 1871. Its keeper, Ines Falk, also ran the school.",
    "The lighthouse of Port Ellery was built by the engineer Tomas Arden out of grey granite.",
    "Port Ellery lies on a bay. Two ferries a day cross to the island of Scar.",
    "The ferry Marigold was built in 1962 and carries forty passengers to Scar.",
    "Ines Falk kept a diary of every ship that passed Port Ellery for thirty years.",
    "Scar is known for its puffins. Nobody lives on the island in winter.",
]


# ---------------------------------------------------------------- the environment and the servers


@pytest.fixture(scope="session")
def environment() -> Path:
    """Return the folder that tests/vllm/install.sh made and SPECRAG_VLLM names."""
    folder = Path(os.environ["SPECRAG_VLLM"])
    if not (folder / "ready").is_file():
        pytest.fail(f"SPECRAG_VLLM names {folder}, where no vLLM is ready: run `make test-vllm`")
    return folder


def variables() -> dict[str, str]:
    """Return the environment variables for vLLM's Python: nobody's settings, nothing downloaded."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("VLLM_")}
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; without it vLLM takes nearly all memory
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else two servers share the first core
        # The first log-probabilities would wait for a C++ compiler.
        "TORCHDYNAMO_DISABLE": "1",
    }


def run_script(environment: Path, name: str, *arguments: str | Path, stdin: str = "") -> str:
    """Run a script of tests/vllm with vLLM's Python and return what it printed."""
    done = subprocess.run(
        [environment / "venv/bin/python", SCRIPTS / name, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env=variables(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class VllmServer:
    """A real server as a child process; it runs inside a `with` block."""

    running: set[VllmServer] = set()  # noqa: RUF012 - of the class

    def __init__(self, environment: Path, model: Path, log: Path, dtype: str = "float32") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.root = f"http://127.0.0.1:{self.port}"
        self.base_url = f"{self.root}/v1"
        self.model = "smol"
        self._log = log
        binaries = environment / "venv/bin"
        self._command = [
            *(binaries / "python", binaries / "vllm", "serve", model),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--served-model-name", self.model, "--max-model-len", str(CONTEXT_TOKENS)),
            *("--enforce-eager", "--enable-prompt-tokens-details"),
            # bfloat16 leaves up to a nat a draft between two right implementations.
            *("--dtype", dtype),
        ]

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables(),
                start_new_session=True,  # its engine and workers are stopped with it
            )
        self.running.add(self)
        try:
            self._wait(seconds=400)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.running.discard(self)
        self.process.terminate()
        with suppress(ProcessLookupError):
            # Those that end by themselves take their shared memory along.
            deadline = time.monotonic() + 15
            while time.monotonic() < deadline:
                self.process.poll()
                os.killpg(self.process.pid, 0)
                time.sleep(0.1)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.show_log()

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"vLLM ended with {self.process.returncode}: see its log")
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.2)
            else:
                return
        pytest.fail(f"vLLM was not ready after {seconds:g} s: see its log")

    def show_log(self) -> None:
        """Write the end of the log to stdout, where pytest keeps it for a test that failed."""
        lines = self._log.read_text(errors="replace").splitlines()[-60:]
        sys.stdout.write("\n".join(["", f"The end of {self._log}:", *lines, ""]))

    def get(self, path: str) -> str:
        """Return what a route answers."""
        with urllib.request.urlopen(self.root + path, timeout=60) as reply:  # noqa: S310 - ours
            return reply.read().decode()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send one request without any client library."""
        data = json.dumps({"model": self.model, **body}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.root + path, data, headers)  # noqa: S310 - ours
        with urllib.request.urlopen(request, timeout=120) as reply:  # noqa: S310 - ours
            return dict(json.load(reply))

    def tokenize(self, messages: Sequence[Message] | str, **options: Any) -> dict[str, Any]:
        """Return the server's tokens of a templated conversation, or of a bare text."""
        if isinstance(messages, str):
            body = {"prompt": messages, "add_special_tokens": False}
        else:
            body = {"messages": [message.to_dict() for message in messages]}
        return self.post("/tokenize", {**body, "return_token_strs": True, **options})

    def span(self, messages: Sequence[Message], index: int = 1) -> tuple[int, int]:
        """Return where a turn's tokens stand in the prompt, by two prefixes of it."""
        whole = self.tokenize(messages)["tokens"]
        before = self.tokenize(messages[:index])["tokens"]
        through = self.tokenize(
            messages[: index + 1], add_generation_prompt=False, continue_final_message=True
        )["tokens"]
        assert whole[: len(before)] == before
        assert whole[: len(through)] == through
        return len(before), len(through)

    def prompt_logprobs(self, messages: Sequence[Message], index: int = 1) -> list[float]:
        """Return log P of a turn's tokens as the server tells it, cut out by `span`."""
        turns = [message.to_dict() for message in messages]
        body = {"messages": turns, "max_tokens": 1, "prompt_logprobs": 0}
        told = self.post("/v1/chat/completions", body)["prompt_logprobs"]
        cut = told[slice(*self.span(messages, index))]
        return [entry["logprob"] for position in cut for entry in position.values()]

    def under_way(self) -> int:
        """Return how many requests the engine is working on."""
        gauge = r"^vllm:num_requests_running\{.*\} (\d+)"
        return int(re.search(gauge, self.get("/metrics"), re.MULTILINE)[1])

    def kill_engine(self) -> None:
        """Kill the process that computes; the one that speaks HTTP lives on to notice."""
        listed = subprocess.run(
            ["ps", "-g", str(self.process.pid), "-o", "pid=,args="],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        (engine,) = re.findall(r"^ *(\d+) .*EngineCore", listed, re.MULTILINE)
        os.kill(int(engine), signal.SIGKILL)


@pytest.fixture(autouse=True)
def server_logs() -> Iterator[None]:
    """Show what the servers said where a test fails."""
    yield
    for server in VllmServer.running:
        server.show_log()


@pytest.fixture(scope="session")
def vllm_server(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Serve SmolLM2-135M-Instruct for all tests."""
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with VllmServer(environment, environment / "model", log) as server:
        yield server


@pytest.fixture(scope="session")
def doomed_server(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Serve the same model as most people do, in bfloat16; the last test breaks the server."""
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with VllmServer(environment, environment / "model", log, "bfloat16") as server:
        yield server


@pytest.fixture(scope="session")
def nan_server(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Serve a tiny model whose logits are NaN, as those of damaged or overflowing weights are."""
    folder = tmp_path_factory.mktemp("nan")
    run_script(environment, "write_nan_model.py", environment / "model", folder / "model")
    with VllmServer(environment, folder / "model", folder / "server.log") as server:
        yield server


@pytest.fixture(scope="session")
def reference(environment: Path, vllm_server: VllmServer) -> dict[str, list[float | None]]:
    """Return each draft's log-probabilities, token by token, under Hugging Face transformers."""
    ids = [vllm_server.tokenize(messages)["tokens"] for messages in DRAFTS.values()]
    printed = run_script(environment, "reference.py", environment / "model", stdin=json.dumps(ids))
    return dict(zip(DRAFTS, json.loads(printed), strict=True))


def endpoint(server: VllmServer, **options: Any) -> Endpoint:
    """Return the server as the pipeline sees it."""
    return Endpoint(server.base_url, server.model, **{"request_timeout": 240, **options})


def verify(
    server: VllmServer, messages: Sequence[Message], *, top_logprobs: int = 20, **options: Any
) -> ChatReply:
    """Ask for one token and for the log-probabilities of the assistant's turn."""
    request = ChatRequest(
        messages=tuple(messages), max_tokens=1, top_logprobs=top_logprobs, score_message=1
    )
    return asyncio.run(endpoint(server, **options).chat(request, step=STEP))


# ---------------------------------------------------------------- scored messages


@pytest.mark.parametrize("name", DRAFTS)
def test_a_scored_draft_agrees_with_transformers(
    vllm_server: VllmServer, reference: dict[str, list[float]], name: str
) -> None:
    """The same tokens get the same log-probabilities as from another implementation."""
    start, end = vllm_server.span(DRAFTS[name])

    scored = verify(vllm_server, DRAFTS[name]).scored

    expected = reference[name][start:end]
    assert [token.logprob for token in scored] == pytest.approx(expected, abs=1e-3)


def test_scores_in_bfloat16_agree_with_transformers(
    environment: Path, doomed_server: VllmServer
) -> None:
    """In the coarse numbers of most deployments, tokens still agree as far as those can tell.

    Log-probabilities around 20 lie 0.125 nats apart there, and the instructions a processor has
    decide how each layer's rounding falls: between 0.05 and 0.10 nats a token (root mean square)
    part this server from transformers, either from float32, and one processor from another. A
    span that is off by a token is nats away.
    """
    ids = [doomed_server.tokenize(messages)["tokens"] for messages in DRAFTS.values()]
    folder, stdin = environment / "model", json.dumps(ids)
    reference = json.loads(run_script(environment, "reference.py", folder, "bfloat16", stdin=stdin))

    for messages, expected in zip(DRAFTS.values(), reference, strict=True):
        start, end = doomed_server.span(messages)
        scored = verify(doomed_server, messages).scored
        pairs = zip(scored, expected[start:end], strict=True)
        mean_square = statistics.fmean((token.logprob - other) ** 2 for token, other in pairs)
        assert math.sqrt(mean_square) < 0.25


@pytest.mark.parametrize("name", DRAFTS)
def test_the_scored_tokens_are_those_of_the_tokenizer(vllm_server: VllmServer, name: str) -> None:
    """Neither the template's tokens nor a neighbouring turn's are among them."""
    start, end = vllm_server.span(DRAFTS[name])
    pieces = vllm_server.tokenize(DRAFTS[name])["token_strs"][start:end]

    scored = verify(vllm_server, DRAFTS[name]).scored

    spelled = [piece.replace("\u0120", " ").replace("\u010a", "\n") for piece in pieces]
    assert [token.text for token in scored] == spelled


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        pytest.param(QUESTION, "Łódź, São Tomé — “naïve” œuvre № 7", id="unicode"),
        pytest.param(QUESTION, "京都 is 🏯, not 👩‍🚀 or 🇫🇷", id="emoji"),
        pytest.param(QUESTION, "🦜", id="one emoji"),
        pytest.param(QUESTION, "First line\n\n  second line,\tindented", id="newline"),
        pytest.param(QUESTION, "Paris", id="one token"),
        pytest.param(QUESTION, "It opened in 1920", id="number"),
        pytest.param(QUESTION, "القاهرة، وليس ירושלים", id="right to left"),
        pytest.param("Paris or Lyon: is it Paris or Lyon?", "Paris or Lyon", id="of the question"),
        pytest.param(QUESTION, "It is <think>so</think>Paris</think> then", id="thinking"),
    ],
)
def test_the_scored_text_is_the_assistants(
    vllm_server: VllmServer, question: str, answer: str
) -> None:
    """Whatever the text is made of, its tokens are exactly those of the turn."""
    messages = (user(question), assistant(answer), CHECK)

    reply = verify(vllm_server, messages)

    assert reply.scored, reply.scored_evidence
    assert "".join(token.text for token in reply.scored) == answer
    assert [token.logprob for token in reply.scored] == vllm_server.prompt_logprobs(messages)


@pytest.mark.parametrize("answer", ["assistant", "user", "a", "<|im_end|>"])
def test_a_text_of_the_template_is_never_taken_for_the_assistants(
    vllm_server: VllmServer, answer: str
) -> None:
    """What stands in the template as well is found exactly or not at all."""
    messages = (user(QUESTION), assistant(answer), CHECK)

    scored = verify(vllm_server, messages).scored

    if scored is not None:
        assert [token.logprob for token in scored] == vllm_server.prompt_logprobs(messages)


# ---------------------------------------------------------------- the first token


def test_more_alternatives_than_the_server_allows_are_not_asked_for(
    vllm_server: VllmServer,
) -> None:
    """More than 20 are refused by vLLM; the request is sent once, with those."""
    reply = verify(vllm_server, DRAFTS["sensible"], top_logprobs=50)

    assert reply.attempts == 1
    assert len(reply.tokens[0].alternatives) == 20


def test_labels_asked_for_by_id_are_read_in_any_order(vllm_server: VllmServer) -> None:
    """With `logprob_token_ids` the written token comes first and the rest in no order."""
    (yes,), (no,), (odd,) = (
        vllm_server.tokenize(text)["tokens"] for text in ("Yes", "No", " kettle")
    )
    listed = dict(verify(vllm_server, DRAFTS["sensible"]).tokens[0].alternatives)
    both = math.exp(listed["Yes"]) + math.exp(listed["No"])

    by_id = {"logprob_token_ids": [odd, yes, no]}
    (token,) = verify(vllm_server, DRAFTS["sensible"], extra_body=by_id).tokens

    values = [logprob for _, logprob in token.alternatives]
    assert values != sorted(values, reverse=True)
    assert token.alternatives[0][0] == token.text
    labels = read_labels(token)
    assert labels.log_share("Yes") == pytest.approx(listed["Yes"] - math.log(both), abs=1e-3)
    assert labels.mass == pytest.approx(both, abs=1e-3)


# ---------------------------------------------------------------- the verifier


def test_a_trial_shows_what_vllm_can(vllm_server: VllmServer) -> None:
    """The evidence is counted on the server, and its tokeniser confirms the span."""
    prompted, forced, reflected = asyncio.run(Verifier(endpoint(vllm_server)).trials())

    assert prompted.works
    told = re.fullmatch(r"(\d+) of (\d+) positions, confirmed by /tokenize", prompted.evidence)
    assert told
    assert int(told[1]) == int(told[2]) - 1  # nothing comes before the first
    assert not forced.works
    assert reflected.works


@pytest.mark.parametrize("order", ["rationale_first", "answer_first"])
def test_both_spans_of_a_draft_are_exact(vllm_server: VllmServer, order: str) -> None:
    """Rationale and answer, without their headers, by the server's own numbers and tokeniser."""
    draft = Draft(rationale=SEAT, answer="Paris, of course")
    verifier = Verifier(endpoint(vllm_server), scoring=Scoring(order=order))

    (score,) = verifier.score(QUESTION, [draft])

    first = order == "answer_first"
    text = draft_text(SEAT, draft.answer, answer_first=first)
    messages = check_messages(QUESTION, draft=text)
    values = vllm_server.prompt_logprobs(messages)
    pieces = [token.text for token in verify(vllm_server, messages).scored]
    assert score.tier == "prompt_logprobs"
    for term, part in (("consistency_rationale", SEAT), ("consistency_answer", draft.answer)):
        at = text.index(part)
        ends = [len("".join(pieces[: place + 1])) for place in range(len(pieces))]
        places = [
            p for p, end in enumerate(ends) if at < end and end - len(pieces[p]) < at + len(part)
        ]
        span = score.spans[term]
        assert span.tokens == len(places)
        assert span.total == pytest.approx(sum(values[place] for place in places))
        assert score.terms[term] == pytest.approx(span.total / span.tokens)


def test_labels_are_asked_for_by_their_ids(vllm_server: VllmServer) -> None:
    """So that P(Yes) is exact wherever Yes ranks: the same as among all alternatives."""
    verifier = Verifier(endpoint(vllm_server))
    draft = Draft(rationale=SEAT, answer="Paris")

    (score,) = verifier.score(QUESTION, [draft])

    messages = check_messages(QUESTION, draft=draft_text(SEAT, "Paris"))
    by_rank = read_labels(verify(vllm_server, messages).tokens[0])
    assert score.terms["reflection"] == pytest.approx(by_rank.log_share("Yes"), abs=0.05)
    assert score.label_mass >= by_rank.mass - 1e-3


def test_the_papers_product_of_real_drafts(vllm_server: VllmServer) -> None:
    """All five terms come from one server and two requests per draft."""
    model = endpoint(vllm_server)
    scoring = Scoring(formula="paper", order="answer_first")
    options = {"num_drafts": 3, "max_answer_tokens": 64, "scoring": scoring}
    with SpeculativeRAG(drafter=model, verifier=model, **options) as rag:
        answer = rag.ask(ABOUT_PASSAGES, PASSAGES)

    assert answer.tier == "prompt_logprobs"
    scored = [score for score in answer.trace.scores if score.value is not None]
    assert scored, [score.missing for score in answer.trace.scores]
    for score in scored:
        both = [score.spans[f"draft_{part}"].total for part in ("rationale", "answer")]
        consistent = [score.spans[f"consistency_{part}"].total for part in ("rationale", "answer")]
        log_yes = score.value - math.log(sum(map(math.exp, both))) - sum(consistent)
        assert math.log(score.label_mass) + score.terms["reflection"] == pytest.approx(log_yes)


def test_a_text_is_worth_having_without_log_probabilities(nan_server: VllmServer) -> None:
    """A drafter whose numbers are no numbers may still write."""
    asked = ChatRequest(messages=(user(QUESTION),), max_tokens=2, top_logprobs=0)

    reply = asyncio.run(endpoint(nan_server).chat(asked, step=Step(kind="draft")))

    assert reply.count.completion == 2
    assert reply.tokens is None
    assert reply.attempts == 2


def test_a_verifier_with_nan_logits_scores_nothing(nan_server: VllmServer) -> None:
    """The error names the tier that needs no log-probabilities."""
    draft = Draft(rationale=SEAT, answer="Paris")

    with pytest.raises(LogprobsUnavailableError, match="not JSON compliant"):
        Verifier(endpoint(nan_server)).score(QUESTION, [draft])


# ---------------------------------------------------------------- refusals and failures


def test_a_prompt_beyond_the_context_is_told_apart(vllm_server: VllmServer) -> None:
    """The caller can send fewer passages, which helps with no other refusal."""
    messages = (user("word " * CONTEXT_TOKENS), assistant("Paris"), CHECK)

    with pytest.raises(ContextTooSmallError, match="maximum context length is 2048"):
        verify(vllm_server, messages)


def test_logits_that_are_nan_are_no_log_probabilities(nan_server: VllmServer) -> None:
    """The request is blamed with a 400, although it works without log-probabilities."""
    plain = ChatRequest(messages=DRAFTS["sensible"], max_tokens=1)
    assert asyncio.run(endpoint(nan_server).chat(plain, step=STEP)).count.completion == 1

    with pytest.raises(LogprobsUnavailableError, match="not JSON compliant"):
        verify(nan_server, DRAFTS["sensible"])


def test_a_question_is_answered(vllm_server: VllmServer) -> None:
    """Drafter and verifier on one real server: an answer, and the tokens that both took."""
    model = endpoint(vllm_server)
    with SpeculativeRAG(drafter=model, verifier=model, num_drafts=3, max_answer_tokens=64) as rag:
        answer = rag.ask(ABOUT_PASSAGES, PASSAGES)

    assert answer.text
    for role in ("drafter", "verifier"):
        count = answer.usage.tokens(role)
        assert count.prompt > 0
        assert count.completion > 0


def test_an_engine_that_dies_ends_the_question(doomed_server: VllmServer) -> None:
    """All drafts are lost on their way: the question ends soon, and the error tells of each."""
    model = endpoint(doomed_server)
    options = {"num_drafts": 5, "passages_per_draft": 2, "partitioner": MultiPerspective()}
    with (
        SpeculativeRAG(drafter=model, verifier=model, deadline=60, **options) as rag,
        ThreadPoolExecutor(1) as thread,
    ):
        asked = thread.submit(rag.ask, ABOUT_PASSAGES, PASSAGES)
        while doomed_server.under_way() < 5:
            assert not asked.done()

        doomed_server.kill_engine()
        killed = time.monotonic()
        with pytest.raises(NoAnswerError) as raised:
            asked.result(timeout=120)

    assert time.monotonic() - killed < 20
    assert raised.value.reason == "fallback_failed"
    lost = [f"draft {index}: {doomed_server.base_url}: " for index in range(5)]
    assert all(map(str.startswith, raised.value.failures, [*lost, doomed_server.base_url]))
