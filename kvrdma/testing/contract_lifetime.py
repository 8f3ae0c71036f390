"""Contract: every read ends exactly once, and nothing is left behind, in whatever order things go away."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvrdma.errors import (
    PeerLostError,
    ReadCancelledError,
    RegionBusyError,
    RegistrationError,
    StaleRegionError,
    TransportClosedError,
    TransportError,
)
from kvrdma.testing import target as at
from kvrdma.testing.contract_base import ContractBase
from kvrdma.testing.target import PAGE, Reader, done
from kvrdma.transport import Completion, Device, Peer, PeerLost, ReadDone, ReadFailed, ReadId, wait

BIG = 32 << 20


def open_fds() -> int:
    """Count this process's open file descriptors."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def resident_bytes() -> int:
    """Give this process's resident memory: counted; ``statm`` is an estimate, off by 20 MB where a NIC is mapped."""
    return int(Path("/proc/self/smaps_rollup").read_text().partition("\nRss:")[2].split()[0]) << 10


class LifetimeContract(ContractBase):
    """Ends of reads, regions, peers and transports."""

    def test_poll_when_idle(self) -> None:
        reader, _, peer, _ = self.link(PAGE, [PAGE])
        assert reader.transport.poll() == []
        done(reader.read(peer, reader.rows([(0, 0, 0, PAGE)])))
        assert reader.transport.poll() == []
        assert not wait([reader.transport], 0)

    def test_descriptor_is_readable_while_something_waits(self) -> None:
        reader, _, peer, _ = self.link(PAGE, [PAGE])
        reads = {reader.transport.read(peer, reader.rows([(0, 0, 0, PAGE)])) for _ in range(3)}
        for _ in range(2):
            assert wait([reader.transport], 30)
        reader.drain(reads)
        assert not wait([reader.transport], 0)

    def test_completion_carries_the_ids(self) -> None:
        reader, _, peer, _ = self.link(PAGE, [PAGE])
        read = reader.transport.read(peer, reader.rows([(0, 0, 0, 8), (16, 0, 16, 8)]))
        assert reader.finish(read) == ReadDone(read, peer.id, rows=2, rows_posted=2, nbytes=16)

    def test_peer_describes_itself(self) -> None:
        reader, _, peer, _ = self.link(PAGE, [PAGE, 7])
        capabilities = reader.transport.capabilities()
        assert peer.transport == reader.transport.name
        assert [region.nbytes for region in peer.regions] == [PAGE, 7]
        assert peer.via
        assert "cpu" in capabilities.memory_kinds
        assert not peer.one_sided or capabilities.one_sided

    def test_deregister_waits_for_reads_into_the_region(self) -> None:
        reader, _, peer, sources = self.link(BIG, [BIG])
        rows = reader.rows([(0, 0, 0, BIG)])
        reads = {reader.transport.read(peer, rows) for _ in range(4)}
        with pytest.raises(RegionBusyError):
            reader.transport.deregister(reader.region)
        for ended in reader.drain(reads).values():
            done(ended)
        reader.check(rows, sources)
        reader.transport.deregister(reader.region)

    def test_region_that_overlaps_the_destination_of_a_read_is_busy(self) -> None:
        reader, _, peer, _ = self.link(BIG, [BIG])
        part = reader.transport.register(reader.buffer.ctypes.data, BIG // 2, Device())
        rows = reader.rows([(0, 0, 0, BIG // 2)])  # may count to either region
        reads = {reader.transport.read(peer, rows) for _ in range(8)}
        with pytest.raises(RegionBusyError):
            reader.transport.deregister(part)
        reader.drain(reads)
        reader.transport.deregister(part)

    def test_regions_and_peers_of_another_transport_are_refused(self) -> None:
        reader, target, peer, sources = self.link(PAGE, [PAGE])
        other = self.reader(PAGE)
        stranger = self.connect(other, target)
        with pytest.raises(RegistrationError):
            reader.transport.deregister(other.region)
        with pytest.raises(PeerLostError):
            reader.transport.read(stranger, reader.rows([(0, 0, 0, PAGE)]))
        reader.transport.disconnect(stranger)
        rows = reader.rows([(0, 0, 0, PAGE)])
        done(reader.read(peer, rows))  # neither has been touched
        reader.check(rows, sources)
        done(other.read(stranger, other.rows([(0, 0, 0, PAGE)])))

    def test_region_deregistered_by_the_peer(self) -> None:
        reader, target, peer, _ = self.link(2 * PAGE, [PAGE, PAGE])
        target.call(at.deregister, 0)
        if self.stale_keys_noticed:
            ended = reader.read(peer, reader.rows([(0, 0, 0, PAGE)]))
            assert isinstance(ended, ReadFailed), ended
            assert isinstance(ended.reason, StaleRegionError | PeerLostError), ended
        reader.buffer[:] = at.POISON
        rows = reader.rows([(PAGE, 1, 0, PAGE)])
        assert isinstance(reader.read(peer, rows), ReadDone)
        reader.check(rows, [at.pattern(1, PAGE), at.pattern(2, PAGE)])

    def test_key_from_before_a_new_registration(self) -> None:
        reader, target, peer, sources = self.link(PAGE, [PAGE])
        target.call(at.deregister, 0)
        target.call(at.reregister, 0)
        rows = reader.rows([(0, 0, 0, PAGE)])
        if self.stale_keys_noticed:
            assert isinstance(reader.read(peer, rows), ReadFailed)
        done(reader.read(self.connect(reader, target), rows))
        reader.check(rows, sources)

    def test_disconnect_with_reads_in_flight(self) -> None:
        reader, target, peer, _ = self.link(BIG, [BIG])
        reads = {reader.transport.read(peer, reader.rows([(0, 0, 0, BIG)])) for _ in range(8)}
        reader.transport.disconnect(peer)
        for ended in reader.drain(reads).values():
            if isinstance(ended, ReadFailed):
                assert isinstance(ended.reason, ReadCancelledError | PeerLostError), ended
        again = self.connect(reader, target)
        done(reader.read(again, reader.rows([(0, 0, 0, PAGE)])))

    def test_nothing_is_written_after_a_read_has_ended(self) -> None:
        reader, _, peer, _ = self.link(BIG, [BIG])
        reads = {reader.transport.read(peer, reader.rows([(0, 0, 0, BIG)])) for _ in range(8)}
        reader.transport.disconnect(peer)
        reader.drain(reads)
        reader.buffer[:] = at.POISON
        for _ in range(20):
            reader.transport.poll()
            time.sleep(0.01)
        reader.check(reader.rows([]), [])

    def test_disconnect_is_idempotent(self) -> None:
        reader, _, peer, _ = self.link(PAGE, [PAGE])
        reader.transport.disconnect(peer)
        reader.transport.disconnect(peer)
        with pytest.raises(PeerLostError):
            reader.transport.read(peer, reader.rows([(0, 0, 0, 8)]))
        assert reader.transport.poll() == []

    def test_disconnect_one_of_two(self) -> None:
        reader, target, peer, sources = self.link(BIG, [BIG])
        other = self.connect(reader, target)
        rows = reader.rows([(0, 0, 0, BIG)])
        reads = {reader.transport.read(p, rows): p for p in (peer, other) * 3}
        reader.transport.disconnect(peer)
        for read, ended in reader.drain(set(reads)).items():
            if reads[read] is other:
                done(ended)
        reader.check(rows, sources)

    def test_close_twice(self) -> None:
        transport = self.reader(PAGE).transport
        transport.close()
        transport.close()
        assert transport.poll() == []

    def test_close_with_reads_in_flight(self) -> None:
        reader, _, peer, _ = self.link(BIG, [BIG])
        reads = {reader.transport.read(peer, reader.rows([(0, 0, 0, BIG)])) for _ in range(8)}
        reader.transport.close()
        ended = [c for c in _poll_for(reader, 1.0) if not isinstance(c, PeerLost)]
        assert sorted(c.read for c in ended) == sorted(reads)

    def test_everything_is_refused_after_close(self) -> None:
        reader, target, peer, _ = self.link(PAGE, [PAGE])
        address, keys = target.call(at.exports)
        transport = reader.transport
        transport.close()
        for call in (
            lambda: transport.register(reader.buffer.ctypes.data, PAGE, Device()),
            lambda: transport.deregister(reader.region),
            lambda: transport.address(),  # noqa: PLW0108
            lambda: transport.connect(address, keys),
            lambda: transport.read(peer, reader.rows([])),
        ):
            with pytest.raises(TransportClosedError):
                call()
        transport.disconnect(peer)

    def test_target_closes_while_it_is_read(self) -> None:
        reader, target, peer, sources = self.link(BIG, [BIG])
        rows = reader.rows([(0, 0, 0, BIG)])
        reads = {reader.transport.read(peer, rows) for _ in range(8)}
        target.call(at.close_target)
        ended = reader.drain(reads)
        if any(isinstance(c, ReadDone) for c in ended.values()):
            reader.check(rows, sources)
        assert isinstance(_read_anyway(reader, peer), TransportError)

    def test_target_closes_and_opens_again(self) -> None:
        reader, target, peer, _ = self.link(PAGE, [PAGE])
        target.call(at.close_target)
        target.call(at.open_target, type(self).factory, [PAGE], 77)
        rows = reader.rows([(0, 0, 0, PAGE)])
        assert isinstance(_read_anyway(reader, peer), TransportError)
        reader.buffer[:] = at.POISON
        done(reader.read(self.connect(reader, target), rows))
        reader.check(rows, [at.pattern(77, PAGE)])

    @pytest.mark.parametrize("order", ["peer first", "transport first", "in a cycle"])
    def test_objects_dropped_in_any_order(self, order: str) -> None:
        target = self.target([BIG])
        before = threading.active_count()
        transport = type(self).factory()
        reader = Reader.open(transport, BIG, self.timeout_s)
        peer = self.connect(reader, target)
        transport.read(peer, reader.rows([(0, 0, 0, BIG)]))
        if order == "peer first":
            del peer
        elif order == "in a cycle":
            loop: list[object] = [transport, peer]
            loop.append(loop)
            del loop
        kept = reader.buffer  # the caller keeps the memory alive until the transport is gone
        del transport, reader
        gc.collect()
        assert threading.active_count() <= before + 1
        assert len(kept) == BIG

    def test_20_000_batches_leave_nothing_behind(self) -> None:
        reader, target, peer, sources = self.link(64 * PAGE, [64 * PAGE])
        rows = reader.rows([(i * PAGE, 0, (63 - i) * PAGE, 64) for i in range(64)])
        start_fds, start_bytes = 0, 0
        for round_ in range(200):
            for _ in range(10):
                reader.drain({reader.transport.read(peer, rows[i : i + 7]) for i in range(0, 60, 6)})
            extra = reader.transport.register(reader.buffer.ctypes.data, PAGE, Device())
            again = self.connect(reader, target)
            reader.transport.disconnect(again)
            reader.transport.deregister(extra)
            if round_ == 50:
                start_fds, start_bytes = open_fds(), resident_bytes()
        reader.check(rows[:61], sources)
        assert open_fds() <= start_fds + 2
        assert resident_bytes() <= start_bytes + (8 << 20)


def _poll_for(reader: Reader, seconds: float) -> list[Completion]:
    seen: list[Completion] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        seen += reader.transport.poll()
        time.sleep(0.01)
    return seen


def _read_anyway(reader: Reader, peer: Peer) -> TransportError | None:
    """Read from a peer that should be gone; give the error it ends with, or None if it claims success."""
    try:
        read: ReadId = reader.transport.read(peer, reader.rows([(0, 0, 0, 64)]))
    except PeerLostError as error:
        return error
    ended = reader.finish(read)
    assert np.isin(reader.buffer[0], [at.POISON, reader.buffer[0]])
    return ended.reason if isinstance(ended, ReadFailed) else None
