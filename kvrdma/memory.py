"""Registers the cache's allocations, and the fence table, once with every open transport."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvrdma.errors import RegistrationError, TransportError
from kvrdma.layout import KVLayout
from kvrdma.transport import Device, Region, Transport
from kvrdma.wire import TransportOffer

_log = logging.getLogger(__name__)


class RegisteredMemory:
    """Keeps tensors alive and registered; knows what peers need to read them.

    A transport that cannot register all of it (host memory only, and the cache is on a GPU) is left out, with
    the reason in ``refused``.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        layout: KVLayout,
        tensors: Mapping[str, Any],
        fence: tuple[int, int],
    ) -> None:
        """Register the storages of ``layout`` in order, then the fence table ``(addr, nbytes)``.

        Raises:
            RegistrationError: no transport can register all of it; gives each one's reason.
        """
        self._tensors = dict(tensors)
        self._regions: dict[str, list[Region]] = {}
        self.refused: dict[str, str] = {}
        devices = devices_of(tensors)
        wanted = [(store.addr, store.nbytes, _device_at(devices, store.addr)) for store in layout.regions]
        wanted.append((*fence, Device()))
        self._transports: dict[str, Transport] = {}
        for transport in transports:
            try:
                self._regions[transport.name] = _register_all(transport, wanted)
            except TransportError as error:
                self.refused[transport.name] = str(error)
                continue
            self._transports[transport.name] = transport
        if transports and not self._transports:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.refused.items())
            raise RegistrationError(f"no transport can register the cache: {reasons}")

    @property
    def transports(self) -> dict[str, Transport]:
        """The transports that registered all of it, by name."""
        return self._transports

    def offers(self) -> dict[str, TransportOffer]:
        """Give what peers need to read this memory, by transport."""
        return {
            name: TransportOffer(transport.address(), tuple(region.key for region in self._regions[name]))
            for name, transport in self._transports.items()
        }

    def deregister(self) -> None:
        """Deregister everything that is not in use; the transports stay open."""
        for name, transport in self._transports.items():
            for region in self._regions.pop(name, []):
                try:
                    transport.deregister(region)
                except TransportError as error:
                    _log.warning("region %d stays registered with %s: %s", region.id, name, error)


def _register_all(transport: Transport, wanted: Sequence[tuple[int, int, Device]]) -> list[Region]:
    regions: list[Region] = []
    try:
        for addr, nbytes, device in wanted:
            regions.append(transport.register(addr, nbytes, device))
    except TransportError:
        for region in regions:
            transport.deregister(region)
        raise
    return regions


def devices_of(tensors: Mapping[str, Any]) -> list[tuple[int, Device]]:
    """Give address and device of every tensor, in order."""
    found = []
    for tensor in tensors.values():
        for plane in tensor if isinstance(tensor, tuple | list) else (tensor,):
            device = getattr(plane, "device", None)
            kind = getattr(device, "type", None) or ("cuda" if hasattr(device, "id") else "cpu")
            index = getattr(device, "index", None) or getattr(device, "id", None) or 0
            address = plane.data_ptr() if hasattr(plane, "data_ptr") else _address(plane)
            found.append((address, Device.parse(f"{kind}:{index}" if kind == "cuda" else kind)))
    return sorted(found, key=lambda pair: pair[0])


def _address(array: Any) -> int:  # noqa: ANN401 - NumPy or CuPy
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])


def _device_at(devices: Sequence[tuple[int, Device]], addr: int) -> Device:
    """Device of the first tensor at or after the start of a storage."""
    return next((device for place, device in devices if place >= addr), Device())
