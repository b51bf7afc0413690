"""LlamaServer: a llama.cpp server in a child process."""

import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from specrag_integrations.errors import (
    ConfigurationError,
    EndpointUnavailableError,
    MissingDependencyError,
)
from specrag_integrations.local.weights import StrPath, check_gguf

_CHILD = Path(__file__).with_name("child.py")
_SHOWN_LOG_BYTES = 2000
_PROMPT_CACHE_MIB = 256  # llama.cpp's own default is 8 GiB


class LlamaServer:
    """An OpenAI-compatible server on the loopback interface for one GGUF file.

    The server runs in a process of its own and ends with this object: by `stop`, at the end of a
    `with` block, when the object is garbage, when the interpreter exits, and also when this process
    is killed. Ctrl-C does not reach it.

    Args:
        path: A GGUF file.
        slots: How many requests are worked on at once; more wait their turn.
        context_tokens: Prompt and completion of one request together. llama.cpp gives each slot at
            most what the model was trained for.
        threads: CPU threads; None takes all cores.
        alias: The served model name; by default the file's name.
        api_key: What clients must send, if anything.
        start_timeout: Seconds in which the model must be loaded.

    Raises:
        ConfigurationError: a number below one.
        WeightsError: `path` is not a GGUF file.
    """

    def __init__(
        self,
        path: StrPath,
        *,
        slots: int,
        context_tokens: int = 8192,
        threads: int | None = None,
        alias: str | None = None,
        api_key: str | None = None,
        start_timeout: float = 300.0,
    ) -> None:
        numbers = {"slots": slots, "context_tokens": context_tokens, "threads": threads}
        for name, number in numbers.items():
            if number is not None and number < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {number}")
        self.path = Path(path)
        self.slots = slots
        self.alias = alias or self.path.stem
        self._settings = {
            **numbers,
            "path": str(self.path.resolve()),
            "alias": self.alias,
            "api_key": api_key,
            "prompt_cache_mib": _PROMPT_CACHE_MIB,
        }
        self._start_timeout = start_timeout
        self._process: _Process | None = None
        self._address = ""
        check_gguf(self.path)

    def __repr__(self) -> str:
        state = self._address or "not started"
        return f"LlamaServer({str(self.path)!r}, slots={self.slots}, {state})"

    def start(self) -> Self:
        """Start the server and wait until it serves; nothing happens if it runs already.

        Raises:
            MissingDependencyError: xllamacpp is not installed.
            EndpointUnavailableError: it ended or did not get ready in time; with its last words.
        """
        if self._process is not None and self._process.alive:
            return self
        if importlib.util.find_spec("xllamacpp") is None:
            raise MissingDependencyError("xllamacpp", "local")
        self.stop()
        process = _Process()
        self._process = process
        self._end = weakref.finalize(self, process.end)
        try:
            self._address = process.begin(self._settings, self._start_timeout)
        except TimeoutError:
            raise self._failure(f"was not ready after {self._start_timeout:g} s") from None
        except EOFError:
            raise self._failure("ended while it started") from None
        finally:
            if not self._address:
                self.stop()
        return self
