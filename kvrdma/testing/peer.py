"""A second process for tests: runs functions there and brings results, or tracebacks, home."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvrdma.errors import KVRDMAError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

T = TypeVar("T")


class PeerProcessError(KVRDMAError, AssertionError):
    """A function failed in the peer process, or the process is gone; carries the remote traceback."""


def freeze(pid: int, timeout_s: float = 10.0) -> None:
    """Stop a process and wait until each of its threads stands still.

    The signal alone is not enough: a thread that runs on another core goes on for up to some milliseconds, time
    for an answer that a frozen process does not give.

    Raises:
        ProcessLookupError: no such process.
        TimeoutError: a thread still ran after ``timeout_s`` seconds.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + timeout_s
    while running := [thread for thread in _threads(pid) if thread[1] not in "TtZX"]:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"threads {running} of process {pid} still ran {timeout_s:g} s after SIGSTOP")
        time.sleep(0.0005)


def _threads(pid: int) -> list[tuple[int, str]]:
    """The id of each thread of a process, and the letter of its state."""
    found = []
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):  # it ended meanwhile
            found.append((int(folder.name), (folder / "stat").read_text().rpartition(")")[2].split()[0]))
    return found


def _serve(connection: Connection, environ: Mapping[str, str]) -> None:
    os.environ.update(environ)
    state = SimpleNamespace()
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, function(state, *args)))
        except Exception:  # noqa: BLE001 - whatever it was travels home as text
            connection.send((False, traceback.format_exc()))


class PeerProcess:
    """A spawned process with a namespace of its own; ``call`` runs functions ``f(state, *args)`` there."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Start it; ``environ`` is set there before anything is imported by ``call``."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, dict(environ or {})), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def call(self, function: Callable[..., T], *args: Any, timeout_s: float = 120.0) -> T:  # noqa: ANN401
        """Run ``function(state, *args)`` there and return its result.

        Raises:
            PeerProcessError: it raised (with its traceback), the process died, or the time is over.
        """
        name = getattr(function, "__name__", repr(function))
        try:
            self._connection.send((function, args))
            if not self._connection.poll(timeout_s):
                raise PeerProcessError(f"{name} in process {self.pid} gave no answer within {timeout_s:g} s")
            worked, value = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join(5)
            code = self._process.exitcode
            raise PeerProcessError(f"process {self.pid} died (exit code {code}) while it ran {name}") from error
        if not worked:
            raise PeerProcessError(f"{name} failed in process {self.pid}:\n{value}")
        result: T = value
        return result

    def signal(self, number: int) -> None:
        """Send it a signal; after ``signal.SIGSTOP``, return only when each of its threads stands still."""
        if number == signal.SIGSTOP:
            freeze(self.pid)
        else:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it by SIGKILL and reap it."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """Let it end by itself; kill it if it does not within 10 s."""
        self._connection.close()
        if self._process.is_alive():
            self.signal(signal.SIGCONT)
        self._process.join(10)
        if self._process.exitcode is None:
            self.kill()

    def __enter__(self) -> Self:
        """Use as a context manager: closed at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()
