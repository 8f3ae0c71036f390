"""The link test beyond single reads: the other direction, streams, latencies, a soak, a restart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvrdma.bench import link_more
from kvrdma.bench.link import Link, LinkOptions
from kvrdma.bench.link_more import (
    chaos,
    latency_report,
    measure_latency,
    measure_reverse,
    measure_streams,
    soak,
    soak_speeds,
)
from kvrdma.bench.link_peer import LinkPeer
from kvrdma.bench.patterns import Case, Shape
from kvrdma.bench.spawned_peer import LocalControl
from kvrdma.cli import main
from kvrdma.errors import PeerLostError, ReadTimeoutError, TransportError
from kvrdma.testing import Fault, FaultTransport
from kvrdma.transport import open_transport
from tests.helpers.link_cli import run

CASE = Case("fragmented", Shape(2, 16, 512))
OPTIONS = LinkOptions(iters=3, read_timeout_s=10.0)


def new_link(peer: LinkPeer, options: LinkOptions = OPTIONS) -> Link:
    return Link(LocalControl(peer), open_transport("memory"), CASE.shape.pool_nbytes, options)


@pytest.fixture
def peer() -> Iterator[LinkPeer]:
    made = LinkPeer()
    yield made
    made.close()


@pytest.fixture
def link(peer: LinkPeer) -> Iterator[Link]:
    made = new_link(peer)
    yield made
    made.close()


def test_the_peer_reads_from_here(link: Link) -> None:
    report = measure_reverse(link, CASE, 3)
    assert (report.verified, report.one_sided, report.nbytes, report.block_bytes) == (True, True, 16384, 512)
    assert report.gb_per_s.best == pytest.approx(16384 / report.total_ms.best / 1e6, rel=0.05)


def test_streams_share_the_rows_and_leave_no_connection_behind(link: Link) -> None:
    report = measure_streams(link, CASE, 5, 2)
    assert (report.streams, report.verified, report.nbytes) == (5, True, 16384)
    assert report.total_ms.best <= report.total_ms.median
    assert link.read_and_verify(CASE)[1] is None


def test_streams_that_lose_rows_are_seen(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    read = link.transport.read
    monkeypatch.setattr(link.transport, "read", lambda peer, rows: read(peer, rows[:-1]))
    assert not measure_streams(link, CASE, 2, 1).verified


def test_latencies_are_counted_and_in_order(link: Link) -> None:
    report = measure_latency(link, 64, 4, 500)
    assert (report.reads, report.depth, report.nbytes, report.verified) == (500, 4, 64, True)
    marks = [report.percentiles_us[name] for name in ("50", "90", "99", "99.9", "max")]
    assert marks == sorted(marks)
    assert sum(count for _, count in report.histogram) == 500
    assert report.cdf_us == sorted(report.cdf_us)
    assert report.cdf_us[-1] == report.percentiles_us["max"]


def test_latency_figures_are_arithmetic() -> None:
    times = [n * 1e-6 for n in range(1, 1001)]
    report = latency_report(8, 1, times, 0.5, verified=True)
    assert report.percentiles_us == {"50": 500.0, "90": 900.0, "99": 990.0, "99.9": 999.0, "max": 1000.0}
    assert (report.mean_us, report.reads_per_s) == (500.5, 2000.0)
    assert len(report.cdf_us) == 200
    assert report.cdf_us[99] == 500.0
    bounds = [bound for bound, _ in report.histogram]
    assert dict(report.histogram)[1024.0] == 1000 - 861, "above 2**9.75 = 861.1"
    assert bounds == sorted(bounds)


def test_a_read_that_never_ends_ends_the_measurement(peer: LinkPeer) -> None:
    faulty = FaultTransport(open_transport("memory"), [Fault.NEVER])
    faulty.name = "memory"  # type: ignore[misc] # the peer opens what it wraps
    link = Link(LocalControl(peer), faulty, CASE.shape.pool_nbytes, LinkOptions(iters=1, read_timeout_s=0.2))
    with pytest.raises(ReadTimeoutError, match="KVRDMA_READ_TIMEOUT_S"):
        measure_latency(link, 64, 1, 10)
    link.close()


def test_a_soak_counts_failures_and_goes_on(peer: LinkPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_more, "_SOAK_STEP_S", 0.01)
    opened: list[Link] = []
    told: list[str] = []

    def opener() -> Link:
        if len(opened) == 2:
            opened.append(opened[-1])
            raise PeerLostError("nobody there, once")
        faults = {0: [Fault.NONE, Fault.FAIL_AT_POLL], 1: [Fault.LOSE_PEER]}.get(len(opened), [])
        faulty = FaultTransport(open_transport("memory"), faults)
        faulty.name = "memory"  # type: ignore[misc] # the peer opens what it wraps
        opened.append(Link(LocalControl(peer), faulty, CASE.shape.pool_nbytes, OPTIONS))
        return opened[-1]

    report = soak(opener, CASE, 0.5, None, told.append)
    assert sum(report.failures.values()) >= 2
    assert report.failures["PeerLostError"] >= 1
    assert (report.reads > 3, report.wrong) == (True, [])
    assert report.nbytes == report.reads * CASE.shape.nbytes
    assert told
    assert report.seconds >= 0.5


def test_a_soak_keeps_to_its_rate(peer: LinkPeer) -> None:
    told: list[str] = []
    report = soak(lambda: new_link(peer), CASE, 0.5, 20 * CASE.shape.nbytes, told.append)
    assert 1 <= report.reads <= 0.5 * 20 + 2
    assert report.average_gb_per_s == pytest.approx(report.nbytes / report.seconds / 1e9, abs=1e-4)
    assert report.gb_per_s > report.average_gb_per_s, "pauses are no part of the time of the reads"
    assert all(re.search(r"0 wrong, \S+ GB/s while reading, \S+ GB/s over all$", line) for line in told)


def test_both_speeds_of_a_soak_are_named() -> None:
    assert soak_speeds(8.258, 0.2) == "8.26 GB/s while reading, 0.20 GB/s over all"
    assert soak_speeds(0.0, 0.0012) == "0 GB/s while reading, 0.0012 GB/s over all"
    small = ["--transport", "memory", "--nbytes", "64K", "--block", "4K", "--iters", "1", "--pattern", "contig"]
    shown = CliRunner().invoke(main, ["link-test", *small, "--soak", "200ms", "--rate", "0.001"])
    assert shown.exit_code == 0, shown.output
    assert re.search(r"^soak: .* GB/s while reading, \S+ GB/s over all, p99", shown.stdout, re.MULTILINE)


def test_chaos_needs_an_error_and_a_recovery(peer: LinkPeer) -> None:
    link = new_link(peer)
    report = chaos(link, CASE, lambda: peer._close(link.number), lambda: new_link(peer))
    assert report.verified
    assert issubclass(getattr(__import__("kvrdma.errors", fromlist=["x"]), report.error), TransportError)
    link = new_link(peer, LinkOptions(read_timeout_s=0.2))
    with pytest.raises(PeerLostError, match=r"0\.2 s later no read had failed"):
        chaos(link, CASE, lambda: None, lambda: new_link(peer))


@pytest.mark.needs("cma")
def test_the_command_does_all_of_it_and_saves(tmp_path: Path) -> None:
    saved = tmp_path / "report.json"
    words = ["--transport", "cma", "--nbytes", "64K", "--block", "4K", "--pattern", "contig", "--iters", "2", "--json"]
    more = ["--direction", "both", "--streams", "2", "--latency", "64", "--depth", "2", "--soak", "200ms", "--rate",
            "0.01", "--chaos", "--save", str(saved)]  # fmt: skip
    done = run(*words, *more)
    assert done.returncode == 0, done.stderr
    report = json.loads(saved.read_text())
    assert report.pop("kind") == "link"
    assert report == json.loads(done.stdout)
    assert {"reverse", "streams", "latency", "soak", "chaos"} < set(report)
    assert report["chaos"]["error"] == "PeerLostError"
    assert report["soak"]["average_gb_per_s"] < report["soak"]["gb_per_s"]
    assert report["soak"]["reads"] * 65536 <= 0.01e9 * 0.2 + 2 * 65536
    plain = CliRunner().invoke(main, ["link-test", "--transport", "memory", "--latency", "64", "--direction", "both",
                                      "--nbytes", "64K", "--block", "4K", "--iters", "2"])  # fmt: skip
    assert plain.exit_code == 0, plain.output
    assert "64 B reads, 1 in flight: p50 " in plain.stdout
    assert "peer reads from here: " in plain.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--rate", "1"), "--rate only with --soak"),
        (("--depth", "2"), "--depth only with --latency"),
        (("--latency", "12"), "--latency 12 is not a multiple of 8"),
        (("--soak", "soon"), "'soon' is not a time such as 30s"),
        (("--chaos",), "--chaos needs a peer of its own"),
        (("--save", "/nowhere/x.json"), "--save /nowhere/x.json"),
    ],
)
def test_options_without_effect_or_sense_are_refused(words: tuple[str, ...], says: str) -> None:
    small = ["--transport", "memory", "--nbytes", "64K", "--block", "4K", "--iters", "2", "--pattern", "contig"]
    ended = CliRunner().invoke(main, ["link-test", *small, *words])
    assert ended.exit_code == 2
    assert says in ended.output
