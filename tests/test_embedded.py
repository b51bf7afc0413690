"""Embedded endpoints: real llama.cpp servers on this machine, which never outlive their parent."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrag_integrations.errors import (
    ConfigurationError,
    EndpointUnavailableError,
    MissingDependencyError,
    WeightsError,
)
from specrag_integrations.local import EmbeddedPair
from specrag_integrations.local.server import LlamaServer
from specrag_integrations.local.weights import pull
from specrag_integrations.models import ChatRequest, Step, user

SMOL = "smollm2-135m-instruct"
MIRROR = Path(__file__).parents[1] / "weights-mirror.toml"
PARENT = """
import os, sys, time
from specrag_integrations.local.server import LlamaServer
server = LlamaServer(sys.argv[1], slots=1, context_tokens=512)
server.launch()
print(server.pid, flush=True)
{then}
"""


@pytest.fixture(scope="session")
def registry() -> str:
    """Return the registry to fetch from: SPECRAG_REGISTRY, or the repository's mirror."""
    return os.environ.get("SPECRAG_REGISTRY", str(MIRROR))


@pytest.fixture(scope="session")
def smol(registry: str) -> Path:
    """Return the smallest real model."""
    return pull(SMOL, registry=registry)


@pytest.fixture(scope="module")
def server(smol: Path) -> Iterator[LlamaServer]:
    """Serve the smallest model for the tests of this module."""
    with LlamaServer(smol, slots=2, context_tokens=1024, alias="smol") as running:
        yield running


def ask(url: str, body: dict[str, Any] | None = None, **headers: str) -> dict[str, Any]:
    """Send one request without any client library."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, data, headers)  # noqa: S310 - our own server
    with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310
        return dict(json.load(reply))


def chat(url: str, **options: Any) -> dict[str, Any]:
    """Ask for a few tokens."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return ask(f"{url}/chat/completions", {"messages": messages, "max_tokens": 8, **options})


def runs(pid: int) -> bool:
    """Tell whether a process lives; one that only waits to be collected does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def ends(pid: int, seconds: float = 2.0) -> bool:
    """Tell whether a process is gone within `seconds`."""
    deadline = time.monotonic() + seconds
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not runs(pid)


def crash(server: LlamaServer) -> None:
    """Let a server die, and wait until the system has collected its threads."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while server.pid is not None and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.embedded
def test_a_server_chats_with_logprobs(server: LlamaServer) -> None:
    """The server speaks the chat protocol and returns the tokens' log-probabilities."""
    reply = chat(server.base_url, logprobs=True, top_logprobs=3, temperature=0)

    (choice,) = reply["choices"]
    tokens = choice["logprobs"]["content"]
    assert choice["message"]["content"]
    assert len(tokens) == reply["usage"]["completion_tokens"] == 8
    assert all(token["logprob"] <= 0 and len(token["top_logprobs"]) == 3 for token in tokens)


@pytest.mark.embedded
def test_a_server_tells_its_name_and_context(server: LlamaServer) -> None:
    """Clients learn the alias and the context of one slot, not of all together."""
    (model,) = ask(f"{server.base_url}/models")["data"]

    assert model["id"] == "smol"
    assert model["meta"]["n_ctx"] == 1024


@pytest.mark.embedded
def test_a_context_beyond_the_model_is_capped(smol: Path) -> None:
    """More context than the model was trained for is not promised to clients."""
    with LlamaServer(smol, slots=1, context_tokens=20_000) as long:
        (model,) = ask(f"{long.base_url}/models")["data"]

    assert model["meta"]["n_ctx"] == model["meta"]["n_ctx_train"] == 8192


@pytest.mark.embedded
def test_two_servers_run_side_by_side(server: LlamaServer, smol: Path) -> None:
    """Each server has its own port and process."""
    with LlamaServer(smol, slots=1, context_tokens=512) as other:
        assert other.base_url != server.base_url
        assert other.pid != server.pid
        assert chat(other.base_url)["choices"]
    assert chat(server.base_url)["choices"]


@pytest.mark.embedded
def test_a_key_is_asked_for(smol: Path) -> None:
    """With `api_key` nobody else on the machine can use the server, nor read the key in `ps`."""
    with LlamaServer(smol, slots=1, context_tokens=512, api_key="secret") as guarded:
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            chat(guarded.base_url)
        refused.value.close()
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        url = f"{guarded.base_url}/chat/completions"
        assert ask(url, body, Authorization="Bearer secret")["choices"]
        listed = subprocess.run(
            ["ps", "-ww", "-p", str(guarded.pid)],  # noqa: S607 - wherever the system has it
            capture_output=True,
            check=True,
        )

    assert b"secret" not in listed.stdout


@pytest.mark.embedded
def test_stop_is_quick_idempotent_and_leaves_no_process(smol: Path) -> None:
    """After `stop` the process is gone, and the server can be started again."""
    server = LlamaServer(smol, slots=1, context_tokens=512).start()
    pid = server.pid
    assert pid is not None
    assert server.start().pid == pid  # starting twice starts one

    started = time.monotonic()
    server.stop()
    server.stop()

    assert time.monotonic() - started < 1
    assert not runs(pid)
    with pytest.raises(EndpointUnavailableError, match="is not started"):
        _ = server.base_url
    with server:
        assert chat(server.base_url)["choices"]


@pytest.mark.embedded
def test_a_server_ends_with_its_last_reference(smol: Path) -> None:
    """A forgotten server is no orphan."""
    server = LlamaServer(smol, slots=1, context_tokens=512).start()
    pid = server.pid
    assert pid is not None

    del server
    gc.collect()

    assert not runs(pid)


@pytest.mark.embedded
@pytest.mark.parametrize("moment", ["while loading", "when ready"])
def test_a_killed_parent_takes_the_server_along(smol: Path, moment: str) -> None:
    """SIGKILL leaves the parent no time to clean up; the child ends by itself."""
    wait = "server.wait(); print('ready', flush=True)\n" if moment == "when ready" else ""
    parent, pid = start_parent(smol, wait + "time.sleep(60)")
    with parent:
        if wait:
            parent.stdout.readline()
        else:
            time.sleep(0.3)
        assert runs(pid)

        parent.kill()

        assert ends(pid)


@pytest.mark.embedded
def test_a_killed_parent_with_a_living_fork_takes_the_server_along(smol: Path) -> None:
    """A fork of the parent lets go of the pipe, and does not end the server when it exits."""
    forks = (
        "server.wait()\n"
        "if os.fork() == 0: sys.exit()\n"
        "os.wait()\n"
        "print(server.pid, flush=True)\n"
        "if os.fork() == 0: time.sleep(5); os._exit(0)\n"
        "time.sleep(60)"
    )
    parent, pid = start_parent(smol, forks)
    with parent:
        assert int(parent.stdout.readline()) == pid
        assert runs(pid)

        parent.kill()

        assert ends(pid)


@pytest.mark.embedded
def test_ctrl_c_reaches_the_parent_alone(smol: Path) -> None:
    """An interrupt of the whole process group leaves the server to the parent's decision."""
    survives = (
        "server.wait()\n"
        "try:\n"
        "    print('ready', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(0.5); print(server.pid, flush=True); raise"
    )
    parent, pid = start_parent(smol, survives)
    with parent:
        parent.stdout.readline()

        os.killpg(parent.pid, signal.SIGINT)

        assert parent.stdout.readline() == f"{pid}\n"
        assert parent.wait(timeout=10) != 0
        assert ends(pid)


def start_parent(smol: Path, then: str) -> tuple[subprocess.Popen[str], int]:
    """Start a process that starts a server, as the leader of its own group."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(then=then), str(smol)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    return parent, int(parent.stdout.readline())


@pytest.mark.embedded
def test_a_server_that_died_is_noticed(smol: Path) -> None:
    """A crash is told when the address is next asked for."""
    with LlamaServer(smol, slots=1, context_tokens=512) as server:
        crash(server)

        with pytest.raises(EndpointUnavailableError, match=r"server for SmolLM2.* has ended"):
            _ = server.base_url


@pytest.mark.embedded
def test_a_damaged_model_is_told_in_llama_cpps_words(smol: Path, tmp_path: Path) -> None:
    """A child that dies at start is an error with what it said last."""
    cut = tmp_path / "cut.gguf"
    with smol.open("rb") as whole:
        cut.write_bytes(whole.read(20_000_000))

    with pytest.raises(EndpointUnavailableError, match=r"cut\.gguf ended .* model is corrupted"):
        LlamaServer(cut, slots=1).start()


@pytest.mark.embedded
def test_a_start_that_takes_too_long_is_given_up(smol: Path) -> None:
    """After `start_timeout` the child is ended and the error says so."""
    server = LlamaServer(smol, slots=1, start_timeout=0.05)

    with pytest.raises(EndpointUnavailableError, match=r"was not ready after 0\.05 s"):
        server.start()

    assert server.pid is None


@pytest.mark.embedded
def test_a_pair_serves_both_roles(registry: str, smol: Path) -> None:
    """Without `with`, the first access starts the servers, and `close` ends them."""
    pair = EmbeddedPair(
        drafter=SMOL, verifier=smol, num_drafts=3, context_tokens=512, registry=registry
    )
    roles = pair.roles
    assert roles["drafter"] is pair.drafter
    # The same file: one server with the slots of the larger role.
    assert roles["verifier"] is roles["drafter"]
    assert roles["drafter"].max_concurrency == 3

    request = ChatRequest(messages=(user("Name a colour."),), max_tokens=4, top_logprobs=0)

    async def draft() -> list[Any]:
        steps = [Step(kind="draft", index=index) for index in range(3)]
        return await asyncio.gather(*(pair.drafter.chat(request, step=step) for step in steps))

    replies = asyncio.run(draft())
    assert all(reply.tokens for reply in replies)

    pid = pair.drafter.server.pid
    pair.close()
    pair.close()
    assert not runs(pid)
    with pytest.raises(EndpointUnavailableError, match="is not started, or was closed") as closed:
        asyncio.run(roles["drafter"].chat(request, step=Step(kind="draft", index=0)))
    assert closed.value.model == roles["drafter"].server.alias


@pytest.mark.embedded
def test_the_endpoints_alone_keep_the_servers(registry: str, smol: Path, tmp_path: Path) -> None:
    """`SpeculativeRAG(**EmbeddedPair().roles)` works although nobody holds the pair."""
    other = tmp_path / "other.gguf"
    other.symlink_to(smol)
    roles = EmbeddedPair(
        drafter=SMOL, verifier=other, num_drafts=1, context_tokens=512, registry=registry
    ).roles
    gc.collect()

    servers = {role: endpoint.server for role, endpoint in roles.items()}
    assert servers["drafter"].slots == 1
    assert servers["verifier"].slots == 2
    assert chat(servers["drafter"].base_url)["choices"]
    assert chat(servers["verifier"].base_url)["choices"]
    pids = [server.pid for server in servers.values()]
    del roles, servers
    gc.collect()
    assert not any(map(runs, pids))


@pytest.mark.embedded
def test_a_pair_in_a_with_block_notices_a_crash(registry: str, smol: Path) -> None:
    """A role whose server died is refused with the reason; the block still ends cleanly."""
    with EmbeddedPair(
        drafter=smol, verifier=smol, num_drafts=1, context_tokens=512, registry=registry
    ) as pair:
        drafter = pair.drafter
        request = ChatRequest(messages=(user("Name a colour."),), max_tokens=4)
        crash(drafter.server)
        with pytest.raises(EndpointUnavailableError, match="has ended"):
            _ = pair.roles
        with pytest.raises(EndpointUnavailableError, match="server for .* has ended"):
            asyncio.run(drafter.chat(request, step=Step(kind="draft", index=0)))


def test_what_is_no_model_is_refused_at_construction(tmp_path: Path) -> None:
    """A text file, a missing file and an unknown name never get as far as a process."""
    text = tmp_path / "model.gguf"
    text.write_text("not a model")

    with pytest.raises(WeightsError, match="is not a GGUF file"):
        LlamaServer(text, slots=1)
    with pytest.raises(WeightsError, match="cannot be read: No such file"):
        LlamaServer(tmp_path / "missing.gguf", slots=1)
    with pytest.raises(WeightsError, match="neither a file nor one of the known weights"):
        EmbeddedPair(drafter="gpt-5")
    with pytest.raises(WeightsError, match="is not a GGUF file"):
        EmbeddedPair(verifier=text)


@pytest.mark.parametrize("wrong", [{"num_drafts": 0}, {"context_tokens": -1}, {"threads": 0}])
def test_numbers_below_one_are_refused(wrong: dict[str, int]) -> None:
    """Numbers that can never work are refused at construction."""
    with pytest.raises(ConfigurationError, match="must be at least 1"):
        EmbeddedPair(**wrong)


def test_without_llama_cpp_the_extra_is_named(tmp_path: Path) -> None:
    """Where xllamacpp is not installed, the error says what to install."""
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    # An interpreter without site-packages, which sees nothing but this package.
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from specrag_integrations.local.server import LlamaServer\n"
        "LlamaServer(sys.argv[2], slots=1).start()"
    )
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, root, str(model)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert MissingDependencyError.__name__ in done.stderr
    assert "pip install 'specrag-integrations[local]'" in done.stderr


@pytest.mark.embedded
def test_an_endpoint_of_this_process_is_not_pickled(smol: Path) -> None:
    """Its server ends with the process, so that a copy elsewhere could only fail, and late."""
    with EmbeddedPair(drafter=smol, verifier=smol) as pair:
        endpoint = pair.drafter
        with pytest.raises(pickle.PicklingError, match="start an EmbeddedPair where it is used"):
            pickle.dumps(endpoint)
        assert copy.deepcopy(endpoint) is endpoint
