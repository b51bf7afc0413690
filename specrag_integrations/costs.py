"""Costs: how long a question takes by standard and by Speculative RAG, predicted from rates.

One small model of time. A request alone takes `overhead + prompt / prefill + (written - 1) /
decode` seconds, the first written token being part of the prefill; of several at once, each further
one adds the share of that which the server does not hide. What it takes for granted:

- Rates do not depend on a prompt's length, nor on what it says.
- The servers do nothing else meanwhile; retries, the partitioning and the network's moods are free.
- Speculative RAG costs its drafts and its verification; a question that falls back costs standard
  RAG on top.

It knows nothing of accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrag_integrations.options import checked_positive, checked_whole
from specrag_integrations.scores import TIERS, TierName

AT_ONCE = 4
"""How many requests at once a server's speed-up is measured with."""
MOST_DRAFTS = 10
"""Beyond it, nobody has measured what one more draft is good for."""
WORTH_IT = 1.05
"""Below this ratio two times are called the same."""

# Tokens of our own prompts and of usual replies, as counted by SmolLM2 and Qwen2.5 with their chat
# templates. Whoever changes a prompt by more than a line measures anew.
DRAFT_PROMPT = 250
"""A draft's prompt without its passages: task, example, question and template."""
DRAFT_PREFIX = 180
"""What of it every draft of every question begins with: the example."""
DRAFT_WRITTEN = 48
"""Rationale and answer: two lines, one sentence. A 0.5B model writes 20 to 42, larger ones more."""
ANSWER_PROMPT = 185
"""Standard RAG's prompt without its passages."""
ANSWER_PREFIX = 130
"""What of it every question begins with."""
ANSWER_WRITTEN = 12
"""An answer in a few words with its citation."""
CHECK_PROMPT = 66
"""A verification's prompt without the draft: question, check and template."""
CHECK_PREFIX = 40
"""What the verifications of one question begin with: the question."""
CHOICE_PROMPT = 60
"""The prompt that lists all drafts, without them."""
CHOICE_PER_DRAFT = DRAFT_WRITTEN + 4
"""A draft there, under its letter."""
CHOICE_WRITTEN = 2
"""The letter and the end of the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast a server is.

    Args:
        prefill: Prompt tokens per second, of one request alone.
        decode: Written tokens per second, of one request alone.
        overhead: Seconds a request takes however short it is.
        speed_up: How much sooner 4 drafts are done at once than one after another: 4 where they
            cost no more than one, 1 where they queue, less where they hinder each other.
        cached_prefix: Whether what prompts begin with in common is read from a cache.

    Raises:
        ConfigurationError: a number that no server can have.
    """

    prefill: float
    decode: float
    overhead: float = 0.0
    speed_up: float = 1.0
    cached_prefix: bool = False

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "speed_up"):
            checked_positive(name, getattr(self, name))
        if self.overhead:
            checked_positive("overhead", self.overhead)

    @property
    def further(self) -> float:
        """The share of its own time that each further request at once adds.

        Assumed to be the same for all: what hides three further requests hides nine.
        """
        return max(0.0, (AT_ONCE / self.speed_up - 1) / (AT_ONCE - 1))

    def seconds(self, prompt: int, written: int = 1, *, cached: int = 0) -> float:
        """Return what a request alone takes; `cached` tokens of its prompt may be in the cache."""
        return self.reading(prompt, cached=cached) + self.writing(written)

    def reading(self, prompt: int, *, cached: int = 0) -> float:
        """Return the seconds to the first written token."""
        return self.overhead + (prompt - (cached if self.cached_prefix else 0)) / self.prefill

    def writing(self, written: int) -> float:
        """Return the seconds from the first written token to the last."""
        return (written - 1) / self.decode

    def at_once(self, seconds: float, requests: int) -> float:
        """Return what equal requests take at once, one alone taking `seconds`."""
        return seconds * (1 + (requests - 1) * self.further)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {
            "prefill": self.prefill,
            "decode": self.decode,
            "overhead": self.overhead,
            "speed_up": self.speed_up,
            "cached_prefix": self.cached_prefix,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A question's passages, as far as they cost time.

    Args:
        passages: How many (n).
        tokens: Of one passage (t).
        per_draft: How many passages a draft reads (k).
        lead: How many the first draft reads, where that is more (l).
    """

    passages: int
    tokens: int
    per_draft: int
    lead: int = 0

    def __post_init__(self) -> None:
        for name in ("passages", "tokens", "per_draft"):
            checked_whole(name, getattr(self, name))

    @property
    def draft_tokens(self) -> int:
        """Tokens of a draft's passages."""
        return self.tokens * min(self.per_draft, self.passages)

    @property
    def longest(self) -> int:
        """How many passages the first draft is to read, which no other exceeds."""
        return max(self.per_draft, self.lead)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the first draft's passages."""
        return self.tokens * min(self.longest, self.passages)

    @property
    def all_tokens(self) -> int:
        """Tokens of all passages."""
        return self.tokens * self.passages

    @property
    def covering(self) -> int:
        """How many drafts read every passage once, n / k: at least 2, to have a choice.

        1 where one draft reads everything anyway.
        """
        if self.passages <= self.per_draft:
            return 1
        return min(MOST_DRAFTS, max(2, math.ceil(self.passages / self.per_draft)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardCost:
    """Seconds of standard RAG: one request, of all passages, to the verifier."""

    read: float
    write: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.read + self.write

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {"read": self.read, "write": self.write, "seconds": self.seconds}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeCost:
    """Seconds of Speculative RAG, by stage."""

    num_drafts: int
    read: float
    """All drafts' prompts, at once."""
    write: float
    """All drafts, at once."""
    verify: float
    """What verification adds after the last draft."""
    requests: Mapping[str, int]
    """By stage."""

    @property
    def draft(self) -> float:
        """The drafts: read and written."""
        return self.read + self.write

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.draft + self.verify

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {
            "num_drafts": self.num_drafts,
            "read": self.read,
            "write": self.write,
            "draft": self.draft,
            "verify": self.verify,
            "seconds": self.seconds,
            "requests": dict(self.requests),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """A drafter and a verifier.

    `shared`: both run on the same hardware, so that neither works for nothing while the other does.
    """

    drafter: Rates
    verifier: Rates
    shared: bool = False

    def standard(self, load: Load) -> StandardCost:
        """Return what standard RAG takes."""
        prompt = ANSWER_PROMPT + load.all_tokens
        return StandardCost(
            read=self.verifier.reading(prompt, cached=ANSWER_PREFIX),
            write=self.verifier.writing(ANSWER_WRITTEN),
        )

    def speculative(self, load: Load, *, num_drafts: int, tier: TierName) -> SpeculativeCost:
        """Return what Speculative RAG takes with so many drafts."""
        drafter = self.drafter
        longest = drafter.reading(DRAFT_PROMPT + load.longest_tokens, cached=DRAFT_PREFIX)
        read = drafter.reading(DRAFT_PROMPT + load.draft_tokens, cached=DRAFT_PREFIX)
        write = drafter.writing(DRAFT_WRITTEN)
        # A draft that queues lands after the one before it; drafts at no extra cost land together.
        apart = drafter.further * (read + write)
        return SpeculativeCost(
            num_drafts=num_drafts,
            read=longest + (num_drafts - 1) * drafter.further * read,
            write=drafter.at_once(write, num_drafts),
            verify=self._verification(tier, num_drafts, apart),
            requests={"draft": num_drafts, "verify": TIERS[tier].requests(num_drafts)},
        )

    def _verification(self, tier: TierName, num_drafts: int, apart: float) -> float:
        """Return what verification adds after the last draft, drafts landing `apart` seconds apart.

        On hardware of its own the verifier works while drafts are written, so that it is late by as
        much as it is slower than they land; on shared hardware all its work comes on top.
        """
        one = self._check(tier, num_drafts)
        if tier == "choice":  # cannot begin before the last draft
            return one
        if self.shared:
            return self.verifier.at_once(one, num_drafts)
        late = max(0.0, self.verifier.further * one - apart)
        return one + (num_drafts - 1) * late

    def _check(self, tier: TierName, num_drafts: int) -> float:
        """Return what one verification takes alone; of `choice`, the only one."""
        verifier = self.verifier
        prompt = CHECK_PROMPT + DRAFT_WRITTEN
        if tier == "prompt_logprobs":  # vLLM reads no cache for it
            return verifier.seconds(prompt)
        if tier == "reflection":
            return verifier.seconds(prompt, cached=CHECK_PREFIX)
        if tier == "forced_decoding":  # what has been written is in the cache for the check
            written = verifier.seconds(CHECK_PREFIX, DRAFT_WRITTEN)
            return written + verifier.seconds(prompt, cached=CHECK_PREFIX + DRAFT_WRITTEN)
        if tier == "choice":  # asked twice, in different orders
            listed = CHOICE_PROMPT + CHOICE_PER_DRAFT * num_drafts
            return 2 * verifier.seconds(listed, CHOICE_WRITTEN)
        return 0.0  # draft_only and agreement send nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What both ways are predicted to take on two servers."""

    servers: Servers
    load: Load
    tier: TierName
    standard: StandardCost
    options: tuple[SpeculativeCost, ...]
    """By the number of drafts, from 2 to what covers the passages."""

    @property
    def speculative(self) -> SpeculativeCost:
        """The option to take: the most drafts with which it is faster than standard RAG.

        More drafts always cost more time and see more passages, so that time alone would always
        choose 2. Where no number is faster, the one that covers the passages.
        """
        worth_it = [option for option in self.options if self.ratio_of(option) >= WORTH_IT]
        return (worth_it or self.options)[-1]

    @property
    def ratio(self) -> float:
        """How many times longer standard RAG takes."""
        return self.ratio_of(self.speculative)

    def ratio_of(self, option: SpeculativeCost) -> float:
        """Return how many times longer standard RAG takes than this option."""
        return self.standard.seconds / option.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {
            "passages": self.load.passages,
            "tokens": self.load.tokens,
            "passages_per_draft": self.load.per_draft,
            "passages_of_first_draft": self.load.longest,
            "tier": self.tier,
            "shared": self.servers.shared,
            "num_drafts": self.speculative.num_drafts,
            "ratio": self.ratio,
            "standard": self.standard.to_dict(),
            "speculative": self.speculative.to_dict(),
            "options": [{**one.to_dict(), "ratio": self.ratio_of(one)} for one in self.options],
        }


def forecast(servers: Servers, load: Load, *, tier: TierName) -> Forecast:
    """Predict what both ways take."""
    numbers = range(min(2, load.covering), load.covering + 1)
    return Forecast(
        servers=servers,
        load=load,
        tier=tier,
        standard=servers.standard(load),
        options=tuple(servers.speculative(load, num_drafts=m, tier=tier) for m in numbers),
    )


def in_seconds(seconds: float) -> str:
    """Return a time with two digits that count."""
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2g} s"  # noqa: PLR2004 - digits
