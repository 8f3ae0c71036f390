"""Contract: peers that are other processes, and what they do to us: freeze, die, restart."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from typing import ClassVar

import numpy as np
import pytest

from kvrdma.errors import PeerLostError, ReadTimeoutError, TransportError
from kvrdma.inflight import InFlight, ReadReleased
from kvrdma.testing import target as at
from kvrdma.testing.contract_base import ContractBase
from kvrdma.testing.target import PAGE, Reader, Target, done
from kvrdma.transport import Completion, PeerLost, ReadDone, ReadFailed, ReadId, wait

BIG = 64 << 20
SLOTS, SLOT = 16, 8 << 20
OFFSETS = 61
"""Has no factor in common with the slots: no slot gets the same bytes twice in a row."""
TRIES = 10
NOTICE_S = 30.0
"""Against waiting for ever; what is noticed is noticed at once, on a machine that has time for it."""
CLOSE_S = 5.0


class ProcessPartContract(ContractBase):
    """Death, freezing and restart of a peer process."""

    two_processes: ClassVar[bool] = True
    works_while_stopped: ClassVar[bool] = False
    """Whether a read from a stopped process completes (no CPU of the peer is needed)."""

    def test_peer_killed_in_mid_read(self) -> None:
        """The peer dies under reads that are posted over and over: what was done is right, what was not fails."""
        for _ in range(TRIES):
            if failed := self._kill_under_reads():
                assert all(isinstance(each.reason, PeerLostError) for each in failed), failed
                return
        raise AssertionError(f"in {TRIES} tries no read was under way when the peer died")

    def _kill_under_reads(self) -> list[ReadFailed]:
        """Read into every slot again and again, each time other bytes, kill the peer when one is done; what failed."""
        reader, target, peer, (source,) = self.link(SLOTS * SLOT, [SLOT + OFFSETS * PAGE])
        assert target.process
        under_way: dict[ReadId, tuple[int, int]] = {}
        free, posted = list(range(SLOTS)), 0
        failed: list[ReadFailed] = []
        completion: Completion | None = None
        end = time.monotonic() + NOTICE_S
        while not isinstance(completion, PeerLost):
            assert time.monotonic() < end, f"no PeerLost within {NOTICE_S} s, {len(failed)} of {posted} reads failed"
            with suppress(PeerLostError):  # PeerLost is still to be polled
                while free:
                    slot, offset = free[0], posted % OFFSETS * PAGE
                    read = reader.transport.read(peer, reader.rows([(slot * SLOT, 0, offset, SLOT)]))
                    under_way[read] = free.pop(0), offset
                    posted += 1
            wait([reader.transport], 0.1)
            for completion in reader.transport.poll():
                if isinstance(completion, PeerLost):
                    continue
                slot, offset = under_way.pop(completion.read)
                if isinstance(completion, ReadFailed):
                    failed.append(completion)
                    continue
                here = reader.buffer[slot * SLOT : (slot + 1) * SLOT]
                # A byte of each page: to look at all of them takes longer than to read them, and nothing would be read.
                assert np.array_equal(here[::PAGE], source[offset : offset + SLOT : PAGE]), f"read {completion.read}"
                free.append(slot)
                target.process.signal(signal.SIGKILL)  # without waiting for its end: reads go on until then
        assert not under_way, "PeerLost came before the ends of its reads"
        with pytest.raises(PeerLostError):
            reader.transport.read(peer, reader.rows([(0, 0, 0, SLOT)]))
        _close_in_time(reader)
        return failed

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
