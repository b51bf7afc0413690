"""Every error of the package.

    SpecRAGError
    ├── ConfigurationError (ValueError)      a wrong option or combination; raised at construction
    ├── MissingDependencyError (ImportError) names the extra to install
    ├── InputError (ValueError)              an empty question, an unreadable file, a bad line
    ├── WeightsError                         model weights that cannot be had or fail their hash
    ├── CacheError                           the cache of replies cannot be read or written
    ├── EvaluationError                      an evaluation that could not go on; all done is kept
    ├── EndpointError                        .endpoint .model .status_code .request_id .retryable
    │   ├── EndpointTimeoutError             no reply within the request's time; retryable
    │   ├── EndpointUnavailableError         no connection, 429 or 5xx; retryable; .retry_after
    │   ├── EndpointRejectedError            any other 4xx, with the server's own message
    │   │   └── ContextTooSmallError         the prompt is longer than the model's context
    │   ├── MalformedReplyError              a reply that is not what the protocol promises
    │   └── LogprobsUnavailableError         the server returned no usable log-probabilities
    ├── DraftFormatError                     a draft without an answer; .text keeps what was written
    └── NoAnswerError                        .reason .failures

Callers usually need three: `SpecRAGError`, `EndpointError` and `NoAnswerError`. Within a question
an `EndpointError` or `DraftFormatError` of one draft becomes a value (`FailedDraft`); everything
else is a bug and propagates as itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class SpecRAGError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigurationError(SpecRAGError, ValueError):
    """An option, or a combination of options, that can never work."""


class MissingDependencyError(SpecRAGError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        """Name the missing package and the extra that brings it."""
        super().__init__(
            f"{package} is not installed; run: pip install 'specrag-integrations[{extra}]'"
        )


class InputError(SpecRAGError, ValueError):
    """A question, file or line that cannot be used."""


class WeightsError(SpecRAGError):
    """Model weights that cannot be fetched, or that fail their hash."""


class CacheError(SpecRAGError):
    """The cache of replies cannot be read or written."""


class EvaluationError(SpecRAGError):
    """An evaluation that could not go on; what was done is kept."""


class EndpointError(SpecRAGError):
    """A model endpoint did not give a usable reply."""

    retryable = False

    def __init__(
        self,
        message: str,
        *,
        endpoint: str = "",
        model: str | None = None,
        status_code: int | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        """Keep what a caller needs to act: who failed, how, and when to come back (seconds)."""
        super().__init__(message)
        self.endpoint = endpoint
        self.model = model
        self.status_code = status_code
        self.request_id = request_id
        self.retry_after = retry_after
        self.attempts = 1
        """Generating HTTP requests sent before giving up; 0 where the model was not found out."""


class EndpointTimeoutError(EndpointError):
    """No reply within the time allowed for one request."""

    retryable = True


class EndpointUnavailableError(EndpointError):
    """No connection, too many requests, or a server-side failure."""

    retryable = True


class EndpointRejectedError(EndpointError):
    """The server refused the request; sending it again would not help."""


class ContextTooSmallError(EndpointRejectedError):
    """The prompt does not fit into the model's context."""


class MalformedReplyError(EndpointError):
    """The server answered, but not with what the protocol promises."""


class LogprobsUnavailableError(EndpointError):
    """The server returned no usable log-probabilities for this request."""


class DraftFormatError(SpecRAGError):
    """A model's text holds no answer that could be read as a draft."""

    def __init__(self, message: str, *, text: str) -> None:
        """Keep the text, so that a trace can show what the model wrote."""
        super().__init__(message)
        self.text = text


class NoAnswerReason(StrEnum):
    """Why a question has no answer at all."""

    NO_PASSAGES = "no_passages"
    NO_USABLE_DRAFT = "no_usable_draft"
    DISAGREEMENT = "disagreement"
    LOW_CONFIDENCE = "low_confidence"
    FALLBACK_FAILED = "fallback_failed"
    DEADLINE = "deadline"


class NoAnswerError(SpecRAGError):
    """Nothing was selected, and the fallback is absent, too late, or failed as well."""

    def __init__(
        self, message: str, *, reason: NoAnswerReason, failures: Sequence[str] = ()
    ) -> None:
        """Keep the reason and one line for each thing that failed."""
        super().__init__(message)
        self.reason = reason
        self.failures = tuple(failures)
