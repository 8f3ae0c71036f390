"""Which transport a link test uses: by what each can do here, tried until one really works."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvrdma.bench.link import Link, LinkOptions, OpenedLink
from kvrdma.bench.patterns import Case
from kvrdma.bench.pool import check_device
from kvrdma.bench.spawned_peer import Control
from kvrdma.errors import (
    ConnectError,
    NotOneSidedError,
    TransportError,
    TransportUnavailableError,
)
from kvrdma.transport import Transport, installed_transports, open_transport

AUTO = "auto"
_REACH_ORDER = ("host", "network", "process")


@dataclass(frozen=True, slots=True)
class Candidates:
    """Open transports, best first, and why the others are not among them."""

    transports: tuple[Transport, ...]
    refused: tuple[TransportError, ...]

    @property
    def need_this_process(self) -> bool:
        """Whether none reaches another process, so that both ends must live in this one."""
        return all(transport.capabilities().reach == "process" for transport in self.transports)

    def beyond_process(self) -> Candidates:
        """Give those that reach another process; close the others."""
        far: list[Transport] = []
        near: list[TransportError] = []
        refused = list(self.refused)
        for transport in self.transports:
            if transport.capabilities().reach != "process":
                far.append(transport)
                continue
            transport.close()
            near.append(TransportUnavailableError(f"{transport.name} reaches no further than its own process"))
        if not far:
            hint = f"use {AUTO} or one that reaches other processes ({', '.join(reaching_further()) or 'none here'})"
            refused += [TransportUnavailableError(f"{error}: {hint}") for error in near]
        return Candidates(tuple(far), tuple(refused))

    def close(self) -> None:
        """Close all of them. Idempotent."""
        for transport in self.transports:
            transport.close()


def open_candidates(name: str, options: LinkOptions, listed: Sequence[str] = ()) -> Candidates:
    """Open the transport ``name``, or for ``auto`` each that can register the device's memory.

    The nearer its reach the better (a same-host mechanism beats the network), then one-sided before emulated.
    Those that reach no further than this process come last.

    Args:
        name: of a transport, or ``auto``.
        options: the device, and whether emulated reads are refused.
        listed: what ``auto`` chooses from, best first; empty: all, in the order above.

    Raises:
        ConfigError: nothing installed here allocates the device's memory.
        TransportError: none can be opened; says why for each.
    """
    check_device(options.device)
    names = (list(listed) or sorted(installed_transports())) if name == AUTO else [name]
    opened: list[Transport] = []
    refused: list[TransportError] = []
    with contextlib.ExitStack() as stack:
        for each in names:
            try:
                transport = open_transport(each, require_one_sided=options.require_one_sided)
            except TransportError as error:
                refused.append(error)
                continue
            stack.callback(transport.close)
            if options.device.kind in transport.capabilities().memory_kinds:
                opened.append(transport)
            else:
                transport.close()
                text = f"{each} cannot read {options.device.kind} memory here"
                refused.append(TransportUnavailableError(text))
        if not opened:
            raise _summary(refused)
        stack.pop_all()
    return Candidates(tuple(opened if listed else sorted(opened, key=_preference)), tuple(refused))


def reaching_further(device_kind: str | None = None) -> list[str]:
    """Names of the transports that can be opened here and reach other processes, and read such memory if given."""
    found: list[str] = []
    for name in sorted(installed_transports()):
        try:
            transport = open_transport(name)
        except TransportError:
            continue
        able = transport.capabilities()
        if able.reach != "process" and (device_kind is None or device_kind in able.memory_kinds):
            found.append(name)
        transport.close()
    return found


def _preference(transport: Transport) -> tuple[int, bool, bool]:
    can = transport.capabilities()
    return _REACH_ORDER.index(can.reach), not can.one_sided, can.needs_target_progress


def connect_first(candidates: Candidates, control: Control, cases: Sequence[Case], options: LinkOptions) -> OpenedLink:
    """Try the candidates in order until one has carried a read of the first case; close the others.

    Args:
        candidates: all are closed afterwards, but the one that works.
        control: to the peer.
        cases: what the link will be used for; the largest decides the size of the pools.
        options: deadlines and device.

    Raises:
        ControlError: the peer cannot be asked.
        TransportError: none works; says why for each.
    """
    refused: list[TransportError] = list(candidates.refused)
    waiting = list(candidates.transports)
    try:
        while waiting:
            try:
                return _first_read(control, waiting.pop(0), cases, options, tuple(refused))
            except TransportError as error:
                refused.append(error)
    finally:
        for transport in waiting:
            transport.close()
    raise _summary(refused)


def _first_read(
    control: Control,
    transport: Transport,
    cases: Sequence[Case],
    options: LinkOptions,
    refused: tuple[TransportError, ...],
) -> OpenedLink:
    link = Link(control, transport, max(case.shape.pool_nbytes for case in cases), options)
    try:
        times, wrong = link.read_and_verify(cases[0])
    except BaseException:
        link.close()
        raise
    return OpenedLink(link, times.total_s, wrong, refused)


def _summary(refused: Sequence[TransportError]) -> TransportError:
    if len(refused) == 1:
        return refused[0]
    text = "no transport works:\n" + "\n".join(f"  {error}" for error in refused)
    for kind in (NotOneSidedError, ConnectError, TransportUnavailableError):
        if any(isinstance(error, kind) for error in refused):
            return kind(text)
    return TransportError(text)
