"""Model options: what a model may be asked for beside its messages, by what it is.

A keyword that a model does not know fails its call, so that models of an application are given
options only where their class is known to take them, or where the application says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from langchain_core.runnables import Runnable, RunnableSequence
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import (
    DynamicRunnable,
    RunnableConfigurableAlternatives,
)
from langchain_core.runnables.fallbacks import RunnableWithFallbacks
from langchain_core.runnables.retry import RunnableRetry

from specrag_integrations.errors import ConfigurationError
from specrag_integrations.foreign import secrets_of
from specrag_integrations.langchain.chat_model import EndpointChat
from specrag_integrations.models import ChatRequest

log = logging.getLogger("specrag_integrations")

Options = Literal["openai"] | Callable[[ChatRequest], Mapping[str, Any]]
"""How a model of an application is asked for log-probabilities: as OpenAI's, or a function from
what is wanted to the keyword arguments of its `invoke`."""

_LIKE_OPENAI = frozenset({("langchain_openai", "BaseChatOpenAI")})
"""Package and class of the chat models that take OpenAI's options, their subclasses included."""


def leaves(model: object) -> Iterator[object]:
    """Yield the models that may answer in the end, without the wrappers that pass options on."""
    if isinstance(model, RunnableBindingBase):
        yield from leaves(model.bound)
    elif isinstance(model, RunnableWithFallbacks):
        for one in (model.runnable, *model.fallbacks):
            yield from leaves(one)
    elif isinstance(model, RunnableConfigurableAlternatives):
        several: tuple[object, ...] = (model.default, *model.alternatives.values())
        for other in several:
            yield from leaves(other)
    elif isinstance(model, DynamicRunnable):
        yield from leaves(model.default)
    else:
        yield model


def is_foreign(model: object) -> bool:
    """Whether a model of an application may answer, instead of an `EndpointChat`."""
    return not all(isinstance(one, EndpointChat) for one in leaves(model))


def most_attempts(model: object) -> int:
    """Return the most HTTP requests one call may send, as far as its models tell."""
    if isinstance(model, RunnableBindingBase):
        times = model.max_attempt_number if isinstance(model, RunnableRetry) else 1
        return times * most_attempts(model.bound)
    if isinstance(model, RunnableWithFallbacks):
        return sum(map(most_attempts, (model.runnable, *model.fallbacks)))
    if isinstance(model, RunnableConfigurableAlternatives):
        return max(map(most_attempts, (model.default, *model.alternatives.values())))
    if isinstance(model, DynamicRunnable):
        return most_attempts(model.default)
    if isinstance(model, RunnableSequence):
        return sum(map(most_attempts, model.steps))
    retries = getattr(model, "max_retries", None)
    return 1 + (retries if isinstance(retries, int) and retries > 0 else 0)


def warn_of_retries(model: object, name: str) -> None:
    """Log that two layers of retries multiply, where a model has them."""
    for retrying in _retrying(model):
        within = most_attempts(retrying.bound)
        if within > 1:
            log.warning(
                "%s: the %d attempts of .with_retry() multiply with its client's to %d requests; "
                "leave retries to one of them",
                name,
                retrying.max_attempt_number,
                retrying.max_attempt_number * within,
            )


def _retrying(model: object) -> Iterator[RunnableRetry[Any, Any]]:
    if isinstance(model, RunnableRetry):
        yield model
    elif isinstance(model, RunnableBindingBase):
        yield from _retrying(model.bound)
    elif isinstance(model, RunnableWithFallbacks):
        for one in (model.runnable, *model.fallbacks):
            yield from _retrying(one)


def checked_options(options: Options | None) -> Options | None:
    """Return `options` of a model.

    Raises:
        ConfigurationError: they are none.
    """
    if options is None or options == "openai" or callable(options):
        return options
    raise ConfigurationError(
        f"options={options!r} must be 'openai' or a function from a ChatRequest to keyword "
        "arguments"
    )


def options_for(
    model: Runnable[Any, Any], options: Options | None
) -> Callable[[ChatRequest], Mapping[str, Any]] | None:
    """Return how a model is asked for log-probabilities; None if it is not known to have any."""
    if not is_foreign(model):
        return endpoint_options
    if callable(options):
        return options
    if options == "openai" or all(map(_is_like_openai, leaves(model))):
        return openai_options
    return None


def endpoint_options(request: ChatRequest) -> Mapping[str, Any]:
    """Return a request as the options of an `EndpointChat`, as far as it is not the usual."""
    options: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
    }
    if request.top_logprobs is not None:
        options |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if request.labels:
        options["labels"] = list(request.labels)
    if request.score_message is not None:
        options["score_message"] = request.score_message
    if request.forced:
        options["forced"] = request.forced
    if not request.think:
        options["think"] = False
    return options


def openai_options(request: ChatRequest) -> Mapping[str, Any]:
    """Return a request as OpenAI's options.

    How the application's model writes is left to the application; a word to be judged by its
    log-probability needs no more tokens than it has.
    """
    if request.top_logprobs is None:
        return {}
    # Some servers fail on logprobs without top_logprobs, so at least one is asked for.
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": max(1, request.top_logprobs)}
    return options | ({"max_tokens": request.max_tokens} if request.needs_logprobs else {})


def takes_stream(model: object) -> bool:
    """Whether a call may say that it is not to be streamed, whoever listens."""
    return all(isinstance(one, EndpointChat) or _is_openai(one) for one in leaves(model))


def counts_streams(model: object) -> bool:
    """Whether a stream may be asked for the number of its tokens, and nobody said otherwise."""
    told = (getattr(one, "stream_usage", None) for one in leaves(model))
    return all(map(_is_like_openai, leaves(model))) and False not in told


def secrets_within(model: object) -> Iterator[str]:
    """Yield the keys that the models within a Runnable hold."""
    for one in leaves(model):
        if isinstance(one, RunnableSequence):
            for step in one.steps:
                yield from secrets_within(step)
        yield from secrets_of(one)


def _is_like_openai(model: object) -> bool:
    # The Responses API words log-probabilities otherwise, has none for its reasoning models, and
    # counts its streams unasked.
    responses = getattr(model, "_use_responses_api", None)
    return _is_openai(model) and not (responses and responses({}))


def _is_openai(model: object) -> bool:
    return any(
        (kind.__module__.partition(".")[0], kind.__name__) in _LIKE_OPENAI
        for kind in type(model).__mro__
    )
