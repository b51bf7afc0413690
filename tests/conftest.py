"""Fixtures shared by all tests."""

from __future__ import annotations

import importlib
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with Ctrl-C ignored, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def scripted() -> Iterator[Callable[..., ScriptedServer]]:
    """Start scripted servers, `scripted(respond, kind="vllm", …)`, and stop them all at the end."""
    with ExitStack() as stack:

        def start(*args: Any, **options: Any) -> ScriptedServer:
            return stack.enter_context(ScriptedServer(*args, **options))

        yield start


@pytest.fixture
def server(scripted: Callable[..., ScriptedServer]) -> ScriptedServer:
    """Return a running server with the default responder."""
    return scripted()


@pytest.fixture(scope="session")
def ragas() -> Any:
    """Return the library; the test is skipped where it is not installed, or cannot be imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("ragas.metrics.collections")
        except ImportError as error:
            pytest.skip(f"needs the environment that `make test-ragas` makes ({error})")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Return the folder of the question sets: $SPECRAG_DATA, or `shared/data` by the checkout."""
    named = os.environ.get("SPECRAG_DATA")
    folder = Path(named) if named else Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        if named:
            pytest.fail(f"SPECRAG_DATA names {named}, which is no folder")
        pytest.skip("no question sets: set SPECRAG_DATA to a folder that holds them")
    return folder
