"""LlamaServer: a llama.cpp server in a child process."""

import importlib.util
import json
import os
import selectors
import subprocess
import sys
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

from specrag_integrations.errors import (
    EndpointUnavailableError,
    MissingDependencyError,
)
from specrag_integrations.local.weights import StrPath, check_gguf
from specrag_integrations.options import checked_whole

_CHILD = Path(__file__).with_name("child.py")
_PROMPT_CACHE_MIB = 256  # llama.cpp's own default is 8 GiB
_SHOWN_LOG_BYTES = 1000


class LlamaServer:
    """An OpenAI-compatible server on the loopback interface for one GGUF file.

    The server runs in a process of its own. It ends by `stop`, with the `with` block, when this
    object is garbage, when the interpreter exits, and also when this process is killed. Ctrl-C does
    not reach it: the parent decides.

    Args:
        path: A GGUF file.
        slots: How many requests are worked on at once; more wait their turn.
        context_tokens: Prompt and completion of one request together; llama.cpp gives a slot no
            more than the model was trained for.
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
            if number is not None:
                checked_whole(name, number)
        self.path = Path(path)
        check_gguf(self.path)
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
        self._child: _Child | None = None

    def __repr__(self) -> str:
        return f"LlamaServer({self.path.name!r}, slots={self.slots}, pid={self.pid})"

    @property
    def pid(self) -> int | None:
        """The child's process id, or None when it does not run."""
        return self._child.process.pid if self._child and self._child.alive else None

    @property
    def base_url(self) -> str:
        """The address for OpenAI clients.

        Raises:
            EndpointUnavailableError: the server was not started, or has ended; with its last words.
        """
        child = self._launched()
        if not child.alive:
            raise self._failure("has ended")
        return f"{child.address}/v1"

    def start(self) -> Self:
        """Start the server and wait until it serves; one that runs is left alone.

        Raises:
            MissingDependencyError: xllamacpp is not installed.
            EndpointUnavailableError: it ended, or was not ready in time; with its last words.
        """
        return self.launch().wait()

    def launch(self) -> Self:
        """Start the child process and return at once, so that several servers load side by side."""
        if self.pid is not None:
            return self
        if importlib.util.find_spec("xllamacpp") is None:
            raise MissingDependencyError("xllamacpp", "local")
        self.stop()
        self._child = _Child(self._settings)
        self._end = weakref.finalize(self, self._child.end)  # at interpreter exit as well
        return self

    def wait(self) -> Self:
        """Wait until the launched server serves; raises as `start`."""
        child = self._launched()
        try:
            child.wait_for_address(self._start_timeout)
        except BaseException as error:
            failure = self._failure(str(error))
            self.stop()
            if isinstance(error, EOFError | TimeoutError):
                raise failure from None
            raise
        return self

    def stop(self) -> None:
        """End the server; nothing happens if it does not run."""
        if self._child is not None:
            self._end()
            self._child = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _launched(self) -> "_Child":
        if self._child is None:
            raise self._failure("is not started, or was closed")
        return self._child

    def _failure(self, what: str) -> EndpointUnavailableError:
        words = self._child.last_words() if self._child else ""
        told = f"; its last words: {words}" if words else ""
        return EndpointUnavailableError(
            f"the llama.cpp server for {self.path.name} {what}{told}", model=self.alias
        )


class _Child:
    """The child process and what it writes to standard error."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.address: str | None = None
        self._owner = os.getpid()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self.process = subprocess.Popen(  # noqa: S603 - our own file, run by our own interpreter
            [sys.executable, "-P", str(_CHILD)],
            bufsize=0,
            stdin=subprocess.PIPE,  # its end is what the child takes for ours
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C goes to a terminal's whole process group
        )
        _children.add(self)
        # Through the pipe, not as an argument: the key is nobody else's business.
        with suppress(BrokenPipeError):  # ended already; `wait_for_address` will tell
            self.stdin.write(json.dumps(settings).encode() + b"\n")

    @property
    def stdin(self) -> IO[bytes]:
        return cast("IO[bytes]", self.process.stdin)

    @property
    def stdout(self) -> IO[bytes]:
        return cast("IO[bytes]", self.process.stdout)

    @property
    def alive(self) -> bool:
        # A fork cannot ask about a child that is its parent's.
        return os.getpid() != self._owner or self.process.poll() is None

    def wait_for_address(self, timeout: float) -> None:
        if self.address is not None:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self.stdout, selectors.EVENT_READ)
            if not selector.select(timeout):
                raise TimeoutError(f"was not ready after {timeout:g} s")
        line = self.stdout.readline()
        if not line:
            raise EOFError(f"ended while it started, with code {self.process.wait()}")
        self.address = json.loads(line)["address"]

    def last_words(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _SHOWN_LOG_BYTES))
        return " ".join(self._log.read().decode(errors="replace").split())

    def end(self) -> None:
        """Kill the child: it holds nothing worth saving, and so stopping takes no time."""
        if os.getpid() != self._owner:
            return  # a fork of ours exits; the server is not its to end
        self.process.kill()
        self.process.wait()
        for stream in (self.stdin, self.stdout, self._log):
            stream.close()

    def let_go(self) -> None:
        """Close a fork's copy of the pipe: it would keep the child alive when its parent dies."""
        self.stdin.close()


_children: weakref.WeakSet[_Child] = weakref.WeakSet()


def _let_go_of_all() -> None:
    for child in _children:
        child.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_of_all)
