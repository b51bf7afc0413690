"""Retries: the one layer of them, which obeys what the server asks for."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from specrag_integrations.errors import (
    EndpointError,
    EndpointRejectedError,
    LogprobsUnavailableError,
)

if TYPE_CHECKING:
    from tenacity import AsyncRetrying, RetryCallState

T = TypeVar("T")

_LONGEST_RETRY_AFTER = 60.0


def _retrying(attempts: int, adaptations: int) -> AsyncRetrying:
    from tenacity import AsyncRetrying, retry_if_exception

    failures = 0

    def stop(state: RetryCallState) -> bool:
        nonlocal failures
        error = state.outcome.exception() if state.outcome else None
        failures += not isinstance(error, EndpointRejectedError | LogprobsUnavailableError)
        return failures >= attempts or state.attempt_number >= attempts + adaptations

    return AsyncRetrying(
        stop=stop,
        wait=_wait,
        retry=retry_if_exception(_worth_retrying),
        reraise=True,
    )


async def with_retries(
    attempts: int, send: Callable[[], Awaitable[T]], *, adaptations: int = 0
) -> tuple[T, int]:
    """Return what `send` brings and how often it was called.

    A refusal that taught another wording counts as an attempt, but for `adaptations` of them.
    """
    retrying = _retrying(attempts, adaptations)
    try:
        result: T = await retrying(send)
    except EndpointError as error:
        error.attempts = retrying.statistics["attempt_number"]
        raise
    return result, retrying.statistics["attempt_number"]


def _worth_retrying(error: BaseException) -> bool:
    if not isinstance(error, EndpointError) or not error.retryable:
        return False
    return (error.retry_after or 0.0) <= _LONGEST_RETRY_AFTER


def _wait(state: RetryCallState) -> float:
    from tenacity import wait_exponential, wait_random

    error = state.outcome.exception() if state.outcome else None
    if isinstance(error, EndpointError) and error.retry_after is not None:
        return error.retry_after
    return wait_exponential(multiplier=0.25, max=8.0)(state) + wait_random(0.0, 0.25)(state)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Read `Retry-After` (seconds or a date) or the millisecond form some servers send."""
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
        return max(0.0, milliseconds / 1000)
    value = headers.get("retry-after")
    if (seconds := _number(value)) is not None:
        return max(0.0, seconds)
    if value:
        from email.utils import parsedate_to_datetime

        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        except (ValueError, OverflowError):
            return None
    return None


def _number(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
