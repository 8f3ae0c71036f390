"""The least that a question and an answer of given sizes cost on this host: as ZMQ messages, and over a TCP socket."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import zmq

from kvrdma.bench.command import answer_of

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


def _serve_socket(answer_nbytes: int, asked_nbytes: int, pipe: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pipe.send(listening.getsockname()[1])
        connection, _ = listening.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _receive(connection, asked_nbytes):
            connection.sendall(bytes(answer_nbytes))


def _receive(connection: socket.socket, nbytes: int) -> bool:
    """Take so many bytes; False if the connection ended before."""
    while nbytes and (got := len(connection.recv(nbytes))):
        nbytes -= got
    return not nbytes


def _started(serve: Callable[..., None], *arguments: float) -> tuple[multiprocessing.process.BaseProcess, int]:
    """Start a process that answers; give it and the port that it has sent."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(*arguments, theirs), daemon=True)
    process.start()
    return process, int(answer_of(process, pipe, _TIMEOUT_MS / 1e3, "the process that answers"))


class _Answering:
    """A process that answers, and its only client. A context manager."""

    _process: multiprocessing.process.BaseProcess

    def _hang_up(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Ready to ask."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        self._hang_up()
        self._process.join(5)
        self._process.kill()


class Echo(_Answering):
    """A process that answers by ZMQ, and its only client."""

    def __init__(self, asked_nbytes: int, answer_nbytes: int, busy_s: float = 0.0) -> None:
        """Start and connect it; it is busy for ``busy_s`` seconds before each answer."""
        self._process, port = _started(_serve, answer_nbytes, busy_s)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
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

    def _hang_up(self) -> None:
        self._socket.send(b"")
        self._context.destroy(linger=1000)  # the process may still have to be told


class SocketEcho(_Answering):
    """A process that answers over one TCP socket, at once, and its only client."""

    def __init__(self, asked_nbytes: int, answer_nbytes: int) -> None:
        """Start and connect it."""
        self._process, port = _started(_serve_socket, answer_nbytes, asked_nbytes)
        self._socket = socket.create_connection(("127.0.0.1", port), _TIMEOUT_MS / 1e3)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._asked, self._answer_nbytes = bytes(asked_nbytes), answer_nbytes

    def ask(self) -> float:
        """Ask once; give the seconds until the answer is here.

        Raises:
            TimeoutError: none came within 10 s.
        """
        began_s = time.perf_counter()
        self._socket.sendall(self._asked)
        if not _receive(self._socket, self._answer_nbytes):
            raise TimeoutError("no echo")
        return time.perf_counter() - began_s

    def _hang_up(self) -> None:
        self._socket.close()
