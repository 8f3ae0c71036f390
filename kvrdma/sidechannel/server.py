"""The listening side: one ROUTER socket and one thread that answers requests in order."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvrdma import wire
from kvrdma.errors import ConfigError, KVRDMAError, MessageError, ProtocolVersionError
from kvrdma.sidechannel.backlog import BacklogWatch
from kvrdma.sidechannel.context import new_context
from kvrdma.sidechannel.curve import admit, key_pair
from kvrdma.sidechannel.endpoint import Endpoint
from kvrdma.sidechannel.holder import port_holder
from kvrdma.thread_start import start_thread
from kvrdma.wire import Failed, Message

Handler = Callable[[Message], Message]

_ZAP_URL = "inproc://zeromq.zap.01"
_CLOSE_TIMEOUT_S = 5.0
_MAX_WAITING = 4
"""Requests of one connection that wait here; the others wait in the kernel's buffers and at their sender."""
_MAX_UNSENT = 64
"""Answers to one connection that wait to be sent; the others are dropped."""
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ServerCounts:
    """What a server has seen; written by its thread only."""

    answered: int = 0
    malformed: int = 0
    """Frames that were no message: damaged, too long, of another version."""
    rejected: int = 0
    """Clients turned away for want of the secret."""


class SideChannelServer:
    """Listens at an endpoint and answers each message by ``handler(message)``.

    The handler runs in the server's thread. A ``KVRDMAError``, ``OSError`` or ``MemoryError`` from it becomes
    a ``Failed`` answer; any other exception is a defect: it ends the thread and comes out of ``close``.

    What peers can make it hold: 4 requests of a connection, each of 2 frames of at most 4 MiB; 64 answers of a
    connection that reads none. A peer whose messages are no such requests, or never end, is shut out when it has
    sent 64 MiB that were not taken, or the most where all have sent 256 MiB, by a look every 50 ms: what a fast
    link brings in that time comes on top. The number of connections is bounded by the descriptors of the process
    only, two of which each takes. With a secret, those who do not hold it are turned away before their first message.
    """

    def __init__(self, bind: Endpoint, handler: Handler, secret: str | None = None, *, insecure: bool = False) -> None:
        """Bind and start answering.

        Args:
            bind: where to listen; port 0 picks a free one, see ``endpoint``.
            handler: answers one message.
            secret: clients must hold the same.
            insecure: listen beyond loopback without a secret all the same.

        Raises:
            ConfigError: beyond loopback without a secret, or the endpoint cannot be bound; names it.
            UnreachableError: the host name is unknown.
        """
        if secret is None and not insecure and not bind.is_loopback():
            raise ConfigError(
                f"{bind} can be reached from other hosts: set KVRDMA_SECRET on both sides, or pass "
                "--insecure on a network where everyone may read this process's memory"
            )
        self._pid = os.getpid()
        self.counts = ServerCounts()
        self._handler = handler
        self._client_public = key_pair(secret, "client").public if secret else None
        self._context = new_context()
        self._defect: BaseException | None = None
        self._stop_url = f"inproc://stop-{id(self)}"
        try:
            self._stopping = self._open(zmq.PAIR, self._stop_url)
            self._stop = self._open(zmq.PAIR, None)  # now: later there may be no descriptor for it
            self._stop.connect(self._stop_url)
            self._router = self._open(zmq.ROUTER, None)
            self._listen(bind, secret)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name=f"kvrdma control {self.endpoint}", daemon=True)
        try:
            start_thread(self._thread)
        except ConfigError:
            self._end_watch()
            self._context.destroy(linger=0)
            raise

    def _open(self, kind: int, url: str | None) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.setsockopt(zmq.LINGER, 500)
        if url:
            opened.bind(url)
        return opened

    def _listen(self, bind: Endpoint, secret: str | None) -> None:
        router = self._router
        router.setsockopt(zmq.IPV6, 1)
        router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        router.setsockopt(zmq.RCVHWM, _MAX_WAITING)
        router.setsockopt(zmq.SNDHWM, _MAX_UNSENT)
        router.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        router.setsockopt(zmq.SNDTIMEO, 0)
        self._zap: zmq.Socket[bytes] | None = None
        if secret is not None:
            self._zap = self._open(zmq.REP, _ZAP_URL)
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, key_pair(secret, "server").private)
            router.setsockopt(zmq.ZAP_DOMAIN, b"kvrdma")
        url = bind.url()
        self._watch = BacklogWatch(router)
        try:
            router.bind(url)
        except zmq.ZMQError as error:
            self._end_watch()
            holder = port_holder(bind.port) if error.errno == errno.EADDRINUSE else ""
            raise ConfigError(
                f"cannot listen at {bind}: {error.strerror}{', held by ' if holder else ''}{holder}; choose another "
                "port or an address of this host",
                code=error.errno,
            ) from error
        last = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.endpoint = Endpoint(bind.host, int(last.rpartition(":")[2]))

    def _end_watch(self) -> None:
        self._router.disable_monitor()
        self._watch.join(_CLOSE_TIMEOUT_S)

    @property
    def alive(self) -> bool:
        """Whether it still answers: until ``close``, or a defect of the handler."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop listening, within 5 s. Idempotent; does nothing in a forked child, which has no part in it.

        Raises:
            BaseException: whatever the handler ended the thread with.
        """
        if os.getpid() != self._pid:
            return
        if self._thread.is_alive():
            self._stop.send(b"")
            self._thread.join(_CLOSE_TIMEOUT_S)
        if not self._thread.is_alive() and not self._context.closed:
            self._context.destroy(linger=500)
        defect, self._defect = self._defect, None
        if defect is not None:
            raise defect

    def _run(self) -> None:
        try:
            self._answer_until_stopped()
        except BaseException as error:  # noqa: BLE001 - kept for close(), and said at once
            self._defect = error
            _log.exception("control channel at %s ended by a defect", self.endpoint)
        finally:
            self._end_watch()
            for each in (self._router, self._zap, self._stopping):
                if each is not None:
                    each.close()

    def _answer_until_stopped(self) -> None:
        poller = zmq.Poller()
        for each in (self._router, self._zap, self._stopping):
            if each is not None:
                poller.register(each, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stopping in ready:
                return
            if self._zap is not None and self._zap in ready:
                self._check_client(self._zap)
            if self._router in ready:
                self._serve_one()

    def _serve_one(self) -> None:
        """Take one message from the queue and answer it."""
        frames = self._router.recv_multipart(copy=False)
        try:
            self._answer([frame.bytes for frame in frames])
        finally:  # after the answer: somebody waits for that
            with contextlib.suppress(zmq.ZMQError):  # not told of peers that speak a ZMTP before 3: none of ours
                self._watch.taken(int(frames[-1].get(zmq.SRCFD)))

    def _check_client(self, zap: zmq.Socket[bytes]) -> None:
        reply = admit(zap.recv_multipart(), self._client_public or b"")
        self.counts.rejected += reply[2] != b"200"
        zap.send_multipart(reply)

    def _answer(self, frames: list[bytes]) -> None:
        """Answer ``[identity, request id, frame]``."""
        try:
            request = _decode(frames[1:])
        except (MessageError, ProtocolVersionError) as error:
            self.counts.malformed += 1
            reply: Message = _failed(error)
        else:
            reply = self._reply_to(request)
            self.counts.answered += 1
        try:
            self._router.send_multipart([*frames[:1], *(frames[1:2] or [b""]), wire.encode(reply)])
        except zmq.ZMQError as error:
            _log.warning("control channel at %s could not answer a peer: %s", self.endpoint, error)

    def _reply_to(self, request: Message) -> Message:
        try:
            return self._handler(request)
        except (KVRDMAError, OSError, MemoryError) as error:
            return _failed(error)


def _decode(parts: list[bytes]) -> Message:
    if len(parts) != 2:
        raise MessageError(f"control message has {len(parts)} parts: need 2, a request id and a frame")
    return wire.decode(parts[1])


def _failed(error: BaseException) -> Failed:
    name = type(error).__name__ if isinstance(error, KVRDMAError) else "ControlError"
    text = str(error) or type(error).__name__
    return Failed(name, text[:16384])
