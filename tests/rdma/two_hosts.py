"""Two guests joined by a cable: one serves, the other tests the link over RDMA, cuts it and connects again.

``python -m tests.rdma.two_hosts a|b``, in guests of ``scripts/test-rdma two``. The exit status says whether all held.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import SimpleNamespace

from kvrdma.errors import ConnectError, PeerLostError, TransportError
from kvrdma.testing import target as at
from kvrdma.testing.target import PAGE, Reader, done
from kvrdma.transport import ReadFailed, open_transport

HOST, LINK_PORT, MEETING_PORT = "10.77.1.1", 7000, 7001
WAIT_S, LOST_S, CUT_S = 240.0, 20.0, 25.0
CUT = b"c"


def serve() -> int:
    """Serve link tests and one region until the other guest hangs up."""
    address = f"{HOST}:{LINK_PORT}"
    command = [sys.executable, "-m", "kvrdma", "link-test", "serve", "--bind", address, "--insecure"]
    server = subprocess.Popen(command)
    state = SimpleNamespace()
    at.open_target(state, lambda: open_transport("verbs"), [PAGE], 1)
    _connect(LINK_PORT).close()  # it listens
    with socket.create_server((HOST, MEETING_PORT)) as listener:
        listener.settimeout(WAIT_S)
        other, _ = listener.accept()
        with other:
            blob, keys = at.exports(state)
            other.sendall(json.dumps([blob.hex(), [key.hex() for key in keys]]).encode() + b"\n")
            other.settimeout(WAIT_S)
            while other.recv(1) == CUT:  # until it is done; the cut is shorter than any timeout of TCP
                subprocess.run(["ip", "link", "set", os.environ["NETDEV"], "down"], check=True)
                time.sleep(CUT_S)
                subprocess.run(["ip", "link", "set", os.environ["NETDEV"], "up"], check=True)
    server.terminate()
    server.wait(20)
    state.transport.close()
    return 0


def _connect(port: int) -> socket.socket:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            return socket.create_connection((HOST, port), timeout=5)
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(1)


def test_link() -> None:
    """Run the link test of the command line against the other guest."""
    sizes = ("--nbytes", "1MiB", "--block", "4KiB,64KiB", "--iters", "3", "--pattern", "fragmented,contig")
    command = [sys.executable, "-m", "kvrdma", "link-test", "connect", f"{HOST}:{LINK_PORT}", "--require-rdma"]
    told = subprocess.run(
        [*command, "--transport", "verbs", "--json", *sizes], capture_output=True, text=True, check=False
    )
    print(told.stdout, told.stderr, flush=True)
    report = json.loads(told.stdout)
    assert report["verified"], report
    assert report["one_sided"], report


@contextmanager
def cut_here() -> Iterator[None]:
    """Take down the device of this side: its port says so."""
    subprocess.run(["ip", "link", "set", os.environ["NETDEV"], "down"], check=True)
    yield
    subprocess.run(["ip", "link", "set", os.environ["NETDEV"], "up"], check=True)


@contextmanager
def cut_there(other: socket.socket) -> Iterator[None]:
    """Have the other side take down its device for a while: here everything looks sound, but nobody answers."""
    other.sendall(CUT)
    time.sleep(2.0)
    yield


def cut_and_connect_again(blob: bytes, keys: list[bytes], cut: AbstractContextManager[None]) -> None:
    """A cut ends the read with a lost peer, in bounded time; afterwards everything works again."""
    reader = Reader.open(open_transport("verbs"), PAGE)
    peer = reader.transport.connect(blob, keys)
    rows = reader.rows([(0, 0, 0, PAGE)])
    done(reader.read(peer, rows))
    with cut:
        began_s = time.monotonic()
        try:
            ended = reader.finish(reader.transport.read(peer, rows), LOST_S)
            assert isinstance(ended, ReadFailed), ended
            why: TransportError = ended.reason
        except PeerLostError as error:
            why = error
        assert isinstance(why, PeerLostError), why
        print(f"after {time.monotonic() - began_s:.2f} s: {why}", flush=True)
    again, began_s = None, time.monotonic()
    while again is None and time.monotonic() - began_s < 60:
        with suppress(ConnectError):
            again = reader.transport.connect(blob, keys)
    assert again is not None, "no connection after the link has come back"
    print(f"connected again {time.monotonic() - began_s:.2f} s later", flush=True)
    reader.buffer[:] = at.POISON
    done(reader.read(again, rows))
    reader.check(rows, [at.pattern(1, PAGE)])
    reader.transport.close()


def main() -> int:
    """Run one of the two roles."""
    if sys.argv[1] == "a":
        return serve()
    with _connect(MEETING_PORT) as other:
        blob, keys = json.loads(other.makefile().readline())
        test_link()
        for cut in (cut_here(), cut_there(other)):
            cut_and_connect_again(bytes.fromhex(blob), [bytes.fromhex(key) for key in keys], cut)
        other.sendall(b".")
    return 0


if __name__ == "__main__":
    sys.exit(main())
