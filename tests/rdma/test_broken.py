"""What breaks under RDMA in the field, made to happen: settings, addresses, limits, and a device that is taken away."""

from __future__ import annotations

import functools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvrdma.errors import (
    ConfigError,
    ConnectError,
    PeerLostError,
    TransportError,
    TransportUnavailableError,
)
from kvrdma.testing import PeerProcess
from kvrdma.testing import target as at
from kvrdma.testing.target import PAGE, Reader, done
from kvrdma.transport import Peer, ReadFailed, open_transport

pytestmark = [
    pytest.mark.needs("verbs"),
    pytest.mark.skipif("NETDEV" not in os.environ, reason="only the guest says which device carries RDMA"),
]
open_verbs = functools.partial(open_transport, "verbs")
NETDEV = os.environ.get("NETDEV", "")
ADDRESS = "10.77.0.1/24"
LOST_S = 20.0
"""RC gives up after retries that take some seconds; an emulated processor adds to that."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def undone(do: tuple[str, ...], undo: tuple[str, ...]) -> Iterator[None]:
    """Run ``ip`` with ``do`` and afterwards with ``undo``."""
    ip(*do)
    try:
        yield
    finally:
        ip(*undo)


@pytest.fixture
def process() -> Iterator[PeerProcess]:
    with PeerProcess() as peer:
        yield peer


@pytest.fixture
def linked(process: PeerProcess) -> Iterator[tuple[Reader, Peer]]:
    """A reader that has read from the other process."""
    process.call(at.open_target, open_verbs, [PAGE], 1)
    reader = Reader.open(open_verbs(), PAGE)
    peer = reader.transport.connect(*process.call(at.exports))
    done(reader.read(peer, reader.rows([(0, 0, 0, PAGE)])))
    yield reader, peer
    reader.transport.close()


def lost(reader: Reader, peer: Peer) -> TransportError:
    """Read from a peer that cannot answer; give the reason, which comes in bounded time."""
    began_s = time.monotonic()
    try:
        ended = reader.finish(reader.transport.read(peer, reader.rows([(0, 0, 0, PAGE)])), LOST_S)
    except PeerLostError as error:
        return error
    assert isinstance(ended, ReadFailed), ended
    assert isinstance(ended.reason, PeerLostError), ended
    assert time.monotonic() - began_s < LOST_S
    return ended.reason


def works_again(process: PeerProcess) -> None:
    """Transports that are opened now read the right bytes."""
    process.call(at.close_target)
    process.call(at.open_target, open_verbs, [PAGE], 5)
    reader = Reader.open(open_verbs(), PAGE)
    rows = reader.rows([(0, 0, 0, PAGE)])
    done(reader.read(reader.transport.connect(*process.call(at.exports)), rows))
    reader.check(rows, [at.pattern(5, PAGE)])
    reader.transport.close()


def active() -> bool:
    said = subprocess.run(["rdma", "link"], capture_output=True, text=True, check=True)
    return "state ACTIVE" in said.stdout


def wait_active() -> None:
    for _ in range(100):
        if active():
            return
        time.sleep(0.2)
    raise AssertionError("the port does not come back")


def test_a_gid_index_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRDMA_VERBS_GID_INDEX", "77")
    with pytest.raises(TransportUnavailableError, match=r"rxe0:1 has no GID 77 \(KVRDMA_VERBS_GID_INDEX\)"):
        open_verbs()


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRDMA_VERBS_DEVICES", "mlx5_0")
    with pytest.raises(ConfigError, match="KVRDMA_VERBS_DEVICES names mlx5_0, which this host does not have"):
        open_verbs()


def test_gids_of_different_kinds_are_refused_at_once(monkeypatch: pytest.MonkeyPatch, process: PeerProcess) -> None:
    process.call(at.open_target, open_verbs, [PAGE], 1)
    address, keys = process.call(at.exports)
    monkeypatch.setenv("KVRDMA_VERBS_GID_INDEX", "0")  # the link-local one
    reader = Reader.open(open_verbs(), PAGE)
    with pytest.raises(ConnectError, match="of different fabrics or GID kinds"):
        reader.transport.connect(address, keys)
    reader.transport.close()


def test_a_port_that_is_down_is_named(process: PeerProcess) -> None:
    down = undone(("link", "set", NETDEV, "down"), ("link", "set", NETDEV, "up"))
    with down, pytest.raises(TransportUnavailableError, match="rxe0:1 is DOWN"):
        open_verbs()
    wait_active()
    process.call(at.open_target, open_verbs, [PAGE], 1)
    works_again(process)


def test_memory_beyond_the_limit_is_refused_by_name() -> None:
    def nobody() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (256 << 10, 256 << 10))
        os.setgid(65534)
        os.setuid(65534)

    script = (
        "import numpy as np\n"
        "from kvrdma.errors import TransportError\n"
        "from kvrdma.testing.target import register\n"
        "from kvrdma.transport import open_transport\n"
        "try:\n"
        "    register(open_transport('verbs'), np.zeros(64 << 20, np.uint8))\n"
        "except TransportError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, preexec_fn=nobody, cwd="/"
    )
    assert told.stdout.startswith(("RegistrationError", "TransportUnavailableError")), told
    assert "ulimit -l" in told.stdout


def test_an_address_that_goes_away_ends_its_peers_in_time(process: PeerProcess, linked: tuple[Reader, Peer]) -> None:
    reader, peer = linked
    with undone(("addr", "del", ADDRESS, "dev", NETDEV), ("addr", "add", ADDRESS, "dev", NETDEV)):
        reason = lost(reader, peer)
        began_s = time.monotonic()
        with pytest.raises(ConnectError):
            reader.transport.connect(*process.call(at.exports))
        assert time.monotonic() - began_s < LOST_S
    assert "peer" in str(reason)
    works_again(process)


def test_another_address_is_found_by_who_opens_then(process: PeerProcess, linked: tuple[Reader, Peer]) -> None:
    reader, peer = linked
    del linked
    old = undone(("addr", "del", ADDRESS, "dev", NETDEV), ("addr", "add", ADDRESS, "dev", NETDEV))
    new = undone(("addr", "add", "10.78.0.9/24", "dev", NETDEV), ("addr", "del", "10.78.0.9/24", "dev", NETDEV))
    with old, new:
        works_again(process)
        lost(reader, peer)  # its peer has closed
    works_again(process)


def test_a_smaller_mtu_is_agreed_on(process: PeerProcess) -> None:
    process.call(at.open_target, open_verbs, [PAGE], 1)  # of 4096 bytes
    with undone(("link", "set", NETDEV, "mtu", "1500"), ("link", "set", NETDEV, "mtu", "4200")):
        reader = Reader.open(open_verbs(), PAGE)
        rows = reader.rows([(0, 0, 0, PAGE)])
        done(reader.read(reader.transport.connect(*process.call(at.exports)), rows))
        reader.check(rows, [at.pattern(1, PAGE)])
        reader.transport.close()
    wait_active()


def ended_in_time(process: PeerProcess, reader: Reader, removing: subprocess.Popen[bytes]) -> None:
    """Both sides close in time, and then nobody holds the device any more."""
    began_s = time.monotonic()
    reader.transport.close()
    assert time.monotonic() - began_s < 5.0
    process.call(at.close_target)
    assert removing.wait(30) == 0


def test_a_device_that_is_taken_away_is_let_go(process: PeerProcess, linked: tuple[Reader, Peer]) -> None:
    """The kernel waits for those who use soft-RoCE, tells them nothing, and serves them until they close."""
    reader, peer = linked
    with subprocess.Popen(["rdma", "link", "delete", "rxe0"]) as removing:
        time.sleep(2.0)
        if removing.poll() is None:
            done(reader.read(peer, reader.rows([(0, 0, 0, PAGE)])))
        ended_in_time(process, reader, removing)
    with pytest.raises(TransportUnavailableError, match="no RDMA device at all"):
        open_verbs()
    subprocess.run(["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", NETDEV], check=True)
    wait_active()
    process.call(at.open_target, open_verbs, [PAGE], 1)
    works_again(process)


def test_a_network_card_that_is_taken_away_ends_its_peers(process: PeerProcess, linked: tuple[Reader, Peer]) -> None:
    """Last: the card it leaves is another one."""
    reader, peer = linked
    with subprocess.Popen(["ip", "link", "delete", NETDEV]) as removing:
        time.sleep(2.0)
        print("after the removal:", lost(reader, peer))
        ended_in_time(process, reader, removing)
    ip("link", "add", NETDEV, "mtu", "4200", "type", "veth", "peer", "name", "veth1", "mtu", "4200")
    for words in (("set", "veth1", "up"), ("set", NETDEV, "up")):
        ip("link", *words)
    ip("addr", "add", ADDRESS, "dev", NETDEV)
    subprocess.run(["rdma", "link", "add", "rxe0", "type", "rxe", "netdev", NETDEV], check=True)
    wait_active()
    process.call(at.open_target, open_verbs, [PAGE], 1)
    works_again(process)
