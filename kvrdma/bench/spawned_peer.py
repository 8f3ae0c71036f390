"""A link test's peer process on this host, and the control of a peer in this process."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Protocol

from kvrdma.bench.link_peer import LinkPeer
from kvrdma.bench.ready import wait_readable
from kvrdma.errors import ControlError, PeerLostError, UnreachableError
from kvrdma.sidechannel import Endpoint, SideChannelClient
from kvrdma.transport import Device
from kvrdma.wire import CloseLink, Message

_START_S = 30.0
_END_S = 5.0
_STDERR_SHOWN = 4000


class Control(Protocol):
    """How the consumer talks to its peer."""

    def request(self, message: Message, timeout_s: float) -> Message:
        """Send a message and wait for its answer."""
        ...

    def close(self) -> None:
        """End the conversation. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class LocalControl:
    """Calls a peer of the same process, for transports that reach no further."""

    peer: LinkPeer

    def request(self, message: Message, timeout_s: float) -> Message:
        """Answer at once."""
        del timeout_s
        return self.peer.handle(message)

    def close(self) -> None:
        """Close the peer."""
        self.peer.close()


class EstablishedControl:
    """A control connection that has worked: from here on silence means that the peer was lost."""

    def __init__(self, inner: Control) -> None:
        self._inner = inner
        self._lost = ""

    def request(self, message: Message, timeout_s: float) -> Message:
        """Send a message and wait for its answer.

        Raises:
            PeerLostError: the connection broke or no answer came, now or earlier.
            KVRDMAError: the peer's own error.
        """
        if self._lost:
            raise PeerLostError(self._lost)
        try:
            return self._inner.request(message, timeout_s)
        except UnreachableError as error:
            self._lost = f"the peer was lost: {error}"
            raise PeerLostError(self._lost) from error

    def close(self) -> None:
        """Close the connection."""
        self._inner.close()


class SpawnedPeer:
    """A new interpreter that serves one link test, behind a secret of its own.

    It ends when this object is closed, when this process dies, or at its deadline, whichever comes first.
    """

    def __init__(self, device: Device, deadline_s: float) -> None:
        """Start it and connect.

        Raises:
            UnreachableError: it did not come up; carries its traceback.
        """
        secret = secrets.token_hex(32)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the peer
        command = ["-m", "kvrdma.bench.link_peer", "--device", str(device), "--deadline-s", str(deadline_s)]
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, "KVRDMA_SECRET": secret, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C is for the parent, which then closes its end of stdin
        )
        try:
            self._client = SideChannelClient(Endpoint.parse(self._first_line()), secret)
        except BaseException:
            self._end()
            raise
        try:
            self._client.request(CloseLink(0), _START_S)  # connected: from here on its end is noticed at once
        except BaseException:
            self.close()
            raise

    def _first_line(self) -> str:
        assert self.process.stdout is not None
        ready = wait_readable(self.process.stdout, _START_S)
        line = self.process.stdout.readline().decode().strip() if ready else ""
        if not line:
            raise UnreachableError(f"the peer process did not start within {_START_S:g} s{self._last_words()}")
        return line

    def _last_words(self) -> str:
        """Give what it wrote to stderr, its traceback above all."""
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace").strip()
        return f"; it wrote:\n{text[-_STDERR_SHOWN:]}" if text else ""

    def request(self, message: Message, timeout_s: float) -> Message:
        """Send a message and wait for its answer.

        Raises:
            PeerLostError: it is stuck, or has died; then it carries its exit code and traceback.
            KVRDMAError: its own error.
        """
        if self.process.poll() is not None:
            raise self._ended()
        try:
            return self._client.request(message, timeout_s)
        except UnreachableError as error:
            try:
                self.process.wait(1)
            except subprocess.TimeoutExpired:
                raise PeerLostError(f"the peer process is stuck: {error}") from None
            raise self._ended() from error
        except ControlError as error:
            words = self._last_words()
            if words:
                error.add_note(f"the peer process{words}")
            raise

    def _ended(self) -> PeerLostError:
        code = self.process.returncode
        return PeerLostError(f"the peer process ended with exit code {code}{self._last_words()}")

    def close(self) -> None:
        """End the process, by force if it takes longer than 5 s. Idempotent."""
        self._client.close()
        self._end()

    def _end(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._stderr.close()
