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


def check_model(name: str, value: object) -> None:
    """Accept a chat model.

    Raises:
        ConfigurationError: it is something else, such as the class `Endpoint` itself.
    """
    if callable(getattr(value, "chat", None)) and not isinstance(value, type):
        return
    given = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    raise ConfigurationError(
        f"{name} must be an Endpoint or another ChatModel, not {given}; "
        "write Endpoint(base_url, model)"
    )


def check_json(name: str, value: object) -> None:
    """Accept what JSON can hold; the message names the place and the type, never a value.

    Raises:
        ConfigurationError: it is something else, such as a set, or a number that is not finite.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str | int | float | None):
                raise ConfigurationError(
                    f"{name} has a key of type {type(key).__name__}, which JSON cannot hold; "
                    "give a str"
                )
            check_json(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            check_json(f"{name}[{place}]", item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{name} is not finite, and JSON cannot hold it; give a number")
    elif not isinstance(value, str | int | float | None):
        raise ConfigurationError(
            f"{name} is a {type(value).__name__}, which JSON cannot hold; "
            "give a dict, list, str, number, bool or None"
        )


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
