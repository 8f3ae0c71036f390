"""A producer, and a consumer over a transport that misbehaves on demand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from kvrdma.config import Config
from kvrdma.reference import PullReference
from kvrdma.testing import Fault, FaultTransport
from kvrdma.transport import open_transport
from tests.helpers.tagged import SMALL, Model, Rank, Side

MODEL = Model()
WORD = Fault.NONE
"""The read of the lease's word, which comes before the data."""


class Scene:
    """One engine of one rank on either side, in this process."""

    def __init__(self, config: Config = SMALL) -> None:
        self.fault = FaultTransport(open_transport("memory"))
        self.producer = Side(MODEL, transport=lambda: FaultTransport(open_transport("memory")), config=config)
        self.consumer = Side(MODEL, transport=lambda: self.fault, config=config)
        self.rank: Rank = self.consumer.ranks[0]
        self.sender: Rank = self.producer.ranks[0]

    def publish(self, request: int = 1, blocks: Sequence[int] = (8, 6, 7)) -> PullReference:
        """Publish as an engine of several ranks would: its consumer looks at the word first."""
        made = self.producer.publish(request, list(blocks), 4 * len(blocks))
        return msgspec.structs.replace(made, live=False)

    def close(self) -> None:
        self.consumer.close()
        self.producer.close()


def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
