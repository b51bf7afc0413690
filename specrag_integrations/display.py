"""Display: what the command line shows of a question, its drafts and its answer.

Texts of passages and models are shown as they are: nothing in them is markup, and what a terminal
would take for a command is replaced.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from specrag_integrations.answers import Answer
from specrag_integrations.costs import WORTH_IT, Forecast, in_seconds
from specrag_integrations.drafts import Draft, FailedDraft
from specrag_integrations.events import Event
from specrag_integrations.local.weights import Weights
from specrag_integrations.passages import Passage
from specrag_integrations.scores import UNASKED, Score
from specrag_integrations.subsets import Subset
from specrag_integrations.usage import ModelRole

if TYPE_CHECKING:  # only the doctor and the evaluation need what these import
    from specrag_integrations.doctor import Checkup, Diagnosis
    from specrag_integrations.evaluation.calibrating import CalibrationReport
    from specrag_integrations.evaluation.runs import Progress as RunProgress
    from specrag_integrations.trials import Trial

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SHORT = 160
_SHORTER = 100
_SAME_TIME = 1.05
"""Below this ratio two times are called the same."""
_CHECK = "the verifier's log P(Yes) to whether the answer is the correct one"
_TIERS = {
    "prompt_logprobs": _CHECK,
    "forced_decoding": _CHECK,
    "reflection": _CHECK,
    "choice": "the verifier's pick, the same in two orders",
    "draft_only": "the drafter's own log-probabilities, weak evidence",
    "agreement": "the share of drafts with this answer, the weakest evidence",
}
_NONE = "-"
_LINE_SECONDS = 60.0
_WIDEST = 1000


# -------------------------------------------------------------------- consoles and text


def console(*, stderr: bool = False) -> Console:
    """Return a console that takes no text for markup and writes what its encoding can say."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def clean(text: str) -> str:
    """Replace control characters, so that no text can command the terminal."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r\n", "\n"))


def one_line(text: str, limit: int | None = None) -> str:
    """Return the text in one line, cut at a word's end where it is longer than `limit`."""
    line = clean(" ".join(text.split()))
    if limit is None or len(line) <= limit:
        return line
    return line[:limit].rsplit(" ", 1)[0] + " ..."


def _text(text: str, style: str = "") -> Text:
    return Text(clean(text), style)


# -------------------------------------------------------------------- while it works


@dataclass(slots=True)
class Watch:
    """One line that tells what is going on, where somebody watches."""

    progress: Progress
    _scored: int = field(default=0, init=False)
    _drafts: list[str] = field(default_factory=list, init=False)
    _planned: int = field(default=0, init=False)
    _written: str = field(default="", init=False)
    _counting: bool = field(default=False, init=False)
    _next_line: float = field(default=0.0, init=False)

    def say(self, what: str) -> None:
        """Show what is being done now, its time starting at zero."""
        for task in self.progress.task_ids:
            self.progress.remove_task(task)
        self._scored, self._drafts, self._planned, self._written = 0, [], 0, ""
        self.progress.add_task(what, total=None)

    def see(self, event: Event) -> None:
        """Show how far a question has come."""
        if event.type == "passages":
            self._planned = len(event.subsets)
        elif event.type == "draft":
            draft = event.draft
            told = draft.answer if isinstance(draft, Draft) else "failed"
            self._drafts.append(f"draft {draft.index}: {told}")
        elif event.type == "score":
            self._scored += 1
        elif event.type == "delta":
            self._written += event.text
        self._show()

    def count(self, now: RunProgress) -> None:
        """Show how far a run of many questions has come, and how long it will take.

        Where nobody watches, a line is written every minute, so that a log tells it as well.
        """
        if not self._counting:
            self._next_line = time.monotonic() + _LINE_SECONDS
        left = "" if now.seconds_left is None else f", {in_seconds(now.seconds_left)} left"
        told = one_line(f"{now.done} of {now.total}{left}  {now.system}: {now.dataset}", 100)
        if not self.progress.disable:
            if not self._counting:
                self.say(told)
            self.progress.update(self.progress.task_ids[-1], description=told)
        elif time.monotonic() >= self._next_line:
            self.progress.console.print(told, soft_wrap=True)
            self._next_line = time.monotonic() + _LINE_SECONDS
        self._counting = True

    def _show(self) -> None:
        parts = []
        if self._planned:
            parts.append(f"drafts {len(self._drafts)} of {self._planned}, scored {self._scored}")
        parts += self._drafts[-1:]
        if self._written:
            parts = [f"writing: {self._written[-40:]}"]
        if parts and self.progress.task_ids:
            self.progress.update(
                self.progress.task_ids[-1], description=one_line("  ".join(parts), 70)
            )


@contextmanager
def watching(out: Console) -> Iterator[Watch]:
    """Show a line of progress on `out` if it is a terminal; it leaves no trace."""
    encoding = (out.encoding or "").lower()
    columns = (
        SpinnerColumn("dots" if encoding.startswith("utf") else "line"),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    unseen = not out.is_terminal or out.is_dumb_terminal
    progress = Progress(*columns, console=out, transient=True, disable=unseen)
    # Some releases of rich write an empty line where one that shows nothing ends.
    with nullcontext() if unseen else progress:
        yield Watch(progress)


# -------------------------------------------------------------------- an answer


def show_answer(out: Console, answer: Answer) -> None:
    """Print an answer, what it rests on, and what it cost; the answer comes first."""
    out.print(_text(answer.text, "bold"), soft_wrap=not out.is_terminal)
    out.print()
    facts = _facts()
    if answer.rationale:
        facts.add_row("Why", _text(answer.rationale))
    facts.add_row("Sources", _sources(answer))
    facts.add_row("Trust", _text(_trust(answer)))
    for rival in answer.dissent:
        ids = ", ".join(passage.label for passage in rival.passages)
        drafts = ", ".join(map(str, rival.drafts))
        told = f"score {_number(rival.value)}, draft {drafts}, from {ids}"
        facts.add_row("Rival", Text.assemble(clean(rival.answer), "  ", (clean(told), "dim")))
    facts.add_row("Time", _text(_time(answer)))
    facts.add_row("Tokens", _text(_tokens(answer)))
    for note in answer.trace.notes:
        facts.add_row("Note", _text(note, "yellow"))
    out.print(facts)


def _facts() -> Table:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="cyan", no_wrap=True)
    facts.add_column(overflow="fold")
    return facts


def _sources(answer: Answer) -> Text:
    ranks = {id(passage): rank for rank, passage in enumerate(answer.trace.passages, start=1)}
    lines = Text()
    for number, passage in enumerate(answer.passages, start=1):
        cited = number in answer.citations
        lines.append(f"[{number}] {_name(passage)}", "" if cited or not answer.citations else "dim")
        lines.append(f"  {clean(passage.label)}, rank {ranks.get(id(passage), _NONE)}", "dim")
        lines.append(", cited\n" if cited else "\n", "dim")
    lines.rstrip()
    return lines


def _name(passage: Passage) -> str:
    return one_line(passage.title or passage.text, 60)


def _trust(answer: Answer) -> str:
    if answer.abstained:
        return "the passages do not tell"
    if answer.fallback_reason is not None:
        return f"no draft was selected ({answer.fallback_reason}); standard RAG answered"
    if answer.selection is None:
        return "standard RAG scores nothing"
    if answer.tier is None:
        return f"selected by {answer.selection.selector}, which scores no draft by itself"
    score = next(
        s
        for s in answer.trace.scores
        if s.draft == answer.selection.winner and s.tier == answer.tier
    )
    told = f"score {_score(score)}; tier {answer.tier}: {_rests_on(answer)}"
    if answer.confidence is None:
        return f"{told}. Not calibrated: no probability of being right."
    return f"{told}; confidence {answer.confidence:.2f} ({answer.confidence_kind})"


def _rests_on(answer: Answer) -> str:
    """Say what the scores of an answer's drafts are."""
    if UNASKED in answer.trace.notes:
        return UNASKED
    return _TIERS.get(answer.tier or "", "none")


def _time(answer: Answer) -> str:
    stages = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in _stages(answer).items())
    return f"{_ms(answer.trace.seconds)}: {stages}"


def _stages(answer: Answer) -> dict[str, float]:
    """Return the seconds each stage added, in order; verification runs beside the drafting."""
    names = {
        "partition": "partition",
        "draft": "drafts",
        "verify": "verification after the last draft",
        "select": "selection",
        "refine": "refinement",
        "fallback": "standard RAG",
        "answer": "standard RAG",
    }
    spent, before = {}, 0.0
    for stage, ended in sorted(answer.trace.stages.items(), key=lambda item: item[1]):
        spent[names.get(stage, stage)] = ended - before
        before = ended
    return spent


def _tokens(answer: Answer) -> str:
    roles: tuple[ModelRole, ...] = ("drafter", "verifier")
    parts = [f"{role} {_count(answer, role)}" for role in roles if _used(answer, role)]
    requests = answer.usage.requests
    return "; ".join([*parts, "1 request" if requests == 1 else f"{requests} requests"])


def _used(answer: Answer, role: ModelRole) -> bool:
    return any(step.role == role for step in answer.usage.steps)


def _count(answer: Answer, role: ModelRole) -> str:
    if not _used(answer, role):
        return _NONE
    count = answer.usage.tokens(role)
    if count.prompt is None or count.completion is None:
        return "not counted"
    cached = f" ({count.cached:,} cached)" if count.cached else ""
    return f"{count.prompt:,} in{cached}, {count.completion:,} out"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def _score(score: Score) -> str:
    if score.value is None:
        return f"{_NONE} ({one_line(score.missing or 'not scored', 60)})"
    share = f" = P(Yes) {math.exp(score.value):.0%}" if _is_p_yes(score) else ""
    return f"{score.value:.2f}{share}"


def _is_p_yes(score: Score) -> bool:
    return score.value is not None and score.terms.get("reflection") == score.value


# -------------------------------------------------------------------- the demonstration


def show_question(out: Console, question: str, row_id: str | None, gold: Sequence[str]) -> None:
    """Print the question, and the answers that count as right."""
    facts = _facts()
    facts.add_row("Question", _text(question, "bold"))
    if row_id is not None:
        told = " or ".join(gold) if gold else "the passages do not tell"
        facts.add_row("Gold", _text(f"{told}  ({row_id}; the models do not see this)", "dim"))
    out.print(facts)


def show_passages(out: Console, passages: Sequence[Passage]) -> None:
    """Print the passages by rank, shortened."""
    _heading(out, f"1  Retrieved: {len(passages)} passages, best first")
    ranked = Table.grid(padding=(0, 2))
    ranked.add_column(justify="right", style="cyan", no_wrap=True)
    ranked.add_column(no_wrap=True)
    room = max(20, out.width - 6)
    for rank, passage in enumerate(passages, start=1):
        line = _text(_name(passage), "bold green" if passage.metadata.get("is_gold") else "bold")
        line.append(f"  {one_line(passage.text)}", "not bold dim")
        if len(line) > room:
            line.truncate(room - 4)
            line.append(" ...")
        ranked.add_row(f"#{rank}", line)
    out.print(ranked)
    if any(passage.metadata.get("is_gold") for passage in passages):
        gold = [f"#{n}" for n, one in enumerate(passages, start=1) if one.metadata.get("is_gold")]
        out.print(_text(f"The answer stands in {', '.join(gold)}.", "dim"))


def show_subsets(out: Console, subsets: Sequence[Subset], passages: int) -> None:
    """Print which passages each draft reads."""
    sizes = sorted({len(subset.ranks) for subset in subsets})
    size = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
    _heading(out, f"2  Partitioned: each draft reads {size} of {passages} passages")
    grid = Table(box=None, pad_edge=False, padding=(0, 1), header_style="cyan")
    grid.add_column("", no_wrap=True)
    for rank in range(passages):
        grid.add_column(f"#{rank + 1}", justify="center")
    for subset in subsets:
        cells = ["x" if rank in subset.ranks else "." for rank in range(passages)]
        grid.add_row(
            f"draft {subset.index}", *(Text(c, "bold" if c == "x" else "dim") for c in cells)
        )
    out.print(grid)


def show_drafts(out: Console, answer: Answer) -> None:
    """Print every draft with its log-probabilities and its score, the winner marked."""
    trace = answer.trace
    drafter, verifier = (_model(answer, role) for role in ("drafter", "verifier"))
    _heading(out, f"3  Drafted by {drafter}, verified by {verifier}")
    winner = answer.selection.winner if answer.selection else None
    scores = {score.draft: score for score in trace.scores if score.tier == answer.tier}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("draft", no_wrap=True)
    table.add_column("answer, and the rationale it was written from", ratio=1, overflow="fold")
    table.add_column("log p", justify="right", no_wrap=True)
    table.add_column("score", justify="right", no_wrap=True)
    for draft in trace.drafts:
        won = draft.index == winner
        name = Text(f"{draft.index} wins" if won else str(draft.index), "bold green" if won else "")
        table.add_row(name, *_draft_cells(draft, scores.get(draft.index), won=won))
    out.print(table)
    out.print(
        _text(
            "log p: mean log-probability per token, by the drafter, of the answer and of the "
            f"rationale. score: {_rests_on(answer)}.",
            "dim",
        )
    )


def _draft_cells(
    draft: Draft | FailedDraft, score: Score | None, *, won: bool
) -> tuple[RenderableType, RenderableType, RenderableType]:
    if isinstance(draft, FailedDraft):
        return _text(f"failed: {one_line(draft.reason, _SHORT)}", "red"), _NONE, _NONE
    told = _text(one_line(draft.answer, _SHORT), "bold green" if won else "bold")
    told.append(f"\n{one_line(draft.rationale, 2 * _SHORT) or '(no rationale)'}", "not bold dim")
    spans = {"ans": draft.answer_logprob, "rat": draft.rationale_logprob}
    logprobs = "\n".join(f"{name} {span.mean:.2f}" for name, span in spans.items() if span)
    if draft.abstained:
        return told, logprobs, "abstained"
    if score is None or score.value is None:
        return told, logprobs, "not scored"
    share = f"\nYes {math.exp(score.value):.0%}" if _is_p_yes(score) else ""
    return told, logprobs, Text(f"{score.value:.2f}{share}", "bold green" if won else "")


def _model(answer: Answer, role: str) -> str:
    names = {step.model for step in answer.usage.steps if step.role == role and step.model}
    return one_line(" and ".join(sorted(names)) or f"the {role}", 60)


def show_demo_answer(out: Console, answer: Answer) -> None:
    """Print the answer of Speculative RAG with what it rests on."""
    _heading(out, "4  Answered")
    facts = _facts()
    facts.add_row("Answer", _text(answer.text, "bold green"))
    facts.add_row("Sources", _sources(answer))
    if answer.fallback_reason is not None:
        facts.add_row("Trust", _text(_trust(answer)))
    for note in answer.trace.notes:
        facts.add_row("Note", _text(one_line(note, 3 * _SHORT), "yellow"))
    out.print(facts)


def show_comparison(
    out: Console, speculative: Answer, standard: Answer, *, gold: Sequence[str] | None
) -> None:
    """Print what both ways answered and took."""
    _heading(out, "5  Compared with standard RAG")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("", no_wrap=True)
    table.add_column("Speculative RAG", ratio=1, overflow="fold")
    table.add_column("standard RAG", ratio=1, overflow="fold")
    both = (speculative, standard)

    def row(name: str, cells: Sequence[str]) -> None:
        table.add_row(name, *(_text(cell) for cell in cells))

    row("answer", [one_line(answer.text, _SHORT) for answer in both])
    if gold is not None:
        row("against gold", ["right" if is_right(a, gold) else "wrong" for a in both])
    row("total", [_ms(answer.trace.seconds) for answer in both])
    stages = [_stages(answer) for answer in both]
    for stage, shown in {
        "partition": "  partition",
        "drafts": "  draft",
        "verification after the last draft": "  verify *",
        "standard RAG": "  one call",
    }.items():
        if any(stage in spent for spent in stages):
            row(shown, [_ms(spent[stage]) if stage in spent else _NONE for spent in stages])
    row("first token", [_ms(answer.trace.first_token or answer.trace.seconds) for answer in both])
    roles: tuple[ModelRole, ...] = ("drafter", "verifier")
    for role in roles:
        row(f"{role} tokens", [_count(answer, role) for answer in both])
    row("requests", [f"{answer.usage.requests}" for answer in both])
    out.print(table)
    notes = [
        "standard RAG: the verifier reads all passages in one call.",
        "Both ran one after the other on the same endpoints, warmed up with another question.",
        "* after the last draft landed; earlier drafts are verified while others are written.",
    ]
    if speculative.fallback_reason is None:
        notes.append("An accepted draft arrives whole, so its first token takes the total time.")
    if gold is not None:
        notes.append("right: a gold answer stands in the answer as whole words.")
    out.print(_text(" ".join(notes), "dim"))


def verdict(speculative: Answer, standard: Answer, *, cores: int | None) -> str:
    """Return in plain words which was faster in this run; `cores` of the machine that ran both."""
    times = {"Speculative RAG": speculative.trace.seconds, "standard RAG": standard.trace.seconds}
    (fast, less), (slow, more) = sorted(times.items(), key=lambda item: item[1])
    ratio = more / less if less else math.inf
    if ratio < _SAME_TIME:
        told = f"In this run both took about the same time ({less:.2f} s and {more:.2f} s)."
    else:
        told = (
            f"In this run {fast} was faster, by a factor of {ratio:.1f} "
            f"({less:.2f} s; {slow} {more:.2f} s)."
        )
    drafts = len(speculative.trace.drafts)
    if cores is not None and drafts > 1:
        shared = "1 CPU core" if cores == 1 else f"{cores} CPU cores"
        told += (
            f" All models share {shared} here, where {drafts} drafts cost {drafts} drafts: drafting"
            " in parallel pays where the hardware computes drafts side by side."
        )
    return f"{told} One question, measured once: an example, not a benchmark."


def is_right(answer: Answer, gold: Sequence[str]) -> bool:
    """Whether the answer holds a gold one, as `specrag eval` counts; without one, it abstains."""
    from specrag_integrations.evaluation.metrics import contains  # the demo's alone

    return contains(answer.text, gold) if gold else answer.abstained


def show_closing(out: Console, text: str) -> None:
    """Print the last word."""
    out.print()
    out.print(_text(text, "bold"))


def _heading(out: Console, title: str) -> None:
    out.print()
    characters = "\u2500" if (out.encoding or "").lower().startswith("utf") else "-"
    out.print(Rule(_text(title, "bold"), align="left", style="cyan", characters=characters))


# -------------------------------------------------------------------- weights


def show_weights(out: Console, weights: Sequence[tuple[Weights, bool]]) -> None:
    """Print the known weights, and whether the cache holds them."""
    for one, cached in weights:
        size = f"{one.bytes / 1e6:,.0f} MB"
        state = "cached" if cached else "not cached"
        out.print(_text(one.name, "bold"), f"{size}, {one.licence}, {state}", sep="  ")
        out.print(f"  official: {one.repository}, {one.file}", style="dim", soft_wrap=True)


# -------------------------------------------------------------------- the doctor


def show_diagnosis(out: Console, diagnosis: Diagnosis) -> None:
    """Print what both endpoints are and take, what is predicted from it, and the verdict."""
    _heading(out, "1  Measured")
    both = {"drafter": diagnosis.drafter, "verifier": diagnosis.verifier}
    if diagnosis.drafter is diagnosis.verifier:
        both = {"both roles": diagnosis.verifier}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("", no_wrap=True)
    for role in both:
        table.add_column(role, ratio=1, overflow="fold")
    cells = [_checkup_cells(one, drafts=role != "verifier") for role, one in both.items()]
    for name in cells[-1]:
        table.add_row(name, *(_text(found.get(name, _NONE)) for found in cells))
    out.print(table)
    facts = _facts()
    for role, one in both.items():
        for note in one.notes:
            facts.add_row("Note", _text(f"{role}: {one_line(note, 3 * _SHORT)}", "yellow"))
    for note in diagnosis.notes:
        facts.add_row("Note", _text(note, "yellow"))
    if facts.row_count:
        out.print(facts)
    if diagnosis.forecast is not None:
        _show_forecast(out, diagnosis.forecast)
    show_closing(out, diagnosis.verdict)
    out.print(_text(diagnosis.caveat, "dim"))


def _checkup_cells(one: Checkup, *, drafts: bool) -> dict[str, str]:
    """Return what is told of an endpoint, by row."""
    cells = {
        "address": one.url,
        "model": one.model,
        "server": " ".join([one.server or "unknown", one.version or ""]).strip(),
        "context": _NONE if one.context_tokens is None else f"{one.context_tokens:,} tokens",
    }
    for trial in one.tiers:
        cells[f"tier {trial.tier}"] = _trial(trial)
    cells["tier draft_only"] = _trial(one.drafts) if drafts and one.drafts else _NONE
    cells["prefix cache"] = _NONE
    if one.cache is not None:
        cells["prefix cache"] = f"{'seen' if one.cache.seen else 'not seen'} ({one.cache.evidence})"
    cells["prefill"] = _rate(one.prefill)
    cells["decode"] = _rate(one.decode)
    cells["overhead"] = _NONE if one.overhead is None else f"{_ms(one.overhead)} a request"
    cells["4 at once"] = _NONE if one.speed_up is None else f"{one.speed_up:.1f}x one at a time"
    cells["measured in"] = in_seconds(one.seconds)
    return cells


def _trial(trial: Trial) -> str:
    return f"{'yes' if trial.works else 'no'} ({one_line(trial.evidence, _SHORT)})"


def _rate(rate: float | None) -> str:
    return _NONE if rate is None else f"{rate:,.0f} tokens/s"


def _show_forecast(out: Console, found: Forecast) -> None:
    load = found.load
    _heading(out, f"2  Predicted: {load.passages} passages of {load.tokens} tokens")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("", no_wrap=True)
    for name in ("read", "write", "verify *", "total", "requests", "faster by"):
        table.add_column(name, justify="right", no_wrap=True)
    standard = found.standard
    seconds = [standard.read, standard.write, None, standard.seconds]
    table.add_row("standard RAG", *(_NONE if s is None else in_seconds(s) for s in seconds), "1")
    for option in found.options:
        chosen = option is found.speculative and found.ratio >= WORTH_IT
        seconds = [option.read, option.write, option.verify, option.seconds]
        table.add_row(
            f"m = {option.num_drafts}",
            *(in_seconds(s) for s in seconds if s is not None),
            str(sum(option.requests.values())),
            f"{found.ratio_of(option):.2f}x",
            style="bold" if chosen else None,
        )
    out.print(table)
    first = f", the first of {load.longest}" if load.longest > load.per_draft else ""
    apart = "hardware of their own (if not, say --shared)"
    hardware = "the same hardware" if found.servers.shared else apart
    out.print(
        _text(
            f"m drafts, each of {load.per_draft} passages{first}; tier {found.tier}; drafter and "
            f"verifier taken to run on {hardware}. * what verification adds after the last draft.",
            "dim",
        )
    )


# -------------------------------------------------------------------- an evaluation


def show_evaluation(out: Console, summary: Mapping[str, Any]) -> None:
    """Print how the systems compare, and what to do."""
    _show_columns(out, "right or wrong", _RIGHT_COLUMNS.items(), summary["systems"])
    asked = [row for row in summary["systems"] if not row["bound"]]
    abstaining = [row for row in asked if row["abstained_rightly"]]
    _show_columns(out, "abstained", _ABSTAINING_COLUMNS.items(), abstaining)
    _show_columns(out, "time and tokens", _TIME_COLUMNS.items(), asked)
    _show_columns(out, "selection", _SELECTION_COLUMNS.items(), summary["selection"])
    judged = [row for row in summary["systems"] if _is_judged(row)]
    _show_columns(out, "judged by RAGAS", _JUDGED_COLUMNS, judged)
    if judged:
        out.print(_text(_told_of_judging(summary, judged), "dim"))
    sets = ", ".join(_set(one) for one in summary["datasets"])
    out.print(
        _text(
            f"Questions of each set: {sets or 'none'}. In the table's brackets: 95 % intervals.",
            "dim",
        )
    )
    for one in summary["datasets"]:
        if label := one["majority"]:
            told = f"{one['name']}: {label['label']} every time is right {_percent(label['share'])}"
            out.print(_text(told, "dim"))
    _show_cautions(out, summary, asked)
    show_closing(out, summary["recommendation"])


def _show_cautions(
    out: Console, summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Print which figures are not what they seem."""
    for name in ("mixed_times", "shared_prompts"):
        if told := summary.get(name):
            out.print(_text(told, "yellow"))
    for row in rows:
        if row["errors"]:
            out.print(_text(_told_of_failures(row), "yellow"))


def _told_of_failures(row: Mapping[str, Any]) -> str:
    told = f"{row['name']}: {row['errors']} of {row['questions']} questions failed"
    first = "at first: " if row["errors"] > 1 else ""
    return f"{told}, and count as wrong ({first}{one_line(row['first_error'], _SHORTER)})"


def _set(one: Mapping[str, Any]) -> str:
    without = f", {one['unanswerable']} without an answer" if one["unanswerable"] else ""
    return f"{one['name']} ({one['questions']}{without})"


_RIGHT_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "right": lambda row: _share(row["accuracy"]),
    "against standard": lambda row: _points(_against(row, "difference")),
    "won:lost": lambda row: _won_and_lost(row["against_standard"]),
    "F1": lambda row: _NONE if row["f1"] is None else f"{row['f1']['value']:.2f}",
    "F1 against": lambda row: _points(_against(row, "f1")),
    "words": lambda row: _NONE if row["words"] is None else f"{row['words']:.0f}",
}
_ABSTAINING_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "where nothing answers": lambda row: _share(row["abstained_rightly"]),
    "where something does": lambda row: _share(row["abstained_wrongly"]),
}
_TIME_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "fell back": lambda row: _NONE if row["fallback"] is None else _percent(row["fallback"]),
    "first token": lambda row: _median(row["first_token"]),
    "total": lambda row: _median(row["total"]),
    "speed-up": lambda row: _speedup(_against(row, "speedup")),
    "drafter": lambda row: _thousands(row["tokens"]["drafter"]),
    "verifier": lambda row: _thousands(row["tokens"]["verifier"]),
}
_SELECTION_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "mean": lambda row: _percent(row["mean"]),
    "selected": lambda row: _percent(row["selected"]),
    "oracle": lambda row: _percent(row["oracle"]),
    "contested": lambda row: f"{row['contested']} of {row['questions']}",
    "efficiency": lambda row: _interval(row["efficiency"]),
}
_JUDGED_COLUMNS: Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]] = (
    ("faithful", lambda row: _share(row["faithfulness"])),
    ("difference", lambda row: _points(_against(row, "faithfulness"))),
    ("factual", lambda row: _share(row["factual_correctness"])),
    ("difference", lambda row: _points(_against(row, "factual_correctness"))),
)


def _is_judged(row: Mapping[str, Any]) -> bool:
    return bool(row["faithfulness"] or row["factual_correctness"])


def _told_of_judging(summary: Mapping[str, Any], judged: Sequence[Mapping[str, Any]]) -> str:
    """Return who judged how many answers, and how far that can be trusted."""
    from specrag_integrations.evaluation.ragas import CAUTION

    counts = (
        max((row[name] or {"n": 0})["n"] for name in ("faithfulness", "factual_correctness"))
        for row in judged
    )
    answers = f"{sum(counts)} of {sum(row['questions'] for row in judged)} answers"
    judge = one_line(summary["judge"]["name"], 60) if summary["judge"] else "an unnamed judge"
    return f"Judged by {judge}: {answers}. {CAUTION}"


def _show_columns(
    out: Console,
    title: str,
    columns: Iterable[tuple[str, Callable[[Mapping[str, Any]], str]]],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    if not rows:
        return
    names, cells = zip(*columns, strict=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column(title, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        name = row.get("name") or row["system"] + (" (labels)" if row["labels"] else "")
        table.add_row(_text(name), *(_text(cell(row)) for cell in cells))
    # On a narrow terminal long lines are wrapped by it; a name cut to letters says nothing.
    width = out.width
    out.width = max(width, Measurement.get(out, out.options.update(width=_WIDEST), table).maximum)
    out.print(table, crop=False)
    out.width = width
    out.print()


def show_calibration(out: Console, found: CalibrationReport, path: Path) -> None:
    """Print what was calibrated, how well it fits, and what may be promised."""
    calibration, facts = found.calibration, _facts()
    terms = ", ".join(f"{name} {weight:+.3g}" for name, weight in calibration.coefficients.items())
    facts.add_row("P(correct)", _text(f"{calibration.kind} in {terms}"))
    for name, measures in (("raw score", found.before), ("confidence", found.after)):
        if measures is not None:
            told = f"Brier {measures.brier:.3f}, log loss {measures.log_loss:.3f}"
            facts.add_row(name, _text(f"{told}, ECE {measures.ece:.3f} ({measures.n} questions)"))
    for name, efficiency in (
        ("selection now", found.current_efficiency),
        ("with fitted weights", found.fitted_efficiency),
    ):
        if efficiency is not None:
            told = f"efficiency {_interval(efficiency.interval.to_dict())}"
            facts.add_row(name, _text(f"{told} on {efficiency.contested} contested questions"))
    weights = ", ".join(f"{name} {weight:.3g}" for name, weight in calibration.weights.items())
    facts.add_row("weights", _text(weights or "the tier's own term alone"))
    for name, told in _accepted(found):
        facts.add_row(name, _text(told))
    for note in found.notes:
        facts.add_row("Note", _text(note, "yellow"))
    out.print(facts)
    out.print()
    out.print(_text(_promise(found), "bold"))
    out.print(_text(f"Written to {path}", "dim"), soft_wrap=True)


def _accepted(found: CalibrationReport) -> Iterator[tuple[str, str]]:
    """Tell what the thresholds accept of the half that tests; each way of using them is a row."""
    thresholds = found.calibration.thresholds
    if thresholds is None:
        return
    whole = thresholds.questions
    if thresholds.accept_confidence is not None:
        accepted, early = round(found.coverage * whole), round(found.early * whole)
        right = round((found.precision or 0.0) * accepted)
        yield "accepted", f"{accepted} of {whole} questions, {right} right, {early} of them early"
    name = "accepted" if thresholds.accept_confidence is None else "all awaited"
    yield name, f"{thresholds.accepted} of {whole} questions, {thresholds.right} right"


def _promise(found: CalibrationReport) -> str:
    thresholds = found.calibration.thresholds
    if thresholds is None:
        bound = "" if found.bound is None else f" (the best lower bound is {found.bound:.2g})"
        return (
            f"No threshold promises anything{bound}: the file holds a confidence and no thresholds."
        )
    accept = thresholds.accept_confidence
    early = "" if accept is None else f", and stop early from {accept:.2f} on"
    told = (
        f"Accept from confidence {thresholds.min_confidence:.2f} on{early}: with probability "
        f"{1 - thresholds.delta:g}, at least {thresholds.target:g} of the accepted answers are "
        "right, for questions like these in this very set-up."
    )
    if found.attained:
        return told
    more = "the accepted are not right often enough"
    if found.needed is not None:
        more = f"at this precision, it takes about {found.needed} accepted in the half that tests"
    return f"No threshold attains {found.asked:g}: {more}. {told}"


def show_seed_table(out: Console, summary: Mapping[str, Any]) -> None:
    """Print time, accuracy and cost of the three engines: the large model, the small one, both.

    Where all of them were judged, accuracy is RAGAS's factual correctness.
    """
    rows = {row["name"]: row for row in summary["systems"]}
    engines = {
        "monolithic (verifier alone)": rows.get("standard"),
        "drafter only": rows.get("drafter_only"),
        "speculative": next((rows[name] for name in rows if name.startswith("speculative")), None),
    }
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("engine", overflow="fold")
    known = [row for row in engines.values() if row is not None]
    judged = bool(known) and all(row["factual_correctness"] for row in known)
    right, accuracy = ("factual (RAGAS)", "factual_correctness") if judged else _RIGHT
    for name in ("TTFT p50", "total p50", right, "cost per 1,000"):
        table.add_column(name, justify="right", no_wrap=True)
    for engine, row in engines.items():
        cells = [_NONE] * 4 if row is None else _seed_cells(row, accuracy)
        table.add_row(engine, *cells)
    out.print(table)
    if judged:
        out.print(_text(_told_of_judging(summary, known), "dim"))
    _show_cautions(out, summary, known)


_RIGHT = ("right", "accuracy")


def _seed_cells(row: Mapping[str, Any], accuracy: str) -> list[str]:
    first, total, cost = row["first_token"], row["total"], row["cost"]
    return [
        _median(first),
        _median(total),
        _share(row[accuracy]),
        _NONE if cost is None else f"${cost['value']:,.2f}",
    ]


def _share(interval: Mapping[str, float] | None) -> str:
    if interval is None:
        return _NONE
    low, high = 100 * interval["low"], 100 * interval["high"]
    return f"{_percent(interval['value'])} ({low:.0f}-{high:.0f})"


def _against(row: Mapping[str, Any], name: str) -> Any:
    """Return one thing of a comparison with standard RAG; None where there is none."""
    return (row["against_standard"] or {}).get(name)


def _points(difference: Mapping[str, float] | None) -> str:
    if difference is None:
        return _NONE
    value, low, high = (100 * difference[name] for name in ("value", "low", "high"))
    return f"{value:+.0f} ({low:+.0f} to {high:+.0f})"


def _won_and_lost(against: Mapping[str, Any] | None) -> str:
    if against is None or against["p"] is None:
        return _NONE
    return f"{against['wins']}:{against['losses']}, p {against['p']:.2f}"


def _interval(interval: Mapping[str, float] | None) -> str:
    if interval is None:
        return _NONE
    return f"{interval['value']:.2f} ({interval['low']:.2f} to {interval['high']:.2f})"


def _median(found: Mapping[str, float] | None) -> str:
    return _NONE if found is None else in_seconds(found["p50"])


def _thousands(tokens: Mapping[str, float | None]) -> str:
    if None in tokens.values():
        return _NONE
    return f"{tokens['prompt']:,.0f}+{tokens['completion']:,.0f}"


def _speedup(interval: Mapping[str, float | None] | None) -> str:
    if interval is None:
        return _NONE
    low, high = interval["low"] or 0.0, interval["high"]
    if high is None:
        return f"too few ({interval['n']})"
    return f"{interval['value']:.2f}x ({low:.2f}-{high:.2f})"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
