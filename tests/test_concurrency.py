"""The same answers under any number of loops, threads and processes, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from scripted_server import Fault, Reply

from specrag_integrations import Endpoint, SpeculativeRAG
from specrag_integrations.models import ChatRequest, Step, user
from specrag_integrations.portal import _CLEAN_UP_SECONDS, portal

REQUEST = ChatRequest(messages=(user("Who wrote Emma?"),), max_tokens=20)
STEP = Step(kind="draft")
QUESTION = "Who wrote Emma?"
PASSAGES = [
    "Emma is a novel about youthful hubris, published in December 1815.",
    "Jane Austen wrote six major novels in the early nineteenth century.",
    "The novel Emma was written by Jane Austen and dedicated to the Prince Regent.",
    "Clueless is a film of 1995 that retells the plot of Emma.",
    "Charlotte Bronte wrote Jane Eyre under a pen name.",
    "Hartfield is the estate where the heroine of the novel lives.",
]

# What every script in a process of its own begins with.
PREAMBLE = f"""
import asyncio, gc, json, os, sys, threading, time
from specrag_integrations import Endpoint, SpeculativeRAG
from specrag_integrations.models import ChatRequest, Step, user

URL, QUESTION, PASSAGES = sys.argv[1], {QUESTION!r}, {PASSAGES!r}
REQUEST, STEP = ChatRequest(messages=(user(QUESTION),), max_tokens=20), Step(kind="draft")

def make():
    endpoint = Endpoint(URL, "scripted")
    return SpeculativeRAG(drafter=endpoint, verifier=endpoint)

def essence(answer):
    drafts = [(draft.index, draft.answer) for draft in answer.trace.drafts]
    scores = sorted((score.draft, score.value) for score in answer.trace.scores)
    passages = [passage.text for passage in answer.passages]
    return json.dumps([answer.text, answer.rationale, answer.tier, passages, drafts, scores])
"""


def start(server, script, *flags):
    """Start a script in a process of its own; its output is read with `ended`."""
    code = PREAMBLE + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code, server.base_url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process, timeout=60):
    """Return the lines a script wrote, once it has ended well and without a warning."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the script hangs\n{out}\n{err}")
    assert (process.returncode, err) == (0, ""), err
    return out.splitlines()


def essence(answer):
    scope = {"json": json}
    exec(PREAMBLE[PREAMBLE.index("def essence") :], scope)  # noqa: S102 - the scripts' own words
    return scope["essence"](answer)


@pytest.fixture
def connect():
    """Make endpoints that are closed at the end."""
    made = []

    def make(server, **options):
        made.append(Endpoint(server.base_url, "scripted", **options))
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


@pytest.fixture
def rag(server, connect):
    """Return an engine whose two roles share one endpoint."""
    endpoint = connect(server)
    return SpeculativeRAG(drafter=endpoint, verifier=endpoint)


def others():
    return asyncio.all_tasks() - {asyncio.current_task()}


def portal_is_idle():
    async def idle():
        for _ in range(20):  # finalisers of generators take a few turns of the loop
            await asyncio.sleep(0)
        # A trial request may go on: it serves later questions.
        return {task.get_coro().__qualname__ for task in others()} <= {"Endpoint._try"}

    return portal.run(idle())


def in_threads(count, work):
    with ThreadPoolExecutor(count) as pool:
        return [future.result(timeout=60) for future in [pool.submit(work) for _ in range(count)]]


# ---------------------------------------------------------------- one limit, one client


def test_one_limit_holds_across_loops_and_threads(scripted, connect):
    """Thirty calls from three loops in three threads never exceed it, and do use it."""
    server = scripted("fine", delay=0.03)
    endpoint = connect(server, max_concurrency=4)

    async def ten():
        chats = [endpoint.chat(REQUEST, step=STEP) for _ in range(8)]
        streams = [last(endpoint.stream(REQUEST, step=STEP)) for _ in range(2)]
        return await asyncio.gather(*chats, *streams)

    async def last(stream):
        return [delta async for delta in stream][-1].reply

    for replies in in_threads(3, lambda: asyncio.run(ten())):
        assert [reply.text for reply in replies] == ["fine"] * 10
    assert server.max_in_flight == 4


def test_one_client_serves_every_caller(server, connect):
    """Two `asyncio.run`, eight threads, a running loop: one client, few connections."""
    made = []

    def factory(**options):
        made.append(openai.AsyncOpenAI(**options))
        return made[-1]

    endpoint = connect(server, client_factory=factory)

    async def mixed():
        await endpoint.chat(REQUEST, step=STEP)
        portal.run(endpoint.chat(REQUEST, step=STEP))  # synchronous code inside a running loop
        await endpoint.chat(REQUEST, step=STEP)

    asyncio.run(mixed())
    asyncio.run(mixed())
    in_threads(8, lambda: portal.run(endpoint.chat(REQUEST, step=STEP)))
    assert len(made) == 1
    assert len(server.chats) == 14
    assert len(server.connections) <= 8


def test_first_calls_at_once_make_one_client(server, connect):
    """The first use from many threads is no race."""
    made = []

    def factory(**options):
        made.append(openai.AsyncOpenAI(**options))
        return made[-1]

    endpoint = connect(server, client_factory=factory)
    in_threads(8, lambda: portal.run(endpoint.chat(REQUEST, step=STEP)))
    assert len(made) == 1


# ---------------------------------------------------------------- the same answers everywhere


def test_the_same_answer_however_it_is_asked_for(server, rag):
    """Sync, async twice, streamed, from eight threads, and inside a running loop."""
    expected = essence(rag.ask(QUESTION, PASSAGES))

    async def inside():
        return rag.ask(QUESTION, PASSAGES)

    async def streamed():
        return [event async for event in rag.astream(QUESTION, PASSAGES)][-1].answer

    answers = [
        asyncio.run(rag.aask(QUESTION, PASSAGES)),
        asyncio.run(rag.aask(QUESTION, PASSAGES)),
        asyncio.run(inside()),
        asyncio.run(streamed()),
        list(rag.stream(QUESTION, PASSAGES))[-1].answer,
        *in_threads(8, lambda: rag.ask(QUESTION, PASSAGES)),
    ]
    assert [essence(answer) for answer in answers] == [expected] * len(answers)
    assert server.wait_idle()
    assert portal_is_idle()


def test_a_fork_answers_as_its_parent_does(server):
    """The child opens connections of its own, k-means does not hang, and the parent goes on."""
    script = """
    made = []
    def factory(**options):
        import openai
        made.append(os.getpid())
        return openai.AsyncOpenAI(**options)

    endpoint = Endpoint(URL, "scripted", client_factory=factory)
    rag = SpeculativeRAG(drafter=endpoint, verifier=endpoint)
    answers = [essence(rag.ask(QUESTION, PASSAGES))]
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        found = [essence(rag.ask(QUESTION, PASSAGES))]
        found.append(essence(asyncio.run(rag.aask(QUESTION, PASSAGES))))
        assert made[1:] == [os.getpid()], made
        rag.close()
        found.append(essence(rag.ask(QUESTION, PASSAGES)))
        os.write(writing, json.dumps(found).encode())
        os.close(writing)
        os._exit(0)
    os.close(writing)
    answers += [essence(rag.ask(QUESTION, PASSAGES)) for _ in range(3)]
    with os.fdopen(reading) as pipe:
        answers += json.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    answers.append(essence(rag.ask(QUESTION, PASSAGES)))
    assert made == [os.getpid()], made
    print(len(answers), len(set(answers)))
    rag.close()
    """
    # Python 3.12 warns of any fork beside threads, which is what this is about.
    assert ended(start(server, script, "-W", "ignore::DeprecationWarning")) == ["8 1"]


@pytest.mark.filterwarnings("ignore")  # what Jupyter's own packages say is not our concern
def test_three_calls_in_a_notebook(server, rag):
    """A real kernel, whose loop always runs: sync, async and sync again."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = [
        PREAMBLE.replace("sys.argv[1]", repr(server.base_url)) + "rag = make()",
        "print(essence(rag.ask(QUESTION, PASSAGES)))",
        "print(essence(await rag.aask(QUESTION, PASSAGES)))",
        "print(essence(list(rag.stream(QUESTION, PASSAGES))[-1].answer))\nrag.close()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    assert outputs[0] == []
    expected = essence(rag.ask(QUESTION, PASSAGES)) + "\n"
    assert [[output.text for output in cell] for cell in outputs[1:]] == [[expected]] * 3


# ---------------------------------------------------------------- cancellation


@pytest.mark.parametrize("mode", ["chat", "stream"])
def test_a_cancelled_request_is_aborted_and_frees_its_place(scripted, connect, mode):
    """The server sees the disconnect, the next request goes out, and no task is left."""
    server = scripted(lambda _, call: Fault(hang=True) if call == 0 else "next")
    endpoint = connect(server, max_concurrency=1)

    async def main():
        async def read():
            async for _ in endpoint.stream(REQUEST, step=STEP):
                pass

        work = endpoint.chat(REQUEST, step=STEP) if mode == "chat" else read()
        task = asyncio.create_task(work)
        assert await asyncio.to_thread(server.wait_for, lambda s: s.in_flight == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not others()
        return await endpoint.chat(REQUEST, step=STEP)

    assert asyncio.run(main()).text == "next"
    assert server.wait_for(lambda s: s.aborted == 1)
    assert portal_is_idle()


def test_a_cancelled_caller_in_the_queue_leaves_it(scripted, connect):
    """Whoever waits for a place and gives up does not take it later."""
    server = scripted("fine", delay=0.2)
    endpoint = connect(server, max_concurrency=1)

    async def main():
        tasks = [asyncio.create_task(endpoint.chat(REQUEST, step=STEP)) for _ in range(3)]
        assert await asyncio.to_thread(server.wait_for, lambda s: s.in_flight == 1)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(main())
    assert [type(result).__name__ for result in results] == [
        "ChatReply",
        "CancelledError",
        "ChatReply",
    ]
    assert len(server.chats) == 2


def test_a_cancelled_lookup_does_not_fail_those_who_wait(scripted, connect):
    """The next in line asks for the model's name instead."""
    server = scripted(faults={"/v1/models": Fault(hang=True)})
    endpoint = Endpoint(server.base_url)

    async def main():
        first = asyncio.create_task(endpoint.chat(REQUEST, step=STEP))
        assert await asyncio.to_thread(server.wait_for, lambda s: s.requests)
        second = asyncio.create_task(endpoint.chat(REQUEST, step=STEP))
        await asyncio.sleep(0.05)
        server.faults.clear()
        first.cancel()
        return await second

    assert asyncio.run(main()).model == "scripted"
    endpoint.close()


@pytest.mark.parametrize("mode", ["aask", "astream", "stream"])
def test_a_question_given_up_leaves_nothing_in_flight(scripted, connect, mode):
    """All drafts are aborted at the server, however the caller leaves."""
    server = scripted(Fault(hang=True))
    endpoint = connect(server)
    rag = SpeculativeRAG(drafter=endpoint, verifier=endpoint, num_drafts=3)

    async def main():
        if mode == "aask":
            task = asyncio.create_task(rag.aask(QUESTION, PASSAGES))
            assert await asyncio.to_thread(server.wait_for, lambda s: s.in_flight == 3)
            task.cancel()
            await asyncio.wait([task])
        else:
            events = rag.astream(QUESTION, PASSAGES)
            await anext(events)
            assert await asyncio.to_thread(server.wait_for, lambda s: s.in_flight == 3)
            await events.aclose()
        assert not others()

    if mode == "stream":
        events = rag.stream(QUESTION, PASSAGES)
        next(events)
        assert server.wait_for(lambda s: s.in_flight == 3)
        events.close()
    else:
        asyncio.run(main())
    assert server.wait_for(lambda s: s.aborted == 3)
    assert server.wait_idle()
    assert portal_is_idle()


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ there")
@pytest.mark.parametrize("mode", ["ask", "asyncio.run"])
def test_an_interrupt_ends_a_question_promptly(scripted, mode):
    """Ctrl-C raises KeyboardInterrupt at once, and the server sees every request end."""
    server = scripted(Fault(hang=True))
    script = f"""
    rag, endpoint = make(), Endpoint(URL, "scripted")

    async def five():
        await asyncio.gather(*(endpoint.chat(REQUEST, step=STEP) for _ in range(5)))

    try:
        rag.ask(QUESTION, PASSAGES) if {mode!r} == "ask" else asyncio.run(five())
    except KeyboardInterrupt:
        print(time.time())
    """
    process = start(server, script)
    assert server.wait_for(lambda s: s.in_flight == 5, timeout=60)
    sent = time.time()
    process.send_signal(signal.SIGINT)
    assert server.wait_for(lambda s: s.aborted == 5)
    (raised,) = ended(process)
    assert float(raised) - sent < _CLEAN_UP_SECONDS / 2
    assert server.wait_idle()


# ---------------------------------------------------------------- nothing left behind


def test_a_forgotten_endpoint_closes_its_connections(server):
    """No close, no warning: also with a key callable, after a stream and after an error."""
    script = """
    from specrag_integrations.errors import EndpointError
    from specrag_integrations.portal import portal

    async def pieces(endpoint):
        return [delta async for delta in endpoint.stream(REQUEST, step=STEP)]

    for number in range(3):
        key = (lambda: "key") if number == 1 else "key"
        endpoint = Endpoint(URL, "scripted", api_key=key, max_attempts=1)
        asyncio.run(endpoint.chat(REQUEST, step=STEP))
        asyncio.run(pieces(endpoint))
        try:
            asyncio.run(Endpoint(URL + "/nowhere", "x").chat(REQUEST, step=STEP))
        except EndpointError:
            pass
    del endpoint

    def sockets():
        return [path for path in map(link, os.listdir("/proc/self/fd")) if "socket" in path]

    for _ in range(100):
        gc.collect()
        if len(sockets()) == 2:
            break
        portal.run(asyncio.sleep(0.05))
    print(len(sockets()))
    """
    link = """
    def link(name):
        try:
            return os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            return ""
    """
    if not os.path.isdir("/proc/self/fd"):  # noqa: PTH112 - no path of ours
        pytest.skip("counts sockets in /proc")
    lines = ended(start(server, textwrap.dedent(link) + textwrap.dedent(script), "-W", "always"))
    assert lines == ["2"]  # the loop's own pair, which wakes it up


def test_an_endpoint_is_garbage_when_nobody_holds_it(server):
    """Neither its client nor its finaliser keeps it alive, whatever it was used for."""
    for key in ("text", lambda: "from-a-callable"):
        endpoint = Endpoint(server.base_url, "scripted", api_key=key)
        asyncio.run(endpoint.chat(REQUEST, step=STEP))
        endpoint.close()
        asyncio.run(endpoint.chat(REQUEST, step=STEP))
        seen = weakref.ref(endpoint)
        del endpoint
        portal.run(asyncio.sleep(0))
        gc.collect()
        assert seen() is None


def test_leaving_without_closing_is_quiet(server):
    """A script that just ends prints nothing, warnings shown."""
    script = """
    rag = make()
    print(rag.ask(QUESTION, PASSAGES).text == asyncio.run(rag.aask(QUESTION, PASSAGES)).text)
    """
    assert ended(start(server, script, "-W", "always")) == ["True"]


@pytest.mark.parametrize("seconds", [0, 1])
def test_a_stream_that_is_still_held_does_not_keep_the_interpreter(server, seconds):
    """A script that ends in the middle of a synchronous stream ends, and says nothing.

    Also where somebody's exit handler takes its time while no thread can be started any more.
    """
    script = f"""
    import atexit
    atexit.register(time.sleep, {seconds})
    held = make().stream(QUESTION, PASSAGES)
    print(next(held).type)
    """
    assert ended(start(server, script)) == ["passages"]


def test_reopening_many_times_keeps_one_client(server, connect):
    """Closed clients are let go."""
    clients = weakref.WeakSet()

    def factory(**options):
        client = openai.AsyncOpenAI(**options)
        clients.add(client._client)
        return client

    endpoint = connect(server, client_factory=factory)
    for _ in range(5):
        asyncio.run(endpoint.chat(REQUEST, step=STEP))
        endpoint.close()
    gc.collect()
    assert len(clients) <= 1


# ---------------------------------------------------------------- the caller's loop


def test_the_first_question_does_not_block_the_callers_loop(server):
    """Imports, k-means and all I/O of a fresh process happen elsewhere.

    That nothing heavy is imported in the caller's thread is what is asserted; the longest gap
    between two heartbeats depends on the machine and is only bounded generously.
    """
    script = """
    import builtins

    heavy, real_import = [], builtins.__import__

    def noting(name, *rest):
        top = name.partition(".")[0]
        if top in {"openai", "sklearn", "scipy", "tenacity"} and top not in sys.modules:
            heavy.append((top, threading.current_thread() is threading.main_thread()))
        return real_import(name, *rest)

    builtins.__import__ = noting
    rag = make()

    async def main():
        beats = [time.perf_counter()]

        async def beat():
            while True:
                await asyncio.sleep(0.001)
                beats.append(time.perf_counter())

        heart = asyncio.create_task(beat())
        await rag.aask(QUESTION, PASSAGES)
        heart.cancel()
        return max(after - before for before, after in zip(beats, beats[1:]))

    gap = asyncio.run(main())
    print(json.dumps([sorted(set(heavy)), round(gap, 3)]))
    rag.close()
    """
    heavy, gap = json.loads(ended(start(server, script))[-1])
    assert [name for name, in_main in heavy if in_main] == []
    assert {name for name, _ in heavy} >= {"openai", "sklearn", "tenacity"}
    assert gap < 0.5


def test_other_work_goes_on_while_an_endpoint_waits(scripted, connect):
    """Two questions on one loop overlap: neither blocks it."""
    both = asyncio.Barrier(2)

    async def respond(body, call):
        await both.wait()
        return Reply("together")

    endpoint = connect(scripted(respond))

    async def main():
        return await asyncio.gather(*(endpoint.chat(REQUEST, step=STEP) for _ in range(2)))

    assert [reply.text for reply in asyncio.run(main())] == ["together"] * 2
