"""``Outbox``: small messages to many mailboxes, from one thread that waits for none of them.

Done messages, heartbeats and goodbyes are sent at least once: each is repeated until its receiver has answered
or its time is over. Receivers take duplicates as nothing new. A mailbox that is gone costs a bounded queue and no
other mailbox anything.
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
from kvrdma.errors import KVRDMAError
from kvrdma.sidechannel.curve import KeyPair, key_pair
from kvrdma.sidechannel.endpoint import Endpoint
from kvrdma.wire import Message

_REQUEST_ID = struct.Struct("<Q")
_REPEAT_S = 1.0
_IDLE_S = 60.0
_MAX_PENDING = 10_000
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
    dead: bool = False
    """Its socket takes nothing: a connection that failed by its protocol is not made again by ZMQ."""
    letters: dict[int, _Letter] = field(default_factory=dict)


class Outbox:
    """Delivers messages to mailboxes. ``send`` may be called from any thread."""

    def __init__(self, secret: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the thread; ``secret`` is that of the mailboxes."""
        self._keys: tuple[KeyPair, bytes] | None = None
        if secret is not None:
            self._keys = key_pair(secret, "client"), key_pair(secret, "server").public
        self._clock = clock
        self._context = zmq.Context()
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
        self._thread.start()

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
                poller.register(box.socket, zmq.POLLIN)
            ready = dict(poller.poll(200 if self.pending() else 5000))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            for box in self._boxes.values():
                if box.socket in ready:
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
            if box.dead:
                self._reopen(endpoint, box)
                continue
            for letter in list(box.letters.values()):
                if letter.until_s <= now_s:
                    del box.letters[letter.number]
                    self.lost += 1
                elif letter.sent_s + _REPEAT_S <= now_s:
                    self._transmit(box, letter, now_s)
            if box.letters:
                box.used_s = now_s
            elif now_s - box.used_s > _IDLE_S:
                box.socket.close(0)
                del self._boxes[endpoint]

    def _transmit(self, box: _Box, letter: _Letter, now_s: float) -> None:
        letter.sent_s = now_s
        try:
            box.socket.send_multipart([_REQUEST_ID.pack(letter.number), letter.frame], zmq.DONTWAIT)
        except zmq.Again:
            box.dead = True  # until it is opened anew, a second later

    def _reopen(self, endpoint: Endpoint, box: _Box) -> None:
        if any(letter.sent_s + _REPEAT_S > self._clock() for letter in box.letters.values()):
            return
        box.socket.close(0)
        del self._boxes[endpoint]
        new = self._open(endpoint)
        if new is None:
            self.lost += len(box.letters)
        else:
            new.letters = box.letters

    def _open(self, endpoint: Endpoint) -> _Box | None:
        socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),
            (zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES),
            (zmq.SNDHWM, _MAX_PENDING),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 1000),
        ):
            socket.setsockopt(option, value)
        if self._keys is not None:
            ours, theirs = self._keys
            socket.setsockopt(zmq.CURVE_SERVERKEY, theirs)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, ours.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, ours.private)
        try:
            socket.connect(endpoint.url())
        except (KVRDMAError, zmq.ZMQError) as error:
            _log.warning("mailbox %s cannot be reached: %s", endpoint, error)
            socket.close(0)
            return None
        box = self._boxes[endpoint] = _Box(socket, self._clock())
        return box
