"""The command line: `specrag demo`, `ask`, `doctor`, `eval`, `report`, `calibrate` and `models`.

Everything heavy is imported inside the commands, so that `specrag --help` answers at once.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import click

from specrag_integrations.errors import (
    ConfigurationError,
    EvaluationError,
    MissingDependencyError,
    NoAnswerError,
    NoAnswerReason,
    SpecRAGError,
)
from specrag_integrations.local import DRAFTER, VERIFIER

if TYPE_CHECKING:
    from specrag_integrations.answers import Answer
    from specrag_integrations.confidence import Calibration
    from specrag_integrations.display import Watch
    from specrag_integrations.endpoint import Endpoint
    from specrag_integrations.engine import Engine
    from specrag_integrations.evaluation.folder import RunFolder
    from specrag_integrations.evaluation.questions import Question
    from specrag_integrations.evaluation.runs import Run
    from specrag_integrations.evaluation.summary import Prices
    from specrag_integrations.evaluation.systems import System
    from specrag_integrations.events import Event
    from specrag_integrations.local.pair import Roles
    from specrag_integrations.passages import Passage
    from specrag_integrations.usage import ModelRole

_INTERRUPTED = 130
_USAGE = 2
_FAILED = 1
_TOP = 10
_DEMO_QUESTION = "demo-06"
_DEMO_PASSAGES = 8
_REFUSED_KEY = frozenset({401, 403})

_REGISTRY_HELP = "A TOML file with more sources of weights.  [env: SPECRAG_REGISTRY]"
_KEYS = """\b
API keys are read from the environment, never from the command line:
  SPECRAG_API_KEY            sent to every URL given
  SPECRAG_DRAFTER_API_KEY    sent to the drafter's URL instead
  SPECRAG_VERIFIER_API_KEY   sent to the verifier's URL instead
"""
_KEYS_AND_JUDGE = f"{_KEYS}  SPECRAG_JUDGE_API_KEY      sent to the judge's URL instead\n"


def main() -> NoReturn:
    """Run the command line; what goes wrong on purpose is one line, and a bug keeps its traceback.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # no locale fails on a character it lacks
    try:
        code = specrag.main(prog_name="specrag", standalone_mode=False) or 0
        if sys.stdout is not None:  # closed by whoever started us
            sys.stdout.flush()
    except (click.Abort, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would only add a traceback
        code = _INTERRUPTED
    except (click.ClickException, SpecRAGError, OSError) as error:
        code = _told(error)
    _let_go_of_broken_pipes()
    sys.exit(code)


def _told(error: click.ClickException | SpecRAGError | OSError) -> int:
    """Tell what went wrong in one line, and return the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return error.exit_code
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        hint = f"; see: {context.command_path} --help" if context else ""
        return _complain(error.format_message().rstrip(".") + hint, error.exit_code)
    if isinstance(error, SpecRAGError):
        return _complain(f"{error}{_hint(error)}", _exit_code(error))
    if isinstance(error, BrokenPipeError):
        return _FAILED  # the reader has gone, and knows
    if error.filename is not None:
        raise error
    return _complain(f"the output cannot be written: {error.strerror}", _FAILED)


def _complain(message: str, code: int) -> int:
    from specrag_integrations.display import one_line

    with suppress(OSError):
        click.echo(f"Error: {one_line(message)}", err=True)
    return code


def _exit_code(error: SpecRAGError) -> int:
    return _USAGE if isinstance(error, ConfigurationError) else _FAILED


def _hint(error: BaseException | None) -> str:
    """Say what a user of the command line can do about a refused key."""
    while error is not None:
        if getattr(error, "status_code", None) in _REFUSED_KEY:
            return " in the environment variable SPECRAG_API_KEY"
        error = error.__cause__
    return ""


def _let_go_of_broken_pipes() -> None:
    """Python flushes at exit, and would complain about a reader that has gone."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # closed by whoever started us
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="specrag-integrations")
def specrag() -> None:
    """Speculative RAG: a small model drafts answers from subsets of the retrieved passages, a large
    model verifies them by token log-probabilities (arXiv 2407.08223).

    Try `specrag demo` first: it runs on this machine.
    """  # noqa: D205 - click shows it as it stands


# -------------------------------------------------------------------- options shared by commands


@dataclass(frozen=True, slots=True, kw_only=True)
class _Models:
    """Which models answer: URLs with the names served there, or weights on this machine."""

    drafter: str | None
    drafter_model: str | None
    verifier: str | None
    verifier_model: str | None
    registry: str | None

    @property
    def embedded(self) -> bool:
        """Whether they run on this machine."""
        return not (self.drafter or self.verifier)


def _gathered(name: str, kind: type, *options: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator that gives a command some options, and their values as one `kind`."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_values(**given: Any) -> None:
            values = {field.name: given.pop(field.name) for field in dataclasses.fields(kind)}
            command(**{name: kind(**values)}, **given)

        for option in options:
            with_values = option(with_values)
        return with_values

    return decorated


_model_options = _gathered(
    "models",
    _Models,
    click.option("--registry", metavar="FILE", help=_REGISTRY_HELP),
    click.option("--verifier-model", metavar="M", help=f"Its model.  [{VERIFIER}]"),
    click.option("--verifier", metavar="URL", help="Endpoint of the verifier."),
    click.option(
        "--drafter-model",
        metavar="M",
        help="Its model; without a URL, a name of `specrag models list` or a GGUF file."
        f"  [{DRAFTER}]",
    ),
    click.option("--drafter", metavar="URL", help="OpenAI-compatible endpoint of the drafter."),
)
"""The options that say which models answer."""


@contextmanager
def _serving(models: _Models, num_drafts: int, watch: Watch) -> Iterator[Roles]:
    """Provide both roles: by URL, or embedded while the block lasts."""
    if not models.embedded:
        yield _remote(models)
        return
    from importlib.util import find_spec

    from specrag_integrations.local.pair import EmbeddedPair
    from specrag_integrations.local.weights import resolve

    if find_spec("xllamacpp") is None:  # to be known before a gigabyte has been fetched
        raise MissingDependencyError("xllamacpp", "local")
    drafter, verifier = models.drafter_model or DRAFTER, models.verifier_model or VERIFIER
    pair = EmbeddedPair(
        drafter=drafter, verifier=verifier, num_drafts=num_drafts, registry=models.registry
    )
    for name in (drafter, verifier):
        resolve(name, registry=models.registry)  # shows a bar of its own
    watch.say("loading the models")
    with pair:
        yield pair.roles


def _remote(models: _Models) -> Roles:
    from specrag_integrations.endpoint import Endpoint
    from specrag_integrations.local.pair import Roles

    url = models.drafter or models.verifier or ""
    urls = {"drafter": models.drafter or url, "verifier": models.verifier or url}
    names = {"drafter": models.drafter_model, "verifier": models.verifier_model}
    wanted = {}
    for role, other in (("drafter", "verifier"), ("verifier", "drafter")):
        shared = urls[role] == urls[other]
        # One URL for both roles: what is said of one role holds for the other as well.
        name = names[role] or (names[other] if shared else None)
        keys = [f"SPECRAG_{role.upper()}_API_KEY", "SPECRAG_API_KEY"]
        keys += [f"SPECRAG_{other.upper()}_API_KEY"] if shared else []
        key = next((os.environ[variable] for variable in keys if os.environ.get(variable)), None)
        wanted[role] = (urls[role], name, key)
    # The same model is one endpoint, with one limit to the requests under way.
    endpoints = {one: Endpoint(one[0], one[1], api_key=one[2]) for one in wanted.values()}
    return Roles(drafter=endpoints[wanted["drafter"]], verifier=endpoints[wanted["verifier"]])


def _asked(
    engine: Engine,
    question: str,
    passages: Sequence[Passage],
    *,
    deadline: float | None = None,
    watch: Watch,
    see: Callable[[Event], None] = lambda _: None,
) -> Answer:
    """Ask, and show how far the question has come."""
    answer: Answer | None = None
    for event in engine.stream(question, passages, deadline=deadline):
        watch.see(event)
        see(event)
        if event.type == "answer":
            answer = event.answer
    assert answer is not None  # noqa: S101 - the last event is always the answer
    return answer


def _checked_question(question: str) -> str:
    if not question.strip():
        raise click.UsageError("the question is empty", click.get_current_context())
    try:
        question.encode()
    except UnicodeEncodeError:
        message = "the question holds bytes that are no text in this locale"
        raise click.UsageError(message, click.get_current_context()) from None
    return question


def _or_usage(*, wrong: bool, message: str) -> None:
    if wrong:
        raise click.UsageError(message, click.get_current_context())


# -------------------------------------------------------------------- demo


@specrag.command(epilog=_KEYS)
@click.option("--question", metavar="TEXT", help="A question of your own about the corpus.")
@click.option("--id", "row_id", metavar="demo-NN", help=f"A bundled one.  [{_DEMO_QUESTION}]")
@_model_options
def demo(*, question: str | None, row_id: str | None, models: _Models) -> None:
    """Answer a question about a small bundled corpus, and show how.

    Shown are the passages, the subsets, the drafts, their scores and the answer; then what standard
    RAG answers and takes on the same endpoints. The models run on this machine (llama.cpp) unless
    URLs are given; one URL alone serves both roles.
    """
    from specrag_integrations import corpus, display
    from specrag_integrations.documents import find_row, rank, read_documents
    from specrag_integrations.pipeline import NUM_DRAFTS, SpeculativeRAG
    from specrag_integrations.standard import StandardRAG

    _or_usage(wrong=bool(question and row_id), message="give --question or --id, not both")
    gold: Sequence[str] | None = None
    if question is None:
        row = find_row(corpus.questions(), row_id or _DEMO_QUESTION)
        row_id, question, gold, passages = row.id, row.question, row.answers, list(row.passages)
    else:
        question = _checked_question(question)
        passages = rank(question, read_documents([corpus.documents_path()]), _DEMO_PASSAGES)
    out = display.console()
    display.show_question(out, question, row_id, gold or ())
    display.show_passages(out, passages)

    def see(event: Event) -> None:
        if event.type == "passages":
            display.show_subsets(out, event.subsets, len(event.passages))

    progress = out if out.is_terminal else display.console(stderr=True)
    with display.watching(progress) as watch, _serving(models, NUM_DRAFTS, watch) as roles:
        speculative, standard = SpeculativeRAG(**roles), StandardRAG(roles["verifier"])
        with speculative, standard:
            watch.say("warming up both ways with another question")
            speculative.warmup()
            other = corpus.questions()[-1]
            SpeculativeRAG(**roles, num_drafts=1).ask(other.question, other.passages)
            standard.ask(other.question, other.passages[:1])
            watch.say("asking Speculative RAG")
            answer = _asked(speculative, question, passages, watch=watch, see=see)
            display.show_drafts(out, answer)
            display.show_demo_answer(out, answer)
            watch.say("asking standard RAG")
            baseline = _asked(standard, question, passages, watch=watch)
    display.show_comparison(out, answer, baseline, gold=gold)
    cores = _cores() if models.embedded else None
    display.show_closing(out, display.verdict(answer, baseline, cores=cores))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# -------------------------------------------------------------------- ask


@specrag.command(epilog=_KEYS)
@click.argument("question", required=False)
@click.argument("more_docs", nargs=-1, metavar="[--docs PATH...]")
@click.option("--docs", multiple=True, metavar="PATH", help=".txt, .md, .jsonl files or folders.")
@click.option("--passages", metavar="FILE", help="A JSONL of questions with their passages.")
@click.option("--id", "row_id", metavar="ROW", help="The line of --passages.  [the first]")
@click.option(
    "--top", type=click.IntRange(min=1), metavar="N", help="Passages to take from --docs.  [10]"
)
@_model_options
@click.option("--num-drafts", type=click.IntRange(min=1), metavar="N", help="How many drafts.")
@click.option(
    "--passages-per-draft", type=click.IntRange(min=1), metavar="K", help="Passages a draft reads."
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Seconds; the best draft scored by then wins.",
)
@click.option("--standard", is_flag=True, help="Answer by standard RAG with the verifier instead.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer and its trace as JSON.")
def ask(
    *,
    question: str | None,
    more_docs: tuple[str, ...],
    docs: tuple[str, ...],
    passages: str | None,
    row_id: str | None,
    top: int | None,
    num_drafts: int | None,
    passages_per_draft: int | None,
    deadline: float | None,
    standard: bool,
    as_json: bool,
    models: _Models,
) -> None:
    """Answer QUESTION from files.

    \b
      specrag ask "When was the wall built?" --docs notes/
      specrag ask --passages questions.jsonl --id harbour-7

    Documents are split, and ranked for the question with BM25. With --passages, the passages are
    those of the file, and QUESTION may be left out: then the file's own is asked. The models run on
    this machine (llama.cpp) unless URLs are given; one URL alone serves both roles.
    """  # noqa: D301 - click needs the control character itself
    from specrag_integrations import display
    from specrag_integrations.pipeline import NUM_DRAFTS, PASSAGES_PER_DRAFT, SpeculativeRAG
    from specrag_integrations.standard import StandardRAG

    paths = (*docs, *more_docs)
    _or_usage(
        wrong=bool(docs) == bool(passages), message="give either --docs PATH … or --passages FILE"
    )
    _or_usage(wrong=bool(more_docs and passages), message="QUESTION must be one argument: quote it")
    _or_usage(wrong=bool(row_id and not passages), message="--id names a line of --passages")
    _or_usage(wrong=bool(top and passages), message="--top goes with --docs")
    sized = num_drafts is not None or passages_per_draft is not None
    _or_usage(wrong=sized and standard, message="standard RAG writes no drafts")
    if passages:
        question, found = _from_rows(question, passages, row_id)
    else:
        _or_usage(wrong=question is None, message="Missing argument 'QUESTION'.")
        question, found = _from_documents(question or "", paths, top or _TOP)
    if standard and models.embedded:  # no second model is loaded for nothing
        models = replace(models, drafter_model=models.verifier_model or VERIFIER)
    drafts = num_drafts or NUM_DRAFTS
    with (
        display.watching(display.console(stderr=True)) as watch,
        _serving(models, drafts, watch) as roles,
    ):
        engine: Engine = StandardRAG(roles["verifier"])
        if not standard:
            per_draft = passages_per_draft or PASSAGES_PER_DRAFT
            engine = SpeculativeRAG(**roles, num_drafts=drafts, passages_per_draft=per_draft)
        with engine:
            watch.say("asking")
            answer = _asked(engine, question, found, deadline=deadline, watch=watch)
    if as_json:
        ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
        click.echo(json.dumps(answer.to_dict(), ensure_ascii=ascii_only, indent=2))
    else:
        display.show_answer(display.console(), answer)


def _from_rows(question: str | None, path: str, row_id: str | None) -> tuple[str, list[Passage]]:
    from specrag_integrations.documents import find_row, read_rows
    from specrag_integrations.errors import InputError

    rows = read_rows(path)
    if not rows:
        raise InputError(f"{path}: holds no question")
    row = rows[0] if row_id is None else find_row(rows, row_id)
    question = _checked_question(row.question if question is None else question)
    return question, _some(row.passages)


def _from_documents(question: str, paths: Sequence[str], top: int) -> tuple[str, list[Passage]]:
    from specrag_integrations.documents import rank, read_documents

    question = _checked_question(question)
    return question, _some(rank(question, read_documents(paths), top))


def _some(passages: Sequence[Passage]) -> list[Passage]:
    """Find out that there is nothing to read before any model is loaded."""
    from specrag_integrations.passages import usable_passages

    if not usable_passages(passages).passages:
        raise NoAnswerError(
            "there are no passages to answer from", reason=NoAnswerReason.NO_PASSAGES
        )
    return list(passages)


# -------------------------------------------------------------------- doctor


@specrag.command(epilog=_KEYS)
@click.option(
    "--passages", type=click.IntRange(min=1), metavar="N", help="Passages of a question.  [10]"
)
@click.option(
    "--tokens", type=click.IntRange(min=1), metavar="T", help="Tokens of a passage.  [200]"
)
@_model_options
@click.option(
    "--shared",
    is_flag=True,
    help="Both servers run on the same hardware.  [known for the models of this machine]",
)
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
def doctor(
    *, passages: int | None, tokens: int | None, shared: bool, as_json: bool, models: _Models
) -> None:
    """Try out two endpoints, and predict what Speculative RAG takes with them.

    Shown are each server's kind, the tiers that work with the evidence, its rates, and what they
    mean for a question: with how many drafts it is how much faster than standard RAG, or that it is
    not. It sends a few dozen short requests. The models run on this machine (llama.cpp) unless URLs
    are given; one URL alone serves both roles.
    """
    from specrag_integrations import display
    from specrag_integrations.doctor import PASSAGES, TOKENS, diagnose
    from specrag_integrations.pipeline import NUM_DRAFTS

    with (
        display.watching(display.console(stderr=True)) as watch,
        _serving(models, NUM_DRAFTS, watch) as roles,
    ):
        found = diagnose(
            **roles,
            passages=passages or PASSAGES,
            tokens=tokens or TOKENS,
            shared=shared or models.embedded,
            say=watch.say,
        )
    if as_json:
        ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
        click.echo(json.dumps(found.to_dict(), ensure_ascii=ascii_only, indent=2))
    else:
        display.show_diagnosis(display.console(), found)


# -------------------------------------------------------------------- eval, report, calibrate


@dataclass(frozen=True, slots=True, kw_only=True)
class _Data:
    """Which questions are asked."""

    files: tuple[str, ...]
    docs: tuple[str, ...]
    top: int | None
    limit: int | None
    skip: int
    seed: int
    fresh: bool

    def questions(self) -> list[Question]:
        from specrag_integrations import corpus
        from specrag_integrations.evaluation.questions import read_questions

        _or_usage(wrong=bool(self.top and not self.docs), message="--top goes with --docs")
        return read_questions(
            self.files or [corpus.questions_path()],
            docs=self.docs,
            top=self.top or _TOP,
            limit=self.limit,
            skip=self.skip,
            seed=self.seed,
        )


_data_options = _gathered(
    "data",
    _Data,
    click.option(
        "--fresh", is_flag=True, help="Ask anew what is in the cache of replies, for timings."
    ),
    click.option("--seed", type=int, default=0, metavar="N", help="Which questions --limit takes."),
    click.option(
        "--skip",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Leave out the first N of those drawn, to confirm a choice on others.",
    ),
    click.option(
        "--limit",
        type=click.IntRange(min=1),
        metavar="N",
        help="Questions of each file.  [all]",
    ),
    click.option(
        "--top", type=click.IntRange(min=1), metavar="N", help="Passages from --docs.  [10]"
    ),
    click.option(
        "--docs", multiple=True, metavar="PATH", help="Where rows without passages find them."
    ),
    click.argument("files", nargs=-1, metavar="[DATA]..."),
)
"""The options that say which questions are asked."""

_PRICES_HELP = (
    "What a role's tokens cost in $ per million, as ROLE=READ:WRITTEN, or its hardware in $ an "
    "hour, as ROLE=N/h; ROLE is drafter or verifier."
)


@specrag.command("eval", epilog=_KEYS_AND_JUDGE)
@_data_options
@click.option(
    "--systems",
    default="main",
    metavar="A,B,...",
    help="What is compared; --systems help lists the names.  [main]",
)
@click.option("--out", metavar="DIR", help="A folder for all outcomes, the summary and the report.")
@click.option("--price", "prices", multiple=True, metavar="ROLE=P", help=_PRICES_HELP)
@click.option("--calibration", metavar="FILE", help="For systems that are +calibrated.")
@click.option("--judge", metavar="URL", help="Endpoint of a model that judges answers by RAGAS.")
@click.option("--judge-model", metavar="M", help="Its model.")
@click.option(
    "--table", type=click.Choice(["systems", "seed"]), default="systems", help="What is printed."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@_model_options
def evaluate(
    *,
    data: _Data,
    systems: str,
    out: str | None,
    prices: tuple[str, ...],
    calibration: str | None,
    judge: str | None,
    judge_model: str | None,
    table: str,
    as_json: bool,
    models: _Models,
) -> None:
    """Compare Speculative RAG with standard RAG on the questions of DATA.

    \b
      specrag eval questions.jsonl --limit 50 --out results/
      specrag eval questions.jsonl --systems standard,speculative,speculative+m3+k4

    DATA are files of questions with references and passages: the JSONL of docs/passages-jsonl.md,
    HotpotQA, MuSiQue, PubHealth, TriviaQA, PopQA, or hub:NAME; without any, the bundled questions
    are asked. Replies are kept in the cache, so that a run that was stopped goes on where it was.
    The models run on this machine (llama.cpp) unless URLs are given; one URL alone serves both
    roles.
    """  # noqa: D301 - click needs the control character itself
    from specrag_integrations import display
    from specrag_integrations.evaluation.systems import described, parse_systems

    if systems == "help":
        click.echo(described())
        return
    _or_usage(wrong=bool(judge_model and not judge), message="--judge-model goes with --judge")
    compared, priced = parse_systems(systems), _prices(prices)
    _or_usage(
        wrong=bool(calibration) and not any(system.calibrated for system in compared),
        message="--calibration goes with a system that is +calibrated",
    )
    questions = data.questions()
    with _run(
        data,
        models,
        compared,
        questions,
        out=out,
        calibration=calibration,
        judge=_judge(judge, judge_model) if judge else None,
    ) as (folder, _):
        summary = folder.summarise(questions, compared, prices=priced)
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    elif table == "seed":
        display.show_seed_table(display.console(), summary)
    else:
        display.show_evaluation(display.console(), summary)
    if folder.report is not None:
        click.echo(f"Report: {folder.report}", err=as_json)


@contextmanager
def _run(
    data: _Data,
    models: _Models,
    systems: Sequence[System],
    questions: Sequence[Question],
    *,
    out: str | None,
    calibration: str | None = None,
    judge: Endpoint | None = None,
    check: Callable[[Run], object] = lambda _: None,
) -> Iterator[tuple[RunFolder, Run]]:
    """Answer and judge what has not been yet, and provide the folder with all of it.

    `check` raises before the first question what would be wrong with the run after the last.
    """
    from specrag_integrations import display
    from specrag_integrations.evaluation.cache import ReplyCache
    from specrag_integrations.evaluation.folder import Manifest, RunFolder, held
    from specrag_integrations.evaluation.judging import judge_answers
    from specrag_integrations.evaluation.runs import Run, served
    from specrag_integrations.evaluation.sittings import Sitting
    from specrag_integrations.evaluation.systems import Models
    from specrag_integrations.local.weights import cache_folder
    from specrag_integrations.portal import portal
    from specrag_integrations.prompts import prompts_hash

    calibrated = _calibration(calibration)
    slots = max(system.num_drafts for system in systems)
    with (
        held(Path(out)) if out else nullcontext(),
        closing(ReplyCache(cache_folder() / "replies.sqlite")) as cache,
        display.watching(display.console(stderr=True)) as watch,
        _serving(models, slots, watch) as roles,
    ):
        watch.say("asking the models for a first token")
        weights = _weights(models)
        found, facts = {}, {}
        for role in ("drafter", "verifier"):
            found[role], facts[role] = portal.run(
                served(roles[role], cache=cache, weights=weights[role], fresh=data.fresh)
            )
        judging = None
        if judge is not None:  # it is not timed, so that it need not be asked afresh
            judging = portal.run(served(judge, cache=cache, weights=None, fresh=False))
        manifest = Manifest(
            models=facts,
            prompts=prompts_hash(),
            sittings=[
                Sitting(
                    seed=data.seed,
                    servers={role: told["server"] for role, told in facts.items()},
                    command=shlex.join(["specrag", *map(_without_secrets, sys.argv[1:])]),
                )
            ],
        )
        run = Run(
            questions=questions,
            systems=systems,
            models=Models(**found, calibration=calibrated),
        )
        run.engines()
        check(run)
        with RunFolder(Path(out) if out else None, manifest) as folder:
            folder.add_questions(questions)
            folder.add_setups(_setups(run))
            if judging is not None:
                folder.add_judge(judging[1])
            done = {outcome.key for outcome in folder.outcomes}
            try:
                portal.run(run.answer_all(done=done, keep=folder.keep, show=watch.count))
                if judging is not None:
                    watch.say("judging the answers")
                    judge_answers(
                        folder.outcomes,
                        judging[0],
                        questions=questions,
                        systems=systems,
                        known=folder.judgements,
                        keep=folder.keep_judgement,
                        show=watch.count,
                    )
            except KeyboardInterrupt:
                click.echo(f"Stopped: {_kept(folder)}", err=True)
                raise
            except ConfigurationError:
                raise  # it is wrong usage
            except (SpecRAGError, OSError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise EvaluationError(f"{reason}; {_kept(folder)}") from error
            yield folder, run


def _without_secrets(argument: str) -> str:
    """Return an argument as it may be shown: a URL without user, password and query."""
    from specrag_integrations.credentials import split_address

    found = _ADDRESS.fullmatch(argument)
    if found is None:
        return argument
    try:
        shown, *_ = split_address(found["url"])
    except ConfigurationError:
        shown = "***"
    return f"{found['option'] or ''}{shown}"


_ADDRESS = re.compile(r"(?P<option>-[^=]*=)?(?P<url>.*://.*)", re.DOTALL)


def _setups(run: Run) -> dict[str, str]:
    """Return what each system of a run stands for, in each set of questions."""
    sets = {question.dataset: question for question in run.questions}
    return {
        f"{system.name} on {dataset}": system.setup(run.models, question)
        for system in run.systems
        for dataset, question in sets.items()
    }


def _kept(folder: RunFolder) -> str:
    where = f"in {folder.path}" if folder.path else "in the cache of replies"
    judgements = f" and {len(folder.judgements)} judgements" if folder.judgements else ""
    kept = f"{len(folder.outcomes)} outcomes{judgements} are kept {where}"
    return f"{kept}; run the same command to go on"


def _judge(url: str, model: str | None) -> Endpoint:
    from specrag_integrations.endpoint import Endpoint
    from specrag_integrations.evaluation.ragas import check_library

    check_library()  # to be known before anything is asked
    key = os.environ.get("SPECRAG_JUDGE_API_KEY") or os.environ.get("SPECRAG_API_KEY")
    return Endpoint(url, model, api_key=key)


def _weights(models: _Models) -> dict[str, str | None]:
    """Return the hash of each role's weights, where they run on this machine."""
    if not models.embedded:
        return {"drafter": None, "verifier": None}
    from specrag_integrations.local.weights import hash_of

    named = {
        "drafter": models.drafter_model or DRAFTER,
        "verifier": models.verifier_model or VERIFIER,
    }
    return {role: hash_of(name, registry=models.registry) for role, name in named.items()}


def _calibration(path: str | None) -> Calibration | None:
    from specrag_integrations.confidence import Calibration

    return Calibration.load(path) if path else None


def _prices(given: Sequence[str]) -> Prices | None:
    """Read `verifier=0.6:0.8` (per million tokens read and written) and `drafter=1.2/h`."""
    from specrag_integrations.evaluation.summary import HourPrice
    from specrag_integrations.usage import Price

    prices: dict[ModelRole, Price | HourPrice] = {}
    for one in given:
        found = _PRICE.fullmatch(one)
        if found is None:
            message = f"--price {one!r} must read like verifier=0.60:0.80 or drafter=1.20/h"
            raise click.UsageError(message, click.get_current_context())
        role = cast("ModelRole", found["role"])
        _or_usage(wrong=role in prices, message=f"--price names {role} twice: give it one price")
        if found["hour"]:
            prices[role] = HourPrice(hour=float(found["hour"]))
        else:
            prices[role] = Price(input=float(found["read"]), output=float(found["written"]))
    return prices or None


_AMOUNT = r"\d+(?:\.\d+)?"
_PRICE = re.compile(
    rf"(?P<role>drafter|verifier)="
    rf"(?:(?P<hour>{_AMOUNT})/h|(?P<read>{_AMOUNT}):(?P<written>{_AMOUNT}))"
)


@specrag.command()
@click.argument("folder", metavar="DIR")
@click.option("--price", "prices", multiple=True, metavar="ROLE=P", help=_PRICES_HELP)
@click.option(
    "--features",
    metavar="FILE",
    help="Write all outcomes without texts: scores, rightness and timings.",
)
@click.option(
    "--table", type=click.Choice(["systems", "seed"]), default="systems", help="What is printed."
)
def report(*, folder: str, prices: tuple[str, ...], features: str | None, table: str) -> None:
    """Make the summary and the report of DIR anew, without any model.

    DIR is what `specrag eval --out DIR` has written, whole or stopped half-way.
    """
    from specrag_integrations import display
    from specrag_integrations.evaluation.folder import RunFolder
    from specrag_integrations.evaluation.outcomes import write_outcomes
    from specrag_integrations.evaluation.systems import system_named

    priced = _prices(prices)
    inside = bool(features and _resolved(features).is_relative_to(_resolved(folder)))
    _or_usage(wrong=inside, message=f"--features {features} lies in {folder}: name another")
    with RunFolder(Path(folder)) as run:
        systems = [system_named(name) for name in dict.fromkeys(o.system for o in run.outcomes)]
        summary = run.summarise(run.questions, systems, prices=priced)
        if features:
            try:
                write_outcomes(Path(features), run.outcomes, texts=False)
            except OSError as error:
                raise EvaluationError(f"{features} cannot be written: {error.strerror}") from error
    if table == "seed":
        display.show_seed_table(display.console(), summary)
    else:
        display.show_evaluation(display.console(), summary)
    click.echo(f"Report: {run.report}")


class _Share(click.FloatRange):
    """A number between 0 and 1; `nan` is none, and slips through every comparison."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        share = float(super().convert(value, param, ctx))
        if not 0 < share < 1:
            self.fail(f"{value} is not between 0 and 1.", param, ctx)
        return share


_SHARE = _Share(min=0, max=1, min_open=True, max_open=True)


@specrag.command(epilog=_KEYS)
@_data_options
@click.option(
    "--system", "name", default="speculative", metavar="NAME", help="As for eval.  [speculative]"
)
@click.option(
    "--target-precision",
    type=_SHARE,
    default=0.9,
    metavar="P",
    help="The share of accepted answers that are to be right.  [0.9]",
)
@click.option(
    "--delta", type=_SHARE, default=0.1, metavar="D", help="How likely that may fail.  [0.1]"
)
@click.option("--out", default="calibration.json", metavar="FILE", help="[calibration.json]")
@click.option("--demonstration", is_flag=True, help="Mark it as one that nobody should rely on.")
@_model_options
def calibrate(
    *,
    data: _Data,
    name: str,
    target_precision: float,
    delta: float,
    out: str,
    demonstration: bool,
    models: _Models,
) -> None:
    """Measure how far a draft's score can be trusted, on questions with known answers.

    \b
      specrag calibrate questions.jsonl --target-precision 0.9 --out calibration.json

    FILE then gives answers a confidence, P(correct), and holds the confidence from which on they
    may be accepted: with probability 1 - D over the questions of DATA, at least the share P of the
    accepted answers is right, for exchangeable questions in the same set-up.
    """  # noqa: D301 - click needs the control character itself
    from specrag_integrations import display
    from specrag_integrations.evaluation import calibrating
    from specrag_integrations.evaluation.runs import Run
    from specrag_integrations.evaluation.systems import system_named

    system = system_named(name)
    _or_usage(wrong=not system.drafts, message=f"--system {name} has no drafts to calibrate")
    _or_usage(
        wrong=system.calibrated,
        message=f"--system {name} stops early; leave +calibrated out, for all drafts are needed",
    )
    _or_usage(
        wrong=_resolved(out) in map(_resolved, data.files),
        message=f"--out {out} would overwrite the questions",
    )
    reason = _why_no_file(Path(out))
    _or_usage(wrong=bool(reason), message=f"--out {out} cannot be written: {reason}")
    questions = [question for question in data.questions() if question.is_judged]
    selector = system.options.get("selector")
    calibrating.check_calibratable(
        questions=len(questions), selector=selector, tier=system.scoring.get("tier")
    )
    with _run(data, models, [system], questions, out=None, check=Run.fingerprint) as (folder, run):
        found = calibrating.calibrate(
            folder.outcomes,
            fingerprint=run.fingerprint(),
            target_precision=target_precision,
            delta=delta,
            selector=selector,
            seed=data.seed,
            demonstration=demonstration,
        )
    try:
        found.calibration.save(out)
    except OSError as error:
        raise EvaluationError(
            f"{out} cannot be written: {error.strerror}; all replies are in the cache, so that the "
            "same command is quick now"
        ) from error
    display.show_calibration(display.console(), found, Path(out))


def _resolved(path: str) -> Path:
    """Return where a path leads; links that lead to themselves are left as they are."""
    return Path(os.path.realpath(path))


def _why_no_file(path: Path) -> str | None:
    """Say why no file can be written at a path; None where nothing is known against it."""
    try:
        path.stat()
    except FileNotFoundError:
        possible = path.parent.is_dir()
    except OSError as error:  # a name too long, a loop of links
        return error.strerror
    else:
        possible = not path.is_dir()
    return None if possible else "it must be a file in a folder that is there"


# -------------------------------------------------------------------- models


_registry_option = click.option("--registry", metavar="FILE", help=_REGISTRY_HELP)


@specrag.group()
def models() -> None:
    """Model weights for this machine: files known by their hash."""


@models.command("list")
@_registry_option
def list_(registry: str | None) -> None:
    """List the known weights, and whether they are in the cache."""
    from specrag_integrations.display import console, show_weights
    from specrag_integrations.local.weights import find, path_of, weights_names

    show_weights(
        console(),
        [
            (find(name, registry=registry), path_of(name, registry=registry) is not None)
            for name in weights_names(registry=registry)
        ],
    )


@models.command("pull")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_registry_option
def pull_(names: tuple[str, ...], registry: str | None) -> None:
    """Fetch weights that are not in the cache yet, and print where they lie."""
    from specrag_integrations.local.weights import find, pull

    for name in names:  # a wrong name is told before the first download
        find(name, registry=registry)
    for name in names:
        click.echo(pull(name, registry=registry))


@models.command("path")
@click.argument("name")
@_registry_option
def path_(name: str, registry: str | None) -> None:
    """Print where weights lie in the cache."""
    from specrag_integrations.errors import WeightsError
    from specrag_integrations.local.weights import path_of

    path = path_of(name, registry=registry)
    if path is None:
        raise WeightsError(f"{name} is not in the cache; run: specrag models pull {name}")
    click.echo(path)


if __name__ == "__main__":
    main()
