"""The consumer's side of a link test: connects, reads scattered blocks, verifies every byte, times it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvrdma import __version__, wire
from kvrdma.bench.patterns import Case, Mismatch, Words, find_late, find_mismatch, rows_of
from kvrdma.bench.pool import Pool, allocate
from kvrdma.bench.reading import ReadTimes, timed_read
from kvrdma.bench.report import CaseReport, LinkReport, Times, case_report
from kvrdma.bench.spawned_peer import Control
from kvrdma.errors import KVRDMAError, MessageError, TransportError
from kvrdma.rows import Rows
from kvrdma.transport import Device, Peer, Transport

M = TypeVar("M")

_FILL_BYTES_PER_S = 50e6
"""Slowest filling of a pool that is not taken for a hang."""
_GOODBYE_S = 1.0
_MIN_ITERS = 3


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How to test."""

    device: Device = field(default_factory=Device)
    require_one_sided: bool = False
    iters: int = 7
    budget_s: float | None = 10.0
    """Time of all cases together, fills and checks included: slow ones stop after 3 iterations. None: no limit."""
    control_timeout_s: float = 5.0
    read_timeout_s: float = 60.0


class Link:
    """A transport of this process, connected to a pool of the peer."""

    def __init__(self, control: Control, transport: Transport, pool_nbytes: int, options: LinkOptions) -> None:
        """Allocate a pool on both sides and connect; owns ``transport`` from here on.

        Args:
            control: to the peer.
            transport: open, of the kind to use.
            pool_nbytes: size of each pool.
            options: deadlines and device.

        Raises:
            KVRDMAError: the peer cannot open the transport, or the two do not reach each other.
        """
        self.started = time.perf_counter()
        self.transport = transport
        self.options = options
        self._control = control
        self._link = 0
        self._generation = 1  # what the peer fills its pool with when it opens
        self._fill_timeout_s = options.control_timeout_s + pool_nbytes / _FILL_BYTES_PER_S
        try:
            self.pool: Pool = allocate(pool_nbytes, options.device)
            self.pool.poison()
            self._region = transport.register(self.pool.addr, self.pool.nbytes, self.pool.device)
            opened = self._ask(
                wire.OpenLink(transport.name, pool_nbytes, options.require_one_sided),
                wire.LinkOpened,
                self._fill_timeout_s + 20.0,  # a transport may take long to start
            )
            self._link = opened.link
            start = time.perf_counter()
            keys = self._ask(wire.DescribeLink(self._link), wire.LinkKeys, options.control_timeout_s)
            self._keys = keys
            self.peer: Peer = self.connect_again()
            self.connect_s = time.perf_counter() - start
        except BaseException:
            self.close()
            raise

    @property
    def number(self) -> int:
        """What the peer calls this link; 0 after ``close``."""
        return self._link

    def connect_again(self) -> Peer:
        """Make another connection to the peer's pool; the caller disconnects it.

        Raises:
            ConnectError: the peer cannot be reached.
        """
        return self.transport.connect(self._keys.address, [self._keys.key])

    def close(self) -> None:
        """Close the transport, then tell the peer, which may be gone. Idempotent."""
        self.transport.close()
        link, self._link = self._link, 0
        if link:
            with contextlib.suppress(KVRDMAError):  # the peer closes idle links by itself
                self._ask(wire.CloseLink(link), wire.LinkClosed, _GOODBYE_S)

    def _ask(self, message: wire.Message, answer: type[M], timeout_s: float) -> M:
        reply = self._control.request(message, timeout_s)
        if not isinstance(reply, answer):
            raise MessageError(f"{type(message).__name__} was answered by {type(reply).__name__}")
        return reply

    def refresh(self) -> int:
        """Give the peer's pool bytes it never had before and poison ours; returns the new generation."""
        self._generation = self._generation % 4096 + 1
        message = wire.FillPool(self._link, self._generation)
        self._ask(message, wire.PoolFilled, self._fill_timeout_s)
        self.pool.poison()
        return self._generation

    def read(self, rows: Rows, at_end: Callable[[], None] = lambda: None) -> ReadTimes:
        """Read the rows and wait for their end.

        Args:
            rows: what to read.
            at_end: called at once when the read is reported done, ahead of anything else; its time is not counted.

        Raises:
            ReadTimeoutError: no end within the deadline; close the transport before the pool is used again.
            TransportError: the read failed or the peer was lost.
        """
        return timed_read(self.transport, self.peer, rows, self.options.read_timeout_s, at_end)

    def pull_back(self, case: Case) -> wire.LinkPulled:
        """Let the peer read the case from our pool into its own, with fresh bytes, and verify them.

        Raises:
            TransportError: the peer cannot read from here, or its read failed.
        """
        self._generation = self._generation % 4096 + 1
        self.pool.fill(self._generation)
        shape = (case.shape.layers, case.shape.blocks, case.shape.block_bytes)
        address, seconds = self.transport.address(), self.options.read_timeout_s
        message = wire.PullLink(
            self._link, address, self._region.key, case.pattern, shape, case.seed, self._generation, seconds
        )
        return self._ask(message, wire.LinkPulled, seconds + self._fill_timeout_s)

    def read_and_verify(self, case: Case) -> tuple[ReadTimes, Mismatch | None]:
        """Read fresh bytes once and compare the whole pool with what must be in it."""
        return self._verified(case, rows_of(case, self.pool.addr), self.pool.ends(case))

    def _verified(
        self, case: Case, rows: Rows, look: Callable[[], Words], before: Callable[[], None] = lambda: None
    ) -> tuple[ReadTimes, Mismatch | None]:
        """Refresh, call ``before``, read, look at the ends of the rows at once, compare everything."""
        generation = self.refresh()
        before()
        seen: list[Words] = []
        times = self.read(rows, lambda: seen.append(look()))
        wrong = find_mismatch(self.pool.host_bytes(), case, generation)
        return times, wrong or find_late(seen[0], case, generation)

    def run(self, case: Case, until: float | None = None) -> tuple[CaseReport, Mismatch | None]:
        """Read and verify a first time, then measure; every measured read brings fresh bytes and is verified as well.

        Reads and copies of the same rows take turns, so that both see the same machine. Filling, looking and
        comparing are outside the clock.

        Args:
            case: what to read.
            until: when to be done, by ``time.perf_counter``; three iterations are made in any case.
        """
        rows, look, memcpy = rows_of(case, self.pool.addr), self.pool.ends(case), self.pool.memcpy(case)
        first, wrong = self._verified(case, rows, look)
        times = Times([], [], [])
        memcpy()

        def copy() -> None:
            start = time.perf_counter()
            memcpy()
            times.memcpy_s.append(time.perf_counter() - start)

        took_s = 0.0
        for done in range(self.options.iters):
            started = time.perf_counter()
            if until is not None and done >= _MIN_ITERS and started + took_s > until:
                break
            measured, mismatch = self._verified(case, rows, look, before=copy)
            wrong = wrong or mismatch
            times.blocking_s.append(measured.blocking_s)
            times.total_s.append(measured.total_s)
            took_s = time.perf_counter() - started
        return case_report(case, times, first.rows_posted, verified=wrong is None), wrong

    def ucx(self) -> dict[str, str] | None:
        """Give the path, version and features of the native library under the transport, if it has one."""
        details = dict(self.transport.capabilities().details)
        return details if {"library", "version"} <= details.keys() else None


@dataclass(frozen=True, slots=True)
class LinkResult:
    """A finished link test."""

    report: LinkReport
    via: str
    """The mechanism that moved the bytes."""
    mismatches: tuple[str, ...]
    refused: tuple[TransportError, ...] = ()
    """Why better transports were not used."""


@dataclass(frozen=True, slots=True)
class OpenedLink:
    """A link over which one case has been read, for the first time."""

    link: Link
    first_read_s: float
    first_mismatch: Mismatch | None
    refused: tuple[TransportError, ...] = ()
    """Why better transports are not used."""


def measure(opened: OpenedLink, cases: Sequence[Case], progress: Callable[[int, Case], None]) -> LinkResult:
    """Run the cases over a connected link.

    Raises:
        KVRDMAError: the peer is lost or a read failed; wrong bytes are reported, not raised.
    """
    reports: list[CaseReport] = []
    wrong: list[str] = []
    link = opened.link
    if opened.first_mismatch:
        wrong.append(f"first read: {opened.first_mismatch}")
    for index, case in enumerate(cases):
        progress(index, case)
        case_result, mismatch = link.run(case, _share_of_budget(link, len(cases) - index))
        reports.append(case_result)
        if mismatch:
            wrong.append(f"{case.pattern}, blocks of {case.shape.block_bytes} bytes: {mismatch}")
    report = LinkReport(
        kvrdma=__version__,
        transport=link.transport.name,
        one_sided=link.peer.one_sided,
        device=str(link.options.device),
        ucx=link.ucx(),
        verified=not wrong,
        connect_ms=round(link.connect_s * 1e3, 4),
        first_read_ms=round(opened.first_read_s * 1e3, 4),
        cases=reports,
    )
    return LinkResult(report, link.peer.via, tuple(wrong), opened.refused)


def _share_of_budget(link: Link, cases_left: int) -> float | None:
    """When the next case has to be done, so that those after it have as much time."""
    if link.options.budget_s is None:
        return None
    now = time.perf_counter()
    return now + (link.started + link.options.budget_s - now) / cases_left
