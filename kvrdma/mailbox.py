"""``Outbox``: small messages to many mailboxes, from one thread that waits for none of them.

Done messages, heartbeats and goodbyes are sent at least once: each is repeated until its receiver has answered
or its time is over. Receivers take duplicates as nothing new. A mailbox that is gone costs a bounded queue and no
other mailbox anything; what was given up before it came back does not reach it, unless its system had it already.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from kvrdma import wire
from kvrdma.errors import ConfigError, KVRDMAError
from kvrdma.sidechannel.context import new_context
from kvrdma.sidechannel.curve import KeyPair, key_pair
from kvrdma.sidechannel.endpoint import Endpoint
from kvrdma.thread_start import start_thread
from kvrdma.wire import Message

_REQUEST_ID = struct.Struct("<Q")
_REPEAT_S = 1.0
_IDLE_S = 60.0
_MAX_PENDING = 10_000
_MAX_UNSENT = 100
"""Messages in ZMQ's queue of a mailbox that is connected and does not read."""
_REOPEN_S = 5.0
_CLOSE_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Letter:
    number: int
    frame: bytes
    until_s: float
    sent_s: float = float("-inf")


@dataclass(slots=True)
class _Box:
    socket: zmq.Socket[bytes]
    used_s: float
    blocked_s: float | None = None
    """Since when its socket takes nothing: not connected (yet), or a full queue."""
    letters: dict[int, _Letter] = field(default_factory=dict)


class Outbox:
    """Delivers messages to mailboxes. ``send`` may be called from any thread."""

    def __init__(self, secret: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the thread; ``secret`` is that of the mailboxes."""
        self._keys: tuple[KeyPair, bytes] | None = None
        if secret is not None:
            self._keys = key_pair(secret, "client"), key_pair(secret, "server").public
        self._clock = clock
        self._context = new_context()
        self._queue: deque[tuple[Endpoint, Message, float]] = deque()
        self._boxes: dict[Endpoint, _Box] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False
        self._stop_s: float | None = None
        self._numbers = 0
        self.lost = 0
        """Messages that were not answered in time or did not fit the queue."""
        self._thread = threading.Thread(target=self._run, name="kvrdma outbox", daemon=True)
        try:
            start_thread(self._thread)
        except ConfigError:
            os.close(self._wake)
            self._context.destroy(linger=0)
            raise

    def send(self, endpoint: Endpoint, message: Message, keep_trying_s: float) -> None:
        """Queue a message; it is given up after ``keep_trying_s`` seconds without an answer."""
        with self._lock:
            if self._closed or len(self._queue) >= _MAX_PENDING:
                self.lost += 1
                return
            self._queue.append((endpoint, message, self._clock() + keep_trying_s))
            os.eventfd_write(self._wake, 1)

    def pending(self) -> int:
        """Count what has not been answered yet."""
        return len(self._queue) + sum(len(box.letters) for box in list(self._boxes.values()))

    def close(self) -> None:
        """Give what is pending one more second, then drop it. Idempotent."""
        if self._thread.is_alive():
            self._stop_s = self._clock() + _CLOSE_S
            os.eventfd_write(self._wake, 1)
            self._thread.join(_CLOSE_S + 1)
        with self._lock:
            if self._closed:
                return
            self._closed = True  # whoever sends from now on must not write into a descriptor that was closed
        if not self._thread.is_alive():
            self._context.destroy(linger=0)
            os.close(self._wake)

    def _run(self) -> None:
        while self._stop_s is None or (self._clock() < self._stop_s and self.pending()):
            poller = zmq.Poller()
            poller.register(self._wake, zmq.POLLIN)
            for box in self._boxes.values():
                poller.register(box.socket, zmq.POLLIN if box.blocked_s is None else zmq.POLLIN | zmq.POLLOUT)
            ready = dict(poller.poll(200 if self.pending() else 5000))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            for box in self._boxes.values():
                if ready.get(box.socket, 0) & zmq.POLLIN:
                    self._take_answers(box)
            self._post_new()
            self._repeat_and_drop(self._clock())
        for box in self._boxes.values():
            box.socket.close(0)

    def _take_answers(self, box: _Box) -> None:
        while int(box.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            frames = box.socket.recv_multipart()
            if len(frames[0]) == _REQUEST_ID.size:
                box.letters.pop(_REQUEST_ID.unpack(frames[0])[0], None)

    def _post_new(self) -> None:
        while self._queue:
            endpoint, message, until_s = self._queue.popleft()
            box = self._boxes.get(endpoint) or self._open(endpoint)
            if box is None or len(box.letters) >= _MAX_PENDING:
                self.lost += 1
                continue
            self._numbers += 1
            box.letters[self._numbers] = _Letter(self._numbers, wire.encode(message), until_s)

    def _repeat_and_drop(self, now_s: float) -> None:
        for endpoint, box in list(self._boxes.items()):
            stale = self._expire(box, now_s)
            # A connection that failed by its protocol is not made again by ZMQ.
            if stale or (box.blocked_s is not None and box.blocked_s + _REOPEN_S <= now_s):
                self._reopen(endpoint, box)
                continue
            due = [letter for letter in box.letters.values() if letter.sent_s + _REPEAT_S <= now_s]
            for letter in due:
                if not self._transmit(box, letter, now_s):
                    break
            if box.letters:
                box.used_s = now_s
            elif now_s - box.used_s > _IDLE_S:
                box.socket.close(0)
                del self._boxes[endpoint]

    def _expire(self, box: _Box, now_s: float) -> bool:
        """Give up what is too late; true if a copy of it may still wait in the socket."""
        late = [letter for letter in box.letters.values() if letter.until_s <= now_s]
        for letter in late:
            del box.letters[letter.number]
        self.lost += len(late)
        return any(letter.sent_s > float("-inf") for letter in late)

    def _transmit(self, box: _Box, letter: _Letter, now_s: float) -> bool:
        try:
            box.socket.send_multipart([_REQUEST_ID.pack(letter.number), letter.frame], zmq.DONTWAIT)
        except zmq.Again:
            if box.blocked_s is None:
                box.blocked_s = now_s
            return False
        letter.sent_s, box.blocked_s = now_s, None
        return True

    def _reopen(self, endpoint: Endpoint, box: _Box) -> None:
        """Close the socket, with everything that was not sent, and connect anew."""
        box.socket.close(0)
        del self._boxes[endpoint]
        new = self._open(endpoint)
        if new is None:
            self.lost += len(box.letters)
            return
        new.letters = box.letters
        for letter in new.letters.values():
            letter.sent_s = float("-inf")

    def _open(self, endpoint: Endpoint) -> _Box | None:
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:  # descriptors have run out
            _log.warning("mailbox %s cannot be reached: %s", endpoint, error)
            return None
        try:
            self._connect(socket, endpoint)
        except (KVRDMAError, zmq.ZMQError) as error:
            _log.warning("mailbox %s cannot be reached: %s", endpoint, error)
            socket.close(0)
            return None
        box = self._boxes[endpoint] = _Box(socket, self._clock())
        return box

    def _connect(self, socket: zmq.Socket[bytes], endpoint: Endpoint) -> None:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),
            (zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES),
            (zmq.IMMEDIATE, 1),  # nothing is queued for a mailbox that is not there (yet): it would come late
            (zmq.SNDHWM, _MAX_UNSENT),
            (zmq.RCVHWM, _MAX_UNSENT),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 1000),
        ):
            socket.setsockopt(option, value)
        if self._keys is not None:
            ours, theirs = self._keys
            socket.setsockopt(zmq.CURVE_SERVERKEY, theirs)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, ours.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, ours.private)
        socket.connect(endpoint.url())
