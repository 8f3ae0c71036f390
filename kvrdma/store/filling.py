"""``Filler``: the thread that reads what senders offer, and follows up on what the engines report."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from kvrdma.engine.peers import Sparing
from kvrdma.errors import KVRDMAError, MessageError
from kvrdma.reference import PullReference
from kvrdma.store.shelf import Shelf, Stock
from kvrdma.wire import StoreOffer

MAX_QUEUED = 1024
_MAX_FILL_S = 60.0
_IDLE_S = 5.0
_REFUSE_S = 5.0
_MAX_REFUSED = 16
_CLOSE_S = 10.0
_WARN_EVERY_S = 10.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FillName:
    """Names a filling among an engine's pulls."""

    number: int


class Filler:
    """Takes offers from any thread and fills the shelf with them."""

    def __init__(self, shelf: Shelf) -> None:
        """Start the thread."""
        self._shelf = shelf
        self._offers: deque[tuple[StoreOffer, float]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._warn = Sparing(_WARN_EVERY_S)
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        """Families that could not be opened: until when they are turned away, and why."""
        self._fills = 0
        self._closing = False
        self.defect: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvrdma store", daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Count the offers that wait."""
        return len(self._offers)

    @property
    def alive(self) -> bool:
        """Whether it still works: until ``close``, or a defect."""
        return self._thread.is_alive()

    def offer(self, offer: StoreOffer) -> str:
        """Queue an offer; gives the reason if it is turned away at once."""
        now_s = time.monotonic()
        until_s, why = self._refused.get(offer.family, (0.0, ""))
        if now_s < until_s:
            return why
        if len(self._offers) >= MAX_QUEUED or self._closing:
            return f"{len(self._offers)} offers wait already"
        self._offers.append((offer, now_s + offer.within_s))
        os.eventfd_write(self._wake, 1)
        return ""

    def close(self) -> None:
        """Stop the thread."""
        if not self._closing:
            self._closing = True
            os.eventfd_write(self._wake, 1)
            self._thread.join(_CLOSE_S)
            if not self._thread.is_alive():
                os.close(self._wake)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._step()
        except BaseException as error:  # noqa: BLE001 - said at once; lookups go on without it
            self.defect = error
            _log.exception("the store fills no more: a defect")

    def _step(self) -> None:
        stocks = self._shelf.stocks()
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        for stock in stocks:
            for engine in stock.members.engines:
                poller.register(engine.fileno(), select.POLLIN)
        if not self._offers:
            poller.poll(_IDLE_S * 1e3)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._shelf.follow_up()
        if self._offers:
            self._take_up(*self._offers.popleft())

    def _take_up(self, offer: StoreOffer, until_s: float) -> None:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            self._shelf.numbers.declined += 1
            return
        try:
            self._fill(self._open(offer.family), offer, min(left_s, _MAX_FILL_S))
        except KVRDMAError as error:
            self._shelf.numbers.declined += 1
            if self._warn("offer", time.monotonic()):
                _log.warning("store: an offer is turned away: %s", error)

    def _open(self, text: bytes) -> Stock:
        try:
            return self._shelf.stock(text) or self._shelf.open_stock(text)
        except KVRDMAError as error:
            self._refused[text] = time.monotonic() + _REFUSE_S, str(error)
            if len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)
            raise

    def _fill(self, stock: Stock, offer: StoreOffer, timeout_s: float) -> None:
        reference = read_reference(offer.reference)
        self._fills += 1
        name = FillName(self._fills)
        fill = self._shelf.reserve(name, stock, offer)
        if fill is None:
            self._shelf.numbers.declined += 1
            stock.members.decline(offer.rank, reference)
            return
        try:
            stock.members.fill(name, reference, fill, timeout_s)
        except KVRDMAError:
            self._shelf.filled(name, succeeded=False)
            raise


def read_reference(text: bytes) -> PullReference:
    """Read ``StoreOffer.reference`` or ``StoreFound.reference``.

    Raises:
        MessageError: it is malformed.
    """
    try:
        params = msgspec.msgpack.decode(text, type=dict)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MessageError(f"a reference cannot be read: {error}") from None
    return PullReference.from_params(params)
