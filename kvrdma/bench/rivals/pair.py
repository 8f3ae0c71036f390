"""A contender from outside: two processes, asked over pipes, frozen while others have their turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from kvrdma.bench.patterns import Case
from kvrdma.bench.ready import wait_readable
from kvrdma.errors import KVRDMAError

JSON = dict[str, Any]
_ROOT = Path(__file__).parents[3]
_SETTLE_S = 0.03
_ANSWER_S = 120.0


class ContenderError(KVRDMAError):
    """A contender's process died or gave no answer; carries the end of what it wrote."""


@dataclass(frozen=True, slots=True)
class Contender:
    """How to start one."""

    name: str
    python: str
    """Interpreter of the venv that has the library."""
    module: str
    """Under ``kvrdma.bench.rivals``."""
    reader: JSON = field(default_factory=dict)
    """Arguments of the reader's end."""
    target: JSON | None = field(default_factory=dict)
    """Arguments of the target's end; None: there is only a reader."""
    environ: Mapping[str, str] = field(default_factory=dict)


class Child:
    """One process that serves an end (``kvrdma.bench.rivals.ends``)."""

    def __init__(self, contender: Contender, arguments: JSON, log: Path) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [contender.python, "-m", f"kvrdma.bench.rivals.{contender.module}", json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **contender.environ, "PYTHONPATH": str(_ROOT)},
            )

    def ask(self, op: str, **values: object) -> JSON:
        """Send a request and wait for its answer.

        Raises:
            ContenderError: none came within 120 s.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **values}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure(op) from None
        line = self._process.stdout.readline() if wait_readable(self._process.stdout, _ANSWER_S) else ""
        if not line:
            raise self._failure(op)
        reply: JSON = json.loads(line)
        return reply

    def _failure(self, op: str) -> ContenderError:
        words = self._log.read_text(errors="replace")[-2000:].strip()
        return ContenderError(f"no answer to {op!r} from {self._process.args!r}; it wrote:\n{words}")

    def signal(self, number: int) -> None:
        """Send a signal."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill and reap it."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class Pair:
    """The running processes of one contender; frozen but within ``turn``."""

    def __init__(self, contender: Contender, pool_nbytes: int, logs: Path) -> None:
        """Start, fill the target's pool, connect, freeze."""
        self.contender = contender
        name = contender.name.replace("/", "-").replace(" ", "-")
        self._children: list[Child] = []
        self._target: Child | None = None
        try:
            if contender.target is not None:
                self._target = Child(contender, contender.target, logs / f"{name}-target.log")
                self._children.append(self._target)
            self._reader = Child(contender, contender.reader, logs / f"{name}-reader.log")
            self._children.append(self._reader)
            meta: JSON = {"meta": "", "addr": 0}
            if self._target is not None:
                meta = self._target.ask("open", nbytes=pool_nbytes, generation=1)
            self._reader.ask("open", nbytes=pool_nbytes, generation=0)
            self._reader.ask("connect", meta=meta["meta"], addr=meta["addr"])
        except BaseException:
            self.end()
            raise
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for child in self._children:
            child.signal(number)

    def __enter__(self) -> Self:
        """Begin a turn: let the processes run, and their threads go back to sleep: thawing is no part of a read."""
        self._signal(signal.SIGCONT)
        time.sleep(_SETTLE_S)
        return self

    def __exit__(self, *exc: object) -> None:
        """End the turn: freeze them, so that a spinning thread takes no core from the next contender."""
        self._signal(signal.SIGSTOP)

    def load(self, case: Case, generation: int) -> None:
        """Give the target fresh bytes, poison the reader's pool, prepare the case, read once to warm up."""
        if self._target is not None:
            self._target.ask("fill", generation=generation)
        self._reader.ask("fill", generation=0)
        shape = case.shape
        dimensions = [shape.layers, shape.blocks, shape.block_bytes]
        self._reader.ask("load", pattern=case.pattern, shape=dimensions, seed=case.seed)
        self._reader.ask("read")

    def read(self) -> JSON:
        """Read once: ``blocking_s``, ``total_s``, ``cpu_s`` of the reader, ``target_cpu_s``."""
        before = self._target_cpu_s()
        measured = self._reader.ask("read")
        measured["target_cpu_s"] = self._target_cpu_s() - before
        return measured

    def _target_cpu_s(self) -> float:
        return float(self._target.ask("cpu")["cpu_s"]) if self._target is not None else 0.0

    def mismatch(self, generation: int) -> str:
        """Compare the reader's pool with what must be in it; empty if every byte is right."""
        if self._target is None:
            return ""
        return str(self._reader.ask("verify", generation=generation)["mismatch"])

    def end(self) -> None:
        """End both processes."""
        for child in self._children:
            child.end()
