"""Doctor: what two endpoints are, can do and take, found out by trying, and what to expect of them.

Some twenty short requests for each endpoint, sized by what the first ones take: a slow machine is
asked for little, a fast one for enough to measure anything. What cannot be found out is a note;
only an endpoint that answers nothing at all is an error.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specrag_integrations.costs import (
    ANSWER_PROMPT,
    ANSWER_WRITTEN,
    AT_ONCE,
    DRAFT_PROMPT,
    DRAFT_WRITTEN,
    WORTH_IT,
    Forecast,
    Load,
    Rates,
    Servers,
    forecast,
    in_seconds,
)
from specrag_integrations.endpoint import Endpoint
from specrag_integrations.errors import EndpointError
from specrag_integrations.labels import is_thinking
from specrag_integrations.models import ChatReply, ChatRequest, Step, user
from specrag_integrations.pipeline import LEAD, PASSAGES_PER_DRAFT
from specrag_integrations.portal import portal
from specrag_integrations.scores import ASKING, Scoring, TierName
from specrag_integrations.tasks import Tasks
from specrag_integrations.trials import Trial, working
from specrag_integrations.verifier import Verifier, all_tiers

Say = Callable[[str], None]

PASSAGES = 10
TOKENS = 200
_CAVEAT = (
    "A prediction from a model of costs, about time and not about accuracy: whether its answers "
    "are better, only an evaluation on your questions can say."
)

_STEP = Step(kind="verify")
_ENOUGH = 0.2
"""Seconds that a difference between two probes must have to be believed at once."""
_CHEAP = 0.5
"""Seconds up to which a probe is sent again, since the fastest of some is the least disturbed."""
_TRIES = 3
_RESOLUTION = 0.001
"""Seconds below which a difference is nothing but noise."""
_SHORT_WORDS, _LONG_WORDS, _MOST_WORDS = 16, 120, 4000
_CONTEXT_SHARE = 4
"""A prompt takes no more than this part of the context."""
_FEW_WRITTEN, _MANY_WRITTEN = 12, 64
_WRITING_SECONDS = 3.0
_DRAFTING_SECONDS = 2.5
"""What a draft-like probe may take, which is sent alone and four times at once."""
_LEAST_READ, _LEAST_WRITTEN = 24, 8
_CACHE_SPEED_UP = 2.0
"""How much sooner a repeated prompt must be answered for a cache to be the likeliest reason."""
_CHARACTERS_PER_TOKEN = 5
"""Of the probes' words, where a server does not count its tokens."""
_QUEUEING = 0.5
"""A share of its own time that a further draft adds, beyond which drafts queue."""
_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work night point "
    "home water room mother area money story fact month lot right study book eye job word business "
    "issue side kind head house service friend father power hour game line end member law car city"
)


# -------------------------------------------------------------------- what is reported


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCache:
    """Whether a repeated prompt was seen to cost less."""

    seen: bool
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """What one endpoint was found to be, to allow and to take; None is what could not be found."""

    url: str
    model: str
    server: str | None = None
    """The kind, such as `vllm`; None where it does not say."""
    version: str | None = None
    context_tokens: int | None = None
    tiers: tuple[Trial, ...] = ()
    """What trial requests showed; none of an endpoint that only drafts."""
    drafts: Trial | None = None
    """Whether the tokens of a draft come with their log-probabilities."""
    cache: PrefixCache | None = None
    prefill: float | None = None
    """Prompt tokens per second, of one request alone."""
    overhead: float | None = None
    """Seconds of a request however short it is."""
    decode: float | None = None
    """Written tokens per second, of one request alone."""
    speed_up: float | None = None
    """How much sooner 4 draft-like requests at once are done than one after another."""
    notes: tuple[str, ...] = ()
    """What could not be measured and why, and what makes a measurement rough."""
    seconds: float = 0.0
    """What finding out took."""

    @property
    def rates(self) -> Rates | None:
        """What the cost model needs, if all of it is known."""
        if self.prefill is None or self.decode is None or self.speed_up is None:
            return None
        return Rates(
            prefill=self.prefill,
            decode=self.decode,
            overhead=self.overhead or 0.0,
            speed_up=self.speed_up,
            cached_prefix=self.cache is not None and self.cache.seen,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        cache = self.cache
        return {
            "url": self.url,
            "model": self.model,
            "server": self.server,
            "version": self.version,
            "context_tokens": self.context_tokens,
            "tiers": [trial.to_dict() for trial in self.tiers],
            "drafts": self.drafts.to_dict() if self.drafts else None,
            "cache": {"seen": cache.seen, "evidence": cache.evidence} if cache else None,
            "prefill": self.prefill,
            "overhead": self.overhead,
            "decode": self.decode,
            "speed_up": self.speed_up,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What two endpoints were found to be, and what to expect of them."""

    drafter: Checkup
    verifier: Checkup
    """The same object where one endpoint takes both roles."""
    load: Load
    tier: TierName
    """The one that a question would begin with."""
    forecast: Forecast | None
    """None where a rate it needs could not be measured."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the passages do not fit into a context."""
        needed = {
            "verifier": (self.verifier, ANSWER_PROMPT + self.load.all_tokens + ANSWER_WRITTEN),
            "drafter": (self.drafter, DRAFT_PROMPT + self.load.longest_tokens + DRAFT_WRITTEN),
        }
        fewer = {"verifier": "standard RAG reads fewer", "drafter": "drafts fail"}
        return tuple(
            f"{tokens:,} tokens do not fit into the {role}'s context of {one.context_tokens:,}: "
            f"{fewer[role]}"
            for role, (one, tokens) in needed.items()
            if one.context_tokens is not None and tokens > one.context_tokens
        )

    @property
    def verdict(self) -> str:
        """What to expect, in plain words."""
        if self.forecast is None:
            missing = {"drafter": self.drafter.rates, "verifier": self.verifier.rates}
            roles = " and ".join(role for role, rates in missing.items() if rates is None)
            return (
                f"Tier {self.tier}. No prediction: not all rates of the {roles} could be measured."
            )
        return _verdict(self.forecast)

    @property
    def caveat(self) -> str:
        """What the verdict is, and what it is not about."""
        return _CAVEAT

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {
            "drafter": self.drafter.to_dict(),
            "verifier": self.verifier.to_dict(),
            "tier": self.tier,
            "forecast": self.forecast.to_dict() if self.forecast else None,
            "notes": list(self.notes),
            "verdict": self.verdict,
            "caveat": self.caveat,
        }


def _verdict(found: Forecast) -> str:
    load, option, standard = found.load, found.speculative, found.standard
    passages = "1 passage" if load.passages == 1 else f"{load.passages} passages"
    what = f"{passages} of {load.tokens} tokens"
    times = f"{in_seconds(standard.seconds)} against {in_seconds(option.seconds)} on {what}"
    if load.covering == 1:
        return f"Standard RAG: one draft would read all of {what}, with nothing to choose from."
    if found.ratio <= 1 / WORTH_IT:
        return f"Standard RAG will be faster here: {times}, since {_why_slow(found)}."
    head = f"Tier {found.tier}, m = {option.num_drafts}: "
    if found.ratio < WORTH_IT:
        return f"{head}standard RAG takes about the same time: {times}."
    told = (
        f"{head}about {found.ratio:.1f}x faster than standard RAG on {what} (drafts "
        f"{in_seconds(option.draft)}, verification {in_seconds(option.verify)}, against "
        f"{in_seconds(standard.seconds)})"
    )
    read = load.longest + (option.num_drafts - 1) * load.per_draft
    if read < load.passages:
        told += f", but its drafts read at most {read} of the {load.passages} passages"
    if option.num_drafts < load.covering:
        told += (
            f"; m = {load.covering}, which reads more, takes "
            f"{in_seconds(found.options[-1].seconds)}"
        )
    return f"{told}."


def _why_slow(found: Forecast) -> str:
    """Name what costs Speculative RAG most of its time."""
    option, drafter = found.speculative, found.servers.drafter
    drafts = option.num_drafts
    if drafter.further > _QUEUEING:
        alone = drafter.at_once(1.0, drafts)
        return f"{drafts} drafts at once take as long as {alone:.1f} one after another"
    parts = {
        f"verifying {drafts} drafts takes {in_seconds(option.verify)}": option.verify,
        f"writing drafts of {DRAFT_WRITTEN} tokens takes {in_seconds(option.write)}": option.write,
        f"reading for {drafts} drafts takes {in_seconds(option.read)}": option.read,
    }
    return max(parts, key=parts.__getitem__)


# -------------------------------------------------------------------- finding out


def diagnose(
    drafter: Endpoint,
    verifier: Endpoint,
    *,
    passages: int = PASSAGES,
    tokens: int = TOKENS,
    shared: bool = False,
    say: Say = lambda _: None,
) -> Diagnosis:
    """Find out what two endpoints are and can do, and predict what to expect of them.

    Args:
        drafter: The small model.
        verifier: The large model; the same object as `drafter` is examined once.
        passages: How many passages a question has.
        tokens: Tokens of a passage.
        shared: Whether both run on the same hardware; known where they have one address.
        say: Told what is being measured.

    Raises:
        ConfigurationError: a number below one.
        EndpointError: an endpoint answers nothing at all.
    """
    return portal.run(
        adiagnose(drafter, verifier, passages=passages, tokens=tokens, shared=shared, say=say)
    )


async def adiagnose(
    drafter: Endpoint,
    verifier: Endpoint,
    *,
    passages: int = PASSAGES,
    tokens: int = TOKENS,
    shared: bool = False,
    say: Say = lambda _: None,
) -> Diagnosis:
    """As `diagnose`, without blocking the loop."""
    load = Load(passages=passages, tokens=tokens, per_draft=PASSAGES_PER_DRAFT, lead=LEAD)
    roles = {"drafter": drafter, "verifier": verifier}
    if drafter is verifier:
        roles = {"verifier": verifier}
    found = {role: _Examination(endpoint) for role, endpoint in roles.items()}
    for role, examination in found.items():  # a wrong address is told before anything is measured
        say(f"asking the {role} who it is")
        await examination.introduction()
    for role, examination in found.items():
        await examination.measure(tiers=role == "verifier", say=_naming(role, say))
    checkups = {role: examination.checkup for role, examination in found.items()}
    verifying = checkups["verifier"]
    drafting = checkups.get("drafter", verifying)
    tier = _first_tier(drafting, verifying)
    predicted = None
    if drafting.rates and verifying.rates:
        same = shared or drafter.base_url == verifier.base_url
        servers = Servers(drafter=drafting.rates, verifier=verifying.rates, shared=same)
        predicted = forecast(servers, load, tier=tier)
    return Diagnosis(drafter=drafting, verifier=verifying, load=load, tier=tier, forecast=predicted)


def _naming(role: str, say: Say) -> Say:
    return lambda what: say(f"measuring the {role}: {what}")


def _first_tier(drafter: Checkup, verifier: Checkup) -> TierName:
    """Return the tier a question would begin with."""
    tiers = all_tiers(Scoring(), comparable_drafts=True, own_selector=True)
    return working(tiers, (*verifier.tiers, *filter(None, [drafter.drafts])), Scoring())[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """One request's time, and the tokens it went into."""

    seconds: float
    prompt: int
    written: int
    cached: int
    reply: ChatReply

    @property
    def read(self) -> int:
        """Tokens of the prompt that had to be computed."""
        return self.prompt - self.cached

    @property
    def disturbed(self) -> bool:
        """Whether its time holds a refusal or a pause."""
        return self.reply.attempts > 1

    @property
    def rank(self) -> tuple[bool, float]:
        """What the least is the best of."""
        return self.disturbed, self.seconds


class _Examination:
    """One endpoint while it is examined."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._notes: list[str] = []
        self._seconds = 0.0
        self._short: _Sample | None = None
        self._long: tuple[ChatRequest, _Sample] | None = None
        self._found = Checkup(url=endpoint.base_url, model=endpoint.name)

    @property
    def checkup(self) -> Checkup:
        """What is known so far."""
        return replace(self._found, notes=tuple(self._notes), seconds=self._seconds)

    def _note(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)

    async def introduction(self) -> None:
        """Ask who is there, with a first request that also warms up and teaches the dialect.

        Raises:
            EndpointError: the endpoint answers nothing at all.
        """
        started = time.perf_counter()
        reply = await self._endpoint.chat(_writing(_SHORT_WORDS, 2), step=_STEP)
        if is_thinking(reply):
            self._note("it thinks aloud before it replies, which the prediction leaves out")
        known = await self._endpoint.capabilities()
        self._found = replace(
            self._found,
            model=self._endpoint.name,
            server=known.server,
            version=await self._endpoint.version(),
            context_tokens=known.context_tokens,
        )
        self._seconds += time.perf_counter() - started

    async def measure(self, *, tiers: bool, say: Say) -> None:
        """Measure everything; what fails is a note."""
        started = time.perf_counter()
        if tiers:
            say("tiers")
            self._found = replace(self._found, tiers=await self._trials())
        for what, found_by in {
            "prefill": self._prefill,
            "prefix cache": self._cache,
            "decode": self._decode,
            f"{AT_ONCE} requests at once": self._speed_up,
        }.items():
            say(what)
            try:
                self._found = await found_by(self._found)
            except EndpointError as error:
                self._note(f"{what}: {error}")
        self._seconds += time.perf_counter() - started

    async def _trials(self) -> tuple[Trial, ...]:
        try:
            return await Verifier(self._endpoint).trials()
        except EndpointError as error:
            return tuple(Trial(tier=name, works=False, evidence=str(error)) for name in ASKING)

    async def _prefill(self, checkup: Checkup) -> Checkup:
        """Compare prompts of two lengths; the longer one grows until the difference is plain."""
        most = _MOST_WORDS
        if checkup.context_tokens is not None:
            most = min(most, max(2 * _SHORT_WORDS, checkup.context_tokens // _CONTEXT_SHARE))
        words = min(_LONG_WORDS, most)
        self._short = short = await self._fastest(lambda: _reading(_SHORT_WORDS))
        while True:
            request, long = await self._fastest_of(partial(_reading, words))
            gained = long.seconds - short.seconds
            if gained >= _ENOUGH or words == most:
                break
            growth = 2 * _ENOUGH / max(gained, _ENOUGH / 4)
            words = min(most, round(words * max(2.0, growth)))
        self._long = request, long
        tokens = long.read - short.read
        if tokens <= 0:
            self._note(
                f"the prefill cannot be measured: prompts of {_SHORT_WORDS} and {words} words were "
                f"counted as {short.prompt} and {long.prompt} tokens"
            )
            return checkup
        if gained < _RESOLUTION:
            self._note(
                f"{tokens:,} prompt tokens more or less make no difference in time: the prefill "
                "rate is a lower bound"
            )
        rate = tokens / max(gained, _RESOLUTION)
        overhead = max(0.0, short.seconds - short.read / rate)
        return replace(checkup, prefill=rate, overhead=overhead)

    async def _cache(self, checkup: Checkup) -> Checkup:
        """Send the longest prompt again."""
        if self._long is None:
            return checkup
        request, first = self._long
        again = await self._fastest(lambda: request)
        if again.cached > first.cached:  # what all prompts begin with is always there
            told = f"{again.cached:,} of {again.prompt:,} tokens of a repeated prompt"
            return replace(checkup, cache=PrefixCache(seen=True, evidence=told))
        ratio = first.seconds / max(again.seconds, _RESOLUTION)
        saved = first.seconds - again.seconds
        seen = ratio >= _CACHE_SPEED_UP and saved >= _RESOLUTION
        told = f"by time: a repeated prompt is {ratio:.1f}x faster"
        if not seen:
            told = (
                f"a repeated prompt took {in_seconds(again.seconds)}, at first "
                f"{in_seconds(first.seconds)}"
            )
        return replace(checkup, cache=PrefixCache(seen=seen, evidence=told))

    async def _decode(self, checkup: Checkup) -> Checkup:
        """Have something long written, at first a little of it."""
        if self._short is None:
            self._note("the decode rate cannot be measured without a short request's time")
            return checkup
        sample = await self._fastest(lambda: _writing(_SHORT_WORDS, _FEW_WRITTEN))
        rate = self._decode_rate(sample, checkup)
        wanted = _MANY_WRITTEN if rate is None else round(rate * _WRITING_SECONDS)
        wanted = min(_MANY_WRITTEN, wanted)
        if wanted > _FEW_WRITTEN:
            sample = await self._fastest(lambda: _writing(_SHORT_WORDS, wanted))
            rate = self._decode_rate(sample, checkup) or rate
        if rate is None:
            self._note(
                f"the decode rate cannot be measured: it wrote {sample.written} tokens where "
                f"{wanted} were asked for"
            )
        return replace(checkup, decode=rate, drafts=_trial_of_drafts(sample.reply))

    def _decode_rate(self, sample: _Sample, checkup: Checkup) -> float | None:
        short = self._short
        if short is None or sample.written <= max(1, short.written):
            return None
        reading = (sample.read - short.read) / (checkup.prefill or float("inf"))
        spent = sample.seconds - short.seconds - max(0.0, reading)
        return (sample.written - short.written) / max(spent, _RESOLUTION)

    async def _speed_up(self, checkup: Checkup) -> Checkup:
        """Send a draft-like request alone, then four at once."""
        if checkup.prefill is None or checkup.decode is None:
            self._note("4 requests at once cannot be sized without both rates")
            return checkup
        rates = Rates(
            prefill=checkup.prefill, decode=checkup.decode, overhead=checkup.overhead or 0.0
        )
        read, write = DRAFT_PROMPT + PASSAGES_PER_DRAFT * TOKENS, DRAFT_WRITTEN
        share = min(1.0, _DRAFTING_SECONDS / rates.seconds(read, write))
        if checkup.context_tokens is not None:
            share = min(share, checkup.context_tokens / (2 * (read + write)))
        words = max(_LEAST_READ, round(read * share))
        tokens = max(_LEAST_WRITTEN, round(write * share))
        alone = await self._fastest(lambda: _writing(words, tokens))
        best: float | None = None
        spent = 0.0
        for _ in range(_TRIES):
            began = time.perf_counter()
            async with Tasks() as tasks:
                asked = [_writing(words, tokens) for _ in range(AT_ONCE)]
                under_way = [tasks.start(self._sample(request)) for request in asked]
                four = [await one for one in under_way]
            took = time.perf_counter() - began
            # They may have become longer or shorter than the one.
            work = sum(rates.seconds(one.read, one.written) for one in four)
            ratio = work / rates.seconds(alone.read, alone.written) * alone.seconds / took
            best = max(best or 0.0, ratio)
            spent += took
            if spent > _CHEAP and not any(one.disturbed for one in four):
                break
        if best is not None and best < 1:
            self._note(
                f"{AT_ONCE} requests at once take longer than one after another: they hinder each "
                "other, or something else keeps the machine busy"
            )
        return replace(checkup, speed_up=best)

    # ---------------------------------------------------------------- samples

    async def _fastest(self, make: Callable[[], ChatRequest]) -> _Sample:
        return (await self._fastest_of(make))[1]

    async def _fastest_of(self, make: Callable[[], ChatRequest]) -> tuple[ChatRequest, _Sample]:
        """Send a request, several times where that is cheap, and return the fastest."""
        best: tuple[ChatRequest, _Sample] | None = None
        spent = 0.0
        for _ in range(_TRIES):
            request = make()
            sample = await self._sample(request)
            if best is None or sample.rank < best[1].rank:
                best = request, sample
            spent += sample.seconds
            if spent > _CHEAP and not sample.disturbed:
                break
        assert best is not None  # noqa: S101 - there is at least one try
        return best

    async def _sample(self, request: ChatRequest) -> _Sample:
        reply = await self._endpoint.chat(request, step=_STEP)
        for note in reply.notes:
            self._note(note)
        count = reply.count
        prompt, written = count.prompt, count.completion
        if prompt is None:
            self._note("it counts no tokens: lengths are estimated")
            prompt = sum(len(turn.content) for turn in request.messages) // _CHARACTERS_PER_TOKEN
        if written is None:
            written = len(reply.tokens or ()) or len(reply.text) // _CHARACTERS_PER_TOKEN
        if written > request.max_tokens:
            self._note(
                f"it ignores max_tokens ({written} tokens where {request.max_tokens} were "
                "allowed): its rates are rough"
            )
        return _Sample(
            seconds=reply.seconds,
            prompt=prompt,
            written=written,
            cached=count.cached or 0,
            reply=reply,
        )


def _trial_of_drafts(reply: ChatReply) -> Trial:
    tokens = len(reply.tokens or ())
    written = reply.count.completion
    told = f"log-probabilities of {tokens}"
    told += f" of {written} written tokens" if written is not None else " written tokens"
    return Trial(tier="draft_only", works=bool(tokens), evidence=told)


# -------------------------------------------------------------------- what is asked


def _reading(words: int) -> ChatRequest:
    """Ask for one token after so many words, which no cache knows."""
    prompt = f"{_filler(words)}\n\nReply with one word: OK"
    return ChatRequest(messages=(user(prompt),), max_tokens=1, think=False)


def _writing(words: int, tokens: int) -> ChatRequest:
    """Ask for something long after so many words, with log-probabilities as a draft's."""
    prompt = f"{_filler(words)}\n\nCount from 1 to 200, in words, with a comma after each number."
    return ChatRequest(messages=(user(prompt),), max_tokens=tokens, top_logprobs=0, think=False)


def _filler(words: int) -> str:
    """Return words by chance, which begin differently every time."""
    return " ".join(random.choices(_WORDS.split(), k=words))  # noqa: S311 - no secret
