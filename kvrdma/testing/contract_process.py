"""Contract: peers that are other processes, and what they do to us: freeze, die, restart."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from typing import ClassVar

import pytest

from kvrdma.errors import PeerLostError, ReadTimeoutError, TransportError
from kvrdma.inflight import InFlight, ReadReleased
from kvrdma.testing import target as at
from kvrdma.testing.contract_base import ContractBase
from kvrdma.testing.target import PAGE, Reader, Target, done
from kvrdma.transport import Completion, PeerLost, ReadDone, ReadFailed, wait

BIG = 64 << 20
NOTICE_S = 2.0
CLOSE_S = 5.0


class ProcessPartContract(ContractBase):
    """Death, freezing and restart of a peer process."""

    two_processes: ClassVar[bool] = True
    works_while_stopped: ClassVar[bool] = False
    """Whether a read from a stopped process completes (no CPU of the peer is needed)."""

    def test_peer_killed_in_mid_read(self) -> None:
        reader, target, peer, sources = self.link(BIG, [BIG])
        rows = reader.rows([(0, 0, 0, BIG)])
        reads = {reader.transport.read(peer, rows) for _ in range(20)}
        _kill(target)
        ended = _poll_until_lost(reader, NOTICE_S)
        assert sorted(c.read for c in ended if not isinstance(c, PeerLost)) == sorted(reads)
        failed = [c for c in ended if isinstance(c, ReadFailed)]
        assert failed, "20 reads of 64 MiB ended before the peer was killed?"
        assert all(isinstance(c.reason, PeerLostError) for c in failed), failed
        assert isinstance(ended[-1], PeerLost)
        if len(failed) < len(reads):
            assert len(sources[0]) == BIG
        with pytest.raises(PeerLostError):
            reader.transport.read(peer, rows)
        _close_in_time(reader)

    def test_peer_killed_when_idle(self) -> None:
        reader, target, peer, _ = self.link(PAGE, [PAGE])
        done(reader.read(peer, reader.rows([(0, 0, 0, PAGE)])))
        _kill(target)
        (lost,) = _poll_until_lost(reader, NOTICE_S)
        assert isinstance(lost, PeerLost)
        assert lost.peer == peer.id
        with pytest.raises(PeerLostError):
            reader.transport.read(peer, reader.rows([(0, 0, 0, PAGE)]))
        reader.transport.disconnect(peer)
        _close_in_time(reader)

    def test_other_peers_go_on_when_one_dies(self) -> None:
        reader, doomed, _, _ = self.link(2 * PAGE, [PAGE])
        healthy = self.connect(reader, self.target([PAGE], seed=9))
        _kill(doomed)
        _poll_until_lost(reader, NOTICE_S)
        rows = reader.rows([(PAGE, 0, 0, PAGE)])
        done(reader.read(healthy, rows))
        reader.check(rows, [at.pattern(9, PAGE)])

    def test_close_after_the_peer_was_killed(self) -> None:
        reader, target, peer, _ = self.link(BIG, [BIG])
        for _ in range(10):
            reader.transport.read(peer, reader.rows([(0, 0, 0, BIG)]))
        _kill(target)
        _close_in_time(reader)

    def test_peer_frozen(self) -> None:
        reader, target, peer, sources = self.link(PAGE, [PAGE])
        rows = reader.rows([(0, 0, 0, PAGE)])
        done(reader.read(peer, rows))
        reader.buffer[:] = at.POISON
        assert target.process
        target.process.signal(signal.SIGSTOP)
        reads = InFlight(reader.transport)
        read = reads.read(peer, rows, timeout_s=0.5)
        first = _next_outcome(reads, reader)
        if self.works_while_stopped:
            done(first)  # type: ignore[arg-type]
        else:
            assert isinstance(first, ReadFailed)
            assert isinstance(first.reason, ReadTimeoutError)
            assert reads.quarantined == (read,)
            target.process.signal(signal.SIGCONT)
            assert _next_outcome(reads, reader) == ReadReleased(read)
        assert reads.quarantined == ()
        reader.check(rows, sources)

    def test_disconnect_and_close_while_the_peer_is_frozen(self) -> None:
        reader, target, peer, _ = self.link(BIG, [BIG])
        assert target.process
        target.process.signal(signal.SIGSTOP)
        read = reader.transport.read(peer, reader.rows([(0, 0, 0, BIG)]))
        reader.transport.disconnect(peer)
        assert isinstance(reader.finish(read, CLOSE_S), ReadDone | ReadFailed)
        _close_in_time(reader)

    def test_close_while_the_peer_is_frozen(self) -> None:
        reader, target, peer, _ = self.link(BIG, [BIG])
        assert target.process
        target.process.signal(signal.SIGSTOP)
        for _ in range(4):
            reader.transport.read(peer, reader.rows([(0, 0, 0, BIG)]))
        _close_in_time(reader)

    def test_peer_restarted(self) -> None:
        reader, target, peer, _ = self.link(PAGE, [PAGE])
        address, keys = target.call(at.exports)
        rows = reader.rows([(0, 0, 0, PAGE)])
        done(reader.read(peer, rows))
        _kill(target)
        successor = self.target([PAGE], seed=33)
        _poll_until_lost(reader, NOTICE_S)
        with pytest.raises(TransportError):
            _read_once(reader, address, keys)
        done(reader.read(self.connect(reader, successor), rows))
        reader.check(rows, [at.pattern(33, PAGE)])

    @pytest.mark.parametrize("how", ["return", "sys.exit(0)", "gc", "close"])
    def test_interpreter_exit_with_reads_in_flight(self, how: str) -> None:
        target = self.target([BIG])
        address, keys = target.call(at.exports)
        factory = type(self).factory
        script = textwrap.dedent(f"""
            import gc, pickle, sys, numpy as np
            from kvrdma.testing.target import Reader
            factory = pickle.loads({__import__("pickle").dumps(factory)!r})
            reader = Reader.open(factory(), {BIG})
            peer = reader.transport.connect({address!r}, {keys!r})
            for _ in range(10):
                reader.transport.read(peer, reader.rows([(0, 0, 0, {BIG})]))
            transport, buffer, how = reader.transport, reader.buffer, {how!r}
            if how == "gc":
                del reader, transport
            elif how == "close":
                transport.close()
            elif how != "return":
                sys.exit(0)
        """)
        ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")


def _kill(target: Target) -> None:
    assert target.process
    target.process.kill()


def _read_once(reader: Reader, address: bytes, keys: list[bytes]) -> None:
    """Connect and read; raises the reason if the read fails."""
    peer = reader.transport.connect(address, keys)
    ended = reader.read(peer, reader.rows([(0, 0, 0, 64)]), 20.0)
    if isinstance(ended, ReadFailed):
        raise ended.reason


def _poll_until_lost(reader: Reader, seconds: float) -> list[Completion]:
    seen: list[Completion] = []
    end = time.monotonic() + seconds
    while not any(isinstance(c, PeerLost) for c in seen):
        left_s = end - time.monotonic()
        assert left_s > 0, f"no PeerLost within {seconds} s, only {seen}"
        wait([reader.transport], left_s)
        seen += reader.transport.poll()
    return seen


def _next_outcome(reads: InFlight, reader: Reader) -> object:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        outcomes = reads.poll()
        if outcomes:
            assert len(outcomes) == 1, outcomes
            return outcomes[0]
        wait([reader.transport], 0.05)
    raise AssertionError("nothing ended within 30 s")


def _close_in_time(reader: Reader) -> None:
    start = time.monotonic()
    reader.transport.close()
    assert time.monotonic() - start < CLOSE_S
