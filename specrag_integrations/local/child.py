"""The program of the child process: one llama.cpp server that never outlives its parent.

Run by file, not as a module, so that nothing but xllamacpp is imported. It reads its settings as
one line of JSON on standard input, prints `{"address": ...}` once it serves, and ends when standard
input does: the system closes it for a parent that was killed.
"""

import fcntl
import json
import os
import sys
import threading
from typing import Any


def main() -> None:
    """Serve until the parent is gone."""
    announce = os.dup(1)
    os.dup2(2, 1)  # llama.cpp may print; standard output carries the address and nothing else
    settings = json.loads(sys.stdin.buffer.readline())
    _end_with_parent()
    # OpenMP threads that spin while they wait take the core the other server needs, and decoding is
    # ten times slower. OpenMP reads this when it is loaded, so it is set before the import.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import xllamacpp

    try:
        server = xllamacpp.Server(_parameters(xllamacpp, settings))
    except RuntimeError as error:
        sys.exit(str(error))
    with os.fdopen(announce, "w") as out:
        json.dump({"address": server.listening_address}, out)
        out.write("\n")
    threading.Event().wait()


def _end_with_parent() -> None:
    def wait_for_the_end() -> None:
        os.read(0, 1)
        os._exit(0)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    if sys.platform == "linux":
        # While llama.cpp loads a model it holds the GIL, and our thread cannot run. Linux sends
        # SIGIO when the pipe is closed, and a process ends by it where no handler is installed.
        fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)


def _parameters(xllamacpp: Any, settings: dict[str, Any]) -> Any:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = settings["path"]
    parameters.model_alias = {settings["alias"]}
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = 0  # any free one
    # A request that its client has left ends with the batch at hand. With llama.cpp's 2048 tokens
    # a small machine is busy for half a minute with what nobody waits for.
    parameters.n_batch = 512
    parameters.n_parallel = settings["slots"]
    parameters.n_ctx = settings["context_tokens"] * settings["slots"]  # llama.cpp divides it
    if settings["threads"] is not None:
        parameters.cpuparams.n_threads = settings["threads"]
        parameters.cpuparams_batch.n_threads = settings["threads"]
    if settings["api_key"] is not None:
        parameters.api_keys = [settings["api_key"]]
    parameters.cache_ram_mib = settings["prompt_cache_mib"]
    parameters.no_extra_bufts = True  # no second, repacked copy of the weights in memory
    parameters.verbosity = 1  # errors only
    parameters.ui = False
    parameters.endpoint_slots = False  # which would show others what is being asked
    return parameters


if __name__ == "__main__":
    main()
