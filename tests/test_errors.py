"""The errors a caller may meet, and what each of them carries."""

from __future__ import annotations

import inspect
import pickle

import pytest

from specrag_integrations import NoAnswerError, NoAnswerReason, SpecRAGError, errors

TREE = {
    "CacheError": ("SpecRAGError",),
    "ConfigurationError": ("SpecRAGError", "ValueError"),
    "ContextTooSmallError": ("EndpointRejectedError",),
    "DraftFormatError": ("SpecRAGError",),
    "EndpointError": ("SpecRAGError",),
    "EndpointRejectedError": ("EndpointError",),
    "EndpointTimeoutError": ("EndpointError",),
    "EndpointUnavailableError": ("EndpointError",),
    "EvaluationError": ("SpecRAGError",),
    "InputError": ("SpecRAGError", "ValueError"),
    "LogprobsUnavailableError": ("EndpointError",),
    "MalformedReplyError": ("EndpointError",),
    "MissingDependencyError": ("SpecRAGError", "ImportError"),
    "NoAnswerError": ("SpecRAGError",),
    "SpecRAGError": ("Exception",),
    "WeightsError": ("SpecRAGError",),
}


def classes():
    """Return all exceptions of the module."""
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }


def test_the_tree_of_errors():
    """One root; built-in bases where a caller would expect them."""
    found = {
        name: tuple(base.__name__ for base in kind.__bases__) for name, kind in classes().items()
    }

    assert found == TREE


@pytest.mark.parametrize("name", TREE)
def test_the_tree_is_drawn_at_the_top_of_the_module(name):
    """The drawing is what people read."""
    assert f" {name}" in errors.__doc__ or errors.__doc__.count(name)
    assert issubclass(getattr(errors, name), SpecRAGError)
    assert getattr(errors, name).__doc__


def test_which_errors_are_worth_another_try():
    """Time-outs and unavailable servers; nothing a server refused."""
    retryable = {name for name, kind in classes().items() if getattr(kind, "retryable", False)}

    assert retryable == {"EndpointTimeoutError", "EndpointUnavailableError"}


def test_an_endpoints_error_says_who_failed_and_how():
    """What a caller needs to act."""
    error = errors.EndpointUnavailableError(
        "busy",
        endpoint="http://host/v1",
        model="m",
        status_code=429,
        request_id="r-1",
        retry_after=2.5,
    )

    assert str(error) == "busy"
    assert (error.endpoint, error.model, error.status_code) == ("http://host/v1", "m", 429)
    assert (error.request_id, error.retry_after, error.attempts) == ("r-1", 2.5, 1)


def test_a_missing_dependency_names_the_line_to_run():
    """It is an ImportError for whoever catches those."""
    error = errors.MissingDependencyError("xllamacpp", "local")

    assert "pip install 'specrag-integrations[local]'" in str(error)
    assert isinstance(error, ImportError)


def test_no_answer_keeps_its_reason_and_the_failures():
    """One line for each thing that failed; reasons are plain strings."""
    error = NoAnswerError("nothing", reason=NoAnswerReason.DEADLINE, failures=["a", "b"])

    assert (error.reason, error.failures) == ("deadline", ("a", "b"))
    assert {reason.value for reason in NoAnswerReason} == {
        "no_passages",
        "no_usable_draft",
        "disagreement",
        "low_confidence",
        "fallback_failed",
        "deadline",
    }


def test_errors_cross_a_process_boundary():
    """A pool's worker sends its exception by pickle."""
    error = errors.EndpointUnavailableError("busy", status_code=429)

    copy = pickle.loads(pickle.dumps(error))

    assert (str(copy), copy.status_code, type(copy)) == ("busy", 429, type(error))
