"""Trials: what a verifier's server returns, found out with a few small requests before they count.

The verification of one known draft is sent, once for each endpoint, and its reply is read by the
code that reads real ones: what it tells is the evidence. A model of an application is not tried.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specrag_integrations.drafts import Draft
from specrag_integrations.errors import EndpointError
from specrag_integrations.labels import is_thinking
from specrag_integrations.models import ChatModel, ChatReply, Token
from specrag_integrations.prompts import PROBE_ANSWER, PROBE_QUESTION, PROBE_RATIONALE
from specrag_integrations.scores import ASKING, TIERS, Scoring, TierName
from specrag_integrations.tasks import Tasks
from specrag_integrations.tiers import ForcedDecoding, Reflection

log = logging.getLogger("specrag_integrations")

PROBE_DRAFT = Draft(rationale=PROBE_RATIONALE, answer=PROBE_ANSWER)
_LITTLE_MASS = 0.01
"""Below this probability of Yes and No together, a verifier is not answering the question."""
_CRASH = 500
"""The status of a server that fails on a field."""
_GLANCE = 0.05
"""Seconds in which a trial that has ended meanwhile tells its outcome."""
_PATIENCE = 30.0
"""Seconds before a server that failed two trials in a row is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What trial requests showed of a tier."""

    tier: TierName
    works: bool
    evidence: str
    """What came back, such as `0 of 75 positions`."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able form."""
        return {"tier": self.tier, "works": self.works, "evidence": self.evidence}


def working(
    names: Sequence[TierName], trials: Sequence[Trial], scoring: Scoring
) -> tuple[TierName, ...]:
    """Return the tiers that may be used, after what trials showed."""
    works: Mapping[TierName, bool] = {trial.tier: trial.works for trial in trials}
    return tuple(
        name
        for name in names
        if works.get(name, not TIERS[name].needs_proof)
        and (works.get("reflection", True) or "reflection" not in scoring.weights_at(name))
    )


class Tryout:
    """Tries one verifier out, and remembers what is to be known of it.

    Args:
        model: The verifier.
        scoring: What its verifications look like.
    """

    def __init__(self, model: ChatModel, scoring: Scoring) -> None:
        self.thinks = False
        """Whether it thinks aloud before a word that counts, and cannot be told not to."""
        self._model = model
        self._reflection = Reflection(model=model, scoring=scoring)
        self._refusal: EndpointError | None = None
        self._crash: Trial | None = None
        self._failures = 0
        self._last_failure = 0.0
        self._late = False
        self._told: set[TierName] = set()

    async def known(self, names: Sequence[TierName], tasks: Tasks) -> tuple[Trial, ...] | None:
        """Return what is known of some tiers for the next question; None while nothing is.

        A trial that a deadline once cut off is not waited for again until it has ended.
        """
        if self._failures > 1 and time.monotonic() < self._last_failure + _PATIENCE:
            return None
        if self._late:
            trying = tasks.start(self._try_out(names))
            await asyncio.wait([trying], timeout=_GLANCE)
            return trying.result() if trying.done() else None
        return await self._try_out(names)

    async def _try_out(self, names: Sequence[TierName]) -> tuple[Trial, ...] | None:
        started = time.monotonic()
        try:
            trials = await self.trials(names)
        except asyncio.CancelledError:
            self._late = True
            raise
        except EndpointError as error:  # not an answer: it is tried again
            if self._last_failure < started:  # questions at one time share one failure
                self._failures += 1
            self._last_failure = time.monotonic()
            log.info("%s could not be tried: %s", self._model.name, error)
            return None
        self._late, self._failures = False, 0
        for trial in trials:
            if not trial.works and trial.tier not in self._told:
                self._told.add(trial.tier)
                level = logging.WARNING if trial.tier == "reflection" else logging.INFO
                log.log(level, "%s: no %s: %s", self._model.name, trial.tier, trial.evidence)
        return trials

    async def trials(self, names: Sequence[TierName]) -> tuple[Trial, ...]:
        """Try out those of some tiers that a trial can tell something about.

        Raises:
            EndpointError: the server cannot be reached, is busy, or refuses every request.
        """
        if not set(ASKING).intersection(names):
            return ()
        scored = "prompt_logprobs" in names and self._refusal is None
        try:
            reply = await self._probe(scored=scored)
        except EndpointError as error:
            if not scored or _may_pass(error):
                raise
            reply = await self._probe()
            self._refusal = error  # it fails on this field alone
        if reply is None:
            return ()
        trials = [await self._trial_of_reflection(reply)]
        if "prompt_logprobs" in names:
            trials.insert(0, self._trial_of_prompt_logprobs(reply))
        if "forced_decoding" in names:
            trials.insert(1, await self._trial_of_forcing())
        return tuple(trials)

    async def _probe(self, *, scored: bool = False, room: bool = False) -> ChatReply | None:
        reflection = replace(self._reflection, thinks=room)
        return await self._model.probe(
            reflection.request(PROBE_QUESTION, PROBE_DRAFT, scored=scored)
        )

    def _trial_of_prompt_logprobs(self, reply: ChatReply) -> Trial:
        told = reply.scored_evidence if self._refusal is None else str(self._refusal)
        works = self._refusal is None and self._finds_both(reply.scored or ())
        return Trial(tier="prompt_logprobs", works=works, evidence=told)

    async def _trial_of_reflection(self, reply: ChatReply) -> Trial:
        token = next(iter(reply.tokens or ()), None)
        listed = len(dict(token.alternatives)) if token else 0
        told = f"{listed} alternatives to the first token"
        mass = self._reflection.read(reply).label_mass or 0.0
        self.thinks = self.thinks or is_thinking(reply)
        if listed > 1 and mass < _LITTLE_MASS and not self.thinks:
            # Perhaps it thinks in a block that the template opened, or begins with a new line.
            more = await self._probe(room=True)
            found = self._reflection.read(more).label_mass if more else None
            self.thinks = (found or 0.0) >= _LITTLE_MASS
        if self.thinks:
            told += "; it writes before it answers, so that the word behind that is read"
        elif listed > 1:
            told += f", Yes and No with {mass:.2g} of the probability"
        works = listed > 1 and (self.thinks or mass >= _LITTLE_MASS)
        return Trial(tier="reflection", works=works, evidence=told)

    async def _trial_of_forcing(self) -> Trial:
        if self._crash is not None:
            return self._crash
        forcing = ForcedDecoding(reflection=self._reflection)
        known = await self._model.capabilities()
        if known is None or not known.forces_text:
            told = "only llama.cpp's server can be made to write a given text"
            return Trial(tier="forced_decoding", works=False, evidence=told)
        try:
            reply = await self._model.probe(forcing.request(PROBE_QUESTION, PROBE_DRAFT))
        except EndpointError as error:
            if _may_pass(error):
                raise
            self._crash = Trial(tier="forced_decoding", works=False, evidence=str(error))
            return self._crash
        tokens = (reply.tokens if reply else None) or ()
        works = self._finds_both(tokens)
        told = f"{len(tokens)} tokens written as given" if works else "another text was written"
        return Trial(tier="forced_decoding", works=works, evidence=told)

    def _finds_both(self, tokens: Sequence[Token]) -> bool:
        """Whether the known draft's rationale and answer are in its tokens."""
        return len(self._reflection.spans_of(PROBE_DRAFT, tokens)) == 2  # noqa: PLR2004


def _may_pass(error: EndpointError) -> bool:
    """Whether a server was busy or not there, as opposed to one that fails on a field."""
    return error.retryable and error.status_code != _CRASH
