"""What every part of the contract suite shares: how its two ends come to be and go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import pytest

from kvrdma.testing import target as at
from kvrdma.testing.peer import PeerProcess
from kvrdma.testing.target import Bytes, Factory, Reader, Target
from kvrdma.transport import Peer, Transport

SEED = 1


class ContractBase:
    """Opens transports and targets and closes them after each test."""

    factory: ClassVar[Factory]
    """Opens the transport under test; picklable, e.g. ``functools.partial(open_transport, "name")``."""
    two_processes: ClassVar[bool] = False
    """Whether targets live in a process of their own."""
    environ: ClassVar[Mapping[str, str]] = {}
    """Environment of those processes."""
    stale_keys_noticed: ClassVar[bool] = True
    """Whether reading a deregistered region is reported as failed."""
    timeout_s: ClassVar[float] = 60.0
    """How long a read may take before its test fails."""

    @pytest.fixture(autouse=True)
    def _ends(self) -> Iterator[None]:
        self._transports: list[Transport] = []
        self._targets: list[Target] = []
        yield
        for transport in self._transports:
            transport.close()
        for target in self._targets:
            target.close()
        self._transports.clear()  # pytest keeps this instance, and closed transports keep what poll() may still need
        self._targets.clear()

    def open(self) -> Transport:
        """Open a transport that is closed after the test."""
        transport = type(self).factory()
        self._transports.append(transport)
        return transport

    def reader(self, nbytes: int) -> Reader:
        """Open a reading end with ``nbytes`` of poison."""
        return Reader.open(self.open(), nbytes, self.timeout_s)

    def new_target(self) -> Target:
        """Make a place for a target, in another process if the suite says so."""
        target = Target(PeerProcess(self.environ) if self.two_processes else None)
        self._targets.append(target)
        return target

    def target(self, sizes: Sequence[int], seed: int = SEED) -> Target:
        """Open a target with one region of pattern per size."""
        target = self.new_target()
        target.call(at.open_target, type(self).factory, sizes, seed)
        return target

    def connect(self, reader: Reader, target: Target) -> Peer:
        """Connect the reader to every region of the target."""
        return reader.transport.connect(*target.call(at.exports))

    def link(self, nbytes: int, sizes: Sequence[int]) -> tuple[Reader, Target, Peer, list[Bytes]]:
        """Open both ends and connect them; also returns the bytes that the target's regions hold."""
        target = self.target(sizes)
        reader = self.reader(nbytes)
        sources = [at.pattern(SEED + index, size) for index, size in enumerate(sizes)]
        return reader, target, self.connect(reader, target), sources
