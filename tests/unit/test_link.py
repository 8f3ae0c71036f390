"""The link test itself, over the in-memory transport: what it measures, and each way it can fail."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from kvrdma import wire
from kvrdma.bench import choose, room
from kvrdma.bench.choose import Candidates, connect_first, open_candidates
from kvrdma.bench.link import Link, LinkOptions, LinkResult, measure
from kvrdma.bench.link_peer import MAX_LINKS, LinkPeer
from kvrdma.bench.patterns import Bytes, Case, Shape
from kvrdma.bench.pool import HostPool, allocate
from kvrdma.bench.report import Times, case_report
from kvrdma.bench.spawned_peer import LocalControl
from kvrdma.errors import (
    ConfigError,
    ConnectError,
    ControlError,
    MessageError,
    NotOneSidedError,
    PeerIdentityError,
    PeerLostError,
    ReadTimeoutError,
    TransportError,
    TransportUnavailableError,
)
from kvrdma.rows import Batch, Rows, RowTable, as_rows
from kvrdma.testing import Fault, FaultTransport
from kvrdma.transport import Capabilities, Completion, Device, Peer, ReadDone, ReadId, Region, Transport, wait
from kvrdma_memory import MemoryTransport

SHAPE = Shape(layers=2, blocks=8, block_bytes=64)
CASES = tuple(Case(pattern, SHAPE) for pattern in ("contig", "fragmented", "remote_contig"))
OPTIONS = LinkOptions(iters=3, read_timeout_s=10.0)


@contextmanager
def local_peer() -> Iterator[LocalControl]:
    control = LocalControl(LinkPeer())
    try:
        yield control
    finally:
        control.close()


def run(transport: Transport, options: LinkOptions = OPTIONS) -> LinkResult:
    with local_peer() as control:
        opened = connect_first(Candidates((transport,), ()), control, CASES, options)
        try:
            return measure(opened, CASES, lambda *_: None)
        finally:
            opened.link.close()


def test_every_case_is_verified_and_measured() -> None:
    result = run(MemoryTransport())
    report = result.report
    assert (report.verified, result.mismatches, result.via) == (True, (), "memmove")
    assert (report.transport, report.one_sided, report.device, report.ucx) == ("memory", True, "cpu", None)
    assert [case.pattern for case in report.cases] == ["contig", "fragmented", "remote_contig"]
    for case in report.cases:
        assert (case.rows, case.nbytes, case.block_bytes, case.verified) == (16, 1024, 64, True)
        assert 0 < case.blocking_us.best <= case.blocking_us.median
        assert 0 < case.total_ms.best <= case.total_ms.median
        assert case.gb_per_s.best >= case.gb_per_s.median > 0
    assert report.cases[0].rows_posted == 2


def test_a_report_is_arithmetic() -> None:
    case = Case("contig", Shape(1, 10, 100_000))  # 1 MB
    times = Times(blocking_s=[3e-6, 1e-6, 2e-6], total_s=[4e-3, 1e-3, 2e-3], memcpy_s=[1e-3, 0.5e-3, 0.5e-3])
    report = case_report(case, times, 1, verified=True)
    assert (report.blocking_us.best, report.blocking_us.median) == (1.0, 2.0)
    assert (report.total_ms.best, report.total_ms.median) == (1.0, 2.0)
    assert (report.gb_per_s.best, report.gb_per_s.median) == (1.0, 0.5)
    assert (report.memcpy_gb_per_s, report.memcpy_ratio) == (2.0, 0.25)


class Corrupting(MemoryTransport):
    """Damages one byte of our own pool after the chosen reads."""

    def __init__(self, *victims: int, offset: int) -> None:
        super().__init__()
        self._victims, self._offset, self._reads = victims, offset, 0

    def register(self, addr: int, nbytes: int, device: Device) -> Region:
        self._pool = (addr, nbytes)
        return super().register(addr, nbytes, device)

    def poll(self) -> list[Completion]:
        done = super().poll()
        self._reads += len(done)
        if done and self._reads in self._victims:
            byte = ctypes.c_ubyte.from_address(self._pool[0] + self._offset)
            byte.value ^= 0xFF
        return done


def test_a_wrong_byte_in_a_row_is_reported_with_its_place() -> None:
    # Reads 1 and 2 are the first of all and the first of "contig"; both are verified. Block 0 holds bytes 0-63.
    result = run(Corrupting(2, offset=9))
    assert not result.report.verified
    assert [case.verified for case in result.report.cases] == [False, True, True]
    assert len(result.mismatches) == 1
    assert result.mismatches[0].startswith("contig, blocks of 64 bytes: row 0 is wrong at local byte 8 (remote byte 8)")


def test_a_wrong_byte_around_the_rows_is_reported() -> None:
    result = run(Corrupting(1, offset=8 * 64))  # the first block after layer 0's eight
    assert result.mismatches[0].startswith("first read: memory outside every row is wrong at local byte 512")


@pytest.mark.parametrize("victims", [(3,), (4,), (5,), (3, 4, 5)], ids=str)
def test_a_wrong_byte_in_any_measured_read_is_reported(victims: tuple[int, ...]) -> None:
    # 1: first of all; 2: first of "contig"; 3-5: measured.
    result = run(Corrupting(*victims, offset=0))
    assert [case.verified for case in result.report.cases] == [False, True, True]
    assert len(result.mismatches) == 1


def test_a_wrong_byte_beyond_a_smaller_case_s_part_of_the_pool_is_reported() -> None:
    small = Case("contig", Shape(layers=1, blocks=4, block_bytes=64))
    cases = (CASES[0], small)
    # 1-5: the first of all and the larger case; 6-9: the smaller one.
    transport = Corrupting(8, offset=SHAPE.pool_nbytes - 1)
    with local_peer() as control:
        opened = connect_first(Candidates((transport,), ()), control, cases, OPTIONS)
        result = measure(opened, cases, lambda *_: None)
        opened.link.close()
    assert [case.verified for case in result.report.cases] == [True, False]
    assert "memory outside every row is wrong at local byte 2040" in result.mismatches[0]


class Hasty(MemoryTransport):
    """Reports the end before the first or the last row has arrived; that one comes when its consumer is busy."""

    def __init__(self, missing: int) -> None:
        super().__init__()
        self._missing = missing
        self._owed: tuple[Peer, Rows] | None = None

    def read(self, peer: Peer, rows: Batch, then: RowTable | None = None) -> ReadId:
        rows = as_rows(rows)
        self._owed = peer, rows[self._missing :][:1].copy()
        return super().read(peer, np.delete(rows, self._missing, axis=0), then)

    def arrive(self) -> None:
        if self._owed is not None:
            owed, self._owed = super().read(*self._owed), None
            while not any(isinstance(done, ReadDone) and done.read == owed for done in self.poll()):
                wait([self], 10)


@pytest.mark.parametrize("missing", [0, -1], ids=["first row", "last row"])
def test_bytes_that_come_after_the_report_of_the_end_are_missed(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    transport, content = Hasty(missing), HostPool.host_bytes

    def late(pool: HostPool) -> Bytes:
        transport.arrive()
        return content(pool)

    monkeypatch.setattr(HostPool, "host_bytes", late)
    result = run(transport)
    assert [case.verified for case in result.report.cases] == [False, False, False]
    assert "the read was reported done before all bytes were there: row " in result.mismatches[0]
    assert "(poison: nothing was written)" in result.mismatches[0]


class Lazy(MemoryTransport):
    """Claims to have read and moves nothing after its second read: the bytes of before are still there."""

    reads = 0

    def read(self, peer: Peer, rows: Batch, then: RowTable | None = None) -> ReadId:
        self.reads += 1
        return super().read(peer, rows if self.reads <= 2 else np.empty((0, 4), np.uint64), then)


def test_stale_bytes_of_an_earlier_read_do_not_pass() -> None:
    result = run(Lazy())
    assert [case.verified for case in result.report.cases] == [False, False, False]
    assert "(poison: nothing was written)" in result.mismatches[0]


def test_a_read_that_never_ends_is_given_up_by_its_deadline() -> None:
    faulty = FaultTransport(MemoryTransport(), [Fault.NONE, Fault.NEVER])
    faulty.name = "memory"  # type: ignore[misc]
    with pytest.raises(ReadTimeoutError, match=r"16 rows by memory did not arrive within 0\.2 s"):
        run(faulty, LinkOptions(iters=3, read_timeout_s=0.2))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault.FAIL_AT_POST, PeerLostError),
        (Fault.FAIL_AT_POLL, TransportError),
        (Fault.HALF_WRITTEN, TransportError),
        (Fault.LOSE_PEER, PeerLostError),
    ],
)
def test_a_failed_read_ends_the_test(fault: Fault, kind: type[TransportError]) -> None:
    faulty = FaultTransport(MemoryTransport(), [Fault.NONE, Fault.NONE, fault])
    faulty.name = "memory"  # type: ignore[misc]
    with pytest.raises(kind, match="injected"):
        run(faulty)


class Elsewhere(MemoryTransport):
    """Reaches another host in name, and nobody in fact."""

    error: TransportError = PeerIdentityError("another host answers")
    closed = False

    def connect(self, address: bytes, keys: Sequence[bytes]) -> Peer:
        del address, keys
        raise self.error

    def close(self) -> None:
        self.closed = True
        super().close()


def test_transports_are_tried_until_one_works() -> None:
    first, second, third = Elsewhere(), MemoryTransport(), Elsewhere()
    with local_peer() as control:
        opened = connect_first(Candidates((first, second, third), ()), control, CASES, OPTIONS)
        assert opened.link.transport is second
        assert opened.first_mismatch is None
        assert [str(error) for error in opened.refused] == ["another host answers"]
        assert (first.closed, third.closed) == (True, True)
        opened.link.close()


def test_if_none_works_the_error_says_why_for_each() -> None:
    refused = (TransportUnavailableError("x is not installed"),)
    with local_peer() as control, pytest.raises(ConnectError, match="no transport works") as caught:
        connect_first(Candidates((Elsewhere(), Elsewhere()), refused), control, CASES, OPTIONS)
    assert str(caught.value).splitlines()[1:] == ["  x is not installed"] + ["  another host answers"] * 2


def test_the_only_reason_keeps_its_class() -> None:
    transport = Elsewhere()
    transport.error = NotOneSidedError("only emulated")
    with local_peer() as control, pytest.raises(NotOneSidedError, match=r"^only emulated$"):
        connect_first(Candidates((transport,), ()), control, CASES, OPTIONS)


def fake(
    name: str,
    reach: Literal["process", "host", "network"],
    kinds: tuple[str, ...] = ("cpu",),
    *,
    one_sided: bool = True,
) -> type[Transport]:
    class Fake(MemoryTransport):
        def capabilities(self) -> Capabilities:
            return Capabilities(frozenset(kinds), reach, one_sided, needs_target_progress=False, max_rows=1)

    Fake.name = name
    return Fake


def test_auto_orders_by_reach_then_by_one_sidedness(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {
        "a": fake("a", "network", one_sided=False),
        "b": fake("b", "process"),
        "c": fake("c", "network"),
        "d": fake("d", "host"),
        "e": fake("e", "host", kinds=("cuda",)),
    }

    def opening(name: str, **options: object) -> Transport:
        if name == "f":
            raise TransportUnavailableError("f: no library")
        return kinds[name](**options)

    monkeypatch.setattr(choose, "installed_transports", lambda: {**kinds, "f": None})
    monkeypatch.setattr(choose, "open_transport", opening)
    found = open_candidates("auto", OPTIONS)
    assert [each.name for each in found.transports] == ["d", "c", "a", "b"]
    assert [str(error) for error in found.refused] == ["e cannot read cpu memory here", "f: no library"]
    assert not found.need_this_process
    far = found.beyond_process()
    assert [each.name for each in far.transports] == ["d", "c", "a"]
    assert far.refused == found.refused
    near = open_candidates("b", OPTIONS).beyond_process()
    hint = "use auto or one that reaches other processes (a, c, d, e)"
    assert near.transports == ()
    assert [str(e) for e in near.refused] == [f"b reaches no further than its own process: {hint}"]
    assert open_candidates("b", OPTIONS).need_this_process
    with pytest.raises(TransportUnavailableError, match="f: no library"):
        open_candidates("f", OPTIONS)


@pytest.mark.parametrize(("budget_s", "reads"), [(0.0, 3), (None, 9), (600.0, 9)])
def test_a_spent_budget_leaves_three_reads_and_an_unlimited_one_all(budget_s: float | None, reads: int) -> None:
    """A first read; then another one and the measured ones in each of the three cases."""

    class Counting(MemoryTransport):
        count = 0

        def read(self, peer: Peer, rows: Batch, then: RowTable | None = None) -> ReadId:
            self.count += 1
            return super().read(peer, rows, then)

    transport = Counting()
    assert run(transport, LinkOptions(iters=9, budget_s=budget_s)).report.verified
    assert transport.count == 1 + 3 * (1 + reads)


def test_a_pool_larger_than_memory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 1024 kB\n")
    monkeypatch.setattr(room, "MEMINFO", tmp_path / "meminfo")
    with pytest.raises(ConfigError, match=r"a pool of 2\.0 MiB does not fit into memory: 1\.0 MiB are free"):
        LinkPeer().handle(wire.OpenLink("memory", 2 << 20))
    monkeypatch.setattr(room, "MEMINFO", tmp_path / "none")
    assert room.free_nbytes() is None


def test_gpu_memory_without_its_extra_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for refuse in (lambda: allocate(64, Device("cuda")), lambda: open_candidates("auto", LinkOptions(Device("cuda")))):
        with pytest.raises(ConfigError, match=r"pip install 'kvrdma\[cuda12\]'"):
            refuse()


def test_host_pools_are_page_aligned() -> None:
    pool = HostPool(4096)
    pool.poison()
    assert (pool.addr % 4096, pool.host_bytes().tolist()) == (0, [0xA5] * 4096)


def test_the_peer_bounds_its_links_and_forgets_idle_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = LinkPeer()
    for number in range(1, MAX_LINKS + 1):
        opened = peer.handle(wire.OpenLink("memory", 64))
        assert isinstance(opened, wire.LinkOpened)
        assert opened.link == number
    with pytest.raises(ControlError, match="serves 4 link tests already"):
        peer.handle(wire.OpenLink("memory", 64))
    monkeypatch.setattr("kvrdma.bench.link_peer.IDLE_S", -1.0)
    again = peer.handle(wire.OpenLink("memory", 64))
    assert isinstance(again, wire.LinkOpened)
    assert again.link == 5
    with pytest.raises(ControlError, match="no link 1 here"):
        peer.handle(wire.DescribeLink(1))
    peer.close()


@pytest.mark.parametrize(
    ("message", "kind", "says"),
    [
        (wire.FillPool(9, 1), ControlError, "no link 9"),
        (wire.OpenLink("nosuch", 64), TransportUnavailableError, "'nosuch' is not installed"),
        (wire.OpenLink("memory", 1 << 50), ConfigError, "need a multiple of 8 up to"),
        (wire.OpenLink("memory", 12), ConfigError, "need a multiple of 8"),
        (wire.LinkClosed(), MessageError, "does not answer what is itself an answer"),
        (wire.AskStore(), MessageError, "a link test's server listens here, and does not answer users of a store"),
    ],
)
def test_the_peer_refuses_nonsense(message: wire.Message, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        LinkPeer().handle(message)


def test_closing_an_unknown_link_is_harmless() -> None:
    assert LinkPeer().handle(wire.CloseLink(0)) == wire.LinkClosed()


def test_a_peer_that_answers_the_wrong_thing_is_refused() -> None:
    class Confused:
        def request(self, message: wire.Message, timeout_s: float) -> wire.Message:
            del message, timeout_s
            return wire.LinkClosed()

        def close(self) -> None: ...

    with pytest.raises(MessageError, match="OpenLink was answered by LinkClosed"):
        Link(Confused(), MemoryTransport(), 64, OPTIONS)
