"""EmbeddedPair: a drafter and a verifier on this machine."""

import pickle
import threading
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, TypedDict

from specrag_integrations.confidence import Calibration
from specrag_integrations.endpoint import Endpoint
from specrag_integrations.errors import EndpointUnavailableError
from specrag_integrations.local import DRAFTER, VERIFIER
from specrag_integrations.local.server import LlamaServer
from specrag_integrations.local.weights import StrPath, is_known, resolve
from specrag_integrations.options import checked_whole

_CALIBRATION = Path(__file__).with_name("calibration.json")
_VERIFIER_SLOTS = 2
_REQUEST_SECONDS = 600.0  # a full context takes a small machine minutes


class Roles(TypedDict):
    """Endpoints by the parameter of `SpeculativeRAG` they are meant for."""

    drafter: Endpoint
    verifier: Endpoint


class EmbeddedPair:
    """A drafter and a verifier on this machine, for `SpeculativeRAG(**pair.roles)`.

    Nothing runs before the first use. Use it in a `with` block, or let the servers end with the
    last reference to their endpoints. Weights that are not there yet are fetched.

    Args:
        drafter: Known weights (`specrag_integrations.local.weights.weights_names`) or a GGUF file.
        verifier: As `drafter`; if both are the same, one server takes both roles.
        num_drafts: How many drafts are written at once.
        context_tokens: Prompt and completion of one request together, at most what the model was
            trained for.
        threads: CPU threads of each server; None takes all cores.
        registry: A TOML file that adds sources of weights; by default what SPECRAG_REGISTRY names.
        progress: Report downloads on standard error.

    Raises:
        ConfigurationError: a number below one.
        WeightsError: neither known weights nor a GGUF file.
    """

    def __init__(
        self,
        *,
        drafter: StrPath = DRAFTER,
        verifier: StrPath = VERIFIER,
        num_drafts: int = 5,
        context_tokens: int = 8192,
        threads: int | None = None,
        registry: StrPath | None = None,
        progress: bool = True,
    ) -> None:
        numbers = {"num_drafts": num_drafts, "context_tokens": context_tokens, "threads": threads}
        for name, number in numbers.items():
            if number is not None:
                checked_whole(name, number)
        for model in (drafter, verifier):
            is_known(model, registry=registry)
        self._models = {"drafter": drafter, "verifier": verifier}
        self._slots = {"drafter": num_drafts, "verifier": _VERIFIER_SLOTS}
        self._context_tokens = context_tokens
        self._threads = threads
        self._registry = registry
        self._progress = progress
        self._lock = threading.Lock()
        self._roles: dict[str, ServedEndpoint] = {}

    def __repr__(self) -> str:
        models = ", ".join(f"{role}={str(model)!r}" for role, model in self._models.items())
        return f"EmbeddedPair({models})"

    @property
    def drafter(self) -> Endpoint:
        """The drafter's endpoint; the servers are started if they do not run."""
        return self.roles["drafter"]

    @property
    def verifier(self) -> Endpoint:
        """The verifier's endpoint; the servers are started if they do not run."""
        return self.roles["verifier"]

    @property
    def roles(self) -> Roles:
        """Both endpoints; the servers are started if they do not run.

        Raises:
            MissingDependencyError: xllamacpp is not installed.
            WeightsError: the weights cannot be had.
            EndpointUnavailableError: a server does not start, or has ended; with its last words.
        """
        with self._lock:
            if not self._roles:
                self._roles = self._start()
            for endpoint in self._roles.values():
                endpoint.check()
            return Roles(drafter=self._roles["drafter"], verifier=self._roles["verifier"])

    def start(self) -> Self:
        """Start both servers now; raises as `roles`."""
        _ = self.roles
        return self

    @property
    def calibration(self) -> Calibration:
        """A calibration of the default pair and the default pipeline, to see what one does.

        It is a demonstration: it was made by `specrag calibrate` from questions about Wikipedia,
        which are not yours, and promises little, see `calibration.thresholds` and docs/results.md.
        `SpeculativeRAG` refuses it by name with other weights, drafts or passages per draft.
        """
        return Calibration.load(_CALIBRATION)

    def close(self) -> None:
        """Close the connections and end the servers; a later use starts them again."""
        with self._lock:
            for endpoint in self._roles.values():
                endpoint.close()
                endpoint.server.stop()
            self._roles = {}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> "dict[str, ServedEndpoint]":
        paths = {
            role: resolve(model, registry=self._registry, progress=self._progress)
            for role, model in self._models.items()
        }
        # Both roles may share one file, and then one server with the larger number of slots.
        slots: dict[Path, int] = {}
        for role, path in paths.items():
            slots[path] = max(slots.get(path, 0), self._slots[role])
        with ExitStack() as unless_all_serve:
            servers = [self._server(path, number) for path, number in slots.items()]
            for server in servers:
                unless_all_serve.callback(server.stop)
                server.launch()
            endpoints = {server.path: ServedEndpoint(server.wait()) for server in servers}
            unless_all_serve.pop_all()
        return {role: endpoints[path] for role, path in paths.items()}

    def _server(self, path: Path, slots: int) -> LlamaServer:
        return LlamaServer(
            path, slots=slots, context_tokens=self._context_tokens, threads=self._threads
        )


class ServedEndpoint(Endpoint):
    """An endpoint that keeps its server, so that `SpeculativeRAG(**EmbeddedPair().roles)` does."""

    def __init__(self, server: LlamaServer) -> None:
        super().__init__(
            server.base_url,
            server.alias,
            max_concurrency=server.slots,
            request_timeout=_REQUEST_SECONDS,
        )
        self.server = server

    def __reduce__(self) -> NoReturn:
        """Refuse: its server is a child of this process and ends with it.

        Raises:
            PicklingError: always.
        """
        raise pickle.PicklingError(
            f"{self!r} is served by this process alone and cannot be pickled; start an "
            "EmbeddedPair where it is used, or serve the model and give its URL to an Endpoint"
        )

    def check(self) -> None:
        """Raise an `EndpointUnavailableError` if the server has ended."""
        _ = self.server.base_url

    def _unreachable(self, error: Exception) -> EndpointUnavailableError:
        """Say why nobody answers where it is known: a pair that was closed, or a crash."""
        try:
            self.check()
        except EndpointUnavailableError as ended:
            return ended
        return super()._unreachable(error)
