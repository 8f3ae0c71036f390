"""What is special about ucx: the progress thread, served and one-sided reads, and peers that misbehave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvrdma.errors import (
    ConfigError,
    ConnectError,
    NotOneSidedError,
    PeerIdentityError,
    RegistrationError,
    StaleRegionError,
    TransportClosedError,
)
from kvrdma.rows import as_rows
from kvrdma.testing import PeerProcess
from kvrdma.testing import target as at
from kvrdma.testing.target import PAGE, Reader, done, scattered
from kvrdma.transport import Device, PeerLost, ReadFailed, poll_until, wait
from kvrdma_ucx import UcxTransport
from kvrdma_ucx.blobs import UcxAddress

pytestmark = pytest.mark.needs("ucx")

BIG = 64 << 20


class OneSidedUcx(UcxTransport):
    """Without error reports UCX reads host memory of this host by cma: one-sided, without any RDMA device."""

    _peer_errors = False


def _link(nbytes: int = PAGE, kind: type[UcxTransport] = UcxTransport) -> tuple[SimpleNamespace, Reader]:
    target = SimpleNamespace()
    at.open_target(target, kind, [nbytes], 1)
    return target, Reader.open(kind(), nbytes)


def _is_old(transport: UcxTransport) -> bool:
    return transport.capabilities().details["version"].startswith("1.13")


def test_over_tcp_reads_are_served_and_said_to_be() -> None:
    target, reader = _link()
    peer = reader.transport.connect(*at.exports(target))
    assert not peer.one_sided
    assert peer.via.startswith("tcp/")
    assert peer.via.endswith("(served by the peer's CPU)")
    assert not reader.transport.capabilities().one_sided
    for transport in (target.transport, reader.transport):
        transport.close()


def test_require_one_sided_refuses_before_any_byte_moves() -> None:
    target, _ = _link()
    transport = UcxTransport(require_one_sided=True)
    reader = Reader.open(transport, PAGE)
    with pytest.raises(NotOneSidedError, match=r"over tcp/\S+, which has no one-sided read.*KVRDMA_UCX_LIB") as raised:
        transport.connect(*at.exports(target))
    assert "require_one_sided (--require-rdma, KVRDMA_REQUIRE_ONE_SIDED) rules that out" in str(raised.value)
    assert raised.value.code == -22
    assert (reader.buffer == at.POISON).all()
    transport.close()
    target.transport.close()


def test_one_sided_path_is_proven_by_a_read() -> None:
    target, reader = _link(kind=OneSidedUcx)
    if _is_old(target.transport):
        pytest.skip("UCX 1.13 uses cma for rendezvous only")
    strict = OneSidedUcx(require_one_sided=True)
    mine = Reader.open(strict, PAGE)
    peer = strict.connect(*at.exports(target))
    assert (peer.one_sided, peer.via) == (True, "cma/memory")
    rows = mine.rows([(0, 0, 0, PAGE)])
    done(mine.read(peer, rows))
    mine.check(rows, target.buffers)
    for transport in (strict, reader.transport, target.transport):
        transport.close()


@pytest.mark.parametrize("kind", [UcxTransport, OneSidedUcx])
def test_a_region_registered_again_is_another_region(kind: type[UcxTransport]) -> None:
    """The slot of its cookie is used again at once; the cookie is not."""
    target, reader = _link(kind=kind)
    peer = reader.transport.connect(*at.exports(target))
    at.deregister(target, 0)
    at.reregister(target, 0)
    ended = reader.read(peer, reader.rows([(0, 0, 0, PAGE)]))
    assert isinstance(ended, ReadFailed)
    assert isinstance(ended.reason, StaleRegionError)
    fresh = reader.transport.connect(*at.exports(target))
    done(reader.read(fresh, reader.rows([(0, 0, 0, PAGE)])))
    for transport in (reader.transport, target.transport):
        transport.close()


def test_only_the_regions_that_were_read_must_be_alive() -> None:
    target = SimpleNamespace()
    at.open_target(target, UcxTransport, [PAGE] * 40, 1)
    reader = Reader.open(UcxTransport(), PAGE)
    peer = reader.transport.connect(*at.exports(target))
    at.deregister(target, 20)
    for region in range(40):
        ended = reader.read(peer, reader.rows([(0, region, 0, 64)]))
        assert isinstance(ended, ReadFailed) == (region == 20), region
    for transport in (reader.transport, target.transport):
        transport.close()


def _wakeups_and_cpu_s() -> tuple[int, float]:
    """How often the transports' threads went to sleep so far, and how long they have run."""
    wakeups, cpu_s = 0, 0.0
    for task in Path("/proc/self/task").iterdir():
        status = (task / "status").read_text()
        if status.startswith("Name:\tkvrdma-ucx\n"):
            wakeups += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
            cpu_s += int((task / "schedstat").read_text().split()[0]) / 1e9
    return wakeups, cpu_s


def test_idle_threads_sleep() -> None:
    """UCX's keepalive wakes each thread about once a second. Rates: on a busy machine the two seconds are longer."""
    target, reader = _link()
    peer = reader.transport.connect(*at.exports(target))
    done(reader.read(peer, reader.rows([(0, 0, 0, PAGE)])))
    time.sleep(0.3)
    before, began_s = _wakeups_and_cpu_s(), time.monotonic()
    assert before[0] > 0
    time.sleep(2)
    wakeups, cpu_s = (now - then for now, then in zip(_wakeups_and_cpu_s(), before, strict=True))
    elapsed_s = time.monotonic() - began_s
    assert wakeups < 20 * elapsed_s
    assert cpu_s < 0.1 * elapsed_s, "a thread that does not sleep takes all of it, or its share"
    for transport in (reader.transport, target.transport):
        transport.close()


def test_caller_hands_over_and_returns() -> None:
    """100,000 rows from a frozen peer: posting waits for nobody, and the array is the caller's again."""
    count = 100_000
    with PeerProcess() as process:
        process.call(at.open_target, UcxTransport, [BIG], 1)
        reader = Reader.open(UcxTransport(), BIG)
        peer = reader.transport.connect(*process.call(at.exports))
        rows = reader.rows([(i * 512, 0, ((i * 7919) % count) * 512, 256) for i in range(count)])
        given = rows.copy()
        process.signal(signal.SIGSTOP)
        read = reader.transport.read(peer, given)
        given[:] = 0
        assert reader.transport.poll() == []
        process.signal(signal.SIGCONT)
        done(reader.finish(read))
        source = SimpleNamespace()
        at.open_target(source, UcxTransport, [BIG], 1)
        reader.check(rows, source.buffers)
        for transport in (reader.transport, source.transport):
            transport.close()


def test_another_minor_version_is_refused_before_it_is_contacted() -> None:
    """Found the hard way: a target with 1.13 aborts when it is greeted by 1.22."""
    target, reader = _link()
    address, keys = at.exports(target)
    theirs = "1.21.3" if not _is_old(target.transport) else "1.22.0"
    old = UcxAddress.unpack(address)._replace(ucx_version=theirs, worker=b"would crash")
    with pytest.raises(ConnectError, match=rf"the peer runs UCX {theirs}, this process 1\."):
        reader.transport.connect(old.pack(), keys)
    for transport in (reader.transport, target.transport):
        transport.close()


def test_another_process_at_the_same_address_is_noticed() -> None:
    """As after a restart that got the old port: it answers, is not the one that was asked for, and lives on."""
    target, reader = _link()
    address, keys = at.exports(target)
    old = UcxAddress.unpack(address)._replace(instance=b"?" * 16, table_addr=0x1000)
    for _ in range(3):
        with pytest.raises(PeerIdentityError, match=r"has restarted: another transport \(UCX 1\."):
            reader.transport.connect(old.pack(), [])
    peer = reader.transport.connect(address, keys)
    done(reader.read(peer, reader.rows([(0, 0, 0, PAGE)])))
    for transport in (reader.transport, target.transport):
        transport.close()


def _read_for_ever(state: SimpleNamespace, address: bytes, keys: list[bytes]) -> None:
    state.reader = Reader.open(UcxTransport(), BIG)
    peer = state.reader.transport.connect(address, keys)
    for _ in range(20):
        state.reader.transport.read(peer, state.reader.rows([(0, 0, 0, BIG)]))


def test_a_reader_killed_in_mid_read_harms_nobody() -> None:
    """UCX's emulation of GET would abort the producer here."""
    target, reader = _link(BIG)
    peer = reader.transport.connect(*at.exports(target))
    for _ in range(4):
        with PeerProcess() as other:
            other.call(_read_for_ever, *at.exports(target))
            other.kill()
        rows = reader.rows([(0, 0, 0, PAGE)])
        done(reader.read(peer, rows))
    for transport in (reader.transport, target.transport):
        transport.close()


def test_a_frozen_reader_does_not_slow_others() -> None:
    target, reader = _link(BIG)
    peer = reader.transport.connect(*at.exports(target))
    with PeerProcess() as other:
        other.call(_read_for_ever, *at.exports(target))
        other.signal(signal.SIGSTOP)
        time.sleep(0.2)
        start = time.monotonic()
        done(reader.read(peer, reader.rows([(0, 0, 0, PAGE)])))
        assert time.monotonic() - start < 10
    for transport in (reader.transport, target.transport):
        transport.close()


def test_two_that_read_each_other_part_on_one_side_only() -> None:
    left, right = _link()
    at.open_target(other := SimpleNamespace(), lambda: right.transport, [PAGE], 2)
    there = right.transport.connect(*at.exports(left))
    back = Reader.open(left.transport, PAGE)
    here = left.transport.connect(*at.exports(other))
    right.transport.disconnect(there)
    time.sleep(0.3)
    rows = back.rows([(0, 0, 0, PAGE)])
    done(back.read(here, rows))
    back.check(rows, other.buffers)
    assert left.transport.poll() == []
    for transport in (right.transport, left.transport):
        transport.close()


def test_short_reads_are_not_stuck_behind_long_ones() -> None:
    target, reader = _link(BIG)
    peer = reader.transport.connect(*at.exports(target))
    long = [reader.transport.read(peer, reader.rows([(0, 0, 0, BIG)])) for _ in range(4)]
    short = reader.transport.read(peer, reader.rows([(0, 0, 0, 64)]))
    ended = poll_until(reader.transport, short)
    assert len(ended) == 1, "the short read ended after a long one"
    reader.drain(set(long))
    for transport in (reader.transport, target.transport):
        transport.close()


def test_many_peers_and_reads_in_turn() -> None:
    targets = [SimpleNamespace() for _ in range(8)]
    for index, target in enumerate(targets):
        at.open_target(target, UcxTransport, [64 * PAGE], index)
    reader = Reader.open(UcxTransport(), 8 * 64 * PAGE)
    rows, reads = [], set()
    for index, target in enumerate(targets):
        peer = reader.transport.connect(*at.exports(target))
        pieces = [(index * 64 * PAGE + a, 0, b, n) for a, _, b, n in scattered(32, PAGE, 64, index)]
        rows.append(reader.rows(pieces))
        reads.add(reader.transport.read(peer, rows[-1]))
    for ended in reader.drain(reads).values():
        done(ended)
    everything = as_rows(np.concatenate([part + np.array([0, i, 0, 0], np.uint64) for i, part in enumerate(rows)]))
    reader.check(everything, [target.buffers[0] for target in targets])
    for transport in (reader.transport, *(target.transport for target in targets)):
        transport.close()


def test_forked_child_is_told_and_ends() -> None:
    script = textwrap.dedent("""
        import os, sys
        from kvrdma.errors import TransportClosedError
        from kvrdma_ucx import UcxTransport
        transport = UcxTransport()
        child = os.fork()
        if child == 0:
            try:
                transport.address()
            except TransportClosedError as error:
                sys.exit(7 if "does not survive fork" in str(error) else 8)
            sys.exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        transport.address()
        """)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)


def test_unmapped_memory_is_not_registered() -> None:
    transport = UcxTransport()
    with pytest.raises(RegistrationError, match="nothing is mapped at 0x1000"):
        transport.register(0x1000, PAGE, Device())
    with pytest.raises(RegistrationError, match=r"cannot handle CUDA memory|no CUDA driver"):
        transport.register(id(transport), 64, Device("cuda", 0))
    transport.close()


@pytest.mark.parametrize("options", [{"max_in_flight": 0}, {"max_in_flight": 5000}, {"connect_timeout_s": 0}])
def test_settings_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        UcxTransport(**options)  # type: ignore[arg-type]


def test_settings_of_the_user_win_and_the_environment_is_not_touched() -> None:
    script = textwrap.dedent("""
        import os
        before = dict(os.environ)
        from kvrdma_ucx import UcxTransport
        transport = UcxTransport()
        assert dict(os.environ) == before
        print(transport.capabilities().details["transports"])
        """)
    environ = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environ, check=True, capture_output=True, text=True, timeout=30
    )
    assert ended.stdout.split() == ["tcp/lo"]
    assert ended.stderr == ""


def test_connect_gives_up_in_time_and_close_does_not_wait_for_it() -> None:
    with PeerProcess() as process:
        process.call(at.open_target, UcxTransport, [PAGE], 1)
        address, keys = process.call(at.exports)
        process.signal(signal.SIGSTOP)
        transport = UcxTransport(connect_timeout_s=0.5)
        start = time.monotonic()
        with pytest.raises(ConnectError, match=r"did not answer within 0\.5"):
            transport.connect(address, keys)
        assert time.monotonic() - start < 10
        patient = UcxTransport(connect_timeout_s=30)
        errors: list[Exception] = []
        thread = threading.Thread(target=lambda: errors.append(_error_of(patient, address, keys)))
        thread.start()
        time.sleep(0.3)
        patient.close()
        thread.join(5)
        assert not thread.is_alive()
        assert isinstance(errors[0], TransportClosedError | ConnectError)
        transport.close()


def _error_of(transport: UcxTransport, address: bytes, keys: list[bytes]) -> Exception:
    try:
        transport.connect(address, keys)
    except (TransportClosedError, ConnectError) as error:
        return error
    raise AssertionError("connected to a frozen process")


def test_a_peer_that_closes_is_lost_at_once() -> None:
    target, reader = _link()
    peer = reader.transport.connect(*at.exports(target))
    start = time.monotonic()
    target.transport.close()
    assert wait([reader.transport], 2.0)
    (lost,) = reader.transport.poll()
    assert isinstance(lost, PeerLost)
    assert lost.peer == peer.id
    assert time.monotonic() - start < 2
    reader.transport.close()


def _threads() -> set[str]:
    tasks = Path("/proc/self/task").iterdir()
    return {task.name for task in tasks if (task / "comm").read_text().strip() == "kvrdma-ucx"}


def test_threads_end_with_their_transports() -> None:
    before = _threads()
    transports = [UcxTransport() for _ in range(3)]
    ours = _threads() - before
    assert len(ours) == 3
    transports.pop().close()
    assert len(_threads() & ours) == 2
    del transports
    assert not _threads() & ours
