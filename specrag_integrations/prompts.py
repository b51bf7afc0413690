"""Every prompt, as a pure function of strings.

What is constant comes first, so that a server's prefix cache serves all drafts. There is no system
turn of ours, since several chat templates have no place for one. Rationale before answer is the
order of the paper's drafter (section 3, appendix G); every sentence here is our own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import iscoroutine, signature
from string import ascii_uppercase

from specrag_integrations.errors import ConfigurationError
from specrag_integrations.models import Message, assistant, user
from specrag_integrations.options import check_kind
from specrag_integrations.passages import Passage

Template = Callable[[str, Sequence[Passage], Sequence[Message]], tuple[Message, ...]]
"""(question, passages, history) -> the prompt, as `draft_messages` or an application words it.

The same arguments must give the same messages. It is tried once, with made-up ones, when an engine
is made.
"""

RATIONALE = "Rationale:"
ANSWER = "Answer:"
UNKNOWN = "unknown"
"""What a model is asked to answer where the passages do not tell."""

_DRAFT_TASK = (
    "Answer the question from the passages: first one sentence of rationale that cites a passage, "
    f"then the answer in a few words. If the passages do not tell, the answer is {UNKNOWN}."
)
_DRAFT_FORMAT = f"Write two lines, {RATIONALE} and {ANSWER}"
_ANSWER_TASK = (
    "Answer the question from the passages in a few words, and cite the passage. "
    f"If the passages do not tell, the answer is {UNKNOWN}."
)

_DRAFT_REQUEST = (
    f"Write two lines. {RATIONALE} one sentence that says what in the context above tells the "
    f"answer. {ANSWER} the answer itself. If the context does not tell, the answer is {UNKNOWN}."
)

# Told how to write, small models copy the description ("the answer only"); shown once, they follow.
# As turns of its own, the example is a prefix that every draft of every question shares.
_EXAMPLE_PASSAGES = (
    Passage(
        title="Harbour Museum",
        text="The Harbour Museum stands in a former rope factory. It opened in 1921 and was "
        "enlarged forty years later.",
    ),
    Passage(
        title="Harbour Bridge",
        text="The Harbour Bridge was built in 1934 by the engineer Ada Lund.",
    ),
)
_EXAMPLE_QUESTION = "Who built the Harbour Bridge?"
_EXAMPLE_RATIONALE = "Passage [2] says that the engineer Ada Lund built the Harbour Bridge in 1934."
EXAMPLE_ANSWER = "Ada Lund"
"""An invented name: a draft that gives it to another question has copied the example."""

_CHECK = "Is this the correct answer to the question? Reply Yes or No."
_CHOICE = "Which draft gives the correct answer to the question? Reply with its letter only."
BEST = "Best:"
_SINGLE_PROMPT = (
    "Choose the draft that answers the question most accurately, and improve its answer where it "
    f"is wrong or unclear. Write two lines: {BEST} and the draft's letter, then {ANSWER} and the "
    "answer in a few words."
)
_REFINE_TASK = (
    "A draft answers the question from these passages. Check it against them and write the answer "
    "in a few words, corrected where it is wrong, and cite the passage. "
    f"If the passages do not tell, the answer is {UNKNOWN}."
)

PROBE_QUESTION = "Which city is the capital of France?"
PROBE_RATIONALE = "The government and the parliament of France have their seat in Paris."
PROBE_ANSWER = "Paris"
"""What a server is tried with once, to see which log-probabilities it returns."""


def checked_template(name: str, template: Template) -> Template:
    """Return an application's template that tells when it makes no prompt; it is tried once.

    Args:
        name: The parameter it was given as.
        template: What was given.

    Raises:
        ConfigurationError: it cannot be called so, or returned something else than messages.
    """
    check_kind(name, template, method="__call__")
    try:
        signature(template).bind("question", (), ())
    except TypeError as error:
        raise ConfigurationError(
            f"{name} is called with (question, passages, history), which it does not take: {error}"
        ) from None

    def prompt(
        question: str, passages: Sequence[Passage], history: Sequence[Message]
    ) -> tuple[Message, ...]:
        turns = template(question, passages, history)
        if iscoroutine(turns):
            turns.close()  # else Python warns that nobody awaited it
        if not isinstance(turns, list | tuple) or not turns:
            wrong = f"{'an empty ' if turns in ([], ()) else 'a '}{type(turns).__name__}"
        elif others := [turn for turn in turns if not isinstance(turn, Message)]:
            wrong = f"a {type(turns).__name__} that holds a {type(others[0]).__name__}"
        elif odd := [turn for turn in turns if not isinstance(turn.content, str)]:
            wrong = f"a Message whose content is a {type(odd[0].content).__name__}"
        else:
            return tuple(turns)
        raise ConfigurationError(
            f"{name} must return a list of Message, such as [user('…')] with "
            f"specrag_integrations.models.user; it returned {wrong}"
        )

    prompt("question", (Passage(text="text", title="title"),), ())
    return prompt


def draft_messages(
    question: str,
    passages: Sequence[Passage],
    history: Sequence[Message] = (),
    *,
    instructions: str | None = None,
) -> tuple[Message, ...]:
    """Ask for one rationale and one answer from one subset of the passages."""
    example = (
        user(_draft_prompt(_EXAMPLE_QUESTION, _EXAMPLE_PASSAGES, None)),
        assistant(draft_text(_EXAMPLE_RATIONALE, EXAMPLE_ANSWER)),
    )
    return _in_order(example, history, _draft_prompt(question, passages, instructions))


def draft_request(prompt: Sequence[Message]) -> tuple[Message, ...]:
    """Have an app's own prompt ask for a draft: a rationale, then an answer.

    A prompt that ends with a user turn is continued in that turn: several chat templates refuse two
    in a row.
    """
    if not prompt or prompt[-1].role != "user":
        return (*prompt, user(_DRAFT_REQUEST))
    *before, last = prompt
    return (*before, replace(last, content=_joined(last.content, _DRAFT_REQUEST)))


def answer_messages(
    question: str,
    passages: Sequence[Passage],
    history: Sequence[Message] = (),
    *,
    instructions: str | None = None,
) -> tuple[Message, ...]:
    """Ask for an answer from all passages: standard RAG, as brief as the drafts are."""
    example = (
        user(_answer_prompt(_EXAMPLE_QUESTION, _EXAMPLE_PASSAGES, None)),
        assistant(f"{EXAMPLE_ANSWER} [2]"),
    )
    return _in_order(example, history, _answer_prompt(question, passages, instructions))


def check_messages(
    question: str, *, draft: str, passages: Sequence[Passage] = ()
) -> tuple[Message, ...]:
    """Ask whether a draft's text holds, for a Yes or a No as the first token (paper section 3.3).

    The draft stands as an assistant turn, so that its tokens can be scored in the same request.
    """
    return (asking(question, passages), assistant(draft), user(_CHECK))


def asking(question: str, passages: Sequence[Passage] = ()) -> Message:
    """Return the turn a draft replies to: the question, after passages where there are some."""
    return user(_joined(numbered(passages), question))


def draft_text(rationale: str, answer: str, *, answer_first: bool = False) -> str:
    """Return a draft as the verifier reads it."""
    parts = [f"{RATIONALE} {rationale}"] if rationale else []
    parts.insert(0 if answer_first else 1, f"{ANSWER} {answer}")
    return "\n".join(parts)


def choice_messages(question: str, drafts: Sequence[tuple[str, str]]) -> tuple[Message, ...]:
    """Ask which of some lettered drafts, (rationale, answer) each, answers the question.

    The letters are those of `letters(len(drafts))`.
    """
    return (user(_joined(f"Question: {question}", _lettered(drafts), _CHOICE)),)


def single_prompt_messages(question: str, drafts: Sequence[tuple[str, str]]) -> tuple[Message, ...]:
    """Ask for the best of some lettered drafts and its improved answer, in one generation."""
    return (user(_joined(f"Question: {question}", _lettered(drafts), _SINGLE_PROMPT)),)


def refine_messages(
    question: str,
    passages: Sequence[Passage],
    *,
    rationale: str,
    answer: str,
    history: Sequence[Message] = (),
    instructions: str | None = None,
) -> tuple[Message, ...]:
    """Ask for a draft's answer, corrected where the passages it was written from contradict it."""
    prompt = _joined(
        _REFINE_TASK,
        instructions,
        numbered(passages),
        f"Question: {question}",
        draft_text(rationale, answer),
    )
    return _in_order((), history, prompt)


def prompts_hash() -> str:
    """Return a hash that changes with every word of every prompt."""
    passages, drafts = [Passage(text="text", title="title")], [("rationale", "answer")]
    turns = (
        *draft_messages("question", passages),
        *answer_messages("question", passages),
        *check_messages("question", draft=draft_text(*drafts[0])),
        *choice_messages("question", drafts),
        *single_prompt_messages("question", drafts),
        *refine_messages("question", passages, rationale="rationale", answer="answer"),
    )
    return turns_hash(turns)


def turns_hash(turns: Sequence[Message]) -> str:
    """Return a short hash of some turns."""
    told = json.dumps([turn.to_dict() for turn in turns])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def letters(count: int) -> tuple[str, ...]:
    """Return the letters of some drafts, A first, at most 26."""
    return tuple(ascii_uppercase[:count])


def _lettered(drafts: Sequence[tuple[str, str]]) -> str:
    return "\n\n".join(
        f"Draft {letter}\n{draft_text(rationale, answer)}"
        for letter, (rationale, answer) in zip(letters(len(drafts)), drafts, strict=True)
    )


def numbered(passages: Sequence[Passage]) -> str:
    """Return passages as `[1] title`, text; the numbers are what citations refer to."""
    return "\n\n".join(
        f"[{number}] {passage.title}\n{passage.text.strip()}"
        if passage.title
        else f"[{number}] {passage.text.strip()}"
        for number, passage in enumerate(passages, start=1)
    )


def _draft_prompt(question: str, passages: Sequence[Passage], instructions: str | None) -> str:
    return _joined(
        _DRAFT_TASK, instructions, numbered(passages), f"Question: {question}", _DRAFT_FORMAT
    )


def _answer_prompt(question: str, passages: Sequence[Passage], instructions: str | None) -> str:
    return _joined(_ANSWER_TASK, instructions, numbered(passages), f"Question: {question}")


def _in_order(
    example: Sequence[Message], history: Sequence[Message], prompt: str
) -> tuple[Message, ...]:
    """Put an app's system turns first, where templates want them, then the example."""
    system = [turn for turn in history if turn.role == "system"]
    others = [turn for turn in history if turn.role != "system"]
    return (*system, *example, *others, user(prompt))


def _joined(*parts: str | None) -> str:
    return "\n\n".join(part for part in parts if part)
