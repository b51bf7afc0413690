"""Options: checked where they are given, so that no question fails for them."""

from __future__ import annotations

import math

from specrag_integrations.errors import ConfigurationError, InputError


def checked_whole(name: str, value: int, *, at_least: int = 1) -> int:
    """Return a whole number.

    Raises:
        ConfigurationError: it is none, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigurationError(f"{name}={value!r} must be at least {at_least}, a whole number")
    return value


def checked_positive(name: str, value: float) -> float:
    """Return a finite number above 0.

    Raises:
        ConfigurationError: it is none.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ConfigurationError(f"{name}={value!r} must be a number above 0")
    return value


def check_kind(name: str, value: object, *, kind: type = object, method: str | None = None) -> None:
    """Accept None, and what is an instance of `kind` and has the method.

    Raises:
        ConfigurationError: it is something else, such as a class instead of an object of it.
    """
    if value is None:
        return
    if not isinstance(value, kind):
        raise ConfigurationError(f"{name} must be a {kind.__name__}, not {value!r}")
    if method and (isinstance(value, type) or not callable(getattr(value, method, None))):
        raise ConfigurationError(f"{name} must be an object with {method}(), not {value!r}")


def checked_question(question: str) -> str:
    """Return the question without white space around it.

    Raises:
        InputError: it is not a string, or empty.
    """
    if not isinstance(question, str):
        raise InputError(f"the question must be a str, not {type(question).__name__}")
    if not question.strip():
        raise InputError("the question is empty")
    return question.strip()
