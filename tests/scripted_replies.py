"""What the scripted server writes: replies and faults, and their shapes on the wire.

Tests import all of it from `scripted_server`.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from specrag_integrations import prompts

if TYPE_CHECKING:
    from scripted_server import ScriptedServer

Json = dict[str, Any]
Kind = Literal["openai", "vllm", "sglang", "llama.cpp"]
Template = Literal["plain", "drops-thoughts", "upper-cases", "empty-thought-last"]
"""What a chat template does to assistants' turns.

`drops-thoughts` leaves out what stands before `</think>` in all turns but the last (Qwen3,
DeepSeek), `empty-thought-last` opens the last turn with an empty thought, and that one only
(Qwen3, seen with `continue_final_message`), `upper-cases` stands for any other change.
"""
Auto = Literal["auto"]
AUTO: Auto = "auto"

THINK, END_THINK = "<think>", "</think>"
THOUGHT = (THINK, "\nThe", " passages", " agree.\n", END_THINK)
"""The tokens of a thinking block."""
INSTEAD_OF_THINKING = {"Yes": -13.8, "No": -14.2, "The": -12.5}
"""The other candidates where a model begins to think: there, but without a meaning."""
PROBE_QUESTION: str = getattr(prompts, "PROBE_QUESTION", "What is this question a probe for?")
"""What the package's trial requests ask; a stand-in as long as the package has none."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Anything but a good reply."""

    status: int = field(default=503, kw_only=False)
    body: Any = None
    """JSON to send; None: an error in the server kind's own shape."""
    headers: Mapping[str, str] = field(default_factory=lambda: {"Retry-After": "0"})
    hang: bool = False
    """Never answer; with `stream_break_after`, fall silent in the middle of the stream."""
    close: bool = False
    """Drop the connection without an answer."""
    after: float = 0.0
    """Seconds before the fault."""
    raw: bytes | None = None
    content_type: str = "application/json"
    stream_break_after: int | None = None
    """Send `reply`, but drop the connection after so many chunks (halfway, if not streamed). With a
    `body`, send that as an error event and end the stream without `[DONE]` instead."""
    reply: Reply | str | None = None
    """What to break; None: the default reply."""


Rows = list[Any]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the model writes."""

    text: str = field(default="", kw_only=False)
    logprobs: Sequence[tuple[str | bytes, float]] | Auto | None = AUTO
    """The written tokens; None: the server leaves log-probabilities out although asked."""
    alternatives: Mapping[str, float] = field(default_factory=dict)
    """The first token's candidates, as text and log-probability; the written one is added."""
    finish_reason: str | None = "stop"
    usage: Json | Auto | None = AUTO
    model: str | None = None
    prompt_logprobs: Rows | Auto | Callable[[Rows], Rows] | None = AUTO
    """A callable gets the right rows and returns those to send: see `BROKEN_PROMPT_LOGPROBS`."""
    prompt_token_ids: list[int] | Auto | None = AUTO
    reasoning: str | None = None
    """Sent beside the text and in none of the tokens; a server that `thinks` writes its own."""
    split_bytes: bool = False
    """Spread every non-ASCII character over two tokens."""
    delay: float = 0.0
    chunk_delay: float = 0.0
    headers: Mapping[str, str] = field(default_factory=dict)
    message: Json = field(default_factory=dict)
    """Merged into the message, such as `{"content": None, "refusal": "…"}` (not streamed)."""
    extra: Json = field(default_factory=dict)
    """Merged into the top level of the answer (not streamed)."""
    omit: Sequence[str] = ()
    """Fields that the top level of the answer lacks (not streamed)."""


@dataclass(frozen=True, kw_only=True)
class Forced:
    """What a grammar makes llama.cpp write; `ended`: it had to end the turn as well."""

    pieces: Sequence[bytes]
    ended: bool


Answer = Reply | Fault | str
Respond = Callable[[Json, int], Answer | Awaitable[Answer]]


# Ways to be broken.


def _with_logprobs(rows: Rows, *values: Any) -> Rows:
    """Replace the log-probabilities by these values in turn."""
    return [
        row and {key: {**found, "logprob": values[at % len(values)]} for key, found in row.items()}
        for at, row in enumerate(rows)
    ]


BROKEN_PROMPT_LOGPROBS: Mapping[str, Json] = {
    "missing": {"omit": ("prompt_logprobs",)},
    "null": {"prompt_logprobs": None},
    "empty": {"prompt_logprobs": []},
    "only the first": {"prompt_logprobs": [None]},
    "short": {"prompt_logprobs": lambda rows: rows[:-1]},
    "not finite": {"prompt_logprobs": lambda rows: _with_logprobs(rows, "-inf", "NaN")},
    "fillers": {"prompt_logprobs": lambda rows: _with_logprobs(rows, -9999.0)},
    "shifted": {"prompt_logprobs": lambda rows: [None, *rows[2:], *rows[1:2]]},
}
"""Options of a `Reply`: `replace(default_respond(body, call), **BROKEN_PROMPT_LOGPROBS["short"])`.

All come with a 200 and the right `prompt_token_ids`.
"""


def unsupported(*params: str, model: str = "scripted") -> dict[str, Fault]:
    """Return a `refuse` like LiteLLM's proxy: one message names all parameters at once."""
    names = list(params)
    message = (
        f"litellm.UnsupportedParamsError: openai does not support parameters: {names}, "
        f"for model={model}. To drop these, set `litellm.drop_params=True` or for proxy:\n\n"
        "`litellm_settings:\n drop_params: true`\n. \n If you want to use these params "
        f"dynamically send allowed_openai_params={names} in your request.. "
        f"Received Model Group={model}\nAvailable Model Group Fallbacks=None"
    )
    error = {"message": message, "type": "None", "param": None, "code": "400"}
    return dict.fromkeys(params, Fault(400, body={"error": error}, headers={}))


def extra_forbidden(body: Json) -> Json | None:
    """Return what a strict FastAPI server says to the first field that OpenAI does not have."""
    from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming

    for name, value in body.items():
        if name not in CompletionCreateParamsStreaming.__annotations__:
            problem = {"type": "extra_forbidden", "loc": ["body", name], "input": value}
            return {"detail": [{**problem, "msg": "Extra inputs are not permitted"}]}
    return None


# Tokens and their log-probabilities.


def hash_unit(*parts: object) -> float:
    """Return a number in [0, 1) that depends on the parts alone."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def pseudo_logprob(token: str | bytes, position: int) -> float:
    """Return the log-probability the server makes up for a token, between -4 and 0."""
    data = token.encode() if isinstance(token, str) else token
    return round(-0.001 - 3.998 * hash_unit(data.hex(), position), 4)


def words(text: str) -> list[str]:
    """Split a text into words with the white space before them."""
    return re.findall(r"\s*\S+(?:\s+\Z)?", text) or ([text] if text else [])


def split_characters(text: str) -> list[bytes]:
    """Split a text into words, and those in the middle of every non-ASCII character."""
    return [
        piece for word in words(text) for piece in re.split(rb"(?<=[\xc2-\xf4])", word.encode())
    ]


def plain_words(text: str) -> list[str]:
    """Split a text into words in which `<|im_end|>` and the like are no special tokens."""
    return [piece for word in words(text) for piece in re.split(r"(?<=<)(?=\|im_)", word)]


Split = Callable[[str], Sequence[str | bytes]]


def prompt_pieces(
    messages: Sequence[Json],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    split: Split = words,
    template: Template = "plain",
) -> list[bytes]:
    """Return the tokens of a ChatML conversation: its words and four more per message.

    For that sum the first message's opening and its end are one token each. What precedes an
    assistant's message is a prefix of the whole, as with real templates.
    """
    roles = [message["role"] for message in messages]
    pieces: list[str | bytes] = [f"<|im_start|>{roles[0]}\n"] if roles else []
    for index, message in enumerate(messages):
        last = index == len(messages) - 1
        pieces += _turn(message, split, "plain" if roles[index] != "assistant" else template, last)
        if last and continue_final_message:
            break
        pieces += ["<|im_end|>", "\n"] if index else ["<|im_end|>\n"]
        if not last or add_generation_prompt:
            pieces += ["<|im_start|>", f"{'assistant' if last else roles[index + 1]}\n"]
    return [piece.encode() if isinstance(piece, str) else piece for piece in pieces]


def _turn(message: Json, split: Split, template: Template, last: bool) -> list[str | bytes]:
    text = text_of(message.get("content"))
    if template == "drops-thoughts" and not last:
        text = text.rpartition(END_THINK)[2].lstrip("\n")
    if template == "upper-cases":
        text = text.upper()
    opening = (
        [THINK, "\n\n", END_THINK, "\n\n"] if template == "empty-thought-last" and last else []
    )
    return [*opening, *split(text)]


def text_of(content: Any) -> str:
    """Return a message's or token's text, whatever form it has."""
    if isinstance(content, bytes):
        return content.decode(errors="replace")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


# Requests, and what is said to them where a test does not care.


def max_tokens_of(body: Json) -> int | None:
    """Return how many tokens a request allows, under either name."""
    return body.get("max_completion_tokens", body.get("max_tokens"))


def p_yes(body: Json) -> float:
    """Return P(Yes) / (P(Yes) + P(No)) of `default_respond` for a verification."""
    return round(0.05 + 0.9 * hash_unit("yes", body["messages"]), 4)


def is_verification(body: Json) -> bool:
    """Tell whether a request asks for a token's alternatives, after a thought or at once.

    Drafts ask for one at most.
    """
    wanted = body.get("top_logprobs") or 0
    at_once = max_tokens_of(body) == 1 and wanted > 0
    return at_once or wanted > 1 or bool(body.get("logprob_token_ids"))


def is_probe(body: Json) -> bool:
    """Tell whether a request is a trial by which the package learns what a server can do."""
    asked = (text_of(m.get("content")) for m in body.get("messages", ()) if m.get("role") == "user")
    return PROBE_QUESTION in next(asked, "")


def default_respond(body: Json, call: int) -> Reply:
    """Judge a verification, draft for anything else; both depend on the messages alone."""
    if is_verification(body):
        p = p_yes(body)
        shares = {"Yes": 0.9 * p, " yes": 0.05 * p, "No": 0.95 * (1 - p), "Maybe": 0.05}
        alternatives = {text: math.log(share) for text, share in shares.items()}
        likeliest = max(alternatives, key=alternatives.__getitem__)
        finish_reason = "length" if max_tokens_of(body) == 1 else "stop"
        return Reply(likeliest, alternatives=alternatives, finish_reason=finish_reason)
    seed = hashlib.sha256(json.dumps(body["messages"]).encode()).hexdigest()
    return Reply(f"Rationale: the passages mention {seed[:6]} twice.\nAnswer: answer {seed[6:8]}")


# The wire.


@dataclass(frozen=True)
class Written:
    """One token of a reply."""

    data: bytes
    logprob: float
    others: Mapping[str, float]
    """The other candidates, as text and log-probability."""


def _written(token: str | bytes, logprob: float, others: Mapping[str, float] | None) -> Written:
    data = token.encode() if isinstance(token, str) else token
    if others is None:
        others = {" or": logprob - 1.0, " so": logprob - 2.0}
    kept = {text: value for text, value in others.items() if text.encode() != data}
    return Written(data, logprob, kept)


class Writing:
    """One reply on its way onto the wire."""

    def __init__(
        self, server: ScriptedServer, body: Json, call: int, answer: Reply | Forced | str
    ) -> None:
        self.server, self.body, self.call = server, body, call
        self.kind = server.kind
        self.thoughts = 0
        """How many of the tokens belong to a thinking block."""
        self.reply, self.tokens = self._write(answer)
        self.prompt = server.prompt(
            body, split_characters if isinstance(answer, Reply) and answer.split_bytes else words
        )
        asked = bool(body.get("logprobs")) and self.reply.logprobs is not None
        self.entries: list[Json] | None = self._entries() if asked else None

    @property
    def base(self) -> Json:
        model = self.reply.model or self.body.get("model") or self.server.models[0]
        return {"id": f"chatcmpl-{self.call}", "created": 1, "model": model}

    # What is written.

    def _write(self, answer: Reply | Forced | str) -> tuple[Reply, list[Written]]:
        if isinstance(answer, Forced):
            return self._write_forced(answer)
        reply = Reply(answer) if isinstance(answer, str) else answer
        given = reply.logprobs
        if given is None or isinstance(given, str):
            texts = split_characters(reply.text) if reply.split_bytes else words(reply.text)
            given = [(text, pseudo_logprob(text, index)) for index, text in enumerate(texts)]
            if given and text_of(given[0][0]) in reply.alternatives:
                given[0] = (given[0][0], reply.alternatives[text_of(given[0][0])])
        tokens = [
            _written(token, logprob, None if index else reply.alternatives)
            for index, (token, logprob) in enumerate(given)
        ]
        return self._think_first(reply, tokens) if self._thinks() else (reply, tokens)

    def _thinks(self) -> bool:
        switches = self.body.get("chat_template_kwargs") or {}
        told_not_to = False in (switches.get("enable_thinking"), switches.get("thinking"))
        return bool(self.server.thought) and not (told_not_to and self.server.obeys_thinking_switch)

    def _think_first(self, reply: Reply, tokens: list[Written]) -> tuple[Reply, list[Written]]:
        first, *rest = self.server.thought
        block = [_written(first, -0.0001, INSTEAD_OF_THINKING)]
        block += [
            _written(piece, pseudo_logprob(piece, index), None)
            for index, piece in enumerate(rest, start=1)
        ]
        limit = max_tokens_of(self.body)
        whole = block + tokens
        cut = whole[:limit]
        self.thoughts = min(len(block), len(cut))
        finish_reason = "length" if len(cut) < len(whole) else reply.finish_reason
        text = b"".join(token.data for token in cut).decode(errors="replace")
        return replace(reply, text=text, finish_reason=finish_reason), cut

    def _write_forced(self, forced: Forced) -> tuple[Reply, list[Written]]:
        """Write what the grammar says; the candidates are those of the model without it."""
        tokens = []
        for index, piece in enumerate([*forced.pieces, b""] if forced.ended else forced.pieces):
            logprob = pseudo_logprob(piece, index)
            others = {" or": round(logprob / 2, 4), " so": logprob - 1.0}
            tokens.append(_written(piece, logprob, others))
        text = b"".join(forced.pieces).decode(errors="replace")
        return Reply(text, finish_reason="stop" if forced.ended else "length"), tokens

    # The bodies.

    def whole(self) -> Json:
        content, reasoning = self._texts()
        message: Json = {"role": "assistant", "content": content}
        if self.kind == "sglang":
            message |= {"reasoning_content": None, "tool_calls": None}
        elif self.kind != "llama.cpp":
            message["refusal"] = None
        choice: Json = {"index": 0, "message": message | self._reasoning(reasoning)}
        choice["message"] |= self.reply.message
        choice |= self._logprobs(self.entries)
        choice["finish_reason"] = self.reply.finish_reason
        answer = {**self.base, "object": "chat.completion", "choices": [choice]}
        if (usage := self._usage()) is not None:
            answer["usage"] = usage
        if self.kind == "vllm":
            choice |= {"stop_reason": None, "token_ids": None}
            answer |= self._prompt()
        elif self.kind == "sglang":
            choice["matched_stop"] = None
            answer["metadata"] = {"weight_version": "default"}
        elif self.kind == "llama.cpp":
            answer |= {"timings": {"prompt_n": len(self.prompt), "predicted_n": len(self.tokens)}}
        answer |= self.reply.extra
        return {name: value for name, value in answer.items() if name not in self.reply.omit}

    def chunks(self) -> list[Json]:
        empty = None if self.kind == "llama.cpp" else ""
        chunks = [self._chunk({"role": "assistant", "content": empty})]
        thoughts = words(self.reply.reasoning or "")
        chunks += [self._chunk(self._reasoning(thought)) for thought in thoughts]
        for index, text in enumerate(decode_incrementally([token.data for token in self.tokens])):
            entries = None if self.entries is None else [self.entries[index]]
            delta = self._delta(index, text)
            if delta or entries:
                chunks.append(self._chunk(delta, entries))
        chunks.append(self._chunk({}, finish_reason=self.reply.finish_reason))
        usage = self._usage()
        if usage is not None and (self.body.get("stream_options") or {}).get("include_usage"):
            chunks.append({**chunks[0], "choices": [], "usage": usage})
        return chunks

    def _chunk(
        self, delta: Json, entries: list[Json] | None = None, finish_reason: str | None = None
    ) -> Json:
        if self.kind == "sglang":
            nothing = dict.fromkeys(("role", "content", "reasoning_content", "tool_calls"))
            delta = nothing | delta
        choice = {"index": 0, "delta": delta, **self._logprobs(entries)}
        choice["finish_reason"] = finish_reason
        if self.kind == "sglang":
            choice["matched_stop"] = None
        return {**self.base, "object": "chat.completion.chunk", "choices": [choice]}

    def _delta(self, index: int, text: str) -> Json:
        """Return where a streamed token goes; the marks of a parsed thought go nowhere."""
        if index >= self.thoughts or not self.server.reasoning_parser:
            return {"content": text}
        return {} if text in (THINK, END_THINK) else self._reasoning(text)

    def _texts(self) -> tuple[str | None, str | None]:
        """Return the message's content and its reasoning."""
        text = self.reply.text
        if not self.thoughts or not self.server.reasoning_parser:
            return text, self.reply.reasoning
        reasoning, _, content = text.removeprefix(THINK).partition(END_THINK)
        if self.kind != "vllm":
            reasoning, content = reasoning.strip(), content.strip()
        return content or ("" if self.kind == "llama.cpp" else None), reasoning or None

    def _reasoning(self, text: str | None) -> Json:
        if text is None:
            return {}
        return {"reasoning" if self.kind == "vllm" else "reasoning_content": text}

    def _logprobs(self, entries: list[Json] | None) -> Json:
        if entries is not None:
            return {"logprobs": {"content": entries}}
        return {} if self.kind == "llama.cpp" else {"logprobs": None}

    def _usage(self) -> Json | None:
        if self.reply.usage != AUTO:
            return self.reply.usage
        prompt, completion = len(self.prompt), len(self.tokens)
        usage: Json = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        if self.kind in {"vllm", "sglang"}:
            usage["prompt_tokens_details"] = None
        return usage | ({"reasoning_tokens": 0} if self.kind == "sglang" else {})

    # Log-probabilities.

    def _entries(self) -> list[Json]:
        shown = self._shown([token.data for token in self.tokens])
        entries = []
        for token, text in zip(self.tokens, shown, strict=True):
            entry = self._entry(token.data, text, token.logprob)
            entries.append({**entry, "top_logprobs": self._top(token, entry)})
        return entries

    def _top(self, token: Written, entry: Json) -> list[Json]:
        """Return the likeliest candidates, or those that vLLM was asked for by their ids.

        vLLM puts the written token first whatever its rank; llama.cpp and SGLang leave it where it
        belongs, which may be outside.
        """
        others = {text.encode(): value for text, value in token.others.items()}
        ids = self.body.get("logprob_token_ids") if self.kind == "vllm" else None
        if ids:
            named = [self.server.piece(token_id) for token_id in dict.fromkeys(ids)]
            pairs = [(piece, others.get(piece, -20.0)) for piece in named if piece != token.data]
            return [entry, *self._candidates(pairs)]
        ranked = [entry, *self._candidates(sorted(others.items(), key=lambda pair: -pair[1]))]
        if self.kind in {"llama.cpp", "sglang"}:
            ranked.sort(key=lambda candidate: -candidate["logprob"])
        usual = 20 if self.kind == "llama.cpp" else 0
        return ranked[: self.body.get("top_logprobs", usual) or 0]

    def _candidates(self, pairs: Sequence[tuple[bytes, float]]) -> list[Json]:
        return [self._entry(data, text_of(data), value) for data, value in pairs]

    def _entry(self, data: bytes, text: str, logprob: float) -> Json:
        if self.kind in {"vllm", "sglang"}:
            data = text.encode()
        entry: Json = {"token": text, "bytes": list(data), "logprob": logprob}
        if self.kind == "llama.cpp":
            entry["id"] = self.server.ids([data])[0]
        return entry

    def _shown(self, pieces: Sequence[bytes]) -> list[str]:
        """Return the tokens' text: each kind of server has its way with parts of characters."""
        if self.kind == "vllm":
            return decode_incrementally(pieces)
        if self.kind == "llama.cpp":
            return [codecs.getincrementaldecoder("utf-8")("replace").decode(p) for p in pieces]
        errors = "replace" if self.kind == "sglang" else "backslashreplace"
        return [piece.decode(errors=errors) for piece in pieces]

    def _prompt(self) -> Json:
        ids, reply = self.server.ids(self.prompt), self.reply
        logprobs: Any = None
        if self.body.get("prompt_logprobs") is not None:
            logprobs = reply.prompt_logprobs
            if callable(logprobs):
                logprobs = logprobs(self._prompt_rows(ids))
            elif logprobs == AUTO:
                logprobs = self._prompt_rows(ids)
        token_ids = ids if reply.prompt_token_ids == AUTO else reply.prompt_token_ids
        if not self.body.get("return_token_ids"):
            token_ids = None
        return {"prompt_logprobs": logprobs, "prompt_token_ids": token_ids}

    def _prompt_rows(self, ids: Sequence[int]) -> Rows:
        rows: Rows = [None]
        wanted = self.body["prompt_logprobs"]
        texts = decode_incrementally(self.prompt)
        for index in range(1, len(ids)):
            value = pseudo_logprob(self.prompt[index], index)
            row = {str(ids[index]): _rank(value, 3 if wanted else 1, texts[index])}
            if wanted:
                row["1"] = _rank(value / 2, 1, " other")
            rows.append(row)
        return rows


def _rank(logprob: float, rank: int, text: str) -> Json:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


def decode_incrementally(pieces: Sequence[bytes]) -> list[str]:
    """Return each token's text as vLLM does.

    Tokens that end within a character have none; the one that completes it has all of theirs, with
    the white space that the first of them may have begun with.
    """
    texts, pending = [], b""
    for piece in pieces:
        pending += piece
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(pending)
        unfinished = len(text.encode()) < len(pending) and not text.endswith("\ufffd")
        texts.append("" if unfinished else text)
        pending = pending if unfinished else b""
    return texts
