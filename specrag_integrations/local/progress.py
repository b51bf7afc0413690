"""What a download tells: single lines, and a bar where somebody watches."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_SECONDS = 0.2


def say(line: str) -> None:
    """Write one line to standard error."""
    sys.stderr.write(f"specrag: {line}\n")
    sys.stderr.flush()


@contextmanager
def watched(folder: Path, total_bytes: int, label: str) -> Iterator[None]:
    """Show on a terminal how `folder` grows to `total_bytes`, whoever writes there.

    Looking at the disk serves every source alike, and needs none of their own progress reports.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    done = threading.Event()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total_bytes)

        def follow() -> None:
            while not done.wait(_POLL_SECONDS):
                bar.update(task, completed=min(_bytes_in(folder), total_bytes))

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
        finally:
            done.set()
            follower.join()


def _bytes_in(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        try:
            size += path.stat().st_size
        except FileNotFoundError:  # moved while we looked
            continue
    return size
