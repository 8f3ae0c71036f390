"""The asking side: one DEALER socket, and the reasons why nobody answers."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Mapping
from types import TracebackType
from typing import NoReturn, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvrdma import errors, wire
from kvrdma.errors import (
    AuthenticationError,
    ControlError,
    KVRDMAError,
    MessageError,
    ProtocolVersionError,
    UnreachableError,
)
from kvrdma.sidechannel.context import new_context
from kvrdma.sidechannel.curve import key_pair
from kvrdma.sidechannel.endpoint import Endpoint
from kvrdma.sidechannel.greeting import mechanism_of
from kvrdma.wire import Failed, Message

_REQUEST_ID = struct.Struct("<Q")
_FAILURES_TO_BE_SURE = 3
"""Handshakes that end without a reason; one may be an accident of timing."""
_GREETING_TIMEOUT_S = 1.0
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)


class SideChannelClient:
    """Sends messages to one server and waits for each answer; for one thread."""

    def __init__(self, endpoint: Endpoint, secret: str | None = None, *, refused_s: float = math.inf) -> None:
        """Start to connect; whether anybody is there shows in the first ``request``.

        Args:
            endpoint: of the server.
            secret: the server's, if it has one.
            refused_s: how long a request goes on where nobody listens (connections are refused, or the host is known
                to be out of reach), within its time; all of it by default, for a server that is about to start.

        Raises:
            UnreachableError: the host name is unknown.
            ConfigError: too few descriptors are left.
        """
        self.endpoint = endpoint
        self._refused_s = refused_s
        self._secret = secret
        self._url = endpoint.url()
        self._context = new_context()
        self._last_id = 0
        self._open = False
        self._connect()

    def _connect(self) -> None:
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),
            (zmq.IMMEDIATE, 1),  # nothing is queued for a server that is not there (yet): it would be done later
            (zmq.RCVHWM, 4),
            (zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES),
            (zmq.RECONNECT_IVL, 50),
        ):
            self._socket.setsockopt(option, value)
        if self._secret is not None:
            ours = key_pair(self._secret, "client")
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, key_pair(self._secret, "server").public)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, ours.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, ours.private)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._for_answer, self._for_either = self._poller(zmq.POLLIN), self._poller(zmq.POLLIN | zmq.POLLOUT)
        self._socket.connect(self._url)
        self._open = True
        self._connected = self._ready = False
        self._failures = 0

    def _drop(self) -> None:
        """Close the connection, with everything that was not sent."""
        if self._open:
            self._open = False
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(0)

    def request(self, message: Message, timeout_s: float) -> Message:
        """Send ``message`` and wait for its answer.

        A request that ends without an answer takes its connection with it: what was not sent by then never is,
        and the next request connects anew. What was sent may still be carried out.

        Raises:
            UnreachableError: nobody answered in time, or the connection broke.
            AuthenticationError: the server holds another secret, or only one side has one.
            ProtocolVersionError: the server speaks another version.
            MessageError: the answer cannot be read.
            KVRDMAError: the server's own error, as the class that it was there.
        """
        self._last_id += 1
        parts = [_REQUEST_ID.pack(self._last_id), wire.encode(message)]
        try:
            if not self._open:
                self._connect()
            reply = self._exchange(parts, timeout_s)
        except BaseException:
            self._drop()
            raise
        if isinstance(reply, Failed):
            raise _error_of(reply, self.endpoint)
        return reply

    def _exchange(self, parts: list[bytes], timeout_s: float) -> Message:
        """Send as soon as there is a connection; all of it within the time."""
        deadline = time.monotonic() + timeout_s
        self._refused_at_s = math.inf
        # At once, unless there is news of the connection: who is there now is then not the server that was meant.
        sent = self._ready and not int(self._monitor.events) & zmq.POLLIN and self._send(parts)
        while (left_s := deadline - time.monotonic()) > 0:
            poller = self._for_answer if sent else self._for_either
            ready = dict(poller.poll(max(1, int(left_s * 1e3))))
            state = ready.get(self._socket, 0)
            if state & zmq.POLLIN:
                reply = self._receive()
                if reply is not None:
                    return reply
            elif self._monitor in ready:
                self._follow(recv_monitor_message(self._monitor), deadline)
            elif state & zmq.POLLOUT:
                sent = self._send(parts)
        raise UnreachableError(self._why_silent(timeout_s))

    def _send(self, parts: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(parts, zmq.DONTWAIT)
        except zmq.Again:
            return False  # the connection has just broken: the monitor says why
        return True

    def _poller(self, events: int) -> zmq.Poller:
        """Prepare to wait for the socket and for news of its connection."""
        poller = zmq.Poller()
        poller.register(self._socket, events)
        poller.register(self._monitor, zmq.POLLIN)
        return poller

    def _receive(self) -> Message | None:
        """Take one answer; None for a late answer to an earlier request."""
        frames = self._socket.recv_multipart()
        if len(frames) != 2:
            raise MessageError(f"{self.endpoint} answered in {len(frames)} parts: need 2")
        if frames[0] != _REQUEST_ID.pack(self._last_id):
            return None
        try:
            return wire.decode(frames[1])
        except ProtocolVersionError as error:
            raise ProtocolVersionError(f"{self.endpoint}: {error}") from None

    def _follow(self, event: Mapping[str, object], deadline: float) -> None:
        kind, value = event["event"], event["value"]
        if kind == zmq.EVENT_CONNECTED:
            self._connected = True
        elif kind == zmq.EVENT_CONNECT_RETRIED and not self._connected:
            now_s = time.monotonic()
            self._refused_at_s = min(self._refused_at_s, now_s)
            refused_s = now_s - self._refused_at_s
            if refused_s >= self._refused_s:
                raise UnreachableError(
                    f"nobody listens at {self.endpoint} (refused, or no way there, for {refused_s:.1f} s): its process "
                    "has ended, or check host, port and firewall"
                )
        elif kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._ready = True
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise AuthenticationError(f"{self.endpoint} turned this side away: KVRDMA_SECRET differs")
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._fail_protocol(value)
        elif kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._failures += 1
            if self._failures >= _FAILURES_TO_BE_SURE:
                self._fail_unexplained(deadline)
        elif kind == zmq.EVENT_DISCONNECTED and self._ready:
            raise UnreachableError(f"{self.endpoint} closed the control connection: its process has ended")

    def _fail_protocol(self, value: object) -> None:
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            self._fail_one_sided()
        if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            raise AuthenticationError(f"KVRDMA_SECRET differs from that of {self.endpoint}")
        raise UnreachableError(f"{self.endpoint} answers, but is no kvrdma control channel")

    def _fail_one_sided(self) -> NoReturn:
        ours, theirs = ("has", "has none") if self._secret else ("has none", "has one")
        raise AuthenticationError(f"KVRDMA_SECRET is set on one side only: this side {ours}, {self.endpoint} {theirs}")

    def _fail_unexplained(self, deadline: float) -> None:
        """Say why handshakes end in silence, as far as the listener's own greeting tells."""
        left_s = max(0.05, min(_GREETING_TIMEOUT_S, deadline - time.monotonic()))
        theirs = mechanism_of(self.endpoint, left_s)
        if theirs is None:
            raise UnreachableError(f"{self.endpoint} closes every connection: no kvrdma listens there")
        if theirs != ("CURVE" if self._secret else "NULL"):
            self._fail_one_sided()
        if self._secret:
            raise AuthenticationError(f"KVRDMA_SECRET differs from that of {self.endpoint}")
        raise UnreachableError(f"{self.endpoint} ends every handshake: another program speaks ZMQ there")

    def _why_silent(self, timeout_s: float) -> str:
        if self._ready:
            return f"{self.endpoint} gave no answer within {timeout_s:g} s"
        if self._connected:
            return f"{self.endpoint} accepted the connection, then was silent for {timeout_s:g} s: no kvrdma?"
        return f"nobody listens at {self.endpoint} (tried for {timeout_s:g} s): check host, port and firewall"

    def close(self) -> None:
        """Drop the connection. Idempotent."""
        if not self._context.closed:
            self._drop()
            self._context.destroy(0)

    def __enter__(self) -> Self:
        """Use as a context manager: closed at the end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def _error_of(reply: Failed, endpoint: Endpoint) -> KVRDMAError:
    """Rebuild the server's error; one this side does not know becomes a ``ControlError``."""
    kind = getattr(errors, reply.error, None)
    if not (isinstance(kind, type) and issubclass(kind, KVRDMAError)):
        kind = ControlError
    return kind(f"{endpoint}: {reply.message}")
