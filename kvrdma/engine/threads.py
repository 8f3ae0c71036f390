"""An engine's own two threads: one moves data, one watches the clock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from kvrdma.engine.consumer import Consumer
from kvrdma.engine.loop import Loop
from kvrdma.engine.peers import Peers
from kvrdma.engine.producer import Producer
from kvrdma.engine.tenant import Tenant
from kvrdma.errors import ConfigError
from kvrdma.thread_start import start_thread
from kvrdma.transport import Transport

_CLOSE_S = 5.0
_HOUSEKEEPING_S = 1.0
_TICK_S = (0.02, 0.5)
"""Shortest and longest time between two looks at leases and heartbeats."""
_log = logging.getLogger(__name__)


class EngineThreads:
    """Runs the parts of an engine until ``close``, or until one of them meets a defect.

    The clock has a thread of its own, so that leases end and heartbeats go out whatever the data thread is busy
    with.
    """

    def __init__(self, loop: Loop, consumer: Consumer, peers: Peers, tenant: Tenant, producer: Producer) -> None:
        """Prepare; nothing runs before ``start``."""
        self._loop = loop
        self._consumer = consumer
        self._peers = peers
        self._tenant = tenant
        self._producer = producer
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self.defect: BaseException | None = None

    def start(self, transports: Sequence[Transport], at_defect: Callable[[], None]) -> None:
        """Start both.

        Args:
            transports: the data thread closes them at its end, and follows up on what they report then.
            at_defect: called when everything has ended because of one.

        Raises:
            ConfigError: there can be no more threads.
        """

        def move_data() -> None:
            self._guard(self._move_data)
            self._guard(lambda: self._shut_down(transports))
            if self.defect is not None:
                at_defect()

        for name, target in (("data", move_data), ("clock", lambda: self._guard(self._watch_clock))):
            thread = threading.Thread(target=target, name=f"kvrdma {name}", daemon=True)
            try:
                start_thread(thread)
            except ConfigError:
                self.close()
                raise
            self._threads.append(thread)

    def close(self) -> None:
        """End both threads, within some seconds."""
        self._closing.set()
        self._loop.run(lambda: None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_S)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - nobody may wait for a thread that has ended
            self.defect = self.defect or error
            _log.exception("the engine is ended by a defect")
            self._closing.set()
            self._loop.run(lambda: None)

    def _move_data(self) -> None:
        housekeeping_s = self._loop.now()
        while not self._closing.is_set():
            self._loop.step(_HOUSEKEEPING_S, self._consumer.take)
            if self._loop.now() - housekeeping_s > _HOUSEKEEPING_S:
                housekeeping_s = self._loop.now()
                self._consumer.drop_idle_peers()

    def _shut_down(self, transports: Sequence[Transport]) -> None:
        try:
            self._loop.finish()
            self._consumer.close(self.defect)
            self._peers.close()
        finally:
            for transport in transports:
                transport.close()
        self._loop.collect(self._consumer.take)
        self._consumer.abandon()

    def _watch_clock(self) -> None:
        wait_s = 0.0
        while not self._closing.wait(wait_s):
            next_s = min(self._producer.expire(), self._tenant.beat())
            wait_s = min(max(next_s, _TICK_S[0]), _TICK_S[1])
