"""The two ends of a contender, and the loop that serves one of them over stdin and stdout.

One line of JSON per request and per answer. The same loop runs in kvrdma's interpreter and in a rival's
(numpy is all it needs), so every contender moves the same rows and is measured by the same clock.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from typing import Any, Protocol, TextIO

import numpy as np

from kvrdma.bench import patterns
from kvrdma.bench.patterns import POISON, Bytes, Case, Shape

JSON = dict[str, Any]
READ_DEADLINE_S = 60.0


class End(Protocol):
    """One process's half of a contender."""

    def open(self, pool: Bytes) -> bytes:
        """Register the pool; give what the other end's ``connect`` needs."""
        ...

    def connect(self, meta: bytes, remote_pool_addr: int) -> None:
        """Reach the other end (readers only)."""
        ...

    def load(self, case: Case) -> None:
        """Prepare to read the case; not timed."""
        ...

    def read(self) -> float:
        """Read the loaded case once and wait for its end.

        Returns:
            Seconds for which posting held the caller.
        """
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class Session:
    """Answers the requests of one process's pipe."""

    def __init__(self, end: End) -> None:
        self._end = end
        self._pool: Bytes = np.empty(0, np.uint8)
        self._case: Case | None = None

    def answer(self, request: JSON) -> JSON:
        """Carry out one request; its ``op`` names the method."""
        op = request.pop("op")
        reply: JSON = getattr(self, f"_op_{op}")(**request)
        return reply

    def _op_open(self, nbytes: int, generation: int) -> JSON:
        buffer = np.empty(nbytes + 4096, np.uint8)
        start = -buffer.ctypes.data % 4096
        self._pool = buffer[start : start + nbytes]
        self._op_fill(generation)
        meta = self._end.open(self._pool)
        return {"meta": base64.b64encode(meta).decode(), "addr": self._pool.ctypes.data, "pid": os.getpid()}

    def _op_fill(self, generation: int) -> JSON:
        if generation:
            patterns.fill(self._pool, generation)
        else:
            self._pool[:] = POISON
        return {}

    def _op_connect(self, meta: str, addr: int) -> JSON:
        self._end.connect(base64.b64decode(meta), addr)
        return {}

    def _op_load(self, pattern: str, shape: list[int], seed: int) -> JSON:
        self._case = Case(pattern, Shape(*shape), seed)
        self._end.load(self._case)
        return {}

    def _op_read(self) -> JSON:
        start, cpu = time.perf_counter(), time.process_time()
        blocking_s = self._end.read()
        total_s = time.perf_counter() - start
        return {"blocking_s": blocking_s, "total_s": total_s, "cpu_s": time.process_time() - cpu}

    def _op_cpu(self) -> JSON:
        return {"cpu_s": time.process_time()}

    def _op_verify(self, generation: int) -> JSON:
        if self._case is None:
            return {"mismatch": "nothing was loaded"}
        wrong = patterns.find_mismatch(self._pool, self._case, generation)
        return {"mismatch": str(wrong) if wrong else ""}

    def _op_close(self) -> JSON:
        self._end.close()
        return {}


def serve(end: End, requests: TextIO, replies: TextIO) -> None:
    """Answer requests until ``close`` or the end of the stream (the parent has died)."""
    session = Session(end)
    for line in requests:
        request = json.loads(line)
        last = request["op"] == "close"
        replies.write(json.dumps(session.answer(request)) + "\n")
        replies.flush()
        if last:
            return


def main(end: End) -> None:
    """Serve ``end`` on a private copy of stdout, so that a library's prints cannot damage the protocol."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(end, sys.stdin, replies)
    replies.flush()
    os._exit(0)  # a rival's destructors may hang or crash; its figures are already delivered
