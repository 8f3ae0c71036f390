"""The least that a question and an answer cost on this host: bare ZMQ messages of given sizes, nothing read between."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import zmq

_TIMEOUT_MS = 10_000


def _serve(answer_nbytes: int, busy_s: float, pipe: Connection) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        pipe.send(socket.bind_to_random_port("tcp://127.0.0.1"))
        answer = bytes(answer_nbytes)
        while len(frames := socket.recv_multipart()) > 2:
            until_s = time.perf_counter() + busy_s
            while time.perf_counter() < until_s:
                pass
            socket.send_multipart([*frames[:2], answer])


class Echo:
    """A process that answers, and its only client. A context manager."""

    def __init__(self, asked_nbytes: int, answer_nbytes: int, busy_s: float = 0.0) -> None:
        """Start and connect it; it is busy for ``busy_s`` seconds before each answer."""
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(answer_nbytes, busy_s, theirs), daemon=True)
        self._process.start()
        if not pipe.poll(_TIMEOUT_MS / 1e3):
            raise TimeoutError("the process that answers does not start")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{pipe.recv()}")
        self._asked = [b"id", bytes(asked_nbytes)]

    def ask(self) -> float:
        """Ask once; give the seconds until the answer is here.

        Raises:
            TimeoutError: none came within 10 s.
        """
        began_s = time.perf_counter()
        self._socket.send_multipart(self._asked)
        if not self._socket.poll(_TIMEOUT_MS):
            raise TimeoutError("no echo")
        self._socket.recv_multipart()
        return time.perf_counter() - began_s

    def __enter__(self) -> Self:
        """Ready to ask."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self._socket.send(b"")
        self._process.join(5)
        self._process.kill()
        self._context.destroy(0)
